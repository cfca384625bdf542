"""On whose account a request runs, how urgent and how even it is: from the API's fields to the control process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import drive, endless, error_of, events, gateway, says


def test_the_fields_travel(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            await g.completion(tenant="alice", user="bob", priority=-3, deadline_ms=5000, slo="relaxed")
            await g.chat(user="bob", slo=250)
            await g.chat(user="b" * 500)
            first, second, third = g.control.submits
            assert (first.tenant, first.priority, first.slo, first.tbt_ms) == ("alice", -3, "relaxed", 0)
            assert 4000 < first.deadline_ms <= 5000
            assert (second.tenant, second.priority, second.deadline_ms) == ("bob", 0, 0)
            assert (second.slo, second.tbt_ms) == ("", 250)
            assert len(third.tenant) == 64

    drive(work, tmp_path)


def test_kv_4_tenants_share_no_cached_blocks_and_users_do(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            for fields in (
                {"tenant": "a"},
                {"tenant": "b"},
                {"tenant": "a", "cache_salt": "s"},
                {"tenant": "as"},
                {"cache_salt": "s"},
                {},
                {"user": "c"},
                {"tenant": "a", "user": "d"},
            ):
                await g.completion(**fields)
            salts = [submit.salt for submit in g.control.submits]
            assert len(set(salts[:6])) == 6
            assert salts[5] == salts[6] == b"" and salts[7] == salts[0]

    drive(work, tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("slo", 0, "slo must be"),
        ("slo", 60_001, "60000"),
        ("slo", "", "1 to 64 characters"),
        ("slo", "x" * 65, "1 to 64 characters"),
        ("slo", 1.5, "slo"),
        ("slo", True, "slo"),
        ("tenant", "", "1 and 256"),
        ("tenant", "x" * 257, "1 and 256"),
        ("priority", 1001, "1000"),
        ("deadline_ms", 0, "deadline_ms must be"),
        ("deadline_ms", 86_400_001, "86400000"),
    ],
)
def test_what_is_outside_its_range_is_refused(tmp_path: Path, field: str, value: Any, said: str) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            error = error_of(await g.completion(**{field: value}))
            assert error["param"] == field and said in error["message"]
            assert not g.control.submits

    drive(work, tmp_path)


@pytest.mark.parametrize("reason", ["deadline", "queue_timeout"])
def test_a_request_whose_time_is_over_gets_504(tmp_path: Path, reason: str) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok"), auto=False) as g:
            for send in (g.completion, g.chat):
                for stream in (False, True):
                    answer = asyncio.create_task(send(stream=stream))
                    count = len(g.control.submits)
                    await g.control.until(lambda count=count: len(g.control.submits) > count)
                    g.control.end(g.control.submits[-1].key, reason, "its time is over")
                    error = error_of(await answer, 504)
                    assert (error["code"], error["type"]) == (reason, "timeout_error")
                    assert error["message"] == "its time is over"

    drive(work, tmp_path)


def test_a_stream_whose_time_is_over_ends_with_an_error_event(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la "), auto=False) as g:
            answer = asyncio.create_task(g.completion(stream=True, max_tokens=100))
            await g.control.until(lambda: len(g.control.submits) == 1)
            for _ in range(3):
                g.control.tick()
            g.control.end(g.control.submits[0].key, "deadline", "its time is over")
            response = await answer
            assert response.status_code == 200
            (error,) = [chunk["error"] for chunk in events(response) if "error" in chunk]
            assert error["code"] == "deadline"

    drive(work, tmp_path)
