"""``evenflow profile``: what it prints and writes, what it refuses, and that ``simulate`` takes it."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from evenflow.cli.errors import MemoryShort, UsageError
from evenflow.cli.simulation.profile import ProfileFlags, run_profile, settle
from evenflow.dataplane.simulated.profiled import Fit, Profile, Range, Terms
from evenflow.dataplane.simulated.shape import KNOWN
from msgspec import structs

EVENFLOW = [sys.executable, "-P", "-c", "from evenflow.cli.main import run; run()"]
TERMS = Terms([(1, 9000.0), (64, 30_000.0)], [(1, 2000.0)], 150.0, 0.3, 0.4, 1.5, 0.6)
PROFILE = Profile(
    "cpu",
    "a processor, 2 threads",
    structs.replace(KNOWN["mistral-7b"], name="small", max_len=4096),
    2,
    "bfloat16",
    16,
    500,
    TERMS,
    300.0,
    2.0,
    60,
    0.01,
    Range(64, 16, 2000, 500_000),
    Fit(50, 0.012, 0.04, 0.09, -0.001),
    Fit(24, 0.02, 0.05, 0.08, 0.002),
)
FLAGS = ProfileFlags("small", None, 1.0, 64, 16, 16, "bfloat16", 1 << 20, "cpu", 2, False)


def found(profile: Profile, left_out: int = 0) -> Callable[[object], tuple[Profile, int]]:
    return lambda heard: (profile, left_out)


def simulate(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    load = ["--prompt-tokens", "20:200", "--output-tokens", "5:40", "-n", "40", "--max-num-seqs", "16"]
    command = [*EVENFLOW, "simulate", "small", "--device", str(path), *load, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_it_is_printed_written_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.json"
    assert run_profile(replace(FLAGS, out=path), found(PROFILE)) == 0
    told = capsys.readouterr()
    assert "residuals   of 50 batches: P50 1.2%, P90 4.0%, worst 9.0%, bias -0.1%" in told.out and told.err == ""
    assert "measured    up to 64 tokens, 16 decodes, 2000 tokens of context" in told.out
    assert f"evenflow simulate small --device {path}" in told.out
    done = simulate(path, "--token-budget", "64", "--rate", "2")
    assert done.returncode == 0, done.stderr
    assert "Measured on a processor, 2 threads: iterations within 2.0% (P50) and 5.0% (P90)." in done.stdout
    assert "extrapolated" not in done.stdout
    more = json.loads(simulate(path, "--token-budget", "128", "--rate", "2", "--json").stdout)
    assert more["device_validated"] and 0 < more["extrapolated_iterations"] < more["iterations"]
    wrong = simulate(path, "--rate", "2", "--stages", "2")
    assert wrong.returncode == 2 and "was measured as one stage" in wrong.stderr


def test_a_capacity_that_rests_on_what_was_not_measured_says_so(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    assert run_profile(replace(FLAGS, out=path), found(PROFILE)) == 0
    asked = ["small", "--device", str(path), "--prompt-tokens", "20:200", "--output-tokens", "5:40", "-n", "70"]
    asked += ["--max-num-seqs", "16", "--slo", "1s"]

    def told(command: str, *arguments: str) -> str:
        done = subprocess.run(
            [*EVENFLOW, command, *asked, *arguments], capture_output=True, text=True, timeout=300, check=True
        )
        return done.stdout

    assert "extrapolated" not in told("capacity", "--token-budget", "64")
    assert "% of the iterations at that load were larger than any that was measured" in told(
        "capacity", "--token-budget", "128"
    )
    curve = json.loads(told("tune", "--budgets", "64,128", "--json"))["curve"]
    assert curve[0]["extrapolated_share"] == 0 < curve[1]["extrapolated_share"] <= 1


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_profile(replace(FLAGS, as_json=True), found(PROFILE)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "profile" and told["range"]["tokens"] == 64 and told["probes"]["batches"] == 24


def test_what_spoils_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_profile(FLAGS, found(structs.replace(PROFILE, scatter=0.4), 9)) == 0
    told = capsys.readouterr().err
    assert "lay 40% apart: this machine was busy" in told and "no time for 9 of the planned batches" in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_budget": 4}, "--token-budget must be from 8 to 8192, got 4"),
        ({"max_num_seqs": 1}, "--max-num-seqs must be from 2 to 4096, got 1"),
        ({"threads": -1}, "--threads must be from 1 to 1024, got -1"),
        ({"block_size": 24}, "--block-size must be a power of two"),
        ({"kv_memory": 1000}, "--kv-cache-memory 1000 is too small"),
        ({"out": Path("here.toml")}, "must end in .json"),
        ({"out": Path("/nowhere/here.json")}, "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    flags = {name: getattr(FLAGS, name) for name in FLAGS.__slots__}
    with pytest.raises(UsageError, match=words):
        settle(**{**flags, **change})
    with pytest.raises(MemoryShort, match="--kv-cache-memory"):
        settle(**{**flags, "kv_memory": 1 << 60})


def test_an_unknown_model_is_exit_code_2() -> None:
    done = subprocess.run([*EVENFLOW, "profile", "no-such"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no-such" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
