"""Prefill and decode without sockets, every engine in turn, again and again."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from child import Child
from engines import OURS, Engine, start
from report import Report, Row

#: Decode iterations of one repetition; each repetition counts with their median.
STEPS = 12


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of an engine: a prompt of ``tokens``, or ``batch`` sequences that decode after ``tokens``."""

    name: str
    tokens: int
    batch: int = 0
    #: Its repetitions are a part of the others', since it takes that much longer.
    part: int = 1


WORKS = (
    Work("prefill_512", 512),
    Work("prefill_2048", 2048),
    Work("decode_1", 512, 1),
    Work("decode_8", 512, 8),
    Work("decode_32", 512, 32, part=2),
)
GOALS = {
    ("prefill_512", "bf16"): 1.0,
    ("prefill_2048", "bf16"): 1.03,
    ("decode_1", "bf16"): 1.15,
    ("decode_1", "int8"): 1.4,
    ("decode_1", "int4"): 1.2,
    ("decode_8", "bf16"): 1.6,
    ("decode_8", "int8"): 2.2,
    ("decode_32", "bf16"): 1.4,
    ("decode_32", "int8"): 1.8,
}


def measure(child: Child, work: Work, seed: int) -> float:
    """Tokens a second of one repetition."""
    if not work.batch:
        (seconds,) = child.ask(work="prefill", tokens=work.tokens, seed=seed)["seconds"]
        return work.tokens / seconds
    seconds = child.ask(work="decode", batch=work.batch, context=work.tokens, steps=STEPS, seed=seed)["seconds"]
    return work.batch / statistics.median(seconds)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of medians of resampled ``values``."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def compare(found: list[Engine], works: Sequence[Work], repetitions: int, threads: int, results: Report) -> None:
    """Add the rows of engines of one precision. All are loaded at once, and one works at a time."""
    dtype = found[0].dtype
    rates: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        children: list[Child] = []
        for engine in found:
            print(f"starting {engine.name} {engine.dtype}", file=sys.stderr)
            children.append(stack.enter_context(closing(start(engine, threads))))
        for repetition in range(repetitions):
            for work in works:
                if repetition % work.part:
                    continue
                for place in range(len(children)):
                    # Whoever comes first would otherwise always come first.
                    child = children[(place + repetition) % len(children)]
                    rate = measure(child, work, 1 + repetition)
                    rates.setdefault((work.name, child.name), []).append(rate)
                    print(f"{work.name} {child.name} {dtype}: {rate:.1f} tok/s", file=sys.stderr)
    for work in works:
        names = [engine.name for engine in found]
        middle = {name: statistics.median(rates[work.name, name]) for name in names}
        for name in names:
            case: dict[str, object] = {"work": work.name, "dtype": dtype, "engine": name}
            results.add(Row("tokens_per_s", case, middle[name], "tok/s"))
        peers = [name for name in names if name != OURS]
        if not peers:
            continue
        best = max(peers, key=lambda name: middle[name])
        pairs = zip(rates[work.name, OURS], rates[work.name, best], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        ratio, goal = statistics.median(ratios), GOALS.get((work.name, dtype))
        case = {"work": work.name, "dtype": dtype}
        met = None if goal is None else ratio >= goal
        results.add(Row("ratio_best_peer", case, ratio, "", best, ratio, goal, met))
        for side, value in zip(("low", "high"), interval(ratios), strict=True):
            results.add(Row(f"ratio_best_peer_{side}", case, value, "", best, value))
