"""The wheel: every module of the tree is in it, nothing else is, and its metadata is what the README says."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from evenflow import __version__

ROOT = Path(__file__).parents[1]
FOLDERS = ("control", "dataplane", "kernels", "cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is left in the tree, and without the network."""
    base = tmp_path_factory.mktemp("wheel")
    tree = base / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    for folder in FOLDERS:
        copytree(ROOT / folder, tree / folder, ignore=ignore_patterns("__pycache__"))
    result = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", base, tree],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return zipfile.ZipFile(next(base.glob("*.whl")))


def sources() -> set[str]:
    files = {path.relative_to(ROOT).as_posix() for f in FOLDERS for path in (ROOT / f).rglob("*") if path.is_file()}
    return {name for name in files if "__pycache__" not in name} | {"__init__.py", "py.typed"}


def test_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    held = {name.removeprefix("evenflow/") for name in wheel.namelist() if name.startswith("evenflow/")}
    assert held == sources()


def test_wheel_holds_nothing_beside_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"evenflow", f"evenflow-{__version__}.dist-info"}


def test_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"evenflow-{__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "evenflow = evenflow.cli.main:run" in wheel.read(f"{info}/entry_points.txt").decode()


def test_control_and_cli_do_not_depend_on_torch(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(wheel.read(f"evenflow-{__version__}.dist-info/METADATA").decode())
    always = [need for need in metadata.get_all("Requires-Dist") or [] if "extra ==" not in need]
    assert always and not any(need.startswith(("torch", "numpy")) for need in always)
