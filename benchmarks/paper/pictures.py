"""One picture for each figure or table: ours beside the paper's, and the curves that a single target cannot show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capacities import BARS
from cells import ORCA, SARATHI, VLLM, Found
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.shape import KNOWN
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from targets import ARXIV, CHAT, Bar, Row, device_cost, prefill, trace
from timelines import timeline

OURS, PAPER, THIRD = "#2a6f97", "#d9a441", "#8f8f8f"
#: Of pictures in inches, and dots an inch: some 30 KB each.
SIZE, DOTS = (7.2, 3.4), 90
#: Figures that are bars alone: their targets, title, the unit, and whether the axis is logarithmic.
PLAIN = {
    "table-3": (("T3",), "Table 3: SLOs as multiples of a decode iteration", "seconds", True),
    "table-4": (("T4",), "Table 4: the policy's halves, Yi-34B", "seconds", True),
    "figure-1": (("F1a", "F1b"), "Figure 1: Yi-34B, makespan and P99 TBT", "seconds", True),
    "figure-3": (("F3",), "Figure 3: batches of prompts or decodes, Yi-34B on two A100", "milliseconds", True),
    "figure-8": (("F8",), "Figure 8: Falcon-180B, TP4 PP2", "milliseconds", True),
    "figure-9": (("F9",), "Figure 9: a prompt beside 32 decodes, Mistral-7B", "times the decodes alone", True),
    "figure-10": (("F10",), "Figure 10: capacity of sarathi over the baselines", "times", False),
    "figure-11": (("F11",), "Figure 11: capacity of sarathi over the baselines, pipelines", "times", False),
    "figure-12": (("F12",), "Figure 12: capacity by SLO, budget and batch size", "requests/s", False),
    "figure-13a": (("F13a",), "Figure 13a: Falcon-180B, 32 decodes", "milliseconds", False),
    "figure-13b": (("F13b",), "Figure 13b: Falcon-180B, capacity", "requests/s", False),
    "figure-14": (("F14",), "Figure 14: prompts in chunks over whole prompts, Yi-34B", "times", False),
    "tiles": (("F6x",), "Tile quantisation: 257 tokens over 256, Mistral-7B", "times", False),
    "piggyback": (("X1",), "Decodes that ride on a chunk, Yi-34B", "milliseconds", False),
    "budget-sweep": (("X2",), "Capacity by token budget, Mistral-7B, P99 TBT 0.1 s", "requests/s", False),
}


def draw(folder: Path, rows: Sequence[Row], found: dict[str, Found], quick: bool) -> list[tuple[str, str]]:
    """All pictures that there are results for; file and title of each."""
    drawn: list[tuple[str, str]] = []

    def save(name: str, title: str, paint: Callable[[Axes], None], size: tuple[float, float] = SIZE) -> None:
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        paint(axes)
        axes.set_title(title, fontsize=10)
        figure.savefig(folder / f"{name}.png", dpi=DOTS)
        drawn.append((f"{name}.png", title))

    save("table-1", "Table 1: the models, and their KV cache", models)
    save("table-2", "Table 2: lengths of the data sets", lengths)
    save("figure-4", "Figure 4: where a prompt's time goes, Mistral-7B on an A100", breakdown)
    save("figure-5", "Figure 5: arithmetic intensity of linear layers, LLaMA2-70B on an A100", intensity)
    save("figure-6", "Figure 6: linear layers by tokens, LLaMA2-70B", linear_layers)
    save("figure-7", "Figure 7: C and D come while A and B decode", timeline, (7.2, 4.4))
    for name, (ids, title, unit, logarithmic) in PLAIN.items():
        bars = [bar for row in rows if row.target.id in ids for bar in row.bars]
        if bars:
            save(name, title, lambda axes, b=bars, u=unit, log=logarithmic: plain(axes, b, u, log))
    strict = strict_capacities(found)
    if strict and not quick:
        save("capacity", "Capacity under the strict SLO: P99 TBT (chat lengths)", lambda axes: policies(axes, strict))
    return drawn


def plain(axes: Axes, bars: Sequence[Bar], unit: str, logarithmic: bool) -> None:
    """Ours beside the paper's."""
    width = 0.38
    for at, bar in enumerate(bars):
        shift = width / 2 if bar.paper is not None else 0.0
        axes.bar(at - shift, bar.ours, width, color=OURS)
        if bar.paper is not None:
            axes.bar(at + shift, bar.paper, width, color=PAPER)
    many = len(bars) > 8
    axes.set_xticks(range(len(bars)), [bar.label for bar in bars], fontsize=6 if many else 8)
    if many:
        axes.tick_params(axis="x", rotation=60)
    if logarithmic:
        axes.set_yscale("log")
    axes.set_ylabel(unit)
    if any(bar.paper is not None for bar in bars):
        handles = [Patch(color=OURS, label="simulated"), Patch(color=PAPER, label="paper")]
        axes.legend(handles=handles, fontsize=8)


