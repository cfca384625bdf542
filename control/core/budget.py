"""The budget that keeps a promise in milliseconds: how much prefill an iteration may hold beside its decodes.

What a user sees is the *round*: the time from one tick of a lane to its next, as results come back to control. It is
predicted from the model of iteration time (``timing``). In a pipeline of p stages the results of a round's iterations
come one after the other, each in its own time; but the first one that is longer than those before it needs the
difference on every other stage, too, until the pipeline runs at the new pace (``passage``). Real rounds take more or
less than that (stages differ, there are hops and a host): that is learned too, as is the margin that the scatter of
rounds asks for. Each iteration then has the seconds that keep all rounds that it is part of inside the target of the
strictest class that decodes; what its decodes leave of them is room for chunks.

Every iteration is bounded by itself, from the model, and not by the outcome of earlier ones: so there is no loop that
could swing. What learns does so slowly, except when the device itself has changed.
"""

from __future__ import annotations

from collections import deque
from math import inf, sqrt
from typing import TYPE_CHECKING

from .margin import Margin
from .slo import Slo
from .timing import Estimator, Features, TimeModel, attention_work

if TYPE_CHECKING:
    from .inflight import InFlight
    from .policy import Chunks
    from .sequence import Sequence

#: Where the device has no tile of its own: the least chunk of a prompt that is being read, since fewer tokens read
#: the keys and values before them for little; and the least to begin one with, for which there must be room beside
#: decodes that will take longer as they grow.
LEAST_CHUNK, LEAST_START = 4, 8
#: Where decodes leave no room, one in so many iterations has prefill all the same: what fits but for the margin, and
#: of a prompt that is being read at least what takes this part of the time of the decodes. The iteration is missed
#: anyway, and while a prompt is read the decodes only grow: the sooner it has been, the more rounds hold the target.
EVERY, FORCED = 4, 0.5
#: The part of the room beside decodes that the margin takes at most. With more, prompts would be read so slowly that
#: decodes grow by what it saves, until there is no room at all.
SHARE = 0.25
#: A request that prefills in progress keep out, since what they leave is not worth a chunk, goes before them after so
#: many iterations; one that decodes keep out is admitted after so many. Its first tile then breaks the target, but so
#: seldom that it is held for 99 % of rounds.
TURN, PATIENCE = 16, 256
#: Nothing is known of iterations much larger than any measured: they may be this many times as large.
TRUST = 2
#: Precision to which the seconds are sought that chunks of doubtful cost may take: spare ones, halved so often.
_HALVINGS = 6
#: Tokens of an iteration that need no measurement.
FIRST_TRUST = 64

#: A round that is so many times longer than expected had a pause in it.
_PAUSE = 1.3
#: Rounds are that much longer than their iterations before anything is known, for each stage.
_GAP_S = 0.001

#: Seconds before the end of the running iteration at which the next plan is made: at first, at least, at most.
_FIRST_LEAD_S, _LEAST_LEAD_S, _MOST_LEAD_S = 0.006, 0.002, 0.25
#: A plan that was held and late lengthens the lead, each that was in time shortens it: also one that was not held,
#: since the lead may be what kept it from that, and would else stay so for ever.
_LEAD_GROWS, _LEAD_SHRINKS = 1.5, 0.998
#: A plan is not held for less.
_LEAST_WAIT_S = 0.001
#: Timers may come this much early.
_EARLY_S = 0.0005


class Timed:
    """What was predicted of a plan that is out."""

    __slots__ = ("features", "held", "made_at", "seconds", "target")

    def __init__(self, features: Features, seconds: float, target: float, made_at: float, held: float) -> None:
        self.features = features
        self.seconds = seconds  #: of the iteration on one stage
        self.target = target  #: of the round, in seconds
        self.made_at = made_at
        self.held = held  #: seconds of the iteration that it was made late in, 0 if it was made at once


class _Tick:
    """The last result of a lane with decodes."""

    __slots__ = ("at", "going", "results")

    def __init__(self, at: float, results: int, going: bool) -> None:
        self.at = at
        self.results = results  #: of all lanes, so far
        self.going = going  #: somebody waits for the next tick


