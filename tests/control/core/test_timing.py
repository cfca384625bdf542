"""The model of iteration time: what it learns, how soon, and what it never does."""

import random
from collections.abc import Callable, Iterator
from math import isfinite

import pytest
from evenflow.control.core.timing import TERMS, Estimator, Features, TimeModel, attention_work
from hypothesis import given, settings
from hypothesis import strategies as st

Law = Callable[[Features], float]


def linear(scale: float = 1.0) -> Law:
    return lambda f: scale * (0.006 + 5e-4 * f.prefill + 6e-8 * f.attention + 4e-4 * f.decodes + 1.5e-7 * f.kv_tokens)


def tiled(f: Features) -> float:
    """The batch is computed in tiles of 64 tokens."""
    tiles = -(-(f.prefill + f.decodes) // 64)
    return 0.004 + 0.02 * tiles + 5e-8 * f.attention + 1e-7 * f.kv_tokens


def floored(f: Features) -> float:
    """No iteration is faster than its host, and attention weighs heavily."""
    return max(0.012, 0.002 + 1e-4 * f.prefill + 1.5e-7 * f.attention + 3e-5 * f.decodes + 2e-7 * f.kv_tokens)


def load(seed: int, count: int, most: int = 256) -> Iterator[Features]:
    """A server's batches: decodes always, and prompts now and then, whose chunks come one after the other."""
    draw = random.Random(seed)
    decodes, computed, rest = 8, 0, 0
    for _ in range(count):
        if not rest and draw.random() < 0.15:
            computed, rest = 0, draw.randrange(50, 6000)
        taken = min(rest, draw.randrange(most // 2, most + 1))
        work = attention_work(computed, taken) if taken else 0.0
        computed, rest = computed + taken, rest - taken
        decodes = max(1, min(64, decodes + draw.randrange(-2, 3)))
        yield Features(taken, work, decodes, decodes * draw.randrange(200, 1200))


def errors(model: TimeModel, law: Law, batches: Iterator[Features], noise: float = 0.0, seed: int = 5) -> list[float]:
    """Relative errors of predictions, each made before its measurement is learned."""
    draw = random.Random(seed)
    found: list[float] = []
    for features in batches:
        took = law(features) * (1.0 + draw.gauss(0.0, noise) if noise else 1.0)
        found.append(abs(model.predict(features) / took - 1.0))
        model.learn(features, took)
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def test_attention_work_counts_pairs() -> None:
    assert attention_work(0, 4) == 1 + 2 + 3 + 4
    assert attention_work(10, 3) == 11 + 12 + 13
    whole, parts = attention_work(0, 100), attention_work(0, 30) + attention_work(30, 70)
    assert whole == parts


def test_the_terms_add_up_to_the_prediction() -> None:
    model = TimeModel()
    errors(model, linear(), load(1, 100))
    features = Features(100, 5e4, 20, 9e3)
    terms = model.terms(features)
    assert len(terms) == len(TERMS) and sum(terms) == pytest.approx(model.predict(features), rel=1e-12)
    values = (1.0, features.prefill, features.attention, features.decodes, features.kv_tokens)
    assert terms == pytest.approx([c * v for c, v in zip(model.coefficients, values, strict=True)])


def test_it_can_be_used_before_it_has_learned() -> None:
    model = TimeModel()
    assert not model.fitted
    assert 0.001 < model.predict(Features(0, 0, 1, 100)) < model.predict(Features(256, 3e4, 1, 100)) < 1.0
    errors(model, linear(), load(1, 8))
    assert model.fitted


@pytest.mark.parametrize("law", [linear(), linear(0.02), linear(30.0), tiled, floored])
def test_it_learns_a_device_within_fifty_iterations(law: Law) -> None:
    found = errors(TimeModel(), law, load(2, 500))
    assert quantile(found[50:], 0.5) < 0.06 and quantile(found[50:], 0.95) < 0.25


def test_a_linear_device_is_learned_exactly() -> None:
    model = TimeModel()
    found = errors(model, linear(), load(3, 600))
    assert max(found[300:]) < 0.02
    expected = (0.006, 5e-4, 6e-8, 4e-4, 1.5e-7)
    assert model.coefficients == pytest.approx(expected, rel=0.15)


def test_noise_is_measured_and_averaged_out() -> None:
    model = TimeModel()
    errors(model, linear(), load(4, 800), noise=0.08)
    assert 0.05 < model.noise < 0.12
    exact = [abs(model.predict(f) / linear()(f) - 1.0) for f in load(5, 200)]
    assert quantile(exact, 0.95) < 0.1 and quantile(exact, 0.5) < 0.04


@pytest.mark.parametrize("scale", [1.5, 4.0, 1 / 1.5, 0.2])
def test_a_device_that_changes_its_speed_is_followed_at_once(scale: float) -> None:
    model = TimeModel()
    errors(model, linear(), load(6, 300), noise=0.02)
    found = errors(model, linear(scale), load(7, 60), noise=0.02)
    assert quantile(found[5:], 0.9) < 0.15


@pytest.mark.parametrize("scale", [20.0, 3.0, 1 / 3.0, 0.1])
def test_a_profile_that_is_wrong_about_prompts_alone_is_mended_by_a_few_chunks(scale: float) -> None:
    """First chunks may take many times what later ones take. Decodes in between are as expected."""
    law = linear()
    samples = [Features(0, 0, n, n * c) for n, c in ((1, 32), (16, 32), (16, 1024))]
    samples += [Features(n, attention_work(c, n), 0, 0) for n, c in ((16, 0), (64, 0), (64, 1984), (256, 0))]
    model = TimeModel()
    model.fit([(f, law(f) * (scale if f.prefill else 1.0)) for f in samples])
    decodes = Features(0, 0, 8, 8 * 300)
    for k in range(5):
        chunk = Features(16, attention_work(16 * k, 16), 8, 8 * 300)
        for batch in (decodes, decodes, decodes, chunk):
            model.learn(batch, law(batch))
    assert model.predict(decodes) == pytest.approx(law(decodes), rel=0.1)
    large = Features(128, attention_work(100, 128), 8, 8 * 300)
    assert model.predict(large) == pytest.approx(law(large), rel=0.5)


def test_a_pause_of_the_machine_is_not_believed() -> None:
    model = TimeModel()
    errors(model, linear(), load(8, 300), noise=0.02)
    features = Features(200, attention_work(1000, 200), 16, 16 * 500)
    before = model.predict(features)
    for took in (3.0, 0.5):
        model.learn(features, took)
        errors(model, linear(), load(9, 2), noise=0.02)
    assert model.predict(features) < 1.4 * before
    found = errors(model, linear(), load(10, 60), noise=0.02)
    assert quantile(found[30:], 0.9) < 0.08


def test_what_batches_do_not_show_is_remembered() -> None:
    """Hours of nothing but decodes do not make it forget what prefill costs."""
    model = TimeModel()
    errors(model, linear(), load(11, 400))
    chunk = Features(256, attention_work(3000, 256), 8, 8 * 500)
    decodes = (Features(0, 0, 8 + i % 3, 4000 + i % 500) for i in range(5_000))
    errors(model, linear(), decodes, noise=0.03)
    assert model.predict(chunk) == pytest.approx(linear()(chunk), rel=0.08)
    found = errors(model, linear(1.3), load(12, 60))
    assert quantile(found[15:], 0.9) < 0.15


def test_a_profile_makes_it_right_from_the_start() -> None:
    shapes = [(0, 0, 1), (0, 64, 0), (0, 256, 0), (2000, 64, 0), (32, 0, 16), (2000, 0, 16), (0, 128, 8)]
    samples: list[tuple[Features, float]] = []
    for context, taken, decodes in shapes:
        features = Features(taken, attention_work(context, taken) if taken else 0.0, decodes, decodes * context)
        samples.append((features, linear()(features)))
    model = TimeModel()
    model.fit(samples)
    assert model.fitted
    found = errors(model, linear(), load(13, 100))
    assert quantile(found, 0.9) < 0.05
    model.fit([])
    assert model.fitted


def test_measurements_that_cannot_be_are_passed_over() -> None:
    model = TimeModel()
    before = model.coefficients
    features = Features(10, 55, 1, 10)
    for took in (0.0, -1.0, float("nan"), float("inf")):
        model.learn(features, took)
        model.fit([(features, took)])
    assert model.coefficients == before and not model.fitted


BATCH = st.builds(
    lambda taken, context, decodes, length: Features(
        taken, attention_work(context, taken) if taken else 0.0, decodes, decodes * length
    ),
    st.integers(0, 8192),
    st.integers(0, 100_000),
    st.integers(0, 4096),
    st.integers(1, 100_000),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(BATCH, st.floats(1e-6, 1e4)), min_size=1, max_size=40), st.integers(1, 8))
def test_no_history_makes_it_negative_or_infinite(history: list[tuple[Features, float]], times: int) -> None:
    model = TimeModel()
    for _ in range(times):
        for features, seconds in history:
            model.learn(features, seconds)
            assert all(isfinite(c) and c >= 0.0 for c in model.coefficients)
            assert isfinite(model.predict(features)) and 0.01 <= model.noise <= 0.3


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(1e-3, 1e2)), min_size=1, max_size=80))
def test_the_covariance_stays_symmetric_and_bounded(history: list[tuple[float, float, float]]) -> None:
    estimator = Estimator([1.0, 1.0], 1.0)
    for x, y, measured in history * 5:
        estimator.update([x, y], measured)
        (a, b), (c, d) = estimator._cov
        assert b == c and a > 0.0 and d > 0.0
        assert b * b <= a * d * (1 + 1e-6), "a correlation is at most one"
