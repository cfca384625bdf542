"""The ``events`` socket: publishes to whoever listens, holds nobody up, and knows whether anybody does."""

from __future__ import annotations

import zmq

from .wire.sockets import WireContext, bind_publisher, bound_endpoint

#: Subscriptions taken in at a time.
_BURST = 1024
#: Topics that are remembered. Whoever listens subscribes to one or a few.
_MAX_TOPICS = 1024


class Publisher:
    """An XPUB. Raises ``EndpointError`` if the endpoint cannot be bound."""

    def __init__(self, context: WireContext, endpoint: str) -> None:
        self._socket = bind_publisher(context, endpoint)
        self._topics: set[bytes] = set()
        self.endpoint = bound_endpoint(self._socket)

    def watched(self) -> bool:
        """Whether somebody subscribes. Takes in what subscribers have said since: to be called now and then."""
        for _ in range(_BURST):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            # ZeroMQ says a topic's first subscription and its last cancellation, also that of a lost connection.
            if frame[:1] == b"\x01" and len(self._topics) < _MAX_TOPICS:
                self._topics.add(frame[1:])
            elif frame[:1] == b"\x00":
                self._topics.discard(frame[1:])
        return bool(self._topics)

    def publish(self, frame: bytes) -> None:
        """Send to all who have room for it."""
        self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)
