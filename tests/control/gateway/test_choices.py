"""Choices of one request, log-probabilities in OpenAI's shapes, echo; whole and streamed, which must agree."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest
from evenflow.control.wire import End, Refused, Submit, Tick
from gateway_harness import EOS, drive, endless, error_of, events, gateway, says, smollm


def tokens_of(submit: Submit) -> list[int]:
    return array("I", submit.tokens).tolist()


def text_of(*ids: int) -> str:
    return smollm().decode(list(ids), skip_special_tokens=False)


def joined_columns(chunks: list[Any], index: int = 0) -> dict[str, list[Any]]:
    """The streamed columns of one choice, and its text."""
    columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            if choice["index"] == index and choice["logprobs"] is not None:
                for name, values in columns.items():
                    values += choice["logprobs"][name]
    return columns


def joined_text(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


# -- n ---------------------------------------------------------------------------------------------------------


def test_str_7_each_choice_has_its_index_and_one_finish(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        said = {0: "one", 1: "two three", 2: "four five six"}

        def script(submit: Submit) -> list[int]:
            return [*smollm().encode(said[submit.sampling.index], add_special_tokens=False), EOS]

        async with gateway(endpoint, script) as g:
            g.control.cached_tokens = 1
            whole = (await g.chat(n=3, seed=7)).json()
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
            assert [choice["message"]["content"] for choice in whole["choices"]] == list(said.values())
            alone = (await g.chat(seed=7)).json()["usage"]
            usage = whole["usage"]
            assert usage["prompt_tokens"] == alone["prompt_tokens"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
            assert usage["completion_tokens"] == 2 + 3 + 4
            assert usage["total_tokens"] == usage["prompt_tokens"] + 9
            chunks = events(await g.chat(n=3, stream=True, stream_options={"include_usage": True}))
            assert chunks[-2]["usage"] == usage and chunks[-1] == "[DONE]"
            for index, text in said.items():
                mine = [c["choices"][0] for c in chunks[:-2] if c["choices"][0]["index"] == index]
                assert mine[0]["delta"] == {"role": "assistant", "content": ""} and mine[-1]["delta"] == {}
                assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
                assert "".join(choice["delta"].get("content", "") for choice in mine) == text

    drive(work, tmp_path)


def test_choices_have_one_seed_their_own_index_and_a_leader(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            answer = (await g.completion(prompt=["one", "two three"], n=3, seed=9, best_of=3)).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(6))
            submits = g.control.submits
            assert [(s.sampling.seed, s.sampling.index) for s in submits] == [(9, 0), (9, 1), (9, 2)] * 2
            first, second = submits[0].key, submits[3].key
            assert [s.leader for s in submits] == [None, first, first, None, second, second]
            assert len({s.request for s in submits}) == 6
            sizes = [len(s.tokens) // 4 for s in submits]
            assert answer["usage"]["prompt_tokens"] == sizes[0] + sizes[3]
            g.control.submits.clear()
            await g.completion(n=2)
            seeds = {s.sampling.seed for s in g.control.submits}
            assert len(seeds) == 1 and seeds.pop() > 0

    drive(work, tmp_path)


def test_one_choice_that_fails_ends_all_and_is_told(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la"), step_s=0.002) as g:

            async def fail() -> None:
                await g.control.until(lambda: len(g.control.submits) == 3)
                key = g.control.submits[1].key
                ((identity, peer),) = g.control.peers.items()
                job = peer.jobs.pop(key)
                end = End(key, job.slot, "error", job.sent, 0, "a worker died three times")
                g.control.send(identity, Tick(peer.sequence, 0, b"", False, b"", ends=[end]))
                peer.sequence += 1

            for send in (g.chat, g.completion):
                for stream in (False, True):
                    g.control.submits.clear()
                    g.control.aborts.clear()
                    answer, _ = await asyncio.gather(send(n=3, stream=stream), fail())
                    if answer.status_code == 200:
                        *_, last = events(answer)
                        assert stream and "a worker died" in last["error"]["message"]
                    else:
                        assert "a worker died" in error_of(answer, 500)["message"]
                    await g.control.until(lambda: len(g.control.aborts) == 2)
                    keys = [submit.key for submit in g.control.submits]
                    assert sorted(g.control.aborts) == [keys[0], keys[2]]

    drive(work, tmp_path)


def test_a_refused_choice_refuses_the_request(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("x")) as g:
            g.control.refuse = Refused(1, "overloaded", "max_queued_tokens", "too many tokens", 1000)
            for stream in (False, True):
                assert error_of(await g.chat(n=2, stream=stream), 429)["code"] == "rate_limit_exceeded"

    drive(work, tmp_path)


# -- log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 2])
def test_api_5_completions_logprobs(tmp_path: Path, width: int) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("one two three")) as g:
            choice = (await g.completion(logprobs=width)).json()["choices"][0]
            ids = smollm().encode("one two three", add_special_tokens=False)
            columns = choice["logprobs"]
            assert set(columns) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
            assert columns["tokens"] == ["one", " two", " three"] and "".join(columns["tokens"]) == choice["text"]
            assert columns["text_offset"] == [0, 3, 7]
            first = len(g.control.submits[0].tokens) // 4
            assert columns["token_logprobs"] == [-(first + i) / 8 for i in range(3)]
            for token, value, top in zip(ids, columns["token_logprobs"], columns["top_logprobs"], strict=True):
                assert top[text_of(token)] == value
                assert set(top) == {text_of(token + i) for i in range(max(width, 1))}
            assert g.control.submits[0].sampling.logprobs == width
            assert g.control.submits[0].sampling.prompt_logprobs == -1
            chunks = events(await g.completion(logprobs=width, stream=True))
            assert joined_columns(chunks) == columns and joined_text(chunks) == choice["text"]

    drive(work, tmp_path)


@pytest.mark.parametrize("width", [None, 0, 3])
def test_api_5_chat_logprobs(tmp_path: Path, width: int | None) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("naïve 東京 🧑‍🚀")) as g:
            answer = (await g.chat(logprobs=True, top_logprobs=width, n=2)).json()
            for choice in answer["choices"]:
                assert choice["logprobs"]["refusal"] is None
                content = choice["logprobs"]["content"]
                assert b"".join(bytes(item["bytes"]) for item in content).decode() == "naïve 東京 🧑‍🚀"
                for item in content:
                    assert set(item) == {"token", "logprob", "bytes", "top_logprobs"}
                    assert item["token"] == bytes(item["bytes"]).decode(errors="replace")
                    assert len(item["top_logprobs"]) == (width or 0)
                    for best in item["top_logprobs"][:1]:
                        assert best == {name: item[name] for name in ("token", "logprob", "bytes")}
            assert any("\ufffd" in item["token"] for item in content)
            chunks = events(await g.chat(logprobs=True, top_logprobs=width, n=2, stream=True))
            for index in (0, 1):
                mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
                assert mine[0]["logprobs"] is None and mine[-1]["logprobs"] is None
                assert [item for choice in mine[1:-1] for item in choice["logprobs"]["content"]] == content

    drive(work, tmp_path)


def test_api_5_what_is_not_asked_for_is_null_and_wrong_wishes_are_named(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            for response in (await g.chat(), await g.chat(logprobs=False), await g.completion(logprobs=False)):
                assert response.json()["choices"][0]["logprobs"] is None
            for fields, param in (
                ({"top_logprobs": 2}, "top_logprobs"),
                ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
                ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
                ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
                ({"logprobs": 3}, "logprobs"),
                ({"prompt_logprobs": 21}, "prompt_logprobs"),
                ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            ):
                assert error_of(await g.chat(**fields))["param"] == param, fields
            for fields, param in (
                ({"logprobs": True}, "logprobs"),
                ({"logprobs": 21}, "logprobs"),
                ({"logprobs": -1}, "logprobs"),
                ({"top_logprobs": 2}, "top_logprobs"),
            ):
                error = error_of(await g.completion(**fields))
                assert error["param"] == param, fields
                assert param != "logprobs" or "between 0 and 20" in error["message"]

    drive(work, tmp_path)


@pytest.mark.parametrize(
    ("said", "stop", "tokens"),
    [
        ("The quick brown fox jumps", ["brown"], ["The", " quick", " brown"]),  # its space is out
        ("The quick brown fox jumps", [" brown"], ["The", " quick"]),
        ("The quick brown fox jumps", ["own fox"], ["The", " quick", " brown"]),
        ("The quick brown fo", ["own fox"], ["The", " quick", " brown", " fo"]),
        ("東京 ok", ["京"], ["東"]),
    ],
)
def test_tokens_are_told_with_their_text_and_not_beyond_a_stop(
    tmp_path: Path, said: str, stop: list[str], tokens: list[str]
) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says(said), step_s=0.001) as g:
            choice = (await g.completion(stop=stop, logprobs=1)).json()["choices"][0]
            told = [item if not item.startswith("bytes:") else None for item in choice["logprobs"]["tokens"]]
            if None not in told:
                assert told == tokens
            assert "".join(tokens).startswith(choice["text"])
            for offset in choice["logprobs"]["text_offset"]:
                assert offset < len(choice["text"])
            chunks = events(await g.completion(stop=stop, logprobs=1, stream=True))
            assert joined_columns(chunks) == choice["logprobs"] and joined_text(chunks) == choice["text"]
            released = 0
            for chunk in chunks[:-1]:
                piece = chunk["choices"][0]
                released += len(piece["text"])
                if piece["logprobs"] is not None:
                    assert all(offset < released for offset in piece["logprobs"]["text_offset"])

    drive(work, tmp_path)


def test_tokens_without_text_are_told_too(tmp_path: Path) -> None:
    """Hidden special tokens, and ids that the tokenizer does not know."""

    async def work(endpoint: str) -> None:
        ids = [*smollm().encode("a", add_special_tokens=False), EOS, 49_200, EOS]
        async with gateway(endpoint, lambda _: ids, vocab_size=49_216) as g:
            fields = {"ignore_eos": True, "max_tokens": 4}
            choice = (await g.completion(logprobs=0, **fields)).json()["choices"][0]
            assert choice["text"] == "a" and choice["finish_reason"] == "length"
            assert choice["logprobs"]["tokens"] == ["a", "<|im_end|>", "", "<|im_end|>"]
            assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1]
            chunks = events(await g.completion(logprobs=0, stream=True, **fields))
            assert joined_columns(chunks) == choice["logprobs"]

    drive(work, tmp_path)


def test_a_worker_that_reports_none_is_an_error_and_not_silence(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            g.control.reports = False
            assert "log-probabilities" in error_of(await g.chat(logprobs=True), 500)["message"]
            assert (await g.chat()).status_code == 200

    drive(work, tmp_path)


def test_prompt_logprobs_in_vllms_form(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            answer = (await g.completion(prompt=[300, 301, 302], prompt_logprobs=2, n=2)).json()
            expected = [
                None,
                {
                    "301": {"logprob": -1 / 8, "rank": 1, "decoded_token": text_of(301)},
                    "302": {"logprob": -9 / 8, "rank": 2, "decoded_token": text_of(302)},
                },
                {
                    "302": {"logprob": -2 / 8, "rank": 1, "decoded_token": text_of(302)},
                    "303": {"logprob": -10 / 8, "rank": 2, "decoded_token": text_of(303)},
                },
            ]
            assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected, expected]
            assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
            assert [submit.sampling.prompt_logprobs for submit in g.control.submits] == [2, -1]
            chat = (await g.chat(prompt_logprobs=0)).json()
            size = chat["usage"]["prompt_tokens"]
            assert len(chat["prompt_logprobs"]) == size and chat["prompt_logprobs"][0] is None
            assert all(len(position) == 1 for position in chat["prompt_logprobs"][1:])
            assert "prompt_logprobs" not in (await g.completion()).json()["choices"][0]
            single = (await g.completion(prompt=[300], prompt_logprobs=1)).json()
            assert single["choices"][0]["prompt_logprobs"] == [None]

    drive(work, tmp_path)


# -- echo ------------------------------------------------------------------------------------------------------


def test_echo_puts_the_prompt_before_the_output(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says(" three")) as g:
            for prompt in ("one two", smollm().encode("one two", add_special_tokens=False)):
                answer = (await g.completion(prompt=prompt, echo=True)).json()
                assert answer["choices"][0]["text"] == "one two three" and answer["choices"][0]["logprobs"] is None
                assert answer["usage"]["completion_tokens"] == 2
                chunks = events(await g.completion(prompt=prompt, echo=True, stream=True))
                assert chunks[0]["choices"][0]["text"] == "one two" and joined_text(chunks) == "one two three"
            assert {submit.sampling.prompt_logprobs for submit in g.control.submits} == {-1}

    drive(work, tmp_path)


@pytest.mark.parametrize("count", [1, 2])
def test_kv_1_echo_with_logprobs(tmp_path: Path, count: int) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says(" three")) as g:
            fields: dict[str, Any] = {"prompt": "one two", "echo": True, "logprobs": 1, "n": count}
            choices = (await g.completion(**fields)).json()["choices"]
            for choice in choices:
                assert choice["text"] == "one two three"
                columns = choice["logprobs"]
                assert columns["tokens"] == ["one", " two", " three"] and columns["text_offset"] == [0, 3, 7]
                assert columns["token_logprobs"] == [None, -1 / 8, -2 / 8]
                assert columns["top_logprobs"] == [None, {" two": -1 / 8}, {" three": -2 / 8}]
            assert [s.sampling.prompt_logprobs for s in g.control.submits] == [1, -1][:count]
            chunks = events(await g.completion(**fields, stream=True))
            for index, choice in enumerate(choices):
                assert joined_columns(chunks, index) == choice["logprobs"]
                assert joined_text(chunks, index) == choice["text"]

    drive(work, tmp_path)


def test_echo_without_any_output(tmp_path: Path) -> None:
    """How evaluation programs measure a text's likelihood."""

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la")) as g:
            fields: dict[str, Any] = {"prompt": "one two", "echo": True, "logprobs": 1, "max_tokens": 0}
            answer = (await g.completion(**fields)).json()
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("one two", "length")
            assert choice["logprobs"]["tokens"] == ["one", " two"]
            assert choice["logprobs"]["token_logprobs"] == [None, -1 / 8]
            assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 2
            assert g.control.submits[0].max_tokens == 1
            chunks = events(await g.completion(**fields, stream=True))
            assert joined_columns(chunks) == choice["logprobs"] and joined_text(chunks) == "one two"
            assert chunks[-2]["choices"][0]["finish_reason"] == "length"
            plain = (await g.completion(prompt="one", echo=True, max_tokens=0)).json()["choices"][0]
            assert plain["text"] == "one" and plain["logprobs"] is None
            assert error_of(await g.completion(max_tokens=0))["param"] == "max_tokens"
            assert error_of(await g.chat(max_tokens=0))["param"] == "max_tokens"

    drive(work, tmp_path)


