"""A small Llama model of seeded noise: for tests, and for trying a server without any download.

Weights are scaled so that every layer counts: a large embedding would make a model with a tied head repeat its last
token, and small queries would make attention an average. So each token depends on the whole context.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..models.config import HEAD, LlamaConfig, ModelError, tensor_shapes
from .source import PlainSource

#: Query heads share KV heads unevenly enough (3 to 1) to show a wrong grouping.
RANDOM_CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=96,
    ffn_size=160,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_len=8192,
    tied=True,
)
#: Standard deviations, as multiples of what keeps activations at their size; others are 1.
_SCALES = {"embed_tokens": 0.05, "q_proj": 4.0}


class RandomSource(PlainSource):
    """A model whose tensors are drawn from ``seed`` and the tensor's place in the model."""

    def __init__(self, config: LlamaConfig = RANDOM_CONFIG, seed: int = 0) -> None:
        self.name = "random"
        self.config = config
        self.eos_ids: tuple[int, ...] = ()
        self._seed = seed
        self._shapes = tensor_shapes(config)

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1 and not name.endswith(".bias"):
            return torch.ones(shape)
        # By place, not by hash: the same tensor whichever stage asks for it, in any process.
        generator = torch.Generator().manual_seed(self._seed * 100_003 + list(self._shapes).index(name))
        scale = next((scale for part, scale in _SCALES.items() if part in name), 1.0)
        return torch.randn(shape, generator=generator) * (scale * shape[-1] ** -0.5)

    def bits(self, name: str) -> float:
        return 32


def parse_random(model: str) -> RandomSource:
    """From ``random`` or ``random:layers=4,seed=1,…``: integer fields of ``LlamaConfig``, and the seed."""
    allowed = {field.name for field in fields(LlamaConfig) if field.type in (int, "int")}
    values: dict[str, int] = {}
    for item in filter(None, model.removeprefix("random").removeprefix(":").split(",")):
        key, _, value = item.partition("=")
        if key not in allowed | {"seed"} or not value.isdecimal():
            raise ModelError(f"{item} in {model} is not one of {', '.join(sorted(allowed))}, seed = a number")
        values[key] = int(value)
    seed = values.pop("seed", 0)
    return RandomSource(replace(RANDOM_CONFIG, **values), seed)


def write_hf_directory(source: RandomSource, path: Path, shards: int = 1) -> None:
    """Write the model as a Hugging Face directory without tokenizer, in one file or in indexed shards."""
    config = source.config
    path.mkdir(parents=True, exist_ok=True)
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_len,
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(source.eos_ids) or None,
        "bos_token_id": None,
    }
    (path / "config.json").write_text(json.dumps(description, indent=2), "utf-8")
    names = [name for name in tensor_shapes(config) if not (config.tied and name == HEAD)]
    if shards == 1:
        save_file({name: source.load(name) for name in names}, path / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        save_file({name: source.load(name) for name in mine}, path / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8"
    )
