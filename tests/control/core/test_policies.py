"""Exact timelines of every policy: which prompts and which decodes are in each iteration.

An iteration is written as a device would see it, such as ``"AB C3"``: the decodes of A and B, and three tokens of C's
prompt. Plans are made ahead, as in the server: whoever comes while an iteration runs finds the next one already made.
"""

from array import array
from itertools import pairwise

import pytest
from evenflow.control.core.bounds import POLICIES, WHOLE_PROMPTS, iteration_tokens
from evenflow.control.core.events import Limits, SendPlan
from evenflow.control.core.policies import make_policy
from inprocess import InProcess
from shadow_server import only, prompt, shadow_server, wanted

NAMES = "ABCDEFGHIJ"
Options = int | bool | float


class Timeline:
    """A server whose iterations are written down. Requests (tokens of the prompt, of the output) are named A, B
    … in the order in which they come; the first ones are there before the replica is."""

    def __init__(self, policy: str, *first: tuple[int, int], budget: int = 64, **options: Options) -> None:
        self.server: InProcess = shadow_server(policy=policy, budget=budget, share=0.0, up=False, **options)  # pyright: ignore[reportArgumentType]
        self._sizes: list[tuple[int, int]] = []
        for size, output in first:
            self.submit(size, output)
        self.server.bring_up(0)

    def submit(self, size: int, output: int) -> None:
        key = len(self._sizes)
        self._sizes.append((size, output))
        self.server.submit(key, prompt(size, seed=key + 1), output)

    def iterate(self, count: int = 1) -> int:
        """Let the device finish so many iterations; the step of the next that will be planned."""
        for _ in range(count):
            returned = self._returned()
            while self._returned() == returned:
                actions = self.server.actions()
                assert actions, "there is nothing to run"
                action, replica, stage = actions[-1]
                action(replica, stage)
        return only(self.server).step

    def _returned(self) -> int:
        replica = only(self.server)
        return replica.step - len(replica.inflight)

    def finish(self) -> None:
        """Let all requests end, and check their tokens."""
        self.server.run()
        self.server.assert_idle()
        for key, (size, output) in enumerate(self._sizes):
            assert self.server.tokens(key) == wanted(prompt(size, seed=key + 1), output)

    def entries(self, since: int = 0, lane: int | None = None) -> list[str]:
        """The iterations from step ``since`` on, of ``lane`` or of all."""
        owners: dict[int, str] = {}
        told: list[str] = []
        for sent in self.server.plans:
            for register in sent.registers:
                owners[register.slot] = NAMES[register.request]
            if (lane is None or sent.plan.lane == lane) and sent.plan.step >= since:
                told.append(_entry(sent, owners))
        return told


def _entry(sent: SendPlan, owners: dict[int, str]) -> str:
    plan = sent.plan
    bits = int.from_bytes(plan.decodes, "little")
    decodes = "".join(sorted(owners[slot] for slot in range(bits.bit_length()) if bits >> slot & 1))
    chunks = zip(array("H", plan.chunk_slots), array("I", plan.chunk_tokens), strict=True)
    return " ".join([*([decodes] if decodes else []), *sorted(f"{owners[slot]}{tokens}" for slot, tokens in chunks)])


def timeline(policy: str, *requests: tuple[int, int], **options: Options) -> list[str]:
    """All iterations of requests that come at once."""
    found = Timeline(policy, *requests, **options)  # pyright: ignore[reportArgumentType]
    found.finish()
    return found.entries()


# ---- Figure 7 of the paper: A and B are decoding; C and D arrive --------------------------------------------------


def figure_7(policy: str, budget: int) -> list[str]:
    """What follows the arrival of C, with a prompt of 20 tokens, and of D, with one of 10."""
    found = Timeline(policy, (4, 9), (4, 9), budget=budget)
    since = found.iterate(3)
    found.submit(20, 3)
    found.submit(10, 3)
    found.finish()
    assert found.entries()[:since] == ["A4 B4", *["AB"] * (since - 1)]
    return found.entries(since)


