"""Balance of a pipeline: lanes that cost the same, in their decodes and in the prompts they read.

A batch that costs more than its neighbours makes every stage wait for it: the stages after the first at once, the
first one round later.

**Decodes.** A sequence decodes at first in the lane that read the end of its prompt: only there the next turn is a
whole round later, so that the first stage need not wait for its id. When a lane's turn comes, it may give sequences
to other lanes, whose turns are then again a round after the sequence's last one, if all lanes are in use. It gives
until no lane has two sequences fewer than it has (one of a cost that brings the two closest). If it is then predicted
to cost more than the cheapest lane by more than ``SLACK``, it gives one more, which that lane returns at its own turn
in the form of a shorter one: an exchange, made only if it at least halves what the two lanes differ by. So nothing is
moved to and fro, and a move costs what a sequence's end and beginning do. No more than ``SAMPLE`` sequences of a lane
are looked at, and after a search for an exchange none is made for ``PAUSE`` ticks of the lane.

**Prompts.** While less is to be read than the turns of a round could take, each turn takes the same part of it. Small
batches pass a pipeline sooner than one large one, so first tokens come earlier too, unless the prompt costs little
beside what an iteration costs anyway. So of the numbers of turns that delay the end of the last chunk by no more than
``PATIENCE``, the largest is taken; both costs are measured, as what iterations without prompts take, and what others
take beyond that.

**A promise in milliseconds.** What moves waits for its next token by the turns between the two lanes longer than a
round. With a budget in seconds, nothing moves that would miss its target so, unless the lane's decodes miss it in any
case. While there are prompts to read, that budget evens out lanes by itself: one with less to decode reads more.

With one stage there is one lane, and none of this happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .policy import Chunks
from .sequence import Sequence
from .timing import Features, TimeModel

if TYPE_CHECKING:
    from .lane import Lane
    from .replica import Replica

#: Part of a lane's predicted cost by which it may exceed the cheapest one's.
SLACK = 0.05
#: Sequences of a lane that are looked at for a move.
SAMPLE = 32
#: Ticks of a lane between two searches for an exchange.
PAUSE = 4
#: Part by which spreading prompts over turns may delay the end of the last chunk.
PATIENCE = 0.1
#: Costs of an iteration, a token of a prompt, a decode and a KV token that it reads, before any are measured.
DECLARED = (20.0, 1.0, 1.0, 0.001)
#: The model of iteration time learns from one in so many iterations.
LEARN_EVERY = 4
#: Weight of an iteration in the means of what iterations take with and without prompts.
_RATE = 1.0 / 16.0


class Balance:
    """What a replica's lanes should have, and should read."""

    __slots__ = (
        "_base",
        "_extra",
        "_learns",
        "_level",
        "_rest",
        "_tokens",
        "_turns",
        "constant",
        "decode",
        "kv_token",
        "model",
    )

    def __init__(self, lanes: int, model: TimeModel | None) -> None:
        """``model``: one that learns elsewhere."""
        self._learns = model is None
        self.model = TimeModel() if model is None else model
        self.constant, _, self.decode, self.kv_token = DECLARED
        self._rest = [0] * lanes  #: by lane: the tick from which exchanges are searched again
        self._level = 0  #: prompt tokens for each turn
        self._turns = 0  #: turns that this still holds for
        self._base = 0.0  #: mean seconds of an iteration without prompts, 0 before there was one
        self._tokens = 0.0  #: mean prompt tokens of the others
        self._extra = 0.0  #: mean seconds that those took beyond that

    def learn(self, step: int, features: Features, seconds: float) -> None:
        """An iteration took ``seconds`` on the last stage."""
        if seconds <= 0.0:
            return
        if not features.prefill:
            self._base += _RATE * (seconds - self._base) if self._base else seconds
        elif self._base and features.decodes:
            beyond = seconds - self._base
            self._extra += _RATE * ((beyond if beyond > 0.0 else 0.0) - self._extra)
            self._tokens += _RATE * (features.prefill - self._tokens)
        if step % LEARN_EVERY == 0:
            if self._learns:
                self.model.learn(features, seconds)
            if self.model.fitted:
                self.constant, _, _, self.decode, self.kv_token = self.model.coefficients

    def cost(self, lane: Lane) -> float:
        """What the lane's next decodes are predicted to cost."""
        return self.constant + self.decode * lane.count + self.kv_token * lane.kv_tokens

    # ---- decodes ---------------------------------------------------------------------------------------------

    def even_out(self, replica: Replica, lane: Lane) -> None:
        """Before a turn of ``lane`` is planned: let it give sequences to other lanes."""
        if replica.budget is not None and not replica.budget.bears_moves(lane.count, lane.kv_tokens):
            return
        least = _least(replica, lane)
        while lane.count - least.count > 1:
            gap = self.cost(lane) - self.cost(least)
            seq = self._nearest(replica, lane, gap / 2 - self.decode)
            replica.move(seq, least)
            least = _least(replica, lane)
        if lane.tick >= self._rest[lane.index] and lane.count > 1:
            self._exchange(replica, lane)

    def _exchange(self, replica: Replica, lane: Lane) -> None:
        """Give the cheapest lane a sequence for which it will return a shorter one, if that helps."""
        cost = self.cost(lane)
        low, cheapest = cost, lane
        for other in replica.lanes:
            found = self.cost(other)
            if found < low:
                low, cheapest = found, other
        gap = cost - low
        if gap <= SLACK * cost or not cheapest.count or cheapest.count - lane.count > 1:
            return
        self._rest[lane.index] = lane.tick + PAUSE
        returned = 0.0
        if cheapest.count >= lane.count:
            returned = self.kv_token * _kv_tokens(self._nearest(replica, cheapest, 0.0))
        else:
            # It keeps what it is given: then it has one more.
            returned = -self.decode
        seq = self._nearest(replica, lane, gap / 2 + returned)
        rest = gap - 2 * (self.kv_token * _kv_tokens(seq) - returned)
        if abs(rest) <= gap / 2:
            replica.move(seq, cheapest)

    def _nearest(self, replica: Replica, lane: Lane, cost: float) -> Sequence:
        """The sequence of ``lane`` whose KV tokens cost nearest to ``cost``, of a sample that differs by tick."""
        owners, grow = replica.owners, lane.grow
        best: Sequence | None = None
        least, seen = 0.0, 0
        for offset in range(lane.block_size):
            for slot in grow[(lane.tick + offset) % lane.block_size]:
                seq = owners[slot]
                assert seq is not None
                off = abs(self.kv_token * _kv_tokens(seq) - cost)
                if best is None or off < least:
                    best, least = seq, off
                seen += 1
                if seen == SAMPLE:
                    return best
        if best is None:
            best = owners[lane.highest_slot()]
            assert best is not None
        return best

    # ---- prompts ---------------------------------------------------------------------------------------------

    def room(self, replica: Replica, decodes: int, left: int) -> int:
        """How many of ``left`` tokens a turn with ``decodes`` decodes should spend on prompts."""
        stages = replica.stages
        owed = _owed(replica, left * stages)
        level = -(-owed // self._spread(replica, owed, decodes))
        if not self._turns or level > self._level:
            self._level, self._turns = level, stages
        self._turns -= 1
        room = self._level
        tile = replica.limits.tile
        if tile:
            room += -(decodes + room) % tile
        return min(room, left)

    def _spread(self, replica: Replica, owed: int, decodes: int) -> int:
        """Over how many turns to spread ``owed`` tokens of prompts."""
        turns = stages = replica.stages
        if self._tokens:
            base, token = self._base, self._extra / self._tokens
        else:
            constant, token, decode, kv_token = DECLARED
            kv_tokens = 0
            for lane in replica.lanes:
                kv_tokens += lane.kv_tokens
            base = constant + decode * decodes + kv_token * kv_tokens / stages
        prompt = token * owed
        most = (1.0 + PATIENCE) * stages * (base + prompt)
        # The last chunk begins turns - 1 iterations later than the first, and passes all stages.
        while turns > 1 and (turns - 1 + stages) * (base + prompt / turns) > most:
            turns -= 1
        return turns


class Drought:
    """For how long there has been nothing to plan although a plan might have been out."""

    __slots__ = ("_seconds", "_since")

    def __init__(self) -> None:
        self._since = -1.0  #: begin of the present drought, -1 outside one
        self._seconds = 0.0  #: in those before it, since the last plan

    def nothing(self, now: float, held: bool) -> None:
        """No plan is made. ``held``: one could be, and is held back."""
        if held:
            self._end(now)
        elif self._since < 0.0:
            self._since = now

    def end(self, now: float) -> int:
        """A plan is made: microseconds of drought since the last one."""
        self._end(now)
        seconds, self._seconds = self._seconds, 0.0
        return int(seconds * 1e6)

    def _end(self, now: float) -> None:
        if self._since >= 0.0:
            self._seconds += now - self._since
            self._since = -1.0


def spare_lanes(replica: Replica, lane: Lane, chunks: Chunks) -> int:
    """Lanes for which there is nothing to run beside the plan with ``chunks`` that was just made for ``lane``."""
    if chunks and (replica.prefills or len(replica.waiting)):
        return 0
    spare = 0
    for other in replica.lanes:
        if not other.count and other is not lane:
            spare += 1
    return spare


def _owed(replica: Replica, most: int) -> int:
    """Tokens of prompts that could be read, at least up to ``most``."""
    owed = 0
    for seq in replica.prefills:
        owed += (len(seq.tokens) >> 2) - seq.computed
        if owed >= most:
            return owed
    seats = replica.max_running - len(replica.running)
    waiting = replica.waiting
    if seats >= len(waiting):
        return owed + waiting.tokens
    for seq in waiting:
        if seats <= 0 or owed >= most:
            break
        owed += len(seq.tokens) >> 2
        seats -= 1
    return owed


def _least(replica: Replica, lane: Lane) -> Lane:
    """The lane with the fewest decodes, of several the one that reads least."""
    least = lane
    for other in replica.lanes:
        if other.count < least.count or (other.count == least.count and other.kv_tokens < least.kv_tokens):
            least = other
    return least


def _kv_tokens(seq: Sequence) -> int:
    return seq.planned + 1
