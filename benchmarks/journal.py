"""What a journal costs the control process: a step of benchmarks/control_plane.py with one and without.

``journal_share``: by how much more of the processor's time a step takes on average (goal 5 %), handing over included.
The two take turns in a process, the collector of what is handed over is another process, which only reads it.
``served_share``: likewise of the control process of a real server with its sockets, all of its threads, for an
iteration (``control_us``) of scripted workers; the two are served in turns.
``writer_us``: what the process that writes a journal without ids takes for a step, beside the control process;
``file_bytes`` of it.

Run: python benchmarks/journal.py [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter, thread_time_ns

from control_plane import ANSWER, PROMPT, Load
from evenflow.control.__main__ import settle_gc
from evenflow.control.client import AsyncClient
from evenflow.control.core.events import ReplicaUp
from evenflow.control.journal.link import JournalLink
from evenflow.control.journal.recorder import Recorder, decode_items
from evenflow.control.journal.replay import Journal, replay
from evenflow.control.journal.writer import Writer
from evenflow.control.status import figure
from report import Report, Row, arguments
from serving import Served, control_of, served, threads_of

RUNNING = (32, 256, 1024, 4096)
GOAL = 0.05
#: Of the server: milliseconds of an iteration, and its requests.
STEP_MS, SERVED = 20, 256
#: Reads what is handed over, and drops it.
DRAIN = """
import sys
from evenflow.control.journal.ring import RingClosed, RingReader
ring = RingReader(*map(int, sys.argv[-3:]))
try:
    while True:
        for message in ring.messages(1.0):
            pass
except RingClosed:
    pass
"""


def recorded(load: Load, journal: Recorder) -> None:
    """Let ``load``, of which nothing has run yet, keep ``journal``."""
    replica = load.engine.replicas[0]
    journal.opened(load.engine.limits, 0.0, 0.0)
    journal.took(ReplicaUp(0, 1, load.stages, replica.pool.num_blocks, load.slots), 0.0)
    load.journal = journal


def cost(running: int, rounds: int, steps: int, report: Report) -> None:
    """One case: the two are warmed up, then take turns."""
    link = JournalLink([sys.executable, "-c", DRAIN])
    plain, other = Load(running), Load(running)
    recorded(other, Recorder(link.hand))
    for load in (plain, other):
        # Of this thread: what else runs on the machine counts as little as it can.
        load.clock = thread_time_ns
        for _ in range(ANSWER + ANSWER // 2):
            load.step()
    settle_gc()
    shares: list[float] = []
    times: list[float] = []
    for number in range(rounds):
        took: dict[int, float] = {}
        # Who goes first has the caches to win back.
        for load in (plain, other) if number & 1 else (other, plain):
            load.prepare(steps)
            took[id(load)] = statistics.fmean(load.step() for _ in range(steps)) / 1e3
        shares.append(took[id(other)] / took[id(plain)] - 1)
        times.append(took[id(other)])
    link.close()
    if link.lost:
        raise RuntimeError("what was handed over was not read")
    share = statistics.median(shares)
    case = {"running": running}
    report.add(Row("journal_share", case, share, "", "without", 1 + share, GOAL, share <= GOAL))
    report.add(Row("step_us", case, statistics.median(times), "us"))


async def _control_us(server: Served, seconds: float) -> float:
    """Microseconds of the control process for an iteration, in steady load: each answer is followed by a request."""
    control = control_of(server)

    async def count() -> tuple[float, float]:
        values = (await client.status()).values
        return sum(threads_of(control).values()), values[figure("stage_iterations_total", replica=0, stage=0)]

    async def user(number: int) -> None:
        draw = random.Random(number)
        length = draw.randrange(1, ANSWER)
        while True:
            prompt = [draw.randrange(1, vocabulary) for _ in range(PROMPT)]
            async for _ in await client.submit(prompt, max_tokens=length):
                pass
            length = ANSWER

    async with AsyncClient(server.endpoint) as client:
        vocabulary = (await client.wait_connected(30)).vocab_size
        users = [asyncio.create_task(user(number)) for number in range(SERVED)]
        async with asyncio.timeout(60):
            while (await client.status()).values["num_decoding"] < SERVED * 3 // 4:
                await asyncio.sleep(0.2)
        spent, iterations = await count()
        await asyncio.sleep(seconds)
        spent_then, iterations_then = await count()
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    return (spent_then - spent) / (iterations_then - iterations) * 1e6


def serving(rounds: int, seconds: float, report: Report) -> None:
    """A server with a journal and one without, in turns."""
    arguments = ["--step-ms", str(STEP_MS), "--max-num-seqs", str(SERVED), "--token-budget", str(3 * SERVED)]
    arguments += ["--worker-arg=--blank", "--worker-arg=--num-blocks=40000"]
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for journal in (False, True) if number & 1 else (True, False):
                more = ["--journal", f"{folder}/{number}"] if journal else []
                with served("scripted", *arguments, *more) as server:
                    took[journal].append(asyncio.run(_control_us(server, seconds)))
    share = statistics.median(other / plain - 1 for plain, other in zip(took[False], took[True], strict=True))
    case = {"running": SERVED, "step_ms": STEP_MS}
    report.add(Row("served_share", case, share, "", "without", 1 + share, GOAL, share <= GOAL))
    report.add(Row("control_us", case, statistics.median(took[True]), "us"))


def writing(running: int, steps: int, report: Report) -> None:
    """What is done with it elsewhere, here, and whether it can be replayed."""
    taken: list[bytes] = []
    load = Load(running)
    journal = Recorder(lambda data, soon: taken.append(bytes(data)) if data else None)
    recorded(load, journal)
    for _ in range(steps):
        load.step()
    journal.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        writer = Writer(path, 1 << 40, b"key")
        start = perf_counter()
        for data in taken:
            writer.take(decode_items(data))
        writer.close()
        took = (perf_counter() - start) / steps * 1e6
        case = {"running": running}
        report.add(Row("writer_us", case, took, "us"))
        report.add(Row("file_bytes", {**case, "a": "step"}, path.stat().st_size / steps, "B"))
        done = replay(Journal(path))
        if done.problem or writer.note:
            raise RuntimeError(f"the journal cannot be replayed: {done.problem} {writer.note}")


def main() -> int:
    options = arguments(__doc__).parse_args()
    report = Report("journal")
    for running in RUNNING[:2] if options.quick else RUNNING:
        cost(running, *((15, 64) if options.quick else (41, 128)), report)
        writing(running, ANSWER + (ANSWER >> (1 if options.quick else 0)), report)
    serving(*((1, 4.0) if options.quick else (7, 15.0)), report)
    report.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
