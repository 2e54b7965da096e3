"""`grads="accumulator"` of layers, models and ports, in both wings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import policy
from mpmodules import linen, nnx, use_policy
from tests.mpmodules.wings import BOTH, MIXED, NnxModel, Text, dense, layer, weight

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


def gradients(wing: Any, model: Any, grads: Any = "accumulator") -> list[Any]:
    """Returns the gradients of a model: of the parameters of 64 numbers, then of others."""
    if wing.name == "nnx":
        step = nnx.grad(lambda instance: weighed(instance(X)), grads=grads)
        found = nnx.jit(step)(model.instance)
    else:
        step = policy.grad(lambda params: weighed(model.pure(params, X)), grads=grads)
        found = jax.jit(step)(model.params)
    return sorted(jax.tree.leaves(found), key=lambda leaf: -leaf.size)


def root_gradients(wing: Any, part: Any, text: str, grads: Any = "accumulator") -> list[Any]:
    """Returns the gradients of a layer that is called in a scope."""
    with use_policy(text):
        if wing.name == "nnx":
            return gradients(wing, NnxModel(part.nnx(nnx, nnx.Rngs(0))), grads)
        instance = part.linen(None, linen, "")
        params = instance.init(jax.random.key(0), X)
        step = policy.grad(lambda params: weighed(instance.apply(params, X)), grads=grads)
        return sorted(jax.tree.leaves(jax.jit(step)(params)), key=lambda leaf: -leaf.size)


@BOTH
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("stored", ["f32", "bf16"])
def test_kernels_get_their_accumulators_in_whatever_they_are_stored(wing, name, stored):
    kernel, bias = root_gradients(wing, LAYERS[name], f"p={stored},c=bf16")
    assert worst(kernel) < 1e-6
    np.testing.assert_allclose(bias, C.astype(np.float64).sum(0), rtol=1e-5)


@BOTH
def test_they_are_rounded_without_it(wing):
    assert worst(root_gradients(wing, LAYERS["Dense"], MIXED, "float32")[0]) > 5e-4


TEXTS: dict[str, Text] = {
    "a layer": Text(lambda self, x: self.layer(x), layer=LAYERS["Dense"]),
    "own code": Text(lambda self, x: x @ self.kernel, kernel=weight(8, 8)),
}


@BOTH
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("way", ["ours", "port", "ours in half"])
def test_models_and_ports_of_layers_and_of_own_code(wing, text, way):
    """At a boundary to float32 the forward matmul returns its accumulator too."""
    obeyed = "p=bf16,c=bf16" if way.endswith("half") else MIXED
    make = wing.ours if way.startswith("ours") else wing.port
    model = make(TEXTS[text], obeyed, *([X] if way.startswith("ours") else [None, X]))
    assert worst(gradients(wing, model)[0]) < 1e-6


def test_autocast():
    def loss(params):
        return weighed(policy.autocast(jnp.dot, MIXED)(X.astype(np.float32), params))

    assert worst(policy.grad(loss, grads="accumulator")(np.ones((8, 8), np.float32))) < 1e-6


def test_scanned_and_rematerialised_layers():
    """Each of three layers is added up over a scan, in a checkpoint."""

    class Block(linen.Module):
        @linen.compact
        def __call__(self, carry, _):
            return carry + weighed(linen.Dense(8, use_bias=False)(jnp.asarray(X))), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return linen.scan(linen.remat(Block), length=3, **split)()(jnp.float32(0), None)[0]

    with use_policy("p=f32,c=bf16"):
        model = Net()
        params = model.init(jax.random.key(0), X)
        step = policy.grad(lambda params: model.apply(params, X), grads="accumulator")
        (kernels,) = jax.tree.leaves(jax.jit(step)(params))
    assert max(map(worst, kernels)) < 1e-6


def half_exact(x):
    """Returns the share of the numbers that bfloat16 has."""
    return np.mean(np.asarray(x) == np.asarray(x).astype(HALF).astype(np.float32))


@BOTH
@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")  # a CPU emulates 8 bits
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_int8", "mixed_float8"])
def test_attention(wing, preset):
    wide, rounded = (
        root_gradients(wing, ATTENTION, preset, grads)[:4] for grads in ("accumulator", "float32")
    )
    for a, b in zip(wide, rounded, strict=True):
        assert a.size == 64
        assert half_exact(a) < 0.2 or not a.any()
        assert half_exact(b) == 1
        np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01 * np.abs(b).max())


# --- nnx's gradients ------------------------------------------------------------------------------


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
