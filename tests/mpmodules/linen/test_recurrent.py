"""Recurrent cells compute, return and keep their carry in what the policy says, and no boundary
casts a carry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_nn
from mpmodules.linen import apply_policy
from policy import DtypePolicyWarning, get_policy, use_policy
from policy.programs.walk import walk

BATCH, TIME, WIDTH, HIDDEN = 2, 5, 4, 3
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
HALVES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A cell of both `flax.linen` and ours: what makes it, and the shape of one step's input."""

    make: Callable[..., Any]
    shape: tuple[int, ...] = (BATCH, WIDTH)


CASES = {
    "SimpleCell": Case(lambda nn, **kw: nn.SimpleCell(HIDDEN, **kw)),
    "SimpleCell residual": Case(lambda nn, **kw: nn.SimpleCell(HIDDEN, residual=True, **kw)),
    "LSTMCell": Case(lambda nn, **kw: nn.LSTMCell(HIDDEN, **kw)),
    "OptimizedLSTMCell": Case(lambda nn, **kw: nn.OptimizedLSTMCell(HIDDEN, **kw)),
    "GRUCell": Case(lambda nn, **kw: nn.GRUCell(HIDDEN, **kw)),
    "MGUCell": Case(lambda nn, **kw: nn.MGUCell(HIDDEN, **kw)),
    "MGUCell without reset": Case(lambda nn, **kw: nn.MGUCell(HIDDEN, reset_gate=False, **kw)),
    "ConvLSTMCell": Case(
        lambda nn, **kw: nn.ConvLSTMCell(HIDDEN, kernel_size=(2,), **kw), (BATCH, 3, WIDTH)
    ),
}
EACH_CELL = pytest.mark.parametrize("name", CASES)
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES)
KEY = jax.random.key(0)


def sequence(case: Case, dtype: Any = jnp.float32, steps: int = TIME) -> jax.Array:
    """(batch, time, features...)."""
    shape = (case.shape[0], steps, *case.shape[1:])
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def start(case: Case, cell: Any) -> tuple[Any, Any, jax.Array]:
    """The types of a cell's variables, its first carry and its first input."""
    x = sequence(case)[:, 0]
    carry = cell.initialize_carry(KEY, x.shape)
    return jax.eval_shape(cell.init, KEY, carry, x), carry, x


@functools.cache
def variables_of(name: str) -> Any:
    """A cell's float32 variables as Flax makes them."""
    cell, x = CASES[name].make(flax_nn), sequence(CASES[name])[:, 0]
    return jax.jit(cell.init)(KEY, cell.initialize_carry(KEY, x.shape), x)


def rnn_variables_of(name: str) -> Any:
    return {"params": {"cell": variables_of(name)["params"]}}


