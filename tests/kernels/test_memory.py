"""Memory that is zero, aligned, of any type, and not yet resident."""

import psutil
import pytest
import torch
from evenflow.kernels.memory import lazy_zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_zeros_of_any_type_are_aligned_and_writable(dtype: torch.dtype) -> None:
    pages = lazy_zeros((3, 5, 7), dtype)
    assert pages.shape == (3, 5, 7) and pages.dtype == dtype and pages.is_contiguous()
    assert pages.data_ptr() % 64 == 0 and not pages.any()
    pages[1, 2, 3] = 5
    assert pages.sum() == 5


def test_pages_are_resident_only_when_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pages = lazy_zeros((1 << 30,), torch.int8)
    assert process.memory_info().rss - before < 1 << 29
    pages[: 1 << 20] = 1
    assert int(pages[: 1 << 20].sum()) == 1 << 20
