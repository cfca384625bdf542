"""The real surroundings of a control process: an event loop, the system's clocks and ZeroMQ sockets."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from .gatekeeper import Gatekeeper, open_doors
from .host import Take
from .intake import Intake
from .options import ControlOptions
from .publisher import Publisher
from .wire.keys import Role
from .wire.sockets import DEFAULT_HWM, Socket, bind_clients, bind_router, close_context, new_context


class LoopHost:
    """``loop``: its clock must be the system's monotonic one, as those of asyncio and uvloop are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = time.monotonic
        self.wall = time.time

    def draw(self, bits: int) -> int:
        return secrets.randbits(bits)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self._loop.call_at(when, callback, *args)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self._loop.call_later(delay, callback, *args)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        return self._loop.call_soon(callback, *args)

    def open(self, options: ControlOptions, from_worker: Take, from_client: Take) -> SocketPorts:
        return SocketPorts(self._loop, options, from_worker, from_client)


class SocketPorts:
    """The sockets, read by the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: ControlOptions, from_worker: Take, from_client: Take
    ) -> None:
        self._context = new_context()
        workers = bind_router(self._context, options.workers, hwm=65_536, receive_hwm=DEFAULT_HWM)
        self.workers = Intake(loop, workers, from_worker)
        self.clients = Intake(loop, bind_clients(self._context, options.clients), from_client)
        self.events = Publisher(self._context, options.events) if options.events else None
        self.guard: Gatekeeper | None = None
        try:
            sockets: dict[Role, Socket] = {"worker": self.workers.socket, "client": self.clients.socket}
            self.guard = open_doors(loop, self._context, sockets, options.doors, options.keys, options.insecure)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.workers.close()
        self.clients.close()
        if self.guard is not None:
            self.guard.close()
        if self.events is not None:
            self.events.close()
        close_context(self._context)
