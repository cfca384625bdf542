"""Log-probabilities as HTTP clients see them: which tokens may be told yet, and the JSON shapes of the two endpoints.

A token is told once its text is: what is held back for a stop string holds its tokens back, and what a stop string
cuts off is never told. The values are of the raw logits, before penalties, biases and temperature.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..client import TokenLogprob
from .detokenizer import Decoding
from .schema import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs

#: JSON has no infinity; OpenAI's value for a token that cannot be drawn.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Reported:
    """One token: its bytes, its log-probability and the best alternatives (None for a prompt's first token), and
    the offset of its text in the choice's text, in characters."""

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...] | None
    offset: int


class LogprobLedger:
    """The output tokens of one choice that were made and not told yet. ``add`` each, ``release`` as text goes out."""

    __slots__ = ("_decoding", "_made", "_out", "_pending")

    def __init__(self, decoding: Decoding, offset: int = 0) -> None:
        self._decoding = decoding
        self._made = self._out = offset
        self._pending: deque[tuple[TokenLogprob, int, int]] = deque()

    def add(self, row: TokenLogprob, chars: int, silent: bool) -> None:
        """A token that made ``chars`` characters certain. One that made none and is not ``silent`` is a part of the
        next character."""
        start = self._made
        self._made += chars
        self._pending.append((row, start, self._made if chars or silent else start + 1))

    def release(self, chars: int, *, last: bool) -> list[Reported]:
        """``chars`` more characters went out; ``last``: nothing will follow."""
        self._out += chars
        told: list[Reported] = []
        pending = self._pending
        while pending and (pending[0][2] <= self._out or (last and pending[0][1] < self._out)):
            row, start, _ = pending.popleft()
            told.append(report(self._decoding, row, start))
        return told


def report(decoding: Decoding, row: TokenLogprob, offset: int, width: int | None = None) -> Reported:
    """``row`` with texts instead of ids, and all or ``width`` of its alternatives."""
    top = tuple((decoding.token_bytes(token), _finite(value)) for token, value in row.top[:width])
    return Reported(decoding.token_bytes(row.id), _finite(row.logprob), top, offset)


def report_prompt(
    decoding: Decoding, ids: Sequence[int], rows: Sequence[TokenLogprob], width: int, *, skip_special_tokens: bool
) -> list[Reported]:
    """A prompt's tokens; ``rows`` are those of all but the first, which has none."""
    detokenizer = decoding.start(skip_special_tokens=skip_special_tokens)
    told = [Reported(decoding.token_bytes(ids[0]), None, None, 0)]
    offset = len(detokenizer.push(ids[0]))
    for row in rows:
        told.append(report(decoding, row, offset, width))
        offset += len(detokenizer.push(row.id))
    return told


def completion_logprobs(told: Sequence[Reported]) -> CompletionLogprobs:
    """Columns, one entry a token. The alternatives are named by their text, the token itself is always among them."""
    columns = CompletionLogprobs([], [], [], [])
    for item in told:
        text = _named(item.token)
        columns.tokens.append(text)
        columns.text_offset.append(item.offset)
        columns.token_logprobs.append(item.logprob)
        if item.top is None or item.logprob is None:
            columns.top_logprobs.append(None)
            continue
        best: dict[str, float] = {}
        for token, value in item.top:
            best.setdefault(_named(token), value)
        best.setdefault(text, item.logprob)
        columns.top_logprobs.append(best)
    return columns


def chat_logprobs(told: Sequence[Reported]) -> ChatLogprobs:
    """One object a token, with its bytes, since a token may be a part of a character."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                item.token.decode(errors="replace"),
                _IMPOSSIBLE if item.logprob is None else item.logprob,
                list(item.token),
                [
                    ChatTopLogprob(token.decode(errors="replace"), value, list(token))
                    for token, value in item.top or ()
                ],
            )
            for item in told
        ]
    )


def prompt_logprobs(decoding: Decoding, rows: Sequence[TokenLogprob], width: int) -> PromptLogprobs:
    """vLLM's form: for each position the prompt's token and the ``width`` best ones, by id; none for the first."""
    positions: PromptLogprobs = [None]
    for row in rows:
        found = {str(row.id): PromptLogprob(_finite(row.logprob), row.rank, _text(decoding, row.id))}
        for rank, (token, value) in enumerate(row.top[:width], 1):
            found.setdefault(str(token), PromptLogprob(_finite(value), rank, _text(decoding, token)))
        positions.append(found)
    return positions


def _text(decoding: Decoding, token: int) -> str:
    return decoding.token_bytes(token).decode(errors="replace")


def _named(token: bytes) -> str:
    """The token's text; one that is a part of a character is spelled as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _IMPOSSIBLE
