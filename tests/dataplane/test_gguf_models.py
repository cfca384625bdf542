"""GGUF files and safetensors of the same half-precision weights: the same logits, whatever the file says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evenflow.dataplane.weights import open_model
from gguf.constants import GGMLQuantizationType
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import SHAPE, answer, runners, write
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
_SCALED = {"type": "linear", "factor": 2.0, "original_context_length": 64}


def half_model(path: Path, kind: Any, **settings: Any) -> Path:
    write(path, kind, **{"max_position_embeddings": 128, **settings})
    file = path / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return path


def scaling(arch: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{arch}.rope.scaling.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    ("kind", "arch", "settings", "metadata"),
    [
        (LlamaConfig, "llama", {"attention_bias": True, "mlp_bias": True}, {}),
        (LlamaConfig, "llama", {"tie_word_embeddings": True, "head_dim": 32}, {"llama.rope.scaling.type": "none"}),
        (
            LlamaConfig,
            "llama",
            {"rope_parameters": _LINEAR, "max_position_embeddings": 64},
            scaling("llama", _SCALED),
        ),
        (
            LlamaConfig,
            "llama",
            {"rope_parameters": _LINEAR, "max_position_embeddings": 64},
            {"llama.rope.scale_linear": 2.0, "llama.rope.scaling.original_context_length": 64},
        ),
        (MistralConfig, "llama", {"sliding_window": 20}, {"llama.attention.sliding_window": 20}),
        (MistralConfig, "llama", {"sliding_window": None}, {"llama.attention.sliding_window": 128}),
        (Qwen2Config, "qwen2", {"tie_word_embeddings": True}, {}),
        (Qwen2Config, "qwen2", {"rope_parameters": _YARN}, scaling("qwen2", {**_SCALED, "type": "yarn"})),
        (Qwen3Config, "qwen3", {}, {}),
    ],
)
def test_same_logits_as_safetensors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    arch: str,
    settings: dict[str, Any],
    metadata: dict[str, Any],
) -> None:
    """MOD-6."""
    path = half_model(tmp_path / "model", kind, **settings)
    source, file = open_model(str(path)), tmp_path / "model.gguf"
    write_gguf(source, file, arch=arch, metadata=metadata, kind=GGMLQuantizationType.F16)
    config = open_model(str(file)).config
    assert replace(config, norm_eps=source.config.norm_eps) == source.config
    prompt = list(np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 90).tolist())
    ours, logits = answer(monkeypatch, runners(file), prompt, 8, 33)
    theirs, wanted = answer(monkeypatch, runners(path), prompt, 8, 33)
    assert ours.out == theirs.out
    # The file holds the norm's epsilon as a 32-bit number.
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


def test_rope_freqs_are_the_scaling_of_llama3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converters write what each frequency is divided by, since the metadata have no words for the rule."""
    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    parameters = {"rope_type": "llama3", "rope_theta": 500.0, **rule}
    path = half_model(tmp_path / "model", LlamaConfig, rope_parameters=parameters)
    divisors = []
    for dimension in range(0, 16, 2):
        turns = 64 * 500.0 ** (-dimension / 16) / (2 * np.pi)
        kept = min(max((turns - 1) / 3, 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / 8 + kept))
    assert 1.0 in divisors and 8.0 in divisors and len(set(divisors)) > 2
    file = tmp_path / "model.gguf"
    extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    write_gguf(open_model(str(path)), file, extra=extra, kind=GGMLQuantizationType.F16)
    prompt = list(range(100))
    ours, logits = answer(monkeypatch, runners(file), prompt, 8, 33)
    theirs, wanted = answer(monkeypatch, runners(path), prompt, 8, 33)
    assert ours.out == theirs.out
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
