"""The block pool alone, against a model that keeps every named prefix in a dictionary and does nothing clever."""

from dataclasses import dataclass, field

import pytest
from evenflow.control.core.blocks import BlockPool
from evenflow.control.core.sequence import Sequence
from evenflow.control.wire import Submit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inprocess import u32

BLOCK = 2


def sequence(tokens: tuple[int, ...], salt: bytes = b"") -> Sequence:
    return Sequence(0, 0, Submit(0, "r", u32(tokens), len(tokens), salt=salt), 1000)


Name = tuple[bytes, tuple[int, ...]]


@dataclass
class Naive:
    """What the pool promises, one dictionary entry a block. ``cached`` is in the order of eviction."""

    blocks: dict[Name, int] = field(default_factory=dict)  # named prefix: block
    refs: dict[Name, int] = field(default_factory=dict)
    cached: list[Name] = field(default_factory=list)

    def match(self, tokens: tuple[int, ...], salt: bytes) -> list[int]:
        """The longest run of named prefixes that leaves one token."""
        found: list[int] = []
        for end in range(BLOCK, len(tokens), BLOCK):
            if (salt, tokens[:end]) not in self.blocks:
                break
            found.append(self.blocks[salt, tokens[:end]])
        return found

    def reference(self, name: Name) -> None:
        if not self.refs.get(name):
            self.cached.remove(name)
        self.refs[name] += 1

    def release(self, names: list[Name]) -> None:
        """Tails first."""
        for name in reversed(names):
            self.refs[name] -= 1
            if not self.refs[name]:
                self.cached.append(name)

    def evict(self, blocks: set[int]) -> None:
        for name in [name for name in self.cached if self.blocks[name] in blocks]:
            self.cached.remove(name)
            del self.blocks[name], self.refs[name]


