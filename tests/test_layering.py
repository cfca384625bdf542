"""The folders' imports run one way, and what must not be in the tree is not there (read from the source, not run)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("control", "dataplane", "kernels", "cli")

#: What each folder may take from the package: longest prefix wins.
ALLOWED: dict[str, tuple[str, ...]] = {
    "control": ("control",),
    "control.wire": ("control.wire",),
    "control.core": ("control.core", "control.wire"),
    "dataplane": ("dataplane", "control.wire", "kernels"),
    "dataplane.simulated": ("dataplane", "control.wire", "control.core", "kernels"),
    "kernels": ("kernels",),
    "cli": ("cli", "control", "dataplane", "kernels"),
}
#: The decision core is a function of its events: no clock, no chance, no outside.
NOT_IN_CORE = frozenset(
    [
        "asyncio",
        "concurrent",
        "datetime",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "queue",
        "random",
        "secrets",
        "select",
        "selectors",
        "signal",
        "socket",
        "ssl",
        "structlog",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
        "uuid",
        "uvloop",
        "zmq",
    ]
)
COMPUTES = frozenset({"torch", "numpy", "safetensors", "gguf", "transformers"})


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name below the package, file) of each module."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            yield ".".join(parts), path


MODULES = dict(modules())


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(name: str, path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, imported module): ours as ``.control.wire`` (below the package), others by their full name."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name.replace("evenflow", "", 1) if alias.name.startswith("evenflow") else alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 0:
                yield node, module.replace("evenflow", "", 1) if module.startswith("evenflow") else module
                continue
            above = package[: len(package) - node.level + 1]
            base = ".".join([*above, *module.split(".")] if module else above)
            if module:
                yield node, f".{base}"
            else:
                for alias in node.names:
                    target = f"{base}.{alias.name}" if base else alias.name
                    yield node, f".{target}" if target in MODULES or not base else f".{base}"


def allowed_for(name: str) -> tuple[str, ...]:
    prefix = max((p for p in ALLOWED if name == p or name.startswith(f"{p}.")), key=len)
    return ALLOWED[prefix]


def inside(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_down_only(name: str) -> None:
    for node, imported in imports(name, MODULES[name]):
        if not imported.startswith("."):
            continue
        target = imported[1:]
        # The package itself holds nothing but its version.
        if target not in ("", "__version__"):
            assert any(inside(target, folder) for folder in allowed_for(name)), (
                f"{name}, line {node.lineno}: imports {target}"
            )


@pytest.mark.parametrize("name", [n for n in MODULES if inside(n, "control") or inside(n, "cli")])
def test_control_and_cli_do_without_what_computes(name: str) -> None:
    for node, imported in imports(name, MODULES[name]):
        assert imported.split(".")[0] not in COMPUTES, f"{name}, line {node.lineno}: imports {imported}"


@pytest.mark.parametrize("name", [n for n in MODULES if inside(n, "control.core")])
def test_core_is_sans_io(name: str) -> None:
    for node, imported in imports(name, MODULES[name]):
        assert imported.split(".")[0] not in NOT_IN_CORE, f"{name}, line {node.lineno}: imports {imported}"
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input", "id", "hash"), f"{name}, line {node.lineno}"


@pytest.mark.parametrize("name", MODULES)
def test_imports_are_at_the_top(name: str) -> None:
    """An import of ours inside a function hides a cycle. Commands load late what is heavy: the one use of it."""
    for function in ast.walk(tree_of(MODULES[name])):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("evenflow")):
                assert name.endswith(("cli.main", "_commands", "__main__")), (
                    f"{name}, line {node.lineno}: import inside {function.name}"
                )


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_nouns_of_a_readable_size(name: str) -> None:
    assert not {"utils", "util", "common", "helpers", "misc"} & set(name.split("."))
    lines = MODULES[name].read_text().splitlines()
    assert len(lines) <= 500, f"{name} has {len(lines)} lines"
    if lines:
        assert ast.get_docstring(tree_of(MODULES[name])), f"{name} does not say what it is for"


_WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by the test)", name=name)
sys.meta_path.insert(0, Absent())
for module in MODULES:
    __import__(module)
loaded = BLOCKED & {name.split(".")[0] for name in sys.modules}
assert not loaded, loaded
"""


def run_without_torch(names: list[str]) -> None:
    program = f"BLOCKED = {set(COMPUTES)!r}\nMODULES = {names!r}\n{_WITHOUT_TORCH}"
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_control_and_cli_import_without_torch() -> None:
    names = [f"evenflow.{n}" for n in MODULES if inside(n, "control") or inside(n, "cli")]
    run_without_torch([n for n in names if not n.endswith(".__main__")])
