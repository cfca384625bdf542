"""Opening models: values, names and rotary order are those that were written."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from evenflow.dataplane.models.config import (
    EMBEDDING,
    LlamaConfig,
    ModelError,
    tensor_shapes,
)
from evenflow.dataplane.models.from_hf import config_from_hf
from evenflow.dataplane.weights import open_model
from evenflow.dataplane.weights.dequantise import FOUR_BITS, four_bits, widen
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource, parse_random, write_hf_directory
from gguf.constants import GGMLQuantizationType
from gguf_files import write_gguf

SMALL = replace(RANDOM_CONFIG, layers=2)


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_gives_back_what_was_written(tmp_path: Path, tied: bool) -> None:
    written = RandomSource(replace(SMALL, tied=tied))
    write_gguf(written, tmp_path / "model.gguf")
    source = open_model(str(tmp_path / "model.gguf"))
    assert source.name == "model"
    assert source.eos_ids == (7, 9)
    assert source.config == replace(written.config, norm_eps=source.config.norm_eps)
    assert source.config.norm_eps == pytest.approx(1e-5)
    for name in tensor_shapes(source.config):
        assert torch.equal(source.load(name), written.load(name)), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_values_equal_the_public_implementation(tmp_path: Path, kind: str) -> None:
    written = RandomSource(SMALL)
    type_ = GGMLQuantizationType[kind]
    write_gguf(written, tmp_path / "model.gguf", kind=type_)
    source = open_model(str(tmp_path / "model.gguf"))
    for name in (EMBEDDING, "model.layers.1.mlp.down_proj.weight"):
        values = written.load(name).numpy()
        wanted = gguf.quants.dequantize(gguf.quants.quantize(values, type_), type_)
        assert np.array_equal(source.load(name).numpy(), wanted)


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_weights_in_four_bits_are_those_of_the_file(kind: GGMLQuantizationType) -> None:
    """To the bit, but for the scales of Q4_K, which are rounded to half precision."""
    generator = np.random.default_rng(0)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (48, block_bytes), dtype=np.uint8)
    blocks[:, :2] = (generator.standard_normal((48, 1)) * 0.01).astype(np.float16).view(np.uint8)
    if kind != GGMLQuantizationType.Q4_0:
        blocks[:, 2:4] = (generator.standard_normal((48, 1)) * 0.01).astype(np.float16).view(np.uint8)
    raw, shape = blocks.reshape(-1), (6, 8 * per_block)
    wanted = torch.from_numpy(gguf.quants.dequantize(raw.reshape(6, -1), kind).astype(np.float32))
    weight = four_bits(raw, kind, shape)
    assert weight.values.shape == shape and int(weight.values.max()) <= 15
    found = weight.dequantised()
    if kind == GGMLQuantizationType.Q4_K:
        scales, minima = (part.float().abs().repeat_interleave(32, 1) for part in (weight.scales, weight.minima))
        assert bool(((found - wanted).abs() <= (scales * 15 + minima) * 2.0**-11 * 1.01).all())
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("kind", "block_bytes"), [(GGMLQuantizationType.Q4_1, 20), (GGMLQuantizationType.Q8_0, 34)])
def test_dequantised_noise_equals_the_public_implementation(kind: GGMLQuantizationType, block_bytes: int) -> None:
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (64, block_bytes), dtype=np.uint8)
    blocks[:, :4] = generator.standard_normal((64, 2)).astype(np.float16).view(np.uint8)
    raw = blocks.reshape(-1)
    wanted = gguf.quants.dequantize(raw.reshape(8, -1), kind)
    assert np.array_equal(widen(raw, kind, (8, 256)).numpy(), wanted)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_directory_gives_back_what_was_written(tmp_path: Path, shards: int, tied: bool) -> None:
    written = RandomSource(replace(SMALL, tied=tied))
    written.eos_ids = (3, 5)
    write_hf_directory(written, tmp_path / "model", shards)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 11}')
    source = open_model(str(tmp_path / "model"))
    assert source.config == written.config
    assert source.eos_ids == (3, 5, 11)
    for name in tensor_shapes(source.config):
        assert torch.equal(source.load(name), written.load(name)), name


def test_smollm2_is_found_by_name() -> None:
    source = open_model("smollm2-135m")
    assert source.name == "smollm2-135m"
    assert source.eos_ids == (2,)
    assert source.config == LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        ffn_size=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        norm_eps=source.config.norm_eps,
        rope_theta=100000.0,
        max_len=8192,
        tied=True,
    )


def test_rope_theta_is_read_from_either_place() -> None:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    assert config_from_hf({**base, "rope_theta": 5e5}).rope_theta == 5e5
    nested = {"rope_type": "default", "rope_theta": 3e4}
    assert config_from_hf({**base, "rope_parameters": nested}).rope_theta == 3e4
    assert config_from_hf(base).rope_theta == 1e4


def test_random_models_by_name() -> None:
    source = parse_random("random:layers=2,vocab_size=64,seed=3")
    assert (source.config.layers, source.config.vocab_size) == (2, 64)
    assert torch.equal(source.load(EMBEDDING), parse_random("random:vocab_size=64,seed=3").load(EMBEDDING))
    assert not torch.equal(source.load(EMBEDDING), parse_random("random:vocab_size=64").load(EMBEDDING))
    with pytest.raises(ModelError, match="depth=3 in random:depth=3 is not one of"):
        open_model("random:depth=3")
