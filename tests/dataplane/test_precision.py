"""Layers of few bits: what a checkpoint holds in 4 bits is used as it is; the rest is rounded, and that is told."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evenflow.dataplane.model_runner import ModelRunner
from evenflow.dataplane.models.config import EMBEDDING, HEAD
from evenflow.dataplane.models.llama import LlamaStage
from evenflow.dataplane.weights import ModelSource, open_model
from evenflow.dataplane.weights.precision import PRECISIONS, Quantiser
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource, write_hf_directory
from evenflow.kernels.quantised import Int4Linear, Int8Linear, quantise4, quantise8
from gguf.constants import GGMLQuantizationType
from gguf_files import write_gguf
from runner_driver import generate, sequence
from torch import Tensor

SMALL = replace(RANDOM_CONFIG, layers=2)
QUERY, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"


def file(tmp_path: Path, kind: str, source: ModelSource | None = None) -> ModelSource:
    write_gguf(source or RandomSource(SMALL), tmp_path / f"{kind}.gguf", kind=GGMLQuantizationType[kind])
    return open_model(str(tmp_path / f"{kind}.gguf"))


def weights(layer: Int8Linear | Int4Linear) -> Tensor:
    return layer.rows(torch.arange(layer.out_features))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bits_of_a_file_are_used_as_they_are(tmp_path: Path, kind: str) -> None:
    """Queries among them, whose rows the file has in another order; the embedding too."""
    source = file(tmp_path, kind)
    quantiser = Quantiser(source, 4)
    for name in (QUERY, DOWN, EMBEDDING):
        layer = quantiser.layer([name])
        assert isinstance(layer, Int4Linear)
        assert torch.equal(weights(layer), source.load(name))
    assert quantiser.report().endswith("in 4 bits; none was rounded")


def test_other_types_of_a_file_have_eight_bits(tmp_path: Path) -> None:
    for kind in ("Q8_0", "Q5_1"):
        source = file(tmp_path, kind)
        layer = Quantiser(source, 4).layer([DOWN])
        assert isinstance(layer, Int8Linear)
        assert torch.equal(weights(layer), quantise8(source.load(DOWN)).dequantised())


def test_floating_weights_are_rounded_and_embedding_and_head_only_to_eight_bits(tmp_path: Path) -> None:
    write_hf_directory(RandomSource(replace(SMALL, tied=False)), tmp_path / "hf")
    for source in (open_model(str(tmp_path / "hf")), file(tmp_path, "BF16")):
        quantiser = Quantiser(source, 4)
        layer = quantiser.layer([DOWN])
        assert isinstance(layer, Int4Linear)
        assert torch.equal(weights(layer), quantise4(source.load(DOWN)).dequantised())
        assert isinstance(quantiser.layer([EMBEDDING]), Int8Linear)
        if not source.config.tied:
            assert isinstance(quantiser.layer([HEAD]), Int8Linear)
        assert f"rounding changed {DOWN} most, by " in quantiser.report()
        assert isinstance(Quantiser(source, 8).layer([DOWN]), Int8Linear)


def test_layers_that_are_computed_together_have_the_bits_of_the_one_that_needs_most(tmp_path: Path) -> None:
    class Mixed(RandomSource):
        def bits(self, name: str) -> float:
            return 8.5 if ".v_proj." in name else 32

    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    layer = Quantiser(Mixed(SMALL), 4).layer(names)
    assert isinstance(layer, Int8Linear)
    assert torch.equal(
        weights(layer), torch.cat([quantise8(Mixed(SMALL).load(name)).dequantised() for name in names])
    )


def test_bits_are_those_of_the_file(tmp_path: Path) -> None:
    assert [file(tmp_path, kind).bits(DOWN) for kind in ("F32", "F16", "Q8_0", "Q4_1")] == [32, 16, 8.5, 5]
    write_hf_directory(RandomSource(SMALL), tmp_path / "hf")
    source = open_model(str(tmp_path / "hf"))
    assert source.bits(DOWN) == 32 and not source.has_int4(DOWN)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_tied_embedding_is_held_once(stages: int) -> None:
    made = [LlamaStage(RandomSource(SMALL), stage, stages, PRECISIONS["int8"]) for stage in range(stages)]
    ids = torch.tensor([3, 511, 3])
    assert torch.equal(
        made[0].embed(ids), quantise8(RandomSource(SMALL).load(EMBEDDING)[ids]).dequantised().bfloat16()
    )
    assert (made[0]._embedding is made[-1]._head) == (stages == 1)


def logits_of(source: ModelSource, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Of 200 tokens of noise, [200, vocabulary]."""
    seen: list[Tensor] = []
    plain = LlamaStage.logits

    def watched(stage: LlamaStage, x: Tensor, at: Tensor) -> Tensor:
        seen.append(plain(stage, x, torch.arange(200)))
        return plain(stage, x, at)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaStage, "logits", watched)
        runner = ModelRunner(source, 0, 1, dtype=dtype, kv_memory=1 << 22, poison=True)
        prompt = np.random.default_rng(0).integers(0, 512, 200).tolist()
        generate([runner], [sequence(prompt, 0, 16, 1)], 1, budget=4096)
    return seen[0]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_logits_are_those_of_the_rounded_weights(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model against one in float32 that has the rounded weights: what differs is a bfloat16 stream, as in
    bfloat16, and that activations are rounded."""

    class Rounded(RandomSource):
        def load(self, name: str) -> Tensor:
            tensor = super().load(name)
            if tensor.dim() == 1:
                return tensor
            made = quantise8(tensor) if dtype == "int8" or name == EMBEDDING else quantise4(tensor)
            return made.dequantised()

    wanted = logits_of(Rounded(SMALL), "float32", monkeypatch)
    found, wide = (
        logits_of(source(SMALL), kind, monkeypatch) for source, kind in [(RandomSource, dtype), (Rounded, "bfloat16")]
    )
    lost, narrow = (
        float(torch.linalg.vector_norm(each - wanted) / torch.linalg.vector_norm(wanted)) for each in (found, wide)
    )
    print(f"logits differ by {lost:.2%} of their size in {dtype}, {narrow:.2%} in bfloat16")
    assert 0 < lost < 3 * narrow
