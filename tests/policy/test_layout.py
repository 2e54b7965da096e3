"""The layout of the packages, read from their syntax trees: readers of jaxprs, and imports.

That no package imports upwards is in `tests.test_contributing`.
"""

import ast
import collections
import functools
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpmodules
import policy
from policy.programs.jaxprs import equations_within, opened, subprograms

PACKAGES = [pathlib.Path(package.__path__[0]) for package in (policy, mpmodules)]
ROOM = "policy.programs"
# The reports' facts of programs, and JAX's listener, which crosses no files for each equation.
READERS = {
    "policy.inspect.traced.float32",
    "policy.inspect.traced.program_facts",
    "mpmodules.calls.plain_layers",
}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Returns the syntax tree of each module, by its dotted name; packages by their own."""
    trees = {}
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            parts = file.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            trees[name] = ast.parse(file.read_text(encoding="utf-8"))
    return trees


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the imported modules, deferred ones included, and the names that they are bound to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else str(node.module), alias.asname or alias.name


@jax.custom_jvp
def _with_jvp(x):
    return 2 * x


@jax.custom_vjp
def _with_vjp(x):
    return 2 * x


_with_jvp.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))
_with_vjp.defvjp(lambda x: (2 * x, None), lambda _, cotangent: (2 * cotangent,))


def holding(x):
    """Runs each kind of equation that holds programs."""
    x = lax.scan(lambda c, _: (c + 1, None), x, None, length=2)[0]
    x = lax.while_loop(lambda c: c.sum() < 0, jnp.sin, x)
    x = lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    x = jax.jit(jnp.tanh)(jax.checkpoint(jnp.sin)(_with_jvp(_with_vjp(x))))
    return lax.reduce(x, 0.0, lambda a, b: a + b, (0,)), x.at[0].add(1.0)


def parameters_of_programs() -> set[str]:
    body, _ = opened(jax.make_jaxpr(holding)(jnp.ones(3)))
    return {one.parameter for equation in equations_within(body) for one in subprograms(equation)}


def words_of_jaxprs(tree: ast.Module, parameters: set[str]) -> Iterator[str]:
    """Yields what a module reads of jaxprs: attributes, names of parameters that hold programs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from {node.attr} & {"get_bind_params", "current_name_stack"}
        if isinstance(node, ast.ImportFrom):
            yield from {alias.name for alias in node.names} & {"current_name_stack"}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from {node.value} & ({"cond_nconsts", "body_nconsts"} | parameters)


@pytest.mark.slow
def test_equations_and_parameters_of_programs_are_read_in_one_room():
    parameters = parameters_of_programs()
    known = "jaxpr call_jaxpr branches body_jaxpr cond_jaxpr update_jaxpr"
    assert {*known.split()} <= parameters
    found = {
        name: words
        for name, tree in modules().items()
        if not (is_in(name, ROOM) or name in READERS)
        and (words := {*words_of_jaxprs(tree, parameters)})
    }
    assert found == {}


@pytest.mark.slow
def test_one_file_decides_which_parameters_hold_programs():
    types = ("Jaxpr", "ClosedJaxpr")
    found = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if getattr(node, "id", getattr(node, "attr", None)) in types
    }
    assert found == {f"{ROOM}.jaxprs", *READERS}


def test_policy_imports_neither_flax_nor_its_modules():
    found = {
        name
        for name, tree in modules().items()
        if is_in(name, "policy")
        and any(is_in(t, "flax") or is_in(t, "mpmodules") for t, _ in imports(tree))
    }
    assert found == set()


@pytest.mark.slow
def test_no_module_is_imported_for_its_side_effects():
    unread = set()
    for name, tree in modules().items():
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        is_package = any(other.startswith(f"{name}.") for other in modules())
        for target, bound in imports(tree):
            binds_module = target in modules() and bound in (
                target.split(".")[0],
                target.split(".")[-1],
            )
            if binds_module and bound not in read and not is_package:
                unread.add((name, bound))
    assert unread == set()


def defined_in(tree: ast.Module) -> set[str]:
    """Returns the public names that a module defines itself, but for its type variables."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            made_by = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if made_by not in ("TypeVar", "ParamSpec"):
                found.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in found if not name.startswith("_")}


@pytest.mark.slow
def test_no_two_modules_of_policy_define_the_same_public_name():
    places: dict[str, list[str]] = collections.defaultdict(list)
    for name, tree in modules().items():
        if is_in(name, "policy"):
            for defined in defined_in(tree):
                places[defined].append(name)
    assert {"autocast", "Policy", "F32", "Axis"} <= set(places)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
