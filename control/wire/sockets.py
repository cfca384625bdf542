"""The one place where ZeroMQ sockets are made, so that every socket has the same limits.

- LINGER 0: a process never waits at its end for a peer that is gone. Where a last message must get out, its
  sender waits for an answer instead.
- Bounded queues: a full one raises ``zmq.Again`` (``zmq.NOBLOCK``), it never drops in silence; a ROUTER
  refuses to send to an unknown peer (``zmq.ZMQError`` with ``EHOSTUNREACH``).
- MAXMSGSIZE: a peer that announces a larger frame is disconnected before memory is set aside for it.
- A context knows the process that made it and refuses to work in a forked child.
- ``ipc://`` paths are checked for the system's limit, and a socket file is only replaced if nobody listens on
  it; only the own user may connect.
- ``tcp://`` is for CURVE: a bind without keys is refused, on loopback addresses too, unless the caller insists. Peers
  that fall silent are found by ZeroMQ's own heartbeats, whatever they compute.

The control process serves its clients on the same machine by a socket of the system's own (``listen_ipc``).

Callers: the control process, its clients and its workers. No event loop is assumed.
"""

import contextlib
import os
import socket as system_socket
import stat
from pathlib import Path
from typing import Any

import zmq

from .fields import MAX_MESSAGE_BYTES
from .keys import DialKeys, Role, ServerKeys

Socket = zmq.Socket[bytes]

#: Bytes of an ``ipc://`` path: ``sockaddr_un`` has 108 with its closing zero.
MAX_IPC_PATH = 107
#: Messages in a socket's queue, each way and peer. Result, plan and tick are one message each.
DEFAULT_HWM = 4096
#: Messages on their way to one client, at each end: a client that reads too slowly gets few large ones soon.
CLIENT_HWM = 256
#: Records that wait for a subscriber, who misses what comes while it is full; nobody else is held up.
EVENTS_HWM = 256
#: A subscriber has nothing to say but its subscriptions, and few of them.
_SUBSCRIPTIONS_HWM = 2
_MAX_SUBSCRIPTION_BYTES = 128
#: How soon a lost connection is tried again, in milliseconds, and the slowest retry.
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500
#: Connections that wait to be accepted on a socket of the system's own.
_BACKLOG = 1024
#: Between machines: how often a peer is asked for a sign of life, and when it is given up, in milliseconds.
_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 10_000
#: Who has not shown its key by then is disconnected.
_HANDSHAKE_MS = 5000


class EndpointError(OSError):
    """An endpoint cannot be used. The text names it and says why."""


class ForkedContext(RuntimeError):
    """A ZeroMQ context was used in another process than the one that made it."""


class WireContext(zmq.Context[Socket]):
    """A context that raises ``ForkedContext`` when a forked child makes a socket with it."""

    # Declared here since a context accepts only attributes of its class.
    _home: int = 0

    def __init__(self, io_threads: int = 1) -> None:
        super().__init__(io_threads)  # pyright: ignore[reportUnknownMemberType]
        self._home = os.getpid()

    def socket(self, *args: Any, **kwargs: Any) -> Socket:
        here = os.getpid()
        if here != self._home:
            raise ForkedContext(
                f"this ZeroMQ context belongs to process {self._home}, not to its forked child {here}:"
                " start children with exec and let each make its own context"
            )
        return super().socket(*args, **kwargs)


def new_context(io_threads: int = 1) -> WireContext:
    """A context for this process. Close it with ``close_context``."""
    return WireContext(io_threads)


def close_context(context: zmq.Context[Socket]) -> None:
    """Close all sockets of a context, without waiting for unsent messages, and end it."""
    context.destroy(linger=0)


