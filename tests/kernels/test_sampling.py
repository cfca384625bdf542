"""Philox bits, and the draw: distribution, limits, independence of the batch."""

import numpy as np
import pytest
import torch
from evenflow.kernels.philox import philox4x32
from evenflow.kernels.sampling import SamplingParams, gumbel, sample


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    first = np.array([counter[0]], np.uint32)
    words = philox4x32(first, (counter[1], counter[2], counter[3]), key[1] << 32 | key[0])
    assert tuple(words[0].tolist()) == expected


def test_philox_of_many_counters_equals_one_by_one() -> None:
    first = np.arange(20_000, dtype=np.uint32)
    many = philox4x32(first, (5, 6, 0), 7)
    for index in (0, 8191, 8192, 19_999):
        assert np.array_equal(philox4x32(first[index : index + 1], (5, 6, 0), 7)[0], many[index])


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 100)
    logits[0, [17, 80]] = 3.0
    assert sample(logits, [SamplingParams(), SamplingParams()]).tolist() == [17, 0]


def draws(logits: torch.Tensor, count: int, **params: float) -> np.ndarray:
    tokens = [
        sample(logits[None], [SamplingParams(seed=99, position=n, **params)])[0]  # type: ignore[arg-type]
        for n in range(count)
    ]
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


def test_large_vocabulary_equals_the_direct_rule() -> None:
    """The shortcuts (a head of candidates, noise only where it can win) do not change the result."""
    generator = torch.Generator().manual_seed(3)
    for scale in (0.01, 3.0):
        logits = torch.randn(6000, generator=generator) * scale
        ids = np.arange(6000)
        for position in range(20):
            params = SamplingParams(temperature=0.8, seed=5, position=position)
            direct = logits.numpy().astype(np.float64) / 0.8 + gumbel(ids, params)
            assert sample(logits[None], [params])[0] == direct.argmax()
        for top_p in (0.3, 0.9, 0.999):
            params = SamplingParams(temperature=0.8, top_p=top_p, seed=5)
            scaled = logits.numpy().astype(np.float64) / 0.8
            order = np.argsort(-scaled, kind="stable")
            mass = np.cumsum(np.exp(scaled[order] - scaled.max()))
            nucleus = order[: np.searchsorted(mass, top_p * mass[-1]) + 1]
            best = nucleus[(scaled[nucleus] + gumbel(nucleus, params)).argmax()]
            assert sample(logits[None], [params])[0] == best


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=2**64 - 1, position=10),
        SamplingParams(temperature=0.5, top_k=5, seed=1, index=3),
        SamplingParams(temperature=1.3, top_p=0.9, seed=1),
        SamplingParams(temperature=1.0, top_k=2000, top_p=0.99, seed=1),
        SamplingParams(temperature=1.0, top_k=1, seed=8),
        SamplingParams(temperature=2.0, seed=1, index=1),
        SamplingParams(temperature=2.0, seed=1, index=2),
    ]
    together = sample(logits, params)
    assert [int(sample(logits[row : row + 1], [params[row]])[0]) for row in range(8)] == together.tolist()
    order = [5, 0, 7, 3, 1, 6, 2, 4]
    assert sample(logits[order], [params[row] for row in order]).tolist() == together[order].tolist()


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1.0, 100.0])
@pytest.mark.parametrize("top_k", [-1, 0, 1, 50, 10**6])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 1.0])
def test_extreme_parameters_give_a_valid_token(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 30
    temperature = float(np.float32(temperature))
    token = sample(logits[None], [SamplingParams(temperature, top_k, top_p, seed=4)])[0]
    assert 0 <= token < 2000
    if temperature < 1e-5 or top_k == 1 or top_p == 1e-6:
        assert token == int(logits.argmax())
    flat = sample(torch.zeros(1, 2000), [SamplingParams(temperature, top_k, top_p, seed=4)])[0]
    assert 0 <= flat < 2000


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((4000,), -torch.inf)
    logits[[5, 3000]] = torch.tensor([1.0, 1.2])
    for params in ({}, {"top_k": 3}, {"top_p": 0.9}):
        assert set(np.flatnonzero(draws(logits, 50, temperature=5.0, **params))) <= {5, 3000}
