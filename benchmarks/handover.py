"""What it costs to hand 2 MiB of hidden states from one stage's process to the next on the same host.

``handover_ms``: from before the sender begins to when the receiver, which sleeps until then, has them in place;
``copied_ms``: to when it has also copied them to memory of its own, as an iteration does. The peer is the same bytes
through a ZeroMQ socket (``ipc``), in turns with it.

Run: python benchmarks/handover.py [--quick] [--json]
"""

from __future__ import annotations

import multiprocessing
import select
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq
from evenflow.control.wire import Start
from evenflow.dataplane.links import StageLinks
from report import Report, Row, arguments

TOKENS, WIDTH = 1024, 2048
GOAL_MS = 0.3
#: Milliseconds between two: an iteration of the sender.
PAUSE_S = 0.005


def _links(folder: str, stage: int) -> StageLinks:
    return StageLinks(Start(1, 2, 64, 16, 8, TOKENS, 2048, folder), stage, WIDTH)


def receive(folder: str, told: Connection) -> None:
    """The second stage: tells after each when it had the bytes, and when it had copied them."""
    links = _links(folder, 1)
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.bind(f"ipc://{folder}/peer")
    own = np.zeros((TOKENS, WIDTH), np.uint8)
    poll = select.poll()
    poll.register(links.inbound or 0, select.POLLIN)
    told.send(None)
    while (asked := told.recv()) is not None:
        way, step = asked
        if way == "links":
            while not links.has_hidden(step):
                poll.poll()
                links.drain()
            seen = time.perf_counter_ns()
            own[:] = links.hidden()
            links.finish_hidden()
        else:
            frame = socket.recv(copy=False)
            seen = time.perf_counter_ns()
            own[:] = np.frombuffer(frame.buffer, np.uint8).reshape(TOKENS, WIDTH)
        told.send((seen, time.perf_counter_ns()))
    links.close()
    socket.close(0)


def main() -> int:
    options = arguments(__doc__).parse_args()
    rounds = 100 if options.quick else 1000
    times: dict[str, list[tuple[float, float]]] = {"links": [], "zeromq": []}
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        tell, told = start.Pipe()
        other = start.Process(target=receive, args=(folder, told))
        other.start()
        tell.recv()
        links = _links(folder, 0)
        socket = zmq.Context.instance().socket(zmq.PUSH)
        socket.connect(f"ipc://{folder}/peer")
        hidden = np.arange(TOKENS * WIDTH, dtype=np.uint32).astype(np.uint8).reshape(TOKENS, WIDTH)
        for step in range(1, rounds + 1):
            for way in times:
                tell.send((way, step))
                time.sleep(PAUSE_S)
                began = time.perf_counter_ns()
                if way == "links":
                    links.send_hidden(step, hidden)
                else:
                    socket.send(hidden.data)
                times[way].append(tuple((at - began) / 1e6 for at in tell.recv()))
        tell.send(None)
        other.join()
        links.close()
        socket.close(0)
    report = Report("handover")
    case = {"bytes": TOKENS * WIDTH}
    for place, measure in enumerate(("handover_ms", "copied_ms")):
        ours, theirs = (sorted(each[place] for each in times[way]) for way in ("links", "zeromq"))
        median, peer = statistics.median(ours), statistics.median(theirs)
        goal = GOAL_MS if place == 0 else None
        report.add(
            Row(measure, case, median, "ms", "ZeroMQ", peer / median, goal, None if goal is None else median < goal)
        )
        report.add(Row(measure.replace("_ms", "_p99_ms"), case, ours[len(ours) * 99 // 100], "ms"))
        report.add(Row(f"zeromq_{measure}", case, peer, "ms"))
    report.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
