"""How many iterations a second the simulator does on one core, with so many sequences always running.

The load saturates the batch limit, so that many sequences always run; prompts and outputs are those of the paper's
chat trace. Seconds are of this process's CPU. With the interpreted core it takes about twice as long; which one it is
is told. ``--profile`` shows where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from itertools import repeat
from pathlib import Path

from evenflow.control import compiled
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.load import arrivals, shuffled
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.traces import read_trace
from evenflow.dataplane.simulated.world import World

TRACE = Path(__file__).parent / "paper" / "data" / "openchat_sharegpt4_8k_lengths.csv.gz"


def speed(running: int, requests: int, policy: str) -> tuple[int, float, float]:
    """Iterations, seconds of CPU, and mean tokens an iteration gave out."""
    scenario = Scenario(
        KNOWN["yi-34b"],
        load_device("h100"),
        ranks=4,
        policy=policy,
        max_num_seqs=running,
        length=8192,
        blocks=1 << 20,
    )
    world = World(scenario.limits(), scenario.models())
    world.feed(list(arrivals(shuffled(read_trace(TRACE), 0, requests), repeat(0.0), 8192)))
    # Until the batch is full, and from when it no longer is, iterations are smaller: they do not count.
    world.run(stop=lambda world: world.record.finished >= requests // 10, every=64)
    began, before, given = time.process_time(), world.iterations, world.record.tokens
    world.run(stop=lambda world: world.record.finished >= requests - 2 * running, every=64)
    seconds, count = time.process_time() - began, world.iterations - before
    return count, seconds, (world.record.tokens - given) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--policy", default="stall-free")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    profiler = cProfile.Profile()
    if arguments.profile:
        profiler.enable()
    count, seconds, tokens = speed(arguments.running, arguments.requests, arguments.policy)
    profiler.disable()
    fast = compiled.folder().is_dir()
    told = {
        "iterations_per_s": count / seconds,
        "iterations": count,
        "cpu_seconds": seconds,
        "tokens_per_iteration": tokens,
        "compiled_core": fast,
    }
    if arguments.json:
        print(json.dumps(told))
    else:
        print(
            f"{count / seconds:,.0f} iterations/s: {count} in {seconds:.2f} s of CPU, {tokens:.0f} tokens each,"
            f" {'compiled' if fast else 'interpreted'} core"
        )
    if arguments.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(16)
    return 0


if __name__ == "__main__":
    sys.exit(main())
