"""Recurrent cells compute, return and keep their carry in what the policy says, and no boundary
casts a carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx as our_nnx
from mpmodules.nnx import apply_policy
from policy import DtypePolicyWarning, get_policy, use_policy
from policy.programs.walk import walk

BATCH, TIME, WIDTH, HIDDEN = 2, 5, 4, 3
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
CASES: dict[str, Callable[..., Any]] = {
    "SimpleCell": lambda nnx, **kw: nnx.SimpleCell(WIDTH, HIDDEN, rngs=nnx.Rngs(0), **kw),
    "SimpleCell residual": lambda nnx, **kw: nnx.SimpleCell(
        WIDTH, HIDDEN, residual=True, rngs=nnx.Rngs(0), **kw
    ),
    "LSTMCell": lambda nnx, **kw: nnx.LSTMCell(WIDTH, HIDDEN, rngs=nnx.Rngs(0), **kw),
    "OptimizedLSTMCell": lambda nnx, **kw: nnx.OptimizedLSTMCell(
        WIDTH, HIDDEN, rngs=nnx.Rngs(0), **kw
    ),
    "GRUCell": lambda nnx, **kw: nnx.GRUCell(WIDTH, HIDDEN, rngs=nnx.Rngs(0), **kw),
}
EACH_CELL = pytest.mark.parametrize("name", CASES)
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES)


def sequence(dtype: Any = jnp.float32, steps: int = TIME) -> jax.Array:
    """(batch, time, features)."""
    return jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, steps, WIDTH)), dtype)


def first_carry(cell: Any) -> Any:
    return cell.initialize_carry((BATCH, WIDTH), flax_nnx.Rngs(1))


def dtypes(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def param_dtypes(module: Any) -> set[str]:
    return dtypes(flax_nnx.state(module, flax_nnx.Param))


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


def pure(module: Any) -> tuple[Callable[..., Any], Any]:
    """A module as a function of its state and its inputs, and the state."""
    graphdef, state = flax_nnx.split(module)
    return lambda state, *args, **kwargs: flax_nnx.merge(graphdef, state)(*args, **kwargs), state


def shapes(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The types of what a call returns, without running it."""
    fn, state = pure(module)
    return jax.eval_shape(lambda state, *args: fn(state, *args, **kwargs), state, *args)


def jaxpr_of(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.make_jaxpr(fn)(*args).jaxpr


def matmul_dtypes(jaxpr: Any) -> set[str]:
    """The dtypes of all operands and results of all matmuls."""
    found = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert found
    return {v.aval.dtype.name for e in found for v in (*e.invars, *e.outvars)}


def gradients(module: Any, *args: Any) -> Any:
    """A function of state and inputs to the gradients of the sum of squares of the output, and the
    state.
    """
    graphdef, state = flax_nnx.split(module)

    def loss(module: Any, *args: Any) -> Any:
        out = module(*args)
        y = out[1] if isinstance(out, tuple) else out
        return jnp.square(y.astype(jnp.float32)).sum()

    def run(state: Any, *args: Any) -> Any:
        return flax_nnx.grad(loss)(flax_nnx.merge(graphdef, state), *args)

    return run, state


# --------------------------------------------------------------------------------------------------
# One table of cells
# --------------------------------------------------------------------------------------------------


@EACH_POLICY
@EACH_CELL
def test_an_rnn_returns_output_dtype_and_a_carry_in_compute_dtype(name, policy):
    wanted = get_policy(policy)
    with use_policy(policy):
        rnn = our_nnx.RNN(CASES[name](our_nnx), return_carry=True)
        carry, y = shapes(rnn, sequence())
        fn, state = pure(rnn)
        assert matmul_dtypes(jaxpr_of(fn, state, sequence())) == {wanted.compute_dtype.name}
    assert (dtypes(carry), dtypes(y)) == ({wanted.compute_dtype.name}, {wanted.output_dtype.name})


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@EACH_CELL
def test_a_ported_rnn_obeys_as_ours_does(name, policy):
    ported = apply_policy(flax_nnx.RNN(CASES[name](flax_nnx), return_carry=True), policy)
    with use_policy(policy):
        ours = our_nnx.RNN(CASES[name](our_nnx), return_carry=True)
        programs = []
        for rnn in (ours, ported):
            fn, state = pure(rnn)
            programs.append(
                jax.jit(lambda state, x, fn=fn: fn(state, x)).lower(state, sequence()).as_text()
            )
    assert programs[0] == programs[1]
    assert param_dtypes(ported) == {get_policy(policy).param_dtype.name}
    assert isinstance(ported.cell, getattr(our_nnx, name.split()[0]))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@EACH_CELL
def test_half_precision_is_close_to_float32_and_jit_changes_nothing_beyond_rounding(name, policy):
    full = flax_nnx.jit(lambda rnn, x: rnn(x))(our_nnx.RNN(CASES[name](our_nnx)), sequence())
    with use_policy(policy):
        rnn = our_nnx.RNN(CASES[name](our_nnx))
        half = flax_nnx.jit(lambda rnn, x: rnn(x))(rnn, sequence())
        eager = rnn(sequence()) if policy == "mixed_bfloat16" else half
    ulp = float(jnp.finfo(get_policy(policy).compute_dtype).eps)
    assert half.dtype == eager.dtype == jnp.float32
    np.testing.assert_allclose(
        half, full, rtol=0, atol=4 * ulp
    )  # values below 1, five steps of feedback
    np.testing.assert_allclose(eager, half, rtol=0, atol=2 * ulp)


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
}


