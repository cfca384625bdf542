"""The engines that are compared offline, and processes of them that answer in ``talk``'s lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import weights
from child import Child
from evenflow.cli.libraries import library_env
from evenflow.kernels.linear import multiplies_bfloat16

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT = ROOT / "benchmarks/out/peers"
OURS = "evenflow"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine at one precision. ``python`` is the interpreter of its environment, made by ``make peers``."""

    name: str
    dtype: str  #: bf16, int8 or int4: what the weights are in; rows compare engines of one of them
    python: Path
    program: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def installed(self) -> bool:
        return self.python.exists()


def quick_dtype() -> str:
    """What peers that compute in the type of their weights get bfloat16 weights in: products in bfloat16 take eight
    times as long as in float32 where the processor has no instructions for them."""
    return "bfloat16" if multiplies_bfloat16() else "float32"


def engines(dtype: str, threads: int) -> list[Engine]:
    """All that have weights of this precision, evenflow first. Makes their files, which takes a minute once."""
    here = Path(sys.executable)
    openvino, vllm = (ROOT / f".venv-{name}/bin/python" for name in ("openvino", "vllm"))
    own = {"bf16": "bfloat16", "int8": "int8", "int4": "int4"}[dtype]
    kind = {"bf16": "f16", "int8": "q8_0", "int4": "q4_0"}[dtype]
    OUT.mkdir(parents=True, exist_ok=True)
    file = str(weights.gguf_file(OUT, kind))
    found = [
        Engine(OURS, dtype, here, "offline_evenflow.py", (own, str(threads)), library_env(threads, {})),
        Engine("openvino", dtype, openvino, "offline_openvino.py", (file, str(threads))),
    ]
    if dtype == "bf16":
        computed = quick_dtype()
        directory = str(weights.directory(OUT, computed))
        found += [
            Engine("vllm", dtype, vllm, "offline_vllm.py", (directory, computed, str(threads))),
            Engine("transformers", dtype, here, "offline_transformers.py", (directory, computed, str(threads))),
        ]
    return found


def start(engine: Engine, threads: int) -> Child:
    """A process of an engine that is ready to be asked. What it prints lies in ``OUT``."""
    child = Child(
        engine.name,
        [str(engine.python), str(HERE / engine.program), *engine.arguments],
        log=OUT / f"{engine.name}-{engine.dtype}.log",
        environment={"OMP_NUM_THREADS": str(threads), **engine.environment},
        directory=OUT,
    )
    child.answer()
    return child
