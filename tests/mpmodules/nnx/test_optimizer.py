"""`nnx.Optimizer` around `mixed_precision`: hyperparameters, averages of masters, resync, without
glue.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpmodules import nnx
from policy import (
    DtypePolicyWarning,
    DynamicLossScale,
    loss_scale_of,
    master_params,
    mixed_precision,
    select_tree,
)
from policy.optim import convert, finite_of, init_from_master, resync
from policy.optim.rounding import round_to

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def loss_fn(model, x):
    return jnp.square(model(x).astype(jnp.float32) - 1).mean()


def parts(param_dtype, learning_rate=0.05) -> Any:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=param_dtype, dtype=jnp.float32)
    tx = mixed_precision(
        optax.inject_hyperparams(optax.adamw)(learning_rate=learning_rate),
        "mixed_bfloat16",
        loss_scale="dynamic",
    )
    return model, tx, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def step(model, optimizer):
    _, gradients = nnx.value_and_grad(loss_fn, loss_scale=loss_scale_of(optimizer))(model, X)
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # optax.apply_updates adds float32 updates to half-precision params
        optimizer.update(model, gradients)


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_moments_in_8_bits_step_convert_and_resume_in_an_optimizer():
    def made(moments: Any) -> Any:
        model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
        key = None if moments is None else jax.random.key(1)
        tx = mixed_precision(optax.adam(1e-2), "float32", moment_dtype=moments, key=key)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def one(model, optimizer):
        _, gradients = nnx.value_and_grad(loss_fn)(model, jnp.sin(jnp.arange(64.0))[None])
        optimizer.update(model, gradients)

    model, optimizer = made({"mu": "int8", "nu": "float8"})
    plain_model, plain = made(None)
    for _ in range(2):
        one(model, optimizer)
        one(plain_model, plain)
    mu = optimizer.opt_state.inner[0].mu
    assert (mu.kernel.dtype, mu.bias.dtype) == (jnp.int8, jnp.float32)
    assert optimizer.opt_state.moment_scales[0].nu.kernel.shape == (64, 1)
    np.testing.assert_allclose(model.kernel[...], plain_model.kernel[...], atol=0.3 * 2e-2)
    state = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
    again = made({"mu": "int8", "nu": "float8"})
    nnx.update(again, state)
    one(*again)
    one(model, optimizer)
    for a, b in zip(values(nnx.state(again)), values(nnx.state((model, optimizer))), strict=True):
        np.testing.assert_array_equal(a, b)
    wide = convert(optimizer.opt_state, nnx.state(model, nnx.Param), to=plain.tx)
    nnx.update(plain.opt_state, nnx.state(wide))
    one(model, plain)
    assert plain.opt_state.inner[0].mu.kernel.dtype == jnp.float32


@pytest.mark.parametrize("param_dtype", DTYPES)
def test_masters_are_read_with_the_models_own_state(param_dtype):
    model, _, optimizer = parts(param_dtype)
    step(model, optimizer)
    params = nnx.state(model, nnx.Param)
    for holder in (optimizer, optimizer.opt_state):
        masters = master_params(params, holder)
        assert jax.tree.structure(masters) == jax.tree.structure(
            params
        )  # Params: nnx.update takes them
        assert {leaf.dtype for leaf in values(masters)} == {np.dtype("float32")}
        for master, param in zip(values(masters), values(params), strict=True):
            np.testing.assert_array_equal(round_to(jnp.asarray(master), param_dtype), param)
    average = optax.incremental_update(masters, jax.tree.map(jnp.zeros_like, masters), 0.5)
    for half, master in zip(values(average), values(masters), strict=True):
        np.testing.assert_array_equal(half, master / 2)


def test_hyperparameters_are_read_and_set_in_float32_and_masters_stay():
    model, _, optimizer = parts(jnp.bfloat16)
    step(model, optimizer)
    rate = optax.tree.get(optimizer.opt_state, "learning_rate")
    assert rate[...] == np.float32(0.05)
    before = values(optimizer.opt_state.masters)
    rate[...] = jnp.float32(0.0)  # in place: it is a Variable
    for a, b in zip(values(optimizer.opt_state.masters), before, strict=True):
        np.testing.assert_array_equal(a, b)
    optimizer.opt_state = optax.tree.set(optimizer.opt_state, weight_decay=jnp.float32(0.0))
    masters = values(master_params(nnx.state(model, nnx.Param), optimizer))
    step(model, optimizer)
    for a, b in zip(
        values(master_params(nnx.state(model, nnx.Param), optimizer)), masters, strict=True
    ):
        np.testing.assert_array_equal(a, b)  # a rate of 0
    assert optax.tree.get(optimizer.opt_state, "learning_rate").dtype == jnp.float32


@pytest.mark.parametrize("param_dtype", DTYPES)
def test_resync_follows_what_was_written_to_the_model(param_dtype):
    model, _, optimizer = parts(param_dtype)
    step(model, optimizer)
    model.kernel[...] = jnp.full((3, 2), 0.25, param_dtype)
    structure = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = resync(nnx.state(model, nnx.Param), optimizer.opt_state)
    assert jax.tree.structure(optimizer.opt_state) == structure
    masters = master_params(nnx.state(model, nnx.Param), optimizer)
    np.testing.assert_array_equal(masters["kernel"][...], 0.25)
    step(model, optimizer)
    assert finite_of(optimizer)
    assert not (np.asarray(model.kernel[...], np.float32) == 0.25).any()


def test_params_beside_those_that_the_optimizer_steps_are_refused_by_name():
    model = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2)))
    only_head = nnx.All(nnx.Param, nnx.PathContains(1))
    tx = mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    optimizer = nnx.Optimizer(model, tx, wrt=only_head)
    text = (
        r"Unexpected: layers/0/bias, layers/0/kernel\. .* Pass the params that the optimizer steps"
    )
    with pytest.raises(ValueError, match=text):
        master_params(nnx.state(model, nnx.Param), optimizer)
    assert master_params(nnx.state(model, only_head), optimizer)


# --------------------------------------------------------------------------------------------------
# gradients that are still scaled
# --------------------------------------------------------------------------------------------------


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
        differentiated = nnx.value_and_grad(
            loss_fn, loss_scale=loss_scale_of(optimizer), grads=grads
        )
        loss, gradients = differentiated(model, x)
        updates = optimizer.update(model, gradients)
        after = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        nnx.update(model, select_tree(finite_of(optimizer), after, before))
        return loss, updates

    return step


def everything(*parts):
    leaves = jax.tree.leaves(nnx.as_pure(nnx.state(parts)))
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in leaves]


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16", "float16"])
def test_scaled_gradients_step_as_true_ones_do_within_their_rounding(policy):
    ends = {}
    for grads in ("float32", "compute"):
        model, optimizer = trained(policy)
        step = train_step(grads)
        _, _, updates = (step(model, optimizer, X)[1] for _ in range(3))
        assert jax.tree.structure(updates) == jax.tree.structure(
            nnx.as_pure(nnx.state(model, nnx.Param))
        )
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
        assert (optimizer.opt_state.count[...], optimizer.step[...]) == (3, 3)
        ends[grads] = values(master_params(nnx.state(model, nnx.Param), optimizer))
    for scaled, true in zip(ends["compute"], ends["float32"], strict=True):
        np.testing.assert_allclose(
            scaled, true, rtol=0, atol=0.01
        )  # three Adam steps of 0.05, from rounded gradients


@pytest.mark.parametrize("grads", ["float32", "compute"])
def test_a_skipped_step_leaves_params_statistics_and_moments_and_halves_the_scale(grads):
    model, optimizer = trained("mixed_float16")
    step = train_step(grads)
    step(model, optimizer, X)
    kept = lambda: everything(  # noqa: E731
        nnx.state(model, nnx.Param, nnx.BatchStat),
        optimizer.opt_state.inner,
        optimizer.opt_state.count,
    )
    before = kept()
    step(model, optimizer, X.at[0, 0].set(jnp.inf))
    for a, b in zip(kept(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not finite_of(optimizer)
    assert loss_scale_of(optimizer).loss_scale == 2.0**14
    assert optimizer.opt_state.skipped[...] == 1
    step(model, optimizer, X)
    assert finite_of(optimizer)


def test_a_scale_that_float16_cannot_hold_is_found_by_skipping():
    model, optimizer = trained("mixed_float16", DynamicLossScale(2.0**30))
    one = train_step("compute")
    finite = []
    for _ in range(24):
        one(model, optimizer, X)
        finite.append(bool(finite_of(optimizer)))
    first = finite.index(True)
    assert 0 < first < 24 and all(finite[first:])
    assert loss_scale_of(optimizer).loss_scale == 2.0 ** (30 - first)


def test_float32_params_start_from_masters():
    of_training = nnx.state(Net(nnx.Rngs(7)), nnx.Param)
    model, optimizer = trained("bfloat16", None)
    params, state = init_from_master(optimizer.tx, nnx.as_pure(of_training))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))
    masters = master_params(nnx.state(model, nnx.Param), optimizer)
    for a, b in zip(values(masters), values(of_training), strict=True):
        np.testing.assert_array_equal(a, b)
    train_step("compute")(model, optimizer, X)


def test_multi_steps_goes_inside():
    model, _, _ = parts(jnp.bfloat16)
    tx = mixed_precision(optax.MultiSteps(optax.sgd(0.1), 2), "bfloat16", loss_scale=8.0)
    optimizer: Any = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = values(nnx.state(model, nnx.Param))
    for moves in (False, True):
        step(model, optimizer)
        after = values(nnx.state(model, nnx.Param))
        assert all(map(np.array_equal, after, before)) != moves


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
    for a, b in zip(everything(model, optimizer), everything(*again), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert loss_scale_of(again[1]).loss_scale == 2.0**11  # fell once, and grew twice


def test_half_precision_params_step_under_strict_promotion_as_under_the_standard():
    ends = []
    for promotion in ("strict", "standard"):
        model, optimizer = trained("bfloat16", None)
        gradients = nnx.grad(loss_fn)(model, X)
        with jax.numpy_dtype_promotion(promotion):
            optimizer.update(model, gradients)
        ends.append(values(nnx.state(model, nnx.Param)))
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_plain_transform_refuses_them_and_flaxs_errors_and_other_optimizer_stand():
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


def test_a_loss_that_was_scaled_by_hand_is_told():
    model, optimizer = trained("mixed_float16")

    @nnx.jit
    def step(model, optimizer, x):
        loss_scale = loss_scale_of(optimizer)
        optimizer.update(model, nnx.grad(lambda model: loss_scale.scale(loss_fn(model, x)))(model))

    with pytest.warns(
        DtypePolicyWarning, match=r"reached mixed_precision without loss_scale\.unscale"
    ):
        step(model, optimizer, X)
