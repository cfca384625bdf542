"""Figure 1 and Table 4: whole runs of 128 requests of Yi-34B on two A100."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.figures import Figures, summarise
from evenflow.dataplane.simulated.load import Entry, arrivals, poisson, shuffled
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.world import World
from targets import ARXIV, CHAT, Bar, Row, find, middle, near, run, trace

SEEDS = (0, 1, 2)
REQUESTS = 128
#: P50 of TTFT and P99 of TBT of Table 4, in seconds: whole prompts, chunks apart, both.
TABLE4: dict[str, tuple[tuple[float, float | None], ...]] = {
    "sharegpt": ((0.53, 0.68), (1.04, None), (0.76, 0.14)),
    "arxiv": ((3.78, 1.38), (5.38, None), (3.90, 0.17)),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """Medians over seeds, in seconds, and the range of the first."""

    ttft: float
    tbt: float
    least: float
    most: float


def yi(policy: str, budget: int, length: int, sequences: int = 128, host: str = "graphs") -> Scenario:
    return Scenario(
        KNOWN["yi-34b"],
        load_device("a100-pcie"),
        ranks=2,
        policy=policy,
        token_budget=budget,
        max_num_seqs=sequences,
        length=length,
        host=host,
    )


def once(scenario: Scenario, entries: Sequence[Entry], rate: float | None, seed: int) -> Figures:
    """One run; without a rate all requests come at once."""
    limits = scenario.limits()
    world = World(limits, scenario.models())
    times = repeat(0.0) if rate is None else poisson(rate, seed)
    world.feed(arrivals(shuffled(entries, seed, REQUESTS), times, limits.max_model_len))
    world.run()
    return summarise(world.record)


def over_seeds(scenario: Scenario, entries: Sequence[Entry], rate: float) -> Seen:
    runs = [once(scenario, entries, rate, seed) for seed in SEEDS]
    first = [figures.ttft.p50 for figures in runs]
    return Seen(middle(first), middle(figures.pooled_tbt.p99 for figures in runs), min(first), max(first))


def figure1() -> list[Row]:
    arxiv, chat = trace(ARXIV), trace(CHAT)
    ours = once(yi("stall-free", 1536, 16384, 256), arxiv, None, 0).duration
    theirs = once(yi("prefill-first", 512, 16384, 256), arxiv, None, 0).duration
    rows = [
        Row(
            find("F1a"),
            f"{ours:.0f} / {theirs:.0f} (ratio {theirs / ours:.3f})",
            abs(theirs / ours - 1.12) <= 0.05,
            bars=(Bar("makespan\nsarathi", ours, 505), Bar("makespan\nvllm", theirs, 567)),
        )
    ]
    for rate, papers in ((0.55, (1.39, 0.52)), (1.0, (2.05, 0.54))):
        paper = papers[0] / papers[1]
        stalled = over_seeds(yi("prefill-first", 512, 8192), chat, rate).tbt
        even = over_seeds(yi("stall-free", 1536, 8192), chat, rate).tbt
        reason = "the paper's machines ran sustained loads 1.0 to 2.0 times slower than their kernels"
        rows.append(
            Row(
                find("F1b", f"qps {rate}"),
                f"{stalled:.2f} / {even:.2f}",
                near(stalled / even, paper, 0.5),
                reason,
                (
                    Bar(f"P99 TBT {rate}/s\nvllm", stalled, papers[0]),
                    Bar(f"P99 TBT {rate}/s\nsarathi", even, papers[1]),
                ),
            )
        )
    return rows


def table4() -> list[Row]:
    """The halves of the policy alone: whole prompts beside decodes, chunks apart from decodes, and both together."""
    rows: list[Row] = []
    for data, name, rate, length in ((trace(CHAT), "sharegpt", 1.0, 8192), (trace(ARXIV), "arxiv", 0.5, 16384)):
        hybrid = over_seeds(yi("hybrid-only", 512, length), data, rate)
        chunked = over_seeds(yi("chunked-only", 512, length), data, rate)
        both = over_seeds(yi("stall-free", 512, length), data, rate)
        order = hybrid.ttft < both.ttft < chunked.ttft and hybrid.tbt > 2 * both.tbt and hybrid.tbt > 2 * chunked.tbt
        for metric, seen, papers in zip(
            ("hybrid-only", "chunked-only", "sarathi"), (hybrid, chunked, both), TABLE4[name], strict=True
        ):
            ours = f"{seen.ttft:.2f} ({seen.least:.2f}-{seen.most:.2f}) / {seen.tbt:.2f}"
            bars = (
                Bar(f"{name} {metric}\nP50 TTFT", seen.ttft, papers[0]),
                Bar(f"{name} {metric}\nP99 TBT", seen.tbt, papers[1]),
            )
            rows.append(Row(find("T4", name, metric), ours, order, bars=bars))
    return rows


def rows() -> list[Row]:
    return figure1() + table4()


if __name__ == "__main__":
    run(rows)
