"""The names of `policy`: those of a training script and of jmp; others in its namespaces."""

import ast
import importlib
import pathlib
import subprocess
import sys
import types

import pytest

import mpmodules
import policy

NAMESPACES = {"losses", "optim", "quantized", "reductions", "sharding", "testing"}
OF_JMP = {
    *("DynamicLossScale", "LossScale", "NoOpLossScale", "StaticLossScale"),
    *("Policy", "get_policy", "cast_to_full", "cast_to_half", "half_dtype"),
    *("all_finite", "select_tree"),
}
OF_EVERY_LOOP = {
    *("mixed_precision", "apply_gradients", "value_and_grad", "finite_of", "loss_scale_of"),
    *("accumulate_gradients", "split_batch", "state_shardings", "init_from_master"),
}


def declared(file: str) -> dict[str, str]:
    """Returns the names that a face imports for type checkers, and the modules they come from."""
    tree = ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_the_face_has_at_most_45_names():
    assert dir(policy) == sorted(policy.__all__) and len(policy.__all__) <= 45
    assert set(policy.__all__) >= OF_JMP | OF_EVERY_LOOP


def test_only_namespaces_are_modules():
    modules = {n for n in policy.__all__ if isinstance(getattr(policy, n), types.ModuleType)}
    assert modules == NAMESPACES


def test_a_star_import_leaves_policy_alone():
    scope = {"policy": policy}
    exec("from policy import *", scope)
    assert scope["policy"] is policy
    assert set(scope) - {"__builtins__", "policy"} == set(policy.__all__)


@pytest.mark.parametrize("face", ["policy", "policy.inspect"])
def test_type_checkers_see_the_names_that_a_face_loads_late(face):
    module = importlib.import_module(face)
    expected = module._MODULES | dict.fromkeys(getattr(module, "_NAMESPACES", ()), face)
    assert declared(str(module.__file__)) == expected
    for name in module._MODULES:
        assert getattr(module, name) is getattr(importlib.import_module(expected[name]), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_classes_of_results_are_where_the_functions_come_from():
    for function in ("audit", "compare", "estimate", "suggest"):
        returned = getattr(policy, function).__annotations__["return"]
        assert returned in dir(importlib.import_module("policy.inspect"))


@pytest.mark.slow
def test_namespaces_say_what_they_export():
    for module in (getattr(policy, name) for name in NAMESPACES):
        assert dir(module) == sorted(module.__all__)
        assert all(callable(getattr(module, name)) for name in module.__all__)


def test_mpmodules_shows_no_internals():
    assert dir(mpmodules) == sorted(mpmodules.__all__)
    scope: dict[str, object] = {}
    exec("from mpmodules import *", scope)
    assert {"linen", "nnx", "use_policy"} <= set(scope)


def test_classes_of_results_are_there_before_a_tool_was_used():
    program = "import policy; print(policy.inspect.RunLog.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "RunLog"


@pytest.mark.parametrize("name", ["mpmodules", "mpmodules.linen", "mpmodules.nnx", "policy.optim"])
def test_an_import_loads_no_tool(name):
    tools = ("policy.inspect", "policy.porting", "policy.command_line")
    program = f"import sys, {name}; print(*(m for m in sys.modules if m.startswith({tools})))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
