"""``evenflow worker``: one worker process, started by hand, that dials a server which ``evenflow launch`` started.

First the control process is asked whether there is such a place and what a worker must know, so that a wrong address,
key or number is known before anything is loaded. Then this process becomes the worker: it loads the model, dials in,
dials again when control is restarted, and ends on SIGTERM or Ctrl-C. Exit codes: 0 ended as told, 1 refused or
failed, 2 asked for what cannot be.
"""

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from ..control.wire import PROTOCOL_VERSION, Probe, Quit, Terms, WireError, decode_to_worker, encode
from ..control.wire.dialling import dial_followed
from ..control.wire.keys import DialKeys, KeyFault, dial_keys
from ..control.wire.sockets import EndpointError, close_context, new_context
from .children import worker_argv
from .errors import UsageError
from .libraries import library_env
from .options import ServeOptions, check_model, settle, threads_per_worker, usable_cores

_LOOK_MS = 200
#: A control process that was restarted meanwhile has lost the question.
_ASK_AGAIN_S = 2.0


class Refused(Exception):
    """The server does not want this worker, or there is none. One sentence."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to dial, and which stage of which replica to be; 0 ``stages``: as many as the server has."""

    connect: str
    replica: int
    stage: int
    stages: int = 0


def ask_terms(place: Place, keys: DialKeys | None, timeout: float | None, say: Callable[[str], None]) -> Terms:
    """Ask the control process until it answers. ``say`` is told what is in the way, after some seconds and then
    every minute. Raises ``Refused``, also after ``timeout`` seconds without an answer."""
    context = new_context()
    try:
        dealer, dialling = dial_followed(context, place.connect, keys=keys)
        question = encode(Probe(PROTOCOL_VERSION, place.replica, place.stage, stages=place.stages))
        started = time.monotonic()
        asked = float("-inf")
        while True:
            now = time.monotonic()
            complaint = dialling.complaint(now)
            if dialling.refused or (timeout is not None and now - started >= timeout):
                raise Refused(dialling.problem or f"{place.connect} does not answer")
            if complaint is not None:
                say(f"{complaint}; it is tried again until it does.")
            if now - asked >= _ASK_AGAIN_S and dialling.up:
                asked = now
                dealer.send(question, zmq.NOBLOCK)
            if not dealer.poll(_LOOK_MS):
                continue
            try:
                answer = decode_to_worker(dealer.recv_multipart(zmq.NOBLOCK)[-1])
            except (WireError, zmq.Again):
                continue
            if isinstance(answer, Terms):
                return answer
            if isinstance(answer, Quit):
                raise Refused(f"the server refuses this worker: {answer.reason}")
    finally:
        close_context(context)


def external_argv(options: ServeOptions, place: Place, terms: Terms, keys: Path | None) -> list[str]:
    """The command line of the process that this one becomes."""
    options = dataclasses.replace(
        options,
        stages=terms.stages,
        block_size=terms.block_size,
        token_budget=terms.token_budget,
        max_num_seqs=terms.max_num_seqs,
    )
    options, _ = settle(options)
    # The stages of a replica share this machine.
    threads = options.threads or threads_per_worker(usable_cores(), terms.stages)
    rest = ["--external", *([] if keys is None else ["--keys", str(keys)])]
    return worker_argv(options, place.connect, place.replica, place.stage, threads, rest)


def run_worker(
    options: ServeOptions,
    place: Place,
    keys: Path | None,
    insecure: bool,
    timeout: float | None,
) -> int:
    """Becomes the worker and does not return, or returns the exit code."""
    if place.connect.startswith("tcp://") and keys is None and not insecure:
        raise UsageError(f"--connect {place.connect} needs --keys, or --insecure for a server without keys.")
    check_model(options)
    # Until the worker has handlers of its own.
    signal.signal(signal.SIGTERM, _end)

    def say(line: str) -> None:
        print(f"evenflow: {line}", file=sys.stderr, flush=True)

    try:
        loaded = None if keys is None else dial_keys(keys, "worker")
        terms = ask_terms(place, loaded, timeout, say)
    except (Refused, KeyFault, EndpointError) as error:
        print(f"evenflow: {error}", file=sys.stderr)
        return 1
    argv = external_argv(options, place, terms, keys)
    threads = int(argv[argv.index("--threads") + 1]) if "--threads" in argv else 1
    for name, value in library_env(threads, os.environ).items():
        os.environ.setdefault(name, value)
    os.execv(argv[0], argv)


def _end(_number: int, _frame: object) -> None:
    raise SystemExit(0)
