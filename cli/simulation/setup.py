"""From flags to a scenario and a load."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from ...control.core.slo import Slo, parse_slo
from ...dataplane.simulated.load import Entry, arrivals, constant, poisson, shuffled, traced
from ...dataplane.simulated.profiled import Profile, load_description, shape_for
from ...dataplane.simulated.refusal import CannotSimulate
from ...dataplane.simulated.scenario import Scenario
from ...dataplane.simulated.shape import load_shape
from ...dataplane.simulated.traces import read_trace
from ...dataplane.simulated.world import Arrival
from ..bench.plan import Arrivals, parse_length
from ..errors import UsageError

#: Requests of a synthetic load, if nothing else ends it.
DEFAULT_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class SystemFlags:
    """What is simulated, as typed."""

    model: str
    device: str = "a100-pcie"
    ranks: int = 1
    stages: int = 1
    replicas: int = 1
    policy: str = "stall-free"
    admission: str = "fcfs"
    token_budget: int = 512
    max_num_seqs: int = 128
    max_model_len: int | None = None
    block_size: int = 16
    tile: int = 0
    prefill_share: float | None = None
    prefix_caching: bool = True
    tbt_slo: str | None = None
    host: str = "eager"
    speed: float = 1.0
    utilisation: float = 0.85


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """What it is loaded with, as typed."""

    rate: float | None = None
    arrivals: Arrivals = "poisson"
    trace: Path | None = None
    pace: float = 1.0
    requests: int | None = None
    duration: float | None = None
    prompt: str = "512"
    output: str = "128"
    seed: int = 0


def make_scenario(flags: SystemFlags, slo: Slo | None = None) -> Scenario:
    """Raises ``UsageError`` for a system that cannot be."""
    if flags.tbt_slo is not None:
        if flags.policy != "stall-free":
            raise UsageError(f"--tbt-slo needs --policy stall-free: {flags.policy} does not bound an iteration")
        try:
            slo = parse_slo(flags.tbt_slo)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if flags.prefill_share is not None and not 0 <= flags.prefill_share < 1:
        raise UsageError(f"--prefill-share must be at least 0 and less than 1, got {flags.prefill_share:g}")
    if flags.block_size < 1 or flags.block_size & (flags.block_size - 1):
        raise UsageError(f"--block-size must be a power of two, got {flags.block_size}")
    try:
        device = load_description(flags.device)
        scenario = Scenario(
            shape=shape_for(device, flags.model) if isinstance(device, Profile) else load_shape(flags.model),
            device=device,
            ranks=flags.ranks,
            stages=flags.stages,
            replicas=flags.replicas,
            policy=flags.policy,
            admission=flags.admission,
            token_budget=flags.token_budget,
            max_num_seqs=flags.max_num_seqs,
            length=flags.max_model_len or 0,
            block_size=flags.block_size,
            tile=flags.tile,
            share=0.25 if flags.prefill_share is None else flags.prefill_share,
            prefix_caching=flags.prefix_caching,
            slo=slo,
            host=flags.host,
            speed=flags.speed,
            utilisation=flags.utilisation,
        )
        scenario.limits()
        scenario.models()
    except CannotSimulate as error:
        raise UsageError(str(error)) from None
    return scenario


def make_entries(flags: LoadFlags, requests: int) -> list[Entry]:
    """The lengths of the load: of the trace, or drawn. Raises ``UsageError``."""
    if flags.trace is not None:
        try:
            return read_trace(flags.trace)
        except CannotSimulate as error:
            raise UsageError(str(error)) from None
    return list(islice(_drawn(flags), requests))


def _drawn(flags: LoadFlags) -> Iterator[Entry]:
    prompt = parse_length(flags.prompt, "--prompt-tokens")
    output = parse_length(flags.output, "--output-tokens")
    chance = random.Random(f"{flags.seed}/lengths")
    while True:
        yield Entry(prompt.draw(chance), output.draw(chance))


def make_load(flags: LoadFlags, most: int) -> tuple[Iterable[Arrival], int | None]:
    """Requests in the order of their arrival, and how many if that is known. ``most``: tokens of a sequence. Raises
    ``UsageError``."""
    if flags.rate is not None and not 0 < flags.rate <= 1e6:
        raise UsageError(f"--rate must be above 0 and at most 1000000 requests a second, got {flags.rate:g}")
    if flags.requests is not None and flags.requests < 1:
        raise UsageError(f"--requests must be at least 1, got {flags.requests}")
    if not 0 < flags.pace <= 1e6:
        raise UsageError(f"--pace must be above 0 and at most 1000000, got {flags.pace:g}")
    entries: Iterable[Entry]
    if flags.trace is not None:
        known = make_entries(flags, 0)
        if flags.rate is None:
            return _at_own_times(known, flags, most)
        entries = shuffled(known, flags.seed, flags.requests)
    elif flags.rate is None:
        raise UsageError("give --rate, or a --trace that has arrival times")
    else:
        entries = _drawn(flags)
        if flags.requests is not None or flags.duration is None:
            entries = islice(entries, flags.requests or DEFAULT_REQUESTS)
    times: Iterable[float] = poisson(flags.rate, flags.seed)
    if flags.arrivals == "constant":
        times = constant(flags.rate)
    if flags.duration is None:
        return arrivals(entries, times, most), len(entries) if isinstance(entries, Sequence) else flags.requests
    duration = flags.duration
    return arrivals(entries, takewhile(lambda at: at < duration, times), most), None


def _at_own_times(entries: list[Entry], flags: LoadFlags, most: int) -> tuple[Iterable[Arrival], int]:
    if entries[0].at is None:
        raise UsageError(f"{flags.trace} has no arrival times: give --rate")
    if flags.duration is not None:
        entries = [entry for entry in entries if (entry.at or 0.0) < flags.duration * flags.pace]
    chosen = entries[: flags.requests]
    return traced(chosen, most, flags.pace), len(chosen)