def dtypes(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def types(tree: Any) -> list[str]:
    return [leaf.dtype.name for leaf in jax.tree.leaves(tree)]


def assert_same_bits(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of inner bodies included."""
    return (site.equation for site in walk(jaxpr))


def matmul_dtypes(fn: Callable[..., Any], *args: Any) -> set[str]:
    """The dtypes of all operands and results of all matmuls and convolutions."""
    eqns = equations(jax.make_jaxpr(fn)(*args).jaxpr)
    found = [e for e in eqns if e.primitive.name in ("dot_general", "conv_general_dilated")]
    assert found
    return {v.aval.dtype.name for e in found for v in (*e.invars, *e.outvars)}


# --------------------------------------------------------------------------------------------------
# What Flax does
# --------------------------------------------------------------------------------------------------


def standard_promotion(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return test(*args, **kwargs)

    return run


@standard_promotion
def test_flaxs_lstm_returns_float32_from_a_half_dtype():
    case = CASES["LSTMCell"]
    cell: Any = case.make(flax_nn, dtype=jnp.bfloat16)
    variables, carry, x = start(case, cell)
    if jax.eval_shape(cell.apply, variables, carry, x)[1].dtype != jnp.float32:
        pytest.skip("repaired upstream")
    assert dtypes(
        jax.eval_shape(our_cell_of(case, jnp.bfloat16).apply, variables, carry, x)[1]
    ) == {"bfloat16"}


def our_cell_of(case: Case, dtype: Any) -> Any:
    return case.make(our_nn, dtype=dtype)


@standard_promotion
def test_flaxs_rnn_over_a_half_cell_raises_and_ours_returns_what_dtype_says():
    case = CASES["SimpleCell"]
    variables = flax_nn.RNN(case.make(flax_nn)).init(KEY, sequence(case))
    ours = our_nn.RNN(our_cell_of(case, jnp.bfloat16), return_carry=True)
    assert dtypes(jax.eval_shape(ours.apply, variables, sequence(case))) == {"bfloat16"}
    try:
        jax.eval_shape(
            flax_nn.RNN(case.make(flax_nn, dtype=jnp.bfloat16)).apply, variables, sequence(case)
        )
    except TypeError as error:
        assert "carry" in str(error)
    else:
        pytest.skip("repaired upstream")


@pytest.mark.parametrize("half", HALVES)
@standard_promotion
def test_flaxs_cells_can_t_create_half_parameters_and_ours_draw_in_float32(half):
    case, x = CASES["GRUCell"], sequence(CASES["GRUCell"])[:, 0]

    def variables(nn: Any) -> Any:
        cell = case.make(nn, param_dtype=half)
        return cell.init(KEY, cell.initialize_carry(KEY, x.shape), x)

    ours = variables(our_nn)
    assert dtypes(ours) == {half}
    kernel = variables_of("GRUCell")["params"]["hr"]["kernel"]
    assert_same_bits(ours["params"]["hr"]["kernel"], kernel.astype(half))
    try:
        variables(flax_nn)
    except (NotImplementedError, TypeError) as error:
        assert half in str(error)
    else:
        pytest.skip("repaired upstream")


# --------------------------------------------------------------------------------------------------
# One table of cells
# --------------------------------------------------------------------------------------------------


@EACH_CELL
def test_without_a_policy_a_float32_cell_is_flaxs_bit_for_bit(name):
    case, x = CASES[name], sequence(CASES[name])

    def run(nn: Any) -> Any:
        cell = case.make(nn)
        rnn = nn.RNN(cell, return_carry=True)
        carry = cell.initialize_carry(KEY, case.shape)
        step = jax.jit(cell.apply)(variables_of(name), carry, x[:, 0])
        gradients = jax.grad(lambda v, x: jnp.square(rnn.apply(v, x)[1]).sum(), (0, 1))
        return carry, step, jax.jit(gradients)(rnn_variables_of(name), x)

    assert_same_bits(run(our_nn), run(flax_nn))


@EACH_CELL
def test_without_a_policy_dtypes_are_inferred_as_flax_infers_them(name):
    case = CASES[name]
    theirs, ours = case.make(flax_nn), case.make(our_nn)
    variables, carry, x = start(case, theirs)
    with jax.numpy_dtype_promotion("standard"):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (carry, x))
        for args in (half, (carry, half[1])):
            assert jax.eval_shape(ours.apply, variables, *args) == jax.eval_shape(
                theirs.apply, variables, *args
            )


@pytest.mark.parametrize("half", HALVES)
@EACH_CELL
def test_without_a_policy_an_explicit_half_dtype_is_what_carry_and_output_are_in(name, half):
    case = CASES[name]
    cell: Any = case.make(our_nn, dtype=half)
    variables, carry, x = start(case, cell)
    assert dtypes(variables) == {"float32"}
    assert dtypes(carry) == dtypes(jax.eval_shape(cell.apply, variables, carry, x)) == {half}
    rnn: Any = our_nn.RNN(cell, return_carry=True)
    assert dtypes(jax.eval_shape(lambda: rnn.init_with_output(KEY, sequence(case))[0])) == {half}


@EACH_POLICY
@EACH_CELL
def test_a_policy_decides_every_dtype_of_a_cell_forward_and_backward(name, policy):
    case, wanted = CASES[name], get_policy(policy)
    cell: Any = case.make(our_nn)
    with use_policy(policy):
        variables, carry, x = start(case, cell)
        assert dtypes(variables) == {wanted.param_dtype.name}
        assert dtypes(carry) == {wanted.compute_dtype.name}

        def loss(variables, carry, x):
            new_carry, y = cell.apply(variables, carry, x)
            return jnp.square(y.astype(jnp.float32)).sum(), (new_carry, y)

        step = jax.value_and_grad(loss, has_aux=True)
        (_, (new_carry, y)), gradients = jax.eval_shape(step, variables, carry, x)
        assert dtypes((new_carry, y)) == {wanted.compute_dtype.name}
        assert jax.tree.structure(new_carry) == jax.tree.structure(carry)
        assert dtypes(gradients) == {wanted.param_dtype.name}
        assert matmul_dtypes(step, variables, carry, x) == {wanted.compute_dtype.name}


@pytest.mark.parametrize("policy", [None, "bfloat16"])
@EACH_CELL
def test_parameters_have_flaxs_tree_and_initial_values(name, policy):
    case, theirs = CASES[name], variables_of(name)
    with use_policy(policy):
        cell, x = case.make(our_nn), sequence(case)[:, 0]
        ours = jax.jit(cell.init)(KEY, cell.initialize_carry(KEY, x.shape), x)
    if policy != "bfloat16":
        return assert_same_bits(ours, theirs)
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == jnp.bfloat16
        if b.shape == (
            HIDDEN,
            HIDDEN,
        ):  # the orthogonal ones; what runs in half draws there, as in Flax
            assert_same_bits(a, b.astype(jnp.bfloat16))


@EACH_POLICY
@EACH_CELL
def test_an_rnn_returns_output_dtype_and_a_carry_in_compute_dtype(name, policy):
    case, wanted = CASES[name], get_policy(policy)
    rnn: Any = our_nn.RNN(case.make(our_nn), return_carry=True)
    with use_policy(policy):
        variables = jax.eval_shape(rnn.init, KEY, sequence(case))
        carry, y = jax.eval_shape(rnn.apply, variables, sequence(case))
        assert dtypes(variables) == {wanted.param_dtype.name}
        assert (dtypes(carry), dtypes(y)) == (
            {wanted.compute_dtype.name},
            {wanted.output_dtype.name},
        )
        assert matmul_dtypes(rnn.apply, variables, sequence(case)) == {wanted.compute_dtype.name}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@EACH_CELL
def test_a_ported_rnn_obeys_as_ours_does(name, policy):
    case = CASES[name]
    x = sequence(case)
    ours = our_nn.RNN(case.make(our_nn), return_carry=True)
    ported = apply_policy(flax_nn.RNN(case.make(flax_nn), return_carry=True), policy)
    with use_policy(policy):
        variables = jax.eval_shape(ours.init, KEY, x)
        program = jax.jit(lambda *args: ours.apply(*args)).lower(variables, x).as_text()
    assert jax.eval_shape(ported.init, KEY, x) == variables
    assert jax.jit(lambda *args: ported.apply(*args)).lower(variables, x).as_text() == program


@pytest.mark.parametrize("policy", ["mixed_bfloat16"])
@EACH_CELL
def test_half_precision_is_close_to_float32(name, policy):
    rnn: Any
    rnn, x, variables = (
        our_nn.RNN(CASES[name].make(our_nn)),
        sequence(CASES[name]),
        rnn_variables_of(name),
    )
    full = jax.jit(rnn.apply)(variables, x)
    with use_policy(policy):
        half = jax.jit(rnn.apply)(variables, x)
    ulp = float(jnp.finfo(get_policy(policy).compute_dtype).eps)
    np.testing.assert_allclose(
        half, full, rtol=0, atol=4 * ulp
    )  # values below 1, five steps of feedback


@pytest.mark.parametrize("name", ["SimpleCell", "OptimizedLSTMCell", "GRUCell"])
def test_jit_changes_nothing_beyond_rounding(name):
    rnn: Any
    rnn, x, variables = (
        our_nn.RNN(CASES[name].make(our_nn)),
        sequence(CASES[name]),
        rnn_variables_of(name),
    )
    with use_policy("mixed_bfloat16"):
        eager, jitted = rnn.apply(variables, x), jax.jit(rnn.apply)(variables, x)
    assert eager.dtype == jitted.dtype == jnp.float32
    np.testing.assert_allclose(jitted, eager, rtol=0, atol=2**-7)


@EACH_CELL
def test_a_hand_threaded_cell_lowers_to_the_same_matmuls_and_gates(name):
    case = CASES[name]
    ours, theirs = case.make(our_nn), case.make(flax_nn, dtype=jnp.bfloat16)
    variables, carry, x = start(case, case.make(flax_nn))
    args = variables, *jax.tree.map(lambda a: a.astype(jnp.bfloat16), (carry, x))
    with use_policy("p=f32,c=bf16,o=bf16"):
        program = jax.jit(lambda *args: ours.apply(*args)).lower(*args).as_text()
    assert program == jax.jit(lambda *args: theirs.apply(*args)).lower(*args).as_text()


# --------------------------------------------------------------------------------------------------
# Carries
# --------------------------------------------------------------------------------------------------


@EACH_CELL
def test_the_carry_keeps_its_type_through_a_scan_also_where_it_was_made_in_float32(name):
    case = CASES[name]
    cell: Any = case.make(our_nn)
    variables, wide = (
        variables_of(name),
        cell.initialize_carry(KEY, case.shape),
    )  # made with no policy in force
    steps = jnp.moveaxis(sequence(case), 1, 0)
    with use_policy("mixed_bfloat16"):
        half = cell.initialize_carry(KEY, case.shape)
        scan = functools.partial(jax.lax.scan, lambda carry, x: cell.apply(variables, carry, x))
        (last, y), (wide_last, wide_y) = scan(half, steps), scan(wide, steps)
    assert (dtypes(half), dtypes(last), dtypes(y)) == ({"bfloat16"}, {"bfloat16"}, {"bfloat16"})
    assert (dtypes(wide_last), dtypes(wide_y)) == ({"float32"}, {"bfloat16"})
    for a, b in zip(jax.tree.leaves((wide_last, wide_y)), jax.tree.leaves((last, y)), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=0, atol=2**-7)


@EACH_CELL
def test_a_cell_with_a_policy_of_its_own_returns_output_dtype_and_leaves_its_carry(name):
    case = CASES[name]
    cell: Any = case.make(our_nn, dtype_policy="mixed_bfloat16")
    variables, carry, x = start(case, cell)
    new_carry, y = jax.eval_shape(cell.apply, variables, carry, x)
    assert (dtypes(carry), dtypes(new_carry), dtypes(y)) == (
        {"bfloat16"},
        {"bfloat16"},
        {"float32"},
    )
    by_keyword = jax.eval_shape(lambda v: cell.apply(v, carry=carry, inputs=x), variables)
    assert by_keyword == (new_carry, y)


@EACH_CELL
def test_ten_steps_of_decoding_feed_the_carry_back(name):
    case = CASES[name]
    cell, steps = case.make(our_nn), jnp.moveaxis(sequence(case, steps=10), 1, 0)
    rnn: Any = our_nn.RNN(cell, return_carry=True)
    with use_policy("mixed_bfloat16"):
        variables, carry = variables_of(name), cell.initialize_carry(KEY, case.shape)
        step: Any = jax.jit(cell.apply)
        outputs = []
        for x in steps:
            carry, y = step(variables, carry, x)
            assert (dtypes(carry), dtypes(y)) == ({"bfloat16"}, {"bfloat16"})
            outputs.append(y)
        whole = jax.jit(rnn.apply)(rnn_variables_of(name), sequence(case, steps=10))
    assert step._cache_size() == 1
    np.testing.assert_allclose(
        np.stack([np.asarray(y, np.float32) for y in outputs], 1),
        np.asarray(whole[1]),
        rtol=0,
        atol=2**-8,
    )


def test_a_carry_is_drawn_with_the_cells_own_initialiser_in_compute_dtype():
    cell: Any = our_nn.GRUCell(HIDDEN, carry_init=jax.nn.initializers.normal())
    plain: Any = cell.initialize_carry(KEY, (BATCH, WIDTH))
    assert_same_bits(
        plain,
        flax_nn.GRUCell(HIDDEN, carry_init=cell.carry_init).initialize_carry(KEY, (BATCH, WIDTH)),
    )
    with use_policy("mixed_float16"):
        half = cell.initialize_carry(KEY, (BATCH, WIDTH))
    assert_same_bits(half, plain.astype(jnp.float16))
    with use_policy("bfloat16"):
        orthogonal = our_nn.GRUCell(HIDDEN, carry_init=jax.nn.initializers.orthogonal())
        assert dtypes(orthogonal.initialize_carry(KEY, (BATCH, WIDTH))) == {"bfloat16"}


class Leaky(our_nn.RNNCellBase):
    """A user's cell: its carry holds a count, a float32 average and the last hidden state."""

    features: int = HIDDEN

    @our_nn.compact
    def __call__(self, carry, inputs):
        count, average, h = carry
        h = our_nn.tanh(our_nn.Dense(self.features)(inputs) + our_nn.Dense(self.features)(h))
        average = average * 0.9 + h.astype(jnp.float32) * 0.1
        return (count + 1, average, h), h

    @our_nn.nowrap
    def initialize_carry(self, rng, input_shape):
        zeros = jnp.zeros((*input_shape[:-1], self.features))
        return jnp.zeros((), jnp.int32), zeros, zeros

    @property
    def num_feature_axes(self):
        return 1


def test_a_users_cell_is_a_boundary_for_inputs_and_outputs_and_keeps_the_types_of_its_carry():
    x = jnp.ones((BATCH, WIDTH))
    with use_policy("mixed_bfloat16"):
        cell = Leaky()
        carry = cell.initialize_carry(KEY, x.shape)
        (new_carry, y), variables = cell.init_with_output(KEY, carry, x)
        assert types(new_carry) == types(carry)
        assert (y.dtype, dtypes(variables)) == (jnp.float32, {"float32"})
        assert matmul_dtypes(cell.apply, variables, carry, x) == {"bfloat16"}
        rnn = our_nn.RNN(cell, return_carry=True)
        last, ys = rnn.init_with_output(KEY, jnp.ones((BATCH, TIME, WIDTH)))[0]
    assert types(last) == types(carry)
    assert (ys.dtype, int(last[0])) == (jnp.float32, TIME)


# --------------------------------------------------------------------------------------------------
# RNN and Bidirectional
# --------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seq_lengths": {"seq_lengths": np.array([2, 5])},
    "reverse": {"reverse": True},
    "reverse, keep_order": {"reverse": True, "keep_order": True},
    "reverse, keep_order, seq_lengths": {
        "reverse": True,
        "keep_order": True,
        "seq_lengths": np.array([4, 1]),
    },
    "time_major": {"time_major": True},
    "init_key": {"init_key": jax.random.key(3)},
}


@pytest.mark.parametrize("return_carry", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_an_rnn_does_what_it_does_in_flax(option, return_carry):
    case, options = CASES["LSTMCell"], OPTIONS[option]
    x = sequence(case)
    ours, theirs = our_nn.RNN(case.make(our_nn)), flax_nn.RNN(case.make(flax_nn))
    variables = rnn_variables_of("LSTMCell")
    expected = theirs.apply(variables, x, return_carry=return_carry, **options)
    assert_same_bits(ours.apply(variables, x, return_carry=return_carry, **options), expected)
    with use_policy("mixed_bfloat16"):
        out = ours.apply(variables, x, return_carry=return_carry, **options)
    carry, y = out if return_carry else ((), out)
    assert (dtypes(carry), dtypes(y)) == ({"bfloat16"} if return_carry else set(), {"float32"})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(np.float32), b, rtol=0, atol=2**-6),
        out,
        expected,
    )