def test_figure_7_request_level() -> None:
    """C and D wait until A and B have all their tokens."""
    assert figure_7("request-level", 64) == ["AB", "AB", "AB", "AB", "C20 D10", "CD", "CD"]


def test_figure_7_prefill_first() -> None:
    """The whole prompts run before A and B go on: a generation stall."""
    assert figure_7("prefill-first", 64) == ["C20 D10", "ABCD", "ABCD", "AB", "AB"]


def test_figure_7_hybrid() -> None:
    """A and B are in the iteration of the whole prompts, and wait as long for it."""
    assert figure_7("hybrid", 64) == ["AB C20 D10", "ABCD", "ABCD", "AB"]


def test_figure_7_stall_free() -> None:
    """A and B are in every iteration, and none has more than the budget of 16 tokens: C's prompt takes two."""
    assert figure_7("stall-free", 16) == ["AB C14", "AB C6 D8", "ABC D2", "ABCD", "D"]


# ---- request-level ------------------------------------------------------------------------------------------------


def test_request_level_runs_all_prompts_first_and_then_decodes_until_the_last_request_ends() -> None:
    found = Timeline("request-level", (30, 2), (30, 5), (30, 3))
    found.submit(5, 2)
    found.finish()
    # C's prompt does not fit the first iteration of 64 tokens.
    assert found.entries() == ["A30 B30", "C30", "ABC", "BC", "B", "B", "D5", "D"]


def test_request_level_has_a_batch_for_each_lane() -> None:
    """Each of two lanes takes half of the sequences that may run, and the next ones when all of those have ended."""
    found = Timeline("request-level", *[(5, 4), (5, 2), (5, 3), (5, 3), (5, 2)], stages=2, seqs=4)
    found.finish()
    assert found.entries(lane=0) == ["A5 B5", "AB", "A", "A"]
    assert found.entries(lane=1) == ["C5 D5", "CD", "CD", "E5", "E"]


def test_request_level_forgets_a_prompt_that_is_aborted_before_it_runs() -> None:
    found = Timeline("request-level", (60, 3), (60, 3), (60, 3), (60, 3))
    found.server.abort(2)
    found.server.run()
    found.server.assert_idle()
    assert found.entries() == ["A60", "B60", "D60", *["ABD"] * 2]


# ---- prefill-first ------------------------------------------------------------------------------------------------


def test_prefill_first_packs_whole_prompts_up_to_the_bound() -> None:
    """D opens the next iteration; it is not passed by E, which would fit."""
    requests = [(20, 2), (20, 2), (20, 2), (20, 2), (4, 2)]
    assert timeline("prefill-first", *requests) == ["A20 B20 C20", "D20 E4", "ABCDE"]


def test_prefill_first_admits_as_soon_as_it_can() -> None:
    """Two sequences may run: B's end lets C in at once, and A pauses for its prompt."""
    assert timeline("prefill-first", (8, 6), (8, 3), (9, 2), seqs=2) == ["A8 B8", "AB", "AB", "C9", "AC", "A", "A"]


def test_prefill_first_is_never_mixed_and_pauses_are_no_ticks() -> None:
    found = Timeline("prefill-first", (8, 12), block_size=4)
    for _ in range(4):
        found.iterate(2)
        found.submit(7, 2)
    found.finish()
    assert all(0 in (sent.decodes, sent.tokens - sent.decodes) for sent in found.server.plans)
    assert sum("A" in entry for entry in found.entries()) == 1 + 11


# ---- hybrid and hybrid-only ---------------------------------------------------------------------------------------


def test_hybrid_runs_a_prompt_that_fits_beside_the_decodes_and_nobody_passes_it() -> None:
    """C's 63 tokens do not fit beside two decodes, and D's 3 would; C runs when only one decodes."""
    found = Timeline("hybrid-only", (4, 8), (4, 6))
    found.iterate(2)
    found.submit(63, 2)
    found.submit(3, 2)
    found.finish()
    assert found.entries() == ["A4 B4", *["AB"] * 5, "A C63", "AC D3", "D"]


