"""Log-probabilities reach the client once each, with the right value, whatever happens to the sequence."""

from array import array

import pytest
from evenflow.control.core.biases import bias_problem
from evenflow.control.core.events import Limits, OutOfStep, Returned, Submitted
from evenflow.control.wire import Logprobs, Sampling, Submit
from inprocess import InProcess, u32
from msgspec.structs import replace
from shadow_server import advance, device_side, logprob_of, only, prompt, scrambled, shadow_server, wanted

BOTH = Sampling(logprobs=2, prompt_logprobs=1)


def check(server: InProcess, key: int, tokens: list[int], sampling: Sampling = BOTH) -> None:
    """All of the request's are there. (That none came twice, the client checks.)"""
    known = tokens + server.tokens(key)
    expected = {i: logprob_of(known, i, sampling.logprobs) for i in range(len(tokens), len(known))}
    if sampling.prompt_logprobs >= 0:
        expected |= {i: logprob_of(known, i, sampling.prompt_logprobs) for i in range(1, len(tokens))}
    assert server.logprobs_of(key) == expected


@pytest.mark.parametrize("stages", [1, 3])
def test_each_position_once_under_preemption(stages: int) -> None:
    server = shadow_server(budget=32, blocks=12, stages=stages)
    requests = {key: prompt(40 + 3 * key, seed=key) for key in range(5)}
    for key, tokens in requests.items():
        server.submit(key, tokens, 40, sampling=BOTH)
    server.run(scrambled(stages))
    assert only(server).preemptions
    for key, tokens in requests.items():
        assert server.tokens(key) == wanted(tokens, 40)
        check(server, key, tokens)
    server.assert_idle()


@pytest.mark.parametrize("done", range(0, 26, 3))
def test_each_position_once_when_a_worker_dies(done: int) -> None:
    """At any point of the prompt and of the output; also with results on their way to control."""
    server = shadow_server(budget=16, stages=2)
    server.submit(0, prompt(90), 12, sampling=BOTH)
    server.submit(1, prompt(9, seed=2), 12, sampling=Sampling(logprobs=0))
    advance(server, done)
    server.crash(0, keep_results=bool(done % 2))
    server.bring_up(0)
    server.run()
    check(server, 0, prompt(90))
    check(server, 1, prompt(9, seed=2), Sampling(logprobs=0))
    server.assert_idle()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_kv_1_prompt_logprobs_do_not_come_from_the_prefix_cache(order: tuple[int, int]) -> None:
    """The same prompt again, and prompts that share a prefix, in both orders."""
    server = shadow_server(budget=16)
    shared = prompt(33)
    prompts = [[*shared, 5], [*shared, 6, 7]]
    for key, which in enumerate([*order, *order]):
        server.submit(key, prompts[which], 3, sampling=BOTH)
        server.run()
        check(server, key, prompts[which])
        assert server.clients[0].cached[key] == 0
    # Others may still read what these computed.
    server.submit(9, prompts[0], 3)
    server.run()
    assert server.clients[0].cached[9] == 32


def test_a_prompt_that_was_told_is_read_from_the_cache_when_it_comes_again() -> None:
    server = shadow_server(budget=64, blocks=12, share=0.0)
    for key in range(3):
        server.submit(key, prompt(50, seed=key), 60, sampling=BOTH)
    server.run()
    assert only(server).preemptions
    registered = [r for sent in server.plans for r in sent.registers]
    again = [r for r in registered if len(r.tokens) > 4 * r.prompt_len]
    assert again and all(r.sampling.prompt_logprobs == -1 and r.sampling.logprobs == 2 for r in again)
    for key in range(3):
        check(server, key, prompt(50, seed=key))


def test_an_abort_drops_what_is_on_its_way() -> None:
    server = shadow_server(budget=16, stages=2)
    server.submit(0, prompt(60), 30, sampling=BOTH)
    server.submit(1, prompt(20, seed=2), 30, sampling=BOTH)
    advance(server, 9)
    assert server.results[0] or only(server).inflight
    told = dict(server.logprobs_of(0))
    assert told and len(told) < 59
    server.abort(0)
    server.run()
    assert server.logprobs_of(0) == told
    check(server, 1, prompt(20, seed=2))


def test_an_abort_leaves_several_results_void() -> None:
    """The first of them is where the prompt's log-probabilities would go on, the others lie behind a gap."""
    server = shadow_server(budget=16, stages=2)
    server.submit(0, prompt(100), 4, sampling=BOTH)
    server.submit(1, prompt(20, seed=2), 4, sampling=BOTH)
    device_side(server)
    assert len(only(server).inflight) == 3
    server.abort(0)
    server.run()
    assert not server.logprobs_of(0)
    check(server, 1, prompt(20, seed=2))


