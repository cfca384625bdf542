"""Cases FT-6, PRE-1, STR-1, STR-4, CAN-2, OBS-3, ZMQ-1 on live scripted servers, which check their own books."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import msgpack
import pytest
import zmq
from gateway_harness import smollm
from live_server import PATIENCE, HttpStream, LiveServer, live, wait_for

pytestmark = pytest.mark.xdist_group("scripted")

#: The core checks its books after every step.
CHECKED = {"EVENFLOW_CHECK": "1"}
SAID = "naïve 東京 🧑‍🚀 ok. The quick brown fox, xabcz."


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Two stages, so that a batch can be between them."""
    with live("scripted", "--stages", "2", "--step-ms", "10", env=CHECKED) as started:
        yield started


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model always says ``SAID``."""
    script = tmp_path_factory.mktemp("script") / "ids.json"
    script.write_text(json.dumps(smollm().encode(SAID, add_special_tokens=False)))
    with live("scripted", f"--worker-arg=--script={script}", env=CHECKED) as started:
        yield started


def idle(server: LiveServer) -> None:
    """Wait until no request and no block is held."""

    def nothing() -> bool:
        values = server.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        return all(values.get(f"evenflow_{name}") == 0 for name in names)

    wait_for(nothing, why="an idle server")


def answers(server: LiveServer, chat: bool, **fields: Any) -> list[tuple[str, str]]:
    """Text and finish reason of one request, whole and streamed."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Speak"}]} if chat else {"prompt": "Speak"}
    ask |= {"max_tokens": 200, **fields}
    (choice,) = server.post(path, **ask).json()["choices"]
    whole = choice["message"]["content"] if chat else choice["text"]
    stream = HttpStream(server.url, path, **ask)
    stream.finish()
    return [(whole, choice["finish_reason"]), (stream.text, stream.reasons[0])]


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_text_split_over_tokens_is_whole_str1(speaker: LiveServer, chat: bool) -> None:
    assert answers(speaker, chat) == [(SAID, "stop")] * 2


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (["own fox"], "naïve 東京 🧑‍🚀 ok. The quick br"),
        (["ab", "bc"], "naïve 東京 🧑‍🚀 ok. The quick brown fox, x"),
        (["bc", "xab"], "naïve 東京 🧑‍🚀 ok. The quick brown fox, "),
        ("京", "naïve 東"),
    ],
)
def test_no_part_of_a_stop_is_sent_str4(speaker: LiveServer, chat: bool, stop: str | list[str], left: str) -> None:
    assert answers(speaker, chat, stop=stop) == [(left, "stop")] * 2


def test_odd_requests_beside_a_stream_ft6(server: LiveServer) -> None:
    fields: dict[str, Any] = {"prompt": "Go on", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    alone = HttpStream(server.url, **fields).finish()
    stream = HttpStream(server.url, **fields)
    wait_for(lambda: len(stream.pieces) > 5)
    odd: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [""]}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [1 << 31]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages"),
    ]
    for path, body, param in odd:
        answer = server.post(path, **body)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["param"].startswith(param)
    assert httpx.post(f"{server.url}/v1/completions", content=b"\xff{", timeout=PATIENCE).status_code == 400
    assert not stream.done
    assert stream.finish() == alone


def test_a_request_larger_than_the_pool_pre1() -> None:
    """Refused at once, with the pool's size; the one behind it is answered."""
    with live("scripted", "--worker-arg=--num-blocks=20", env=CHECKED) as server:
        assert "320" in str(server.said("lowered") and server.log)
        large = server.post("/v1/completions", prompt=list(range(1, 401)), max_tokens=4)
        assert large.status_code == 400
        error = large.json()["error"]
        assert error["code"] == "context_length_exceeded" and "320" in error["message"]
        small = server.post("/v1/completions", prompt="hi", max_tokens=4, ignore_eos=True)
        assert small.status_code == 200 and small.json()["usage"]["completion_tokens"] == 4
        # As large as fits, several at once: each needs the whole pool, and each is answered.
        most = [
            HttpStream(server.url, prompt=list(range(k, k + 300)), max_tokens=20, ignore_eos=True) for k in (1, 2, 3)
        ]
        for stream in most:
            stream.finish()
        idle(server)


