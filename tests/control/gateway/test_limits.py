"""Abuse and overload: what is refused, is refused before it costs anything."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from evenflow.control.gateway import limits
from evenflow.control.wire import Refused
from gateway_harness import Gateway, drive, error_of, gateway, says


def forbid_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr("evenflow.control.gateway.tokenizer.TextModel.encode", refuse)


BIASES = {str(token): 1 for token in range(600_000)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"n": 10**9}, "n", id="n"),
        pytest.param({"n": 10**30}, "n", id="n past 64 bits"),
        pytest.param({"best_of": 10**9}, "best_of", id="best_of"),
        pytest.param({"logprobs": 10**9}, "logprobs", id="logprobs"),
        pytest.param({"prompt_logprobs": 10**9}, "prompt_logprobs", id="prompt_logprobs"),
        pytest.param({"stop": ["x"] * 10_000}, "stop", id="10k stop strings"),
        pytest.param({"stop": "x" * 1_000_000}, "stop", id="a long stop string"),
        pytest.param({"stop_token_ids": [5] * 10_000}, "stop_token_ids", id="10k stop ids"),
        pytest.param({"logit_bias": BIASES}, "logit_bias", id="600k biases"),
        pytest.param({"logit_bias": dict(list(BIASES.items())[:1025])}, "logit_bias", id="1025 biases"),
        pytest.param({"prompt": ["x"] * 10_000}, "prompt", id="10k prompts"),
        pytest.param({"max_tokens": 10**9}, "max_tokens", id="max_tokens"),
    ],
)
def test_sec_3_large_wishes_are_refused_untokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            forbid_tokenizing(monkeypatch)
            error = error_of(await g.completion(**fields))
            assert error["param"] == param and len(error["message"]) < 500
            assert not g.control.submits
            assert "evenflow_request_refused_total" in g.service.metrics.text().decode()

    drive(work, tmp_path)


def test_sec_3_a_million_biases_are_not_even_read(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            body = json.dumps({"prompt": "x", "logit_bias": {str(token): 1 for token in range(1_000_000)}})
            assert len(body) > limits.MAX_BODY_BYTES
            error_of(await g.http.post("/v1/completions", content=body), 413)

    drive(work, tmp_path)


@pytest.mark.parametrize("name", ["x-request-id", "authorization", "x-anything"])
def test_sec_3_a_header_of_a_megabyte(tmp_path: Path, name: str) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            for send in ("/v1/completions", "/version"):
                method = "POST" if send.startswith("/v1") else "GET"
                response = await g.http.request(method, send, headers={name: "x" * (1 << 20)})
                error_of(response, 431)
                assert len(response.headers["x-request-id"]) == 24

    drive(work, tmp_path)


def test_sec_3_the_log_probabilities_of_a_prompt_are_bounded(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok"), max_model_len=1 << 20) as g:
            most = limits.MAX_PROMPT_LOGPROBS // 21
            error = error_of(await g.completion(prompt=[5] * (most + 1), prompt_logprobs=20))
            assert error["param"] == "prompt_logprobs" and str(limits.MAX_PROMPT_LOGPROBS) in error["message"]
            error = error_of(await g.completion(prompt=[5] * (most + 1), logprobs=20, echo=True))
            assert error["param"] == "logprobs"
            many = {"prompt": [[5] * (most // 8 + 1)] * 2, "n": 4}
            assert error_of(await g.completion(**many, prompt_logprobs=20))["param"] == "prompt_logprobs"
            assert not g.control.submits

    drive(work, tmp_path)


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


def test_sec_3_a_body_of_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                response = await g.http.post(path, content=unread(), headers={"content-length": str(1 << 30)})
                assert error_of(response, 413)["code"] == "request_too_large"

    drive(work, tmp_path)


async def unread_is_429(g: Gateway) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = await g.http.post(path, content=unread())
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "1"


def test_obs_2_a_full_queue_is_told_by_the_status(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            g.control.values = {"num_requests_waiting": 7.0, "max_queued": 8.0}
            await g.service.client.status()
            assert (await g.completion()).status_code == 200
            g.control.values = {"num_requests_waiting": 8.0, "max_queued": 8.0}
            await g.service.client.status()
            await unread_is_429(g)
            # What costs no place in the queue is still served.
            assert (await g.http.post("/tokenize", json={"prompt": "x"})).status_code == 200
            g.control.values = {"num_requests_waiting": 0.0, "max_queued": 8.0}
            await g.service.client.status()
            assert (await g.completion()).status_code == 200
            text = g.service.metrics.text().decode()
            assert 'code="rate_limit_exceeded",model_name="smollm2-135m"} 2.0' in text

    drive(work, tmp_path)


def test_obs_2_a_refusal_is_remembered_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            monkeypatch.setattr("evenflow.control.gateway.service.FULL_SECONDS", 1000.0)
            # One that is too large for what is left says nothing of others.
            g.control.refuse = Refused(1, "overloaded", "max_queued_tokens", "too many tokens", 1000)
            for _ in range(2):
                error_of(await g.completion(), 429)
            assert len(g.control.submits) == 2
            g.control.refuse = Refused(1, "overloaded", "max_queued", "too many requests", 700_000)
            error_of(await g.completion(), 429)
            assert len(g.control.submits) == 3
            g.control.refuse = None
            response = await g.http.post("/v1/completions", content=unread())
            assert error_of(response, 429) and response.headers["retry-after"] == "700"
            g.service._full_until = 0.0
            assert (await g.completion()).status_code == 200

    drive(work, tmp_path)
