"""The C library's heap, in processes that others send messages to."""

import contextlib
import ctypes

#: Parameters of glibc's ``mallopt``.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Memory of this size and more is the system's own, and goes back to it when it is freed. Few messages are as large.
LARGE_BYTES = 1 << 20


def return_large() -> None:
    """Let large pieces of memory go back to the system when they are freed.

    glibc learns from each large piece that is freed to keep the next ones: a few messages of the largest size that a
    socket takes, of which nothing is left, made a control process larger by 14 MB for good. Told a size, it does not.
    """
    # Other C libraries have no such function, or nothing to be told.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, 2 * LARGE_BYTES)
