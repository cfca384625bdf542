"""From the core's deliveries to each client's stream of ticks. Sans-I/O; called by the server and by tests.

A client's stream is ordered, and ownership of slots travels in it: a slot belongs to a request from the tick of its
first token until its end, so a token can never reach another request. An iteration whose rows all belong to one
client (a gateway, usually) is passed on as it came, without touching a row. One of many clients is taken apart in one
pass over its rows; a tick that is a single token, of which there are thousands a second then, is put together from
bytes that lie ready.
"""

from __future__ import annotations

from .core.events import Delivered, Ended
from .core.packing import pack_u16, pack_u64
from .core.sequence import Sequence
from .wire import NO_SLOT, End, Logprobs, Tick, TokenLogprobs, encode

#: Shared by the ticks in which there are none.
_NO_ENDS: list[End] = []
_NO_LOGPROBS: list[TokenLogprobs] = []
#: The bitmaps that have a single bit, by its slot: as many as were needed.
_SINGLE: list[bytes] = []
#: The encoded fields of a tick with one token, from ``live`` up to the token itself, by its slot.
_BEFORE_TOKEN: list[bytes] = []
#: The numbers of a byte.
_BYTES = [bytes((value,)) for value in range(256)]


class Stream:
    """One client's stream of ticks."""

    __slots__ = ("first", "more", "owner", "sequence")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.sequence = 0  #: number of the next tick
        #: Its rows of the iteration at hand: the first slot (-1: none so far) and the others, if there are any.
        self.first = -1
        self.more: list[int] | None = None


class Rows:
    """Who owns the slots of one replica, as the clients were told: request and stream, by slot."""

    __slots__ = ("owned", "streams")

    def __init__(self) -> None:
        self.owned: list[Sequence | None] = []
        self.streams: list[Stream | None] = []

    def set(self, slot: int, seq: Sequence, stream: Stream) -> None:
        while len(self.owned) <= slot:
            self.owned.append(None)
            self.streams.append(None)
        self.owned[slot] = seq
        self.streams[slot] = stream

    def get(self, slot: int) -> Sequence | None:
        return self.owned[slot] if 0 <= slot < len(self.owned) else None

    def clear(self, slot: int) -> None:
        self.owned[slot] = None
        self.streams[slot] = None


class _News:
    """What an iteration brings besides tokens, by client."""

    __slots__ = ("ends", "logprobs", "owners", "starts")

    def __init__(self, delivered: Delivered) -> None:
        self.owners: dict[int, None] = {}
        self.starts: dict[int, list[tuple[int, Sequence]]] = {}
        self.ends: dict[int, list[Ended]] = {}
        self.logprobs: dict[int, list[tuple[Sequence, Logprobs]]] = {}
        for start in delivered.starts:
            self.owners[start[1].owner] = None
            self.starts.setdefault(start[1].owner, []).append(start)
        for ended in delivered.ends:
            self.owners[ended.seq.owner] = None
            self.ends.setdefault(ended.seq.owner, []).append(ended)
        for row in delivered.logprobs:
            self.owners[row[0].owner] = None
            self.logprobs.setdefault(row[0].owner, []).append(row)


