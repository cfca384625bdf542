"""Does the simulator foretell this machine? A description, a recorded run, and what was foretold beside what was.

``evenflow profile`` measures this machine; then a server records a journal under a load of ``evenflow bench``
(Poisson arrivals, shares of what the description says can be served), and the journal's requests are simulated with
that description, the server's settings and nothing else of the run. P50 of TTFT and TBT must lie within 10 % of what
was measured and P99 within 20 %, at each load below saturation. Past it the simulator must say so instead.

Simulating is repeated and must be equal. All processes share this machine's cores, so the worker computes with one
thread less than there are cores; ``--threads`` is another number.

Run: python benchmarks/prediction.py [--quick] [--json] [--model MODEL] [--threads N]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from evenflow.cli.history import History, read_history
from evenflow.cli.simulation.simulate import is_saturated
from evenflow.cli.whatif import recorded_setting
from evenflow.control.journal.replay import Journal
from evenflow.dataplane.simulated.capacity import ceiling
from evenflow.dataplane.simulated.figures import Figures, summarise
from evenflow.dataplane.simulated.load import Entry
from evenflow.dataplane.simulated.profiled import Profile, ProfiledCost, load_description
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.world import ReplicaModel, World
from report import Report, Row, arguments
from serving import served

TOKENS, SEQUENCES = 256, 64
#: Sequences that run together at about the load that can be served.
RUNNING = 16
PROMPT, OUTPUT = "50:600", "20:80"
#: Shares of the load that the description says can be served; more than 1 is past saturation.
LOADS, QUICK_LOADS = (0.3, 0.6), (0.5,)
PAST = 3.0
#: Seconds of a load.
LONGEST_S = 600.0
GOALS = {"p50": 0.10, "p99": 0.20}


def evenflow(*command: str) -> None:
    """Run a command to its end. Raises ``RuntimeError`` with what it said if it fails."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "evenflow.cli", *command], capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise RuntimeError(f"evenflow {' '.join(command)}: {done.stderr or done.stdout}")
    if done.stderr:
        print(done.stderr, end="", file=sys.stderr)


@contextmanager
def recorded(model: str, threads: int, rate: float, requests: int, folder: Path) -> Iterator[History]:
    """What a server's journal tells of a load. Raises ``RuntimeError`` if it would last too long."""
    if requests / rate > LONGEST_S:
        raise RuntimeError(
            f"{requests} requests at {rate:.3f} a second last {requests / rate / 60:.0f} minutes: this machine is too"
            " slow for the model, or was busy when it was measured"
        )
    path = folder / f"{rate:.3f}.journal"
    flags = ["--token-budget", str(TOKENS), "--max-num-seqs", str(SEQUENCES), "--threads", str(threads)]
    with served(model, *flags, "--journal", str(path)) as server:
        load = ["--rate", f"{rate:.4f}", "-n", str(requests), "--prompt-tokens", PROMPT, "--output-tokens", OUTPUT]
        evenflow("bench", server.url, *load, "--json")
    yield read_history(Journal(path))


def foretold(history: History, profile: Profile) -> World:
    """The journal's requests on the described machine."""
    setting, shape = recorded_setting(history), history.shape
    model = ReplicaModel(ProfiledCost(profile), 1, shape.blocks, shape.profile)
    world = World(setting.limits, [model], slots=shape.slots, hop_us=profile.hop_us)
    world.feed(history.arrivals)
    world.run()
    return world


def compare(load: float, measured: Figures, predicted: Figures, report: Report) -> None:
    """Rows of one load."""
    for name in ("ttft", "tbt"):
        for part, goal in GOALS.items():
            real, told = getattr(getattr(measured, name), part), getattr(getattr(predicted, name), part)
            error = abs(told / real - 1)
            case: dict[str, Any] = {"load": load, "ms": f"{told * 1e3:.2f}", "measured_ms": f"{real * 1e3:.2f}"}
            report.add(Row(f"{name}_{part}_error", case, error, "", "measured", told / real, goal, error <= goal))


def mean_rate(profile: Profile) -> float:
    """Requests a second that the description says can just be served."""
    prompt, output = (sum(map(int, spec.split(":"))) // 2 for spec in (PROMPT, OUTPUT))
    scenario = Scenario(profile.shape, profile, token_budget=TOKENS, max_num_seqs=RUNNING)
    return ceiling(scenario, [Entry(prompt, output)]) / 1.1


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    options = parser.parse_args()
    report = Report("prediction")
    requests = 40 if options.quick else 150
    with tempfile.TemporaryDirectory(prefix="evenflow-") as name:
        folder = Path(name)
        described = folder / "here.json"
        sizes = ["--token-budget", str(TOKENS), "--max-num-seqs", str(SEQUENCES), "--threads", str(options.threads)]
        evenflow("profile", options.model, "--out", str(described), *sizes, *(["--quick"] if options.quick else []))
        profile = cast(Profile, load_description(str(described)))
        tried = profile.probes or profile.fit
        report.add(Row("profile_p50_error", {"batches": tried.batches}, tried.p50, ""))
        report.add(Row("profile_p90_error", {"batches": tried.batches}, tried.p90, ""))
        report.add(Row("profile_scatter", {}, profile.scatter, ""))
        most = mean_rate(profile)
        for load in QUICK_LOADS if options.quick else LOADS:
            with recorded(options.model, options.threads, load * most, requests, folder) as history:
                world, again = foretold(history, profile), foretold(history, profile)
            if summarise(world.record) != summarise(again.record) or world.record.gaps != again.record.gaps:
                raise RuntimeError("two simulations of the same load differ")
            if is_saturated(world.record):
                raise RuntimeError(f"{load * most:.2f} requests/s are more than can be served: nothing is foretold")
            compare(load, history.figures, summarise(world.record), report)
            beyond = cast(ProfiledCost, world.stages[0].cost).beyond
            report.add(Row("extrapolated", {"load": load}, beyond / world.iterations, ""))
        with recorded(options.model, options.threads, PAST * most, max(60, requests), folder) as history:
            said = is_saturated(foretold(history, profile).record)
            waits = history.figures.delay
            case = {"load": PAST, "measured_delay_p99_s": f"{waits.p99:.1f}"}
            report.add(Row("past_saturation_told", case, float(said), "", goal=1, met=said))
    report.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