def test_a_prompts_go_to_their_client_also_in_an_iteration_of_anothers_decodes() -> None:
    server = shadow_server(budget=16)
    server.submit(0, prompt(8), 40, owner=0)
    advance(server, 4)
    server.submit(0, prompt(60, seed=2), 4, owner=1, sampling=BOTH)
    server.run()
    assert not server.clients[0].logprobs
    known = prompt(60, seed=2) + server.tokens(0, owner=1)
    assert server.logprobs_of(0, owner=1) == {
        i: logprob_of(known, i, 1 if i < 60 else 2) for i in range(1, len(known))
    }


def test_the_token_that_stops_has_its_own() -> None:
    tokens = prompt(20)
    stop = wanted(tokens, 4)[3]
    server = shadow_server()
    server.submit(0, tokens, 30, sampling=BOTH, stop_ids=(stop,))
    server.run()
    assert server.reason(0) == "stop" and server.tokens(0)[-1] == stop
    check(server, 0, tokens)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (Logprobs(60, 1, b"\0" * 4, b"\0" * 4), "slot 60, which nobody has"),
        (Logprobs(999, 1, b"\0" * 4, b"\0" * 4), "slot 999, which nobody has"),
        (Logprobs(0, 1, b"", b""), "0 bytes of values"),
        (Logprobs(0, 1, b"\0" * 5, b"\0" * 5), "5 bytes of values"),
        (Logprobs(0, 1, b"\0" * 4, b"\0" * 8), "4 bytes of values"),
        (Logprobs(0, 1, b"\0" * 8, b"\0" * 8, b"\0" * 12, b"\0" * 12), "12 of alternatives"),
        (Logprobs(0, 1, b"\0" * 4, b"\0" * 4, b"\0" * 4, b""), "0 of alternatives"),
        (Logprobs(0, 5, b"\0" * 4, b"\0" * 4), "from token 5, expected 1"),
        (Logprobs(0, 1, b"\0" * 160, b"\0" * 160), "past the end of its prompt"),
    ],
)
def test_what_contradicts_the_plans_ends_the_epoch(entry: Logprobs, problem: str) -> None:
    server = shadow_server(budget=16)
    server.submit(0, prompt(40), 4, sampling=BOTH)
    (action, replica, stage), *_ = server.actions()
    action(replica, stage)
    result = replace(server.results[0][0], logprobs=[entry])
    (effect,) = server.engine.step(Returned(0, result), 1.0)
    assert isinstance(effect, OutOfStep) and problem in effect.reason


def f32(*values: float) -> bytes:
    return array("f", values).tobytes()


@pytest.mark.parametrize(
    ("ids", "values", "field", "message"),
    [
        (u32([1]), b"", "bias_values", "4 and 0 bytes"),
        (b"", f32(1), "bias_values", "0 and 4 bytes"),
        (b"\0\0\0", b"\0\0\0", "bias_values", "3 and 3 bytes"),
        (u32([1, 100]), f32(1, 1), "bias_ids", "from 0 to 99, not 100"),
        (u32([1, 1]), f32(1, 1), "bias_ids", "once"),
        (u32(list(range(1025))), f32(*[0.0] * 1025), "bias_ids", "at most 1024"),
        (u32([1, 2]), f32(0, float("nan")), "bias_values", "from -100 to 100, not nan"),
        (u32([1]), f32(float("-inf")), "bias_values", "from -100 to 100, not -inf"),
        (u32([1]), f32(100.5), "bias_values", "from -100 to 100, not 100.5"),
    ],
)
def test_biases_are_checked_where_a_submission_is_taken(ids: bytes, values: bytes, field: str, message: str) -> None:
    server = shadow_server()
    server.engine.limits = Limits(vocab_size=100)
    sampling = Sampling(bias_ids=ids, bias_values=values)
    server.step(Submitted(0, Submit(1, "r", u32([1]), 1, 4, sampling)))
    (refused,) = server.rejected
    assert (refused.key, refused.code, refused.field) == (1, "invalid", field) and message in refused.message
    assert not server.engine.requests


def test_biases_at_their_bounds_are_taken() -> None:
    sampling = Sampling(bias_ids=u32([0, 99]), bias_values=f32(-100, 100))
    assert bias_problem(sampling, 100) is None
