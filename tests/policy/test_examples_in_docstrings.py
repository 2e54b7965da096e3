"""Every public name of policy has an example in its docstring, and all examples run."""

import doctest
import importlib
import pkgutil
from types import ModuleType
from typing import Any

import jax
import pytest

import policy
from policy import losses, reductions, testing

# `LossScale` is a union, and the warning is caught, not called.
WITHOUT = frozenset(("DtypePolicyWarning", "LossScale"))
NAMESPACES = (policy.grads, losses, policy.optim, reductions, policy.sharding, testing)

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(policy.__path__, "policy.")
    if not info.name.endswith("__main__")
)


def public() -> dict[str, Any]:
    """Returns the public objects by name: those of `policy` itself, and the functions of its public
    modules.
    """
    flat = {name: getattr(policy, name) for name in policy.__all__ if name not in WITHOUT}
    flat = {name: value for name, value in flat.items() if not isinstance(value, ModuleType)}
    for module in NAMESPACES:
        flat |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    return flat


PUBLIC = public()


def place_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


EXAMPLES = {
    test.name: test
    for module in MODULES
    for test in doctest.DocTestFinder().find(importlib.import_module(module))
    if test.examples
}


@pytest.mark.cases(fast=1, slow=17)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_runs(name):
    example, output = EXAMPLES[name], []
    if name in map(place_of, PUBLIC.values()):
        example.globs = {}  # a reader copies it as it is, imports included
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with jax.numpy_dtype_promotion("standard"):  # a reader's own setting: optax promotes
        runner.run(example, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)
