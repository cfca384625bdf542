"""An event loop that knows when it woke and how late it was: the clock of the measurements.

Tokens are stamped with the time at which the loop learned that their socket can be read, not with the time at which
their turn came: a server writes a whole batch at once, and the last stream of it must not look slower than the first.
"""

import asyncio
import select
import selectors
import sys
import time


class StampingSelector(selectors.DefaultSelector):
    """A selector that stamps. Times are of ``time.monotonic``, which is also asyncio's clock.

    ``woke``: when the events being handled were found. ``late``: by how much they may have been there before,
    which is 0 if the loop was asleep when they came. ``called``: when it last asked; ``slept``: and had to wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.woke = self.called = time.monotonic()
        self.late = 0.0
        self.slept = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.called = time.monotonic()
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            self.late = self.called - self.woke
            self.woke = self.called
            self.slept = False
            return ready
        if sys.platform == "linux":
            # epoll itself sleeps whole milliseconds, which would make requests leave late.
            select.select([self.fileno()], [], [], timeout)
            ready = super().select(0)
        else:
            ready = super().select(timeout)
        self.late = 0.0
        self.slept = True
        self.woke = time.monotonic()
        return ready


def new_loop() -> tuple[asyncio.SelectorEventLoop, StampingSelector]:
    """A loop and its clock."""
    selector = StampingSelector()
    return asyncio.SelectorEventLoop(selector), selector
