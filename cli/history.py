"""What a journal tells of its requests and of its device: replayed once, on the core, with the times that were."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, cast

from msgspec import structs

from ..control.core.events import Delivered, Effect, Limits, Rejected, SendPlan
from ..control.core.sequence import Sequence
from ..control.journal.records import Answered, Came, Up
from ..control.journal.replay import Journal, Replayed, Step, replay
from ..control.wire import Result, Sample, Submit
from ..dataplane.simulated.figures import Figures, summarise
from ..dataplane.simulated.fitted import FittedCost, Measured, Residuals, fit, residuals
from ..dataplane.simulated.record import Record
from ..dataplane.simulated.world import Arrival

#: Clocks that are further apart are those of different machines.
_SAME_CLOCK_US = 1_000_000


@dataclass(slots=True)
class _Named:
    """A request by its number here, as ``Record`` wants it."""

    key: int


@dataclass(slots=True)
class _Request:
    at: int
    submit: Submit
    output: int = 0  #: tokens that it was given in all
    began: int = 0  #: those of them that it had when it came


@dataclass(slots=True)
class Shape:
    """The first replica as it came up, and how many there were."""

    stages: int = 1
    blocks: int = 1
    slots: int = 1
    replicas: set[int] = field(default_factory=set[int])
    profile: tuple[Sample, ...] = ()


@dataclass(slots=True)
class History:
    """``arrivals``: with as many output tokens as each had. ``figures``: what really was; ``preemptions`` too."""

    limits: Limits
    shape: Shape
    arrivals: list[Arrival]
    figures: Figures
    preemptions: int
    refused: int
    unfinished: int
    cost: FittedCost
    residuals: Residuals
    hop_us: int
    replayed: Replayed
    iterations: int


class _Collector:
    def __init__(self, journal: Journal) -> None:
        self.engine = journal.engine
        self.record = Record()
        self.requests: list[_Request] = []
        self.shape = Shape()
        self.refused = 0
        self.iterations = 0
        self.preemptions = 0
        self.measured: list[Measured] = []
        self.hops: list[float] = []
        self.gaps: list[float] = []
        self.start: float | None = None
        self.numbers: dict[Sequence, int] = {}
        self.orders: dict[int, int] = {}
        self._plans: dict[tuple[int, int, int], tuple[SendPlan, float]] = {}

    def watch(self, step: Step, effects: list[Effect]) -> None:
        event = step.event
        if self.start is None:
            self.start = event.now
            self._inherit()
        now = round((event.now - self.start) * 1e6)
        if isinstance(event, Up):
            self._up(event.replica, event.stages, event.num_blocks, event.num_slots, event.profile)
        elif isinstance(event, Came):
            seq = self.engine.requests.get(event.owner, {}).get(event.submit.key)
            if seq is not None and seq not in self.numbers:
                self._came(seq, event.submit, event.owner, now)
        elif isinstance(event, Answered):
            self._answered(event)
        for effect in effects:
            if type(effect) is SendPlan:
                self.iterations += 1
                self._plans[effect.replica, effect.plan.epoch, effect.plan.step] = effect, event.now
            elif type(effect) is Delivered:
                self._delivered(effect, now)
            elif isinstance(effect, Rejected):
                self.refused += 1

    def _inherit(self) -> None:
        """The journal begins in the middle: what is unfinished there arrives at its start."""
        for replica in self.engine.replicas.values():
            pool = replica.pool
            self._up(replica.index, replica.stages, pool.num_blocks, len(replica.owners), [])
        found = [seq for owned in self.engine.requests.values() for seq in owned.values()]
        for seq in sorted(found, key=lambda seq: seq.order):
            tokens = seq.tokens + bytes(4 * (seq.received - seq.known))
            submit = Submit(
                seq.key,
                seq.request,
                tokens,
                seq.prompt_len,
                seq.max_len - seq.prompt_len,
                seq.sampling,
                salt=seq.salt,
            )
            self._came(seq, submit, seq.owner, 0)

    def _up(self, replica: int, stages: int, blocks: int, slots: int, profile: list[Sample]) -> None:
        if not self.shape.replicas:
            self.shape = Shape(stages, blocks, slots, set(), tuple(profile))
        self.shape.replicas.add(replica)

    def _came(self, seq: Sequence, submit: Submit, owner: int, now: int) -> None:
        number = len(self.requests)
        self.numbers[seq] = self.orders[seq.order] = number
        began = (len(submit.tokens) >> 2) - submit.prompt_len
        leader = submit.leader
        if leader is not None:
            # By its number here, or nobody's: who led has ended.
            led = self.engine.requests.get(owner, {}).get(leader)
            leader = None if led is None else self.numbers.get(led)
        tenant = submit.tenant or f"client {owner}"
        self.requests.append(_Request(now, structs.replace(submit, leader=leader, tenant=tenant), began, began))
        self.record.submitted(number, now, submit.prompt_len, submit.max_tokens)

    def _answered(self, event: Answered) -> None:
        result: Result = event.result
        found = self._plans.pop((event.replica, result.epoch, result.step), None)
        if found is None or result.ended_us <= result.started_us or self.start is None:
            return
        send, planned = found
        took = result.ended_us - result.started_us
        chunks = send.tokens - send.decodes
        self.measured.append(Measured(chunks, send.attention, send.decodes, send.kv_tokens, took))
        back = event.now * 1e6 - result.ended_us
        begun = event.now * 1e6 - took
        if 0 <= back < _SAME_CLOCK_US:
            self.hops.append(back)
            begun = result.started_us
        self.record.planned(send, round(begun - self.start * 1e6), cast(Any, self.orders))
        there = result.received_us - planned * 1e6
        if 0 <= there < _SAME_CLOCK_US:
            self.hops.append(there)
        if result.idle_us and not result.starved_us and result.received_us <= result.started_us - result.idle_us:
            self.gaps.append(result.idle_us)

    def _delivered(self, told: Delivered, now: int) -> None:
        numbers = self.numbers
        starts = [(slot, _Named(numbers[seq])) for slot, seq in told.starts if seq in numbers]
        ends: list[Any] = []
        for ended in told.ends:
            number = numbers.get(ended.seq)
            if number is None:
                continue
            ends.append(structs.replace(ended, seq=cast(Any, _Named(number))))
            if ended.reason != "paused":
                self.requests[number].output = ended.seq.known - ended.seq.prompt_len
                del numbers[ended.seq]
        self.record.delivered(
            Delivered(told.replica, told.step, told.live, told.ids, told.sole, cast(Any, starts), ends), now
        )


def read_history(journal: Journal) -> History:
    """Raises ``JournalError``, and ``ValueError`` with a sentence if there is nothing to learn from."""
    collector = _Collector(journal)
    preempted = sum(r.preemptions for r in journal.engine.replicas.values()) + journal.engine.counters["preemptions"]
    replayed = replay(journal, collector.watch)
    engine = journal.engine
    if not collector.measured:
        raise ValueError("the journal holds no iteration whose time could be learned")
    unfinished = 0
    for seq, number in collector.numbers.items():
        # Cut off by the journal's end: it counts with what it had.
        collector.requests[number].output = seq.received - seq.prompt_len
        unfinished += 1
    hop = statistics.median(collector.hops) if collector.hops else 200.0
    gap = statistics.median(collector.gaps) if collector.gaps else 0.0
    cost = fit(collector.measured, gap, round(hop))
    arrivals = [_arrival(request) for request in collector.requests]
    total = sum(r.preemptions for r in engine.replicas.values()) + engine.counters["preemptions"]
    return History(
        journal.limits,
        collector.shape,
        arrivals,
        summarise(collector.record),
        total - preempted,
        collector.refused,
        unfinished,
        cost,
        residuals(cost, collector.measured),
        round(hop),
        replayed,
        collector.iterations,
    )


def _arrival(request: _Request) -> Arrival:
    submit = request.submit
    output = max(request.output, request.began + 1, 1)
    return Arrival(request.at, submit.prompt_len, output, submit=structs.replace(submit, max_tokens=output))