def test_hybrid_reserves_the_maximum_length_and_hybrid_only_does_not() -> None:
    """Seven blocks of four tokens; a request has 17 at most, and the last is never written: four blocks. So two do
    not run together. Paged, they do, until one is preempted and has to be computed anew."""
    requests = [(4, 13), (4, 13)]
    options = {"blocks": 7, "block_size": 4}
    found = Timeline("hybrid", *requests, **options)  # pyright: ignore[reportArgumentType]
    found.finish()
    assert found.entries() == ["A4", *["A"] * 12, "B4", *["B"] * 12]
    assert only(found.server).preemptions == 0
    found = Timeline("hybrid-only", *requests, **options)  # pyright: ignore[reportArgumentType]
    found.finish()
    assert found.entries()[:2] == ["A4 B4", "AB"] and only(found.server).preemptions == 1


@pytest.mark.parametrize("policy", ["hybrid", "request-level"])
def test_what_is_reserved_can_be_used_to_the_last_block(policy: str) -> None:
    found = Timeline(policy, (4, 13), (5, 12), (3, 14), (1, 2), blocks=12, block_size=4)
    assert len(only(found.server).running) == 3
    found.finish()
    assert only(found.server).preemptions == 0 and not any(sent.plan.grow_slots for sent in found.server.plans)


# ---- chunked-only -------------------------------------------------------------------------------------------------


def test_chunked_only_alternates_between_chunks_and_decodes() -> None:
    found = Timeline("chunked-only", (4, 8), (4, 8), budget=8)
    found.iterate(2)
    found.submit(20, 3)
    found.finish()
    assert found.entries() == ["A4 B4", "AB", "AB", "AB", "C8", "AB", "C8", "AB", "C4", "ABC", "ABC"]


def test_chunked_only_alternates_in_each_lane() -> None:
    found = Timeline("chunked-only", (4, 9), (4, 9), budget=8, stages=2)
    found.iterate(3)
    found.submit(40, 2)
    found.finish()
    for lane in range(2):
        kinds = ["chunk" if entry[0] == "C" and entry[1:] else "decode" for entry in found.entries(lane=lane)[1:]]
        assert "chunk" in kinds and ("chunk", "chunk") not in set(pairwise(kinds))


# ---- all ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(WHOLE_PROMPTS))
def test_a_prompt_that_no_iteration_holds_is_refused(policy: str) -> None:
    server = shadow_server(policy=policy, budget=50)
    server.submit(0, prompt(50), 1000)
    server.submit(1, prompt(51), 2)
    (refused,) = server.rejected
    assert (refused.key, refused.code, refused.field) == (1, "too_long", "tokens")
    assert refused.message == (
        "the prompt has 51 tokens; with at least one of output"
        f" an iteration, which policy {policy} computes a prompt in, allows 50"
    )
    del server.clients[0].tokens[1]
    server.run()
    # What may have to be computed anew must fit an iteration too, so it gets no longer than that.
    assert server.reason(0) == "length" and len(server.tokens(0)) == 1


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - WHOLE_PROMPTS))
def test_prompts_longer_than_the_budget_are_served_in_chunks(policy: str) -> None:
    assert timeline(policy, (150, 2)) == ["A64", "A64", "A22", "A"]


def test_the_tokens_of_an_iteration_by_policy() -> None:
    assert [iteration_tokens(policy, 256, 8192, 100) for policy in POLICIES] == [256, 8192, 8292, 8192, 256, 8292]
    assert {iteration_tokens(policy, 9000, 8192, 100) for policy in POLICIES} == {9000}


def test_policies_by_name() -> None:
    assert Limits().policy == POLICIES[0] == "stall-free"
    kinds = {(type(made := make_policy(policy, 1)), made.reserves) for policy in POLICIES}
    assert len(kinds) == len(POLICIES)
    with pytest.raises(ValueError, match="no policy 'orca'"):
        make_policy("orca", 1)
