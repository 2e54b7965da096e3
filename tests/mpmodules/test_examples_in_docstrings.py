"""Every public function and class of mpmodules has an example, which runs."""

import doctest
import inspect
import types
from collections.abc import Iterator
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import optax
import pytest

from mpmodules import linen, nnx
from mpmodules.functions import (
    activations,
    attention,
    functional,
    fused_attention,
    normalization,
    pooling,
)
from policy import mixed_precision, use_policy

MODULES = (activations, attention, functional, fused_attention, normalization, pooling)
WINGS = (linen, nnx)
NAMES: dict[str, Any] = {
    "flax": flax,
    "jax": jax,
    "jnp": jnp,
    "key": jax.random.key(0),
    "mixed_precision": mixed_precision,
    "optax": optax,
    "use_policy": use_policy,
}
NAMES |= {module.__name__.rpartition(".")[2]: module for module in (*MODULES, *WINGS)}


def own(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields the functions and classes that a module or a wing defines."""
    for name, defined in vars(module).items():
        is_definition = inspect.isfunction(defined) or inspect.isclass(defined)
        if name.startswith("_") or not is_definition:
            continue
        place = defined.__module__
        is_wings = module in WINGS and place.startswith(f"{module.__name__}.")
        if not is_wings and place != module.__name__:
            continue
        yield name, defined


PUBLIC = [
    pytest.param(defined, id=f"{module.__name__}.{name}")
    for module in (*MODULES, *WINGS)
    for name, defined in own(module)
]


@pytest.mark.parametrize("defined", PUBLIC)
def test_the_example_in_the_docstring_runs(defined: Any):
    name = defined.__name__
    ours = (defined.__doc__ or "").partition("Flax's own description:")[0]
    test = doctest.DocTestParser().get_doctest(ours, dict(NAMES), name, None, None)
    assert test.examples, f"{name} has no example."
    report: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not failed, "".join(report)
