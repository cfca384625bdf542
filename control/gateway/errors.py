"""Errors as OpenAI clients know them: an HTTP status and ``{"error": {message, type, param, code}}``."""

import msgspec

from ..client_state import Finish


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """A request cannot be served. ``retry_after`` (seconds) is set where waiting helps."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after: float | None = None,
        queue_full: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after = retry_after
        #: The queue takes nobody at the moment, whatever the request.
        self.queue_full = queue_full

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorEnvelope(ErrorBody(self.message, self.kind, self.param, self.code)))

    def headers(self) -> dict[str, str]:
        if self.retry_after is not None:
            milliseconds = max(1, round(self.retry_after * 1000))
            return {"retry-after": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}
        return {"x-should-retry": "false"} if self.status in (429, 503, 504) else {}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """HTTP 400."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after: float, *, queue_full: bool = False) -> ApiError:
    """HTTP 429."""
    return ApiError(
        429,
        message,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        retry_after=retry_after,
        queue_full=queue_full,
    )


def unavailable(message: str, retry_after: float = 1.0, code: str = "service_unavailable") -> ApiError:
    """HTTP 503 that passes by itself."""
    return ApiError(503, message, code=code, kind="service_unavailable_error", retry_after=retry_after)


def from_finish(finish: Finish) -> ApiError:
    """What a client is told of a request that ended without an answer."""
    message = finish.message or "the request was ended by the service"
    wait = finish.retry_after_ms / 1000 if finish.retry_after_ms else 1.0
    if finish.code == "overloaded":
        return overloaded(message, wait, queue_full=finish.field in ("max_queued", "key"))
    if finish.code in ("draining", "not_ready", "closed"):
        return unavailable(message, wait, finish.code)
    if finish.code == "too_long":
        return invalid(message, finish.field or None, "context_length_exceeded")
    if finish.code == "invalid":
        return invalid(message, finish.field or None, "invalid_value")
    for timeout in ("deadline", "queue_timeout"):
        if timeout in (finish.reason, finish.code):
            return ApiError(504, message, code=timeout, kind="timeout_error")
    if finish.reason == "abort":
        return ApiError(503, message, code="aborted", kind="service_unavailable_error")
    return ApiError(500, message, code=finish.code or "internal_error", kind="server_error")
