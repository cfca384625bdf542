"""SEC-1: nothing in the package runs data as code, as read from the source. A breach is named by file and line."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for folder in ("control", "dataplane", "kernels", "cli") for path in (ROOT / folder).rglob("*.py")
)

#: Modules that make objects or code of bytes.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
MODULES |= {"imp", "runpy", "code", "codeop", "pty"}
#: Calls that do, by their last names, whatever they are called on.
CALLS = {"eval", "exec", "compile", "__import__", "import_module", "exec_module", "load_module", "run_path"}
CALLS |= {"run_module", "spec_from_loader", "spec_from_file_location", "recv_pyobj", "send_pyobj"}
CALLS |= {"unsafe_load", "full_load"}
#: Calls by their whole names.
NAMED = {"os.system", "os.popen", "pty.spawn", "torch.hub.load", "torch.jit.load", "yaml.load", "yaml.load_all"}
NAMED |= {"subprocess.getoutput", "subprocess.getstatusoutput", "logging.config.listen"}
#: Calls that do unless a keyword says otherwise.
UNLESS = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "np.load": ("allow_pickle", False),
}
#: Calls that let an import find its module elsewhere.
PATHS = frozenset(
    f"sys.{where}.{how}" for where in ("path", "meta_path", "path_hooks") for how in ("append", "insert", "extend")
) | {"site.addsitedir"}
#: File and what is found there: why it may be.
ALLOWED = {
    ("control/compiled.py", "sys.path.append"): "what build_core compiled of this very tree, named by its digest",
}


def breaches(source: str, file: str) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that could run data as code."""
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if not MODULES.isdisjoint(name.split(".")[:1]) or name in ("importlib", "importlib.machinery"):
                yield node.lineno, name
        if isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _calls(node))


def _calls(node: ast.Call) -> Iterator[str]:
    named = ast.unparse(node.func)
    last = named.rpartition(".")[2]
    if named in NAMED or named in PATHS:
        yield named
    elif last in CALLS and named != "re.compile":
        # A pattern is compiled, not code.
        yield last
    if named in UNLESS:
        keyword, wanted = UNLESS[named]
        said = {k.arg: k.value for k in node.keywords}.get(keyword)
        if not (isinstance(said, ast.Constant) and said.value is wanted):
            yield f"{named} without {keyword}={wanted}"
    for k in node.keywords:
        if k.arg == "allow_pickle" and not (isinstance(k.value, ast.Constant) and k.value.value is False):
            yield "allow_pickle"
        if k.arg in ("shell", "trust_remote_code") and not (isinstance(k.value, ast.Constant) and not k.value.value):
            yield k.arg


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sec_1_no_data_is_run_as_code(path: Path) -> None:
    file = str(path.relative_to(ROOT))
    found = [(line, what) for line, what in breaches(path.read_text(), file) if (file, what) not in ALLOWED]
    assert not found, "\n".join(f"{file}:{line}: {what}" for line, what in found)


def test_what_is_allowed_is_there_and_has_a_reason() -> None:
    for (file, what), reason in ALLOWED.items():
        assert reason, f"{file}: why {what} is allowed is not said"
        assert what in {found for _, found in breaches((ROOT / file).read_text(), file)}, f"{file} has no {what}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "from shelve import open",
        "import importlib",
        "import runpy",
        "eval(text)",
        "builtins.exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "importlib.import_module(name)",
        "loader.exec_module(module)",
        "socket.recv_pyobj()",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=chosen)",
        "numpy.load(path)",
        "np.load(path, allow_pickle=True)",
        "os.system(text)",
        "sys.path.insert(0, folder)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_what_runs_data_as_code_is_found(source: str) -> None:
    assert [line for line, _ in breaches(f"x = 1\n{source}\n", "x.py")][:1] == [2]


@pytest.mark.parametrize(
    "source",
    [
        "re.compile(text)",
        "torch.load(path, weights_only=True)",
        "np.load(p, allow_pickle=False)",
        "import importlib.util",
    ],
)
def test_what_does_not_is_not(source: str) -> None:
    assert not list(breaches(source, "x.py"))
