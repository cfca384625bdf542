"""The run: starts requests when they are due, or keeps so many open, and watches its own punctuality."""

import asyncio
import contextlib
import gc
import signal
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .client import Outcome, Target, exchange
from .loop import StampingSelector, new_loop
from .plan import Planned

#: Seconds between two looks at how late the loop wakes, and between two pictures of the progress.
PROBE_SECONDS = 0.01
PROGRESS_SECONDS = 1.0
#: Seconds before the first request: whatever the start of the loop costs is over.
HEAD_START_SECONDS = 0.05


@dataclass(slots=True)
class Load:
    """What a run has brought so far. ``wakes``: seconds by which the loop woke late, probe by probe."""

    outcomes: list[Outcome] = field(default_factory=list)
    wakes: "array[float]" = field(default_factory=lambda: array("d"))
    #: The outcomes that are still being filled, and sums over the others.
    running: dict[int, Outcome] = field(default_factory=dict)
    failed: int = 0
    tokens: int = 0
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """What to do. ``concurrency``: for requests without a time, how many are open at once; ``duration``: when those
    end to be started, in seconds; ``body`` makes a request's body; ``timeout`` in seconds, of each request."""

    target: Target
    requests: Iterator[Planned]
    body: Callable[[Planned], bytes]
    concurrency: int | None = None
    duration: float | None = None
    timeout: float = 600.0


def run_load(work: Work, progress: Callable[[Load], None] | None = None) -> Load:
    """Returns when all is done, or after an interrupt (SIGINT or SIGTERM), which ends the streams that run."""
    loop, selector = new_loop()
    load = Load()
    # What is there stays: a collection in the middle of the run is a pause that looks like the server's.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_run(work, load, selector, progress))
    finally:
        gc.unfreeze()
    return load


async def _run(work: Work, load: Load, selector: StampingSelector, progress: Callable[[Load], None] | None) -> None:
    loop = asyncio.get_running_loop()
    driver = asyncio.ensure_future(_drive(work, load, selector))

    def interrupt() -> None:
        load.interrupted = True
        driver.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        # Not in the main thread: then who runs us handles signals.
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, interrupt)
    probe = _Probe(load, selector)
    shown = None if progress is None else asyncio.ensure_future(_show(load, progress))
    try:
        await driver
    except asyncio.CancelledError:
        if not load.interrupted:
            raise
    finally:
        probe.close()
        if shown is not None:
            shown.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)


async def _drive(work: Work, load: Load, selector: StampingSelector) -> None:
    loop = asyncio.get_running_loop()
    begin = loop.time() + HEAD_START_SECONDS

    async def one(planned: Planned, body: bytes, due: float | None) -> None:
        outcome = Outcome(planned.index, due, loop.time())
        load.outcomes.append(outcome)
        load.running[planned.index] = outcome
        try:
            await exchange(work.target, body, outcome, lambda: (selector.woke, selector.late), work.timeout)
        except asyncio.CancelledError:
            outcome.unfinished = True
            raise
        finally:
            del load.running[planned.index]
            load.failed += bool(outcome.failure)
            load.tokens += outcome.tokens

    async def take_turns() -> None:
        for planned in work.requests:
            if work.duration is not None and loop.time() >= begin + work.duration:
                return
            await one(planned, work.body(planned), None)

    async with asyncio.TaskGroup() as group:
        if work.concurrency is not None:
            await asyncio.sleep(begin - loop.time())
            for _ in range(work.concurrency):
                group.create_task(take_turns())
            return
        for planned in work.requests:
            # Made before its time, so that a long prompt does not leave late.
            body = work.body(planned)
            due = begin + (planned.at or 0.0)
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(planned, body, due))
            # It leaves before the next body is made.
            await asyncio.sleep(0)


class _Probe:
    """How late the loop wakes when a timer is due while it sleeps: what the machine takes from it."""

    def __init__(self, load: Load, selector: StampingSelector) -> None:
        self._wakes = load.wakes
        self._selector = selector
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._timer = self._loop.call_soon(self._look)

    def _look(self) -> None:
        selector = self._selector
        if selector.slept and self._due >= selector.called:
            self._wakes.append(max(0.0, selector.woke - self._due))
        self._due = self._loop.time() + PROBE_SECONDS
        self._timer = self._loop.call_at(self._due, self._look)

    def close(self) -> None:
        self._timer.cancel()


async def _show(load: Load, progress: Callable[[Load], None]) -> None:
    while True:
        progress(load)
        await asyncio.sleep(PROGRESS_SECONDS)
