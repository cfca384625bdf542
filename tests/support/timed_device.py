"""A device that follows a law of cost, and the real core on it, in virtual time.

No tokens are computed: only when each iteration of each stage begins and ends counts, and what the streams see of it.
Plans are known to depend only on earlier ones, so the times of one follow as soon as it is sent.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from evenflow.control.core.engine import Engine
from evenflow.control.core.events import (
    Delivered,
    Due,
    Event,
    Limits,
    Rejected,
    ReplicaUp,
    Returned,
    SendPlan,
    Submitted,
    Wake,
)
from evenflow.control.core.timing import attention_work
from evenflow.control.wire import Result, Sample, Submit


@dataclass(frozen=True, slots=True)
class Load:
    """What is in an iteration. ``kv_tokens`` are read by its decodes, ``before`` by its chunks, each once."""

    prefill: int
    attention: float
    decodes: int
    kv_tokens: int
    before: int = 0


#: Seconds of an iteration on one stage.
Law = Callable[[Load], float]


@dataclass(slots=True)
class Gap:
    """One token after another of one stream: when, how long after, and the target."""

    at: float
    seconds: float
    target: float


@dataclass(slots=True)
class Iteration:
    """A plan as it ran: at its end on the last stage."""

    plan: SendPlan
    sent: float
    started: float
    ended: float
    #: Seconds for which a stage had nothing to do but to wait for this plan.
    starved: float
    chunks: list[int]


@dataclass(slots=True)
class _Request:
    submitted: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    ended: float = 0.0
    tbt: float = 0.0


@dataclass(slots=True)
class Seen:
    """What came out."""

    gaps: list[Gap] = field(default_factory=list[Gap])
    iterations: list[Iteration] = field(default_factory=list[Iteration])
    requests: dict[int, _Request] = field(default_factory=dict[int, _Request])
    rejected: list[Rejected] = field(default_factory=list[Rejected])

    def held(self, start: float, end: float = 1e9) -> float:
        """The part of the gaps in a time that were inside their target."""
        inside = [gap.seconds <= gap.target for gap in self.gaps if start <= gap.at < end]
        return sum(inside) / len(inside)

    def rate(self, start: float, end: float) -> float:
        """Tokens computed a second."""
        return sum(i.plan.tokens for i in self.iterations if start <= i.ended < end) / (end - start)

    def worst(self, start: float = 0.0, end: float = 1e9) -> float:
        return max((gap.seconds for gap in self.gaps if start <= gap.at < end), default=0.0)


class TimedDevice:
    """``law(stage, now)`` is a stage's law at a time. Everything travels for ``hop`` seconds; timers are up to a
    millisecond late; iterations scatter by ``noise`` of themselves. ``spikes``: the share of iterations that take so
    many times as long, and how many."""

    def __init__(
        self,
        limits: Limits,
        law: Callable[[int, float], Law],
        *,
        stages: int = 1,
        noise: float = 0.0,
        spikes: tuple[float, float] = (0.0, 1.0),
        hop: float = 0.0002,
        blocks: int = 100_000,
        profile: list[Sample] | None = None,
        seed: int = 1,
    ) -> None:
        self.law, self.stages, self.noise, self.spikes, self.hop = law, stages, noise, spikes, hop
        self.engine = Engine(limits)
        self.seen = Seen()
        self.now = 0.0
        self.on_end: Callable[[int], None] = lambda key: None
        self._target = limits.slo
        self._draw = random.Random(seed)
        self._heap: list[tuple[float, int, Event]] = []
        self._count = 0
        self._wake = -1  #: the timer that holds
        self._free = [0.0] * stages
        self._first_free = [0.0] * stages
        self._sampled: dict[int, float] = {}  #: by slot: when its last token is known to the first stage
        self._slots: dict[int, int] = {}
        self._told = 0.0  #: when the newest result comes
        slots = min(65_000, limits.max_num_seqs * 2)
        self._width = slots
        self._step(ReplicaUp(0, 1, stages, blocks, slots, profile or []))

    def submit(self, key: int, prompt: int, output: int, at: float = -1.0, slo: str = "", tbt_ms: int = 0) -> None:
        at = max(at, self.now)
        tokens = array("I", [(key * 7919 + 1) & 0xFFFF, *([7] * (prompt - 1))]).tobytes()
        self._at(at, Submitted(0, Submit(key, f"r{key}", tokens, prompt, output, slo=slo, tbt_ms=tbt_ms)))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, number, event = heappop(self._heap)
            if type(event) is Due and number != self._wake:
                continue
            self._step(event)
        self.now = until

    def _at(self, when: float, event: Event) -> int:
        self._count += 1
        heappush(self._heap, (when, self._count, event))
        return self._count

    def _step(self, event: Event) -> None:
        if type(event) is Submitted:
            request = self.seen.requests[event.submit.key] = _Request(self.now)
            if self._target is not None:
                found = self._target.find(event.submit.slo)
                request.tbt = event.submit.tbt_ms / 1e3 if event.submit.tbt_ms or not found else found.tbt
        for effect in self.engine.step(event, self.now):
            if type(effect) is SendPlan:
                self._execute(effect)
            elif type(effect) is Wake:
                self._wake = self._at(effect.at + self._draw.uniform(0.0, 0.001), Due())
            elif type(effect) is Delivered:
                self._deliver(effect)
            elif type(effect) is Rejected:
                self.seen.rejected.append(effect)
            else:
                raise AssertionError(effect)

    def _execute(self, send: SendPlan) -> None:
        plan = send.plan
        arrival = self.now + self.hop
        slots = _slots(plan.decodes)
        chunk_slots = array("H", plan.chunk_slots)
        chunks = list(array("I", plan.chunk_tokens))
        replica = self.engine.replicas[0]
        attention, before = 0.0, 0
        finals: list[int] = []
        for slot, taken in zip(chunk_slots, chunks, strict=True):
            seq = replica.owners[slot]
            assert seq is not None
            known = len(seq.tokens) >> 2
            computed = seq.computed if seq.lane is None else known
            attention += attention_work(computed - taken, taken)
            before += computed - taken
            if computed == known:
                finals.append(slot)
        features = Load(sum(chunks), attention, send.decodes, send.kv_tokens, before)
        ready = max([arrival, *(self._sampled[slot] for slot in slots)])
        starved = started = end = 0.0
        for stage in range(self.stages):
            free = self._free[stage]
            started = max(ready, free)
            if arrival > free and started == arrival and free > 0.0 and len(replica.inflight) > 0:
                starved = max(starved, arrival - free)
            took = self.law(stage, started)(features)
            if self.noise:
                took *= max(0.5, 1.0 + self._draw.gauss(0.0, self.noise))
            if self.spikes[0] and self._draw.random() < self.spikes[0]:
                took *= self.spikes[1]
            end = self._free[stage] = started + took
            ready = end + self.hop
        for slot in [*slots, *finals]:
            self._sampled[slot] = ready
        self.seen.iterations.append(Iteration(send, self.now, started, end, starved, chunks))
        result = Result(
            epoch=plan.epoch,
            step=plan.step,
            lane=plan.lane,
            received_us=int(arrival * 1e6),
            started_us=int(started * 1e6),
            ended_us=int(end * 1e6),
            idle_us=0,
            starved_us=int(starved * 1e6),
            ids=bytes(4 * self._width),
        )
        # Results do not pass each other on their way, also when that becomes shorter.
        self._told = max(self._told, ready)
        self._at(self._told, Returned(0, result))

    def _deliver(self, told: Delivered) -> None:
        for slot, seq in told.starts:
            self._slots[slot] = seq.key
        requests = self.seen.requests
        for slot in _slots(bytes(told.live)):
            request = requests[self._slots[slot]]
            request.tokens += 1
            if request.last:
                self.seen.gaps.append(Gap(self.now, self.now - request.last, request.tbt))
            else:
                request.first = self.now
            request.last = self.now
        for ended in told.ends:
            if ended.slot >= 0:
                self._slots.pop(ended.slot, None)
            if ended.reason != "paused":
                requests[ended.seq.key].ended = self.now
                self.on_end(ended.seq.key)


def _slots(bitmap: bytes) -> list[int]:
    value = int.from_bytes(bitmap, "little")
    return [i for i, bit in enumerate(reversed(bin(value)[2:])) if bit == "1"] if value else []


def profile_of(law: Law) -> list[Sample]:
    """What a worker with that law measures while it warms up: chunks and batches of decodes, as far as they are quick
    (see ``dataplane.profile``)."""
    shapes = [
        (0, 16, 0),
        (0, 64, 0),
        (0, 256, 0),
        (0, 1024, 0),
        (2048, 64, 0),
        (32, 0, 1),
        (32, 0, 16),
        (2048, 0, 16),
    ]
    samples: list[Sample] = []
    for context, taken, decodes in shapes:
        work = attention_work(context, taken) if taken else 0.0
        before = context if taken else 0
        took = law(Load(taken, work, decodes, decodes * context, before))
        if took < 0.25:
            samples.append(Sample(taken, int(work), decodes, decodes * context, int(took * 1e6)))
    return samples


def keep_busy(device: TimedDevice, clients: int, *, prompts: tuple[int, int], outputs: tuple[int, int]) -> None:
    """A closed loop: each client sends its next request when the one before has ended."""
    draw = random.Random(3)
    keys = iter(range(10**9))

    def send(_: int = 0) -> None:
        device.submit(next(keys), draw.randrange(*prompts), draw.randrange(*outputs))

    device.on_end = send
    for _ in range(clients):
        send()
