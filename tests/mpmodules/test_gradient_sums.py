"""Sums of gradients over the uses of a parameter: one table for all ways to use it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import policy
from mpmodules import linen as nn
from mpmodules import nnx

# Ones are added to 2048, in which neither half dtype keeps them.
ONES, LARGE, ROWS = 20, 2048.0, 3000
SIZE = 4
USES = jnp.concatenate([jnp.ones(ONES), jnp.array([LARGE])])
IDS = jnp.zeros(ROWS, jnp.int32)
KINDS = ("float32", "accumulator", "compute")


def like(x, w):
    """Returns an array in the dtype in which a parameter is read."""
    return jnp.asarray(x, w.dtype)


def repeated(use, w):
    """Adds up a use of a parameter ONES times, and once with LARGE."""
    total = jnp.zeros_like(w)
    for _ in range(ONES):
        total = use(total, w)
    return total + like(LARGE, w) * w


def in_a_scan(w):
    def step(total, use):
        return (total + use * w, None)

    return lax.scan(step, jnp.zeros_like(w), like(USES, w))[0]


def in_a_matmul_of_a_scan(w):
    def step(_, use):
        return (None, (use * jnp.eye(SIZE, dtype=w.dtype)) @ w)

    return lax.scan(step, None, like(USES, w))[1]


def in_matmuls(w):
    eye = jnp.eye(SIZE, dtype=w.dtype)
    return sum((eye @ w for _ in range(ONES)), jnp.zeros_like(w)) + (like(LARGE, w) * eye) @ w


def in_a_cond(w):
    def use(total, w):
        return lax.cond(w[0] > 0, lambda total, w: total + w, lambda total, w: total, total, w)

    return repeated(use, w)


def reshaped_before(w):
    return repeated(lambda total, moved: total + moved, w.reshape(2, 2).T)


@jax.custom_jvp
def plus(w, x):
    return w + x


plus.defjvp(lambda primals, tangents: (plus(*primals), tangents[0] + tangents[1]))


def cast_before_a_loop(w, half):
    cast = w.astype(half)

    def step(total, use):
        return (total + use * cast.astype(jnp.float32), None)

    return lax.scan(step, jnp.zeros(SIZE), USES)[0]


def cast_before_additions(w, half):
    return repeated(lambda total, cast: total + cast, w.astype(half))


def rows(w, *shape):
    return jnp.ones((ROWS, *shape), w.dtype)


# By name: the body, and how often it uses its parameter.
TIMES = ONES + LARGE
BODIES: dict[str, tuple[Any, float]] = {
    "in a python loop": (lambda w: repeated(jnp.add, w), TIMES),
    "in a scan": (in_a_scan, TIMES),
    "in a matmul of a scan": (in_a_matmul_of_a_scan, TIMES),
    "in matmuls": (in_matmuls, TIMES),
    "as rows of a table": (lambda w: w[None][IDS], ROWS),
    "as a bias": (lambda w: rows(w, SIZE) + w[None], ROWS),
    "as a factor": (lambda w: jax.vmap(lambda row: row * w)(rows(w, SIZE)), ROWS),
    "as a divisor": (lambda w: rows(w, SIZE) / w[None], -ROWS),
    "in halves": (lambda w: rows(w, SIZE) + jnp.concatenate([w[:2], w[2:]])[None], ROWS),
    "as a number": (lambda w: w[0] * rows(w), ROWS),
    "as the exponential of a number": (lambda w: jnp.exp(w[0] - 1) * rows(w), ROWS),
    "as the softplus of a number": (lambda w: jax.nn.softplus(w[0] - 1) * rows(w), ROWS / 2),
    "in a broadcast activation": (
        lambda w: (jnp.eye(SIZE, dtype=w.dtype) @ w)[None] * rows(w, 1),
        ROWS,
    ),
    "in a checkpoint": (lambda w: jax.checkpoint(lambda w: repeated(jnp.add, w))(w), TIMES),
    "in a jit": (lambda w: repeated(jax.jit(lambda total, w: total + w), w), TIMES),
    "in a cond": (in_a_cond, TIMES),
    "reshaped before": (reshaped_before, TIMES),
    "in a custom rule": (lambda w: repeated(lambda total, w: plus(w, total), w), TIMES),
    "cast before a loop": (cast_before_a_loop, TIMES),
    "cast before additions": (cast_before_additions, TIMES),
}
NAMES = {name: uses for name, (_, uses) in BODIES.items()}
CAST_BEFORE = ("cast before a loop", "cast before additions")
in_dtypes = pytest.mark.parametrize(
    ("half", "stored"),
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
    ids=["bfloat16 of float32", "bfloat16", "float16"],
)


def total(y):
    return jnp.sum(y.astype(jnp.float32))


def outputs(params, half):
    """Returns the sum over all bodies, each with a parameter of its own."""
    half_of: dict[str, Any] = {name: {"half": half} for name in CAST_BEFORE}
    return sum(total(BODIES[name][0](w, **half_of.get(name, {}))) for name, w in params.items())


def lost(gradients, uses):
    """Returns the gradients that are not summed over all uses, by name.

    The bound is less than the sum of the ones, and more than half a unit of bfloat16 in 2068.
    """
    found = {name: float(jnp.ravel(g)[0].astype(jnp.float32)) for name, g in gradients.items()}
    return {name: got for name, got in found.items() if abs(got - uses[name]) > 9}


# Each place of the code returns a loss of the parameters.


def as_a_function(half, obeyed):
    return functools.partial(outputs, half=half)


def under_autocast(half, obeyed):
    return policy.autocast(functools.partial(outputs, half=half), obeyed)


def linen_model(half, own_code=None, name=None):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, names):
            ones = nn.initializers.ones
            return outputs({name: self.param(name, ones, (SIZE,)) for name in names}, half)

    if own_code is not None:
        Net.own_code = own_code
    return Net(name=name)


def in_linen(half, obeyed, own_code=None):
    model = linen_model(half, own_code)
    return lambda params: model.apply({"params": params}, tuple(params))


def kept_in_linen(half, obeyed):
    return in_linen(half, obeyed, "keep")


def nested_in_linen(half, obeyed):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, names):
            return linen_model(half, name="inner")(names)

    model = Outer()
    return lambda params: model.apply({"params": {"inner": params}}, tuple(params))


class NnxModel(nnx.Module):
    def __init__(self, params, half):
        self.params = nnx.Dict({name: nnx.Param(w) for name, w in params.items()})
        self.half = half

    def __call__(self):
        return outputs({name: w[...] for name, w in self.params.items()}, self.half)


def in_nnx(half, obeyed):
    def loss(params):
        return NnxModel(params, half)()

    return loss


PLACES = {
    as_a_function: ("float32", "accumulator"),
    kept_in_linen: ("float32",),
    under_autocast: ("jax",),
    in_linen: ("jax", *KINDS),
    nested_in_linen: ("jax",),
    in_nnx: ("jax",),
}
"""The kinds of gradients that are right in each place."""


def gradients_of(loss, kind, params):
    if kind == "jax":
        return jax.grad(loss)(params)
    gradients = policy.grad(loss, grads=kind)(params)
    return gradients.tree if kind == "compute" else gradients


def parameters(dtype):
    return {name: jnp.ones(SIZE, dtype) for name in NAMES}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@in_dtypes
def test_the_gradient_of_a_parameter_is_summed_over_its_uses_in_float32(place, half, stored):
    obeyed = policy.get_policy(f"params={stored},compute={half},output=float32")
    params = parameters(stored)
    with policy.use_policy(obeyed):
        loss = place(half, obeyed)
        found = {kind: lost(gradients_of(loss, kind, params), NAMES) for kind in PLACES[place]}
    if stored == "float32" and place in (as_a_function, kept_in_linen):
        # The gradients of such a program are JAX's own, and so is the sum over a cast.
        assert set(found.pop("float32")) == set(CAST_BEFORE)
    assert not any(found.values()), found


@pytest.mark.parametrize("kind", ["plain", "accumulator", "compute"])
@in_dtypes
def test_nnx_sums_the_gradients_of_a_model_in_float32(half, stored, kind):
    obeyed = policy.get_policy(f"params={stored},compute={half},output=float32")
    with policy.use_policy(obeyed):
        model = NnxModel(parameters(jnp.float32), half)
    assert model.params["in a scan"].dtype == stored
    options = {} if kind == "plain" else {"grads": kind, "policy": obeyed}
    gradients = nnx.grad(lambda model: model(), **options)(model)
    gradients = gradients.tree if kind == "compute" else gradients
    found = {name: w[...] for name, w in gradients["params"].items()}
    assert not lost(found, NAMES)


class TwoUses(nn.Module):
    """Layers whose parameters are used in several calls, and in many rows."""

    @nn.compact
    def __call__(self):
        dense = nn.Dense(SIZE, use_bias=False, name="dense")
        calls = sum((dense(jnp.ones(1)) for _ in range(ONES)), dense(jnp.array([LARGE])))
        rows = nn.Embed(2, SIZE, name="embed")(IDS)
        bias = nn.Dense(SIZE, name="biased")(jnp.ones((ROWS, 1)))
        return total(calls) + total(rows) + total(bias)


@in_dtypes
@pytest.mark.parametrize("kind", ["jax", "float32", "accumulator"])
def test_layers_that_are_called_again_sum_their_gradients_in_float32(half, stored, kind):
    model: Any = TwoUses()
    with policy.use_policy(f"params={stored},compute={half},output=float32"):
        params = model.init(jax.random.key(0))["params"]
        got = gradients_of(lambda params: model.apply({"params": params}), kind, params)
    assert params["dense"]["kernel"].dtype == stored
    found = {
        "dense": got["dense"]["kernel"],
        "embed": got["embed"]["embedding"],
        "bias": got["biased"]["bias"],
    }
    assert not lost(found, {"dense": ONES + LARGE, "embed": ROWS, "bias": ROWS})


@in_dtypes
def test_a_loss_that_uses_a_parameter_beside_its_model_sums_both_in_float32(half, stored):
    params = {"in a python loop": jnp.ones(SIZE, stored)}
    model: Any = in_linen(half, None)
    with policy.use_policy(f"params={stored},compute={half},output=float32"):
        for kind in ("float32", "accumulator"):
            got = gradients_of(lambda params: model(params) + outputs(params, half), kind, params)
            np.testing.assert_array_equal(got["in a python loop"], [2 * (ONES + LARGE)] * SIZE)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_jax_sums_in_the_dtype_of_the_parameter(half):
    got = jax.grad(lambda w: total(repeated(jnp.add, w)))(jnp.ones(SIZE, half))
    assert float(got[0]) == LARGE
