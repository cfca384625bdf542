"""``--dtype auto``: a child measures what each type of weights costs here, and the quickest is served."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from .errors import MeasureFailed
from .libraries import library_env
from .options import AUTO, ServeOptions, threads_per_worker, usable_cores

#: Seconds that loading and measuring may take.
_PATIENCE_S = 300.0
#: Served where nothing is computed here.
_DEFAULT = "bfloat16"


def settle_dtype(options: ServeOptions) -> tuple[ServeOptions, list[str]]:
    """Options that name a type, and the lines that tell why it was chosen. Raises ``MeasureFailed``."""
    if options.dtype != AUTO:
        return options, []
    if options.scripted or options.workers == 0:
        return replace(options, dtype=_DEFAULT), []
    threads = options.threads or threads_per_worker(usable_cores(), options.workers)
    command = [sys.executable, "-P", "-m", "evenflow.dataplane.choosing"]
    command += ["--model", options.model, "--threads", str(threads)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            env={**os.environ, **library_env(threads, os.environ)},
        )
    except subprocess.TimeoutExpired:
        raise MeasureFailed(f"--dtype auto: nothing was measured in {_PATIENCE_S:.0f} s; name a type.") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("evenflow: ")
        raise MeasureFailed(f"--dtype auto: {last}.")
    costs = json.loads(done.stdout)
    best = min(costs, key=lambda cost: cost["request_ms"])["dtype"]
    return replace(options, dtype=best), table(costs, best, threads)


def table(costs: Sequence[dict[str, float | str]], best: str, threads: int) -> list[str]:
    """Lines for a log: what was measured, and which type it speaks for."""
    head = f"{'--dtype':<10}{'1 decode, ms':>14}{'8 decodes, ms':>15}{'prompt, tok/s':>15}{'a request, s':>14}"
    lines = [f"--dtype auto measured, with {threads} thread{'s' * (threads > 1)}:", head]
    for cost in costs:
        speed = 1e3 / float(cost["prompt_token_ms"])
        figures = f"{cost['decode_1_ms']:>14.1f}{cost['decode_8_ms']:>15.1f}{speed:>15.0f}"
        request = float(cost["request_ms"]) / 1e3
        lines.append(f"{cost['dtype']:<10}{figures}{request:>14.2f}{'  <- served' if cost['dtype'] == best else ''}")
    return lines
