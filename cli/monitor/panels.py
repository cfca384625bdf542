"""Draws a ``Snapshot``: pure functions of the snapshot and the size of the screen.

Colours (of Okabe and Ito's palette, told apart by everybody) only repeat what glyphs and words say, so nothing is
lost without them. Every line is cut to the width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from .snapshot import Iteration, Running, Snapshot

DECODE, CHUNK, CACHED, GOOD, BAD, FREE = "#0072B2", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "grey50"
#: Iterations on the screen, at most.
SHOWN_ITERATIONS = 12
NARROW = 60
_SPARKS = "▁▂▃▄▅▆▇█"
_STATES = {"ready": GOOD, "draining": CHUNK, "not ready": CHUNK, "lost": BAD}

Part = tuple[int, str, str]


def render(snapshot: Snapshot, width: int, height: int) -> Text:
    """The whole screen: at most ``height`` lines of at most ``width`` columns."""
    lines = [_head(snapshot, width)]
    lines += _latency(snapshot, width)
    lines.append(_load(snapshot))
    lines.append(_blocks(snapshot, width))
    room = height - len(lines) - len(snapshot.stages) - 3
    shown = snapshot.iterations[: max(1, min(SHOWN_ITERATIONS, room // 2))]
    lines.append(_rule(_iteration_title(snapshot), width))
    lines += [_iteration(iteration, width) for iteration in shown]
    if snapshot.stages:
        lines.append(_rule("stages: busy █  bubble ▒  plan late ! ", width))
        lines += [_stage(snapshot, number, width) for number in range(len(snapshot.stages))]
    lines.append(_rule(f"requests: {snapshot.running} running, {snapshot.waiting} waiting", width))
    lines += _requests(snapshot.requests, width, height - len(lines))
    screen = Text(no_wrap=True, overflow="crop", end="")
    for number, line in enumerate(lines[: max(1, height)]):
        line.truncate(max(1, width))
        screen.append("\n" if number else "").append_text(line)
    return screen


def bar(parts: Sequence[Part], total: int, width: int) -> Text:
    """Parts of ``total`` as a bar of ``width`` columns; what is not zero has a column, and the sum is never wider."""
    text = Text()
    if total <= 0 or width <= 0:
        return text
    left, position = width, 0.0
    for size, glyph, style in parts:
        begin = round(position)
        position += size * width / total
        columns = min(left, max(round(position) - begin, 1 if size > 0 else 0))
        left -= columns
        text.append(glyph * columns, style)
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest ``width`` values, each as a column of up to eight eighths of the largest."""
    shown = list(values)[-max(0, width) :] if width > 0 else []
    most = max(shown, default=0.0)
    return "".join(_SPARKS[min(7, int(value / most * 7.999)) if most > 0 else 0] for value in shown)


def short(value: float | None) -> str:
    """A count in at most five characters: 812, 4.1k, 63k, 1.2M."""
    if value is None:
        return "-"
    for limit, divisor, suffix in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(value) < limit - 0.5 * divisor:
            scaled = value / divisor
            return f"{scaled:.1f}{suffix}" if scaled < 10 and suffix else f"{scaled:.0f}{suffix}"
    return f"{value / 1e9:.1f}G"


def seconds(value: float) -> str:
    """A duration with its unit: 31.0 ms, 2.41 s, 12.0 s, 3m20s, 2h05m."""
    if value < 0.9995:
        return f"{value * 1e3:.1f} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    if value < 3600:
        return f"{int(value) // 60}m{int(value) % 60:02d}s"
    return f"{int(value) // 3600}h{int(value) % 3600 // 60:02d}m"


def _head(snapshot: Snapshot, width: int) -> Text:
    up = sum(state == "up" for state in snapshot.replicas)
    text = Text(" evenflow ", "bold").append(f" {snapshot.model or '-'}  ")
    text.append(snapshot.state, f"bold {_STATES.get(snapshot.state, BAD)}")
    if snapshot.state == "lost":
        text.append(" (no answer; figures are the last known)")
    elif len(snapshot.replicas) > 1:
        text.append(f"  replicas {up} of {len(snapshot.replicas)}")
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    gap = width - text.cell_len - len(clock) - 1
    return text.append(" " * gap + clock) if gap > 0 else text


def _latency(snapshot: Snapshot, width: int) -> list[Text]:
    lines: list[Text] = []
    rates = (
        ("TBT ", snapshot.tbt, "out", snapshot.output_rate, snapshot.output_history),
        ("TTFT", snapshot.ttft, "in ", snapshot.prompt_rate, []),
    )
    for name, values, direction, rate, history in rates:
        text = Text(f" {name}", "bold")
        for share, value in zip(("p50", "p90", "p99"), values or (None,) * 3, strict=False):
            text.append(f"  {share} ").append(f"{'-' if value is None else seconds(value):>8}", "bold")
        text.append(f"   {direction} {short(rate):>5} tok/s ")
        text.append(sparkline(history, width - text.cell_len - 1), DECODE)
        lines.append(text)
    return lines


