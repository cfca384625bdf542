"""What do weights of few bits cost in accuracy?

SmolLM2-135M reads ``passage.txt``, which was written for this, in one pass. ``perplexity`` is of
each token after those before it; its ``ratio`` is to that in bfloat16, which the goal of int8 bounds. ``agreement``
is the part of all places at which the most probable token is the same as in bfloat16.

Run: python benchmarks/accuracy.py [--model MODEL] [--dtypes int8 int4 …] [--quick] [--json]
"""

from __future__ import annotations

from pathlib import Path

import report
import torch
from evenflow.control.gateway.tokenizer import load_text_model
from evenflow.control.wire.location import locate_model
from evenflow.dataplane.models.llama import LlamaStage
from evenflow.dataplane.weights import ModelSource, open_model
from evenflow.dataplane.weights.precision import PRECISIONS
from evenflow.kernels import cpu
from evenflow.kernels.attention import AttnBatch
from evenflow.kernels.attention_cpu import CPUAttention
from evenflow.kernels.attention_native import NativeAttention
from report import Report, Row
from torch import Tensor

MODEL = "smollm2-135m"
PASSAGE = Path(__file__).parent / "passage.txt"
BASE = "bfloat16"
#: Perplexity as a multiple of that in bfloat16.
GOALS = {"int8": 1.01}
BLOCK, SLICE = 16, 128


def read(source: ModelSource, dtype: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token after the first: its log-probability. Of each place but the last: the most probable token."""
    stage = LlamaStage(source, 0, 1, PRECISIONS[dtype])
    config, count = source.config, len(ids)
    backend = NativeAttention() if stage.compute is torch.float32 and cpu.available() else CPUAttention()
    blocks = -(-count // BLOCK)
    cache = backend.allocate(config.layers, blocks, BLOCK, config.kv_heads, config.head_dim, stage.dtype)
    batch = AttnBatch(
        cu_q=torch.tensor([0, count], dtype=torch.int32),
        kv_len=torch.tensor([count], dtype=torch.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        slot=torch.arange(count),
        num_decodes=0,
    )
    x = torch.zeros(stage.padded(count), config.hidden_size, dtype=stage.dtype)
    x[:count] = stage.embed(ids)
    positions = torch.arange(len(x)).clamp_(max=count - 1)
    x = stage.forward(x, positions, cache, backend, backend.plan(batch, cache), torch.full((len(x),), count))
    found: list[Tensor] = []
    best: list[Tensor] = []
    for rows in torch.arange(count - 1).split(SLICE):
        logits = stage.logits(x, rows)
        found.append(torch.log_softmax(logits, -1).gather(1, ids[rows + 1, None]).squeeze(1))
        best.append(logits.argmax(1))
    return torch.cat(found).double(), torch.cat(best)


@torch.inference_mode()
def measure(model: str, dtypes: list[str], tokens: int | None, results: Report) -> None:
    source = open_model(model)
    text = load_text_model(locate_model(model)).encode(PASSAGE.read_text("utf-8"), add_special_tokens=False)
    ids = torch.tensor(text[:tokens])
    base, chosen = read(source, BASE, ids)
    case = {"model": model, "tokens": len(ids)}
    results.add(Row("perplexity", {"dtype": BASE, **case}, float((-base.mean()).exp()), ""))
    for dtype in dtypes:
        found, best = read(source, dtype, ids)
        ratio, goal = float((base.mean() - found.mean()).exp()), GOALS.get(dtype)
        met = None if goal is None else ratio <= goal
        results.add(
            Row("perplexity", {"dtype": dtype, **case}, float((-found.mean()).exp()), "", BASE, ratio, goal, met)
        )
        same = float((best == chosen).double().mean())
        results.add(Row("agreement", {"dtype": dtype, **case}, same, "", BASE))


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtypes", nargs="+", default=["int8", "int4"], choices=[*PRECISIONS])
    options = parser.parse_args()
    results = Report("accuracy")
    measure(options.model, options.dtypes, 300 if options.quick else None, results)
    results.show(options.json)


if __name__ == "__main__":
    main()
