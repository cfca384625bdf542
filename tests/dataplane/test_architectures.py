"""What models may be made of: each option against transformers on tiny random weights, through the real runner.

The prompt comes in chunks, KV memory is NaN beforehand, and both logits and greedy tokens must agree.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from evenflow.dataplane.model_runner import load_runner
from evenflow.dataplane.models.config import HEAD
from runner_driver import generate, sequence
from safetensors.torch import load_file, save_file
from tiny_models import answer, change_config, expected, oracle, runners, write
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config


def prompt_of(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(160) for _ in range(length)]


def check(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    lengths: tuple[int, ...] = (50,),
    new: int = 10,
    chunk: int = 17,
    stages: int = 1,
    generating: bool = False,
) -> torch.Tensor:
    """Holds our answers to prompts of these lengths against transformers; returns the last one's logits."""
    ours = torch.empty(0)
    for length in lengths:
        answered, ours = answer(monkeypatch, runners(path, stages), prompt_of(length), new, chunk)
        wanted = expected(oracle(path), answered, generating)
        torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=1e-4)
        assert answered.out == wanted.argmax(-1).tolist()
        assert len(set(answered.out)) > 3, "an answer that repeats itself proves little"
    return ours


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        (
            LlamaConfig,
            {"attention_bias": True, "head_dim": 24, "num_attention_heads": 2, "tie_word_embeddings": True},
        ),
        (LlamaConfig, {"mlp_bias": True, "num_key_value_heads": 6, "rope_parameters": {"rope_theta": 500.0}}),
        (MistralConfig, {"sliding_window": None}),
        (Qwen2Config, {"tie_word_embeddings": True}),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        (Qwen3Config, {"head_dim": 32}),
        (
            Qwen3Config,
            {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        ),
    ],
)
def test_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, settings: dict[str, Any]
) -> None:
    path = write(tmp_path / "model", kind, **settings)
    whole = check(monkeypatch, path)
    assert torch.equal(check(monkeypatch, path, chunk=50, stages=2), whole)


def test_sliding_window_of_mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MOD-4: window 64, prompt 200, chunks of 48, then 80 decodes; and a window of more than one tile of keys."""
    path = write(tmp_path / "narrow", MistralConfig, sliding_window=64)
    check(monkeypatch, path, (200,), new=80, chunk=48)
    path = write(tmp_path / "wide", MistralConfig, sliding_window=300)
    check(monkeypatch, path, (700,), new=12, chunk=190)


def test_an_absent_window_of_mistral_is_that_of_transformers(tmp_path: Path) -> None:
    path = write(tmp_path / "model", MistralConfig, max_position_embeddings=8192)
    change_config(path, lambda data: data.pop("sliding_window"))
    assert load_runner(str(path), kv_memory=1 << 21)._stage.config.windows == (4096,) * 3
    assert oracle(path).config.sliding_window == 4096


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
#: Scaling, and the model's length: the trained one is 64 in each.
_SCALINGS: list[tuple[dict[str, Any], int]] = [
    ({"type": "linear", "factor": 2.0}, 64),
    ({"rope_type": "linear", "type": "linear", "factor": 2}, 64),
    ({"rope_type": "llama3", "factor": 2.0, **_LLAMA3}, 128),
    ({"rope_type": "llama3", "type": "llama3", "factor": 8.0, **_LLAMA3}, 512),
    ({"type": "dynamic", "factor": 2.0}, 64),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 128),
    (
        {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 0.5,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
        64,
    ),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.4}, 64),
]


@pytest.mark.parametrize(("scaling", "max_len"), _SCALINGS)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_up_to_twice_the_trained_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: dict[str, Any], max_len: int, place: str
) -> None:
    """MOD-1, as old and new versions of transformers write it."""
    path = write(tmp_path / "model", LlamaConfig, max_position_embeddings=max_len)

    def change(data: dict[str, Any]) -> None:
        del data["rope_parameters"]
        data.update({place: scaling, "rope_theta": 300.0} if place == "rope_scaling" else {})
        data.update({place: {**scaling, "rope_theta": 300.0}} if place == "rope_parameters" else {})

    change_config(path, change)
    is_dynamic = "dynamic" in scaling.values()
    check(monkeypatch, path, (114, 58), new=14, chunk=31, generating=is_dynamic)
    assert runners(path)[0].info.max_model_len >= 128


@pytest.mark.parametrize("absent", [None, {}])
def test_no_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: dict[str, Any] | None) -> None:
    path = write(tmp_path / "model", LlamaConfig)
    change_config(path, lambda data: data.update(rope_scaling=absent, rope_parameters=absent, rope_theta=700.0))
    check(monkeypatch, path)


def test_dynamic_scaling_does_not_depend_on_chunks_or_on_who_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}
    path = write(tmp_path / "model", LlamaConfig, **settings)
    stage = runners(path)
    assert stage[0].info.prefix_limit == 64
    alone, wanted = answer(monkeypatch, stage, prompt_of(130), 20, 1000)
    for chunk in (1, 16, 61):
        assert torch.equal(answer(monkeypatch, stage, prompt_of(130), 20, chunk)[1], wanted), chunk
    # Recomputed: the tokens of the answer come as chunks now, after a prompt of the same length.
    again = sequence(prompt_of(130), 0, 16, 20)
    again.tokens, again.out = alone.tokens[:140], alone.out[:10]
    mates = [sequence(prompt_of(length), 20 * number, 16, 20) for number, length in ((1, 63), (2, 64), (3, 199))]
    again_and_mates = [again, *mates]
    generate(stage, again_and_mates, 20, budget=37)
    assert again.out == alone.out


@pytest.mark.parametrize("stages", [1, 2])
def test_tied_and_untied_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """MOD-2: a tied head may be in the file too, or in the embedding's place; another one there is not ignored."""
    path = write(tmp_path / "model", LlamaConfig, tie_word_embeddings=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    embedding = "model.embed_tokens.weight"
    assert HEAD not in tensors
    tied = check(monkeypatch, path, stages=stages)
    save_file({**tensors, HEAD: tensors[embedding].clone()}, file, {"format": "pt"})
    assert torch.equal(check(monkeypatch, path, stages=stages), tied)
    moved = {HEAD if name == embedding else name: tensor for name, tensor in tensors.items()}
    save_file(moved, file, {"format": "pt"})
    assert torch.equal(check(monkeypatch, path, stages=stages), tied)
    save_file({**tensors, HEAD: tensors[embedding].flip(0)}, file, {"format": "pt"})
    own = check(monkeypatch, path, stages=stages)
    change_config(path, lambda data: data.update(tie_word_embeddings=False))
    assert torch.equal(check(monkeypatch, path, stages=stages), own)
    assert not torch.equal(own, tied)


@pytest.mark.parametrize("settings", [{"num_hidden_layers": 5}, {"num_hidden_layers": 5, "vocab_size": 2000}])
def test_every_number_of_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """MOD-5: layers that do not divide evenly."""
    path = write(tmp_path / "model", LlamaConfig, **settings)
    wanted = check(monkeypatch, path)
    for stages in range(2, 6):
        parts = runners(path, stages)
        assert sum(len(part._stage.layers) for part in parts) == 5
        assert torch.equal(answer(monkeypatch, parts, prompt_of(50), 10, 17)[1], wanted), stages
