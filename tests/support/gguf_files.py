"""GGUF files of random models, written with the public package in the names and order that converters use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from evenflow.dataplane.models.config import tensor_shapes
from evenflow.dataplane.weights import ModelSource
from gguf.constants import GGMLQuantizationType

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, part = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{part}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{part}"


def _pair_neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    """The order in which files of the llama architecture hold q and k: rows 2i and 2i+1 of a head are a pair."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(
    source: ModelSource,
    path: Path,
    *,
    arch: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    leave_out: str = "",
    extra: Mapping[str, np.ndarray] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> None:
    """The model of ``source``; matrices as ``kind``, vectors as float32. ``metadata``: further keys, by type."""
    config = source.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_token_list([f"token {n}" for n in range(config.vocab_size)])
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(9)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (metadata or {}).items():
        add[type(value)](key, value)
    for name in tensor_shapes(config):
        values = source.load(name).numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = _pair_neighbours(values, config.heads if ".q_proj." in name else config.kv_heads)
        if name != leave_out:
            stored = values if values.ndim == 1 else gguf.quants.quantize(values, kind)
            writer.add_tensor(_gguf_name(name), stored, raw_dtype=None if values.ndim == 1 else kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