class Fanout:
    """Which request owns which slot, and where each client's stream is."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self._streams: dict[int, Stream] = {}

    @property
    def clients(self) -> list[int]:
        """The clients that something is kept of."""
        return list(self._streams)

    def forget(self, owner: int) -> None:
        """The client is gone."""
        self._streams.pop(owner, None)
        for rows in self._rows.values():
            for slot, seq in enumerate(rows.owned):
                if seq is not None and seq.owner == owner:
                    rows.clear(slot)

    def sent(self, owner: int) -> int:
        """How many ticks were made for this client: the number of the next one."""
        stream = self._streams.get(owner)
        return 0 if stream is None else stream.sequence

    def renumber(self, owner: int, sequence: int) -> None:
        """The next tick for this client is number ``sequence``: some were merged."""
        self._stream(owner).sequence = sequence

    def owned_by(self, owner: int) -> dict[tuple[int, int], int]:
        """The slots of this client's requests: replica and slot to key."""
        return {
            (replica, slot): seq.key
            for replica, rows in self._rows.items()
            for slot, seq in enumerate(rows.owned)
            if seq is not None and seq.owner == owner
        }

    def frames(self, delivered: Delivered) -> list[tuple[int, bytes]]:
        """One encoded ``Tick`` for each client concerned."""
        frames: list[tuple[int, bytes]] = []
        if delivered.sole >= 0:
            for owner, told in self.ticks(delivered):
                frames.append((owner, encode(told)))
            return frames
        rows = self._begin(delivered)
        news = _News(delivered)
        concerned = self._concerned(delivered, rows)
        ids = bytes(delivered.ids)
        step = _encoded(delivered.step)
        # No starts, no ends, the replica, no log-probabilities.
        rest = b"\xc4\x00\xc4\x00\x90" + _encoded(max(delivered.replica, 0)) + b"\x90"
        for stream in concerned:
            slot = stream.first
            if slot < 0 or stream.more is not None or stream.owner in news.owners:
                tick = self._told(stream, delivered, rows, news, ids)
                if tick is not None:
                    frames.append((stream.owner, encode(tick)))
                continue
            stream.first = -1
            sequence = stream.sequence
            stream.sequence = sequence + 1
            if slot >= len(_BEFORE_TOKEN):
                _prepare(slot)
            token = ids[4 * slot : 4 * slot + 4]
            if 256 <= sequence < 1 << 16:
                high, low = _BYTES[sequence >> 8], _BYTES[sequence & 255]
                parts = [b"\x9b\x31\xcd", high, low, step, _BEFORE_TOKEN[slot], token, rest]
            else:
                parts = [b"\x9b\x31", _encoded(sequence), step, _BEFORE_TOKEN[slot], token, rest]
            frames.append((stream.owner, b"".join(parts)))
        return frames

    def ticks(self, delivered: Delivered) -> list[tuple[int, Tick]]:
        """The same, not encoded."""
        rows = self._begin(delivered)
        live, sole = delivered.live, delivered.sole
        if sole >= 0:
            ends, starts, logprobs = delivered.ends, delivered.starts, delivered.logprobs
            if not ends and not starts and not logprobs:
                if not any(live):
                    return []  # all rows are void, perhaps because the client is gone
                return [(sole, self._tick(self._stream(sole), delivered, live, True, delivered.ids))]
            if _all_of(sole, ends, logprobs):
                told = self._ends(ends, rows)
                client = self._stream(sole)
                return [(sole, self._tick(client, delivered, live, True, delivered.ids, starts, told, logprobs))]
        concerned, news, ids = self._concerned(delivered, rows), _News(delivered), bytes(delivered.ids)
        ticks: list[tuple[int, Tick]] = []
        for stream in concerned:
            tick = self._told(stream, delivered, rows, news, ids)
            if tick is not None:
                ticks.append((stream.owner, tick))
        return ticks

    def _begin(self, delivered: Delivered) -> Rows:
        """Note who owns slots from this iteration on."""
        rows = self._rows.get(delivered.replica)
        if rows is None:
            rows = self._rows[delivered.replica] = Rows()
        for slot, seq in delivered.starts:
            rows.set(slot, seq, self._stream(seq.owner))
        return rows

    def _stream(self, owner: int) -> Stream:
        stream = self._streams.get(owner)
        if stream is None:
            stream = self._streams[owner] = Stream(owner)
        return stream

    def _told(self, stream: Stream, delivered: Delivered, rows: Rows, news: _News, ids: bytes) -> Tick | None:
        """One client's tick, if there is something to be told."""
        owner = stream.owner
        live, mine = _taken(stream, ids)
        if owner not in news.owners:
            return self._tick(stream, delivered, live, False, mine)
        ends = self._ends(news.ends[owner], rows) if owner in news.ends else None
        logprobs = news.logprobs.get(owner)
        if not (mine or ends or logprobs):
            return None
        self._streams[owner] = stream
        return self._tick(stream, delivered, live, False, mine, news.starts.get(owner), ends, logprobs)

    def _concerned(self, delivered: Delivered, rows: Rows) -> list[Stream]:
        """The streams of the iteration's clients, each with its rows; by their first rows, then those without any."""
        streams = rows.streams
        found: list[Stream] = []
        base = 0
        for byte in bytes(delivered.live):
            bits: int = byte
            while bits:
                low = bits & -bits
                bits ^= low
                slot = base + low.bit_length() - 1
                stream = streams[slot]
                assert stream is not None, "a token of a slot that nobody owns"
                if stream.first < 0:
                    stream.first = slot
                    found.append(stream)
                elif stream.more is None:
                    stream.more = [slot]
                else:
                    stream.more.append(slot)
            base += 8
        others: dict[int, None] = {}
        for ended in delivered.ends:
            others[ended.seq.owner] = None
        for seq, _ in delivered.logprobs:
            others[seq.owner] = None
        for owner in others:
            stream = self._streams.get(owner)
            if stream is None:
                # Known from its first tick on, which this iteration may not bring.
                stream = Stream(owner)
            if stream.first < 0:
                found.append(stream)
        return found

    def _tick(
        self,
        stream: Stream,
        delivered: Delivered,
        live: bytes | bytearray,
        dense: bool,
        ids: bytes | memoryview,
        starts: list[tuple[int, Sequence]] | None = None,
        ends: list[End] | None = None,
        logprobs: list[tuple[Sequence, Logprobs]] | None = None,
    ) -> Tick:
        sequence = stream.sequence
        stream.sequence = sequence + 1
        slots = keys = b""
        if starts:
            slots = pack_u16([slot for slot, _ in starts])
            keys = pack_u64([seq.key for _, seq in starts])
        # MessagePack's encoder takes any buffer; the copy would cost more than the rest.
        return Tick(
            sequence,
            delivered.step,
            live,  # type: ignore[arg-type]
            dense,
            ids,  # type: ignore[arg-type]
            slots,
            keys,
            ends or _NO_ENDS,
            max(delivered.replica, 0),
            _told_logprobs(logprobs) if logprobs else _NO_LOGPROBS,
        )

    def _ends(self, ended: list[Ended], rows: Rows) -> list[End]:
        told: list[End] = []
        for end in ended:
            seq, slot = end.seq, end.slot
            owns = rows.get(slot) is seq
            if owns:
                rows.clear(slot)
            elif end.reason == "paused":
                continue
            told.append(
                End(
                    seq.key,
                    slot if owns else NO_SLOT,
                    end.reason,
                    seq.known - seq.prompt_len,
                    seq.cached,
                    end.message,
                )
            )
        return told


