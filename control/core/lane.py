"""A lane: the turn of one micro-batch in a pipeline, and the sequences that decode in it.

Decoding sequences advance by themselves. A tick of the lane gives each of them one token, and costs only what
changes at that tick:

* ``bitmap`` is the set of decoding slots, ready to be sent;
* ``grow[t % block_size]`` holds the tables that need a new block at tick *t*, which recurs for ever, so nothing is
  rescheduled;
* ``ends[t]`` holds the sequences whose last token by length is sampled at tick *t*;
* the ring keeps the sampled ids tick by tick, one copy a result; a sequence reads its column when it leaves.

``tick`` is the next tick to be planned, ``done`` the first whose result has not come.
"""

from __future__ import annotations

from array import array

from .sequence import Sequence

#: Ticks that the ring remembers. Longer columns are collected before they are overwritten.
RING_TICKS = 512
#: Collected this many ticks early: at most two plans of a lane are out.
RING_MARGIN = 8


class Lane:
    """State of one lane. ``width`` is the number of slots of the replica."""

    __slots__ = (
        "_ring",
        "_ring_ids",
        "awaits",
        "bitmap",
        "block_size",
        "collect",
        "count",
        "done",
        "ends",
        "grow",
        "in_flight",
        "index",
        "kv_base",
        "owners",
        "tick",
        "width",
    )

    def __init__(self, index: int, width: int, block_size: int) -> None:
        self.index = index
        self.width = width
        self.block_size = block_size
        self.tick = 0
        self.done = 0
        self.in_flight = 0  #: plans of this lane that are out
        self.count = 0  #: decoding sequences
        self.awaits = -1  #: the latest step whose ids the next tick takes
        self.kv_base = 0  #: sum over them of (known tokens - tick)
        self.bitmap = bytearray((width + 7) >> 3)
        self.grow: list[dict[int, list[int]]] = [{} for _ in range(block_size)]
        self.ends: dict[int, dict[int, Sequence]] = {}
        self.collect: dict[int, dict[int, Sequence]] = {}
        self.owners: dict[int, int] = {}
        # An array gives a column several times faster than a memoryview, which in turn takes a row as it comes.
        self._ring_ids = array("I", bytes(RING_TICKS * width * 4))
        self._ring = memoryview(self._ring_ids).cast("B")

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the next tick's decodes read."""
        return self.kv_base + self.count * self.tick

    def join(self, seq: Sequence, known: int) -> None:
        """Let ``seq``, which has ``known`` tokens (the last perhaps still being sampled), decode from now on."""
        tick, slot = self.tick, seq.slot
        seq.lane = self
        seq.join_tick = seq.column = tick
        seq.join_known = known
        self.bitmap[slot >> 3] |= 1 << (slot & 7)
        self.count += 1
        self.kv_base += known - tick
        self.owners[seq.owner] = self.owners.get(seq.owner, 0) + 1
        if seq.account is not None:
            seq.account.joined(self)
        if len(seq.table) * self.block_size < seq.max_len - 1:
            seq.bucket = (tick - known + 1) % self.block_size
            self.grow[seq.bucket][slot] = seq.table
        else:
            seq.bucket = -1
        end = seq.end_tick = tick + seq.max_len - 1 - known
        due = self.ends.get(end)
        if due is None:
            self.ends[end] = {slot: seq}
        else:
            due[slot] = seq
        if end - tick >= RING_TICKS - RING_MARGIN:
            self.collect.setdefault(tick + RING_TICKS - RING_MARGIN, {})[slot] = seq

    def leave(self, seq: Sequence) -> None:
        """Take ``seq`` out, with all its entries, and collect its tokens up to the last result."""
        slot = seq.slot
        seq.computed = seq.join_known - 1 + self.tick - seq.join_tick
        self.bitmap[slot >> 3] &= ~(1 << (slot & 7))
        self.count -= 1
        self.kv_base -= seq.join_known - seq.join_tick
        if seq.account is not None:
            seq.account.left(self)
        owners = self.owners
        left = owners[seq.owner] - 1
        if left:
            owners[seq.owner] = left
        else:
            del owners[seq.owner]
        if seq.bucket >= 0:
            del self.grow[seq.bucket][slot]
        due = self.ends.get(seq.end_tick)
        if due is not None:
            # At its own end the calendar's page is already gone.
            del due[slot]
            if not due:
                del self.ends[seq.end_tick]
        if self.collect:
            tick = seq.column + RING_TICKS - RING_MARGIN
            due = self.collect.get(tick)
            if due is not None and due.get(slot) is seq:
                del due[slot]
                if not due:
                    del self.collect[tick]
        self.gather(seq)
        seq.lane = None

    def gather(self, seq: Sequence) -> None:
        """Append the sequence's column of the ring, up to the last result, to its tokens."""
        start, stop = seq.column, self.done
        if stop <= start:
            return
        width, ids = self.width, self._ring_ids
        first, last = start % RING_TICKS, stop % RING_TICKS
        if first < last:
            seq.tokens = b"".join((seq.tokens, ids[first * width + seq.slot : last * width : width]))
        else:
            head, tail = ids[first * width + seq.slot :: width], ids[seq.slot : last * width : width]
            seq.tokens = b"".join((seq.tokens, head, tail))
        seq.column = stop

    def gather_due(self) -> None:
        """Collect the columns that the ring is about to overwrite. Called before each tick is planned."""
        due = self.collect.pop(self.tick, None)
        if due is None:
            return
        for slot, seq in due.items():
            self.gather(seq)
            self.collect.setdefault(seq.column + RING_TICKS - RING_MARGIN, {})[slot] = seq

    def store(self, ids: bytes | memoryview) -> None:
        """Keep the ids of the oldest tick without a result, indexed by slot."""
        start = (self.done % RING_TICKS) * self.width * 4
        self._ring[start : start + len(ids)] = ids
        self.done += 1

    def highest_slot(self) -> int:
        """The largest decoding slot; the lane must have one."""
        used = self.bitmap.rstrip(b"\0")
        return (len(used) << 3) - 9 + used[-1].bit_length()
