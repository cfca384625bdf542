"""The decision core in virtual time: the engine that serves, an agenda of events, and modelled devices.

There is no clock: time is that of the next event, in whole microseconds, and two runs of the same load are equal to
the byte. Requests come from an iterator, one ahead, so that memory is bounded by what is unfinished. Nothing is
computed: sampled ids are zeros, and requests end by their length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from msgspec import structs

from ...control.core.engine import Engine
from ...control.core.events import (
    Delivered,
    Due,
    Effect,
    Event,
    Limits,
    Move,
    Moved,
    Rejected,
    ReplicaUp,
    Returned,
    SendPlan,
    Submitted,
    Wake,
)
from ...control.wire import Result, Sample, Submit
from .cost import Cost
from .moving import KvLink
from .record import Record
from .stages import ModelledStages


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of ``prompt`` tokens that outputs ``output`` tokens, ``at`` so many microseconds from the start.

    ``tokens``: the prompt's ids, as u32, None if they do not matter. ``slo``: its class, if there are any.
    ``submit``: what is submitted, but for its key, if it is more than that.
    """

    at: int
    prompt: int
    output: int
    tokens: bytes | None = None
    slo: str = ""
    submit: Submit | None = None


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """One replica: what its iterations cost, its stages, and the blocks of its KV pool. ``profile``: what its workers
    would have measured before they serve."""

    cost: Cost
    stages: int
    blocks: int
    profile: tuple[Sample, ...] = ()


#: Called with each plan and what its stages report.
Watch = Callable[[SendPlan, list[Result]], None]


class World:
    """``limits`` are the core's. ``slots`` of each replica; ``hop_us``: microseconds of every message between the
    control process and a worker, and of ids from the last stage to the first. ``link``: of KV blocks from replicas
    that compute prompts to those that decode."""

    def __init__(
        self,
        limits: Limits,
        replicas: Iterable[ReplicaModel],
        *,
        slots: int = 0,
        hop_us: int = 50,
        watch: Watch | None = None,
        record: Record | None = None,
        link: KvLink | None = None,
    ) -> None:
        self.link = link
        self.engine = Engine(limits)
        self.record = Record() if record is None else record
        self.now = 0
        self.hop_us = hop_us
        self.iterations = 0
        self.watch = watch
        self.stages: list[ModelledStages] = []
        self._agenda: list[tuple[int, int, Event]] = []
        self._count = 0
        self._timer = -1  #: number of the event that the core wants to be woken by
        self._source: Iterator[Arrival] = iter(())
        self._keys = array("Q")  #: of the requests that the core has taken, by the core's number
        self._arrivals = 0
        slots = slots or min(65_000, limits.max_num_seqs * 2 + 64)
        padded = limits.policy == "request-level"
        for index, model in enumerate(replicas):
            self.stages.append(ModelledStages(model.cost, model.stages, slots, hop_us=hop_us, padded=padded))
            self._step(ReplicaUp(index, 1, model.stages, model.blocks, slots, list(model.profile)))

    def feed(self, source: Iterable[Arrival]) -> None:
        """Let requests arrive, in the order of their times."""
        self._source = iter(source)
        self._next_arrival()

    def at(self, when: int, event: Event) -> int:
        """Let ``event`` happen at ``when``; returns its number."""
        self._count += 1
        heappush(self._agenda, (when, self._count, event))
        return self._count

    def run(self, until: int | None = None, stop: Callable[[World], bool] | None = None, every: int = 1024) -> bool:
        """Until nothing is left to happen, or ``until``, or ``stop`` says so, which is asked once in ``every``
        events. Whether it was the first."""
        agenda = self._agenda
        events = 0
        while agenda:
            if until is not None and agenda[0][0] > until:
                self.now = until
                return False
            self.now, number, event = heappop(agenda)
            kind = type(event)
            if kind is Due and number != self._timer:
                continue
            if kind is Submitted:
                self._arrive(event)
            self._step(event)
            events += 1
            if stop is not None and not events % every and stop(self):
                return False
        return True

    def _step(self, event: Event) -> None:
        for effect in self.engine.step(event, self.now / 1e6):
            if type(effect) is SendPlan:
                self._plan(effect)
            elif type(effect) is Delivered:
                self.record.delivered(effect, self.now)
            else:
                self._other(effect)

    def _other(self, effect: Effect) -> None:
        if isinstance(effect, Wake):
            self._timer = self.at(max(self.now, round(effect.at * 1e6)), Due())
        elif isinstance(effect, Rejected):
            self.record.rejected.append(effect)
            self._keys.pop()
        elif isinstance(effect, Move):
            assert self.link is not None, "blocks move, and there is no link"
            self.at(self.link.take(effect, self.now + self.hop_us) + self.hop_us, Moved(effect.move))
        else:
            raise AssertionError(f"the core says of a modelled replica: {effect}")

    def _plan(self, send: SendPlan) -> None:
        self.iterations += 1
        results = self.stages[send.replica].run(send, self.now + self.hop_us)
        if send.registers or send.plan.chunk_slots:
            self.record.planned(send, results[0].started_us, self._keys)
        if self.watch is not None:
            self.watch(send, results)
        last = results[-1]
        self.at(last.ended_us + self.hop_us, Returned(send.replica, last))

    def _next_arrival(self) -> None:
        arrival = next(self._source, None)
        if arrival is None:
            return
        key = self._arrivals
        self._arrivals += 1
        if arrival.submit is not None:
            submit = structs.replace(arrival.submit, key=key)
        else:
            tokens = arrival.tokens
            if tokens is None:
                tokens = own_tokens(key, arrival.prompt)
            submit = Submit(key, f"r{key}", tokens, arrival.prompt, arrival.output, slo=arrival.slo)
        self.at(arrival.at, Submitted(0, submit))

    def _arrive(self, event: Event) -> None:
        assert isinstance(event, Submitted)
        submit = event.submit
        self.record.submitted(submit.key, self.now, submit.prompt_len, submit.max_tokens)
        self._keys.append(submit.key)
        self._next_arrival()


def own_tokens(key: int, length: int) -> bytes:
    """A prompt that shares no block with any other."""
    return array("I", [key + 1]).tobytes() * length
