"""The order ``fair``: each tenant's service is counted, and who has had least is next (the virtual token counter of
Sheng et al. 2024, "Fairness in Serving Large Language Models", Algorithm 2).

A prompt token that is computed costs 1, an output token 2, divided by the tenant's weight. A prompt is charged when
it is admitted, with its first output token; tokens from the prefix cache and what is computed again cost nothing.
Output is charged by counts: a tenant's sequences in a lane all gain a token when the lane ticks, so its counter
follows from the tick and nothing is added up per token. A tenant that comes to wait again is lifted to the least
counter of those that wait, so that nobody saves up service.

Of the running, those of the tenant with the largest counter are preempted first, the youngest first. Beyond the
paper: a tenant that is ahead of a waiting one by more than all tokens that the block pools hold makes way for it. So
two tenants that both wait never get further apart, whatever the blocks do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, nsmallest
from operator import attrgetter
from typing import TYPE_CHECKING

from .sequence import Sequence
from .waiting import Running, WaitingQueue

if TYPE_CHECKING:
    from .lane import Lane

PROMPT_COST = 1.0
OUTPUT_COST = 2.0
#: Counters of tenants that have nothing here are kept for so many.
MAX_IDLE = 65_536

_order = attrgetter("order")


class Account:
    """What a tenant has had, in token costs divided by its weight."""

    __slots__ = ("_counts", "_outputs", "_spent", "name", "sequences", "waiting", "weight")

    def __init__(self, name: str | int, weight: float, spent: float) -> None:
        self.name = name
        self.weight = weight
        self.sequences = 0  #: that wait or run, on any replica
        self.waiting = 0  #: that wait
        self._spent = spent
        self._outputs = 0  #: tokens given in lanes, less the tick of each lane for every sequence that is in it
        self._counts: dict[Lane, int] = {}

    @property
    def counter(self) -> float:
        """Never falls."""
        outputs = self._outputs
        for lane, count in self._counts.items():
            outputs += count * lane.tick
        return self._spent + outputs * OUTPUT_COST / self.weight

    @property
    def decoding(self) -> int:
        """Its sequences that are in a lane."""
        return sum(self._counts.values())

    def charge(self, prompt: int, output: int) -> None:
        self._spent += (prompt * PROMPT_COST + output * OUTPUT_COST) / self.weight

    def lift(self, least: float) -> None:
        """Count at least ``least``."""
        counter = self.counter
        if counter < least:
            self._spent += least - counter

    def joined(self, lane: Lane) -> None:
        """One of its sequences decodes in ``lane`` from the lane's next tick on."""
        self._counts[lane] = self._counts.get(lane, 0) + 1
        self._outputs -= lane.tick

    def left(self, lane: Lane) -> None:
        """One of them no longer does."""
        self._outputs += lane.tick
        count = self._counts[lane] - 1
        if count:
            self._counts[lane] = count
        else:
            del self._counts[lane]


class Ledger:
    """The accounts of all tenants, on whichever replica they are served."""

    def __init__(self, weights: Iterable[tuple[str, float]]) -> None:
        self.accounts: dict[str | int, Account] = {}
        self.queues: list[FairQueue] = []
        self.pool_tokens = 0  #: that the block pools hold
        self.admissions = 0
        self.floor = 0.0  #: the least counter of those that waited at the last admission
        self.least_weight = 1.0
        self._weights: dict[str, float] = {}
        for name, weight in weights:
            self._weights[name] = weight
            self.least_weight = min(self.least_weight, weight)
        self._idle: list[tuple[float, int, Account]] = []
        self._retired = 0

    def open(self, tenant: str, owner: int) -> Account:
        """The account that a request is on: its tenant's, or that of its client, if it names none."""
        name: str | int = tenant or owner
        account = self.accounts.get(name)
        if account is None:
            weight = self._weights.get(tenant, 1.0)
            account = self.accounts[name] = Account(name, weight, self.floor)
        account.sequences += 1
        return account

    def close(self, seq: Sequence) -> None:
        """``seq`` has ended. A counter that ``floor`` has overtaken is that of a new tenant and need not be kept."""
        account = seq.account
        if account is None:
            return
        seq.account = None
        account.sequences -= 1
        idle = self._idle
        if not account.sequences:
            self._retired += 1
            heappush(idle, (account.counter, self._retired, account))
        while idle and (idle[0][0] <= self.floor or len(idle) > MAX_IDLE):
            counter, _, gone = heappop(idle)
            if not gone.sequences and gone.counter == counter and self.accounts.get(gone.name) is gone:
                del self.accounts[gone.name]

    def least(self) -> float:
        """The least counter of those that wait; if nobody does, of those that waited last."""
        found = [queue.least() for queue in self.queues if len(queue)]
        return min(found) if found else self.floor


class Share:
    """A tenant's sequences on one replica."""

    __slots__ = ("account", "entry", "items", "running")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.items: list[Sequence] = []  #: waiting, by arrival
        self.running = Running()
        self.entry: tuple[float, int] | None = None  #: its key in the queue's heap, perhaps outdated

    def key(self) -> tuple[float, int]:
        """The next of its waiting sequences comes before those of shares with larger keys."""
        return self.account.counter, self.items[0].order


