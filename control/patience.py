"""How long a result may be waited for before a worker is taken to hang. A pure function of what was measured."""

from __future__ import annotations

from collections.abc import Collection

#: A hang is assumed only after this many times the slowest recent iteration.
HANG_FACTOR = 10
#: The first iteration of an epoch may take this long: a fresh process touches its memory for the first time.
FIRST_RESULT_S = 15.0
#: ... with so many tokens at most; with more, in proportion.
FIRST_RESULT_TOKENS = 512


def patience(recent: Collection[tuple[float, int]], tokens: int) -> float:
    """Seconds that an iteration of ``tokens`` tokens may take, after ``recent`` ones (seconds, tokens) of its epoch.

    A prompt that is computed whole can be far larger than all that was measured lately: such an iteration may take
    as much longer as it has more tokens.
    """
    if not recent:
        return FIRST_RESULT_S * max(1.0, tokens / FIRST_RESULT_TOKENS)
    slowest = max(seconds for seconds, _ in recent)
    most = max(count for _, count in recent)
    return slowest * max(HANG_FACTOR, tokens / most)
