"""Runs the application under uvicorn: its sockets, its signals, its bounded end.

SIGTERM and SIGINT begin a drain: new requests get 503, running ones finish within a limit, what is left then gets an
error event; a second signal ends at once. The listening socket stays open until the last request has ended, so that
clients are told instead of refused.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..client import AsyncClient
from .app import build_app
from .defaults import SamplingDefaults
from .limits import HEAD_SECONDS, MAX_HEADER_BYTES
from .service import Service
from .tokenizer import TextModel

log = structlog.get_logger(__name__)

#: How often a drain looks whether the last request has ended.
_DRAIN_STEP_S = 0.05
_STATUS_MS = 1000


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on the size and the time of a request's head, of which httptools has none."""

    _head = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
        super().data_received(data)
        # A piece may hold the head's end and much of the body: then the head is over here.
        if self._in_head and self._head > 2 * MAX_HEADER_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_came()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head = 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int) -> None:
        self._head_came()
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and status == HTTPStatus.REQUEST_TIMEOUT:
            # A part of the next request's head has come while the answer to this one is being written.
            self._expect_head()
            return
        if not answering and not self.transport.is_closing():
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            self.transport.write(line.encode() + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


class _Server(uvicorn.Server):
    """Leaves signals to ``serve``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    listener: socket.socket,
    *,
    control: str,
    model: TextModel,
    names: list[str],
    version: str,
    drain_seconds: float,
    defaults: SamplingDefaults,
    keys: str | None = None,
) -> None:
    """Serve until told to end. ``listener`` is bound; it is closed at the end."""
    loop = asyncio.get_running_loop()
    async with AsyncClient(control, name="gateway", keys=keys) as client:
        client.subscribe(_STATUS_MS)
        service = Service(client, model, names, defaults)
        config = uvicorn.Config(
            build_app(service, version),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
        server = _Server(config)
        drains: list[asyncio.Task[None]] = []

        def on_signal() -> None:
            if drains:
                log.warning("second signal: ending at once")
                server.should_exit = True
                server.force_exit = True
                return
            service.draining = True
            drains.append(loop.create_task(_drain(service, server, drain_seconds)))

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        log.info("serving", address=_address(listener), models=names, default_sampling=defaults.fields())
        try:
            await server.serve([listener])
        finally:
            for drain in drains:
                drain.cancel()
            await asyncio.gather(*drains, return_exceptions=True)
            service.threads.shutdown(wait=False, cancel_futures=True)


async def _drain(service: Service, server: uvicorn.Server, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    log.info("draining", running=service.active, limit_s=seconds)
    deadline = loop.time() + seconds
    while service.active and loop.time() < deadline:
        await asyncio.sleep(_DRAIN_STEP_S)
    if service.active:
        log.warning("drain limit reached", unfinished=service.active)
        # Running streams get an error event from this.
        service.client.fail_all("the server is shutting down", "closed")
        for _ in range(20):
            if not service.active:
                break
            await asyncio.sleep(_DRAIN_STEP_S)
    server.should_exit = True


def _address(listener: socket.socket) -> str:
    name: Any = listener.getsockname()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
