"""Log-probabilities, ranks and best tokens against a log-softmax in float64 and a stable sort."""

import numpy as np
import pytest
import torch
from evenflow.kernels.logprobs import TokenLogprobs, logprobs
from hypothesis import given, settings
from hypothesis import strategies as st


def random_rows(count: int, size: int, seed: int, scale: float, grain: float, masked: float) -> np.ndarray:
    source = np.random.default_rng(seed)
    rows = source.normal(0, scale, (count, size)).astype(np.float32)
    if grain:
        rows = np.round(rows / np.float32(grain)) * np.float32(grain)
    rows[:, 1:][source.random((count, size - 1)) < masked] = -np.inf
    return rows


def fields(found: TokenLogprobs) -> list[bytes]:
    return [array.tobytes() for array in (found.values, found.ranks, found.top_ids, found.top_values)]


@given(
    size=st.sampled_from([1, 5, 64, 1300, 20_000]),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.1, 4.0, 1000.0]),
    grain=st.sampled_from([0.0, 0.5]),
    masked=st.sampled_from([0.0, 0.5]),
    best=st.sampled_from([0, 1, 5, 20]),
)
@settings(max_examples=60, deadline=None)
def test_equal_a_reference(size: int, seed: int, scale: float, grain: float, masked: float, best: int) -> None:
    rows = random_rows(2, size, seed, scale, grain, masked)
    tokens = np.random.default_rng(seed).integers(0, size, 2)
    found = logprobs(rows, tokens, best)
    expected = torch.log_softmax(torch.from_numpy(rows).double(), 1).numpy()
    for n in (0, 1):
        order = np.argsort(-rows[n], kind="stable")
        near = {"rtol": 2e-6, "atol": 2e-6}
        np.testing.assert_allclose(found.values[n], expected[n, tokens[n]], **near)
        assert order[found.ranks[n] - 1] == tokens[n]
        assert found.top_ids[n].tolist() == order[:best].tolist()
        np.testing.assert_allclose(found.top_values[n], expected[n, order[:best]], **near)
    assert found.top_ids.shape == found.top_values.shape == (2, min(best, size))


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = random_rows(9, 5000, 3, 4.0, 0.0, 0.0)
    tokens = np.arange(9) * 500
    together = logprobs(rows, tokens, 7)
    for n in range(9):
        alone = logprobs(rows[n : n + 1], tokens[n : n + 1], 7)
        part = TokenLogprobs(*(getattr(together, name)[n : n + 1] for name in TokenLogprobs.__slots__))
        assert fields(alone) == fields(part)
    assert fields(logprobs(rows[:0], tokens[:0], 7)) == [b""] * 4


@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_rows_without_a_distribution(broken: float) -> None:
    rows = np.full((2, 200), broken, np.float32)
    rows[0, 100:] = 1.0
    found = logprobs(rows, np.array([150, 150]), 2)
    if broken == np.inf:
        assert found.values.tolist() == [-np.inf, -np.inf]
        assert found.ranks.tolist() == [151, 151]
        assert found.top_ids.tolist() == [[0, 1], [0, 1]]
    else:
        # What is masked or no number has no part in the others.
        assert found.values[0] == pytest.approx(-np.log(100)) and found.values[1] == -np.inf
        assert found.ranks.tolist() == [51, 151]
        assert found.top_ids.tolist() == [[100, 101], [0, 1]]
