"""A gateway in the test's process, in front of a scripted control process."""

import asyncio
import contextlib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from evenflow.control.client import AsyncClient
from evenflow.control.gateway.app import build_app
from evenflow.control.gateway.defaults import SamplingDefaults
from evenflow.control.gateway.service import Service
from evenflow.control.gateway.tokenizer import TextModel, load_text_model
from evenflow.control.wire.location import locate_model
from fake_control import FakeControl, Script

MODEL = "smollm2-135m"
EOS = 2


@functools.cache
def smollm() -> TextModel:
    """SmolLM2's tokenizer and template, rebuilt from the packaged GGUF file."""
    with tempfile.TemporaryDirectory() as cache:
        return load_text_model(locate_model(MODEL), Path(cache))


def says(text: str, *, end: bool = True) -> Script:
    """A model that answers everything with ``text``."""
    ids = smollm().encode(text, add_special_tokens=False) + [EOS] * end
    return lambda _: ids


def endless(text: str) -> Script:
    ids = smollm().encode(text, add_special_tokens=False)
    return lambda _: ids * (4096 // len(ids))


class Gateway:
    def __init__(self, http: httpx.AsyncClient, control: FakeControl, service: Service) -> None:
        self.http = http
        self.control = control
        self.service = service

    async def completion(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "Hello", **fields})

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}], **fields}
        )


@contextlib.asynccontextmanager
async def gateway(
    endpoint: str,
    script: Script,
    *,
    text: TextModel | None = None,
    defaults: SamplingDefaults | None = None,
    **options: Any,
) -> AsyncIterator[Gateway]:
    """An application without a server around it; ``options`` are ``FakeControl``'s."""
    async with FakeControl(endpoint, script, **options) as control, AsyncClient(endpoint, name="gateway") as client:
        client.subscribe(100)
        service = Service(client, text or smollm(), [MODEL], defaults)
        await client.wait_connected(20)
        transport = httpx.ASGITransport(build_app(service, "test"))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
                yield Gateway(http, control, service)
        finally:
            service.threads.shutdown()


def events(response: httpx.Response) -> list[Any]:
    """The events of a streamed answer; the closing ``[DONE]`` stays a text."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def streamed_text(chunks: list[Any]) -> str:
    """The joined text of one choice's chunks, for both endpoints."""
    text = ""
    for chunk in chunks:
        if chunk != "[DONE]":
            for choice in chunk["choices"]:
                text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


def drive(work: Callable[[str], Awaitable[None]], folder: Path) -> None:
    """Run a test's coroutine with an endpoint of its own."""

    async def main() -> None:
        await work(f"ipc://{folder}/c")

    asyncio.run(main())
