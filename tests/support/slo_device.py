"""Devices of different laws of cost for tests of budgets in seconds, and what is asked of them."""

from __future__ import annotations

from math import ceil

from evenflow.control.core.budget import Budget
from evenflow.control.core.events import Limits
from evenflow.control.core.slo import parse_slo
from timed_device import Law, Load, TimedDevice, keep_busy, profile_of


def linear(f: Load) -> float:
    return 0.006 + 5e-4 * f.prefill + 6e-8 * f.attention + 4e-4 * f.decodes + 1.5e-7 * f.kv_tokens


def tiled(f: Load) -> float:
    """Computes 64 tokens at a time."""
    return 0.004 + 0.012 * ceil((f.prefill + f.decodes) / 64) + 5e-8 * f.attention + 1e-7 * f.kv_tokens


def floored(f: Load) -> float:
    """No iteration is faster than its host; attention weighs heavily."""
    return max(0.012, 0.002 + 1e-4 * f.prefill + 1.5e-7 * f.attention + 3e-5 * f.decodes + 2e-7 * f.kv_tokens)


def edge(f: Load) -> float:
    """Two cores that decode eight streams of 2,000 tokens in 90 ms, of which 46 are there however little there is to
    do; 256 tokens of a prompt after 6,000 others take a second."""
    return 0.046 + 3.5e-4 * f.prefill + 5.7e-7 * f.attention + 5e-4 * f.decodes + 2.5e-6 * f.kv_tokens


def reading(f: Load) -> float:
    """Two cores to whose caches keys and values come from memory, for a chunk as for a decode: eight streams of 600
    tokens take 41 ms, and the first token of a chunk after 6,000 others 19."""
    read = f.kv_tokens + f.before
    return 0.012 + 1.85e-3 * f.prefill + 5.5e-7 * f.attention + 2.2e-3 * f.decodes + 2.27e-6 * read


LAWS: dict[str, tuple[Law, int]] = {
    "linear": (linear, 0),
    "tiled": (tiled, 64),
    "floored": (floored, 0),
    "edge": (edge, 0),
    "reading": (reading, 0),
}


def scaled(law: Law, by: float) -> Law:
    return lambda f: by * law(f)


def device(
    law: str = "linear",
    *,
    slo: str | None = "100ms",
    ttft: str | None = None,
    stages: int = 1,
    budget: int = 2048,
    noise: float = 0.02,
    spikes: tuple[float, float] = (0.0, 1.0),
    speed: float = 1.0,
    change: tuple[float, float, float] = (1e9, 1e9, 1.0),
    profiled: bool = False,
    blocks: int = 100_000,
    seed: int = 1,
) -> TimedDevice:
    """``change``: from, until, and by how much all costs are multiplied between. The law's cost is divided among the
    stages."""
    costs, tile = LAWS[law]
    limits = Limits(
        token_budget=budget,
        max_num_seqs=64,
        max_model_len=32768,
        prefix_caching=False,
        tile=tile,
        slo=None if slo is None else parse_slo(slo, ttft),
    )
    start, end, by = change
    quick = scaled(costs, speed / stages)
    slow = scaled(costs, by * speed / stages)
    return TimedDevice(
        limits,
        lambda stage, now: slow if start <= now < end else quick,
        stages=stages,
        noise=noise,
        spikes=spikes,
        seed=seed,
        blocks=blocks,
        profile=profile_of(quick) if profiled else None,
    )


def budget_of(server: TimedDevice) -> Budget:
    budget = server.engine.replicas[0].budget
    assert budget is not None
    return budget


def held(server: TimedDevice, start: float, end: float = 1e9, target: float = 0.1) -> float:
    """The part of the gaps in a time that were inside the target."""
    gaps = [gap for gap in server.seen.gaps if start <= gap.at < end]
    assert len(gaps) > 50
    return sum(gap.seconds <= target for gap in gaps) / len(gaps)


def busy(server: TimedDevice, until: float, clients: int = 12) -> TimedDevice:
    keep_busy(server, clients, prompts=(100, 6000), outputs=(10, 120))
    server.run(until)
    return server
