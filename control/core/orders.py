"""The orders in which requests are admitted: where a request stands, and the queue that goes with it."""

from __future__ import annotations

from ..wire import Submit
from .events import Limits
from .fair import FairQueue, Ledger
from .sequence import Sequence
from .waiting import PriorityQueue, WaitingQueue


def assign(seq: Sequence, submit: Submit, limits: Limits, ledger: Ledger | None) -> None:
    """Give ``seq``, which has just come, its place in the order.

    ``priority``: by arrival, and every step of priority is worth ``patience`` seconds of waiting: a sort key that
    never changes, and in which everything that waits becomes more urgent than what comes. ``deadline``: the earliest
    first; without one, as if it were ``patience`` seconds away.
    """
    seq.priority = submit.priority
    rank = 0.0
    if limits.admission == "priority":
        rank = seq.arrived + submit.priority * limits.patience
    elif limits.admission == "deadline":
        rank = seq.arrived + (submit.deadline_ms / 1000 if submit.deadline_ms else limits.patience)
    elif ledger is not None:
        seq.account = ledger.open(submit.tenant, seq.owner)
    seq.place = (rank, seq.order)


def make_ledger(limits: Limits) -> Ledger | None:
    """The accounts, if the order needs them."""
    return Ledger(limits.tenant_weights) if limits.admission == "fair" else None


def make_queue(limits: Limits, ledger: Ledger | None) -> WaitingQueue:
    """An empty queue of the order."""
    if ledger is not None:
        return FairQueue(ledger)
    return PriorityQueue() if limits.admission == "priority" else WaitingQueue()
