"""Who obeys which policy, from strongest to weakest: an argument of the layer, dtype_policy=, a
rule, the enclosing module or scope, the global policy, none.

An nnx layer obeys what was in force where it was built, a linen layer what is in force where it is
called: here both are one place.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen, nnx
from policy import DtypePolicyWarning, set_policy, use_policy
from tests.mpmodules.wings import MIXED
from tests.programs import boundary_casts, named, operations

X = jnp.ones((2, 4))
BF16, F16 = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"
EACH_WING = pytest.mark.parametrize("wing", ["linen", "nnx"])
obeys_its_own = pytest.mark.filterwarnings("ignore:.*has an explicit:policy.DtypePolicyWarning")
CLASSES: dict[str, Any] = {"linen": linen.Dense, "nnx": nnx.Linear}


class Wrap(linen.Module):
    """A module around one layer, which is made in a scope of its own if it has one."""

    make: Callable[[], Any]
    inner: Any = None

    @linen.compact
    def __call__(self, x):
        with use_policy(self.inner) if self.inner else contextlib.nullcontext():
            return self.make()(x)


class NnxWrap(nnx.Module):
    def __init__(self, make, scope=None):
        with use_policy(scope) if scope else contextlib.nullcontext():
            self.layer = make()

    def __call__(self, x):
        return self.layer(x)


def layer(wing: str, **options: Any) -> Any:
    if wing == "linen":
        return linen.Dense(4, **options)
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0), **options)


def wrap(wing: str, scope: Any = None, policy: Any = None, **options: Any) -> Any:
    """A module with `policy` around a layer with `options`."""
    cls = Wrap if wing == "linen" else NnxWrap
    return cls(lambda: layer(wing, **options), scope, dtype_policy=policy)


def program(wing: str, model: Any) -> tuple[Callable[[Any], Any], Any]:
    """The model as a function of its input, and its parameters."""
    if wing == "linen":
        variables = model.init(jax.random.key(0), X)
        return lambda x: model.apply(variables, x), variables
    graph, state = flax.nnx.split(model)
    return lambda x: flax.nnx.merge(graph, state, copy=True)(x), state


def computed(wing: str, model: Any) -> str:
    """The dtype that the one matmul multiplies in."""
    (dot,) = named(operations(program(wing, model)[0], X), "dot_general")
    assert len(set(dot.inputs)) == 1
    return dot.inputs[0]


def stored(wing: str, model: Any) -> str:
    (dtype,) = {leaf.dtype.name for leaf in jax.tree.leaves(program(wing, model)[1])}
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


@obeys_its_own
@pytest.mark.filterwarnings("ignore:.*changes no nnx layer:policy.DtypePolicyWarning")
@EACH_WING
@pytest.mark.parametrize("level", LEVELS)
def test_the_stronger_level_decides(wing, level):
    expected, scopes, policy, inner, options = LEVELS[level]
    with contextlib.ExitStack() as blocks:
        for scope in scopes:
            is_rule = scope is RULE
            rules = {CLASSES[wing]: F16} if is_rule else None
            blocks.enter_context(use_policy(None if is_rule else scope, rules=rules))
        assert computed(wing, wrap(wing, inner, policy, **options)) == expected


@EACH_WING
def test_a_scope_is_stronger_than_the_global_policy_and_that_is_stronger_than_none(wing):
    set_policy(F16)
    with use_policy(BF16):
        assert computed(wing, wrap(wing)) == "bfloat16"
    with use_policy(None):
        assert computed(wing, wrap(wing)) == "float32"
    set_policy(BF16)
    assert computed(wing, wrap(wing)) == "bfloat16"
    set_policy(BF16, {CLASSES[wing]: F16})
    assert computed(wing, wrap(wing)) == "float16"


@obeys_its_own
@EACH_WING
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
def test_an_argument_replaces_its_own_field_alone(wing, given, param, compute):
    with use_policy("bf16"):
        made = layer(wing, **given)
        assert (stored(wing, made), computed(wing, made)) == (param, compute)


@obeys_its_own
@EACH_WING
def test_an_explicit_dtype_alone_makes_no_boundary_and_is_what_an_inheriting_layer_returns(wing):
    with use_policy(MIXED):
        run, _ = program(wing, layer(wing, dtype=jnp.float16))
        assert boundary_casts(operations(run, X)) == []
        assert jax.eval_shape(run, X).dtype == jnp.float16
        made = layer(wing, dtype=jnp.complex64, param_dtype=jnp.complex64)
        run, _ = program(wing, made)
        assert stored(wing, made) == "complex64"
        assert jax.eval_shape(run, X.astype(jnp.complex64)).dtype == jnp.complex64
    own = layer(wing, dtype=jnp.float16, dtype_policy=MIXED)
    assert jax.eval_shape(program(wing, own)[0], X).dtype == jnp.float32


@EACH_WING
def test_an_explicit_dtype_that_defeats_the_policy_warns_once_and_one_that_agrees_not(wing):
    name = CLASSES[wing].__name__
    expected = (
        f"{name} at '{name}' has an explicit dtype=float32 and param_dtype=float16, which override "
        "the policy in force, 'params=float32,compute=bfloat16,output=float32'. Delete the "
        "argument to let the policy decide, or give the layer a dtype_policy."
    )
    with warnings.catch_warnings(record=True) as caught, use_policy(MIXED):
        warnings.simplefilter("always")
        for _ in range(3):
            made = layer(wing, dtype=jnp.float32, param_dtype=jnp.float16)
            assert (stored(wing, made), computed(wing, made)) == ("float16", "float32")
            agrees = layer(wing, dtype=jnp.bfloat16, param_dtype=jnp.float32)
            assert computed(wing, agrees) == "bfloat16"
    assert [str(w.message) for w in caught if w.category is DtypePolicyWarning] == [expected]
