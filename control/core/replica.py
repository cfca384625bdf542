"""One replica: its lanes, the sequences on it, and the window of plans that are in flight.

Up to *stages* + 1 plans are out (one a stage and one waiting), at most two of one lane. Blocks need no fence: every
rank runs plans in step order, so a block released in a plan may be granted again in the same one. Slots are fenced:
a slot is used again only after the results of all plans that name it, so a result row always belongs to
``owners[slot]``. Sequences that leave while results are in flight collect those themselves (``InFlight.late``).
"""

from __future__ import annotations

from array import array
from collections import deque
from heapq import heappush
from math import inf
from operator import attrgetter

from ..wire import BatchPlan, Register, Result
from ..wire.digest import audit_digest, audited, is_audited
from . import logprobs
from .admission import admit, make_way
from .balance import Balance, Drought, spare_lanes
from .blocks import BlockPool
from .budget import Budget
from .events import Delivered, Ended, Limits, OutOfStep, SendPlan
from .fair import Ledger
from .inflight import InFlight, named
from .lane import Lane
from .orders import make_queue
from .packing import pack_u16, pack_u32, span
from .policies import make_policy
from .policy import Chunks
from .role import Role
from .routing import owe
from .sequence import Phase, Sequence
from .timing import Features
from .waiting import WaitingQueue

_order = attrgetter("order")


