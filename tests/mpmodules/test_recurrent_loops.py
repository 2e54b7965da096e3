"""RNN and Bidirectional of both wings: what they return and carry, options, rules and ports."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import DtypePolicyWarning, get_policy
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
    dtypes,
    equations,
    loop,
    lowered,
    matmul_dtypes,
    sequence,
    shape_of,
)

EACH_CELL = pytest.mark.parametrize(("wing", "name"), CELLS, ids=lambda x: str(x))
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES)
EACH_WING = pytest.mark.parametrize("wing", WINGS, ids=str)
MIXED = "mixed_bfloat16"


def rnn_of(wing: Any, lib: Any, name: str = "LSTMCell", **options: Any) -> Any:
    return lib.RNN(wing.cell(lib, name, **options), return_carry=True)


def traced(wing: Any, build: Any, policy: Any = None, name: str = "", **kwargs: Any) -> Any:
    """Returns the dtypes of parameters, carry, outputs and matmuls."""
    x = sequence(name)
    model = wing.pure(build, x, policy=policy, abstract=True)
    carry, y = jax.eval_shape(lambda p, x: model.call(p, x, **kwargs), model.params, x)
    return tuple(map(dtypes, (model.params, carry, y))), matmul_dtypes(model.call, model.params, x)


def names(*given: str) -> tuple[set[str], ...]:
    """Returns a set of one dtype for each name."""
    return tuple({jnp.dtype(name).name} for name in given)


def of_policy(text: str) -> tuple[tuple[set[str], ...], set[str]]:
    policy = get_policy(text)
    compute = policy.compute_dtype.name
    return names(policy.param_dtype.name, compute, policy.output_dtype.name), {compute}


@EACH_POLICY
@EACH_CELL
def test_an_rnn_returns_output_dtype_and_a_carry_in_compute_dtype(wing, name, policy):
    build = lambda: rnn_of(wing, wing.ours, name)  # noqa: E731
    assert traced(wing, build, policy, name) == of_policy(policy)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@EACH_CELL
def test_a_ported_rnn_obeys_as_ours_does(wing, name, policy):
    def port() -> Any:
        return wing.ours.apply_policy(rnn_of(wing, wing.theirs, name), policy)

    x = sequence(name)
    ours = wing.pure(lambda: rnn_of(wing, wing.ours, name), x, policy=policy, abstract=True)
    ported = wing.pure(port, x, abstract=True)
    assert dtypes(ported.params) == dtypes(ours.params)
    assert lowered(ported.call, ported.params, x) == lowered(ours.call, ours.params, x)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@EACH_CELL
def test_half_precision_is_close_to_float32_and_jit_changes_nothing_beyond_rounding(
    wing, name, policy
):
    x = sequence(name)
    full, half = (loop(wing, wing.ours, name, given) for given in (None, policy))
    _, y = jax.jit(half.call)(half.params, x)
    ulp = float(jnp.finfo(get_policy(policy).compute_dtype).eps)
    # values below 1, five steps of feedback
    assert_close(y, jax.jit(full.call)(full.params, x)[1], atol=4 * ulp)
    if policy == MIXED:
        assert_close(half.call(half.params, x)[1], y, atol=2 * ulp)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without its carry": {"return_carry": False},
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


@pytest.mark.parametrize("option", OPTIONS)
@EACH_WING
def test_every_option_of_an_rnn_does_what_it_does_in_flax(wing, option):
    if wing is NNX and option == "init_key":
        pytest.skip("linen's alone")
    runs = (wing.theirs, None), (wing.ours, None), (wing.ours, MIXED)
    models = [loop(wing, lib, "LSTMCell", policy) for lib, policy in runs]
    expected, plain, out = (m.call(m.params, sequence(), **OPTIONS[option]) for m in models)
    assert_same_bits(plain, expected)
    *carry, y = out if isinstance(out, tuple) else (out,)
    assert dtypes(y) == {"float32"} and dtypes(carry) <= {"bfloat16"}
    assert_close(out, expected, atol=2**-6)


@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("wing", "name"), [case for case in CELLS if case[1] in ("LSTMCell", "ConvLSTMCell")], ids=str
)
def test_an_initial_carry_may_come_in_any_dtype(wing, name, policy, given):
    carry = wing.carry(wing.cell(wing.ours, name), shape_of(name))
    carry = jax.tree.map(lambda a: a.astype(given), carry)
    build = lambda: rnn_of(wing, wing.ours, name)  # noqa: E731
    assert traced(wing, build, policy, name, initial_carry=carry) == of_policy(policy)


@EACH_WING
def test_the_carry_that_an_rnn_returns_starts_the_next_call_exactly_where_one_long_call_would_be(
    wing,
):
    x, rnn = sequence(steps=6), loop(wing, wing.ours, "LSTMCell", MIXED)
    _, whole = rnn.call(rnn.params, x)
    carry, first = rnn.call(rnn.params, x[:, :3])
    _, second = rnn.call(rnn.params, x[:, 3:], initial_carry=carry)
    assert_same_bits(jnp.concatenate([first, second], 1), whole)


@EACH_POLICY
@pytest.mark.parametrize("ported", [False, True])
@EACH_WING
def test_a_bidirectional_rnn_returns_output_dtype_and_carries_in_compute_dtype(
    wing, ported, policy
):
    def build() -> Any:
        lib = wing.theirs if ported else wing.ours
        halves = [lib.RNN(wing.cell(lib, "GRUCell")) for _ in range(2)]
        model = lib.Bidirectional(*halves, return_carry=True)
        return wing.ours.apply_policy(model, policy) if ported else model

    found, _ = traced(wing, build, policy)
    assert found == of_policy(policy)[0]
    model = wing.pure(build, sequence(), policy=policy, abstract=True)
    carry, y = jax.eval_shape(model.call, model.params, sequence())
    wide = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.float32), carry)
    again, _ = jax.eval_shape(lambda p: model.call(p, sequence(), initial_carry=wide), model.params)
    assert (y.shape, again) == ((BATCH, TIME, 2 * HIDDEN), carry)


@EACH_WING
def test_a_cell_may_have_a_policy_of_its_own_and_linens_takes_that_of_its_rnn(wing):
    def around(scope: Any = None, **options: Any) -> Any:
        return traced(wing, lambda: rnn_of(wing, wing.ours, **options), scope)[0]

    assert around(dtype_policy=MIXED) == names("f4", "bfloat16", "f4")
    assert around("bfloat16", dtype_policy="float32") == names("f4", "f4", "bfloat16")
    given = lambda: wing.ours.RNN(  # noqa: E731
        wing.cell(wing.ours, "LSTMCell"), return_carry=True, dtype_policy=MIXED
    )
    if wing is LINEN:
        assert traced(wing, given)[0] == names("f4", "bfloat16", "f4")
    else:
        with pytest.raises(ValueError, match=r"^RNN\(dtype_policy=.*LSTMCell.* had been built bef"):
            given()


# --- rules ----------------------------------------------------------------------------------------


def ruled(wing: Any, lib: Any, policy: str, rules: Any) -> Any:
    """Traces an RNN under rules: those of a scope for linen's cells of ours, else of a port."""
    if wing is LINEN and lib is wing.ours:
        return traced(wing, lambda: rnn_of(wing, lib), (policy, rules))
    build = lambda: wing.ours.apply_policy(rnn_of(wing, lib), policy, rules)  # noqa: E731
    return traced(wing, build)


