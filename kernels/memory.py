"""Memory for KV blocks."""

from math import prod

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU that cost nothing until they are written: pages that the system has not yet backed.

    ``torch.zeros`` writes them all, a second for each GiB, while a worker that starts is being waited for.
    """
    size = prod(shape) * dtype.itemsize
    pages = np.zeros(size + _ALIGN, np.uint8)
    start = -pages.ctypes.data % _ALIGN
    return torch.from_numpy(pages[start : start + size]).view(dtype).view(shape)
