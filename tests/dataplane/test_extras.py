"""Biases, penalties, minimum lengths and log-probabilities: from REGISTER to the rows of the last stage."""

from collections import Counter

import numpy as np
import pytest
from evenflow.control.wire import BatchPlan, Register, Sampling, Start
from evenflow.dataplane.extras import History, RowExtras, remember
from evenflow.dataplane.slots import PlanRefused, SlotTable
from hypothesis import given
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(0, 40), max_size=40)


def u16(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def plan(step: int = 0, decodes=(), chunks=(), released=()) -> BatchPlan:
    return BatchPlan(
        epoch=1,
        step=step,
        lane=0,
        decodes=sum(1 << slot for slot in decodes).to_bytes(2, "little"),
        chunk_slots=u16(*(slot for slot, _ in chunks)),
        chunk_tokens=u32(*(tokens for _, tokens in chunks)),
        released=u16(*released),
    )


def register(slot: int, tokens=(5, 6, 7, 8, 9), generation: int = 1, **fields: object) -> Register:
    values = {"prompt_len": len(tokens), "computed": 0, "max_len": 24, **fields}
    blocks = u32(2 * slot, 2 * slot + 1)
    return Register(slot=slot, generation=generation, request=1, tokens=u32(*tokens), blocks=blocks, **values)


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(Start(1, 1, 20, 8, 10, 32, 24, ""), first=True, last=True)


@given(prompt=TOKENS, output=TOKENS, later=TOKENS)
def test_a_history_counts_what_came(prompt: list[int], output: list[int], later: list[int]) -> None:
    history = History(np.array(prompt, np.uint32), np.array(output, np.uint32))
    counted = Counter(output)
    for token in [None, *later]:
        if token is not None:
            history.append(token)
            counted[token] += 1
        ids = history.ids.tolist()
        assert sorted(ids) == sorted({*prompt, *counted})
        assert history.counts.tolist() == [counted[token] for token in ids]


def test_rows_without_extras_have_none(table: SlotTable) -> None:
    rows = table.apply([register(0), register(1, min_len=6, stop_ids=(3,))], plan(chunks=[(0, 5), (1, 5)]))
    assert rows.sampling.extras == {} and not rows.prompts
    other = SlotTable(Start(1, 2, 20, 8, 10, 32, 24, ""), first=True, last=False)
    batch = other.apply([register(0, sampling=Sampling(repetition=2.0, prompt_logprobs=1))], plan(chunks=[(0, 5)]))
    assert batch.sampling is None and not batch.prompts


def test_extras_are_those_of_the_row(table: SlotTable) -> None:
    biased = Sampling(bias_ids=u32(7, 9), bias_values=f32(-1.5, 100))
    batch = table.apply(
        [register(4, sampling=biased), register(2), register(1, sampling=Sampling(min_p=0.25, logprobs=3))],
        plan(chunks=[(4, 5), (2, 5), (1, 5)]),
    )
    assert batch.sampling.min_p.tolist() == [0.25, 0.0, 0.0]
    extras = batch.sampling.extras
    assert sorted(extras) == [0, 2]
    assert extras[0] == RowExtras(logprobs=3)
    ids, values = extras[2].bias
    assert (ids.tolist(), values.tolist()) == ([7, 9], [-1.5, 100.0])


def test_stop_ids_are_forbidden_until_the_minimum_length(table: SlotTable) -> None:
    """Five tokens are known: the sixth may not be a stop, the seventh may."""
    wanted = {"min_len": 7, "stop_ids": (3, 4)}
    registers = [register(0, **wanted), register(1, sampling=Sampling(logprobs=0), **wanted), register(2, min_len=9)]
    extras = table.apply(registers, plan(chunks=[(0, 5), (1, 5), (2, 5)])).sampling.extras
    assert sorted(extras) == [0, 1]
    assert [extras[row].forbidden.tolist() for row in (0, 1)] == [[3, 4], [3, 4]]
    assert [extras[row].logprobs for row in (0, 1)] == [-1, 0]
    assert table.apply([], plan(1, decodes=[0, 1])).sampling.extras == {1: RowExtras(logprobs=0)}


def test_penalties_know_what_was_drawn(table: SlotTable) -> None:
    """Also when the next batch was derived before; prompt ids count for repetition only."""
    both = Sampling(repetition=1.5, presence=1.0)
    output_only = Sampling(frequency=1.0)
    first = table.apply(
        [
            register(0, (5, 6, 5, 8, 8), prompt_len=3, sampling=both),
            register(1, (5, 6, 5, 8, 8), prompt_len=3, sampling=output_only),
        ],
        plan(chunks=[(0, 5), (1, 5)]),
    )
    ahead = table.apply([], plan(1, decodes=[0, 1]))
    histories = [ahead.sampling.extras[row].history for row in (0, 1)]
    assert histories[0].ids.tolist() == [5, 6, 8] and histories[0].counts.tolist() == [0, 0, 2]
    assert histories[1].ids.tolist() == [8] and histories[1].counts.tolist() == [2]
    remember(first.sampling.extras, np.array([6, 40]))
    assert histories[0].counts.tolist() == [0, 1, 2]
    assert histories[1].ids.tolist() == [8, 40] and histories[1].counts.tolist() == [2, 1]


def test_a_late_id_does_not_reach_the_slots_next_owner(table: SlotTable) -> None:
    penalised = Sampling(presence=1.0)
    before = table.apply([register(0, sampling=penalised)], plan(chunks=[(0, 5)]))
    after = table.apply([register(0, generation=2, sampling=penalised)], plan(1, chunks=[(0, 5)], released=[0]))
    remember(before.sampling.extras, np.array([9]))
    assert after.sampling.extras[0].history.ids.tolist() == []
    plain = table.apply([register(0, generation=3)], plan(2, chunks=[(0, 5)], released=[0]))
    assert plain.sampling.extras == {}


def test_prompt_tokens_come_after_each_place_of_a_chunk(table: SlotTable) -> None:
    """Across chunks; not the output's, and none where only the output is left to compute."""

    def told(batch) -> list[tuple[int, int, int, list[int], int]]:
        return [(p.slot, p.first, p.start, p.tokens.tolist(), p.best) for p in batch.prompts]

    wanted = Sampling(prompt_logprobs=2)
    registers = [register(3), register(6, (1, 2, 3, 4, 5, 6), prompt_len=4, sampling=wanted)]
    assert told(table.apply(registers, plan(chunks=[(3, 3), (6, 2)]))) == [(6, 3, 1, [2, 3], 2)]
    assert told(table.apply([], plan(1, chunks=[(3, 2), (6, 1)]))) == [(6, 2, 3, [4], 2)]
    assert told(table.apply([], plan(2, decodes=[3], chunks=[(6, 3)]))) == []
    assert told(table.apply([], plan(3, decodes=[3, 6]))) == []
    one = [register(7, (1,), sampling=wanted)]
    assert told(table.apply(one, plan(4, chunks=[(7, 1)]))) == []


@pytest.mark.parametrize(("ids", "values"), [(u32(1, 2), f32(1.0)), (b"", f32(1.0)), (b"xyz", b"xyz")])
def test_biases_that_do_not_fit_together_are_refused(table: SlotTable, ids: bytes, values: bytes) -> None:
    with pytest.raises(PlanRefused, match=r"register of slot 0: . bytes of bias_ids"):
        table.apply([register(0, sampling=Sampling(bias_ids=ids, bias_values=values))], plan())
