"""From logits to tokens and reports: raw log-probabilities, broken rows, prompts in slices."""

import numpy as np
import torch
from evenflow.control.wire import Logprobs
from evenflow.dataplane import sampler
from evenflow.dataplane.batch import SamplingRows
from evenflow.dataplane.extras import History, PromptTokens, RowExtras
from evenflow.dataplane.sampler import choose, prompt_logprobs


def rows(temperature: list[float], extras: dict[int, RowExtras]) -> SamplingRows:
    count = len(temperature)
    return SamplingRows(
        rows=np.arange(count, dtype=np.int32),
        temperature=np.array(temperature, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.arange(count, dtype=np.uint64),
        index=np.zeros(count, np.uint32),
        position=np.arange(40, 40 + count),
        extras=extras,
    )


def values_of(report: Logprobs) -> np.ndarray:
    return np.frombuffer(report.values, "<f4")


def test_logprobs_are_of_the_logits_before_any_change() -> None:
    logits = torch.randn(3, 900, generator=torch.Generator().manual_seed(2))
    wanted = torch.log_softmax(logits, -1).numpy()
    best = logits.argmax(-1).tolist()
    history = History(np.array(best, np.uint32), np.array([], np.uint32))
    extras = {
        0: RowExtras(bias=(np.array([7]), np.array([100.0], np.float32)), logprobs=2),
        1: RowExtras(history=history, repetition=10.0, forbidden=np.array([3]), logprobs=0),
        2: RowExtras(logprobs=1),
    }
    ids, found = choose(logits.clone(), rows([0.0, 0.0, 0.0], extras), np.array([5, 9, 11]))
    assert ids[0] == 7 and ids[1] != best[1] and ids[2] == best[2]
    assert [(report.slot, report.start) for report in found] == [(5, 40), (9, 41), (11, 42)]
    for row, report in enumerate(found):
        np.testing.assert_allclose(values_of(report), wanted[row, ids[row : row + 1]], atol=1e-5)
    assert np.frombuffer(found[0].top_ids, "<u4").tolist() == torch.topk(logits[0], 2).indices.tolist()
    assert np.frombuffer(found[1].ranks, "<u4")[0] > 1 and found[1].top_ids == b""


def test_a_row_of_nan_disturbs_nobody() -> None:
    """Whatever it asks for, it gets a token, and the others get theirs."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(4))
    broken = logits.clone()
    broken[1], broken[2, 10:] = torch.nan, torch.nan
    everything = RowExtras(
        bias=(np.array([7]), np.array([1.0], np.float32)),
        history=History(np.array([1, 20], np.uint32), np.array([20], np.uint32)),
        repetition=1.1,
        presence=0.1,
        frequency=0.1,
        forbidden=np.array([2]),
        logprobs=3,
    )
    for temperature in (0.0, 0.8):
        asked = rows([temperature] * 4, dict.fromkeys(range(4), everything))
        expected, reports = choose(logits.clone(), asked, np.arange(4))
        ids, found = choose(broken.clone(), asked, np.arange(4))
        assert ids[[0, 3]].tolist() == expected[[0, 3]].tolist()
        assert [found[row] for row in (0, 3)] == [reports[row] for row in (0, 3)]
        assert ids[[1, 2]].tolist() == [0, 10]
        assert values_of(found[1]).tolist() == values_of(found[2]).tolist() == [-np.inf]


def test_prompts_are_reported_whole_though_their_logits_come_in_slices() -> None:
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(5))
    asked: list[int] = []

    def of_tokens(numbers: torch.Tensor) -> torch.Tensor:
        asked.append(len(numbers))
        return logits[numbers]

    tokens = np.arange(150) % 300
    prompts = [PromptTokens(3, 10, 21, tokens, 2), PromptTokens(8, 160, 1, tokens[:4], 0)]
    found = prompt_logprobs(prompts, of_tokens)
    assert asked == [sampler.SLICE, sampler.SLICE, 150 - 2 * sampler.SLICE, 4]
    assert [(report.slot, report.start, len(report.top_ids)) for report in found] == [(3, 21, 1200), (8, 1, 0)]
    wanted = torch.log_softmax(logits, -1).numpy()
    np.testing.assert_allclose(values_of(found[0]), wanted[np.arange(10, 160), tokens], atol=1e-5)
    np.testing.assert_allclose(values_of(found[1]), wanted[np.arange(160, 164), tokens[:4]], atol=1e-5)