def test_who_leaves_frees_its_blocks_can2(server: LiveServer) -> None:
    fields: dict[str, Any] = {"prompt": "x " * 300, "max_tokens": 3000, "ignore_eos": True}
    streams = [HttpStream(server.url, **fields, seed=seed) for seed in range(6)]
    wait_for(lambda: all(len(stream.pieces) > 3 for stream in streams))
    wait_for(lambda: server.metrics().get("evenflow_kv_blocks_used", 0) > 0)  # the gateway asks once a second
    for stream in streams:
        stream.leave()
    idle(server)
    # Gone before anything could be scheduled.
    address = httpx.URL(server.url)
    body = json.dumps({**fields, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(20):
        with socket.create_connection((address.host, address.port or 0)) as connection:
            connection.sendall(head + body)
    idle(server)
    # The prefix cache keeps what was computed; nothing else is left, and the next request is right.
    values = server.metrics()
    assert values["evenflow_kv_blocks_free"] + values["evenflow_kv_blocks_cached"] == values["evenflow_kv_blocks"]
    assert server.post("/v1/completions", prompt="a", max_tokens=3).status_code == 200


def test_aborts_at_any_time_are_idempotent_can2(server: LiveServer) -> None:
    """As a foreign client would send them: before the request, twice, after its end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(PATIENCE * 1000)
        dealer.connect(server.endpoint)

        def send(*fields: Any) -> None:
            dealer.send(msgpack.packb(fields))

        def until(tag: int) -> list[Any]:
            while (message := msgpack.unpackb(dealer.recv()))[0] != tag:
                pass
            return message

        send(32, 1, "foreign")
        until(48)
        greedy = [0.0, 0, 1.0, 0, 0]
        prompt = bytes([9, 0, 0, 0] * 40)
        send(34, 1)
        for key in range(1, 30):
            send(33, key, f"r{key}", prompt, 40, 500, greedy)
            send(34, key)
            send(34, key)
        send(33, 99, "last", prompt, 40, 3, greedy, [], 3)
        ends: list[Any] = []
        while not ends:
            ends = [end for end in until(49)[8] if end[0] == 99]
        assert ends[0][2:4] == ["length", 3]
        send(34, 99)
        send(34, 99)
        send(35, 7)
        while (reply := until(51))[1] != 7:
            pass
        assert reply[6]["num_requests_running"] == 0 and reply[6]["audit_failures_total"] == 0
    idle(server)
    assert "integrity" not in server.log.lower()


def test_nothing_secret_is_told_obs3(server: LiveServer) -> None:
    marker, key = "Xyzzy-7193-plugh", "sk-live-5521-secret"
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": marker, "max_tokens": 3},
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE,
    )
    assert answer.status_code == 200
    refused = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": marker, "max_tokens": marker},
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE,
    )
    assert refused.status_code == 400
    processes = " ".join(" ".join(process.cmdline()) for process in server.members())
    metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    for text in (server.log, metrics, processes):
        assert marker not in text and key not in text


def test_the_server_ends_beside_a_client_that_reads_nothing_zmq1() -> None:
    with live("scripted", "--drain-timeout", "1") as server, zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        with dealer:
            dealer.linger = 0
            dealer.rcvhwm = 1
            dealer.connect(server.endpoint)
            dealer.send(msgpack.packb((32, 1, "stuck")))
            dealer.send(msgpack.packb((33, 1, "r", bytes([5, 0, 0, 0] * 32), 32, 4000, [0.0, 0, 1.0, 0, 0])))
            wait_for(lambda: server.metrics().get("evenflow_num_requests_running"), why="a running request")
            assert server.stop() == 0
