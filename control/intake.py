"""A socket in the control process's event loop: read without futures, written without waiting."""

from __future__ import annotations

import asyncio
import errno

import zmq

from .host import Sent, Take
from .wire.sockets import Socket

#: Messages taken from a socket before the other gets its turn.
BURST = 64


class Intake:
    """Reads a socket whenever it has something, and gives ``take`` a message's first frame (of a ROUTER: who sent it)
    and the others. The descriptor only signals changes, so after every send and every read the socket is asked again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: Socket, take: Take) -> None:
        self.socket = socket
        self._loop = loop
        self._take = take
        self._scheduled = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self.drain)

    def drain(self) -> None:
        """Take in what is there, at most a burst of it."""
        self._scheduled = False
        for _ in range(BURST):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames[0], frames[1:])
        self.kick()

    def send(self, identity: bytes, frames: list[bytes]) -> Sent:
        """Queue a message, and say what became of it."""
        sent: Sent = "sent"
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            sent = "full"
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            sent = "gone"
        self.kick()
        return sent

    def kick(self) -> None:
        if not self._scheduled and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._scheduled = True
            self._loop.call_soon(self.drain)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
