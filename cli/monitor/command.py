"""The command: finds the server, asks it again and again, shows what it says.

It is a client of the control process like any other: status replies for figures and requests, the ``events`` socket
for iterations. A server that is away or restarts is shown as lost until it answers again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq
from rich.console import Console
from rich.live import Live

from ...control.client import AsyncClient
from ...control.wire import IterationRecord, WireError, decode_record
from ...control.wire.sockets import (
    EndpointError,
    Socket,
    WireContext,
    close_context,
    dial_publisher,
    ipc_endpoint,
    new_context,
)
from ..run_dir import running
from .panels import render
from .snapshot import Snapshot, Tracker

#: Rows of requests that are asked for.
ROWS = 64
#: Seconds until a server that does not answer is shown as lost.
PATIENCE_S = 2.0
#: Answers before a picture is saved: its histories are to show something.
PICTURE_ANSWERS = 24
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class NoServer(Exception):
    """Which server to watch is not clear; the text is a sentence for the user."""


def find_endpoint(target: str | None, environ: dict[str, str]) -> str:
    """The clients' endpoint of ``target``: an endpoint, a run directory, a URL of a server of this user on this
    machine, or None for the only one that runs. Raises ``NoServer``."""
    if target is not None and target.startswith(("ipc://", "tcp://")):
        return target
    if target is not None and Path(target).is_dir():
        return ipc_endpoint(Path(target).resolve() / "clients")
    servers = running(environ)
    known = ", ".join(f"{url or path} ({path})" for path, url in servers)
    if target is not None:
        wanted = target.rstrip("/").removesuffix("/v1").replace("//localhost", "//127.0.0.1")
        matching = [path for path, url in servers if url == wanted]
        if not matching:
            raise NoServer(
                f"no server of yours on this machine is at {target}; running: {known or 'none'}."
                " Name its ZeroMQ endpoint (the log of evenflow serve says it)."
            )
        return ipc_endpoint(matching[0] / "clients")
    if len(servers) != 1:
        if not servers:
            raise NoServer("no server of yours runs on this machine: start one with evenflow serve")
        raise NoServer(f"several servers run, name one: {known}")
    return ipc_endpoint(servers[0][0] / "clients")


class _Records:
    """The subscription, made where the server's welcome says, and made anew if it says another place."""

    def __init__(self, context: WireContext) -> None:
        self._context = context
        self._endpoint = ""
        self._socket: Socket | None = None

    def follow(self, endpoint: str) -> None:
        if endpoint != self._endpoint:
            if self._socket is not None:
                self._socket.close(0)
            self._socket = dial_publisher(self._context, endpoint) if endpoint else None
            self._endpoint = endpoint

    def take(self) -> list[IterationRecord]:
        found: list[IterationRecord] = []
        while self._socket is not None:
            try:
                found.append(decode_record(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except WireError:
                continue
        return found


async def snapshots(endpoint: str, interval: float) -> AsyncIterator[Snapshot]:
    """One snapshot every ``interval`` seconds, for ever. Raises ``EndpointError`` for an endpoint that cannot be."""
    context = new_context()
    records = _Records(context)
    tracker = Tracker(endpoint)
    try:
        async with AsyncClient(endpoint, name="monitor", context=context) as client:
            while True:
                began = time.monotonic()
                try:
                    reply = await client.status(PATIENCE_S, ROWS)
                except TimeoutError:
                    yield tracker.lost(time.time())
                else:
                    if client.welcome is not None:
                        records.follow(client.welcome.events)
                    yield tracker.take(reply, records.take(), time.time(), time.monotonic())
                await asyncio.sleep(max(0.0, began + interval - time.monotonic()))
    finally:
        close_context(context)


async def _once(endpoint: str, interval: float, answers: int) -> Snapshot:
    """The last of so many answers, at least two: rates and iterations need a moment. Or the first lost one."""
    stream = snapshots(endpoint, interval)
    try:
        count = 0
        async for snapshot in stream:
            count += 1
            if snapshot.state == "lost" or count >= answers:
                return snapshot
        raise AssertionError("snapshots have no end")
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


async def _watch(endpoint: str, interval: float) -> None:
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async for snapshot in snapshots(endpoint, interval):
            live.update(render(snapshot, *console.size), refresh=True)


async def _print_json(endpoint: str, interval: float) -> None:
    async for snapshot in snapshots(endpoint, interval):
        print(msgspec.json.encode(snapshot).decode(), flush=True)


def _print_once(snapshot: Snapshot, as_json: bool, svg: Path | None) -> None:
    if as_json:
        print(msgspec.json.encode(snapshot).decode())
        return
    # On a terminal its width; a file or pipe gets as much as fits most screens.
    width = None if sys.stdout.isatty() else 100
    console = Console(width=width, height=40, record=svg is not None, highlight=False)
    console.print(render(snapshot, console.width, 40))
    if svg is not None:
        # Its fonts would be fetched from elsewhere; any monospaced one will do.
        picture = _FONT.sub("", console.export_svg(title="evenflow monitor"))
        svg.write_text(picture, encoding="utf-8")


def run_monitor(target: str | None, interval: float, once: bool, as_json: bool, svg: Path | None) -> int:
    """Returns the exit code: 2 if the screen is asked for where there is none, 1 without a server."""
    if not once and not as_json and not sys.stdout.isatty():
        print(
            "evenflow: the output is no terminal, so there is no screen to draw on: use --once for one picture,"
            " --json for one object a refresh.",
            file=sys.stderr,
        )
        return 2
    try:
        endpoint = find_endpoint(target, dict(os.environ))
        if once:
            snapshot = asyncio.run(_once(endpoint, min(interval, 1.0), PICTURE_ANSWERS if svg is not None else 2))
            if snapshot.state == "lost":
                problem = f"no server answers at {endpoint}"
                print(json.dumps({"state": "lost", "error": problem}) if as_json else "", end="\n" if as_json else "")
                print(f"evenflow: {problem}", file=sys.stderr)
                return 1
            _print_once(snapshot, as_json, svg)
        elif as_json:
            asyncio.run(_print_json(endpoint, interval))
        else:
            asyncio.run(_watch(endpoint, interval))
    except (NoServer, EndpointError) as error:
        print(f"evenflow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Who reads has left. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0
