"""Rotary position embedding in the order of Hugging Face checkpoints: a head's first half pairs with its second.

A head of ``head_dim`` dimensions has ``head_dim / 2`` frequencies, in radians a position. The scalings change them so
that a model reads more positions than it was trained on; each is computed in the type and order of operations of the
transformers library, so that a float32 model agrees with it to the last bits.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor

#: Tables that dynamic frequencies keep: one for each long prompt that is being read.
_PROMPT_TABLES = 16


def base_frequencies(head_dim: int, theta: float) -> Tensor:
    """Frequencies without scaling, float32[head_dim / 2]."""
    return 1.0 / (theta ** _exponents(head_dim))


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim


def llama3_frequencies(
    frequencies: Tensor, factor: float, low_factor: float, high_factor: float, original_len: int
) -> Tensor:
    """Waves longer than ``original_len / low_factor`` positions become ``factor`` times longer, those shorter than
    ``original_len / high_factor`` stay, and what lies between is blended."""
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = original_len / low_factor, original_len / high_factor
    scaled = torch.where(wavelengths > longest, frequencies / factor, frequencies)
    kept = (original_len / wavelengths - low_factor) / (high_factor - low_factor)
    blended = (1 - kept) * scaled / factor + kept * scaled
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, scaled)


def yarn_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    original_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Dimensions that turn more than ``beta_fast`` times in ``original_len`` positions stay, those that turn less
    than ``beta_slow`` times are divided by ``factor``, with a linear ramp between. ``truncate``: the ramp begins and
    ends at whole dimensions."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = theta ** _exponents(head_dim)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


class RopeTable:
    """Cosines and sines of all positions, for frequencies that do not change."""

    def __init__(self, frequencies: Tensor, positions: int, magnitude: float = 1.0) -> None:
        """``frequencies`` float32[head_dim / 2]; both parts of a rotation are scaled by ``magnitude``."""
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        self._cos = (angles.cos() * magnitude)[:, None, :].contiguous()
        self._sin = (angles.sin() * magnitude)[:, None, :].contiguous()

    def rows(self, positions: Tensor, prompt_len: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these positions [T], each float32[T, 1, head_dim / 2]."""
        return self._cos[positions], self._sin[positions]


class DynamicRope:
    """Frequencies that fall with the length of the sequence, once it is longer than ``original_len`` ("dynamic NTK").

    The length that counts for a position is the prompt's for positions of the prompt, and position + 1 for positions
    after it. That is what transformers computes when it generates: the prompt in one pass, then token by token over
    a cache. It depends on the token's place in its sequence only, never on chunks or on a recomputation. Where
    prompts have different lengths past ``original_len``, their keys differ even where their tokens agree.

    Each value is computed once, in an operation of fixed shape, and looked up from then on: a function may round an
    element by its place in the vector, and bits must not depend on the batch.
    """

    def __init__(self, head_dim: int, theta: float, factor: float, original_len: int, positions: int) -> None:
        self._theta, self._factor, self._original = theta, factor, original_len
        self._exponents = _exponents(head_dim)
        self._power = head_dim / (head_dim - 2)
        self._short = RopeTable(base_frequencies(head_dim, theta), original_len)
        #: Tables of long prompts by their length, those of the last prefills.
        self._prompts: OrderedDict[int, RopeTable] = OrderedDict()
        #: Rows of positions after a prompt, where they are made.
        self._made = torch.zeros(positions, dtype=torch.bool)
        self._cos = torch.empty(positions, 1, head_dim // 2)
        self._sin = torch.empty(positions, 1, head_dim // 2)

    def rows(self, positions: Tensor, prompt_len: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As ``RopeTable.rows``; ``prompt_len`` [T] is the length of the prompt of each token's sequence."""
        if prompt_len is None:
            raise ValueError("dynamic rotary frequencies need the lengths of the prompts")
        length = torch.maximum(prompt_len, positions + 1)
        cos, sin = self._short.rows(positions.clamp(max=self._original - 1))
        after = (length > self._original) & (positions >= prompt_len)
        if bool(after.any()):
            wanted = positions[after]
            for position in wanted[~self._made[wanted]].tolist():
                angles = position * self._frequencies(position + 1)
                self._cos[position], self._sin[position] = angles.cos(), angles.sin()
                self._made[position] = True
            cos[after], sin[after] = self._cos[wanted], self._sin[wanted]
        inside = (length > self._original) & (positions < prompt_len)
        for each in prompt_len[inside].unique().tolist():
            at = inside & (prompt_len == each)
            cos[at], sin[at] = self._prompt(each).rows(positions[at])
        return cos, sin

    def _prompt(self, length: int) -> RopeTable:
        table = self._prompts.pop(length, None) or RopeTable(self._frequencies(length), length)
        self._prompts[length] = table
        if len(self._prompts) > _PROMPT_TABLES:
            self._prompts.popitem(last=False)
        return table

    def _frequencies(self, length: int) -> Tensor:
        stretch = self._factor * torch.tensor(length) / self._original - (self._factor - 1)
        return 1.0 / ((self._theta * stretch**self._power) ** self._exponents)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [T, heads, head_dim]; ``cos`` and ``sin`` [T, 1, head_dim / 2] are the rows' own."""
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
