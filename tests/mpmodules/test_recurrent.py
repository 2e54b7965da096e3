"""Recurrent cells compute, return and keep their carry in what the policy says, in both wings, and
no boundary casts a carry.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import DtypePolicyWarning, get_policy, use_policy
from tests.mpmodules.recurrent_cells import (
    BATCH,
    CELLS,
    HIDDEN,
    LINEN,
    NNX,
    POLICIES,
    TIME,
    WIDTH,
    WINGS,
    assert_close,
    assert_same_bits,
    built,
    dtypes,
    equations,
    loop,
    lowered,
    matmul_dtypes,
    sequence,
    shape_of,
    types,
)

EACH_CELL = pytest.mark.parametrize(("wing", "name"), CELLS, ids=lambda x: str(x))
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES)
EACH_WING = pytest.mark.parametrize("wing", WINGS, ids=str)


# --------------------------------------------------------------------------------------------------
# Without a policy
# --------------------------------------------------------------------------------------------------


@EACH_CELL
def test_without_a_policy_a_float32_cell_is_flaxs_bit_for_bit(wing, name):
    x = sequence(name)

    def run(lib: Any) -> Any:
        cell = wing.cell(lib, name)
        carry = wing.carry(cell, shape_of(name))
        step = wing.pure(lambda: cell, carry, x[:, 0])
        rnn = loop(wing, lib, name)
        gradients = jax.grad(lambda v, x: jnp.square(rnn.call(v, x)[1]).sum(), (0, 1))
        by_params, by_x = jax.jit(gradients)(rnn.params, x)
        taken = jax.jit(step.call)(step.params, carry, x[:, 0])
        return wing.values(step.params), carry, taken, wing.values(by_params), by_x

    assert_same_bits(run(wing.ours), run(wing.theirs))


@EACH_CELL
def test_without_a_policy_dtypes_are_inferred_as_flax_infers_them(wing, name):
    theirs = wing.cell(wing.theirs, name)
    carry, x = wing.carry(theirs, shape_of(name)), sequence(name)[:, 0]
    ours, theirs = (
        wing.pure(lambda lib=lib: wing.cell(lib, name), carry, x)
        for lib in (wing.ours, wing.theirs)
    )
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (carry, x))
    of_half_carry = [half] if wing is LINEN or not name.startswith("SimpleCell") else []
    with jax.numpy_dtype_promotion("standard"):
        for args in (*of_half_carry, (carry, half[1])):
            found, expected = (jax.eval_shape(m.call, m.params, *args) for m in (ours, theirs))
            assert found == expected


@pytest.mark.parametrize("half", ("bfloat16", "float16"))
@EACH_CELL
def test_without_a_policy_an_explicit_half_dtype_is_what_carry_and_output_are_in(wing, name, half):
    cell, carry = built(wing, name, dtype=half)
    assert dtypes(cell.params) == {"float32"}
    taken = jax.eval_shape(cell.call, cell.params, carry, sequence(name)[:, 0])
    assert dtypes(carry) == dtypes(taken) == {half}
    rnn = loop(wing, wing.ours, name, dtype=half)
    assert dtypes(jax.eval_shape(rnn.call, rnn.params, sequence(name))) == {half}


# --------------------------------------------------------------------------------------------------
# Under a policy
# --------------------------------------------------------------------------------------------------


@EACH_POLICY
@EACH_CELL
def test_a_policy_decides_every_dtype_of_a_cell_forward_and_backward(wing, name, policy):
    wanted, x = get_policy(policy), sequence(name)[:, 0]
    cell, carry = built(wing, name, policy)
    assert dtypes(cell.params) == {wanted.param_dtype.name}
    assert dtypes(carry) == {wanted.compute_dtype.name}

    def loss(params, carry, x):
        new_carry, y = cell.call(params, carry, x)
        return jnp.square(y.astype(jnp.float32)).sum(), (new_carry, y)

    step = jax.value_and_grad(loss, has_aux=True)
    (_, (new_carry, y)), gradients = jax.eval_shape(step, cell.params, carry, x)
    assert dtypes((new_carry, y)) == {wanted.compute_dtype.name}
    assert jax.tree.structure(new_carry) == jax.tree.structure(carry)
    assert dtypes(gradients) == {wanted.param_dtype.name}
    assert matmul_dtypes(step, cell.params, carry, x) == {wanted.compute_dtype.name}


@EACH_CELL
def test_half_parameters_have_flaxs_tree_and_orthogonal_kernels_are_drawn_in_float32(wing, name):
    ours, full = (wing.values(built(wing, name, policy)[0].params) for policy in ("bfloat16", None))
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, full)
    assert dtypes(ours) == {"bfloat16"}
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(full), strict=True):
        if b.ndim == 2 and b.shape[0] == HIDDEN:  # orthogonal; what runs in half draws in half
            assert_same_bits(a, b.astype(jnp.bfloat16))


@EACH_CELL
def test_a_hand_threaded_cell_lowers_to_the_same_program(wing, name):
    cell, carry = built(wing, name, "p=f32,c=bf16,o=bf16")
    x = sequence(name, jnp.bfloat16)[:, 0]
    half = {"dtype": jnp.bfloat16}
    with jax.numpy_dtype_promotion("standard"):
        by_hand = wing.pure(lambda: wing.cell(wing.theirs, name, **half), carry, x)
    assert lowered(cell.call, cell.params, carry, x) == lowered(
        by_hand.call, by_hand.params, carry, x
    )


@EACH_CELL
def test_the_carry_keeps_its_type_through_a_scan_also_where_it_was_made_in_float32(wing, name):
    wide = built(wing, name)[1]
    cell, half = built(wing, name, "mixed_bfloat16")
    steps = jnp.moveaxis(sequence(name), 1, 0)

    def scan(carry):
        return jax.lax.scan(lambda carry, x: cell.call(cell.params, carry, x), carry, steps)

    (last, y), (wide_last, wide_y) = jax.jit(scan)(half), jax.jit(scan)(wide)
    assert (dtypes(half), dtypes(last), dtypes(y)) == ({"bfloat16"}, {"bfloat16"}, {"bfloat16"})
    assert (dtypes(wide_last), dtypes(wide_y)) == ({"float32"}, {"bfloat16"})
    assert_close((wide_last, wide_y), (last, y), atol=2**-7)


@EACH_CELL
def test_a_cell_with_a_policy_of_its_own_returns_output_dtype_and_leaves_its_carry(wing, name):
    cell, carry = built(wing, name, dtype_policy="mixed_bfloat16")
    x = sequence(name)[:, 0]
    new_carry, y = jax.eval_shape(cell.call, cell.params, carry, x)
    assert (dtypes(carry), dtypes(new_carry)) == ({"bfloat16"}, {"bfloat16"})
    assert dtypes(y) == {"float32"}
    by_keyword = jax.eval_shape(lambda v: cell.call(v, carry=carry, inputs=x), cell.params)
    assert by_keyword == (new_carry, y)


@EACH_CELL
def test_ten_steps_of_decoding_feed_the_carry_back_and_are_those_of_an_rnn(wing, name):
    cell, carry = built(wing, name, "mixed_bfloat16")
    rnn = loop(wing, wing.ours, name, "mixed_bfloat16")
    if wing is LINEN:
        cell_params = rnn.params["params"]["cell"]
        params: Any = {"params": cell_params}
    else:
        params = rnn.params["cell"]
    step: Any = jax.jit(cell.call)
    x, outputs = sequence(name, steps=10), []
    for t in range(10):
        carry, y = step(params, carry, x[:, t])
        assert (dtypes(carry), dtypes(y)) == ({"bfloat16"}, {"bfloat16"})
        outputs.append(y.astype(jnp.float32))
    assert step._cache_size() == 1
    assert_close(jnp.stack(outputs, 1), jax.jit(rnn.call)(rnn.params, x)[1], atol=2**-7)


@EACH_WING
def test_a_carry_is_drawn_with_the_initialiser_given_in_compute_dtype(wing):
    def carry(init: Any, lib: Any = wing.ours) -> Any:
        if wing is LINEN:
            return wing.carry(wing.cell(lib, "GRUCell", carry_init=init))
        cell = wing.cell(lib, "GRUCell")
        return cell.initialize_carry((BATCH, WIDTH), lib.Rngs(1), init)

    normal, orthogonal = jax.nn.initializers.normal(), jax.nn.initializers.orthogonal()
    full = carry(normal)
    assert_same_bits(full, carry(normal, wing.theirs))
    with use_policy("mixed_float16"):
        assert_same_bits(carry(normal), full.astype(jnp.float16))
    with use_policy("bfloat16"):
        assert dtypes(carry(orthogonal)) == {"bfloat16"}


@EACH_WING
def test_an_explicit_dtype_is_obeyed_with_a_warning(wing):
    expected = (
        r"^GRUCell at 'GRUCell' has an explicit dtype=float32, which overrides the policy in "
        r"force, 'params=float32,compute"
    )
    x = sequence()[:, 0]
    with use_policy("mixed_bfloat16"), pytest.warns(DtypePolicyWarning, match=expected):
        cell = wing.cell(wing.ours, "GRUCell", dtype=jnp.float32)
        carry = wing.carry(cell)
        pure = wing.pure(lambda: cell, carry, x, policy="mixed_bfloat16")
        assert dtypes((carry, jax.eval_shape(pure.call, pure.params, carry, x))) == {"float32"}


# --------------------------------------------------------------------------------------------------
# Cells of a user's own
# --------------------------------------------------------------------------------------------------


def _leaky(h: Any, carry: Any) -> Any:
    count, average, _ = carry
    return (count + 1, average * 0.9 + h.astype(jnp.float32) * 0.1, h), h


def _first(shape: Any) -> Any:
    zeros = jnp.zeros((*shape[:-1], HIDDEN))
    return jnp.zeros((), jnp.int32), zeros, zeros


class Leaky:
    """Its carry holds a count, a float32 average and the last hidden state."""

    @property
    def num_feature_axes(self) -> int:
        return 1


class LeakyLinen(Leaky, linen.RNNCellBase):
    @linen.compact
    def __call__(self, carry, inputs):
        return _leaky(
            linen.tanh(linen.Dense(HIDDEN)(inputs) + linen.Dense(HIDDEN)(carry[2])), carry
        )

    @linen.nowrap
    def initialize_carry(self, rng, input_shape):
        return _first(input_shape)


class LeakyNnx(Leaky, nnx.RNNCellBase):
    def __init__(self):
        self.i = nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
        self.h = nnx.Linear(HIDDEN, HIDDEN, rngs=nnx.Rngs(0))

    def __call__(self, carry, inputs):
        return _leaky(nnx.tanh(self.i(inputs) + self.h(carry[2])), carry)

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return _first(input_shape)


@pytest.mark.parametrize(("wing", "cls"), [(LINEN, LeakyLinen), (NNX, LeakyNnx)], ids=str)
def test_a_users_cell_is_a_boundary_for_inputs_and_outputs_and_keeps_the_types_of_its_carry(
    wing, cls
):
    x, carry = sequence(), _first((BATCH, WIDTH))
    cell = wing.pure(cls, carry, x[:, 0], policy="mixed_bfloat16")
    new_carry, y = jax.eval_shape(cell.call, cell.params, carry, x[:, 0])
    assert (types(new_carry), y.dtype) == (types(carry), jnp.float32)
    assert matmul_dtypes(cell.call, cell.params, carry, x[:, 0]) == {"bfloat16"}
    make = lambda: wing.ours.RNN(cls(), return_carry=True)  # noqa: E731
    rnn = wing.pure(make, x, policy="mixed_bfloat16")
    last, ys = rnn.call(rnn.params, x)
    assert (types(last), ys.dtype, int(last[0])) == (types(carry), jnp.float32, TIME)


# --------------------------------------------------------------------------------------------------
# Gradients
# --------------------------------------------------------------------------------------------------


@EACH_CELL
def test_gradients_are_summed_over_the_steps_in_float32_and_residuals_are_half(wing, name):
    x = sequence(name, steps=7)
    rnn = loop(wing, wing.ours, name, "p=f32,c=bf16,o=bf16")
    loss = lambda v: rnn.call(v, x)[1].astype(jnp.float32).sum()  # noqa: E731
    scans = [e for e in equations(jax.grad(loss), rnn.params) if e.primitive.name == "scan"]
    forward, backward = scans
    assert {v.aval.dtype.name for v in forward.outvars if 7 in v.aval.shape} == {"bfloat16"}
    kernels = {leaf.shape for leaf in jax.tree.leaves(rnn.params) if leaf.ndim > 1}
    sums = [v for v in backward.outvars if v.aval.shape in kernels]
    assert sums and {v.aval.dtype.name for v in sums} == {"float32"}


@pytest.mark.parametrize("stored", ("f32", "bf16"))
@EACH_WING
def test_the_gradient_of_a_1024_step_rnn_is_accurate(wing, stored):
    # One sign: rounding errors can't cancel.
    x = np.random.default_rng(1).uniform(0.5, 1.5, size=(1, 1024, WIDTH))
    options = {"recurrent_kernel_init": jax.nn.initializers.zeros}
    make = lambda: wing.ours.RNN(wing.cell(wing.ours, "SimpleCell", **options))  # noqa: E731
    inputs = jnp.asarray(x, jnp.float32)
    rnn = wing.pure(make, inputs, policy=f"p={stored},c=bf16,o=bf16")
    loss = lambda v: rnn.call(v, inputs).astype(jnp.float32).sum()  # noqa: E731

    def input_kernel(tree: Any) -> Any:
        values = wing.values(tree)
        leaf = values["params"]["cell"]["i"] if wing is LINEN else values["cell"]["dense_i"]
        return np.asarray(leaf["kernel"], np.float64)

    slopes = 1 - np.tanh(x[0] @ input_kernel(rnn.params)) ** 2
    truth = np.einsum("tw,th->wh", x[0], slopes)  # of the sum of all outputs
    found = input_kernel(jax.jit(jax.grad(loss))(rnn.params))
    # Summed in half over the steps: 2% off.
    np.testing.assert_allclose(found, truth, atol=2**-8 * np.abs(truth).max())


@pytest.mark.parametrize("name", ("LSTMCell", "OptimizedLSTMCell", "GRUCell"))
@EACH_WING
def test_second_derivatives_of_an_rnn_reach_its_biases(wing, name):
    x, biased = sequence(), {"bias_init": jax.nn.initializers.normal(0.5)}

    def penalty(lib: Any, policy: Any) -> Any:
        make = lambda: lib.RNN(wing.cell(lib, name, **biased))  # noqa: E731
        rnn = wing.pure(make, x, policy=policy)
        value = lambda v, x: jnp.tanh(rnn.call(v, x)).sum()  # noqa: E731
        gradient = jax.grad(lambda v: jnp.sum(jnp.square(jax.grad(value, 1)(v, x))))
        return wing.values(jax.jit(gradient)(rnn.params))

    found, truth = penalty(wing.ours, "mixed_bfloat16"), penalty(wing.theirs, None)

    def compare(a: Any, b: Any) -> None:
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 0.08

    jax.tree.map(compare, found, truth)
