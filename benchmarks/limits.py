"""How far from the machine's limits are the CPU kernels, and whole iterations of SmolLM2-135M?

The rates that are measured: bytes read from memory (sums over parts of 256 MiB), and operations of a large product
in float32, in bfloat16 if the processor multiplies that, and of one of whole numbers in 8 bits (torch's own library).
The limit of a kernel or an iteration is the longer of what its bytes and its operations take at these rates;
``ratio`` is the part of the limit that it reaches. Weights in bfloat16, and weights in 8 and 4 bits as whole numbers,
are held to multiply at the quicker of their own rate and that of float32; an iteration in bfloat16 has its attention
at that, too. Weights are read from memory, not from a cache: each call has others. ``product_against_onednn``
compares the packed product with oneDNN's of the same values, in bfloat16 if the processor multiplies that.

Rates are measured anew in every repetition, beside what they are compared with. Within one, the quickest of a few
calls counts, since other programs can only slow a call down; of the repetitions the median counts.

Run: python benchmarks/limits.py [--threads N] [--quick] [--json]
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import report
from evenflow.cli.libraries import library_env

# As in a worker, and before torch is loaded.
os.environ.update(library_env(os.cpu_count() or 1, os.environ))

import torch
from evenflow.dataplane.model_runner import ModelRunner, load_runner
from evenflow.dataplane.models.config import EMBEDDING, HEAD, LlamaConfig, tensor_shapes
from evenflow.dataplane.profile import Shape
from evenflow.dataplane.weights import open_model
from evenflow.kernels import cpu
from evenflow.kernels.attention import AttnBatch
from evenflow.kernels.attention_native import NativeAttention
from evenflow.kernels.linear import Linear, multiplies_bfloat16
from evenflow.kernels.packed import PackedLinear
from evenflow.kernels.quantised import GROUP, Int4Linear, Int8Linear, quantise4, quantise8
from report import Report, Row

MODEL = "smollm2-135m"
READ_BYTES, PARTS, SIDE = 256 << 20, 16, 512
#: Seconds after which a measurement makes no further call.
LONGEST_S = 0.3
#: [out, in] of the model's layers, its head last, and the rows that they get.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
ROWS = (1, 8, 32, 512)
#: Rows of a batch, tokens of each, tokens before.
BATCHES = (Shape(1, 1, 512), Shape(8, 1, 512), Shape(32, 1, 512), Shape(1, 512, 0), Shape(1, 256, 4096))

#: Bytes of a weight of the layers and of the head, scales among them, and of a value of the cache.
BYTES = {
    "bfloat16": (2.0, 2.0, 2),
    "float32": (4.0, 4.0, 4),
    "int8": (1 + 2 / GROUP, 1 + 2 / GROUP, 2),
    "int4": (0.5 + 4 / GROUP, 1 + 2 / GROUP, 2),
}

Case = tuple[str, tuple[tuple[str, Any], ...]]


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of the quickest of ``calls`` after the first, or of a few rounds of a single one."""
    calls = list(calls) * 3 if len(calls) == 1 else calls
    calls[0]()
    best = float("inf")
    until = time.perf_counter() + LONGEST_S
    for call in calls[1:]:
        began = time.perf_counter()
        call()
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > until:
            break
    return best


class Measured:
    """What each repetition found: seconds, and the part of that repetition's limit."""

    def __init__(self) -> None:
        self.seconds: defaultdict[Case, list[float]] = defaultdict(list)
        self.shares: defaultdict[Case, list[float]] = defaultdict(list)

    def add(self, case: Case, seconds: float, share: float | None = None) -> None:
        self.seconds[case].append(seconds)
        if share is not None:
            self.shares[case].append(share)


