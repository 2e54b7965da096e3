"""`grads="accumulator"` of layers, models and ports, in both wings."""

from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy
from mpmodules import linen, nnx, use_policy
from policy.grads.value_and_grad import GradientKind

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


LINEN = {
    "Dense": lambda nn: nn.Dense(8),
    "DenseGeneral": lambda nn: nn.DenseGeneral((8,)),
    "Einsum": lambda nn: nn.Einsum((8, 8), "bi,io->bo"),
    "Conv": lambda nn: nn.Conv(8, (1,)),
}
NNX = {
    "Linear": lambda nn, rngs: nn.Linear(8, 8, rngs=rngs),
    "LinearGeneral": lambda nn, rngs: nn.LinearGeneral(8, 8, rngs=rngs),
    "Einsum": lambda nn, rngs: nn.Einsum("bi,io->bo", (8, 8), (8,), rngs=rngs),
    "Conv": lambda nn, rngs: nn.Conv(8, 8, (1,), rngs=rngs),
}


def linen_gradients(
    model: Any, scope: str | None = "mixed_bfloat16", grads: GradientKind = "accumulator"
) -> Any:
    with use_policy(scope):
        params = jax.eval_shape(model.init, jax.random.key(0), X)
        params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), params)
        step = policy.grad(lambda params: weighed(model.apply(params, X)), grads=grads)
        return jax.jit(step)(params)["params"]


def nnx_gradients(model: Any, grads: GradientKind = "accumulator") -> Any:
    return nnx.jit(nnx.grad(lambda model: weighed(model(X)), grads=grads))(model)


@pytest.mark.parametrize("layer", LINEN)
def test_linen_kernels_get_their_accumulators(layer):
    got = linen_gradients(LINEN[layer](linen))
    assert worst(got["kernel"]) < 1e-6
    np.testing.assert_allclose(got["bias"], C.astype(np.float64).sum(0), rtol=1e-5)


@pytest.mark.parametrize("layer", NNX)
@pytest.mark.parametrize("params", ["f32", "bf16"])
def test_nnx_kernels_get_their_accumulators(layer, params):
    """Flax's gradient of a param that is stored in half precision is rounded to it."""
    with use_policy(f"p={params},c=bf16"):
        model = NNX[layer](nnx, nnx.Rngs(0))
    got = nnx_gradients(model)
    assert worst(got["kernel"][...]) < 1e-6
    np.testing.assert_allclose(got["bias"][...], C.astype(np.float64).sum(0), rtol=1e-5)
    assert model.kernel.dtype == policy.get_policy(params).param_dtype


def test_they_are_rounded_without_it():
    assert worst(linen_gradients(linen.Dense(8), grads="float32")["kernel"]) > 5e-4
    with use_policy("mixed_bfloat16"):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    assert worst(nnx_gradients(model, grads="float32")["kernel"][...]) > 5e-4


def test_a_model_that_returns_its_accumulator():
    """At a boundary to float32 the forward matmul returns its accumulator too."""
    assert worst(linen_gradients(linen.Dense(8, dtype_policy="mixed_bfloat16"), None)["kernel"]) < (
        1e-6
    )
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16")
    assert worst(nnx_gradients(model)["kernel"][...]) < 1e-6


def test_ports_and_autocast():
    ported = linen.apply_policy(flax.linen.Dense(8), "mixed_bfloat16")
    assert worst(linen_gradients(ported, None)["kernel"]) < 1e-6
    model = nnx.apply_policy(flax.nnx.Linear(8, 8, rngs=flax.nnx.Rngs(0)), "mixed_bfloat16")
    assert worst(nnx_gradients(model)["kernel"][...]) < 1e-6

    def loss(params):
        return weighed(policy.autocast(jnp.dot, "mixed_bfloat16")(X.astype(np.float32), params))

    assert worst(policy.grad(loss, grads="accumulator")(np.ones((8, 8), np.float32))) < 1e-6


