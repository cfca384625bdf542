"""From the core's deliveries to each client's stream of ticks. Sans-I/O; called by the server and by tests.

A client's stream is ordered, and ownership of slots travels in it: a slot belongs to a request from the tick of its
first token until its end, so a token can never reach another request. An iteration whose rows all belong to one
client (a gateway, usually) is passed on as it came, without touching a row.
"""

from __future__ import annotations

from array import array

from .core.events import Delivered, Ended
from .core.packing import pack_u16, pack_u32
from .core.sequence import Sequence
from .wire import NO_SLOT, End, Logprobs, Tick, TokenLogprobs


class Fanout:
    """Which request owns which slot, as the clients were told."""

    def __init__(self) -> None:
        self._owned: dict[tuple[int, int], Sequence] = {}
        self._sent: dict[int, int] = {}

    def forget(self, owner: int) -> None:
        """The client is gone."""
        self._sent.pop(owner, None)
        for place in [place for place, seq in self._owned.items() if seq.owner == owner]:
            del self._owned[place]

    def sent(self, owner: int) -> int:
        """How many ticks were made for this client: the number of the next one."""
        return self._sent.get(owner, 0)

    def renumber(self, owner: int, sequence: int) -> None:
        """The next tick for this client is number ``sequence``: some were merged."""
        self._sent[owner] = sequence

    def owned_by(self, owner: int) -> dict[tuple[int, int], int]:
        """The slots of this client's requests: replica and slot to key."""
        return {place: seq.key for place, seq in self._owned.items() if seq.owner == owner}

    def ticks(self, delivered: Delivered) -> list[tuple[int, Tick]]:
        """One message for each client concerned."""
        replica = delivered.replica
        owned = self._owned
        for slot, seq in delivered.starts:
            owned[replica, slot] = seq
        live, sole = delivered.live, delivered.sole
        if sole >= 0:
            if not delivered.ends and not delivered.starts and not delivered.logprobs:
                if not any(live):
                    return []  # all rows are void, perhaps because the client is gone
                return [(sole, self._tick(sole, delivered, live, True, delivered.ids))]
            if all(ended.seq.owner == sole for ended in delivered.ends) and all(
                seq.owner == sole for seq, _ in delivered.logprobs
            ):
                told = self._ends(delivered.ends, replica)
                starts, rows = delivered.starts, delivered.logprobs
                return [(sole, self._tick(sole, delivered, live, True, delivered.ids, starts, told, rows))]
        return self._split(delivered)

    def _split(self, delivered: Delivered) -> list[tuple[int, Tick]]:
        replica, live, owned = delivered.replica, delivered.live, self._owned
        slots: dict[int, list[int]] = {}
        for byte, bits in enumerate(live):
            while bits:
                low = bits & -bits
                bits ^= low
                slot = (byte << 3) + low.bit_length() - 1
                slots.setdefault(owned[replica, slot].owner, []).append(slot)
        starts: dict[int, list[tuple[int, Sequence]]] = {}
        for start in delivered.starts:
            starts.setdefault(start[1].owner, []).append(start)
        ends: dict[int, list[Ended]] = {}
        for ended in delivered.ends:
            ends.setdefault(ended.seq.owner, []).append(ended)
        logprobs: dict[int, list[tuple[Sequence, Logprobs]]] = {}
        for row in delivered.logprobs:
            logprobs.setdefault(row[0].owner, []).append(row)
        values = memoryview(delivered.ids).cast("I")
        ticks: list[tuple[int, Tick]] = []
        for owner in dict.fromkeys([*slots, *starts, *ends, *logprobs]):
            mine = slots.get(owner, [])
            bitmap = bytearray((mine[-1] >> 3) + 1 if mine else 0)
            for slot in mine:
                bitmap[slot >> 3] |= 1 << (slot & 7)
            told = self._ends(ends.get(owner, []), replica)
            rows = logprobs.get(owner)
            if not mine and not told and not rows:
                continue
            ids = pack_u32([values[slot] for slot in mine])
            ticks.append((owner, self._tick(owner, delivered, bitmap, False, ids, starts.get(owner), told, rows)))
        return ticks

    def _tick(
        self,
        owner: int,
        delivered: Delivered,
        live: bytes | bytearray,
        dense: bool,
        ids: bytes | memoryview,
        starts: list[tuple[int, Sequence]] | None = None,
        ends: list[End] | None = None,
        logprobs: list[tuple[Sequence, Logprobs]] | None = None,
    ) -> Tick:
        sequence = self._sent.get(owner, 0)
        self._sent[owner] = sequence + 1
        slots = keys = b""
        if starts:
            slots = pack_u16([slot for slot, _ in starts])
            keys = array("Q", [seq.key for _, seq in starts]).tobytes()
        # MessagePack's encoder takes any buffer; the copy would cost more than the rest.
        return Tick(
            sequence,
            delivered.step,
            live,  # type: ignore[arg-type]
            dense,
            ids,  # type: ignore[arg-type]
            slots,
            keys,
            ends or [],
            max(delivered.replica, 0),
            [
                TokenLogprobs(seq.key, row.start, row.values, row.ranks, row.top_ids, row.top_values)
                for seq, row in logprobs
            ]
            if logprobs
            else [],
        )

    def _ends(self, ended: list[Ended], replica: int) -> list[End]:
        told: list[End] = []
        for end in ended:
            seq = end.seq
            place = (replica, end.slot)
            owns = self._owned.get(place) is seq
            if owns:
                del self._owned[place]
            elif end.reason == "paused":
                continue
            told.append(
                End(
                    seq.key,
                    end.slot if owns else NO_SLOT,
                    end.reason,
                    seq.known - seq.prompt_len,
                    seq.cached,
                    end.message,
                )
            )
        return told