def attention(shape: Shape, config: LlamaConfig) -> tuple[Callable[[], object], int, int]:
    """One layer's attention in bfloat16: a call, the bytes that it reads and its floating point operations."""
    backend = NativeAttention()
    length, size = shape.context + shape.each, 16
    blocks = -(-length // size)
    cache = backend.allocate(1, shape.rows * blocks, size, config.kv_heads, config.head_dim, torch.bfloat16)
    for pages in (*cache.keys, *cache.values):
        pages.fill_(0.5)
    batch = AttnBatch(
        cu_q=torch.arange(shape.rows + 1, dtype=torch.int32) * shape.each,
        kv_len=torch.full((shape.rows,), length, dtype=torch.int32),
        block_table=torch.arange(shape.rows * blocks, dtype=torch.int32).view(shape.rows, blocks),
        slot=torch.full((shape.tokens,), -1),
        num_decodes=shape.decodes,
    )
    q = torch.randn(shape.tokens, config.heads, config.head_dim)
    out = torch.empty_like(q)
    pairs = shape.attention or shape.kv_tokens
    read = 4 * shape.rows * length * config.kv_heads * config.head_dim
    return lambda: backend.attend(q, cache, 0, batch, out, 0.1), read, 4 * pairs * config.heads * config.head_dim


def linear(dtype: str, weight: torch.Tensor) -> PackedLinear | Int8Linear | Int4Linear:
    """A layer of ``weight`` in this precision."""
    if dtype == "bfloat16":
        return PackedLinear(weight)
    return Int8Linear(quantise8(weight)) if dtype == "int8" else Int4Linear(quantise4(weight))


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes to read and operations to make: of products of weights, and of attention."""

    read: int
    products: int
    attention: int = 0


def iteration_cost(shape: Shape, config: LlamaConfig, layer_bytes: float, head_bytes: float, kv_bytes: int) -> Cost:
    """Of one iteration; bytes are of each weight, and of each value of the cache."""
    shapes = tensor_shapes(config)
    layers = sum(a * b for n, s in shapes.items() if len(s) == 2 and n not in (EMBEDDING, HEAD) for a, b in [s])
    head = config.vocab_size * config.hidden_size
    kv = 2 * config.layers * config.kv_heads * config.head_dim * kv_bytes
    read = layers * layer_bytes + head * head_bytes + shape.rows * (shape.context + shape.each) * kv
    pairs = shape.attention or shape.kv_tokens
    products = 2 * (layers * shape.tokens + head * shape.rows)
    return Cost(int(read), products, int(4 * config.layers * pairs * config.heads * config.head_dim))


def repetition(runners: dict[str, ModelRunner], config: LlamaConfig, quick: bool, found: Measured) -> None:
    parts = torch.ones(PARTS, READ_BYTES // PARTS // 4)
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    read = timed([lambda part=part: part.sum() for part in parts]) * PARTS
    product = timed([lambda: left @ right] * PARTS)
    narrow = product
    if multiplies_bfloat16():
        left16, right16 = left.to(torch.bfloat16), right.to(torch.bfloat16)
        narrow = timed([lambda: left16 @ right16] * PARTS)
        found.add(("matrix_rate", (("dtype", "bfloat16"),)), narrow)
    ones, others = torch.ones(SIDE, SIDE, dtype=torch.int8), torch.ones(SIDE, SIDE, dtype=torch.int8)
    whole = timed([lambda: torch.ops.aten._int_mm(ones, others)] * PARTS)
    found.add(("bandwidth", ()), read)
    found.add(("matrix_rate", (("dtype", "float32"),)), product)
    found.add(("matrix_rate", (("dtype", "int8"),)), whole)

    quickest = {"bfloat16": min(product, narrow), "int8": min(product, whole), "int4": min(product, whole)}

    def share(seconds: float, cost: Cost, dtype: str = "float32") -> float:
        attending = quickest["bfloat16"] if dtype == "bfloat16" else product
        computing = (cost.products * quickest.get(dtype, product) + cost.attention * attending) / (2 * SIDE**3)
        return max(cost.read * read / READ_BYTES, computing) / seconds

    generator = torch.Generator().manual_seed(0)
    for out, inputs in SHAPES[2:4] if quick else SHAPES:
        weight = torch.randn(out, inputs, generator=generator).to(torch.bfloat16)
        for dtype in ("bfloat16",) if quick else ("bfloat16", "int8", "int4"):
            one = linear(dtype, weight)
            size = one.packed.nbytes
            copies = max(2, (READ_BYTES // 4) // size)
            layers = [one, *(linear(dtype, weight) for _ in range(copies - 1))]
            theirs_in = torch.bfloat16 if multiplies_bfloat16() else torch.float32
            onednn = [Linear(weight.to(theirs_in)) for _ in range(copies)] if dtype == "bfloat16" else []
            for rows in ROWS:
                if rows > 32 and out > 10_000:
                    continue
                x = torch.randn(rows, inputs, generator=generator)
                case = (("weight", f"{out}x{inputs}"), ("dtype", dtype), ("rows", rows))
                seconds = timed([lambda p=p, x=x: p(x) for p in layers])
                cost = Cost(size, 2 * rows * out * inputs)
                found.add(("product", case), seconds, share(seconds, cost, dtype))
                if onednn:
                    given = x.to(theirs_in)
                    theirs = timed([lambda o=o, x=given: o(x) for o in onednn])
                    found.add(("product_against_onednn", case), seconds, theirs / seconds)
    for shape in BATCHES:
        case = (("rows", shape.rows), ("tokens", shape.each), ("context", shape.context))
        call, read_bytes, operations = attention(shape, config)
        seconds = timed([call])
        found.add(("attention", case), seconds, share(seconds, Cost(read_bytes, 0, int(operations))))
        for dtype, runner in runners.items():
            seconds = timed([lambda r=runner, s=shape: r.rehearse(s)])
            cost = iteration_cost(shape, config, *BYTES[dtype])
            took = share(seconds, cost, dtype)
            found.add(("iteration", (("dtype", dtype), *case)), seconds, took)


def measure(threads: int, quick: bool, results: Report) -> None:
    """All cases."""
    torch.set_num_threads(threads)
    if not cpu.available():
        raise SystemExit("the C++ kernels cannot be built here: there is nothing to measure")
    config = open_model(MODEL).config
    dtypes = ("bfloat16",) if quick else ("bfloat16", "float32", "int8", "int4")
    runners = {dtype: load_runner(MODEL, dtype=dtype, kv_memory=1 << 30, threads=threads) for dtype in dtypes}
    found = Measured()
    with torch.inference_mode():
        for _ in range(2 if quick else 7):
            repetition(runners, config, quick, found)
    at = {"threads": threads}
    for (name, case), seconds in found.seconds.items():
        took = median(seconds)
        if name == "bandwidth":
            results.add(Row(name, at, READ_BYTES / took / 1e9, "GB/s"))
        elif name == "matrix_rate":
            results.add(Row(name, {**dict(case), **at}, 2 * SIDE**3 / took / 1e9, "GFLOP/s"))
        else:
            peer = "onednn" if name.endswith("onednn") else "limit"
            ratio = median(found.shares[name, case])
            results.add(Row(name, {**dict(case), **at}, took * 1e3, "ms", peer, ratio))


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads that compute")
    options = parser.parse_args()
    results = Report("limits")
    measure(options.threads, options.quick, results)
    results.show(options.json)


if __name__ == "__main__":
    main()
