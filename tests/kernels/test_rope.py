"""Rotary frequencies: those of transformers to the last bit; dynamic ones by the rule that is documented."""

from typing import Any

import pytest
import torch
from evenflow.dataplane.models.config import LlamaConfig
from evenflow.dataplane.models.llama import make_rope
from evenflow.dataplane.models.rope import theta_and_scaling
from evenflow.kernels.rope import DynamicRope, RopeTable
from torch import Tensor
from transformers import LlamaConfig as OracleConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_RULES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def ours(given: dict[str, Any], head_dim: int, trained_len: int) -> RopeTable | DynamicRope:
    theta, scaling = theta_and_scaling({"rope_parameters": given}, trained_len)
    max_len = scaling.reach(trained_len)
    return make_rope(LlamaConfig(8, 8, 8, 1, 1, 1, head_dim, 1e-6, theta, max_len, True, scaling))


def theirs(given: dict[str, Any], head_dim: int, trained_len: int, length: int, positions: Tensor) -> list[Tensor]:
    config = OracleConfig(
        head_dim=head_dim, rope_parameters=dict(given), max_position_embeddings=trained_len, num_hidden_layers=1
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, seq_len=torch.tensor(length))
    angles = positions.to(torch.float32)[:, None] * frequencies
    return [(part * magnitude)[:, None] for part in (angles.cos(), angles.sin())]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("given", "trained_len"),
    [
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, 4096),
        ({"rope_type": "llama3", "factor": 32.0, "rope_theta": 500000.0, **_RULES}, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 32768}, 32768),
        (
            {
                "rope_type": "yarn",
                "factor": 16.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4096,
                "beta_fast": 8,
                "truncate": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
            4096,
        ),
    ],
)
def test_equals_transformers(given: dict[str, Any], trained_len: int, head_dim: int) -> None:
    positions = torch.tensor([0, 1, 777, trained_len - 1, trained_len])
    rope = ours(given, head_dim, trained_len + 1)
    expected = theirs(given, head_dim, trained_len, 1, positions)
    for one, other in zip(rope.rows(positions), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-7, rtol=0)


def test_dynamic_frequencies_follow_the_prompt_and_then_the_position() -> None:
    given = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    rope = ours(given, 64, 100)

    def rows(positions: list[int], prompt_len: int) -> list[Tensor]:
        at = torch.tensor(positions)
        return list(rope.rows(at, torch.full_like(at, prompt_len)))

    def expect(actual: list[Tensor], positions: list[int], length: int) -> None:
        wanted = theirs(given, 64, 100, length, torch.tensor(positions))
        for one, other in zip(actual, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=2e-7, rtol=0)

    expect(rows([0, 50, 99], 100), [0, 50, 99], 100)
    expect(rows([0, 50, 220], 221), [0, 50, 220], 221)
    expect(rows([99], 20), [99], 100)
    for position in (100, 101, 399):
        expect(rows([position], 20), [position], position + 1)
    # Sequences of one batch do not see each other, whatever was computed before.
    positions, prompts = torch.tensor([7, 300, 120, 0, 7, 300]), torch.tensor([221, 20, 121, 0, 90, 301])
    together = rope.rows(positions, prompts)
    for index, (position, prompt_len) in enumerate(zip(positions.tolist(), prompts.tolist(), strict=True)):
        for one, other in zip(together, rows([position], prompt_len), strict=True):
            assert torch.equal(one[index], other[0])
    with pytest.raises(ValueError, match="need the lengths of the prompts"):
        rope.rows(positions)
