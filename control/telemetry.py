"""What the control process knows of its own work, beside the core: counts, token times, iteration records. Sans-I/O.

The server reports what it does; ``status`` reads the sums, the events socket gets the records. A record is put
together only while somebody listens (``watched``); the rest is a few additions an iteration.
"""

from __future__ import annotations

from .core.events import Delivered, Rejected, SendPlan, Submitted
from .core.replica import Replica
from .latency import TokenTimes
from .wire import IterationRecord, Result, StageTimes

#: Why requests end.
END_REASONS = ("stop", "length", "abort", "error", "deadline", "queue_timeout")
#: Iterations of a replica that wait for the results of all stages, at most: more are out only if something is wrong.
MAX_OPEN = 1024


class _Draft:
    """The record of an iteration that was sent and has not come back from all stages."""

    __slots__ = ("missing", "record", "stages")

    def __init__(self, record: IterationRecord, stages: int) -> None:
        self.record = record
        self.stages: list[StageTimes | None] = [None] * stages
        self.missing = stages  #: of which nothing is known


class Telemetry:
    """One for the life of a control process."""

    def __init__(self) -> None:
        self.times = TokenTimes()
        self.watched = False  #: somebody listens to records
        self.iterations = {"decode": 0, "prefill": 0, "mixed": 0}
        self.decode_tokens = 0
        self.chunk_tokens = 0
        self.budget_tokens = 0
        self.ended: dict[str, int] = dict.fromkeys(END_REASONS, 0)
        self.refused: dict[str, int] = {}
        self._open: dict[int, dict[tuple[int, int], _Draft]] = {}

    # ---- requests --------------------------------------------------------------------------------------------

    def submitted(self, event: Submitted, now: float) -> None:
        """A request is given to the core, which may yet refuse it (``rejected``)."""
        self.times.submitted(event.owner, event.submit.key, now)

    def rejected(self, effect: Rejected) -> None:
        if effect.field != "key":
            # Else the key is that of a request that runs.
            self.times.forget(effect.owner, effect.key)
        self.count_refusal(effect.code)

    def count_refusal(self, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1

    def delivered(self, effect: Delivered, lane: int, now: float) -> None:
        """Tokens of ``lane`` (any number if there are none) and ends are given out."""
        self.times.delivered(effect, lane, now)
        ended = self.ended
        for end in effect.ends:
            reason = end.reason
            if reason != "paused":
                ended[reason] = ended.get(reason, 0) + 1

    def epoch_over(self, replica: int) -> None:
        """After the core has given out what the replica's loss ends."""
        self.times.epoch_over(replica)
        self._open.pop(replica, None)

    def watch(self, watched: bool) -> None:
        """Whether somebody listens to records from now on."""
        self.watched = watched
        if not watched:
            self._open.clear()

    # ---- iterations ------------------------------------------------------------------------------------------

    def planned(self, send: SendPlan, replica: Replica, now: float, sent: float) -> None:
        """A plan of ``replica``, which the core made at ``now``, was sent at ``sent`` (seconds)."""
        decodes = send.decodes
        chunk_tokens = send.tokens - decodes
        kind = ("mixed" if chunk_tokens else "decode") if decodes else "prefill"
        self.iterations[kind] += 1
        self.decode_tokens += decodes
        self.chunk_tokens += chunk_tokens
        self.budget_tokens += replica.limits.token_budget
        if self.watched:
            self._draft(send, replica, now, sent)

    def _draft(self, send: SendPlan, replica: Replica, now: float, sent: float) -> None:
        plan, pool = send.plan, replica.pool
        drafts = self._open.setdefault(send.replica, {})
        if len(drafts) >= MAX_OPEN:
            drafts.clear()
        tokens, decodes = send.tokens, send.decodes
        record = IterationRecord(
            send.replica,
            plan.epoch,
            plan.step,
            plan.lane,
            int(now * 1e6),
            int(sent * 1e6),
            0,
            [],
            tokens,
            decodes,
            len(plan.chunk_slots) >> 1,
            tokens - decodes,
            replica.limits.token_budget,
            send.kv_tokens,
            len(replica.waiting),
            replica.waiting.tokens,
            len(replica.running),
            pool.held,
            pool.evictable,
            len(pool.free),
            replica.preemptions,
            send.predicted_us,
        )
        drafts[plan.epoch, plan.step] = _Draft(record, replica.stages)

    def returned(self, replica: int, stage: int, result: Result, now: float) -> IterationRecord | None:
        """A stage's result was taken up at ``now``. The record, if it was the last one missing."""
        drafts = self._open.get(replica)
        if drafts is None:
            return None
        draft = drafts.get((result.epoch, result.step))
        if draft is None or stage >= len(draft.stages):
            return None
        stages = draft.stages
        if stages[stage] is None:
            draft.missing -= 1
        stages[stage] = StageTimes(
            result.received_us, result.started_us, result.ended_us, result.idle_us, result.starved_us
        )
        record = draft.record
        if stage == len(stages) - 1:
            record.returned_us = int(now * 1e6)
        if draft.missing:
            return None
        del drafts[result.epoch, result.step]
        record.stages = [times for times in stages if times is not None]
        return record
