"""Made-up log-probabilities, as a worker would report them: they follow from the tokens up to each position.

The shadow workers decide tokens; this stands beside the last stage of a replica, follows its plans, and adds to each
result what the registered sequences ask for, void rows and repeated prompt positions included.
"""

import struct
import zlib
from array import array
from collections import deque
from dataclasses import dataclass

from evenflow.control.wire import BatchPlan, Logprobs, Register, Result
from msgspec.structs import replace

#: A log-probability, its rank, and the alternatives.
Row = tuple[float, int, tuple[tuple[int, float], ...]]


def logprob_of(tokens: list[int], index: int, width: int) -> Row:
    """What is reported of token ``index`` of a sequence, with ``width`` alternatives."""
    word = zlib.crc32(array("I", tokens[: index + 1]).tobytes())
    (value,) = struct.unpack("f", struct.pack("f", -1 - word / (1 << 32)))
    top = tuple((word + i & 0xFFFF, value - i) for i in range(width))
    return value, word & 0xFF, tuple((i, struct.unpack("f", struct.pack("f", v))[0]) for i, v in top)


def packed(tokens: list[int], start: int, stop: int, width: int) -> tuple[bytes, bytes, bytes, bytes]:
    """``values``, ``ranks``, ``top_ids`` and ``top_values`` of tokens ``start`` to ``stop``."""
    rows = [logprob_of(tokens, index, width) for index in range(start, stop)]
    return (
        array("f", [row[0] for row in rows]).tobytes(),
        array("I", [row[1] for row in rows]).tobytes(),
        array("I", [token for row in rows for token, _ in row[2]]).tobytes(),
        array("f", [value for row in rows for _, value in row[2]]).tobytes(),
    )


@dataclass
class Held:
    """A slot's sequence."""

    tokens: list[int]
    computed: int
    register: Register


class LogprobWorker:
    """Feed it each plan with its registrations, then the results in order."""

    def __init__(self) -> None:
        self._plans: deque[tuple[list[Register], BatchPlan]] = deque()
        self._slots: dict[int, Held] = {}

    def accept(self, registers: list[Register], plan: BatchPlan) -> None:
        self._plans.append((registers, plan))

    def complete(self, result: Result) -> Result:
        """The result of the oldest plan, with its log-probabilities."""
        registers, plan = self._plans.popleft()
        assert result.step == plan.step
        for slot in array("H", plan.released):
            del self._slots[slot]
        for register in registers:
            self._slots[register.slot] = Held(array("I", register.tokens).tolist(), register.computed, register)
        ids = array("I", result.ids)
        entries: list[Logprobs] = []
        for slot in [s for s in range(8 * len(plan.decodes)) if plan.decodes[s >> 3] >> (s & 7) & 1]:
            entries += self._sample(slot, ids[slot])
        for slot, taken in zip(array("H", plan.chunk_slots), array("I", plan.chunk_tokens), strict=True):
            held = self._slots[slot]
            first, last = held.computed + 1, min(held.computed + taken + 1, held.register.prompt_len)
            width = held.register.sampling.prompt_logprobs
            if width >= 0 and first < last:
                entries.append(Logprobs(slot, first, *packed(held.tokens, first, last, width)))
            held.computed += taken
            if held.computed == len(held.tokens):
                held.computed -= 1
                entries += self._sample(slot, ids[slot])
        return replace(result, logprobs=entries)

    def _sample(self, slot: int, token: int) -> list[Logprobs]:
        held = self._slots[slot]
        held.computed += 1
        held.tokens.append(token)
        width, place = held.register.sampling.logprobs, len(held.tokens) - 1
        if width < 0:
            return []
        return [Logprobs(slot, place, *packed(held.tokens, place, place + 1, width))]
