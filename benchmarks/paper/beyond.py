"""Beyond the paper: what it leaves open, each answered coarsely. ``beyond.py [NAME ...]`` runs some of:

tiles      prefill speed by token budget in small steps: the dips where a tile begins (6.1)
latency    TTFT under an SLO, and end-to-end latency, by policy at the same load
devices    how much prefill fits beside decodes within a target: A100, H100, H200, MI300X (6.3)
loads      capacity of all policies on other loads: Azure code and conversation, BWB, Mooncake, prefill only (6.4)
attention  what chunks cost, and the best chunk, with full, sliding-window and linear attention
budget     a budget in milliseconds against fixed ones, on a load that changes
overload   fairness between tenants, and priority, when more comes than can be served (6.6)
bubbles    idle time of pipeline stages by cause, which the paper only infers
prefix     prefix reuse with Mooncake's hashes, and chunks aligned with shared prefixes

``--quick`` takes fewer requests and policies. ``--json`` prints the rows as one object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

import msgspec
from evenflow.control.bubbles import CAUSES, BubbleAccount
from evenflow.control.core.bounds import POLICIES
from evenflow.control.core.events import SendPlan
from evenflow.control.core.slo import Slo, SloClass
from evenflow.control.wire import Result, Submit
from evenflow.dataplane.simulated.capacity import capacity
from evenflow.dataplane.simulated.cost import DeviceCost
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.figures import Figures, spread, summarise
from evenflow.dataplane.simulated.load import Entry, arrivals, poisson, shuffled, traced
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.world import Arrival, World, own_tokens
from targets import CHAT, decodes, device_cost, mixed, prefill, trace

MISTRAL, A100 = KNOWN["mistral-7b"], load_device("a100-pcie")


@dataclass(frozen=True, slots=True)
class Line:
    """One answer: of what question, for what case, and the figures by name."""

    question: str
    case: str
    figures: dict[str, float | str]


def serve(scenario: Scenario, load: Iterable[Arrival]) -> tuple[Figures, World]:
    """Run a load to its end."""
    world = World(scenario.limits(), scenario.models())
    world.feed(load)
    world.run()
    return summarise(world.record), world


def mistral(policy: str = "stall-free", budget: int = 512, sequences: int = 128, length: int = 8192) -> Scenario:
    return Scenario(
        MISTRAL, A100, policy=policy, token_budget=budget, max_num_seqs=sequences, length=length, host="graphs"
    )


def mooncake() -> list[Entry]:
    """Its requests of less than 30,000 tokens."""
    return [entry for entry in trace("mooncake_conversation_2500") if entry.prompt < 30_000]


def tiles(quick: bool) -> list[Line]:
    """Prompt tokens a second beside 32 decodes at 2k tokens, by the iteration's total."""
    cost = device_cost("mistral-7b")

    def speed(budget: int) -> float:
        return (budget - 32) / cost.stage_us(0, mixed(32, 2048, budget - 32)) * 1e6

    best = max(speed(budget) for budget in range(128, 2049, 128))
    lines: list[Line] = []
    for budget in range(128, 2049, 128):
        told: dict[str, float | str] = {
            "tokens_per_s": speed(budget),
            "of_best": speed(budget) / best,
            "one_more": speed(budget + 1) / speed(budget),
        }
        lines.append(Line("tiles", f"budget {budget}", told))
    return lines


def latency(quick: bool) -> list[Line]:
    """At 0.8 requests/s, which all policies sustain for the chat lengths under the strict SLO."""
    requests = 128 if quick else 1024
    chosen = shuffled(trace(CHAT), 0, requests)
    lines: list[Line] = []
    for policy in POLICIES:
        if policy == "request-level" and quick:
            continue
        figures, _ = serve(mistral(policy), arrivals(chosen, poisson(0.8, 0), 8192))
        told: dict[str, float | str] = {
            "ttft_p50": figures.ttft.p50,
            "ttft_p99": figures.ttft.p99,
            "tbt_p99": figures.pooled_tbt.p99,
            "e2e_p50": figures.e2e.p50,
            "e2e_p99": figures.e2e.p99,
        }
        lines.append(Line("latency", policy, told))
    return lines


def devices(quick: bool) -> list[Line]:
    """The longest chunk beside 32 decodes at 2k tokens whose iteration stays within the target."""
    lines: list[Line] = []
    for name in ("a100-pcie", "a100-sxm", "h100", "h200", "mi300x"):
        device = load_device(name)
        for model in ("mistral-7b", "llama-3-8b"):
            cost = DeviceCost(device, KNOWN[model], host="graphs")
            base = cost.stage_us(0, decodes(32, 2048))
            told: dict[str, float | str] = {
                "decodes_ms": base / 1e3,
                "measured": ", ".join(device.measured) or "nothing",
            }
            for ms in (20, 50, 100):
                fits = [n for n in range(16, 8193, 16) if cost.stage_us(0, mixed(32, 2048, n)) <= ms * 1e3]
                told[f"tokens_within_{ms}_ms"] = max(fits, default=0)
            lines.append(Line("devices", f"{model} on {name}", told))
    return lines