@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["SimpleCell", "LSTMCell", "ConvLSTMCell"])
def test_an_initial_carry_may_come_in_any_dtype(name, policy, given):
    case, wanted = CASES[name], get_policy(policy)
    carry = jax.tree.map(
        lambda a: a.astype(given), case.make(our_nn).initialize_carry(KEY, case.shape)
    )
    rnn: Any = our_nn.RNN(case.make(our_nn), return_carry=True)
    with use_policy(policy):
        (last, y), _ = jax.eval_shape(
            lambda: rnn.init_with_output(KEY, sequence(case), initial_carry=carry)
        )
    assert (dtypes(last), dtypes(y)) == ({wanted.compute_dtype.name}, {wanted.output_dtype.name})


def test_the_carry_that_an_rnn_returns_starts_the_next_call_exactly_where_one_long_call_would_be():
    case = CASES["LSTMCell"]
    rnn: Any = our_nn.RNN(case.make(our_nn), return_carry=True)
    x = sequence(case, steps=6)
    variables = rnn_variables_of("LSTMCell")
    with use_policy("mixed_bfloat16"):
        _, whole = rnn.apply(variables, x)
        carry, first = rnn.apply(variables, x[:, :3])
        _, second = rnn.apply(variables, x[:, 3:], initial_carry=carry)
    assert_same_bits(jnp.concatenate([first, second], 1), whole)


