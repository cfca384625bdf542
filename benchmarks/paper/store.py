"""What costs minutes to find, kept in ``benchmarks/out/paper`` by what it depends on: its settings and the code.

The code is the modules that ``START`` imports, directly or through others, as far as they belong to this package,
without their comments and docstrings; and the devices. So a result is never taken for that of other code, and a run
that was ended goes on where it was.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "benchmarks" / "out" / "paper"
#: What all simulated runs are made by.
START = ("dataplane/simulated/capacity.py", "dataplane/simulated/figures.py", "dataplane/simulated/traces.py")


def kept(name: str, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of ``make``, or what it gave when it was called with the same settings and code before."""
    path = where(name, settings)
    if path.exists():
        return json.loads(path.read_bytes())["found"]
    found = make()
    OUT.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"settings": settings, "code": code(), "found": found}, indent=1))
    fresh.replace(path)
    return found


def where(name: str, settings: Mapping[str, Any]) -> Path:
    """The file of a result."""
    key = hashlib.sha256(f"{code()} {json.dumps(settings, sort_keys=True)}".encode()).hexdigest()[:12]
    return OUT / f"{name}-{key}.json"


@cache
def code(root: Path = ROOT) -> str:
    """A digest of the code that results depend on."""
    digest = hashlib.sha256()
    for path in sorted(sources(root)):
        tree = ast.parse(path.read_bytes())
        _drop_docstrings(tree)
        digest.update(f"{path.relative_to(root)}\0{ast.dump(tree)}\0".encode())
    for path in sorted((root / "dataplane" / "simulated" / "devices").glob("*.json")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def sources(root: Path = ROOT) -> set[Path]:
    """All modules of the package that results depend on."""
    found: set[Path] = set()
    todo = [root / name for name in START]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                names = [folder / name.name for name in node.names]
                for module in (folder, folder / "__init__", *names):
                    if (file := module.with_suffix(".py")).is_file():
                        todo.append(file)
    return found


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                node.body = body[1:]
