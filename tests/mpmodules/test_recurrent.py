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
from policy.programs.reading.walk import walk
from tests.mpmodules.table.cases import CASES, SEQUENCE, Case
from tests.mpmodules.table.running import THEIRS, Built, built, dtypes_of
from tests.mpmodules.wings import BOTH, KEY, MIXED, Text, assert_same_bits, layer
from tests.programs import named, operations

BATCH, TIME, WIDTH, HIDDEN = 2, 5, 4, 3
CELLS = [(wing, case) for wing, case in CASES if case.is_cell]
EACH_CELL = pytest.mark.parametrize(
    ("wing", "case"), CELLS, ids=[f"{wing}-{case}" for wing, case in CELLS]
)


def loop(wing: str, case: Case, policy: str) -> Built:
    """Returns the RNN over a cell."""
    (rnn,) = (each for at, each in CASES if (at, str(each)) == (wing, f"RNN over {case}"))
    return built(wing, rnn, policy)


def assert_close(ours: Any, theirs: Any, atol: float) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=0, atol=atol)


# --- programs and carries -------------------------------------------------------------------------


@EACH_CELL
def test_half_parameters_have_flaxs_tree_and_orthogonal_kernels_are_drawn_in_float32(wing, case):
    ours, full = (jax.tree.leaves(built(wing, case, text)[1]) for text in ("bfloat16", None))
    for a, b in zip(ours, full, strict=True):
        assert (a.shape, a.dtype) == (b.shape, jnp.bfloat16)
        if b.ndim == 2 and b.shape[0] == HIDDEN:  # orthogonal; what runs in half draws in half
            assert_same_bits(a, b.astype(jnp.bfloat16))


