"""The worker process around a ``StageExecutor``: one thread, one poll loop, three kinds of socket.

It dials the control process, says what it is and has, and then does what it is told: ``Start`` begins an
epoch (slots are dropped, links made anew), plans run in order as their inputs come, ``Redial`` asks for
another hello, ``Quit`` and SIGTERM end it after the running iteration. What it cannot follow it answers with
``Resync`` and then ignores plans until the next ``Start``. A malformed frame never ends it; an exception
inside an iteration does, with code 1.

The host works while the device computes, so that little is left to do between two iterations:

    device   |------- step k -------|                |------ step k + 1 ------|
    host     |result k-1, inbox,    |hidden states or|result k, inbox,
             |batch of step k + 1   |ids of k; launch|batch of step k + 2

Hidden states or sampled ids go out first, since another stage waits for them; then the next iteration is launched
if its inputs are there; then the result goes to control. The stages of a pipeline tend to end their iterations at the
same moment and may have to share cores: what only control and the next batch need is held back for a moment
(``_stand_back``), until the others have been served. A runner that computes in the calling thread (``done`` is
None) would delay the result by an iteration: then it goes out before the launch. What was refused while an iteration
ran is reported after its result. Times are microseconds of ``time.monotonic_ns``.
"""

import argparse
import contextlib
import gc
import logging
import os
import secrets
import select
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import zmq
from numpy.typing import NDArray

from ..control.wire import (
    BatchPlan,
    Heartbeat,
    Quit,
    Redial,
    Register,
    Resync,
    Sample,
    Start,
    Started,
    ToWorker,
    WireError,
    decode_to_worker,
    encode,
)
from ..control.wire.dialling import dial_followed
from ..control.wire.keys import DialKeys, dial_keys
from ..control.wire.lifeline import ParentGone, die_with_parent
from ..control.wire.sockets import close_context, new_context
from .batch import Runner, now_us
from .executor import Limits, Outcome, SampledIds, StageExecutor
from .links import LinkBroken, StageLinks
from .meeting import host_identity, meet_at, part
from .slots import PlanRefused

log = logging.getLogger(__name__)

HEARTBEAT_US = 1_000_000
#: How long a stage stands back for its neighbours: so much, and no more than this part of its last iteration.
STAND_BACK_US = 500
_STAND_BACK_PART = 8
#: How much of that it looks for its inputs without sleeping: to be woken costs as much as to compute a small batch.
SPIN_US = 200
#: Messages that may lie here unread; what else comes waits in the socket, which has bounds of its own.
_INBOX = 256
#: At most one line about malformed frames in this time.
_COMPLAINT_US = 1_000_000


