"""How many iterations a second the simulator does on one core, with so many sequences always running.

The load saturates the batch limit, so that many sequences always run; prompts and outputs are those of the paper's
chat trace. Seconds are of this process's CPU. With the interpreted core it takes about twice as long; which one it is
is told. ``--profile`` shows where the time goes.

Where there is an environment with vidur==0.0.26 (``make peers``, or ``--vidur PYTHON``), that simulates the same
requests with its Sarathi scheduler, in its own process: see peers/vidur_simulation.py for what is left out in its
favour. Without one the peer is null, and the 600 requests a second that were once recorded of its main branch on some
machine are told for what they are.

Run: python benchmarks/simulation_speed.py [--quick] [--json] [--running N] [--requests N] [--policy P] [--profile]
"""

from __future__ import annotations

import cProfile
import json
import pstats
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from evenflow.control import compiled
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.load import arrivals, shuffled
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.traces import read_trace
from evenflow.dataplane.simulated.world import World
from report import Report, Row, arguments

TRACE = Path(__file__).parent / "paper" / "data" / "openchat_sharegpt4_8k_lengths.csv.gz"


ROOT = Path(__file__).parent.parent
BUDGET, LENGTH, BLOCKS = 512, 8192, 1 << 20
#: Iterations a second at 128 running sequences.
GOAL = 10_000.0
#: Requests a second of Vidur's main branch, as recorded elsewhere: not measured here.
RECORDED = 600.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Between the first tenth of the requests and the last that leave the batch full. ``requests`` that ended."""

    iterations: int
    requests: int
    seconds: float
    tokens: float = 0.0


def span(running: int, requests: int) -> tuple[int, int]:
    """Of finished requests, between which is measured: before and after, iterations are smaller."""
    return requests // 10, requests - 2 * running


def speed(running: int, requests: int, policy: str) -> Speed:
    """Of this simulator; ``tokens``: mean output of an iteration."""
    scenario = Scenario(
        KNOWN["yi-34b"],
        load_device("h100"),
        ranks=4,
        policy=policy,
        token_budget=BUDGET,
        max_num_seqs=running,
        length=LENGTH,
        blocks=BLOCKS,
    )
    world = World(scenario.limits(), scenario.models())
    world.feed(list(arrivals(shuffled(read_trace(TRACE), 0, requests), repeat(0.0), LENGTH)))
    first, last = span(running, requests)
    world.run(stop=lambda world: world.record.finished >= first, every=64)
    began, before = time.process_time(), world.iterations
    given, finished = world.record.tokens, world.record.finished
    world.run(stop=lambda world: world.record.finished >= last, every=64)
    seconds, count = time.process_time() - began, world.iterations - before
    return Speed(count, world.record.finished - finished, seconds, (world.record.tokens - given) / count)


def vidur(python: Path, running: int, requests: int) -> Speed:
    """Of Vidur, on the same requests. Raises ``RuntimeError`` with its last lines if it fails."""
    load = arrivals(shuffled(read_trace(TRACE), 0, requests), repeat(0.0), LENGTH)
    first, last = span(running, requests)
    asked = {
        "requests": [(one.prompt, one.output) for one in load],
        "running": running,
        "budget": BUDGET,
        "blocks": BLOCKS,
        "first": first,
        "last": last,
    }
    program = Path(__file__).parent / "peers" / "vidur_simulation.py"
    done = subprocess.run(
        [str(python), str(program)], input=json.dumps(asked), capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise RuntimeError("vidur failed:\n" + "\n".join(done.stderr.splitlines()[-8:]))
    told = json.loads(done.stdout)
    return Speed(told["iterations"], last - first, told["cpu_seconds"])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--policy", default="stall-free")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--vidur", type=Path, default=ROOT / ".venv-vidur" / "bin" / "python", metavar="PYTHON")
    options = parser.parse_args()
    requests = options.requests or (1024 if options.quick else 2048)
    first, last = span(options.running, requests)
    if last <= first:
        parser.error(f"--requests {requests} are too few: they do not keep {options.running} running")
    profiler = cProfile.Profile()
    if options.profile:
        profiler.enable()
    ours = speed(options.running, requests, options.policy)
    profiler.disable()
    core = "compiled" if compiled.folder().is_dir() else "interpreted"
    case = {"running": options.running, "policy": options.policy, "core": core}
    report = Report("simulation_speed")
    iterations, ended = ours.iterations / ours.seconds, ours.requests / ours.seconds
    goal = GOAL if options.running == 128 else None
    met = None if goal is None else iterations >= goal
    if options.vidur.is_file():
        theirs = vidur(options.vidur, options.running, requests)
        ratio = iterations * theirs.seconds / theirs.iterations
        report.add(Row("iterations_per_s", case, iterations, "1/s", "vidur 0.0.26", ratio, goal, met))
        ratio = ended * theirs.seconds / theirs.requests
        report.add(Row("requests_per_s", case, ended, "1/s", "vidur 0.0.26", ratio))
        report.add(
            Row("vidur_iterations_per_s", {"running": options.running}, theirs.iterations / theirs.seconds, "1/s")
        )
    else:
        report.add(Row("iterations_per_s", case, iterations, "1/s", goal=goal, met=met))
        report.add(Row("requests_per_s", {**case, "vidur_recorded": RECORDED}, ended, "1/s"))
    report.add(Row("tokens_per_iteration", case, ours.tokens, ""))
    report.show(options.json)
    if options.profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(16)
    return 0


if __name__ == "__main__":
    sys.exit(main())
