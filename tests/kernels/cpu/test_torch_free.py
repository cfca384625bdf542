"""The kernels without torch (check.cpp, check_pool.cpp): under sanitizers, and on another processor emulated."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from evenflow.kernels import cpu
from evenflow.kernels.cpu import build

HERE = Path(__file__).parent
#: Random cases of each kernel, and jobs of the pool.
CASES, JOBS = 25, 20_000
SANITIZED = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: The compiler's own headers use what they leave undefined on purpose, which it tells of when it optimises less.
QUIET = ("-Wno-maybe-uninitialized", "-Wno-uninitialized")
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
    return done.stdout


def compile_check(compiler: str, level: str, target: Path, *options: str) -> None:
    """``check.cpp`` with the kernels of one level, whose own file alone may have that level's instructions."""
    common = (compiler, *build.COMMON, *options, *QUIET, f"-I{build.SOURCES}")
    of_level = build.LEVELS.get(platform.machine(), {}).get(level, ())
    part = target.with_suffix(".o")
    run(*common, *of_level, "-c", str(build.SOURCES / "level.cpp"), "-o", str(part))
    run(*common, f"-DCHECKED=level_{level}", str(HERE / "check.cpp"), str(part), "-o", str(target))


def native() -> str:
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    return compiler


@pytest.mark.parametrize("best", [False, True], ids=["baseline", "best"])
def test_kernels_hold_under_sanitizers(best: bool, tmp_path: Path) -> None:
    """The level that every processor has, and the one that this processor uses."""
    compiler = native()
    assert cpu.available()
    level = cpu.levels()[-1 if best else 0]
    program = tmp_path / "check"
    compile_check(compiler, level, program, *SANITIZED)
    assert run(str(program), "1", str(CASES)) == f"{level}: {CASES} cases, 0 wrong\n"


def test_kernels_hold_on_arm(tmp_path: Path) -> None:
    """Its baseline has NEON: paths of its own in ``whole.h`` and other numbers of registers everywhere."""
    if shutil.which(ARM_COMPILER) is None or shutil.which(ARM_EMULATOR) is None:
        pytest.skip(f"{ARM_COMPILER} and {ARM_EMULATOR} are not installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    program = tmp_path / "check"
    compile_check(ARM_COMPILER, "baseline", program, "-static")
    assert run(ARM_EMULATOR, str(program), "2", str(CASES)) == f"baseline: {CASES} cases, 0 wrong\n"


def test_the_pool_has_no_race(tmp_path: Path) -> None:
    program = tmp_path / "check_pool"
    options = ("-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{build.SOURCES}")
    run(native(), *build.COMMON, *options, str(HERE / "check_pool.cpp"), "-o", str(program))
    assert run(str(program), str(JOBS)) == f"{JOBS + JOBS // 4} jobs, 0 wrong\n"


def test_a_kernel_that_is_wrong_is_found(tmp_path: Path) -> None:
    """What the others rely on: the checks see a product that is missing."""
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    rows = sources / "rows.h"
    text = rows.read_text()
    planted = text.replace("for (; i < size; ++i) sum += wide(x[i]) * wide(x[i]);", "")
    assert planted != text, "the line that the test takes out is there no longer"
    rows.write_text(planted)
    program = tmp_path / "check"
    include = (f"-I{sources}", "-DCHECKED=level_baseline", str(HERE / "check.cpp"), str(sources / "level.cpp"))
    run(native(), *build.COMMON, "-O0", *QUIET, *include, "-o", str(program))
    done = subprocess.run([str(program), "3", "4"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "norm [" in done.stdout and "matmul" not in done.stdout