@EACH_POLICY
@pytest.mark.parametrize("nn", [our_nn, flax_nn])
def test_a_bidirectional_rnn_returns_output_dtype_and_carries_in_compute_dtype(nn, policy):
    case, wanted = CASES["GRUCell"], get_policy(policy)
    model: Any = nn.Bidirectional(nn.RNN(case.make(nn)), nn.RNN(case.make(nn)), return_carry=True)
    model: Any = apply_policy(model, policy) if nn is flax_nn else model
    with use_policy(policy):
        (carry, y), variables = jax.eval_shape(lambda: model.init_with_output(KEY, sequence(case)))
        carries = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.float32), carry)
        again, _ = jax.eval_shape(
            lambda: model.init_with_output(KEY, sequence(case), initial_carry=carries)[0]
        )
    assert dtypes(variables) == {wanted.param_dtype.name}
    assert (dtypes(carry), dtypes(y)) == ({wanted.compute_dtype.name}, {wanted.output_dtype.name})
    assert (y.shape, again) == ((BATCH, TIME, 2 * HIDDEN), carry)


def test_a_policy_given_to_an_rnn_reaches_its_cell_and_a_cell_may_have_its_own():
    x = jnp.ones((BATCH, TIME, WIDTH))

    def outputs(rnn):
        (carry, y), variables = jax.eval_shape(lambda: rnn.init_with_output(KEY, x))
        return dtypes(variables), dtypes(carry), dtypes(y)

    inner = our_nn.RNN(our_nn.LSTMCell(HIDDEN), return_carry=True, dtype_policy="mixed_bfloat16")
    assert outputs(inner) == ({"float32"}, {"bfloat16"}, {"float32"})
    own = our_nn.RNN(our_nn.LSTMCell(HIDDEN, dtype_policy="mixed_bfloat16"), return_carry=True)
    assert outputs(own) == ({"float32"}, {"bfloat16"}, {"float32"})
    with use_policy("bfloat16"):
        assert outputs(own) == ({"float32"}, {"bfloat16"}, {"bfloat16"})
        full = our_nn.RNN(our_nn.LSTMCell(HIDDEN, dtype_policy="float32"), return_carry=True)
        assert outputs(full) == ({"float32"}, {"float32"}, {"bfloat16"})


