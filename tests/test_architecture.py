"""Imports point one way, and importing the package stays light. A paragraph in the README would not hold this."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

import nbmemprof

pytestmark = pytest.mark.cost(0.01)  # hundreds of files to read, quickly
PACKAGE = ROOT / "nbmemprof"
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sorted(PACKAGE.rglob("*.py"))}
HEAVY = ("torch", "cupy", "altair", "anywidget", "ipywidgets", "numba", "pandas", "matplotlib", "vl_convert", "pynvml")

# room -> the rooms that its modules may import from, at the top or inside a function
GROUND = {"errors", "units", "_optional", "_cells", "_jit", "_torch_import", "schema", "capture", "heap", "attribution", "tags", "_kv_caches"}
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "_optional": {"errors"},
    "schema": {"errors"},
    "capture": {"errors", "units", "schema"},
    "_asked": {"errors", "capture"},
    "attribution": {"schema", "_stack_words"},
    "_stack_words": {"schema"},
    "tags": {"errors", "_optional", "schema"},
    "_kv_caches": set(),
    "_jit": {"errors", "_optional"},
    "_line": set(),
    "_cells": {"_optional"},
    "_torch_import": {"errors", "_optional"},
    "access": {"errors", "units", "_optional", "access"},  # the warp model: no GPU, no capture
    "gpu": GROUND | {"access", "gpu", "analyses"},  # counters come home as a capture, and are read by an analysis
    "prediction": GROUND | {"allocator", "prediction", "analyses"},
    "searching": GROUND | {"allocator", "prediction", "analyses", "recording", "sources", "searching"},
    "heap": GROUND | {"allocator"},
    "allocator": GROUND | {"allocator"},
    "flags": {"errors", "units", "_optional", "sources", "verbs"},  # looks for the files that declare flags
    "sources": GROUND | {"allocator", "prediction", "gpu", "sources", "flags"},  # the virtual device is the model, a prediction comes from a fake run
    "analyses": {"errors", "units", "schema", "capture", "heap", "allocator", "analyses"},
    "views": GROUND | {"access", "allocator", "analyses", "prediction", "views"},  # of predictions the catalogue of cards
    "memory_stats": {"errors", "units", "_optional", "schema"},
    "history": {"errors", "capture", "analyses"},
    "recording": GROUND | {"sources", "flags", "history"},
    "holding": GROUND | {"holding", "sources", "analyses"},
    "profiling": {"errors", "capture", "recording"},
    "patterns": GROUND | {"recording", "analyses"},
    "buffers": {"errors", "units", "_optional"},
    "watching": GROUND | {"watching", "recording", "analyses"},
    "runs": GROUND | {"watching", "analyses", "history"},
    "comparing": GROUND | {"recording", "analyses"},
    "cuda_cell": GROUND | {"gpu", "flags", "cuda_cell"},
    "verbs": GROUND | {"verbs", "access", "allocator", "gpu", "prediction", "searching", "holding", "sources", "analyses", "views", "flags", "memory_stats", "recording", ""},
    "magics": GROUND | {"_line", "gpu", "prediction", "holding", "sources", "analyses", "views", "verbs", "flags", "history", "memory_stats", "recording"},
}
# A capture shows, derives and reads itself for convenience, a verb speaks to the shell that runs it: such a call goes up, inside the function, and is listed here.
LAZY_UP = {
    *((name, "nbmemprof.magics") for name in MODULES if name.startswith("nbmemprof.verbs.")),
    ("nbmemprof.capture", "nbmemprof.heap"),
    ("nbmemprof.capture", "nbmemprof.sources.torch_snapshot"),
    ("nbmemprof.capture", "nbmemprof.views.first"),
    ("nbmemprof.capture", "nbmemprof.views.report"),
    ("nbmemprof.access._warp", "nbmemprof.views.warp"),
    ("nbmemprof.access._trace", "nbmemprof.views.warp"),
    ("nbmemprof.gpu.probes._frame", "nbmemprof.views.probes"),
    ("nbmemprof.gpu.probes._frame", "nbmemprof.views.charts.probes"),
    ("nbmemprof.searching.result", "nbmemprof.views.max_batch"),
    ("nbmemprof.analyses.fragmentation", "nbmemprof.recording"),  # fragmentation() without a capture takes a picture now
}
FREE = {"", "__main__"}  # the lazy name table and the command line may reach everything


def room(module: str) -> str:
    """The first part below the package: ``nbmemprof.views.first`` is in ``views``."""
    return module.removeprefix("nbmemprof").lstrip(".").split(".")[0]


def imports(source: str) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether it does so when it is itself imported; type-checking blocks left out."""
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.extend((name.name, top) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            whole = [f"{node.module}.{name.name}" for name in node.names]
            found.extend((name if name in MODULES or node.module == "nbmemprof" else str(node.module), top) for name in whole)
        inner = top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            walk(child, inner)

    walk(ast.parse(source), True)
    return found


def wrong_way(module: str, source: str) -> list[str]:
    """Imports of a module that point the wrong way."""
    if room(module) in FREE:
        return []
    assert room(module) in ALLOWED, f"{room(module)} is a new room: say in ALLOWED what it may import"
    wrong = []
    for target, top in imports(source):
        if target.split(".")[0] != "nbmemprof" or room(target) in ALLOWED[room(module)] | {"__version__"}:
            continue
        if top or (module, target) not in LAZY_UP:
            wrong.append(f"{module} imports {target}")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    assert wrong_way(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("nbmemprof.analyses.peak", "from nbmemprof.views import first"),
        ("nbmemprof.sources.cupy_pool", "def start():\n    from nbmemprof import magics"),
        ("nbmemprof.views.text", "from nbmemprof.sources.torch_cpu import source"),
        ("nbmemprof.capture", "from nbmemprof.views import first"),
        ("nbmemprof.schema", "import nbmemprof.capture"),
    ],
)
def test_an_import_the_wrong_way_is_seen(module, line):
    assert wrong_way(module, line)


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) == "analyses"])
def test_analyses_need_polars_and_numpy_and_nothing_else(module):
    outside = {target.split(".")[0] for target, _ in imports(MODULES[module].read_text())} - {"nbmemprof", "polars", "numpy"}
    assert outside <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("module", MODULES)
