"""Servers under load over HTTP: what each can serve with even tokens, and what long prompts do to running streams.

``served``: prompts of 500 to 1,500 tokens, outputs of 64 to 128, Poisson arrivals. A server's capacity is the largest
rate on a grid at which the 99th percentile of the time between tokens is at most 100 ms, half of the first tokens
come within 5 s (a server that keeps its promise by letting requests wait has more load than it can serve), and no
request fails. The ceiling is what the measured rate of a large product would allow if prompts and outputs cost their
arithmetic alone.

``stall``: the worst gap of eight running streams while prompts of 1,000, 4,000 and 7,000 tokens arrive.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from engines import OURS
from evenflow.dataplane.models.config import EMBEDDING, HEAD, tensor_shapes
from evenflow.dataplane.weights import open_model
from report import Report, Row
from servers import Server, ours, peers, running
from streams import MODEL, PROMPTS, observe

TARGET_MS, TARGET = 100.0, "100ms"
#: Seconds in which half of the first tokens must come.
WAIT_S = 5.0
PROMPT, OUTPUT = (500, 1500), (64, 128)
#: Requests a second: each step of the grid is so many times the one before.
LEAST_RATE, STEP = 0.1, 1.12
#: Seconds of arrivals of one trial.
TRIAL_S = 60
SIDE = 1024
CAPACITY_GOAL, SHARE_GOAL, P99_GOAL_MS, WORST_GOAL_MS = 1.5, 0.65, 120.0, 130.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What a server did under one rate."""

    rate: float
    p99_ms: float
    first_s: float  #: the median
    failed: int
    tokens_per_s: float  #: of prompts and outputs

    @property
    def held(self) -> bool:
        return self.p99_ms <= TARGET_MS and self.first_s <= WAIT_S and not self.failed


def trial(url: str, model: str, rate: float, seconds: int, seed: int) -> Trial:
    """``seconds`` of arrivals, and all answers; each ``seed`` has other prompts.

    Raises ``RuntimeError`` if nothing is reported.
    """
    command = [sys.executable, "-P", "-m", "evenflow.cli", "bench", url, "--rate", f"{rate:.4f}", "--model", model]
    lengths = [f"--{name}-tokens={least}:{most}" for name, (least, most) in (("prompt", PROMPT), ("output", OUTPUT))]
    asked = [*command, *lengths, "--duration", f"{seconds}s", "--seed", str(seed), "--json"]
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode not in (0, 1, 3) or not done.stdout:
        raise RuntimeError(f"evenflow bench ended with {done.returncode}: {done.stderr[-500:]}")
    found = json.loads(done.stdout)
    return Trial(
        rate, found["p99_itl_ms"], found["median_ttft_ms"] / 1e3, found["failed"], found["total_token_throughput"]
    )


def capacity(url: str, server: Server, ceiling: float, seconds: int) -> list[Trial]:
    """The trials of a search for the largest rate that is held, by halving the grid between the least rate and the
    ceiling. The least rate comes first: a server that does not hold it holds none."""
    steps = [LEAST_RATE]
    while steps[-1] * STEP < ceiling:
        steps.append(steps[-1] * STEP)
    tried: list[Trial] = []

    def holds(step: int) -> bool:
        tried.append(trial(url, server.model, steps[step], seconds, len(tried)))
        now = tried[-1]
        print(
            f"served {server.name} {server.setting}: {now.rate:.2f} requests/s, P99 TBT {now.p99_ms:.0f} ms,"
            f" first token {now.first_s:.1f} s, {now.failed} failed: {'held' if now.held else 'not held'}",
            file=sys.stderr,
        )
        return now.held

    if not holds(0):
        return tried
    held, broken = 0, len(steps)
    while broken - held > 1:
        middle = (held + broken) // 2
        if holds(middle):
            held = middle
        else:
            broken = middle
    return tried


def ceiling(threads: int) -> float:
    """Requests a second if all that a request needs were products at the rate of a large one, in float32 or bfloat16,
    whichever is quicker here."""
    torch.set_num_threads(threads)
    rates: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
        took: list[float] = []
        for _ in range(10):
            began = time.perf_counter()
            left @ right
            took.append(time.perf_counter() - began)
        rates.append(2 * SIDE**3 / min(took))
    config = open_model(MODEL).config
    shapes = tensor_shapes(config)
    layers = sum(a * b for n, s in shapes.items() if len(s) == 2 and n not in (EMBEDDING, HEAD) for a, b in [s])
    head = config.vocab_size * config.hidden_size
    prompt, output = sum(PROMPT) / 2, sum(OUTPUT) / 2
    pairs = prompt * prompt / 2 + output * (prompt + output / 2)
    attention = 4 * pairs * config.layers * config.heads * config.head_dim
    return max(rates) / (2 * layers * (prompt + output) + 2 * head * (output + 1) + attention)