def bind_router(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    handover: bool = True,
    hwm: int = DEFAULT_HWM,
    receive_hwm: int | None = None,
    insecure: bool = False,
) -> Socket:
    """A ROUTER on ``endpoint``. With ``handover`` a peer that dials again under its old name replaces itself.
    ``hwm`` bounds its queues, ``receive_hwm`` those of what it has not read.

    ``insecure``: a ``tcp://`` endpoint may be without keys. ``bind_tcp`` is for one with them.
    """
    return _bind(_make_router(context, handover, hwm, receive_hwm), endpoint, insecure)


def make_client_router(context: zmq.Context[Socket]) -> Socket:
    """The control process's ROUTER for clients in other places, bound nowhere yet: ``bind_tcp`` comes next."""
    return _make_router(context, True, CLIENT_HWM, DEFAULT_HWM)


def bind_tcp(
    socket: Socket,
    endpoint: str,
    keys: ServerKeys | None,
    role: Role,
    *,
    insecure: bool = False,
    listener: int | None = None,
) -> None:
    """Let peers in other places dial ``socket``, too, which is bound to an ``ipc://`` endpoint already.

    Whoever dials needs a key that the context's ZAP handler knows, asked in the domain of ``role``; without such a
    handler nobody is let in. ``listener`` is the descriptor of a socket that listens already: it is taken over.
    Raises ``EndpointError``, also without ``keys`` unless ``insecure``.
    """
    if not endpoint.startswith("tcp://"):
        raise EndpointError(f"cannot bind {endpoint}: it is not a tcp:// endpoint")
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, role.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if listener is not None:
        socket.setsockopt(zmq.USE_FD, listener)
    _bind(socket, endpoint, insecure or keys is not None)


def bind_publisher(context: zmq.Context[Socket], endpoint: str) -> Socket:
    """An XPUB on ``endpoint``: it drops what a subscriber has no room for, and can be asked who subscribes."""
    publisher = _make(context, zmq.XPUB, EVENTS_HWM)
    publisher.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES)
    # What subscribers say waits in their own connections, and comes in no faster than it is taken.
    publisher.setsockopt(zmq.RCVHWM, _SUBSCRIPTIONS_HWM)
    return _bind(publisher, endpoint, open_tcp=False)


def dial_publisher(context: zmq.Context[Socket], endpoint: str, *, hwm: int = DEFAULT_HWM) -> Socket:
    """A SUB that gets all messages of a publisher. It dials again by itself whenever the publisher is lost."""
    subscriber = _make(context, zmq.SUB, hwm)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    return _connect(subscriber, endpoint)


def dial_dealer(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    identity: bytes = b"",
    hwm: int = DEFAULT_HWM,
    receive_hwm: int | None = None,
    keys: DialKeys | None = None,
) -> Socket:
    """A DEALER to ``endpoint``, which need not exist yet. It dials again by itself whenever the peer is lost.

    ``hwm`` bounds its queues, ``receive_hwm`` that of what it has not read. ``keys`` are for ``tcp://``; on
    ``ipc://`` the file's permissions say who may dial.
    """
    dealer = prepare_dealer(context, endpoint, identity=identity, hwm=hwm, receive_hwm=receive_hwm, keys=keys)
    return _connect(dealer, endpoint)


def prepare_dealer(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    identity: bytes = b"",
    hwm: int = DEFAULT_HWM,
    receive_hwm: int | None = None,
    keys: DialKeys | None = None,
) -> Socket:
    """The same, not yet dialling, for those who follow it from the start; ``start_dialling`` comes next."""
    dealer = _make(context, zmq.DEALER, hwm)
    if receive_hwm is not None:
        dealer.setsockopt(zmq.RCVHWM, receive_hwm)
    if identity:
        dealer.setsockopt(zmq.ROUTING_ID, identity)
    if keys is not None and endpoint.startswith("tcp://"):
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return dealer


def start_dialling(dealer: Socket, endpoint: str) -> None:
    """Raises ``EndpointError`` and closes the socket if ``endpoint`` is none."""
    _connect(dealer, endpoint)


