"""Scripted worker processes: the protocol of ``dataplane.worker.Worker`` over a ``LightStage``, and links between
stages, in virtual time. And the launcher, which starts again what dies."""

from collections import deque
from collections.abc import Callable
from random import Random

from evenflow.cli.supervisor import FORGIVEN_AFTER, overdue, wait_before_start
from evenflow.control.wire import (
    BatchPlan,
    Heartbeat,
    KillWorker,
    LauncherHello,
    Quit,
    Redial,
    Register,
    Resync,
    Start,
    Started,
    ToWorker,
    WorkerExited,
    decode_to_worker,
    encode,
)
from evenflow.dataplane.slots import PlanRefused

from .clock import Clock
from .network import Dealer, Frames, Network
from .stage import Build, Hidden, LightStage, Outcome, Sampled

BEAT_S = 1.0
#: Results that a worker which repeats itself remembers: step numbers restart, and these may match.
MOST_TOLD = 12


class LinkBroken(Exception):
    """The neighbouring stage is not there."""


class Inlet:
    """What a stage reads from the one before it, in one epoch: the pipe and the ring of ``dataplane.links``."""

    def __init__(self, told: Callable[[], None]) -> None:
        self.told = told
        self.open = True
        self.hidden: deque[tuple[int, Hidden]] = deque()
        self.ids: deque[Sampled] = deque()
        self.due = 0.0


class Host:
    """What the workers of one machine share. ``inlets``: by replica, epoch and stage, as the pipes' names are."""

    def __init__(self, clock: Clock, net: Network, random: Random, hop: float) -> None:
        self.clock, self.net, self.random, self.hop = clock, net, random, hop
        self.inlets: dict[tuple[int, int, int], Inlet] = {}
        self.resyncs: list[str] = []

    def pass_on(self, inlet: Inlet, item: tuple[int, Hidden] | Sampled) -> None:
        """A pipe: in order, and what was written is read even if the writer dies."""
        inlet.due = max(inlet.due, self.clock.now + self.hop * (0.5 + self.random.random()))
        self.clock.at(inlet.due, self._passed, inlet, item)

    def _passed(self, inlet: Inlet, item: tuple[int, Hidden] | Sampled) -> None:
        if inlet.open:
            if isinstance(item, tuple):
                inlet.hidden.append(item)
            else:
                inlet.ids.append(item)
            inlet.told()


