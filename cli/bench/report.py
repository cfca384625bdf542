"""A summary as text for people and as one object for programs, in the keys of ``vllm bench serve``."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .client import Outcome
from .stats import Objectives, Spread, Summary, succeeded, time_to_first


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.2f}"


def text(summary: Summary, objectives: Objectives, notes: Sequence[str]) -> str:
    """A table, then what must be known to believe it."""
    lines = [
        f"{'requests':<22}{summary.completed} completed, {summary.failed} failed, {summary.unfinished} unfinished",
        f"{'duration':<22}{summary.duration:.2f} s",
        f"{'throughput':<22}{summary.requests_per_second:.2f} requests/s,"
        f" {summary.tokens_per_second:.1f} output tokens/s",
        f"{'tokens':<22}{summary.prompt_tokens} of prompts, {summary.output_tokens} of output",
    ]
    if summary.good is not None:
        wanted = [
            f"{name} at most {_milliseconds(value)} ms"
            for name, value in (("TTFT", objectives.ttft), ("TBT", objectives.tbt))
            if value is not None
        ]
        lines.append(
            f"{'goodput':<22}{summary.good_per_second:.2f} requests/s:"
            f" {summary.good} of {summary.completed} with {' and '.join(wanted)}"
        )
    lines += ["", f"{'milliseconds':<22}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}{'max':>10}"]
    lags = summary.lags
    rows: list[tuple[str, Spread]] = [
        ("TTFT", summary.ttft),
        ("TBT", summary.tbt),
        ("TPOT", summary.tpot),
        ("E2E", summary.e2e),
        ("connecting", summary.connect),
        ("own lag, sending", lags.send),
        ("own lag, reading", lags.read),
        ("own lag, waking", lags.wake),
    ]
    for name, spread in rows:
        if spread.count:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.most)
            lines.append(f"{name:<22}" + "".join(f"{_milliseconds(value):>10}" for value in values))
    lines.append("")
    lines += [f"{count} failed: {kind}: {summary.details[kind]}" for kind, count in summary.failures.items()]
    if summary.chunks and not summary.exact:
        lines.append("Gaps are between chunks, each taken for one token: the server sends no usage in them.")
    lines += notes
    if not lags.valid:
        lines.append(
            f"INVALID: this client was itself late by {_milliseconds(lags.worst)} ms (P99), more than 5 % of the"
            f" median gap, {_milliseconds(lags.limit)} ms. Give it more of the machine, or another one."
        )
    return "\n".join(lines)


def as_object(summary: Summary, outcomes: Sequence[Outcome], facts: dict[str, Any]) -> dict[str, Any]:
    """Ready for JSON. Rows (``ttfts`` …, in seconds) are of the completed requests, in the order of their starts."""
    done = [outcome for outcome in outcomes if succeeded(outcome)]
    result: dict[str, Any] = {
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.requests_per_second,
        "request_goodput": summary.good_per_second,
        "output_throughput": summary.tokens_per_second,
        "total_token_throughput": (summary.prompt_tokens + summary.output_tokens) / (summary.duration or 1.0),
    }
    for name, spread in (
        ("ttft", summary.ttft),
        ("tpot", summary.tpot),
        ("itl", summary.tbt),
        ("e2el", summary.e2e),
    ):
        result |= {
            f"mean_{name}_ms": spread.mean * 1e3,
            f"median_{name}_ms": spread.p50 * 1e3,
            f"p90_{name}_ms": spread.p90 * 1e3,
            f"p99_{name}_ms": spread.p99 * 1e3,
            f"max_{name}_ms": spread.most * 1e3,
        }
    lags = summary.lags
    result |= {
        "input_lens": [outcome.prompt_tokens for outcome in done],
        "output_lens": [outcome.tokens for outcome in done],
        "ttfts": [time_to_first(outcome) for outcome in done],
        "itls": [outcome.gaps.tolist() for outcome in done],
        "latencies": [(outcome.ended or outcome.started) - outcome.started for outcome in done],
        "start_times": [outcome.started for outcome in done],
        "errors": [f"{outcome.failure}: {outcome.detail}" for outcome in outcomes if outcome.failure],
        "evenflow": facts
        | {
            "valid": lags.valid,
            "unfinished": summary.unfinished,
            "failures": summary.failures,
            "good": summary.good,
            "tokens_counted_by": "usage" if summary.exact else "chunks",
            "chunks": summary.chunks,
            "lag_limit_seconds": lags.limit,
            "send_lag_seconds": asdict(lags.send),
            "read_lag_seconds": asdict(lags.read),
            "wake_lag_seconds": asdict(lags.wake),
            "connect_seconds": asdict(summary.connect),
        },
    }
    return result
