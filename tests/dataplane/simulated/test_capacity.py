"""The search for the largest load: against functions whose answer is known, and against runs to their end."""

from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from evenflow.dataplane.simulated.capacity import Capacity, capacity, ceiling, judge, largest
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.figures import summarise
from evenflow.dataplane.simulated.load import Entry, arrivals, poisson
from evenflow.dataplane.simulated.refusal import CannotSimulate
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.world import World
from hypothesis import given
from hypothesis import strategies as st

SCENARIO = Scenario(
    KNOWN["mistral-7b"], load_device("a100-pcie"), token_budget=256, max_num_seqs=8, length=4096, host="graphs"
)
CHANCE = Random(1)
ENTRIES = [Entry(CHANCE.randint(200, 3000), CHANCE.randint(5, 40)) for _ in range(120)]


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e3), st.sampled_from([1.15, 1.5]))
def test_the_largest_is_found(edge: float, start: float, step: float) -> None:
    found = largest(lambda rate: rate <= edge, start, step)
    if edge < start / 1000 / step:
        assert found == 0.0
    elif found:
        assert 0.975 * edge <= found <= edge


def test_nothing_passes_and_everything_does() -> None:
    assert largest(lambda rate: False, 1.0) == 0.0
    assert largest(lambda rate: True, 1.0) > 1e6


@pytest.mark.parametrize("rate", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("policy", ["stall-free", "prefill-first"])
def test_a_verdict_is_that_of_the_whole_run(policy: str, rate: float) -> None:
    """What is given up early would have been missed; what is held has the figures of the run."""
    scenario = replace(SCENARIO, policy=policy)
    slo = 0.04
    verdict = judge(scenario, ENTRIES, rate, slo, 3)
    world = World(scenario.limits(), scenario.models())
    world.feed(arrivals(ENTRIES, islice(poisson(rate, 3), len(ENTRIES)), 4096))
    world.run()
    figures = summarise(world.record)
    delays = sorted(a - b for a, b in zip(world.record.scheduled, world.record.arrived, strict=True))
    sustained = figures.pooled_tbt.p99 <= slo and delays[len(delays) // 2] <= 2_000_000
    assert verdict.sustained == sustained
    if sustained:
        assert verdict.tbt_p99 == figures.pooled_tbt.p99
        assert verdict.delay_p50 == pytest.approx(delays[len(delays) // 2] / 1e6)


def test_both_limits_bind() -> None:
    """Stall-free is bounded by its throughput, prefill-first by its stalls: the paper's point."""
    chunked = judge(SCENARIO, ENTRIES, 20.0, 0.04)
    assert not chunked.sustained and chunked.delay_p50 > 2 and chunked.tbt_p99 <= 0.04
    whole = judge(replace(SCENARIO, policy="prefill-first"), ENTRIES, 2.0, 0.04)
    assert not whole.sustained and whole.delay_p50 < 2 and whole.tbt_p99 > 0.04


def test_capacity_over_seeds() -> None:
    found = capacity(SCENARIO, ENTRIES, 0.04, seeds=range(2), requests=100)
    assert found == capacity(SCENARIO, ENTRIES, 0.04, seeds=range(2), requests=100)
    assert len(set(found.rates)) == 2 and all(0.3 < rate / ceiling(SCENARIO, ENTRIES) < 3 for rate in found.rates)
    assert found.interval is not None and found.interval[0] < found.rate < found.interval[1]
    half = capacity(replace(SCENARIO, speed=0.5), ENTRIES, 0.08, requests=100)
    assert half.rate == pytest.approx(found.rates[0] / 2, rel=0.3) and half.interval is None


def test_the_interval_is_students() -> None:
    """Of 1, 2, 3: mean 2, standard deviation 1, t = 4.303 with two degrees of freedom."""
    interval = Capacity(2.0, (1.0, 2.0, 3.0)).interval
    assert interval == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(
        CannotSimulate, match="30 requests are too few to see a queue where 8 run at once: it takes 32"
    ):
        capacity(SCENARIO, ENTRIES, 0.04, requests=30)
