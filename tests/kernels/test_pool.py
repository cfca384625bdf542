"""Threads that share the units of an operation: each once, however many there are, whoever asks, on any cores."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from evenflow.kernels import cpu
from evenflow.kernels.packed import PackedLinear
from torch import Tensor

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels cannot be built here")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer_and_rows(rows: int) -> tuple[PackedLinear, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return PackedLinear(torch.randn(700, 40, generator=generator)), torch.randn(rows, 40, generator=generator)


def computed(layer: PackedLinear, x: Tensor) -> Tensor:
    out = torch.full((len(x), layer.out_features), torch.nan)
    layer.into(x, out)
    return out


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_every_unit_is_done_once_by_any_number_of_threads(threads: int) -> None:
    torch.set_num_threads(1)
    cases = [layer_and_rows(rows) for rows in (1, 2, 33, 150)]
    wanted = [computed(*case) for case in cases]
    torch.set_num_threads(threads)
    for _ in range(300):
        for case, expected in zip(cases, wanted, strict=True):
            assert torch.equal(computed(*case), expected)


def test_threads_that_ask_at_the_same_time_get_their_own_results() -> None:
    torch.set_num_threads(2)
    wrong: list[int] = []

    def ask(rows: int) -> None:
        layer, x = layer_and_rows(rows)
        expected = computed(layer, x)
        wrong.extend(rows for _ in range(300) if not torch.equal(computed(layer, x), expected))

    callers = [threading.Thread(target=ask, args=(rows,)) for rows in (1, 20, 60, 130)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_nobody_waits_for_helpers_that_have_no_core() -> None:
    """Eight threads on one core: whoever has it does the work."""
    program = (
        "import os, torch; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); torch.set_num_threads(8)\n"
        "from evenflow.kernels.packed import PackedLinear\n"
        "from evenflow.kernels import cpu; assert cpu.available()\n"
        "layer, x = PackedLinear(torch.ones(700, 40)), torch.ones(30, 40)\n"
        "for _ in range(2000):\n"
        "    assert bool((layer(x) == 40).all())\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120, env=dict(os.environ))
