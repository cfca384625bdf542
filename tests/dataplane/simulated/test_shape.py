"""Models' sizes from their configurations, as they are published."""

import json
from pathlib import Path

import pytest
from evenflow.dataplane.simulated.refusal import CannotSimulate
from evenflow.dataplane.simulated.shape import KNOWN, load_shape, shape_of

MISTRAL = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 14848,
    "new_decoder_architecture": True,
    "multi_query": True,
    "num_attention_heads": 232,
    "num_hidden_layers": 80,
    "num_kv_heads": 8,
    "parallel_attn": True,
    "vocab_size": 65024,
    "max_position_embeddings": 16384,
}


def test_mistral() -> None:
    shape = shape_of(MISTRAL, "mistral-7b")
    assert shape.window == 4096
    assert shape_of(MISTRAL | {"sliding_window": None}, "mistral-7b") == KNOWN["mistral-7b"]
    assert shape.weight_bytes / 2 == pytest.approx(7.24e9, rel=0.01)


def test_falcon() -> None:
    shape = shape_of(FALCON, "falcon-180b")
    assert shape == KNOWN["falcon-180b"] and shape.inner == 59392
    assert shape.weight_bytes / 2 == pytest.approx(180e9, rel=0.01)


def test_a_window_that_is_not_used() -> None:
    assert shape_of(MISTRAL | {"use_sliding_window": False}, "qwen").window == 0


def test_experts() -> None:
    mixtral = MISTRAL | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    shape = shape_of(mixtral, "mixtral")
    assert (shape.experts, shape.active) == (8, 2)
    assert shape.weight_bytes / 2 == pytest.approx(46.7e9, rel=0.01)


def test_a_text_model_inside_another() -> None:
    inside = shape_of({"model_type": "llava", "text_config": MISTRAL, "vocab_size": 32064}, "llava")
    assert (inside.hidden, inside.vocab) == (4096, 32000)


@pytest.mark.parametrize("name", KNOWN)
def test_known_ones(name: str) -> None:
    assert load_shape(name).name == name


def test_files(tmp_path: Path) -> None:
    folder = tmp_path / "mistral"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(MISTRAL))
    assert load_shape(str(folder)) == load_shape(str(path)) == shape_of(MISTRAL, "mistral")
    path.write_text("{")
    with pytest.raises(CannotSimulate, match="is not JSON"):
        load_shape(str(folder))
    with pytest.raises(CannotSimulate, match="there is no model 'mistral-8b': it is one of codellama-34b, "):
        load_shape("mistral-8b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a number from 1 on, not -1"),
        ({"vocab_size": "many"}, "vocab_size must be a number from 1 on, not 'many'"),
    ],
)
def test_a_bad_configuration_is_told_by_its_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(CannotSimulate, match=message):
        shape_of(MISTRAL | change, "mine")
