"""The HTTP port: bound by the launcher before anything is loaded, then handed to each life of the gateway.

So a taken port is known at once, and while a gateway is being restarted, connections wait in the socket's
queue.
"""

import errno
import socket
from dataclasses import dataclass

from ..control.wire.keys import Role

BACKLOG = 2048


class PortTaken(Exception):
    """The address cannot be bound; the text is the sentence for the user."""


@dataclass(frozen=True, slots=True)
class OpenDoor:
    """A listening socket for workers or clients on other machines, which every life of control takes over."""

    role: Role
    socket: socket.socket
    endpoint: str


def open_door(role: Role, endpoint: str) -> OpenDoor:
    """Bind ``tcp://host:port`` and listen, so that a taken port is known at once and port 0 is chosen once.
    Raises ``PortTaken``."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    listener = listen("0.0.0.0" if host == "*" else host, int(port), "[network]")
    listener.setblocking(False)
    name, bound = listener.getsockname()[:2]
    return OpenDoor(role, listener, f"tcp://[{name}]:{bound}" if ":" in name else f"tcp://{name}:{bound}")


def listen(host: str, port: int, chosen_by: str = "--port") -> socket.socket:
    """Bind and listen. Port 0 takes a free one; ``socket.getsockname`` tells which. Raises ``PortTaken``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise PortTaken(f"Cannot listen on {host}: {error.strerror or error}.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"Port {port} of {host} is taken by another process; choose another with {chosen_by}."
            ) from None
        raise PortTaken(f"Cannot listen on {host} port {port}: {error.strerror}.") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches ``listener``."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