def models(axes: Axes) -> None:
    names = ("mistral-7b", "yi-34b", "llama-2-70b", "falcon-180b")
    for at, name in enumerate(names):
        shape = KNOWN[name]
        axes.bar(at - 0.2, shape.weight_bytes / 1e9, 0.38, color=OURS, label="weights, GB" if not at else "")
        kv = shape.kv_token_bytes / 1024
        axes.bar(at + 0.2, kv, 0.38, color=THIRD, label="KV cache, KiB a token" if not at else "")
    axes.set_xticks(range(len(names)), names)
    axes.legend(fontsize=8)


def lengths(axes: Axes) -> None:
    for name, color, label in ((CHAT, OURS, "sharegpt"), (ARXIV, PAPER, "arxiv")):
        entries = trace(name)
        for values, style, what in (
            (sorted(entry.prompt for entry in entries), "-", "prompt"),
            (sorted(entry.output for entry in entries), "--", "output"),
        ):
            step = max(1, len(values) // 500)
            shares = [at / len(values) for at in range(0, len(values), step)]
            axes.plot(values[::step], shares, style, color=color, label=f"{label}, {what}")
    axes.set_xscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("share of requests")
    axes.legend(fontsize=8)


def breakdown(axes: Axes) -> None:
    cost = device_cost("mistral-7b")
    tokens = (128, 256, 512, 1024, 2048, 4096, 8192)
    layers = cost.shape.layers
    linear = [layers * cost.products_ms(n) for n in tokens]
    attention = [layers * cost.prefill_ms(n, 0) for n in tokens]
    whole = [cost.iteration_us(prefill(n)) / 1e3 for n in tokens]
    rest = [w - a - b for w, a, b in zip(whole, linear, attention, strict=True)]
    bottom = [0.0] * len(tokens)
    for label, values, color in (("linear", linear, OURS), ("attention", attention, PAPER), ("others", rest, THIRD)):
        shares = [v / w for v, w in zip(values, whole, strict=True)]
        axes.bar(range(len(tokens)), shares, bottom=bottom, color=color, label=label)
        bottom = [b + s for b, s in zip(bottom, shares, strict=True)]
    for at, ms in enumerate(whole):
        axes.annotate(f"{ms:.0f} ms", (at, 1.01), ha="center", fontsize=8)
    axes.set_xticks(range(len(tokens)), [str(n) for n in tokens])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("share of the time")
    axes.set_ylim(0, 1.12)
    axes.legend(fontsize=8)


def intensity(axes: Axes) -> None:
    linear, shape = load_device("a100-pcie").linear, KNOWN["llama-2-70b"]
    tokens = [2**n for n in range(13)]
    weights = shape.layer_weights
    values = [
        2 * n * weights / (shape.value_bytes * (weights + n * (4 * shape.hidden + 3 * shape.inner))) for n in tokens
    ]
    axes.loglog(tokens, values, color=OURS)
    axes.axhline(
        linear.tiles["128x128"] * linear.units / linear.bytes_per_ms, color=PAPER, label="the device's ridge"
    )
    axes.set_xlabel("tokens")
    axes.set_ylabel("operations a byte")
    axes.legend(fontsize=8)


def linear_layers(axes: Axes) -> None:
    tokens = [16, 32, 64, 96, *range(128, 2049, 64)]
    for ranks, style in ((1, "-"), (2, "--"), (4, "-."), (8, ":")):
        cost = device_cost("llama-2-70b", ranks)
        axes.plot(tokens, [80 * cost.products_ms(n) for n in tokens], style, color=OURS, label=f"TP{ranks}")
    axes.axvspan(128, 512, color=PAPER, alpha=0.25, label="flat in the paper")
    axes.set_xlabel("tokens")
    axes.set_ylabel("milliseconds of 80 layers")
    axes.legend(fontsize=8)


def strict_capacities(found: dict[str, Found]) -> dict[str, list[tuple[str, Any]]]:
    """By model what each policy's search found under the strict SLO, of full size."""
    told: dict[str, list[tuple[str, Any]]] = {}
    for bars in BARS:
        if "strict" in bars.setting and bars.data == CHAT:
            cells = bars.cells(2048, 3)
            if all(cell.name in found for cell in cells):
                told[f"{bars.system.model}\n{bars.slo:g} s"] = [
                    (cell.policy, found[cell.name].capacity) for cell in cells
                ]
    return told


def policies(axes: Axes, strict: dict[str, list[tuple[str, Any]]]) -> None:
    """Capacities relative to the best baseline, with the 95 % interval over seeds, and the rates as numbers."""
    colors = {SARATHI: OURS, VLLM: PAPER, ORCA: THIRD}
    names = {SARATHI: "evenflow (stall-free)", VLLM: "prefill-first (vLLM)", ORCA: "hybrid (Orca)"}
    for at, group in enumerate(strict.values()):
        for n, (policy, capacity) in enumerate(group):
            low, high = capacity.interval or (capacity.rate, capacity.rate)
            spread = [[capacity.rate - max(low, 0.0)], [high - capacity.rate]]
            x = at + 0.27 * (n - 1)
            label = names[policy] if not at else ""
            axes.bar(x, capacity.rate, 0.25, color=colors[policy], yerr=spread, capsize=2, label=label)
            axes.annotate(f"{capacity.rate:.2f}", (x, max(high, capacity.rate)), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(strict)), list(strict))
    axes.set_ylabel("requests/s")
    axes.legend(fontsize=8)
