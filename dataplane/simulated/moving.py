"""How long KV blocks take from one replica to another: the link of each, which one move at a time has at each end."""

from __future__ import annotations

from ...control.core.events import Move


class KvLink:
    """``bytes_per_us`` from a replica and, at the same time, to it, all its ranks together; ``start_us`` for each
    move; ``token_bytes`` of keys and values of a token in all layers."""

    def __init__(self, token_bytes: int, bytes_per_us: float, start_us: int = 500) -> None:
        self.token_bytes = token_bytes
        self.bytes_per_us = bytes_per_us
        self.start_us = start_us
        self.moved_bytes = 0
        self.busy_us = 0
        self._from: dict[int, int] = {}  #: by replica: when its link is free
        self._to: dict[int, int] = {}

    def take(self, move: Move, now: int) -> int:
        """When a move that is asked for at ``now`` (µs) is done."""
        size = move.tokens * self.token_bytes
        start = max(now, self._from.get(move.source, 0), self._to.get(move.target, 0))
        took = self.start_us + round(size / self.bytes_per_us)
        self._from[move.source] = self._to[move.target] = start + took
        self.moved_bytes += size
        self.busy_us += took
        return start + took
