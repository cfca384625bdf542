"""Should a worker leave a core to control, gateway and clients when they share the machine?

SmolLM2-135M is served by a worker that computes on every core, and by one that leaves one, in turns, under the same
closed load through HTTP (``evenflow bench``, itself on that machine). ``tokens_per_s`` counts prompts and outputs;
``ratio`` is that of all cores to one less, in pairs. The default is all cores: threads that have lost their core are
not waited for (``kernels/cpu/pool.h``).

Run: python benchmarks/sharing.py [--quick] [--json]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from report import Report, Row, arguments
from serving import served
from streams import MODEL

USERS, REQUESTS = 16, 48
LOAD = ("--prompt-tokens", "100:500", "--output-tokens", "64:128", "--json")


def measured(threads: int, requests: int, seed: int) -> tuple[float, float]:
    """Tokens a second, and the 99th percentile of the time between tokens in milliseconds."""
    command = [sys.executable, "-P", "-m", "evenflow.cli", "bench"]
    with served(MODEL, "--threads", str(threads)) as server:
        asked = ("--concurrency", str(USERS), "--requests", str(requests), "--seed", str(seed))
        done = subprocess.run([*command, server.url, *LOAD, *asked], capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"evenflow bench ended with {done.returncode}: {done.stderr[-500:]}")
    found = json.loads(done.stdout)
    return found["total_token_throughput"], found["p99_itl_ms"]


def main() -> int:
    options = arguments(__doc__).parse_args()
    cores = os.cpu_count() or 1
    if cores < 2:
        raise SystemExit("a machine with one core has none to leave")
    rounds, requests = (1, USERS) if options.quick else (5, REQUESTS)
    found: dict[int, list[tuple[float, float]]] = {cores: [], cores - 1: []}
    for number in range(rounds):
        for threads in sorted(found, reverse=bool(number & 1)):
            found[threads].append(measured(threads, requests, number))
    report = Report("sharing")
    pairs = zip(found[cores], found[cores - 1], strict=True)
    ratio = statistics.median(all_cores[0] / fewer[0] for all_cores, fewer in pairs)
    for threads, values in found.items():
        rate, tail = (statistics.median(each) for each in zip(*values, strict=True))
        case = {"threads": threads, "users": USERS}
        if threads == cores:
            report.add(Row("tokens_per_s", case, rate, "tok/s", "one thread less", ratio))
        else:
            report.add(Row("tokens_per_s", case, rate, "tok/s"))
        report.add(Row("p99_tbt_ms", case, tail, "ms"))
    report.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
