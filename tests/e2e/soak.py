"""A server under everything at once, for minutes: mixed traffic, clients that leave, nonsense, and kill -9 at random.

Not collected by pytest; ``make soak`` runs it. At the end: every answer of a prompt was always the same, whatever
died meanwhile; nothing that should be refused was taken; all blocks are free or cached; the memory of control and
gateway has not grown; no process is left. The first half kills anybody, the second, in which memory is watched, only
workers.

Run: python tests/e2e/soak.py [--minutes 10] [--seed 0] [--model scripted]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from live_server import HttpStream, LiveServer, Watch, ended_by_signals, live, wait_for

KINDS = 60
RATE = 6.0  #: requests a second
KILL_S = (8.0, 20.0)
#: What a process may grow by while it serves the second half.
GROWTH = 0.05
GROWTH_BYTES = 8 << 20
NONSENSE: tuple[dict[str, Any], ...] = (
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": -5},
    {"prompt": "x", "n": 10**9},
    {"prompt": [1 << 40]},
    {"prompt": "x", "top_p": 7},
    {"prompt": "x " * 40_000},
    {"prompt": {"no": "prompt"}},
    {"prompt": "x", "model": "another"},
)


@dataclass
class Tally:
    """What came of the requests, by kind of request."""

    texts: dict[int, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def request_of(kind: int) -> dict[str, Any]:
    """The same request for the same ``kind``, always."""
    draw = random.Random(kind)
    body: dict[str, Any] = {
        "prompt": " ".join(f"w{draw.randrange(300)}" for _ in range(draw.choice([1, 5, 40, 200, 700]))),
        "max_tokens": draw.choice([1, 10, 60, 200]),
        "ignore_eos": True,
        "seed": kind,
        "temperature": draw.choice([0.0, 0.8]),
    }
    if draw.random() < 0.3:
        # Requests that share a prefix.
        body["prompt"] = "shared " * 150 + body["prompt"]
    return body


@dataclass
class Caller:
    """One request on its way."""

    kind: int
    stream: HttpStream
    leaves_at: float | None

    def judge(self, tally: Tally) -> None:
        stream = self.stream
        if self.leaves_at is not None:
            tally.count("left")
        elif stream.broken is not None:
            tally.count("connection lost")
        elif stream.error is not None and stream.status in (429, 503):
            tally.count("refused for now")
        elif stream.error is not None or not stream.done:
            tally.wrong.append(f"request {self.kind}: status {stream.status}, {stream.error}, done: {stream.done}")
        else:
            tally.count("answered")
            if tally.texts.setdefault(self.kind, stream.text) != stream.text:
                tally.wrong.append(f"request {self.kind}: another text than before")


def nonsense(server: LiveServer, draw: random.Random, tally: Tally) -> None:
    try:
        status = httpx.post(f"{server.url}/v1/completions", json=draw.choice(NONSENSE), timeout=30).status_code
    except httpx.HTTPError:
        tally.count("connection lost")
        return
    if status in (400, 404, 413):
        tally.count("nonsense refused")
    elif status in (429, 503):
        tally.count("refused for now")
    else:
        tally.wrong.append(f"nonsense got status {status}")


def memory(server: LiveServer) -> dict[str, int]:
    """Resident bytes of control and gateway."""
    found: dict[str, int] = {}
    for role in ("control", "gateway"):
        try:
            found[role] = server.find(role).memory_info().rss
        except psutil.Error:
            continue
    return found


def run(server: LiveServer, minutes: float, seed: int) -> Tally:
    """The traffic; returns when all of it has ended."""
    draw = random.Random(seed)
    tally = Tally()
    callers: list[Caller] = []
    start = now = time.monotonic()
    end, half = start + 60 * minutes, start + 30 * minutes
    next_kill, next_look = start + 5.0, half
    seen: dict[str, list[int]] = {"control": [], "gateway": []}
    while (now := time.monotonic()) < end:
        if draw.random() < 0.1:
            nonsense(server, draw, tally)
        elif len(callers) < 64:
            kind = draw.randrange(KINDS)
            leaves = now + draw.random() if draw.random() < 0.2 else None
            callers.append(Caller(kind, HttpStream(server.url, **request_of(kind)), leaves))
        for caller in callers:
            if caller.leaves_at is not None and caller.leaves_at < now:
                caller.stream.leave()
        for caller in [c for c in callers if not c.stream.is_alive()]:
            callers.remove(caller)
            caller.judge(tally)
        if now > next_kill:
            roles = [f"worker {replica}.{stage}" for replica in (0, 1) for stage in (0, 1)]
            if now < half - 15:
                roles += ["control", "gateway"]
            role = draw.choice(roles)
            server.kill(role)
            tally.count(f"killed {role.split()[0]}")
            next_kill = now + draw.uniform(*KILL_S)
        if now > next_look:
            for role, size in memory(server).items():
                seen[role].append(size)
            next_look = now + 2.0
            print(f"{now - start:4.0f} s  {len(callers):2d} under way  {tally.counts}", file=sys.stderr)
        time.sleep(draw.expovariate(RATE))
    for caller in callers:
        caller.stream.join(120.0)
        if caller.stream.is_alive():
            tally.wrong.append(f"request {caller.kind} never ended")
        else:
            caller.judge(tally)
    for role, sizes in seen.items():
        third = max(1, len(sizes) // 3)
        before, after = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
        print(f"{role}: {before / 1e6:.1f} MB, at the end {after / 1e6:.1f} MB")
        if after > before * (1 + GROWTH) + GROWTH_BYTES:
            tally.wrong.append(f"{role} grew from {before} to {after} bytes")
    return tally


def settle(server: LiveServer, tally: Tally) -> None:
    """Everything is over: nothing may be left in the books."""

    def idle() -> bool:
        values = server.metrics()
        held = values["evenflow_kv_blocks_free"] + values["evenflow_kv_blocks_cached"]
        return values["evenflow_num_requests_running"] == 0 and held == values["evenflow_kv_blocks"]

    wait_for(idle, 60, "all blocks free or cached")
    if "integrity" in server.log.lower() or "Traceback" in server.log:
        tally.wrong.append("the log speaks of an integrity check or an exception")
    with Watch(server.url) as watch:
        watch.settled()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="scripted")
    options = parser.parse_args()
    extra = ["--step-ms", "5", "--worker-arg=--num-blocks=600"] if options.model == "scripted" else []
    with ended_by_signals(), live(options.model, "--stages", "2", "--replicas", "2", *extra) as server:
        tally = run(server, options.minutes, options.seed)
        settle(server, tally)
        code = server.stop()  # asserts that no process and no file is left
        if code:
            tally.wrong.append(f"exit code {code}")
    print(tally.counts)
    for text in tally.wrong[:20]:
        print("wrong:", text)
    print("soak:", "failed" if tally.wrong else "passed")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
