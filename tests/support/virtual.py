"""A replica's pipeline in virtual time: the real core and executors, an event heap instead of a clock.

Each stage runs its plans in order; an iteration starts when its inputs are there and the stage is free, and takes
planned seconds. Hidden states, sampled ids and results travel for ``delay`` seconds. Nothing sleeps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from evenflow.control.core.events import Returned
from inprocess import InProcess


@dataclass(frozen=True, slots=True)
class Run:
    """One iteration on one stage."""

    stage: int
    step: int
    started: float
    ended: float


class VirtualPipeline:
    """Drives the first replica of ``server``. Submit before or between calls of ``run``."""

    def __init__(self, server: InProcess, seconds: Callable[[int, int], float], delay: float = 0.0005) -> None:
        self.server = server
        self.seconds = seconds  #: of an iteration, by stage and its tokens
        self.delay = delay
        self.now = 0.0
        self.runs: list[Run] = []
        #: After each event: its time, plans that are out, unfinished requests.
        self.history: list[tuple[float, int, int]] = []
        self._free_at = [0.0] * server.stages
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._next_step = [0] * server.stages
        #: When the hidden states of (stage, step) arrive; until then the stage may not start.
        self._arrives: dict[tuple[int, int], float] = {}

    def run(self) -> None:
        """Until nothing is left to happen."""
        self._start_stages()
        while self._events:
            self.now, _, happen = heappop(self._events)
            happen()
            self._start_stages()
            engine = self.server.engine
            (replica,) = engine.replicas.values()
            self.history.append((self.now, len(replica.inflight), sum(map(len, engine.requests.values()))))

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, happen))

    def _start_stages(self) -> None:
        loopback = self.server.replicas[0]
        for stage in range(self.server.stages):
            step = self._next_step[stage]
            ready = self._arrives.get((stage, step), 0.0)
            if self._free_at[stage] > self.now or ready > self.now or not loopback.can_run(stage):
                continue
            tokens = self.server.plans[step].tokens
            end = self.now + self.seconds(stage, tokens)
            # Computed at once; what it gives becomes visible at its end.
            held = len(loopback._ids)
            self.server._run_stage(0, stage)
            self.runs.append(Run(stage, step, self.now, end))
            self._next_step[stage] += 1
            self._free_at[stage] = end
            if stage + 1 < self.server.stages:
                self._arrives[stage + 1, step] = end + self.delay
                self._at(end + self.delay, lambda: None)
            else:
                if len(loopback._ids) > held:
                    self._at(end + self.delay, self._deliver)
                self._at(end + self.delay, self._return)
            self._at(end, lambda: None)

    def _deliver(self) -> None:
        self.server.replicas[0].deliver_ids()

    def _return(self) -> None:
        result = self.server.results[0].popleft()
        self.server.step(Returned(0, result))

    def busy_share(self, stage: int, start: float, end: float) -> float:
        """The part of the time from ``start`` to ``end`` in which the stage was computing."""
        busy = sum(max(0.0, min(r.ended, end) - max(r.started, start)) for r in self.runs if r.stage == stage)
        return busy / (end - start)
