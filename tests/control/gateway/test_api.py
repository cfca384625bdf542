"""The HTTP interface against a scripted control process, without a server around it."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import structlog
from evenflow.control.gateway import limits as gateway_limits
from evenflow.control.gateway.limits import MAX_BODY_BYTES, MAX_STOPS
from gateway_harness import (
    EOS,
    MODEL,
    Gateway,
    drive,
    endless,
    error_of,
    events,
    gateway,
    says,
    smollm,
    streamed_text,
)

# -- fields ----------------------------------------------------------------------------------------------------

OPTIONAL = [
    "model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "skip_special_tokens", "stream", "stream_options", "n", "logprobs", "logit_bias", "user",
    "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty", "cache_salt", "metadata", "store",
]  # fmt: skip
OPTIONAL_CHAT = [
    *OPTIONAL, "max_completion_tokens", "tools", "tool_choice", "response_format", "top_logprobs", "functions",
    "function_call", "modalities", "audio", "prediction", "reasoning_effort", "service_tier", "parallel_tool_calls",
    "chat_template_kwargs", "add_generation_prompt", "verbosity", "web_search_options", "safety_identifier",
]  # fmt: skip


def test_api_1_null_is_absent(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            for send, names in ((g.completion, [*OPTIONAL, "best_of", "echo", "suffix"]), (g.chat, OPTIONAL_CHAT)):
                for name in names:
                    assert (await send(**{name: None})).status_code == 200, name
                assert (await send(**dict.fromkeys(names))).status_code == 200

    drive(work, tmp_path)


def test_api_1_max_completion_tokens(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la")) as g:
            answer = (await g.chat(max_completion_tokens=5)).json()
            assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"
            assert (await g.chat(max_completion_tokens=5, max_tokens=5)).status_code == 200
            assert error_of(await g.chat(max_completion_tokens=5, max_tokens=6))["param"] == "max_completion_tokens"

    drive(work, tmp_path)


def test_api_2_context_overflow(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la"), max_model_len=64) as g:
            for length in (62, 63):
                usage = (await g.completion(prompt=[5] * length)).json()["usage"]
                assert usage["completion_tokens"] == 64 - length
            for length in (64, 65):
                error = error_of(await g.completion(prompt=[5] * length))
                assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
                assert "64 tokens" in error["message"] and str(length) in error["message"]
                assert "-" not in error["message"]
            error = error_of(await g.completion(prompt=[5] * 8, max_tokens=60))
            assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
            assert "68" in error["message"] and "60" in error["message"] and "8 in the prompt" in error["message"]
            assert (await g.completion(prompt=[5] * 8, max_tokens=56)).status_code == 200

    drive(work, tmp_path)


def test_api_4_content_in_parts(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            messages = [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "tool", "content": [{"type": "text", "text": "gamma"}], "tool_call_id": "1"},
            ]
            tokens = (await g.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
            text = (await g.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
            assert text.startswith("<|im_start|>system\nbe brief<|im_end|>")
            assert all(word in text for word in ("alpha\nbeta", "gamma"))
            assert (await g.chat(messages=messages)).status_code == 200
            messages[1]["content"] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
            assert error_of(await g.chat(messages=messages))["param"] == "messages[1].content[1].type"
            for bad, param in (
                ([{"content": "x"}], "messages[0].role"),
                ([{"role": "user"}], "messages[0].content"),
                ([{"role": "user", "content": 5}], "messages[0].content"),
                (["x"], "messages[0]"),
                ("x", "messages"),
            ):
                assert error_of(await g.chat(messages=bad))["param"] == param

    drive(work, tmp_path)


def test_api_7_known_but_not_implemented(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            asks = {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "response_format": {"type": "json_object"},
                "echo": True,
                "guided_json": {},
                "audio": {},
            }
            for name, value in asks.items():
                error = error_of(await g.chat(**{name: value}))
                assert (
                    error["param"] == name and error["code"] == "unsupported_parameter" and name in error["message"]
                )
            nothing = {
                "echo": False,
                "tools": [],
                "response_format": {"type": "text"},
                "modalities": ["text"],
            }
            assert (await g.chat(**nothing)).status_code == 200
            assert error_of(await g.completion(suffix="x"))["param"] == "suffix"
            with structlog.testing.capture_logs() as logs:
                for _ in range(3):
                    assert (await g.chat(foo=1, temprature=0.5)).status_code == 200
            warned = [entry["field"] for entry in logs if entry["log_level"] == "warning"]
            assert sorted(warned) == ["foo", "temprature"]

    drive(work, tmp_path)


def test_ft_6_odd_requests_while_a_stream_runs(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la la"), step_s=0.002) as g:
            running = asyncio.create_task(g.chat(stream=True, max_tokens=150))
            await g.control.until(lambda: bool(g.control.submits))
            assert error_of(await g.completion(prompt=""))["param"] == "prompt"
            assert error_of(await g.completion(prompt=[]))["param"] == "prompt"
            assert error_of(await g.completion(prompt=[""]))["param"] == "prompt[0]"
            assert error_of(await g.completion(prompt=[[]]))["param"] == "prompt[0]"
            assert error_of(await g.completion(prompt=["a", 5]))["param"] == "prompt"
            assert error_of(await g.completion(prompt=[5, 49_152]))["param"] == "prompt[1]"
            assert error_of(await g.completion(prompt=[5, -1]))["param"] == "prompt[1]"
            assert error_of(await g.chat(messages=[]))["param"] == "messages"
            assert len(g.control.submits) == 1
            chunks = events(await running)
            assert chunks[-1] == "[DONE]" and chunks[-2]["choices"][0]["finish_reason"] == "length"

    drive(work, tmp_path)


def test_smp_3_numbers_at_and_past_their_ends(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:

            async def raw(field: str) -> Any:
                return await g.http.post("/v1/completions", content='{"prompt":"x",' + field + "}")

            for field in ('"temperature":NaN', '"temperature":Infinity', '"top_p":1e999', '"temperature":"0.7"'):
                error_of(await raw(field))
            good = [
                '"temperature":-0.0', '"temperature":1e-4', '"temperature":1e-38', '"top_p":0', '"top_p":1e-6',
                '"top_p":1', '"top_k":-1', '"top_k":0', '"top_k":1', '"top_k":49153', '"seed":-1',
                '"seed":-9223372036854775808', '"min_p":0',
            ]  # fmt: skip
            for field in good:
                assert (await raw(field)).status_code == 200, field
            sampled = [submit.sampling for submit in g.control.submits]
            assert [sampling.temperature for sampling in sampled[:3]] == [0.0, 1e-4, 0.0]
            assert [sampling.top_k for sampling in sampled[6:10]] == [0, 0, 1, 49153]
            assert all(sampling.seed > 0 for sampling in sampled)
            for field, low in (("temperature", "between 0 and 2"), ("top_p", "between 0 and 1")):
                assert low in error_of(await raw(f'"{field}":-1'))["message"]
            for stop in ('""', '[""]', "[" + ",".join(['"x"'] * (MAX_STOPS + 1)) + "]"):
                assert error_of(await raw(f'"stop":{stop}'))["param"].startswith("stop")

    drive(work, tmp_path)


def test_tok_3_what_ends_an_answer(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("a b c"), eos_ids=(0, 7)) as g:
            await g.completion()
            await g.completion(ignore_eos=True, stop_token_ids=[300], max_tokens=4)
            answer = await g.completion(min_tokens=2, stop_token_ids=[300], max_tokens=9)
            assert answer.status_code == 200
            ends = [submit.stop_ids for submit in g.control.submits]
            assert ends == [(0, EOS, 7), (300,), (0, EOS, 7, 300)]
            assert g.control.submits[2].min_tokens == 2
            assert error_of(await g.completion(min_tokens=5, max_tokens=4))["param"] == "min_tokens"
            assert error_of(await g.completion(stop_token_ids=[49_152]))["param"] == "stop_token_ids[0]"

    drive(work, tmp_path)


def test_tok_3_a_stop_id_gives_no_text(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        ids = smollm().encode("one two three", add_special_tokens=False)
        async with gateway(endpoint, lambda _: ids) as g:
            choice = (await g.completion(stop_token_ids=[ids[1]])).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("one", "stop")

    drive(work, tmp_path)


def test_tok_1_chat_is_encoded_as_the_template_wrote_it(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        model = dataclasses.replace(smollm(), chat_template="{{ bos_token }}{{ messages[0].content }}")
        async with gateway(endpoint, says("ok"), text=model) as g:
            usage = (await g.chat()).json()["usage"]
            tokens = memoryview(g.control.submits[0].tokens).cast("I").tolist()
            assert tokens.count(1) == 1 and usage["prompt_tokens"] == len(tokens)

    drive(work, tmp_path)


def test_tok_4_templates_that_refuse_or_are_missing(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        strict = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}x"
        async with gateway(endpoint, says("ok"), text=dataclasses.replace(smollm(), chat_template=strict)) as g:
            two = [{"role": "user", "content": "a"}] * 2
            assert error_of(await g.chat(messages=two))["message"] == "roles must alternate"
        async with gateway(endpoint, says("ok"), text=dataclasses.replace(smollm(), chat_template=None)) as g:
            assert "chat template" in error_of(await g.chat())["message"]
            assert (await g.completion()).status_code == 200
        async with gateway(endpoint, says("ok"), text=dataclasses.replace(smollm(), chat_template="{% if %}")) as g:
            assert "does not compile" in error_of(await g.chat())["message"]
        async with gateway(endpoint, says("ok")) as g:
            assert (await g.chat(messages=[{"role": "system", "content": ""}])).status_code == 200

    drive(work, tmp_path)


def test_tok_5_ids_past_the_tokenizer_have_no_text(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        ids = [*smollm().encode("ab", add_special_tokens=False), 49_200, 49_215, EOS]
        async with gateway(endpoint, lambda _: ids, vocab_size=49_216) as g:
            assert (await g.completion()).json()["choices"][0]["text"] == "ab"
            assert streamed_text(events(await g.chat(stream=True))) == "ab"

    drive(work, tmp_path)


# -- sizes, routes, logs ---------------------------------------------------------------------------------------


def test_sec_3_sizes_are_bounded(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            big = b'{"prompt":"' + b"a" * MAX_BODY_BYTES + b'"}'
            error_of(await g.http.post("/v1/completions", content=big), 413)

            async def pieces() -> Any:
                for start in range(0, len(big), 1 << 20):
                    yield big[start : start + (1 << 20)]

            error_of(await g.http.post("/v1/completions", content=pieces()), 413)
            error_of(await g.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-a": "b" * 70_000}), 431)
            error_of(await g.completion(n=10**9))
            error_of(await g.completion(logit_bias={str(key): 1 for key in range(2000)}))
            error_of(await g.http.post("/v1/completions", content=b"[" * 100_000))
            error_of(await g.http.post("/v1/chat/completions", content=b'{"messages":' + b"[" * 100_000))
            error_of(await g.http.post("/v1/completions", content=b'{"prompt":"\xff"}'))
            error_of(await g.http.post("/v1/completions", content=rb'{"prompt":"\ud800"}'))
            response = await g.completion(prompt="x")
            assert response.status_code == 200 and len(response.headers["x-request-id"]) == 24
            for given, echoed in (("mine-1", True), ("x" * 129, False), ("x" * (1 << 15), False)):
                got = await g.http.get("/version", headers={"x-request-id": given})
                assert (got.headers["x-request-id"] == given) is echoed
            assert len(g.control.submits) == 1

    drive(work, tmp_path)


def test_sec_3_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.control.gateway.routes.BODY_SECONDS", 0.05)

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:

            async def slow() -> Any:
                yield b'{"prompt":'
                await asyncio.sleep(60)
                yield b'"x"}'

            error_of(await g.http.post("/v1/completions", content=slow()), 408)

    drive(work, tmp_path)


def test_obs_2_a_text_that_cannot_fit_is_not_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok"), max_model_len=1024) as g:

            def refuse(*_: Any, **__: Any) -> list[int]:
                raise AssertionError("tokenized")

            monkeypatch.setattr("evenflow.control.gateway.tokenizer.TextModel.encode", refuse)
            for response in (
                await g.completion(prompt="lorem ipsum " * 400_000),
                await g.chat(messages=[{"role": "user", "content": "x" * 5_000_000}]),
            ):
                assert error_of(response)["code"] == "context_length_exceeded"
            assert (await g.http.get("/health")).status_code == 200

    drive(work, tmp_path)


def test_obs_3_nothing_secret_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = "xyzzy-marker"

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says(f"out {marker}")) as g:
            headers = {"authorization": f"Bearer {marker}", "x-request-id": marker}
            with structlog.testing.capture_logs() as logs:
                for path, body in (
                    ("/v1/completions", {"prompt": marker, "stop": [marker + "!"], "unknown": marker}),
                    ("/v1/completions", {"prompt": marker, "temperature": marker}),
                    ("/v1/chat/completions", {"messages": [{"role": marker, "content": marker}], "stream": True}),
                    ("/v1/completions", {"prompt": marker, "model": marker}),
                ):
                    await g.http.post(path, json=body, headers=headers)
                broken = g.service.model
                g.service.model = None  # type: ignore[assignment]
                assert error_of(await g.completion(prompt=marker), 500)["code"] == "internal_error"
                g.service.model = broken
            assert any(entry["event"] == "request failed" for entry in logs)
            metrics = (await g.http.get("/metrics")).text
            assert marker not in repr(logs) and marker not in metrics

    drive(work, tmp_path)
    out = capsys.readouterr()
    assert marker not in out.out + out.err


async def ready_within(g: Gateway, status: int) -> None:
    async with asyncio.timeout(20):
        while (await g.http.get("/ready")).status_code != status:
            await asyncio.sleep(0.02)


def test_health_and_readiness_tell_the_truth(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            await ready_within(g, 200)
            g.control.ready = False
            await ready_within(g, 503)
            assert (await g.http.get("/health")).status_code == 200
            g.control.ready = True
            await ready_within(g, 200)
            g.control.silent = True
            await ready_within(g, 503)
            assert (await g.http.get("/health")).status_code == 503
            g.control.silent = False
            await ready_within(g, 200)
            g.service.draining = True
            await ready_within(g, 503)
            response = await g.completion()
            assert error_of(response, 503)["code"] == "draining" and "retry-after" in response.headers

    drive(work, tmp_path)


def test_without_a_control_process_new_requests_get_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.control.gateway.service.CONNECT_SECONDS", 0.05)

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            g.control.silent = True
            await ready_within(g, 503)
            response = await g.completion()
            error_of(response, 503)
            assert "retry-after" in response.headers

    drive(work, tmp_path)
    assert gateway_limits.CONNECT_SECONDS == 10.0


def test_before_the_model_is_known_requests_are_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While workers load, control knows no limits yet: that is no reason to call a prompt too long."""
    monkeypatch.setattr("evenflow.control.gateway.service.CONNECT_SECONDS", 0.2)

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("x"), max_model_len=0) as g:
            for response in (await g.completion(), await g.chat(stream=True)):
                assert error_of(response, 503)["code"] == "not_ready"
                assert int(response.headers["retry-after"]) >= 1

    drive(work, tmp_path)