def _load(snapshot: Snapshot) -> Text:
    limit = f"/{snapshot.running_limit}" if snapshot.running_limit else ""
    text = Text(f" run {snapshot.running}{limit}   wait {snapshot.waiting} ({short(snapshot.waiting_tokens)} tok)")
    for name, count in (
        ("preempted", snapshot.preemptions),
        ("refused", snapshot.refused),
        ("epochs lost", snapshot.epochs_lost),
    ):
        text.append(f"   {name} ").append(str(count), f"bold {BAD}" if count else "")
    return text


def _blocks(snapshot: Snapshot, width: int) -> Text:
    total = snapshot.blocks_used + snapshot.blocks_cached + snapshot.blocks_free
    parts = (
        (snapshot.blocks_used, "█", DECODE),
        (snapshot.blocks_cached, "▒", CACHED),
        (snapshot.blocks_free, "·", FREE),
    )
    shares = [100 * size / total if total else 0.0 for size, _, _ in parts]
    hits = "" if snapshot.cache_hits is None else f"  hits {100 * snapshot.cache_hits:.0f}%"
    tail = f"  █ used {shares[0]:.0f}%  ▒ cached {shares[1]:.0f}%  · free {shares[2]:.0f}%{hits}"
    head = Text(f" KV {short(total)} blocks  ")
    head.append_text(bar(parts, total, width - head.cell_len - len(tail) - 1))
    return head.append(tail)


def _iteration_title(snapshot: Snapshot) -> str:
    rate = "" if snapshot.iteration_rate is None else f"{snapshot.iteration_rate:.0f} iterations/s, newest first: "
    return f"{rate}█ decode  ▓ prompt chunk  ░ unused budget"


def _iteration(iteration: Iteration, width: int) -> Text:
    unused = max(0, iteration.budget - iteration.decodes - iteration.chunk_tokens)
    took = "" if iteration.milliseconds is None else f"{iteration.milliseconds:.1f} ms"
    tail = f"  {iteration.decodes:>4} + {iteration.chunk_tokens:<5}{took:>10}"
    if width >= NARROW:
        chunks = f"{iteration.chunks} chunk{'' if iteration.chunks == 1 else 's'}" if iteration.chunks else ""
        tail += f"  {chunks:<9}"
    text = Text(f" {iteration.replica}.{iteration.lane} {iteration.step:>7} ")
    parts = ((iteration.decodes, "█", DECODE), (iteration.chunk_tokens, "▓", CHUNK), (unused, "░", FREE))
    text.append_text(bar(parts, iteration.budget, width - text.cell_len - len(tail) - 1))
    return text.append(tail)


def _stage(snapshot: Snapshot, number: int, width: int) -> Text:
    stage = snapshot.stages[number]
    tail = f"  busy {100 * stage.busy:5.1f}%  bubble {100 * stage.bubble:4.1f}%  late {100 * stage.late:4.1f}%"
    text = Text(f" {stage.replica}.{stage.stage} ")
    busy, bubble, late = round(1000 * stage.busy), round(1000 * stage.bubble), round(1000 * stage.late)
    used = busy + bubble + late
    parts = ((busy, "█", GOOD), (bubble, "▒", CHUNK), (late, "!", BAD), (max(0, 1000 - used), "·", FREE))
    text.append_text(bar(parts, max(1000, used), width - text.cell_len - len(tail) - 1))
    return text.append(tail)


def _requests(requests: list[Running], width: int, room: int) -> list[Text]:
    if room < 2 or not requests:
        return []
    wide = width >= NARROW
    name_width = max(8, min(24, width - 56)) if wide else max(6, width - 28)
    head = f" {'request':<{name_width}} {'phase':<8}"
    head += (
        f" {'prompt':>7} {'done':>5} {'cached':>6} {'output':>12} {'age':>8}"
        if wide
        else f" {'output':>9} {'age':>7}"
    )
    lines = [Text(head, "bold")]
    for row in requests[: room - 1]:
        text = Text(f" {row.request[:name_width]:<{name_width}} ")
        text.append(
            f"{row.phase:<8}", CHUNK if row.phase == "prefill" else FREE if row.phase == "waiting" else DECODE
        )
        output = f"{row.output}/{row.limit}"
        if wide:
            done = f"{100 * row.computed // max(1, row.prompt)}%"
            text.append(f" {row.prompt:>7} {done:>5} {row.cached:>6} {output:>12} {seconds(row.age):>8}")
        else:
            text.append(f" {output:>9} {seconds(row.age):>7}")
        lines.append(text)
    return lines


def _rule(title: str, width: int) -> Text:
    return Text(f"─ {title} ", FREE).append("─" * max(0, width - len(title) - 3), FREE)