def loads(quick: bool) -> list[Line]:
    """The strict SLO (0.1 s); one seed. The batch limit is small, so that short runs see a queue."""
    sequences, requests = (16, 64) if quick else (64, 512)
    prompts_only = [entry._replace(output=1) for entry in trace("azure2023_code")]
    chosen: dict[str, list[Entry]] = {
        "azure code": trace("azure2023_code"),
        "azure conversation": trace("azure2023_conv"),
        "bwb": trace("bwb_lengths"),
        "mooncake": [
            entry._replace(hashes=()) for entry in trace("mooncake_conversation_2500") if entry.prompt < 30_000
        ],
        "prefill only": prompts_only,
    }
    lines: list[Line] = []
    for name, entries in chosen.items():
        if quick and name not in ("azure code", "prefill only"):
            continue
        told: dict[str, float | str] = {}
        for policy in ("stall-free", "prefill-first", "hybrid") if quick else POLICIES:
            # What a policy reads whole must fit its iterations: the load's longest sequence is the limit of all.
            length = 8192 if name != "mooncake" else 32_000
            scenario = mistral(policy, 512, sequences if policy != "hybrid" else 16, length)
            told[policy] = capacity(scenario, entries, 0.1, requests=requests).rate
        lines.append(Line("loads", name, told))
    return lines


def attention(quick: bool) -> list[Line]:
    """A prompt of 16k tokens in chunks, over the whole prompt. Linear attention updates a state of as many numbers a
    head as 128 tokens have keys and values: it costs what a window of the head's size does."""
    lines: list[Line] = []
    for name, window in (("full", 0), ("window of 4,096", 4096), ("linear", MISTRAL.head_dim)):
        cost = DeviceCost(A100, msgspec.structs.replace(MISTRAL, window=window), host="graphs")
        whole = cost.iteration_us(prefill(16_384))
        told: dict[str, float | str] = {"whole_ms": whole / 1e3}
        for chunk in (128, 256, 512, 1024, 2048, 4096):
            took = sum(cost.iteration_us(prefill(chunk, at)) for at in range(0, 16_384, chunk))
            told[f"chunks_of_{chunk}"] = took / whole
        # The largest chunk with which no iteration beside 32 decodes at 8k tokens is longer than the target.
        last = [
            chunk
            for chunk in range(64, 4097, 64)
            if cost.stage_us(0, mixed(32, 8192, chunk, 16_384 - chunk)) <= 100_000
        ]
        told["most_within_100_ms"] = max(last, default=0)
        lines.append(Line("attention", name, told))
    return lines


