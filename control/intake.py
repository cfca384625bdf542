"""A socket in the control process's event loop: read without futures, written without waiting."""

from __future__ import annotations

import asyncio
import errno

import zmq

from .host import Sent, Take
from .wire.sockets import Socket

#: Plain numbers: another frame of the same message follows, or none.
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
#: Messages taken from a socket before the other gets its turn.
BURST = 64


class Intake:
    """Reads a socket whenever it has something, and gives ``take`` a message's first frame (of a ROUTER: who sent it)
    and the others. The descriptor only signals changes, and whoever sends may have taken the signal: so the socket is
    asked again after every read, and once the sends at hand are done.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: Socket, take: Take) -> None:
        self.socket = socket
        self._loop = loop
        self._take = take
        # What ``send_multipart`` calls in the end, after it has looked at every frame twice.
        self._send = super(zmq.Socket, socket).send
        self._scheduled = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self.drain)

    def drain(self) -> None:
        """Take in what is there, at most a burst of it."""
        self._scheduled = False
        if self.socket.closed:
            return
        for _ in range(BURST):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames[0], frames[1:])
        self.kick()

    def send(self, identity: bytes, frames: list[bytes]) -> Sent:
        """Queue a message, and say what became of it."""
        if not self._scheduled:
            self._look_later()
        send = self._send
        try:
            send(identity, _MORE)
            if len(frames) > 1:
                for frame in frames[:-1]:
                    send(frame, _MORE)
            send(frames[-1], _LAST)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return "gone"
        return "sent"

    def kick(self) -> None:
        """Look whether there is something to be read."""
        if not self._scheduled and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._look_later()

    def _look_later(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self.drain)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
