"""``docs/metrics.md`` and ``/metrics`` say the same: a control process's own figures through a gateway's page."""

import asyncio
import re
from array import array
from pathlib import Path

import pytest
from evenflow.control.core.events import Limits
from evenflow.control.core.slo import parse_slo
from evenflow.control.gateway.metrics import Metrics
from evenflow.control.loop_host import LoopHost
from evenflow.control.options import ControlOptions
from evenflow.control.server import ControlServer
from evenflow.control.wire import Result, Started, StatusReply, Submit
from one_worker import WORKER

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def control_reply(folder: Path, monkeypatch: pytest.MonkeyPatch) -> StatusReply:
    """The status of a control process that has served a request and refused another."""

    async def main() -> StatusReply:
        options = ControlOptions(
            f"ipc://{folder}/w", f"ipc://{folder}/c", str(folder), Limits(slo=parse_slo("100ms"))
        )
        server = ControlServer(options, LoopHost(asyncio.get_running_loop()))
        for intake in (server._workers, server._clients):
            monkeypatch.setattr(intake, "send", lambda identity, frames: "sent")
        try:
            server._act(server.supervisor.take(b"w", WORKER, 0.0))
            epoch = server.supervisor.sites[0].epoch
            server._act(server.supervisor.take(b"w", Started(epoch), 0.0))
            session = server.sessions.open(b"c", "test", 0.0)[0]
            ids = array("I", range(1, 9)).tobytes()
            server._submit(session, Submit(5, "r", ids, 8, 2))
            server._submit(session, Submit(6, "bad", ids, 9, 2))
            for step in range(2):
                result = Result(epoch, step, 0, 0, 0, 0, 0, 0, array("I", [42]).tobytes())
                server._act(server.supervisor.take(b"w", result, 0.0))
            return server._status(0, 0)
        finally:
            server.close()

    return asyncio.run(main())


def families(text: str) -> dict[str, tuple[str, set[str]]]:
    """Name to type and labels, of a page in Prometheus' text format; ``_created`` times left out."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            if not name.endswith("_created"):
                found[name] = (kind, set())
        elif not line.startswith("#"):
            full = line.partition("{")[0].partition(" ")[0]
            name = full if full in found else re.sub(r"_(bucket|sum|count)$", "", full)
            if name in found:
                found[name][1].update(set(re.findall(r'(\w+)="', line)) - {"model_name", "le"})
                assert 'model_name="m"' in line
    return found


def documented() -> dict[str, tuple[str, set[str]]]:
    rows = re.findall(r"^\| `(evenflow_\w+)` \| (\w+) \|([^|]*)\| ([^|]+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}


def test_the_document_lists_what_is_exposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = control_reply(tmp_path, monkeypatch)
    metrics = Metrics("m", lambda: reply, lambda: True)
    metrics.first_token(0.5, 1)
    metrics.gap(0.1, 2)
    metrics.finished("stop", 1.0, 8, 3)
    metrics.responded(200)
    metrics.refused("invalid_value")
    page = metrics.text().decode()
    assert families(page) == documented()
    assert 'evenflow_requests_refused_total{code="invalid",model_name="m"} 1.0' in page
    assert 'evenflow_requests_ended_total{model_name="m",reason="length"} 1.0' in page
    assert 'evenflow_iterations_by_kind_total{kind="prefill",model_name="m"} 1.0' in page
    assert 'evenflow_stage_iterations_total{model_name="m",replica="0",stage="0"} 2.0' in page
    assert "evenflow_tokens_given_out_total{" in page


def test_units_are_in_the_names() -> None:
    for name, (kind, _) in documented().items():
        assert name.endswith("_total") == (kind == "counter"), name
        if kind == "histogram":
            assert name.endswith("_seconds"), name


def test_figures_that_are_no_metrics_are_left_out() -> None:
    values = {'a{b="1"}': 1.0, 'a{b="2"}': 2.0, "a b": 3.0, "{": 4.0, "prompt_tokens_total": 5.0}
    reply = StatusReply(0, 1, "m", True, False, values)
    page = Metrics("m", lambda: reply, lambda: False).text().decode()
    assert re.findall(r"^evenflow_a\b.*", page, re.MULTILINE) == [
        'evenflow_a{b="1",model_name="m"} 1.0',
        'evenflow_a{b="2",model_name="m"} 2.0',
    ]
    assert "} 3.0" not in page and "} 4.0" not in page and "} 5.0" not in page
