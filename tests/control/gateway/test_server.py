"""The gateway as a process of its own: sockets, signals, disconnects, real clients."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from evenflow.control.gateway import server, sse
from evenflow.control.gateway.limits import MAX_HEADER_BYTES
from fake_control import FakeControl, Script
from gateway_harness import MODEL, drive, endless, events, gateway, says
from uvicorn.server import ServerState


@dataclass
class Process:
    control: FakeControl
    child: asyncio.subprocess.Process
    port: int
    http: httpx.AsyncClient

    async def ready(self, status: int = 200) -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await self.http.get("/ready")).status_code == status:
                        return
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def process(endpoint: str, script: Script, *options: str, step_s: float = 0.005) -> AsyncIterator[Process]:
    """A real gateway process on a port that this process has bound, as the launcher does it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with FakeControl(endpoint, script, step_s=step_s) as control:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "evenflow.control.gateway", "--control", endpoint, "--model", MODEL),
            *("--fd", str(listener.fileno()), "--parent", str(os.getpid()), *options),
            pass_fds=[listener.fileno()],
            stderr=asyncio.subprocess.PIPE,
        )
        listener.close()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                yield Process(control, child, port, http)
        finally:
            if child.returncode is None:
                child.kill()
            await child.communicate()


def stream_body(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}


