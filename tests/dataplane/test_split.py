"""How layers are shared out over stages: every number of stages, the head counted, nothing lost."""

import pytest
from evenflow.dataplane.model_runner import ModelRunner
from evenflow.dataplane.models.config import ModelError, describe_stage, split_layers
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource
from hypothesis import given
from hypothesis import strategies as st


def sizes(layers: int, stages: int, head: float = 0.0) -> list[int]:
    return [len(part) for part in split_layers(layers, stages, head)]


def test_layers_without_a_head_are_split_evenly() -> None:
    assert sizes(30, 4) == [8, 8, 7, 7]
    assert sizes(22, 4) == [6, 6, 5, 5]
    assert sizes(5, 3) == [2, 2, 1]
    assert sizes(7, 1, 8.0) == [7]


def test_a_large_head_stands_for_layers() -> None:
    """SmolLM2-135M: the head is as large as eight of its 30 layers and counts half."""
    assert sizes(30, 2, 8.0) == [17, 13]
    assert sizes(30, 3, 8.0) == [12, 11, 7]
    assert sizes(32, 2, 2.4) == [17, 15]
    assert sizes(4, 4, 100.0) == [1, 1, 1, 1]


@given(st.integers(1, 80), st.integers(1, 80), st.floats(0, 50))
def test_any_split(layers: int, stages: int, head: float) -> None:
    if stages > layers:
        with pytest.raises(
            ModelError, match=f"{layers} layers cannot be split over {stages} stages; possible: 1 to "
        ):
            split_layers(layers, stages, head)
        return
    parts = split_layers(layers, stages, head)
    assert len(parts) == stages and all(parts)
    assert [layer for part in parts for layer in part] == list(range(layers))
    # No better last stage exists: a layer more or less there does not lower the largest cost.
    if stages > 1:
        last = len(parts[-1])

        def slowest(last: int) -> float:
            return max(-(-(layers - last) // (stages - 1)), last + head / 2)

        assert slowest(last) == max(*map(len, parts[:-1]), last + head / 2)
        for other in (last - 1, last + 1):
            if 1 <= other <= layers - stages + 1:
                assert slowest(other) >= slowest(last)


def test_the_split_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    assert describe_stage(range(13, 30), 1, 2) == "stage 1 of 2: layers 13 to 29 + head"
    assert describe_stage(range(4, 5), 1, 3) == "stage 1 of 3: layer 4"
    with caplog.at_level("INFO"):
        ModelRunner(RandomSource(RANDOM_CONFIG), 0, 1, kv_memory=1 << 20)
    assert "stage 0 of 1: layers 0 to 3 + embedding + head" in caplog.text
