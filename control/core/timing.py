"""How long an iteration takes: a linear model of what is in its batch, learned while serving.

An iteration costs a constant, its prefill tokens, the attention of its chunks (each token reads those before it),
its decodes and the KV tokens that they read. Each term has a coefficient in seconds, found by recursive least squares
whose memory fades: in the form of a Kalman filter whose coefficients wander a little each iteration. So what a batch
does not show keeps its value, and its uncertainty grows only up to a bound. Coefficients never fall below zero.
A measurement far outside what is believed counts as if it lay at the edge, since a pause of the machine says nothing
of the model; three in a row on the same side do: then the device has become slower or faster, and the terms that
these iterations had are scaled. Rows are counted apart for batches of different terms: where decodes take what they
should and only chunks do not, it is the terms of the chunks that are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

#: What the coefficients of ``TimeModel`` multiply, in this order.
TERMS = ("constant", "prefill", "attention", "decodes", "kv")
#: A batch in which every term is of the order of one: the units in which the filter works.
_UNITS = (1.0, 256.0, 256.0 * 1024.0, 64.0, 64.0 * 1024.0)
#: Seconds of each term in that batch before anything is known of the device.
_GUESS = (0.005, 0.1, 0.01, 0.01, 0.01)
#: Seconds of each term where there are none and a promise rests on the model: the memory of a small device makes
#: attention dear, and what is held to be cheap is found to be dear late, since batches change little from one to the
#: next, so that the constant seems to explain all.
_WARY = (0.005, 0.1, 0.1, 0.02, 0.1)

#: Relative standard deviation by which a coefficient may wander in an iteration.
_WANDER = 0.002
#: A coefficient is never held to be more uncertain than this, relative to itself.
_MOST_DOUBT = 0.5
#: Of a coefficient that is zero or very small: the part of the mean iteration that it may yet turn out to be.
_LEAST = 0.05
#: Standard deviations at which a measurement's surprise is cut off.
_GATE = 4.0
#: So many cut-off measurements on one side mean that the device has changed.
_CHANGED = 3
#: Measurements for which terms count as right after a batch of no others took what was expected.
_CONFIRMED = 6
#: A term is scaled to this part of itself at the least.
_LEAST_SCALE = 0.02
#: Relative standard deviation of a measurement: at first, at least and at most.
_NOISE, _LEAST_NOISE, _MOST_NOISE = 0.05, 0.01, 0.3
#: Weight of a measurement in the estimate of the noise.
_NOISE_RATE = 1.0 / 32.0
#: Measurements after which a model that began with a guess is trusted.
_FITTED = 8


class Estimator:
    """Non-negative coefficients of a linear function, found from measurements one at a time.

    ``coefficients`` are the first belief, ``doubt`` its standard deviation relative to each. Values are positive.
    """

    __slots__ = ("_confirmed", "_cov", "_mean", "_runs", "_size", "coefficients", "noise", "seen")

    def __init__(self, coefficients: Sequence[float], doubt: float) -> None:
        self._size = len(coefficients)
        self.coefficients: list[float] = [float(c) for c in coefficients]
        self.seen = 0  #: measurements taken in
        self.noise = _NOISE  #: relative standard deviation of a measurement
        self._mean = sum(self.coefficients) / self._size
        #: By the terms of a batch (a bit each): when one of these last took what was expected, in measurements.
        self._confirmed: dict[int, int] = {}
        #: By the terms of a batch: side, inputs and value of the last measurements, if they were cut off.
        self._runs: dict[int, list[tuple[int, list[float], float]]] = {}
        self._cov: list[list[float]] = [[0.0] * self._size for _ in range(self._size)]
        self._widen(doubt)

    def value(self, inputs: list[float]) -> float:
        """The function at ``inputs``."""
        total = 0.0
        for i in range(self._size):
            total += self.coefficients[i] * inputs[i]
        return total

    def doubt(self, inputs: list[float]) -> float:
        """Standard deviation of the function at ``inputs``: how little is known of it there."""
        variance = 0.0
        for i in range(self._size):
            row, total = self._cov[i], 0.0
            for j in range(self._size):
                total += row[j] * inputs[j]
            variance += total * inputs[i]
        return sqrt(variance) if variance > 0.0 else 0.0

    def update(self, inputs: list[float], measured: float) -> None:
        """Learn from one measurement; what is not positive and finite is passed over."""
        if not 0.0 < measured < 1e6 or not isfinite(sum(inputs)):
            return
        size, cov, theta = self._size, self._cov, self.coefficients
        expected = self.value(inputs)
        self.seen += 1
        self._mean += (measured - self._mean) / min(self.seen + 1.0, 64.0)
        # Covariance of each coefficient with the value, and the variance of the value.
        gain = [0.0] * size
        spread = 0.0
        for i in range(size):
            row, total = cov[i], 0.0
            for j in range(size):
                total += row[j] * inputs[j]
            gain[i] = total
            spread += total * inputs[i]
        base = max(expected, _LEAST * self._mean)
        noise = self.noise * base
        spread += noise * noise
        if spread <= 0.0:
            return
        surprise = measured - expected
        edge = _GATE * sqrt(spread)
        if surprise > edge:
            if self._beyond(1, inputs, measured):
                return
            surprise = edge
        elif surprise < -edge:
            if self._beyond(-1, inputs, measured):
                return
            surprise = -edge
        else:
            terms = _terms_of(inputs)
            self._confirmed[terms] = self.seen
            self._runs[terms] = []
        # What the measurement does not show keeps its value, also where it is correlated with what does: small
        # batches may follow a law of their own (the host's), from which nothing is to be concluded for others.
        for i in range(size):
            shown = inputs[i] > 0.0
            if shown:
                theta[i] += gain[i] / spread * surprise
            row = cov[i]
            for j in range(i, size):
                if shown or inputs[j] > 0.0:
                    entry = row[j] - gain[i] * gain[j] / spread
                    row[j] = cov[j][i] = entry
        relative = (surprise / base) ** 2
        # What is due to the coefficients' own doubt is not noise of the measurement.
        relative *= noise * noise / spread
        variance = self.noise * self.noise
        variance += _NOISE_RATE * (relative - variance)
        self.noise = sqrt(min(max(variance, _LEAST_NOISE**2), _MOST_NOISE**2))
        self._keep_positive()
        self._wander()

    def _beyond(self, side: int, inputs: list[float], measured: float) -> bool:
        """Note a measurement that was cut off; true if it was the one that proves a change, which is made: to the
        coefficients that had a part in it, but for those that other batches have just confirmed."""
        terms = _terms_of(inputs)
        run = self._runs.get(terms)
        if run is None or (run and run[0][0] != side):
            self._runs[terms] = run = []
        run.append((side, inputs, measured))
        if len(run) < _CHANGED:
            return False
        right = 0
        for others, at in self._confirmed.items():
            if others != terms and others & ~terms == 0 and self.seen - at <= _CONFIRMED:
                right |= others
        wrong = terms & ~right
        if not wrong:
            wrong = terms
        scales: list[float] = []
        for _, shown, took in run:
            rest, part = took, 0.0
            for i in range(self._size):
                if wrong >> i & 1:
                    part += self.coefficients[i] * shown[i]
                else:
                    rest -= self.coefficients[i] * shown[i]
            scales.append(max(rest / max(part, _LEAST * self._mean), _LEAST_SCALE))
        scale = sorted(scales)[_CHANGED >> 1]
        self._runs[terms] = []
        factors = [scale if wrong >> i & 1 else 1.0 for i in range(self._size)]
        for i in range(self._size):
            self.coefficients[i] *= factors[i]
            row = self._cov[i]
            for j in range(self._size):
                row[j] *= factors[i] * factors[j]
        self._widen(0.3)
        return True

    def _widen(self, doubt: float) -> None:
        """Doubt each coefficient by ``doubt`` of itself more."""
        for i in range(self._size):
            extra = doubt * max(self.coefficients[i], _LEAST * self._mean)
            self._cov[i][i] += extra * extra

    def _keep_positive(self) -> None:
        """Move the likeliest coefficients to the likeliest that are not negative."""
        theta, cov = self.coefficients, self._cov
        for i in range(self._size):
            if theta[i] < 0.0:
                short, row = -theta[i], cov[i]
                for j in range(self._size):
                    theta[j] += short * row[j] / row[i]
        for i in range(self._size):
            if theta[i] < 0.0:
                theta[i] = 0.0

    def _wander(self) -> None:
        """Let the coefficients have changed a little, and bound the doubt."""
        cov = self._cov
        for i in range(self._size):
            weight = max(self.coefficients[i], _LEAST * self._mean)
            step, most, least = _WANDER * weight, _MOST_DOUBT * weight, 1e-6 * weight
            doubt = cov[i][i] + step * step
            if doubt < least * least:
                doubt = least * least
            if doubt > most * most:
                shrink = most / sqrt(doubt)
                for j in range(self._size):
                    cov[i][j] *= shrink
                    cov[j][i] = cov[i][j]
                doubt = most * most
            cov[i][i] = doubt


def _terms_of(inputs: list[float]) -> int:
    """A bit for each term that has a part in a value."""
    terms = 0
    for i in range(len(inputs)):
        if inputs[i] > 0.0:
            terms |= 1 << i
    return terms


class Features:
    """What of a batch its time depends on. ``attention`` is the sum over its chunks of
    tokens · (computed tokens before + (tokens + 1) / 2); ``kv_tokens`` are those that the decodes read."""

    __slots__ = ("attention", "decodes", "kv_tokens", "prefill")

    def __init__(self, prefill: float, attention: float, decodes: float, kv_tokens: float) -> None:
        self.prefill = prefill
        self.attention = attention
        self.decodes = decodes
        self.kv_tokens = kv_tokens


def attention_work(computed: int, taken: int) -> float:
    """Pairs of tokens that the attention of a chunk of ``taken`` tokens after ``computed`` others looks at."""
    return taken * (computed + 0.5 * (taken + 1))


class TimeModel:
    """Seconds of an iteration by its features. Usable at once; better when it has been ``fit`` or has learned.

    ``wary``: until then, rather too long than too short.
    """

    __slots__ = ("_estimator", "_profiled")

    def __init__(self, wary: bool = False) -> None:
        self._estimator = Estimator(_WARY if wary else _GUESS, 2.0)
        self._profiled = False

    @property
    def fitted(self) -> bool:
        """Whether predictions rest on measurements of this device."""
        return self._profiled or self._estimator.seen >= _FITTED

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """Seconds by ``TERMS``: a constant, of a prefill token, an attention pair, a decode, a KV token."""
        c = self._estimator.coefficients
        return c[0], c[1] / _UNITS[1], c[2] / _UNITS[2], c[3] / _UNITS[3], c[4] / _UNITS[4]

    @property
    def noise(self) -> float:
        """Relative standard deviation of what is measured about what is predicted."""
        return self._estimator.noise

    def predict(self, features: Features) -> float:
        """Seconds of an iteration."""
        return self._estimator.value(_inputs(features))

    def doubt(self, features: Features) -> float:
        """Seconds by which ``predict`` may be wrong, beside the scatter of iterations (one standard deviation)."""
        return self._estimator.doubt(_inputs(features))

    def terms(self, features: Features) -> tuple[float, float, float, float, float]:
        """Seconds of each of ``TERMS``; they add up to ``predict``."""
        c, x = self._estimator.coefficients, _inputs(features)
        return c[0], c[1] * x[1], c[2] * x[2], c[3] * x[3], c[4] * x[4]

    def learn(self, features: Features, seconds: float) -> None:
        """Take in that an iteration took ``seconds``; what is not positive is passed over."""
        self._estimator.update(_inputs(features), seconds)

    def fit(self, samples: Sequence[tuple[Features, float]]) -> None:
        """Begin anew from measurements made in advance: (features, seconds)."""
        usable = [(features, seconds) for features, seconds in samples if 0.0 < seconds < 1e6]
        if not usable:
            return
        # The guess counts for nothing beside them: it is brought to their scale, then doubted.
        guess = self._estimator if self._estimator.seen else Estimator(_GUESS, 2.0)
        scale = sorted(seconds / guess.value(_inputs(features)) for features, seconds in usable)[len(usable) >> 1]
        estimator = Estimator([c * scale for c in guess.coefficients], 2.0)
        for _ in range(4):
            for features, seconds in usable:
                estimator.update(_inputs(features), seconds)
        # Measured in advance is not measured while serving: it is trusted to a fifth.
        self._estimator = Estimator(estimator.coefficients, 0.2)
        self._profiled = True


def _inputs(features: Features) -> list[float]:
    return [
        1.0,
        features.prefill / _UNITS[1],
        features.attention / _UNITS[2],
        features.decodes / _UNITS[3],
        features.kv_tokens / _UNITS[4],
    ]
