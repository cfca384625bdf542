"""Which iterations a worker times before it serves, so that control knows from the start what iterations take."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..control.wire import Sample

#: Seconds after which no other iteration is begun, and that none is expected to take longer than.
PROFILE_S, LONGEST_S = 1.2, 0.4
#: So many shapes are measured however long it takes.
NEEDED = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """``rows`` sequences with ``each`` tokens after ``context`` others: chunks, or decodes if they are single."""

    rows: int
    each: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.each

    @property
    def decodes(self) -> int:
        return self.rows if self.each == 1 else 0

    @property
    def prefill(self) -> int:
        return 0 if self.each == 1 else self.tokens

    @property
    def attention(self) -> int:
        """Pairs of a chunk's token with those that it attends to."""
        return 0 if self.each == 1 else self.rows * (self.each * self.context + self.each * (self.each + 1) // 2)

    @property
    def kv_tokens(self) -> int:
        """What the decodes read."""
        return self.rows * (self.context + 1) if self.each == 1 else 0


#: The quick ones first, but one of decodes and one of prefill before all others.
SHAPES = (
    Shape(1, 1, 31),
    Shape(1, 64, 0),
    Shape(16, 1, 31),
    Shape(1, 16, 0),
    Shape(16, 1, 1023),
    Shape(1, 64, 1984),
    Shape(1, 256, 0),
    Shape(1, 1024, 0),
)


def measure(
    run: Callable[[Shape], None],
    tokens: int,
    length: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """Time ``run`` on the shapes of at most ``tokens`` tokens that do not reach beyond ``length``. Each runs twice,
    as far as there is time, and the quicker run counts: the first of a process may take many times as long as others,
    so the two shapes that are always measured run twice in any case."""
    samples: list[Sample] = []
    began = clock()
    each = 0.0  #: seconds of a prefill token so far
    for shape in SHAPES:
        if len(samples) >= NEEDED and clock() - began > PROFILE_S:
            break
        if shape.tokens > tokens or shape.context + shape.each > length:
            continue
        if len(samples) >= NEEDED and shape.prefill * each > LONGEST_S:
            continue
        took = 0.0
        for _ in range(2):
            start = clock()
            run(shape)
            seconds = clock() - start
            took = min(took, seconds) if took else seconds
            if len(samples) >= NEEDED and (clock() - began > PROFILE_S or seconds > LONGEST_S / 4):
                break
        if shape.prefill:
            each = took / shape.prefill
        samples.append(
            Sample(shape.prefill, shape.attention, shape.decodes, shape.kv_tokens, max(1, int(took * 1e6)))
        )
    return samples
