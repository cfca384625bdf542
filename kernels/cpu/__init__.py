"""The C++ kernels for the CPU, and whether this process can use them.

Called by the modules of ``kernels`` that have a C++ path. The library is compiled when first wanted, if a compiler
is there (``build``); without one, or with ``EVENFLOW_KERNELS=torch``, everything is computed in torch operations, and
a log line says so. ``EVENFLOW_KERNELS`` may also name an instruction set level (``levels``).

The operations are ``torch.ops.evenflow.*``; ``ops.cpp`` says what they take.
"""

import logging
import os
from functools import cache

import torch

from . import build

_log = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Whether ``torch.ops.evenflow`` is there. The first call in a process may compile it."""
    wanted = os.environ.get("EVENFLOW_KERNELS", "")
    if wanted == "torch":
        _log.info("kernels: operations of torch, as EVENFLOW_KERNELS asks")
        return False
    try:
        if not _loaded():
            torch.ops.load_library(str(build.build()))
        if wanted and not use_level(wanted):
            _log.warning("kernels: this processor has no level %s, only %s", wanted, ", ".join(levels()))
    except (build.BuildError, OSError) as error:
        _log.warning("kernels: operations of torch, which are slower: %s", error)
        return False
    return True


def _loaded() -> bool:
    """A second library would be refused: whoever edits the sources while a process runs keeps the first."""
    return hasattr(torch.ops.evenflow, "matmul")


def levels() -> list[str]:
    """The instruction set levels of this processor, the best last. Only where ``available``."""
    return torch.ops.evenflow.levels().split()


def use_level(name: str) -> bool:
    """Compute at this level from now on, in the whole process (tests); False if the processor does not have it."""
    return torch.ops.evenflow.use_level(name)