def _all_of(owner: int, ends: list[Ended], logprobs: list[tuple[Sequence, Logprobs]]) -> bool:
    """Whether those are this client's only."""
    for ended in ends:
        if ended.seq.owner != owner:
            return False
    return not logprobs or all(seq.owner == owner for seq, _ in logprobs)


def _told_logprobs(logprobs: list[tuple[Sequence, Logprobs]]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(seq.key, row.start, row.values, row.ranks, row.top_ids, row.top_values) for seq, row in logprobs
    ]


def _taken(stream: Stream, ids: bytes) -> tuple[bytes, bytes]:
    """Bitmap and ids of the stream's rows, which are taken from it."""
    first, more = stream.first, stream.more
    if first < 0:
        return b"", b""
    stream.first = -1
    if more is None:
        if first >= len(_SINGLE):
            _prepare(first)
        return _SINGLE[first], ids[4 * first : 4 * first + 4]
    stream.more = None
    more.insert(0, first)
    bitmap = bytearray((more[-1] >> 3) + 1)
    for slot in more:
        bitmap[slot >> 3] |= 1 << (slot & 7)
    return bytes(bitmap), b"".join([ids[4 * slot : 4 * slot + 4] for slot in more])


def _prepare(most: int) -> None:
    """Have what ticks with a single token are made of, up to slot ``most``."""
    for slot in range(len(_SINGLE), most + 1):
        bitmap = bytes(slot >> 3) + bytes((1 << (slot & 7),))
        size = len(bitmap)
        header = bytes((0xC4, size)) if size < 256 else b"\xc5" + size.to_bytes(2, "big")
        _SINGLE.append(bitmap)
        # The bitmap, not dense, four bytes of ids.
        _BEFORE_TOKEN.append(header + bitmap + b"\xc2\xc4\x04")


def _encoded(number: int) -> bytes:
    """A number that is not negative in MessagePack, as short as can be."""
    if number < 128:
        return _BYTES[number]
    if number < 1 << 8:
        return b"\xcc" + number.to_bytes(1, "big")
    if number < 1 << 16:
        return b"\xcd" + number.to_bytes(2, "big")
    if number < 1 << 32:
        return b"\xce" + number.to_bytes(4, "big")
    return b"\xcf" + number.to_bytes(8, "big")
