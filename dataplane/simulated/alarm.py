"""A descriptor that becomes readable at a set time, so that a poll loop wakes to the microsecond.

It is Linux's timerfd, which Python itself has from 3.13 on.
"""

import ctypes
import os
import time
import weakref

_ABSOLUTE = 1


class _Spec(ctypes.Structure):
    """C's ``itimerspec``: interval (unused here) and value, in seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """One timer on the clock of ``time.monotonic``, not set at first."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._set = libc.timerfd_settime
        self._set.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Spec), ctypes.c_void_p)
        self.descriptor: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "no timer descriptor")
        weakref.finalize(self, os.close, self.descriptor)

    def set(self, at_s: float) -> None:
        """Readable from ``at_s`` on, which may have passed, and not before."""
        seconds, nanoseconds = divmod(max(1, round(at_s * 1e9)), 1_000_000_000)
        if self._set(self.descriptor, _ABSOLUTE, _Spec(0, 0, seconds, nanoseconds), None):
            raise OSError(ctypes.get_errno(), "the timer cannot be set")
