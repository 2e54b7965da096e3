import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpmodules.nnx._training import grad, value_and_grad
from policy.grads.microbatching import accumulate_gradients, split_batch
from policy.grads.value_and_grad import ScaledGradients
from policy.grads.value_and_grad import value_and_grad as plain_value_and_grad

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


class Net(nnx.Module):
    def __init__(self, param_dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(3, 4, rngs=rngs, dtype=jnp.float32, param_dtype=param_dtype)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(self.norm(self.inner(x))))

    def loss(self, x):
        return loss_of(self, x)


def loss_of(model, x):
    return jnp.square(model(x) - 1.0).mean()


def leaves(tree):
    return jax.tree.leaves(tree)


def test_gradients_and_updates_equal_flaxs():
    ours, theirs = Net(), Net()
    value, gradients = value_and_grad(loss_of, loss_scale=2.0**10)(ours, X)
    expected_value, expected = nnx.value_and_grad(loss_of)(theirs, X)
    np.testing.assert_array_equal(value, expected_value)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), gradients, expected)
    for a, b in zip(
        leaves(nnx.state(ours, nnx.BatchStat)),
        leaves(nnx.state(theirs, nnx.BatchStat)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert ours.norm.mean[...].any()  # moved, and still there
    counts = [
        model.dropout.rngs.count[...] for model in (ours, theirs) if model.dropout.rngs is not None
    ]
    assert counts[0] == counts[1] > 0


def test_gradients_of_half_params_are_float32_and_complex_losses_differentiate_as_in_flax():
    gradients = grad(loss_of)(Net(jnp.bfloat16), X)
    assert {leaf.dtype for leaf in leaves(gradients)} == {jnp.dtype(jnp.float32)}
    model = nnx.Dict(w=nnx.Param(jnp.asarray(1.0 + 2.0j)))
    gradients = grad(lambda m: m["w"][...] ** 2, holomorphic=True)(model)
    np.testing.assert_array_equal(gradients["w"][...], 2.0 + 4.0j)


def test_compute_gradients_are_still_scaled_and_rounded():
    model = Net()
    model.eval()
    scaled = grad(loss_of, loss_scale=8.0, grads="compute", policy="mixed_bfloat16")(model, X)
    assert isinstance(scaled, ScaledGradients)
    assert {leaf.dtype for leaf in leaves(scaled.tree)} == {jnp.dtype(jnp.bfloat16)}
    plain = grad(loss_of)(model, X)
    jax.tree.map(
        lambda s, p: np.testing.assert_allclose(
            s.astype(jnp.float32), p * 8, rtol=2.0**-8, atol=1e-6
        ),
        scaled.tree,
        plain,
    )


def test_aux_argnums_and_filters_work_as_in_flax():
    model = Net()

    def loss(x, model):
        return loss_of(model, x), "aux"

    (value, aux), gradients = value_and_grad(loss, argnums=1, has_aux=True)(X, model)
    assert aux == "aux"
    assert value.dtype == jnp.float32
    kernel_only = grad(loss, argnums=nnx.DiffState(1, nnx.PathContains("kernel")), has_aux=True)(
        X, model
    )[0]
    assert len(leaves(kernel_only)) == 2 < len(leaves(gradients))


def test_half_precision_params_give_float32_gradients():
    gradients = grad(loss_of)(Net(jnp.bfloat16), X)
    assert {leaf.dtype for leaf in leaves(gradients)} == {jnp.dtype(jnp.float32)}


def test_the_framework_free_one_refuses_a_model_and_takes_its_state():
    model = Net()
    model.eval()
    for held in (model, {"model": model, "w": X}, model.inner.kernel):
        with pytest.raises(TypeError, match="Argument 0 holds nnx references"):
            plain_value_and_grad(lambda held: loss_of(model, X))(held)
    with pytest.raises(ValueError, match=r"take the model as an argument, but got the bound metho"):
        value_and_grad(model.loss)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    _, gradients = plain_value_and_grad(
        lambda params: loss_of(nnx.merge(graphdef, params, rest), X)
    )(params)
    expected = nnx.grad(loss_of)(model, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), gradients, expected)


@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_both_decorate_as_flaxs_do(loss_scale):
    @value_and_grad(has_aux=True, loss_scale=loss_scale)
    def loss_and_aux(model, x):
        return loss_of(model, x), "aux"

    @grad(loss_scale=loss_scale)
    def loss(model, x):
        return loss_of(model, x)

    model = Net()
    model.eval()
    (value, aux), gradients = loss_and_aux(model, X)
    assert aux == "aux"
    np.testing.assert_array_equal(value, loss_of(model, X))
    jax.tree.map(np.testing.assert_array_equal, gradients, loss(model, X))


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("loss_scale", [None, 8.0])
@pytest.mark.parametrize("graph_updates", [True, False])
def test_the_gradient_of_a_shared_parameter_stays_shared(graph_updates, loss_scale, param_dtype):
    shared = nnx.Param(jnp.ones((), param_dtype))
    model = nnx.Dict(a=shared, b=nnx.List([shared, nnx.Param(jnp.ones((), param_dtype))]))
    gradients = grad(
        lambda m: m["a"][...] * m["b"][0][...] + m["b"][1][...],
        loss_scale=loss_scale,
        graph_updates=graph_updates,
    )(model)
    state = gradients if graph_updates else nnx.state(gradients)
    assert [leaf.item() for leaf in jax.tree.leaves(state)] == [2.0, 1.0]
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}


def test_a_model_is_not_accumulated_over():
    model, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
    loss_fn = lambda model, x: model(x).mean()  # noqa: E731
    text = r"takes params that are arrays, but got an nnx model \(Linear\)\. Split it"
    for wrap in (lambda f: f, nnx.jit):
        step = wrap(lambda m, x: accumulate_gradients(value_and_grad(loss_fn), m, x))
        with pytest.raises(TypeError, match=text):
            step(model, split_batch(x, 4))