# -- how tokens are drawn --------------------------------------------------------------------------------------


def test_every_sampling_field_reaches_the_control_process(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, endless("la")) as g:
            for send in (g.completion, g.chat):
                await send(
                    min_p=0.25,
                    repetition_penalty=1.5,
                    presence_penalty=-0.5,
                    frequency_penalty=2,
                    logit_bias={"7": -100, "49151": 0.5},
                    min_tokens=3,
                    max_tokens=5,
                )
                sampling = g.control.submits[-1].sampling
                assert (sampling.min_p, sampling.repetition) == (0.25, 1.5)
                assert (sampling.presence, sampling.frequency) == (-0.5, 2.0)
                assert array("I", sampling.bias_ids).tolist() == [7, 49_151]
                assert array("f", sampling.bias_values).tolist() == [-100.0, 0.5]
                assert g.control.submits[-1].min_tokens == 3
            await g.completion(max_tokens=2)
            sampling = g.control.submits[-1].sampling
            assert (sampling.min_p, sampling.repetition, sampling.presence, sampling.frequency) == (0, 1, 0, 0)
            assert (sampling.bias_ids, sampling.logprobs, sampling.prompt_logprobs) == (b"", -1, -1)

    drive(work, tmp_path)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ('"n":0', "n", "between 1 and 128"),
        ('"n":129', "n", "between 1 and 128"),
        ('"n":1.5', "n", "Expected int"),
        ('"n":2,"best_of":3', "best_of", "equal to n, 2, got 3"),
        ('"best_of":2', "best_of", "equal to n, 1"),
        ('"min_p":1.01', "min_p", "between 0 and 1"),
        ('"min_p":-0.1', "min_p", "between 0 and 1"),
        ('"repetition_penalty":0', "repetition_penalty", "between 0.01 and 10"),
        ('"repetition_penalty":-1', "repetition_penalty", "between 0.01 and 10"),
        ('"repetition_penalty":10.5', "repetition_penalty", "between 0.01 and 10"),
        ('"presence_penalty":2.1', "presence_penalty", "between -2 and 2"),
        ('"frequency_penalty":-2.1', "frequency_penalty", "between -2 and 2"),
        ('"frequency_penalty":1e999', "frequency_penalty", ""),
        ('"logit_bias":{"5":101}', "logit_bias", "between -100 and 100, got 101"),
        ('"logit_bias":{"5":-1e300}', "logit_bias", "between -100 and 100"),
        ('"logit_bias":{"five":1}', "logit_bias", "between 0 and 49151, got 'five'"),
        ('"logit_bias":{"-5":1}', "logit_bias", "between 0 and 49151"),
        ('"logit_bias":{"49152":1}', "logit_bias", "between 0 and 49151"),
        ('"logit_bias":{"%s":1}' % ("9" * 5000), "logit_bias", "between 0 and 49151"),
        ('"logit_bias":{"5":1,"05":2}', "logit_bias", "twice"),
        ('"logit_bias":{"5":"1"}', "logit_bias", ""),
        ('"logit_bias":[1]', "logit_bias", ""),
        ('"min_tokens":-1', "min_tokens", "between 0 and"),
    ],
)
def test_smp_4_values_out_of_range_are_named(tmp_path: Path, body: str, param: str, said: str) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            for path, start in (
                ("/v1/completions", '{"prompt":"x",'),
                ("/v1/chat/completions", '{"messages":[{"role":"user","content":"x"}],'),
            ):
                error = error_of(await g.http.post(path, content=start + body + "}"))
                if error["param"] is not None or said:
                    # A number too large for JSON's reader has no field to name.
                    assert (error["param"] or "").startswith(param) and said in error["message"]
            assert not g.control.submits

    drive(work, tmp_path)


def test_prompts_times_n_are_bounded(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok")) as g:
            error = error_of(await g.completion(prompt=["a"] * 3, n=100))
            assert error["param"] == "n" and "300 choices, at most 256" in error["message"]
            assert not g.control.submits

    drive(work, tmp_path)
