"""A runner that takes planned time, and dies or hangs when told to: for tests and benchmarks of the control
plane.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...control.wire import Sample
from ..batch import Finished, ModelInfo, Runner, StageBatch
from ..profile import SHAPES
from .alarm import Alarm

#: Work between two iterations shorter than this does not delay the device's timeline: a device has a queue.
HOST_SLACK_S = 1e-3


def _exit_now() -> None:
    os._exit(70)


def _hang_for_ever() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while True:
        signal.pause()


class ScriptedRunner:
    """``inner`` on a device that needs ``step_s`` seconds an iteration and ``per_token_s`` for each of its
    tokens.

    Iterations that follow each other without a pause end at exact multiples of their cost: each ends at its
    deadline, so that neither noticing it late nor the host's work between two of them adds up. What ``inner``
    itself needs is part of the cost, not added to it: it computes at launch, and the rest of the time passes by
    itself.

    When a running batch has the token ``crash_on`` (``hang_on``), the process exits (hangs) in that
    iteration. Tokens of a prompt are in a batch when they are prefilled, so a request recomputed after a
    crash crashes again.
    """

    def __init__(
        self,
        inner: Runner,
        step_s: float = 0.0,
        per_token_s: float = 0.0,
        *,
        crash_on: int | None = None,
        hang_on: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        crash: Callable[[], None] = _exit_now,
        hang: Callable[[], None] = _hang_for_ever,
    ) -> None:
        self._inner = inner
        self._step_s = step_s
        self._per_token_s = per_token_s
        self._crash_on = crash_on
        self._hang_on = hang_on
        self._clock = clock
        self._sleep = sleep
        self._crash = crash
        self._hang = hang
        self._free_at = -1.0
        self._ends_at = -1.0
        self._finished: Finished
        self._alarm = Alarm() if step_s or per_token_s else None

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    @property
    def done(self) -> int | None:
        return None if self._alarm is None else self._alarm.descriptor

    def start(self, num_blocks: int) -> None:
        self._inner.start(num_blocks)

    def warm_up(self, tokens: int) -> None:
        self._inner.warm_up(tokens)

    def profile(self, tokens: int) -> list[Sample]:
        return [
            Sample(
                shape.prefill,
                shape.attention,
                shape.decodes,
                shape.kv_tokens,
                _microseconds(self._step_s + self._per_token_s * shape.tokens),
            )
            for shape in SHAPES
            if shape.tokens <= tokens and (self._step_s or self._per_token_s)
        ]

    def launch(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> None:
        now = self._clock()
        begin = self._free_at if now - self._free_at < HOST_SLACK_S else now
        self._free_at = begin + self._step_s + self._per_token_s * batch.num_tokens
        if self._crash_on is not None and self._has(batch, hidden, self._crash_on):
            self._crash()
        if self._hang_on is not None and self._has(batch, hidden, self._hang_on):
            self._hang()
        self._inner.launch(batch, hidden)
        finished = self._inner.collect()
        self._ends_at = max(self._free_at, self._clock())
        self._finished = replace(finished, started_us=_microseconds(now), ended_us=_microseconds(self._ends_at))
        if self._alarm is not None:
            self._alarm.set(self._ends_at)

    def collect(self) -> Finished:
        left = self._ends_at - self._clock()
        if left > 0:
            self._sleep(left)
        return self._finished

    def _has(self, batch: StageBatch, hidden: NDArray[np.uint8] | None, token: int) -> bool:
        if batch.ids is not None:
            return bool((batch.ids == token).any())
        assert hidden is not None
        words = np.ascontiguousarray(hidden).view(np.uint64).reshape(-1, 2)
        return bool((words[:, 0] >> np.uint64(32) == np.uint64(token)).any())


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
