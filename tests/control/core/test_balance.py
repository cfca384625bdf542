"""Balance of pipelines, on the real core in virtual time: decodes over lanes, prompts over turns, what it gains."""

import random
from array import array

import pytest
from evenflow.control.bubbles import CAUSES
from evenflow.control.core.balance import SLACK
from evenflow.control.core.events import Limits
from evenflow.control.core.integrity import check_integrity
from evenflow.control.core.replica import Replica
from evenflow.control.core.sequence import Sequence
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline import Law, Pipeline

EVEN = Law(constant=1000, token=0, pair=0, kv_token=0)  #: every batch costs the same


def limits(**changes: object) -> Limits:
    fields = {"token_budget": 512, "max_num_seqs": 64, "prefix_caching": False, "max_model_len": 1 << 17}
    return Limits(**{**fields, **changes})  # type: ignore[arg-type]


def only(pipeline: Pipeline) -> Replica:
    (replica,) = pipeline.engine.replicas.values()
    return replica


class Moves:
    """Counts how often sequences change their lane."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.count = 0
        self._pipeline, self._lanes = pipeline, dict[Sequence, int]()
        pipeline.watch = self.look

    def look(self) -> None:
        for seq in only(self._pipeline).running:
            if seq.lane is not None:
                index = seq.lane.index
                self.count += self._lanes.setdefault(seq, index) != index
                self._lanes[seq] = index


def causes(pipeline: Pipeline, before: list[int] | None = None) -> list[int]:
    sums = [sum(found) for found in zip(*(account.causes for account in pipeline.bubbles.accounts), strict=True)]
    return sums if before is None else [now - then for now, then in zip(sums, before, strict=True)]


def rounds(pipeline: Pipeline, count: int) -> None:
    """Let so many turns of every lane be planned."""
    replica = only(pipeline)
    until = replica.step + count * replica.stages
    while replica.step < until:
        pipeline.run(pipeline.now + 500)


def read_all(pipeline: Pipeline) -> Replica:
    """Until every request decodes."""
    replica = only(pipeline)
    while len(replica.running) < len(pipeline.requests) or replica.prefills:
        pipeline.run(pipeline.now + 500)
    return replica


# ---- decodes -------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 4000)), min_size=1, max_size=40),
    st.booleans(),
)
def test_lanes_come_to_rest_with_counts_within_one_and_costs_within_a_bound(
    stages: int, prompts: list[tuple[int, int]], even: bool
) -> None:
    pipeline = Pipeline(limits(), stages, EVEN if even else Law())
    for at, size in prompts:
        pipeline.submit(at, size, 20_000)
    replica = read_all(pipeline)
    check_integrity(pipeline.engine)
    moves = Moves(pipeline)
    rounds(pipeline, 24)
    assert moves.count <= 6 * stages
    settled = moves.count
    rounds(pipeline, 24)
    assert moves.count - settled <= 1, "what is even stays where it is, but lanes of unlike counts grow apart"
    counts = [lane.count for lane in replica.lanes]
    assert sum(counts) == len(prompts) and max(counts) - min(counts) <= 1
    costs = [replica.balance.cost(lane) for lane in replica.lanes]
    # An exchange that halves the difference is made: so it is less than what sequences differ by.
    longest = max(seq.planned for seq in replica.running)
    most = SLACK * max(costs) + replica.balance.decode + replica.balance.kv_token * longest
    assert max(costs) - min(costs) <= most
    if len(prompts) >= 8 * stages:
        assert max(costs) - min(costs) <= 2 * SLACK * max(costs)
    check_integrity(pipeline.engine)


@pytest.mark.parametrize("stages", [2, 4])
def test_the_first_stage_never_waits_for_a_sequence_that_came_or_moved(stages: int) -> None:
    """Batches that cost the same, requests that come and go all the time: no bubble, though sequences move."""
    draw = random.Random(stages)
    pipeline = Pipeline(limits(), stages, EVEN, delay=0)
    for _ in range(6 * stages):
        pipeline.submit(0, draw.randrange(1, 60), 4000)
    for _ in range(150):
        pipeline.submit(draw.randrange(400_000), draw.randrange(1, 60), draw.randrange(1, 60))
    moves = Moves(pipeline)
    pipeline.run(50_000)
    before, idle = pipeline.timeline.ended, causes(pipeline)
    pipeline.run(400_000)
    assert moves.count > 20 and causes(pipeline) == idle and before


@pytest.mark.parametrize("stages", [2, 4])
def test_prompts_that_come_at_once_are_spread_over_the_lanes_at_once(stages: int) -> None:
    pipeline = Pipeline(limits(), stages, EVEN, delay=0)
    requests = [pipeline.submit(0, 1, 40) for _ in range(8)]
    pipeline.run()
    assert [ran.send.decodes for ran in pipeline.timeline.ran[4 * stages : 5 * stages]] == [8 // stages] * stages
    # Each round gives each of them a token; before the first the pipeline fills.
    ideal = 1000 * stages * (1 + 39)
    assert max(request.tokens[-1] for request in requests) <= 1.1 * ideal


def test_long_and_short_sequences_share_lanes() -> None:
    """Long ones come first and short ones later: by count alone a lane could have only long ones."""
    law = Law(constant=100, token=1, pair=0, kv_token=0.1)
    pipeline = Pipeline(limits(token_budget=1 << 14), 2, law, delay=0)
    for key in range(16):
        pipeline.submit(0, 8000 if key % 2 == 0 else 100, 3000)
    replica = read_all(pipeline)
    rounds(pipeline, 20)
    read = [lane.kv_tokens for lane in replica.lanes]
    assert [lane.count for lane in replica.lanes] == [8, 8] and max(read) - min(read) < 8000
    before, start = causes(pipeline), pipeline.now
    rounds(pipeline, 40)
    assert sum(causes(pipeline, before)) < 0.06 * 2 * (pipeline.now - start)


# ---- prompts -------------------------------------------------------------------------------------------------


def chunks(pipeline: Pipeline, start: int) -> list[int]:
    """Prompt tokens of the iterations from step ``start`` on."""
    return [ran.send.tokens - ran.send.decodes for ran in pipeline.timeline.ran[start:]]


def decoding(stages: int, law: Law, **changes: object) -> Pipeline:
    """A pipeline with four decodes a lane."""
    pipeline = Pipeline(limits(**changes), stages, law)
    for _ in range(4 * stages):
        pipeline.submit(0, 30, 4000)
    read_all(pipeline)
    rounds(pipeline, 30)
    return pipeline


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("tile", [0, 64])
def test_a_prompt_that_a_round_can_read_is_read_by_all_its_turns_alike(stages: int, tile: int) -> None:
    pipeline = decoding(stages, Law(), tile=tile)
    start = only(pipeline).step
    request = pipeline.submit(pipeline.now, 600, 5)
    rounds(pipeline, 3)
    read = [taken for taken in chunks(pipeline, start) if taken]
    batches = [ran.send.tokens for ran in pipeline.timeline.ran[start:] if ran.send.tokens > ran.send.decodes]
    assert sum(read) == 600
    if tile:
        assert all(total % tile == 0 for total in batches[:-1]) and max(read) <= 600 // stages + tile
    else:
        assert len(read) == stages and max(read) - min(read) <= stages
    # As one chunk, or a full one and its rest, it would pass all stages at its whole cost.
    whole = sum(Law().cost(ran.send) - 200 for ran in pipeline.timeline.ran[start:] if ran.send.attention)
    assert request.tokens[0] - request.arrived < stages * (200 + whole)


def test_a_prompt_that_fills_the_turns_of_a_round_is_not_throttled() -> None:
    pipeline = decoding(4, Law())
    start = only(pipeline).step
    pipeline.submit(pipeline.now, 5000, 5)
    rounds(pipeline, 4)
    assert [ran.send.tokens for ran in pipeline.timeline.ran[start + 1 : start + 5]] == [512] * 4


def test_a_prompt_that_costs_nothing_beside_the_decodes_is_read_at_once() -> None:
    """Reading weights takes two milliseconds, whatever is computed with them: spreading would only be later."""
    pipeline = decoding(4, Law(constant=200, token=1, least=2000))
    start = only(pipeline).step
    pipeline.submit(pipeline.now, 300, 5)
    rounds(pipeline, 3)
    assert max(chunks(pipeline, start)) == 300


def test_with_one_stage_nothing_is_moved_or_held_back() -> None:
    pipeline = Pipeline(limits(), 1, Law())
    pipeline.submit(0, 600, 5)
    pipeline.run()
    assert chunks(pipeline, 0)[:2] == [512, 88] and pipeline.timeline.ran[0].send.spare == 0


# ---- bubbles, provoked ---------------------------------------------------------------------------------------


def share(pipeline: Pipeline, before: list[int]) -> dict[str, float]:
    """By cause, the part of the idle time since ``before``."""
    found = causes(pipeline, before)
    return {cause: idle / sum(found) for cause, idle in zip(CAUSES, found, strict=True)}


NOTHING = [0] * len(CAUSES)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_whole_prompts_of_unlike_lengths_make_bubbles_of_the_first_kind(stages: int) -> None:
    pipeline = Pipeline(limits(policy="hybrid-only", token_budget=4096), stages, Law(), delay=0)
    for key in range(60):
        # Each fills an iteration, or all but.
        pipeline.submit(0, 4096 if key % 2 else 2100, 1)
    pipeline.run()
    found = share(pipeline, NOTHING)
    assert found["pb1"] > 0.9, found
    assert [account.idle_us for account in pipeline.bubbles.accounts] == pipeline.idle_us()
    even = Pipeline(limits(token_budget=512), stages, Law(), delay=0)
    for key in range(60):
        even.submit(0, 4096 if key % 2 else 2100, 1)
    even.run()
    assert sum(causes(even)) < 0.2 * sum(causes(pipeline)), "chunks of one size leave little of them"


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_prompts_between_decodes_make_bubbles_of_the_second_kind(stages: int) -> None:
    pipeline = Pipeline(limits(policy="prefill-first", token_budget=4096), stages, Law(), delay=0)
    for _ in range(4 * stages):
        pipeline.submit(0, 100, 2000)
    read_all(pipeline)
    rounds(pipeline, 10)
    before = causes(pipeline)
    for turn in range(20):
        pipeline.submit(pipeline.now + 30_000 * (turn + 1), 1500, 1)
    pipeline.run(pipeline.now + 700_000)
    found = share(pipeline, before)
    assert found["pb2"] > 0.9, found
    assert [account.idle_us for account in pipeline.bubbles.accounts] == pipeline.idle_us()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_decodes_that_read_unlike_lengths_make_bubbles_of_the_third_kind(stages: int) -> None:
    """One sequence a lane: nothing can be exchanged."""
    pipeline = Pipeline(limits(), stages, Law(), delay=0)
    for key in range(stages):
        pipeline.submit(0, 20_000 if key == 1 else 50, 2000)
    read_all(pipeline)
    rounds(pipeline, 10)
    before, start = causes(pipeline), pipeline.now
    rounds(pipeline, 100)
    found = share(pipeline, before)
    assert found["pb3"] > 0.9, found
    assert sum(causes(pipeline, before)) > 0.2 * stages * (pipeline.now - start)
    assert [account.idle_us for account in pipeline.bubbles.accounts] == pipeline.idle_us()


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_with_fewer_sequences_than_lanes_has_no_work(stages: int) -> None:
    pipeline = Pipeline(limits(), stages, Law(), delay=0)
    pipeline.submit(0, 50, 100)
    pipeline.submit(90_000, 50, 100)
    pipeline.run()
    found = share(pipeline, NOTHING)
    assert found["no_work"] > 0.9, found
    assert sum(array("q", pipeline.idle_us())) == sum(causes(pipeline))
