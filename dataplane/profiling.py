"""Measures this device with a model, and describes it so that the simulator can tell what it would do.

Iterations of a grid of batches run in this process, on the runner that serves (``rehearsal``); the description is
fitted to them (``simulated.profiled``) and tried on others. Used by ``evenflow profile``.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import structs

from ..control.wire.sockets import bind_router, close_context, dial_dealer, ipc_endpoint, new_context
from .batch import Runner
from .model_runner import ModelRunner
from .models.config import LlamaConfig
from .rehearsal import Batch, Rehearsal, Timing, grid, probes
from .simulated.cost import Work
from .simulated.profiled import Fit, Profile, ProfiledCost, Range, Timed, errors, fit_between, fit_terms
from .simulated.shape import ModelShape
from .weights import open_model

#: Iterations of each batch that are timed: the median counts.
TIMES = 3
#: Batches on which a description is tried.
PROBES = 24
#: Share of the time that is for them.
_PROBES_SHARE = 0.2
#: Batches of the grid that a description cannot do without.
_NEEDED = 4
_PINGS = 300


@dataclass(frozen=True, slots=True)
class Bounds:
    """Batches of at most ``tokens`` and ``rows`` are measured, for about ``seconds``."""

    tokens: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker is started with."""

    model: str
    dtype: str
    block_size: int
    kv_memory: int
    threads: int
    attention: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What batches of the grid took, and the probes, and how many there was no time for."""

    timed: list[Timed]
    probes: list[Timed]
    left_out: int


#: Called with the batches measured so far, and how many there may be.
Heard = Callable[[int, int], None]


def profile_model(engine: Engine, bounds: Bounds, heard: Heard | None = None) -> tuple[Profile, int]:
    """Load the model, measure it and describe this device; how many of the planned batches there was no time for.
    Raises ``ModelError``."""
    torch.set_num_threads(engine.threads)
    source = open_model(engine.model)
    runner = ModelRunner(
        source,
        0,
        1,
        dtype=engine.dtype,
        block_size=engine.block_size,
        kv_memory=engine.kv_memory,
        attention=engine.attention,
    )
    bounds = replace(bounds, tokens=min(bounds.tokens, runner.info.max_model_len // 2))
    runner.warm_up(bounds.tokens)
    measured = measure(runner, bounds, heard)
    shape = shape_of(source.config, runner, engine.dtype)
    return describe(shape, runner, engine.threads, engine.dtype, measured), measured.left_out


def shape_of(config: LlamaConfig, runner: ModelRunner, dtype: str) -> ModelShape:
    """The model as the simulator knows models, as long as the KV pool lets its sequences be."""
    return ModelShape(
        runner.info.name,
        config.hidden_size,
        config.ffn_size,
        config.layers,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.vocab_size,
        runner.info.max_model_len,
        window=max(config.windows, default=0),
        tied=config.tied,
        value_bytes=4 if dtype == "float32" else 2,
    )


def measure(
    runner: Runner, bounds: Bounds, heard: Heard | None = None, clock: Callable[[], float] = time.monotonic
) -> Measured:
    """Time the grid, as far as there is time, and then the probes. ``runner`` has been warmed up."""
    length = runner.info.max_model_len
    rehearsal = Rehearsal(runner, bounds.tokens, bounds.rows)
    wanted = grid(bounds.tokens, bounds.rows, length)
    tried = probes(bounds.tokens, bounds.rows, length, PROBES)
    total = len(wanted) + len(tried)
    began = clock()
    groups: list[list[Timed]] = []
    done = 0
    for batches, share in ((wanted, 1 - _PROBES_SHARE), (tried, 1.0)):
        until = began + share * bounds.seconds
        found: list[Timed] = []
        for batch in batches:
            if clock() > until and (batches is tried or len(found) >= _NEEDED):
                break
            found.append(_timed(batch, rehearsal.run(batch, TIMES)))
            done += 1
            if heard is not None:
                heard(done, total)
        groups.append(found)
    return Measured(groups[0], groups[1], total - done)


def _timed(batch: Batch, timings: Sequence[Timing]) -> Timed:
    """The iteration of the median."""
    ordered = sorted(timings, key=lambda timing: timing.took_us)
    middle = ordered[len(ordered) // 2]
    chunks = [(batch.chunk, batch.before)] if batch.chunk else []
    attention = batch.chunk * (batch.before + 0.5 * (batch.chunk + 1))
    work = Work(batch.tokens, batch.decodes, middle.kv_tokens, chunks, batch.sampled, attention)
    between = statistics.median(timing.between_us for timing in timings)
    return Timed(work, middle.took_us, between, ordered[-1].took_us - ordered[0].took_us)


def describe(shape: ModelShape, runner: Runner, threads: int, dtype: str, measured: Measured) -> Profile:
    """What was measured, as a description."""
    timed, info = measured.timed, runner.info
    constant, each = fit_between(timed)
    works = [one.work for one in (*timed, *measured.probes)]
    context = [work.kv_tokens // work.decodes for work in works if work.decodes]
    profile = Profile(
        name=info.device,
        title=f"{processor()}, {threads} thread{'s' if threads > 1 else ''}",
        shape=shape,
        threads=threads,
        dtype=dtype,
        block_size=info.block_size,
        blocks=info.num_blocks,
        terms=fit_terms(timed),
        between_us=constant,
        between_row_us=each,
        hop_us=hop_us(),
        scatter=statistics.median(one.apart_us / max(one.took_us, 1) for one in timed),
        range=Range(
            tokens=max(work.tokens for work in works),
            decodes=max(1, *(work.decodes for work in works)),
            context=max(1, *context, *(before for work in works for _, before in work.chunks)),
            kv_tokens=max(1, *(work.kv_tokens for work in works)),
        ),
        fit=Fit(0, 0.0, 0.0, 0.0, 0.0),
    )
    cost = ProfiledCost(profile)
    tried = errors(cost, measured.probes) if measured.probes else None
    return structs.replace(profile, fit=errors(cost, timed), probes=tried)


def hop_us() -> int:
    """Microseconds of a message from one thread to another that waits for it, over a socket like the workers'."""
    context = new_context()
    with tempfile.TemporaryDirectory(prefix="evenflow-") as folder:
        endpoint = ipc_endpoint(Path(folder) / "hop")
        router = bind_router(context, endpoint)
        dealer = dial_dealer(context, endpoint)

        def echo() -> None:
            for _ in range(_PINGS):
                router.send_multipart(router.recv_multipart())

        thread = threading.Thread(target=echo)
        thread.start()
        times: list[float] = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            dealer.send(b"ping")
            dealer.recv()
            times.append(time.perf_counter() - began)
        thread.join()
    close_context(context)
    return max(1, round(statistics.median(times) / 2 * 1e6))


def processor() -> str:
    """This machine's, as it names itself."""
    try:
        with Path("/proc/cpuinfo").open() as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