class Worker:
    """One rank, from its hello to its end."""

    def __init__(
        self,
        runner: Runner,
        connect: str,
        replica: int,
        stage: int,
        stages: int,
        limits: Limits,
        *,
        keys: DialKeys | None = None,
        external: bool = False,
    ) -> None:
        """``external``: started by hand. ``keys``: for a ``tcp://`` endpoint."""
        self._executor = StageExecutor(runner, stage, stages, limits)
        self._replica = replica
        self._links: StageLinks | None = None
        self._warm = 0  #: the largest iteration that the runner has been warmed up for
        self._profile: list[Sample] = []
        self._context = new_context()
        self._external = external
        self._meeting: Path | None = None
        # Processes in two containers may have the same id.
        identity = f"worker-{replica}-{stage}-{os.getpid()}-{secrets.token_hex(4)}".encode()
        self._control, self._dialling = dial_followed(self._context, connect, identity=identity, keys=keys)
        #: What to wait for while nothing runs, and while an iteration does: then inputs of the next one may wait.
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._running_poller = zmq.Poller()
        self._running_poller.register(self._control, zmq.POLLIN)
        self._done = runner.done
        if self._done is not None:
            self._running_poller.register(self._done, zmq.POLLIN)
        #: Messages taken from the socket and not yet handled, with the time at which they were there.
        self._inbox: deque[tuple[list[bytes], int]] = deque()
        #: When the last iteration ended.
        self._ended_us = now_us()
        #: The outcome of which control has not been told, with the idle and starved time before it.
        self._owed: tuple[Outcome, int, int] | None = None
        self._reads_hidden = False
        self._broken: LinkBroken | None = None  #: what the last iteration left could not be passed on
        self._beat_us = self._ended_us + HEARTBEAT_US
        self._complaint_us = 0
        #: The instance that last asked for another hello, and when.
        self._redialled = (-1, 0)
        self._stopping = False
        self._code = 0

    def stop(self) -> None:
        """End after the running iteration. Safe in a signal handler."""
        self._stopping = True

    def run(self, wake: int | None = None) -> int:
        """Serve until told to stop. Returns the exit code. ``wake``: a descriptor whose input ends a wait."""
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)
            self._running_poller.register(wake, zmq.POLLIN)
        try:
            self._hello()
            while not self._stopping:
                self._turn()
            if self._executor.running:
                self._finish()
            self._settle()
        except Exception:
            log.exception("the worker fails at step %d of epoch %d", self._executor.expected, self._executor.epoch)
            return 1
        finally:
            self._leave()
            close_context(self._context)
        return self._code

    def _turn(self) -> None:
        executor = self._executor
        launched = not executor.running and self._ready() and self._launch()
        if self._owed is not None and self._stand_back():
            return
        self._settle()
        executor.prepare()
        if executor.running:
            self._listen(self._running_poller)
        else:
            # What computed at once may be followed by the next; messages are read between the two.
            self._listen(self._poller, at_once=launched)

    def _stand_back(self) -> bool:
        """After an iteration in a pipeline: leave the cores to the neighbours for a moment, unless this stage's next
        inputs come meanwhile. Whether they have.
        """
        links, outcome = self._links, self._owed[0] if self._owed is not None else None
        if links is None or links.inbound is None or outcome is None or not self._executor.queued:
            # Without a plan at hand it is control that is waited for, and first of all heard.
            return False
        wait_us = min(STAND_BACK_US, (outcome.ended_us - outcome.started_us) // _STAND_BACK_PART)
        running = self._executor.running
        if not running and links.spin(min(wait_us, SPIN_US)):
            return True
        source = self._done if running else links.inbound
        ready, _, _ = select.select([] if source is None else [source], [], [], wait_us / 1e6)
        return bool(ready) and not running

    def _listen(self, poller: zmq.Poller, at_once: bool = False) -> None:
        """Wait for something to do, and do it unless it is an iteration to launch."""
        wait_us = 0 if at_once or self._inbox else max(0, self._beat_us - now_us())
        ready = poller.poll(-(-wait_us // 1000))
        if poller is self._running_poller:
            for source, _ in ready:
                if source == self._done:
                    self._finish()
                    return
        elif len(ready) == 1 and self._links is not None and ready[0][0] == self._links.inbound and not self._inbox:
            # The inputs that the device waits for, and nothing else: messages have time until it runs.
            return
        self._receive(now_us())
        self._handle_inbox()
        if now_us() >= self._beat_us:
            self._send(Heartbeat(epoch=self._executor.epoch))
            self._watch()

    # -- control ---------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        self._beat_us = now_us() + HEARTBEAT_US
        # Full only when control has been away for an hour: whoever comes then asks for a hello.
        with contextlib.suppress(zmq.Again):
            self._control.send(encode(message), zmq.NOBLOCK)

    def _watch(self) -> None:
        """Say what keeps this worker from control. Looked at when nothing else was sent for a second."""
        complaint = self._dialling.complaint(now_us() / 1e6)
        if self._dialling.refused:
            self._give_up(f"{self._dialling.problem}")
        elif complaint is not None:
            log.warning("%s; it is tried again until it does", complaint)

    def _give_up(self, reason: str) -> None:
        log.error("not wanted by the control process: %s", reason)
        self._stopping, self._code = True, 1

    def _hello(self) -> None:
        self._send(self._executor.hello(self._replica, os.getpid(), self._external, host_identity()))

    def _receive(self, stamp_us: int) -> None:
        """Take the messages from control's socket, which were there at ``stamp_us``: all, or as many as may wait."""
        while len(self._inbox) < _INBOX and int(self._control.get(zmq.EVENTS)) & zmq.POLLIN:
            self._inbox.append((self._control.recv_multipart(zmq.NOBLOCK), stamp_us))

    def _handle_inbox(self) -> None:
        while self._inbox and not self._stopping:
            frames, received_us = self._inbox.popleft()
            try:
                messages = [decode_to_worker(frame) for frame in frames]
            except WireError as error:
                self._complain(f"not a message: {error}")
                continue
            if isinstance(messages[-1], BatchPlan | Register):
                self._executor.accept_messages(messages, received_us)
            elif len(messages) == 1:
                self._handle(messages[0])
            else:
                self._complain(f"{len(messages)} frames that are no plan")

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Redial):
            # A restarted control process answers each heartbeat that waited for it: one hello is enough for all.
            again, self._redialled = self._redialled, (message.instance, now_us())
            if message.instance == again[0] and self._redialled[1] < again[1] + HEARTBEAT_US // 2:
                return
            log.info("control does not know this worker: it says hello again")
            self._leave()
            self._hello()
        elif isinstance(message, Quit) and message.refused:
            self._give_up(message.reason)
        elif isinstance(message, Quit):
            log.info("told to quit: %s", message.reason or "no reason given")
            self._stopping = True
        elif not isinstance(message, Heartbeat):
            self._complain(f"a worker has no use for {type(message).__name__}")

    def _start(self, start: Start) -> None:
        # What runs belongs to the epoch before: nobody waits for its result.
        self._leave()
        try:
            self._executor.start(start)
            if start.token_budget > self._warm:
                self._executor.runner.warm_up(start.token_budget)
                self._warm = start.token_budget
                self._profile = self._executor.runner.profile(start.token_budget)
            width = self._executor.runner.info.hidden_bytes
            if self._external and start.stages > 1:
                self._meeting = Path(start.links)
                meet_at(self._meeting, start.epoch)
            self._links = StageLinks(start, self._executor.stage, width)
        except (PlanRefused, OSError, ValueError) as error:
            # A path with a zero byte in it is no OSError.
            self._executor.refuse()
            self._resync(str(error))
            return
        if self._links.inbound is not None:
            self._poller.register(self._links.inbound, zmq.POLLIN)
        self._ended_us = now_us()
        log.info("epoch %d begins: %d blocks, budget %d", start.epoch, start.num_blocks, start.token_budget)
        self._send(Started(start.epoch, self._profile))

    def _leave(self) -> None:
        self._executor.stop()
        if self._links is not None:
            if self._links.inbound is not None:
                self._poller.unregister(self._links.inbound)
            self._links.close()
            self._links = None
        if self._meeting is not None:
            part(self._meeting)
            self._meeting = None

    def _resync(self, reason: str) -> None:
        self._settle()
        log.warning("resync at step %d of epoch %d: %s", self._executor.expected, self._executor.epoch, reason)
        self._send(Resync(epoch=self._executor.epoch, expected=self._executor.expected, reason=reason[:4096]))

    def _complain(self, reason: str) -> None:
        """A frame from control made no sense. A plan may have been lost with it, so an epoch cannot go on."""
        if self._executor.epoch and not self._executor.refused:
            self._executor.close(reason)
        elif now_us() >= self._complaint_us:
            self._complaint_us = now_us() + _COMPLAINT_US
            log.warning("ignored: %s", reason)

    # -- iterations ------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Take in what other stages sent; whether the oldest plan can run."""
        links, executor = self._links, self._executor
        try:
            if links is None:
                return executor.can_run()
            links.drain()
            while (sampled := links.take_ids()) is not None:
                executor.take_ids(sampled)
            return executor.can_run(links.has_hidden(executor.awaited_step()))
        except (PlanRefused, LinkBroken) as error:
            self._break(error)
            return False

    def _break(self, error: Exception) -> None:
        executor = self._executor
        executor.refuse()
        self._resync(str(error))
        if self._links is not None and self._links.inbound is not None:
            self._poller.unregister(self._links.inbound)
            self._links.close()
        self._links = None

    def _launch(self) -> bool:
        """Start the oldest plan, whose inputs are here."""
        links, executor = self._links, self._executor
        assert links is not None
        self._reads_hidden = executor.awaited_step() is not None
        if not executor.launch(links.hidden() if self._reads_hidden else None):
            self._settle()
            self._finish()
        return True

    def _finish(self) -> None:
        """Take what the iteration left, and give it to the stage that waits for it."""
        links, executor = self._links, self._executor
        assert links is not None
        self._broken = None
        outcome = executor.collect(self._pass_on)
        if self._reads_hidden:
            links.finish_hidden()
        idle_us = max(0, outcome.started_us - self._ended_us)
        starved_us = min(idle_us, max(0, outcome.received_us - self._ended_us))
        self._ended_us = outcome.ended_us
        self._owed = outcome, idle_us, starved_us
        if self._broken is not None:
            self._break(self._broken)
        if not executor.queued:
            # A plan that has come by now is known to have been there.
            self._receive(outcome.ended_us)

    def _pass_on(self, step: int, hidden: NDArray[np.uint8] | None, sampled: SampledIds | None) -> None:
        """Give the next stage what it waits for."""
        assert self._links is not None
        try:
            if hidden is not None:
                self._links.send_hidden(step, hidden)
            elif sampled is not None:
                self._links.send_ids(sampled)
        except LinkBroken as error:
            self._broken = error

    def _settle(self) -> None:
        """Send control the result that it is owed."""
        if self._owed is not None:
            (outcome, idle_us, starved_us), self._owed = self._owed, None
            self._send(outcome.result(outcome.started_us, outcome.ended_us, idle_us, starved_us))


# -- the process ---------------------------------------------------------------------------------------------


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """What every worker is told on its command line, whatever it computes with."""
    limits = Limits()
    parser.add_argument("--connect", required=True, help="endpoint of the control process for workers")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block")
    parser.add_argument("--max-tokens", type=int, default=limits.max_tokens, help="most tokens of an iteration")
    parser.add_argument("--max-slots", type=int, default=limits.num_slots, help="most sequences at a time")
    parser.add_argument("--parent", type=int, default=None, help="process id of the parent that starts this")
    parser.add_argument("--external", action="store_true", help="started by hand: outlives its parent, heeds Ctrl-C")
    parser.add_argument("--keys", metavar="FOLDER", default=None, help="server.pub and worker.key, for tcp://")


def run_worker(arguments: argparse.Namespace, load: Callable[[], Runner]) -> int:
    """The life of a worker process: load, dial, serve. Returns its exit code."""
    name = f"worker {arguments.replica}.{arguments.stage}"
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s %(levelname)s {name}: %(message)s", force=True
    )
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"evenflow {name}")
    external: bool = arguments.external
    try:
        if not external:
            die_with_parent(arguments.parent)
    except ParentGone as error:
        log.error("%s", error)
        return 1
    signal.signal(signal.SIGINT, _exit_at_once if external else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_at_once)
    try:
        keys = None if arguments.keys is None else dial_keys(arguments.keys, "worker")
        runner = load()
        limits = Limits(max_tokens=arguments.max_tokens, num_slots=arguments.max_slots)
        place = (arguments.replica, arguments.stage, arguments.stages)
        worker = Worker(runner, arguments.connect, *place, limits, keys=keys, external=external)
    except (OSError, ValueError, MemoryError) as error:
        log.error("cannot start: %s", error or type(error).__name__)
        return 1
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT) if external else (signal.SIGTERM,):
        signal.signal(number, lambda _number, _frame: worker.stop())
    # What was loaded lives as long as the process: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    log.info("dials %s", arguments.connect)
    return worker.run(wake)


def _exit_at_once(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
