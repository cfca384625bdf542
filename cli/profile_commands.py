"""The grammar of ``profile``: the device that this runs on, as the simulator wants to know it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .flags import Dtype
from .libraries import library_env

#: Seconds of measuring; loading the model comes on top.
FULL_S, QUICK_S = 80.0, 20.0


def profile(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="smollm2-135m, a GGUF file, or a Hugging Face model directory."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.json", help="Write the description for simulate.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for a quarter of the time.")] = False,
    token_budget: Annotated[
        int, typer.Option("--token-budget", "--max-num-batched-tokens", help="Most tokens in one iteration.")
    ] = 256,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Most sequences that run at once.")] = 256,
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens in a KV block.")] = 16,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Type of weights and KV cache.")] = Dtype.BFLOAT16,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option("--kv-cache-memory", metavar="BYTES", show_default="as serve", help="A number with K, M or G."),
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option("--attention-backend", show_default="the fastest here", help="As for serve.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", show_default="all cores", help="Threads that compute.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the description as JSON.")] = False,
) -> None:
    """Measure this device with MODEL, so that simulate and tune can tell what it would do."""
    from .errors import UsageError
    from .options import parse_bytes
    from .simulation.profile import run_profile, settle

    flags = settle(
        model=model,
        out=out,
        seconds=QUICK_S if quick else FULL_S,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        dtype=dtype.value,
        kv_memory=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
        attention_backend=attention_backend or "cpu",
        threads=threads,
        as_json=as_json,
    )
    os.environ.update(library_env(flags.threads, os.environ))
    from ..dataplane.models.config import ModelError
    from ..dataplane.profiling import Bounds, Engine, profile_model

    engine = Engine(
        flags.model, flags.dtype, flags.block_size, flags.kv_memory, flags.threads, flags.attention_backend
    )
    bounds = Bounds(flags.token_budget, flags.max_num_seqs, flags.seconds)
    try:
        code = run_profile(flags, lambda heard: profile_model(engine, bounds, heard))
    except ModelError as error:
        raise UsageError(str(error)) from None
    raise typer.Exit(code)
