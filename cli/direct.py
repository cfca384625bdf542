"""``status``, ``generate`` and ``chat`` with ``--connect``: they dial the control process itself, with keys over TCP.

The control process knows token ids only. So for text a gateway is started here, which dials it, and is ended
afterwards; it needs the model's files on this machine, for the tokenizer alone.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from ..control.client import Client
from ..control.wire import Welcome
from ..control.wire.keys import KeyFault
from ..control.wire.sockets import EndpointError
from .chat import run_chat
from .children import gateway_argv
from .errors import UsageError
from .generate import complete
from .listener import listen, url_of
from .openai_http import Draw
from .options import ServeOptions, check_model

#: Seconds for an answer of the control process, and for the gateway to start.
_ANSWER_S = 5.0
_START_S = 60.0


class Unreachable(Exception):
    """The control process or the gateway does not answer. One sentence."""


def _dial(connect: str, keys: Path | None) -> Client:
    if connect.startswith("tcp://") and keys is None:
        # A server without keys is possible, a silent one much likelier.
        print(f"evenflow: dials {connect} without --keys", file=sys.stderr)
    return Client(connect, name="evenflow", keys=keys)


def _guarded(work: Callable[[], int], as_json: bool = False) -> int:
    """Errors as one sentence and exit code 1."""
    try:
        return work()
    except (Unreachable, KeyFault, EndpointError) as error:
        text = str(error)
    except TimeoutError as error:
        text = str(error) or "the control process does not answer"
    if as_json:
        print(json.dumps({"ready": False, "error": text}))
    else:
        print(f"evenflow: {text}", file=sys.stderr)
    return 1


def status_directly(connect: str, keys: Path | None, as_json: bool) -> int:
    """Returns the exit code: 0 if the service is ready."""

    def work() -> int:
        with _dial(connect, keys) as client:
            client.wait_connected(_ANSWER_S)
            status = client.status(_ANSWER_S)
        if as_json:
            values = {"ready": status.ready, "models": [status.model], "replicas": status.replicas}
            print(json.dumps({"url": connect, **values, "metrics": status.values}))
        else:
            print(f"{connect}: {'ready' if status.ready else 'not ready'}")
            print(f"{'model':<26}{status.model}")
            for index, state in enumerate(status.replicas):
                print(f"{f'replica {index}':<26}{state}")
            for name in ("num_requests_running", "num_requests_waiting", "refused_connections_total"):
                if name in status.values:
                    print(f"{name.replace('_', ' '):<26}{status.values[name]:g}")
        return 0 if status.ready else 1

    return _guarded(work, as_json)


def generate_directly(connect: str, keys: Path | None, model: str | None, prompt: str, draw: Draw) -> int:
    """Returns the exit code."""

    def work() -> int:
        with _gateway(connect, keys, model) as url:
            return complete(url, None, prompt, draw)

    return _guarded(work)


def chat_directly(connect: str, keys: Path | None, model: str | None, system: str | None, draw: Draw) -> int:
    """Returns the exit code."""

    def work() -> int:
        with _gateway(connect, keys, model) as url:
            return run_chat(url, None, system, draw)

    return _guarded(work)


@contextlib.contextmanager
def _gateway(connect: str, keys: Path | None, model: str | None) -> Iterator[str]:
    """The URL of a gateway of our own on the loopback address."""
    with _dial(connect, keys) as client:
        welcome: Welcome = client.wait_connected(_ANSWER_S)
    options = ServeOptions(model or welcome.model, served_model_name=welcome.model, port=0, drain_timeout=2.0)
    try:
        check_model(options)
    except UsageError as error:
        hint = "" if model else f" (the server calls its model {welcome.model!r}: say which files those are)"
        raise UsageError(f"{error}{hint}") from None
    with listen(options.host, 0) as listener:
        argv = gateway_argv(options, connect, listener.fileno(), keys)
        process = subprocess.Popen(
            [*argv, "--log-level", "error"],
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            _wait_ready(process, url_of(listener))
            yield url_of(listener)
        finally:
            process.terminate()
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Unreachable("The gateway that was started for this failed.")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        time.sleep(0.05)
    raise Unreachable("The gateway that was started for this does not reach the control process.")
