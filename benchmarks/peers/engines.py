"""The engines that are compared offline, and a child process of one of them that answers in ``talk``'s lines."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import weights

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT = ROOT / "benchmarks/out/peers"
OURS = "evenflow"
#: Seconds that an answer may take; the first of some engines compiles.
PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine at one precision. ``python`` is the interpreter of its environment, made by ``make peers``."""

    name: str
    dtype: str  #: bf16, int8 or int4: what the weights are in; rows compare engines of one of them
    python: Path
    program: str
    arguments: tuple[str, ...]

    @property
    def installed(self) -> bool:
        return self.python.exists()


def engines(dtype: str, threads: int) -> list[Engine]:
    """All that have weights of this precision, evenflow first. Makes their files, which takes a minute once."""
    here = Path(sys.executable)
    openvino, vllm = (ROOT / f".venv-{name}/bin/python" for name in ("openvino", "vllm"))
    own = {"bf16": "bfloat16", "int8": "int8", "int4": "int4"}[dtype]
    kind = {"bf16": "f16", "int8": "q8_0", "int4": "q4_0"}[dtype]
    OUT.mkdir(parents=True, exist_ok=True)
    file = str(weights.gguf_file(OUT, kind))
    found = [
        Engine(OURS, dtype, here, "offline_evenflow.py", (own, str(threads))),
        Engine("openvino", dtype, openvino, "offline_openvino.py", (file, str(threads))),
    ]
    if dtype == "bf16":
        directory = str(weights.directory(OUT))
        found += [
            Engine("vllm", dtype, vllm, "offline_vllm.py", (directory, own, str(threads))),
            Engine("transformers", dtype, here, "offline_transformers.py", (directory, own, str(threads))),
        ]
    return found


class Child:
    """A running engine. What it prints lies in ``OUT``."""

    def __init__(self, engine: Engine, threads: int) -> None:
        self.engine = engine
        log = OUT / f"{engine.name}-{engine.dtype}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [str(engine.python), str(HERE / engine.program), *engine.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=OUT,
                start_new_session=True,
            )
        self._log = log
        self._unread = b""
        self._answer()

    def ask(self, **asked: Any) -> list[float]:
        """The seconds that were measured. Raises ``RuntimeError`` with what the engine says."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
            part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                last = self._log.read_text(errors="replace").splitlines()[-5:]
                raise RuntimeError(f"{self.engine.name} gave no answer:\n" + "\n".join(last))
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.engine.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
