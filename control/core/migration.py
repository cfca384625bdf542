"""Disaggregated serving (Splitwise, DistServe, TetriInfer): prompts are computed on some replicas, and sequences
decode on others, to which their KV blocks move.

The first ``Limits.prefill_replicas`` replicas compute prompts. A sequence's first token is sampled there; then it
leaves its slot and its blocks are kept (``Role.held``) until they have moved. A move begins when a replica that
decodes has a place, a slot and blocks for all its tokens above the watermark; it reserves them, and takes the fewest
KV tokens of those that have. Moves begin in the order in which prompts end, so one that does not fit holds up those
behind it, and the blocks that they keep hold up admission: that is how a shortage of either kind is felt. On its new
replica the sequence computes its last token, whose KV nobody has, and decodes. Who is preempted there has to begin
again on a replica that computes prompts.

How long a move takes is told by an event (``Moved``). A move to blocks whose sequence has ended since is waited for,
since until then something writes to them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .admission import begin
from .events import Move
from .sequence import Sequence

if TYPE_CHECKING:
    from .replica import Replica


class Moving:
    """A move that is under way. ``seq`` is None when it has ended meanwhile."""

    __slots__ = ("blocks", "seq", "source", "target")

    def __init__(self, seq: Sequence, source: Replica, target: Replica, blocks: list[int]) -> None:
        self.seq: Sequence | None = seq
        self.source = source
        self.target = target
        self.blocks = blocks  #: of the target, reserved


class Migration:
    """What is on its way from one replica to another, and what waits to be."""

    def __init__(self) -> None:
        self.leaving: deque[tuple[Sequence, Replica]] = deque()  #: computed, by the order in which they were
        self.moving: dict[int, Moving] = {}  #: by number
        self._count = 0

    def sequences(self) -> list[Sequence]:
        """All that are on no replica."""
        found = [seq for seq, _ in self.leaving]
        return found + [move.seq for move in self.moving.values() if move.seq is not None]

    def begin(self, replicas: list[Replica]) -> list[Move]:
        """Begin all moves that can begin."""
        begun: list[Move] = []
        leaving = self.leaving
        while leaving:
            seq, source = leaving[0]
            tokens = len(seq.tokens) >> 2
            target = _target(replicas, tokens)
            if target is None:
                break
            leaving.popleft()
            blocks = target.pool.alloc(target.pool.blocks_for(tokens))
            target.role.coming += 1
            target.role.reserved += len(blocks)
            self._count += 1
            self.moving[self._count] = Moving(seq, source, target, blocks)
            # The KV of the last token is not there: it is computed where the sequence goes.
            begun.append(Move(self._count, source.index, target.index, tokens - 1))
        return begun

    def arrived(self, number: int) -> Sequence | None:
        """The blocks of a move are there. Returns the sequence, which runs on the move's target then."""
        move = self.moving.pop(number, None)
        if move is None:
            return None
        seq, target = move.seq, move.target
        target.role.coming -= 1
        target.role.reserved -= len(move.blocks)
        if seq is None:
            target.pool.free += move.blocks
            return None
        move.source.role.release(move.source.pool, seq)
        seq.table = move.blocks
        begin(target, seq, (len(seq.tokens) >> 2) - 1)
        return seq

    def target(self, number: int) -> Replica | None:
        """Where a move goes."""
        move = self.moving.get(number)
        return None if move is None else move.target

    def remove(self, seq: Sequence) -> bool:
        """``seq`` ends, if it is on its way: whether it was."""
        for at, (other, source) in enumerate(self.leaving):
            if other is seq:
                del self.leaving[at]
                source.role.release(source.pool, seq)
                return True
        for move in self.moving.values():
            if move.seq is seq:
                move.seq = None
                move.source.role.release(move.source.pool, seq)
                return True
        return False

    def lost(self, replica: Replica) -> list[Sequence]:
        """``replica`` is gone, and every move from it and to it with it: the sequences whose KV is lost. Those of
        which it is still held wait for another move."""
        homeless = [seq for seq, source in self.leaving if source is replica]
        self.leaving = deque(entry for entry in self.leaving if entry[1] is not replica)
        again: list[tuple[Sequence, Replica]] = []
        for number, move in list(self.moving.items()):
            seq = move.seq
            if move.source is replica:
                move.target.role.coming -= 1
                move.target.role.reserved -= len(move.blocks)
                move.target.pool.free += move.blocks
                if seq is not None:
                    homeless.append(seq)
            elif move.target is replica:
                if seq is not None:
                    again.append((seq, move.source))
            else:
                continue
            del self.moving[number]
        self.leaving.extendleft(reversed(again))
        for seq in homeless:
            seq.computed = 0
        return homeless


def _target(replicas: list[Replica], tokens: int) -> Replica | None:
    """Of those that decode and have room for ``tokens``, the one with the most blocks left."""
    best = None
    for replica in replicas:
        pool, role = replica.pool, replica.role
        spare = pool.available - pool.blocks_for(tokens)
        if role.computes_prompts or spare < (replica.watermark if pool.held else 0):
            continue
        if len(replica.running) + role.coming >= replica.max_running or len(replica.free_slots) <= role.coming:
            continue
        if best is None or pool.available > best.pool.available:
            best = replica
    return best
