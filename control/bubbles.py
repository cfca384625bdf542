"""The bubble account: why a stage was idle between two of its iterations, to the microsecond. Sans-I/O.

A stage's result says how long it was idle before the iteration, and for which part of that the plan had not come. The
rest was a wait: for the hidden states of the stage before it, on the first stage for sampled ids. Causes:

``no_work``    the core had nothing to plan
``plan_late``  the core had something to plan, but the plan had not come
``pb1``        a wait for a batch that prefills more than the one before it, which prefills too
``pb2``        a wait for one of two batches of which only one prefills
``pb3``        a wait for a batch whose decodes read more

The three pipeline bubbles are those of the Sarathi-Serve paper, section 3.3. The rules, in this order:

1. While the plan had not come: ``no_work`` for as long as the core had had nothing to plan before it made this plan.
   While as many plans were out as may be, until the last stage had run the oldest of them, it was a wait for that
   batch (of a later stage, like any other wait). The rest is ``plan_late``.
2. A wait of the first stage: ``no_work`` as far as batches that there could have been would have filled it: one for
   each lane that the core had nothing for, as long as the iteration before. A wait of a later stage: as far as the
   stage before it was idle before the same iteration longer than this stage's plan was missing, the causes of that
   idle time. It travels down the pipeline.
3. The rest of a wait: by the terms of the time model in which the batch that was waited for (of a later stage the one
   that came, of the first the one whose ids were missing) costs more than the one that the stage ran before: prefill
   (``pb1`` if both prefill, else ``pb2``) and decodes (``pb3``). Where none costs more, the wait is one of transfers
   and of the hosts' work: it counts by what the two batches are, both prefill, one does, none does.
4. One stage waits for nobody: between plan and start lies only its own work, which counts as ``plan_late``.

Shares are rounded by largest remainders, so that the parts add up to the idle time. What lies before the first
iteration of an epoch is not between two. Of the workers' clocks only those of one replica are compared: its stages
are on one host, and share one. The core's drought is a duration by its own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .core.events import SendPlan
from .core.timing import Features, TimeModel
from .wire import Result

CAUSES = ("pb1", "pb2", "pb3", "plan_late", "no_work")
PB1, PB2, PB3, PLAN_LATE, NO_WORK = range(5)
#: Rounds for which a batch is remembered beside those that are out: ids that are missing are never older.
_ROUNDS = 4

#: Weights of the terms before a time model is fitted, as multiples of one pair of a prompt's token and a token that
#: it attends to: what a model of a few billion parameters gives on current devices, within a factor of a few.
PREFILL_TOKEN = 10_000
PREFILL_PAIR = 1
DECODE_TOKEN = 10_000
DECODE_KV_TOKEN = 2


@dataclass(slots=True, eq=False)
class Batch:
    """What is known of an iteration when it is planned, and how far the account of it has come.

    ``attention``: pairs of a chunk's token and a token that it attends to. ``dry_us``: how long the core had had
    nothing to plan. ``awaits``: the latest step whose ids its decodes take, -1 for none. ``spare``: lanes for which
    there was nothing to run.
    """

    chunk_tokens: int
    attention: float
    decodes: int
    kv_tokens: int
    dry_us: int = 0
    awaits: int = -1
    spare: int = 0
    ended_us: int = 0  #: on the last stage
    #: The idle time before it, by cause, of the latest stage that has been accounted.
    idle: list[int] | None = None
    #: Results by stage that came before the one of the stage before.
    early: dict[int, Result] = field(default_factory=dict[int, Result])


#: What a batch's prefill and its decodes cost, in any unit; the part that all batches have is left out.
Costs = Callable[[Batch], tuple[int, int]]


def declared_costs(batch: Batch) -> tuple[int, int]:
    """The costs of a batch by the declared weights."""
    return (
        PREFILL_TOKEN * batch.chunk_tokens + PREFILL_PAIR * int(batch.attention),
        DECODE_TOKEN * batch.decodes + DECODE_KV_TOKEN * batch.kv_tokens,
    )


def modelled_costs(model: TimeModel) -> Costs:
    """The costs by ``model``, in picoseconds; the declared ones until it is fitted."""

    def costs(batch: Batch) -> tuple[int, int]:
        if not model.fitted:
            return declared_costs(batch)
        features = Features(batch.chunk_tokens, batch.attention, batch.decodes, batch.kv_tokens)
        _, prefill, attention, decodes, kv_tokens = model.terms(features)
        return int((prefill + attention) * 1e12), int((decodes + kv_tokens) * 1e12)

    return costs


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` in parts proportional to ``weights`` (not all 0), by largest remainders; of equal ones the first."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    missing = total - sum(parts)
    if missing:
        order = sorted(range(len(parts)), key=lambda i: -(total * weights[i] % whole))
        for i in order[:missing]:
            parts[i] += 1
    return parts


@dataclass(slots=True)
class StageAccount:
    """Where a stage's time went, in microseconds, over the life of the control process.

    ``late`` counts iterations whose plan had not come when the one before ended, although the core had not been
    without work. ``causes`` is the idle time by cause, as in ``CAUSES``.
    """

    iterations: int = 0
    late: int = 0
    busy_us: int = 0
    causes: list[int] = field(default_factory=lambda: [0] * len(CAUSES))

    @property
    def idle_us(self) -> int:
        return sum(self.causes)


@dataclass(slots=True)
class _Stage:
    """One stage's place in the present epoch."""

    account: StageAccount
    step: int = -1  #: the last one accounted
    batch: Batch | None = None  #: of that step
    busy_us: int = 0  #: how long it took


