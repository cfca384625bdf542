"""The Python client against a scripted control process: restarts, gaps, pauses, reused slots."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evenflow.control.client import AsyncClient, Client
from evenflow.control.client_state import SILENCE_S, ClientState
from evenflow.control.wire import (
    PROTOCOL_VERSION,
    Abort,
    ClientHello,
    ClientPing,
    End,
    Merged,
    Owned,
    Refused,
    Run,
    Sampling,
    Submit,
    Tick,
    Unknown,
    Welcome,
)
from fake_control import FakeControl


def welcome(instance: int = 1) -> Welcome:
    return Welcome(PROTOCOL_VERSION, instance, "m", True, 4096, 1000, 16, 4096, 256, 256)


def tick(
    sequence: int,
    tokens: dict[int, int],
    starts: dict[int, int] | None = None,
    ends: list[End] | None = None,
    *,
    dense: bool = False,
    replica: int = 0,
) -> Tick:
    bitmap = bytearray(max(tokens, default=0) // 8 + 1)
    for slot in tokens:
        bitmap[slot // 8] |= 1 << slot % 8
    if dense:
        ids = array("I", [tokens.get(slot, 7777) for slot in range(max(tokens, default=-1) + 1)])
    else:
        ids = array("I", [tokens[slot] for slot in sorted(tokens)])
    starts = starts or {}
    return Tick(
        sequence,
        0,
        bytes(bitmap),
        dense,
        ids.tobytes(),
        array("H", starts.keys()).tobytes(),
        array("Q", starts.values()).tobytes(),
        ends or [],
        replica,
    )


def joined() -> ClientState:
    state = ClientState("test")
    state.start(0.0)
    assert state.outbox == [ClientHello(PROTOCOL_VERSION, "test")]
    state.outbox.clear()
    state.receive(welcome(), 0.1)
    return state


def ask(state: ClientState, prompt: list[int], **options: Any) -> Any:
    options.setdefault("sampling", Sampling())
    return state.submit(array("I", prompt).tobytes(), name="r", **options)


def submits(state: ClientState) -> list[Submit]:
    return [message for message in state.outbox if isinstance(message, Submit)]


def tokens_of(submit: Submit) -> list[int]:
    return array("I", submit.tokens).tolist()


@pytest.mark.parametrize("dense", [False, True])
def test_tokens_reach_the_owner_of_their_slot(dense: bool) -> None:
    state = joined()
    first, second = ask(state, [1]), ask(state, [2])
    state.receive(tick(0, {9: 50}, {9: first.key}, dense=dense), 0.2)
    state.receive(tick(1, {9: 51, 300: 60}, {300: second.key}, dense=dense), 0.2)
    state.receive(tick(2, {300: 61}, ends=[End(first.key, 9, "stop", 2, 1)], dense=dense), 0.2)
    assert first.received.tolist() == [50, 51]
    assert second.received.tolist() == [60, 61]
    assert first.finish is not None and first.finish.reason == "stop" and first.finish.cached_tokens == 1
    assert second.finish is None


def test_a_reused_slot_gives_nothing_to_its_former_owner() -> None:
    state = joined()
    first, second = ask(state, [1]), ask(state, [2])
    state.receive(tick(0, {4: 50}, {4: first.key}), 0.2)
    state.abort(first)
    assert Abort(first.key) in state.outbox
    # Still under way when the abort was sent.
    state.receive(tick(1, {4: 51}), 0.2)
    state.receive(tick(2, {4: 60}, {4: second.key}), 0.2)
    assert first.received.tolist() == [50]
    assert second.received.tolist() == [60]


def test_slots_of_two_replicas_are_different_slots() -> None:
    state = joined()
    first, second = ask(state, [1]), ask(state, [2])
    state.receive(tick(0, {4: 50}, {4: first.key}, replica=0), 0.2)
    state.receive(tick(1, {4: 60}, {4: second.key}, replica=1), 0.2)
    state.receive(tick(2, {4: 51}, replica=0), 0.2)
    assert first.received.tolist() == [50, 51]
    assert second.received.tolist() == [60]


def u16(*values: int) -> bytes:
    return array("H", values).tobytes()


def u32(*values: int) -> bytes:
    return array("I", values).tobytes()


def u64(*values: int) -> bytes:
    return array("Q", values).tobytes()


def test_merged_ticks_continue_end_and_hand_over_slots() -> None:
    state = joined()
    first, second, third = (ask(state, [n]) for n in (1, 2, 3))
    state.receive(tick(0, {4: 50, 5: 60}, {4: first.key, 5: second.key}), 0.2)
    runs = [Run(first.key, u32(51, 52)), Run(third.key, u32(70)), Run(99, u32(1))]
    ends = [End(first.key, 0xFFFF, "length", 3, 1)]
    owned = [Owned(0, u16(4), u64(third.key)), Owned(1, u16(5), u64(second.key))]
    state.receive(Merged(1, runs, ends, owned), 0.3)
    assert first.received.tolist() == [50, 51, 52]
    assert first.finish is not None and first.finish.reason == "length" and first.finish.cached_tokens == 1
    state.receive(tick(2, {4: 71, 5: 99}), 0.4)
    state.receive(tick(3, {5: 61}, replica=1), 0.4)
    assert third.received.tolist() == [70, 71] and second.received.tolist() == [60, 61]


@pytest.mark.parametrize(
    "merged",
    [Merged(1), Merged(0, [Run(1, b"123")]), Merged(0, owned=[Owned(0, u16(1, 2), u64(1))])],
    ids=["gap", "odd ids", "odd slots"],
)
def test_a_merged_tick_that_does_not_fit_is_like_a_gap(merged: Merged) -> None:
    state = joined()
    request = ask(state, [1])
    state.receive(merged, 0.2)
    assert state.connection == 1 and not state.connected and request.received.tolist() == []


def test_the_next_hello_names_the_session_that_is_over() -> None:
    state = joined()
    state.receive(msgspec.structs.replace(welcome(), session=77), 0.2)
    state.receive(Unknown(1), 0.3)
    assert state.outbox == [ClientHello(PROTOCOL_VERSION, "test", 77)]


def test_a_pause_is_no_end() -> None:
    state = joined()
    request = ask(state, [1])
    state.receive(tick(0, {4: 50}, {4: request.key}, [End(request.key, 4, "paused", 1)]), 0.2)
    state.receive(tick(1, {4: 99}), 0.2)
    state.receive(tick(2, {8: 51}, {8: request.key}, [End(request.key, 8, "length", 2)]), 0.2)
    assert request.received.tolist() == [50, 51]
    assert request.finish is not None and request.finish.reason == "length"


def test_a_gap_leads_to_a_new_connection_and_a_continuation() -> None:
    state = joined()
    request = ask(state, [1, 2], max_tokens=9)
    state.receive(tick(0, {4: 50}, {4: request.key}), 0.2)
    state.receive(tick(2, {4: 52}), 0.3)
    assert state.connection == 1 and not state.connected
    assert state.outbox == [ClientHello(PROTOCOL_VERSION, "test")]
    state.receive(welcome(), 0.4)
    (again,) = submits(state)
    assert tokens_of(again) == [1, 2, 50] and again.prompt_len == 2 and again.max_tokens == 9
    state.receive(tick(0, {6: 51}, {6: request.key}), 0.5)
    assert request.received.tolist() == [50, 51]


def test_unknown_leads_to_a_continuation() -> None:
    state = joined()
    request = ask(state, [1])
    state.receive(tick(0, {4: 50}, {4: request.key}), 0.2)
    state.receive(Unknown(2), 0.3)
    state.receive(welcome(2), 0.4)
    assert [tokens_of(submit) for submit in submits(state)] == [[1, 50]]


def test_the_end_of_the_connection_leads_to_another_one() -> None:
    state = joined()
    request = ask(state, [1])
    state.receive(tick(0, {4: 50}, {4: request.key}), 0.2)
    state.disconnected(0.3)
    assert state.connection == 1 and state.phase == "lost"
    state.disconnected(0.4)
    assert state.connection == 1, "it is on its way already"
    state.receive(welcome(), 0.5)
    assert [tokens_of(submit) for submit in submits(state)] == [[1, 50]]


def test_what_is_complete_is_not_asked_for_again() -> None:
    state = joined()
    stopped = ask(state, [1], stop_ids=(50,))
    full = ask(state, [1], max_tokens=1)
    early = ask(state, [1], stop_ids=(50,), min_tokens=3)
    starts = {1: stopped.key, 2: full.key, 3: early.key}
    state.receive(tick(0, {1: 50, 2: 60, 3: 50}, starts), 0.2)
    state.receive(Unknown(2), 0.3)
    state.receive(welcome(2), 0.4)
    assert stopped.finish is not None and stopped.finish.reason == "stop"
    assert full.finish is not None and full.finish.reason == "length"
    assert [submit.key for submit in submits(state)] == [early.key]


def passes(state: ClientState, since: float, until: float) -> None:
    """The timer fires four times a second."""
    while since < until:
        since += 0.25
        state.on_timer(since)


def test_a_process_that_was_stopped_first_reads_what_came_meanwhile() -> None:
    state = joined()
    passes(state, 0.0, 0.5)
    state.on_timer(8.0)
    assert state.connected, "nobody was listening"
    state.receive(welcome(), 8.1)
    passes(state, 8.0, 10.0)
    assert state.connected
    state.on_timer(30.0)
    passes(state, 30.0, 31.0)
    assert state.phase == "lost", "there was time to read, and nothing came"


def test_silence_is_noticed_and_hellos_go_on() -> None:
    state = joined()
    passes(state, 0.0, 1.0)
    assert state.outbox == [ClientPing()]
    state.outbox.clear()
    passes(state, 1.0, SILENCE_S + 0.25)
    assert state.phase == "lost" and state.outbox[0] == ClientHello(PROTOCOL_VERSION, "test")
    state.outbox.clear()
    request = ask(state, [1])
    assert state.outbox == []
    state.on_timer(5.0)
    assert state.outbox == [ClientHello(PROTOCOL_VERSION, "test")]
    state.receive(welcome(2), 5.1)
    assert [submit.key for submit in submits(state)] == [request.key]


def test_a_refused_continuation_is_tried_again_and_a_new_request_is_not() -> None:
    state = joined()
    old = ask(state, [1])
    state.receive(tick(0, {4: 50}, {4: old.key}), 0.2)
    state.receive(Unknown(2), 0.3)
    state.receive(welcome(2), 0.4)
    new = ask(state, [2])
    for request in (old, new):
        state.receive(Refused(request.key, "overloaded", "", "full", 700), 1.0)
    assert new.finish is not None and new.finish.code == "overloaded" and new.finish.retry_after_ms == 700
    state.outbox.clear()
    state.on_timer(1.6)
    assert submits(state) == []
    state.on_timer(1.8)
    assert [submit.key for submit in submits(state)] == [old.key]


def test_a_tick_that_lies_about_its_ids_is_like_a_gap() -> None:
    state = joined()
    request = ask(state, [1])
    state.receive(
        Tick(0, 0, b"\x10", False, b"", array("H", [4]).tobytes(), array("Q", [request.key]).tobytes()), 0.2
    )
    assert state.connection == 1 and request.received.tolist() == []


# -- through sockets -------------------------------------------------------------------------------------------


def run(work: Callable[[str], Coroutine[Any, Any, None]], tmp_path: Path) -> None:
    asyncio.run(work(f"ipc://{tmp_path}/c"))


def count_up(submit: Submit) -> list[int]:
    """Each next id is the number of tokens before it: a continuation that lost or repeated one would show."""
    have = len(submit.tokens) // 4
    return [1000 + number for number in range(have, have + 500)]


def test_a_stream_gives_all_tokens_and_the_end(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with FakeControl(endpoint, count_up) as control, AsyncClient(endpoint) as client:
            limits = await client.wait_connected(20)
            assert limits.max_model_len == control.max_model_len
            stream = await client.submit([5, 6], max_tokens=20, request="mine")
            ids = [token async for chunk in stream for token in chunk.ids]
            assert ids == [1000 + number for number in range(2, 22)]
            assert stream.finish is not None and stream.finish.reason == "length"
            assert control.submits[0].request == "mine"
            assert (await client.status()).model == "fake"

    run(work, tmp_path)


def test_a_missing_seed_is_drawn(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with FakeControl(endpoint, count_up) as control, AsyncClient(endpoint) as client:
            for _ in range(2):
                await client.submit([5], max_tokens=1, sampling=Sampling(temperature=1.0))
            await client.submit([5], max_tokens=1, sampling=Sampling(temperature=1.0, seed=3))
            await control.until(lambda: len(control.submits) == 3)
            seeds = [submit.sampling.seed for submit in control.submits]
            assert len(set(seeds)) == 3 and seeds[2] == 3 and 0 not in seeds

    run(work, tmp_path)


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart_of_control_loses_and_repeats_nothing(tmp_path: Path, clean: bool) -> None:
    async def work(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:
            async with FakeControl(endpoint, count_up, step_s=0.002) as control:
                streams = [await client.submit([5] * (1 + index), max_tokens=60) for index in range(8)]
                got = [(await anext(stream)).ids for stream in streams]
                if not clean:
                    control.silent = True
            async with FakeControl(endpoint, count_up, instance=2, step_s=0.001) as control:
                for ids, stream in zip(got, streams, strict=True):
                    ids += [token async for chunk in stream for token in chunk.ids]
                assert all(submit.prompt_len < len(submit.tokens) // 4 for submit in control.submits)
            for index, ids in enumerate(got):
                assert ids == [1000 + number for number in range(1 + index, 61 + index)]

    run(work, tmp_path)


def test_control_that_falls_silent_is_noticed(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with FakeControl(endpoint, count_up) as control, AsyncClient(endpoint) as client:
            await client.wait_connected(20)
            control.silent = True
            async with asyncio.timeout(20):
                while client.connected:
                    await asyncio.sleep(0.05)
            control.silent = False
            await client.wait_connected(20)

    run(work, tmp_path)


def test_closing_a_stream_aborts(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with FakeControl(endpoint, count_up, step_s=0.01) as control, AsyncClient(endpoint) as client:
            async with await client.submit([5], max_tokens=400) as stream:
                await anext(stream)
            await control.until(lambda: bool(control.aborts))
            assert stream.finish is not None and stream.finish.reason == "abort"
            await client.abort(stream)
            await stream.confirmed(20)

    run(work, tmp_path)


def test_paused_through_sockets(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with FakeControl(endpoint, count_up, step_s=0.002) as control, AsyncClient(endpoint) as client:
            stream = await client.submit([5], max_tokens=50)
            ids = (await anext(stream)).ids
            control.pause(control.submits[0].key)
            ids += [token async for chunk in stream for token in chunk.ids]
            assert ids == [1000 + number for number in range(1, 51)]

    run(work, tmp_path)


def test_zmq_1_a_client_without_a_server_closes_at_once(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with asyncio.timeout(10):
            async with AsyncClient(endpoint) as client:
                stream = await client.submit([1, 2, 3])
                with pytest.raises(TimeoutError):
                    await client.wait_connected(0.05)
            assert stream.finish is not None and stream.finish.code == "closed"

    run(work, tmp_path)


def test_the_synchronous_client(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        def use() -> list[int]:
            with Client(endpoint) as client:
                client.wait_connected(20)
                assert client.status().model == "fake"
                with client.submit([5], max_tokens=400) as stream:
                    next(iter(stream))
                stream = client.submit([5], max_tokens=30)
                ids = [token for chunk in stream for token in chunk.ids]
                assert stream.finish is not None and stream.finish.reason == "length"
                return ids

        async with FakeControl(endpoint, count_up, step_s=0.001):
            assert await asyncio.to_thread(use) == [1000 + number for number in range(1, 31)]

    run(work, tmp_path)


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    state = ClientState()
    state.start(0.0)
    state.receive(Refused(None, "protocol", "version", "protocol version 1, not 2"), 0.1)
    assert state.problem == "protocol version 1, not 2" and not state.connected
    with pytest.raises(OSError, match="relative"), Client("ipc://relative"):
        pass
    with Client(f"ipc://{tmp_path}/nobody") as client, pytest.raises(TimeoutError, match="nobody"):
        client.wait_connected(0.05)


def test_chunks_and_prompts_have_log_probabilities_that_were_asked_for(tmp_path: Path) -> None:
    """Also in continuations after a restart; siblings name their leader."""
    endpoint = f"ipc://{tmp_path}/c"
    sampling = Sampling(logprobs=1, prompt_logprobs=0)

    async def work() -> None:
        async with FakeControl(endpoint, lambda _: [70, 71, 72], step_s=0.01), AsyncClient(endpoint) as client:
            stream = await client.submit([7, 8, 9], max_tokens=3, sampling=sampling)
            other = await client.submit([7, 8, 9], max_tokens=3, leader=stream)
            chunks = [chunk async for chunk in stream]
            rows = [row for chunk in chunks for row in chunk.logprobs]
            assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in chunks)
            assert [(row.id, row.logprob, row.rank, row.top) for row in rows] == [
                (70 + i, -(3 + i) / 8, 1, ((70 + i, -(3 + i) / 8),)) for i in range(3)
            ]
            assert [(row.id, row.logprob, row.top) for row in stream.prompt_logprobs] == [
                (8, -1 / 8, ()),
                (9, -2 / 8, ()),
            ]
            async for chunk in other:
                assert not chunk.logprobs
            assert other.prompt_logprobs == []

    asyncio.run(work())


def test_siblings_name_their_leader(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/c"

    async def work() -> None:
        async with FakeControl(endpoint, lambda _: [5]) as control:

            def blocking() -> None:
                with Client(endpoint) as client:
                    leader = client.submit([7, 8], max_tokens=1, sampling=Sampling(logprobs=0, prompt_logprobs=0))
                    sibling = client.submit([7, 8], max_tokens=1, leader=leader)
                    assert [chunk.ids for chunk in sibling] == [[5]]
                    ((row,),) = [chunk.logprobs for chunk in leader]
                    assert (row.id, row.logprob) == (5, -2 / 8) and leader.prompt_logprobs[0].id == 8

            await asyncio.to_thread(blocking)
            first, second = control.submits
            assert (first.leader, second.leader) == (None, first.key)

    asyncio.run(work())
