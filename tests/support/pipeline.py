"""A replica's pipeline in virtual time without workers: the real core, made-up ids, and a cost law.

An iteration starts on a stage when the stage is free, the plan has come, and the hidden states, or on the first stage
the ids of all decode rows, have come. So all its times are known when its plan is made. They are whole microseconds.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from evenflow.control.bubbles import BubbleAccount
from evenflow.control.core.engine import Engine
from evenflow.control.core.events import Delivered, Event, Limits, ReplicaUp, Returned, SendPlan, Submitted
from evenflow.control.core.integrity import check_integrity
from evenflow.control.core.packing import bits
from evenflow.control.wire import Result, Submit
from msgspec.structs import replace


@dataclass(frozen=True, slots=True)
class Law:
    """Microseconds of an iteration on one stage. ``least``: what it takes to read the weights, whatever the batch."""

    constant: float = 200.0
    token: float = 10.0
    pair: float = 0.001
    kv_token: float = 0.01
    least: float = 0.0

    def cost(self, send: SendPlan) -> int:
        linear = self.token * send.tokens
        memory = self.pair * send.attention + self.kv_token * send.kv_tokens
        return max(1, round(self.constant + max(self.least, linear) + memory))


@dataclass(slots=True)
class Ran:
    """One iteration: its plan and, by stage, what the stage reports."""

    send: SendPlan
    results: list[Result] = field(default_factory=list[Result])


class Timeline:
    """When each stage runs each plan."""

    def __init__(self, stages: int, cost: Callable[[int, SendPlan], int], delay: int = 0) -> None:
        """``cost``: microseconds by stage and plan; ``delay``: of hidden states and ids on their way."""
        self.stages, self.cost, self.delay = stages, cost, delay
        self.ended = [0] * stages
        self.ran: list[Ran] = []
        #: By slot: when its newest id is at the first stage.
        self._ids: dict[int, int] = {}

    def run(self, send: SendPlan, received: int) -> Ran:
        """The iteration of a plan that comes to all stages at ``received``."""
        plan = send.plan
        slots = bits(plan.decodes)
        ready = max((self._ids[slot] for slot in slots), default=0)
        ran = Ran(send)
        for stage in range(self.stages):
            free = self.ended[stage]
            start = max(free, received, ready)
            end = start + self.cost(stage, send)
            starved = min(start - free, max(0, received - free))
            ran.results.append(Result(plan.epoch, plan.step, plan.lane, received, start, end, start - free, starved))
            self.ended[stage] = end
            ready = end + self.delay
        # A chunk that does not sample gives no id; its slot decodes only after one that does.
        for slot in [*slots, *array("H", plan.chunk_slots)]:
            self._ids[slot] = ready
        self.ran.append(ran)
        return ran


@dataclass(slots=True)
class Request:
    arrived: int
    prompt: int
    output: int
    #: When its tokens came to the control process.
    tokens: list[int] = field(default_factory=list[int])


class Pipeline:
    """One replica that serves ``requests``."""

    def __init__(
        self,
        limits: Limits,
        stages: int,
        law: Law,
        *,
        blocks: int = 1 << 16,
        slots: int = 0,
        delay: int = 50,
        speed: Callable[[int], float] = lambda stage: 1.0,
        check: bool = False,
    ) -> None:
        """``delay``: microseconds of every message. ``speed``: of a stage, as a factor on its times."""
        self.engine = Engine(limits)
        self.stages, self.delay, self.check = stages, delay, check
        self.timeline = Timeline(stages, lambda stage, send: round(law.cost(send) * speed(stage)), delay)
        self.bubbles = BubbleAccount(stages)
        self.requests: list[Request] = []
        self.now = 0
        self.watch: Callable[[], None] = lambda: None  #: called after each step of the core
        self._slots = slots or limits.max_num_seqs + 64
        self._ids = bytes(4 * self._slots)
        self._owners: dict[int, int] = {}
        self._events: list[tuple[int, int, Event]] = []
        self._count = 0
        self._step(ReplicaUp(0, 1, stages, blocks, self._slots))

    def submit(self, at: int, prompt: int, output: int) -> Request:
        """A request that arrives at ``at``."""
        key = len(self.requests)
        request = Request(at, prompt, output)
        self.requests.append(request)
        tokens = array("I", [key % 50_000 + 1]) * prompt
        submit = Submit(key, f"r{key}", tokens.tobytes(), prompt, output)
        self._at(at, Submitted(0, submit))
        return request

    def run(self, until: int | None = None) -> None:
        """Until nothing is left to happen, or at ``until``."""
        while self._events and (until is None or self._events[0][0] <= until):
            self.now, _, event = heappop(self._events)
            self._step(event)
        if until is not None:
            self.now = max(self.now, until)

    def _at(self, when: int, event: Event) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, event))

    def _step(self, event: Event) -> None:
        for effect in self.engine.step(event, self.now / 1e6):
            if isinstance(effect, SendPlan):
                self._plan(effect)
            elif isinstance(effect, Delivered):
                self._deliver(effect)
        if self.check:
            check_integrity(self.engine)
        self.watch()

    def _plan(self, send: SendPlan) -> None:
        self.bubbles.planned(send)
        ran = self.timeline.run(send, self.now + self.delay)
        for stage, result in enumerate(ran.results):
            self.bubbles.returned(stage, result)
        last = ran.results[-1]
        result = replace(last, ids=self._ids)
        self._at(last.ended_us + self.delay, Returned(0, result))

    def _deliver(self, delivered: Delivered) -> None:
        for slot, seq in delivered.starts:
            self._owners[slot] = seq.key
        for slot in bits(bytes(delivered.live)):
            self.requests[self._owners[slot]].tokens.append(self.now)

    # ---- what came out

    def idle_share(self, start: int, end: int) -> float:
        """The part of the time from ``start`` to ``end`` in which stages were idle, over all stages."""
        busy = 0
        for ran in self.timeline.ran:
            for result in ran.results:
                busy += max(0, min(result.ended_us, end) - max(result.started_us, start))
        return 1 - busy / (self.stages * (end - start))

    def idle_us(self) -> list[int]:
        """By stage: idle time between its iterations."""
        return [sum(ran.results[stage].idle_us for ran in self.timeline.ran[1:]) for stage in range(self.stages)]
