"""``evenflow keys``: makes the CURVE keys with which workers and clients on other machines are known.

``control/wire/keys.py`` says what is in the folder. Nothing is ever overwritten: a file that is there already is an
error, before anything is written.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..control.wire.keys import ROLES, Role, new_pair
from .errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def _write(files: Iterable[tuple[Path, bytes]]) -> None:
    """New files, mode 0600, in folders of mode 0700. Raises ``UsageError`` for one that exists."""
    files = list(files)
    for path, _ in files:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists and is not overwritten; remove it, or choose another folder or name.")
    for path, key in files:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(key + b"\n")


def make_keys(folder: Path) -> list[str]:
    """Keys of a server, of its workers and of its clients. Returns the lines that say what was made."""
    public, secret = new_pair()
    files = [(folder / "server.key", secret), (folder / "server.pub", public)]
    lines = [f"server public key: {public.decode()}"]
    for role in ROLES:
        public, secret = new_pair()
        files += [(folder / f"{role}.key", secret), (folder / f"{role}s" / f"{role}.pub", public)]
        lines.append(f"{role} public key: {public.decode()}")
    _write(files)
    return [
        *lines,
        f"The control process uses the folder {folder}; server.key never leaves its machine.",
        f"Copy {folder}/server.pub and {folder}/worker.key to machines with workers: evenflow worker --keys FOLDER.",
        f"Copy {folder}/server.pub and {folder}/client.key to machines of clients: evenflow status --keys FOLDER.",
        f"Public keys in {folder}/workers and {folder}/clients are let in; remove one to shut its owner out.",
    ]


def add_peer(folder: Path, role: Role, name: str) -> list[str]:
    """Another worker's or client's key, allowed from now on, in a folder of its own. Returns lines as above."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is not a name: letters, digits, dots, dashes and underscores, at most 64.")
    try:
        server = (folder / "server.pub").read_bytes().strip()
    except OSError:
        raise UsageError(f"{folder} holds no server.pub; make keys first: evenflow keys --out {folder}.") from None
    public, secret = new_pair()
    own = folder / name
    # The allow-list last: nobody is let in whose key could not be written.
    _write(
        [(own / f"{role}.key", secret), (own / "server.pub", server), (folder / f"{role}s" / f"{name}.pub", public)]
    )
    return [
        f"{role} {name} public key: {public.decode()}",
        f"Copy the folder {own} to its machine and remove it here; the server lets it in from now on.",
    ]