@pytest.mark.parametrize("ported", [False, True])
@pytest.mark.parametrize("pattern", ["cell", "our class", "Flax's class"])
@EACH_WING
def test_rules_by_path_and_class_reach_a_cell(wing, pattern, ported):
    classes = {"our class": wing.ours.LSTMCell, "Flax's class": wing.theirs.LSTMCell}
    rules = [(classes.get(pattern, pattern), "float32")]
    found = ruled(wing, wing.theirs if ported else wing.ours, "bfloat16", rules)
    assert found == (names("f4", "f4", "bfloat16"), {"float32"})


@EACH_WING
def test_rules_reach_the_layers_inside_a_cell_under_strict_promotion_too(wing):
    found = ruled(wing, wing.ours, MIXED, [("cell/h.", "float32")])
    assert found == (names("f4", "bfloat16", "f4"), {"bfloat16", "float32"})
    with pytest.raises(ValueError, match="Rule 'cell/h_' matched no module"):
        ruled(wing, wing.ours, MIXED, [("cell/h_", "float32")])


@EACH_WING
def test_a_ported_cell_keeps_an_explicit_dtype_where_asked(wing):
    def build(**options: Any) -> Any:
        model = rnn_of(wing, wing.theirs, dtype=jnp.float32)
        return wing.ours.apply_policy(model, MIXED, **options)

    with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float32"):
        kept, _ = traced(wing, lambda: build(keep_explicit=True))
    assert kept == names("f4", "f4", "f4")
    assert traced(wing, build)[0] == names("f4", "bfloat16", "f4")


@EACH_WING
def test_stacked_cells_and_stacked_rnns_hand_on_compute_dtype(wing):
    def stacked(*layers: Any) -> Any:
        return wing.ours.Sequential(layers) if wing is LINEN else wing.ours.Sequential(*layers)

    def cell(name: str, *sizes: int) -> Any:
        cls = getattr(wing.ours, name)
        return cls(sizes[-1]) if wing is LINEN else cls(*sizes, rngs=wing.ours.Rngs(0))

    def cells() -> Any:
        return stacked(cell("LSTMCell", WIDTH, WIDTH), cell("LSTMCell", WIDTH, WIDTH))

    def rnns() -> Any:
        first, second = cell("GRUCell", WIDTH, HIDDEN), cell("SimpleCell", HIDDEN, 2)
        return stacked(wing.ours.RNN(first), wing.ours.RNN(second))

    carry = (jnp.zeros((BATCH, WIDTH), jnp.bfloat16),) * 2
    for build, args in ((cells, (carry, sequence()[:, 0])), (rnns, (sequence(),))):
        model = wing.pure(build, *args, policy=MIXED, abstract=True)
        out = jax.eval_shape(model.call, model.params, *args)
        assert jax.tree.leaves(out)[-1].dtype == jnp.float32
        assert matmul_dtypes(model.call, model.params, *args) == {"bfloat16"}
        found = equations(model.call, model.params, *args)
        casts = [e for e in found if e.primitive.name == "convert_element_type"]
        wide = [e for e in casts if e.outvars[0].aval.dtype == jnp.float32]
        # On the way out, and for a half-precision carry, which own code reads in float32.
        assert len(wide) <= len(jax.tree.leaves(out)) + 2 * len(jax.tree.leaves(args[0]))
