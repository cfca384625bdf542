"""Memory that is zero, aligned, of any type, and not yet resident."""

import psutil
import pytest
import torch
from evenflow.kernels import memory
from evenflow.kernels.memory import lay_together, lazy_zeros


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


class Held:
    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed


def test_weights_lie_one_after_the_other_with_their_bits() -> None:
    shapes = [((3, 5, 7), torch.bfloat16), ((1000,), torch.uint8), ((0,), torch.float32), ((90, 100), torch.float32)]
    wanted = [torch.randn(shape).to(dtype) for shape, dtype in shapes]
    layers = [Held(tensor.clone()) for tensor in wanted]
    lay_together([*layers, layers[0]])
    for layer, tensor in zip(layers, wanted, strict=True):
        assert layer.packed.dtype == tensor.dtype and layer.packed.shape == tensor.shape
        assert torch.equal(layer.packed, tensor) and layer.packed.is_contiguous()
    first, second, empty, last = (layer.packed for layer in layers)
    # Each at the next multiple of 64; one that is named twice is there once.
    assert first.data_ptr() % (2 << 20) == 0 and empty.numel() == 0
    assert [second.data_ptr() - first.data_ptr(), last.data_ptr() - second.data_ptr()] == [256, 1024]


def test_weights_outlive_the_layers_they_came_with() -> None:
    layers = [Held(torch.full((1 << 20,), float(number))) for number in range(3)]
    lay_together(layers)
    kept = layers[1].packed
    del layers
    assert bool((kept == 1.0).all())


def test_a_system_without_huge_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", 10_000)
    layer = Held(torch.arange(5.0))
    lay_together([layer])
    assert layer.packed.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    lay_together([])