def test_heavy_packages_are_met_inside_functions(module):
    assert [target for target, top in imports(MODULES[module].read_text()) if top and target.split(".")[0] in HEAVY] == []


def test_only_the_magics_know_ipython_when_imported():
    assert [name for name, path in MODULES.items() if any(top and target.split(".")[0] == "IPython" for target, top in imports(path.read_text()))] == [
        "nbmemprof.magics"
    ]


@pytest.mark.cost(1.2)
def test_importing_everything_loads_nothing_heavy():
    """In a fresh process, with the heavy packages blocked, every module but the command line imports, and does so without them."""
    code = f"""
import importlib, sys
for name in {HEAVY!r}:
    sys.modules[name] = None  # an import of it raises
import nbmemprof
assert not [m for m in sys.modules if m.startswith("nbmemprof.")], "the package alone loads no module of its own"
assert "polars" not in sys.modules
for name in {[m for m in MODULES if not m.endswith("__main__")]!r}:
    importlib.import_module(name)
loaded = [m for m in sys.modules if m.split(".")[0] in {HEAVY!r} and sys.modules[m] is not None]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves():
    for name in nbmemprof.__all__:
        assert getattr(nbmemprof, name) is not None, name
    assert set(nbmemprof.__all__) <= set(dir(nbmemprof))


def test_public_names_are_few():
    assert len(nbmemprof.__all__) <= 45


def test_no_tracked_text_names_a_machine():
    """Paths of the machine that something was written on say nothing to the reader."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    homes = tuple(f"/{name}/" for name in ("work", "root", "farm"))
    for name in listed.stdout.split():
        path = Path(ROOT, name)
        if path.suffix in {".py", ".md", ".ipynb", ".toml", ".cfg", ".txt", ".js", ".cu", ".json"} and path.is_file():
            text = path.read_text(errors="replace")
            assert not [home for home in homes if f'"{home}' in text or f" {home}" in text or f"`{home}" in text or f"'{home}" in text], name


def test_no_module_at_the_top_has_the_name_of_a_public_function() -> None:
    """Importing a module binds its name in the package: it would hide a function of that name."""
    import nbmemprof

    tops = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert tops & set(nbmemprof._NAMES) == set()
