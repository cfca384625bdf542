"""``evenflow bench`` as a program, against a server that emits one token every 20 ms, and against evenflow."""

import json
import os
import pty
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from evenflow.cli.bench.command import BenchOptions, run_bench
from evenflow.cli.errors import UsageError
from evenflow.cli.main import app
from live_server import EVENFLOW, PATIENCE, live, wait_for
from steady_server import Manners, steady

pytestmark = pytest.mark.xdist_group("scripted")
#: 3: the machine was too busy for the figures to count, which tests do not mind.
WELL = {0, 3}


def bench(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EVENFLOW, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
        **options,
    )


def parsed(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.stderr == "", result.stderr
    return json.loads(result.stdout)


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, for what does not depend on time: exit code and output."""

    def work(*arguments: str) -> tuple[int, str]:
        code = typer.main.get_command(app)(["bench", *arguments], standalone_mode=False)
        said = capsys.readouterr()
        assert said.err == ""
        return code, said.out

    return work


def test_one_token_every_20_ms_to_50_streams_ops1() -> None:
    manners = Manners()
    with steady(manners) as server:
        result = bench(
            server.url, "--rate", "500", "-n", "50", "--prompt-tokens", "5:9", "--output-tokens", "40", "--json"
        )
        code, said = result.returncode, parsed(result)
    assert code in WELL and said["completed"] == 50 and said["failed"] == 0
    assert said["output_lens"] == [40] * 50 and said["total_output_tokens"] == 2000
    assert all(len(gaps) == 39 for gaps in said["itls"])
    for gaps in said["itls"]:
        # Generous: server and client share a busy machine. A run that calls itself valid has no such excuse.
        assert 0.6 < sum(gaps) < 3.0
        assert abs(statistics.median(gaps) - 0.02) < (0.003 if code == 0 else 0.015)
    assert said["median_itl_ms"] == pytest.approx(20, abs=10)
    assert said["evenflow"]["tokens_counted_by"] == "usage" and said["evenflow"]["prompts"] == "words"
    assert said["evenflow"]["send_lag_seconds"]["count"] == 50
    assert manners.most_open > 30, "arrivals do not wait for answers"
    assert all(5 <= len(body["prompt"].split()) <= 9 for body in manners.bodies)
    assert all(body["ignore_eos"] and body["max_tokens"] == 40 for body in manners.bodies)


def test_a_chunk_of_several_tokens_is_one_gap_and_zeros_ops1(run: Run) -> None:
    with steady(Manners(batch=4)) as server:
        code, out = run(server.url, "-c", "2", "-n", "4", "--output-tokens", "12", "--json")
        said = json.loads(out)
    assert code in WELL and said["output_lens"] == [12] * 4
    for gaps in said["itls"]:
        assert [gap for index, gap in enumerate(gaps) if index % 4 != 3] == [0.0] * 9
        assert sum(gaps) > 0
    with steady(Manners(batch=4, usage=False)) as server:
        code, out = run(server.url, "-c", "2", "-n", "4", "--output-tokens", "12")
    assert code in WELL and "each taken for one token" in out and "48 of output" in out


@pytest.mark.parametrize(
    ("manners", "kind"),
    [
        (Manners(every=3, cut_after=3), "cut stream"),
        (Manners(every=3, status=500), "HTTP 500"),
        (Manners(every=3, status=429), "HTTP 429"),
    ],
)
def test_failures_are_counted_and_fail_the_run(run: Run, manners: Manners, kind: str) -> None:
    with steady(manners) as server:
        code, out = run(
            server.url, "--rate", "100", "--arrivals", "constant", "-n", "9", "--output-tokens", "6", "--json"
        )
        said = json.loads(out)
    assert code == 1 and (said["completed"], said["failed"]) == (6, 3)
    assert said["evenflow"]["failures"] == {kind: 3} and len(said["errors"]) == 3
    assert len(said["ttfts"]) == 6


def test_a_server_without_extensions_is_asked_plainly(run: Run) -> None:
    manners = Manners(refuses=("ignore_eos", "continuous_usage_stats"))
    with steady(manners) as server:
        code, out = run(f"{server.url}/v1/completions", "-c", "1", "-n", "2", "--output-tokens", "5", "--json")
        said = json.loads(out)
    assert code in WELL and said["evenflow"]["tokens_counted_by"] == "chunks"
    assert manners.bodies[0]["stream_options"] == {"include_usage": True} and "ignore_eos" not in manners.bodies[0]


def test_a_trace_is_replayed(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n0.0,3,4\n0.3,6,5\n0.1,4,3\n")
    manners = Manners()
    with steady(manners) as server:
        code, out = run(server.url, "--trace", str(trace), "--json")
        said = json.loads(out)
    assert code in WELL and said["output_lens"] == [4, 3, 5]
    starts = said["start_times"]
    assert starts[1] - starts[0] > 0.09 and starts[2] - starts[0] > 0.29


def test_duration_ends_a_closed_loop(run: Run) -> None:
    manners = Manners()
    with steady(manners) as server:
        code, out = run(
            server.url, "-c", "3", "--duration", "400ms", "--output-tokens", "5", "--ttft-slo", "9s", "--json"
        )
        said = json.loads(out)
    assert code in WELL and 3 <= said["completed"] <= 20 and manners.most_open == 3
    assert said["request_goodput"] is not None


def test_an_interrupt_prints_what_there_is() -> None:
    manners = Manners()
    with steady(manners) as server:
        process = subprocess.Popen(
            [*EVENFLOW, "bench", server.url, "-c", "4", "-n", "100", "--output-tokens", "100000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda: len(manners.bodies) == 4, why="the streams")
        wait_for(lambda: manners.tokens > 40, why="the tokens")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in err
    assert "4 unfinished" in out and "TBT" in out and "Interrupted" in out


def test_a_terminal_gets_a_bar_and_a_pipe_does_not_obs4(run: Run) -> None:
    with steady(Manners()) as server:
        ours, theirs = pty.openpty()
        try:
            result = subprocess.run(
                [*EVENFLOW, "bench", server.url, "-c", "2", "-n", "4", "--output-tokens", "5"],
                stdout=subprocess.PIPE,
                stderr=theirs,
                text=True,
                timeout=PATIENCE,
                env={**os.environ, "TERM": "xterm"},
            )
            os.set_blocking(ours, False)
            shown = os.read(ours, 65536).decode()
        finally:
            os.close(ours)
            os.close(theirs)
        piped = bench(server.url, "-c", "2", "-n", "4", "--output-tokens", "5")
    assert "/4 done" in shown and "\x1b" not in result.stdout
    assert "\x1b" not in piped.stdout and piped.stderr == ""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({}, "one of --rate"),
        ({"rate": 1.0, "concurrency": 1}, "one of --rate"),
        ({"rate": 0.0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"concurrency": 0}, "--concurrency"),
        ({"concurrency": 1, "requests": 0}, "--requests"),
        ({"concurrency": 1, "output": "5:1"}, "--output-tokens"),
        ({"concurrency": 1, "tbt_slo": "soon"}, "--tbt-slo"),
        ({"trace": Path("/no/such.csv")}, "--trace"),
    ],
)
def test_bad_usage_names_the_flag(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        run_bench(BenchOptions("http://127.0.0.1:1", **flags))


def test_bad_usage_is_exit_code_2() -> None:
    result = bench("http://127.0.0.1:1")
    assert result.returncode == 2 and "one of --rate" in result.stderr and result.stdout == ""


def test_no_server() -> None:
    result = bench("http://127.0.0.1:1", "-c", "1")
    assert result.returncode == 1 and result.stderr.startswith("evenflow: No server answers at")


def test_evenflow_itself() -> None:
    with live("scripted", "--step-ms", "10") as server:
        for extra, prompts in (([], "token ids"), (["--chat"], "words")):
            result = bench(
                server.url,
                "--rate",
                "40",
                "-n",
                "12",
                "--prompt-tokens",
                "20",
                "--output-tokens",
                "16",
                *extra,
                "--json",
            )
            code, said = result.returncode, parsed(result)
            assert code in WELL and said["completed"] == 12, said["errors"]
            assert said["output_lens"] == [16] * 12
            assert said["evenflow"]["tokens_counted_by"] == "usage" and said["evenflow"]["prompts"] == prompts
            assert said["input_lens"] == [20] * 12 or extra
            assert said["median_itl_ms"] > 5


def test_help_loads_nothing_heavy_obs4(run: Run) -> None:
    program = """
import sys
from evenflow.cli.main import run
sys.argv = ["evenflow", "bench", "--help"]
try:
    run()
except SystemExit:
    pass
print([m for m in ("torch", "numpy", "zmq", "httpx", "httptools", "msgspec", "asyncio") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr
