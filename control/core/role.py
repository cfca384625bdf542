"""What a replica does of disaggregated serving (``migration``); by default, everything itself."""

from __future__ import annotations

from .blocks import BlockPool
from .sequence import Holder, Sequence


class Role:
    """Of one replica during one epoch."""

    __slots__ = ("coming", "computes_prompts", "handed", "held", "only_decodes", "reserved")

    def __init__(self) -> None:
        self.computes_prompts = False  #: and nothing decodes here
        self.only_decodes = False  #: what was computed elsewhere
        self.handed: list[Sequence] = []  #: to go on on another replica
        self.held: dict[Sequence, Holder] = {}  #: blocks of those whose prompt is computed, until they have moved
        self.coming = 0  #: sequences that move here
        self.reserved = 0  #: blocks for them

    def keeps(self, seq: Sequence) -> bool:
        """``seq`` samples its first token: whether it goes on elsewhere. Its blocks are kept apart from it then."""
        if not self.computes_prompts:
            return False
        held = self.held[seq] = Holder()
        held.table, held.node, held.named, held.dups = seq.table, seq.node, seq.named, seq.dups
        seq.table, seq.node, seq.named, seq.dups = [], None, 0, []
        return True

    def hands_on(self, seq: Sequence) -> bool:
        """``seq`` has left the device and is not at its end: whether it does not come back."""
        if not self.only_decodes and seq not in self.held:
            return False
        self.handed.append(seq)
        return True

    def release(self, pool: BlockPool, seq: Sequence) -> None:
        """The blocks that may have been kept for ``seq`` have moved, or need not."""
        held = self.held.pop(seq, None)
        if held is not None:
            pool.release(held)
