"""The decision core and what is done beside it in every step, compiled: the same sources through mypyc, for half the
time.

``python -m evenflow.control.build_core`` builds it into ``_compiled/`` of the package. The folder is named by a
digest of what it was built from, so a build of other sources is never used: whoever edits the core gets the
interpreted one until it is built again. Both make the same decisions, byte for byte; without a build, or with
``EVENFLOW_PURE=1``, the core is interpreted.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import MutableSequence
from pathlib import Path

CONTROL = Path(__file__).parent
ROOT = CONTROL.parent
#: Beside the core: the fan-out of tokens, and what is counted of each iteration.
BESIDE = ("fanout.py", "histogram.py", "latency.py", "telemetry.py")


def folder() -> Path:
    """Where a build of these very sources lies, if there is one."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag} {sys.platform} {os.uname().machine}".encode())
    beside = [CONTROL / name for name in BESIDE]
    for path in [*sorted(CONTROL.glob("core/*.py")), *sorted(CONTROL.glob("wire/*.py")), *beside]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return ROOT / "_compiled" / digest.hexdigest()[:16]


def prefer(path: MutableSequence[str]) -> bool:
    """Let imports below the package with this ``__path__`` find the compiled core first; False if there is none."""
    if os.environ.get("EVENFLOW_PURE") == "1":
        return False
    built = folder()
    if not built.is_dir():
        return False
    path.insert(0, str(built))
    sys.path.append(str(built / "lib"))  # what the compiled modules share
    return True
