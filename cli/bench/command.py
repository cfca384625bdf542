"""The command: from its flags to a plan, a run and a report.

Exit codes: 0 all is well, 1 requests failed (or none was made), 2 asked for what cannot be, 3 all requests are well
but the client itself was too late for the figures to count, 130 interrupted.
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import UsageError
from ..openai_http import ServerError
from .load import Load, Work, run_load
from .plan import Arrivals, Planned, Prompts, parse_length, parse_seconds, plan, read_trace
from .probe import WORDS, Abilities, encode_body, explore, find_target, request_body, split_url
from .report import as_object, text
from .stats import Objectives, Summary, summarise

#: Requests if neither their number nor a time is given.
DEFAULT_REQUESTS = 100
#: Most requests open at once in a closed loop.
MAX_CONCURRENCY = 100_000
_BAR = 24


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The flags, as typed. Times and lengths are still texts."""

    url: str | None
    chat: bool = False
    model: str | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    concurrency: int | None = None
    requests: int | None = None
    duration: str | None = None
    prompt: str = "512"
    output: str = "128"
    trace: Path | None = None
    seed: int = 0
    ttft_slo: str | None = None
    tbt_slo: str | None = None
    timeout: str = "600s"
    as_json: bool = False


def _check(options: BenchOptions) -> None:
    ways = [
        flag
        for flag, value in (
            ("--rate", options.rate),
            ("--concurrency", options.concurrency),
            ("--trace", options.trace),
        )
        if value is not None
    ]
    if len(ways) != 1:
        given = " and ".join(ways) or "none"
        raise UsageError(f"give one of --rate, --concurrency and --trace, got {given}")
    if options.rate is not None and not 0 < options.rate <= 1e6:
        raise UsageError(f"--rate must be above 0 and at most 1000000 requests a second, got {options.rate:g}")
    if options.concurrency is not None and not 1 <= options.concurrency <= MAX_CONCURRENCY:
        raise UsageError(f"--concurrency must be from 1 to {MAX_CONCURRENCY}, got {options.concurrency}")
    if options.requests is not None and options.requests < 1:
        raise UsageError(f"--requests must be at least 1, got {options.requests}")


def _requests(options: BenchOptions) -> tuple[Iterator[Planned], int | None, float | None]:
    """The plan, how many requests it has if that is known, and when it ends, in seconds. Raises ``UsageError``."""
    duration = None if options.duration is None else parse_seconds(options.duration, "--duration")
    requests = options.requests
    if options.trace is not None:
        try:
            content = options.trace.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--trace {options.trace} cannot be read: {error}") from None
        rows = read_trace(content, str(options.trace), requests=requests, duration=duration)
        return iter(rows), len(rows), duration
    if requests is None and duration is None:
        requests = DEFAULT_REQUESTS
    planned = plan(
        parse_length(options.prompt, "--prompt-tokens"),
        parse_length(options.output, "--output-tokens"),
        rate=options.rate,
        arrivals=options.arrivals,
        seed=options.seed,
        requests=requests,
        duration=duration,
    )
    return planned, requests, duration


def _bodies(abilities: Abilities, seed: int) -> Callable[[Planned], bytes]:
    if abilities.ids is not None:
        ids = Prompts(abilities.ids, seed)
        return lambda planned: encode_body(
            request_body(abilities, ids.make(planned.index, planned.prompt), planned.output)
        )
    words = Prompts(WORDS, seed)
    return lambda planned: encode_body(
        request_body(abilities, words.make(planned.index, planned.prompt), planned.output)
    )


class _Progress:
    """A bar on a terminal, one short line a second: a prettier one would cost the measurement milliseconds."""

    def __init__(self, total: int | None, duration: float | None) -> None:
        self._total = total
        self._duration = duration
        self._began = time.monotonic()
        self._tokens = 0
        self._at = self._began

    def show(self, load: Load) -> None:
        now = time.monotonic()
        running = len(load.running)
        done = len(load.outcomes) - running
        tokens = load.tokens + sum(outcome.tokens for outcome in load.running.values())
        speed = (tokens - self._tokens) / max(now - self._at, 1e-3)
        self._tokens, self._at = tokens, now
        shares = [done / self._total] if self._total else []
        if self._duration:
            shares.append((now - self._began) / self._duration)
        filled = round(_BAR * min(1.0, max(shares, default=0.0)))
        total = f"/{self._total}" if self._total else ""
        line = (
            f"[{'#' * filled}{'.' * (_BAR - filled)}] {done}{total} done, {running} running, {load.failed} failed,"
            f" {speed:.0f} tokens/s"
        )
        with suppress(OSError):
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def clear(self) -> None:
        with suppress(OSError):
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def exit_code(summary: Summary, interrupted: bool) -> int:
    """As the module says."""
    if interrupted:
        return 130
    if summary.failed or not summary.completed:
        return 1
    return 0 if summary.lags.valid else 3


def _allow_files() -> None:
    """As many connections as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_bench(options: BenchOptions) -> int:
    """Returns the exit code. Raises ``UsageError``."""
    _check(options)
    objectives = Objectives(
        None if options.ttft_slo is None else parse_seconds(options.ttft_slo, "--ttft-slo"),
        None if options.tbt_slo is None else parse_seconds(options.tbt_slo, "--tbt-slo"),
    )
    timeout = parse_seconds(options.timeout, "--timeout")
    requests, total, duration = _requests(options)
    base, chat = split_url(options.url or "", options.chat)
    try:
        target = find_target(base, chat, os.environ.get("OPENAI_API_KEY"))
        abilities = explore(base, chat, options.model)
    except ServerError as error:
        print(f"evenflow: {error}", file=sys.stderr)
        return 1
    return _measure(
        options,
        objectives,
        Work(
            target,
            requests,
            _bodies(abilities, options.seed),
            concurrency=options.concurrency,
            duration=duration,
            timeout=timeout,
        ),
        abilities,
        total,
    )


def _measure(
    options: BenchOptions, objectives: Objectives, work: Work, abilities: Abilities, total: int | None
) -> int:
    _allow_files()
    animated = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    progress = _Progress(total, work.duration) if animated else None
    load = run_load(work, None if progress is None else progress.show)
    if progress is not None:
        progress.clear()
    summary = summarise(load.outcomes, load.wakes, objectives)
    prompts = "token ids" if abilities.ids is not None else "words"
    if options.as_json:
        facts = {
            "model": abilities.model,
            "prompts": prompts,
            "seed": options.seed,
            "rate": options.rate,
            "concurrency": options.concurrency,
            "interrupted": load.interrupted,
        }
        print(msgspec.json.encode(as_object(summary, load.outcomes, facts)).decode())
    else:
        notes = [f"Prompts were sent as {prompts}."]
        if "ignore_eos" not in abilities.options:
            notes.append("The server does not know ignore_eos: outputs may be shorter than asked for.")
        if load.interrupted:
            notes.append("Interrupted: the requests that ran were ended.")
        print(text(summary, objectives, notes))
    return exit_code(summary, load.interrupted)
