"""Building the C++ kernels: once, named by what it was built from, and what happens where that cannot be."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from evenflow.kernels import cpu
from evenflow.kernels.cpu import build
from evenflow.kernels.linear import Linear, make_linear


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    cpu.available.cache_clear()
    yield
    cpu.available.cache_clear()


def test_a_build_is_found_again() -> None:
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler")
    library = build.build()
    assert library == build.built() == build.build()
    assert library.parent.name == build.digest()


def test_where_there_is_a_compiler_the_kernels_serve() -> None:
    """So that the tests of the kernels are left out without a compiler only, and not for a build that is broken."""
    if build.compiler() is None or os.environ.get("EVENFLOW_KERNELS") == "torch":
        pytest.skip("there is no C++ compiler, or torch was asked for")
    assert cpu.available()


def test_other_sources_or_options_are_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {build.digest()}
    monkeypatch.setattr(build, "COMMON", (*build.COMMON, "-g"))
    names.add(build.digest())
    for source in build.SOURCES.iterdir():
        if source.suffix in (".cpp", ".h"):
            (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.digest() in names
    with (tmp_path / "level.h").open("a") as file:
        file.write("// other\n")
    names.add(build.digest())
    assert len(names) == 3


def test_without_a_compiler_torch_computes_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "_loaded", lambda: False)
    monkeypatch.setattr(build, "_homes", lambda: (tmp_path / "one", tmp_path / "two"))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with caplog.at_level(logging.WARNING):
        assert not cpu.available() and not cpu.available()
    assert [record.message for record in caplog.records] == [
        "kernels: operations of torch, which are slower: there is no C++ compiler (CXX, c++, g++, clang++)"
    ]
    weight = torch.randn(40, 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    layer = make_linear(weight, None, torch.float32)
    assert isinstance(layer, Linear)
    x = torch.ones(16, 20)
    torch.testing.assert_close(layer(x), x @ weight.float().T)


def test_what_the_compiler_says_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(build, "_homes", lambda: (tmp_path / "one", tmp_path / "two"))
    monkeypatch.setattr(build, "COMMON", ("-no-such-option",))
    with pytest.raises(build.BuildError, match="no-such-option"):
        build.build()
    assert [path.name for path in (tmp_path / "one").iterdir()] == [".lock"]


def test_a_folder_of_somebody_else_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_homes", lambda: (tmp_path / "one", tmp_path / "two"))
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    with pytest.raises(build.BuildError, match="written to"):
        build.build()


@pytest.mark.parametrize(("wanted", "said"), [("torch", "False"), ("baseline", "True"), ("no-such", "True")])
def test_the_environment_chooses(wanted: str, said: str) -> None:
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler")
    build.build()
    program = "from evenflow.kernels import cpu; print(cpu.available())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "EVENFLOW_KERNELS": wanted},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == said, done.stderr
    assert ("has no level no-such" in done.stderr) == (wanted == "no-such")
