"""Iterations of chosen batches, run and timed as a worker runs them: through the executor, without a server.

Sequences are put in the middle of their lives: a REGISTER says that their context is computed, and attention reads
whatever the cache holds there, which takes as long as what would be true. What goes around the device's work (the
plan is decoded and applied, the result is derived and encoded) is timed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..control.wire import BatchPlan, Register, Start, encode
from .batch import Runner
from .executor import Limits, StageExecutor

#: Iterations before those that are timed.
_WARM = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """``decodes`` that have ``context`` tokens each, and beside them a ``chunk`` (0: none) after ``before`` tokens of
    its prompt. ``last``: the prompt ends with it, so it samples."""

    decodes: int
    context: int = 0
    chunk: int = 0
    before: int = 0
    last: bool = False

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk

    @property
    def sampled(self) -> int:
        return self.decodes + (self.chunk > 0 and self.last)


@dataclass(frozen=True, slots=True)
class Timing:
    """One iteration, in microseconds: the device's work, and the time since the end of the one before. ``kv_tokens``:
    what its decodes read."""

    took_us: int
    between_us: int
    kv_tokens: int


class Rehearsal:
    """``runner``: the only stage of a model, ready to serve. Batches of at most ``tokens`` tokens and ``rows``
    sequences."""

    def __init__(self, runner: Runner, tokens: int, rows: int) -> None:
        self._info = runner.info
        self._executor = StageExecutor(runner, 0, 1, Limits(tokens, rows + 2))
        self._tokens = tokens
        self._slots = rows + 2
        self._epoch = 0
        self._chance = np.random.default_rng(0)

    def run(self, batch: Batch, times: int) -> list[Timing]:
        """Run ``batch`` so many times after warming up; its decodes grow by a token each time. Raises ``ValueError``
        for a batch that is larger than allowed or reaches beyond the model's length."""
        info, executor = self._info, self._executor
        iterations = _WARM + times
        longest = max(batch.context + iterations + 1 if batch.decodes else 0, batch.before + batch.chunk + 1)
        if not 0 < batch.tokens <= self._tokens or batch.decodes > self._slots - 2 or longest > info.max_model_len:
            raise ValueError(f"{batch} does not fit {self._tokens} tokens or {info.max_model_len} of a sequence")
        self._epoch += 1
        executor.start(
            Start(
                self._epoch,
                1,
                info.num_blocks,
                info.block_size,
                self._slots,
                self._tokens,
                info.max_model_len,
                "",
            )
        )
        messages = self._messages(batch, iterations)
        executor.accept(messages[0])
        ended = 0
        timings: list[Timing] = []
        for following in [*messages[1:], None]:
            # The next plan is at hand, as in service.
            if following is not None:
                executor.accept(following)
            outcome = executor.execute()
            started, before, ended = outcome.started_us, ended, outcome.ended_us
            encode(outcome.result(started, ended))
            read = int(outcome.batch.kv_len[: outcome.batch.num_decodes].sum())
            timings.append(Timing(ended - started, started - before, read))
        executor.stop()
        # The first ones warm up, or put the decodes in their places.
        return timings[-times:]

    def _messages(self, batch: Batch, iterations: int) -> list[list[bytes]]:
        """The frames of all plans. A first one makes the decodes decode: they sample from the last token of a
        prompt."""
        messages: list[list[bytes]] = []
        decodes = batch.decodes
        generation = 1
        if decodes:
            slots = np.arange(decodes, dtype="<u2").tobytes()
            frames = [
                self._register(slot, 1, batch.context, batch.context - 1, batch.context + iterations + 1)
                for slot in range(decodes)
            ]
            ones = np.ones(decodes, "<u4").tobytes()
            frames.append(encode(BatchPlan(self._epoch, 0, 0, b"", chunk_slots=slots, chunk_tokens=ones)))
            messages.append(frames)
        bitmap = ((1 << decodes) - 1).to_bytes((decodes + 7) // 8, "little")
        slot = decodes
        for number in range(iterations):
            frames = []
            chunk_slots = chunk_tokens = released = b""
            if batch.chunk:
                # Each time that of another request, which has come as far.
                known = batch.before + batch.chunk + (not batch.last)
                frames.append(self._register(slot, generation, known, batch.before, known + 1))
                generation += 1
                chunk_slots = np.array([slot], "<u2").tobytes()
                chunk_tokens = np.array([batch.chunk], "<u4").tobytes()
                released = chunk_slots if number else b""
            plan = BatchPlan(
                self._epoch,
                len(messages),
                0,
                bitmap,
                chunk_slots=chunk_slots,
                chunk_tokens=chunk_tokens,
                released=released,
            )
            messages.append([*frames, encode(plan)])
        return messages

    def _register(self, slot: int, generation: int, known: int, computed: int, length: int) -> bytes:
        """Blocks are spread over the pool as in service, as far as there are so many of them."""
        info = self._info
        count = -(-length // info.block_size)
        blocks = (slot * count + np.arange(count)) % info.num_blocks
        tokens = self._chance.integers(0, info.vocab_size, known)
        return encode(
            Register(
                slot,
                generation,
                slot,
                tokens.astype("<u4").tobytes(),
                known,
                computed,
                blocks.astype("<u4").tobytes(),
                length,
            )
        )


def grid(tokens: int, rows: int, length: int) -> list[Batch]:
    """The batches that a device's description rests on, the ones that bound it first: of at most ``tokens`` tokens
    and ``rows`` decodes in sequences of at most ``length`` tokens."""
    room = length - 16  #: what iterations add
    sizes = _doubling(tokens)
    counts = _doubling(min(rows, tokens))
    near, middle, far = (max(1, min(context, room - tokens)) for context in (48, 448, 1792))
    chunks = [Batch(0, chunk=size) for size in sizes]
    decodes = [Batch(count, near) for count in counts]
    late = [Batch(0, chunk=size, before=far) for size in sizes if size >= 16]
    full = [Batch(count, far) for count in counts]
    mixed = [Batch(count, middle, tokens - count, before) for count in counts[2:-1] for before in (0, middle)]
    lasts = [Batch(0, chunk=size, before=near, last=True) for size in sizes]
    some = [Batch(count, middle) for count in counts]
    between = [Batch(0, chunk=size, before=middle) for size in sizes if size >= 16]
    order = [chunks[-1], decodes[-1], chunks[0], decodes[0], full[-1], late[-1] if late else chunks[-1]]
    rest = (chunks, decodes, mixed, full[::2], late[::2], lasts[::2], some[1::2], between[::2])
    spare = (full[1::2], late[1::2], lasts[1::2], some[::2], between[1::2])
    return list(dict.fromkeys([*order, *(batch for group in (*rest, *spare) for batch in group)]))


def probes(tokens: int, rows: int, length: int, count: int, seed: int = 0) -> list[Batch]:
    """Batches as they come in service, none of them on purpose in the grid: to see how good a description is."""
    chance = np.random.default_rng(seed)
    room = length - 16 - tokens
    made: list[Batch] = []
    for _ in range(count):
        decodes = int(chance.integers(0, min(rows, tokens // 2) + 1))
        chunk = int(chance.integers(1, tokens - decodes + 1)) if chance.random() < 0.5 or not decodes else 0
        context, before = (int(x) for x in chance.integers(1, max(2, min(1536, room)), 2))
        made.append(Batch(decodes, context, chunk, before, bool(chance.random() < 0.3)))
    return made


def _doubling(most: int) -> Sequence[int]:
    """1, 2, 4 … and ``most``."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*sizes, most]
