"""A whole server in processes of its own: started, found by role, harmed, and gone without a trace.

Every process of a server carries a mark in its environment, so the ones that outlive it are found wherever
they went. Log lines are stamped as they come: recovery is measured between them and the tokens.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from evenflow.cli.status import parse_metrics

EVENFLOW = [sys.executable, "-P", "-c", "from evenflow.cli.main import run; run()"]
#: Seconds for anything that should happen: the machine may be busy, and speed is not what is tested.
PATIENCE = 120.0
_MARK = "EVENFLOW_TEST_MARK"


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE, why: str = "it") -> Any:
    """The first true result of ``what``."""
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, f"{why} did not happen in {seconds:g} s"
        time.sleep(0.02)
    return result


def marked(mark: str) -> list[psutil.Process]:
    """Every living process that carries ``mark``."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class LiveServer:
    """``evenflow serve MODEL``, started but not yet waited for: call ``ready``; ``close`` in any case.

    ``cluster``: instead ``evenflow launch`` with this file.
    """

    def __init__(
        self,
        model: str,
        *arguments: str,
        port: int = 0,
        env: Mapping[str, str] | None = None,
        cluster: Path | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        # Its own place for sockets; short, since the addresses of Unix sockets are.
        self.run_parent = Path(tempfile.mkdtemp(prefix="ef", dir="/tmp"))
        self.lines: list[tuple[float, str]] = []
        self.url = ""
        self._links: list[Path] = []
        command = ["launch", str(cluster)] if cluster is not None else ["serve", model, "--port", str(port)]
        self.process = subprocess.Popen(
            [*EVENFLOW, *command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Titles are written over the environment, and the mark with it, unless told.
            env={
                **os.environ,
                **(env or {}),
                "XDG_RUNTIME_DIR": str(self.run_parent),
                _MARK: self.mark,
                "SPT_NOENV": "1",
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            for line in pipe:
                self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    @property
    def log(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    def said(self, text: str, after: float = 0.0) -> float | None:
        """When a line with ``text`` came, the first one after ``after``."""
        return next((at for at, line in list(self.lines) if at > after and text in line), None)

    def ready(self) -> "LiveServer":
        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log
            return re.search(r"^ready: (http://\S+)", self.log, re.MULTILINE)

        self.url = wait_for(found, 2 * PATIENCE, "the ready line")[1]
        self._links = [Path(file.read_text()) for file in self.run_parent.glob("*/links-at")]
        return self

    @property
    def endpoint(self) -> str:
        """Where ZeroMQ clients dial, as the log says."""
        return wait_for(lambda: re.search(r"ZeroMQ clients dial (ipc://\S+)", self.log))[1]

    def members(self) -> list[psutil.Process]:
        return [process for process in marked(self.mark) if process.pid != self.process.pid]

    def find(self, role: str) -> psutil.Process:
        """``control``, ``gateway``, ``journal`` or ``worker R.S``: its living process, once it is there."""

        def seek() -> psutil.Process | None:
            for process in self.members():
                with contextlib.suppress(psutil.Error):
                    if _role(process.cmdline()) == role:
                        return process
            return None

        return wait_for(seek, why=role)

    def kill(self, role: str, number: int = signal.SIGKILL) -> float:
        """Send a signal. Returns when."""
        process = self.find(role)
        now = time.monotonic()
        process.send_signal(number)
        return now

    def get(self, path: str) -> int:
        return httpx.get(self.url + path, timeout=PATIENCE).status_code

    def metrics(self) -> dict[str, float]:
        return parse_metrics(httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=fields, timeout=PATIENCE)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it in order. Returns the exit code, after nothing is left."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self.assert_gone()
        return code

    def assert_gone(self, seconds: float = 10.0) -> None:
        """No process and no file of it remains."""
        wait_for(lambda: not self.members(), seconds, "the end of all processes")
        self._reader.join(10.0)
        if self.process.returncode != -signal.SIGKILL:
            assert list(self.run_parent.iterdir()) == [], self.log
            assert not [path for path in self._links if path.exists()], self.log

    def close(self) -> None:
        """End what still lives and check that nothing is left."""
        try:
            if self.process.poll() is None:
                self.stop(signal.SIGTERM)
            else:
                self.assert_gone()
        finally:
            for process in marked(self.mark):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)
            self._reader.join(10.0)
            # A killed launcher's directories are for the next one with the same parent, which never comes.
            for path in self._links:
                shutil.rmtree(path, ignore_errors=True)
            for path in [*self.run_parent.glob("*/*"), *self.run_parent.glob("*")]:
                with contextlib.suppress(OSError):
                    path.rmdir() if path.is_dir() else path.unlink()
            self.run_parent.rmdir()


def _role(argv: list[str]) -> str | None:
    text = " ".join(argv)
    if title := re.match(r"evenflow (control|gateway|journal|worker \d+\.\d+)", text):
        return title[1]
    if "evenflow.control.gateway" in argv:
        return "gateway"
    if "evenflow.control.journal" in argv:
        return "journal"
    if "evenflow.control" in argv:
        return "control"
    for module in ("evenflow.dataplane", "evenflow.dataplane.simulated"):
        if module in argv:
            return f"worker {argv[argv.index('--replica') + 1]}.{argv[argv.index('--stage') + 1]}"
    return None


@contextlib.contextmanager
def live(
    model: str, *arguments: str, wait: bool = True, env: Mapping[str, str] | None = None
) -> Iterator[LiveServer]:
    """A ready server; its log is printed, for pytest to show if the test fails."""
    server = LiveServer(model, *arguments, env=env)
    try:
        yield server.ready() if wait else server
    except BaseException:
        print(server.log[-20_000:])
        raise
    finally:
        server.close()


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT came. ``code`` is the exit code that tells of it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise ``Interrupted`` here, the first of them only: so what was started is ended on the way
    out, which servers in sessions of their own would outlive otherwise. Only a main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class HttpStream(threading.Thread):
    """One streamed answer, read as it comes. ``body`` is what is posted; ``text`` what has come."""

    def __init__(self, url: str, path: str = "/v1/completions", **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = url + path
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        #: When each piece came, and the piece.
        self.pieces: list[tuple[float, str]] = []
        self.status: int | None = None
        self.reasons: list[str] = []
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.broken: str | None = None
        self.done = False
        self._leave = False
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE) as answer:
                self.status = answer.status_code
                if answer.status_code != 200:
                    self.error = json.loads(answer.read())["error"]
                    return
                for line in answer.iter_lines():
                    if self._leave:
                        return
                    if line.startswith("data: "):
                        self._event(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.broken = repr(error)

    def _event(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            if piece := choice["delta"].get("content") if "delta" in choice else choice["text"]:
                self.pieces.append((time.monotonic(), piece))
            if choice["finish_reason"]:
                self.reasons.append(choice["finish_reason"])

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in list(self.pieces))

    def leave(self) -> None:
        """Disconnect at the next event."""
        self._leave = True

    def finish(self) -> str:
        """The whole text, once it has ended well."""
        self.join(PATIENCE)
        assert not self.is_alive(), f"the stream has not ended: {len(self.pieces)} pieces"
        assert self.broken is None and self.error is None, (self.broken, self.error)
        assert self.done and self.status == 200 and len(self.reasons) == 1
        return self.text


@dataclass
class Watch:
    """Asks ``/health`` and ``/ready`` all the time: ``with Watch(url) as watch``."""

    url: str
    #: When asked, and the status codes of both.
    seen: list[tuple[float, int, int]] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        assert self._thread is not None
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        # Made once: a client of its own for each question takes so long on busy cores that an outage can be missed.
        verify = ssl.create_default_context()
        while not self._end.is_set():
            # Between two gateways a connection may be lost; the next answer tells.
            with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=PATIENCE, verify=verify) as client:
                while not self._end.wait(0.05):
                    now = time.monotonic()
                    codes = [client.get(self.url + path).status_code for path in ("/health", "/ready")]
                    self.seen.append((now, codes[0], codes[1]))

    def health(self, since: float = 0.0) -> set[int]:
        return {health for at, health, _ in list(self.seen) if at > since}

    def ready(self, since: float = 0.0) -> set[int]:
        return {ready for at, _, ready in list(self.seen) if at > since}

    def settled(self, seconds: float = PATIENCE) -> None:
        """Wait for both to say 200."""
        asked = time.monotonic()
        wait_for(lambda: any(at > asked and (h, r) == (200, 200) for at, h, r in list(self.seen)), seconds, "ready")
