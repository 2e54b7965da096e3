"""Recurrent cells beside the table of layers: programs, carries through loops, cells of a user's
own, and gradients over many steps. No boundary casts a carry.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import use_policy
from policy.programs.walk import walk
from tests.mpmodules.recurrent_cells import (
    BATCH,
    CELLS,
    HIDDEN,
    LINEN,
    NNX,
    TIME,
    WIDTH,
    WINGS,
    assert_close,
    built,
    dtypes,
    loop,
    sequence,
    types,
)
from tests.mpmodules.wings import MIXED, assert_same_bits
from tests.programs import named, operations

EACH_CELL = pytest.mark.parametrize(("wing", "name"), CELLS, ids=lambda x: str(x))
EACH_WING = pytest.mark.parametrize("wing", WINGS, ids=str)


# --- programs and carries -------------------------------------------------------------------------


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
    with jax.numpy_dtype_promotion("standard"):
        hand = wing.pure(lambda: wing.cell(wing.theirs, name, dtype=jnp.bfloat16), carry, x)
    texts = [
        jax.jit(lambda *args, call=pure.call: call(*args)).lower(pure.params, carry, x).as_text()
        for pure in (cell, hand)
    ]
    assert texts[0] == texts[1]


@EACH_CELL
def test_the_carry_keeps_its_type_through_a_scan_also_where_it_was_made_in_float32(wing, name):
    wide = built(wing, name)[1]
    cell, half = built(wing, name, MIXED)
    steps = jnp.moveaxis(sequence(name), 1, 0)

    def scan(carry):
        return jax.lax.scan(lambda carry, x: cell.call(cell.params, carry, x), carry, steps)

    (last, y), (wide_last, wide_y) = jax.jit(scan)(half), jax.jit(scan)(wide)
    assert (dtypes(half), dtypes(last), dtypes(y)) == ({"bfloat16"}, {"bfloat16"}, {"bfloat16"})
    assert (dtypes(wide_last), dtypes(wide_y)) == ({"float32"}, {"bfloat16"})
    assert_close((wide_last, wide_y), (last, y), atol=2**-7)


@EACH_CELL
def test_a_cell_with_a_policy_of_its_own_returns_output_dtype_and_leaves_its_carry(wing, name):
    cell, carry = built(wing, name, dtype_policy=MIXED)
    x = sequence(name)[:, 0]
    new_carry, y = jax.eval_shape(cell.call, cell.params, carry, x)
    assert (dtypes(carry), dtypes(new_carry)) == ({"bfloat16"}, {"bfloat16"})
    assert dtypes(y) == {"float32"}
    by_keyword = jax.eval_shape(lambda v: cell.call(v, carry=carry, inputs=x), cell.params)
    assert by_keyword == (new_carry, y)


@EACH_CELL
def test_ten_steps_of_decoding_feed_the_carry_back_and_are_those_of_an_rnn(wing, name):
    (cell, carry), rnn = built(wing, name, MIXED), loop(wing, name, MIXED)
    inside = rnn.params["params"]["cell"] if wing is LINEN else rnn.params["cell"]
    params = {"params": inside} if wing is LINEN else inside
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


# --- cells of a user's own ------------------------------------------------------------------------


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
        h = linen.tanh(linen.Dense(HIDDEN)(inputs) + linen.Dense(HIDDEN)(carry[2]))
        return _leaky(h, carry)

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
    cell = wing.pure(cls, carry, x[:, 0], policy=MIXED)
    new_carry, y = jax.eval_shape(cell.call, cell.params, carry, x[:, 0])
    assert (types(new_carry), y.dtype) == (types(carry), jnp.float32)
    dots = named(operations(cell.call, cell.params, carry, x[:, 0]), "dot_general")
    assert {(*op.inputs, *op.outputs) for op in dots} == {("bfloat16",) * 3}
    make = lambda: wing.ours.RNN(cls(), return_carry=True)  # noqa: E731
    rnn = wing.pure(make, x, policy=MIXED)
    last, ys = rnn.call(rnn.params, x)
    assert (types(last), ys.dtype, int(last[0])) == (types(carry), jnp.float32, TIME)


# --- gradients ------------------------------------------------------------------------------------


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

    found, truth = penalty(wing.ours, MIXED), penalty(wing.theirs, None)

    def compare(a: Any, b: Any) -> None:
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 0.08

    jax.tree.map(compare, found, truth)


@EACH_CELL
def test_what_backward_keeps_of_the_steps_is_half(wing, name):
    x, rnn = sequence(name, steps=7), loop(wing, name, "p=f32,c=bf16,o=bf16")
    loss = lambda v: rnn.call(v, x)[1].astype(jnp.float32).sum()  # noqa: E731
    sites = walk(jax.make_jaxpr(jax.grad(loss))(rnn.params))
    forward, _ = (site.equation for site in sites if site.name == "scan")
    assert {v.aval.dtype.name for v in forward.outvars if 7 in v.aval.shape} == {"bfloat16"}
