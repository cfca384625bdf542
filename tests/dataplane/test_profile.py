"""What a worker measures of itself before it serves, on devices whose clocks are made up."""

from collections.abc import Callable

from evenflow.dataplane.profile import PROFILE_S, SHAPES, Shape, measure
from pytest import approx


class Device:
    """Takes what ``cost`` says, and ``cold`` times as much for its first iterations."""

    def __init__(self, cost: Callable[[Shape], float], cold: float = 1.0, colds: int = 2) -> None:
        self.now, self.runs = 0.0, list[Shape]()
        self._cost, self._cold, self._colds = cost, cold, colds

    def run(self, shape: Shape) -> None:
        self.now += self._cost(shape) * (self._cold if shape not in self.runs and self._colds > 0 else 1.0)
        if shape not in self.runs:
            self._colds -= 1
        self.runs.append(shape)

    def clock(self) -> float:
        return self.now


def quick(shape: Shape) -> float:
    return 0.001 + 1e-5 * shape.tokens + 1e-8 * shape.attention


def slow(shape: Shape) -> float:
    return 2.0 + 0.01 * shape.tokens


def test_a_quick_device_measures_all_shapes_twice_that_it_can_hold() -> None:
    device = Device(quick)
    samples = measure(device.run, 2048, 8192, device.clock)
    assert len(samples) == len(SHAPES) and len(device.runs) == 2 * len(SHAPES)
    assert [s.took_us for s in samples] == approx([quick(shape) * 1e6 for shape in SHAPES], rel=0.01)
    device = Device(quick)
    assert all(s.prefill + s.decodes <= 16 for s in measure(device.run, 16, 8192, device.clock))
    assert all(shape.context + shape.each <= 256 for shape in device.runs if shape.tokens > 16)


def test_a_cold_start_is_not_taken_for_the_device() -> None:
    device = Device(quick, cold=500.0)
    samples = measure(device.run, 2048, 8192, device.clock)
    assert [s.took_us for s in samples[:2]] == approx([quick(shape) * 1e6 for shape in SHAPES[:2]], rel=0.01)


def test_a_slow_device_measures_decodes_and_a_chunk_and_stops_in_time() -> None:
    device = Device(slow)
    samples = measure(device.run, 2048, 8192, device.clock)
    assert [(s.decodes, s.prefill) for s in samples] == [(1, 0), (0, 64)]
    device = Device(lambda shape: 0.05 + 0.002 * shape.tokens)
    measure(device.run, 2048, 8192, device.clock)
    assert device.now < 2 * PROFILE_S
