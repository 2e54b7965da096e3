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


@functools.cache
def variables_of(name: str) -> Any:
    """A cell's float32 variables as Flax makes them."""
    cell, x = CASES[name].make(flax_nn), sequence(CASES[name])[:, 0]
    return jax.jit(cell.init)(KEY, cell.initialize_carry(KEY, x.shape), x)


def rnn_variables_of(name: str) -> Any:
    return {"params": {"cell": variables_of(name)["params"]}}


def dtypes(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


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
# One table of cells
# --------------------------------------------------------------------------------------------------


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
