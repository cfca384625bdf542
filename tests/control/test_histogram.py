"""Percentiles of a sliding window: as exact as promised, weighted, and forgetful by the second."""

import random
from math import ceil

import pytest
from evenflow.control.histogram import GROWTH, LEAST, SlidingHistogram

SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)


def exact(values: list[float], share: float) -> float:
    return sorted(values)[max(1, ceil(share * len(values))) - 1]


@pytest.mark.parametrize("count", [1, 2, 99, 5000])
def test_percentiles_are_within_half_a_bucket(count: int) -> None:
    draw = random.Random(count)
    values = [draw.lognormvariate(-3, 2) for _ in range(count)]
    histogram = SlidingHistogram()
    for value in values:
        histogram.add(value, 1, 5.0)
    found = histogram.percentiles(SHARES, 5.0)
    assert found is not None and histogram.count == count
    for share, value in zip(SHARES, found, strict=True):
        assert value == pytest.approx(exact(values, share), rel=GROWTH**0.5 - 1 + 1e-9)


def test_a_weight_counts_as_so_many_values() -> None:
    histogram = SlidingHistogram()
    histogram.add(0.02, 98, 1.0)
    histogram.add(3.0, 2, 1.0)
    assert histogram.percentiles((0.5, 0.98, 0.99), 1.0) == pytest.approx([0.02, 0.02, 3.0], rel=0.01)


def test_what_left_the_window_is_forgotten_by_the_second() -> None:
    histogram = SlidingHistogram(window=10)
    assert histogram.percentiles((0.5,), 0.0) is None
    histogram.add(1.0, 1, 100.2)
    histogram.add(9.0, 1, 104.0)
    assert histogram.percentiles((0.0, 1.0), 109.9) == pytest.approx([1.0, 9.0], rel=0.01)
    assert histogram.percentiles((0.0, 1.0), 110.0) == pytest.approx([9.0, 9.0], rel=0.01)
    assert histogram.percentiles((0.5,), 114.0) is None
    assert histogram.count == 2
    histogram.add(2.0, 1, 500.0)
    assert histogram.percentiles((0.5,), 500.0) == pytest.approx([2.0], rel=0.01)


def test_zero_and_tiny_values_have_a_bucket() -> None:
    histogram = SlidingHistogram()
    for value in (0.0, LEAST / 100, LEAST):
        histogram.add(value, 1, 1.0)
    found = histogram.percentiles((1.0,), 1.0)
    assert found is not None and found[0] < 2 * LEAST
