"""``evenflow profile``: measure the device that this runs on, write its description, and say how good that is.

Exit codes: 0 done, 2 asked for what cannot be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...dataplane.simulated.profiled import Fit, Profile
from ..errors import MemoryShort, UsageError
from ..options import KV_LEAST, default_kv_memory, free_memory, usable_cores
from .progress import Bar

#: From so far on the machine was busy with something else.
DISTURBED = 0.15
#: Called with the batches measured so far, and how many there may be.
Heard = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ProfileFlags:
    """What is measured, checked. ``seconds``: of measuring."""

    model: str
    out: Path | None
    seconds: float
    token_budget: int
    max_num_seqs: int
    block_size: int
    dtype: str
    kv_memory: int
    attention_backend: str
    threads: int
    as_json: bool


def settle(
    *,
    model: str,
    out: Path | None,
    seconds: float,
    token_budget: int,
    max_num_seqs: int,
    block_size: int,
    dtype: str,
    kv_memory: int | None,
    attention_backend: str,
    threads: int | None,
    as_json: bool,
) -> ProfileFlags:
    """With what serve would run with. Raises ``UsageError``, ``MemoryShort``."""
    for flag, value, least, most in (
        ("--token-budget", token_budget, 8, 8192),
        ("--max-num-seqs", max_num_seqs, 2, 4096),
        ("--threads", threads or 1, 1, 1024),
    ):
        if not least <= value <= most:
            raise UsageError(f"{flag} must be from {least} to {most}, got {value}.")
    if not 1 <= block_size <= 4096 or block_size & (block_size - 1):
        raise UsageError(f"--block-size must be a power of two from 1 to 4096, got {block_size}.")
    if out is not None and out.suffix != ".json":
        raise UsageError(f"--out {out} must end in .json, so that simulate --device knows it for a description.")
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.absolute().parent}.")
    free = free_memory()
    memory = default_kv_memory(free, 1) if kv_memory is None else kv_memory
    if memory < KV_LEAST:
        raise UsageError(f"--kv-cache-memory {memory} is too small; it must be at least 1M.")
    if memory > free:
        raise MemoryShort(f"--kv-cache-memory {memory} is more than the {free} bytes of memory that are free.")
    return ProfileFlags(
        model=model,
        out=out,
        seconds=seconds,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        dtype=dtype,
        kv_memory=memory,
        attention_backend=attention_backend,
        threads=min(threads or usable_cores(), usable_cores()),
        as_json=as_json,
    )


def run_profile(flags: ProfileFlags, measure: Callable[[Heard], tuple[Profile, int]]) -> int:
    """The command. ``measure`` loads, measures and describes; also how many batches there was no time for."""
    with Bar("measuring", None, flags.as_json) as bar:
        profile, left_out = measure(lambda done, total: bar.show(done, total=total))
    written = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    if flags.out is not None:
        try:
            flags.out.write_bytes(written + b"\n")
        except OSError as error:
            raise UsageError(f"--out {flags.out}: {error.strerror}") from None
    if flags.as_json:
        print(written.decode())
    else:
        print(text(profile, flags.out))
    if profile.scatter > DISTURBED:
        print(
            f"evenflow: iterations of the same batch lay {profile.scatter:.0%} apart: this machine was busy with"
            " something else, and the description is worth little.",
            file=sys.stderr,
        )
    if left_out:
        print(
            f"evenflow: there was no time for {left_out} of the planned batches: the description is the coarser.",
            file=sys.stderr,
        )
    return 0


def text(profile: Profile, out: Path | None) -> str:
    """What was measured, and what a description of it is worth."""
    most, terms = profile.range, profile.terms
    lines = [
        f"{profile.shape.name} ({profile.dtype}) on {profile.title}",
        "",
        f"{'tokens':>10}{'ms':>10}{'ms a token':>12}      an iteration's linear layers",
    ]
    for tokens, us in terms.tokens:
        lines.append(f"{tokens:>10}{us / 1e3:>10.2f}{us / 1e3 / tokens:>12.3f}")
    rows, head = terms.sampled[-1]
    lines += [
        "",
        f"and for {rows} rows that sample {head / 1e3:.2f} ms, for a chunk {terms.chunk / 1e3:.3f} ms, for 1,000"
        f" tokens before it {terms.before_token:.3f} ms and {1e3 * terms.before_pair:.2f} us a token of it, for 1,000"
        f" KV tokens of decodes {terms.kv_token:.3f} ms;",
        f"between two iterations {profile.between_us / 1e3:.2f} ms and {profile.between_row_us:.1f} us a row; a"
        f" message takes {profile.hop_us} us.",
        "",
        f"measured    up to {most.tokens} tokens, {most.decodes} decodes, {most.context} tokens of context,"
        f" {most.kv_tokens} KV tokens read",
        f"residuals   {_errors(profile.fit)}",
    ]
    if profile.probes is not None:
        lines.append(f"others      {_errors(profile.probes)}")
    if out is not None:
        lines += ["", f"evenflow simulate {profile.shape.name} --device {out} …"]
    return "\n".join(lines)


def _errors(fit: Fit) -> str:
    return (
        f"of {fit.batches} batches: P50 {fit.p50:.1%}, P90 {fit.p90:.1%}, worst {fit.worst:.1%}, bias {fit.bias:+.1%}"
    )
