"""Measuring types of weights against each other: what is tried, how layers are counted, whose turn it is."""

from dataclasses import replace
from pathlib import Path

import pytest
from evenflow.dataplane import choosing
from evenflow.dataplane.choosing import CHUNK, EIGHT, ONE, SHAPES, Cost, candidates, measure
from evenflow.dataplane.models.config import ModelError
from evenflow.dataplane.profile import Shape
from evenflow.dataplane.weights import open_model
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource
from gguf import GGMLQuantizationType
from gguf_files import write_gguf


@pytest.mark.parametrize(("kind", "four"), [("Q4_0", True), ("Q8_0", False), ("F16", False)])
def test_4_bits_are_tried_only_where_the_file_has_them(kind: str, four: bool, tmp_path: Path) -> None:
    write_gguf(RandomSource(), tmp_path / "m.gguf", kind=GGMLQuantizationType[kind])
    wanted = ["bfloat16", "float32", "int8", *(["int4"] if four else [])]
    assert candidates(open_model(str(tmp_path / "m.gguf"))) == wanted


def test_a_layer_counts_for_all_of_its_kind_and_the_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    turns: list[tuple[str, bool, Shape]] = []

    class Runner:
        def __init__(self, dtype: str, last: bool) -> None:
            self.dtype, self.last = dtype, last

        def rehearse(self, shape: Shape) -> None:
            turns.append((self.dtype, self.last, shape))
            # The first iteration of a kind takes longer, and does not count.
            first = turns.count(turns[-1]) == 1
            took = 0.002 * shape.tokens + (0.010 if self.last else 0.0) + (5.0 if first else 0.0)
            clock[0] += took * (2 if self.dtype == "int8" else 1)

    monkeypatch.setattr(choosing, "_pair", lambda source, dtype: (Runner(dtype, False), Runner(dtype, True)))
    costs = measure(RandomSource(replace(RANDOM_CONFIG, layers=5)), ["bfloat16", "int8"], lambda: clock[0])
    assert [cost.dtype for cost in costs] == ["bfloat16", "int8"]
    for cost, factor in zip(costs, (1, 2), strict=True):
        assert cost.decode_1_ms == pytest.approx(factor * (5 * 2.0 + 10.0))
        assert cost.decode_8_ms == pytest.approx(factor * (5 * 16.0 + 10.0))
        assert cost.prompt_token_ms == pytest.approx(factor * (5 * 2.0 + 10.0 / CHUNK.tokens))
        assert cost.request_ms == pytest.approx(512 * cost.prompt_token_ms + 16 * cost.decode_8_ms)
    # One after the other, so that what disturbs a moment meets both.
    assert [dtype for dtype, _, _ in turns[: 2 * 2 * len(SHAPES)]] == ["bfloat16"] * 6 + ["int8"] * 6
    assert {shape for _, _, shape in turns} == {ONE, EIGHT, CHUNK}


def test_real_layers_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "SECONDS", 0.0)
    write_gguf(RandomSource(), tmp_path / "m.gguf", kind=GGMLQuantizationType["Q4_0"])
    source = open_model(str(tmp_path / "m.gguf"))
    costs = measure(source, candidates(source))
    assert len(costs) == 4
    for cost in costs:
        assert isinstance(cost, Cost) and min(cost.decode_1_ms, cost.decode_8_ms, cost.prompt_token_ms) > 0


def test_a_model_of_one_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="name the --dtype"):
        measure(RandomSource(replace(RANDOM_CONFIG, layers=1)), ["bfloat16"])
