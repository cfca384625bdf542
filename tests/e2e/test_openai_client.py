"""Issue's line 6: the unmodified ``openai`` client, evenflow's own clients and commands, on a live real model."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from evenflow.control.client import AsyncClient, Client
from gateway_harness import smollm
from live_server import EVENFLOW, PATIENCE, LiveServer, live

pytestmark = pytest.mark.xdist_group("smollm2")

MODEL = "smollm2-135m"
QUESTION = "The capital of France is"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    # Two stages have one thread each here, which other tests on the same cores do not stall.
    with live(MODEL, "--dtype", "float32", "--stages", "2") as started:
        yield started


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def continuation(server: LiveServer) -> str:
    """Sixteen greedy tokens after ``QUESTION``."""
    answer = server.post("/v1/completions", model=MODEL, prompt=QUESTION, max_tokens=16, temperature=0)
    text = answer.json()["choices"][0]["text"]
    assert "Paris" in text
    return text


def test_completions(client: openai.OpenAI, continuation: str) -> None:
    whole = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=16, temperature=0)
    assert whole.choices[0].text == continuation and whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    pieces: list[str] = []
    usage = None
    stream = client.completions.create(
        model=MODEL,
        prompt=QUESTION,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.text for choice in chunk.choices]
    assert "".join(pieces) == continuation and len(pieces) > 8
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_chat(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": "Name the capital of France."}]
    whole = client.chat.completions.create(model=MODEL, messages=ask, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    text = whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant" and text and "Paris" in text
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ask,  # type: ignore[arg-type]
        max_completion_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_a_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=1.0, seed=seed)
        .choices[0]
        .text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_two_choices_with_logprobs(client: openai.OpenAI) -> None:
    ask: list[Any] = [
        {"role": "user", "content": "Name three colours of the rainbow, please, in any order you like."}
    ]
    wanted: dict[str, Any] = {"model": MODEL, "messages": ask, "n": 2, "max_tokens": 8, "seed": 3, "temperature": 1.0}
    whole = client.chat.completions.create(**wanted, logprobs=True, top_logprobs=3)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        content = choice.logprobs.content
        assert "".join(item.token for item in content) == choice.message.content
        for item in content:
            assert bytes(item.bytes or []).decode(errors="replace") == item.token
            best = [top.logprob for top in item.top_logprobs]
            assert len(best) == 3 and best == sorted(best, reverse=True) and item.logprob <= best[0] <= 0
    assert whole.usage is not None and whole.usage.completion_tokens <= 16
    pieces: dict[int, list[str]] = {0: [], 1: []}
    tokens: dict[int, list[str]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(**wanted, logprobs=True, top_logprobs=3, stream=True):
        for choice in chunk.choices:
            pieces[choice.index].append(choice.delta.content or "")
            if choice.logprobs is not None:
                tokens[choice.index] += [item.token for item in choice.logprobs.content or []]
    for index, choice in enumerate(whole.choices):
        assert "".join(pieces[index]) == "".join(tokens[index]) == choice.message.content


def test_kv_1_a_text_is_measured_as_it_was_made(client: openai.OpenAI, continuation: str) -> None:
    """Log-probabilities of a generated text are those that an echo of it gives, now and with a filled cache."""
    made = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=16, temperature=0, logprobs=2).choices[
        0
    ]
    assert made.text == continuation and made.logprobs is not None
    for _ in range(2):
        echoed = client.completions.create(
            model=MODEL, prompt=QUESTION + continuation, max_tokens=0, echo=True, logprobs=2, temperature=0
        ).choices[0]
        assert echoed.text == QUESTION + continuation and echoed.logprobs is not None
        columns = echoed.logprobs
        assert columns.tokens is not None and columns.token_logprobs is not None and columns.top_logprobs is not None
        assert "".join(columns.tokens) == echoed.text and columns.token_logprobs[0] is None
        assert columns.tokens[-16:] == made.logprobs.tokens
        assert columns.token_logprobs[-16:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-4)
        for top, best in zip(columns.top_logprobs[-16:], made.logprobs.top_logprobs or [], strict=True):
            assert top == pytest.approx(best, abs=1e-4)


def test_biases_and_penalties_reach_the_model(client: openai.OpenAI, continuation: str) -> None:
    first = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=1, temperature=0)
    token = smollm().encode(first.choices[0].text, add_special_tokens=False)[0]
    banned = client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=1, temperature=0, logit_bias={str(token): -100}
    )
    assert banned.choices[0].text != first.choices[0].text
    forced = client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=4, temperature=0, logit_bias={str(token): 100}
    )
    assert forced.choices[0].text == first.choices[0].text * 4
    varied = client.completions.create(
        model=MODEL,
        prompt=QUESTION,
        max_tokens=4,
        temperature=0,
        logit_bias={str(token): 30},
        frequency_penalty=2,
        extra_body={"repetition_penalty": 10, "min_p": 0.1, "min_tokens": 4},
    )
    assert varied.choices[0].text != forced.choices[0].text


def test_models_and_errors(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL == client.models.retrieve(MODEL).id
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="a", max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="a", max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="a")


def test_the_asynchronous_openai_client(server: LiveServer, continuation: str) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=QUESTION, max_tokens=16, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE) as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    assert asyncio.run(main()) == [continuation] * 4


def test_clients_of_the_zeromq_socket(server: LiveServer, continuation: str) -> None:
    """The same tokens without HTTP, at the endpoint that the log names."""
    prompt = smollm().encode(QUESTION, add_special_tokens=True)

    async def main() -> list[int]:
        async with AsyncClient(server.endpoint) as client:
            welcome = await client.wait_connected(PATIENCE)
            assert welcome.model == MODEL and welcome.ready
            async with await client.submit(prompt, max_tokens=16) as stream:
                ids = [token async for chunk in stream for token in chunk.ids]
            assert stream.finish is not None and stream.finish.reason == "length"
            return ids

    ids = asyncio.run(main())
    assert smollm().decode(ids, skip_special_tokens=True) == continuation
    with Client(server.endpoint) as client, client.submit(prompt, max_tokens=16) as stream:
        assert [token for chunk in stream for token in chunk.ids] == ids
        assert client.status(PATIENCE).ready


def command(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EVENFLOW, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OPENAI_BASE_URL": f"{url}/v1"},
    )


def test_generate_and_status(server: LiveServer, continuation: str) -> None:
    made = command("generate", "--url", f"{server.url}/v1", "-p", QUESTION, "--max-tokens", "16", url=server.url)
    assert made.returncode == 0 and made.stdout == continuation + "\n", made.stderr
    told = command("status", "--json", url=server.url)
    state = json.loads(told.stdout)
    assert told.returncode == 0 and state["ready"] and state["models"] == [MODEL]
    assert state["metrics"]["evenflow_replicas_up"] == 1