@pytest.mark.parametrize("make", [our_nn, flax_nn])
@pytest.mark.parametrize("pattern", ["cell", our_nn.LSTMCell, flax_nn.LSTMCell])
def test_rules_by_path_and_class_reach_a_cell(make, pattern):
    model: Any = make.RNN(make.LSTMCell(HIDDEN), return_carry=True)
    x, rules = jnp.ones((BATCH, TIME, WIDTH)), [(pattern, "float32")]
    if make is flax_nn:
        model = apply_policy(model, "bfloat16", rules)
    with use_policy("bfloat16", rules):
        (carry, y), variables = jax.eval_shape(lambda: model.init_with_output(KEY, x))
        assert matmul_dtypes(model.apply, variables, x) == {"float32"}
    assert (dtypes(variables), dtypes(carry), dtypes(y)) == ({"float32"}, {"float32"}, {"bfloat16"})


def test_rules_reach_the_layers_inside_a_cell_under_strict_promotion_too():
    rnn, x = our_nn.RNN(our_nn.LSTMCell(HIDDEN), return_carry=True), jnp.ones((BATCH, TIME, WIDTH))
    with use_policy("mixed_bfloat16", [("cell/h.", "float32")]):
        (carry, y), variables = jax.eval_shape(lambda: rnn.init_with_output(KEY, x))
        assert matmul_dtypes(rnn.apply, variables, x) == {"bfloat16", "float32"}
    assert (dtypes(carry), dtypes(y)) == ({"bfloat16"}, {"float32"})
    with (
        use_policy("mixed_bfloat16", [("cell/h_", "float32")]),
        pytest.raises(ValueError, match="matched no module"),
    ):
        rnn.init(KEY, x)


