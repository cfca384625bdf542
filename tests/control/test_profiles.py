"""What workers measured before they serve, as control takes it."""

from dataclasses import replace

from evenflow.control.core.events import Limits
from evenflow.control.core.slo import parse_slo
from evenflow.control.profiles import expectation, slowest_profile
from evenflow.control.wire import Sample

LIMITS = Limits(token_budget=256, max_model_len=8192)


def profile(by: float = 1.0) -> list[Sample]:
    shapes = [(16, 0, 0), (64, 0, 0), (256, 0, 0), (64, 1984, 0), (0, 0, 1), (0, 0, 16)]
    samples: list[Sample] = []
    for taken, context, decodes in shapes:
        pairs = taken * context + taken * (taken + 1) // 2
        took = 0.005 + 4e-4 * taken + 5e-8 * pairs + 3e-4 * decodes
        samples.append(Sample(taken, pairs, decodes, 32 * decodes, int(1e6 * by * took)))
    return samples


def test_the_slowest_stage_counts_for_each_kind_of_iteration() -> None:
    mixed = [*profile(2.0)[:3], *profile(0.5)[3:]]
    assert slowest_profile([profile(), mixed]) == [*profile(2.0)[:3], *profile()[3:]]
    assert slowest_profile([profile()[:2], profile()]) == profile()[:2]
    assert slowest_profile([[], profile()]) == [] == slowest_profile([])


def test_the_worst_gap_of_a_fixed_budget_is_predicted() -> None:
    told = expectation(profile(), LIMITS, 1)
    assert told is not None
    near, far = told["worst_gap_ms"], told["worst_gap_ms_at_full_context"]
    assert isinstance(near, int) and isinstance(far, int)
    assert abs(near - 109) <= 8 and abs(far - 211) <= 20
    two = expectation(profile(), LIMITS, 2)
    assert two is not None and abs(int(str(two["worst_gap_ms"])) - 2 * near) <= 1


def test_the_chunks_of_a_target_are_predicted() -> None:
    told = expectation(profile(), replace(LIMITS, token_budget=2048, slo=parse_slo("100ms")), 1)
    assert told is not None
    assert told["interactive_ms"] == 100 and told["relaxed_ms"] == 500
    near, far = int(str(told["interactive_chunk"])), int(str(told["interactive_chunk_at_full_context"]))
    assert abs(near - 232) <= 20 and abs(far - 116) <= 20
    assert int(str(told["relaxed_chunk"])) > 3 * near


def test_nothing_is_told_without_a_profile() -> None:
    assert expectation([], LIMITS, 1) is None
