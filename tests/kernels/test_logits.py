"""Biases, penalties and masks against transformers' processor and a reference in float64."""

import numpy as np
import torch
from evenflow.kernels.logits import Adjustments, Bias, Penalties, adjust
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

SIZE = 100
IDS = st.lists(st.integers(0, SIZE + 20), unique=True, max_size=30)


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def random_row(seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).normal(0, 5, SIZE).astype(np.float32)
    row[[3, 50]] = 0.0, -np.inf
    return row


@given(seed=st.integers(0, 2**32), tokens=st.lists(st.integers(0, SIZE - 1), min_size=1), factor=st.floats(0.01, 10))
@settings(max_examples=50, deadline=None)
def test_repetition_equals_transformers(seed: int, tokens: list[int], factor: float) -> None:
    row = random_row(seed)
    expected = RepetitionPenaltyLogitsProcessor(factor)(torch.tensor([tokens]), torch.tensor(row)[None])[0]
    seen = np.unique(tokens)
    adjust(row, Adjustments(penalties=Penalties(seen, np.zeros_like(seen), repetition=factor)))
    assert torch.equal(torch.from_numpy(row), expected)


@given(
    seed=st.integers(0, 2**32),
    biased=IDS,
    prompt=IDS,
    output=st.lists(st.integers(0, SIZE - 1), max_size=30),
    forbidden=IDS,
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
@settings(max_examples=80, deadline=None)
def test_all_changes_happen_in_order(
    seed: int,
    biased: list[int],
    prompt: list[int],
    output: list[int],
    forbidden: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    row = random_row(seed)
    values = np.random.default_rng(seed).uniform(-100, 100, len(biased)).astype(np.float32)
    expected = row.astype(np.float64)
    for token, value in zip(biased, values, strict=True):
        if token < SIZE:
            expected[token] += value
    for token in {*prompt, *output}:
        if token < SIZE:
            expected[token] *= repetition if expected[token] < 0 else 1 / repetition
            expected[token] -= presence * (token in output) + frequency * output.count(token)
    for token in forbidden:
        if token < SIZE:
            expected[token] = -np.inf
    seen = ids(sorted({*prompt, *output}))
    counts = ids([output.count(token) for token in seen])
    adjust(
        row,
        Adjustments(
            Bias(ids(biased), values), Penalties(seen, counts, repetition, presence, frequency), ids(forbidden)
        ),
    )
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


def test_nothing_asked_changes_nothing() -> None:
    row = random_row(1)
    before = row.copy()
    adjust(row, Adjustments())
    none = ids([])
    adjust(row, Adjustments(Bias(none, none.astype(np.float32)), Penalties(none, none, 2.0, 1.0, 1.0), none))
    seen = ids([1, 2, 50])
    adjust(row, Adjustments(penalties=Penalties(seen, seen)))
    assert np.array_equal(row, before)
