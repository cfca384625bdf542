"""The draw: against a direct rule and the filters of transformers, limits, broken rows, independence of the batch."""

import numpy as np
import pytest
import torch
from evenflow.kernels import sampling
from evenflow.kernels.noise import BLOCK, gumbel
from evenflow.kernels.sampling import SamplingParams, keys_of, sample
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

SIZES = st.sampled_from([2, 63, 64, 65, 512, 6000, 20_032])


def floor_of(logits: torch.Tensor, params: SamplingParams) -> float:
    """The least logit that the filters keep of one row."""
    padded = torch.nn.functional.pad(logits, (0, -len(logits) % BLOCK), value=-torch.inf)
    peaks = padded.view(-1, BLOCK).amax(1).numpy()
    return float(sampling._floor(logits.numpy(), peaks, float(logits.max()), params))


def random_logits(size: int, seed: int, scale: float, grain: float = 0.0, masked: float = 0.0) -> torch.Tensor:
    """Normal logits; ``grain`` rounds them, so that many are equal, ``masked`` is the share of -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator) * scale
    if grain:
        logits = (logits / grain).round() * grain
    logits[1:][torch.rand(size - 1, generator=generator) < masked] = -torch.inf
    return logits


@given(
    size=SIZES,
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    grain=st.sampled_from([0.0, 0.5]),
    masked=st.sampled_from([0.0, 0.9]),
    temperature=st.floats(0.0625, 100.0, width=32),
    top_k=st.sampled_from([0, 1, 2, 50, 300, 5000, 10**9]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_equals_the_direct_rule_within_what_transformers_keeps(
    size: int, seed: int, scale: float, grain: float, masked: float, **filters: float
) -> None:
    """In float64: every filter, then the largest sum of logit and noise over all that is kept.

    Two things differ from transformers: of equal logits at the border all are kept, and the mass is summed in
    another precision, so its border may be another where it is met almost exactly.
    """
    logits = random_logits(size, seed, scale, grain, masked)
    params = SamplingParams(seed=seed, position=seed % 977, index=2, **filters)  # type: ignore[arg-type]
    scaled = (logits.double() - logits.max()) / params.temperature
    scores = scaled[None]
    if 0 < params.top_k < size:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        mass = torch.softmax(scores[0], 0).sort(descending=True).values.cumsum(0)
        assume(params.top_p < 1e-3 or ((mass - params.top_p).abs() > 1e-6).all())
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0.0:
        assume(params.min_p == 1.0 or ((scaled - np.log(params.min_p)).abs() > 1e-9).all())
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    kept = torch.isfinite(scores[0])
    border = logits[kept].min()
    expected = (logits >= border) & (logits > -torch.inf)
    if params.top_k or params.top_p < 1.0 or params.min_p:
        assert torch.equal((logits >= floor_of(logits, params)) & (logits > -torch.inf), expected)
    ids = torch.arange(size)[expected].numpy()
    with np.errstate(over="ignore"):
        sums = scaled[expected].numpy() + gumbel(keys_of([params]), ids)[0]
    assert sample(logits[None], {0: params})[0] == ids[sums.argmax()]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 100)
    logits[0, [17, 80]] = 3.0
    assert sample(logits, {}).tolist() == [17, 0]


def draws(logits: torch.Tensor, count: int, **params: float) -> np.ndarray:
    rows = {n: SamplingParams(seed=99, position=n, **params) for n in range(count)}  # type: ignore[arg-type]
    tokens = sample(logits.expand(count, -1).contiguous(), rows)
    return np.bincount(tokens, minlength=len(logits)) / count


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -torch.inf])
    for temperature in (0.7, 1.0, 2.0):
        expected = torch.softmax(logits / temperature, 0).numpy()
        # Four standard errors of a share of 2,000 draws are at most 0.045.
        assert np.abs(draws(logits, 2000, temperature=temperature) - expected).max() < 0.045


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    logits = probabilities.log()
    kept = draws(logits, 600, temperature=1.0, top_k=3)
    assert set(np.flatnonzero(kept)) == {1, 3, 4}
    kept = draws(logits, 600, temperature=1.0, top_p=0.6)
    assert set(np.flatnonzero(kept)) == {1, 3}
    assert abs(kept[1] - 0.4 / 0.65) < 0.09
    # Top-p counts the mass that top-k left: 0.4 of 0.65 is already more than 0.6.
    assert set(np.flatnonzero(draws(logits, 100, temperature=1.0, top_k=2, top_p=0.6))) == {1}


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(11, 3000, generator=torch.Generator().manual_seed(0))
    logits[8, 5] = torch.nan
    logits[9] = -torch.inf
    logits[10, 7] = torch.inf
    draws = {
        1: SamplingParams(1.0, seed=2**64 - 1, position=10),
        2: SamplingParams(0.5, top_k=5, seed=1, index=3),
        3: SamplingParams(1.3, top_p=0.9, seed=1),
        4: SamplingParams(1.0, top_k=2000, top_p=0.99, seed=1),
        5: SamplingParams(1.0, top_k=1, seed=8),
        6: SamplingParams(2.0, min_p=0.05, seed=1, index=1),
        7: SamplingParams(2.0, seed=1, index=2),
        8: SamplingParams(1.0, top_k=40),
        9: SamplingParams(1.0, top_p=0.5),
        10: SamplingParams(1.0, min_p=0.5),
    }
    together = sample(logits, draws)
    # Rows without a distribution: the first NaN, the first of the largest.
    assert together[8:].tolist() == [5, 0, 7]
    for row in range(11):
        alone = sample(logits[row : row + 1], {0: draws[row]} if row in draws else {})
        assert alone[0] == together[row], row
    order = [5, 9, 0, 7, 3, 8, 1, 6, 10, 2, 4]
    shuffled = sample(logits[order], {order.index(row): params for row, params in draws.items()})
    assert shuffled.tolist() == together[order].tolist()
    assert sample(logits[[8, 0]], {}).tolist() == [5, together[0]]


def test_many_rows_are_drawn_in_groups() -> None:
    """More rows than one group of blocks of noise holds."""
    logits = torch.randn(200, 6016, generator=torch.Generator().manual_seed(1))
    draws = {row: SamplingParams(1.0, seed=row) for row in range(0, 200, 3)}
    assert len(draws) * 6016 // BLOCK < sampling._GROUP
    together = sample(logits, draws)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_GROUP", 500)
        assert np.array_equal(sample(logits, draws), together)
    assert together[1] == logits[1].argmax()


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6, 1.0, 100.0])
@pytest.mark.parametrize("top_k", [-1, 0, 1, 50, 10**6])
@pytest.mark.parametrize(("top_p", "min_p"), [(1e-6, 0.0), (0.5, 1e-45), (1.0, 1.0), (1.0, 0.0)])
def test_extreme_parameters_give_a_valid_token(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 30
    params = SamplingParams(temperature, top_k, top_p, min_p, seed=4)
    for row in (logits, logits * 1e36):
        token = sample(row[None], {0: params})[0]
        assert 0 <= token < 2000
        if temperature < 1e-5 or top_k == 1 or top_p == 1e-6 or min_p == 1.0:
            assert token == int(row.argmax())
    flat = sample(torch.zeros(1, 2000), {0: params})[0]
    assert 0 <= flat < 2000


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((4001,), -torch.inf)
    logits[[5, 3000, 4000]] = torch.tensor([1.0, 1.2, 1.1])
    for params in ({}, {"top_k": 3}, {"top_k": 700}, {"top_p": 0.9}, {"min_p": 1e-9}):
        assert set(np.flatnonzero(draws(logits, 80, temperature=5.0, **params))) == {5, 3000, 4000}
