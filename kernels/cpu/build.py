"""Compiles the kernels' C++ sources into one library that torch loads. Needs a C++20 compiler; takes seconds.

Run: python -m evenflow.kernels.cpu

The library lies in a folder named by a digest of what it was built from, so that one of other sources is never used:
below the package, or in the user's cache where the package cannot be written to. Every instruction set level is a
file of its own (``level.cpp``, with that level's options); which one runs is decided when the library is loaded.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
ROOT = SOURCES.parents[1]
LIBRARY = "kernels.so"
COMMON = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall")
#: The oldest torch whose stable ABI is asked for: 2.11.
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
#: Options of each level's file.
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "baseline": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c", "-DLEVEL_AVX2"),
        "avx512": (*_AVX512, "-DLEVEL_AVX512"),
        "avx512vnni": (*_AVX512, "-mavx512vnni", "-DLEVEL_VNNI"),
        "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-DLEVEL_VNNI", "-DLEVEL_BF16"),
    },
}


class BuildError(Exception):
    """The kernels cannot be compiled here: one sentence, or the compiler's words."""


def compiler() -> str | None:
    """The C++ compiler: ``CXX``, or the system's."""
    named = os.environ.get("CXX")
    names = (named,) if named else ("c++", "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def digest() -> str:
    """Names a build: sources, options, machine and torch."""
    named = repr((COMMON, TARGET, LEVELS, platform.system(), platform.machine(), torch.__version__))
    found = hashlib.sha256(named.encode())
    for path in _sources():
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def _homes() -> tuple[Path, Path]:
    """Where builds may lie."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return ROOT / "_kernels", cache / "evenflow" / "kernels"


def built() -> Path | None:
    """The library of these very sources, if there is one."""
    name = digest()
    return next((path for home in _homes() if (path := home / name / LIBRARY).is_file()), None)


def build() -> Path:
    """Compile, unless that is done. Processes that want it at once wait for the first. Raises ``BuildError``."""
    if (ready := built()) is not None:
        return ready
    command = compiler()
    if command is None:
        raise BuildError("there is no C++ compiler (CXX, c++, g++, clang++)")
    home = next((home for home in _homes() if _writable(home)), None)
    if home is None:
        raise BuildError(f"neither {_homes()[0]} nor {_homes()[1]} can be written to")
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (ready := built()) is not None:
            return ready
        with tempfile.TemporaryDirectory(prefix=".", dir=home) as scratch:
            _compile(command, Path(scratch))
            if home == ROOT / "_kernels":
                # Of older sources; the cache is for several installations.
                for old in home.iterdir():
                    if not old.name.startswith("."):
                        shutil.rmtree(old, ignore_errors=True)
            folder = home / digest()
            folder.mkdir()
            (Path(scratch) / LIBRARY).rename(folder / LIBRARY)
    return folder / LIBRARY


def _writable(home: Path) -> bool:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    # What lies there is run: nobody else may have put it there.
    return home.stat().st_uid == os.getuid() and os.access(home, os.W_OK)


def _compile(command: str, folder: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    objects: list[str] = []
    for name, options in LEVELS.get(platform.machine(), {"baseline": ()}).items():
        objects.append(str(folder / f"{name}.o"))
        _run(command, *COMMON, *options, "-c", str(SOURCES / "level.cpp"), "-o", objects[-1])
    objects.append(str(folder / "ops.o"))
    include = torch_folder / "include"
    _run(command, *COMMON, TARGET, "-isystem", str(include), "-c", str(SOURCES / "ops.cpp"), "-o", objects[-1])
    libraries = ("-L", str(torch_folder / "lib"), "-ltorch_cpu", "-lc10")
    _run(command, "-shared", *objects, *libraries, "-o", str(folder / LIBRARY))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-2000:]}")