def test_a_client_that_disconnects_aborts_its_request(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with process(endpoint, endless("la la")) as p:
            await p.ready()
            async with p.http.stream("POST", "/v1/chat/completions", json=stream_body()) as response:
                assert response.status_code == 200
                async for _ in response.aiter_bytes():
                    break
            await p.control.until(lambda: len(p.control.aborts) == 1)
            with pytest.raises(httpx.ReadTimeout):
                await p.http.post("/v1/completions", json={"prompt": "hi"}, timeout=0.5)
            await p.control.until(lambda: len(p.control.aborts) == 2)

    drive(work, tmp_path)


def test_ft_5_sigterm_drains(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with process(endpoint, endless("la la")) as p:
            await p.ready()
            running = asyncio.create_task(p.http.post("/v1/chat/completions", json=stream_body(max_tokens=200)))
            await p.control.until(lambda: bool(p.control.submits))
            p.child.send_signal(signal.SIGTERM)
            await p.ready(503)
            refused = await p.http.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert events(await running)[-1] == "[DONE]"
            assert await asyncio.wait_for(p.child.wait(), 30) == 0

    drive(work, tmp_path)


def test_ft_5_at_the_drain_limit_the_rest_get_an_error_event(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with process(endpoint, endless("la la"), "--drain-timeout", "0.3", step_s=0.02) as p:
            await p.ready()
            running = asyncio.create_task(p.http.post("/v1/chat/completions", json=stream_body()))
            await p.control.until(lambda: bool(p.control.submits))
            p.child.send_signal(signal.SIGTERM)
            chunks = events(await running)
            assert chunks[-1]["error"]["code"] == "closed"
            assert await asyncio.wait_for(p.child.wait(), 30) == 0

    drive(work, tmp_path)


def test_ft_5_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with process(endpoint, endless("la la"), "--drain-timeout", "600", step_s=0.5) as p:
            await p.ready()
            running = asyncio.create_task(p.http.post("/v1/chat/completions", json=stream_body()))
            await p.control.until(lambda: bool(p.control.submits))
            p.child.send_signal(signal.SIGTERM)
            await p.ready(503)
            p.child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(p.child.wait(), 30) == 0
            await asyncio.gather(running, return_exceptions=True)

    drive(work, tmp_path)


def test_a_restart_of_control_is_only_a_pause(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with process(endpoint, endless("la la")) as p:
            await p.ready()
            body = stream_body(max_tokens=200)
            requests = [asyncio.create_task(p.http.post("/v1/chat/completions", json=body)) for _ in range(4)]
            await p.control.until(lambda: len(p.control.submits) >= 4)
            await asyncio.sleep(0.2)
            await p.control.stop()
            async with FakeControl(endpoint, endless("la la"), instance=2) as second:
                for response in await asyncio.gather(*requests):
                    chunks = events(response)
                    assert chunks[-1] == "[DONE]" and chunks[-2]["choices"][0]["finish_reason"] == "length"
                for submit in second.submits:
                    assert submit.max_tokens == 200

    drive(work, tmp_path)


def test_sec_3_a_head_without_end_is_cut_off(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        async with process(endpoint, says("ok")) as p:
            await p.ready()
            reader, writer = await asyncio.open_connection("127.0.0.1", p.port)
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nx-long: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(64):
                    writer.write(b"y" * (MAX_HEADER_BYTES // 4))
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                assert (await reader.read(64)).startswith(b"HTTP/1.1 431")
            writer.close()
            large = b'{"prompt":"' + b"a " * 200_000 + b'"}'
            assert (await p.http.post("/v1/completions", content=large)).status_code == 400
            assert (await p.http.get("/version")).status_code == 200

    drive(work, tmp_path)


def test_sec_3_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.1)

    async def app(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def work() -> None:
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(app, http=server.BoundedProtocol, log_config=None, lifespan="off")
        config.load()
        state = ServerState()
        listening = await loop.create_server(lambda: server.BoundedProtocol(config, state, {}, loop), "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            for started in (b"", b"GET / HTTP/1.1\r\nhost: x", b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET /"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(started)
                text = await asyncio.wait_for(reader.read(), 20)
                assert b"HTTP/1.1 408 " in text and text.count(b"HTTP/1.1 204 ") == started.count(b"\r\n\r\n")
                writer.close()

    asyncio.run(work())


def test_the_openai_client_unmodified(tmp_path: Path) -> None:
    from openai import APIError, AsyncOpenAI, BadRequestError

    async def work(endpoint: str) -> None:
        async with process(endpoint, says("Hello 東京 🧑‍🚀!"), "--drain-timeout", "0.2") as p:
            await p.ready()
            async with AsyncOpenAI(base_url=f"http://127.0.0.1:{p.port}/v1", api_key="none") as client:
                assert [model.id async for model in client.models.list()] == [MODEL]
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
                text, usage, reasons = "", None, []
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        reasons.append(choice.finish_reason)
                assert text == "Hello 東京 🧑‍🚀!" and usage is not None and usage.completion_tokens > 3
                assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
                whole = await client.completions.create(model=MODEL, prompt="hi", max_tokens=100)
                assert whole.choices[0].text == text
                with pytest.raises(BadRequestError) as caught:
                    await client.completions.create(model=MODEL, prompt="hi", temperature=9)
                assert caught.value.param == "temperature"
            p.control.script = endless("la")
            async with AsyncOpenAI(base_url=f"http://127.0.0.1:{p.port}/v1", api_key="none") as client:
                stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
                with pytest.raises(APIError, match="shutting down"):
                    async for _ in stream:
                        if p.child.returncode is None and not p.control.silent:
                            p.control.silent = True
                            p.child.send_signal(signal.SIGTERM)

    drive(work, tmp_path)


def test_a_silent_stream_gets_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr("evenflow.control.gateway.answers.HEADER_SECONDS", 0.01)

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok"), auto=False) as g:
            request = asyncio.create_task(g.chat(stream=True))
            await g.control.until(lambda: bool(g.control.submits))
            await asyncio.sleep(0.5)
            g.control.auto = True
            g.control.tick()
            await g.service.client.status()
            response = await request
            assert response.text.count(": keep-alive\n\n") >= 2
            assert events(response)[-1] == "[DONE]"

    drive(work, tmp_path)


def test_a_taken_port_and_a_missing_model_are_one_sentence(tmp_path: Path) -> None:
    async def work(endpoint: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            for model, said in ((MODEL, f"127.0.0.1:{port}"), ("nothing-here", "nothing-here")):
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "evenflow.control.gateway", "--control", endpoint),
                    *("--model", model, "--port", port if model == MODEL else "0"),
                    stderr=asyncio.subprocess.PIPE,
                )
                _, text = await child.communicate()
                assert child.returncode == 1
                assert text.decode().startswith("error: ") and said in text.decode()
                assert "Traceback" not in text.decode()

    drive(work, tmp_path)
