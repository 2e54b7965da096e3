"""The layout of mpmodules: both wings have one file for one job, and imports have no circle."""

import ast
import functools
from collections.abc import Iterator, KeysView
from pathlib import Path

import pytest

import mpmodules

ROOT = Path(mpmodules.__file__).parent
# Linen has none of these.
ONLY_NNX = {"_training", "_layers/newer_flax"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports() -> dict[str, set[str]]:
    """Returns the modules of mpmodules that each imports, deferred imports included."""
    trees = {name_of(path): ast.parse(path.read_text("utf-8")) for path in ROOT.rglob("*.py")}
    return {name: set(_imported(tree, trees.keys())) for name, tree in trees.items()}


def _imported(tree: ast.Module, known: KeysView[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        if isinstance(node, ast.ImportFrom) and (node.module or "") in known:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else str(node.module)


def reachable(name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = imports()[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_both_wings_have_the_same_files_for_the_same_jobs():
    linen, nnx = (
        {path.relative_to(ROOT / wing).with_suffix("").as_posix() for path in files}
        for wing in ("linen", "nnx")
        if (files := (ROOT / wing).rglob("*.py"))
    )
    assert linen - nnx == set()
    assert nnx - linen == ONLY_NNX


def test_no_file_imports_itself_through_others():
    assert not [name for name in imports() if name in reachable(name)]


@pytest.mark.parametrize(("wing", "other"), [("linen", "nnx"), ("nnx", "linen")])
def test_wings_import_shared_files_alone_and_shared_files_no_wing(wing: str, other: str):
    for name, imported in imports().items():
        if name.startswith(f"mpmodules.{wing}"):
            assert not [module for module in imported if module.startswith(f"mpmodules.{other}")]
        elif not name.startswith(f"mpmodules.{other}"):
            assert not [module for module in imported if module.startswith(f"mpmodules.{wing}")]


def test_no_module_is_imported_for_its_side_effects():
    for path in ROOT.rglob("*.py"):
        if path.name == "__init__.py":
            continue  # a face re-exports
        tree = ast.parse(path.read_text("utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {a.asname or a.name for n in nodes for a in n.names if n.module != "__future__"}
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        kept = {a.asname for n in nodes for a in n.names if a.asname == a.name}  # re-exported
        assert names - kept <= read | _in_annotations(tree), path


def _in_annotations(tree: ast.Module) -> set[str]:
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {name for text in texts if isinstance(text, str) for name in text.split()}
