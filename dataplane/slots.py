"""The slot-indexed state of one rank, and the batches derived from it.

A plan is a difference; ``SlotTable`` applies it (release, register, grow, run) and derives what the stage
computes. Each sequence has *known* tokens (a count: tokens still being sampled are known, since their places
are) and *computed* tokens (their KV is in the cache). On the first stage *arrived* counts the known tokens
whose ids are here; it lags behind *known* while a sampled id is on its way from the last stage.

    0 ........ computed ........ arrived ........ known ........ max_len
      in cache          ids here        being sampled     may come

Called by ``StageExecutor``, in step order, while the device still runs the batch before: a batch therefore shares
nothing with the table. A plan that refers to what does not exist raises ``PlanRefused``; the table is then unusable
until the next epoch. Work per plan is a fixed number of array operations, except that registrations and chunks,
which are few, cost a few more each. An operation on a row of each sequence takes about a microsecond, so their number
is what counts: conditions are checked for all rows at once, and looked at one by one only when one of them fails.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..control.wire import BatchPlan, Register, Start
from ..control.wire.digest import audit_digest, audited, is_audited
from .batch import Flags, Int32, Int64, Receivers, SamplingRows, StageBatch
from .extras import Extras

_INT32_MAX = (1 << 31) - 1
_NONE: Int64 = np.empty(0, np.int64)


class PlanRefused(Exception):
    """A plan or an epoch that this rank cannot follow. The text says why and becomes ``Resync.reason``."""


class SlotTable:
    """State of all slots of one rank during one epoch."""

    def __init__(self, start: Start, *, first: bool, last: bool, vocab_size: int = 1 << 32) -> None:
        slots = start.num_slots
        self._vocab_size = vocab_size
        self._first = first
        self._last = last
        self._num_slots = slots
        self._num_blocks = start.num_blocks
        self._block_size = start.block_size
        self._budget = start.token_budget
        self._max_model_len = start.max_model_len
        self._max_blocks = -(-start.max_model_len // start.block_size)
        #: The generation of the last registration, -1 before the first.
        self._generation = np.full(slots, -1, np.int64)
        #: The same while the slot is registered, else -1.
        self._owner = np.full(slots, -1, np.int64)
        self._computed = np.zeros(slots, np.int64)
        self._known = np.zeros(slots, np.int64)
        self._arrived = np.zeros(slots, np.int64)
        self._prompt_len = np.zeros(slots, np.int64)
        self._max_len = np.zeros(slots, np.int64)
        self._min_len = np.zeros(slots, np.int64)
        #: The id of the last arrived token, and those of them that are not in ``_tokens`` yet. A decode's input is
        #: the newest id of its slot, so it is found without a visit to as many pages as there are rows.
        self._newest = np.zeros(slots, np.int64)
        self._unwritten: list[tuple[Int64, Int64, Int64]] = []
        # Large and zero: the system commits these pages when they are first written.
        self._tokens = np.zeros((slots, start.max_model_len), np.uint32)
        self._table = np.zeros((slots, self._max_blocks), np.int32)
        self._num_blocks_of = np.zeros(slots, np.int64)
        #: Tokens that the blocks of a registered slot hold, else 0.
        self._room = np.zeros(slots, np.int64)
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._seed = np.zeros(slots, np.uint64)
        self._index = np.zeros(slots, np.uint32)
        # As wide as the longest list of stop ids so far; -1 matches no token.
        self._stop_ids = np.full((slots, 4), -1, np.int64)
        #: Last stage only.
        self._extras = Extras()
        #: For row numbers and for the query offsets of decodes; never written again.
        self._counting = np.arange(slots + 1, dtype=np.int32)
        self._scratch = np.zeros(slots, np.int64)

    # -- applying a plan -------------------------------------------------------------------------------------

    def apply(self, registers: Sequence[Register], plan: BatchPlan) -> StageBatch:
        """Apply a plan and derive its batch, without input ids (``fill_inputs``). Raises ``PlanRefused``."""
        self._write_back()
        self._release(self._slots_of(plan.released, "released"))
        for register in registers:
            self._register(register)
        self._grow(self._slots_of(plan.grow_slots, "grow_slots"), _words(plan.grow_blocks, "grow_blocks"))
        return self._run(plan)

    def _slots_of(self, buffer: bytes, field: str) -> Int64:
        if not buffer:
            return _NONE
        if len(buffer) % 2:
            raise PlanRefused(f"{field}: {len(buffer)} bytes are no list of slots")
        slots = np.frombuffer(buffer, "<u2").astype(np.int64)
        if len(slots) and slots.max() >= self._num_slots:
            raise PlanRefused(f"{field}: slot {slots.max()} of {self._num_slots}")
        return slots

    def _require_registered(self, slots: Int64, field: str) -> None:
        unknown = self._owner[slots] < 0
        if np.count_nonzero(unknown):
            raise PlanRefused(f"{field}: slot {slots[unknown][0]} is not registered")

    def _distinct(self, slots: Int64) -> bool:
        numbers = self._counting[: len(slots)]
        self._scratch[slots] = numbers
        return not np.count_nonzero(self._scratch[slots] != numbers)

    def _release(self, slots: Int64) -> None:
        if not len(slots):
            return
        self._require_registered(slots, "released")
        self._owner[slots] = -1
        self._room[slots] = 0
        if self._extras:
            self._extras.release(slots)

    def _register(self, message: Register) -> None:
        slot = message.slot
        name = f"register of slot {slot}"
        if slot >= self._num_slots:
            raise PlanRefused(f"{name}: there are {self._num_slots} slots")
        if self._owner[slot] >= 0:
            raise PlanRefused(f"{name}: it is still registered (generation {self._generation[slot]})")
        if message.generation <= self._generation[slot]:
            raise PlanRefused(f"{name}: generation {message.generation} after {self._generation[slot]}")
        tokens = _words(message.tokens, name)
        blocks = _words(message.blocks, name)
        known = len(tokens)
        if not message.computed < known <= message.max_len <= self._max_model_len:
            raise PlanRefused(
                f"{name}: computed {message.computed} < known {known} <= max_len {message.max_len}"
                f" <= {self._max_model_len} does not hold"
            )
        if tokens.max() >= self._vocab_size:
            raise PlanRefused(f"{name}: token {tokens.max()} of {self._vocab_size}")
        if message.prompt_len > known:
            raise PlanRefused(f"{name}: prompt of {message.prompt_len} in {known} tokens")
        if len(blocks) > self._max_blocks or len(blocks) * self._block_size < message.computed:
            raise PlanRefused(f"{name}: {len(blocks)} blocks for {message.computed} computed tokens")
        if len(blocks) and blocks.max() >= self._num_blocks:
            raise PlanRefused(f"{name}: block {blocks.max()} of {self._num_blocks}")
        self._table[slot, len(blocks) : self._num_blocks_of[slot]] = 0
        self._table[slot, : len(blocks)] = blocks
        self._num_blocks_of[slot] = len(blocks)
        self._tokens[slot, :known] = tokens
        self._room[slot] = len(blocks) * self._block_size
        self._generation[slot] = self._owner[slot] = message.generation
        self._computed[slot] = message.computed
        self._known[slot] = self._arrived[slot] = known
        self._newest[slot] = tokens[-1]
        self._prompt_len[slot] = message.prompt_len
        self._max_len[slot] = message.max_len
        self._min_len[slot] = message.min_len
        self._set_sampling(slot, message)
        if self._last:
            try:
                self._extras.register(message, tokens, self._vocab_size)
            except ValueError as error:
                raise PlanRefused(f"{name}: {error}") from None

    def _set_sampling(self, slot: int, message: Register) -> None:
        sampling = message.sampling
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = min(sampling.top_k, _INT32_MAX)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._index[slot] = sampling.index
        stops = message.stop_ids
        width = self._stop_ids.shape[1]
        if len(stops) > width:
            wider = np.full((self._num_slots, len(stops)), -1, np.int64)
            wider[:, :width] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stops)] = stops

    def _grow(self, slots: Int64, blocks: NDArray[np.uint32]) -> None:
        if len(slots) != len(blocks):
            raise PlanRefused(f"growth: {len(slots)} slots and {len(blocks)} blocks")
        if not len(slots):
            return
        self._require_registered(slots, "grow_slots")
        if not self._distinct(slots):
            raise PlanRefused("growth: a slot grows twice")
        if blocks.max() >= self._num_blocks:
            raise PlanRefused(f"growth: block {blocks.max()} of {self._num_blocks}")
        ends = self._num_blocks_of[slots]
        if ends.max() >= self._max_blocks:
            raise PlanRefused(f"growth: slot {slots[ends.argmax()]} has {ends.max()} blocks, the most there can be")
        self._table[slots, ends] = blocks
        self._num_blocks_of[slots] = ends + 1
        self._room[slots] += self._block_size

    # -- deriving the batch ----------------------------------------------------------------------------------

    def _rows(self, plan: BatchPlan) -> tuple[Int64, Int64 | None, int]:
        """Slots and query lengths of all rows (None: all decode), and how many of them decode."""
        bits = np.unpackbits(np.frombuffer(plan.decodes, np.uint8), bitorder="little")
        decodes = bits.nonzero()[0]
        if len(decodes) and decodes[-1] >= self._num_slots:
            raise PlanRefused(f"decodes: slot {decodes[-1]} of {self._num_slots}")
        chunks = self._slots_of(plan.chunk_slots, "chunk_slots")
        lengths = _words(plan.chunk_tokens, "chunk_tokens")
        if len(chunks) != len(lengths):
            raise PlanRefused(f"chunks: {len(chunks)} slots and {len(lengths)} lengths")
        if not len(chunks):
            return decodes, None, len(decodes)
        if not lengths.all():
            raise PlanRefused(f"chunk of slot {chunks[lengths.argmin()]} is empty")
        order = np.argsort(chunks)
        slots = np.concatenate((decodes, chunks[order]))
        if len(slots) > self._num_slots or not self._distinct(slots):
            raise PlanRefused("a slot has two rows")
        queries = np.ones(len(slots), np.int64)
        queries[len(decodes) :] = lengths[order]
        return slots, queries, len(decodes)

    def _run(self, plan: BatchPlan) -> StageBatch:
        slots, queries, num_decodes = self._rows(plan)
        before = self._computed[slots]
        if queries is None:
            after = before + 1
            cu_q = self._counting[: len(slots) + 1]
        else:
            after = before + queries
            cu_q = np.zeros(len(slots) + 1, np.int32)
            np.cumsum(queries, out=cu_q[1:])
        total = int(cu_q[-1])
        if total > self._budget:
            raise PlanRefused(f"{total} tokens with a budget of {self._budget}")
        known = self._known[slots]
        samples = after == known
        self._check_rows(slots, after, known, samples, num_decodes)
        if queries is None:
            positions, places = before, slots
        else:
            positions = np.arange(total) + np.repeat(before - cu_q[:-1], queries)
            places = np.repeat(slots, queries)
        block_of = positions // self._block_size
        write = (self._table[places, block_of] - block_of) * self._block_size + positions
        sampling = receivers = None
        prompts = ()
        if self._last:
            sampling, receivers = self._sampling(samples, slots, known)
            if self._extras:
                prompts = self._extras.of_prompts(slots, cu_q, before, num_decodes)
        self._computed[slots] = after
        self._known[slots] = known + samples
        return StageBatch(
            step=plan.step,
            lane=plan.lane,
            slots=slots,
            num_decodes=num_decodes,
            cu_q=cu_q,
            positions=positions,
            kv_len=after.astype(np.int32),
            block_table=self._blocks_of(slots, after),
            write=write,
            ids=None,
            sampling=sampling,
            receivers=receivers,
            prompt_len=self._prompt_len[slots],
            prompts=prompts,
        )

    def _blocks_of(self, slots: Int64, after: Int64) -> Int32:
        width = int(-(-after.max() // self._block_size)) if len(slots) else 0
        if 4 * width > self._max_blocks:
            # Whole rows are copied faster than parts of rows, unless the parts are small.
            return self._table.take(slots, axis=0)[:, :width]
        return self._table[slots, :width]

    def _check_rows(self, slots: Int64, after: Int64, known: Int64, samples: Flags, num_decodes: int) -> None:
        """Refuse the first row that asks for what it cannot have."""
        late = np.count_nonzero(after > np.minimum(known, self._room[slots]))
        full = np.count_nonzero(samples & (known >= self._max_len[slots]))
        if not late and not full and np.count_nonzero(samples[:num_decodes]) == num_decodes:
            return
        self._require_registered(slots, "rows")
        if (bad := after > known).any():
            row = bad.argmax()
            raise PlanRefused(f"slot {slots[row]}: to {after[row]} tokens, {known[row]} are known")
        if not samples[:num_decodes].all():
            row = samples[:num_decodes].argmin()
            raise PlanRefused(f"slot {slots[row]} decodes at {after[row] - 1}, {known[row]} tokens are known")
        if (bad := after > self._room[slots]).any():
            row = bad.argmax()
            blocks = self._num_blocks_of[slots[row]]
            raise PlanRefused(f"slot {slots[row]}: {after[row]} tokens past its {blocks} blocks")
        row = (samples & (known >= self._max_len[slots])).argmax()
        raise PlanRefused(f"slot {slots[row]} would sample past its {known[row]} tokens, its maximum")

    def _sampling(self, samples: Flags, slots: Int64, known: Int64) -> tuple[SamplingRows, Receivers]:
        if np.count_nonzero(samples) == len(slots):
            rows = self._counting[: len(slots)]
        else:
            rows = samples.nonzero()[0].astype(np.int32)
            slots, known = slots[samples], known[samples]
        sampling = SamplingRows(
            rows=rows,
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seed=self._seed[slots],
            index=self._index[slots],
            position=known,
            prompt_len=self._prompt_len[slots],
        )
        receivers = Receivers(slots, self._owner[slots], self._stop_ids.take(slots, axis=0), self._min_len[slots])
        early = known + 1 < receivers.min_len
        if self._extras or np.count_nonzero(early):
            sampling.extras = self._extras.of_rows(slots, early, receivers.stop_ids)
        return sampling, receivers

    # -- ids in and out --------------------------------------------------------------------------------------

    def inputs_arrived(self, batch: StageBatch) -> bool:
        """First stage: whether every row's input ids are here. A row in doubt is one whose id is being
        sampled.
        """
        return not np.count_nonzero(self._arrived[batch.slots] < batch.kv_len)

    def fill_inputs(self, batch: StageBatch) -> None:
        """First stage: set ``batch.ids``; only when ``inputs_arrived``."""
        if batch.num_decodes == len(batch.slots):
            batch.ids = self._newest[batch.slots]
            return
        self._write_back()
        places = np.repeat(batch.slots, np.diff(batch.cu_q))
        batch.ids = self._tokens[places, batch.positions].astype(np.int64)

    def append(self, slots: Int64, generations: Int64, ids: Int64) -> None:
        """First stage: take ids that the last stage sampled, one a slot. Those of an older registration are
        dropped.
        """
        current = self._owner[slots] == generations
        if np.count_nonzero(current) < len(slots):
            slots, ids = slots[current], ids[current]
        ends = self._arrived[slots]
        self._newest[slots] = ids
        self._arrived[slots] = ends + 1
        self._unwritten.append((slots, ends, ids))

    def _write_back(self) -> None:
        for slots, ends, ids in self._unwritten:
            self._tokens[slots, ends] = ids
        self._unwritten.clear()

    def digest(self, step: int) -> int | None:
        """The checksum of the slots that ``step`` audits, None where it audits none. Call between two plans."""
        if not is_audited(step):
            return None
        return audit_digest(
            (
                slot,
                int(self._generation[slot]),
                int(self._computed[slot]),
                self._table[slot, : self._num_blocks_of[slot]].astype("<u4").tobytes(),
            )
            for slot in audited(step, self._num_slots)
            if self._owner[slot] >= 0
        )


def _words(buffer: bytes, field: str) -> NDArray[np.uint32]:
    if len(buffer) % 4:
        raise PlanRefused(f"{field}: {len(buffer)} bytes are no list of u32")
    return np.frombuffer(buffer, "<u4")