def bound_endpoint(socket: Socket) -> str:
    """Where a socket listens: the real port after a bind to port 0 (``tcp://127.0.0.1:0``)."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def ipc_endpoint(path: str | os.PathLike[str]) -> str:
    """The endpoint of a socket file. Raises ``EndpointError`` if its path is too long for the system."""
    endpoint = f"ipc://{os.fspath(path)}"
    _check_ipc(endpoint)
    return endpoint


def listen_ipc(endpoint: str) -> system_socket.socket:
    """A stream socket of the system that listens on an ``ipc://`` endpoint and never blocks, for those who speak
    ZeroMQ's protocol themselves. Raises ``EndpointError``."""
    path = _check_ipc(endpoint)
    _clear_stale(path)
    listener = system_socket.socket(system_socket.AF_UNIX, system_socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise EndpointError(f"cannot bind {endpoint}: {error.strerror}") from None
    return listener


def _make_router(context: zmq.Context[Socket], handover: bool, hwm: int, receive_hwm: int | None) -> Socket:
    router = _make(context, zmq.ROUTER, hwm)
    if receive_hwm is not None:
        router.setsockopt(zmq.RCVHWM, receive_hwm)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, int(handover))
    return router


def _make(context: zmq.Context[Socket], kind: int, hwm: int) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    return socket


def _connect(socket: Socket, endpoint: str) -> Socket:
    try:
        if endpoint.startswith("ipc://"):
            _check_ipc(endpoint)
        elif endpoint.startswith("tcp://"):
            _watch_peers(socket, endpoint)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise EndpointError(f"cannot dial {endpoint}: {error}") from None
    except EndpointError:
        socket.close(0)
        raise
    return socket


def _watch_peers(socket: Socket, endpoint: str) -> None:
    """Options of TCP connections made from here on."""
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def _bind(socket: Socket, endpoint: str, open_tcp: bool) -> Socket:
    try:
        if endpoint.startswith("ipc://"):
            path = _check_ipc(endpoint)
            _clear_stale(path)
            socket.bind(endpoint)
            path.chmod(0o600)
        elif endpoint.startswith("tcp://"):
            _check_tcp(endpoint, open_tcp)
            _watch_peers(socket, endpoint)
            socket.bind(endpoint)
        elif endpoint.startswith("inproc://"):
            socket.bind(endpoint)
        else:
            raise EndpointError(f"cannot bind {endpoint}: use ipc:// or tcp://")
    except zmq.ZMQError as error:
        socket.close(0)
        raise EndpointError(f"cannot bind {endpoint}: {error}") from None
    except OSError:
        socket.close(0)
        raise
    return socket


def _check_ipc(endpoint: str) -> Path:
    path = endpoint.removeprefix("ipc://")
    size = len(os.fsencode(path))
    if size > MAX_IPC_PATH:
        raise EndpointError(
            f"{endpoint}: the path has {size} bytes, a socket's path at most {MAX_IPC_PATH};"
            " choose a shorter directory"
        )
    if not path.startswith("/"):
        raise EndpointError(f"{endpoint}: the path of a socket must be absolute")
    return Path(path)


def _clear_stale(path: Path) -> None:
    """Remove a socket file whose listener is gone: a killed process leaves it, and ZeroMQ would replace any."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise EndpointError(f"cannot bind ipc://{path}: a file that is no socket is there")
    with system_socket.socket(system_socket.AF_UNIX, system_socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except BlockingIOError:
            pass  # its queue of connections is full: somebody listens
    raise EndpointError(f"cannot bind ipc://{path}: another process listens there")


def _check_tcp(endpoint: str, open_tcp: bool) -> None:
    _, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise EndpointError(f"cannot bind {endpoint}: {port!r} is no port")
    if not open_tcp:
        raise EndpointError(
            f"cannot bind {endpoint} without keys: whoever reaches the port could read and send everything;"
            " make keys with evenflow keys, use an ipc:// path, or insist with --insecure"
        )
