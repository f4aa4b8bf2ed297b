"""The shape of the house, checked on the sources: layers, sizes, names, readers of fields.

There is no allow-list; the first entry of one needs a record in docs/decisions/.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from fsdpbench.engine.config.strict import StrictModel

ROOT = Path(__file__).resolve().parents[1]
TOP_FOLDERS = ("engine", "bench", "diagnose", "reports")
FLOOR = ("fsdpbench",)
SOURCES = sorted(path for top in TOP_FOLDERS for path in (ROOT / top).rglob("*.py")) + sorted(
    (ROOT / "fsdpbench").glob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BANNED_NAMES = {"utils", "util", "helpers", "common", "misc", "base_utils"}

# Lower number: lower layer. A module may import its own layer and below.
LAYERS = {"floor": 0, "engine": 1, "bench": 2, "diagnose": 3, "reports": 4, "cli": 5}
ENGINE_LAYERS = {
    "config": 0,
    "protocols": 0,
    "tracing": 0,
    "device": 0,
    "topology": 2,
    "launch": 1,
    "optim": 1,
    "parallel": 1,
    "batching": 1,
    "ops": 1,
    "weight_sync": 2,
    "checkpoint": 2,
    "tree": 2,
    "models": 2,
    "setup": 3,
    "step": 3,
    "weight_updates": 3,
    "ranked_engine": 4,
    "fsdp_engine": 4,
    "offload": 2,
    "host_memory": 0,
    "rollout": 4,
    "trainer": 4,
    "algorithms": 5,
    "workflows": 5,
}
TORCH_FREE = [
    "fsdpbench.bench.cli",
    "fsdpbench.bench.records",
    "fsdpbench.bench.store",
    "fsdpbench.diagnose.cli",
    "fsdpbench.diagnose.rules",
    "fsdpbench.engine.config.load",
    "fsdpbench.engine.config.train",
    "fsdpbench.engine.models.facts",
    "fsdpbench.engine.protocols",
    "fsdpbench.engine.topology",
]


def names_of(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "fsdpbench":
        parts = ("fsdpbench", *parts)
    return ".".join(part for part in parts if part != "__init__")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports when it runs, nested imports included."""
    found: set[str] = set()
    type_only = {
        inner
        for node in ast.walk(tree_of(path))
        if is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree_of(path)):
        if node in type_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module.count(".") < 2:  # `from fsdpbench.engine import config` names a module
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] == "fsdpbench"}


def layer_of(module: str) -> str:
    parts = module.split(".")
    if parts[-1] == "cli" and len(parts) == 3:
        return "cli"
    return parts[1] if len(parts) > 1 and parts[1] in TOP_FOLDERS else "floor"


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", SOURCES, ids=names_of(SOURCES))
def test_imports_run_down(path):
    module = module_of(path)
    for target in sorted(imports_of(path)):
        assert LAYERS[layer_of(target)] <= LAYERS[layer_of(module)], f"{module} imports {target}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.parts[len(ROOT.parts)] == "engine"], ids=module_of
)
def test_engine_layers_run_down(path):
    module = module_of(path).split(".")
    if len(module) < 3:
        return
    own = ENGINE_LAYERS[module[2]]
    for target in sorted(imports_of(path)):
        parts = target.split(".")
        if len(parts) > 2 and parts[1] == "engine" and parts[2] in ENGINE_LAYERS:
            assert ENGINE_LAYERS[parts[2]] <= own, f"{'.'.join(module)} imports {target}"


def test_no_two_packages_import_each_other():
    edges: set[tuple[str, str]] = set()
    for path in SOURCES:
        own = module_of(path).split(".")
        if layer_of(module_of(path)) == "cli":
            continue  # the top layer, wherever it lies
        for target in imports_of(path):
            other = target.split(".")
            for depth in (2, 3):
                if len(own) >= depth and len(other) >= depth and own[:depth] != other[:depth]:
                    edges.add((".".join(own[:depth]), ".".join(other[:depth])))
    mutual = sorted({tuple(sorted(edge)) for edge in edges if edge[::-1] in edges})
    assert not mutual


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=names_of(SOURCES + TESTS))
def test_sizes(path):
    assert len(path.read_text().splitlines()) <= 400
    for function in functions_of(path):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= 100, f"{function.name}: {length} lines"


def test_most_functions_fit_a_screen():
    lengths = sorted(
        (function.end_lineno or 0) - function.lineno + 1
        for path in SOURCES
        for function in functions_of(path)
    )
    assert lengths[int(len(lengths) * 0.9)] <= 40


@pytest.mark.parametrize("path", SOURCES, ids=names_of(SOURCES))
def test_module_names_and_docstrings(path):
    assert path.stem not in BANNED_NAMES
    assert ast.get_docstring(tree_of(path)), "a module says what it is"
    assert path.read_text().isascii()


@pytest.mark.parametrize("path", SOURCES, ids=names_of(SOURCES))
def test_no_catch_all(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            kinds = ast.unparse(node.type) if node.type else "everything"
            caught = {name.strip("() ") for name in kinds.split(",")}
            assert not caught & {"everything", "Exception"}, f"line {node.lineno}"


def test_tests_mirror_the_sources():
    missing = []
    for path in TESTS:
        relative = path.relative_to(ROOT / "tests")
        if relative.parts[0] in TOP_FOLDERS and path.name.startswith("test_"):
            words = path.stem.removeprefix("test_").split("_")
            stems = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
            folder = ROOT / relative.parent
            if not any((folder / f"{stem}.py").exists() for stem in stems):
                missing.append(str(relative))
    assert not missing, "tests without a subject of the same name"


def test_every_module_has_a_test():
    untested = []
    for path in SOURCES:
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in TOP_FOLDERS or path.name == "__init__.py":
            continue
        folder = ROOT / "tests" / relative.parent
        own = folder / f"test_{path.name}"
        if not own.exists() and not list(folder.glob(f"test_{path.stem}_*.py")):
            untested.append(str(relative))
    assert not untested


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_packages_are_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {"fsdpbench"} | {
        module_of(path) for path in SOURCES if path.name == "__init__.py" and path.parent != ROOT
    }
    assert sorted(listed) == sorted(folders)


def config_classes() -> list[type]:
    for path in sorted((ROOT / "engine" / "config").glob("*.py")):
        importlib.import_module(module_of(path))
    found = [StrictModel]
    for klass in found:
        found.extend(klass.__subclasses__())
    return sorted({klass for klass in found if klass.__module__.startswith("fsdpbench.")}, key=str)


def test_every_config_field_has_a_reader():
    """A field is read as an attribute, or refused by name in the table of what is not available."""
    read: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif path.name == "availability.py" and isinstance(node, ast.Constant):
                read.update(str(node.value).split("."))
    unread = [
        f"{klass.__name__}.{name}"
        for klass in config_classes()
        for name in klass.__annotations__
        if name in klass.model_fields and name not in read
    ]
    assert not unread
