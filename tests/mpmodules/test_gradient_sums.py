"""Sums of gradients over the uses of a parameter: one table for all ways to use it; and
`grads="accumulator"` of layers, models and ports, in both apis."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

import policy
from mpmodules import linen, nnx, use_policy
from mpmodules import linen as nn
from tests.mpmodules.apis import BOTH, MIXED, NnxModel, Text, dense, layer, weight

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
    step = lambda total, use: (total + use * w, None)  # noqa: E731
    return lax.scan(step, jnp.zeros_like(w), like(USES, w))[0]


def in_a_matmul_of_a_scan(w):
    step = lambda _, use: (None, (use * jnp.eye(SIZE, dtype=w.dtype)) @ w)  # noqa: E731
    return lax.scan(step, None, like(USES, w))[1]


def in_matmuls(w):
    eye = jnp.eye(SIZE, dtype=w.dtype)
    return sum((eye @ w for _ in range(ONES)), jnp.zeros_like(w)) + (like(LARGE, w) * eye) @ w


def in_a_cond(w):
    def use(total, w):
        return lax.cond(w[0] > 0, lambda total, w: total + w, lambda total, w: total, total, w)

    return repeated(use, w)


@jax.custom_jvp
def plus(w, x):
    return w + x


plus.defjvp(lambda primals, tangents: (plus(*primals), tangents[0] + tangents[1]))


def cast_before_a_loop(w, half):
    cast = w.astype(half)
    step = lambda total, use: (total + use * cast.astype(jnp.float32), None)  # noqa: E731
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
    "reshaped before": (lambda w: repeated(jnp.add, w.reshape(2, 2).T), TIMES),
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


class SummingModel(nnx.Module):
    def __init__(self, params, half):
        self.params = nnx.Dict({name: nnx.Param(w) for name, w in params.items()})
        self.half = half

    def __call__(self):
        return outputs({name: w[...] for name, w in self.params.items()}, self.half)


def in_nnx(half, obeyed):
    return lambda params: SummingModel(params, half)()


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


@pytest.mark.cases(slow=1)
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


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("kind", ["plain", "accumulator", "compute"])
@in_dtypes
def test_nnx_sums_the_gradients_of_a_model_in_float32(half, stored, kind):
    obeyed = policy.get_policy(f"params={stored},compute={half},output=float32")
    with policy.use_policy(obeyed):
        model = SummingModel(parameters(jnp.float32), half)
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


@pytest.mark.cases(slow=3)
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


@pytest.mark.cases(slow=2)
@in_dtypes
def test_a_loss_that_uses_a_parameter_beside_its_model_sums_both_in_float32(half, stored):
    params = {"in a python loop": jnp.ones(SIZE, stored)}
    model: Any = in_linen(half, None)
    with policy.use_policy(f"params={stored},compute={half},output=float32"):
        for kind in ("float32", "accumulator"):
            got = gradients_of(lambda params: model(params) + outputs(params, half), kind, params)
            np.testing.assert_array_equal(got["in a python loop"], [2 * (ONES + LARGE)] * SIZE)


HALF = jnp.bfloat16
X = np.random.default_rng(0).normal(size=(64, 8)).astype(HALF)
C = np.random.default_rng(1).normal(size=(64, 8)).astype(HALF)
TRUTH = X.astype(np.float64).T @ C.astype(np.float64)


def weighed(y):
    return jnp.sum(y.astype(jnp.float32) * C.astype(jnp.float32))


def worst(got):
    """Returns the largest error of a kernel's gradient, as a share of the largest number in it."""
    assert got.dtype == jnp.float32
    got = np.asarray(got, np.float64).reshape(8, 8)
    return np.abs(got - TRUTH).max() / np.abs(TRUTH).max()


LAYERS = {
    "Dense": dense(8, 8),
    "DenseGeneral": layer(
        lambda nn: nn.DenseGeneral((8,)), lambda nnx, rngs: nnx.LinearGeneral(8, 8, rngs=rngs)
    ),
    "Einsum": layer(
        lambda nn: nn.Einsum((8, 8), "bi,io->bo"),
        lambda nnx, rngs: nnx.Einsum("bi,io->bo", (8, 8), (8,), rngs=rngs),
    ),
    "Conv": layer(lambda nn: nn.Conv(8, (1,)), lambda nnx, rngs: nnx.Conv(8, 8, (1,), rngs=rngs)),
}
ATTENTION = layer(
    lambda nn: nn.MultiHeadDotProductAttention(2, qkv_features=8, out_features=8),
    lambda nnx, rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
)


def gradients(api: Any, model: Any, grads: Any = "accumulator") -> list[Any]:
    """Returns the gradients of a model: of the parameters of 64 numbers, then of others."""
    if api.name == "nnx":
        step = nnx.grad(lambda instance: weighed(instance(X)), grads=grads)
        found = nnx.jit(step)(model.instance)
    else:
        step = policy.grad(lambda params: weighed(model.pure(params, X)), grads=grads)
        found = jax.jit(step)(model.params)
    return sorted(jax.tree.leaves(found), key=lambda leaf: -leaf.size)