class Pool(RuleBasedStateMachine):
    @initialize(blocks=st.integers(4, 24), caching=st.booleans())
    def build(self, blocks: int, caching: bool) -> None:
        self.pool = BlockPool(blocks, BLOCK, caching)
        self.naive = Naive()
        self.held: list[tuple[Sequence, list[Name]]] = []

    def names(self, seq: Sequence, tokens: tuple[int, ...], full: int) -> list[Name]:
        return [(seq.salt, tokens[: BLOCK * (i + 1)]) for i in range(full)]

    def alloc(self, count: int) -> list[int]:
        """Allocate, and check that exactly the oldest cached blocks made way."""
        pool, naive = self.pool, self.naive
        free = len(pool.free)
        gone = {naive.blocks[name] for name in naive.cached[: max(0, count - free)]}
        taken = pool.alloc(count)
        assert len(taken) == len(set(taken)) == count
        referenced = {naive.blocks[name] for name, refs in naive.refs.items() if refs}
        assert not referenced & set(taken), "a referenced block was given out"
        naive.evict(gone)
        assert gone.isdisjoint(naive.blocks.values())
        return taken

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16).map(tuple),
        salt=st.sampled_from([b"", b"", b"x"]),
    )
    def admit(self, tokens: tuple[int, ...], salt: bytes) -> None:
        pool, naive = self.pool, self.naive
        match = pool.match(u32(tokens), salt)
        expected = naive.match(tokens, salt)
        assert match.blocks == len(expected) <= (len(tokens) - 1) // BLOCK
        names = [(salt, tokens[: BLOCK * (i + 1)]) for i in range(match.blocks)]
        assert match.idle == sum(not naive.refs[name] for name in names)
        need = pool.blocks_for(len(tokens)) - match.blocks
        if pool.available - match.idle < need:
            return
        seq = sequence(tokens, salt)
        pool.claim(seq, match)
        assert seq.table == expected
        for name in names:
            naive.reference(name)
        seq.table += self.alloc(need)
        self.held.append((seq, names))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        """Blocks are filled from the start; twins may have named some of them."""
        seq, names = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        full = data.draw(st.integers(seq.named, min(seq.known // BLOCK, len(seq.table))))
        before = seq.named
        self.pool.name(seq, full)
        if not self.pool.caching:
            assert seq.named == 0
            return
        assert seq.named == full
        tokens = tuple(memoryview(seq.tokens).cast("I"))
        for i in range(before, full):
            name = (seq.salt, tokens[: BLOCK * (i + 1)])
            if name in self.naive.blocks:
                self.naive.reference(name)  # the twin's block keeps the name
                assert seq.table[i] in seq.dups
            else:
                self.naive.blocks[name] = seq.table[i]
                self.naive.refs[name] = 1
            names.append(name)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        """A decode: one token more, and a block when it needs one."""
        seq, _ = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        if seq.known == len(seq.table) * BLOCK:
            if not self.pool.available:
                return
            seq.table += self.alloc(1)
        seq.tokens += u32((token,))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq, names = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(seq)
        self.naive.release(names)
        assert not seq.table and not seq.dups and seq.node is None and not seq.named

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, naive = self.pool, self.naive
        private = [b for seq, _ in self.held for b in [*seq.table[seq.named :], *seq.dups]]
        everything = [*pool.free, *private, *naive.blocks.values()]
        assert sorted(everything) == list(range(pool.num_blocks))
        assert pool.evictable == len(naive.cached)
        assert pool.available == len(pool.free) + len(naive.cached)
        assert pool.held == pool.num_blocks - pool.available

    @invariant()
    def what_is_next_to_go_is_what_was_released_first_tails_before_heads(self) -> None:
        if hasattr(self, "pool"):
            order = [block for node in self.pool.idle_nodes() for block in reversed(node.blocks)]
            assert order == [self.naive.blocks[name] for name in self.naive.cached]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for seq, _ in self.held:
            self.pool.release(seq)
        assert self.pool.available == self.pool.num_blocks
        self.pool.alloc(self.pool.num_blocks)
        assert not self.pool.nodes() and not self.pool.idle_nodes()


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def filled(pool: BlockPool, tokens: tuple[int, ...]) -> Sequence:
    """A sequence whose full blocks have been computed and named."""
    seq = sequence(tokens)
    match = pool.match(seq.tokens, b"")
    pool.claim(seq, match)
    seq.table += pool.alloc(pool.blocks_for(len(tokens)) - match.blocks)
    pool.name(seq, len(tokens) // pool.block_size)
    return seq


def test_tails_are_evicted_before_heads() -> None:
    pool = BlockPool(4, 2)
    pool.release(filled(pool, tuple(range(8))))
    pool.alloc(3)
    assert pool.match(u32(tuple(range(8))), b"").blocks == 1


def test_what_was_used_last_is_evicted_last() -> None:
    pool = BlockPool(4, 2)
    pool.release(filled(pool, (1, 1, 1, 1)))
    pool.release(filled(pool, (2, 2, 2, 2)))
    pool.release(filled(pool, (1, 1, 1, 1)))
    pool.alloc(2)
    assert pool.match(u32((1, 1, 1, 1, 9)), b"").blocks == 2
    assert pool.match(u32((2, 2, 2, 2, 9)), b"").blocks == 0


def test_a_name_is_the_whole_prefix() -> None:
    """Equal blocks after different beginnings are different."""
    pool = BlockPool(8, 2)
    pool.release(filled(pool, (1, 1, 5, 5)))
    assert pool.match(u32((2, 2, 5, 5, 9)), b"").blocks == 0
    assert pool.match(u32((5, 5, 9)), b"").blocks == 0
    assert pool.match(u32((1, 1, 5, 5, 9)), b"other").blocks == 0


def test_referenced_blocks_are_never_evicted() -> None:
    pool = BlockPool(6, 2)
    seq = filled(pool, (1, 1, 2, 2))
    pool.release(filled(pool, (1, 1, 3, 3, 4, 4)))
    assert pool.available == 4
    assert set(pool.alloc(4)).isdisjoint(seq.table)
    assert pool.match(u32((1, 1, 2, 2, 9)), b"").blocks == 2


def test_without_caching_everything_is_free_at_once() -> None:
    pool = BlockPool(6, 2, caching=False)
    seq = filled(pool, (1, 1, 2, 2))
    assert seq.named == 0
    pool.release(seq)
    assert len(pool.free) == 6 and pool.match(u32((1, 1, 2, 2, 9)), b"").blocks == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (1000, 63)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(1, 16).blocks_for(tokens) == blocks
