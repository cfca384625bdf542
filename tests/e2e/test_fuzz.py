"""SEC-1: hostile frames to every socket of a running system. ``fuzz.py`` sends a million of them."""

import os

import pytest
from fuzz_server import command, fuzz

FRAMES = int(os.environ.get("EVENFLOW_FUZZ_FRAMES", "20000"))
SEED = int(os.environ.get("EVENFLOW_FUZZ_SEED", "0"))


@pytest.mark.xdist_group("live")
def test_sec_1_nothing_that_comes_to_a_socket_stops_or_disturbs_anything() -> None:
    report = fuzz(FRAMES, SEED)
    print(*report.lines(), sep="\n")
    assert not report.wrong, f"{report.wrong}\nagain: {command(FRAMES, SEED)}"
    assert report.served and all(report.sent.values())
