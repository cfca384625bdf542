"""``evenflow whatif``: the requests of a journal once more, under other settings.

They arrive when they did, with the lengths that they had; the decision core that serves decides in virtual time; what
iterations take is learned from those that the journal holds. Three columns stand side by side: what was recorded,
what the model makes of the same settings (the nearer to the first, the more the third is worth), and what was asked
for.
Exit codes: 0 done, 1 the journal's plans are not this program's, 2 no journal, or settings that cannot be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from ..control.core.bounds import WHOLE_PROMPTS, iteration_tokens
from ..control.core.events import Limits
from ..control.core.slo import Slo, parse_slo
from ..control.journal.files import JournalError
from ..control.journal.replay import Journal
from ..control.wire import Submit
from ..dataplane.simulated.figures import Figures, Spread, summarise
from ..dataplane.simulated.world import ReplicaModel, World
from .errors import UsageError
from .history import History, read_history
from .options import SLO_TOKENS


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is to be another; ``None`` is as it was. ``tbt_slo`` "none": iterations are bounded by tokens."""

    policy: str | None = None
    admission: str | None = None
    token_budget: int | None = None
    tbt_slo: str | None = None
    ttft_slo: str | None = None
    max_num_seqs: int | None = None
    blocks: int | None = None
    replicas: int | None = None
    prefix_caching: bool | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What is served with."""

    limits: Limits
    replicas: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the users saw."""

    figures: Figures
    preemptions: int
    refused: int
    iterations: int


def recorded_setting(history: History) -> Setting:
    """What the journal was served with, but that nobody is turned away."""
    limits = replace(history.limits, max_queued=1 << 40, max_queued_tokens=1 << 60, vocab_size=1 << 32)
    return Setting(limits, max(1, len(history.shape.replicas)), history.shape.blocks)


def settle(history: History, wishes: Wishes) -> Setting:
    """Raises ``UsageError`` for what cannot be."""
    was = recorded_setting(history)
    limits, stages = was.limits, history.shape.stages
    for flag, value, most in (
        ("--token-budget", wishes.token_budget, 1 << 20),
        ("--max-num-seqs", wishes.max_num_seqs, 32_000),
        ("--blocks", wishes.blocks, 1 << 22),
        ("--replicas", wishes.replicas, 1024),
    ):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{flag} must be from 1 to {most}, not {value}.")
    policy = wishes.policy or limits.policy
    slo = _slo(limits, policy, wishes)
    blocks = wishes.blocks or was.blocks
    length = min(limits.max_model_len, blocks * limits.block_size)
    seqs = wishes.max_num_seqs or limits.max_num_seqs
    budget = wishes.token_budget
    if budget is None:
        # A budget that was as large as a prompt is, or bounded by time, says nothing for another policy.
        usual = SLO_TOKENS if slo is not None and limits.slo is None else limits.token_budget
        budget = 256 if limits.policy in WHOLE_PROMPTS and policy not in WHOLE_PROMPTS else usual
    budget = iteration_tokens(policy, budget, length, seqs)
    settled = replace(
        limits,
        policy=policy,
        admission=wishes.admission or limits.admission,
        token_budget=budget,
        max_num_seqs=min(seqs, budget * stages),
        max_model_len=length,
        prefix_caching=limits.prefix_caching if wishes.prefix_caching is None else wishes.prefix_caching,
        slo=slo,
    )
    return Setting(settled, wishes.replicas or was.replicas, blocks)


def _slo(limits: Limits, policy: str, wishes: Wishes) -> Slo | None:
    if wishes.tbt_slo is None:
        if wishes.ttft_slo is not None:
            raise UsageError("--ttft-slo needs --tbt-slo, which bounds the chunks.")
        return limits.slo if policy == "stall-free" else None
    if wishes.tbt_slo == "none":
        return None
    if policy != "stall-free":
        raise UsageError(f"--tbt-slo needs --policy stall-free: {policy} does not bound an iteration by its chunks.")
    try:
        return parse_slo(wishes.tbt_slo, wishes.ttft_slo)
    except ValueError as error:
        raise UsageError(f"{error}.") from None


