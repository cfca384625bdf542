"""A runner without a model: a shadow of the KV cache whose contents decide the next token.

For tests of the control plane. Two layers per stage, as a model would have them:

- layer A keeps, at each cache place, the token and position written there;
- layer B keeps what the token saw of layer A: a sum over places 0 .. its own position, read through the block
  table.

The next id is a hash of the same sum over layer B. So a block that is reused too early, shared wrongly,
missing or read through a stale table changes ids; and a token computed from wrong context stays wrong for
whoever reads it later, as it would in a model. Places never written in this epoch hold a value that no write
makes. A later stage repeats all this in its own shadow and compares with what the stage before found, so ids
do not depend on the number of stages unless something is wrong. ``shadow_tokens`` computes the same ids from
the tokens alone.

Hidden states are two u64 per token: (token << 32 | position) and the layer B sum.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...control.wire import Logprobs, Sample, Sampling
from ...control.wire.client import GREEDY
from ..batch import Computed, Finished, Int64, ModelInfo, StageBatch, compute_now
from .made_up import Row, made_up_logprobs, made_up_row

UInt64 = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_M1 = 0xFF51AFD7ED558CCD
_M2 = 0xC4CEB9FE1A85EC53
_SEED = 0x2545F4914F6CDD1D
_INDEX = 0x94D049BB133111EB
_PLACE = 0xBF58476D1CE4E5B9
_TOKEN = 0xD6E8FEB86659FD93
_POISON = 0x0DEFACED5EEDBEEF
#: No write makes it: positions stay below 2**32 - 1.
_UNWRITTEN = np.uint64(_MASK)

DEFAULT_VOCAB = 50_000


def _mix(values: UInt64, scratch: UInt64) -> UInt64:
    """Scramble in place and return the same array. ``scratch`` has its shape."""
    values ^= np.right_shift(values, np.uint64(32), out=scratch)
    values *= np.uint64(_M1)
    values ^= np.right_shift(values, np.uint64(29), out=scratch)
    values *= np.uint64(_M2)
    values ^= np.right_shift(values, np.uint64(32), out=scratch)
    return values


def _mix_int(value: int) -> int:
    value &= _MASK
    value ^= value >> 32
    value = value * _M1 & _MASK
    value ^= value >> 29
    value = value * _M2 & _MASK
    return value ^ value >> 32


class ShadowRunner:
    """One stage of the shadow model. Implements ``dataplane.batch.Runner``."""

    def __init__(
        self,
        stage: int = 0,
        stages: int = 1,
        *,
        block_size: int = 16,
        num_blocks: int = 1024,
        vocab_size: int = DEFAULT_VOCAB,
        max_model_len: int = 8192,
        eos_ids: tuple[int, ...] = (0,),
        script: Sequence[int] | None = None,
        name: str = "shadow",
        tile: int = 0,
    ) -> None:
        self._first = stage == 0
        self._last = stage == stages - 1
        self._script = None if script is None else np.array([*script, eos_ids[0]], np.int64)
        self._info = ModelInfo(
            name=name,
            eos_ids=eos_ids,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            hidden_bytes=16,
            tile=tile,
        )
        self._finished: Finished
        self._layer_a: UInt64 = np.empty((0, block_size), np.uint64)
        self._layer_b: UInt64 = np.empty((0, block_size), np.uint64)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def done(self) -> None:
        return None

    def start(self, num_blocks: int) -> None:
        shape = (num_blocks, self._info.block_size)
        self._layer_a = np.full(shape, _UNWRITTEN)
        self._layer_b = np.full(shape, _UNWRITTEN)

    def profile(self, tokens: int) -> list[Sample]:
        return []

    def warm_up(self, tokens: int) -> None:
        """There is nothing that gets faster."""

    def launch(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> None:
        self._finished = compute_now(self.run, batch, hidden)

    def collect(self) -> Finished:
        return self._finished

    def run(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> Computed:
        positions = batch.positions.astype(np.uint64)
        if self._first:
            assert batch.ids is not None
            tokens = batch.ids.astype(np.uint64) << np.uint64(32) | positions
            before = None
        else:
            assert hidden is not None
            words = np.ascontiguousarray(hidden).view(np.uint64).reshape(-1, 2)
            # A token whose carried position is not the plan's is another token from here on.
            tokens = words[:, 0] ^ ((words[:, 0] ^ positions) & np.uint64(0xFFFFFFFF)) * np.uint64(_POISON)
            before = words[:, 1]
        reads = _Reads(batch, self._info.block_size)
        self._layer_a.reshape(-1)[batch.write] = tokens
        seen = reads.sums(self._layer_a)
        flat_b = self._layer_b.reshape(-1)
        flat_b[batch.write] = seen
        found = reads.sums(self._layer_b)
        if before is not None and (wrong := found != before).any():
            found[wrong] ^= np.uint64(_POISON)
            flat_b[batch.write[wrong]] = found[wrong]
        if self._last:
            ids = self._draw(batch, found)
            return ids, self._logprobs(batch, found, ids)
        return np.stack((tokens, found), axis=1).view(np.uint8).reshape(len(tokens), 16), ()

    def _draw(self, batch: StageBatch, found: UInt64) -> Int64:
        rows = batch.sampling
        assert rows is not None
        if self._script is not None:
            assert rows.prompt_len is not None
            place = np.minimum(rows.position - rows.prompt_len, len(self._script) - 1)
            return self._script[place]
        state = found[batch.cu_q[rows.rows + 1] - 1]
        noise = rows.seed * np.uint64(_SEED) + rows.index.astype(np.uint64) * np.uint64(_INDEX)
        noise += rows.position.astype(np.uint64) * np.uint64(_PLACE)
        scratch = np.empty_like(noise)
        state = state + np.where(rows.temperature > 0, _mix(noise, scratch), np.uint64(0))
        return (_mix(state, scratch) % np.uint64(self._info.vocab_size)).astype(np.int64)

    def _logprobs(self, batch: StageBatch, found: UInt64, ids: Int64) -> list[Logprobs]:
        """Made up of the sum from which a token's id comes, and the token."""
        vocab_size = self._info.vocab_size

        def words(sums: UInt64, tokens: Int64) -> UInt64:
            return _mix(sums + tokens.astype(np.uint64) * np.uint64(_TOKEN), np.empty_like(sums))

        told: list[Logprobs] = []
        for prompt in batch.prompts:
            sums = found[prompt.first : prompt.first + len(prompt.tokens)]
            told.append(
                made_up_logprobs(prompt.slot, prompt.start, words(sums, prompt.tokens), prompt.best, vocab_size)
            )
        assert batch.sampling is not None
        for number, extras in batch.sampling.extras.items():
            if extras.logprobs >= 0:
                row = int(batch.sampling.rows[number])
                sums = found[batch.cu_q[row + 1] - 1 : batch.cu_q[row + 1]]
                position = int(batch.sampling.position[number])
                of_token = words(sums, ids[number : number + 1])
                told.append(made_up_logprobs(int(batch.slots[row]), position, of_token, extras.logprobs, vocab_size))
        return told


