"""What one stage computes in one iteration, as host arrays, and the interface of what computes it.

``StageBatch`` is derived from a plan by ``slots.SlotTable``; a ``Runner`` turns it into hidden states or ids.
The real runner (``model_runner``) holds a model's layers; the scripted one (``simulated``) holds a shadow of
the KV cache. Both see the same arrays, so a fault of the control plane shows in either.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..control.wire import Logprobs, Sample
from .extras import PromptTokens, RowExtras

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(slots=True)
class SamplingRows:
    """Parameters of the S rows that sample in this batch, in row order.

    ``rows`` indexes the batch's rows; ``position`` is the absolute index of the token to be drawn, which with
    ``seed`` and ``index`` keys the generator. ``extras``, by number among the S, for the few rows that have any.
    """

    rows: Int32
    temperature: NDArray[np.float32]
    top_k: Int32
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    index: NDArray[np.uint32]
    position: Int64
    #: The boundary between prompt and output: ``position - prompt_len`` is the place of the token in the
    #: output.
    prompt_len: Int64 | None = None
    extras: dict[int, RowExtras] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Receivers:
    """Whose the S sampled ids are, and when one of them ends its sequence. Copies: they hold whatever the slot table
    has become by the time the ids are there.

    ``stop_ids``: S × the most ids that any of them has, -1 where there is none. They count from ``min_len`` known
    tokens on.
    """

    slots: Int64
    generations: Int64
    stop_ids: Int64
    min_len: Int64

    def stopped(self, ids: Int64, position: Int64) -> Int64:
        """The slots whose id in ``ids``, drawn at ``position``, is one of their stop ids and not too early."""
        hits = (self.stop_ids == ids[:, None]).any(axis=1) & (position + 1 >= self.min_len)
        return self.slots[hits]


@dataclass(slots=True)
class StageBatch:
    """R rows (sequences) with T tokens in all: decodes by slot, then chunks by slot.

    ``cu_q``: query offsets, R+1. ``kv_len``: tokens in the cache after this step, R. ``block_table``: R × max
    blocks of any row (0 past a row's end). ``write``: flat cache index (block × block size + offset) of each
    token, T. ``ids``: token ids, T; only the first stage has them. ``sampling`` and ``receivers`` are set on the
    last stage only, and ``prompts`` if log-probabilities of a chunk's prompt are wanted. No array is shared with the
    slot table.
    """

    step: int
    lane: int
    slots: Int64
    num_decodes: int
    cu_q: Int32
    positions: Int64
    kv_len: Int32
    block_table: Int32
    write: Int64
    ids: Int64 | None
    sampling: SamplingRows | None
    receivers: Receivers | None = None
    #: Length of each row's prompt, R; rotary frequencies may depend on it.
    prompt_len: Int64 | None = None
    prompts: Sequence[PromptTokens] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker's hello says of its model and memory."""

    name: str
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    #: Bytes of hidden state a token has on the way to the next stage.
    hidden_bytes: int
    device: str = "cpu"
    tile: int = 0
    #: Keys and values of longer prompts depend on the prompt's length too; 0: never.
    prefix_limit: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """What an iteration left, and when the device worked on it, in microseconds of ``time.monotonic_ns``.

    ``output``: uint8[T, hidden_bytes] for the next stage, or on the last stage int64 ids, one for each row of
    ``batch.sampling``. It may be a view of a buffer that the next launch overwrites. ``logprobs`` has one entry for
    each of ``batch.prompts`` and for each row whose extras ask for one.
    """

    output: NDArray[Any]
    started_us: int
    ended_us: int
    logprobs: Sequence[Logprobs] = ()


class Runner(Protocol):
    """Computes one stage, one iteration at a time. Not thread-safe; called by one worker, in step order.

    ``launch`` gives an iteration to the device and ``collect`` takes what it left; exactly one ``collect`` follows
    each ``launch``. While the device computes, the worker does what the host owes: it sends the result of the
    iteration before, reads its messages and derives the next batch. A device that computes by itself therefore lets
    ``launch`` return as soon as it has its inputs, and tells its end through ``done``. A runner that computes in the
    calling thread does all in ``launch`` (``compute_now``); then nothing is put between the two.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def done(self) -> int | None:
        """A descriptor that is readable from the end of the launched iteration until the next launch; always the
        same one. None: ``launch`` returns at the end.
        """
        ...

    def start(self, num_blocks: int) -> None:
        """Begin an epoch: at most ``num_blocks`` (<= ``info.num_blocks``) blocks will be named. Contents may
        stay.
        """
        ...

    def warm_up(self, tokens: int) -> None:
        """Do once, before the first epoch, what only the first iterations would pay for: no request should meet it.

        ``tokens``: the largest iteration that will come. Leaves no trace in the cache.
        """
        ...

    def profile(self, tokens: int) -> list[Sample]:
        """What iterations of at most ``tokens`` tokens take, after ``warm_up`` and in about a second; empty if that
        cannot be known. Leaves no trace in the cache.
        """
        ...

    def launch(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> None:
        """Begin to compute ``batch``, which nobody changes from now on.

        ``hidden``: uint8[T, hidden_bytes] from the stage before, None on the first stage; valid until ``collect``.
        """
        ...

    def collect(self) -> Finished:
        """Wait for the end of the launched iteration."""
        ...


#: ``output`` and ``logprobs`` of ``Finished``.
Computed = tuple[NDArray[Any], Sequence[Logprobs]]


def compute_now(
    compute: Callable[[StageBatch, NDArray[np.uint8] | None], Computed],
    batch: StageBatch,
    hidden: NDArray[np.uint8] | None,
) -> Finished:
    """The whole iteration in the calling thread: for runners whose ``done`` is None."""
    started_us = now_us()
    output, logprobs = compute(batch, hidden)
    return Finished(output, started_us, now_us(), logprobs)


def now_us() -> int:
    """Microseconds of the clock that all times of a worker are in."""
    return time.monotonic_ns() // 1000
