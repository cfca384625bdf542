"""Runs one stage of a real model: turns a stage batch into hidden states or sampled ids.

Made by a worker (``load_runner``) and called once an iteration, in step order. Owns the stage's weights and its KV
cache; knows nothing of plans. Memory is taken at start, from a figure in bytes, and checked there.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..control.wire import Sample
from ..kernels import cpu
from ..kernels.attention import AttentionBackend, AttnBatch, ReferenceAttention, kv_bytes_per_token
from ..kernels.attention_cpu import CPUAttention
from ..kernels.attention_native import NativeAttention
from .batch import Computed, Finished, ModelInfo, SamplingRows, StageBatch, compute_now
from .models.config import ModelError, describe_stage
from .models.llama import LlamaStage
from .profile import Shape, measure
from .sampler import choose, prompt_logprobs
from .weights import ModelSource, open_model
from .weights.precision import precision_of

_log = logging.getLogger(__name__)


def _cpu_attention(compute: torch.dtype) -> AttentionBackend:
    """The quickest that is here for queries in ``compute``."""
    return NativeAttention() if compute is torch.float32 and cpu.available() else CPUAttention()


BACKENDS: dict[str, Callable[[torch.dtype], AttentionBackend]] = {
    "cpu": _cpu_attention,
    "reference": lambda _: ReferenceAttention(),
}


class ModelRunner:
    """``dataplane.batch.Runner`` for a Llama-family stage on the CPU."""

    def __init__(
        self,
        source: ModelSource,
        stage: int,
        stages: int,
        *,
        dtype: str = "bfloat16",
        block_size: int = 16,
        kv_memory: int = 1 << 30,
        attention: str = "cpu",
        poison: bool = False,
    ) -> None:
        precision = precision_of(dtype)
        if attention not in BACKENDS:
            raise ModelError(f"attention backend {attention} is not known; known: {', '.join(BACKENDS)}")
        self._dtype = precision.stream
        config = source.config
        with torch.inference_mode():
            self._stage = LlamaStage(source, stage, stages, precision)
        _log.info("%s", describe_stage(self._stage.layers, stage, stages))
        if self._stage.report is not None:
            _log.info("%s", self._stage.report)
        if not self._stage.batch_invariant:
            _log.warning("matrix products on this machine depend on the batch: tokens may differ between runs")
        layers = len(self._stage.layers)
        block_bytes = block_size * kv_bytes_per_token(layers, config.kv_heads, config.head_dim, self._dtype)
        # One block more than is offered is the backend's, which reads zeros from it.
        num_blocks = kv_memory // block_bytes - 1
        if num_blocks < 1:
            raise ModelError(
                f"{kv_memory} bytes of KV memory do not hold two blocks of {block_size} tokens "
                f"({block_bytes} bytes each); raise the KV memory or lower the block size"
            )
        self._backend = BACKENDS[attention](self._stage.compute)
        self._cache = self._backend.allocate(
            layers, num_blocks, block_size, config.kv_heads, config.head_dim, self._dtype
        )
        if poison:
            self.poison()
        self._finished: Finished
        self._info = ModelInfo(
            name=source.name,
            eos_ids=source.eos_ids,
            vocab_size=config.vocab_size,
            max_model_len=min(config.max_len, num_blocks * block_size),
            block_size=block_size,
            num_blocks=num_blocks,
            hidden_bytes=config.hidden_size * self._dtype.itemsize,
            prefix_limit=config.rope.original_len if config.rope.kind == "dynamic" else 0,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def done(self) -> None:
        return None

    def start(self, num_blocks: int) -> None:
        """Nothing to prepare: blocks are addressed by id, and every block is written before it is read."""
        if num_blocks > self._info.num_blocks:
            raise ValueError(f"{num_blocks} blocks are more than the {self._info.num_blocks} of this runner")

    def poison(self) -> None:
        """Fill the KV memory with NaN: whatever is read before it is written shows. For tests."""
        self._backend.poison(self._cache)

    def warm_up(self, tokens: int) -> None:
        """A chunk of ``tokens`` tokens and a batch of decodes that write nothing: kernels are generated for their
        shapes, and memory is touched, before anybody waits for it."""
        for rows, each in ((1, min(tokens, self._info.max_model_len)), (min(8, tokens), 1)):
            self.rehearse(Shape(rows, each, 0))

    def profile(self, tokens: int) -> list[Sample]:
        return measure(self.rehearse, tokens, self._info.max_model_len)

    def rehearse(self, shape: Shape) -> None:
        """One iteration of this shape, with made-up tokens, that leaves no trace in the cache."""
        rows, each, length = shape.rows, shape.each, shape.context + shape.each
        count = rows * each
        positions = np.tile(np.arange(shape.context, length, dtype=np.int64), rows)
        blocks = -(-length // self._info.block_size)
        # As spread over the memory as in service, as far as there is so much of it.
        table = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks) % self._info.num_blocks
        sampling = None
        if self._stage.is_last:
            sampling = SamplingRows(
                rows=np.arange(rows, dtype=np.int32),
                temperature=np.zeros(rows, np.float32),
                top_k=np.zeros(rows, np.int32),
                top_p=np.ones(rows, np.float32),
                min_p=np.zeros(rows, np.float32),
                seed=np.zeros(rows, np.uint64),
                index=np.zeros(rows, np.uint32),
                position=np.full(rows, length, np.int64),
            )
        batch = StageBatch(
            step=0,
            lane=0,
            slots=np.arange(rows),
            num_decodes=rows if each == 1 else 0,
            cu_q=np.arange(0, count + 1, each, dtype=np.int32),
            positions=positions,
            kv_len=np.full(rows, length, np.int32),
            block_table=table,
            write=np.full(count, -1, np.int64),
            ids=np.zeros(count, np.int64) if self._stage.is_first else None,
            sampling=sampling,
            prompt_len=np.full(rows, length, np.int64),
        )
        hidden = None if self._stage.is_first else np.zeros((count, self._info.hidden_bytes), np.uint8)
        self.run(batch, hidden)

    def launch(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> None:
        self._finished = compute_now(self.run, batch, hidden)

    def collect(self) -> Finished:
        return self._finished

    @torch.inference_mode()
    def run(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> Computed:
        """Compute the stage in the calling thread."""
        tokens = batch.num_tokens
        x = self._input(batch, hidden)
        positions = torch.zeros(len(x), dtype=torch.int64)
        positions.numpy()[:tokens] = batch.positions
        plan = self._backend.plan(
            AttnBatch(
                cu_q=_tensor(batch.cu_q),
                kv_len=_tensor(batch.kv_len),
                block_table=_tensor(batch.block_table),
                slot=_tensor(batch.write),
                num_decodes=batch.num_decodes,
            ),
            self._cache,
        )
        x = self._stage.forward(x, positions, self._cache, self._backend, plan, _of_tokens(batch, len(x)))
        if not self._stage.is_last:
            return x[:tokens].view(torch.uint8).numpy(), ()
        found = prompt_logprobs(batch.prompts, lambda rows: self._stage.logits(x, rows)) if batch.prompts else []
        rows = batch.sampling
        if rows is None or not len(rows.rows):
            return np.empty(0, np.int64), found
        # A row samples from its last token.
        last = batch.cu_q[rows.rows.astype(np.int64) + 1].astype(np.int64) - 1
        ids, of_ids = choose(self._stage.logits(x, torch.from_numpy(last)), rows, batch.slots[rows.rows])
        return ids, [*found, *of_ids]

    def _input(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> Tensor:
        """The residual stream that enters the stage, with zero rows up to the padded count."""
        tokens = batch.num_tokens
        x = torch.zeros(self._stage.padded(tokens), self._stage.config.hidden_size, dtype=self._dtype)
        if self._stage.is_first:
            if batch.ids is None:
                raise ValueError("the first stage needs token ids")
            x[:tokens] = self._stage.embed(_tensor(batch.ids))
            return x
        if hidden is None or hidden.shape != (tokens, self._info.hidden_bytes):
            shape = None if hidden is None else hidden.shape
            raise ValueError(f"hidden states of shape {shape} came for {tokens} tokens of this stage")
        x.view(torch.uint8).numpy()[:tokens] = hidden
        return x


def load_runner(
    model: str,
    stage: int = 0,
    stages: int = 1,
    *,
    dtype: str = "bfloat16",
    block_size: int = 16,
    kv_memory: int = 1 << 30,
    threads: int | None = None,
    attention: str = "cpu",
    poison: bool = False,
) -> ModelRunner:
    """Open ``model`` (a path or a packaged model's name) and build the runner of one stage.

    ``threads`` sets torch's thread count for the whole process. Raises ``ModelError`` with one sentence for the user.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    return ModelRunner(
        open_model(model),
        stage,
        stages,
        dtype=dtype,
        block_size=block_size,
        kv_memory=kv_memory,
        attention=attention,
        poison=poison,
    )


def _of_tokens(batch: StageBatch, padded: int) -> Tensor | None:
    """The length of the prompt of each token's row, 0 for padding, [padded T]."""
    if batch.prompt_len is None:
        return None
    lengths = torch.zeros(padded, dtype=torch.int64)
    lengths.numpy()[: batch.num_tokens] = np.repeat(batch.prompt_len, np.diff(batch.cu_q))
    return lengths


def _tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over a copy: the slot table's arrays may be read-only or reused."""
    return torch.from_numpy(np.array(array))
