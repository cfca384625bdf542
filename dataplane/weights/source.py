"""Where a model's tensors come from: one interface over GGUF files, Hugging Face directories and seeded noise.

A source is opened on its metadata only; it refuses at once what cannot be served (architecture, tensor type, missing
or surplus tensors) and then gives tensors one by one, so that a stage reads nothing but its own layers.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from ...kernels.quantised import Int4Weight
from ..models.config import LlamaConfig, ModelError, tensor_shapes


class ModelSource(Protocol):
    """An opened model."""

    name: str
    config: LlamaConfig
    #: Token ids that end a sequence.
    eos_ids: tuple[int, ...]

    def load(self, name: str) -> Tensor:
        """The tensor of this canonical name, as a floating type of at least the checkpoint's precision."""
        ...

    def bits(self, name: str) -> float:
        """In how many bits the checkpoint holds a value of this tensor, scales included."""
        ...

    def has_int4(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor as ``load_int4`` gives it."""
        ...

    def load_int4(self, name: str) -> Int4Weight:
        """As it is held, in 4 bits. Only where ``has_int4``."""
        ...


class PlainSource:
    """Of checkpoints that hold nothing in 4 bits."""

    def has_int4(self, name: str) -> bool:
        return False

    def load_int4(self, name: str) -> Int4Weight:
        raise ValueError(f"tensor {name} is not held in 4 bits")


def check_tensors(
    where: str,
    config: LlamaConfig,
    found: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
) -> None:
    """Every tensor the model needs is there in the right shape, and every tensor that is there is needed."""
    needed = tensor_shapes(config)
    for name, shape in needed.items():
        if name not in found:
            raise ModelError(f"{where} lacks tensor {name}")
        if found[name] != shape:
            raise ModelError(f"{where}: tensor {name} has shape {found[name]}, the model needs {shape}")
    surplus = sorted(set(found) - set(needed) - set(ignored))
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise ModelError(f"{where} holds tensor {surplus[0]}{more}, which the model has no place for")