def root_gradients(api: Any, part: Any, text: str, grads: Any = "accumulator") -> list[Any]:
    """Returns the gradients of a layer that is called in a scope."""
    with use_policy(text):
        if api.name == "nnx":
            return gradients(api, NnxModel(part.nnx(nnx, nnx.Rngs(0))), grads)
        instance = part.linen(None, linen, "")
        params = instance.init(jax.random.key(0), X)
        step = policy.grad(lambda params: weighed(instance.apply(params, X)), grads=grads)
        return sorted(jax.tree.leaves(jax.jit(step)(params)), key=lambda leaf: -leaf.size)


@pytest.mark.cases(fast=1, slow=6)
@BOTH
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("stored", ["f32", "bf16"])
def test_kernels_get_their_accumulators_in_whatever_they_are_stored(api, name, stored):
    kernel, bias = root_gradients(api, LAYERS[name], f"p={stored},c=bf16")
    assert worst(kernel) < 1e-6
    np.testing.assert_allclose(bias, C.astype(np.float64).sum(0), rtol=1e-5)


@pytest.mark.cases(fast=1)
@BOTH
def test_they_are_rounded_without_it(api):
    assert worst(root_gradients(api, LAYERS["Dense"], MIXED, "float32")[0]) > 5e-4


TEXTS: dict[str, Text] = {
    "a layer": Text(lambda self, x: self.layer(x), layer=LAYERS["Dense"]),
    "own code": Text(lambda self, x: x @ self.kernel, kernel=weight(8, 8)),
}


@pytest.mark.cases(fast=1, slow=10)
@BOTH
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("way", ["ours", "port", "ours in half"])
def test_models_and_ports_of_layers_and_of_own_code(api, text, way):
    """At a boundary to float32 the forward matmul returns its accumulator too."""
    obeyed = "p=bf16,c=bf16" if way.endswith("half") else MIXED
    make = api.ours if way.startswith("ours") else api.port
    model = make(TEXTS[text], obeyed, *([X] if way.startswith("ours") else [None, X]))
    assert worst(gradients(api, model)[0]) < 1e-6


def test_scanned_and_rematerialized_layers():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, carry, _):
            return carry + weighed(linen.Dense(8, use_bias=False)(jnp.asarray(X))), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return linen.scan(linen.remat(Block), length=3, **split)()(jnp.float32(0), None)[0]

    with use_policy("p=f32,c=bf16,o=f32"):
        model = Net()
        params = model.init(jax.random.key(0), X)
        step = policy.grad(lambda params: model.apply(params, X), grads="accumulator")
        (kernels,) = jax.tree.leaves(jax.jit(step)(params))
    assert max(map(worst, kernels)) < 1e-6


def half_exact(x):
    """Returns the share of the numbers that bfloat16 has."""
    return np.mean(np.asarray(x) == np.asarray(x).astype(HALF).astype(np.float32))


@pytest.mark.cases(slow=2)
@BOTH
@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")  # a CPU emulates 8 bits
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_int8", "mixed_float8"])
def test_attention(api, preset):
    wide, rounded = (
        root_gradients(api, ATTENTION, preset, grads)[:4] for grads in ("accumulator", "float32")
    )
    for a, b in zip(wide, rounded, strict=True):
        assert a.size == 64
        assert half_exact(a) < 0.2 or not a.any()
        assert half_exact(b) == 1
        np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01 * np.abs(b).max())


class Stateful(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.norm = nnx.Embed(5, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.linear = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.calls, self.last = nnx.Variable(jnp.int32(0)), "none"

    def __call__(self, ids):
        self.calls[...] += 1
        self.last = "called"
        return self.linear(self.dropout(self.norm(self.embed(ids))))


@pytest.mark.slow
def test_a_models_state_is_updated_as_in_flax():
    def after(grads):
        with use_policy(MIXED):
            model = Stateful()
        step = nnx.value_and_grad(
            lambda model, ids: (weighed(model(ids)), {"calls": model.calls[...], "text": "aux"}),
            has_aux=True,
            grads=grads,
        )
        (loss, aux), gradients = step(model, jnp.arange(64) % 5)
        assert aux == {"calls": 1, "text": "aux"}
        assert model.last == "called"
        return loss, gradients, nnx.state(model, nnx.Not(nnx.Param))

    plain: Any = after("float32")
    wide: Any = after("accumulator")
    np.testing.assert_allclose(plain[0], wide[0], rtol=1e-2)
    assert jax.tree.structure(plain[1]) == jax.tree.structure(wide[1])
    assert wide[1]["linear"]["kernel"].get_metadata() == plain[1]["linear"]["kernel"].get_metadata()
    for a, b in zip(jax.tree.leaves(plain[2]), jax.tree.leaves(wide[2]), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert int(wide[2]["dropout"]["rngs"]["count"][...]) == 1
    assert np.asarray(wide[2]["norm"]["mean"][...]).any()


def test_gradients_by_a_filter_by_several_arguments_and_of_a_shared_param():
    with use_policy("p=bf16,c=bf16"):
        model, other = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))

    def loss(models, other):
        return sum(weighed(model(X)) for model in (*models, other))

    biases = nnx.DiffState(1, nnx.PathContains("bias"))
    step = nnx.grad(loss, argnums=(0, biases), grads="accumulator")
    first, second = step(flax_nnx.List([model, model]), other)
    assert worst(first[0]["kernel"][...] / 2) < 1e-6
    assert list(second) == ["bias"]
    np.testing.assert_allclose(second["bias"][...], C.astype(np.float64).sum(0), rtol=1e-5)
