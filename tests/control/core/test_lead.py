"""How early a plan is made before the device needs it: long enough after lateness, and never longer for good."""

import pytest
from evenflow.control.core.budget import Budget, Timed
from evenflow.control.core.slo import parse_slo
from evenflow.control.core.timing import Features
from hypothesis import given
from hypothesis import strategies as st
from slo_device import budget_of, busy, device

LEAST, MOST = 0.002, 0.25


def returned(budget: Budget, held: float, starved: float) -> None:
    budget.returned(Timed(Features(0, 0, 4, 400), 0.05, 0.1, 0.0, held), 0, False, False, 0.0, starved, 1.0)


@given(
    st.sampled_from([1, 4]),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.001, 0.05, 2.0]), st.sampled_from([0.0, 1e-6, 0.01, 5.0])), max_size=60
    ),
    st.booleans(),
)
def test_whatever_made_it_grow_plans_in_time_bring_it_down(
    stages: int, events: list[tuple[float, float]], held: bool
) -> None:
    budget = Budget(parse_slo("100ms"), stages, 2048, 0)
    for before, starved in events:
        lead = budget.lead
        returned(budget, before, starved)
        assert LEAST <= budget.lead <= MOST
        if starved:
            assert lead <= budget.lead <= 2.51 * lead and (budget.lead == lead or lead < before)
    for _ in range(2500):
        returned(budget, 0.05 if held else 0.0, 0.0)
    assert budget.lead == LEAST


@pytest.mark.parametrize(("law", "stages"), [("linear", 1), ("floored", 1), ("linear", 4), ("floored", 4)])
def test_a_lead_that_leaves_no_plan_to_hold_is_found_to_be_too_long(law: str, stages: int) -> None:
    """As long as an iteration on all stages, whatever it was that made it so long."""
    server = busy(device(law, stages=stages, profiled=True), 10.0)
    budget = budget_of(server)
    budget.lead = 0.1
    held, seen = budget.plans_held, len(server.seen.iterations)
    server.run(12.0)
    assert budget.plans_held - held < 0.1 * (len(server.seen.iterations) - seen)
    while len(server.seen.iterations) < seen + 1500:
        server.run(server.now + 1.0)
    held, seen = budget.plans_held, len(server.seen.iterations)
    server.run(server.now + 20.0)
    assert budget.lead < 0.008
    assert budget.plans_held - held > 0.5 * (len(server.seen.iterations) - seen)


@pytest.mark.parametrize("stages", [1, 4])
def test_plans_are_held_again_on_a_device_that_has_become_faster(stages: int) -> None:
    """Control was slow while the device was: the lead that this took is longer than most iterations since."""
    shares: list[float] = []
    for hop in (0.0002, 0.03 / stages):
        server = device(stages=stages, speed=0.3, change=(0.0, 30.0, 5.0), profiled=True)
        server.hop = hop
        busy(server, 30.0)
        budget = budget_of(server)
        assert (budget.lead > 0.012 / stages) == (hop > 0.0002)
        server.hop = 0.0002
        server.run(120.0 if stages == 1 else 60.0)
        assert budget.lead < 0.015 / stages
        held, seen = budget.plans_held, len(server.seen.iterations)
        server.run(server.now + 20.0)
        shares.append((budget.plans_held - held) / (len(server.seen.iterations) - seen))
    assert shares[1] > 0.75 * shares[0] > 0.15
