"""How long until a server answers, and until its streams go on after a death.

``cold_start_s``: from the command to the "ready" line with SmolLM2 (goal 15 s). ``recovery_s``: from ``kill -9`` of
a process to the next token of the last of 8 running streams (goal 10 s). The limit that both are compared with,
measured in the same run, is what no worker can do without: importing torch in a fresh process.

Run: python benchmarks/start.py [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from time import monotonic

import psutil
import report
from evenflow.control.client import AsyncClient, Stream
from report import Report, Row
from serving import Served, served

MODEL = "smollm2-135m"
STREAMS = 8
GOAL_START_S, GOAL_RECOVERY_S = 15.0, 10.0


def import_torch() -> float:
    """Seconds until a fresh process has torch."""
    start = monotonic()
    subprocess.run([sys.executable, "-P", "-c", "import torch"], check=True)
    return monotonic() - start


def cold_start(stages: int) -> float:
    """Seconds from the command to a server that is ready."""
    start = monotonic()
    with served(MODEL, "--stages", str(stages)):
        return monotonic() - start


def find(server: Served, title: str) -> psutil.Process:
    """The server's process with this title."""
    for process in psutil.Process(server.pid).children(recursive=True):
        if " ".join(process.cmdline()).startswith(title):
            return process
    raise RuntimeError(f"no process {title!r}")


async def _recover(server: Served, title: str) -> float:
    async with AsyncClient(server.endpoint) as client:
        await client.wait_connected(30)
        streams: list[Stream] = []
        for index in range(STREAMS):
            prompt = [100 + (7 * i * (index + 1)) % 40_000 for i in range(64)]
            streams.append(await client.submit(prompt, max_tokens=2000, min_tokens=2000))
        arrivals = [0.0] * STREAMS

        async def read(index: int) -> None:
            async for _ in streams[index]:
                arrivals[index] = monotonic()

        readers = [asyncio.create_task(read(index)) for index in range(STREAMS)]
        while not all(arrivals):
            await asyncio.sleep(0.05)
        killed = monotonic()
        find(server, title).kill()
        # What was under way when it died may still come: half a second later everything stands still.
        await asyncio.sleep(0.5)
        still = monotonic()
        while not all(at > still for at in arrivals):
            await asyncio.sleep(0.01)
        back = max(arrivals) - killed
        for stream in streams:
            stream.abort()
        for reader in readers:
            reader.cancel()
        return back


def main() -> int:
    options = report.arguments(__doc__).parse_args()
    results = Report("start")
    rounds = 1 if options.quick else 3
    import_torch()  # from now on its files are in memory
    limit = statistics.median(import_torch() for _ in range(rounds))
    results.add(Row("import_torch_s", {}, limit, "s"))

    def add(measure: str, case: dict[str, object], values: list[float], goal: float) -> None:
        value = statistics.median(values)
        results.add(Row(measure, case, value, "s", "import torch", value / limit, goal, value <= goal))

    for stages in (2,) if options.quick else (1, 2):
        add("cold_start_s", {"stages": stages}, [cold_start(stages) for _ in range(rounds)], GOAL_START_S)
    with served(MODEL, "--stages", "2", "--dtype", "float32") as server:
        for title in ("evenflow worker 0.0", "evenflow worker 0.1", "evenflow control"):
            values = [asyncio.run(_recover(server, title)) for _ in range(rounds)]
            add("recovery_s", {"stages": 2, "killed": title.removeprefix("evenflow ")}, values, GOAL_RECOVERY_S)
    results.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