def test_an_explicit_dtype_is_obeyed_with_a_warning():
    case = CASES["GRUCell"]
    cell: Any = case.make(our_nn, dtype=jnp.float32)
    variables, _, x = start(case, cell)
    expected = (
        r"^GRUCell at 'GRUCell' has an explicit dtype=float32, which overrides the policy in "
        r"force, 'params=float32,compute"
    )
    with use_policy("mixed_bfloat16"), pytest.warns(DtypePolicyWarning, match=expected):
        carry = cell.initialize_carry(KEY, x.shape)
        out = jax.eval_shape(cell.apply, variables, carry, x)
    assert dtypes((carry, out)) == {"float32"}


def test_a_ported_cell_keeps_an_explicit_dtype_where_asked():
    x = jnp.ones((BATCH, TIME, WIDTH))
    model: Any = flax_nn.RNN(flax_nn.LSTMCell(HIDDEN, dtype=jnp.float32), return_carry=True)
    with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float32"):
        kept = apply_policy(model, "mixed_bfloat16", keep_explicit=True)
        carry, y = jax.eval_shape(lambda: kept.init_with_output(KEY, x)[0])
    assert dtypes((carry, y)) == {"float32"}
    carry, _ = jax.eval_shape(
        lambda: apply_policy(model, "mixed_bfloat16").init_with_output(KEY, x)[0]
    )
    assert dtypes(carry) == {"bfloat16"}


