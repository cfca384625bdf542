"""Opening models: values, names and rotary order from GGUF; what is refused, and in which words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from evenflow.dataplane.models.config import (
    EMBEDDING,
    HEAD,
    LlamaConfig,
    ModelError,
    config_from_hf,
    split_layers,
    tensor_shapes,
)
from evenflow.dataplane.weights import open_model
from evenflow.dataplane.weights.dequantise import widen
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource, parse_random, write_hf_directory
from gguf.constants import GGMLQuantizationType

_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in top:
        return top[name] + ".weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER[rest.removesuffix('.weight')]}.weight"


def pair_neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    """The order in which GGUF holds q and k: row 2i and 2i+1 of a head form a rotary pair."""
    halves = values.reshape(heads, 2, -1, values.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(
    source: RandomSource,
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    leave_out: str = "",
    extra: dict[str, np.ndarray] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> None:
    config = source.config
    writer = gguf.GGUFWriter(path, (metadata or {}).pop("arch", "llama"))
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_token_list([f"token {n}" for n in range(config.vocab_size)])
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(9)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    for name in tensor_shapes(config):
        values = source.load(name).numpy()
        if "q_proj" in name or "k_proj" in name:
            values = pair_neighbours(values, config.heads if "q_proj" in name else config.kv_heads)
        if name != leave_out:
            stored = values if values.ndim == 1 else gguf.quants.quantize(values, kind)
            writer.add_tensor(gguf_name(name), stored, raw_dtype=None if values.ndim == 1 else kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        open_model(str(path))
    return str(error.value)


def test_gguf_refusals_name_the_cause(tmp_path: Path) -> None:
    model, source = tmp_path / "model.gguf", RandomSource(SMALL)
    write_gguf(source, model, metadata={"arch": "gptneox"})
    assert "GGUF architecture gptneox is not supported; supported: llama" in refused(model)
    write_gguf(source, model, metadata={"llama.rope.scaling.type": "yarn"})
    assert "rotary scaling yarn is not supported; supported: default" in refused(model)
    write_gguf(source, model, leave_out="model.layers.1.self_attn.k_proj.weight")
    assert "lacks tensor model.layers.1.self_attn.k_proj.weight" in refused(model)
    write_gguf(source, model, extra={"blk.0.attn_q.bias": np.zeros(96, np.float32)})
    assert "blk.0.attn_q.bias, which the model has no place for" in refused(model)
    write_gguf(source, model, extra={"rope_freqs.weight": np.zeros(8, np.float32)})
    assert "rotary scaling llama3" in refused(model)
    write_gguf(source, model, extra={"blk.9.attn_norm.weight": np.zeros(96, np.float32)})
    assert "model.layers.9.input_layernorm.weight, which the model has no place for" in refused(model)
    kind = GGMLQuantizationType.TQ1_0
    write_gguf(RandomSource(replace(SMALL, hidden_size=256, ffn_size=256, heads=16, kv_heads=16)), model, kind=kind)
    assert "has type TQ1_0, which is not supported; supported: F32, F16" in refused(model)


def test_damaged_gguf_is_an_error_wherever_it_is_cut(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    write_gguf(RandomSource(SMALL), model)
    whole = model.read_bytes()
    for size in (0, 3, 20, 100, 3000, len(whole) // 2, len(whole) - 1):
        model.write_bytes(whole[:size])
        assert "is not a usable GGUF file" in refused(model)
    # A count larger than the file must not be believed.
    model.write_bytes(whole[:8] + b"\xff" * 8 + whole[16:])
    assert "is not a usable GGUF file" in refused(model)


def test_hugging_face_refusals_name_the_cause(tmp_path: Path) -> None:
    model, source = tmp_path / "model", RandomSource(SMALL)
    assert "is neither a .gguf file, nor a directory" in refused(model)
    write_hf_directory(source, model)
    config = json.loads((model / "config.json").read_text())
    for change, words in (
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Llama"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling llama3 is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "rotary scaling linear is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints (gptq) are not supported"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4 KV heads evenly"),
        ({"num_hidden_layers": 3}, "lacks tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "and 8 more, which the model has no place for"),
        ({"intermediate_size": 161}, "the model needs (161, 96)"),
        ({"tie_word_embeddings": False}, f"lacks tensor {HEAD}"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        assert words in refused(model)
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"\0" * 100)
    assert "is not a usable safetensors file" in refused(model)
    (model / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor" in refused(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    assert "which is not in the directory" in refused(model)


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


def test_layers_are_split_evenly() -> None:
    assert [len(part) for part in split_layers(30, 4)] == [8, 8, 7, 7]
    assert [index for part in split_layers(5, 3) for index in part] == list(range(5))
    with pytest.raises(ModelError, match="4 layers cannot be split over 5 stages"):
        split_layers(4, 5)


def test_random_models_by_name() -> None:
    source = parse_random("random:layers=2,vocab_size=64,seed=3")
    assert (source.config.layers, source.config.vocab_size) == (2, 64)
    assert torch.equal(source.load(EMBEDDING), parse_random("random:vocab_size=64,seed=3").load(EMBEDDING))
    assert not torch.equal(source.load(EMBEDDING), parse_random("random:vocab_size=64").load(EMBEDDING))
    with pytest.raises(ModelError, match="depth=3 in random:depth=3 is not one of"):
        open_model("random:depth=3")