class Worker:
    """One process, from its hello to its end. ``pace``: seconds an iteration takes, given its tokens."""

    def __init__(self, host: Host, build: Build, place: tuple[int, int, int], pid: int, ended: "Ended") -> None:
        self.replica, self.index, self.stages = place
        self.pid = pid
        self.step_s, self.token_s = 0.01, 0.0
        self.slowness = 1.0
        #: How likely a result is to be sent again, later or in the next epoch, which no worker of ours does.
        self.echo = 0.0
        self._told: list[Frames] = []  #: the first results of this epoch
        self.alive, self.stopped = True, False
        self._host, self._clock = host, host.clock
        self._ended = ended
        self.stage = LightStage(build, self.index, self.stages)
        self._inlet: Inlet | None = None
        self._outlet: Inlet | None = None
        self._last_us = 0  #: when the last iteration ended, or the epoch began
        self._spoke = host.clock.now
        self._redialled = (-1, -1e9)
        self._hidden: Hidden | None = None
        name = f"worker-{self.replica}-{self.index}-{pid}".encode()
        self.dealer = Dealer(host.net, "workers", self._read, name)
        self._hello()
        host.clock.after(BEAT_S, self._beat)

    # ---- life ------------------------------------------------------------------------------------------------

    def die(self, status: int) -> None:
        if self.alive:
            self.alive = False
            self._close_links()
            self.dealer.close()
            self._ended(self, status)

    def stop(self) -> None:
        """Do nothing any more, without dying."""
        self.stopped = True

    def go_on(self) -> None:
        if self.alive and self.stopped:
            self.stopped = False
            if self.stage.running is not None and self._clock.now >= self._ends:
                self._finish(self._run)
            self._read()

    # ---- control ---------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        self._spoke = self._clock.now
        self.dealer.send([encode(message)])

    def _hello(self) -> None:
        self._send(self.stage.build.hello(self.replica, self.index, self.stages, self.pid))

    def _beat(self) -> None:
        if self.alive:
            if not self.stopped and self._clock.now >= self._spoke + BEAT_S:
                self._send(Heartbeat(self.stage.epoch))
            self._clock.after(BEAT_S, self._beat)

    def _read(self) -> None:
        while self.dealer.inbox and self.alive and not self.stopped:
            messages = [decode_to_worker(frame) for frame in self.dealer.inbox.popleft()]
            if isinstance(messages[-1], BatchPlan | Register):
                self.stage.accept(messages, int(self._clock.now * 1e6))
            else:
                self._handle(messages[0])
        if self.alive and not self.stopped:
            self._launch()

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Start):
            self._begin(message)
        elif isinstance(message, Redial):
            again, self._redialled = self._redialled, (message.instance, self._clock.now)
            if message.instance == again[0] and self._clock.now < again[1] + BEAT_S / 2:
                return
            self._leave()
            self._hello()
        elif isinstance(message, Quit):
            self.die(1 if message.refused else 0)
        elif not isinstance(message, Heartbeat):
            raise AssertionError(f"a worker has no use for {message}")

    def _begin(self, start: Start) -> None:
        self._leave()
        try:
            self.stage.start(start)
            if start.stages > 1:
                place = (self.replica, start.epoch, self.index)
                if place in self._host.inlets:
                    raise PlanRefused(f"the pipe of {place} is there already")
                self._inlet = self._host.inlets[place] = Inlet(self._read)
        except PlanRefused as error:
            self.stage.refuse()
            self._resync(str(error))
            return
        self._last_us = int(self._clock.now * 1e6)
        told, self._told = self._told, []
        for frames in told:
            if self._host.random.random() < self.echo:
                self._clock.after(30 * self.step_s * self._host.random.random(), self._repeat, frames)
        self._send(Started(start.epoch))

    def _leave(self) -> None:
        self._close_links()
        self.stage.stop()

    def _close_links(self) -> None:
        if self._inlet is not None:
            self._inlet.open = False
            del self._host.inlets[self.replica, self.stage.epoch, self.index]
        self._inlet = self._outlet = None

    def _resync(self, reason: str) -> None:
        self._host.resyncs.append(reason)
        self._send(Resync(self.stage.epoch, self.stage.expected, reason))

    def _break(self, error: Exception) -> None:
        self.stage.refuse()
        self._resync(str(error))
        self._close_links()

    # ---- iterations ------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        stage, inlet = self.stage, self._inlet
        if stage.running is not None:
            return False
        try:
            if inlet is None:
                return self.stages == 1 and stage.can_run()
            while inlet.ids:
                stage.take_ids(inlet.ids.popleft())
            awaited = stage.awaited_step()
            if awaited is None or not inlet.hidden:
                return stage.can_run()
            if inlet.hidden[0][0] != awaited:
                raise LinkBroken(f"hidden states of step {inlet.hidden[0][0]} came, {awaited} is next")
            return stage.can_run(True)
        except (PlanRefused, LinkBroken) as error:
            self._break(error)
            return False

    def _launch(self) -> None:
        if not self._ready():
            return
        stage = self.stage
        batch = stage.launch()
        self._hidden = None
        if not self.stage.first and not batch.empty:
            assert self._inlet is not None
            self._hidden = self._inlet.hidden.popleft()[1]
        tokens = sum(row.count for row in batch.rows)
        self._began_us = int(self._clock.now * 1e6)
        lasts = (self.step_s + self.token_s * tokens) * self.slowness
        self._run = (stage.epoch, batch.plan.step)
        self._ends = self._clock.now + lasts
        self._clock.at(self._ends, self._finish, self._run)

    def _finish(self, run: tuple[int, int]) -> None:
        batch = self.stage.running
        if not self.alive or self.stopped or batch is None or run != (self.stage.epoch, batch.plan.step):
            return
        if self._clock.now < self._ends:
            return
        outcome = self.stage.collect(self._hidden)
        ended_us = int(self._clock.now * 1e6)
        idle_us = max(0, self._began_us - self._last_us)
        starved_us = min(idle_us, max(0, batch.received_us - self._last_us))
        self._last_us = ended_us
        try:
            self._hand_on(outcome)
        except LinkBroken as error:
            self._break(error)
        # The next iteration is on the device before the result of this one is told.
        self._launch()
        frames = [encode(outcome.result(self._began_us, ended_us, idle_us, starved_us))]
        self._spoke = self._clock.now
        self.dealer.send(frames)
        if len(self._told) < MOST_TOLD:
            self._told.append(frames)
        if self.echo and self._host.random.random() < self.echo:
            self._clock.after(3 * self._host.random.random(), self._repeat, frames)

    def _repeat(self, frames: Frames) -> None:
        if self.alive and not self.stopped:
            self.dealer.send(frames)

    def _hand_on(self, outcome: Outcome) -> None:
        if self.stages == 1 or (outcome.hidden is None and (not outcome.sampled or self.stage.first)):
            return
        if self._outlet is None:
            place = (self.replica, self.stage.epoch, (self.index + 1) % self.stages)
            self._outlet = self._host.inlets.get(place)
            if self._outlet is None:
                raise LinkBroken(f"the pipe of {place} is missing: the next stage has not started")
        item = outcome.sampled if outcome.hidden is None else (outcome.batch.plan.step, outcome.hidden)
        assert item is not None
        self._host.pass_on(self._outlet, item)


