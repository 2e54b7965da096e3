"""Every public name of policy has an example in its docstring, and all examples run."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import pytest

import policy
from policy import losses, reductions, testing

# Names without a docstring of their own to hold an example, and the warning, which is caught, not
# called.
WITHOUT = frozenset(("DtypePolicyWarning", "LossScale", "dtype_to_names"))
PENDING = "policy.optim"  # whose docstrings are still being rewritten

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(policy.__path__, "policy.")
    if not info.name.endswith("__main__")
)


def public() -> dict[str, Any]:
    """Returns the public objects by name: those of `policy` itself, and the functions of its public
    modules.
    """
    flat = {
        name: value
        for name, value in vars(policy).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in WITHOUT
    }
    flat = {name: value for name, value in flat.items() if not value.__module__.startswith(PENDING)}
    for module in (losses, reductions, testing):
        for name, value in vars(module).items():
            if (
                inspect.isfunction(value)
                and value.__module__ == module.__name__
                and not name.startswith("_")
            ):
                flat[f"{module.__name__}.{name}"] = value
    return flat


PUBLIC = public()


def place_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def examples_of(module: str) -> list[doctest.DocTest]:
    return [
        test
        for test in doctest.DocTestFinder().find(importlib.import_module(module))
        if test.examples
    ]


EXAMPLES = {test.name: test for module in MODULES for test in examples_of(module)}


def test_the_public_names_are_found():
    assert {
        "Policy",
        "audit",
        "policy.losses.squared_error",
        "policy.testing.assert_dots_in",
    } <= set(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_an_example(name):
    assert place_of(PUBLIC[name]) in EXAMPLES, f"{name} has no example in its docstring"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_runs(name):
    example, output = EXAMPLES[name], []
    if name in map(place_of, PUBLIC.values()):
        example.globs = {}  # a reader copies it as it is, imports included
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)
