"""Memory for KV blocks and weights."""

import contextlib
import mmap
from collections.abc import Iterable
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64
_HUGE = 2 << 20


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU that cost nothing until they are written: pages that the system has not yet backed.

    ``torch.zeros`` writes them all, a second for each GiB, while a worker that starts is being waited for.
    """
    size = prod(shape) * dtype.itemsize
    pages = np.zeros(size + _ALIGN, np.uint8)
    start = -pages.ctypes.data % _ALIGN
    return torch.from_numpy(pages[start : start + size]).view(dtype).view(shape)


class HasPacked(Protocol):
    """A layer with weights of its own, contiguous."""

    packed: Tensor


def lay_together(layers: Iterable[HasPacked]) -> None:
    """Move the layers' weights into one piece of memory, one after the other, where the system may use huge pages.

    They are read once an iteration from end to end, and a page of 4 KiB ends every few hundred nanoseconds. Each old
    place is given back before the next layer moves, so no more than one layer is held twice.
    """
    found = list({id(layer): layer for layer in layers if layer.packed.numel()}.values())
    total = sum(_aligned(layer.packed.nbytes) for layer in found)
    if not total:
        return
    memory = mmap.mmap(-1, total + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses; then the pages are small.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(memory, dtype=torch.uint8)
    at = -pages.data_ptr() % _HUGE
    for layer in found:
        old = layer.packed
        new = pages[at : at + old.nbytes].view(old.dtype).view(old.shape)
        new.copy_(old)
        layer.packed = new
        at += _aligned(old.nbytes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
