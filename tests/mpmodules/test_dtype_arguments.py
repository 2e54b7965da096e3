"""Each argument of a layer that has to do with dtypes changes the program, or is told or rejected.

The arguments are read from the layers' signatures, so that one that a newer Flax adds fails here
until a value for it is given.
"""

import dataclasses
import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax.linen.dtypes import promote_dtype

from tests.mpmodules.table.cases import CASES, ROWS, Case
from tests.mpmodules.table.running import DEPRECATIONS, OURS, THEIRS, program, scope_of

pytestmark = DEPRECATIONS
ABOUT_DTYPES = re.compile(
    "dtype|precision|element_type|float32|fp32|dot_general|conv_general|einsum|fast_variance"
)
OF_NO_DTYPE = {"dtype_policy", "einsum_str"}


def doubled(operation: Any) -> Any:
    """Returns an operation of the author's own, which no program has by itself."""
    return lambda *args, **kwargs: 2.0 * operation(*args, **kwargs)


dot_general, einsum = doubled(jax.lax.dot_general), doubled(jnp.einsum)
conv_general_dilated = doubled(jax.lax.conv_general_dilated)
PLAIN_EINSUM = lambda: jnp.einsum  # noqa: E731


def linen_promote(*arrays: Any, **options: Any) -> list[Any]:
    promoted = promote_dtype(*arrays, **options)
    return [None if x is None else 2 * x for x in promoted]


def nnx_promote(arrays: Any, /, **options: Any) -> list[Any]:
    return linen_promote(*arrays, **options)


# By the ends of names. Of a bool, one value may be what the layer does anyway.
VALUES: dict[str, tuple[Any, ...]] = {
    "param_dtype": (jnp.float16,),
    "promote_dtype": (linen_promote,),
    "dtype": (jnp.float16,),
    "precision": ("highest",),
    "preferred_element_type": (jnp.float32,),
    "force_float32_reductions": (False, True),
    "force_fp32_for_softmax": (False, True),
    "use_fast_variance": (False, True),
    "conv_general_dilated": (conv_general_dilated,),
    "conv_general_dilated_cls": (lambda: conv_general_dilated,),
    "dot_general": (dot_general,),
    "dot_general_cls": (lambda: dot_general,),
    "einsum_cls": (lambda: einsum,),
    "einsum_op": (einsum,),
}
# Arguments that Flax takes together alone.
TOGETHER = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")
# What no value changes: by API, layer and argument; None is each that has it.
OF_NO_EFFECT = {
    ("linen", None, "force_fp32_for_softmax"): "a policy's softmax is in float32 anyway",
    ("linen", "ConvLocal", "conv_general_dilated"): "Flax",
    ("linen", "ConvLocal", "conv_general_dilated_cls"): "Flax",
    (None, "RMSNorm", "use_fast_variance"): "Flax",
    ("nnx", "WeightNorm", "promote_dtype"): "Flax",
}


def around_a_layer(name: str, lib: Any, rngs: Any = None, **arguments: Any) -> Any:
    keys = {} if rngs is None else {"rngs": rngs}
    inside = lib.Dense(6) if rngs is None else lib.Linear(4, 6, rngs=rngs)
    return getattr(lib, name)(inside, **arguments, **keys)


def layers() -> Iterator[tuple[str, type]]:
    for api, lib in OURS.items():
        for name in sorted(dir(lib)):
            kind = getattr(lib, name)
            is_layer = isinstance(kind, type) and issubclass(kind, lib.Module)
            if is_layer and kind.__module__.startswith("mpmodules"):
                yield api, kind


def arguments_of(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = list(inspect.signature(kind.__init__).parameters)
    return [name for name in names if ABOUT_DTYPES.search(name) and name not in OF_NO_DTYPE]


def case_of(api: str, name: str) -> Case:
    if name in ("WeightNorm", "SpectralNorm"):
        call = {"update_stats": True} if name == "SpectralNorm" else {}
        return Case(name, "", functools.partial(around_a_layer, name), (ROWS,), call)
    cases = [case for of, case in CASES if of == api and case.layer == name]
    # Of attention the one that runs its norms, whose arguments it takes, too.
    return next((case for case in cases if case.setting == "normalized"), cases[0])


def text_of(policy: str | None, api: str, name: str, **arguments: Any) -> str:
    """Returns the programs of a layer in a model: of its init, and of its call with gradients."""
    case, modules = case_of(api, name), (THEIRS if policy is None else OURS)[api]
    with scope_of(policy), jax.numpy_dtype_promotion("standard"):  # for Flax's norms
        run = program(api, case, modules, composite=not case.is_cell, **arguments)
        init, (params, rest) = jax.make_jaxpr(run.init, return_shape=True)(jax.random.key(0))

        def both_ways(params: Any, rest: Any, inputs: Any) -> Any:
            out, backward = jax.vjp(lambda params: run.apply(params, rest, inputs)[0], params)
            return out, backward(jax.tree.map(jnp.ones_like, out))

        return re.sub(r"0x\w+", "", f"{init}{jax.make_jaxpr(both_ways)(params, rest, run.inputs)}")


plain = functools.cache(text_of)


def effect(policy: str | None, api: str, name: str, argument: str, value: Any) -> str:
    """Returns what an argument does: "changes", "told", "rejected" or "nothing"."""
    value = nnx_promote if value is linen_promote and api == "nnx" else value
    others = dict.fromkeys(TOGETHER, PLAIN_EINSUM) if argument in TOGETHER else {}
    before = plain(policy, api, name, **others)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            after = text_of(policy, api, name, **(others | {argument: value}))
        except (TypeError, ValueError) as error:
            if argument not in str(error):
                raise
            return "rejected"
    is_told = any(argument in str(each.message) for each in caught)
    return "changes" if after != before else "told" if is_told else "nothing"


def values_of(argument: str) -> tuple[Any, ...]:
    found = [VALUES[end] for end in VALUES if argument == end or argument.endswith("_" + end)]
    return found[0] if found else ()


def test_each_argument_of_each_layer_has_a_value():
    names = {argument for _, kind in layers() for argument in arguments_of(kind)}
    assert len(names) > 20 and all(map(values_of, names)), "new arguments: give them values"


def given() -> Iterator[Any]:
    for api, kind in layers():
        for argument in arguments_of(kind):
            yield pytest.param(api, kind.__name__, argument, id=f"{api}-{kind.__name__}-{argument}")


@pytest.mark.cases(fast=2, slow=40)
@pytest.mark.parametrize(("api", "name", "argument"), list(given()))
def test_an_argument_changes_the_program_or_is_told_or_rejected(api, name, argument):
    keys = itertools.product((api, None), (name, None), (argument,))
    reasons = [OF_NO_EFFECT[key] for key in keys if key in OF_NO_EFFECT]
    values = values_of(argument)
    effects = {effect("mixed_bfloat16", api, name, argument, value) for value in values}
    assert (effects == {"nothing"}) == bool(reasons)
    if reasons == ["Flax"]:  # which ignores it, too
        assert {effect(None, api, name, argument, value) for value in values} == {"nothing"}