@EACH_CELL
def test_a_hand_threaded_cell_lowers_to_the_same_program(wing, case):
    call, params, (carry, x) = built(wing, case, "p=f32,c=bf16,o=bf16", inputs_in=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        hand, theirs, _ = built(wing, case, None, THEIRS[wing], dtype=jnp.bfloat16)
    texts = [
        jax.jit(lambda *args, run=run: run(*args)).lower(held, carry, x).as_text()
        for run, held in ((call, params), (hand, theirs))
    ]
    assert texts[0] == texts[1]


@EACH_CELL
def test_the_carry_keeps_its_type_through_a_scan_also_where_it_was_made_in_float32(wing, case):
    call, params, (half, x) = built(wing, case, MIXED)
    wide = built(wing, case)[2][0]
    steps = jnp.stack([x, -x, x / 2])

    def scan(carry):
        return jax.lax.scan(lambda carry, x: call(params, carry, x), carry, steps)

    (last, y), (wide_last, wide_y) = jax.jit(scan)(half), jax.jit(scan)(wide)
    assert dtypes_of((half, last, y, wide_y)) == {"bfloat16"}
    assert dtypes_of(wide_last) == {"float32"}
    assert_close((wide_last, wide_y), (last, y), atol=2**-7)


@EACH_CELL
def test_a_cell_with_a_policy_of_its_own_returns_output_dtype_and_leaves_its_carry(wing, case):
    call, params, (carry, x) = built(wing, case, dtype_policy=MIXED)
    new_carry, y = jax.eval_shape(call, params, carry, x)
    assert dtypes_of((carry, new_carry)) == {"bfloat16"} and dtypes_of(y) == {"float32"}


def test_a_carry_that_is_given_by_name_is_left_too():
    carry, x = jnp.zeros((BATCH, HIDDEN)), jnp.ones((BATCH, WIDTH))
    cell = linen.GRUCell(HIDDEN, dtype_policy=MIXED)
    (new, y), _ = cell.init_with_output(KEY, carry=carry, inputs=x)
    assert (new.dtype, y.dtype) == (jnp.float32, jnp.float32)
    made = nnx.GRUCell(WIDTH, HIDDEN, rngs=nnx.Rngs(0), dtype_policy=MIXED)
    new, y = made(carry=carry.astype(jnp.bfloat16), inputs=x)
    assert (new.dtype, y.dtype) == (jnp.bfloat16, jnp.float32)


@EACH_CELL
def test_steps_of_decoding_feed_the_carry_back_and_are_those_of_an_rnn(wing, case):
    call, _, (first, _) = built(wing, case, MIXED)
    rnn, params, (steps,) = loop(wing, case, MIXED)
    step, outputs = jax.jit(call), []
    zeros = jnp.zeros((*steps.shape[:1], *steps.shape[2:-1], HIDDEN))
    carry = jax.tree.map(lambda leaf: zeros.astype(leaf.dtype), first)
    for t in range(TIME):
        carry, y = step(params["cell"], carry, steps[:, t])
        assert dtypes_of((carry, y)) == {"bfloat16"}
        outputs.append(y)
    assert step._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    assert_close(jnp.stack(outputs, 1), jax.jit(rnn)(params, steps), atol=2**-7)


@BOTH
def test_a_carry_is_drawn_with_the_initialiser_given_in_compute_dtype(wing):
    def carry(init: Any, lib: Any = wing.module) -> Any:
        if wing.name == "linen":
            return lib.GRUCell(HIDDEN, carry_init=init).initialize_carry(KEY, (BATCH, WIDTH))
        cell = lib.GRUCell(WIDTH, HIDDEN, rngs=lib.Rngs(0))
        return cell.initialize_carry((BATCH, WIDTH), lib.Rngs(1), init)

    normal, orthogonal = jax.nn.initializers.normal(), jax.nn.initializers.orthogonal()
    full = carry(normal)
    assert_same_bits(full, carry(normal, wing.flax))
    with use_policy("mixed_float16"):
        assert_same_bits(carry(normal), full.astype(jnp.float16))
    with use_policy("bfloat16"):
        assert dtypes_of(carry(orthogonal)) == {"bfloat16"}


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


def pure(module: Any, *args: Any) -> Any:
    """Returns a call of a module that was just made."""
    if isinstance(module, nnx.Module):
        return lambda *args: nnx.clone(module)(*args)
    variables = module.init(KEY, *args)
    return lambda *args: module.apply(variables, *args)


@pytest.mark.parametrize(("lib", "cls"), [(linen, LeakyLinen), (nnx, LeakyNnx)])
def test_a_users_cell_is_a_boundary_for_inputs_and_outputs_and_keeps_the_types_of_its_carry(
    lib, cls
):
    def types(tree: Any) -> list[str]:
        return [leaf.dtype.name for leaf in jax.tree.leaves(tree)]

    x, carry = jnp.asarray(SEQUENCE), _first((BATCH, WIDTH))
    with use_policy(MIXED):
        cell, rnn = pure(cls(), carry, x[:, 0]), pure(lib.RNN(cls(), return_carry=True), x)
        new_carry, y = jax.eval_shape(cell, carry, x[:, 0])
        dots = named(operations(cell, carry, x[:, 0]), "dot_general")
        last, ys = rnn(x)
    assert (types(new_carry), y.dtype) == (types(carry), jnp.float32)
    assert {(*op.inputs, *op.outputs) for op in dots} == {("bfloat16",) * 3}
    assert (types(last), ys.dtype, int(last[0])) == (types(carry), jnp.float32, TIME)


# --- gradients ------------------------------------------------------------------------------------


def rnn_over(name: str, **options: Any) -> Text:
    rnn = layer(
        lambda nn: nn.RNN(getattr(nn, name)(HIDDEN, **options)),
        lambda nnx, rngs: nnx.RNN(
            getattr(nnx, name)(WIDTH, HIDDEN, rngs=rngs, **options), rngs=rngs
        ),
    )
    return Text(lambda self, x: self.rnn(x), rnn=rnn)


@BOTH
@pytest.mark.parametrize("stored", ("f32", "bf16"))
def test_the_gradient_of_a_1024_step_rnn_is_accurate(wing, stored):
    # One sign: rounding errors can't cancel.
    x = np.random.default_rng(1).uniform(0.5, 1.5, size=(1, 1024, WIDTH))
    text = rnn_over("SimpleCell", recurrent_kernel_init=jax.nn.initializers.zeros)
    inputs = jnp.asarray(x, jnp.float32)
    model = wing.scoped(text, f"p={stored},c=bf16,o=bf16", None, inputs)

    def input_kernel(tree: Any) -> Any:
        (kernel,) = (leaf for leaf in jax.tree.leaves(tree) if leaf.shape == (WIDTH, HIDDEN))
        return np.asarray(kernel, np.float64)

    slopes = 1 - np.tanh(x[0] @ input_kernel(model.params)) ** 2
    truth = np.einsum("tw,th->wh", x[0], slopes)  # of the sum of all outputs
    found = input_kernel(jax.jit(jax.grad(model.total(inputs)))(model.params))
    # Summed in half over the steps: 2% off.
    np.testing.assert_allclose(found, truth, atol=2**-8 * np.abs(truth).max())


@BOTH
@pytest.mark.parametrize("name", ("LSTMCell", "OptimizedLSTMCell", "GRUCell"))
def test_second_derivatives_of_an_rnn_reach_its_biases(wing, name):
    text = rnn_over(name, bias_init=jax.nn.initializers.normal(0.5))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, TIME, WIDTH)), jnp.float32)

    def penalty(model: Any) -> Any:
        value = lambda v, x: jnp.tanh(model.pure(v, x)).sum()  # noqa: E731
        gradient = jax.grad(lambda v: jnp.sum(jnp.square(jax.grad(value, 1)(v, x))))
        return jax.tree.leaves(jax.jit(gradient)(model.params))

    models = wing.scoped(text, MIXED, None, x), wing.theirs(text, x)
    for a, b in zip(*map(penalty, models), strict=True):
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 0.08


@EACH_CELL
def test_what_backward_keeps_of_the_steps_is_half(wing, case):
    rnn, params, (x,) = loop(wing, case, "p=f32,c=bf16,o=bf16")
    gradient = jax.grad(lambda v: rnn(v, x).astype(jnp.float32).sum())
    sites = walk(jax.make_jaxpr(gradient)(params))
    forward, _ = (site.equation for site in sites if site.name == "scan")
    assert {v.aval.dtype.name for v in forward.outvars if TIME in v.aval.shape} == {"bfloat16"}
