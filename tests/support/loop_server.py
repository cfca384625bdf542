"""The real control process in a test's own event loop, with a worker whose next token depends on the position only.

What it does with clients is as in a process of its own; the test sees its inside, and chooses its pace.
"""

import asyncio
import contextlib
import socket

import zmq
from evenflow.control.core.events import Limits
from evenflow.control.loop_host import LoopHost
from evenflow.control.options import ControlOptions, Door
from evenflow.control.server import TICK_S, ControlServer
from evenflow.control.wire import BatchPlan, Heartbeat, Start, Started, Submit, decode_to_worker, encode
from evenflow.control.wire.sockets import Socket, bound_endpoint, close_context, dial_dealer, new_context
from evenflow.dataplane.batch import ModelInfo
from evenflow.dataplane.executor import Limits as WorkerLimits
from evenflow.dataplane.simulated.blank import BlankRunner
from evenflow.dataplane.simulated.loopback import LoopbackReplica

VOCAB = 40_000


def expected(prompt: int, count: int, received: int = 0) -> list[int]:
    """The output of a request whose prompt has ``prompt`` tokens, from output token ``received`` on."""
    return [1 + (prompt + n) % (VOCAB - 1) for n in range(received, count)]


class LoopServer:
    """``async with LoopServer(folder) as server``. ``pace``: seconds between iterations; ``gate`` stops them.
    With ``tcp`` clients dial a loopback port, without keys."""

    def __init__(self, folder: str, *, tcp: bool = False, pace: float = 0.0, **options: int) -> None:
        doors = (Door("client", "tcp://127.0.0.1:0"),) if tcp else ()
        limits = Limits(token_budget=256, max_num_seqs=64, max_model_len=20_000)
        self.options = ControlOptions(
            *(f"ipc://{folder}/workers", f"ipc://{folder}/clients", folder, limits),
            doors=doors,
            insecure=tcp,
            **options,
        )
        self.pace = pace
        self.gate = asyncio.Event()
        self.gate.set()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "LoopServer":
        self.control = ControlServer(self.options, LoopHost(asyncio.get_running_loop()))
        remote = self.control._ports.remote
        self.endpoint = self.options.clients if remote is None else bound_endpoint(remote.socket)
        self._context = new_context()
        self._tasks = [asyncio.create_task(self._time()), asyncio.create_task(self._work())]
        await self.until(lambda: self.control.supervisor.ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.control.close()
        self._dealer.close(0)
        close_context(self._context)

    async def until(self, condition, timeout: float = 60.0) -> None:
        """Wait until ``condition()`` is true."""
        async with asyncio.timeout(timeout):
            while not condition():
                await asyncio.sleep(0.01)

    def values(self) -> dict[str, float]:
        return self.control._status(0).values

    @property
    def unfinished(self) -> int:
        engine = self.control.engine
        return 0 if engine is None else sum(map(len, engine.requests.values()))

    def narrow(self) -> None:
        """Little room on the way to clients that dial from now on, so that one that does not read is noticed soon."""
        clients, remote = self.control._clients, self.control._ports.remote
        if remote is not None:
            remote.socket.setsockopt(zmq.SNDBUF, 2048)
            remote.socket.setsockopt(zmq.SNDHWM, 8)
        clients.hwm = 8
        adopt = clients._adopt

        def adopt_narrow(made: socket.socket) -> None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            adopt(made)

        clients._adopt = adopt_narrow

    def submissions(self) -> list[Submit]:
        """Everything that clients submit from now on."""
        taken: list[Submit] = []
        submit = self.control._submit

        def note(session, message: Submit) -> None:
            taken.append(message)
            submit(session, message)

        self.control._submit = note
        return taken

    async def _time(self) -> None:
        while True:
            self.control.tick()
            await asyncio.sleep(TICK_S / 5)

    async def _work(self) -> None:
        info = ModelInfo("blank", (0,), VOCAB, 20_000, 16, 4096, 8)
        replica = LoopbackReplica([BlankRunner(0, 1, info)], WorkerLimits(max_tokens=256, num_slots=128))
        dealer = self._dealer = dial_dealer(self._context, self.options.workers)
        dealer.send(encode(replica.hellos()[0]))
        while True:
            await self.gate.wait()
            self._take(replica, dealer)
            for result in replica.run_one():
                dealer.send(encode(result))
            await asyncio.sleep(self.pace)

    def _take(self, replica: LoopbackReplica, dealer: Socket) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
                message = decode_to_worker(frames[-1])
                if isinstance(message, Start):
                    replica.start(message)
                    dealer.send(encode(Started(message.epoch)))
                elif isinstance(message, BatchPlan):
                    replica.submit(frames)
                elif isinstance(message, Heartbeat):
                    dealer.send(encode(Heartbeat()))
