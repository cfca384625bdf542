"""A driver of runners without control plane or slots: sequences in a fixed block layout, batches built by hand."""

from dataclasses import dataclass, field

import numpy as np
from evenflow.dataplane.batch import SamplingRows, StageBatch
from evenflow.dataplane.model_runner import ModelRunner


@dataclass
class Sequence:
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    out: list[int] = field(default_factory=list)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def make_batch(rows: list[tuple[Sequence, int]], block_size: int, step: int = 0) -> StageBatch:
    """Rows of (sequence, tokens to compute), decodes first; a row samples when it reaches its last known token."""
    counts = [count for _, count in rows]
    width = max((seq.computed + n + block_size - 1) // block_size for seq, n in rows)
    table = np.zeros((len(rows), width), np.int32)
    positions, write, ids, sampling = [], [], [], []
    for row, (seq, n) in enumerate(rows):
        used = (seq.computed + n + block_size - 1) // block_size
        table[row, :used] = seq.blocks[:used]
        where = np.arange(seq.computed, seq.computed + n)
        positions.append(where)
        write.append(np.asarray(seq.blocks)[where // block_size] * block_size + where % block_size)
        ids.append(np.asarray(seq.tokens[seq.computed : seq.computed + n]))
        if seq.computed + n == len(seq.tokens):
            sampling.append(row)
    seqs = [rows[row][0] for row in sampling]
    return StageBatch(
        step=step,
        lane=0,
        slots=np.arange(len(rows), dtype=np.int32),
        num_decodes=sum(n == 1 and bool(seq.out) for seq, n in rows),
        cu_q=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int64),
        kv_len=np.array([seq.computed + n for seq, n in rows], np.int32),
        block_table=table,
        write=np.concatenate(write).astype(np.int64),
        ids=np.concatenate(ids).astype(np.int64),
        prompt_len=np.array([len(seq.tokens) - len(seq.out) for seq, _ in rows], np.int64),
        sampling=SamplingRows(
            rows=np.array(sampling, np.int32),
            temperature=np.array([s.temperature for s in seqs], np.float32),
            top_k=np.array([s.top_k for s in seqs], np.int32),
            top_p=np.array([s.top_p for s in seqs], np.float32),
            min_p=np.zeros(len(seqs), np.float32),
            seed=np.array([s.seed for s in seqs], np.uint64),
            index=np.zeros(len(seqs), np.uint32),
            position=np.array([len(s.tokens) for s in seqs], np.int64),
        ),
    )


def run_batch(stages: list[ModelRunner], rows: list[tuple[Sequence, int]]) -> None:
    """One iteration through all stages; sampled ids are appended to their sequences."""
    batch = make_batch(rows, stages[0].info.block_size)
    hidden = None
    for stage in stages[:-1]:
        hidden, _ = stage.run(batch, hidden)
    result, _ = stages[-1].run(batch, hidden)
    assert batch.sampling is not None
    for seq, n in rows:
        seq.computed += n
    for row, token in zip(batch.sampling.rows.tolist(), result.tolist(), strict=True):
        rows[row][0].tokens.append(token)
        rows[row][0].out.append(token)


def generate(stages: list[ModelRunner], sequences: list[Sequence], new_tokens: int, budget: int = 256) -> None:
    """Stall-free in miniature: all decodes, then chunks in order up to ``budget`` tokens; until all are done."""
    while any(len(seq.out) < new_tokens for seq in sequences):
        live = [seq for seq in sequences if len(seq.out) < new_tokens]
        decodes = [seq for seq in live if seq.out][:budget]
        rows = [(seq, 1) for seq in decodes]
        left = budget - len(rows)
        for seq in live:
            if not seq.out and left:
                n = min(left, len(seq.tokens) - seq.computed)
                rows.append((seq, n))
                left -= n
        run_batch(stages, rows)


def sequence(prompt: list[int], first_block: int, block_size: int, new_tokens: int, **params: float) -> Sequence:
    """A sequence whose blocks lie in descending order from ``first_block``, so that no order is taken for granted."""
    count = (len(prompt) + new_tokens + block_size - 1) // block_size
    return Sequence(list(prompt), list(range(first_block + count - 1, first_block - 1, -1)), **params)  # type: ignore[arg-type]
