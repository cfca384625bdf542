"""The monitor's screen, drawn from what a real server said: the same text, at any size, without a terminal."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from evenflow.cli.monitor.panels import bar, render, seconds, short, sparkline
from evenflow.cli.monitor.snapshot import Snapshot, Tracker
from evenflow.control.wire import IterationRecord, StageTimes, StatusReply
from rich.console import Console

HERE = Path(__file__).parent
#: A scripted server of two stages under load, as ``evenflow monitor --once --json`` printed it.
RECORDED = msgspec.json.decode((HERE / "recorded.json").read_bytes(), type=Snapshot)


def drawn(snapshot: Snapshot, width: int, height: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(render(snapshot, width, height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def without_clock(text: str) -> str:
    """The time of day depends on the place where it is read."""
    return re.sub(r"\d\d:\d\d:\d\d", "00:00:00", text)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_the_screen_is_as_it_was(width: int, height: int) -> None:
    expected = (HERE / f"screen-{width}x{height}.txt").read_text()
    assert without_clock(drawn(RECORDED, width, height)) == expected


@pytest.mark.parametrize("width", [1, 7, 20, 39, 59, 60, 79, 80, 131, 300])
@pytest.mark.parametrize("height", [1, 2, 9, 24, 100])
@pytest.mark.parametrize("snapshot", [RECORDED, Snapshot(time=0.0, server="x")], ids=["busy", "lost"])
def test_it_fits_any_screen(width: int, height: int, snapshot: Snapshot) -> None:
    text = render(snapshot, width, height)
    lines = text.split("\n")
    assert 1 <= len(lines) <= height
    assert all(line.cell_len <= width for line in lines)


def test_the_picture_holds_what_the_screen_does() -> None:
    console = Console(file=io.StringIO(), width=100, height=30, record=True)
    console.print(render(RECORDED, 100, 30))
    picture = console.export_svg(title="evenflow monitor")
    assert picture.startswith("<svg")
    for piece in ("evenflow", RECORDED.model, "TTFT", RECORDED.requests[0].request[:12], "▓▓▓"):
        assert piece in picture.replace("&#160;", " ")


def test_a_lost_server_keeps_its_last_figures() -> None:
    tracker = Tracker("ipc:///x")
    assert tracker.lost(1.0).state == "lost"
    tracker.take(StatusReply(1, 7, "m", True, False, {"num_requests_running": 3.0}), [], 2.0, 2.0)
    lost = tracker.lost(3.0)
    assert (lost.state, lost.running, lost.model, lost.time) == ("lost", 3, "m", 3.0)
    assert "no answer" in drawn(lost, 80, 24)


def reply(instance: int = 7, **values: float) -> StatusReply:
    return StatusReply(1, instance, "m", True, False, {**values})


def test_rates_and_shares_are_differences_over_the_time_between() -> None:
    tracker = Tracker("x")
    busy = 'stage_busy_seconds_total{replica="0",stage="0"}'
    late, pb1, pb3, no_work = (
        f'stage_bubble_seconds_total{{replica="0",stage="0",cause="{cause}"}}'
        for cause in ("plan_late", "pb1", "pb3", "no_work")
    )
    first = tracker.take(reply(tokens_given_out_total=100, **{busy: 5.0, late: 1.0, pb1: 3.0}), [], 0.0, 10.0)
    assert first.output_rate is None and first.stages == [] and first.cache_hits is None
    second = tracker.take(
        reply(
            tokens_given_out_total=300,
            prefix_cache_queries_total=100,
            prefix_cache_hits_total=25,
            **{busy: 6.0, late: 1.5, pb1: 3.2, pb3: 0.1, no_work: 0.2, 'recent_tbt_seconds{quantile="0.5"}': 0.02},
        ),
        [],
        0.0,
        12.0,
    )
    assert second.output_rate == 100.0 and second.cache_hits == 0.25 and second.tbt == [0.02]
    ((stage),) = second.stages
    assert (stage.replica, stage.stage, stage.busy, stage.late, stage.bubble) == (0, 0, 0.5, 0.25, 0.15)
    line = next(line for line in drawn(second, 100, 24).splitlines() if line.startswith(" 0.0 "))
    assert "busy  50.0%  bubble 15.0%  late 25.0%" in line
    assert re.search(r" █+▒+!+·+  busy", line)
    for at in (13.0, 14.0, 15.0, 16.0):
        newest = tracker.take(reply(tokens_given_out_total=300), [], 0.0, at)
    assert newest.output_rate == 0.0, "what lies further back than the window is forgotten"
    again = tracker.take(reply(instance=8, tokens_given_out_total=5), [], 0.0, 17.0)
    assert again.output_rate is None, "a restarted server begins anew"


def test_an_iteration_that_spans_clocks_has_no_duration() -> None:
    def record(start: int, end: int) -> IterationRecord:
        stages = [StageTimes(0, start, start + 5, 0), StageTimes(0, end - 5, end, 0)]
        return IterationRecord(0, 1, 2, 0, 1000, 1010, 41_000, stages, 9, 8, 1, 1, 16, 0, 0, 0, 9, 1, 2, 3, 0)

    tracker = Tracker("x")
    snapshot = tracker.take(reply(), [record(1100, 40_100), record(7_000_000, 40_100)], 0.0, 1.0)
    assert [iteration.milliseconds for iteration in snapshot.iterations] == [None, 39.0]


def test_a_bar_is_as_wide_as_it_says_and_shows_all_that_is_there() -> None:
    parts = [(1, "a", ""), (9_000, "b", ""), (0, "c", ""), (3, "d", "")]
    for width in range(4, 90):
        text = bar(parts, 9_004, width).plain
        assert len(text) <= width and text[0] == "a" and "c" not in text and text.count("b") >= width - 3
    assert bar([(4, "x", "")], 8, 10).plain == "xxxxx"
    assert bar(parts, 0, 10).plain == bar(parts, 10, 0).plain == ""


def test_words_for_numbers() -> None:
    assert [short(v) for v in (None, 0, 812.4, 4_096, 63_499, 1_230_000)] == ["-", "0", "812", "4.1k", "63k", "1.2M"]
    assert [seconds(v) for v in (0.031, 2.414, 12.0, 200.0, 7500.0)] == [
        "31.0 ms",
        "2.41 s",
        "12.0 s",
        "3m20s",
        "2h05m",
    ]
    assert sparkline([0, 1, 2, 4], 4) == "▁▂▄█" and sparkline([], 4) == "" and sparkline([1], 0) == ""
