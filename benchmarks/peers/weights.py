"""The same weights for every engine: SmolLM2-135M-Instruct as a Hugging Face directory and as GGUF files.

All are made from the values of the one file that evenflow serves by its name, dequantised to float32: what differs
between engines is then their arithmetic and not their weights. Nothing is made twice.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from evenflow.control.wire.location import locate_model
from evenflow.dataplane.models.config import HEAD, LlamaConfig, tensor_shapes
from evenflow.dataplane.weights import open_model
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers import LlamaConfig as PublicConfig

MODEL = "smollm2-135m"
#: The types of matrices in a GGUF file, and the number of such a file, by the name in the file's own name.
TYPES = {
    "bf16": (GGMLQuantizationType.BF16, 32),
    "f16": (GGMLQuantizationType.F16, 1),
    "q8_0": (GGMLQuantizationType.Q8_0, 7),
    "q4_0": (GGMLQuantizationType.Q4_0, 2),
}
#: Set by the writer itself.
OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def directory(folder: Path, dtype: str = "bfloat16") -> Path:
    """A directory that transformers and vLLM load, of ``dtype`` bfloat16 or float32."""
    target = folder / f"hf-{dtype}"
    if (target / "done").exists():
        return target
    source = open_model(MODEL)
    with torch.device("meta"):
        model = LlamaForCausalLM(_public(source.config))
    state = {name: source.load(name) for name in tensor_shapes(source.config)}
    state[HEAD] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.to(getattr(torch, dtype)).save_pretrained(target)
    file = Path(locate_model(MODEL))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(target)
    (target / "done").touch()
    return target


def gguf_file(folder: Path, kind: str) -> Path:
    """A GGUF file whose matrices are of ``kind`` (``TYPES``) and whose norms are float32."""
    target = folder / f"{MODEL}-{kind}.gguf"
    if target.exists():
        return target
    fields, tensors = _source()
    partial = target.with_suffix(".part")
    writer = GGUFWriter(partial, "llama")
    for name, (value, kinds) in fields.items():
        if kinds[0] is GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, kinds[0])
    quantised, number = TYPES[kind]
    writer.add_file_type(number)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, values in tensors.items():
        wanted = quantised if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


@cache
def _source() -> tuple[dict[str, tuple[Any, list[GGUFValueType]]], dict[str, np.ndarray]]:
    """What evenflow's own file tells (values and their types), and its tensors as float32."""
    reader = GGUFReader(locate_model(MODEL))
    fields = {
        field.name: (field.contents(), field.types)
        for field in reader.fields.values()
        if not field.name.startswith(OWN)
    }
    tensors = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32) for tensor in reader.tensors
    }
    return fields, tensors


def _public(config: LlamaConfig) -> PublicConfig:
    return PublicConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_len,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
        bos_token_id=1,
        eos_token_id=2,
    )