def changing(requests: int) -> list[Arrival]:
    """Chat lengths, at rates that change every 40 s: 0.5, 2.5, 1 and 3.5 requests a second."""
    chosen, found = shuffled(trace(CHAT), 1, requests), list[Arrival]()
    at, chance = 0.0, iter(poisson(1.0, 1))
    last = next(chance)
    for entry in chosen:
        rate = (0.5, 2.5, 1.0, 3.5)[int(at // 40) % 4]
        step = next(chance)
        at += (step - last) / rate
        last = step
        found.append(Arrival(round(at * 1e6), entry.prompt, entry.output))
    return found


def budget(quick: bool) -> list[Line]:
    """P99 of TBT within 0.1 s, and what it costs in TTFT."""
    load = changing(150 if quick else 1000)
    lines: list[Line] = []
    cases: list[tuple[str, Scenario]] = [(f"fixed {n}", mistral(budget=n)) for n in (256, 512, 768, 1024)]
    slo = Slo((SloClass("", 0.1),))
    cases.append(("slo 100 ms", replace(mistral(budget=4096), slo=slo)))
    for name, scenario in cases:
        figures, world = serve(scenario, load)
        over = sum(n for gap, n in zip(world.record.gaps, world.record.counts, strict=True) if gap > 100_000)
        told: dict[str, float | str] = {
            "tbt_p99": figures.tbt.p99,
            "missed": over / max(1, figures.tbt.count),
            "ttft_p50": figures.ttft.p50,
            "ttft_p99": figures.ttft.p99,
            "e2e_p50": figures.e2e.p50,
        }
        lines.append(Line("budget", name, told))
    return lines


def overload(quick: bool) -> list[Line]:
    """One tenant sends four requests a second, more than the device serves; another one in five seconds, in half of
    the runs with a more urgent priority."""
    seconds = 60 if quick else 240
    chosen = shuffled(trace(CHAT), 2, 6 * seconds)
    many = [(at, "crowd") for at in islice(poisson(4.0, 2), 4 * seconds)]
    few = [(at, "guest") for at in islice(poisson(0.2, 3), seconds // 5)]
    lines: list[Line] = []
    for admission in ("fcfs", "fair", "priority"):
        load: list[Arrival] = []
        guests: list[int] = []
        for key, ((at, tenant), entry) in enumerate(zip(sorted(many + few), chosen, strict=False)):
            if tenant == "guest":
                guests.append(key)
            urgent = -1 if tenant == "guest" and admission == "priority" else 0
            prompt, output = min(entry.prompt, 8191), max(1, min(entry.output, 8192 - entry.prompt))
            submit = Submit(key, f"r{key}", own_tokens(key, prompt), prompt, output, tenant=tenant, priority=urgent)
            load.append(Arrival(round(at * 1e6), prompt, output, submit=submit))
        _, world = serve(replace(mistral(), admission=admission), load)
        record, known = world.record, set(guests)
        told: dict[str, float | str] = {}
        for tenant, keys in (("guest", guests), ("crowd", [k for k in range(len(load)) if k not in known])):
            first = spread(record.first[key] - record.arrived[key] for key in keys)
            told[f"{tenant}_ttft_p50"], told[f"{tenant}_ttft_p99"] = first.p50, first.p99
        lines.append(Line("overload", admission, told))
    return lines


def bubbles(quick: bool) -> list[Line]:
    """Falcon-180B, TP4 PP2, chat lengths at 0.25 requests a second: shares of the last stage's time."""
    requests = 64 if quick else 512
    chosen = shuffled(trace(CHAT), 0, requests)
    lines: list[Line] = []
    for policy in ("stall-free", "prefill-first", "hybrid"):
        scenario = Scenario(KNOWN["falcon-180b"], A100, ranks=4, stages=2, policy=policy, length=8192, host="graphs")
        account = BubbleAccount(2)

        def watch(send: SendPlan, results: Sequence[Result], account: BubbleAccount = account) -> None:
            account.planned(send)
            for stage, result in enumerate(results):
                account.returned(stage, result)

        world = World(scenario.limits(), scenario.models(), watch=watch)
        world.feed(arrivals(chosen, poisson(0.25, 0), 8192))
        world.run()
        stage = account.accounts[-1]
        told: dict[str, float | str] = {"busy": stage.busy_us / world.now}
        told |= {cause: us / world.now for cause, us in zip(CAUSES, stage.causes, strict=True)}
        lines.append(Line("bubbles", policy, told))
    return lines


def prefix(quick: bool) -> list[Line]:
    """Llama-3-8B on one H100. The trace at a quarter of its pace; and its prompts three times each at the same
    moment, at a twelfth of it, as agents send them that try a step several times."""
    entries = mooncake()[: 100 if quick else 1200]
    base = Scenario(KNOWN["llama-3-8b"], load_device("h100"), token_budget=2048, length=32_768, host="graphs")
    lines: list[Line] = []
    for load, pace, copies in (("trace", 0.25, 1), ("three of each", 0.08, 3)):
        for name, caching, waits in (("no reuse", False, False), ("reuse", True, False), ("aligned", True, True)):
            scenario = replace(base, prefix_caching=caching, await_prefix=waits)
            coming = [entry for entry in entries for _ in range(copies)]
            figures, world = serve(scenario, traced(coming, 32_768, pace))
            replicas = world.engine.replicas.values()
            hits = sum(replica.cache_hits for replica in replicas)
            told: dict[str, float | str] = {
                "cached": hits / max(1, sum(replica.cache_queries for replica in replicas)),
                "ttft_p50": figures.ttft.p50,
                "ttft_p99": figures.ttft.p99,
                "e2e_p50": figures.e2e.p50,
            }
            lines.append(Line("prefix", f"{load}, {name}", told))
    return lines


QUESTIONS: dict[str, Callable[[bool], list[Line]]] = {
    "tiles": tiles,
    "latency": latency,
    "devices": devices,
    "loads": loads,
    "attention": attention,
    "budget": budget,
    "overload": overload,
    "bubbles": bubbles,
    "prefix": prefix,
}


def text(lines: Sequence[Line]) -> str:
    """Markdown: a table for each question."""
    found: list[str] = []
    question = ""
    for line in lines:
        if line.question != question:
            question = line.question
            heads = ["case", *line.figures]
            found += ["", f"## {question}", "", "| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        values = [value if isinstance(value, str) else f"{value:.4g}" for value in line.figures.values()]
        found.append("| " + " | ".join([line.case, *values]) + " |")
    return "\n".join(found).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *QUESTIONS], default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    lines: list[Line] = []
    for name in arguments.names or QUESTIONS:
        lines += QUESTIONS[name](arguments.quick)
    print(json.dumps([asdict(line) for line in lines]) if arguments.json else text(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
