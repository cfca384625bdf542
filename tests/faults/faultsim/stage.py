"""One stage of a scripted worker: ``StageExecutor`` over a ``SlotTable`` and a ``ShadowRunner`` in plain Python.

It follows plans, refuses plans and samples exactly as those three do (a test holds them side by side), at a tenth of
the cost for the few short sequences of a simulation, where every numpy call costs more than its work. Only sequences
whose KV is wrong get other wrong ids than there.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.control.wire import BatchPlan, Hello, Register, Result, Sampling, Start, ToWorker
from evenflow.control.wire.digest import audit_digest, audited, is_audited
from evenflow.dataplane.slots import PlanRefused

from .pages import Pages, drawn

#: Tokens on their way to the next stage: for each its word, and the sum over what it saw.
Hidden = list[tuple[int, int]]
#: Slot, generation, id.
Sampled = list[tuple[int, int, int]]


class Slot:
    """A registered sequence."""

    __slots__ = (
        "computed",
        "generation",
        "known",
        "live",
        "max_len",
        "min_len",
        "prompt_len",
        "sampling",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(self) -> None:
        self.generation = -1
        self.live = False
        self.computed = self.known = self.prompt_len = self.max_len = self.min_len = 0
        self.tokens: list[int] = []  #: those that are here; only the first stage learns of sampled ones
        self.table: list[int] = []
        self.sampling = Sampling()
        self.stop_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Row:
    slot: int
    state: Slot
    generation: int
    start: int
    count: int
    table: list[int]
    samples: bool
    sampling: Sampling
    stop_ids: tuple[int, ...]
    min_len: int


@dataclass(slots=True)
class Batch:
    """A plan that was applied. ``ids``: the tokens of each row, set when it is launched on the first stage."""

    plan: BatchPlan
    received_us: int
    rows: list[Row]
    digest: int | None
    ids: list[list[int]] | None = None

    @property
    def empty(self) -> bool:
        return not self.rows


@dataclass(slots=True)
class Outcome:
    """What an iteration left; ``hidden`` for the next stage, ``sampled`` on the last."""

    batch: Batch
    hidden: Hidden | None
    sampled: Sampled | None
    stopped: list[int]

    def result(self, started_us: int, ended_us: int, idle_us: int, starved_us: int) -> Result:
        ids = b""
        if self.sampled:
            by_slot = array("I", bytes(4 * (self.sampled[-1][0] + 1)))
            if len(self.sampled) > 1:
                by_slot = array("I", bytes(4 * (max(slot for slot, _, _ in self.sampled) + 1)))
            for slot, _, token in self.sampled:
                by_slot[slot] = token
            ids = by_slot.tobytes()
        plan = self.batch.plan
        return Result(
            plan.epoch,
            plan.step,
            plan.lane,
            self.batch.received_us,
            started_us,
            ended_us,
            idle_us,
            starved_us,
            ids,
            array("H", self.stopped).tobytes(),
            self.batch.digest,
        )


@dataclass(frozen=True, slots=True)
class Build:
    """What a worker has: the fields of its hello."""

    block_size: int = 16
    num_blocks: int = 64
    max_tokens: int = 256
    num_slots: int = 64
    max_model_len: int = 512
    vocab_size: int = 1000
    tile: int = 0
    eos_ids: tuple[int, ...] = (0,)
    model: str = "shadow"

    def hello(self, replica: int, stage: int, stages: int, pid: int) -> Hello:
        return Hello(
            1,
            replica,
            stage,
            0,
            stages,
            pid,
            self.model,
            self.eos_ids,
            self.block_size,
            self.num_blocks,
            self.max_tokens,
            self.num_slots,
            self.max_model_len,
            self.vocab_size,
            "cpu",
            self.tile,
        )


class LightStage:
    """Executes the plans of one stage, one at a time: ``launch``, then ``collect``."""

    def __init__(self, build: Build, stage: int, stages: int) -> None:
        self.build = build
        self.stage, self.stages = stage, stages
        self.first, self.last = stage == 0, stage == stages - 1
        self.epoch = 0
        self.expected = 0
        self.refused = False
        self._reason: str | None = None
        self._start: Start | None = None
        self._slots: list[Slot] = []
        self._pages = Pages(0, build.block_size)
        self._queue: deque[tuple[list[Register], BatchPlan, int]] = deque()
        self._head: Batch | None = None
        self.running: Batch | None = None

    # ---- epochs ----------------------------------------------------------------------------------------------

    def start(self, start: Start) -> None:
        """Begin an epoch. Raises ``PlanRefused``."""
        self.stop()
        self._start, self.epoch = start, start.epoch
        build = self.build
        bounds = (
            ("stages", start.stages, self.stages, start.stages == self.stages),
            ("block_size", start.block_size, build.block_size, start.block_size == build.block_size),
            ("num_blocks", start.num_blocks, build.num_blocks, 0 < start.num_blocks <= build.num_blocks),
            ("num_slots", start.num_slots, build.num_slots, 0 < start.num_slots <= build.num_slots),
            ("token_budget", start.token_budget, build.max_tokens, 0 < start.token_budget <= build.max_tokens),
            (
                "max_model_len",
                start.max_model_len,
                build.max_model_len,
                0 < start.max_model_len <= build.max_model_len,
            ),
        )
        for field, asked, here, holds in bounds:
            if not holds:
                self.refuse()
                raise PlanRefused(f"start: {field} {asked}, this worker has {here}")
        self._slots = [Slot() for _ in range(start.num_slots)]
        self._pages = Pages(start.num_blocks, start.block_size)

    def stop(self) -> None:
        self._start, self.epoch, self.expected = None, 0, 0
        self._slots = []
        self._queue.clear()
        self._head = self.running = None
        self.refused, self._reason = False, None

    def refuse(self) -> None:
        self.refused, self._reason = True, None
        self._queue.clear()
        self._head = None

    def close(self, reason: str) -> None:
        """Close to plans until the next ``start``: ``PlanRefused`` is raised when those queued have run."""
        if not self.refused:
            self.refused, self._reason = True, reason

    # ---- plans -----------------------------------------------------------------------------------------------

    def accept(self, messages: Sequence[ToWorker], received_us: int = 0) -> None:
        """Queue a plan, or close to it and all later ones."""
        if self.refused:
            return
        plan = messages[-1]
        registers = [message for message in messages[:-1] if isinstance(message, Register)]
        if not isinstance(plan, BatchPlan):
            self.close("not a plan: the last frame is no PLAN")
        elif len(registers) != len(messages) - 1:
            self.close("not a plan: a frame before the PLAN is no REGISTER")
        elif not self._slots:
            self.close(f"plan of epoch {plan.epoch} before an epoch was begun")
        elif plan.epoch != self.epoch:
            self.close(f"plan of epoch {plan.epoch} in epoch {self.epoch}")
        elif plan.step != self.expected:
            self.close(f"step {plan.step} came, {self.expected} was expected")
        else:
            self.expected += 1
            self._queue.append((registers, plan, received_us))

    def prepare(self) -> None:
        """Apply the oldest queued plan."""
        if self._head is not None or not self._queue:
            return
        registers, plan, received_us = self._queue.popleft()
        try:
            rows = self._apply(registers, plan)
        except PlanRefused as error:
            self.refuse()
            self._reason = f"step {plan.step}: {error}"
        else:
            self._head = Batch(plan, received_us, rows, self._digest(plan.step))

    def _turn(self) -> Batch | None:
        self.prepare()
        if self._head is None and self._reason is not None and not self._queue:
            reason, self._reason = self._reason, None
            raise PlanRefused(reason)
        return self._head

    def awaited_step(self) -> int | None:
        """The step whose hidden states are needed next. Raises ``PlanRefused``."""
        batch = self._turn()
        return None if batch is None or self.first or batch.empty else batch.plan.step

    def can_run(self, have_hidden: bool = False) -> bool:
        """Whether the oldest plan's inputs are here. Raises ``PlanRefused``."""
        batch = self._turn()
        if batch is None or self.running is not None:
            return False
        if batch.empty:
            return True
        if not self.first:
            return have_hidden
        return all(len(row.state.tokens) >= row.start + row.count for row in batch.rows)

    def launch(self) -> Batch:
        batch, self._head = self._head, None
        assert batch is not None and self.running is None
        if self.first:
            batch.ids = [row.state.tokens[row.start : row.start + row.count] for row in batch.rows]
        self.running = batch
        self.prepare()
        return batch

    def collect(self, hidden: Hidden | None = None) -> Outcome:
        batch, self.running = self.running, None
        assert batch is not None
        out: Hidden = []
        sampled: Sampled = []
        stopped: list[int] = []
        at = 0
        for number, row in enumerate(batch.rows):
            if batch.ids is not None:
                place = row.start
                words = []
                for token in batch.ids[number]:
                    words.append(token << 32 | place)
                    place += 1
                before = None
            else:
                assert hidden is not None
                part = hidden[at : at + row.count]
                at += row.count
                words = [word for word, _ in part]
                before = [found for _, found in part]
            found = self._pages.compute(row.table, row.start, words, before)
            if not self.last:
                out += zip(words, found, strict=True)
            elif row.samples:
                token = self._draw(row, found[-1])
                sampled.append((row.slot, row.generation, token))
                if token in row.stop_ids and row.start + row.count + 1 >= row.min_len:
                    stopped.append(row.slot)
        if self.last and self.first:
            self.take_ids(sampled)
        return Outcome(batch, None if self.last or batch.empty else out, sampled if self.last else None, stopped)

    def take_ids(self, sampled: Sampled) -> None:
        """First stage: take what the last stage sampled."""
        for slot, generation, token in sampled:
            if slot < len(self._slots):
                state = self._slots[slot]
                if state.live and state.generation == generation:
                    state.tokens.append(token)

    # ---- the slot table --------------------------------------------------------------------------------------

    def _apply(self, registers: list[Register], plan: BatchPlan) -> list[Row]:
        for slot in self._slots_of(plan.released, "released"):
            if not self._slots[slot].live:
                raise PlanRefused(f"released: slot {slot} is not registered")
            self._slots[slot].live = False
        for register in registers:
            self._register(register)
        self._grow(self._slots_of(plan.grow_slots, "grow_slots"), _words(plan.grow_blocks, "grow_blocks"))
        return self._rows(plan)

    def _slots_of(self, buffer: bytes, field: str) -> Sequence[int]:
        if not buffer:
            return ()
        if len(buffer) % 2:
            raise PlanRefused(f"{field}: {len(buffer)} bytes are no list of slots")
        slots = array("H", buffer)
        if max(slots) >= len(self._slots):
            raise PlanRefused(f"{field}: slot {max(slots)} of {len(self._slots)}")
        return slots

    def _register(self, message: Register) -> None:
        slot, start = message.slot, self._start
        assert start is not None
        name = f"register of slot {slot}"
        if slot >= len(self._slots):
            raise PlanRefused(f"{name}: there are {len(self._slots)} slots")
        state = self._slots[slot]
        if state.live:
            raise PlanRefused(f"{name}: it is still registered (generation {state.generation})")
        if message.generation <= state.generation:
            raise PlanRefused(f"{name}: generation {message.generation} after {state.generation}")
        tokens, blocks = _words(message.tokens, name), _words(message.blocks, name)
        known, longest = len(tokens), start.max_model_len
        if not message.computed < known <= message.max_len <= longest:
            raise PlanRefused(
                f"{name}: computed {message.computed} < known {known} <= max_len {message.max_len}"
                f" <= {longest} does not hold"
            )
        if message.prompt_len > known:
            raise PlanRefused(f"{name}: prompt of {message.prompt_len} in {known} tokens")
        if len(blocks) > -(-longest // start.block_size) or len(blocks) * start.block_size < message.computed:
            raise PlanRefused(f"{name}: {len(blocks)} blocks for {message.computed} computed tokens")
        if blocks and max(blocks) >= start.num_blocks:
            raise PlanRefused(f"{name}: block {max(blocks)} of {start.num_blocks}")
        # A new object: rows of plans that still run hold the old one.
        state = self._slots[slot] = Slot()
        state.generation, state.live = message.generation, True
        state.computed, state.known = message.computed, known
        state.tokens, state.table = tokens, blocks
        state.prompt_len, state.max_len, state.min_len = message.prompt_len, message.max_len, message.min_len
        state.sampling, state.stop_ids = message.sampling, message.stop_ids

    def _grow(self, slots: Sequence[int], blocks: list[int]) -> None:
        if len(slots) != len(blocks):
            raise PlanRefused(f"growth: {len(slots)} slots and {len(blocks)} blocks")
        if not slots:
            return
        assert self._start is not None
        most = -(-self._start.max_model_len // self._start.block_size)
        for slot in slots:
            if not self._slots[slot].live:
                raise PlanRefused(f"grow_slots: slot {slot} is not registered")
        if len(set(slots)) != len(slots):
            raise PlanRefused("growth: a slot grows twice")
        if max(blocks) >= self._start.num_blocks:
            raise PlanRefused(f"growth: block {max(blocks)} of {self._start.num_blocks}")
        for slot, block in zip(slots, blocks, strict=True):
            table = self._slots[slot].table
            if len(table) >= most:
                raise PlanRefused(f"growth: slot {slot} has {len(table)} blocks, the most there can be")
            table.append(block)

    def _rows(self, plan: BatchPlan) -> list[Row]:
        start = self._start
        assert start is not None
        decodes = bits(plan.decodes)
        if decodes and decodes[-1] >= len(self._slots):
            raise PlanRefused(f"decodes: slot {decodes[-1]} of {len(self._slots)}")
        chunks, lengths = self._slots_of(plan.chunk_slots, "chunk_slots"), _words(plan.chunk_tokens, "chunk_tokens")
        if len(chunks) != len(lengths):
            raise PlanRefused(f"chunks: {len(chunks)} slots and {len(lengths)} lengths")
        if 0 in lengths:
            raise PlanRefused(f"chunk of slot {chunks[lengths.index(0)]} is empty")
        wanted = [(slot, 1) for slot in decodes] + sorted(zip(chunks, lengths, strict=True))
        if len({slot for slot, _ in wanted}) != len(wanted):
            raise PlanRefused("a slot has two rows")
        total = sum(count for _, count in wanted)
        if total > start.token_budget:
            raise PlanRefused(f"{total} tokens with a budget of {start.token_budget}")
        rows: list[Row] = []
        size = start.block_size
        for number, (slot, count) in enumerate(wanted):
            state = self._slots[slot]
            if not state.live:
                raise PlanRefused(f"rows: slot {slot} is not registered")
            before, known = state.computed, state.known
            after = before + count
            if after > known:
                raise PlanRefused(f"slot {slot}: to {after} tokens, {known} are known")
            samples = after == known
            if number < len(decodes) and not samples:
                raise PlanRefused(f"slot {slot} decodes at {before}, {known} tokens are known")
            if after > len(state.table) * size:
                raise PlanRefused(f"slot {slot}: {after} tokens past its {len(state.table)} blocks")
            if samples and known >= state.max_len:
                raise PlanRefused(f"slot {slot} would sample past its {known} tokens, its maximum")
            state.computed = after
            state.known = known + samples
            rows.append(
                Row(
                    slot,
                    state,
                    state.generation,
                    before,
                    count,
                    state.table[: -(-after // size)],
                    samples,
                    state.sampling,
                    state.stop_ids,
                    state.min_len,
                )
            )
        return rows

    def _digest(self, step: int) -> int | None:
        if not is_audited(step):
            return None
        slots = self._slots
        return audit_digest(
            (slot, slots[slot].generation, slots[slot].computed, slots[slot].table)
            for slot in audited(step, len(slots))
            if slots[slot].live
        )

    def _draw(self, row: Row, state: int) -> int:
        return drawn(row.sampling, row.start + row.count, state, self.build.vocab_size)


def bits(bitmap: bytes) -> list[int]:
    """The slots of a bitmap, ascending."""
    found: list[int] = []
    for base, byte in enumerate(bitmap):
        while byte:
            low = byte & -byte
            byte ^= low
            found.append((base << 3) + low.bit_length() - 1)
    return found


def _words(buffer: bytes, field: str) -> list[int]:
    if len(buffer) % 4:
        raise PlanRefused(f"{field}: {len(buffer)} bytes are no list of u32")
    return array("I", buffer).tolist()
