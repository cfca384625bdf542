"""Compiles the decision core, and what belongs to every step, with mypyc (see ``compiled``).

Needs mypy and a C compiler; takes half a minute.

Run: python -m evenflow.control.build_core
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from .compiled import BESIDE, CONTROL, ROOT, folder

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
#: Structs stay as they are: msgspec's own metaclass makes them.
INTERPRETED = frozenset({"__init__.py", "events.py"})


def build() -> Path:
    """Compile the core, unless it is. Raises ``RuntimeError`` with the compiler's words."""
    built = folder()
    if built.is_dir():
        return built
    built.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=built.parent) as scratch:
        tree = Path(scratch) / "evenflow"
        core = tree / "control" / "core"
        tree.mkdir()
        shutil.copy(ROOT / "__init__.py", tree)
        (tree / "control").mkdir()
        (tree / "control" / "__init__.py").touch()
        for name in BESIDE:
            shutil.copy(CONTROL / name, tree / "control")
        for part in ("core", "wire"):
            (tree / "control" / part).mkdir()
            for source in (CONTROL / part).glob("*.py"):
                shutil.copy(source, tree / "control" / part)
        compiled = [m for m in core.glob("*.py") if m.name not in INTERPRETED]
        compiled += [core.parent / name for name in BESIDE]
        modules = sorted(str(module.relative_to(scratch)) for module in compiled)
        command = [sys.executable, "-m", "mypyc", "--follow-imports=silent", *modules]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"MYPYC_OPT_LEVEL": "3"}
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
        libraries = list(Path(scratch).glob(f"*__mypyc{SUFFIX}"))
        if done.returncode or not libraries:
            raise RuntimeError((done.stdout + done.stderr).strip()[-2000:])
        (core.parent / "lib").mkdir()
        for library in libraries:
            library.rename(core.parent / "lib" / library.name)
        shutil.rmtree(core.parent / "wire")
        (core.parent / "__init__.py").unlink()
        shutil.rmtree(core / "__pycache__", ignore_errors=True)
        for old in built.parent.iterdir():
            if not old.name.startswith("."):
                shutil.rmtree(old, ignore_errors=True)
        core.parent.rename(built)
    return built


def main() -> int:
    """Build, and say in a line what there is now."""
    try:
        print(f"decision core: compiled ({build().name})")
    except RuntimeError as error:
        print(f"decision core: interpreted, since it could not be compiled:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
