"""The stubs of both APIs say what the code does: the same names, the same constructors."""

import ast

import flax.nnx
import pytest

from tests.checkers import make_stubs

APIS = pytest.mark.parametrize("api", make_stubs.APIS)
# What the newest Flax has, from which the stubs are written, and the oldest supported does not.
NEWER = set() if hasattr(flax.nnx, "RoPE") else {"RoPE", "_RoPE", "dot_product_attention_with_rope"}


def declared(text: str) -> dict[str, str]:
    """Returns what a stub declares, by name: the statement as text."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name: ast.unparse(node) for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.unparse(node)
    return found


@APIS
def test_a_stub_is_what_the_script_writes(api):
    texts = make_stubs.path_of(api).read_text(), make_stubs.stub_of(api)
    committed, written = map(declared, texts)
    names = {*committed, *written} - NEWER
    stale = {name for name in names if committed.get(name) != written.get(name)}
    assert not stale, "run `python -m tests.checkers.make_stubs` with the newest supported Flax"


@pytest.mark.cases(fast=1)
@APIS
def test_a_stub_names_all_that_the_api_exports(api):
    names = declared(make_stubs.path_of(api).read_text())
    public = {name for name in dir(make_stubs.APIS[api]) if not name.startswith("_")}
    imported_for_itself = {"annotations"} | ({"Any"} if api == "linen" else set())
    assert public - imported_for_itself <= set(names)
    for name in set(names) - NEWER:
        if not name.startswith("_") and name != "VariableState":  # an alias that only warns
            assert hasattr(make_stubs.APIS[api], name), name
