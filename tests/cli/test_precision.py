"""``--dtype auto``: what the child measured decides, and is told."""

import json
import subprocess
import sys
from typing import Any

import pytest
from evenflow.cli.errors import MeasureFailed
from evenflow.cli.options import SCRIPTED, ServeOptions
from evenflow.cli.precision import settle_dtype

COSTS = [
    {"dtype": "bfloat16", "decode_1_ms": 10.0, "decode_8_ms": 20.0, "prompt_token_ms": 0.5, "request_ms": 576.0},
    {"dtype": "int8", "decode_1_ms": 8.0, "decode_8_ms": 16.0, "prompt_token_ms": 0.25, "request_ms": 384.0},
    {"dtype": "int4", "decode_1_ms": 4.0, "decode_8_ms": 30.0, "prompt_token_ms": 1.0, "request_ms": 992.0},
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of children, which answer with ``COSTS``."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, json.dumps(COSTS), "a warning\n")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_type_with_the_quickest_request_is_served_and_all_are_told(asked: list[list[str]]) -> None:
    options, lines = settle_dtype(ServeOptions("m", dtype="auto", threads=2, stages=3))
    assert options == ServeOptions("m", dtype="int8", threads=2, stages=3)
    assert asked == [[sys.executable, "-P", "-m", "evenflow.dataplane.choosing", "--model", "m", "--threads", "2"]]
    assert lines[0] == "--dtype auto measured, with 2 threads:"
    assert [line.split()[0] for line in lines[2:]] == ["bfloat16", "int8", "int4"]
    assert lines[3].split() == ["int8", "8.0", "16.0", "4000", "0.38", "<-", "served"]
    assert all("served" not in line for line in (lines[2], lines[4]))


def test_nothing_is_measured_where_a_type_is_named_or_nothing_is_computed_here(asked: list[list[str]]) -> None:
    for options in (
        ServeOptions("m", dtype="int4"),
        ServeOptions(SCRIPTED, dtype="auto"),
        ServeOptions("m", dtype="auto", simulate="a100-sxm"),
        ServeOptions("m", dtype="auto", replicas=2, external=(0, 1)),
    ):
        settled, lines = settle_dtype(options)
        assert settled.dtype == ("int4" if options.dtype == "int4" else "bfloat16") and lines == []
    assert asked == []


def test_a_child_that_fails_ends_the_start_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "noise\nevenflow: tensor x is missing\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(MeasureFailed, match=r"^--dtype auto: tensor x is missing\.$"):
        settle_dtype(ServeOptions("m", dtype="auto"))