@pytest.mark.parametrize("return_carry", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_an_rnn_does_what_it_does_in_flax(option, return_carry):
    options = OPTIONS[option] | {"return_carry": return_carry}

    def run(nnx: Any) -> Any:
        return nnx.RNN(CASES["LSTMCell"](nnx))(sequence(), **options)

    expected = run(flax_nnx)
    assert_same_bits(run(our_nnx), expected)
    with use_policy("mixed_bfloat16"):
        out = run(our_nnx)
    carry, y = out if return_carry else ((), out)
    assert (dtypes(carry), dtypes(y)) == ({"bfloat16"} if return_carry else set(), {"float32"})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(np.float32), b, rtol=0, atol=2**-6),
        out,
        expected,
    )


@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["SimpleCell", "LSTMCell"])
def test_an_initial_carry_may_come_in_any_dtype(name, policy, given):
    wanted = get_policy(policy)
    with use_policy(policy):
        rnn = our_nnx.RNN(CASES[name](our_nnx), return_carry=True)
        carry = jax.tree.map(lambda a: a.astype(given), first_carry(rnn.cell))
        last, y = shapes(rnn, sequence(), initial_carry=carry)
    assert (dtypes(last), dtypes(y)) == ({wanted.compute_dtype.name}, {wanted.output_dtype.name})


def test_the_carry_that_an_rnn_returns_starts_the_next_call_exactly_where_one_long_call_would_be():
    x = sequence(steps=6)
    with use_policy("mixed_bfloat16"):
        rnn = our_nnx.RNN(CASES["LSTMCell"](our_nnx), return_carry=True)
        _, whole = rnn(x)
        carry, first = rnn(x[:, :3])
        _, second = rnn(x[:, 3:], initial_carry=carry)
    assert_same_bits(jnp.concatenate([first, second], 1), whole)


@EACH_POLICY
@pytest.mark.parametrize("nnx", [our_nnx, flax_nnx])
def test_a_bidirectional_rnn_returns_output_dtype_and_carries_in_compute_dtype(nnx, policy):
    wanted = get_policy(policy)
    with use_policy(policy):
        halves = [nnx.RNN(CASES["GRUCell"](nnx)) for _ in range(2)]
        model: Any = nnx.Bidirectional(*halves, return_carry=True)
        model = apply_policy(model, policy) if nnx is flax_nnx else model
        carry, y = shapes(model, sequence())
        wide = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.float32), carry)
        again, _ = shapes(model, sequence(), initial_carry=wide)
    assert param_dtypes(model) == {wanted.param_dtype.name}
    assert (dtypes(carry), dtypes(y)) == ({wanted.compute_dtype.name}, {wanted.output_dtype.name})
    assert (y.shape, again) == ((BATCH, TIME, 2 * HIDDEN), carry)


def test_a_cell_may_have_a_policy_of_its_own_and_a_policy_that_a_cell_can_t_follow_is_refused():
    def outputs(rnn: Any) -> Any:
        carry, y = shapes(rnn, sequence())
        return param_dtypes(rnn), dtypes(carry), dtypes(y)

    own = CASES["LSTMCell"](our_nnx, dtype_policy="mixed_bfloat16")
    assert outputs(our_nnx.RNN(own, return_carry=True)) == ({"float32"}, {"bfloat16"}, {"float32"})
    same: Any = our_nnx.RNN(own, return_carry=True, dtype_policy="mixed_bfloat16")
    assert outputs(same) == ({"float32"}, {"bfloat16"}, {"float32"})
    with use_policy("bfloat16"):
        full = our_nnx.RNN(CASES["LSTMCell"](our_nnx, dtype_policy="float32"), return_carry=True)
        assert outputs(full) == ({"float32"}, {"float32"}, {"bfloat16"})
    with pytest.raises(
        ValueError, match=r"^RNN\(dtype_policy='.*'\): .*LSTMCell.* had been built before"
    ):
        our_nnx.RNN(CASES["LSTMCell"](our_nnx), dtype_policy="mixed_bfloat16")  # type: ignore[call-arg]


