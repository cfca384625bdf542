"""Log-probabilities on their way from a result to the clients: each position once, and none of a void row.

An output token's travels with the token. A prompt's are computed again whenever the prompt is, after a preemption or
a recovery, so the sequence remembers how far they were told (``Sequence.told``). Called only for results that carry
some.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from msgspec.structs import replace

from ..wire import Logprobs, Result
from .sequence import Phase, Sequence


def fault(result: Result, owners: Seq[Sequence | None]) -> str | None:
    """What contradicts the plans or itself in the result's log-probabilities, if anything does."""
    for entry in result.logprobs:
        seq = owners[entry.slot] if entry.slot < len(owners) else None
        if seq is None:
            return f"log-probabilities of slot {entry.slot}, which nobody has"
        size, tops = len(entry.values), len(entry.top_values)
        count = size >> 2
        if not count or size & 3 or len(entry.ranks) != size or len(entry.top_ids) != tops or tops % size:
            return f"log-probabilities of slot {entry.slot}: {size} bytes of values, {tops} of alternatives"
        if seq.told < entry.start < seq.prompt_len and seq.phase is not Phase.DONE:
            return f"log-probabilities of slot {entry.slot} from token {entry.start}, expected {seq.told}"
        if entry.start < seq.prompt_len < entry.start + count:
            return f"log-probabilities of slot {entry.slot} go past the end of its prompt"
    return None


def settle(result: Result, owners: Seq[Sequence | None]) -> list[tuple[Sequence, Logprobs]]:
    """What is to be told of the result's log-probabilities. Called before its stops take effect: the row of a token
    that ends its sequence counts, those of sequences that had ended before are void."""
    told: list[tuple[Sequence, Logprobs]] = []
    for entry in result.logprobs:
        seq = owners[entry.slot]
        if seq is None or seq.phase is Phase.DONE:
            continue
        if entry.start < seq.prompt_len:
            end = entry.start + (len(entry.values) >> 2)
            if end <= seq.told:
                continue
            entry = _since(entry, seq.told)
            seq.told = end
            if end == seq.prompt_len:
                # From here on the sequence may read from the prefix cache.
                seq.sampling = replace(seq.sampling, prompt_logprobs=-1)
        told.append((seq, entry))
    return told


def _since(entry: Logprobs, start: int) -> Logprobs:
    """The part of ``entry`` from token ``start`` on."""
    skip = start - entry.start
    if skip <= 0:
        return entry
    width = len(entry.top_values) // (len(entry.values) >> 2)
    return Logprobs(
        entry.slot,
        start,
        entry.values[4 * skip :],
        entry.ranks[4 * skip :],
        entry.top_ids[width * skip :],
        entry.top_values[width * skip :],
    )
