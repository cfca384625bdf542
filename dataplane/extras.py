"""What few sequences ask of the last stage beyond temperature, top-k, top-p and min-p: biases, penalties and
log-probabilities. Kept for those slots only, so that batches without them pay nothing.

Penalties need the ids that a sequence has seen. ``History`` has those of REGISTER and takes each sampled id when it
is known; batches refer to it, not to the slot, so an id that comes late for a reused slot goes nowhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..control.wire import Register

Int64 = NDArray[np.int64]
UInt32 = NDArray[np.uint32]


class History:
    """The ids that one sequence has seen, each once, and how often each occurs in its output."""

    __slots__ = ("_counts", "_ids", "_place", "_size")

    def __init__(self, prompt: UInt32, output: UInt32) -> None:
        ids, places = np.unique(np.concatenate((prompt, output)), return_inverse=True)
        self._size = len(ids)
        self._ids = ids.astype(np.int64)
        self._counts = np.bincount(places[len(prompt) :], minlength=self._size)
        self._place = dict(zip(ids.tolist(), range(self._size), strict=True))

    def append(self, token: int) -> None:
        """One more token of the output."""
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros(len(self._ids) + 16, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(len(self._counts) + 16, np.int64)))
            self._ids[place], self._counts[place] = token, 0
            self._size += 1
        self._counts[place] += 1

    @property
    def ids(self) -> Int64:
        return self._ids[: self._size]

    @property
    def counts(self) -> Int64:
        return self._counts[: self._size]


@dataclass(frozen=True, slots=True)
class RowExtras:
    """One row's, as in the wire's ``Sampling``. ``bias``: ids and values. ``forbidden``: ids not to draw."""

    bias: tuple[Int64, NDArray[np.float32]] | None = None
    history: History | None = None
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    forbidden: Int64 | None = None
    logprobs: int = -1


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of a prompt whose log-probabilities are wanted: ``tokens[i]``, at index ``start + i`` of the sequence in
    ``slot``, comes after the batch's token number ``first + i``. ``best``: the alternatives to report with each.
    """

    slot: int
    first: int
    start: int
    tokens: Int64
    best: int


_PLAIN = RowExtras()


@dataclass(frozen=True, slots=True)
class _Slot:
    extras: RowExtras | None
    prompt: Int64 | None
    prompt_logprobs: int


class Extras:
    """By slot, for those that have any."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def __bool__(self) -> bool:
        return bool(self._slots)

    def register(self, message: Register, tokens: UInt32, vocab_size: int = 1 << 32) -> None:
        """Replace what the slot had. Raises ``ValueError`` if ids and values of biases do not match, or an id is not
        below ``vocab_size``."""
        self._slots.pop(message.slot, None)
        sampling = message.sampling
        penalised = sampling.repetition != 1.0 or sampling.presence != 0.0 or sampling.frequency != 0.0
        biased = bool(sampling.bias_ids or sampling.bias_values)
        if not penalised and not biased and sampling.logprobs < 0 and sampling.prompt_logprobs < 0:
            return
        bias = history = prompt = None
        if biased:
            if len(sampling.bias_ids) != len(sampling.bias_values) or len(sampling.bias_ids) % 4:
                raise ValueError(f"{len(sampling.bias_ids)} bytes of bias_ids, {len(sampling.bias_values)} of values")
            ids = np.frombuffer(sampling.bias_ids, "<u4").astype(np.int64)
            if ids.max() >= vocab_size:
                raise ValueError(f"bias of token {ids.max()} of {vocab_size}")
            bias = ids, np.frombuffer(sampling.bias_values, "<f4").astype(np.float32)
        if penalised:
            # Presence and frequency are about the output alone.
            read = tokens[: message.prompt_len if sampling.repetition != 1.0 else 0]
            history = History(read, tokens[message.prompt_len :])
        if sampling.prompt_logprobs >= 0:
            prompt = tokens[: message.prompt_len].astype(np.int64)
        extras = None
        if penalised or biased or sampling.logprobs >= 0:
            extras = RowExtras(
                bias=bias,
                history=history,
                repetition=sampling.repetition,
                presence=sampling.presence,
                frequency=sampling.frequency,
                logprobs=sampling.logprobs,
            )
        self._slots[message.slot] = _Slot(extras, prompt, sampling.prompt_logprobs)

    def release(self, slots: Int64) -> None:
        for slot in slots.tolist():
            self._slots.pop(slot, None)

    def of_rows(self, slots: Int64, early: NDArray[np.bool_], stop_ids: Int64) -> dict[int, RowExtras]:
        """By row number. Rows that are ``early`` may not draw their ``stop_ids`` (-1 is none)."""
        found: dict[int, RowExtras] = {}
        if self._slots:
            for row, slot in enumerate(slots.tolist()):
                if (kept := self._slots.get(slot)) is not None and kept.extras is not None:
                    found[row] = kept.extras
        for row in (early & (stop_ids >= 0).any(axis=1)).nonzero()[0].tolist():
            stops = stop_ids[row]
            found[row] = replace(found.get(row, _PLAIN), forbidden=stops[stops >= 0])
        return found

    def of_prompts(self, slots: Int64, cu_q: NDArray[np.int32], before: Int64, first: int) -> list[PromptTokens]:
        """Of rows from number ``first`` on, which compute from place ``before`` on: the tokens that come next, as far
        as they are the prompt's.
        """
        found: list[PromptTokens] = []
        for row in range(first, len(slots)):
            kept = self._slots.get(int(slots[row]))
            if kept is None or kept.prompt is None:
                continue
            start, begin, end = int(before[row]) + 1, int(cu_q[row]), int(cu_q[row + 1])
            tokens = kept.prompt[start : start + end - begin]
            if len(tokens):
                found.append(PromptTokens(int(slots[row]), begin, start, tokens, kept.prompt_logprobs))
        return found


def remember(extras: Mapping[int, RowExtras], ids: Int64) -> None:
    """Add what the rows drew to their histories. Called once for each iteration, before the next one is launched."""
    for row, of_row in extras.items():
        if of_row.history is not None:
            of_row.history.append(int(ids[row]))
