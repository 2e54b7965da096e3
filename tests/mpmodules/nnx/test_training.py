"""Gradients and optimizers of nnx models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from mpmodules.nnx._training import grad, value_and_grad
from policy import (
    DynamicLossScale,
    finite_of,
    init_from_master,
    loss_scale_of,
    master_params,
    mixed_precision,
    select_tree,
)
from policy.grads.microbatching import accumulate_gradients, split_batch
from policy.grads.value_and_grad import ScaledGradients
from policy.grads.value_and_grad import value_and_grad as plain_value_and_grad
from policy.optim import convert, resync
from policy.optim.storage_modes import round_to

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_equal(found, expected):
    for a, b in zip(values(found), values(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_close(found, expected, **tolerance):
    for a, b in zip(values(found), values(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, **tolerance)


def dtypes(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


class Small(flax_nnx.Module):
    def __init__(self, param_dtype=jnp.float32):
        rngs = flax_nnx.Rngs(0)
        self.inner = flax_nnx.Linear(3, 4, rngs=rngs, dtype=jnp.float32, param_dtype=param_dtype)
        self.norm = flax_nnx.BatchNorm(4, rngs=rngs)
        self.dropout = flax_nnx.Dropout(0.5, rngs=rngs)
        self.outer = flax_nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(self.norm(self.inner(x))))

    def loss(self, x):
        return loss_of(self, x)


def loss_of(model, x):
    return jnp.square(model(x) - 1.0).mean()


@pytest.fixture
def model() -> Any:
    made = Small()
    made.eval()
    return made


@pytest.mark.slow
def test_gradients_and_updates_equal_flaxs():
    ours, theirs = Small(), Small()
    value, gradients = value_and_grad(loss_of, loss_scale=2.0**10)(ours, X)
    expected_value, expected = flax_nnx.value_and_grad(loss_of)(theirs, X)
    np.testing.assert_array_equal(value, expected_value)
    assert_close(gradients, expected, rtol=1e-6)
    assert_equal(*(flax_nnx.state(model, flax_nnx.BatchStat) for model in (ours, theirs)))
    assert ours.norm.mean[...].any()  # moved, and still there
    models: Any = ours, theirs
    counts = [model.dropout.rngs.count[...] for model in models]
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_gradients_of_half_params_are_float32_and_complex_losses_differentiate_as_in_flax():
    gradients = grad(loss_of)(Small(jnp.bfloat16), X)
    assert dtypes(gradients) == {jnp.dtype(jnp.float32)}
    model = flax_nnx.Dict(w=flax_nnx.Param(jnp.asarray(1.0 + 2.0j)))
    gradients = grad(lambda m: m["w"][...] ** 2, holomorphic=True)(model)
    np.testing.assert_array_equal(gradients["w"][...], 2.0 + 4.0j)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flax.nnx.* ran where:policy.DtypePolicyWarning")
def test_compute_gradients_are_still_scaled_and_rounded(model):
    scaled = grad(loss_of, loss_scale=8.0, grads="compute", policy="mixed_bfloat16")(model, X)
    assert isinstance(scaled, ScaledGradients)
    assert dtypes(scaled.tree) == {jnp.dtype(jnp.bfloat16)}
    plain = jax.tree.map(lambda leaf: leaf * 8, grad(loss_of)(model, X))
    assert_close(scaled.tree, plain, rtol=2.0**-8, atol=1e-6)


@pytest.mark.slow
def test_aux_argnums_and_filters_work_as_in_flax():
    model = Small()

    def loss(x, model):
        return loss_of(model, x), "aux"

    (value, aux), gradients = value_and_grad(loss, argnums=1, has_aux=True)(X, model)
    assert aux == "aux"
    assert value.dtype == jnp.float32
    kernels = flax_nnx.DiffState(1, flax_nnx.PathContains("kernel"))
    kernel_only, _ = grad(loss, argnums=kernels, has_aux=True)(X, model)
    assert len(jax.tree.leaves(kernel_only)) == 2 < len(jax.tree.leaves(gradients))


def test_the_framework_free_one_rejects_a_model_and_takes_its_state(model):
    for held in (model, {"model": model, "w": X}, model.inner.kernel):
        with pytest.raises(TypeError, match=r"Argument 0 holds nnx ref.*mpmodules\.nnx\.val"):
            plain_value_and_grad(lambda held: loss_of(model, X))(held)
    with pytest.raises(ValueError, match=r"take the model as an argument, and bound methods"):
        value_and_grad(model.loss)
    graphdef, params, rest = flax_nnx.split(model, flax_nnx.Param, ...)
    merged = lambda params: flax_nnx.merge(graphdef, params, rest)  # noqa: E731
    _, gradients = plain_value_and_grad(lambda params: loss_of(merged(params), X))(params)
    assert_close(gradients, flax_nnx.grad(loss_of)(model, X), rtol=1e-6)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_both_decorate_as_flaxs_do(model, loss_scale):
    with_aux = lambda model, x: (loss_of(model, x), "aux")  # noqa: E731
    decorated = value_and_grad(has_aux=True, loss_scale=loss_scale)(with_aux)
    (value, aux), gradients = decorated(model, X)
    assert aux == "aux"
    np.testing.assert_array_equal(value, loss_of(model, X))
    assert_equal(gradients, grad(loss_scale=loss_scale)(loss_of)(model, X))


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("loss_scale", [None, 8.0])
@pytest.mark.parametrize("graph_updates", [True, False])
def test_the_gradient_of_a_shared_parameter_stays_shared(graph_updates, loss_scale, param_dtype):
    shared, other = (flax_nnx.Param(jnp.ones((), param_dtype)) for _ in range(2))
    model = flax_nnx.Dict(a=shared, b=flax_nnx.List([shared, other]))

    def loss(m):
        return (m["a"][...] * m["b"][0][...] + m["b"][1][...]).astype(jnp.float32)

    gradients = grad(loss, loss_scale=loss_scale, graph_updates=graph_updates)(model)
    state = gradients if graph_updates else flax_nnx.state(gradients)
    assert [leaf.item() for leaf in jax.tree.leaves(state)] == [2.0, 1.0]
    assert dtypes(state) == {jnp.dtype(jnp.float32)}


def test_a_model_is_not_accumulated_over():
    model, x = flax_nnx.Linear(4, 2, rngs=flax_nnx.Rngs(0)), jnp.ones((8, 4))
    loss_fn = lambda model, x: model(x).mean()  # noqa: E731
    text = r"takes params that are arrays, but got an nnx model \(Linear\)\. Split it"
    for wrap in (lambda f: f, flax_nnx.jit):
        step = wrap(lambda m, x: accumulate_gradients(value_and_grad(loss_fn), m, x))
        with pytest.raises(TypeError, match=text):
            step(model, split_batch(x, 4))


def loss_fn(model, x):
    return jnp.square(model(x).astype(jnp.float32) - 1).mean()


def masters_of(model, optimizer):
    return master_params(nnx.state(model, nnx.Param), optimizer)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop, self.head = nnx.Dropout(0.25, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(nnx.relu(self.norm(self.up(x)))))


def trained(policy, loss_scale: Any = "dynamic") -> Any:
    model = Net(nnx.Rngs(0), dtype_policy=policy)
    tx = mixed_precision(optax.adamw(0.05), policy, loss_scale=loss_scale, clip_global_norm=1.0)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def train_step(grads):
    @nnx.jit
    def step(model, optimizer, x):
        before = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        scale = loss_scale_of(optimizer)
        loss, gradients = nnx.value_and_grad(loss_fn, loss_scale=scale, grads=grads)(model, x)
        updates = optimizer.update(model, gradients)
        after = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        nnx.update(model, select_tree(finite_of(optimizer), after, before))
        return loss, updates

    return step


def everything(*parts):
    leaves = jax.tree.leaves(nnx.as_pure(nnx.state(parts)))
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in leaves]


@pytest.mark.slow
def test_moments_in_8_bits_step_convert_and_resume_in_an_optimizer():
    def made(moments: Any = None) -> Any:
        model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
        key = None if moments is None else jax.random.key(1)
        tx = mixed_precision(optax.adam(1e-2), "float32", moment_dtype=moments, key=key)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def one(model, optimizer):
        _, gradients = nnx.value_and_grad(loss_fn)(model, jnp.sin(jnp.arange(64.0))[None])
        optimizer.update(model, gradients)

    moments = {"mu": "int8", "nu": "int8"}
    (model, optimizer), again, plain = made(moments), made(moments), made()
    for _ in range(2):
        one(model, optimizer)
        one(*plain)
    mu = optimizer.opt_state.inner[0].mu
    assert (mu.kernel.qvalue.dtype, mu.bias.dtype) == (jnp.int8, jnp.float32)
    assert mu.kernel.scale.shape == (64, 1)
    np.testing.assert_allclose(model.kernel[...], plain[0].kernel[...], atol=0.3 * 2e-2)
    nnx.update(again, jax.tree.map(jnp.copy, nnx.state((model, optimizer))))
    for pair in (again, (model, optimizer)):
        one(*pair)
    assert_equal(nnx.state(again), nnx.state((model, optimizer)))
    wide = convert(optimizer.opt_state, nnx.state(model, nnx.Param), to=plain[1].tx)
    nnx.update(plain[1].opt_state, nnx.state(wide))
    one(model, plain[1])
    assert plain[1].opt_state.inner[0].mu.kernel.dtype == jnp.float32


EACH_PARAM_DTYPE = pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float16"])


@pytest.mark.slow
@EACH_PARAM_DTYPE
def test_masters_are_read_with_the_models_own_state(policy):
    model, optimizer = trained(policy)
    train_step("float32")(model, optimizer, X)
    params = nnx.state(model, nnx.Param)
    for holder in (optimizer, optimizer.opt_state):
        masters = master_params(params, holder)
        assert jax.tree.structure(masters) == jax.tree.structure(params)  # nnx.update takes them
        assert dtypes(masters) == {np.dtype("float32")}
        for master, param in zip(values(masters), values(params), strict=True):
            np.testing.assert_array_equal(round_to(jnp.asarray(master), param.dtype), param)
    average = optax.incremental_update(masters, jax.tree.map(jnp.zeros_like, masters), 0.5)
    assert_equal(average, jax.tree.map(lambda master: master / 2, masters))


@pytest.mark.slow
def test_hyperparameters_are_read_and_set_in_float32_and_masters_stay():
    model, step = Net(nnx.Rngs(0), dtype_policy="bfloat16"), train_step("float32")
    adamw = optax.inject_hyperparams(optax.adamw)(learning_rate=0.05)
    tx = mixed_precision(adamw, "bfloat16", loss_scale="dynamic")
    optimizer: Any = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step(model, optimizer, X)
    rate = optax.tree.get(optimizer.opt_state, "learning_rate")
    assert rate[...] == np.float32(0.05)
    before = values(optimizer.opt_state.masters)
    rate[...] = jnp.float32(0.0)  # in place: it is a Variable
    assert_equal(optimizer.opt_state.masters, before)
    optimizer.opt_state = optax.tree.set(optimizer.opt_state, weight_decay=jnp.float32(0.0))
    masters = values(masters_of(model, optimizer))
    step(model, optimizer, X)
    assert_equal(masters_of(model, optimizer), masters)  # a rate of 0
    assert optax.tree.get(optimizer.opt_state, "learning_rate").dtype == jnp.float32


@pytest.mark.cases(slow=2)
@EACH_PARAM_DTYPE
def test_resync_follows_what_was_written_to_the_model(policy):
    (model, optimizer), step = trained(policy), train_step("float32")
    step(model, optimizer, X)
    kernel = model.head.kernel
    kernel[...] = jnp.full_like(kernel[...], 0.25)
    structure = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = resync(nnx.state(model, nnx.Param), optimizer.opt_state)
    assert jax.tree.structure(optimizer.opt_state) == structure
    np.testing.assert_array_equal(masters_of(model, optimizer)["head"]["kernel"][...], 0.25)
    step(model, optimizer, X)
    assert finite_of(optimizer)
    assert (np.asarray(kernel[...], np.float32) != 0.25).any()


def test_params_beside_those_that_the_optimizer_steps_are_rejected_by_name():
    model = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2)))
    only_head = nnx.All(nnx.Param, nnx.PathContains(1))
    tx = mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    optimizer = nnx.Optimizer(model, tx, wrt=only_head)
    text = r"Unexpected: layers/0/bias, layers/0/kernel\. Pass the params that the optimizer steps"
    with pytest.raises(ValueError, match=text):
        masters_of(model, optimizer)
    assert master_params(nnx.state(model, only_head), optimizer)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16", "float16"])
def test_scaled_gradients_step_as_true_ones_do_within_their_rounding(policy):
    ends = {}
    for grads in ("float32", "compute"):
        model, optimizer = trained(policy)
        step = train_step(grads)
        _, _, updates = (step(model, optimizer, X)[1] for _ in range(3))
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert dtypes(updates) == {jnp.dtype(jnp.float32)}
        assert (optimizer.opt_state.count[...], optimizer.step[...]) == (3, 3)
        ends[grads] = values(masters_of(model, optimizer))
    # three Adam steps of 0.05, from rounded gradients
    assert_close(ends["compute"], ends["float32"], rtol=0, atol=0.01)


@pytest.mark.slow
def test_float32_params_start_from_masters():
    of_training = nnx.state(Net(nnx.Rngs(7)), nnx.Param)
    model, optimizer = trained("bfloat16", None)
    params, state = init_from_master(optimizer.tx, nnx.as_pure(of_training))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))
    assert_equal(masters_of(model, optimizer), of_training)
    train_step("compute")(model, optimizer, X)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(policy, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    step = train_step("compute")
    model, optimizer = trained(policy, DynamicLossScale(2.0**10, period=3))
    for x in (X, X.at[0, 0].set(jnp.nan), X, X):
        step(model, optimizer, x)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", nnx.state((model, optimizer)))
    again: Any = trained(policy, DynamicLossScale(2.0**10, period=3))
    with checkpoint.StandardCheckpointer() as checkpointer:
        nnx.update(again, checkpointer.restore(tmp_path / "step", nnx.state(again)))
    for _ in range(4):
        assert step(model, optimizer, X)[0] == step(again[0], again[1], X)[0]
    assert_equal(everything(model, optimizer), everything(*again))
    assert loss_scale_of(again[1]).loss_scale == 2.0**11  # fell once, and grew twice


@pytest.mark.slow
def test_a_plain_transform_rejects_them_and_flaxs_errors_and_other_optimizer_stand():
    model, _ = trained("bfloat16", None)
    optimizer: Any = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(
        TypeError, match=r"^grads are ScaledGradients, .* but tx is GradientTransformation\w*: make"
    ):
        optimizer.update(model, nnx.grad(loss_fn, grads="compute")(model, X))
    with pytest.raises(TypeError, match="Missing required argument `grads`"):
        optimizer.update(model)
    owner: Any = nnx.ModelAndOptimizer(model, mixed_precision(optax.sgd(0.1), "bfloat16"))
    before = everything(model)
    owner.update(nnx.grad(loss_fn, grads="compute")(model, X))
    assert any((a != b).any() for a, b in zip(everything(model), before, strict=True))
    with pytest.raises(TypeError, match="Missing required argument `wrt`"):
        nnx.Optimizer(model, optax.sgd(0.1))  # pyright: ignore[reportCallIssue]
