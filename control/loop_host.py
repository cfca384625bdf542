"""The real surroundings of a control process: an event loop, the system's clocks and ZeroMQ sockets."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from .gatekeeper import open_doors
from .host import Take
from .intake import Intake
from .local_router import LocalRouter
from .options import ControlOptions
from .publisher import Publisher
from .wire.keys import Role
from .wire.sockets import DEFAULT_HWM, Socket, bind_router, close_context, make_client_router, new_context


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
        self.remote: Intake | None = None  #: clients in other places
        self.events: Publisher | None = None
        with contextlib.ExitStack() as stack:
            context = new_context()
            stack.callback(close_context, context)
            workers = bind_router(context, options.workers, hwm=65_536, receive_hwm=DEFAULT_HWM)
            self.workers = Intake(loop, workers, from_worker)
            stack.callback(self.workers.close)
            sockets: dict[Role, Socket] = {"worker": workers}
            if any(door.role == "client" for door in options.doors):
                # Their keys are ZeroMQ's business.
                sockets["client"] = make_client_router(context)
                self.remote = Intake(loop, sockets["client"], from_client)
                stack.callback(self.remote.close)
            self.clients = LocalRouter(loop, options.clients, from_client, self.remote)
            stack.callback(self.clients.close)
            if options.events:
                self.events = Publisher(context, options.events)
                stack.callback(self.events.close)
            self.guard = open_doors(loop, context, sockets, options.doors, options.keys, options.insecure)
            if self.guard is not None:
                stack.callback(self.guard.close)
            self.close = stack.pop_all().close