@pytest.mark.parametrize("nnx", [our_nnx, flax_nnx])
@pytest.mark.parametrize("pattern", ["cell", our_nnx.LSTMCell, flax_nnx.LSTMCell])
def test_rules_by_path_and_class_reach_a_cell(nnx, pattern):
    model = nnx.RNN(CASES["LSTMCell"](nnx), return_carry=True)
    model = apply_policy(model, "bfloat16", [(pattern, "float32")])
    carry, y = shapes(model, sequence())
    fn, state = pure(model)
    assert matmul_dtypes(jaxpr_of(fn, state, sequence())) == {"float32"}
    assert (param_dtypes(model), dtypes(carry), dtypes(y)) == (
        {"float32"},
        {"float32"},
        {"bfloat16"},
    )


def test_class_rules_in_a_scope_reach_a_cell_that_is_built_there():
    with use_policy("bfloat16", {our_nnx.GRUCell: "float32"}):
        rnn: Any = our_nnx.RNN(CASES["GRUCell"](our_nnx))
    assert (param_dtypes(rnn), rnn.cell.dense_i.dtype) == ({"float32"}, jnp.float32)


def test_rules_reach_the_layers_inside_a_cell_under_strict_promotion_too():
    model = apply_policy(
        our_nnx.RNN(CASES["LSTMCell"](our_nnx), return_carry=True),
        "mixed_bfloat16",
        [("cell/h.", "float32")],
    )
    carry, y = shapes(model, sequence())
    fn, state = pure(model)
    assert matmul_dtypes(jaxpr_of(fn, state, sequence())) == {"bfloat16", "float32"}
    assert (dtypes(carry), dtypes(y)) == ({"bfloat16"}, {"float32"})


def test_a_ported_cell_keeps_an_explicit_dtype_where_asked():
    def model() -> Any:
        return flax_nnx.RNN(CASES["LSTMCell"](flax_nnx, dtype=jnp.float32), return_carry=True)

    with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float32"):
        kept = apply_policy(model(), "mixed_bfloat16", keep_explicit=True)
        assert dtypes(shapes(kept, sequence())) == {"float32"}
    assert dtypes(shapes(apply_policy(model(), "mixed_bfloat16"), sequence())[0]) == {"bfloat16"}


# --------------------------------------------------------------------------------------------------
# Lifted and stacked
# --------------------------------------------------------------------------------------------------


def test_a_scan_over_stacked_rnns_and_a_rematerialised_rnn_run_in_compute_dtype():
    x = sequence()[..., :HIDDEN]
    with use_policy("mixed_bfloat16"):

        @flax_nnx.vmap(in_axes=0, out_axes=0)
        def build(key: Any) -> Any:
            return our_nnx.RNN(our_nnx.GRUCell(HIDDEN, HIDDEN, rngs=flax_nnx.Rngs(key)))

        rnns = build(jax.random.split(jax.random.key(0), 2))

        class Stack(our_nnx.Module):
            def __init__(self) -> None:
                self.rnns = rnns

            def __call__(self, x: Any) -> Any:
                @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
                @flax_nnx.remat
                def layers(rnn: Any, x: Any) -> Any:
                    return rnn(x)

                return layers(self.rnns, x)

        model = Stack()
        fn, state = pure(model)
        jaxpr = jaxpr_of(fn, state, x)
        y = flax_nnx.jit(lambda model, x: model(x))(model, x)
    assert matmul_dtypes(jaxpr) == {"bfloat16"}
    assert (y.dtype, y.shape) == (jnp.float32, x.shape)
    backward, state = gradients(model)
    assert dtypes(flax_nnx.filter_state(jax.eval_shape(backward, state, x), flax_nnx.Param)) == {
        "float32"
    }


def test_stacked_cells_and_stacked_rnns_hand_on_compute_dtype():
    rngs = flax_nnx.Rngs(0)
    with use_policy("mixed_bfloat16"):
        cells = our_nnx.Sequential(
            our_nnx.LSTMCell(4, 4, rngs=rngs), our_nnx.LSTMCell(4, 4, rngs=rngs)
        )
        rnns = our_nnx.Sequential(
            our_nnx.RNN(our_nnx.GRUCell(4, 3, rngs=rngs)),
            our_nnx.RNN(our_nnx.SimpleCell(3, 2, rngs=rngs)),
        )
        carry = our_nnx.LSTMCell(4, 4, rngs=rngs).initialize_carry((BATCH, WIDTH), rngs)
        for model, args in ((cells, (carry, sequence()[:, 0])), (rnns, (sequence(),))):
            out = shapes(model, *args)
            fn, state = pure(model)
            jaxpr = jaxpr_of(fn, state, *args)
            casts = [
                eqn
                for eqn in equations(jaxpr)
                if eqn.primitive.name == "convert_element_type"
                and eqn.outvars[0].aval.dtype == jnp.float32
            ]
            assert jax.tree.leaves(out)[-1].dtype == jnp.float32
            assert matmul_dtypes(jaxpr) == {"bfloat16"}
            # On the way out, and for a half-precision carry, which own code reads in float32.
            assert len(casts) <= len(jax.tree.leaves(out)) + 2 * len(jax.tree.leaves(args[0]))