# --------------------------------------------------------------------------------------------------
# Lifted and stacked
# --------------------------------------------------------------------------------------------------


def lifted_scan(nn: Any) -> Any:
    cls = nn.scan(
        nn.LSTMCell,
        variable_broadcast="params",
        split_rngs={"params": False},
        in_axes=1,
        out_axes=1,
    )
    return cls(HIDDEN)


class FunctionScan(flax_nn.Module):
    """The function form, as third-party models have it, with cells of either library."""

    nn: Any

    @flax_nn.compact
    def __call__(self, x):
        cell = self.nn.LSTMCell(HIDDEN)
        carry = cell.initialize_carry(KEY, x[:, 0].shape)
        scan = flax_nn.scan(
            lambda cell, carry, x: cell(carry, x),
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        return scan(cell, carry, x)


@pytest.mark.parametrize("nn", [our_nn, flax_nn])
def test_a_class_lifted_cell_runs_in_compute_dtype_with_its_boundary_outside_the_loop(nn):
    x = sequence(CASES["LSTMCell"])
    cell: Any = lifted_scan(nn)
    cell: Any = (
        apply_policy(cell, "mixed_bfloat16")
        if nn is flax_nn
        else cell.clone(dtype_policy="mixed_bfloat16")
    )
    carry = cell.initialize_carry(KEY, x[:, 0].shape)
    (last, y), variables = jax.eval_shape(lambda: cell.init_with_output(KEY, carry, x))
    assert (dtypes(variables), dtypes(last), dtypes(y)) == ({"float32"}, dtypes(carry), {"float32"})
    assert matmul_dtypes(cell.apply, variables, carry, x) == {"bfloat16"}
    eqns = equations(jax.make_jaxpr(cell.apply)(variables, carry, x).jaxpr)
    (scan,) = [e for e in eqns if e.primitive.name == "scan"]
    assert {v.aval.dtype.name for v in scan.outvars} == {"bfloat16"} | dtypes(carry)


@pytest.mark.parametrize("nn", [our_nn, flax_nn])
def test_a_function_form_scan_of_a_cell_keeps_its_carrys_type(nn):
    x = sequence(CASES["LSTMCell"])
    model: Any = apply_policy(FunctionScan(nn), "mixed_bfloat16")
    (_, y), variables = jax.eval_shape(lambda: model.init_with_output(KEY, x))
    assert (dtypes(variables), dtypes(y)) == ({"float32"}, {"float32"})
    assert matmul_dtypes(model.apply, variables, x) == {"bfloat16"}


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell"])
def test_a_rematerialised_cell_and_rnn_give_the_same_gradients(name):
    case, x, variables = CASES[name], sequence(CASES[name]), rnn_variables_of(name)

    class Lifted:
        RNN = our_nn.remat(our_nn.RNN)

        def __getattr__(self, layer):
            return our_nn.remat(getattr(our_nn, layer))

    plain: Any = our_nn.RNN(case.make(our_nn))

    def gradients(rnn: Any) -> Any:
        return jax.jit(jax.grad(lambda v: rnn.apply(v, x).sum()))(variables)

    with use_policy("mixed_bfloat16"):
        expected = gradients(plain)
        for rnn in (our_nn.RNN(case.make(Lifted())), Lifted.RNN(case.make(our_nn))):
            assert dtypes(jax.eval_shape(rnn.apply, variables, x)) == {"float32"}
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-5, atol=2**-5),
                gradients(rnn),
                expected,
            )


