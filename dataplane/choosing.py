"""What each type of weights costs on this machine, measured in about a second: ``serve --dtype auto``.

Two of a model's layers are loaded in each type: one from the middle, and the last with the head; every other layer
takes as long as the one from the middle. Types that round what the file holds beyond 8 bits are not tried: int4 only
where the matrices of the layers lie in the file in 4 bits.

Run: python -m evenflow.dataplane.choosing --model MODEL --threads N    # one JSON array of ``Cost``
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .model_runner import ModelRunner
from .models.config import LlamaConfig, ModelError
from .profile import Shape
from .weights import open_model
from .weights.source import ModelSource

#: What is measured: a decode alone, eight of them, a chunk of a prompt.
ONE, EIGHT, CHUNK = Shape(1, 1, 255), Shape(8, 1, 255), Shape(1, 128, 128)
SHAPES = (ONE, EIGHT, CHUNK)
#: Seconds for all types and shapes together, and the least repetitions of each.
SECONDS, LEAST = 1.0, 2
#: A request to compare by: so many tokens of a prompt, so many of an answer, among seven others.
PROMPT, ANSWER = 512, 128


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one type, in milliseconds: an iteration of one and of eight decodes, a prompt's token, a whole request."""

    dtype: str
    decode_1_ms: float
    decode_8_ms: float
    prompt_token_ms: float

    @property
    def request_ms(self) -> float:
        return PROMPT * self.prompt_token_ms + ANSWER / EIGHT.rows * self.decode_8_ms


def candidates(source: ModelSource) -> list[str]:
    """Types of weights that lose little of what the file holds, the default first."""
    middle = f"model.layers.{source.config.layers // 2}.mlp.down_proj.weight"
    return ["bfloat16", "float32", "int8", *(["int4"] if source.has_int4(middle) else [])]


def measure(source: ModelSource, dtypes: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> list[Cost]:
    """The cost of each of ``dtypes``, in turns, so that a moment's disturbance meets all of them."""
    layers = source.config.layers
    runners = {dtype: _pair(source, dtype) for dtype in dtypes}
    taken: dict[tuple[str, Shape], list[float]] = {}
    began = clock()
    turn = 0
    while turn < LEAST + 1 or clock() - began < SECONDS:
        for dtype in dtypes:
            middle, last = runners[dtype]
            for shape in SHAPES:
                start = clock()
                middle.rehearse(shape)
                between = clock()
                last.rehearse(shape)
                took = (layers - 1) * (between - start) + clock() - between
                # The first time, kernels are generated and memory is touched.
                if turn:
                    taken.setdefault((dtype, shape), []).append(1e3 * took)
        if not turn:
            began = clock()
        turn += 1
    return [
        Cost(
            dtype,
            statistics.median(taken[dtype, ONE]),
            statistics.median(taken[dtype, EIGHT]),
            statistics.median(taken[dtype, CHUNK]) / CHUNK.tokens,
        )
        for dtype in dtypes
    ]


def _pair(source: ModelSource, dtype: str) -> tuple[ModelRunner, ModelRunner]:
    """A layer from the middle, and the last with the head."""
    layers = source.config.layers
    if layers == 1:
        raise ModelError("a model of one layer has nothing to choose by; name the --dtype")
    memory = _kv_memory(source.config)
    middle, last = (
        ModelRunner(source, stage, layers, dtype=dtype, kv_memory=memory) for stage in (layers // 2, layers - 1)
    )
    return middle, last


def _kv_memory(config: LlamaConfig) -> int:
    """Room for the longest and widest of ``SHAPES`` in one layer, whatever the type."""
    tokens = max(shape.rows * (shape.context + shape.each) for shape in SHAPES)
    return 2 * tokens * 2 * config.kv_heads * config.head_dim * 4 + (1 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        source = open_model(arguments.model)
        costs = measure(source, candidates(source))
    except ModelError as error:
        print(f"evenflow: {error}", file=sys.stderr)
        return 1
    print(json.dumps([dataclasses.asdict(cost) | {"request_ms": cost.request_ms} for cost in costs]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
