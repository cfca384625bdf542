"""Descriptions of measured devices: fitted to a law they give it back, and what was not measured is told."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from evenflow.dataplane.rehearsal import Batch, grid, probes
from evenflow.dataplane.simulated.cost import Work
from evenflow.dataplane.simulated.profiled import (
    Fit,
    Profile,
    ProfiledCost,
    Range,
    Terms,
    Timed,
    errors,
    fit_terms,
    interpolated,
    load_description,
    shape_for,
)
from evenflow.dataplane.simulated.refusal import CannotSimulate
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.world import Arrival, World
from msgspec import structs

SHAPE = structs.replace(KNOWN["mistral-7b"], name="small", max_len=4096)
LAW = Terms(
    tokens=[(1, 9000.0), (16, 9000.0), (32, 12_000.0), (256, 90_000.0)],
    sampled=[(1, 2000.0), (256, 30_000.0)],
    chunk=150.0,
    own_pair=0.3,
    before_pair=0.4,
    before_token=1.5,
    kv_token=0.6,
)
MOST = Range(tokens=256, decodes=256, context=2000, kv_tokens=500_000)
PROFILE = Profile(
    "cpu", "a processor", SHAPE, 2, "bfloat16", 16, 500, LAW, 300.0, 2.0, 60, 0.01, MOST, Fit(9, 0, 0, 0, 0)
)


def work(batch: Batch) -> Work:
    chunks = [(batch.chunk, batch.before)] if batch.chunk else []
    attention = batch.chunk * (batch.before + 0.5 * (batch.chunk + 1))
    return Work(batch.tokens, batch.decodes, batch.decodes * batch.context, chunks, batch.sampled, attention)


def measured(batches: list[Batch], noise: float = 0.0) -> list[Timed]:
    draw, cost = random.Random(3), ProfiledCost(PROFILE)
    return [Timed(work(b), cost.device_us(work(b)) * draw.uniform(1 - noise, 1 + noise), 0.0) for b in batches]


def test_a_table_is_linear_between_its_knots_and_beyond() -> None:
    table = [(2, 10.0), (4, 20.0), (8, 24.0)]
    assert [interpolated(table, n) for n in (1, 2, 3, 4, 6, 8, 12)] == [10, 10, 15, 20, 22, 24, 28]
    assert interpolated([(5, 7.0)], 1) == interpolated([(5, 7.0)], 99) == 7.0


@pytest.mark.parametrize(("noise", "bound"), [(0.0, 0.02), (0.05, 0.06)])
def test_a_law_is_found_again_from_the_grid(noise: float, bound: float) -> None:
    found = structs.replace(PROFILE, terms=fit_terms(measured(grid(256, 256, 4096), noise)))
    on_others = errors(ProfiledCost(found), measured(probes(256, 256, 4096, 200)))
    assert on_others.batches == 200 and on_others.p90 < bound and abs(on_others.bias) < bound / 2
    tables = (found.terms.tokens, found.terms.sampled)
    assert all(us == sorted(us) for table in tables for us in [[us for _, us in table]])


def test_batches_of_the_grid_are_within_what_was_asked_for() -> None:
    for tokens, rows, length in ((256, 256, 8192), (64, 4, 512), (8, 2, 40)):
        for batch in [*grid(tokens, rows, length), *probes(tokens, rows, length, 50)]:
            assert 1 <= batch.tokens <= tokens and batch.decodes <= rows
            assert batch.context + 10 < length and batch.before + batch.chunk + 1 < length
            assert batch.context or not batch.decodes


def test_what_was_not_measured_is_counted() -> None:
    cost = ProfiledCost(PROFILE)
    for batch in (Batch(256, 1000), Batch(8, 100, 64, 1999), Batch(0, chunk=256)):
        cost.stage_us(0, work(batch))
    assert cost.beyond == 0
    for number, batch in enumerate((Batch(200, 4000), Batch(8, 100, 64, 2001), Batch(0, chunk=300)), 1):
        cost.stage_us(0, work(batch))
        assert cost.beyond == number


def test_the_host_is_not_sped_up_with_the_device() -> None:
    batch = work(Batch(8, 100))
    slow, fast = (ProfiledCost(PROFILE, speed).stage_us(0, batch) for speed in (1.0, 2.0))
    assert slow - fast == pytest.approx(ProfiledCost(PROFILE).device_us(batch) / 2, abs=1)
    with pytest.raises(CannotSimulate, match="speed is from"):
        ProfiledCost(PROFILE, 0.0)


def test_a_scenario_on_it() -> None:
    scenario = Scenario(SHAPE, PROFILE, token_budget=64, max_num_seqs=16, length=512)
    world = World(scenario.limits(), scenario.models())
    world.feed([Arrival(0, 100, 5)])
    assert world.run() and world.record.finished == 1
    # Two chunks of 64 and 36 tokens, then four decodes: by hand, with four messages of 50 us to the first token.
    cost = ProfiledCost(PROFILE)
    chunks = [Work(64, 0, 0, [(64, 0)], 0, 0.0), Work(36, 0, 0, [(36, 64)], 1, 0.0)]
    assert world.record.first[0] == sum(cost.stage_us(0, chunk) for chunk in chunks) + 100
    assert scenario.models()[0].blocks == 500 and replace(scenario, block_size=32).models()[0].blocks == 250
    for wrong in (replace(scenario, stages=2), replace(scenario, ranks=2)):
        with pytest.raises(CannotSimulate, match="was measured as one stage of one rank"):
            wrong.models()


def test_a_description_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    assert load_description(str(path)) == PROFILE
    assert load_description("h100").name == "h100"
    shipped = Path(__file__).parents[3] / "dataplane" / "simulated" / "devices" / "a40.json"
    assert load_description(str(shipped)).name == "a40"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": 0}, r"`int` >= 1 - at `\$.threads`"),
        ({"colour": 1}, "unknown field `colour`"),
        ({"kind": "phone"}, "Invalid enum value 'phone'"),
        ({"terms": {**msgspec.to_builtins(LAW), "tokens": [[4, 1], [4, 2]]}}, "terms.tokens must ascend"),
        ({"terms": {**msgspec.to_builtins(LAW), "kv_token": -1}}, "kv_token"),
    ],
)
def test_a_wrong_description_is_refused_by_field(change: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(PROFILE), **change}))
    with pytest.raises(CannotSimulate, match=words) as caught:
        load_description(str(path))
    assert str(path) in str(caught.value)


def test_no_file_is_refused() -> None:
    with pytest.raises(CannotSimulate, match="No such file"):
        load_description("/nowhere/here.json")
    with pytest.raises(CannotSimulate, match="there is no device 'b200'"):
        load_description("b200")


def test_it_says_nothing_of_other_models(tmp_path: Path) -> None:
    assert shape_for(PROFILE, "small") == shape_for(PROFILE, "/models/small.gguf") == SHAPE
    with pytest.raises(CannotSimulate, match="was measured with small: it says nothing of mistral-7b"):
        shape_for(PROFILE, "mistral-7b")
    config = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert shape_for(PROFILE, str(tmp_path)) == SHAPE
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**config, "num_hidden_layers": 30}))
    with pytest.raises(CannotSimulate, match="says nothing of"):
        shape_for(PROFILE, str(tmp_path))
