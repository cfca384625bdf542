"""When the stages of a modelled replica run its plans: whole microseconds of virtual time.

An iteration starts on a stage when the stage is free, the plan has come, and the hidden states have, or on the first
stage the ids that its decodes take. A plan depends only on earlier ones, so all its times are known when it is sent.
"""

from __future__ import annotations

from array import array

from ...control.core.events import SendPlan
from ...control.wire import Result
from .cost import Chunk, Cost, Work

#: Steps for which it is remembered when their ids were known.
_KEPT = 64


class ModelledStages:
    """The stages of one replica in one epoch. ``hop_us``: of every message between two processes.

    ``slots``: sequences that the replica has room for. ``padded``: batches are those of requests (FasterTransformer):
    prompts are padded to the longest of the batch, and who has ended goes on costing until all have.
    """

    def __init__(self, cost: Cost, stages: int, slots: int, *, hop_us: int = 0, padded: bool = False) -> None:
        self.cost = cost
        self.stages = stages
        self.hop_us = hop_us
        self.busy_us = [0] * stages
        self._ended = [0] * stages
        self._ids = bytes(4 * slots)
        self._sampled: dict[int, int] = {}  #: by step: when its ids are at the first stage
        # Of each slot's sequence: tokens known and computed, as far as they are chunks.
        self._known = [0] * slots
        self._computed = [0] * slots
        self._last: set[int] = set()  #: slots of which all but the last known token was computed elsewhere
        self._padding = [_Padding() for _ in range(stages)] if padded else None

    def run(self, send: SendPlan, received: int) -> list[Result]:
        """The iteration of a plan that comes to all stages at ``received``: by stage what it reports. The last one's
        report has ids (zeros, since nothing is computed)."""
        work = self._work(send)
        plan = send.plan
        ready = self._sampled.get(send.awaits, 0) if send.awaits >= 0 else 0
        if received > ready:
            ready = received
        results: list[Result] = []
        last = self.stages - 1
        cost, ended = self.cost, self._ended
        epoch, step, lane = plan.epoch, plan.step, plan.lane
        end = 0
        for stage in range(self.stages):
            free = ended[stage]
            start = ready if ready > free else free
            took = cost.stage_us(stage, work)
            end = ended[stage] = start + took
            self.busy_us[stage] += took
            starved = received - free
            if starved > start - free:
                starved = start - free
            ids = self._ids if stage == last else b""
            results.append(
                Result(epoch, step, lane, received, start, end, start - free, starved if starved > 0 else 0, ids)
            )
            if stage != last:
                ready = end + cost.transfer_us(work.tokens)
        sampled = self._sampled
        sampled[step] = end + self.hop_us if last else end
        sampled.pop(step - _KEPT, None)
        return results

    def _work(self, send: SendPlan) -> Work:
        plan = send.plan
        for register in send.registers:
            slot = register.slot
            self._known[slot] = len(register.tokens) >> 2
            self._computed[slot] = register.computed
            if register.computed and register.computed == self._known[slot] - 1:
                self._last.add(slot)
            else:
                self._last.discard(slot)
        decodes, kv_tokens = send.decodes, send.kv_tokens
        chunks: list[Chunk] = []
        sampled = send.decodes
        if plan.chunk_slots:
            known, computed = self._known, self._computed
            for slot, taken in zip(array("H", plan.chunk_slots), array("I", plan.chunk_tokens), strict=True):
                before = computed[slot]
                computed[slot] = before + taken
                if slot in self._last:
                    # Nothing but its last token was to be computed: kernels do that as for a decode.
                    self._last.remove(slot)
                    decodes += 1
                    kv_tokens += before + 1
                    sampled += 1
                    continue
                chunks.append((taken, before))
                if before + taken == known[slot]:
                    sampled += 1
        work = Work(send.tokens, decodes, kv_tokens, chunks, sampled, send.attention)
        if self._padding is not None:
            self._padding[plan.lane].pad(work)
        return work


class _Padding:
    """The batch of requests that a lane runs: what its padding costs."""

    def __init__(self) -> None:
        self._rows = 0
        self._longest = 0  #: of its prompts
        self._ticks = 0  #: iterations of decodes since it began

    def pad(self, work: Work) -> None:
        """Enlarge ``work`` by the padding and by the rows that have ended."""
        if work.chunks:
            if self._ticks:
                self._rows = self._longest = self._ticks = 0
            self._rows += len(work.chunks)
            self._longest = max(self._longest, *(before + taken for taken, before in work.chunks))
            longest = self._longest
            work.chunks = [(longest, 0)] * len(work.chunks)
            work.tokens = longest * len(work.chunks)
            return
        self._ticks += 1
        work.decodes = work.tokens = work.sampled = self._rows
        work.kv_tokens = self._rows * (self._longest + self._ticks)
