"""Where the stages of one replica meet that were started by hand: a directory in the shared memory of their host.

The launcher makes none for them, since they may be on another host. The first stage that needs it does, the last one
that leaves takes it away.
"""

import contextlib
import os
import re
import socket
import stat
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: What ``links`` puts there: names begin with the epoch.
_LINK = re.compile(r"e(\d+)-")


class NoMeeting(OSError):
    """The directory cannot be used here. The text is a sentence that names it."""


def host_identity() -> str:
    """The host's name, and after a slash what only processes that can share memory have in common.

    Containers of one machine may have the same name and kernel, but then not the same shared-memory file system.
    """
    boot, device = "", 0
    with contextlib.suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
        device = _SHARED_MEMORY.stat().st_dev
    return f"{socket.gethostname()[:200]}/{boot}:{device}"


def meet_at(directory: Path, epoch: int) -> None:
    """Make the directory, or check that it is ours, and remove what epochs before ``epoch`` left. Raises
    ``NoMeeting``."""
    try:
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            found = directory.lstat()
            mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
            if not mine:
                raise NoMeeting(f"{directory} is not a directory that belongs to this user alone") from None
        for path in directory.iterdir():
            match = _LINK.match(path.name)
            if match is not None and int(match[1]) < epoch:
                path.unlink(missing_ok=True)
    except NoMeeting:
        raise
    except OSError as error:
        raise NoMeeting(
            f"the stages of this replica cannot meet in {directory} ({error.strerror}):"
            " they must be on one host, as one user"
        ) from None


def part(directory: Path) -> None:
    """Take the directory away if nobody is there any more. Never raises."""
    with contextlib.suppress(OSError):
        directory.rmdir()
