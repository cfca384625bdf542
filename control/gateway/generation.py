"""One choice of an answer: a request at the control process, turned into text until it ends.

The text depends only on the tokens, never on how they were grouped on their way, so a streamed answer and a whole one
are the same.
"""

import contextlib
import time
from dataclasses import dataclass

from ..client import Stream
from .errors import ApiError, from_finish
from .limits import SETTLE_SECONDS
from .metrics import Metrics
from .stops import StopFinder
from .tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class Stopping:
    """What ends a choice's text, besides its length."""

    strings: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    skip_special_tokens: bool = True


class Generation:
    """Call ``piece`` until it gives None, then read ``finish_reason``; ``close`` in any case."""

    def __init__(self, stream: Stream, model: TextModel, stopping: Stopping, metrics: Metrics, prompt_tokens: int):
        self._stream = stream
        self._stopping = stopping
        self._metrics = metrics
        self._detokenizer = model.decoding.start(skip_special_tokens=stopping.skip_special_tokens)
        self._finder = StopFinder(stopping.strings)
        self._began = time.monotonic()
        self._last_at = 0.0
        self._closed = False
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.finish_reason: str | None = None

    @property
    def cached_tokens(self) -> int:
        return self._stream.cached_tokens

    async def settle(self) -> None:
        """After the end: wait for the last figures, if a stop string ended the run before the service could."""
        with contextlib.suppress(TimeoutError):
            await self._stream.confirmed(SETTLE_SECONDS)

    def refusal(self) -> ApiError | None:
        """The error that ended the request before it gave a token, if it did."""
        finish = self._stream.finish
        if finish is not None and finish.reason in ("error", "abort") and not self._stream.received:
            return from_finish(finish)
        return None

    async def news(self) -> None:
        """Return when there is a token or an end to look at."""
        await self._stream.wait()

    async def piece(self) -> str | None:
        """The next piece of text, never empty; None at the end. Raises ``ApiError`` if the request failed."""
        stream = self._stream
        while self.finish_reason is None:
            if await stream.wait():
                text = self._take(stream.take())
                # An end that lies there already is dealt with now: it may hold the last of the text.
                if self.finish_reason is None and stream.finish is not None:
                    text += self._end()
            else:
                text = self._end()
            if text:
                return text
        return None

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stream.abort()
        reason = self.finish_reason or "abort"
        self._metrics.finished(reason, time.monotonic() - self._began, self.prompt_tokens, self.completion_tokens)

    def _take(self, ids: list[int]) -> str:
        now = time.monotonic()
        if self._last_at:
            self._metrics.gap(now - self._last_at, len(ids))
        else:
            self._metrics.first_token(now - self._began, len(ids))
        self._last_at = now
        stopping = self._stopping
        pieces: list[str] = []
        for token in ids:
            self.completion_tokens += 1
            early = self.completion_tokens < stopping.min_tokens
            if token in stopping.ids and not early:
                pieces.append(self._finish("stop"))
                break
            text = self._detokenizer.push(token)
            if not text:
                continue
            pieces.append(text if early else self._finder.feed(text))
            if self._finder.stopped:
                self.finish_reason = "stop"
                self._stream.abort()
                break
        return "".join(pieces)

    def _end(self) -> str:
        finish = self._stream.finish
        assert finish is not None
        if finish.reason in ("stop", "length"):
            return self._finish(finish.reason)
        self.finish_reason = "error"
        raise from_finish(finish)

    def _finish(self, reason: str) -> str:
        text = self._finder.feed(self._detokenizer.finish())
        if not self._finder.stopped:
            text += self._finder.finish()
        self.finish_reason = "stop" if self._finder.stopped else reason
        return text