Ended = Callable[[Worker, int], None]


class Launcher:
    """Starts processes and starts them again, with the real back-off; reports deaths to control, and obeys it."""

    def __init__(
        self,
        host: Host,
        build: Build,
        replicas: int,
        stages: int,
        start_control: Callable[[], None],
        load_s: float,
        tune: Callable[[Worker], None],
    ) -> None:
        self.workers: dict[tuple[int, int], Worker | None] = {}
        self.deaths = 0
        self.settled = False  #: no more faults: what starts now is not slow
        self._host, self._clock, self._build = host, host.clock, build
        self._stages, self._load_s, self._tune = stages, load_s, tune
        self._start_control = start_control
        self._failures: dict[object, int] = {}
        self._started: dict[object, float] = {}
        self._pids = 100
        self.dealer = Dealer(host.net, "workers", self._read)
        self.dealer.send([encode(LauncherHello(1, 1))])
        host.clock.after(BEAT_S, self._beat)
        self._launch_control()
        for replica in range(replicas):
            for stage in range(stages):
                self.workers[replica, stage] = None
                self._launch((replica, stage))

    def control_died(self) -> None:
        self._again("control", self._launch_control)

    def _launch_control(self) -> None:
        self._started["control"] = self._clock.now
        self._start_control()

    def _launch(self, place: tuple[int, int]) -> None:
        self._started[place] = self._clock.now
        self._pids += 1
        self._clock.after(self._load_s * (0.5 + self._host.random.random()), self._loaded, place, self._pids)

    def _loaded(self, place: tuple[int, int], pid: int) -> None:
        worker = self.workers[place] = Worker(self._host, self._build, (*place, self._stages), pid, self._exited)
        self._tune(worker)

    def _exited(self, worker: Worker, status: int) -> None:
        place = (worker.replica, worker.index)
        self.deaths += 1
        self.workers[place] = None
        report = WorkerExited(worker.replica, worker.index, 0, worker.pid, status)
        self._clock.after(self._host.net.notice(), self.dealer.send, [encode(report)])
        self._again(place, self._launch, place)

    def _again(self, name: object, start: Callable[..., None], *args: object) -> None:
        if self._clock.now - self._started[name] > FORGIVEN_AFTER:
            self._failures[name] = 0
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        self._clock.after(0.05 + wait_before_start(failures), start, *args)

    def _read(self) -> None:
        while self.dealer.inbox:
            message = decode_to_worker(self.dealer.inbox.popleft()[-1])
            if isinstance(message, KillWorker):
                worker = self.workers.get((message.replica, message.stage))
                if worker is None:
                    continue
                age = self._clock.now - self._started[message.replica, message.stage]
                if worker.pid == message.pid or (not message.pid and overdue(age, 2 * self._load_s)):
                    worker.die(-9)
            elif isinstance(message, Redial):
                self.dealer.send([encode(LauncherHello(1, 1))])

    def _beat(self) -> None:
        self.dealer.send([encode(Heartbeat())])
        self._clock.after(BEAT_S, self._beat)
