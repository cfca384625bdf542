"""The policies by name (``bounds.POLICIES``)."""

from __future__ import annotations

from .policy import Policy
from .stall_free import ChunkedOnly, StallFree
from .whole_prompts import Hybrid, PrefillFirst, RequestLevel


def make_policy(name: str, lanes: int) -> Policy:
    """A policy for a replica of so many lanes, in its initial state. Raises ``ValueError`` for an unknown name."""
    if name == "stall-free":
        return StallFree()
    if name == "prefill-first":
        return PrefillFirst()
    if name == "hybrid":
        return Hybrid(reserves=True)
    if name == "hybrid-only":
        return Hybrid(reserves=False)
    if name == "chunked-only":
        return ChunkedOnly(lanes)
    if name == "request-level":
        return RequestLevel(lanes)
    raise ValueError(f"there is no policy {name!r}")
