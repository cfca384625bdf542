"""When each request's tokens were given out: time to first token (TTFT) and time between tokens (TBT). Sans-I/O.

Measured in the control process, at the moment a result is taken up, so it holds for every client, whatever gateway it
came through; what lies behind (socket, text, HTTP) is measured by the gateways.

Exact for every token, at a cost that counts changes, not streams: a lane's decodes of one tick that were in its tick
before have the same gap, one weighted entry. Only slots that joined or left a lane are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .core.events import Delivered
from .core.sequence import Sequence
from .histogram import SlidingHistogram


class _LaneTick:
    """Who got a token in the newest tick of a lane (bit *s*: slot *s*), and when."""

    __slots__ = ("at", "bits")

    def __init__(self) -> None:
        self.bits = 0
        self.at = 0.0


class _Slots:
    """The slots of one replica in one epoch. What a former owner of a slot leaves behind is older than the first
    token of the next, so the newest time of a slot is always its owner's."""

    __slots__ = ("lanes", "left", "left_bits")

    def __init__(self) -> None:
        self.lanes: dict[int, _LaneTick] = {}
        self.left: dict[int, float] = {}  #: slots that were not in the newest tick of a lane: their time before
        self.left_bits = 0  #: the same slots as bits

    def last(self, slot: int) -> float | None:
        """When the slot's newest token was given out."""
        last = self.left.get(slot)
        bit = 1 << slot
        for tick in self.lanes.values():
            if tick.bits & bit and (last is None or last < tick.at):
                last = tick.at
        return last

    def leave(self, slot: int, at: float) -> None:
        before = self.left.get(slot)
        if before is None or before < at:
            self.left[slot] = at
            self.left_bits |= 1 << slot

    def forget(self, slot: int) -> None:
        if slot in self.left:
            del self.left[slot]
            self.left_bits &= ~(1 << slot)


class Values(Protocol):
    """Takes in values (seconds), as ``SlidingHistogram`` does."""

    count: int

    def add(self, value: float, weight: int, now: float) -> None: ...

    def percentiles(self, shares: Iterable[float], now: float) -> list[float] | None: ...


class TokenTimes:
    """Follows what the core delivers. Times are seconds of one monotonic clock."""

    def __init__(self, window: int = 30) -> None:
        self.ttft: Values = SlidingHistogram(window)
        self.tbt: Values = SlidingHistogram(window)
        self.tokens = 0  #: given out
        self._arrived: dict[tuple[int, int], float] = {}
        self._slots: dict[int, _Slots] = {}
        self._paused: dict[Sequence, float] = {}

    def submitted(self, owner: int, key: int, now: float) -> None:
        """A request has arrived."""
        self._arrived.setdefault((owner, key), now)

    def forget(self, owner: int, key: int) -> None:
        """It was not accepted after all."""
        self._arrived.pop((owner, key), None)

    def arrived(self, owner: int, key: int, now: float) -> float:
        """When that was; ``now`` if it is not known."""
        return self._arrived.get((owner, key), now)

    def delivered(self, delivered: Delivered, lane: int, now: float) -> None:
        """Tokens and ends of one iteration of ``lane``, or ends alone."""
        slots = self._slots.get(delivered.replica)
        if slots is None:
            slots = self._slots[delivered.replica] = _Slots()
        if delivered.live:
            self._tick(slots, delivered, lane, now)
        for ended in delivered.ends:
            seq = ended.seq
            if ended.reason != "paused":
                self._arrived.pop((seq.owner, seq.key), None)
                self._paused.pop(seq, None)
            elif seq not in self._paused and seq.known > seq.prompt_len:
                last = slots.last(ended.slot)
                if last is not None:
                    self._paused[seq] = last

    def epoch_over(self, replica: int) -> None:
        """The replica's slots and lanes mean nothing any more. To be called after its ends were delivered."""
        self._slots.pop(replica, None)

    def _tick(self, slots: _Slots, delivered: Delivered, lane: int, now: float) -> None:
        bits = int.from_bytes(delivered.live, "little")
        tick = slots.lanes.get(lane)
        if tick is None:
            tick = slots.lanes[lane] = _LaneTick()
        first = 0
        for slot, seq in delivered.starts:
            first |= 1 << slot
            slots.forget(slot)
            self._started(seq, now)
        decodes = bits & ~first
        self.tokens += bits.bit_count()
        if not decodes:
            # The lane may have left its decodes out, and then its newest tick is still the one before.
            for slot, _ in delivered.starts:
                slots.leave(slot, now)
            return
        # In this lane's tick before, and nowhere since.
        elsewhere = slots.left_bits
        for other in slots.lanes.values():
            if other.at > tick.at:
                elsewhere |= other.bits
        again = decodes & tick.bits & ~elsewhere
        if again:
            self.tbt.add(now - tick.at, again.bit_count(), now)
        if decodes != again:
            for slot in slots_of(decodes & ~again):
                last = slots.last(slot)
                if last is not None:
                    self.tbt.add(now - last, 1, now)
                slots.forget(slot)
        if gone := tick.bits & ~bits:
            for slot in slots_of(gone):
                slots.leave(slot, tick.at)
        tick.bits, tick.at = bits, now

    def _started(self, seq: Sequence, now: float) -> None:
        """The first token of ``seq`` in a slot: of its life, or after a pause."""
        paused = self._paused.pop(seq, None)
        if paused is not None:
            self.tbt.add(now - paused, 1, now)
        elif seq.known == seq.prompt_len + 1:
            arrived = self._arrived.get((seq.owner, seq.key))
            if arrived is not None:
                self.ttft.add(now - arrived, 1, now)


def slots_of(bits: int) -> list[int]:
    """The set bits, ascending."""
    found: list[int] = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
