"""Log-probabilities of a request's tokens, as a client collects them from ticks.

Kept in columns: an object a token is made only when somebody reads it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from .wire import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's natural log-probability, its rank (1 is the most likely), and the best alternatives.

    ``top`` holds (id, log-probability), best first; the token itself is among them if it is one of the best.
    """

    id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class LogprobColumns:
    """Consecutive tokens' log-probabilities, ``width`` alternatives each. Grows at the end only."""

    width: int
    values: array[float] = field(default_factory=lambda: array("f"))
    ranks: array[int] = field(default_factory=lambda: array("I"))
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_values: array[float] = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.values)

    def extend(self, told: TokenLogprobs, place: int) -> None:
        """Append what is new of ``told``, whose first token has the index ``place`` here.

        Nothing is taken twice, and nothing from a message that leaves a gap or contradicts itself.
        """
        size, tops = len(told.values), 4 * self.width
        skip = len(self) - place
        fits = size % 4 == 0 and len(told.ranks) == size
        if not fits or len(told.top_ids) != size * self.width or len(told.top_values) != size * self.width:
            return
        if not 0 <= skip < size // 4:
            return
        self.values.frombytes(told.values[4 * skip :])
        self.ranks.frombytes(told.ranks[4 * skip :])
        self.top_ids.frombytes(told.top_ids[tops * skip :])
        self.top_values.frombytes(told.top_values[tops * skip :])

    def read(self, ids: Sequence[int], start: int) -> list[TokenLogprob]:
        """Those of ``ids``, which are the tokens from index ``start`` on; fewer if not all have come."""
        width = self.width
        found: list[TokenLogprob] = []
        for i, token in zip(range(start, len(self)), ids, strict=False):
            best = slice(i * width, (i + 1) * width)
            top = tuple(zip(self.top_ids[best], self.top_values[best], strict=True))
            found.append(TokenLogprob(token, self.values[i], self.ranks[i], top))
        return found
