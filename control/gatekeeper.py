"""Decides who may dial the control process from another machine: the ZAP handler of its context (RFC 27).

ZeroMQ asks it for every connection whose handshake has proved that the peer owns the key that it shows. It says yes
if the key is in the allow-list of that socket's role. Refusals are counted, and logged once a second at most; nobody
else notices them. Peers that do not get so far, without a key or with that of another server, are known from the
sockets' monitors.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterable, Mapping

import structlog
import zmq

from .intake import Intake
from .options import Door
from .wire.keys import ROLES, Role, ServerKeys, allow_list, server_keys
from .wire.sockets import Socket, bind_tcp, bound_endpoint

log = structlog.get_logger("evenflow.control")

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
#: The allow-lists are read again when a connection comes and they are older than this.
FRESH_S = 1.0
_EVENT = struct.Struct("=HI")
_HANDSHAKES_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Gatekeeper:
    """Made before the sockets that it guards are bound. ``refused`` counts."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: zmq.Context[Socket], keys: ServerKeys) -> None:
        self.refused = 0
        self.keys = keys
        self._loop = loop
        self._lists: dict[str, dict[bytes, str]] = {}
        self._read_at = float("-inf")
        self._complained = float("-inf")
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ENDPOINT)
        self._intakes = [Intake(loop, socket, self._asked)]

    def watch(self, socket: Socket) -> None:
        """Hear of the handshakes on ``socket`` that fail before it comes to a key."""
        self._intakes.append(Intake(self._loop, socket.get_monitor_socket(_HANDSHAKES_FAILED), self._failed))

    def kick(self) -> None:
        for intake in self._intakes:
            intake.kick()

    def close(self) -> None:
        for intake in self._intakes:
            intake.close()

    def _asked(self, identity: bytes, frames: list[bytes]) -> None:
        # From this process's own ZeroMQ: [empty, version, request, domain, address, identity, mechanism, key].
        if len(frames) < 7 or frames[1] != _VERSION:
            return
        domain, address, mechanism = frames[3], frames[4], frames[6]
        key = frames[7] if len(frames) == 8 and mechanism == b"CURVE" else b""
        role = domain.decode("ascii", "replace")
        name = self._list(role).get(key)
        if name is None:
            self._refuse(role, f"its key is not in {role}s", address.decode("ascii", "replace"))
            verdict = [b"400", b"not in the allow-list", b""]
        else:
            log.info("connection allowed", role=role, name=name, address=address.decode("ascii", "replace"))
            verdict = [b"200", b"", name.encode()]
        self._intakes[0].send(identity, [b"", _VERSION, frames[2], *verdict, b""])

    def _list(self, role: str) -> dict[bytes, str]:
        now = time.monotonic()
        if now - self._read_at >= FRESH_S:
            self._read_at = now
            self._lists = {known: allow_list(self.keys.folder, known) for known in ROLES}
        return self._lists.get(role, {})

    def _failed(self, event: bytes, frames: list[bytes]) -> None:
        code = _EVENT.unpack(event)[1]
        no_key = code == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        endpoint = frames[0].decode("ascii", "replace")
        self._refuse("", "it has no key" if no_key else "its handshake is not for this server", f"at {endpoint}")

    def _refuse(self, role: str, reason: str, where: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._complained >= 1.0:
            self._complained = now
            log.warning("connection refused", role=role, reason=reason, address=where, so_far=self.refused)


def open_doors(
    loop: asyncio.AbstractEventLoop,
    context: zmq.Context[Socket],
    sockets: Mapping[Role, Socket],
    doors: Iterable[Door],
    keys: str | None,
    insecure: bool,
) -> Gatekeeper | None:
    """Bind the sockets of both roles to their doors, too; who guards them, if there are ``keys``.

    Raises ``EndpointError`` and ``KeyFault``.
    """
    gatekeeper = None if keys is None else Gatekeeper(loop, context, server_keys(keys))
    for door in doors:
        socket = sockets[door.role]
        guarded = None if gatekeeper is None else gatekeeper.keys
        bind_tcp(socket, door.endpoint, guarded, door.role, insecure=insecure, listener=door.listener)
        endpoint = bound_endpoint(socket)
        if gatekeeper is not None:
            gatekeeper.watch(socket)
        else:
            log.warning("open to whoever reaches it: no keys", endpoint=endpoint)
        log.info("listens", role=door.role, endpoint=endpoint, encrypted=gatekeeper is not None)
    return gatekeeper