def test_requests_wait_until_the_limits_are_known(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok"), max_model_len=0) as g:
            assert (await g.http.get("/v1/models")).json()["data"][0]["max_model_len"] is None
            waiting = asyncio.create_task(g.completion())
            await g.service.client.status()
            assert not waiting.done() and not g.control.submits
            g.control.max_model_len = 100
            assert (await waiting).status_code == 200

    drive(work, tmp_path)


def test_models_and_unknown_routes(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            (card,) = (await g.http.get("/v1/models")).json()["data"]
            assert card["id"] == MODEL and card["max_model_len"] == 4096
            assert (await g.http.get(f"/v1/models/{MODEL}")).json() == card
            assert error_of(await g.http.get("/v1/models/a/b"), 404)["code"] == "model_not_found"
            assert error_of(await g.completion(model="other"), 404)["param"] == "model"
            assert (await g.completion(model=MODEL)).json()["model"] == MODEL
            error_of(await g.http.post("/v1/embeddings", json={}), 404)
            error_of(await g.http.get("/v1/completions"), 405)

    drive(work, tmp_path)


def test_metrics_carry_control_figures_and_counts(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la")) as g:
            g.control.values = {"num_requests_running": 3.0, "prompt_tokens_total": 99.0, "bad name": 1.0}
            await g.completion(max_tokens=7)
            async with asyncio.timeout(20):
                while g.service.client.last_status is None or not g.service.client.last_status.values:
                    await asyncio.sleep(0.02)
                    await g.service.client.status()
            text = (await g.http.get("/metrics")).text
            assert f'evenflow_num_requests_running{{model_name="{MODEL}"}} 3.0' in text
            assert f'evenflow_generation_tokens_total{{model_name="{MODEL}"}} 7.0' in text
            assert f'evenflow_prompt_tokens_total{{model_name="{MODEL}"}} 1.0' in text
            assert 'finished_reason="length"' in text and "bad name" not in text
            assert f'evenflow_time_to_first_token_seconds_count{{model_name="{MODEL}"}} 1.0' in text
            assert f'evenflow_inter_token_latency_seconds_count{{model_name="{MODEL}"}} 6.0' in text

    drive(work, tmp_path)


def test_a_salt_travels_as_a_digest_and_prompts_keep_their_order(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, lambda submit: [*memoryview(submit.tokens).cast("I"), EOS]) as g:
            answer = (await g.completion(prompt=["one", "two", "three"], cache_salt="tenant")).json()
            assert [choice["text"] for choice in answer["choices"]] == ["one", "two", "three"]
            salts = {submit.salt for submit in g.control.submits}
            assert len(salts) == 1 and len(salts.pop()) == 32
            lists = (await g.completion(prompt=[[300, 301], [302]])).json()
            assert [choice["index"] for choice in lists["choices"]] == [0, 1]
            assert lists["usage"]["prompt_tokens"] == 3

    drive(work, tmp_path)
