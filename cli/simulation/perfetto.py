"""A timeline of stages for Perfetto and chrome://tracing: the JSON trace event format."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...control.core.events import SendPlan
from ...control.wire import Result
from ..errors import UsageError

#: Iterations that are kept: what the viewer can show.
MOST = 200_000


class Timeline:
    """The first iterations of a run, by replica and stage."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._events: list[dict[str, object]] = []
        self._threads: set[tuple[int, int]] = set()

    def add(self, send: SendPlan, results: list[Result]) -> None:
        """A plan and what its stages report."""
        if len(self._events) >= MOST * self._stages:
            return
        chunks = send.tokens - send.decodes
        name = f"{send.decodes} decodes" if not chunks else f"{chunks} prefill, {send.decodes} decodes"
        for stage, result in enumerate(results):
            self._threads.add((send.replica, stage))
            self._events.append(
                {
                    "name": name,
                    "cat": "mixed" if chunks and send.decodes else "prefill" if chunks else "decode",
                    "ph": "X",
                    "ts": result.started_us,
                    "dur": result.ended_us - result.started_us,
                    "pid": send.replica,
                    "tid": stage,
                    "args": {
                        "step": send.plan.step,
                        "lane": send.plan.lane,
                        "prefill_tokens": chunks,
                        "decodes": send.decodes,
                        "kv_tokens": send.kv_tokens,
                        "idle_us": result.idle_us,
                    },
                }
            )

    def write(self, path: Path) -> None:
        """Raises ``UsageError`` if that cannot be."""
        names: list[dict[str, object]] = []
        for replica, stage in sorted(self._threads):
            if not stage:
                names.append(_name("process_name", replica, 0, f"replica {replica}"))
            names.append(_name("thread_name", replica, stage, f"stage {stage}"))
        try:
            path.write_bytes(msgspec.json.encode({"traceEvents": names + self._events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise UsageError(f"--perfetto {path}: {error.strerror}") from None


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
