"""How fast the waiting queue empties, and so when a refused request may come again."""

from __future__ import annotations

from collections import deque

#: Seconds over which the rate is taken, and between samples of it.
WINDOW_S = 10.0
SAMPLE_S = 0.5
#: What a refused request is told, at least and at most; the most that common clients obey is a minute.
LEAST_MS = 100
MOST_MS = 60_000
#: And while nothing has been measured.
UNKNOWN_MS = 1000


class Drain:
    """Samples of how many requests, and tokens of theirs, have left the queue so far."""

    def __init__(self) -> None:
        self.due = 0.0  #: when the next sample is wanted
        self._samples: deque[tuple[float, int, int]] = deque()

    def sample(self, now: float, requests: int, tokens: int) -> None:
        """So many have left by ``now``; numbers only grow."""
        samples = self._samples
        samples.append((now, requests, tokens))
        self.due = now + SAMPLE_S
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()

    def retry_ms(self, now: float, requests: int, tokens: int, excess: int, excess_tokens: int) -> int:
        """Milliseconds until ``excess`` requests and ``excess_tokens`` tokens will have left the queue at the rate of
        the last seconds. ``requests`` and ``tokens`` are those that have left so far."""
        since, had, had_tokens = self._samples[0] if self._samples else (now, requests, tokens)
        span = now - since
        if span < SAMPLE_S:
            return UNKNOWN_MS
        seconds = 0.0
        for left, wanted in ((requests - had, excess), (tokens - had_tokens, excess_tokens)):
            if wanted > 0:
                seconds = max(seconds, wanted * span / left) if left > 0 else MOST_MS / 1000
        return max(LEAST_MS, min(MOST_MS, round(seconds * 1000)))