class Budget:
    """Of one replica; outlives its epochs. ``most``: tokens of an iteration, at most."""

    def __init__(self, slo: Slo, stages: int, most: int, tile: int) -> None:
        self.slo = slo
        self.model = TimeModel(wary=True)
        self.most = most
        self.tile = tile
        self.strictest = inf  #: target of the strictest class that decodes, in seconds
        self.now = 0.0  #: the time of the present step
        # What the present iteration may hold.
        self.seconds = 0.0  #: for chunks
        self.tokens = 0  #: of chunks, at most
        self.admits = True  #: new sequences may be admitted
        self.kept_out = 0  #: iterations since a request was admitted, while one waited
        self.limit = inf  #: seconds of the whole iteration
        # What became of it.
        self.rounds = 0
        self.missed = 0  #: rounds longer than their target
        self.unreachable = 0  #: iterations whose decodes alone miss the target
        self.withheld = 0  #: iterations in which prefill waited, since decodes left no room for a tile of it
        self.plans_held = 0
        self.plans_late = 0  #: of those held
        self.lead = _FIRST_LEAD_S
        self.margin = Margin()
        self._stages = stages
        self._unit = min(found.tbt for found in slo.classes)
        self.hurries = any(found.ttft < inf for found in slo.classes)
        self._round = Estimator([self._unit, _GAP_S * stages], 0.1)
        self._trusted = FIRST_TRUST
        self._counts: dict[float, int] = {}
        self._waited = 0  #: iterations since prefill last had some, while it waited for room
        self._begun = 0.0  #: when the oldest plan that is out could begin
        self._holds = 0.0  #: seconds of the iteration in which the next plan is being held, 0 if it is not
        # Of the choice that was begun, which becomes an iteration only if a plan is made of it.
        self._withholds = False  #: prefill waits
        self._overloaded = False  #: its decodes alone miss the target
        self._planned: list[float] = []  #: predicted seconds of the newest plans since none was out
        self._rounds: list[tuple[float, float, int]] | None = None  #: what follows from them, if it was asked for
        self._results = 0
        self._measured: list[float] = []  #: seconds of the newest results, and what was predicted of them
        self._predicted: list[float] = []
        self._ticks: list[_Tick | None] = [None] * stages

    def begin_epoch(self) -> None:
        """All sequences have left; what was learned of the device stays."""
        self.strictest = inf
        self._counts = {}
        self._waited = self.kept_out = 0
        self._holds = 0.0
        self._planned, self._measured, self._predicted = [], [], []
        self._rounds = None
        self._ticks = [None] * self._stages

    def fit(self, samples: list[tuple[Features, float]]) -> None:
        """Begin from measurements made in advance, unless there are some from serving."""
        if self.model.fitted or not any(features.prefill > 0.0 for features, _ in samples):
            return
        for features, _ in samples:
            features.prefill = float(self._padded(int(features.prefill), int(features.decodes)))
            self._trust(int(features.prefill + features.decodes) // TRUST)
        self.model.fit(samples)

    # ---- who decodes -----------------------------------------------------------------------------------------

    def joined(self, seq: Sequence) -> None:
        """``seq`` decodes from now on."""
        target = seq.tbt
        self._counts[target] = self._counts.get(target, 0) + 1
        if target < self.strictest:
            self.strictest = target

    def left(self, seq: Sequence) -> None:
        """``seq`` decodes no longer."""
        target = seq.tbt
        count = self._counts[target] - 1
        if count:
            self._counts[target] = count
            return
        del self._counts[target]
        if target == self.strictest:
            self.strictest = min(self._counts, default=inf)

    # ---- predictions -----------------------------------------------------------------------------------------

    def round_s(self, seconds: float) -> float:
        """Seconds of a round of iterations that each take ``seconds`` on one stage."""
        return self._around(self._stages * seconds)

    def _around(self, passage: float) -> float:
        coefficients = self._round.coefficients
        return coefficients[0] / self._unit * passage + coefficients[1]

    def iteration_s(self, target: float, margin: float) -> float:
        """Seconds that the next iteration may take, so that no round with it is longer than ``target``, with a
        ``margin``. Those planned after it are taken to be as long as it is."""
        if target == inf:
            return inf
        coefficients = self._round.coefficients
        ratio = max(coefficients[0] / self._unit, 0.5)
        most = (target / (1.0 + margin) - coefficients[1]) / ratio
        stages = self._stages
        if stages == 1:
            return most
        if self._rounds is None:
            self._rounds = self._under_way()
        least = inf
        for total, knee, count in self._rounds:
            seconds = (most - total) / count
            if seconds > knee:
                seconds = knee + (most - total - count * knee) / (count + stages - 1)
            if seconds < least:
                least = seconds
        return least

    def _under_way(self) -> list[tuple[float, float, int]]:
        """Of each round that the next iteration is part of, by how many plans ago it began: seconds of the iterations
        planned so far, those that one more may take without slowing the pipeline, and iterations to come."""
        stages, planned = self._stages, self._planned
        found: list[tuple[float, float, int]] = []
        for before in range(min(stages, len(planned) + 1)):
            start = len(planned) - before
            total = sum(planned[start:])
            longest = max(planned[start:], default=0.0)
            pace = max(planned[max(0, start - stages) : start], default=0.0)
            if longest > pace:
                total += (stages - 1) * (longest - pace)
            found.append((total, max(longest, pace), stages - before))
        return found

    def bears_moves(self, decodes: int, kv_tokens: int) -> bool:
        """Whether decodes of a lane that has these may move to others, whose turns can be almost a round later."""
        if self.strictest == inf:
            return True
        pace = max(self._planned[-self._stages :], default=0.0)
        bound = self._around((2 * self._stages - 1) * pace) * (1.0 + self.margin.value)
        if bound <= self.strictest:
            return True
        return self.model.predict(Features(0, 0, decodes, kv_tokens)) > self.iteration_s(
            self.strictest, self.margin.value
        )

    def chunk_s(self, tokens: int, computed: int) -> float:
        """Seconds that a chunk of ``tokens`` tokens after ``computed`` others adds."""
        coefficients = self.model.coefficients
        return coefficients[1] * tokens + coefficients[2] * attention_work(computed, tokens)

    def chunk_tokens(self, seconds: float, computed: int) -> int:
        """The largest chunk after ``computed`` tokens that adds at most ``seconds``; not more than ``tokens``."""
        coefficients = self.model.coefficients
        pair = coefficients[2]
        each = coefficients[1] + pair * (computed + 0.5)
        # No seconds are enough for what is said to take none: else nothing would ever be read.
        if seconds < 0.0:
            return 0
        divisor = each + sqrt(each * each + 2.0 * pair * seconds)
        # A little more, so that a chunk fits into the seconds that it was said to take.
        tokens = 2.0 * seconds * (1.0 + 1e-9) / divisor if divisor > 0.0 else inf
        return int(tokens) if tokens < self.tokens else self.tokens

    # ---- planning --------------------------------------------------------------------------------------------

    def open(
        self, decodes: int, kv_tokens: int, computed: int, reads: bool = False, hurried: Hurry | None = None
    ) -> bool:
        """Begin the choice for an iteration that holds ``decodes``; whether it may have prefill.

        ``computed``: of the prompt that has waited longest; ``reads``: it is being read. Sets ``seconds``,
        ``tokens``, ``admits`` and ``limit``.
        """
        trusted = TRUST * self._trusted
        most = self.most if self.most < trusted else trusted
        self.tokens = most - decodes
        if self.tokens <= 0:
            self.tokens = min(LEAST_START, self.most - decodes)
            if self.tokens <= 0:
                return False
        self.admits = True
        self._withholds = self._overloaded = False
        self.limit = self.iteration_s(self.strictest, self.margin.value)
        if self.limit == inf:
            self._waited = 0
            self.seconds = self.chunk_s(self.tokens, computed)
            return True
        start = min(self.tile - decodes % self.tile if self.tile else LEAST_START, self.tokens)
        first = min(LEAST_CHUNK, start) if reads and not self.tile else start
        base = self.model.predict(Features(0, 0, decodes, kv_tokens))
        room = self.iteration_s(self.strictest, 0.0) - base
        spare = max(self.limit - base, (1.0 - SHARE) * room)
        self.limit = base + spare
        least = self.chunk_s(first, computed)
        if spare >= least:
            self._waited = 0
            self.admits = spare >= self.chunk_s(start, 0) or self.kept_out >= PATIENCE
            self.seconds = max(self._certain(spare, computed, decodes, kv_tokens), least)
            if hurried is not None:
                self._spread(base, computed, hurried)
            return True
        self._overloaded = spare < 0.0
        if self._waited < EVERY - 1:
            self._withholds = True
            return False
        self._waited = 0
        # Whatever this one holds, it breaks the target once in EVERY at the most. A target that one decode alone
        # would miss is missed however few are admitted.
        self.admits = (
            self.kept_out >= PATIENCE
            or room >= self.chunk_s(start, 0)
            or self.model.predict(Features(start, attention_work(0, start), 1, 1)) > self.limit
        )
        if reads and room < FORCED * base:
            room = FORCED * base
        self.tokens = max(self.chunk_tokens(room, computed), first)
        self.seconds = self.chunk_s(self.tokens, computed)
        return True

    def _certain(self, spare: float, computed: int, decodes: int, kv_tokens: int) -> float:
        """Seconds for chunks, out of ``spare`` ones, since what is not known well is taken to be the longer."""
        certain = spare - self._doubt(spare, computed, decodes, kv_tokens)
        if certain >= 0.5 * spare:
            return certain
        # Of so large a batch little is known, but that says nothing of a smaller one.
        certain, most = 0.0, spare
        for _ in range(_HALVINGS):
            middle = 0.5 * (certain + most)
            if middle + self._doubt(middle, computed, decodes, kv_tokens) <= spare:
                certain = middle
            else:
                most = middle
        return certain

    def _doubt(self, seconds: float, computed: int, decodes: int, kv_tokens: int) -> float:
        """Seconds by which an iteration may be longer than predicted, with chunks of ``seconds``."""
        tokens = self.chunk_tokens(seconds, computed)
        return self.model.doubt(Features(tokens, attention_work(computed, tokens), decodes, kv_tokens))

    def _spread(self, base: float, computed: int, hurry: Hurry) -> None:
        """With a target for the first token, prefill that is not urgent takes half the room: decodes are the evener.
        A first token that would be late so makes chunks grow to all of it."""
        half = 0.5 * self.seconds
        tokens = self.chunk_tokens(half, computed)
        tile = self.tile if self.tile else LEAST_START
        if tokens >= tile and not hurry.late(tokens / (base + half), self.now):
            self.seconds = half

    def planned(self, chunks: Chunks, decodes: int, kv_tokens: int, idle: bool) -> Timed:
        """A plan is made, before its chunks count as computed. ``idle``: no other is out."""
        prefill, attention = 0, 0.0
        for seq, taken in chunks:
            prefill += taken
            attention += attention_work(seq.computed, taken)
        if idle:
            self._begun = self.now
            self._planned, self._measured, self._predicted = [], [], []
        features = Features(self._padded(prefill, decodes), attention, decodes, kv_tokens)
        self.kept_out += 1
        if self._withholds:
            self._waited += 1
            self.withheld += 1
        if self._overloaded:
            self.unreachable += 1
        self._withholds = self._overloaded = False
        held, self._holds = self._holds, 0.0
        if held > 0.0:
            self.plans_held += 1
        seconds = self.model.predict(features)
        _keep(self._planned, seconds, 2 * self._stages)
        self._rounds = None
        return Timed(features, seconds, self.strictest, self.now, held)

    def _padded(self, prefill: int, decodes: int) -> int:
        """Prefill tokens with those that fill up the last tile."""
        if not self.tile or not prefill:
            return prefill
        return -(-(prefill + decodes) // self.tile) * self.tile - decodes

    def overruns(self, prefill: int, attention: float, decodes: int, kv_tokens: int) -> bool:
        """Whether an iteration with these, and its tile filled up, would be longer than it may."""
        features = Features(self._padded(prefill, decodes), attention, decodes, kv_tokens)
        return self.model.predict(features) > self.limit

    def due(self, out: deque[InFlight]) -> float:
        """Until when the next plan can wait, infinitely long ago if it cannot. Plans in ``out`` have no result yet.

        As late as the running iteration allows, so that requests that come and go meanwhile still count. Only when
        each stage has one to run. All stages step together, if they are alike: the first one is free when the last
        one is, or when its own iteration ends.
        """
        if len(out) < self._stages or not self.model.fitted:
            return -inf
        oldest, newest = out[0].timed, out[-1].timed
        if oldest is None or newest is None:
            return -inf
        seconds = oldest.seconds if oldest.seconds < newest.seconds else newest.seconds
        wait = seconds - self.lead - 2.0 * self.model.noise * seconds
        if wait < _LEAST_WAIT_S:
            return -inf
        at = self._begun + wait
        if self.now >= at - _EARLY_S:
            return -inf
        self._holds = seconds
        return at

    # ---- learning --------------------------------------------------------------------------------------------

    def returned(
        self, timed: Timed, lane: int, ticks: bool, going: bool, took: float, starved: float, now: float
    ) -> None:
        """The oldest plan's result came at ``now``. ``ticks``: it had decodes of ``lane``; ``going``: the lane has
        some still. ``took``: seconds that the last stage computed, 0 if it does not say; ``starved``: seconds that a
        stage waited for the plan."""
        self._begun = now
        if took > 0.0:
            self.model.learn(timed.features, took)
            self._trust(int(timed.features.prefill + timed.features.decodes))
        else:
            took = timed.seconds
        if starved <= 0.0:
            self.lead = max(self.lead * _LEAD_SHRINKS, _LEAST_LEAD_S)
        elif timed.held > 0.0:
            self.plans_late += 1
            self._lengthen_lead(starved, timed.held)
        _keep(self._measured, took, 4 * self._stages)
        _keep(self._predicted, timed.seconds, 4 * self._stages)
        self._results += 1
        if not ticks:
            return
        last = self._ticks[lane]
        self._ticks[lane] = _Tick(now, self._results, going)
        if last is None or not last.going:
            return
        seconds = now - last.at
        self.rounds += 1
        if seconds > timed.target:
            self.missed += 1
        count = self._results - last.results
        if timed.made_at > last.at or starved > 0.0 or count >= len(self._measured):
            # The wait for a plan is in it.
            return
        expected = self._around(passage(self._predicted, count, self._stages))
        if expected <= 0.5 * timed.target:
            # Of rounds without prefill nothing is asked; nor do they tell what those with prefill take.
            return
        self._round.update([passage(self._measured, count, self._stages) / self._unit, 1.0], seconds)
        if seconds < _PAUSE * expected * (1.0 + self.margin.value):
            # A pause is not undone by smaller chunks.
            self.margin.learn(seconds / expected - 1.0)

    def _lengthen_lead(self, starved: float, iteration: float) -> None:
        """A plan that was held in an ``iteration`` of so many seconds came ``starved`` seconds late. One that came
        very late tells of a pause, and a lead longer than the iteration leaves no plan to hold."""
        grown = self.lead * _LEAD_GROWS + min(starved, self.lead)
        self.lead = max(self.lead, min(grown, iteration, _MOST_LEAD_S))

    def _trust(self, tokens: int) -> None:
        if tokens > self._trusted:
            self._trusted = tokens


class Hurry:
    """Prefill that waits, as far as the time of first tokens is concerned: tokens to compute until each, and when it
    is due. Only the oldest prefill, the next request and the last one in the queue are looked at."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits: list[tuple[int, float]] = []

    def late(self, rate: float, now: float) -> bool:
        """Whether one would come too late at ``rate`` tokens a second."""
        return any(now + tokens / rate > due for tokens, due in self.waits)


def passage(seconds: list[float], count: int, stages: int) -> float:
    """Time between the results of the last ``count`` of a row of iterations, and of the one before those, out of a
    pipeline that is kept busy. ``seconds``: what each takes on one stage."""
    start = len(seconds) - count
    longest = max(seconds[start:])
    pace = max(seconds[max(0, start - stages) : start], default=0.0)
    total = sum(seconds[start:])
    if longest > pace:
        total += (stages - 1) * (longest - pace)
    # Its own way is through all stages.
    return max(total, stages * seconds[-1])


def _keep(values: list[float], value: float, most: int) -> None:
    values.append(value)
    if len(values) > most:
        del values[0]
