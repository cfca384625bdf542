"""The commands as a user types them: what they print, their errors, and that nothing heavy is needed."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

EVENFLOW = [sys.executable, "-P", "-c", "from evenflow.cli.main import run; run()"]
SMALL = ["mistral-7b", "--rate", "4", "-n", "20", "--prompt-tokens", "100:900", "--output-tokens", "5:40"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*EVENFLOW, *arguments], capture_output=True, text=True, timeout=300)


def test_simulate_as_json_twice() -> None:
    first, second = (run("simulate", *SMALL, "--json") for _ in range(2))
    assert first.returncode == 0, first.stderr
    told, again = json.loads(first.stdout), json.loads(second.stdout)
    assert told.pop("cpu_seconds") > 0 and again.pop("cpu_seconds") > 0
    assert told == again
    assert told["completed"] == told["requests"] == 20 and told["device_validated"]
    assert 0 < told["scheduling_delay"]["p50"] < told["ttft"]["p50"] < told["e2e"]["p50"]
    assert told["tbt"]["count"] == told["total_output_tokens"] - 20 == told["pooled_tbt"]["count"] - 20
    [stage] = told["stages"]
    assert 0 < stage["busy"] <= told["duration"] and set(stage["idle"]) == {
        "pb1",
        "pb2",
        "pb3",
        "plan_late",
        "no_work",
    }


def test_simulate_for_people(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    done = run("simulate", *SMALL, "--stages", "2", "--device", "h200", "--perfetto", str(path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "mistral-7b on 2 h200, 2 stages, stall-free 512 tokens, at most 128 sequences"
    assert any(line.startswith("TTFT ") for line in lines) and lines[-1].startswith("Not validated: NVIDIA H200")
    assert "20 completed of 20, 0 refused" in done.stdout
    events = json.loads(path.read_bytes())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    for stage in range(2):
        of = [event for event in slices if event["tid"] == stage]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(of)) and len(of) > 20


def test_past_saturation_is_told() -> None:
    """OPS-2: figures of a load that no queue survives say nothing but how long it was."""
    load = ["--prompt-tokens", "1000", "--output-tokens", "50", "-n", "150", "--json"]
    told = [json.loads(run("simulate", "mistral-7b", "--rate", rate, *load).stdout) for rate in ("2", "100")]
    assert [one["past_saturation"] for one in told] == [False, True]
    for name in ("ttft", "scheduling_delay", "e2e"):
        assert told[0][name]["p50"] > 0 and told[1][name] is None
    assert told[1]["tbt"]["p50"] > 0
    lines = run("simulate", "mistral-7b", "--rate", "100", *load[:-1]).stdout.splitlines()
    assert any(line.startswith("Past saturation: ") for line in lines)
    assert "past saturation" in next(line for line in lines if line.startswith("TTFT "))


def test_a_trace_at_its_own_times(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt,output\n0,100,5\n10,100,5\n")
    told = json.loads(run("simulate", "mistral-7b", "--trace", str(path), "--json").stdout)
    assert told["requests"] == 2 and 10 < told["duration"] < 11
    told = json.loads(run("simulate", "mistral-7b", "--trace", str(path), "--pace", "2", "--json").stdout)
    assert 5 < told["duration"] < 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mistral-7b"], "give --rate, or a --trace that has arrival times"),
        (["mistral-8b", "--rate", "1"], "there is no model 'mistral-8b'"),
        (["mistral-7b", "--rate", "1", "--device", "b200"], "there is no device 'b200': it is one of a100-pcie"),
        (["mistral-7b", "--rate", "0"], "--rate must be above 0"),
        (["falcon-180b", "--rate", "1"], "falcon-180b needs 359 GB for its weights, 1 of a100-pcie have 73"),
        (["mistral-7b", "--rate", "1", "--tp", "3"], "32 heads, which 3 ranks cannot share"),
        (["mistral-7b", "--rate", "1", "--tbt-slo", "soon"], "--tbt-slo 'soon': "),
        (["mistral-7b", "--rate", "1", "--token-budget", "0"], "the token budget must be from 1 to 1048576, not 0"),
        (["mistral-7b", "--rate", "1", "--host", "fast"], "a100-pcie has no host 'fast': it has eager, graphs"),
        (["mistral-7b", "--rate", "1", "--prompt-tokens", "many"], "--prompt-tokens 'many' is none of"),
        (["mistral-7b", "--rate", "1", "--trace", "/nowhere.csv"], "/nowhere.csv: No such file"),
    ],
)
def test_simulate_refuses_in_one_sentence(arguments: list[str], message: str) -> None:
    done = run("simulate", *arguments)
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    assert message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_simulating_loads_nothing_heavy() -> None:
    program = f"""
import sys
from evenflow.cli.main import run
sys.argv = ["evenflow", "simulate", *{SMALL!r}]
try:
    run()
except SystemExit:
    pass
print([m for m in ("torch", "numpy", "zmq", "asyncio", "matplotlib") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


def test_capacity_and_tune() -> None:
    load = ["--prompt-tokens", "200:3000", "--output-tokens", "5:40", "-n", "64", "--max-num-seqs", "8"]
    system = ["mistral-7b", "--host", "graphs", "--tbt-p99", "40ms", "--max-model-len", "4096", "--json"]
    found = json.loads(run("capacity", *system, *load, "--token-budget", "256", "--seeds", "2").stdout)
    assert len(found["rates"]) == 2 and found["interval"][0] <= found["capacity"] <= found["interval"][1]
    for verdict in found["verdicts"]:
        assert verdict["sustained"] == (verdict["rate"] <= found["rates"][verdict["seed"]] * 1.0001)
    tuned = run("tune", *system, *load, "--budgets", "128,256,1024")
    told = json.loads(tuned.stdout)
    curve = {point["token_budget"]: point["capacity"] for point in told["curve"]}
    assert list(curve) == [128, 256, 1024] and tuned.returncode == 0
    assert told["token_budget"] in (128, 256) and curve[1024] < 0.5 * curve[256]
    # The same search from another guess.
    assert curve[256] == pytest.approx(found["rates"][0], rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["capacity", "mistral-7b", "--slo", "fast"], "--tbt-p99 'fast' is no time above 0"),
        (["capacity", "mistral-7b", "--slo", "1s", "--seeds", "0"], "--seeds must be from 1 to 100, got 0"),
        (["capacity", "mistral-7b", "--slo", "1s", "-n", "100"], "100 requests are too few to see a queue"),
        (["tune", "mistral-7b", "--slo", "1s", "--policy", "hybrid"], "--policy hybrid has no token budget to tune"),
        (["tune", "mistral-7b", "--slo", "1s", "--budgets", "9:1:1"], "--budgets '9:1:1' is neither FROM:TO:STEP"),
    ],
)
def test_capacity_and_tune_refuse_in_one_sentence(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
