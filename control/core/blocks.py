"""The block allocator and its prefix cache.

A block is a fixed-size page of KV cache, named by a number. Each block is, at every moment, exactly one of

    free ── alloc ──► private ── name ──► referenced (in the tree) ── last release ──► cached (in the tree, LRU)
     ▲                   │                        ▲                                        │
     └──── release ──────┘                        └───────────────── match ────────────────┤
     └─────────────────────────────────── evict ───────────────────────────────────────────┘

and a sequence's table is laid out as

    |◄─────────── named ───────────►|◄── private ──►|
    | claimed │ own, in tree │ dups │ growing       |   (dups: copies of what a twin had named first)

The tree is a radix tree over raw token bytes: an edge is a run of full blocks, compared with ``memcmp``, so a
lookup costs what diverges and not what matches, a name cannot collide, and nobody hashes anything. Runs split where
tables diverge. A node's ``refs`` counts the tables that pass through it whole, so a parent has at least the
references of its children, and a node without references has no descendant with any. Releases go from the deepest
node upward, so in the LRU every node comes after all its descendants: eviction takes runs from the front, tail
first, and always finds a leaf there. Each ``salt`` has a root of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .sequence import Holder, Sequence


class Node:
    """A run of full blocks below ``parent``: ``key`` holds their tokens, ``blocks`` their numbers."""

    __slots__ = ("blocks", "children", "key", "parent", "refs", "salt")

    def __init__(self, parent: Node | None, key: bytes, blocks: list[int], refs: int, salt: bytes) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.refs = refs
        self.salt = salt
        self.children: dict[bytes, Node] = {}


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: each node with how many of its blocks match (all, but perhaps for the last)."""

    path: Seq[tuple[Node, int]]
    blocks: int
    #: Of those, how many nobody references: claiming them lowers what is available by as many.
    idle: int


NO_MATCH = Match((), 0, 0)


class BlockPool:
    """All blocks of one replica. Every rank's cache has the same numbering."""

    __slots__ = ("_block_bytes", "_lru", "_roots", "block_size", "caching", "evictable", "free", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.free = list(range(num_blocks - 1, -1, -1))
        self.evictable = 0  #: blocks that the LRU could give back
        self._block_bytes = 4 * block_size
        self._roots: dict[bytes, Node] = {}
        self._lru: OrderedDict[Node, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that ``alloc`` can give out."""
        return len(self.free) + self.evictable

    @property
    def held(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - len(self.free) - self.evictable

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def alloc(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting as needed. The caller has checked ``available``."""
        free = self.free
        short = count - len(free)
        if short > 0:
            # In steady load nothing is ever free: what is evicted goes straight to who asks.
            taken = free
            self.free = []
            self._evict(short, taken)
            return taken
        if not count:
            return []
        taken = free[-count:]
        del free[-count:]
        return taken

    def match(self, tokens: bytes, salt: bytes) -> Match:
        """The longest cached prefix of ``tokens`` that leaves at least one token to compute."""
        root = self._roots.get(salt)
        if root is None:
            return NO_MATCH
        size = self._block_bytes
        limit = ((len(tokens) >> 2) - 1) // self.block_size
        path: list[tuple[Node, int]] = []
        node, found, idle = root, 0, 0
        while found < limit:
            child = node.children.get(tokens[found * size : (found + 1) * size])
            if child is None:
                break
            same = _common(child.key, tokens[found * size : limit * size], size)
            path.append((child, same))
            found += same
            if not child.refs:
                idle += same
            if same < len(child.blocks):
                break
            node = child
        return Match(path, found, idle) if path else NO_MATCH

    def claim(self, seq: Sequence, match: Match) -> None:
        """Let ``seq`` (without blocks) start with the matched blocks."""
        for node, same in match.path:
            seq.node = self._take(node, same)
            seq.table += seq.node.blocks
        seq.named = match.blocks

    def name(self, seq: Sequence, full: int) -> None:
        """Enter the first ``full`` blocks of the table into the tree, as far as they are not there yet.

        Called when the plan that fills them has been made, and when a sequence leaves. A twin that came first keeps
        its name: the sequence holds a reference on the twin's run and remembers its own copies in ``dups``.
        """
        named = seq.named
        if full <= named or not self.caching:
            return
        size = self._block_bytes
        tokens, table, node = seq.tokens, seq.table, seq.node
        if node is not None and node.refs == 1 and not node.children:
            # Nobody else ends or passes here: the run simply grows.
            node.key += tokens[named * size : full * size]
            node.blocks += table[named:full]
            seq.named = full
            return
        if node is None:
            node = self._roots.get(seq.salt)
            if node is None:
                node = self._roots[seq.salt] = Node(None, b"", [], 0, seq.salt)
        while named < full:
            first = tokens[named * size : (named + 1) * size]
            child = node.children.get(first)
            if child is None:
                child = Node(node, tokens[named * size : full * size], table[named:full], 1, seq.salt)
                node.children[first] = child
                named = full
            else:
                same = _common(child.key, tokens[named * size : full * size], size)
                child = self._take(child, same)
                seq.dups += table[named : named + same]
                named += same
            node = child
        seq.node = node
        seq.named = full

    def release(self, seq: Holder) -> None:
        """Give back everything that ``seq`` holds. Named blocks stay cached, the others are free."""
        node = seq.node
        lru = self._lru
        while node is not None and node.parent is not None:
            node.refs -= 1
            if not node.refs:
                lru[node] = None
                self.evictable += len(node.blocks)
            node = node.parent
        free = self.free
        free += seq.dups
        free += seq.table[seq.named :]
        seq.node = None
        seq.named = 0
        seq.table = []
        seq.dups = []

    def releasable(self, seq: Sequence) -> int:
        """Blocks that the release of ``seq`` alone makes available."""
        count = len(seq.table) - seq.named + len(seq.dups)
        node = seq.node
        while node is not None and node.parent is not None:
            if node.refs == 1:
                count += len(node.blocks)
            node = node.parent
        return count

    def _take(self, node: Node, count: int) -> Node:
        """Reference the first ``count`` blocks of ``node``, splitting it if it has more; returns their node."""
        if count < len(node.blocks):
            # The upper part is new and the lower keeps its identity, so that whoever ends in the run still points
            # at its end, and an idle lower part keeps its place in the LRU, before its ancestors.
            size = self._block_bytes
            parent = node.parent
            assert parent is not None
            upper = Node(parent, node.key[: count * size], node.blocks[:count], node.refs, node.salt)
            parent.children[node.key[:size]] = upper
            node.key = node.key[count * size :]
            node.blocks = node.blocks[count:]
            node.parent = upper
            upper.children[node.key[:size]] = node
            if not node.refs:
                self.evictable -= count
            upper.refs += 1
            return upper
        if not node.refs:
            del self._lru[node]
            self.evictable -= count
        node.refs += 1
        return node

    def _evict(self, count: int, taken: list[int]) -> None:
        """Append ``count`` blocks to ``taken``, of the longest unused."""
        lru = self._lru
        size = self._block_bytes
        self.evictable -= count
        while count:
            node = next(iter(lru))
            blocks = node.blocks
            if len(blocks) > count:
                taken += blocks[-count:]
                del blocks[-count:]
                node.key = node.key[: len(blocks) * size]
                return
            count -= len(blocks)
            taken += blocks
            del lru[node]
            parent = node.parent
            assert parent is not None and not node.children
            del parent.children[node.key[:size]]
            if parent.parent is None and not parent.children:
                self._roots.pop(parent.salt, None)

    def nodes(self) -> list[Node]:
        """All nodes below the roots, parents first: for integrity checks and tests."""
        found: list[Node] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                found.append(node)
            stack.extend(node.children.values())
        return found

    def idle_nodes(self) -> list[Node]:
        """The nodes of the LRU, next to be evicted first."""
        return list(self._lru)


def _common(run: bytes, tokens: bytes, size: int) -> int:
    """How many whole blocks of ``size`` bytes the two have in common at their start (at least one is known)."""
    high = min(len(run), len(tokens)) // size
    if run[: high * size] == tokens[: high * size]:
        return high
    low = 1
    high -= 1
    while low < high:
        middle = (low + high + 1) >> 1
        if run[: middle * size] == tokens[: middle * size]:
            low = middle
        else:
            high = middle - 1
    return low
