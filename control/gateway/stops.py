"""Finds stop strings in text that comes in pieces, and never lets out a part of one.

The text ends just before the match that begins first, as a search of the whole text would find it. So text is
held back while it may be the beginning of a stop string, and a match that is complete waits for one that began
earlier and may still become complete. Each stop string is followed by a Knuth-Morris-Pratt automaton: the cost is
per character and per stop string, whatever their lengths.
"""

from collections.abc import Sequence


class _Follower:
    """How much of one stop string the text ends with."""

    __slots__ = ("_failure", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        failure = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = failure[length - 1]
            if text[index] == text[length]:
                length += 1
            failure[index] = length
        self._failure = failure

    def first_match(self, piece: str) -> int | None:
        """Follow ``piece``; the index in it just past the first complete match, if there is one."""
        text, failure, matched = self.text, self._failure, self.matched
        size = len(text)
        found: int | None = None
        for index, character in enumerate(piece):
            if matched == size:
                matched = failure[matched - 1]
            while matched and character != text[matched]:
                matched = failure[matched - 1]
            if character == text[matched]:
                matched += 1
                if matched == size and found is None:
                    found = index + 1
        self.matched = matched
        return found


class StopFinder:
    """The stop strings of one request. ``feed`` text in order until ``stopped``, then or at the end ``finish``."""

    __slots__ = ("_best", "_followers", "_held", "_start", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._followers = [_Follower(stop) for stop in stops]
        #: Text not let out, and the position in the whole text where it starts.
        self._held = ""
        self._start = 0
        #: Where the earliest complete match begins, in the whole text.
        self._best: int | None = None
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that is certainly not part of a stop string. Nothing more comes once ``stopped``."""
        if not self._followers:
            return piece
        if self.stopped or not piece:
            return ""
        before = self._start + len(self._held)
        total = before + len(piece)
        self._held += piece
        earliest = total
        for follower in self._followers:
            end = follower.first_match(piece)
            size = len(follower.text)
            if end is not None:
                start = before + end - size
                if self._best is None or start < self._best:
                    self._best = start
            elif follower.matched < size:
                earliest = min(earliest, total - follower.matched)
        if self._best is not None and self._best <= earliest:
            return self._stop(self._best)
        cut = earliest - self._start
        out = self._held[:cut]
        self._held = self._held[cut:]
        self._start = earliest
        return out

    def finish(self) -> str:
        """The text has ended: what was held back, up to a match if one is complete."""
        if self.stopped:
            return ""
        if self._best is not None:
            return self._stop(self._best)
        out = self._held
        self._held = ""
        return out

    def _stop(self, position: int) -> str:
        self.stopped = True
        out = self._held[: position - self._start]
        self._held = ""
        return out
