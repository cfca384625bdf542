"""Runs of the fault simulator whose control process keeps a journal, written in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from evenflow.control.host import Host
from evenflow.control.journal.recorder import Recorder, decode_items
from evenflow.control.journal.writer import Writer
from evenflow.control.options import ControlOptions
from evenflow.control.server import ControlServer
from faultsim import control as simulated
from faultsim.world import run

#: A run's length, in events.
EVENTS = 500


def record(
    seed: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    ids: bool = False,
    after: Callable[[Writer], None] = lambda writer: None,
) -> list[Writer]:
    """The journals of the lives of control in run ``seed``. ``after`` is called whenever one has taken something."""
    folder.mkdir(exist_ok=True)
    writers: list[Writer] = []

    class Recorded(ControlServer):
        def __init__(self, options: ControlOptions, host: Host) -> None:
            writer = Writer(folder / f"{seed}-{len(writers)}", 1 << 30, b"a key of the test", "test")
            writers.append(writer)

            def take(data: bytes | bytearray, soon: bool) -> None:
                if data:
                    writer.take(decode_items(data))
                if writer.parts:
                    after(writer)

            super().__init__(options, host, Recorder(take, ids))

    monkeypatch.setattr(simulated, "ControlServer", Recorded)
    report = run(seed, EVENTS)
    assert report.problem is None, report.problem
    for writer in writers:
        writer.close()
        assert not writer.note, writer.note
    return [writer for writer in writers if writer.parts]
