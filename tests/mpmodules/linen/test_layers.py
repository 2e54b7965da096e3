"""What linen's layers have alone: rules of parts, lifted cells, and Flax's fp8 matmuls."""

from __future__ import annotations

import warnings
from typing import Any

import flax.linen
import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpmodules import linen as nn
from mpmodules import linen as our_nn
from mpmodules.linen import apply_policy
from policy import apply_gradients, loss_scale_of, mixed_precision, use_policy, value_and_grad
from tests.mpmodules.recurrent_cells import (
    BATCH,
    HIDDEN,
    KEY,
    LINEN,
    TIME,
    WIDTH,
    assert_close,
    dtypes,
    equations,
    loop,
    matmul_dtypes,
    sequence,
)

BOTH = pytest.mark.parametrize("nn", [our_nn, flax_nn])
MIXED = "mixed_bfloat16"
OVER_TIME: Any = {
    "variable_broadcast": "params",
    "split_rngs": {"params": False},
    "in_axes": 1,
    "out_axes": 1,
}


@pytest.mark.parametrize("ported", (False, True))
def test_a_rule_for_the_parts_of_an_optimized_cell_is_refused(ported):
    wing: Any = flax_nn if ported else our_nn
    rnn, x = wing.RNN(wing.OptimizedLSTMCell(HIDDEN)), jnp.ones((BATCH, TIME, WIDTH))

    def init(rules: Any) -> Any:
        if ported:
            return jax.eval_shape(apply_policy(rnn, "mixed_bfloat16", rules).init, KEY, x)
        with use_policy("mixed_bfloat16", rules):
            return jax.eval_shape(rnn.init, KEY, x)

    with pytest.raises(
        ValueError, match=r"^Rule 'cell/hi' matched no module. Modules seen: cell\.(\n|$)"
    ):
        init({"cell/hi": "float32"})
    variables = init({"cell(/hi)?": "p=bf16,c=f32"})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"bfloat16"}


def test_a_rule_for_the_parts_of_a_root_cell_is_refused_too():
    cell: Any = our_nn.OptimizedLSTMCell(HIDDEN)
    x = jnp.ones((BATCH, WIDTH))
    carry = cell.initialize_carry(KEY, x.shape)
    with (
        use_policy("mixed_bfloat16", {"h.": "float32"}),
        pytest.raises(ValueError, match="only the root"),
    ):
        jax.eval_shape(cell.init, KEY, carry, x)


# --- lifted ---------------------------------------------------------------------------------------


class FunctionScan(flax_nn.Module):
    """The function form, as third-party models have it, with cells of either library."""

    nn: Any

    @flax_nn.compact
    def __call__(self, x):
        cell = self.nn.LSTMCell(HIDDEN)
        carry = cell.initialize_carry(KEY, x[:, 0].shape)
        return flax_nn.scan(lambda cell, carry, x: cell(carry, x), **OVER_TIME)(cell, carry, x)


@BOTH
def test_a_class_lifted_cell_runs_in_compute_dtype_with_its_boundary_outside_the_loop(nn):
    x, cell = sequence(), nn.scan(nn.LSTMCell, **OVER_TIME)(HIDDEN)
    cell = apply_policy(cell, MIXED) if nn is flax_nn else cell.clone(dtype_policy=MIXED)
    carry = cell.initialize_carry(KEY, x[:, 0].shape)
    (last, y), variables = jax.eval_shape(lambda: cell.init_with_output(KEY, carry, x))
    assert (dtypes(variables), dtypes(last), dtypes(y)) == ({"float32"}, dtypes(carry), {"float32"})
    assert matmul_dtypes(cell.apply, variables, carry, x) == {"bfloat16"}
    found = equations(cell.apply, variables, carry, x)
    (scan,) = [e for e in found if e.primitive.name == "scan"]
    assert {v.aval.dtype.name for v in scan.outvars} == {"bfloat16"} | dtypes(carry)


@BOTH
def test_a_function_form_scan_of_a_cell_keeps_its_carrys_type(nn):
    model: Any = apply_policy(FunctionScan(nn), MIXED)
    (_, y), variables = jax.eval_shape(lambda: model.init_with_output(KEY, sequence()))
    assert (dtypes(variables), dtypes(y)) == ({"float32"}, {"float32"})
    assert matmul_dtypes(model.apply, variables, sequence()) == {"bfloat16"}


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell"])
def test_a_rematerialised_cell_and_rnn_give_the_same_gradients(name):
    x, plain = sequence(), loop(LINEN, our_nn, name, MIXED)
    cell, rematerialised = getattr(our_nn, name), our_nn.remat(getattr(our_nn, name))

    def gradients(rnn: Any) -> Any:
        return jax.jit(jax.grad(lambda v: rnn.apply(v, x).sum()))(plain.params)

    with use_policy(MIXED):
        expected = gradients(our_nn.RNN(cell(HIDDEN)))
        for rnn in (our_nn.RNN(rematerialised(HIDDEN)), our_nn.remat(our_nn.RNN)(cell(HIDDEN))):
            assert dtypes(jax.eval_shape(rnn.apply, plain.params, x)) == {"float32"}
            assert_close(gradients(rnn), expected, atol=2**-5)


OWG = "_overwrite_with_gradient"
SQUARE = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.bfloat16)


@pytest.fixture(scope="module")
def case() -> Any:
    model = nn.Dense(16, dot_general_cls=flax.linen.Fp8DirectDotGeneralOp)
    apply: Any = model.apply
    with use_policy("mixed_bfloat16"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variables = model.init(jax.random.key(0), SQUARE)

    def loss_fn(variables, x, factor=1.0):
        with use_policy("mixed_bfloat16"):
            return jnp.square(apply(variables, x).astype(jnp.float32)).mean() * factor

    return variables, loss_fn


def equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("grads", ["float32", "compute"])
def test_the_collection_takes_the_value_that_plain_jax_gives_it(case, grads):
    variables, loss_fn = case
    tx = mixed_precision(
        optax.adamw(1e-2, weight_decay=0.1),
        "mixed_bfloat16",
        loss_scale="dynamic",
        clip_global_norm=1e-3,
    )
    opt_state = tx.init(variables)
    assert len(jax.tree.leaves(opt_state.inner)) == 5  # a count, two moments of kernel and bias

    @jax.jit
    def step(variables, opt_state, factor):
        differentiated = value_and_grad(loss_fn, loss_scale=loss_scale_of(opt_state), grads=grads)
        return apply_gradients(
            tx, variables, opt_state, differentiated(variables, SQUARE, factor)[1]
        )

    new, after, finite = step(variables, opt_state, 1.0)
    assert finite
    expected = jax.grad(loss_fn)(variables, SQUARE)[OWG]
    # the scales of the operands are plain JAX's; that of the output's gradient follows the loss
    # scale
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(new[OWG]), jax.tree.leaves(expected), strict=True
    ):
        assert ours.dtype == theirs.dtype
        if "output_grad" not in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert not equal(new[OWG], variables[OWG])
    assert not equal(new["params"], variables["params"])

    skipped, after, finite = step(new, after, np.nan)
    assert not finite
    assert equal(skipped, new)  # the collection keeps its old value too
    assert after.skipped == 1
