"""The commands as a user types them: exit codes, one-sentence errors, and the clients against a small HTTP server."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from evenflow import __version__
from evenflow.cli.openai_http import base_url
from evenflow.cli.status import parse_metrics

EVENFLOW = [sys.executable, "-P", "-c", "from evenflow.cli.main import run; run()"]


def run(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EVENFLOW, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def test_version_and_help_obs4() -> None:
    """OBS-4: neither needs anything heavy, and a pipe gets no colour codes."""
    version = run("--version")
    assert (version.returncode, version.stdout) == (0, f"evenflow {__version__}\n")
    for command in ([], ["serve"], ["generate"], ["chat"], ["status"], ["launch"], ["worker"], ["keys"]):
        text = run(*command, "--help", env={"COLUMNS": "80"})
        assert text.returncode == 0 and "\x1b" not in text.stdout
    assert "--pipeline-parallel-size" in run("serve", "--help", env={"COLUMNS": "80"}).stdout


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_loads_nothing_heavy_obs4(flag: str) -> None:
    program = f"""
import sys
from evenflow.cli.main import run
sys.argv = ["evenflow", "{flag}"]
try:
    run()
except SystemExit:
    pass
print([m for m in ("torch", "numpy", "zmq", "httpx", "tokenizers", "asyncio") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "m", "--token-budget", "0"],
        ["serve", "m", "--block-size", "24"],
        ["serve", "m", "--kv-cache-memory", "much"],
        ["serve", "m", "--dtype", "int3"],
        ["serve", "m", "--no-such-flag"],
        ["serve"],
        ["no-such-command"],
        ["generate", "--prompt", "x"],
        ["launch", "/no/such/cluster.toml"],
        ["worker", "--connect", "tcp://127.0.0.1:1", "--model", "scripted"],
        ["worker", "--connect", "tcp://127.0.0.1:1"],
        ["keys", "--add-client", "../alice"],
    ],
)
def test_bad_usage_is_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == "" and result.stderr
    assert "Traceback" not in result.stderr


def test_refusal_is_one_sentence_sch5() -> None:
    result = run("serve", "m", "--token-budget", "0")
    assert len(result.stderr.splitlines()) == 1 and "--token-budget" in result.stderr


class Handler(BaseHTTPRequestHandler):
    """Completions that repeat the last words; what was asked is kept in ``asked``."""

    asked: list[dict[str, Any]]
    fail: str

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, json.dumps({"data": [{"id": "tiny"}]}))
        elif self.path == "/ready":
            self._answer(503 if self.fail == "not ready" else 200, "{}")
        else:
            text = (
                '# HELP x y\nevenflow_num_requests_running{model_name="tiny"} 3.0\n'
                'evenflow_iteration_seconds_bucket{le="1"} 7\nprocess_open_fds 9\n'
            )
            self._answer(200, text, "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.fail == "refuse":
            self._answer(400, json.dumps({"error": {"message": "the prompt is too long"}}))
            return
        chat = self.path.endswith("chat/completions")
        last = body["messages"][-1]["content"] if chat else body["prompt"]
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}] if chat else []
        for piece in ("again: ", last):
            choice = {"index": 0, "delta": {"content": piece}} if chat else {"index": 0, "text": piece}
            chunks.append({"choices": [choice]})
        if self.fail == "midway":
            chunks = [*chunks[:1], {"error": {"message": "the request was lost"}}]
        chunks.append({"choices": [], "usage": {}})
        text = ": keep-alive\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self._answer(200, text + "data: [DONE]\n\n", "text/event-stream")


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Running", (Handler,), {"asked": [], "fail": ""})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}", handler
    http.shutdown()
    thread.join()
    http.server_close()


Running = tuple[str, type[Handler]]


def test_generate_from_a_running_server(server: Running) -> None:
    url, handler = server
    result = run("generate", url, "--prompt", "naïve 東京", "--max-tokens", "5", "--seed", "7")
    assert (result.returncode, result.stdout) == (0, "again: naïve 東京\n"), result.stderr
    assert handler.asked == [
        {"model": "tiny", "prompt": "naïve 東京", "max_tokens": 5, "temperature": 0.0, "seed": 7, "stream": True}
    ]
    more = ("--top-k", "4", "--min-p", "0.1", "--repetition-penalty", "1.2", "--stop", "a", "--stop", "b")
    assert run("generate", "--url", url, *more, stdin="from stdin").stdout == "again: from stdin\n"
    drawn = {name: handler.asked[-1][name] for name in ("top_k", "min_p", "repetition_penalty", "stop")}
    assert drawn == {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2, "stop": ["a", "b"]}


def test_refusals_are_one_sentence(server: Running) -> None:
    url, handler = server
    handler.fail = "refuse"
    result = run("generate", url, "--prompt", "x")
    assert result.returncode == 1
    assert result.stderr == "evenflow: The server answered 400: the prompt is too long\n"
    handler.fail = "midway"
    result = run("generate", url, "--prompt", "x")
    assert (result.returncode, result.stderr) == (1, "evenflow: the request was lost\n")


def test_chat_from_a_pipe(server: Running) -> None:
    url, handler = server
    result = run("chat", "--system", "be brief", stdin="one\n\ntwo\n", env={"OPENAI_BASE_URL": f"{url}/v1"})
    assert (result.returncode, result.stdout) == (0, "again: one\nagain: two\n"), result.stderr
    roles = [(message["role"], message["content"]) for message in handler.asked[-1]["messages"]]
    assert roles == [("system", "be brief"), ("user", "one"), ("assistant", "again: one"), ("user", "two")]


def test_status(server: Running) -> None:
    url, handler = server
    result = run("status", "--url", url, "--json")
    state = json.loads(result.stdout)
    assert result.returncode == 0
    assert state["ready"] and state["models"] == ["tiny"]
    assert state["metrics"] == {"evenflow_num_requests_running": 3.0}
    assert f"{url}: ready" in run("status", "--url", url).stdout
    handler.fail = "not ready"
    result = run("status", "--url", url)
    assert result.returncode == 1 and "not ready" in result.stdout


@pytest.mark.parametrize("command", [["status"], ["chat"], ["generate", "--prompt", "x"]])
def test_no_server(command: list[str]) -> None:
    result = run(*command, "--url", "http://127.0.0.1:1/v1", stdin="hello\n")
    assert result.returncode == 1
    assert result.stderr.startswith("evenflow: No server answers at http://127.0.0.1:1/v1")
    assert len(result.stderr.splitlines()) == 1


def test_base_url() -> None:
    for text in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1"):
        assert base_url(text) == "http://h:1/v1"


def test_metrics_are_summed_over_labels() -> None:
    text = 'evenflow_a_total{m="x"} 1\nevenflow_a_total{m="y z"} 2\nevenflow_b 3\nevenflow_bad x\n'
    assert parse_metrics(text) == {"evenflow_a_total": 3.0, "evenflow_b": 3.0}


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "--prompt", "x"]])
def test_model_that_does_not_exist(tmp_path: Path, command: list[str]) -> None:
    """Refused before anything starts, in one sentence."""
    path = str(tmp_path / "no-model")
    result = run(*command, path)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and path in result.stderr
