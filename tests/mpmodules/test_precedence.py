"""Who obeys which policy, from strongest to weakest: an argument of the layer, dtype_policy=, a
rule, the enclosing module or scope, the global policy, none.

An nnx layer obeys what was in force where it was built, a linen layer what is in force where it is
called: here both are one place.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import contextlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen, nnx
from policy import DtypePolicyWarning, set_policy, use_policy
from tests.mpmodules.apis import BOTH, MIXED, LinenModel, Model, NnxModel, Text, X, layer
from tests.programs import boundary_casts

BF16, F16 = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"
obeys_its_own = pytest.mark.filterwarnings("ignore:.*has an explicit:policy.DtypePolicyWarning")
CLASSES: dict[str, Any] = {"linen": linen.Dense, "nnx": nnx.Linear}


def wrapped(api: Any, scope: Any = None, policy: Any = None, **options: Any) -> Model:
    """Returns a module with `policy` around a layer with `options`, which is made and called in a
    scope of its own if it has one.
    """

    def inside() -> Any:
        return use_policy(scope) if scope else contextlib.nullcontext()

    def call(self, x):
        with inside():
            return self.layer(x)

    def nnx_layer(nnx, rngs):
        with inside():
            return nnx.Linear(4, 4, rngs=rngs, **options)

    text = Text(call, layer=layer(lambda nn: nn.Dense(4, **options), nnx_layer))
    return api.ours(text, policy)


def bare(api: Any, **options: Any) -> Model:
    """Returns a layer that is the whole model."""
    if api.name == "nnx":
        return NnxModel(nnx.Linear(4, 4, rngs=nnx.Rngs(0), **options))
    made = linen.Dense(4, **options)
    return LinenModel(made, made, None, (X,))


def computed(model: Model) -> str:
    """Returns the dtype that the one matmul multiplies in."""
    (dot,) = model.dots(X)
    assert len(set(dot)) == 1
    return dot[0]


def stored(model: Model) -> str:
    (dtype,) = set(model.made().values())
    return dtype


RULE = object()  # in place of a scope's policy: a rule for the layer's class
# By name: the dtype computed in, the scopes around, the module's policy, the scope inside of it,
# and the layer's options.
OWN = {"dtype": jnp.float16, "dtype_policy": BF16}
LEVELS: dict[str, tuple[str, list[Any], Any, Any, dict[str, Any]]] = {
    "argument over own policy": ("float16", [], None, None, OWN),
    "own policy over rule": ("bfloat16", [RULE], None, None, {"dtype_policy": BF16}),
    "rule over module": ("float16", [RULE], BF16, None, {}),
    "rule over inner scope": ("float16", [RULE], None, BF16, {}),
    "rule over a scope in its own": ("float16", [RULE, BF16], None, None, {}),
    "scope in a module without policy": ("bfloat16", [], None, BF16, {}),
    "module over the scope around": ("bfloat16", [F16], BF16, None, {}),
    "scope in a module over its policy": ("float16", [], BF16, F16, {}),
    "none": ("float32", [], None, None, {}),
}


@pytest.mark.cases(fast=1, slow=13)
@obeys_its_own
@pytest.mark.filterwarnings("ignore:.*changes no nnx layer:policy.DtypePolicyWarning")
@BOTH
@pytest.mark.parametrize("level", LEVELS)
def test_the_stronger_level_decides(api, level):
    expected, scopes, policy, inner, options = LEVELS[level]
    with contextlib.ExitStack() as blocks:
        for scope in scopes:
            is_rule = scope is RULE
            rules = {CLASSES[api.name]: F16} if is_rule else None
            blocks.enter_context(use_policy(None if is_rule else scope, rules=rules))
        assert computed(wrapped(api, inner, policy, **options)) == expected


@pytest.mark.cases(fast=1)
@BOTH
def test_a_scope_is_stronger_than_the_global_policy_and_that_is_stronger_than_none(api):
    set_policy(F16)
    with use_policy(BF16):
        assert computed(wrapped(api)) == "bfloat16"
    with use_policy(None):
        assert computed(wrapped(api)) == "float32"
    set_policy(BF16)
    assert computed(wrapped(api)) == "bfloat16"
    set_policy(BF16, {CLASSES[api.name]: F16})
    assert computed(wrapped(api)) == "float16"


@pytest.mark.cases(fast=1)
@obeys_its_own
@BOTH
@pytest.mark.parametrize(
    ("given", "param", "compute"),
    [
        ({}, "bfloat16", "bfloat16"),
        ({"dtype": None, "param_dtype": None}, "bfloat16", "bfloat16"),
        ({"dtype": jnp.float32}, "bfloat16", "float32"),
        ({"param_dtype": jnp.float32}, "float32", "bfloat16"),
        ({"dtype": jnp.float16, "param_dtype": jnp.float16}, "float16", "float16"),
    ],
)
def test_an_argument_replaces_its_own_field_alone(api, given, param, compute):
    with use_policy("bf16"):
        made = bare(api, **given)
        assert (stored(made), computed(made)) == (param, compute)


@pytest.mark.slow
@obeys_its_own
@BOTH
def test_an_explicit_dtype_alone_makes_no_boundary_and_is_what_an_inheriting_layer_returns(api):
    with use_policy(MIXED):
        half = bare(api, dtype=jnp.float16)
        assert boundary_casts(half.operations(X)) == []
        assert jax.eval_shape(half.pure, half.params, X).dtype == jnp.float16
        made = bare(api, dtype=jnp.complex64, param_dtype=jnp.complex64)
        assert stored(made) == "complex64"
        x = X.astype(jnp.complex64)
        assert jax.eval_shape(made.pure, made.params, x).dtype == jnp.complex64
    own = bare(api, dtype=jnp.float16, dtype_policy=MIXED)
    assert jax.eval_shape(own.pure, own.params, X).dtype == jnp.float32


@pytest.mark.slow
@BOTH
def test_an_explicit_dtype_that_defeats_the_policy_warns_once_and_one_that_agrees_not(api):
    name = CLASSES[api.name].__name__
    expected = (
        f"{name} at '{name}' has an explicit dtype=float32 and param_dtype=float16, which override "
        "the policy in force, 'params=float32,compute=bfloat16,output=float32'. Delete the "
        "argument to let the policy decide, or give the layer a dtype_policy."
    )
    with warnings.catch_warnings(record=True) as caught, use_policy(MIXED):
        warnings.simplefilter("always")
        for _ in range(3):
            made = bare(api, dtype=jnp.float32, param_dtype=jnp.float16)
            assert (stored(made), computed(made)) == ("float16", "float32")
            agrees = bare(api, dtype=jnp.bfloat16, param_dtype=jnp.float32)
            assert computed(agrees) == "bfloat16"
    assert [str(w.message) for w in caught if w.category is DtypePolicyWarning] == [expected]
