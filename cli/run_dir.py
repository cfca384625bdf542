"""The private directories of one server: its sockets, and the shared memory of its stages.

``RunDir.create`` makes them (mode 0700, names that exist nowhere else), ``remove`` takes them away. The
launcher holds a lock in its directory while it lives, so that the next one can take away what a killed one
left behind.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "evenflow-"
_SHARED_MEMORY = Path("/dev/shm")
#: Bytes of a Unix socket's address, the closing zero left out.
_LONGEST_ADDRESS = 107
_LONGEST_NAME = len("/workers")


def _candidates(environ: dict[str, str]) -> Iterable[Path]:
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime)
    yield Path(tempfile.gettempdir())
    yield Path("/tmp")


def _usable(parent: Path) -> bool:
    longest = len(os.fsencode(parent)) + 1 + len(PREFIX) + 8 + _LONGEST_NAME
    return parent.is_absolute() and longest <= _LONGEST_ADDRESS and os.access(parent, os.W_OK | os.X_OK)


def _sweep(parent: Path) -> None:
    """Remove directories of ours in ``parent`` whose launcher is gone: its lock can be taken."""
    for lock in parent.glob(f"{PREFIX}*/lock"):
        with contextlib.suppress(OSError):
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            with lock.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                links = Path((lock.parent / "links-at").read_text())
                if links.name.startswith(PREFIX):
                    shutil.rmtree(links, ignore_errors=True)
                shutil.rmtree(lock.parent, ignore_errors=True)


def running(environ: dict[str, str]) -> list[tuple[Path, str]]:
    """Directory and URL of every server of this user whose launcher lives; the URL is empty before it is known."""
    found: list[tuple[Path, str]] = []
    for parent in dict.fromkeys(_candidates(environ)):
        for lock in sorted(parent.glob(f"{PREFIX}*/lock")):
            with contextlib.suppress(OSError):
                if lock.parent.lstat().st_uid != os.getuid():
                    continue
                with lock.open("rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:
                        url = lock.parent / "url"
                        found.append((lock.parent, url.read_text() if url.exists() else ""))
    return found


@dataclass(frozen=True, slots=True)
class RunDir:
    """``path`` holds the sockets; ``links`` is where neighbouring stages share memory."""

    path: Path
    links: Path
    lock_fd: int

    @property
    def workers_endpoint(self) -> str:
        return f"ipc://{self.path}/workers"

    @property
    def clients_endpoint(self) -> str:
        return f"ipc://{self.path}/clients"

    @property
    def events_endpoint(self) -> str:
        return f"ipc://{self.path}/events"

    @classmethod
    def create(cls, environ: dict[str, str]) -> "RunDir":
        """Make both directories. Raises ``OSError`` when no place will do."""
        parent = next((place for place in _candidates(environ) if _usable(place)), None)
        if parent is None:
            raise OSError("no writable directory with a short enough path for sockets: set XDG_RUNTIME_DIR")
        _sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
            links = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_SHARED_MEMORY))
        else:
            links = path / "links"
            links.mkdir(mode=0o700)
        (path / "links-at").write_text(str(links))
        # Locked before it has its final name: no sweep can find it unlocked.
        fresh = path / "lock.new"
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        fresh.rename(path / "lock")
        return cls(path, links, fd)

    def publish_url(self, url: str) -> None:
        """Let other commands of this user find the server by its URL."""
        fresh = self.path / "url.new"
        fresh.write_text(url)
        fresh.rename(self.path / "url")

    def remove(self) -> None:
        """Take both directories away. Never raises."""
        shutil.rmtree(self.links, ignore_errors=True)
        # Where workers met that were started by hand, on this host.
        for meeting in self.links.parent.glob(f"{self.links.name}.r*"):
            shutil.rmtree(meeting, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock_fd)
