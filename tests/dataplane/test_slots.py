"""The slot table: what a plan means, and every broken reference refused."""

import numpy as np
import pytest
from evenflow.control.wire import BatchPlan, Register, Sampling, Start
from evenflow.control.wire.digest import audit_digest
from evenflow.dataplane.slots import PlanRefused, SlotTable

BLOCK = 4


def u16(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def bits(*slots: int) -> bytes:
    return sum(1 << slot for slot in slots).to_bytes(16, "little")


def start(**changes: object) -> Start:
    fields = {
        "epoch": 1,
        "stages": 1,
        "num_blocks": 20,
        "block_size": BLOCK,
        "num_slots": 128,
        "token_budget": 32,
        "max_model_len": 24,
        "links": "",
    }
    return Start(**{**fields, **changes})


def register(slot: int = 0, tokens=(5, 6, 7, 8, 9), blocks=(3, 1), **changes: object) -> Register:
    fields = {"generation": 1, "request": 1, "prompt_len": len(tokens), "computed": 0, "max_len": 24}
    return Register(slot=slot, tokens=u32(*tokens), blocks=u32(*blocks), **{**fields, **changes})


def plan(step: int = 0, decodes=(), chunks=(), grow=(), released=()) -> BatchPlan:
    return BatchPlan(
        epoch=1,
        step=step,
        lane=0,
        decodes=bits(*decodes),
        grow_slots=u16(*(slot for slot, _ in grow)),
        grow_blocks=u32(*(block for _, block in grow)),
        chunk_slots=u16(*(slot for slot, _ in chunks)),
        chunk_tokens=u32(*(tokens for _, tokens in chunks)),
        released=u16(*released),
    )


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(start(), first=True, last=True)


def give(table: SlotTable, slot: int, token: int, generation: int = 1) -> None:
    table.append(np.array([slot]), np.array([generation]), np.array([token]))


def test_chunks_and_decodes_become_rows(table):
    batch = table.apply([register(7, tokens=(1, 2, 3, 4, 5), blocks=(9, 2))], plan(chunks=[(7, 5)]))
    table.fill_inputs(batch)
    assert batch.ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.write.tolist() == [36, 37, 38, 39, 8]
    assert batch.sampling.rows.tolist() == [0]
    assert batch.sampling.position.tolist() == [5]
    give(table, 7, 70)

    # Rows: decodes by slot, then chunks by slot, whatever the order in the plan.
    seeded = Sampling(temperature=0.5, top_k=2**32 - 1, top_p=0.25, seed=2**64 - 1, index=9)
    batch = table.apply(
        [register(3, blocks=(4, 5), sampling=seeded), register(1, blocks=(6, 7))],
        plan(1, decodes=[7], chunks=[(3, 5), (1, 3)]),
    )
    assert table.inputs_arrived(batch)
    table.fill_inputs(batch)
    assert batch.slots.tolist() == [7, 1, 3]
    assert batch.num_decodes == 1
    assert batch.cu_q.tolist() == [0, 1, 4, 9]
    assert batch.ids.tolist() == [70, 5, 6, 7, 5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [5, 0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.kv_len.tolist() == [6, 3, 5]
    assert batch.block_table.tolist() == [[9, 2], [6, 7], [4, 5]]
    assert batch.write.tolist() == [9, 24, 25, 26, 16, 17, 18, 19, 20]
    # The chunk that ends before the last known token does not sample.
    assert batch.sampling.rows.tolist() == [0, 2]
    assert batch.sampling.position.tolist() == [6, 5]
    assert batch.sampling.prompt_len.tolist() == [5, 5]
    assert batch.sampling.seed.tolist() == [0, 2**64 - 1]
    assert batch.sampling.index.tolist() == [0, 9]
    assert batch.sampling.top_k.tolist() == [0, 2**31 - 1]
    assert batch.sampling.top_p.tolist() == [1.0, 0.25]
    assert batch.sampling.temperature.tolist() == [0.0, 0.5]


def test_a_cached_prefix_is_not_computed_again(table):
    batch = table.apply([register(computed=4)], plan(chunks=[(0, 1)]))
    table.fill_inputs(batch)
    assert (batch.ids.tolist(), batch.positions.tolist(), batch.kv_len.tolist()) == ([9], [4], [5])
    assert batch.sampling.position.tolist() == [5]


def test_sec_1_ids_that_the_model_does_not_have_are_refused():
    table = SlotTable(start(), first=True, last=True, vocab_size=100)
    with pytest.raises(PlanRefused, match="register of slot 0: token 100 of 100"):
        table.apply([register(tokens=(5, 100, 7))], plan(chunks=[(0, 3)]))
    table = SlotTable(start(), first=True, last=True, vocab_size=100)
    biased = Sampling(bias_ids=u32(3, 100), bias_values=bytes(8))
    with pytest.raises(PlanRefused, match="register of slot 0: bias of token 100 of 100"):
        table.apply([register(sampling=biased)], plan(chunks=[(0, 5)]))


def test_lookahead_waits_for_the_row_and_only_for_that(table):
    table.apply([register(0), register(1, blocks=(4, 5))], plan(chunks=[(0, 5), (1, 5)]))
    batch = table.apply([], plan(1, decodes=[0, 1]))
    assert not table.inputs_arrived(batch)
    give(table, 1, 11)
    assert not table.inputs_arrived(batch)
    give(table, 0, 10)
    assert table.inputs_arrived(batch)
    table.fill_inputs(batch)
    assert batch.ids.tolist() == [10, 11]


def test_ids_of_an_older_registration_are_dropped(table):
    table.apply([register()], plan(chunks=[(0, 5)]))
    table.apply([], plan(1, released=[0]))
    give(table, 0, 99)
    table.apply([register(generation=2)], plan(2, chunks=[(0, 5)]))
    give(table, 0, 99, generation=1)
    batch = table.apply([], plan(3, decodes=[0]))
    assert not table.inputs_arrived(batch)
    give(table, 0, 42, generation=2)
    table.fill_inputs(batch)
    assert batch.ids.tolist() == [42]


def test_the_last_id_of_a_slot_does_not_get_among_the_prompt_of_its_next_owner(table):
    table.apply([register()], plan(chunks=[(0, 5)]))
    give(table, 0, 99)
    again = register(generation=2, tokens=(1, 2, 3, 4, 5, 6, 7))
    batch = table.apply([again, register(1, blocks=(4, 5))], plan(1, chunks=[(0, 7), (1, 5)], released=[0]))
    table.fill_inputs(batch)
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9]
    # One whose last token is all that is left to compute decodes at once.
    done = register(1, generation=2, tokens=(1, 2, 3), blocks=(4,), computed=2)
    batch = table.apply([done], plan(2, decodes=[1], released=[1]))
    assert table.inputs_arrived(batch)
    table.fill_inputs(batch)
    assert batch.ids.tolist() == [3]


def test_release_register_grow_run_happen_in_this_order(table):
    table.apply([register()], plan(chunks=[(0, 5)]))
    batch = table.apply(
        [register(generation=2, blocks=(8,), tokens=(1, 2, 3, 4, 5))],
        plan(1, chunks=[(0, 5)], grow=[(0, 9)], released=[0]),
    )
    assert batch.block_table.tolist() == [[8, 9]]
    assert batch.write.tolist() == [32, 33, 34, 35, 36]


def test_growth_adds_a_block_at_the_end(table):
    table.apply([register(tokens=(1, 2, 3, 4), blocks=(3,))], plan(chunks=[(0, 4)]))
    batch = table.apply([], plan(1, decodes=[0], grow=[(0, 19)]))
    assert batch.block_table.tolist() == [[3, 19]]
    assert batch.write.tolist() == [76]


def test_stops_count_from_the_minimum_length_and_lists_may_be_long(table):
    batch = table.apply(
        [
            register(0, stop_ids=(4, 5), min_len=6),
            register(1, blocks=(4, 5), stop_ids=tuple(range(64)), min_len=7),
            register(2, blocks=(6, 7)),
        ],
        plan(chunks=[(0, 5), (1, 5), (2, 5)]),
    )
    position = np.array([5, 5, 5])
    assert batch.receivers.slots.tolist() == [0, 1, 2]
    assert batch.receivers.stopped(np.array([4, 4, 4]), position).tolist() == [0]
    assert batch.receivers.stopped(np.array([6, 63, 0]), position + 1).tolist() == [1]


def test_middle_and_first_stages_do_not_sample():
    batch = SlotTable(start(), first=True, last=False).apply([register()], plan(chunks=[(0, 5)]))
    assert batch.sampling is None


def test_digest_covers_the_slots_under_audit():
    table = SlotTable(start(), first=True, last=True)
    table.apply(
        [register(slot, blocks=(2 * slot % 19, 1), generation=7) for slot in (0, 1, 64)],
        plan(chunks=[(0, 5), (1, 2), (64, 3)]),
    )
    assert table.digest(14) is None
    expected = audit_digest([(0, 7, 5, [0, 1]), (64, 7, 3, [128 % 19, 1])])
    assert table.digest(15) == expected
    assert table.digest(31) == audit_digest([(1, 7, 2, [2, 1])])
    assert table.digest(47) == 0
    table.apply([], plan(1, released=[64]))
    assert table.digest(15) == audit_digest([(0, 7, 5, [0, 1])])


RUNNING = [register()], plan(chunks=[(0, 5)])


@pytest.mark.parametrize(
    ("registers", "broken", "reason"),
    [
        ([], plan(1, decodes=[1]), "slot 1 is not registered"),
        ([], plan(1, released=[1]), "released: slot 1 is not registered"),
        ([], plan(1, decodes=[0], released=[0]), "rows: slot 0 is not registered"),
        ([], plan(1, grow=[(1, 2)]), "grow_slots: slot 1 is not registered"),
        ([], plan(1, chunks=[(1, 2)]), "slot 1 is not registered"),
        ([], plan(1, chunks=[(500, 2)]), "slot 500 of 128"),
        ([], plan(1, chunks=[(0, 2)]), "to 7 tokens, 6 are known"),
        ([], plan(1, chunks=[(0, 0)]), "is empty"),
        ([], plan(1, decodes=[0], chunks=[(0, 1)]), "two rows"),
        ([], plan(1, grow=[(0, 20)]), "block 20 of 20"),
        ([], plan(1, grow=[(0, 2), (0, 4)]), "grows twice"),
        ([register(1, blocks=(20, 1))], plan(1), "block 20 of 20"),
        ([register(1, blocks=())], plan(1, chunks=[(1, 1)]), "1 tokens past its 0 blocks"),
        ([register(1, blocks=(2,))], plan(1, chunks=[(1, 5)]), "5 tokens past its 1 blocks"),
        ([register(1, blocks=(), computed=4)], plan(1), "0 blocks for 4 computed"),
        ([register(1, blocks=tuple(range(7)))], plan(1), "7 blocks"),
        ([register(1)], plan(1, decodes=[1]), "decodes at 0, 5 tokens are known"),
        ([register(1, computed=5)], plan(1), "computed 5 < known 5"),
        ([register(1, tokens=())], plan(1), "known 0"),
        ([register(1, max_len=25)], plan(1), "max_len 25 <= 24"),
        ([register(1, max_len=4)], plan(1), "max_len 4"),
        ([register(1, prompt_len=6)], plan(1), "prompt of 6 in 5 tokens"),
        ([register(1, max_len=5)], plan(1, chunks=[(1, 5)]), "would sample past its 5 tokens"),
        ([register(128)], plan(1), "there are 128 slots"),
        ([register(0, generation=2)], plan(1), "still registered"),
        ([register(0, generation=1)], plan(1, released=[0]), "generation 1 after 1"),
        (
            [register(1, tokens=range(20), blocks=range(5)), register(2, tokens=range(20), blocks=range(5))],
            plan(1, chunks=[(1, 20), (2, 20)]),
            "40 tokens with a budget of 32",
        ),
    ],
)
def test_broken_references_are_refused(table, registers, broken, reason):
    table.apply(*RUNNING)
    with pytest.raises(PlanRefused) as refused:
        table.apply(registers, broken)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "broken",
    [
        BatchPlan(1, 1, 0, b"", grow_slots=b"x"),
        BatchPlan(1, 1, 0, b"", chunk_slots=u16(0), chunk_tokens=b"xyz"),
        BatchPlan(1, 1, 0, b"", chunk_slots=u16(0), chunk_tokens=u32(1, 2)),
        BatchPlan(1, 1, 0, b"", grow_slots=u16(0), grow_blocks=b""),
        BatchPlan(1, 1, 0, b"\xff" * 8192),
    ],
)
def test_buffers_that_do_not_fit_together_are_refused(table, broken):
    table.apply(*RUNNING)
    with pytest.raises(PlanRefused):
        table.apply([], broken)


def test_a_table_does_not_grow_past_the_longest_sequence():
    table = SlotTable(start(max_model_len=8), first=True, last=True)
    table.apply([register(max_len=8)], plan(chunks=[(0, 5)]))
    with pytest.raises(PlanRefused, match="has 2 blocks, the most"):
        table.apply([], plan(1, grow=[(0, 5)]))
