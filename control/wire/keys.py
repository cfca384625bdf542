"""CURVE keys as files: who may dial a ``tcp://`` socket, and how a peer knows that it reached the right server.

A folder of keys, as ``evenflow keys`` makes it; every file is one line, a key in Z85::

    server.key        the server's secret key: only where the control process runs
    server.pub        its public key: wherever somebody dials
    worker.key        the secret key of workers, client.key that of clients
    workers/NAME.pub  public keys that may dial the workers' socket: the allow-list, read anew for new connections
    clients/NAME.pub  and those that may dial the clients' socket

So a worker's machine needs ``server.pub`` and ``worker.key``, a client's ``server.pub`` and ``client.key``. Secret
keys that other users could read are refused, and none of them is ever part of a text.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

Role = Literal["worker", "client"]
ROLES: tuple[Role, ...] = ("worker", "client")

_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
#: No key is longer: what is larger is not read.
_MOST_BYTES = 256


class KeyFault(OSError):
    """Keys are missing or cannot be used. The text is one sentence that names the file."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the control process needs: its secret key, and the folder with the allow-lists."""

    folder: Path
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class DialKeys:
    """What a peer needs to dial: its own pair, and the public key of the only server that it talks to."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)


def server_keys(folder: str | os.PathLike[str]) -> ServerKeys:
    """Raises ``KeyFault``."""
    path = Path(folder)
    return ServerKeys(path, _secret(path / "server.key"))


def dial_keys(folder: str | os.PathLike[str], role: Role) -> DialKeys:
    """Raises ``KeyFault``."""
    path = Path(folder)
    secret = _secret(path / f"{role}.key")
    return DialKeys(_read(path / "server.pub"), zmq.curve_public(secret), secret)


def allow_list(folder: Path, role: Role) -> dict[bytes, str]:
    """Names by public key (32 bytes) of those who may dial. A file that holds no key allows nobody."""
    allowed: dict[bytes, str] = {}
    for path in sorted((folder / f"{role}s").glob("*.pub")):
        try:
            allowed[z85.decode(_read(path))] = path.stem
        except KeyFault:
            continue
    return allowed


def new_pair() -> tuple[bytes, bytes]:
    """(public, secret), in Z85."""
    return zmq.curve_keypair()


def _secret(path: Path) -> bytes:
    secret = _read(path)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFault(f"{path} can be read by other users: chmod 600 {path}")
    try:
        zmq.curve_public(secret)
    except zmq.ZMQError:
        raise KeyFault(f"{path} holds no secret key") from None
    return secret


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise KeyFault(f"cannot read the key {path}: {error.strerror}") from None
    if not _Z85_KEY.fullmatch(text):
        raise KeyFault(f"{path} is not a key: one line of 40 characters is expected, as evenflow keys writes it")
    return text.encode()
