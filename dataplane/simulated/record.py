"""What the requests of a simulation saw: times of first tokens, gaps between tokens, delays. Exact, in microseconds.

Gaps are kept as (gap, how many) and found by sets of slots: those whose newest token came at the same time are one
bitmap, so an iteration costs a few operations on integers, however many sequences run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...control.core.events import Delivered, Rejected, SendPlan


class Record:
    """Indexed by a request's key, which counts from 0. Times are microseconds from the start, -1 for never."""

    def __init__(self) -> None:
        self.arrived = array("q")
        self.prompts = array("I")
        self.outputs = array("I")
        #: Start of the iteration with a request's first chunk; when its first and its last token came.
        self.scheduled = array("q")
        self.first = array("q")
        self.ended = array("q")
        #: Times between two tokens of a request, and how many of each.
        self.gaps = array("q")
        self.counts = array("I")
        self.limit = 0  #: gaps longer than this are counted, if it is not 0
        self.over = 0  #: those
        self.tokens = 0  #: given out
        self.finished = 0
        self.rejected: list[Rejected] = []
        self.now = 0  #: the time of what was recorded last
        self._groups: dict[int, dict[int, int]] = {}  #: by replica and time of the newest token: bitmap of slots
        self._paused: dict[int, int] = {}  #: by key: when its newest token came
        self._fresh: dict[tuple[int, int], int] = {}  #: by replica and slot: key of who has had no chunk yet

    def submitted(self, key: int, now: int, prompt: int, output: int) -> None:
        """A request arrives. Keys come in ascending order, without gaps."""
        if key != len(self.arrived):
            raise ValueError(f"request {key} comes after {len(self.arrived)} others: keys count from 0")
        self.arrived.append(now)
        self.prompts.append(prompt)
        self.outputs.append(output)
        for column in (self.scheduled, self.first, self.ended):
            column.append(-1)

    def planned(self, send: SendPlan, start: int, keys: Sequence[int]) -> None:
        """A plan with new sequences or chunks of such; it starts at ``start``. ``keys``: by the core's number
        of a request."""
        fresh, replica = self._fresh, send.replica
        for register in send.registers:
            key = keys[register.request]
            if self.scheduled[key] < 0:
                fresh[replica, register.slot] = key
        if fresh:
            for slot in array("H", send.plan.chunk_slots):
                key = fresh.pop((replica, slot), -1)
                if key >= 0:
                    self.scheduled[key] = start

    def delivered(self, told: Delivered, now: int) -> None:
        """Tokens and ends of one iteration."""
        self.now = now
        groups = self._groups.get(told.replica)
        if groups is None:
            groups = self._groups[told.replica] = {}
        live = int.from_bytes(told.live, "little")
        if live:
            self.tokens += live.bit_count()
            left = live
            for slot, seq in told.starts:
                left &= ~(1 << slot)
                key = seq.key
                paused = self._paused.pop(key, None) if self._paused else None
                if paused is not None:
                    self._gap(now - paused, 1)
                elif self.first[key] < 0:
                    self.first[key] = now
            for at in list(groups):
                group = groups[at]
                found = group & left
                if found:
                    self._gap(now - at, found.bit_count())
                    left ^= found
                    if found == group:
                        del groups[at]
                    else:
                        groups[at] = group ^ found
            groups[now] = groups.get(now, 0) | live
        for ended in told.ends:
            slot, seq = ended.slot, ended.seq
            last = -1
            if slot >= 0:
                bit = 1 << slot
                for at in list(groups):
                    group = groups[at]
                    if group & bit:
                        last = at
                        if group == bit:
                            del groups[at]
                        else:
                            groups[at] = group ^ bit
            if ended.reason == "paused":
                if last >= 0 and self.first[seq.key] >= 0:
                    self._paused[seq.key] = last
            else:
                self._paused.pop(seq.key, None)
                self.ended[seq.key] = now
                self.finished += 1

    def _gap(self, gap: int, count: int) -> None:
        self.gaps.append(gap)
        self.counts.append(count)
        if gap > self.limit > 0:
            self.over += count
