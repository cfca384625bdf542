"""Requests that came before there were workers. They wait for the decision core, which must know what those hold."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from .core.events import Limits
from .wire import Refused, Submit

#: When to come again, for those that are refused meanwhile: in milliseconds.
RETRY_MS = 1000


@dataclass(slots=True)
class _Early:
    owner: int
    submit: Submit
    at: float


class EarlyRequests:
    """In the order in which they came. Times are in seconds."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: list[_Early] = []
        self._tokens = 0

    def add(self, owner: int, submit: Submit, now: float) -> Refused | None:
        """Keep a request, or say why not: the bounds are those of the waiting queue."""
        limits, tokens = self._limits, len(submit.tokens) >> 2
        if len(self._waiting) >= limits.max_queued:
            text = "too many requests wait for the workers"
            return Refused(submit.key, "overloaded", "max_queued", text, RETRY_MS)
        if self._waiting and self._tokens + tokens > limits.max_queued_tokens:
            text = f"{self._tokens} tokens wait for the workers; with this request's more than may"
            return Refused(submit.key, "overloaded", "max_queued_tokens", text, RETRY_MS)
        self._waiting.append(_Early(owner, submit, now))
        self._tokens += tokens
        return None

    def __len__(self) -> int:
        return len(self._waiting)

    def count(self, owner: int) -> int:
        """Requests of ``owner``."""
        return sum(early.owner == owner for early in self._waiting)

    def drop(self, owner: int, key: int | None = None) -> None:
        """Forget one request of ``owner``, or all."""
        self._keep([e for e in self._waiting if e.owner != owner or (key is not None and e.submit.key != key)])

    def overdue(self, now: float) -> list[tuple[int, Refused]]:
        """Owners and answers of requests whose deadline has passed; they wait no longer."""
        over = [e for e in self._waiting if e.submit.deadline_ms and now >= e.at + e.submit.deadline_ms / 1000]
        if not over:
            return []
        self._keep([e for e in self._waiting if e not in over])
        text = "the workers did not come before the request's deadline"
        return [(e.owner, Refused(e.submit.key, "deadline", "deadline_ms", text)) for e in over]

    def take(self, now: float) -> list[tuple[int, Submit]]:
        """All, with what is left of their deadlines: the core counts from when it hears of a request."""
        taken: list[tuple[int, Submit]] = []
        for early in self._waiting:
            submit = early.submit
            if submit.deadline_ms:
                left = submit.deadline_ms - round((now - early.at) * 1000)
                submit = replace(submit, deadline_ms=max(1, left))
            taken.append((early.owner, submit))
        self._keep([])
        return taken

    def _keep(self, waiting: list[_Early]) -> None:
        self._waiting = waiting
        self._tokens = sum(len(early.submit.tokens) >> 2 for early in waiting)