def imagine(history: History, setting: Setting) -> Outcome:
    """The journal's requests under ``setting``."""
    shape, limits = history.shape, setting.limits
    model = ReplicaModel(history.cost, shape.stages, setting.blocks, shape.profile)
    slots = min(65_000, max(shape.slots, limits.max_num_seqs + max(8, limits.max_num_seqs // 2)))
    world = World(limits, [model] * setting.replicas, slots=slots, hop_us=history.hop_us)
    ordered = limits.admission == "priority"
    classes = limits.slo is not None
    arrivals = [
        arrival if arrival.submit is None else replace(arrival, submit=_fitting(arrival.submit, ordered, classes))
        for arrival in history.arrivals
    ]
    world.feed(arrivals)
    world.run()
    engine = world.engine
    preemptions = sum(r.preemptions for r in engine.replicas.values()) + engine.counters["preemptions"]
    return Outcome(summarise(world.record), preemptions, len(world.record.rejected), world.iterations)


def _fitting(submit: Submit, ordered: bool, classes: bool) -> Submit:
    """``submit`` as it may be under other limits: without a priority where there are none, of the first class where
    there are others."""
    return structs.replace(
        submit,
        priority=submit.priority if ordered else 0,
        slo="" if classes else submit.slo,
    )


def run_whatif(path: Path, wishes: Wishes, as_json: bool) -> int:
    """Returns the exit code. Raises ``UsageError``."""
    try:
        history = read_history(Journal(path))
    except (JournalError, ValueError) as error:
        if as_json:
            print(json.dumps({"file": str(path), "error": str(error)}))
        else:
            print(f"evenflow: {error}", file=sys.stderr)
        return 2
    if history.replayed.problem:
        print(f"evenflow: {path} was recorded by another scheduler than this one; evenflow replay", file=sys.stderr)
        print("says where they part. What follows it is not known.", file=sys.stderr)
        return 1
    setting = settle(history, wishes)
    was = recorded_setting(history)
    recorded = Outcome(history.figures, history.preemptions, history.refused, history.iterations)
    same = imagine(history, was)
    other = same if setting == was else imagine(history, setting)
    if as_json:
        print(json.dumps(as_object(path, history, was, setting, recorded, same, other)))
    else:
        print(text(path, history, was, setting, recorded, same, other))
    return 0


def describe(setting: Setting) -> str:
    """In a line."""
    limits = setting.limits
    parts = [f"{setting.replicas} replica{'s' * (setting.replicas > 1)}", limits.policy, limits.admission]
    if limits.slo is not None:
        parts.append(" ".join(f"{c.name} {c.tbt * 1e3:g}ms" for c in limits.slo.classes))
    parts += [f"budget {limits.token_budget}", f"{limits.max_num_seqs} sequences"]
    parts.append(f"{setting.blocks} blocks of {limits.block_size}")
    return ", ".join(parts) + ("" if limits.prefix_caching else ", no prefix cache")


_ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("finished", lambda o: f"{o.figures.finished} of {o.figures.requests}"),
    ("output tokens/s", lambda o: f"{o.figures.tokens_per_second:.1f}"),
    ("requests/s", lambda o: f"{o.figures.requests_per_second:.2f}"),
    ("preemptions", lambda o: f"{o.preemptions}"),
    ("refused", lambda o: f"{o.refused}"),
    ("iterations", lambda o: f"{o.iterations}"),
)
_SPREADS = (("TTFT", "ttft"), ("TBT", "tbt"), ("E2E", "e2e"))


def text(
    path: Path,
    history: History,
    was: Setting,
    setting: Setting,
    recorded: Outcome,
    same: Outcome,
    other: Outcome,
) -> str:
    """A table, then what must be known to believe it."""
    lines = [f"recorded: {describe(was)}", f"what if:  {describe(setting)}", ""]
    lines.append(f"{'':<20}{'recorded':>16}{'the same, model':>18}{'what if':>16}")
    outcomes = (recorded, same, other)
    for name, show in _ROWS:
        lines.append(f"{name:<20}" + "".join(f"{show(o):>{w}}" for o, w in zip(outcomes, (16, 18, 16), strict=True)))
    for name, field in _SPREADS:
        for part in ("p50", "p90", "p99", "most"):
            values: list[Spread] = [getattr(o.figures, field) for o in outcomes]
            cells = "".join(f"{getattr(v, part) * 1e3:>{w}.2f}" for v, w in zip(values, (16, 18, 16), strict=True))
            lines.append(f"{f'{name} {part}, ms'.replace('most', 'max'):<20}{cells}")
    lines += ["", *notes(history)]
    return "\n".join(lines)


def notes(history: History) -> list[str]:
    """What must be known to believe the figures."""
    r, c = history.residuals, history.cost.coefficients
    found = [
        f"Model of an iteration, fitted to {r.iterations}: {c[0] / 1e3:.3f} ms + {c[1]:.3f} us a prefill token"
        f" + {c[2] * 1e3:.4f} ns a pair of attention + {c[3]:.3f} us a decode + {c[4] * 1e3:.3f} ns a KV token;"
        f" {history.cost.extra_us:.0f} us between two; messages take {history.hop_us} us.",
        f"Residuals: mean {r.mean:.1%}, P50 {r.p50:.1%}, P90 {r.p90:.1%}, P99 {r.p99:.1%} of the measured time;"
        f" bias {r.bias:+.1%}, R2 {r.explained:.3f}.",
    ]
    if history.refused:
        found.append(f"{history.refused} submissions were refused: how long their answers would be is not known.")
    if history.unfinished:
        found.append(f"{history.unfinished} requests were unfinished at the journal's end: they end where they were.")
    if history.replayed.note:
        found.append(f"The journal: {history.replayed.note}.")
    return found


def as_object(
    path: Path,
    history: History,
    was: Setting,
    setting: Setting,
    recorded: Outcome,
    same: Outcome,
    other: Outcome,
) -> dict[str, Any]:
    """Ready for JSON. Times in seconds, the model's coefficients in microseconds."""
    names = ("constant", "prefill_token", "attention_pair", "decode", "kv_token")
    return {
        "file": str(path),
        "recorded_setting": describe(was),
        "setting": describe(setting),
        "recorded": _figures(recorded),
        "model": _figures(same),
        "whatif": _figures(other),
        "coefficients_us": dict(zip(names, history.cost.coefficients, strict=True)),
        "between_us": history.cost.extra_us,
        "hop_us": history.hop_us,
        "residuals": asdict(history.residuals),
        "refused_in_journal": history.refused,
        "unfinished_in_journal": history.unfinished,
        "note": history.replayed.note,
    }


def _figures(outcome: Outcome) -> dict[str, Any]:
    figures = outcome.figures
    return {
        "requests": figures.requests,
        "finished": figures.finished,
        "duration": figures.duration,
        "output_tokens": figures.output_tokens,
        "output_throughput": figures.tokens_per_second,
        "request_throughput": figures.requests_per_second,
        "preemptions": outcome.preemptions,
        "refused": outcome.refused,
        "iterations": outcome.iterations,
        "ttft": asdict(figures.ttft),
        "tbt": asdict(figures.tbt),
        "scheduling_delay": asdict(figures.delay),
        "e2e": asdict(figures.e2e),
    }
