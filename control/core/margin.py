"""The margin on predicted rounds: what their scatter asks for, so that few of them are longer than they may be."""

from __future__ import annotations

from bisect import bisect_left, insort

#: Rounds that are remembered, and how many of them may have been longer than predicted with the margin: the share of
#: the next that are is then 0.8 %, which leaves a little of one in a hundred for long ones that come in groups.
_REMEMBERED, _LONGER = 256, 1
#: The margin before so many rounds are known is not smaller than this.
_FIRST, _FEW = 0.04, 64
#: By how much of itself a prediction is enlarged at most: more scatter than that is not the device's but its host's,
#: which takes processors away or slows them. Smaller chunks hardly help against it, and leave prompts unread for so
#: long that the decodes beside them grow by what was saved.
#: And by how much more one round can ask for: one that was far out tells of a pause or of a wrong model, which the
#: margin must not be made to cover at once.
_MOST, _STEP = 0.2, 0.02


class Margin:
    """A high quantile of the excess of recent rounds over what was predicted of them, relative to that."""

    __slots__ = ("_next", "_order", "_recent", "value")

    def __init__(self) -> None:
        self.value = _FIRST  #: predictions are enlarged by this part of themselves
        self._recent: list[float] = []  #: in a ring
        self._order: list[float] = []  #: the same, sorted
        self._next = 0

    def learn(self, excess: float) -> None:
        """A round was longer by ``excess`` of what was predicted of it (shorter, if negative)."""
        noted = min(excess, self.value + _STEP)
        if len(self._recent) < _REMEMBERED:
            self._recent.append(noted)
        else:
            del self._order[bisect_left(self._order, self._recent[self._next])]
            self._recent[self._next] = noted
            self._next = (self._next + 1) % _REMEMBERED
        insort(self._order, noted)
        known = len(self._order)
        asked = self._order[known - 1 - _LONGER] if known > _LONGER else 0.0
        self.value = min(max(asked, _FIRST if known < _FEW else 0.0), _MOST)