class _Reads:
    """Where the rows of a batch read: the blocks of all rows end to end, and each token's place in them."""

    def __init__(self, batch: StageBatch, block_size: int) -> None:
        kv_len = batch.kv_len.astype(np.int64)
        counts = -(-kv_len // block_size)
        within = np.arange(batch.block_table.shape[1]) < counts[:, None]
        self._blocks = batch.block_table[within].astype(np.int64)
        order = np.broadcast_to(np.arange(within.shape[1], dtype=np.uint64), within.shape)[within]
        # What distinguishes equal contents at different places of a row.
        self._offsets = order[:, None] * np.uint64(block_size) + np.arange(block_size, dtype=np.uint64)
        self._offsets *= np.uint64(_STEP)
        self._values = np.empty_like(self._offsets)
        self._scratch = np.empty_like(self._offsets)
        self._running = np.zeros(self._values.size + 1, np.uint64)
        starts = (np.cumsum(counts) - counts) * block_size
        self._starts = np.repeat(starts, np.diff(batch.cu_q))
        self._ends = self._starts + batch.positions + 1

    def sums(self, layer: UInt64) -> UInt64:
        """For each token the sum, modulo 2**64, over what its row holds at places 0 .. its position."""
        np.take(layer, self._blocks, axis=0, out=self._values, mode="clip")
        self._values += self._offsets
        mixed = _mix(self._values, self._scratch)
        np.cumsum(mixed.reshape(-1), out=self._running[1:])
        return self._running[self._ends] - self._running[self._starts]


def shadow_tokens(
    prompt: Sequence[int],
    count: int,
    sampling: Sampling = GREEDY,
    *,
    vocab_size: int = DEFAULT_VOCAB,
    stop_ids: Sequence[int] = (),
    min_len: int = 0,
) -> list[int]:
    """The output of an undisturbed run: at most ``count`` tokens, up to and with the first stop.

    Neither blocks nor batches nor stages occur here: ids follow from the tokens alone. ``min_len`` counts
    prompt and output, as in REGISTER.
    """
    known = list(prompt)
    for place, total in enumerate(_sums(known), start=1):
        if place < len(prompt):
            continue
        if place - len(prompt) >= count:
            break
        noise = 0
        if sampling.temperature > 0:
            noise = _mix_int(sampling.seed * _SEED + sampling.index * _INDEX + place * _PLACE)
        known.append(_mix_int(total + noise) % vocab_size)
        if known[-1] in stop_ids and len(known) >= min_len:
            break
    return known[len(prompt) :]


def shadow_logprobs(tokens: Sequence[int], start: int, best: int, *, vocab_size: int = DEFAULT_VOCAB) -> list[Row]:
    """What is reported of the tokens from index ``start`` (at least 1) on, with ``best`` alternatives."""
    return [
        made_up_row(_mix_int(total + token * _TOKEN), best, vocab_size)
        for place, (total, token) in enumerate(zip(_sums(tokens), tokens[1:], strict=False), start=1)
        if place >= start
    ]


def _sums(tokens: Sequence[int]) -> Iterator[int]:
    """After each token, what the last stage found: ids and log-probabilities follow from it. ``tokens`` may grow."""
    sum_a = sum_b = 0
    for place, token in enumerate(tokens):
        sum_a += _mix_int((token << 32 | place) + place * _STEP)
        sum_b += _mix_int((sum_a & _MASK) + place * _STEP)
        yield sum_b
