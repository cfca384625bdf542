"""Is scheduling off the device's critical path? Scripted workers take 5 ms an iteration while 256 requests decode.

``plan_waiting_share``: the part of iterations whose plan was already in the worker's queue when the one before
ended (goal 99 %). ``busy_share``: the part of its time that a stage computes; the smallest stage counts (goal 85 %
with 4 stages). Both come from the workers' own results, taken between two moments of a steady load through real
processes and sockets: the median of several windows, of those that the host left alone where there are such
(``stolen_share``: what it took in all). The limit that ``busy_share`` is compared with is 1.

Run: python benchmarks/overlap.py [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys

import report
from evenflow.control.client import AsyncClient, Stream
from evenflow.control.status import figure
from host import Stolen, undisturbed
from report import Report, Row
from serving import Served, served

RUNNING = 256
STEP_MS = 5
STAGES = (1, 2, 4)
GOAL_WAITING, GOAL_BUSY = 0.99, 0.85


async def _drive(server: Served, seconds: float, windows: int) -> list[tuple[dict[str, float], float]]:
    """Differences of the server's counters over ``seconds`` of steady decoding, and what the host took meanwhile."""
    found: list[tuple[dict[str, float], float]] = []
    draw = random.Random(3)
    async with AsyncClient(server.endpoint) as client:
        welcome = await client.wait_connected(30)
        streams: list[Stream] = []
        for _ in range(RUNNING):
            prompt = [draw.randrange(1, welcome.vocab_size) for _ in range(32)]
            streams.append(await client.submit(prompt, max_tokens=int(1000 * (seconds * windows + 30) / STEP_MS)))
        async with asyncio.timeout(30):
            while (await client.status()).values["num_decoding"] < RUNNING:
                await asyncio.sleep(0.2)
        await asyncio.sleep(1.0)
        for _ in range(windows):
            before, stolen = (await client.status()).values, Stolen()
            await asyncio.sleep(seconds)
            after = (await client.status()).values
            assert after["num_decoding"] == RUNNING, "the load was not steady"
            found.append(({name: after[name] - before.get(name, 0.0) for name in after}, stolen.share()))
        for stream in streams:
            stream.abort()
    return found


def measure(stages: int, seconds: float, windows: int, results: Report) -> None:
    """One case: a server of scripted workers under load."""
    arguments = ["--stages", str(stages), "--step-ms", str(STEP_MS), "--max-num-seqs", str(RUNNING)]
    arguments += ["--worker-arg=--blank", "--worker-arg=--num-blocks=140000"]
    with served("scripted", *arguments) as server:
        found = asyncio.run(_drive(server, seconds, windows))
    waiting: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    for deltas, stolen in found:
        of_stage: list[tuple[float, float]] = []
        for stage in range(stages):
            place = {"replica": 0, "stage": stage}
            late, count, work, idle = (
                deltas[figure(f"stage_{name}_total", **place)]
                for name in ("plans_late", "iterations", "busy_seconds", "idle_seconds")
            )
            of_stage.append((1 - late / count, work / (work + idle)))
        waiting.append((min(share for share, _ in of_stage), stolen))
        busy.append((min(share for _, share in of_stage), stolen))
    case = {"stages": stages, "running": RUNNING}
    value = undisturbed(waiting)
    results.add(Row("plan_waiting_share", case, value, "", "always", value, GOAL_WAITING, value >= GOAL_WAITING))
    value = undisturbed(busy)
    goal = GOAL_BUSY if stages == 4 else None
    results.add(
        Row("busy_share", case, value, "", "always busy", value, goal, None if goal is None else value >= goal)
    )
    results.add(Row("stolen_share", case, statistics.mean(stolen for _, stolen in busy), ""))


def main() -> int:
    options = report.arguments(__doc__).parse_args()
    results = Report("overlap")
    for stages in (1, 4) if options.quick else STAGES:
        measure(stages, 5.0, 2 if options.quick else 6, results)
    results.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