class FairQueue(WaitingQueue):
    """By tenant. The heap of shares is put right from its top when it is asked: counters only grow."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._count = 0
        self._shares: dict[Account, Share] = {}
        self._heap: list[tuple[tuple[float, int], int, Share]] = []
        self._pushes = 0
        ledger.queues.append(self)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        shares = [share for share in self._shares.values() if share.items]
        shares.sort(key=Share.key)
        return iter([seq for share in shares for seq in share.items])

    def __contains__(self, seq: object) -> bool:
        return any(seq in share.items for share in self._shares.values())

    def push(self, seq: Sequence) -> None:
        self.tokens += len(seq.tokens) >> 2
        account = seq.account
        assert account is not None
        if not account.waiting:
            account.lift(self._ledger.least())
        account.waiting += 1
        self._count += 1
        share = self._share(account)
        items = share.items
        if not items or items[-1].order < seq.order:
            items.append(seq)
        else:
            insort(items, seq, key=_order)
        if items[0] is seq:
            self._enter(share)

    def remove(self, seq: Sequence) -> None:
        self.note_departure(seq)
        account = seq.account
        assert account is not None
        account.waiting -= 1
        self._count -= 1
        share = self._shares[account]
        items = share.items
        del items[0 if items[0] is seq else bisect_left(items, seq.order, key=_order)]
        self._tidy(share)

    def head(self) -> Sequence:
        return self._top().items[0]

    def tail(self) -> Sequence:
        return max((share for share in self._shares.values() if share.items), key=Share.key).items[-1]

    def least(self) -> float:
        """The least counter of those that wait; there must be one."""
        return self._top().account.counter

    def behind(self, most: int) -> list[Sequence]:
        """The first of every tenant, then what is behind those."""
        keyed = [(*share.key(), share) for share in self._shares.values() if share.items]
        shares = [share for _, _, share in nsmallest(most + 1, keyed)]
        found = [share.items[0] for share in shares[1:]]
        for share in shares:
            if len(found) >= most:
                break
            found += share.items[1 : 1 + most - len(found)]
        return found

    def close(self) -> None:
        for account, share in self._shares.items():
            account.waiting -= len(share.items)
        self._ledger.queues.remove(self)

    # ---- what runs -------------------------------------------------------------------------------------------

    def started(self, seq: Sequence) -> None:
        ledger, account = self._ledger, seq.account
        assert account is not None
        counter = account.counter
        least = min(counter, self.least()) if self._count else counter
        ledger.floor = max(ledger.floor, least)
        # Chunks of prompts are planned in the order in which they were admitted.
        seq.place = (float(ledger.admissions), seq.order)
        ledger.admissions += 1
        account.charge(0 if seq.generation else max(0, seq.prompt_len - seq.computed), 1)
        self._share(account).running.add(0.0, seq.order, seq)

    def left(self, seq: Sequence) -> None:
        account = seq.account
        assert account is not None
        share = self._shares[account]
        share.running.count -= 1
        self._tidy(share)

    def last(self) -> Sequence:
        found: Sequence | None = None
        most = (-1.0, -1)
        for share in self._shares.values():
            if share.running.count:
                seq = share.running.last()
                place = (share.account.counter, seq.order)
                if place > most:
                    found, most = seq, place
        assert found is not None
        return found

    def outranks(self, head: Sequence) -> bool:
        account = head.account
        assert account is not None
        most = self._bound(account)
        return any(share.running.count and share.account.counter > most for share in self._shares.values())

    def victims(self, head: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        account = head.account
        assert account is not None
        most = self._bound(account)
        found: list[tuple[float, int, Sequence]] = []
        for share in self._shares.values():
            counter = share.account.counter
            if share.running.count and counter > most:
                found += [(-counter, -seq.order, seq) for seq in running if seq.account is share.account]
        found.sort()
        return [seq for _, _, seq in found]

    # ---- inside ----------------------------------------------------------------------------------------------

    def _bound(self, account: Account) -> float:
        """Whose counter is larger makes way for ``account``."""
        return account.counter + OUTPUT_COST * self._ledger.pool_tokens / self._ledger.least_weight

    def _share(self, account: Account) -> Share:
        share = self._shares.get(account)
        if share is None:
            share = self._shares[account] = Share(account)
        return share

    def _tidy(self, share: Share) -> None:
        if not share.items and not share.running.count:
            del self._shares[share.account]

    def _enter(self, share: Share) -> None:
        """Note the share's present key; older entries of it no longer count."""
        share.entry = share.key()
        self._pushes += 1
        heappush(self._heap, (share.entry, self._pushes, share))

    def _top(self) -> Share:
        """The share whose turn it is."""
        heap = self._heap
        while True:
            entry, _, share = heap[0]
            if share.entry != entry:
                heappop(heap)
            elif not share.items:
                heappop(heap)
                share.entry = None
            elif share.key() != entry:
                heappop(heap)
                self._enter(share)
            else:
                return share
