"""The arithmetic, on outcomes with made-up times; and how chunks become gaps, under a clock of the test's."""

import asyncio
import json
from array import array
from typing import Any

import pytest
from evenflow.cli.bench.client import Exchange, Outcome
from evenflow.cli.bench.command import exit_code
from evenflow.cli.bench.report import as_object, text
from evenflow.cli.bench.stats import Objectives, percentile, spread, summarise


def outcome(index: int, started: float, ttft: float, gaps: list[float], **fields: Any) -> Outcome:
    first = started + ttft
    made = Outcome(
        index,
        due=started,
        started=started,
        connected=started + 0.001,
        first=first,
        last=first + sum(gaps),
        ended=first + sum(gaps),
        gaps=array("d", gaps),
        chunks=len(gaps) + 1,
        tokens=len(gaps) + 1,
        prompt_tokens=10,
        exact=True,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([7], 99) == 7
    values = spread([float(value) for value in range(100, -1, -1)])
    assert (values.p50, values.p90, values.p99, values.most, values.mean) == (50, 90, 99, 100, 50)
    assert spread([]).count == 0


def test_a_run_in_figures() -> None:
    outcomes = [
        outcome(0, 0.0, 0.1, [0.02] * 10),
        outcome(1, 1.0, 0.3, [0.02] * 9 + [0.5]),
        outcome(2, 1.5, 0.1, [9.0], failure="HTTP 500", detail="boom"),
        outcome(3, 1.6, 0.2, [0.02], unfinished=True),
    ]
    found = summarise(outcomes, [0.0001], Objectives(ttft=0.2, tbt=0.1))
    assert (found.completed, found.failed, found.unfinished) == (2, 1, 1)
    assert found.failures == {"HTTP 500": 1} and found.details == {"HTTP 500": "boom"}
    # What failed is in no figure; what was cut off by the end is in those of tokens.
    assert found.output_tokens == 11 + 11 + 2 and found.tbt.count == 21 and found.tbt.most == 0.5
    assert found.ttft.most == pytest.approx(0.3) and found.ttft.count == 3
    assert found.e2e.count == 2 and found.e2e.most == pytest.approx(0.3 + 0.68)
    assert found.good == 1 and found.good_per_second == pytest.approx(1 / found.duration)
    assert found.tpot.count == 3 and found.tpot.most == pytest.approx(0.068)
    assert found.exact and found.lags.limit == pytest.approx(0.001) and found.lags.valid
    assert summarise(outcomes, [], Objectives()).good is None
    assert exit_code(found, False) == 1 and exit_code(found, True) == 130


def test_a_late_client_makes_the_run_invalid() -> None:
    def late(**fields: Any) -> Any:
        wakes = fields.pop("wakes", [0.0])
        return summarise([outcome(0, 5.0, 0.1, [0.02, 0.0, 0.0, 0.02], **fields)], wakes, Objectives())

    # 5 % of the median pause, 20 ms; the zeros of tokens that came together are no pauses.
    assert late(due=4.9995).lags.valid and exit_code(late(due=4.9995), False) == 0
    for run in (late(due=4.998), late(late=array("d", [0.002])), late(wakes=[0.002])):
        assert not run.lags.valid and exit_code(run, False) == 3
        assert "INVALID" in text(run, Objectives(), [])
    assert late(due=None).lags.send.count == 0


def test_nothing_came() -> None:
    empty = summarise([], [], Objectives(ttft=1.0))
    assert exit_code(empty, False) == 1 and empty.tokens_per_second == 0
    assert text(empty, Objectives(ttft=1.0), []) and json.dumps(as_object(empty, [], {}))


def test_the_object_has_the_keys_of_vllm_bench_serve() -> None:
    outcomes = [outcome(0, 0.0, 0.1, [0.02, 0.04])]
    found = as_object(summarise(outcomes, [], Objectives()), outcomes, {"seed": 1})
    keys = (
        "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput"
        " output_throughput total_token_throughput input_lens output_lens ttfts itls latencies start_times errors"
        " mean_ttft_ms median_ttft_ms p99_ttft_ms mean_tpot_ms p99_tpot_ms median_itl_ms p99_itl_ms"
    )
    assert set(found) >= set(keys.split())
    assert found["itls"] == [[0.02, 0.04]] and found["median_itl_ms"] == pytest.approx(30)
    assert found["evenflow"]["seed"] == 1 and found["evenflow"]["tokens_counted_by"] == "usage"


class FakeTransport(asyncio.Transport):
    def write(self, data: Any) -> None: ...

    def close(self) -> None: ...


def play(events: list[tuple[float, Any]], head: str = "200 OK", end: bool = True) -> Outcome:
    """What an exchange makes of events that come at these times."""

    async def work() -> Outcome:
        now = 0.0
        result = Outcome(0, None, 0.0)
        exchange = Exchange(result, b"", lambda: (now, 0.0))
        exchange.connection_made(FakeTransport())

        def feed(data: bytes) -> None:
            exchange.get_buffer(0)[: len(data)] = data
            exchange.buffer_updated(len(data))

        feed(f"HTTP/1.1 {head}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for now, event in events:  # noqa: B007
            line = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\r\n\r\n"
            feed(b"%x\r\n%b\r\n" % (len(line), line))
        if end:
            feed(b"0\r\n\r\n")
        exchange.connection_lost(None)
        await exchange.done
        return result

    return asyncio.run(work())


def chunk(tokens: int | None, said: str = "x", reason: str | None = None) -> dict[str, Any]:
    usage = None if tokens is None else {"prompt_tokens": 5, "completion_tokens": tokens}
    return {"choices": [{"index": 0, "text": said, "finish_reason": reason}], "usage": usage}


DONE = b"data: [DONE]\n\n"


def test_tokens_are_counted_by_usage() -> None:
    found = play([(1.0, chunk(0, "")), (2.0, chunk(1)), (3.0, chunk(4)), (4.5, chunk(5, "", "length")), (5.0, DONE)])
    assert (found.first, found.last, found.ended) == (2.0, 4.5, 5.0)
    assert found.gaps.tolist() == [1.0, 0.0, 0.0, 1.5]
    assert (found.tokens, found.prompt_tokens, found.exact, found.failure) == (5, 5, True, "")


def test_without_usage_a_chunk_is_a_token_and_the_total_is_the_servers() -> None:
    total = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}
    found = play([(1.0, chunk(None)), (2.0, chunk(None)), (2.5, chunk(None, "", "stop")), (3.0, total), (3.0, DONE)])
    assert (found.gaps.tolist(), found.tokens, found.exact) == ([1.0], 9, False)
    # Usage with the last choice only: not in every chunk.
    found = play([(1.0, chunk(None)), (2.0, chunk(9, "x", "stop"))])
    assert (found.gaps.tolist(), found.tokens, found.exact, found.failure) == ([1.0], 9, False, "")


def test_chat_chunks_and_events_in_pieces() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    word = {"choices": [{"delta": {"content": "x"}}]}
    thought = {"choices": [{"delta": {"reasoning_content": "x"}}]}
    line = b"data: " + json.dumps(word).encode() + b"\n\n"
    found = play(
        [(1.0, role), (2.0, thought), (3.0, line[:9]), (4.0, line[9:] + b": a comment\n\n"), (5.0, line + DONE)]
    )
    assert (found.first, found.gaps.tolist(), found.tokens, found.failure) == (2.0, [2.0, 1.0], 3, "")


@pytest.mark.parametrize(
    ("events", "options", "kind"),
    [
        ([(1.0, chunk(1))], {"end": False}, "cut stream"),
        ([(1.0, chunk(1))], {}, "cut stream"),
        ([(1.0, {"error": {"message": "dead"}})], {}, "error in the stream"),
        ([(1.0, b"data: {\n\n")], {}, "bad answer"),
        ([(1.0, b'data: {"choices": 3}\n\n')], {}, "bad answer"),
        ([(1.0, DONE)], {}, "no token"),
        ([(1.0, b'{"error": {"message": "busy"}}')], {"head": "429 Too Many"}, "HTTP 429"),
        ([(1.0, b"oops")], {"head": "500 No", "end": False}, "HTTP 500"),
    ],
)
def test_failures_have_kinds(events: Any, options: Any, kind: str) -> None:
    found = play(events, **options)
    assert found.failure == kind and found.ended is not None
    assert summarise([found], [], Objectives()).failures == {kind: 1}
