"""One stage without sockets: a queue of plans, the slot table and a runner.

The worker process drives it from its poll loop; ``simulated.loopback`` drives one per stage in a single
process. Plans run in step order. The plan at the head of the queue is applied to the slot table as soon as
the one before it has run, so that only the computation is left when its inputs (hidden states, or sampled ids
on the first stage) arrive.

After ``PlanRefused`` the executor is closed to plans until the next ``start``: it never guesses.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..control.wire import (
    PROTOCOL_VERSION,
    BatchPlan,
    Hello,
    Register,
    Result,
    Start,
    ToWorker,
    WireError,
    decode_to_worker,
)
from .batch import Int64, Runner, StageBatch
from .slots import PlanRefused, SlotTable


@dataclass(frozen=True, slots=True)
class SampledIds:
    """What the last stage tells the first one: the ids of the rows that sampled, with their slots'
    generations.
    """

    step: int
    slots: Int64
    generations: Int64
    ids: Int64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stage has after one iteration: ``hidden`` for the next stage, or on the last stage ``sampled``."""

    epoch: int
    step: int
    lane: int
    tokens: int
    received_us: int
    hidden: NDArray[np.uint8] | None
    sampled: SampledIds | None
    ids: bytes
    stopped: bytes
    digest: int | None

    def result(self, started_us: int = 0, ended_us: int = 0, idle_us: int = 0, starved_us: int = 0) -> Result:
        return Result(
            epoch=self.epoch,
            step=self.step,
            lane=self.lane,
            received_us=self.received_us,
            started_us=started_us,
            ended_us=ended_us,
            idle_us=idle_us,
            starved_us=starved_us,
            ids=self.ids,
            stopped=self.stopped,
            digest=self.digest,
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
        self._expected = 0
        self._refused = False

    # -- epochs ----------------------------------------------------------------------------------------------

    def hello(self, replica: int = 0, pid: int = 0) -> Hello:
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
        )

    def start(self, start: Start) -> None:
        """Begin an epoch: all slots and queued plans are dropped. Raises ``PlanRefused`` if it asks for too
        much.
        """
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
                self._refuse(f"start: {field} {asked}, this worker has {here}")
        self.runner.start(start.num_blocks)
        self._table = SlotTable(start, first=self.first, last=self.last)
        self._refused = False

    def stop(self) -> None:
        """Leave the epoch: forget slots and plans, and ignore plans until the next ``start``."""
        self._start = None
        self._table = None
        self._queue.clear()
        self._expected = 0
        self._refused = False

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

    def refuse(self) -> None:
        """Close to plans until the next ``start``, as after a refused plan."""
        self._refused = True
        self._queue.clear()

    def _refuse(self, reason: str) -> NoReturn:
        self.refuse()
        raise PlanRefused(reason)

    # -- plans -----------------------------------------------------------------------------------------------

    def accept(self, frames: Sequence[bytes], received_us: int = 0) -> None:
        """Queue a plan: the frames of its message, zero or more REGISTER and one PLAN. Raises
        ``PlanRefused``.
        """
        try:
            messages = [decode_to_worker(frame) for frame in frames]
        except WireError as error:
            self._refuse(f"not a plan: {error}")
        self.accept_messages(messages, received_us)

    def accept_messages(self, messages: Sequence[ToWorker], received_us: int = 0) -> None:
        """Queue a decoded plan. Raises ``PlanRefused``; ignores it if an earlier one was refused."""
        if self._refused:
            return
        plan = messages[-1] if messages else None
        if not isinstance(plan, BatchPlan):
            self._refuse("not a plan: the last frame is no PLAN")
        registers = [message for message in messages[:-1] if isinstance(message, Register)]
        if len(registers) != len(messages) - 1:
            self._refuse("not a plan: a frame before the PLAN is no REGISTER")
        if self._table is None:
            self._refuse(f"plan of epoch {plan.epoch} before an epoch was begun")
        if plan.epoch != self.epoch:
            self._refuse(f"plan of epoch {plan.epoch} in epoch {self.epoch}")
        if plan.step != self._expected:
            self._refuse(f"step {plan.step} came, {self._expected} was expected")
        self._expected += 1
        self._queue.append(_Queued(registers, plan, received_us))

    def _head(self) -> tuple[_Queued, StageBatch] | None:
        if not self._queue or self._table is None:
            return None
        head = self._queue[0]
        if head.batch is None:
            try:
                head.batch = self._table.apply(head.registers, head.plan)
            except PlanRefused as error:
                self._refuse(f"step {head.plan.step}: {error}")
            head.digest = self._table.digest(head.plan.step)
        return head, head.batch

    def awaited_step(self) -> int | None:
        """The step whose hidden states the stage needs next, None if it needs none. Raises ``PlanRefused``."""
        head = self._head()
        if head is None or self.first or head[1].num_tokens == 0:
            return None
        return head[0].plan.step

    def can_run(self, have_hidden: bool = False) -> bool:
        """Whether the oldest plan's inputs are here (``have_hidden``: those of ``awaited_step``).

        Raises ``PlanRefused`` when that plan cannot be applied.
        """
        head = self._head()
        if head is None:
            return False
        if head[1].num_tokens == 0:
            return True
        if not self.first:
            return have_hidden
        assert self._table is not None
        return self._table.inputs_arrived(head[1])

    def execute(self, hidden: NDArray[np.uint8] | None = None) -> Outcome:
        """Run the oldest plan; only when ``can_run``. A plan without rows computes nothing."""
        head = self._head()
        if head is None:
            raise RuntimeError("there is no plan to run")
        queued, batch = head
        table = self._table
        assert table is not None
        output: NDArray[Any] | None = None
        if batch.num_tokens:
            if self.first:
                table.fill_inputs(batch)
            output = self.runner.run(batch, hidden)
        self._queue.popleft()
        sampled, ids, stopped = None, b"", b""
        if self.last and batch.sampling is not None and len(batch.sampling.rows):
            assert output is not None
            sampled, ids, stopped = self._sampled(table, batch, output)
            if self.first:
                self.take_ids(sampled)
        plan = queued.plan
        return Outcome(
            epoch=plan.epoch,
            step=plan.step,
            lane=plan.lane,
            tokens=batch.num_tokens,
            received_us=queued.received_us,
            hidden=None if self.last else output,
            sampled=sampled,
            ids=ids,
            stopped=stopped,
            digest=queued.digest,
        )

    def _sampled(self, table: SlotTable, batch: StageBatch, output: NDArray[Any]) -> tuple[SampledIds, bytes, bytes]:
        assert batch.sampling is not None
        slots = batch.slots[batch.sampling.rows].astype(np.int64)
        ids = output.astype(np.int64)
        by_slot = np.zeros(int(slots.max()) + 1, "<u4")
        by_slot[slots] = ids
        stopped = table.stopped(slots, ids, batch.sampling.position)
        sampled = SampledIds(batch.step, slots, table.generations(slots), ids)
        return sampled, by_slot.tobytes(), stopped.astype("<u2").tobytes()

    def take_ids(self, sampled: SampledIds) -> None:
        """First stage: take what the last stage sampled."""
        if self._table is not None and not self._refused:
            self._table.append(sampled.slots, sampled.generations, sampled.ids)
