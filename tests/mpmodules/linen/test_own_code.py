"""linen ports whose own code multiplies run it under autocast, and layers as layers."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules.linen import apply_policy
from policy import DtypePolicyWarning, audit, autocast, compare
from policy.testing import assert_same_program
from tests.mpmodules.own_code_models import Block, Layers, Net, Projection, error
from tests.programs import assert_same_operations

KEY = jax.random.key(0)
TOKENS = jnp.arange(16).reshape(2, 8)
X = jax.random.normal(jax.random.key(1), (2, 8, 16))
MIXED = "mixed_bfloat16"


def ported(model, policy=MIXED, rules=None):
    return apply_policy(model, policy, rules, own_code="autocast")


def loss_of(model, variables, x, **options):
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def loss(params):
        out = model.apply({"params": params, **rest}, x, **options)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    return loss


@pytest.fixture(scope="module")
def variables():
    return jax.jit(Net().init)(KEY, TOKENS)


def share(model, variables, x=TOKENS):
    return audit(loss_of(model, variables, x), variables["params"], backward=True).f32_matmul_share


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_nothing_is_left_in_float32_and_errors_are_those_of_autocast(policy, variables):
    model = ported(Net(), policy)
    assert share(model, variables) == 0
    with jax.numpy_dtype_promotion("standard"):
        keeps = apply_policy(Projection(8), policy, own_code="keep")
        assert share(keeps, jax.eval_shape(keeps.init, KEY, X), X) > 0.5

    truth, half = loss_of(Net(), variables, TOKENS), loss_of(model, variables, TOKENS)
    alone = autocast(truth, policy)
    gradient = jax.jit(jax.grad(truth))(variables["params"])
    errors = [error(jax.jit(jax.grad(fn))(variables["params"]), gradient) for fn in (half, alone)]
    assert errors[0] <= 1.1 * errors[1] and errors[0] > 0
    out, wide = (jax.jit(m.apply)(variables, TOKENS) for m in (model, Net()))
    assert out.dtype == jnp.float32 and error(out, wide) < 0.02


def test_the_audit_of_a_port_finds_nothing_and_names_no_marks(variables):
    found = audit(loss_of(ported(Net()), variables, TOKENS), variables["params"], backward=True)
    assert not found.findings
    assert not [path for path in found.paths if "policy_" in path]
    assert {"block/qkv", "block/norm"} <= set(found.paths)


def test_compare_names_no_marks(variables):
    found = compare(lambda v: ported(Net()).apply(v, TOKENS), variables)
    assert found.rows and "policy_" not in str(found)


def test_parameters_are_those_of_the_model_and_stored_in_param_dtype(variables):
    model = ported(Net())
    same = jax.tree.map(np.array_equal, jax.jit(model.init)(KEY, TOKENS), variables)
    assert jax.tree.all(same)


def test_no_choice_warns_and_none_is_autocast():
    variables = jax.eval_shape(Projection(8).init, KEY, X)
    shares: dict[str | None, float] = {}
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("error")
        for name in (None, "autocast", "keep"):
            model = apply_policy(Projection(8), MIXED, own_code=name)
            shares[name] = audit(model.apply, variables, X).f32_matmul_share
    assert shares == {None: 0, "autocast": 0, "keep": 1}


def test_values_and_options_that_contradict_are_refused():
    with pytest.raises(
        ValueError, match="own_code should be 'autocast', 'keep' or None, but got 'auto'"
    ):
        apply_policy(Net(), MIXED, own_code="auto")  # pyright: ignore[reportArgumentType]
    for option in ("keep_explicit", "dtype_fields", "cast_submodules"):
        options: Any = {option: True}
        with pytest.raises(
            ValueError, match=f"whatever the code names: leave out {option}=True, or pass own_code="
        ):
            apply_policy(Net(), MIXED, own_code="autocast", **options)


def test_a_model_whose_layers_multiply_is_the_program_that_it_was():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(jax.nn.relu(nn.LayerNorm()(nn.Dense(8)(x))))

    variables = jax.eval_shape(Plain().init, KEY, X)
    ours, kept = (apply_policy(Plain(), MIXED, own_code=own).apply for own in (None, "keep"))
    assert_same_operations(ours, kept, variables, X)
    ours, kept = (apply_policy(Net(), "float32", own_code=own).apply for own in (None, "keep"))
    assert_same_program(ours, kept, (jax.eval_shape(Net().init, KEY, TOKENS), TOKENS))


def test_rules_hold_for_own_code_and_for_layers(variables):
    model = ported(Net(), rules={"block/qkv": "float32", "head": "float32"})
    jaxpr = audit(lambda v: model.apply(v, TOKENS), variables)
    wide = {
        op.path
        for op in jaxpr.operations
        if op.primitive == "dot_general" and "float32" in op.operands
    }
    assert wide == {"block/qkv", "head"}
    with pytest.raises(
        ValueError, match=r"Rule 'block/quv' matched no module\. Modules seen: .*block/qkv"
    ):
        jax.eval_shape(ported(Net(), rules={"block/quv": "float32"}).apply, variables, TOKENS)


def test_state_and_random_streams_are_the_models_own(variables):
    rngs = {"dropout": jax.random.key(2)}
    results = [
        jax.jit(lambda v, m=m: m.apply(v, TOKENS, mutable=["batch_stats"], rngs=rngs))(variables)
        for m in (ported(Net(train=True)), Net(train=True))
    ]
    (out, state), (wide, truth) = results
    assert error(out, wide) < 0.05  # another mask would give 0.5
    assert error(state, truth) < 0.01 and all(
        leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state)
    )


def test_a_scan_of_layers_hands_on_half():
    model, variables = ported(Layers()), jax.eval_shape(Layers().init, KEY, X)
    assert audit(model.apply, variables, X).f32_matmul_share == 0
    scan: Any = next(
        e for e in jax.make_jaxpr(model.apply)(variables, X).eqns if e.primitive.name == "scan"
    )
    assert scan.outvars[0].aval.dtype == jnp.bfloat16
    values = jax.jit(Layers().init)(KEY, X)
    gradients = [
        jax.jit(jax.grad(loss_of(m, values, X)))(values["params"]) for m in (model, Layers())
    ]
    assert error(*gradients) < 0.03


def lifted(transform):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return transform(Block)(name="block")(x)[0]

    return Model()


@pytest.mark.parametrize(
    "transform",
    [
        nn.jit,
        nn.remat,
        lambda block: nn.vmap(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
        ),
    ],
    ids=["jit", "remat", "vmap"],
)
def test_lifted_modules(transform):
    model = lifted(transform)
    variables = jax.eval_shape(model.init, KEY, X)
    assert share(ported(model), variables, X) == 0


def test_a_method_that_is_jitted_itself():
    class Model(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            return Projection(8)(nn.Dense(8)(x))

    variables = jax.eval_shape(Model().init, KEY, X)
    assert share(ported(Model()), variables, X) == 0


def test_cells_keep_their_carry():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                nn.GRUCell,
                variable_broadcast="params",
                split_rngs={"params": False},
                in_axes=1,
                out_axes=1,
            )
            cell = scan(16)
            carry, y = cell(cell.initialize_carry(KEY, x[:, 0].shape), x)
            return Projection(4)(y + carry[:, None])

    variables = jax.jit(Model().init)(KEY, X)
    jaxpr = jax.make_jaxpr(ported(Model()).apply)(variables, X)
    scan: Any = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
    assert scan.outvars[0].aval.dtype == jnp.float32
    assert share(ported(Model()), variables, X) == 0


def test_other_entries_bound_and_inside_of_another_model(variables):
    model = ported(Net())
    hidden = jax.eval_shape(lambda: Net().init(KEY, X, method="hidden"))
    for method in ("hidden", Net.hidden, lambda net, x: net.block(x)[0]):
        run = lambda v, method=method: model.apply(v, X, method=method)  # noqa: E731
        assert audit(run, hidden).f32_matmul_share == 0
    assert audit(lambda v: model.bind(v)(TOKENS), variables).f32_matmul_share == 0

    class Around(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, tokens):
            return self.inner(tokens)

    around = Around(model)
    inside = jax.eval_shape(around.init, KEY, TOKENS)
    assert audit(around.apply, inside, TOKENS).f32_matmul_share == 0


def test_eager_derivatives_and_transformations():
    model = ported(Block())
    variables = Block().init(KEY, X)

    def loss(params, x):
        return jnp.sum(model.apply({"params": params}, x)[0])

    eager, compiled = (
        jax.grad(loss)(variables["params"], X),
        jax.jit(jax.grad(loss))(variables["params"], X),
    )
    assert error(eager, compiled) < 0.01
    rows = jax.vmap(lambda x: model.apply(variables, x[None])[0][0])(X)
    assert error(rows, model.apply(variables, X)[0]) < 0.01
    again = pickle.loads(pickle.dumps(model))
    assert_same_program(again.apply, model.apply, (variables, X))


def test_half_parameters_and_inputs_are_taken_as_they_come():
    model = ported(Net(), "bfloat16")
    variables = jax.jit(model.init)(KEY, TOKENS)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(variables["params"])} == {"bfloat16"}
    out = jax.eval_shape(model.apply, variables, TOKENS)
    assert out.dtype == jnp.bfloat16 and share(model, variables) == 0
    gradients = jax.eval_shape(jax.grad(loss_of(model, variables, TOKENS)), variables["params"])
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients)} == {"bfloat16"}
    block = ported(Block())
    out, _ = jax.eval_shape(
        block.apply, jax.eval_shape(Block().init, KEY, X), X.astype(jnp.bfloat16)
    )
    assert out.dtype == jnp.float32


def test_variables_of_own_code_keep_their_dtype():
    class Cached(nn.Module):
        @nn.compact
        def __call__(self, x):
            key = Projection(16)(x)
            seen = self.variable("cache", "seen", jnp.zeros, key.shape, key.dtype)
            seen.value = seen.value + key
            self.sow("intermediates", "key", key)
            return nn.Dense(4)(seen.value)

    model = ported(Cached())
    variables = jax.eval_shape(model.init, KEY, X)
    _, state = jax.eval_shape(
        lambda v: model.apply(v, X, mutable=["cache", "intermediates"]), variables
    )
    assert state["cache"]["seen"].dtype == variables["cache"]["seen"].dtype == jnp.float32
    assert state["intermediates"]["key"][0].dtype == jnp.float32


class OwnCell(nn.RNNCellBase):
    """A cell that multiplies by itself."""

    @nn.compact
    def __call__(self, carry, x):
        carry = jnp.tanh(Projection(16, name="x")(x) + Projection(16, name="h")(carry))
        return carry, carry

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], 16))

    @property
    def num_feature_axes(self):
        return 1


@pytest.mark.parametrize(
    "loop",
    [lambda: nn.RNN(OwnCell()), lambda: nn.Bidirectional(nn.RNN(OwnCell()), nn.RNN(OwnCell()))],
    ids=["RNN", "Bidirectional"],
)
def test_loops_over_a_cell_of_the_models_own(loop):
    for model in (loop(), nn.Sequential([nn.Dense(16), loop()])):
        variables = jax.jit(model.init)(KEY, X)
        assert share(ported(model), variables, X) == 0
        out, wide = (jax.jit(m.apply)(variables, X) for m in (ported(model), model))
        assert out.dtype == jnp.float32 and error(out, wide) < 0.01


class Modes(nn.Module):
    """Multiplies by hand where it is told to."""

    @nn.compact
    def __call__(self, x, mode="layers"):
        y = nn.Dense(16)(x)
        return Projection(16)(y) if mode == "all" or self.is_initializing() else y


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
def test_a_call_that_shows_nothing_decides_nothing_for_others():
    variables = jax.eval_shape(Modes().init, KEY, X)
    block = jax.eval_shape(Block().init, KEY, X)
    modes, model = apply_policy(Modes(), MIXED), apply_policy(Block(), MIXED)
    jax.eval_shape(modes.apply, variables, X)
    assert audit(lambda v: modes.apply(v, X, mode="all"), variables).f32_matmul_share == 0
    jax.eval_shape(lambda v: model.apply(v, X, method=lambda m, x: x * 2), block)
    assert (
        audit(lambda v: model.apply(v, X, method=lambda m, x: m(x)[0]), block).f32_matmul_share == 0
    )


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
@pytest.mark.parametrize("first", [X[..., :3], X[:0]], ids=["wrong", "empty"])
def test_a_call_that_fails_or_is_empty_decides_nothing(first):
    class Own(Block):
        """A class of its own, of which nothing is known yet."""

    variables, model = jax.eval_shape(Own().init, KEY, X), apply_policy(Own(), MIXED)
    if first.size:
        with pytest.raises(Exception, match="shape"):
            jax.eval_shape(model.apply, variables, first)
    else:
        jax.eval_shape(model.apply, variables, first)
    assert audit(lambda v: model.apply(v, X)[0], variables).f32_matmul_share == 0


class Logits:
    """No pytree."""

    def __init__(self, array):
        self.array = array


def test_an_output_that_hides_arrays_is_called_as_it_is_and_told():
    class Policy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Logits(Projection(4)(x))

    variables = Policy().init(KEY, X)
    with pytest.warns(DtypePolicyWarning, match=r"^Policy can't be traced, .*returns a Logits, "):
        out: Any = ported(Policy()).apply(variables, X)
    assert out.array.shape == (2, 8, 4)


def test_a_scan_that_adds_up_parameters_keeps_its_carry():
    class Sum(nn.Module):
        @nn.compact
        def __call__(self, x):
            steps = self.param("steps", nn.initializers.ones, (1024, 4))
            total, _ = jax.lax.scan(lambda c, row: (c + 1e-3 * row, None), jnp.zeros(4), steps)
            return total + 0 * Projection(4)(x)[0, 0]

    variables = jax.jit(Sum().init)(KEY, X)
    assert error(jax.jit(ported(Sum()).apply)(variables, X), Sum().apply(variables, X)) < 1e-6


def test_a_cell_of_ones_own_inside_of_flaxs_loop():
    class Cell(nn.RNNCellBase):
        @nn.compact
        def __call__(self, carry, x):
            new = jnp.tanh(Projection(8, name="x")(x) + Projection(8, name="h")(carry))
            return new, new

        @nn.nowrap
        def initialize_carry(self, rng, input_shape):
            return jnp.zeros((*input_shape[:-1], 8))

        @property
        def num_feature_axes(self):
            return 1

    model = nn.RNN(Cell())
    variables = jax.eval_shape(model.init, KEY, X)
    assert (
        audit(Around(ported(Around(model))).apply, inside(inside(variables)), X).f32_matmul_share
        == 0
    )
    both = nn.Bidirectional(nn.RNN(Cell()), nn.RNN(Cell()))
    assert (
        audit(
            ported(Around(both)).apply, jax.eval_shape(Around(both).init, KEY, X), X
        ).f32_matmul_share
        == 0
    )


class Around(nn.Module):
    inner: nn.Module

    def __call__(self, x):
        return self.inner(x)


def inside(variables):
    return {"params": {"inner": variables["params"]}}


def test_float64_inputs_and_parameters_are_taken_as_float32():
    with jax.enable_x64(True):
        wide = X.astype(jnp.float64)
        variables = jax.eval_shape(Projection(4).init, KEY, wide)
        found = audit(ported(Projection(4)).apply, variables, wide)
    assert {op.operands for op in found.operations if op.primitive == "dot_general"} == {
        ("bfloat16", "bfloat16")
    }


class Graph(nn.Module):
    """Sums the messages of a node's neighbours, as graph networks do."""

    @nn.compact
    def __call__(self, x):
        messages = nn.Dense(8, use_bias=False)(x)
        return jax.ops.segment_sum(messages, jnp.zeros(len(x), int), num_segments=2)


def test_rows_are_added_up_in_float32():
    x = jnp.ones((4096, 4))
    variables = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape), jax.eval_shape(Graph().init, KEY, x)
    )
    model = apply_policy(Graph(), MIXED)
    out = jax.jit(model.apply)(variables, x)  # no matmul: nothing to tell of
    np.testing.assert_allclose(out[0], 4096 * 4)
    kept = apply_policy(Graph(), MIXED, own_code="keep")
    assert jax.jit(kept.apply)(variables, x)[0, 0] < 2048
