"""The one place where ZeroMQ sockets are made, so that every socket has the same limits.

- LINGER 0: a process never waits at its end for a peer that is gone. Where a last message must get out, its
  sender waits for an answer instead.
- Bounded queues: a full one raises ``zmq.Again`` (``zmq.NOBLOCK``), it never drops in silence; a ROUTER
  refuses to send to an unknown peer (``zmq.ZMQError`` with ``EHOSTUNREACH``).
- MAXMSGSIZE: a peer that announces a larger frame is disconnected before memory is set aside for it.
- A context knows the process that made it and refuses to work in a forked child.
- ``ipc://`` paths are checked for the system's limit, and a socket file is only replaced if nobody listens on
  it; only the own user may connect. ``tcp://`` binds to loopback addresses.

Callers: the control process, its clients and its workers. No event loop is
assumed.
"""

import contextlib
import ipaddress
import os
import socket as system_socket
import stat
from pathlib import Path
from typing import Any

import zmq

from .fields import MAX_MESSAGE_BYTES

Socket = zmq.Socket[bytes]

#: Bytes of an ``ipc://`` path: ``sockaddr_un`` has 108 with its closing zero.
MAX_IPC_PATH = 107
#: Messages in a socket's queue, each way and peer. Result, plan and tick are one message each.
DEFAULT_HWM = 4096
#: Messages on their way to one client, at each end: a client that reads too slowly gets few large ones soon.
CLIENT_HWM = 256
#: How soon a lost connection is tried again, in milliseconds, and the slowest retry.
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500


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
    send_hwm: int | None = None,
) -> Socket:
    """A ROUTER on ``endpoint``. With ``handover`` a peer that dials again under its old name replaces itself.
    ``hwm`` bounds its queues, ``send_hwm`` those of what it sends."""
    router = _make(context, zmq.ROUTER, hwm)
    if send_hwm is not None:
        router.setsockopt(zmq.SNDHWM, send_hwm)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, int(handover))
    return _bind(router, endpoint)


def bind_clients(context: zmq.Context[Socket], endpoint: str) -> Socket:
    """The control process's ROUTER for its clients."""
    return bind_router(context, endpoint, send_hwm=CLIENT_HWM)


def dial_dealer(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    identity: bytes = b"",
    hwm: int = DEFAULT_HWM,
    receive_hwm: int | None = None,
) -> Socket:
    """A DEALER to ``endpoint``, which need not exist yet. It dials again by itself whenever the peer is lost.
    ``hwm`` bounds its queues, ``receive_hwm`` that of what it has not read."""
    dealer = _make(context, zmq.DEALER, hwm)
    if receive_hwm is not None:
        dealer.setsockopt(zmq.RCVHWM, receive_hwm)
    if identity:
        dealer.setsockopt(zmq.ROUTING_ID, identity)
    return _connect(dealer, endpoint)


def client_socket(context: zmq.Context[Socket], endpoint: str) -> Socket:
    """A client's DEALER to the control process."""
    return dial_dealer(context, endpoint, receive_hwm=CLIENT_HWM)


def bound_endpoint(socket: Socket) -> str:
    """Where a socket listens: the real port after a bind to port 0 (``tcp://127.0.0.1:0``)."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def ipc_endpoint(path: str | os.PathLike[str]) -> str:
    """The endpoint of a socket file. Raises ``EndpointError`` if its path is too long for the system."""
    endpoint = f"ipc://{os.fspath(path)}"
    _check_ipc(endpoint)
    return endpoint


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
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise EndpointError(f"cannot dial {endpoint}: {error}") from None
    except EndpointError:
        socket.close(0)
        raise
    return socket


def _bind(socket: Socket, endpoint: str) -> Socket:
    try:
        if endpoint.startswith("ipc://"):
            path = _check_ipc(endpoint)
            _clear_stale(path)
            socket.bind(endpoint)
            path.chmod(0o600)
        elif endpoint.startswith("tcp://"):
            _check_tcp(endpoint)
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


def _check_tcp(endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise EndpointError(f"cannot bind {endpoint}: {port!r} is no port")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise EndpointError(
            f"cannot bind {endpoint}: other machines could reach it, without encryption or authentication;"
            " bind 127.0.0.1 or an ipc:// path"
        )
