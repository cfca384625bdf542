"""Whether targets in milliseconds are kept: figures for clients, and a line now and then when one cannot be."""

from __future__ import annotations

from math import inf

import structlog

from .core.engine import Engine

log = structlog.get_logger("evenflow.control")

#: A replica that cannot keep its target is spoken of this often, in seconds.
AGAIN_S = 30.0


def promise_figures(engine: Engine) -> dict[str, float]:
    """By name and replica; nothing where budgets are in tokens."""
    values: dict[str, float] = {}
    for replica in engine.replicas.values():
        budget = replica.budget
        if budget is None:
            continue
        place = f'{{replica="{replica.index}"}}'
        values[f"slo_rounds_total{place}"] = budget.rounds
        values[f"slo_rounds_missed_total{place}"] = budget.missed
        values[f"slo_unreachable_iterations_total{place}"] = budget.unreachable
        values[f"slo_prefill_withheld_total{place}"] = budget.withheld
        values[f"slo_target_seconds{place}"] = 0.0 if budget.strictest == inf else budget.strictest
        values[f"slo_margin_ratio{place}"] = budget.margin.value
        values[f"plans_held_total{place}"] = budget.plans_held
        values[f"plans_held_late_total{place}"] = budget.plans_late
    return values


class Complaints:
    """What was said of targets that cannot be kept."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[float, int]] = {}  #: by replica: when, and its count then

    def look(self, engine: Engine, now: float) -> None:
        """Log each replica whose decodes alone have missed their target since it was last spoken of."""
        for replica in engine.replicas.values():
            budget = replica.budget
            if budget is None:
                continue
            at, count = self._said.get(replica.index, (-inf, 0))
            # The counts begin anew with the process only: a budget outlives its epochs.
            if budget.unreachable > count and now - at >= AGAIN_S:
                self._said[replica.index] = now, budget.unreachable
                log.warning(
                    "decodes alone miss the target for the time between tokens",
                    replica=replica.index,
                    target_ms=None if budget.strictest == inf else round(budget.strictest * 1e3),
                    iterations=budget.unreachable - count,
                    decoding=sum(lane.count for lane in replica.lanes),
                )
