"""One stage without sockets: a queue of plans, the slot table and a runner.

The worker process drives it from its poll loop; ``simulated.loopback`` drives one per stage in a single
process. Plans run in step order. While one runs on the device, ``prepare`` applies the next to the slot table
and derives its batch, so that only the launch is left when its inputs (hidden states, or sampled ids on the first
stage) are there:

    device   |---- step k ----|  |--- step k + 1 ---|
    host     launch  prepare k+1  collect, launch ...

What belongs to step k is therefore taken when k is derived (the digest, whose its ids are) and not from the table
afterwards.

A plan that cannot be followed closes the executor to plans until the next ``start``: it never guesses. It raises
``PlanRefused`` when its turn comes, not when that is found, so that what runs and what was queued before it still
has its outcome.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..control.wire import (
    PROTOCOL_VERSION,
    BatchPlan,
    Hello,
    Logprobs,
    Register,
    Result,
    Start,
    ToWorker,
    WireError,
    decode_to_worker,
)
from .batch import Finished, Int64, Runner, StageBatch, now_us
from .extras import remember
from .slots import PlanRefused, SlotTable

#: Plans that may wait beyond two a stage: control has far fewer out.
MOST_AHEAD = 64
_NO_IDS: Int64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SampledIds:
    """What the last stage tells the first one: the ids of the rows that sampled, with their slots'
    generations.
    """

    step: int
    slots: Int64
    generations: Int64
    ids: Int64


#: Given a step, and its hidden states or its sampled ids.
PassOn = Callable[[int, NDArray[np.uint8] | None, SampledIds | None], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stage has after one iteration: ``hidden`` for the next stage, or on the last stage ``sampled`` if a row
    did. ``hidden`` is valid until the next launch.

    ``started_us`` and ``ended_us`` say when the device computed.
    """

    plan: BatchPlan
    batch: StageBatch
    received_us: int
    started_us: int
    ended_us: int
    hidden: NDArray[np.uint8] | None
    sampled: SampledIds | None
    digest: int | None
    logprobs: Sequence[Logprobs] = ()

    @property
    def step(self) -> int:
        return self.plan.step

    def result(self, started_us: int = 0, ended_us: int = 0, idle_us: int = 0, starved_us: int = 0) -> Result:
        """The message to control. What it costs is paid when the neighbouring stage has what it waits for."""
        plan, sampled = self.plan, self.sampled
        ids = stopped = b""
        if sampled is not None:
            by_slot = np.zeros(int(sampled.slots.max()) + 1, "<u4")
            by_slot[sampled.slots] = sampled.ids
            ids = by_slot.tobytes()
            assert self.batch.receivers is not None and self.batch.sampling is not None
            stops = self.batch.receivers.stopped(sampled.ids, self.batch.sampling.position)
            stopped = stops.astype("<u2").tobytes()
        return Result(
            epoch=plan.epoch,
            step=plan.step,
            lane=plan.lane,
            received_us=self.received_us,
            started_us=started_us,
            ended_us=ended_us,
            idle_us=idle_us,
            starved_us=starved_us,
            ids=ids,
            stopped=stopped,
            digest=self.digest,
            logprobs=list(self.logprobs),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker accepts of an epoch, beyond what its model and memory say."""

    max_tokens: int = 8192
    num_slots: int = 4096


@dataclass(slots=True)
class _Queued:
    registers: list[Register]
    plan: BatchPlan
    received_us: int
    #: Set by ``prepare``: the batch, and the digest of the tables after it.
    batch: StageBatch | None = None
    digest: int | None = None


class StageExecutor:
    """Executes the plans of one stage of one replica."""

    def __init__(self, runner: Runner, stage: int, stages: int, limits: Limits | None = None) -> None:
        if not 0 <= stage < stages:
            raise ValueError(f"stage {stage} of {stages}")
        self.runner = runner
        self.stage = stage
        self.stages = stages
        self.limits = limits or Limits()
        self.first = stage == 0
        self.last = stage == stages - 1
        self._start: Start | None = None
        self._table: SlotTable | None = None
        self._queue: deque[_Queued] = deque()
        self._running: _Queued | None = None
        self._expected = 0
        self._refused = False
        #: What ``PlanRefused`` will say when the queue is empty.
        self._reason: str | None = None

    # -- epochs ----------------------------------------------------------------------------------------------

    def hello(self, replica: int = 0, pid: int = 0, external: bool = False, host: str = "") -> Hello:
        info = self.runner.info
        return Hello(
            version=PROTOCOL_VERSION,
            replica=replica,
            stage=self.stage,
            rank=0,
            stages=self.stages,
            pid=pid,
            model=info.name,
            eos_ids=info.eos_ids,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_tokens=self.limits.max_tokens,
            num_slots=self.limits.num_slots,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            device=info.device,
            tile=info.tile,
            prefix_limit=info.prefix_limit,
            external=external,
            host=host,
        )

    def start(self, start: Start) -> None:
        """Begin an epoch, as after ``stop``. Raises ``PlanRefused`` if it asks for too much."""
        self.stop()
        info, limits = self.runner.info, self.limits
        self._start = start
        bounds = (
            ("stages", start.stages, self.stages, start.stages == self.stages),
            ("block_size", start.block_size, info.block_size, start.block_size == info.block_size),
            ("num_blocks", start.num_blocks, info.num_blocks, 0 < start.num_blocks <= info.num_blocks),
            ("num_slots", start.num_slots, limits.num_slots, 0 < start.num_slots <= limits.num_slots),
            (
                "token_budget",
                start.token_budget,
                limits.max_tokens,
                0 < start.token_budget <= limits.max_tokens,
            ),
            (
                "max_model_len",
                start.max_model_len,
                info.max_model_len,
                0 < start.max_model_len <= info.max_model_len,
            ),
        )
        for field, asked, here, holds in bounds:
            if not holds:
                self.refuse()
                raise PlanRefused(f"start: {field} {asked}, this worker has {here}")
        self.runner.start(start.num_blocks)
        self._table = SlotTable(start, first=self.first, last=self.last, vocab_size=info.vocab_size)
        self._refused = False

    def stop(self) -> None:
        """Leave the epoch: forget slots and plans, and ignore plans until the next ``start``. Waits for what runs,
        and forgets it too.
        """
        if self._running is not None:
            self.collect()
        self._start = None
        self._table = None
        self._queue.clear()
        self._expected = 0
        self._refused = False
        self._reason = None

    @property
    def epoch(self) -> int:
        """The current epoch, 0 outside one."""
        return self._start.epoch if self._start else 0

    @property
    def expected(self) -> int:
        """The step of the next plan that will be accepted."""
        return self._expected

    @property
    def refused(self) -> bool:
        """Whether a plan was refused in this epoch: later ones are ignored."""
        return self._refused

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> bool:
        """Whether an iteration was launched and not collected."""
        return self._running is not None

    def refuse(self) -> None:
        """Close to plans until the next ``start``, and drop those queued. What runs may still be collected."""
        self._refused = True
        self._reason = None
        self._queue.clear()

    def close(self, reason: str) -> None:
        """Close to plans until the next ``start``: ``PlanRefused`` is raised when those queued have run."""
        if not self._refused:
            self._refused = True
            self._reason = reason

    # -- plans -----------------------------------------------------------------------------------------------

    def accept(self, frames: Sequence[bytes], received_us: int = 0) -> None:
        """Queue a plan: the frames of its message, zero or more REGISTER and one PLAN."""
        try:
            messages = [decode_to_worker(frame) for frame in frames]
        except WireError as error:
            self.close(f"not a plan: {error}")
            return
        self.accept_messages(messages, received_us)

    def accept_messages(self, messages: Sequence[ToWorker], received_us: int = 0) -> None:
        """Queue a decoded plan, or close to it and all later ones."""
        if self._refused:
            return
        plan = messages[-1] if messages else None
        registers = [message for message in messages[:-1] if isinstance(message, Register)]
        if not isinstance(plan, BatchPlan):
            self.close("not a plan: the last frame is no PLAN")
        elif len(registers) != len(messages) - 1:
            self.close("not a plan: a frame before the PLAN is no REGISTER")
        elif self._table is None:
            self.close(f"plan of epoch {plan.epoch} before an epoch was begun")
        elif plan.epoch != self.epoch:
            self.close(f"plan of epoch {plan.epoch} in epoch {self.epoch}")
        elif plan.step != self._expected:
            self.close(f"step {plan.step} came, {self._expected} was expected")
        elif len(self._queue) > 2 * self.stages + MOST_AHEAD:
            self.close(f"step {plan.step} came, {len(self._queue)} plans before it wait")
        else:
            self._expected += 1
            self._queue.append(_Queued(registers, plan, received_us))

    def prepare(self) -> None:
        """Derive the batch of the oldest queued plan, if there is one. Meant for while another runs."""
        if not self._queue or self._queue[0].batch is not None or self._table is None:
            return
        head = self._queue[0]
        try:
            head.batch = self._table.apply(head.registers, head.plan)
        except PlanRefused as error:
            self.refuse()
            self._reason = f"step {head.plan.step}: {error}"
        else:
            head.digest = self._table.digest(head.plan.step)

    def _head(self) -> StageBatch | None:
        """The batch whose turn it is, None if no plan is queued. Raises ``PlanRefused``, once."""
        self.prepare()
        if self._queue:
            return self._queue[0].batch
        if self._reason is not None:
            reason, self._reason = self._reason, None
            raise PlanRefused(reason)
        return None

    def awaited_step(self) -> int | None:
        """The step whose hidden states the stage needs next, None if it needs none. Raises ``PlanRefused``."""
        batch = self._head()
        if batch is None or self.first or batch.num_tokens == 0:
            return None
        return batch.step

    def can_run(self, have_hidden: bool = False) -> bool:
        """Whether the oldest plan's inputs are here (``have_hidden``: those of ``awaited_step``).

        Raises ``PlanRefused`` when a plan that cannot be followed is next.
        """
        batch = self._head()
        if batch is None:
            return False
        if batch.num_tokens == 0:
            return True
        if not self.first:
            return have_hidden
        assert self._table is not None
        return self._table.inputs_arrived(batch)

    def launch(self, hidden: NDArray[np.uint8] | None = None) -> bool:
        """Start the oldest plan; only when ``can_run`` and nothing runs. ``hidden`` stays valid until ``collect``.

        Returns whether the device now computes by itself, else all is done: the runner computed at once, or the plan
        has no rows.
        """
        batch = self._head()
        if batch is None or self._running is not None:
            raise RuntimeError("there is no plan to run, or one runs")
        by_itself = False
        if batch.num_tokens:
            if self.first:
                assert self._table is not None
                self._table.fill_inputs(batch)
            self.runner.launch(batch, hidden)
            by_itself = self.runner.done is not None
        self._running = self._queue.popleft()
        return by_itself

    def collect(self, pass_on: PassOn | None = None) -> Outcome:
        """Wait for the launched iteration and take what it left. ``pass_on`` is given what the next stage waits for,
        before anything else is done with it.
        """
        queued, self._running = self._running, None
        if queued is None or queued.batch is None:
            raise RuntimeError("nothing runs")
        batch = queued.batch
        if batch.num_tokens:
            finished = self.runner.collect()
        else:
            finished = Finished(_NO_IDS, now := now_us(), now)
        hidden = None if self.last or not batch.num_tokens else finished.output
        sampled = None
        if hidden is not None and pass_on is not None:
            pass_on(batch.step, hidden, None)
        if self.last and batch.receivers is not None and len(batch.receivers.slots):
            receivers = batch.receivers
            ids = finished.output.astype(np.int64)
            sampled = SampledIds(batch.step, receivers.slots, receivers.generations, ids)
            if self.first:
                self.take_ids(sampled)
            elif pass_on is not None:
                pass_on(batch.step, None, sampled)
            if batch.sampling is not None and batch.sampling.extras:
                remember(batch.sampling.extras, ids)
        return Outcome(
            plan=queued.plan,
            batch=batch,
            received_us=queued.received_us,
            started_us=finished.started_us,
            ended_us=finished.ended_us,
            hidden=hidden,
            sampled=sampled,
            digest=queued.digest,
            logprobs=finished.logprobs,
        )

    def execute(self, hidden: NDArray[np.uint8] | None = None) -> Outcome:
        """``launch`` and ``collect``, with nothing between the two."""
        self.launch(hidden)
        return self.collect()

    def take_ids(self, sampled: SampledIds) -> None:
        """First stage: take what the last stage sampled."""
        if self._table is not None:
            self._table.append(sampled.slots, sampled.generations, sampled.ids)
