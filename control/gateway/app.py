"""The ASGI application: routes inside one guard that names, counts, bounds and logs each request.

Logs hold ids, lengths, codes and the kinds of errors; never a prompt, an output, a header's value or an error's text,
which may quote them.
"""

import re
import secrets
import time
import traceback
from pathlib import Path

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, unavailable
from .limits import MAX_HEADER_BYTES, MAX_REQUEST_ID
from .routes import WORK_PATHS, Routes
from .service import Service
from .sse import ClientGone

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(rb"[!-~]{1,%d}\Z" % MAX_REQUEST_ID)


def build_app(service: Service, version: str) -> ASGIApp:
    """The application. Its client must be open while it serves."""

    async def refused(http: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if http.url.path in WORK_PATHS:
            service.note(error)
        return error_response(error)

    app = Starlette(
        routes=Routes(service, version).table(),
        exception_handlers={
            ApiError: refused,
            HTTPException: _http_error,
            ClientGone: _nobody,
            Exception: _broken,
        },
    )
    return Guard(app, service)


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers(), "application/json")


async def _http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"{http.method} {http.url.path[:256]} is not a route of this server"
    elif error.status_code == 405:
        message = f"{http.method} is not allowed here"
    else:
        message = error.detail
    response = error_response(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _nobody(_: Request, error: Exception) -> Response:
    """For the log only: who asked has gone."""
    return Response(status_code=499)


async def _broken(_: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "internal error", code="internal_error", kind="server_error"))


class Guard:
    """Outermost: nothing that goes wrong in one request's handling leaves it."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        service = self._service
        given, size = _inspect_headers(scope)
        # The name inside the service is always our own: two clients may send the same one.
        name = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = name
        echo = given or name.encode()
        began = time.monotonic()
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", echo)]
            await send(message)

        work = scope["path"] in WORK_PATHS and scope["method"] == "POST"
        error: ApiError | None = None
        if size > MAX_HEADER_BYTES:
            error = ApiError(431, f"the headers may have at most {MAX_HEADER_BYTES} bytes")
        elif work and service.draining:
            error = unavailable("the server is shutting down", 5.0, "draining")
        service.active += work
        try:
            if error is not None:
                if work:
                    service.note(error)
                await error_response(error)(scope, receive, send_named)
            else:
                await self._app(scope, receive, send_named)
        except Exception as failure:  # answered already, by _broken
            log.error(
                "request failed",
                request=name,
                error=type(failure).__name__,
                at=[
                    f"{Path(frame.filename).name}:{frame.lineno}"
                    for frame in traceback.extract_tb(failure.__traceback__)
                ],
            )
        finally:
            service.active -= work
            if work:
                service.metrics.responded(status)
                log.info(
                    "request",
                    request=name,
                    path=scope["path"],
                    status=status,
                    ms=round((time.monotonic() - began) * 1000, 1),
                )


def _inspect_headers(scope: Scope) -> tuple[bytes | None, int]:
    """The client's request id, if it can be used, and the size of all headers."""
    given: bytes | None = None
    size = 0
    for name, value in scope["headers"]:
        size += len(name) + len(value)
        if name == b"x-request-id" and _REQUEST_ID.match(value):
            given = value
    return given, size
