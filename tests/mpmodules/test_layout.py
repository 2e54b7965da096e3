"""The layout of mpmodules: both APIs have one file for one job, and imports have no circle."""

import functools
from pathlib import Path

import pytest

import mpmodules
from tests.policy.test_layout import imports, is_in, modules

ROOT = Path(mpmodules.__file__).parent
# Linen has none of these.
ONLY_NNX = {"_training", "_quantized", "_layers/newer_flax"}


@functools.cache
def imported() -> dict[str, set[str]]:
    """Returns the modules of mpmodules that each imports, deferred imports included."""
    trees = {name: tree for name, tree in modules().items() if is_in(name, "mpmodules")}
    return {
        name: {target for target, _ in imports(tree)} & trees.keys() for name, tree in trees.items()
    }


def reachable(name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = imported()[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_both_apis_have_the_same_files_for_the_same_jobs():
    linen, nnx = (
        {path.relative_to(ROOT / api).with_suffix("").as_posix() for path in files}
        for api in ("linen", "nnx")
        if (files := (ROOT / api).rglob("*.py"))
    )
    assert linen - nnx == set()
    assert nnx - linen == ONLY_NNX


def test_no_file_imports_itself_through_others():
    assert not [name for name in imported() if name in reachable(name)]


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("api", "other"), [("linen", "nnx"), ("nnx", "linen")])
def test_apis_import_shared_files_alone_and_shared_files_no_api(api: str, other: str):
    for name, targets in imported().items():
        if name.startswith(f"mpmodules.{api}"):
            assert not [module for module in targets if module.startswith(f"mpmodules.{other}")]
        elif not name.startswith(f"mpmodules.{other}") and name != "mpmodules":
            assert not [module for module in targets if module.startswith(f"mpmodules.{api}")]