class Replica:
    """Scheduler state of one replica during one epoch."""

    def __init__(
        self,
        index: int,
        epoch: int,
        stages: int,
        num_blocks: int,
        num_slots: int,
        limits: Limits,
        budget: Budget | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.stages = stages
        self.limits = limits
        self.budget = budget  #: in seconds; None: it is ``limits.token_budget``
        self.pool = BlockPool(num_blocks, limits.block_size, limits.prefix_caching)
        self.lanes = [Lane(i, num_slots, limits.block_size) for i in range(stages)]
        self.waiting = make_queue(limits, ledger)
        self.prefills: list[Sequence] = []  #: admitted, chunks to be planned; by admission order
        self.owed = 0  #: tokens to be computed of those that wait and of the prefills: the sum of ``Sequence.owed``
        self.running: dict[Sequence, None] = {}  #: PREFILL and DECODE
        self.settling: dict[Sequence, None] = {}
        self.inflight: deque[InFlight] = deque()
        self.owners: list[Sequence | None] = [None] * num_slots
        self.step = 0
        self.max_running = min(limits.max_num_seqs, limits.token_budget * stages, num_slots)
        self.policy = make_policy(limits.policy, stages)
        #: Blocks that admission leaves for the growth of those who run.
        self.watermark = 0 if self.policy.reserves else max(1, num_blocks // 100)
        self.preemptions = 0
        self.cache_queries = 0
        self.cache_hits = 0
        self.due = inf  #: when the replica wants to be asked for a plan again, although nothing else happens
        self.balance = Balance(stages, None if budget is None else budget.model)
        self._turn = 0
        self._drought = Drought()
        self.free_slots = list(range(num_slots))
        self.generations = [0] * num_slots
        self._released: list[int] = []
        self.registers: list[Register] = []
        self.alone: Sequence | None = None  #: under suspicion of killing workers: runs with nobody else
        self.ended: list[Ended] = []  #: ownership that ended outside a result, to be delivered
        self.role = Role()
        # Of the plan being made: whether the lane's decodes run, the slots that grow, and a block for each.
        self._ticks = False
        self._grown = b""
        self._blocks: list[int] = []

    # ---- admission -------------------------------------------------------------------------------------------

    def enqueue(self, seq: Sequence, owed: int) -> None:
        """Put ``seq``, of which about ``owed`` tokens are to be computed, into the waiting queue at its place."""
        seq.phase = Phase.WAITING
        owe(self, seq, owed)
        self.waiting.push(seq)

    def admit(self, room: int) -> Sequence | None:
        """Admit the next request, or one that passes it and needs at most ``room`` tokens; None if there is none that
        fits. It has blocks for all its known tokens then."""
        return admit(self, room)

    # ---- planning --------------------------------------------------------------------------------------------

    def plan_next(self, now: float) -> SendPlan | None:
        """The next plan, if one may be out and there is something to run at ``now``."""
        stages = self.stages
        if len(self.inflight) > stages or (self.budget is not None and self._waits(self.budget, now)):
            return None
        make_way(self)
        preempted = -1
        while preempted != self.preemptions:
            # Planning one lane can preempt work of another, which changes what the lanes before it could do.
            preempted = self.preemptions
            for offset in range(stages):
                lane = self.lanes[(self._turn + offset) % stages]
                if lane.in_flight < 2 and (lane.count or self.prefills or len(self.waiting)):
                    plan = self._plan(lane, now)
                    if plan is not None:
                        self._turn = (lane.index + 1) % stages
                        return plan
        self._drought.nothing(now, self.due < inf)
        return None

    def _waits(self, budget: Budget, now: float) -> bool:
        """Whether the next plan is made later; then ``due`` says when."""
        budget.now = now
        at = budget.due(self.inflight) if self.running or self.waiting else -inf
        if at <= now:
            self.due = inf
            return False
        self.due = at
        self._drought.nothing(now, True)
        return True

    def _plan(self, lane: Lane, now: float) -> SendPlan | None:
        if self.stages > 1 and not self.policy.stays:
            self.balance.even_out(self, lane)
        self._ticks, self._grown, self._blocks = False, b"", []
        chunks = self.policy.choose(self, lane)
        ticks = self._ticks
        count = lane.count if ticks else 0
        if not count and not chunks:
            return None
        chunks.sort(key=_chunk_slot)
        record = InFlight(self.step, lane, ticks)
        predicted_us = 0
        if self.budget is not None:
            kv_tokens = lane.kv_tokens if ticks else 0
            record.timed = timed = self.budget.planned(chunks, count, kv_tokens, not self.inflight)
            predicted_us = int(timed.seconds * 1e6)
        tokens = count
        finals = self._advance(record, chunks)
        attention = 0.0
        for seq, taken in chunks:
            tokens += taken
            attention += taken * (seq.computed - 0.5 * (taken - 1))
        plan = BatchPlan(
            self.epoch,
            self.step,
            lane.index,
            record.decodes,
            self._grown,
            pack_u32(self._blocks),
            pack_u16([seq.slot for seq, _ in chunks]),
            pack_u32([taken for _, taken in chunks]),
            pack_u16(self._released),
        )
        if self._released:
            self._released = []
        registers, self.registers = self.registers, []
        digest = self._digest(lane if ticks else None) if is_audited(self.step) else None
        kv_tokens = lane.kv_tokens if ticks else 0
        self.step += 1
        self.inflight.append(record)
        lane.in_flight += 1
        if ticks:
            due = lane.ends.pop(lane.tick, None)
            lane.tick += 1
            if due is not None:
                for seq in due.values():
                    self._settle(seq)
        awaits = lane.awaits if count else -1
        if count:
            lane.awaits = record.step
        for seq in finals:
            self._join(seq, lane, record.step)
        spare = 0
        if self.stages > 1:
            spare = spare_lanes(self, lane, chunks)
            record.features = Features(tokens - count, attention, count, kv_tokens)
        dry_us = self._drought.end(now)
        return SendPlan(
            self.index,
            registers,
            plan,
            digest,
            tokens,
            count,
            kv_tokens,
            predicted_us,
            attention,
            dry_us,
            awaits,
            spare,
        )

    def run_decodes(self, lane: Lane) -> int:
        """Let the decodes of ``lane`` run in the plan being made, and grow those that cross into a new block, at the
        cost of the last in admission order if need be. Called by the policy, before it chooses chunks; returns how
        many run. A lane whose decodes do not run does not tick: nothing of them changes."""
        lane.gather_due()
        pool = self.pool
        crossing = lane.grow[lane.tick % lane.block_size]
        while len(crossing) > pool.available:
            self.preempt(self.waiting.last())
        self._ticks = True
        self._grown = pack_u16(crossing)
        self._blocks = blocks = pool.alloc(len(crossing))
        for at, table in enumerate(crossing.values()):
            table.append(blocks[at])
        return lane.count

    def _advance(self, record: InFlight, chunks: Chunks) -> list[Sequence]:
        """Count the chunks as computed and name the blocks they fill; returns the sequences that now sample."""
        pool = self.pool
        block_size = pool.block_size
        live = record.live
        for seq, taken in chunks:
            computed = seq.computed = seq.computed + taken
            seq.owed -= taken
            self.owed -= taken
            pool.name(seq, computed // block_size)
            if computed < len(seq.tokens) >> 2:
                record.partial.append(seq)
                continue
            slot = seq.slot
            if slot >> 3 >= len(live):
                live.extend(bytes((slot >> 3) + 1 - len(live)))
            live[slot >> 3] |= 1 << (slot & 7)
            record.finals.append(seq)
            seq.pending += 1
            self.prefills.remove(seq)
            if record.sole != seq.owner:
                record.sole = seq.owner if not record.decodes and len(record.finals) == 1 else -1
        return record.finals

    def _join(self, seq: Sequence, lane: Lane, step: int) -> None:
        """``seq`` samples in the plan just made, of ``lane``: let it decode there."""
        known = (len(seq.tokens) >> 2) + 1
        if known == seq.max_len or self.role.keeps(seq):
            self._settle(seq)
            return
        seq.phase = Phase.DECODE
        if lane.count >= self.limits.token_budget:
            lane = min(self.lanes, key=_load)
        lane.join(seq, known)
        lane.awaits = step
        if self.budget is not None:
            self.budget.joined(seq)

    def move(self, seq: Sequence, to: Lane) -> None:
        """Let ``seq``, which decodes, do so in lane ``to`` from now on."""
        lane = seq.lane
        assert lane is not None
        known = seq.planned + 1
        self._leave_lane(seq, lane)
        to.join(seq, known)
        if to.awaits < lane.awaits:
            to.awaits = lane.awaits
        if self.budget is not None:
            self.budget.joined(seq)

    def _leave_lane(self, seq: Sequence, lane: Lane) -> None:
        """Take ``seq`` out of ``lane``; results in flight that hold a token of it are remembered with it."""
        since = max(seq.join_tick, lane.done)
        lane.leave(seq)
        if self.budget is not None:
            self.budget.left(seq)
        out = lane.tick - since
        if out > 0:
            # The lane's newest plans with decodes name it.
            for record in reversed(self.inflight):
                if record.lane is lane and record.ticks:
                    record.late.append(seq)
                    seq.pending += 1
                    out -= 1
                    if not out:
                        break

    def _digest(self, ticking: Lane | None) -> int:
        """What the workers' audit must give after this step, which runs the decodes of ``ticking``."""
        owners = self.owners
        entries: list[tuple[int, int, int, list[int]]] = []
        for slot in audited(self.step, len(owners)):
            seq = owners[slot]
            # A preempted sequence may run again, in another slot, before the old one is free.
            if seq is not None and seq.slot == slot and seq.phase in (Phase.PREFILL, Phase.DECODE):
                computed = seq.planned + (ticking is not None and seq.lane is ticking)
                entries.append((slot, seq.generation, computed, seq.table))
        return audit_digest(entries)

    # ---- leaving ---------------------------------------------------------------------------------------------

    def _settle(self, seq: Sequence) -> None:
        """Take a running sequence off the device: its blocks go, its tokens stay, results in flight still count."""
        lane = seq.lane
        if lane is not None:
            self._leave_lane(seq, lane)
        if seq.phase is Phase.PREFILL and seq in self.prefills:
            self.prefills.remove(seq)
            owe(self, seq, 0)
        if seq.table:
            pool = self.pool
            known, computed = len(seq.tokens) >> 2, seq.computed
            pool.name(seq, (known if known < computed else computed) // pool.block_size)
            pool.release(seq)
        del self.running[seq]
        self.waiting.left(seq)
        self._drop_slot(seq.slot)
        seq.phase = Phase.SETTLING
        if seq is self.alone:
            self.alone = None
        self.settling[seq] = None

    def _drop_slot(self, slot: int) -> None:
        self._released.append(slot)
        if self.inflight:
            self.inflight[-1].fenced.append(slot)
        else:
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        self.owners[slot] = None
        heappush(self.free_slots, slot)

    def preempt(self, seq: Sequence) -> None:
        """Let ``seq``, which runs, wait again: its blocks go, its tokens stay."""
        self.preemptions += 1
        self._settle(seq)
        if not seq.pending:
            self._settled(seq, self.ended)

    def _settled(self, seq: Sequence, ends: list[Ended]) -> None:
        """All results of a sequence that left have come: it has its length, or waits to go on."""
        del self.settling[seq]
        if seq.known >= seq.max_len:
            seq.phase = Phase.DONE
            ends.append(Ended(seq, seq.slot, "length"))
        else:
            ends.append(Ended(seq, seq.slot, "paused"))
            if not self.role.hands_on(seq):
                # What of it stays cached until then is not known.
                self.enqueue(seq, seq.known)

    def remove(self, seq: Sequence) -> None:
        """End ``seq`` wherever it is; rows of it that are in flight become void."""
        phase = seq.phase
        if phase is Phase.WAITING:
            self.waiting.remove(seq)
            owe(self, seq, 0)
        elif phase is not Phase.DONE:
            if phase is not Phase.SETTLING:
                self._settle(seq)
            del self.settling[seq]
            slot = seq.slot
            byte, mask = slot >> 3, ~(1 << (slot & 7))
            for record in self.inflight:
                if byte < len(record.live):
                    record.live[byte] &= mask
            self.role.release(self.pool, seq)
        seq.phase = Phase.DONE

    # ---- results ---------------------------------------------------------------------------------------------

    def receive(self, result: Result, now: float = 0.0, starved_us: int = 0) -> Delivered | OutOfStep | None:
        """Take in the last stage's result, which came at ``now``. Late duplicates and foreign epochs are dropped.

        ``starved_us``: for how long an earlier stage has waited for a plan.
        """
        if result.epoch != self.epoch or not self.inflight:
            return None
        record = self.inflight[0]
        if result.step != record.step:
            if result.step < record.step:
                return None
            return OutOfStep(self.index, f"result of step {result.step}, expected {record.step}")
        if result.lane != record.lane.index or len(result.stopped) & 1:
            text = f"lane {result.lane} of {record.lane.index}, {len(result.stopped)} bytes of stopped slots"
            return OutOfStep(self.index, f"step {result.step}: {text}")
        ids = memoryview(result.ids)
        live = record.live
        width = len(self.owners)
        if len(ids) & 3 or len(ids) > 4 * width or len(ids) < 4 * span(live):
            return OutOfStep(self.index, f"step {result.step}: {len(ids)} bytes of ids do not cover its rows")
        if result.logprobs and (fault := logprobs.fault(result, self.owners)) is not None:
            return OutOfStep(self.index, f"step {result.step}: {fault}")
        self.inflight.popleft()
        lane = record.lane
        lane.in_flight -= 1
        if record.ticks:
            lane.store(ids)
        if self.budget is not None and record.timed is not None:
            took = (result.ended_us - result.started_us) / 1e6
            starved = max(result.starved_us, starved_us) / 1e6
            self.budget.returned(record.timed, lane.index, record.ticks, lane.count > 0, took, starved, now)
        if record.features is not None:
            self.balance.learn(record.step, record.features, (result.ended_us - result.started_us) / 1e6)
        delivered = Delivered(self.index, record.step, live, ids, record.sole)
        ends = delivered.ends
        if self.ended:
            ends += self.ended
            self.ended = []
        if record.finals or record.late:
            self._collect(record, ids, delivered)
        if result.logprobs:
            delivered.logprobs = logprobs.settle(result, self.owners)
        if result.stopped:
            owners = self.owners
            for slot in array("H", result.stopped):
                seq = owners[slot] if slot < width else None
                if seq is None or seq.phase is Phase.DONE:
                    continue
                if slot >> 3 < len(live) and live[slot >> 3] & (1 << (slot & 7)):
                    self.remove(seq)
                    ends.append(Ended(seq, slot, "stop"))
        for seq in record.late:
            if not seq.pending and seq.phase is Phase.SETTLING:
                self._settled(seq, ends)
        for seq in record.finals:
            if not seq.pending and seq.phase is Phase.SETTLING:
                self._settled(seq, ends)
        for slot in record.fenced:
            self._free_slot(slot)
        if self.alone is not None and self.alone.phase is not Phase.DONE:
            self._acquit(self.alone)
        return delivered

    def _collect(self, record: InFlight, ids: memoryview, delivered: Delivered) -> None:
        values = ids.cast("I")
        for seq in record.finals:
            seq.pending -= 1
            if seq.phase is not Phase.DONE:
                seq.tokens += values[seq.slot].to_bytes(4, "little")
                delivered.starts.append((seq.slot, seq))
        for seq in record.late:
            seq.pending -= 1
            if seq.phase is not Phase.DONE:
                seq.tokens += values[seq.slot].to_bytes(4, "little")

    def _acquit(self, seq: Sequence) -> None:
        """A suspect that passed the point at which its worker died is trusted again."""
        if seq.received > seq.doubt_len:
            seq.deaths = 0
            self.alone = None

    def take_ended(self) -> Delivered:
        """Ownership that ended without a result to carry it."""
        ends, self.ended = self.ended, []
        return Delivered(self.index, self.step, b"", b"", -1, [], ends)

    # ---- the end of an epoch ---------------------------------------------------------------------------------

    def evacuate(self) -> tuple[list[Sequence], list[Ended]]:
        """End the epoch: all unfinished sequences, with the tokens whose results came, and the ownership that ends.

        Sequences in a plan that may have been running count one death more: in any that is out, since a worker
        launches the next plan before it tells of the last, and dies with what it had not told.
        """
        suspects = named(self.inflight, self.owners)
        ended = self.ended
        for seq in [*self.running, *self.settling]:
            if seq.lane is not None:
                seq.lane.leave(seq)
            ended.append(Ended(seq, seq.slot, "paused"))
        unfinished = sorted([*self.running, *self.settling, *self.waiting], key=_order)
        for seq in unfinished:
            seq.phase = Phase.WAITING
            seq.slot, seq.pending, seq.computed, seq.owed = -1, 0, 0, 0
            seq.table, seq.node, seq.named, seq.dups = [], None, 0, []
            if seq in suspects:
                seq.deaths += 1
                seq.doubt_len = seq.known
        self.waiting.close()
        self.waiting, self.prefills, self.running, self.settling, self.owed = WaitingQueue(), [], {}, {}, 0
        self.inflight.clear()
        self.ended = []
        self.role = Role()
        return unfinished, ended


def _chunk_slot(chunk: tuple[Sequence, int]) -> int:
    return chunk[0].slot


def _load(lane: Lane) -> tuple[int, int]:
    return lane.count, lane.kv_tokens
