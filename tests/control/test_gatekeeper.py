"""SEC-2: who may dial a ``tcp://`` socket of the control process, and what the others hear."""

import asyncio
import contextlib
import os
import shutil
import socket as system_socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from evenflow.cli.keys import add_peer, make_keys
from evenflow.control.client import AsyncClient, Client
from evenflow.control.core.events import Limits
from evenflow.control.loop_host import LoopHost
from evenflow.control.options import ControlOptions, Door
from evenflow.control.server import TICK_S, ControlServer
from evenflow.control.wire import PROTOCOL_VERSION, LauncherHello, encode
from evenflow.control.wire.dialling import Dialling, dial_followed
from evenflow.control.wire.keys import KeyFault, dial_keys, server_keys
from evenflow.control.wire.sockets import EndpointError, bind_router, bind_tcp, close_context, new_context
from structlog.testing import capture_logs

PATIENCE = 30.0


def listener() -> tuple[system_socket.socket, str]:
    made = system_socket.create_server(("127.0.0.1", 0))
    made.setblocking(False)
    return made, f"tcp://127.0.0.1:{made.getsockname()[1]}"


@asynccontextmanager
async def serving(folder: Path, keys: Path) -> AsyncIterator[tuple[ControlServer, str, str]]:
    """A control process's server in this loop: itself, and where workers and clients dial."""
    (workers, workers_at), (clients, clients_at) = listener(), listener()
    doors = (
        Door("worker", workers_at, os.dup(workers.fileno())),
        Door("client", clients_at, os.dup(clients.fileno())),
    )
    options = ControlOptions(
        f"ipc://{folder}/w", f"ipc://{folder}/c", str(folder), Limits(), doors=doors, keys=str(keys)
    )
    server = ControlServer(options, LoopHost(asyncio.get_running_loop()))

    async def tick() -> None:
        while True:
            server.tick()
            await asyncio.sleep(TICK_S / 5)

    ticking = asyncio.ensure_future(tick())
    try:
        yield server, workers_at, clients_at
    finally:
        ticking.cancel()
        server.close()
        workers.close()
        clients.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def strangers(tmp_path: Path, server: Path) -> Path:
    """Keys of somebody who knows the server, but whom the server does not know."""
    folder = tmp_path / "stranger"
    make_keys(folder)
    shutil.copy(server / "server.pub", folder / "server.pub")
    return folder


def test_who_is_in_the_allow_list_is_let_in_and_nobody_else_is_heard(tmp_path: Path, keys: Path) -> None:
    make_keys(tmp_path / "other")

    async def main() -> None:
        async with (
            serving(tmp_path, keys) as (server, _, at),
            AsyncClient(f"ipc://{tmp_path}/c") as local,
            AsyncClient(at, keys=keys) as remote,
        ):
            await local.wait_connected(PATIENCE)
            await remote.wait_connected(PATIENCE)
            assert server.gatekeeper is not None and server.gatekeeper.refused == 0
            cases = [
                (strangers(tmp_path, keys), "not in the server's allow-list"),
                (tmp_path / "other", "server.pub that of another server?"),
                (None, "is the keys folder missing"),
            ]
            for folder, reason in cases:
                before = server.gatekeeper.refused
                with capture_logs() as logs:
                    async with AsyncClient(at, keys=folder) as refused:
                        await until(lambda was=before: server.gatekeeper and server.gatekeeper.refused > was)
                        with pytest.raises(TimeoutError, match=r"127\.0\.0\.1, port \d+ ") as error:
                            await refused.wait_connected(0.5)
                assert reason in str(error.value)
                warnings = [entry for entry in logs if entry["event"] == "connection refused"]
                assert len(warnings) <= 2, "at most once a second"
                assert local.connected and remote.connected
            status = await remote.status()
            assert status.values["refused_connections_total"] == server.gatekeeper.refused >= 3
            assert len(server.sessions.by_owner) == 2

    run(main)


def test_a_refusal_is_logged_with_the_address_and_without_the_key(tmp_path: Path, keys: Path) -> None:
    stranger = strangers(tmp_path, keys)

    async def main() -> None:
        async with serving(tmp_path, keys) as (_, _, at):
            with capture_logs() as logs:
                async with AsyncClient(at, keys=stranger):
                    await until(lambda: any(entry["event"] == "connection refused" for entry in logs))
            (entry, *_) = (entry for entry in logs if entry["event"] == "connection refused")
            assert entry["role"] == "client" and entry["address"] == "127.0.0.1" and entry["so_far"] == 1
            text = str(logs)
            for path in [*keys.rglob("*.key"), *stranger.rglob("*.key"), *stranger.rglob("*.pub")]:
                assert path.read_text().strip() not in text

    run(main)


