"""What libraries with thread pools of their own read from the environment of a process that computes."""

from __future__ import annotations

from collections.abc import Mapping

#: How often an idle thread of OpenMP (libgomp) looks for work before it sleeps: a tenth of a millisecond or two. By
#: default it is some 300,000 times, and meanwhile our own threads (``kernels/cpu/pool.h``) do not have its core: on
#: two cores that was a third of an iteration of 8 decodes.
_LOOKS = 5000


def library_env(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """To be added to ``environ`` for a process that computes in so many threads. What that says of waiting counts."""
    added = {"OMP_NUM_THREADS": str(threads)}
    if "OMP_WAIT_POLICY" not in environ and "GOMP_SPINCOUNT" not in environ:
        added["GOMP_SPINCOUNT"] = str(_LOOKS)
    return added
