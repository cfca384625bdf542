"""A runner that takes planned time, and dies or hangs when told to: for tests and benchmarks of the control
plane.
"""

import os
import signal
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...control.wire import Sample
from ..batch import Finished, ModelInfo, Runner, StageBatch
from ..profile import SHAPES
from .alarm import Alarm
from .modelled import Timing, constant_timing

#: Work between two iterations shorter than this does not delay the device's timeline: a device has a queue.
HOST_SLACK_S = 1e-3
#: So much before the end of an iteration the process is woken, and looks for the end from then on, as one does with a
#: real device: being woken takes that long.
EARLY_S = 1e-4


def sleep_exactly(seconds: float) -> None:
    """Sleep, but be awake at the end; meanwhile the core is left to whoever wants it."""
    end = time.monotonic() + seconds
    if seconds > EARLY_S:
        time.sleep(seconds - EARLY_S)
    while time.monotonic() < end:
        os.sched_yield()


def _exit_now() -> None:
    os._exit(70)


def _hang_for_ever() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while True:
        signal.pause()


class ScriptedRunner:
    """``inner`` on a device that needs ``step_s`` seconds an iteration and ``per_token_s`` for each of its
    tokens, or what ``timing`` says.

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
        timing: Timing | None = None,
        crash_on: int | None = None,
        hang_on: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_exactly,
        crash: Callable[[], None] = _exit_now,
        hang: Callable[[], None] = _hang_for_ever,
    ) -> None:
        self._inner = inner
        #: Of an iteration; None if it is only what ``inner`` takes.
        self._timing = constant_timing(step_s, per_token_s) if step_s or per_token_s else timing
        self._crash_on = crash_on
        self._hang_on = hang_on
        self._clock = clock
        self._sleep = sleep
        self._crash = crash
        self._hang = hang
        self._free_at = -1.0
        self._ends_at = -1.0
        self._finished: Finished
        self._alarm = None if self._timing is None else Alarm()

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
        timing = self._timing
        if timing is None:
            return []
        return [
            Sample(shape.prefill, shape.attention, shape.decodes, shape.kv_tokens, _microseconds(timing.shape(shape)))
            for shape in SHAPES
            if shape.tokens <= tokens
        ]

    def launch(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> None:
        now = self._clock()
        timing = self._timing
        took = 0.0 if timing is None else timing.batch(batch)
        begin = self._free_at
        if now - begin >= HOST_SLACK_S:
            # The device waited for its input, whose way here takes time; else that passed while it worked.
            begin = now if timing is None else now + timing.arrival(batch)
        self._free_at = begin + took
        if self._crash_on is not None and self._has(batch, hidden, self._crash_on):
            self._crash()
        if self._hang_on is not None and self._has(batch, hidden, self._hang_on):
            self._hang()
        self._inner.launch(batch, hidden)
        finished = self._inner.collect()
        self._ends_at = max(self._free_at, self._clock())
        ended_us = _microseconds(self._ends_at)
        self._finished = Finished(finished.output, _microseconds(now), ended_us, finished.logprobs)
        if self._alarm is not None:
            self._alarm.set(self._ends_at - EARLY_S)

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
