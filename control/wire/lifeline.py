"""What ends a child process when its parent is gone, however the parent ended. Linux only.

The kernel signals the child when the *thread* that started it ends, so parents start children from a thread
that lives as long as they do. The signal is lost if the parent dies before the child asks for it: therefore
the parent's id is compared afterwards.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


class ParentGone(RuntimeError):
    """The parent process ended before its child could ask to be told."""


def die_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send ``number`` to this process when its parent ends.

    ``parent`` is the expected parent's process id; without it, that of the parent at the time of the call.
    Raises ``ParentGone`` if the parent is already another one.
    """
    expected = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != expected:
        raise ParentGone(f"process {expected}, which started this one, has ended")