def test_a_key_opens_the_door_of_its_role_only(tmp_path: Path, keys: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, keys) as (server, workers_at, _):
            context = new_context()
            try:
                client, as_client = dial_followed(context, workers_at, keys=dial_keys(keys, "client"))
                worker, as_worker = dial_followed(context, workers_at, keys=dial_keys(keys, "worker"))

                def looked(dialling: Dialling) -> Dialling:
                    dialling.look()
                    return dialling

                await until(lambda: looked(as_client).refused and looked(as_worker).up)
                with contextlib.suppress(zmq.Again):  # it may be queued, for a connection that never comes
                    client.send(encode(LauncherHello(PROTOCOL_VERSION, 1)), zmq.NOBLOCK)
                worker.send(b"not a message")
                await until(lambda: server.bad_frames)
                assert server.supervisor._launcher is None
            finally:
                close_context(context)

    run(main)


def test_the_allow_list_is_read_anew(tmp_path: Path, keys: Path) -> None:
    """Somebody added while the server runs is let in, also who was refused before; somebody removed is shut out."""
    stranger = strangers(tmp_path, keys)

    async def main() -> None:
        async with serving(tmp_path, keys) as (server, _, at), AsyncClient(at, keys=stranger) as late:
            await until(lambda: server.gatekeeper and server.gatekeeper.refused)
            shutil.copy(stranger / "clients" / "client.pub", keys / "clients" / "late.pub")
            await late.wait_connected(PATIENCE)
            add_peer(keys, "client", "alice")
            async with AsyncClient(at, keys=keys / "alice") as alice:
                await alice.wait_connected(PATIENCE)
            (keys / "clients" / "alice.pub").unlink()
            await asyncio.sleep(1.1)
            async with AsyncClient(at, keys=keys / "alice") as alice:
                with pytest.raises(TimeoutError, match="not in the server's allow-list"):
                    await alice.wait_connected(1.0)

    run(main)


def test_without_a_gatekeeper_nobody_is_let_in(tmp_path: Path, keys: Path) -> None:
    """Encryption alone is not enough: a context that nobody guards refuses whoever dials."""
    context = new_context()
    try:
        router = bind_router(context, f"ipc://{tmp_path}/w")
        (made, at) = listener()
        bind_tcp(router, at, server_keys(keys), "worker", listener=os.dup(made.fileno()))
        made.close()
        worker, _ = dial_followed(context, at, keys=dial_keys(keys, "worker"))
        worker.send(b"hello")
        assert not router.poll(500)
        local, _ = dial_followed(context, f"ipc://{tmp_path}/w", keys=dial_keys(keys, "worker"))
        local.send(b"hello")
        assert router.poll(10_000) and router.recv_multipart()[1] == b"hello"
    finally:
        close_context(context)


def test_no_keys_no_door(tmp_path: Path, keys: Path) -> None:
    async def main() -> None:
        doors = (Door("client", "tcp://127.0.0.1:0"),)
        for changes, error in (
            ({}, r"without keys.*--insecure"),
            ({"keys": str(tmp_path / "nowhere")}, "nowhere/server.key: No such file"),
        ):
            options = ControlOptions(
                f"ipc://{tmp_path}/w", f"ipc://{tmp_path}/c", str(tmp_path), Limits(), doors=doors, **changes
            )
            with pytest.raises((EndpointError, KeyFault), match=error):
                ControlServer(options, LoopHost(asyncio.get_running_loop()))
        options = ControlOptions(
            f"ipc://{tmp_path}/w", f"ipc://{tmp_path}/c", str(tmp_path), Limits(), doors=doors, insecure=True
        )
        with capture_logs() as logs:
            server = ControlServer(options, LoopHost(asyncio.get_running_loop()))
        at = next(entry["endpoint"] for entry in logs if entry["event"] == "listens")
        assert any(entry["log_level"] == "warning" and entry["endpoint"] == at for entry in logs)
        try:
            async with AsyncClient(at) as client:
                await client.wait_connected(PATIENCE)
        finally:
            server.close()

    run(main)


def test_what_does_not_answer_is_named() -> None:
    context = new_context()
    try:
        for endpoint in ("tcp://127.0.0.1:1", "tcp://no.such.host.invalid:5556"):
            dealer, dialling = dial_followed(context, endpoint)
            assert dialling.problem is not None and "has not answered yet" in dialling.problem
            for _ in range(200):
                dialling.look()
                if "does not answer" in dialling.problem:
                    break
                dialling._monitor.poll(50)
            host, port = endpoint.removeprefix("tcp://").split(":")
            assert dialling.problem.startswith(f"{host}, port {port} does not answer")
            dialling.close()
            dealer.close(0)
    finally:
        close_context(context)


def test_the_synchronous_client_takes_keys(tmp_path: Path, keys: Path) -> None:
    with pytest.raises(KeyFault, match=r"client\.key"):
        Client("tcp://127.0.0.1:1", keys=tmp_path).open()
    with Client("tcp://127.0.0.1:1", keys=keys) as client, pytest.raises(TimeoutError, match=r"127\.0\.0\.1, port 1"):
        client.wait_connected(0.5)
