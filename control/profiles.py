"""What workers measured of themselves before they serve: as the core takes it, and in words for people."""

from __future__ import annotations

from collections.abc import Iterable

from .core.events import Limits
from .core.timing import Features, TimeModel, attention_work
from .wire import Sample


def slowest_profile(profiles: Iterable[list[Sample]]) -> list[Sample]:
    """Of each kind of iteration that all stages have measured, what the slowest needs. The stages of a replica wait
    for each other."""
    slowest: dict[tuple[int, int, int, int], Sample] = {}
    counts: dict[tuple[int, int, int, int], int] = {}
    stages = 0
    for profile in profiles:
        stages += 1
        for sample in profile:
            kind = sample.prefill, sample.attention, sample.decodes, sample.kv_tokens
            counts[kind] = counts.get(kind, 0) + 1
            known = slowest.get(kind)
            if known is None or known.took_us < sample.took_us:
                slowest[kind] = sample
    return [sample for kind, sample in slowest.items() if counts[kind] == stages]


def expectation(profile: list[Sample], limits: Limits, stages: int) -> dict[str, object] | None:
    """What to expect of a replica with that profile, None without one: the longest gap between two tokens of a stream
    while prompts are prefilled beside it, at the beginning of a prompt and at the end of the longest."""
    if not any(sample.prefill for sample in profile) or not any(sample.decodes for sample in profile):
        return None
    model = TimeModel()
    model.fit([(Features(s.prefill, s.attention, s.decodes, s.kv_tokens), s.took_us / 1e6) for s in profile])
    if limits.slo is None:
        worst = [
            stages * model.predict(_chunk(limits.token_budget - 1, computed))
            for computed in (0, max(0, limits.max_model_len - limits.token_budget))
        ]
        return {
            "token_budget": limits.token_budget,
            "worst_gap_ms": round(worst[0] * 1e3),
            "worst_gap_ms_at_full_context": round(worst[1] * 1e3),
        }
    told: dict[str, object] = {}
    for found in limits.slo.classes:
        told[f"{found.name}_ms"] = round(found.tbt * 1e3)
        told[f"{found.name}_chunk"] = _largest(model, found.tbt / stages, 0, limits.token_budget)
        told[f"{found.name}_chunk_at_full_context"] = _largest(
            model, found.tbt / stages, limits.max_model_len, limits.token_budget
        )
    return told


def _chunk(tokens: int, computed: int) -> Features:
    """An iteration of a chunk beside one decode."""
    return Features(tokens, attention_work(computed, tokens), 1, computed + 1)


def _largest(model: TimeModel, seconds: float, computed: int, most: int) -> int:
    """The largest chunk that an iteration of so many seconds holds."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) >> 1
        if model.predict(_chunk(middle, computed)) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low
