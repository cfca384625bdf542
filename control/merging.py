"""What waits for a client that reads slower than it is written to. Sans-I/O.

A client's queue holds so many messages. Once it is full, nothing more is put into it before there is room: ticks are
merged here into few messages (``Merged``), token by token, so that what waits is bounded by tokens; of messages that
only describe the present (limits, a subscribed status) the newest is kept; answers are kept as they are. Nothing is
left out, and a client that has waited past a limit is cut off by who calls.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

from .wire import NO_SLOT, End, Merged, Owned, Run, Tick, TokenLogprobs, encode

#: Tokens that may wait for one client. Log-probabilities and ends count for the tokens that take as many bytes.
MAX_WAITING_TOKENS = 1 << 20
#: Answers that may wait for one client, and their bytes.
MAX_WAITING_ANSWERS = 4096
MAX_WAITING_BYTES = 8 << 20
#: A client into whose queue nothing could be put for this many seconds is cut off.
UNREAD_S = 30.0
#: How soon a full queue is tried again, in seconds, and the slowest retry.
RETRY_S = 0.02
RETRY_MAX_S = 0.25

#: What an end, or the start of a run, counts for.
_ENTRY_TOKENS = 16

_BITS = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))


class _Segment:
    """Ticks merged into one message. A request that ends in it cannot come back in it."""

    __slots__ = ("ends", "logprobs", "owned", "runs", "tokens")

    def __init__(self) -> None:
        self.runs: dict[int, bytearray] = {}
        self.ends: dict[int, End] = {}
        self.logprobs: list[TokenLogprobs] = []
        #: Ownership after it; None while it is the last one.
        self.owned: dict[tuple[int, int], int] | None = None
        self.tokens = 0


class Waiting:
    """What one client has not been told. ``owned``: replica and slot to key, as after the tick given with it.

    The tick is the first that found no room, and is the first to be merged; or None, if an answer was the first.
    """

    def __init__(self, now: float, owned: dict[tuple[int, int], int], tick: Tick | None, sequence: int) -> None:
        #: Number of the next message of the client's stream of ticks.
        self.sequence = sequence
        #: Since when nothing could be sent.
        self.since = now
        self.due = now + RETRY_S
        self.tokens = 0
        self.ticks = 0
        self._delay = RETRY_S
        self._owned = dict(owned)
        self._segments: deque[_Segment] = deque()
        self._answers: deque[bytes] = deque()
        self._answer_bytes = 0
        self._newest: dict[str, bytes] = {}
        if tick is not None:
            for end in tick.ends:
                if end.slot != NO_SLOT:
                    self._owned[tick.replica, end.slot] = end.key
            self.hold(tick)

    def answer(self, frame: bytes) -> None:
        """Keep an answer to something that the client has sent."""
        self._answers.append(frame)
        self._answer_bytes += len(frame)

    def describe(self, what: str, frame: bytes) -> None:
        """Keep the newest description of ``what``."""
        self._newest[what] = frame

    def hold(self, tick: Tick) -> None:
        """Merge a tick. Its own number is of no importance: messages are numbered when they are sent."""
        self.ticks += 1
        owned, replica = self._owned, tick.replica
        segment = self._segments[-1] if self._segments else self._next()
        if tick.start_slots:
            keys = memoryview(tick.start_keys).cast("Q")
            for slot, key in zip(memoryview(tick.start_slots).cast("H"), keys, strict=True):
                if key in segment.ends:
                    segment = self._next()
                owned[replica, slot] = key
        runs = segment.runs
        before = segment.tokens
        data, dense, row = memoryview(tick.ids), tick.dense, 0
        for base, byte in enumerate(tick.live):
            for bit in _BITS[byte]:
                slot = (base << 3) + bit
                at = (slot if dense else row) << 2
                row += 1
                key = owned[replica, slot]
                run = runs.get(key)
                if run is None:
                    run = runs[key] = bytearray()
                    segment.tokens += _ENTRY_TOKENS
                run += data[at : at + 4]
        segment.tokens += row
        for told in tick.logprobs:
            segment.logprobs.append(told)
            segment.tokens += _ENTRY_TOKENS + 2 * (len(told.values) + len(told.top_ids)) // 4
        self.tokens += segment.tokens - before
        for end in tick.ends:
            if end.slot != NO_SLOT:
                owned.pop((replica, end.slot), None)
            if end.reason == "paused":
                continue
            if end.key in segment.ends:
                segment = self._next()
            segment.ends[end.key] = End(
                end.key, NO_SLOT, end.reason, end.output_tokens, end.cached_tokens, end.message
            )
            segment.tokens += _ENTRY_TOKENS
            self.tokens += _ENTRY_TOKENS

    def _next(self) -> _Segment:
        if self._segments:
            self._segments[-1].owned = dict(self._owned)
        segment = _Segment()
        self._segments.append(segment)
        return segment

    def overdue(self, now: float) -> str | None:
        """Why this client must be cut off, or None."""
        if self.tokens > MAX_WAITING_TOKENS:
            return f"{self.tokens} tokens waited for it, at most {MAX_WAITING_TOKENS} may"
        if len(self._answers) > MAX_WAITING_ANSWERS:
            return f"{len(self._answers)} answers waited for it, at most {MAX_WAITING_ANSWERS} may"
        if self._answer_bytes > MAX_WAITING_BYTES:
            return f"{self._answer_bytes} bytes of answers waited for it, at most {MAX_WAITING_BYTES} may"
        if now - self.since > UNREAD_S:
            return f"it has read nothing for {now - self.since:.0f} s, at most {UNREAD_S:.0f} s are waited"
        return None

    def flush(self, send: Callable[[bytes], bool], now: float) -> bool:
        """Send what there is while ``send`` finds room. True if nothing is left, and ticks may go out again as they
        are, from number ``sequence`` on."""
        while self._next_sent(send):
            self.since = now
            self._delay = RETRY_S
        if not (self._newest or self._answers or self._segments):
            return True
        self.due = now + self._delay
        self._delay = min(2 * self._delay, RETRY_MAX_S)
        return False

    def _next_sent(self, send: Callable[[bytes], bool]) -> bool:
        if self._newest:
            what = next(iter(self._newest))
            if not send(self._newest[what]):
                return False
            del self._newest[what]
        elif self._answers:
            if not send(self._answers[0]):
                return False
            self._answer_bytes -= len(self._answers.popleft())
        elif self._segments:
            segment = self._segments[0]
            if not send(encode(self._message(segment))):
                return False
            self.sequence += 1
            self.tokens -= segment.tokens
            self._segments.popleft()
        else:
            return False
        return True

    def _message(self, segment: _Segment) -> Merged:
        by_replica: dict[int, tuple[array[int], array[int]]] = {}
        for (replica, slot), key in (self._owned if segment.owned is None else segment.owned).items():
            slots, keys = by_replica.setdefault(replica, (array("H"), array("Q")))
            slots.append(slot)
            keys.append(key)
        return Merged(
            self.sequence,
            [Run(key, bytes(ids)) for key, ids in segment.runs.items()],
            list(segment.ends.values()),
            [Owned(replica, slots.tobytes(), keys.tobytes()) for replica, (slots, keys) in by_replica.items()],
            segment.logprobs,
        )
