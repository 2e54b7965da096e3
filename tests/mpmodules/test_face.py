"""Each api's face: everything of Flax's is there; what is ours is documented as Flax's is, and has
an example that runs.
"""

import doctest
import inspect
import re
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
from mpmodules.functions import attention, functional, fused_attention, normalization, reductions
from policy import mixed_precision, use_policy
from tests.mpmodules.apis import BOTH


def changed(api: Any) -> dict[str, tuple[Any, Any]]:
    """Returns what is not Flax's own, by name: ours and Flax's."""
    pairs = {name: (getattr(api.module, name), getattr(api.flax, name)) for name in dir(api.flax)}
    return {
        name: (ours, theirs)
        for name, (ours, theirs) in pairs.items()
        if not name.startswith("_") and ours is not theirs
    }


def layers(api: Any) -> list[tuple[Any, Any]]:
    """Returns the classes of layers, ours and Flax's."""
    return [
        (ours, theirs)
        for name, (ours, theirs) in changed(api).items()
        if isinstance(theirs, type) and issubclass(theirs, api.flax.Module) and name != "Module"
    ]


@pytest.mark.cases(fast=1)
@BOTH
def test_everything_that_flax_exports_is_there_lazy_names_too(api, monkeypatch):
    assert not set(dir(api.flax)) - set(dir(api.module))
    monkeypatch.setattr(api.flax, "of_tomorrow", object(), raising=False)
    assert api.module.of_tomorrow is api.flax.of_tomorrow
    with pytest.raises(AttributeError, match="no_such_layer"):
        _ = api.module.no_such_layer


@BOTH
def test_what_is_not_flaxs_own_is_ours_and_takes_what_flaxs_takes(api):
    assert {"LayerNorm", "Module", "tabulate"} <= set(changed(api))
    for name, (ours, theirs) in changed(api).items():
        assert ours.__module__.startswith(("mpmodules.", "policy.")), name
        assert ours.__name__ == theirs.__name__
        if api.name == "linen" and not isinstance(theirs, type):
            parameters = list(inspect.signature(theirs).parameters)
            taken = [p for p in inspect.signature(ours).parameters if p != "policy_columns"]
            assert taken[: len(parameters)] == parameters, name
    assert len(layers(api)) > 15
    for ours, theirs in layers(api):
        assert issubclass(ours, theirs) and issubclass(ours, api.module.Module), ours


@BOTH
def test_every_layer_has_flaxs_parameters_and_documents_them(api):
    for ours, theirs in layers(api):
        taken = [name for name in inspect.signature(ours).parameters if name != "dtype_policy"]
        assert ["self", *taken] == list(inspect.signature(theirs.__init__).parameters), ours
        calls = [list(inspect.signature(cls.__call__).parameters) for cls in (ours, theirs)]
        assert calls[0] == calls[1], ours
        text = ours.__doc__ or ""
        for name in re.findall(
            r"^ {2,4}(\w+): ", inspect.cleandoc(theirs.__doc__ or ""), re.MULTILINE
        ):
            assert re.search(rf"^ +{name}: ", text, re.MULTILINE), f"{ours.__name__}: {name}"
        assert text.count("  dtype_policy: ") == 1 and text != theirs.__doc__, ours


def test_a_docstring_keeps_the_sections_that_follow_the_arguments():
    text = linen.Sequential.__doc__ or ""
    assert re.search(r"  dtype_policy: (.|\n)*\n\nRaises:\n  ValueError: ", text)


@BOTH
def test_classes_of_users_keep_their_docstrings(api):
    class Documented(api.module.LayerNorm):
        """Says this."""

    assert Documented.__doc__ == "Says this."


@BOTH
def test_a_layer_of_ours_and_its_class_of_flaxs_stand_for_each_other(api):
    ours, flaxs = api.module.LayerNorm, api.flax.LayerNorm
    given = {"num_features": 4, "rngs": flax.nnx.Rngs(0)} if api.name == "nnx" else {}

    class Users(api.module.LayerNorm):
        pass

    for layer in (ours(**given), flaxs(**given)):
        for cls in (ours, flaxs, api.module.Module, api.flax.Module):
            assert isinstance(layer, cls)
        assert not isinstance(layer, api.module.Conv) and not isinstance(layer, Users)
    assert issubclass(flaxs, ours) and not issubclass(flaxs, Users)
    assert not isinstance(3, api.module.Module)


MODULES = (attention, functional, fused_attention, normalization, reductions)
APIS = (linen, nnx)
NAMES: dict[str, Any] = {
    "flax": flax,
    "jax": jax,
    "jnp": jnp,
    "key": jax.random.key(0),
    "mixed_precision": mixed_precision,
    "optax": optax,
    "use_policy": use_policy,
}
NAMES |= {module.__name__.rpartition(".")[2]: module for module in (*MODULES, *APIS)}


def own(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields the functions and classes that a module or an API defines."""
    for name, defined in vars(module).items():
        is_definition = inspect.isfunction(defined) or inspect.isclass(defined)
        if name.startswith("_") or not is_definition:
            continue
        place = defined.__module__
        is_apis = module in APIS and place.startswith(f"{module.__name__}.")
        if not is_apis and place != module.__name__:
            continue
        yield name, defined


PUBLIC = [
    pytest.param(defined, id=f"{module.__name__}.{name}")
    for module in (*MODULES, *APIS)
    for name, defined in own(module)
]


@pytest.mark.cases(fast=1, slow=5)
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
