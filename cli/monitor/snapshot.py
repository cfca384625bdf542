"""What the monitor shows, as data: one ``Snapshot`` a refresh, made of a status reply and the newest records.

``--json`` prints it as it is; ``panels`` draws it. Times are seconds unless the name says otherwise.
"""

from __future__ import annotations

import re
from collections import deque

from msgspec import Struct

from ...control.status import QUANTILES, figure
from ...control.wire import IterationRecord, StatusReply

#: Iterations that a snapshot keeps, newest first.
KEPT_ITERATIONS = 40
#: Refreshes that the small histories keep.
KEPT_HISTORY = 60
#: Rates are over at least this long.
RATE_SECONDS = 3.0

_STAGE = re.compile(r'stage_busy_seconds_total\{replica="(\d+)",stage="(\d+)"\}\Z')


class Iteration(Struct, frozen=True):
    """One iteration. ``milliseconds`` is from its first stage's start to the last one's end, None across clocks."""

    replica: int
    step: int
    lane: int
    decodes: int
    chunks: int
    chunk_tokens: int
    budget: int
    milliseconds: float | None


class Stage(Struct, frozen=True):
    """The share of the time in which a stage computed, in which its plan was late, and in which it waited for a batch
    unlike the one before it (the three pipeline bubbles together); 0 to 1. In the rest there was nothing to do."""

    replica: int
    stage: int
    busy: float
    late: float
    bubble: float = 0.0


class Running(Struct, frozen=True):
    """An unfinished request; see ``RequestRow``."""

    request: str
    replica: int | None
    phase: str
    prompt: int
    computed: int
    cached: int
    output: int
    limit: int
    age: float


class Snapshot(Struct, frozen=True, kw_only=True):
    """``state``: ``ready``, ``not ready``, ``draining``, or ``lost`` (no answer: the figures are the last known).

    Percentiles are P50, P90, P99 of the server's last 30 seconds, empty if there were no values. Rates are per second
    since ``RATE_SECONDS`` ago, None before there is a past.
    """

    time: float
    server: str
    model: str = ""
    state: str = "lost"
    replicas: list[str] = []
    ttft: list[float] = []
    tbt: list[float] = []
    output_rate: float | None = None
    prompt_rate: float | None = None
    iteration_rate: float | None = None
    running: int = 0
    running_limit: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    refused: int = 0
    preemptions: int = 0
    epochs_lost: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    cache_hits: float | None = None
    stages: list[Stage] = []
    iterations: list[Iteration] = []
    requests: list[Running] = []
    output_history: list[float] = []
    waiting_history: list[int] = []


class Tracker:
    """Makes snapshots of one server, and remembers what rates and histories need."""

    def __init__(self, server: str) -> None:
        self.last = Snapshot(time=0.0, server=server)
        self._server = server
        self._past: deque[tuple[float, dict[str, float]]] = deque()
        self._instance = 0
        self._iterations: deque[Iteration] = deque(maxlen=KEPT_ITERATIONS)
        self._output: deque[float] = deque(maxlen=KEPT_HISTORY)
        self._waiting: deque[int] = deque(maxlen=KEPT_HISTORY)

    def lost(self, time: float) -> Snapshot:
        """No answer came."""
        fields = {name: getattr(self.last, name) for name in Snapshot.__struct_fields__}
        self.last = Snapshot(**{**fields, "time": time, "state": "lost"})
        return self.last

    def take(self, reply: StatusReply, records: list[IterationRecord], time: float, now: float) -> Snapshot:
        """A reply that came at ``now`` (monotonic; ``time`` is the wall clock), and records since the one before."""
        if reply.instance != self._instance:
            self._instance = reply.instance
            self._past.clear()
            self._iterations.clear()
        for record in records:
            self._iterations.appendleft(_iteration(record))
        values = reply.values
        self._past.append((now, values))
        while len(self._past) > 2 and now - self._past[1][0] >= RATE_SECONDS:
            self._past.popleft()
        before_at, before = self._past[0]
        seconds = now - before_at

        def rate(name: str) -> float | None:
            return (values.get(name, 0.0) - before.get(name, 0.0)) / seconds if seconds > 0 else None

        def whole(name: str) -> int:
            return int(values.get(name, 0.0))

        output = rate("tokens_given_out_total")
        if output is not None:
            self._output.append(round(output, 1))
        self._waiting.append(whole("num_requests_waiting"))
        queries = values.get("prefix_cache_queries_total", 0.0)
        self.last = Snapshot(
            time=time,
            server=self._server,
            model=reply.model,
            state="draining" if reply.draining else "ready" if reply.ready else "not ready",
            replicas=list(reply.replicas),
            ttft=_percentiles(values, "recent_ttft_seconds"),
            tbt=_percentiles(values, "recent_tbt_seconds"),
            output_rate=output,
            prompt_rate=rate("iteration_prefill_tokens_total"),
            iteration_rate=rate("iterations_total"),
            running=whole("num_requests_running"),
            running_limit=whole("max_num_seqs"),
            waiting=whole("num_requests_waiting"),
            waiting_tokens=whole("num_tokens_waiting"),
            refused=int(sum(value for name, value in values.items() if name.startswith("requests_refused_total"))),
            preemptions=whole("num_preemptions_total"),
            epochs_lost=whole("epochs_lost_total"),
            blocks_used=whole("kv_blocks_used"),
            blocks_cached=whole("kv_blocks_cached"),
            blocks_free=whole("kv_blocks_free"),
            cache_hits=values.get("prefix_cache_hits_total", 0.0) / queries if queries else None,
            stages=_stages(values, before, seconds),
            iterations=list(self._iterations),
            requests=[
                Running(
                    row.request,
                    row.replica,
                    row.phase,
                    row.prompt,
                    row.computed,
                    row.cached,
                    row.output,
                    row.limit,
                    row.age_ms / 1000,
                )
                for row in reply.requests
            ],
            output_history=list(self._output),
            waiting_history=list(self._waiting),
        )
        return self.last


def _iteration(record: IterationRecord) -> Iteration:
    milliseconds = None
    if record.stages:
        took = record.stages[-1].ended_us - record.stages[0].started_us
        # Stages on several machines have several clocks: what lies outside control's own times is none.
        if 0 <= took <= record.returned_us - record.planned_us:
            milliseconds = took / 1000
    return Iteration(
        record.replica,
        record.step,
        record.lane,
        record.decodes,
        record.chunks,
        record.chunk_tokens,
        record.budget,
        milliseconds,
    )


def _percentiles(values: dict[str, float], name: str) -> list[float]:
    found = [values.get(figure(name, quantile=f"{share:g}")) for share in QUANTILES]
    return [value for value in found if value is not None]


def _stages(values: dict[str, float], before: dict[str, float], seconds: float) -> list[Stage]:
    if seconds <= 0:
        return []
    stages: list[Stage] = []
    for name in values:
        if found := _STAGE.match(name):
            place = {"replica": int(found[1]), "stage": int(found[2])}

            def share(*names: str) -> float:
                grown = sum(values.get(key, 0.0) - before.get(key, 0.0) for key in names)
                return round(min(1.0, max(0.0, grown / seconds)), 4)

            late, *bubbles = (
                figure("stage_bubble_seconds_total", **place, cause=cause)
                for cause in ("plan_late", "pb1", "pb2", "pb3")
            )
            stages.append(Stage(**place, busy=share(name), late=share(late), bubble=share(*bubbles)))
    return sorted(stages, key=lambda stage: (stage.replica, stage.stage))
