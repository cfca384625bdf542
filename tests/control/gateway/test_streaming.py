"""Streamed and whole answers: the same text, the shapes, the errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from evenflow.control.wire import Refused
from gateway_harness import (
    drive,
    endless,
    error_of,
    events,
    gateway,
    says,
    streamed_text,
)

HARD = "naïve 東京 🧑‍🚀 ok. สวัสดี"


@pytest.mark.parametrize("dense", [False, True])
def test_str_1_streamed_and_whole_are_the_same(tmp_path: Path, dense: bool) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says(HARD), dense=dense, step_s=0.001) as g:
            for send in (g.completion, g.chat):
                whole = (await send()).json()["choices"][0]
                text = whole["message"]["content"] if "message" in whole else whole["text"]
                chunks = events(await send(stream=True))
                assert streamed_text(chunks) == text == HARD
                assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)

    drive(work, tmp_path)


@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("The quick brown fox", ["own fox"], "The quick br"),
        ("The quick brown fox", "quick", "The "),
        ("x abc y", ["ab", "bc"], "x "),
        ("The quick brown fo", ["own fox"], "The quick brown fo"),
        ("one. two", [" ", "zz"], "one."),
    ],
)
def test_str_4_stop_strings_never_leak(tmp_path: Path, said: str, stop: Any, expected: str) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says(said), step_s=0.001) as g:
            for send in (g.completion, g.chat):
                whole = (await send(stop=stop)).json()
                choice = whole["choices"][0]
                text = choice["message"]["content"] if "message" in choice else choice["text"]
                assert (text, choice["finish_reason"]) == (expected, "stop")
                chunks = events(await send(stop=stop, stream=True, stream_options={"include_usage": True}))
                assert streamed_text(chunks) == expected
                assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
                assert chunks[-2]["usage"] == whole["usage"]

    drive(work, tmp_path)


def test_str_4_a_match_ends_the_run(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("on and on STOP and on"), step_s=0.001) as g:
            g.control.cached_tokens = 1
            answer = (await g.completion(stop="STOP")).json()
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
            assert answer["choices"][0]["text"] == "on and on "
            await g.control.until(lambda: g.control.aborts == [1])

    drive(work, tmp_path)


def test_str_6_usage_in_streams(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("one two three")) as g:
            g.control.cached_tokens = 1
            whole = (await g.chat()).json()["usage"]
            assert whole["completion_tokens"] == 4 and whole["prompt_tokens_details"] == {"cached_tokens": 1}
            assert whole["total_tokens"] == whole["prompt_tokens"] + 4
            for options in (None, {}, {"include_usage": None}, {"include_usage": False}):
                chunks = events(await g.chat(stream=True, stream_options=options))
                assert all("usage" not in chunk for chunk in chunks[:-1])
            chunks = events(await g.chat(stream=True, stream_options={"include_usage": True}))
            assert [chunk["usage"] for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
            assert chunks[-2]["choices"] == [] and chunks[-2]["usage"] == whole
            assert error_of(await g.chat(stream_options={}))["param"] == "stream_options"

    drive(work, tmp_path)


def test_str_6_usage_in_every_chunk(tmp_path: Path) -> None:
    every = {"include_usage": True, "continuous_usage_stats": True}

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la la la")) as g:
            for send in (g.chat, g.completion):
                chunks = events(await send(stream=True, max_tokens=6, n=2, stream_options=every))[:-1]
                totals = chunks.pop()
                assert totals["choices"] == [] and totals["usage"]["completion_tokens"] == 12
                for index in (0, 1):
                    mine = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
                    counts = [usage["completion_tokens"] for usage in mine]
                    assert counts == sorted(counts) and counts[-1] == 6
                    assert counts[0] == (0 if send == g.chat else counts[0])
                    assert {u["prompt_tokens"] for u in mine} == {totals["usage"]["prompt_tokens"]}
                    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in mine)
            alone = events(await g.chat(stream=True, stream_options={"continuous_usage_stats": True}, max_tokens=2))
            assert all("usage" not in chunk for chunk in alone[:-1])

    drive(work, tmp_path)


def test_with_usage_in_every_chunk_a_token_without_text_is_told_of_too(tmp_path: Path) -> None:
    """A part of a character is no text yet, but a client that counts tokens is to see when each came."""
    every = {"include_usage": True, "continuous_usage_stats": True}

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says(HARD), step_s=0.02) as g:
            for send in (g.completion, g.chat):
                chunks = events(await send(stream=True, stream_options=every))[:-2]
                counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[1:-1]]
                assert counts == sorted(set(counts))
                empty = [c for c in chunks[1:-1] if not streamed_text([c])]
                assert empty and streamed_text(chunks) == HARD
                plain = events(await send(stream=True))[1:-2]
                assert all(streamed_text([chunk]) for chunk in plain)

    drive(work, tmp_path)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_str_7_the_order_of_chunks(tmp_path: Path, count: int) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la la la")) as g:
            chunks = events(await g.chat(stream=True, max_tokens=count))
            assert chunks[-1] == "[DONE]"
            choices = [chunk["choices"][0] for chunk in chunks[:-1]]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
            assert choices[-1]["delta"] == {}
            several = events(await g.completion(prompt=["a", "b"], stream=True, max_tokens=count))
            for index in (0, 1):
                mine = [c["choices"][0] for c in several[:-1] if c["choices"][0]["index"] == index]
                assert [choice["finish_reason"] for choice in mine].count("length") == 1
                assert mine[-1]["finish_reason"] == "length" and mine[-1]["text"] == ""

    drive(work, tmp_path)


def test_str_8_what_can_be_checked_is_checked_before_the_headers(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("x"), max_model_len=64) as g:
            error_of(await g.completion(prompt=[5] * 65, stream=True))
            assert error_of(await g.chat(temperature=-1, stream=True))["param"] == "temperature"
            g.control.refuse = Refused(1, "overloaded", "", "the queue is full", 2500)
            response = await g.chat(stream=True)
            assert error_of(response, 429)["code"] == "rate_limit_exceeded"
            assert response.headers["retry-after"] == "3" and response.headers["retry-after-ms"] == "2500"
            g.control.refuse = Refused(1, "draining", "", "shutting down")
            assert "retry-after" in (await g.completion()).headers
            error_of(await g.completion(), 503)

    drive(work, tmp_path)


def test_str_8_a_later_failure_is_an_event_without_done(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la"), step_s=0.005) as g:

            async def fail() -> None:
                await g.control.until(lambda: bool(g.control.submits))
                await asyncio.sleep(0.1)
                g.service.client.fail_all("worker lost", "internal")

            chunks, _ = await asyncio.gather(g.chat(stream=True), fail())
            *pieces, last = events(chunks)
            assert last["error"]["message"] == "worker lost" and "[DONE]" not in chunks.text
            assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
            whole, _ = await asyncio.gather(g.chat(), fail())
            assert error_of(whole, 500)["code"] == "internal"

    drive(work, tmp_path)
