"""The margin against the quantile that it stands for, found the plain way."""

from random import Random

from evenflow.control.core.margin import Margin
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.floats(-0.9, 0.5), max_size=700))
def test_it_is_the_second_largest_of_the_last_256(values: list[float]) -> None:
    margin, noted = Margin(), list[float]()
    for value in values:
        noted.append(min(value, margin.value + 0.02))
        margin.learn(value)
        last = sorted(noted[-256:], reverse=True)
        asked = last[1] if len(last) > 1 else 0.0
        assert margin.value == min(max(asked, 0.04 if len(last) < 64 else 0.0), 0.2)


def test_few_rounds_are_longer_and_a_bad_spell_is_forgotten() -> None:
    draw, margin, longer = Random(5), Margin(), 0
    for n in range(6000):
        excess = draw.gauss(0.0, 0.05)
        longer += n >= 1000 and excess > margin.value
        margin.learn(excess)
    assert longer <= 0.01 * 5000 and 0.08 < margin.value < 0.2
    for _ in range(60):
        margin.learn(5.0)
    assert margin.value == 0.2
    for _ in range(256):
        margin.learn(0.0)
    assert margin.value == 0.0
