"""Tiny random models of every supported architecture, written by transformers, and its answers as the oracle."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from evenflow.dataplane.model_runner import ModelRunner, load_runner
from evenflow.dataplane.models.llama import LlamaStage
from pytest import MonkeyPatch
from runner_driver import Sequence, generate, sequence
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden / heads
    # Large: with the usual 0.02 attention would be an average, and positions would hardly count.
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": 7,
    "pad_token_id": None,
}


def write(path: Path, kind: type[PreTrainedConfig], **settings: Any) -> Path:
    """A model of ``kind`` in ``path``, in one file; all its tensors are noise, biases and norms too."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(kind(**{**SHAPE, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return path


def change_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the ``config.json`` of ``path``."""
    data = json.loads((path / "config.json").read_text())
    change(data)
    (path / "config.json").write_text(json.dumps(data))


def oracle(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def runners(path: Path, stages: int = 1, **options: Any) -> list[ModelRunner]:
    options = {"dtype": "float32", "kv_memory": 1 << 21, "poison": True, **options}
    return [load_runner(str(path), stage, stages, **options) for stage in range(stages)]


def answer(
    monkeypatch: MonkeyPatch, stages: list[ModelRunner], prompt: list[int], new: int, chunk: int
) -> tuple[Sequence, Tensor]:
    """Our greedy continuation of one prompt, and the logits of each of its tokens, [new, vocabulary]."""
    rows: list[Tensor] = []
    plain = LlamaStage.logits

    def watched(stage: LlamaStage, x: Tensor, at: Tensor) -> Tensor:
        logits = plain(stage, x, at)
        rows.append(logits.clone())
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(LlamaStage, "logits", watched)
        answered = sequence(prompt, 0, stages[0].info.block_size, new)
        generate(stages, [answered], new, budget=chunk)
    return answered, torch.cat(rows)


@torch.inference_mode()
def expected(model: PreTrainedModel, answered: Sequence, generating: bool = False) -> Tensor:
    """The oracle's logits for the tokens of the answer, in one pass, or as it generates."""
    new = len(answered.out)
    if not generating:
        return model(torch.tensor([answered.tokens[:-1]])).logits[0, -new:]
    prompt = torch.tensor([answered.tokens[:-new]])
    model.generation_config.eos_token_id = None
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(generated.logits)
