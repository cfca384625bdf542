"""What the control process tells its clients when a worker turns out to be gone in the middle of a step."""

import asyncio
from array import array
from pathlib import Path

import pytest
from evenflow.control.core.events import Limits
from evenflow.control.host import Sent
from evenflow.control.loop_host import LoopHost
from evenflow.control.options import ControlOptions
from evenflow.control.server import ControlServer
from evenflow.control.wire import Result, Started, Submit, Tick, decode_to_client
from one_worker import WORKER


def test_tokens_are_told_before_their_slot_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result comes; the plan after it cannot be sent. Its token is told first, then the request is paused."""

    async def main() -> list[Tick]:
        options = ControlOptions(f"ipc://{tmp_path}/w", f"ipc://{tmp_path}/c", str(tmp_path), Limits())
        server = ControlServer(options, LoopHost(asyncio.get_running_loop()))
        told: list[Tick] = []

        def tell(_: bytes, frames: list[bytes]) -> Sent:
            message = decode_to_client(frames[0])
            if isinstance(message, Tick):
                told.append(message)
            return "sent"

        gone = False

        def send(_identity: bytes, _frames: list[bytes]) -> Sent:
            return "gone" if gone else "sent"

        monkeypatch.setattr(server.delivery, "_send", tell)
        monkeypatch.setattr(server._workers, "send", send)
        try:
            server._act(server.supervisor.take(b"w", WORKER, 0.0))
            epoch = server.supervisor.sites[0].epoch
            server._act(server.supervisor.take(b"w", Started(epoch), 0.0))
            session, _ = server.sessions.open(b"c", "test", 0.0)
            ids = array("I", range(1, 9)).tobytes()
            server._submit(session, Submit(5, "r", ids, 8, 20))
            sampled = array("I", [42]).tobytes()
            gone = True
            server._act(server.supervisor.take(b"w", Result(epoch, 0, 0, 0, 0, 0, 0, 0, sampled), 0.0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return told
        finally:
            server.close()

    told = asyncio.run(main())
    tokens = [list(memoryview(tick.ids).cast("I")) for tick in told if tick.ids]
    assert tokens == [[42]]
    assert [end.reason for end in told[-1].ends] == ["paused"] and told[-1] is not told[0]
