"""One search for the largest load within an SLO, and many of them in two processes.

A search is kept by its settings and the code (``store``). How long a cell takes is known from ``data/costs.csv``,
which ``all.py --costs`` writes: the longest come first, and what cannot begin in time is left out.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from evenflow.dataplane.simulated.capacity import Capacity, Verdict, capacity
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from store import kept, where
from targets import CHAT, DATA, trace

COSTS = DATA / "costs.csv"
#: Seconds of CPU of a cell of which nothing is known: for each request.
USUAL_S = 0.012
#: Policies by the names of the figures.
SARATHI, VLLM, ORCA = "sarathi", "vllm", "orca"


@dataclass(frozen=True, slots=True)
class System:
    """A model on its devices, with the batch limit that the paper gives Orca there."""

    model: str
    ranks: int
    stages: int
    device: str
    orca: int


MISTRAL = System("mistral-7b", 1, 1, "a100-pcie", 16)
YI = System("yi-34b", 2, 1, "a100-pcie", 16)
LLAMA = System("llama-2-70b", 4, 2, "a40", 8)
FALCON = System("falcon-180b", 4, 2, "a100-pcie", 8)
FALCON_FLAT = System("falcon-180b", 8, 1, "a100-pcie", 8)


@dataclass(frozen=True, slots=True)
class Cell:
    """One search: ``slo`` in seconds. ``sequences``: 0 for the policy's own limit."""

    system: System
    data: str
    slo: float
    policy: str
    budget: int = 512
    sequences: int = 0
    requests: int = 2048
    seeds: int = 3
    host: str = "graphs"

    @property
    def name(self) -> str:
        parts = [self.system.model, f"tp{self.system.ranks}pp{self.system.stages}", self.data, f"{self.slo:g}s"]
        parts += [self.policy, str(self.budget), str(self.sequences), f"{self.requests}x{self.seeds}", self.host]
        return "-".join(parts)

    def scenario(self) -> Scenario:
        policy = {SARATHI: "stall-free", VLLM: "prefill-first", ORCA: "hybrid"}[self.policy]
        limit = self.sequences or (self.system.orca if self.policy == ORCA else 128)
        return Scenario(
            KNOWN[self.system.model],
            load_device(self.system.device),
            ranks=self.system.ranks,
            stages=self.system.stages,
            policy=policy,
            token_budget=self.budget,
            max_num_seqs=limit,
            length=8192 if self.data == CHAT else 16384,
            host=self.host,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found. ``iterations`` simulated in ``seconds`` of CPU."""

    capacity: Capacity
    iterations: int
    seconds: float


def settings(cell: Cell) -> dict[str, Any]:
    """What a cell's result depends on beside the code."""
    return asdict(cell) | {"trace": (DATA / f"{cell.data}.csv.gz").stat().st_size}


def search(cell: Cell) -> Found:
    """Run a cell, or read what a run of the same by the same code has found."""

    def make() -> dict[str, Any]:
        iterations = 0

        def heard(seed: int, verdict: Verdict) -> None:
            nonlocal iterations
            iterations += verdict.iterations

        began = time.process_time()
        scenario, entries = cell.scenario(), trace(cell.data)
        found = capacity(scenario, entries, cell.slo, seeds=range(cell.seeds), requests=cell.requests, heard=heard)
        took = time.process_time() - began
        return {"rate": found.rate, "rates": found.rates, "iterations": iterations, "seconds": took}

    told = kept(cell.name, settings(cell), make)
    return Found(Capacity(told["rate"], tuple(told["rates"])), told["iterations"], told["seconds"])


def known_costs() -> dict[str, float]:
    """Seconds of CPU of each cell in the last whole run."""
    with COSTS.open(newline="") as file:
        return {row["cell"]: float(row["seconds"]) for row in csv.DictReader(file)}


def cost_s(cell: Cell, known: dict[str, float]) -> float:
    """About how many seconds of CPU a cell takes; none if its result is there."""
    if where(cell.name, settings(cell)).exists():
        return 0.0
    return known.get(cell.name, USUAL_S * cell.requests * cell.seeds)


def run_cells(cells: Iterable[Cell], jobs: int = 2, minutes: float = 90.0) -> dict[str, Found]:
    """All of them, each once, in ``jobs`` processes; says which are done. What cannot begin within ``minutes`` is
    left out."""
    known = known_costs()
    left = {cell.name: cell for cell in cells}
    todo = sorted(left.values(), key=lambda cell: cost_s(cell, known))
    seconds = sum(cost_s(cell, known) for cell in todo)
    print(
        f"{len(todo)} searches, {sum(cost_s(cell, known) > 0 for cell in todo)} of them to be run: about"
        f" {seconds / 60:.0f} minutes of CPU, in {jobs} processes",
        file=sys.stderr,
    )
    ends = time.monotonic() + 60 * minutes
    found: dict[str, Found] = {}
    out: dict[Future[Found], Cell] = {}
    with ProcessPoolExecutor(jobs) as pool:
        while todo or out:
            while todo and len(out) < jobs and time.monotonic() < ends:
                cell = todo.pop()
                out[pool.submit(search, cell)] = cell
            if not out:
                break
            done, _ = wait(out, return_when=FIRST_COMPLETED)
            for future in done:
                cell = out.pop(future)
                found[cell.name] = future.result()
                rate = found[cell.name].capacity.rate
                print(f"[{len(found)}/{len(left)}] {cell.name}: {rate:.3f}/s", file=sys.stderr, flush=True)
    for cell in todo:
        print(f"no time was left for {cell.name}", file=sys.stderr)
    return found