def compare_served(found: dict[str, list[Server]], threads: int, seconds: int, twice: bool, results: Report) -> None:
    """Ours before and after the peers, if ``twice``, since machines change."""
    most = ceiling(threads)
    results.add(Row("ceiling", {"work": "served", "dtype": "bf16"}, most, "requests/s"))
    own: list[float] = []
    best, name = 0.0, None
    for server in [ours(TARGET), *[each for settings in found.values() for each in settings], ours(TARGET)]:
        mine = server.name == OURS
        if mine and own and not twice:
            continue
        case: dict[str, object] = {"work": "served", "dtype": "bf16"}
        case |= {"engine": server.name, "setting": server.setting}
        with running(server) as url:
            trials = capacity(url, server, most, seconds)
        for each in trials:
            at = {**case, "rate": round(each.rate, 3), "held": each.held}
            results.add(Row("p99_tbt_ms", at, each.p99_ms, "ms"))
            results.add(Row("median_ttft_ms", at, each.first_s * 1e3, "ms"))
        reached = max((each.rate for each in trials if each.held), default=0.0)
        results.add(Row("capacity", case, reached, "requests/s"))
        if mine:
            own.append(reached)
        elif reached > best:
            best, name = reached, f"{server.name}, {server.setting}"
    mean = statistics.mean(own)
    case = {"work": "served", "dtype": "bf16"}
    ratio = mean / best if best else None
    met = None if ratio is None else ratio >= CAPACITY_GOAL
    results.add(Row("ratio_best_peer", case, mean, "requests/s", name, ratio, CAPACITY_GOAL, met))
    share = mean / most
    results.add(Row("share_of_ceiling", case, share, "", "ceiling", share, SHARE_GOAL, share >= SHARE_GOAL))


def compare_stalls(
    found: dict[str, list[Server]], prompts: Sequence[int], runs: int, peer_runs: int, results: Report
) -> None:
    """Ours ``runs`` times, each setting of a peer ``peer_runs`` times, in turns."""
    gaps: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    servers = [ours(TARGET), *[each for settings in found.values() for each in settings]]
    for run in range(max(runs, peer_runs)):
        for server in servers:
            if run >= (runs if server.name == OURS else peer_runs):
                continue
            with running(server) as url:
                seen = asyncio.run(observe(url, prompts, 5.0, server.model))
            for size, window in {0: seen.quiet, **seen.windows}.items():
                values = seen.gaps(window)
                tail = statistics.quantiles(values, n=100)[98] if len(values) > 1 else values[0]
                took = window[1] - window[0]
                gaps.setdefault((server.name, server.setting, size), []).append((tail, max(values), took))
                print(
                    f"stall {server.name} {server.setting}, prompt {size}: P99 {tail:.0f} ms, worst {max(values):.0f}"
                    f" ms, first token of the prompt {took:.1f} s",
                    file=sys.stderr,
                )
    worst: dict[int, dict[str, float]] = {}
    for (name, setting, size), values in gaps.items():
        case: dict[str, object] = {"work": "stall", "dtype": "bf16"}
        case |= {"engine": name, "setting": setting, "prompt": size}
        tail, most, took = (statistics.median(each) for each in zip(*values, strict=True))
        for measure, value, goal in (("p99_gap_ms", tail, P99_GOAL_MS), ("worst_gap_ms", most, WORST_GOAL_MS)):
            if name == OURS and size == PROMPTS[-1]:
                results.add(Row(measure, case, value, "ms", "goal", value / goal, 1.0, value <= goal))
            else:
                results.add(Row(measure, case, value, "ms"))
        if size:
            results.add(Row("prompt_s", case, took, "s"))
            worst.setdefault(size, {})[name if name == OURS else f"{name}, {setting}"] = most
    for size, found_gaps in worst.items():
        own = found_gaps.pop(OURS)
        if found_gaps:
            best = min(found_gaps, key=found_gaps.__getitem__)
            ratio = found_gaps[best] / own
            results.add(
                Row("ratio_best_peer", {"work": "stall", "dtype": "bf16", "prompt": size}, ratio, "", best, ratio)
            )


def compare(works: Sequence[str], threads: int, quick: bool, runs: int, results: Report) -> None:
    """The works ``served`` and ``stall``, as far as they are wanted. ``runs``: of our part of the latter."""
    found = {} if quick else peers(threads)
    if "served" in works:
        compare_served(found, threads, 10 if quick else TRIAL_S, not quick, results)
    if "stall" in works:
        compare_stalls(found, PROMPTS[:1] if quick else PROMPTS, runs, 1, results)
