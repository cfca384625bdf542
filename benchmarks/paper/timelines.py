"""Figure 7: the iterations of four policies while A and B decode and the prompts of C and D come."""

from __future__ import annotations

from evenflow.control.core.events import SendPlan
from evenflow.control.wire import Result
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.world import Arrival, World
from matplotlib.axes import Axes
from matplotlib.patches import Patch

POLICIES = ("request-level", "prefill-first", "hybrid", "stall-free")
#: A and B run when C and D come, a second after the start.
LOAD = (Arrival(0, 32, 60), Arrival(0, 32, 60), Arrival(1_000_000, 2048, 40), Arrival(1_020_000, 3072, 40))
DECODES, PROMPTS, BOTH = "#9cc5a1", "#d9a441", "#2a6f97"


def iterations(policy: str) -> list[tuple[int, int, int, int]]:
    """Of each: when it starts and ends (µs), its decodes and its prompt tokens. Yi-34B on two A100."""
    scenario = Scenario(
        KNOWN["yi-34b"],
        load_device("a100-pcie"),
        ranks=2,
        policy=policy,
        host="graphs",
        length=4096,
        token_budget=512,
    )
    seen: list[tuple[int, int, int, int]] = []

    def watch(send: SendPlan, results: list[Result]) -> None:
        seen.append((results[0].started_us, results[0].ended_us, send.decodes, send.tokens - send.decodes))

    world = World(scenario.limits(), scenario.models(), watch=watch)
    world.feed(LOAD)
    world.run()
    return seen


def timeline(axes: Axes) -> None:
    """A row for each policy, an iteration for each box."""
    for row, policy in enumerate(reversed(POLICIES)):
        for start, end, decodes, tokens in iterations(policy):
            color = BOTH if decodes and tokens else PROMPTS if tokens else DECODES
            box = (start / 1e6, row - 0.35), (end - start) / 1e6, 0.7
            axes.broken_barh(
                [(box[0][0], box[1])], (box[0][1], box[2]), color=color, edgecolor="white", linewidth=0.4
            )
    axes.axvline(LOAD[2].at / 1e6, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(POLICIES)), list(reversed(POLICIES)))
    axes.set_xlabel("seconds")
    axes.set_xlim(0.7, 5.0)
    patches = [
        Patch(color=color, label=label)
        for color, label in ((DECODES, "decodes alone"), (PROMPTS, "prompts alone"), (BOTH, "both"))
    ]
    axes.legend(handles=patches, fontsize=8, loc="lower right")
