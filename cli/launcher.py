"""``evenflow serve``: the parent of control, gateway and local workers. It holds no state of any request.

Order: the port is bound, then the private directories are made, then the children start and load. Signals:
the first SIGTERM drains for up to ``--drain-timeout``, the first SIGINT for a few seconds (a person is
waiting), the second of either ends everything at once. Exit codes: 0 after a drain, 1 for any failure.
However it is left, no child and no file of it remains: children of a launcher that was killed end by their
own parent-death signal.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..control.wire import Welcome
from ..control.wire.sockets import close_context, new_context
from .children import Plan, build_plan
from .links import ControlLink, watch_ready
from .listener import OpenDoor, PortTaken, listen, open_door, url_of
from .options import ServeOptions, usable_cores
from .output import Output
from .run_dir import RunDir
from .supervisor import Supervisor

#: Seconds that control has beyond its own drain limit before it is asked again.
DRAIN_MARGIN = 5.0
#: Seconds that running requests get after a Ctrl-C.
INTERRUPT_PATIENCE = 4.0

#: Given the server's URL, does the work that the server was started for; its result is the exit code.
Errand = Callable[[str], Awaitable[int]]
MakePlan = Callable[[ServeOptions, RunDir, int, Sequence[OpenDoor]], Plan]


def default_plan(options: ServeOptions, run: RunDir, fd: int, doors: Sequence[OpenDoor]) -> Plan:
    return build_plan(options, run, fd, usable_cores(), os.environ, doors)


def ready_line(url: str, options: ServeOptions, welcome: Welcome) -> str:
    shape = f"{options.stages} stage{'s' * (options.stages > 1)}"
    if options.replicas > 1:
        shape = f"{options.replicas} replicas of {shape}"
    return (
        f"ready: {url} (model {welcome.model}, {shape}, {welcome.max_model_len} tokens of context,"
        f" blocks of {welcome.block_size}, budget {welcome.token_budget}, {welcome.max_num_seqs} sequences)"
    )


def waiting_lines(options: ServeOptions, doors: Sequence[OpenDoor]) -> list[str]:
    """For each worker that somebody has to start by hand, how."""
    connect = next((door.endpoint for door in doors if door.role == "worker"), "")
    trust = "--insecure" if options.network.keys is None else f"--keys {options.network.keys}"
    return [
        f"waits for: evenflow worker --connect {connect} --replica {replica} --stage {stage} {trust}"
        f" --model {options.model}"
        for replica in options.external
        for stage in range(options.stages)
    ]


def serve(
    options: ServeOptions,
    notes: list[str] | None = None,
    errand: Errand | None = None,
    make_plan: MakePlan = default_plan,
    quiet: bool = False,
) -> int:
    """Run a server until a signal, a failure, or the end of ``errand``. Returns the exit code.

    ``options`` are settled. ``notes`` are said first. ``quiet`` leaves out all but the cause of a failure.
    """
    output = Output(sys.stdout, sys.stderr, quiet)
    for note in notes or ():
        output.say(note)
    last: str | None = None
    code = 1
    try:
        with contextlib.ExitStack() as held:
            listener = held.enter_context(listen(options.host, options.port))
            doors = [open_door(role, endpoint) for role, endpoint in options.network.endpoints.items()]
            for door in doors:
                held.enter_context(door.socket)
            run = RunDir.create(dict(os.environ))
            held.callback(run.remove)
            run.publish_url(url_of(listener))
            code, last = asyncio.run(_Launch(options, listener, doors, run, output, errand, make_plan).run())
    except PortTaken as error:
        last = str(error)
    except OSError as error:
        last = f"evenflow cannot start: {error}"
    finally:
        output.close(last)
    return code


class _Launch:
    """The state of one ``serve``."""

    def __init__(
        self,
        options: ServeOptions,
        listener: socket.socket,
        doors: Sequence[OpenDoor],
        run: RunDir,
        output: Output,
        errand: Errand | None,
        make_plan: MakePlan,
    ) -> None:
        self._options = options
        self._listener = listener
        self._run_dir = run
        self._output = output
        self._errand = errand
        self._doors = doors
        self._plan = make_plan(options, run, listener.fileno(), doors)
        self._url = url_of(listener)
        self._was_ready = False
        self._life = 0  #: of control, that the last welcome came from

    async def run(self) -> tuple[int, str | None]:
        """Exit code, and what is to be said last."""
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Whoever started us with nohup wants SIGHUP ignored.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, signals.put_nowait, number)
        context = new_context()
        supervisor = Supervisor(self._plan, self._output.say, lambda *death: link.report(*death))
        link = ControlLink(context, self._run_dir.workers_endpoint, supervisor.kill_worker, supervisor.give_up)
        self._ready: asyncio.Future[Welcome] = loop.create_future()
        tasks: list[asyncio.Task[Any]] = [
            asyncio.ensure_future(link.run()),
            asyncio.ensure_future(
                watch_ready(
                    context, self._run_dir.clients_endpoint, lambda welcome: self._welcomed(supervisor, welcome)
                )
            ),
            asyncio.ensure_future(self._watch_start(supervisor)),
        ]
        try:
            self._say_start()
            supervisor.start()
            return await self._until_end(supervisor, signals, tasks[2])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            supervisor.reap()
            close_context(context)

    def _say_start(self) -> None:
        options = self._options
        processes = f"{options.workers} worker{'s' * (options.workers > 1)}"
        self._output.say(f"starting {options.model} on {self._url}: control, gateway, {processes}")
        self._output.say(f"ZeroMQ clients dial {self._run_dir.clients_endpoint}")
        for door in self._doors:
            self._output.say(f"{door.role}s on other machines dial {door.endpoint}")
        for line in waiting_lines(options, self._doors):
            self._output.say(line)
        self._output.progress(f"loading {options.model}")

    def _welcomed(self, supervisor: Supervisor, welcome: Welcome) -> None:
        supervisor.mark_ready(self._plan.control.name)
        # A control process that was back before it was missed has only this to say.
        back = welcome.ready and supervisor.control_lives != self._life
        self._life = supervisor.control_lives
        if not self._ready.done():
            if welcome.ready:
                self._ready.set_result(welcome)
                self._was_ready = True
        elif (back or welcome.ready != self._was_ready) and supervisor.phase == "running":
            self._was_ready = welcome.ready
            self._output.say("the server is ready again" if welcome.ready else "the server is not ready")

    async def _watch_start(self, supervisor: Supervisor) -> int | None:
        """Say when the server is ready; then run the errand, if there is one, for its exit code."""
        welcome = await self._ready
        supervisor.mark_ready(*(spec.name for spec in self._plan.workers))
        await self._gateway_answers(supervisor)
        supervisor.mark_ready()
        self._output.progress("")
        self._output.announce(ready_line(self._url, self._options, welcome))
        return None if self._errand is None else await self._errand(self._url)

    async def _gateway_answers(self, supervisor: Supervisor) -> None:
        """Wait for one HTTP response. The request waits in the port's queue until a gateway takes it."""
        while True:
            supervisor.gateway_started.clear()
            with contextlib.suppress(OSError):
                host, port = self._listener.getsockname()[:2]
                loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
                reader, writer = await asyncio.open_connection(loopback, port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    if await reader.readline():
                        return
                finally:
                    writer.close()
            # The gateway died with our request in hand: ask its next life.
            await supervisor.gateway_started.wait()

    async def _until_end(
        self,
        supervisor: Supervisor,
        signals: asyncio.Queue[signal.Signals],
        start: asyncio.Task[int | None],
    ) -> tuple[int, str | None]:
        got = asyncio.ensure_future(signals.get())
        watched: set[asyncio.Future[object]] = {got, supervisor.failure}  # type: ignore[assignment]
        if self._errand is not None:
            watched.add(start)  # type: ignore[arg-type]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        self._output.progress("")
        if supervisor.failure.done():
            got.cancel()
            await supervisor.killed(3.0)
            return 1, supervisor.failure.result()
        if got.done():
            number, code = got.result(), 0
        else:
            got.cancel()
            number, code = signal.SIGINT, start.result() or 0
        patience = self._options.drain_timeout + DRAIN_MARGIN
        if number == signal.SIGINT:
            patience = min(self._options.drain_timeout, INTERRUPT_PATIENCE)
        self._output.say("stopping: running requests are finished first; a second signal stops at once")
        drain = asyncio.ensure_future(supervisor.drain(patience, self._listener.close))
        again = asyncio.ensure_future(signals.get())
        await asyncio.wait({drain, again}, return_when=asyncio.FIRST_COMPLETED)
        if drain.done():
            again.cancel()
            return code or drain.result(), None
        drain.cancel()
        await supervisor.killed(1.0)
        return 1, "stopped at once: running requests were cut off"
