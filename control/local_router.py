"""The clients' socket on this machine: a ROUTER that the event loop serves itself, without a thread of ZeroMQ.

A token to each of hundreds of clients is a message to each of them. ZeroMQ hands every one to its own thread, which
asks the system three times for it; here it is one call, made at once. Peers are ordinary DEALERs (``wire.zmtp``).

Each peer is served as far as its queue goes: what the system has no room for waits, ``hwm`` messages at most, then a
message is refused (``full``). One that does not speak the protocol is disconnected, and so is who announces too
large a frame. Who sends much gets a turn like everybody else: messages are taken a burst at a time, peer by peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import structlog

from .host import Port, Sent, Take
from .sessions import MAX_CLIENTS
from .wire.sockets import CLIENT_HWM, listen_ipc
from .wire.zmtp import GREETING, Incoming, ZmtpError, framed, message

log = structlog.get_logger("evenflow.control")

#: Messages taken before other events get their turn.
BURST = 64
#: Bytes read from a peer at a time.
_READ_BYTES = 1 << 16
#: Messages written at a time.
_WRITE = 64
#: Connections accepted before other events get their turn.
_ACCEPT = 64
#: Connections at a time: room to refuse clients that are too many in words.
MAX_CONNECTIONS = MAX_CLIENTS + 256
#: Who has not shaken hands by then is disconnected, in seconds.
HANDSHAKE_S = 30.0
#: Without descriptors for another connection, the next is awaited after so many seconds.
_PAUSE_S = 1.0


class _Peer:
    """One connection. ``waiting`` are messages, the first perhaps without its beginning, that the system has had no
    room for."""

    __slots__ = ("identity", "incoming", "queued", "since", "socket", "waiting", "write")

    def __init__(self, identity: bytes, made: socket.socket, since: float) -> None:
        self.identity = identity
        self.socket = made
        self.write: Callable[[bytes], int] = made.send
        self.since = since
        self.incoming = Incoming()
        self.waiting: deque[bytes] = deque()
        self.queued = False  #: something has come of it that has not been taken


class LocalRouter:
    """A ``Port`` on the ``ipc://`` endpoint. ``take`` is given a peer's name and the one frame of its message (two
    empty ones if it had several). Messages for peers of other names go to ``beyond``.

    Raises ``EndpointError``.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, endpoint: str, take: Take, beyond: Port | None = None
    ) -> None:
        self.endpoint = endpoint
        self.hwm = CLIENT_HWM
        self._loop = loop
        self._take = take
        self._beyond = beyond
        self._peers: dict[bytes, _Peer] = {}
        self._strangers: dict[bytes, _Peer] = {}  #: that have not shaken hands, the oldest first
        self._number = 0
        self._ready: deque[_Peer] = deque()  #: those of which something has come
        self._scheduled = False
        self._listener = listen_ipc(endpoint)
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._loop.add_reader(self._listener.fileno(), self._accept)

    # ---- out -------------------------------------------------------------------------------------------------

    def send(self, identity: bytes, frames: list[bytes]) -> Sent:
        """Queue a message, and say what became of it."""
        peer = self._peers.get(identity)
        if peer is None:
            return "gone" if self._beyond is None else self._beyond.send(identity, frames)
        waiting = peer.waiting
        if waiting:
            if len(waiting) >= self.hwm:
                return "full"
            waiting.append(message(frames))
            return "sent"
        data = framed(frames[0]) if len(frames) == 1 else message(frames)
        try:
            written = peer.write(data)
        except BlockingIOError:
            written = 0
        except OSError:
            self._drop(peer)
            return "gone"
        if written < len(data):
            self._wait(peer, data[written:])
        return "sent"

    def _wait(self, peer: _Peer, data: bytes) -> None:
        if not peer.waiting:
            self._loop.add_writer(peer.socket.fileno(), self._flush, peer)
        peer.waiting.append(data)

    def _flush(self, peer: _Peer) -> None:
        """The system has room again."""
        waiting = peer.waiting
        try:
            written = peer.socket.sendmsg(list(islice(waiting, _WRITE)))
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
            return
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.popleft())
        if written:
            waiting[0] = waiting[0][written:]
        if not waiting:
            self._loop.remove_writer(peer.socket.fileno())

    # ---- in --------------------------------------------------------------------------------------------------

    def _read(self, peer: _Peer) -> None:
        if peer.queued:
            # It sends faster than it gets its turn.
            return
        try:
            data = peer.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.incoming.feed(data)
        peer.queued = True
        self._ready.append(peer)
        if not self._scheduled:
            self._turn()

    def _turn(self) -> None:
        """Take a burst of what has come."""
        self._scheduled = False
        ready, peers, left = self._ready, self._peers, BURST
        while ready and left > 0:
            peer = ready.popleft()
            if peer.identity not in peers:
                continue
            incoming = peer.incoming
            try:
                messages = incoming.messages(left)
            except ZmtpError as error:
                log.debug("connection refused", role="client", reason=str(error))
                self._drop(peer)
                continue
            if incoming.ready and self._strangers:
                self._strangers.pop(peer.identity, None)
            if incoming.reply:
                reply, incoming.reply = incoming.reply, b""
                if not self._write(peer, reply):
                    continue
            if len(messages) == left:
                ready.append(peer)
            else:
                peer.queued = False
            left -= len(messages)
            for found in messages:
                self._take(peer.identity, [b"", b""] if found is None else [found])
        if ready and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _write(self, peer: _Peer, data: bytes) -> bool:
        """Send what is not a message of ours; whether the peer is there."""
        written = 0
        if not peer.waiting:
            try:
                written = peer.write(data)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(peer)
                return False
        if written < len(data):
            self._wait(peer, data[written:])
        return True

    # ---- peers -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPT):
            try:
                made, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("cannot accept a connection", reason=error.strerror)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_PAUSE_S, self._listen)
                return
            if len(self._peers) >= MAX_CONNECTIONS:
                made.close()
            else:
                self._adopt(made)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _adopt(self, made: socket.socket) -> None:
        made.setblocking(False)
        self._number += 1
        # Names that ZeroMQ makes up have five bytes, and those that peers choose do not begin with a zero.
        identity = b"\0local" + self._number.to_bytes(8)
        peer = self._peers[identity] = self._strangers[identity] = _Peer(identity, made, self._loop.time())
        self._loop.add_reader(made.fileno(), self._read, peer)
        self._write(peer, GREETING)

    def _drop(self, peer: _Peer) -> None:
        """End a connection."""
        if self._peers.pop(peer.identity, None) is None:
            return
        self._strangers.pop(peer.identity, None)
        descriptor = peer.socket.fileno()
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        peer.socket.close()

    def kick(self) -> None:
        """Now and then: end connections that come to nothing."""
        latest = self._loop.time() - HANDSHAKE_S
        for peer in list(self._strangers.values()):
            if peer.since > latest:
                break
            self._drop(peer)
        if self._ready and not self._scheduled:
            self._turn()
        if self._beyond is not None:
            self._beyond.kick()

    def close(self) -> None:
        """End all connections and remove the endpoint."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
        for peer in list(self._peers.values()):
            self._drop(peer)