class Own(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x @ self.param("kernel", linen.initializers.ones, (8, 8))


class OwnNnx(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        return x @ self.kernel


@pytest.mark.parametrize("params", ["f32", "bf16"])
def test_parameters_of_own_modules(params):
    assert worst(linen_gradients(Own(), f"p={params},c=bf16")["kernel"]) < 1e-6
    with use_policy(f"p={params},c=bf16"):
        model = OwnNnx()
    assert worst(nnx_gradients(model)["kernel"][...]) < 1e-6


def test_scanned_and_rematerialised_layers():
    """Each of three layers is added up over a scan, in a checkpoint."""

    class Block(linen.Module):
        @linen.compact
        def __call__(self, carry, _):
            return carry + weighed(linen.Dense(8, use_bias=False)(jnp.asarray(X))), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            stack = linen.scan(
                linen.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return stack()(jnp.float32(0), None)[0]

    with use_policy("p=f32,c=bf16"):
        model = Net()
        params = model.init(jax.random.key(0), X)
        step = policy.grad(lambda params: model.apply(params, X), grads="accumulator")
        got = jax.jit(step)(params)
    (kernels,) = jax.tree.leaves(got)
    assert max(map(worst, kernels)) < 1e-6


def half_exact(x):
    """Returns the share of the numbers that bfloat16 has."""
    return np.mean(np.asarray(x) == np.asarray(x).astype(HALF).astype(np.float32))


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")  # a CPU emulates 8 bits
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_int8", "mixed_float8"])
def test_attention_of_both_wings(preset):
    def of(grads):
        params = linen_gradients(
            linen.MultiHeadDotProductAttention(2, qkv_features=8, out_features=8), preset, grads
        )
        with use_policy(preset):
            model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        return [x for x in jax.tree.leaves((params, nnx_gradients(model, grads))) if x.size == 64]

    wide, rounded = of("accumulator"), of("float32")
    assert len(wide) == 8
    for a, b in zip(wide, rounded, strict=True):
        assert half_exact(a) < 0.2 or not a.any()
        assert half_exact(b) == 1
        np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01 * np.abs(b).max())


class Stateful(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(5, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))
        self.last = "none"

    def __call__(self, ids):
        self.calls[...] += 1
        self.last = "called"
        return self.linear(self.dropout(self.norm(self.embed(ids))))


def test_a_model_s_state_is_updated_as_in_flax():
    ids = jnp.arange(64) % 5

    def after(grads):
        with use_policy("mixed_bfloat16"):
            model = Stateful()
        step = nnx.value_and_grad(
            lambda model, ids: (weighed(model(ids)), {"calls": model.calls[...], "text": "aux"}),
            has_aux=True,
            grads=grads,
        )
        (loss, aux), gradients = step(model, ids)
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


def test_gradients_by_a_filter_and_by_several_arguments():
    with use_policy("mixed_bfloat16"):
        model, other = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))

    def loss(model, other):
        return weighed(model(X)) + weighed(other(X))

    biases = nnx.DiffState(1, nnx.PathContains("bias"))
    first, second = nnx.grad(loss, argnums=(0, biases), grads="accumulator")(model, other)
    assert worst(first["kernel"][...]) < 1e-6
    assert list(second) == ["bias"]
    np.testing.assert_allclose(second["bias"][...], C.astype(np.float64).sum(0), rtol=1e-5)


def test_a_shared_param_gets_the_sum_over_its_uses():
    class Tied(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
            self.same = self.up

        def __call__(self, x):
            return weighed(self.up(x)) + weighed(self.same(x))

    with use_policy("p=bf16,c=bf16"):
        model = Tied()
    got = nnx.grad(lambda model: model(X), grads="accumulator")(model)
    (kernel,) = jax.tree.leaves(got)
    assert worst(kernel / 2) < 1e-6


def test_a_train_step_of_nnx_s_optimizer():
    with use_policy("mixed_bfloat16"):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    before = model.kernel[...]
    _, gradients = nnx.value_and_grad(lambda m: weighed(m(X)), grads="accumulator")(model)
    optimizer.update(model, gradients)
    assert worst(before - model.kernel[...]) < 1e-5
