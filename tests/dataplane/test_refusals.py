"""Models that are not served, and the sentence that says why: it names the file, the tensor or the setting."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evenflow.dataplane.models.config import HEAD, ModelError
from evenflow.dataplane.models.from_hf import config_from_hf
from evenflow.dataplane.weights import open_model
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource, write_hf_directory
from gguf.constants import GGMLQuantizationType
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file

SMALL = replace(RANDOM_CONFIG, layers=2)
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        open_model(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("arch", "metadata", "words"),
    [
        ("gptneox", {}, "GGUF architecture gptneox is not supported; supported: llama, qwen2, qwen3"),
        ("gemma", {}, "GGUF architecture gemma is not supported"),
        (
            "llama",
            {"llama.rope.scaling.type": "longrope"},
            "scaling longrope is not supported; supported: def",
        ),
        (
            "llama",
            {"llama.rope.scaling.type": "dynamic"},
            "dynamic is not supported in GGUF files; supported: none",
        ),
        ("llama", {"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ("qwen2", {"qwen2.attention.sliding_window": 8}, "qwen2.attention.sliding_window = 8 is not supported"),
        ("llama", {"split.count": 3}, "files in 3 parts are not supported"),
        ("llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.5}, "it must be at least 1"),
        ("llama", {"llama.rope.scaling.factor": "big"}, "llama.rope.scaling.factor is 'big', it must be a number"),
        (
            "llama",
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            "llama.rope.scaling.yarn_beta_fast = 16 is not supported; supported: 32",
        ),
    ],
)
def test_gguf_metadata(tmp_path: Path, arch: str, metadata: Mapping[str, Any], words: str) -> None:
    write_gguf(RandomSource(SMALL), tmp_path / "model.gguf", arch=arch, metadata=metadata)
    text = refused(tmp_path / "model.gguf")
    assert words in text and "model.gguf" in text


def test_gguf_tensors(tmp_path: Path) -> None:
    model, source = tmp_path / "model.gguf", RandomSource(SMALL)
    write_gguf(source, model, leave_out="model.layers.1.self_attn.k_proj.weight")
    assert "model.gguf lacks tensor model.layers.1.self_attn.k_proj.weight" in refused(model)
    write_gguf(source, model, leave_out="model.embed_tokens.weight")
    assert "tensor token_embd.weight is missing" in refused(model)
    for name, shape, words in (
        ("blk.0.attn_q.bias", 96, "lacks tensor model.layers.0.self_attn.k_proj.bias"),
        ("blk.1.attn_q.bias", 96, "model.layers.1.self_attn.q_proj.bias, which the model has no place for"),
        ("blk.0.attn_q_norm.weight", 16, "self_attn.q_norm.weight, which the model has no place for"),
        ("blk.0.attn_sinks.weight", 6, "tensor blk.0.attn_sinks.weight, which the model has no place for"),
        ("token_types.weight", 6, "tensor token_types.weight, which the model has no place for"),
        ("rope_freqs.weight", 9, "rope_freqs.weight must hold 8 positive numbers"),
        ("blk.9.attn_norm.weight", 96, "model.layers.9.input_layernorm.weight, which the model has no place for"),
    ):
        write_gguf(source, model, extra={name: np.ones(shape, np.float32)})
        assert words in refused(model), name
    write_gguf(source, model, extra={"blk.00.attn_norm.weight": np.ones(96, np.float32)})
    assert "tensor blk.00.attn_norm.weight is there under another name too" in refused(model)
    # What old converters left in the file changes nothing.
    write_gguf(source, model, extra={"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)})
    assert open_model(str(model)).config.layers == 2


@pytest.mark.parametrize("kind", [GGMLQuantizationType.TQ1_0, GGMLQuantizationType.MXFP4])
def test_gguf_tensor_types(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """MOD-6: refused when the file is opened, with the tensor and the type."""
    wide = replace(SMALL, hidden_size=256, ffn_size=256, heads=16, kv_heads=16)
    write_gguf(RandomSource(wide), tmp_path / "model.gguf", kind=kind)
    words = f"tensor token_embd.weight has type {kind.name}, which is not supported; supported: F32, F16"
    assert words in refused(tmp_path / "model.gguf")


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


_RULES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM,",
        ),
        ({"architectures": None}, "architecture (none named) is not supported"),
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM is not supported"),
        (
            {"rope_scaling": {"rope_type": "foo"}},
            "foo is not supported; supported: default, linear, dynamic, llama3",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rotary scaling longrope is not supported"),
        ({"rope_scaling": {"rope_type": None}}, "rotary scaling None is not supported"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', it must be an object"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "says rope_type yarn and type linear"),
        (
            {"rope_scaling": {"type": "linear"}},
            "linear lacks factor; supported: default; linear (factor)",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rotary scaling dynamic lacks factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "of the rotary scaling is '2', it must be a number",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "it must be at least 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 lacks low_freq_factor, high_freq_factor",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "yarn lacks original_max_position_embeddings"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **_RULES, "low_freq_factor": 4.0}},
            "needs 0 < low_freq_factor < high_freq_factor, not 4 and 4",
        ),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; supported: 1"),
        ({"rope_theta": -1.0}, "rope_theta is -1, it must be above 1"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"attention_bias": 1}, "attention_bias is 1, it must be true or false"),
        ({"sliding_window": 64}, "sliding_window = 64 is not supported for LlamaForCausalLM"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window is 0, it",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full"]}, "for each of the 2 layers"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            "names sliding_attention, but use_sliding_window or sliding_window is not set",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints (gptq) are not supported"),
        ({"num_key_value_heads": 4, "num_attention_heads": 6}, "6 attention heads cannot share 4 KV heads evenly"),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "no frequency that dynamic scaling could",
        ),
        ({"head_dim": 5}, "a head of 5 dimensions has no rotary halves"),
        ({"vocab_size": "many"}, "vocab_size is 'many', it must be a whole number of at least 1"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], words: str) -> None:
    assert config_from_hf(BASE).layers == 2
    with pytest.raises(ModelError) as error:
        config_from_hf({**BASE, **change})
    assert words in str(error.value)


def test_no_sequence_is_longer_than_a_message_may_say() -> None:
    scaling = {"type": "linear", "factor": 1e12}
    assert config_from_hf({**BASE, "rope_scaling": scaling}).max_len == 1 << 21
    assert config_from_hf({**BASE, "max_position_embeddings": 1 << 30}).max_len == 1 << 21


def test_hugging_face_tensors(tmp_path: Path) -> None:
    model, source = tmp_path / "model", RandomSource(SMALL)
    assert "is neither a .gguf file, nor a directory" in refused(model)
    write_hf_directory(source, model)
    config = json.loads((model / "config.json").read_text())
    for change, words in (
        ({"rope_scaling": {"rope_type": "foo"}}, f"{model / 'config.json'}: rotary scaling foo is not supported"),
        ({"num_hidden_layers": 3}, "lacks tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "and 8 more, which the model has no place for"),
        (
            {"intermediate_size": 161},
            "layers.0.mlp.gate_proj.weight has shape (160, 96), the model needs (161, 96)",
        ),
        ({"tie_word_embeddings": False}, f"lacks tensor {HEAD}"),
        ({"attention_bias": True}, "lacks tensor model.layers.0.self_attn.q_proj.bias"),
        ({"mlp_bias": True}, "lacks tensor model.layers.0.mlp.gate_proj.bias"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "lacks tensor model.layers.0.self_attn.q_proj.bias"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "lacks tensor model.layers.0.self_attn.q_norm.weight"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        text = refused(model)
        assert words in text and str(model) in text
    (model / "config.json").write_text(json.dumps(config))
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor, words in (
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(96), "which the model has no place for"),
        ("score.weight", torch.ones(2, 96), "holds tensor score.weight, which the model has no place for"),
        ("model.norm.weight", torch.ones(96, dtype=torch.int8), "tensor model.norm.weight has type I8"),
    ):
        save_file({**tensors, name: tensor}, file)
        assert words in refused(model)
    # What old checkpoints hold beside the weights changes nothing.
    save_file({**tensors, "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    assert open_model(str(model)).config.layers == 2
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:1000], b"\0" * 100, b""):
        file.write_bytes(damaged)
        assert f"{file} is not a usable safetensors file" in refused(model)
    file.unlink()
    assert "holds neither model.safetensors nor" in refused(model)


def test_shards(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_hf_directory(RandomSource(SMALL), model, shards=3)
    index = model / "model.safetensors.index.json"
    first, second, third = sorted(model.glob("*.safetensors"))
    listed = json.loads(index.read_text())["weight_map"]
    moved = next(name for name, file in listed.items() if file == first.name)
    for weight_map, words in (
        ({**listed, "a": "../../secret.safetensors"}, "names the file ../../secret.safetensors for tensor a"),
        ({**listed, "a": "model.bin"}, "names the file model.bin for tensor a, which is not a .safetensors file"),
        ({**listed, "a": 3}, "names the file 3 for tensor a"),
        ({**listed, moved: second.name}, f"{second} lacks tensor {moved}, which {index} says it holds"),
        (
            {**listed, "a": "b.safetensors"},
            "lacks the file b.safetensors, in which model.safetensors.index.json has",
        ),
        ({name: file for name, file in listed.items() if file != third.name}, f"{model} lacks tensor"),
        ({}, "lacks weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert words in refused(model), words
    index.write_text(json.dumps({"weight_map": listed}))
    assert open_model(str(model)).config.layers == 2
    tensors = load_file(second)
    save_file({**tensors, moved: load_file(first)[moved]}, second)
    assert f"{second} holds tensor {moved}, which {first} holds too" in refused(model)
    save_file(tensors, second)
    whole = third.read_bytes()
    third.write_bytes(whole[:-10])
    assert f"{third} is not a usable safetensors file" in refused(model)
    third.unlink()
    assert f"{model} lacks the file {third.name}, in which" in refused(model)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    """SEC-6: nor is any code in a model's folder."""
    model, trap = tmp_path / "model", tmp_path / "ran"
    write_hf_directory(RandomSource(SMALL), model)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "modeling.py").write_text(f"open({str(trap)!r}, 'w')\n")
    assert open_model(str(model)).config.layers == 2
    (model / "model.safetensors").unlink()
    # A pickle whose reading calls open(trap, "w").
    (model / "pytorch_model.bin").write_bytes(b"cbuiltins\nopen\n(V%b\nVw\ntR." % str(trap).encode())
    text = refused(model)
    assert "holds only pickled weights (pytorch_model.bin), which could run code" in text
    assert "supported: model.safetensors" in text
    assert not trap.exists()