def test_stacked_cells_and_stacked_rnns_hand_on_compute_dtype():
    x = jnp.ones((BATCH, TIME, WIDTH))
    cells: Any = our_nn.Sequential([our_nn.LSTMCell(HIDDEN), our_nn.LSTMCell(HIDDEN)])
    rnns: Any = our_nn.Sequential(
        [our_nn.RNN(our_nn.GRUCell(HIDDEN)), our_nn.RNN(our_nn.SimpleCell(HIDDEN))]
    )
    with use_policy("mixed_bfloat16"):
        carry = our_nn.LSTMCell(HIDDEN).initialize_carry(KEY, x[:, 0].shape)
        for model, args in ((cells, (carry, x[:, 0])), (rnns, (x,))):
            out, variables = jax.eval_shape(
                lambda model=model, args=args: model.init_with_output(KEY, *args)
            )
            assert jax.tree.leaves(out)[-1].dtype == jnp.float32
            assert matmul_dtypes(model.apply, variables, *args) == {"bfloat16"}
            casts = [
                eqn
                for eqn in equations(jax.make_jaxpr(model.apply)(variables, *args).jaxpr)
                if eqn.primitive.name == "convert_element_type"
                and eqn.outvars[0].aval.dtype == jnp.float32
            ]
            # On the way out, and for a half-precision carry, which own code reads in float32.
            assert len(casts) <= len(jax.tree.leaves(out)) + 2 * len(jax.tree.leaves(args[0]))


# --------------------------------------------------------------------------------------------------
# Gradients
# --------------------------------------------------------------------------------------------------


@EACH_CELL
def test_gradients_of_float32_kernels_are_summed_over_the_steps_in_float32_and_residuals_are_half(
    name,
):
    case = CASES[name]
    x = sequence(case, steps=7)
    rnn: Any = our_nn.RNN(case.make(our_nn))
    with use_policy("p=f32,c=bf16,o=bf16"):
        variables = jax.eval_shape(rnn.init, KEY, x)
        jaxpr = jax.make_jaxpr(jax.grad(lambda v: rnn.apply(v, x).astype(jnp.float32).sum()))(
            variables
        ).jaxpr
    forward, backward = (e for e in equations(jaxpr) if e.primitive.name == "scan")
    stacked = {v.aval.dtype.name for v in forward.outvars if 7 in v.aval.shape}
    assert stacked == {"bfloat16"}
    kernels = {leaf.shape for leaf in jax.tree.leaves(variables) if leaf.ndim > 1}
    sums = [v for v in backward.outvars if v.aval.shape in kernels]
    assert sums
    assert {v.aval.dtype.name for v in sums} == {"float32"}


def test_the_gradient_of_a_512_step_rnn_is_accurate():
    steps = 512
    x = np.random.default_rng(1).uniform(
        0.5, 1.5, size=(1, steps, WIDTH)
    )  # one sign: rounding errors can't cancel
    rnn: Any = our_nn.RNN(
        our_nn.SimpleCell(HIDDEN, recurrent_kernel_init=jax.nn.initializers.zeros)
    )
    variables = rnn.init(KEY, jnp.asarray(x, jnp.float32))
    kernel = np.asarray(variables["params"]["cell"]["i"]["kernel"], np.float64)
    truth = np.einsum(
        "tw,th->wh", x[0], 1 - np.tanh(x[0] @ kernel) ** 2
    )  # of the sum of all outputs

    def error(variables):
        with use_policy("p=f32,c=bf16,o=bf16"):
            loss = lambda v: rnn.apply(v, jnp.asarray(x, jnp.float32)).astype(jnp.float32).sum()  # noqa: E731
            gradient = jax.jit(jax.grad(loss))(variables)["params"]["cell"]["i"]["kernel"]
        return np.abs(np.asarray(gradient, np.float64) - truth).max() / np.abs(truth).max()

    stored_in_half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), variables)
    assert (
        error(variables) < 2**-8 and error(stored_in_half) < 2**-8
    )  # summed in half over the steps: 2% off
