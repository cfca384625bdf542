"""What becomes of a dialling socket's connection, from its ZeroMQ monitor: in words, for those who wait for it.

ZeroMQ dials again by itself and says nothing, except after the other side has refused it: then it has given up.
"""

import struct

import zmq

from .keys import DialKeys
from .sockets import Socket, prepare_dealer, start_dialling

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
)
#: A problem is told when it has lasted so long, and again after so long, in seconds.
TOLD_AFTER_S = 2.0
TOLD_AGAIN_S = 60.0
#: Event and value, ahead of the endpoint's frame.
_EVENT = struct.Struct("=HI")


def spell(endpoint: str) -> str:
    """``tcp://host:5556`` as people say it: ``host, port 5556``."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"{host}, port {port}" if colon and endpoint.startswith("tcp://") else endpoint


def dial_followed(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    identity: bytes = b"",
    receive_hwm: int | None = None,
    keys: DialKeys | None = None,
) -> "tuple[Socket, Dialling]":
    """As ``sockets.dial_dealer``, with somebody who follows the connection from its first moment."""
    dealer = prepare_dealer(context, endpoint, identity=identity, receive_hwm=receive_hwm, keys=keys)
    dialling = Dialling(dealer, endpoint)
    start_dialling(dealer, endpoint)
    return dealer, dialling


class Dialling:
    """Follows one socket, from before it dials. ``look`` takes in what happened since the last call."""

    def __init__(self, socket: Socket, endpoint: str) -> None:
        self._socket = socket
        self._monitor: Socket = socket.get_monitor_socket(_EVENTS)
        self._place = spell(endpoint)
        #: The other side is there and has let us in.
        self.up = False
        #: Connections that were there and ended: ZeroMQ may have made another since, what was under way is lost.
        self.losses = 0
        #: It refused us: ZeroMQ does not dial again.
        self.refused = False
        self._connected = False
        self._cause = ""
        self._told_at: float | None = None

    def look(self) -> None:
        while True:
            try:
                event, value = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            self._take(event, value)

    def close(self) -> None:
        """Stop following. The socket itself is closed afterwards, by its owner."""
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _take(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected = True
            # Nothing is heard until the handshake has ended, one way or the other.
            self._cause = self._cause or "accepts connections, but does not answer"
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.up, self.refused, self._cause = True, False, ""
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refused = True
            self._cause = "refuses this key: its public key is not in the server's allow-list"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.refused = True
            self._cause = "wants other credentials (is the keys folder missing or the wrong one?)"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._cause = "ends the handshake (is the keys folder missing, or server.pub that of another server?)"
        elif event == zmq.EVENT_CONNECT_RETRIED:
            # The first one after a connection is about its end, of which more is known.
            reached, self._connected = self._connected, False
            if not reached:
                self._cause = "does not answer (is the address right, the server running and the port open?)"
        elif event == zmq.EVENT_DISCONNECTED:
            self.losses += self.up
            self.up = False
            self._cause = self._cause or "has ended the connection"

    @property
    def problem(self) -> str | None:
        """Why there is no connection, as a sentence without its full stop; None if there is one."""
        return None if self.up else f"{self._place} {self._cause or 'has not answered yet'}"

    def complaint(self, now: float) -> str | None:
        """``look``, and the problem if it is time to tell it. ``now`` in seconds, monotonic."""
        self.look()
        if self.up:
            self._told_at = None
        elif self._told_at is None:
            self._told_at = now + TOLD_AFTER_S
        elif now >= self._told_at:
            self._told_at = now + TOLD_AGAIN_S
            return self.problem
        return None
