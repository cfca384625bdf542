"""What the control process costs while it streams 20,000 tokens a second to 512 clients through sockets.

Every client has a connection and one request of its own, so each of their tokens is a message. Answers have 256
tokens on average and prompts 512; whenever one ends, its client sends the next. The workers are scripted: one
iteration of all requests takes 25 ms. The clients are one process (``crowd.py``) that checks each token.

``control_cpu_share``: seconds of CPU of the control process, all its threads, in a second (goal 0.35 of a core), and
of that what its main thread needs, which decides, encodes and sends, and what the others do, which is ZeroMQ's.
``late_plan_share``: iterations whose plan had not come when the worker needed it, by the worker's own count (goal
0.01). Both count only while at least 20,000 tokens a second reach the clients (``tokens_per_s``). ``crowd_lag_ms`` is
how late the clients themselves were, 99 % of the time: beyond half an iteration the figures say little.

Run: python benchmarks/flood.py [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from child import Child
from evenflow.control.client import AsyncClient
from evenflow.control.status import figure
from report import Report, Row
from serving import Served, control_of, served, threads_of

CLIENTS = 512
PROMPT, ANSWER = 512, 256
STEP_MS = 25.0
VOCABULARY = 32_000
GOAL_TOKENS, GOAL_SHARE, GOAL_LATE = 20_000.0, 0.35, 0.01
#: Turns of the crowd are this late at most, nearly always: half an iteration.
GOAL_LAG_MS = 12.5


def crowd_at(endpoint: str) -> Child:
    """The clients' process, which answers with its counters so far."""
    script = Path(__file__).parent / "crowd.py"
    numbers = map(str, (CLIENTS, PROMPT, ANSWER, VOCABULARY))
    return Child("the clients' process", [sys.executable, "-P", str(script), endpoint, *numbers])


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything that is counted, at one moment."""

    at: float
    threads: dict[int, float]  #: seconds of CPU by thread of the control process
    values: dict[str, float]  #: the control process's own
    crowd: dict[str, Any]


async def _drive(server: Served, seconds: float) -> tuple[Moment, Moment]:
    """The beginning and the end of ``seconds`` of steady load."""
    pid = control_of(server)
    crowd = crowd_at(server.endpoint)
    try:
        async with AsyncClient(server.endpoint) as client:
            await client.wait_connected(30)

            async def moment() -> Moment:
                values = (await client.status()).values
                return Moment(time.monotonic(), threads_of(pid), values, crowd.ask())

            deadline = time.monotonic() + 60
            while crowd.ask()["ended"] < 2 * CLIENTS:
                # By then every first answer, which may be short, has ended.
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the load does not get steady: {crowd.ask()}")
                await asyncio.sleep(0.5)
            before = await moment()
            await asyncio.sleep(seconds)
            return before, await moment()
    finally:
        crowd.close()


def measure(seconds: float, results: Report) -> None:
    arguments = [
        *("--step-ms", str(STEP_MS), "--max-num-seqs", str(CLIENTS), "--token-budget", str(4 * CLIENTS)),
        *("--worker-arg=--blank", "--worker-arg=--num-blocks=60000", f"--worker-arg=--vocab-size={VOCABULARY}"),
    ]
    with served("scripted", *arguments) as server:
        main = control_of(server)
        before, after = asyncio.run(_drive(server, seconds))
    took = after.at - before.at
    if after.crowd["faults"]:
        raise RuntimeError(f"{after.crowd['faults']} faults, the first: {after.crowd['first_fault']}")
    case: dict[str, object] = {"clients": CLIENTS, "step_ms": STEP_MS}
    tokens = (after.crowd["tokens"] - before.crowd["tokens"]) / took
    enough = tokens >= GOAL_TOKENS
    results.add(Row("tokens_per_s", case, tokens, "tok/s", None, None, GOAL_TOKENS, enough))
    ended = (after.crowd["ended"] - before.crowd["ended"]) / took
    results.add(Row("requests_per_s", case, ended, "req/s"))
    cpu = {thread: spent - before.threads.get(thread, 0.0) for thread, spent in after.threads.items()}
    share = sum(cpu.values()) / took
    results.add(Row("control_cpu_share", case, share, "", None, None, GOAL_SHARE, enough and share <= GOAL_SHARE))
    results.add(Row("control_cpu_share", {**case, "thread": "main"}, cpu[main] / took, ""))
    results.add(Row("control_cpu_share", {**case, "thread": "others"}, share - cpu[main] / took, ""))
    place = {"replica": 0, "stage": 0}
    late, count = (
        after.values[name] - before.values[name]
        for name in (
            figure("stage_plans_late_total", **place),
            figure("stage_iterations_total", **place),
        )
    )
    value = late / count
    results.add(Row("late_plan_share", case, value, "", None, None, GOAL_LATE, enough and value <= GOAL_LATE))
    results.add(Row("iterations_per_s", case, count / took, "/s"))
    for name in ("client_ticks_merged_total", "num_preemptions_total"):
        results.add(Row(name, case, after.values[name] - before.values[name], ""))
    usual, worst = after.crowd["lags_ms"]
    results.add(Row("crowd_lag_ms", case, usual, "ms", None, None, GOAL_LAG_MS, usual <= GOAL_LAG_MS))
    results.add(Row("crowd_worst_lag_ms", case, worst, "ms"))


def main() -> int:
    options = report.arguments(__doc__).parse_args()
    results = Report("flood")
    measure(10.0 if options.quick else 60.0, results)
    results.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
