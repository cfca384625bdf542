"""What one stage computes in one iteration, as host arrays, and the interface of what computes it.

``StageBatch`` is derived from a plan by ``slots.SlotTable``; a ``Runner`` turns it into hidden states or ids.
The real runner (``model_runner``) holds a model's layers; the scripted one (``simulated``) holds a shadow of
the KV cache. Both see the same arrays, so a fault of the control plane shows in either.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class SamplingRows:
    """Parameters of the S rows that sample in this batch, in row order.

    ``rows`` indexes the batch's rows; ``position`` is the absolute index of the token to be drawn, which with
    ``seed`` and ``index`` keys the generator.
    """

    rows: Int32
    temperature: NDArray[np.float32]
    top_k: Int32
    top_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    index: NDArray[np.uint32]
    position: Int64
    #: The boundary between prompt and output: ``position - prompt_len`` is the place of the token in the
    #: output.
    prompt_len: Int64 | None = None


@dataclass(slots=True)
class StageBatch:
    """R rows (sequences) with T tokens in all: decodes by slot, then chunks by slot.

    ``cu_q``: query offsets, R+1. ``kv_len``: tokens in the cache after this step, R. ``block_table``: R × max
    blocks of any row (0 past a row's end). ``write``: flat cache index (block × block size + offset) of each
    token, T. ``ids``: token ids, T; only the first stage has them. ``sampling`` is set on the last stage
    only.
    """

    step: int
    lane: int
    slots: Int32
    num_decodes: int
    cu_q: Int32
    positions: Int64
    kv_len: Int32
    block_table: Int32
    write: Int64
    ids: Int64 | None
    sampling: SamplingRows | None

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


class Runner(Protocol):
    """Computes one stage. Not thread-safe; called by one worker in step order."""

    @property
    def info(self) -> ModelInfo: ...

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

    def run(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> NDArray[Any]:
        """Compute the stage.

        ``hidden``: uint8[T, hidden_bytes] from the stage before, None on the first stage. Returns the same
        shape for the next stage, or on the last stage int64 ids, one for each row of ``batch.sampling``. The
        array may be a view of a buffer that the next call overwrites.
        """
        ...
