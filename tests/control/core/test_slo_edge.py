"""A target of 100 ms on a device that can just keep it: eight streams decode in 50 ms, in 90 when they have grown.

Iterations scatter by 4 %, and one in two hundred takes 30 % longer. Long prompts come one after the other, as in
``benchmarks/stall.py``. All times are virtual.
"""

from dataclasses import dataclass
from statistics import median

import pytest
from slo_device import budget_of, device
from timed_device import TimedDevice

STREAMS = 8
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Served:
    seconds: float
    gaps: list[float]  #: of the streams while the prompt was read, sorted

    @property
    def held(self) -> float:
        return sum(gap <= 0.1 for gap in self.gaps) / len(self.gaps)

    @property
    def p99(self) -> float:
        return self.gaps[int(0.99 * len(self.gaps))]


def streams(
    seed: int,
    context: int = 20,
    profiled: bool = True,
    law: str = "edge",
    noise: float = 0.04,
    spikes: tuple[float, float] = (0.005, 1.3),
) -> TimedDevice:
    server = device(law, noise=noise, spikes=spikes, profiled=profiled, seed=seed)
    for key in range(STREAMS):
        server.submit(key, context, 30_000)
    while len(server.seen.requests) < STREAMS or any(
        request.tokens < 60 for request in server.seen.requests.values()
    ):
        server.run(server.now + 0.1)
    return server


def serve(server: TimedDevice, size: int) -> Served:
    """A prompt of ``size`` tokens, beside the streams."""
    key, since = len(server.seen.requests), server.now
    server.submit(key, size, 1)
    while key not in server.seen.requests or not server.seen.requests[key].tokens:
        server.run(server.now + 0.1)
        assert server.now < since + 300.0, "the prompt is not served"
    end = server.seen.requests[key].first
    server.run(server.now + 1.0)
    return Served(end - since, sorted(gap.seconds for gap in server.seen.gaps if since < gap.at <= end))


@pytest.mark.parametrize("profiled", [True, False])
def test_long_prompts_are_read_in_every_iteration_and_the_target_is_held(profiled: bool) -> None:
    found: dict[int, list[Served]] = {1000: [], 4000: [], 7000: []}
    for seed in SEEDS:
        server = streams(seed, profiled=profiled)
        for size, served in found.items():
            served.append(serve(server, size))
        assert not budget_of(server).withheld and not budget_of(server).unreachable
    for size, seconds in ((1000, 3.0), (4000, 20.0), (7000, 75.0)):
        assert max(served.seconds for served in found[size]) < seconds
        gaps = [gap for served in found[size] for gap in served.gaps]
        assert sum(gap <= 0.1 for gap in gaps) / len(gaps) >= 0.99
        assert median(served.gaps[-1] for served in found[size]) <= 0.125
        assert max(served.p99 for served in found[size]) <= 0.12
    # The iterations are full: a third and more of the time is there for the prompt, if the room is used.
    assert median(served.gaps[len(served.gaps) >> 1] for served in found[4000]) > 0.085


@pytest.mark.parametrize(
    ("context", "seconds", "held", "p99", "worst"),
    [(1000, 45.0, 0.95, 0.11, 0.15), (1600, 65.0, 0.6, 0.165, 0.2)],
)
def test_where_decodes_leave_no_room_the_prompt_is_read_soon_and_no_gap_is_twice_the_target(
    context: int, seconds: float, held: float, p99: float, worst: float
) -> None:
    """Streams of 1,600 tokens take 82 ms alone, and 100 when the prompt has been read, which has six seconds of work.
    How much is missed is reported."""
    for seed in SEEDS:
        server = streams(seed, context)
        budget = budget_of(server)
        served = serve(server, 4000)
        assert served.seconds < seconds
        assert served.held > held and served.p99 < p99 and served.gaps[-1] < worst
        assert budget.missed
        assert bool(budget.withheld) == bool(budget.unreachable) == (context == 1600)


@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_host_that_scatters_a_long_prompt_is_read_before_decodes_have_grown(seed: int) -> None:
    """Iterations scatter by 8 %, one in a hundred takes 40 % longer. A margin for all of that takes a third of
    the room. In what is left a prompt of 7,000 tokens takes four minutes, and decodes end beyond the target by
    themselves."""
    server = streams(seed, 400, law="reading", noise=0.08, spikes=(0.01, 1.4))
    served = [serve(server, size) for size in (1000, 4000, 7000)]
    assert [one.seconds < most for one, most in zip(served, (5.0, 32.0, 180.0), strict=True)] == [True] * 3
    assert max(one.p99 for one in served) < 0.13 and max(one.gaps[-1] for one in served) < 0.2
    assert budget_of(server).margin.value > 0.15
