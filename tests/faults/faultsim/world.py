"""One run: a scenario's server, clients and faults on one clock, with everything checked."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import structlog
from evenflow.control.options import ControlOptions

from . import checks
from .clients import Ask, Asked, Client, Violation
from .clock import Clock
from .control import Control
from .network import Network
from .scenario import Cut, Fault, Scenario, draw
from .workers import Host, Launcher, Worker

#: Once faults have stopped, a token must come or something must end within so many seconds of virtual time.
LIVENESS_S = 400.0
#: Why a worker may refuse a plan after a loss. Any other reason is a mistake in the plan.
EXPLAINED = re.compile(r"step \d+ came, |plan of epoch |the pipe of |hidden states of step ")


@dataclass(frozen=True, slots=True)
class Report:
    """``problem`` is None if all is well. ``disturbed``: events until the faults stopped."""

    seed: int
    events: int
    disturbed: int
    requests: int
    tokens: int
    epochs: int
    problem: str | None
    trace: str = ""


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged, and what the product calls an error that only a mistake can cause is one."""

    def judge(_logger: Any, _method: str, event: dict[str, Any]) -> Any:
        if event["event"] == "integrity check failed" or "do not cover" in str(event.get("reason")):
            raise Violation(f"{event}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[judge],
        wrapper_class=structlog.make_filtering_bound_logger(40),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock = Clock()
        random = self._random = Random(f"network {scenario.seed}")
        self.net = Network(self.clock, random, scenario.latency_s, scenario.spikes)
        self.host = Host(self.clock, self.net, random, scenario.hop_s)
        self.clients: list[Client] = []
        self.asked: list[Asked] = []
        self.losses = 0  #: connections and processes that ended: what may explain that something was lost
        self.faults_over = False
        self._live = 0
        self._tokens = 0
        self._epochs_lost = 0
        self._resyncs = 0
        self._checked = 0
        options = ControlOptions(
            "workers",
            "clients",
            "links",
            scenario.limits,
            replicas=scenario.replicas,
            stages=scenario.stages,
            hang_timeout=scenario.hang_timeout,
            max_requests=scenario.max_requests,
            events="records",
        )
        self.control = Control(self.clock, self.net, Random(f"control {scenario.seed}"), options, scenario.capacity)
        self.launcher = Launcher(
            self.host,
            scenario.build,
            scenario.replicas,
            scenario.stages,
            self.control.launch,
            scenario.load_s,
            self._tune,
        )
        for index in range(scenario.clients):
            self.clients.append(Client(self.clock, self.net, f"client {index}", self._told))

    # ---- what happens ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises ``Violation``, or whatever the product raises."""
        clock, scenario = self.clock, self.scenario
        happenings = scenario.happenings
        place = 0
        while clock.events < scenario.events:
            while place < len(happenings) and happenings[place][0] <= clock.events:
                what = happenings[place][1]
                place += 1
                if isinstance(what, Ask):
                    self._ask(what)
                else:
                    self._fault(what)
                self._check()
            clock.turn()
            self._check()
        self.disturbed = clock.events
        self._heal()
        deadline, progress = clock.now + LIVENESS_S, (-1, -1)
        while (why := self._unsettled()) is not None:
            if (self._tokens, self._live) != progress:
                # A budget of one token, many requests: that takes its time. There is an end of both.
                deadline, progress = clock.now + LIVENESS_S, (self._tokens, self._live)
            if clock.now > deadline:
                raise Violation(f"{LIVENESS_S:.0f} s after the last token or end, with no fault since: {why}")
            clock.turn()
            self._check()
        server = self.control.server
        assert server is not None
        checks.nothing_left(server, scenario.replicas * scenario.stages)

    def _ask(self, ask: Ask) -> None:
        client = self.clients[ask.client]
        self._live += 1
        self.asked.append(client.ask(ask, self.scenario.build.max_model_len, self.scenario.build.vocab_size))

    def _told(self, client: Client, asked: Asked) -> None:
        before = asked.checked
        scenario = self.scenario
        tight = scenario.limits.max_queued < 4096 or scenario.limits.max_queued_tokens < 1 << 20
        asked.look(self.clock.now, scenario.build.max_model_len, self._lost(), tight or scenario.max_requests < 8192)
        self._tokens += asked.checked - before
        if asked.over:
            self._live -= 1

    def _lost(self) -> int:
        server = self.control.server
        return self._epochs_lost + (0 if server is None else server.supervisor.epochs_lost)

    def _tune(self, worker: Worker) -> None:
        worker.step_s, worker.token_s = self.scenario.step_s, self.scenario.token_s

    # ---- checks ----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        host, server = self.control.host, self.control.server
        resyncs = self.host.resyncs
        if len(resyncs) > self._resyncs:
            reason = resyncs[-1]
            self._resyncs = len(resyncs)
            if not self.losses or not EXPLAINED.match(reason):
                raise Violation(f"a worker refuses: {reason}")
        if server is None or host is None or not host.touched:
            return
        host.touched = False
        checks.quick(server)
        if self.clock.events - self._checked >= checks.FULL_EVERY and server.engine is not None:
            self._checked = self.clock.events
            checks.full(server.engine)

    def _unsettled(self) -> str | None:
        server = self.control.server
        if self._live:
            open_ = [a.ask.number for a in self.asked if not a.over and a.request.finish is None]
            return f"requests {open_} have not ended"
        if server is None:
            return "the control process is not there"
        return checks.at_rest(server, sum(client.alive for client in self.clients))

    # ---- faults ----------------------------------------------------------------------------------------------

    def _fault(self, fault: Fault) -> None:
        subject, _, verb = fault.kind.partition(" ")
        if subject == "worker":
            workers = [w for w in self.launcher.workers.values() if w is not None and w.alive]
            if workers:
                self._worker_fault(workers[int(fault.where * len(workers))], verb, fault.size)
        elif subject == "client":
            self._client_fault(int(fault.where * len(self.clients)), verb, fault.size)
        elif subject == "control":
            self._control_fault(verb, fault.size)
        elif fault.kind == "launcher is cut off":
            self._cut(self.launcher.dealer)
        elif fault.kind == "clock jumps":
            self.clock.jumped += 7200 * (fault.size - 0.5)
        elif fault.kind == "messages crawl":
            ends = [w.dealer for w in self.launcher.workers.values() if w is not None]
            ends += [client.dealer for client in self.clients]
            ends[int(fault.where * len(ends))].slow = 10 ** (3 * fault.size)
        elif fault.kind == "records are watched":
            self.control.watched = not self.control.watched
            if self.control.host is not None:
                self.control.host.records.heard = self.control.watched
        else:
            raise ValueError(fault.kind)

    def _cut(self, dealer: Any) -> None:
        self.losses += 1
        if dealer.connection is not None:
            dealer.connection.cut()

    def _worker_fault(self, worker: Worker, verb: str, size: float) -> None:
        if verb == "dies":
            self.losses += 1
            worker.die(-11)
        elif verb == "hangs":
            worker.stop()
        elif verb == "pauses":
            worker.stop()
            self.clock.after(0.01 * 600**size, worker.go_on)
        elif verb == "slows down":
            worker.slowness = 10 ** (1.5 * size)
        elif verb == "repeats itself":
            worker.echo = size
        else:
            self._cut(worker.dealer)

    def _client_fault(self, index: int, verb: str, size: float) -> None:
        client = self.clients[index]
        if verb == "pauses":
            client.stop()
            self.clock.after(0.02 * 2000**size, client.go_on)
        elif verb == "stops":
            client.stop()
        elif verb == "is cut off":
            self._cut(client.dealer)
        else:
            self.losses += 1
            client.die(unnoticed=verb == "vanishes")
            for asked in client.asked.values():
                if not asked.over:
                    asked.over = True
                    self._live -= 1
            self.clients[index] = Client(self.clock, self.net, f"client {index}", self._told)

    def _control_fault(self, verb: str, size: float) -> None:
        host, server = self.control.host, self.control.server
        if server is None or host is None:
            return
        if verb == "dies":
            self.losses += 1
            self._epochs_lost += server.supervisor.epochs_lost + server.supervisor.epochs_begun
            self.control.die()
            self.launcher.control_died()
        else:
            host.stopped = True
            self.clock.after(0.01 * 1500**size, host.resume)

    def _heal(self) -> None:
        """Faults stop. What is dead or hangs stays so."""
        self.net.calm()
        for worker in self.launcher.workers.values():
            if worker is not None:
                worker.slowness, worker.echo, worker.dealer.slow = 1.0, 0.0, 1.0
        for client in self.clients:
            client.dealer.slow = 1.0
            client.go_on()
        if self.control.host is not None:
            self.control.host.resume()


def run(seed: int, events: int, cut: Cut | None = None) -> Report:
    """Run one seed, and say how it went."""
    scenario = draw(seed, events).without(cut or Cut())
    problem, trace = None, ""
    world: World | None = None
    with quiet():
        try:
            world = World(scenario)
            world.run()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
    done = 0 if world is None else world.clock.events
    return Report(
        seed,
        done,
        min(done, events),
        0 if world is None else len(world.asked),
        0 if world is None else world._tokens,
        0 if world is None else world._lost(),
        problem,
        trace,
    )