class BubbleAccount:
    """The account of one replica over all its epochs: ``planned`` for each plan, ``returned`` for each result of a
    stage, in any order between stages."""

    def __init__(self, stages: int, costs: Costs = declared_costs) -> None:
        self.costs = costs
        self.accounts = [StageAccount() for _ in range(stages)]
        self._stages = [_Stage(account) for account in self.accounts]
        self._batches: dict[int, Batch] = {}
        self._kept = (_ROUNDS + 1) * stages + 1

    def begin(self) -> None:
        """A new epoch: steps begin at 0 again."""
        self._stages = [_Stage(account) for account in self.accounts]
        self._batches.clear()

    def planned(self, send: SendPlan) -> None:
        """A plan is on its way to every stage."""
        step = send.plan.step
        self._batches[step] = Batch(
            send.tokens - send.decodes,
            send.attention,
            send.decodes,
            send.kv_tokens,
            send.dry_us,
            send.awaits,
            send.spare,
        )
        self._batches.pop(step - self._kept, None)

    def returned(self, number: int, result: Result) -> None:
        """Stage ``number`` has run an iteration."""
        stages, step = self._stages, result.step
        batch = self._batches.get(step)
        if batch is None or step <= stages[number].step:
            return
        if number and stages[number - 1].step < step:
            batch.early[number] = result
            return
        self._take(number, batch, result)
        while batch.early and (following := batch.early.pop(number + 1, None)) is not None:
            number += 1
            self._take(number, batch, following)

    def _take(self, number: int, batch: Batch, result: Result) -> None:
        stage = self._stages[number]
        account, before = stage.account, stage.batch
        if before is None or not result.idle_us:
            batch.idle = None
        else:
            causes = batch.idle = self._split(number, before, batch, result)
            sums = account.causes
            for cause, part in enumerate(causes):
                sums[cause] += part
        # Whatever a worker says of its clock, a counter only grows.
        busy = max(0, result.ended_us - result.started_us)
        batch.ended_us = result.ended_us
        account.iterations += 1
        account.busy_us += busy
        stage.step, stage.batch, stage.busy_us = result.step, batch, busy

    def _split(self, number: int, before: Batch, batch: Batch, result: Result) -> list[int]:
        """The idle time before ``result`` by cause."""
        stage, above = self._stages[number], batch.idle
        idle, starved = result.idle_us, min(result.starved_us, result.idle_us)
        dry = min(starved, batch.dry_us)
        full = 0
        oldest = self._batches.get(result.step - len(self._stages) - 1) if len(self._stages) > 1 else None
        if starved > dry and oldest is not None:
            full = min(starved - dry, max(0, oldest.ended_us - (result.started_us - idle)))
        late = starved - dry - full
        causes = [0, 0, 0, late, dry]
        if late and not dry and not full:
            stage.account.late += 1
        wait = idle - starved
        if len(self._stages) == 1:
            causes[PLAN_LATE] += wait
            return causes
        awaited = batch
        if not number:
            if full and oldest is not None:
                self._compare(causes, full, oldest, before)
            awaited = self._batches.get(batch.awaits, batch)
            filled = min(wait, batch.spare * stage.busy_us)
            causes[NO_WORK] += filled
            wait -= filled
        else:
            wait += full
            if above is not None and wait:
                travelled = [max(0, above[cause] - causes[cause]) for cause in range(len(CAUSES))]
                taken = min(wait, sum(travelled))
                if taken:
                    for cause, part in enumerate(apportion(taken, travelled)):
                        causes[cause] += part
                    wait -= taken
        if wait:
            self._compare(causes, wait, awaited, before)
        return causes

    def _compare(self, causes: list[int], wait: int, awaited: Batch, before: Batch) -> None:
        """Split a wait for ``awaited`` by what it has more of than ``before``."""
        prefilling = (awaited.chunk_tokens > 0) + (before.chunk_tokens > 0)
        kind = PB1 if prefilling == 2 else PB2
        (prefill, decode), (prefill_before, decode_before) = self.costs(awaited), self.costs(before)
        prefill, decode = max(0, prefill - prefill_before), max(0, decode - decode_before)
        if prefill and decode:
            parts = apportion(wait, (prefill, decode))
            causes[kind] += parts[0]
            causes[PB3] += parts[1]
        elif prefill:
            causes[kind] += wait
        elif decode:
            causes[PB3] += wait
        else:
            causes[kind if prefilling else PB3] += wait
