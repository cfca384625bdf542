"""One choice of an answer: a request at the control process, turned into text until it ends.

The text depends only on the tokens, never on how they were grouped on their way, so a streamed answer and a whole one
are the same.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass

from ..client import Stream, TokenLogprob
from .errors import ApiError, from_finish
from .limits import SETTLE_SECONDS
from .logprobs import LogprobLedger, Reported, prompt_logprobs, report_prompt
from .metrics import Metrics
from .schema import PromptLogprobs
from .stops import StopFinder
from .tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class Stopping:
    """What ends a choice's text, besides its length."""

    strings: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: text, and the tokens that are out with it (None where nobody asked for them)."""

    text: str
    told: list[Reported] | None = None


class PromptRows:
    """A prompt's log-probabilities, which its first choice reports for all of them."""

    def __init__(self, stream: Stream, ids: list[int]) -> None:
        self._stream = stream
        self._ids = ids
        #: The first choice has a token, so they are all here, or it never will.
        self.ready = asyncio.Event()

    def rows(self) -> list[TokenLogprob]:
        """Of each token but the first. Raises ``ApiError`` if some are missing."""
        rows = self._stream.prompt_logprobs
        if len(rows) < len(self._ids) - 1:
            raise _missing()
        return rows


@dataclass(frozen=True, slots=True)
class Reporting:
    """What is told of a choice besides its output's text.

    ``logprobs``: alternatives of each token, -1 for none at all; ``echo``: the prompt's text, to be told first;
    ``rows``: its log-probabilities. ``muted``: the output is made for the sake of the prompt only, and not told.
    """

    logprobs: int = -1
    echo: str | None = None
    rows: PromptRows | None = None
    muted: bool = False


class Generation:
    """Call ``piece`` until it gives None, then read ``finish_reason``; ``close`` in any case.

    ``index`` is that of the choice among those of its prompt ``ids``.
    """

    def __init__(
        self,
        stream: Stream,
        model: TextModel,
        stopping: Stopping,
        metrics: Metrics,
        ids: list[int],
        index: int = 0,
        reporting: Reporting | None = None,
    ) -> None:
        self._stream = stream
        self._stopping = stopping
        self._metrics = metrics
        self._ids = ids
        self._reporting = reporting or Reporting()
        self._decoding = model.decoding
        self._detokenizer = model.decoding.start(skip_special_tokens=stopping.skip_special_tokens)
        self._finder = StopFinder(stopping.strings)
        self._ledger: LogprobLedger | None = None
        self._echo = self._reporting.echo
        if self._reporting.logprobs >= 0:
            self._ledger = LogprobLedger(model.decoding, len(self._echo or ""))
        self._began = time.monotonic()
        self._last_at = 0.0
        self._closed = False
        self._first = index == 0
        #: The prompt is counted once, with its first choice.
        self.prompt_tokens = len(ids) if self._first else 0
        self.completion_tokens = 0
        self.finish_reason: str | None = None

    @property
    def reports(self) -> bool:
        """Tokens' log-probabilities are wanted."""
        return self._reporting.logprobs >= 0

    @property
    def prompt_length(self) -> int:
        """Tokens of its prompt, whichever choice of it this is."""
        return len(self._ids)

    @property
    def cached_tokens(self) -> int:
        return self._stream.cached_tokens if self._first else 0

    def prompt_logprobs(self, width: int) -> PromptLogprobs:
        """The prompt's, with ``width`` alternatives. Raises ``ApiError`` if some are missing."""
        rows = self._reporting.rows
        return prompt_logprobs(self._decoding, [] if rows is None else rows.rows(), width)

    async def settle(self) -> None:
        """After the end: wait for the last figures, if a stop string ended the run before the service could."""
        with contextlib.suppress(TimeoutError):
            await self._stream.confirmed(SETTLE_SECONDS)

    def refusal(self) -> ApiError | None:
        """The error that ended the request before it gave a token, if it did."""
        finish = self._stream.finish
        if finish is not None and finish.reason not in ("stop", "length") and not self._stream.received:
            return from_finish(finish)
        return None

    async def news(self) -> None:
        """Return when there is a token or an end to look at."""
        await self._stream.wait()

    async def piece(self, every: bool = False) -> Piece | None:
        """The next piece; None at the end. Raises ``ApiError`` if the request failed.

        Never empty, unless ``every`` token is to be told of as it comes: some have no text until others follow.
        """
        stream, ledger = self._stream, self._ledger
        while self.finish_reason is None:
            came = await stream.wait()
            if came and self._first and self._reporting.rows is not None:
                self._reporting.rows.ready.set()
            if came and self._echo is not None:
                return await self._preface()
            if came:
                text = self._take(stream.take())
                # An end that lies there already is dealt with now: it may hold the last of the text.
                if self.finish_reason is None and stream.finish is not None:
                    text += self._end()
            else:
                text = self._end()
            told = None if ledger is None else ledger.release(len(text), last=self.finish_reason is not None)
            if text or told or (every and self.finish_reason is None):
                return Piece(text, told)
        return None

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stream.abort()
        if self._first and self._reporting.rows is not None:
            self._reporting.rows.ready.set()
        finish = self._stream.finish
        reason = self.finish_reason or (finish.reason if finish is not None else "abort")
        self._metrics.finished(reason, time.monotonic() - self._began, self.prompt_tokens, self.completion_tokens)

    async def _preface(self) -> Piece:
        """The prompt, which ``echo`` puts before the output."""
        echo, self._echo = self._echo or "", None
        rows = self._reporting.rows
        width = self._reporting.logprobs
        if width < 0 or rows is None:
            return Piece(echo)
        await rows.ready.wait()
        skip = self._stopping.skip_special_tokens
        return Piece(echo, report_prompt(self._decoding, self._ids, rows.rows(), width, skip_special_tokens=skip))

    def _take(self, ids: list[int]) -> str:
        now = time.monotonic()
        if self._last_at:
            self._metrics.gap(now - self._last_at, len(ids))
        else:
            self._metrics.first_token(now - self._began, len(ids))
        self._last_at = now
        if self._reporting.muted:
            self.finish_reason = "length"
            self._stream.abort()
            return ""
        stopping, ledger = self._stopping, self._ledger
        rows = self._stream.take_logprobs() if ledger is not None else []
        if ledger is not None and len(rows) < len(ids):
            raise _missing()
        pieces: list[str] = []
        for i, token in enumerate(ids):
            self.completion_tokens += 1
            early = self.completion_tokens < stopping.min_tokens
            if token in stopping.ids and not early:
                pieces.append(self._finish("stop"))
                break
            text = self._detokenizer.push(token)
            if ledger is not None:
                silent = not text and self._decoding.is_silent(
                    token, skip_special_tokens=stopping.skip_special_tokens
                )
                ledger.add(rows[i], len(text), silent)
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
        self.finish_reason = "error" if finish.reason == "abort" else finish.reason
        raise from_finish(finish)

    def _finish(self, reason: str) -> str:
        text = self._finder.feed(self._detokenizer.finish())
        if not self._finder.stopped:
            text += self._finder.finish()
        self.finish_reason = "stop" if self._finder.stopped else reason
        return text


def _missing() -> ApiError:
    text = "the worker did not report the log-probabilities that were asked for"
    return ApiError(500, text, code="internal_error", kind="server_error")
