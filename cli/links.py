"""The launcher's two connections to the control process.

``ControlLink`` dials the workers' socket: it reports deaths and obeys ``KillWorker`` and ``Fatal``.
``await_ready`` is for a moment a client like any other, which waits for a ``Welcome`` that says ready.
ZeroMQ dials again by itself when control comes back; ``Redial`` and ``Unknown`` then ask for another hello.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable

import zmq
import zmq.asyncio

from ..control.wire import (
    PROTOCOL_VERSION,
    ClientHello,
    ClientPing,
    Fatal,
    Heartbeat,
    KillWorker,
    LauncherHello,
    Redial,
    Unknown,
    Welcome,
    WireError,
    WorkerExited,
    decode_to_client,
    decode_to_worker,
    encode,
)
from ..control.wire.sockets import WireContext, dial_dealer

BEAT_SECONDS = 1.0


def _dial(context: WireContext, endpoint: str) -> zmq.asyncio.Socket:
    return zmq.asyncio.Socket.from_socket(dial_dealer(context, endpoint))


async def _send(dealer: zmq.asyncio.Socket, message: object) -> None:
    # Full: control has been away for long. It will ask for a hello when it is back.
    with contextlib.suppress(zmq.Again):
        await dealer.send(encode(message), zmq.NOBLOCK)


class ControlLink:
    """Run ``run`` as a task; ``report`` may be called at any time."""

    def __init__(
        self,
        context: WireContext,
        endpoint: str,
        on_kill: Callable[[int, int, int], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        self._dealer = _dial(context, endpoint)
        self._on_kill = on_kill
        self._on_fatal = on_fatal
        self._sending: set[asyncio.Task[None]] = set()

    def report(self, replica: int, stage: int, pid: int, status: int) -> None:
        """Tell control that a worker is gone."""
        message = WorkerExited(replica=replica, stage=stage, rank=0, pid=pid, status=status)
        task = asyncio.ensure_future(_send(self._dealer, message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def run(self) -> None:
        hello = LauncherHello(version=PROTOCOL_VERSION, pid=os.getpid())
        await _send(self._dealer, hello)
        beat = asyncio.ensure_future(self._beat())
        try:
            while True:
                frames = await self._dealer.recv_multipart()
                try:
                    message = decode_to_worker(frames[-1])
                except WireError:
                    continue
                if isinstance(message, KillWorker):
                    self._on_kill(message.replica, message.stage, message.pid)
                elif isinstance(message, Fatal):
                    self._on_fatal(message.message)
                elif isinstance(message, Redial):
                    await _send(self._dealer, hello)
        finally:
            beat.cancel()
            self._dealer.close(0)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await _send(self._dealer, Heartbeat())


async def watch_ready(context: WireContext, endpoint: str, on_welcome: Callable[[Welcome], None]) -> None:
    """Call ``on_welcome`` for each ``Welcome``: at the start, at changes, and as control's sign of life."""
    dealer = _dial(context, endpoint)
    hello = ClientHello(version=PROTOCOL_VERSION, name="launcher")

    async def ping() -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await _send(dealer, ClientPing())

    await _send(dealer, hello)
    beat = asyncio.ensure_future(ping())
    try:
        while True:
            frames = await dealer.recv_multipart()
            try:
                message = decode_to_client(frames[-1])
            except WireError:
                continue
            if isinstance(message, Welcome):
                on_welcome(message)
            elif isinstance(message, Unknown):
                await _send(dealer, hello)
    finally:
        beat.cancel()
        dealer.close(0)
