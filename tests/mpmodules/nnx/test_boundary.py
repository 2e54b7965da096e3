"""The boundary: compute_dtype inside, output_dtype where a call comes from outside, references by
identity.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import Policy, nnx, use_policy
from policy import DtypePolicyWarning
from tests.programs import assert_same_operations, boundary_casts, named, operations

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
MIXED = Policy(jnp.float32, jnp.bfloat16, jnp.float32)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def pure(model, call=lambda model, *args: model(*args)):
    """`call` on a copy of `model` that is made inside, so that it can be traced."""
    definition, state = flax_nnx.split(model)
    return lambda *args: call(flax_nnx.merge(definition, state, copy=True), *args)


class Recorder(nnx.Module):
    """Notes the dtype that passes through it, and doubles what does."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen = [*self.seen, x.dtype.name]
        return x * 2


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.after = Recorder()

    def __call__(self, x):
        return self.after(self.linear(x))


class Net(nnx.Module):
    def __init__(self, inner=None, *, rngs):
        self.first = Block(rngs=rngs)
        self.second = Block(dtype_policy=inner, rngs=rngs)
        self.between = Recorder()
        self.head = Block(rngs=rngs)

    def __call__(self, x):
        return self.head(self.between(self.second(self.first(x))))


def recorded(net):
    return [r.seen for r in (net.first.after, net.second.after, net.between, net.head.after)]


def computed(net):
    """The dtypes of the layers of the three blocks, and of what is doubled after each and between.

    In order: first layer, first doubled, second, doubled, between, head, doubled.
    """
    ops = operations(pure(net), jnp.asarray(X))
    return [op.inputs[0] for op in named(ops, "dot_general", "mul")]


@pytest.mark.parametrize("given", ["argument", "scope"])
def test_a_policy_gives_bfloat16_between_layers_and_float32_logits(given):
    if given == "argument":
        net = Net(dtype_policy=MIXED, rngs=nnx.Rngs(0))
    else:
        with use_policy(MIXED):
            net = Net(rngs=nnx.Rngs(0))
    assert net(X).dtype == F32
    assert computed(net) == ["bfloat16"] * 7


@pytest.mark.parametrize("inner", [None, "mixed_bfloat16", "f32", "bf16", "p=f32,c=f32,o=bf16"])
def test_a_users_code_sees_float32_everywhere(inner):
    net = Net(inner, dtype_policy=MIXED, rngs=nnx.Rngs(0))
    net(X)
    net(X.astype(BF16))
    assert recorded(net) == [["float32"] * 2] * 4


@pytest.mark.parametrize("inner", ["f32", "p=f32,c=f32,o=bf16"])
def test_a_submodule_with_its_own_policy_runs_in_it_and_the_code_around_in_its_own(inner):
    net = Net(inner, dtype_policy=MIXED, rngs=nnx.Rngs(0))
    assert net(X).dtype == F32
    half, wide = ["bfloat16"] * 2, ["float32"] * 2
    assert computed(net) == [*half, *wide, "bfloat16", *half]


def test_a_submodule_given_the_same_policy_is_no_boundary():
    net = Net("mixed_bfloat16", dtype_policy=MIXED, rngs=nnx.Rngs(0))
    assert computed(net) == ["bfloat16"] * 7
    assert_same_operations(pure(net), pure(Net(dtype_policy=MIXED, rngs=nnx.Rngs(0))), X)


def test_a_shared_module_keeps_the_policy_it_was_built_under():
    class Shares(nnx.Module):
        def __init__(self, *, rngs):
            self.block = Block(rngs=rngs)
            self.inner = Holder(self.block)

        def __call__(self, x):
            return self.block(x), self.inner(x)

    class Holder(nnx.Module):
        def __init__(self, block):
            self.block = block

        def __call__(self, x):
            return self.block(x)

    shares = Shares(dtype_policy=MIXED, rngs=nnx.Rngs(0))
    assert [out.dtype for out in shares(X)] == [F32, F32]
    assert computed(shares) == ["bfloat16"] * 4
    with use_policy("f16"):
        outer = Holder(shares.block)
    assert outer(X).dtype == F16
    assert computed(outer) == ["bfloat16"] * 2


def test_super_calls_and_methods_that_call_each_other_cross_once():
    class Base(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.seen = []

        def __call__(self, x):
            return self.linear(x)

    class Derived(Base):
        def __call__(self, x):
            y = super().__call__(x)
            z = self.encode(y)
            self.seen = [y.dtype.name, z.dtype.name, self._private(X).dtype.name]
            return z

        def encode(self, x):
            return self.decode(x) + 1

        def decode(self, x):
            return self.linear(x)

        def _private(self, x):
            return jnp.asarray(x)

        @staticmethod
        def static(x):
            return jnp.asarray(x)

        @classmethod
        def of_class(cls, x):
            return jnp.asarray(x)

    model = Derived(dtype_policy=MIXED, rngs=nnx.Rngs(0))
    assert model(X).dtype == F32
    assert model.seen == ["float32"] * 3
    ops = operations(pure(model), jnp.asarray(X))
    assert [op.outputs for op in boundary_casts(ops)] == [("bfloat16",), ("float32",)]
    assert [op.outputs for op in named(ops, "dot_general", "add")] == [("bfloat16",)] * 5
    assert model.encode(X).dtype == model.decode(X).dtype == F32
    half = Derived(dtype_policy="bf16", rngs=nnx.Rngs(0))
    assert half.decode(X).dtype == BF16
    assert half._private(X).dtype == half.static(X).dtype == half.of_class(X).dtype == F32


@pytest.mark.parametrize("own_code", ["autocast", "keep"])
def test_trees_of_arguments_and_results_are_cast_and_everything_else_passes(own_code):
    seen = {}

    class Tree(nnx.Module):
        def __call__(self, x, *more, key, flag, **options):
            arrays = x["a"], more[0], options["extra"][0]
            seen.update(dtypes={array.dtype.name for array in arrays}, more=more[1:], flag=flag)
            return {**x, "a": x["a"] * 2, "text": "out", "none": None, "key": key}

    Tree.own_code = own_code
    key = jax.random.key(0)
    tree = {"a": X, "n": np.arange(3), "c": np.ones(2, np.complex64)}
    out = Tree(dtype_policy="bf16")(tree, X, 1.5, None, key=key, flag=True, extra=[X])
    dtypes = {"bfloat16" if own_code == "keep" else "float32"}
    assert seen == {"dtypes": dtypes, "more": (1.5, None), "flag": True}
    assert (out["a"].dtype, out["n"].dtype.kind, out["c"].dtype) == (BF16, "i", np.complex64)
    np.testing.assert_array_equal(out["n"], tree["n"])
    np.testing.assert_array_equal(out["c"], tree["c"])
    assert jnp.array_equal(jax.random.key_data(out["key"]), jax.random.key_data(key))
    assert (out["text"], out["none"]) == ("out", None)


@pytest.mark.parametrize("own_code", ["autocast", "keep"])
def test_keep_inputs_leaves_named_arguments_as_they_come_by_position_and_by_name(own_code):
    class Diffusion(nnx.Module):
        keep_inputs = ("t", "rest")

        def __call__(self, x, t, *rest, scale=None):
            return tuple(None if y is None else y.dtype.name for y in (x, t, *rest, scale))

    Diffusion.own_code = own_code
    cast = "bfloat16" if own_code == "keep" else "float32"
    model, t = Diffusion(dtype_policy="bf16"), np.array([999.0, 1001.0], np.float32)
    assert model(X, t) == (cast, "float32", None)
    assert model(X, t=t) == (cast, "float32", None)
    assert model(X, t, t, t, scale=X) == (cast, "float32", "float32", "float32", cast)


@pytest.mark.parametrize(
    ("own_code", "policy", "apart"),
    [
        ("autocast", "bf16", -2),
        ("autocast", "c=bf16,inputs=keep", -2),
        ("keep", "bf16", 0),
        ("keep", "c=bf16,inputs=keep", -2),
    ],
)
def test_timesteps_stay_apart_unless_a_class_keeps_its_code_and_casts_inputs(
    own_code, policy, apart
):
    class Embedding(nnx.Module):
        def __call__(self, t):
            return (t[0] - t[1]).astype(jnp.float32)

    Embedding.own_code = own_code
    t = np.array([999.0, 1001.0], np.float32)
    assert Embedding(dtype_policy=policy)(t) == apart


def test_a_bare_root_layer_returns_compute_dtype_unless_it_has_a_policy_of_its_own():
    with use_policy(MIXED):
        bare = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    own = nnx.Linear(4, 4, dtype_policy=MIXED, rngs=nnx.Rngs(0))
    assert (bare(X).dtype, own(X).dtype) == (BF16, F32)
    with use_policy("bf16", rules={nnx.Linear: MIXED}):
        by_rule = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert by_rule(X).dtype == F32


def test_a_sequential_is_a_module_and_a_boundary():
    with use_policy(MIXED):
        model: Any = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.relu, Recorder())
    assert model(X).dtype == F32
    assert model.layers[2].seen == ["float32"]
    ops = operations(pure(model), jnp.asarray(X))
    assert [op.outputs for op in named(ops, "dot_general", "max", "mul")] == [("bfloat16",)] * 3


def test_attention_is_a_module_and_a_boundary():
    with use_policy(MIXED):
        layer = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=False)
    assert layer(X).dtype == F32


# --------------------------------------------------------------------------------------------------
# References
# --------------------------------------------------------------------------------------------------


class Receives(nnx.Module):
    def __call__(self, x, reference, call=None):
        out = reference if call is None else call(reference, x)
        return x, out


@pytest.mark.parametrize(
    "reference",
    [
        lambda: nnx.Rngs(0),
        lambda: nnx.Rngs(0).dropout,
        lambda: nnx.Param(jnp.ones(3)),
        lambda: flax_nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        lambda: nnx.List([nnx.Param(jnp.ones(3))]),
        lambda: jax.new_ref(jnp.ones(3)),
    ],
    ids=["Rngs", "RngStream", "Variable", "Module", "List", "Ref"],
)
def test_references_pass_the_boundary_by_identity(reference):
    reference, receives = reference(), cast(Any, Receives(dtype_policy=MIXED))
    x, out = receives(X, reference)
    assert out is reference
    assert x.dtype == F32
    _, out = Receives(dtype_policy=MIXED)(X, {"a": [reference]})
    assert out["a"][0] is reference


def test_a_reference_that_the_code_closes_over_is_returned_by_identity():
    for reference in (nnx.Rngs(0), nnx.Param(jnp.ones(3)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))):
        receives = cast(Any, Receives(dtype_policy=MIXED))
        _, (inside, (deeper,)) = receives(X, None, call=lambda _, x, r=reference: (r, [r]))
        assert inside is deeper is reference


def test_a_state_passes_by_value_and_a_graph_by_identity():
    layer, receives = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), cast(Any, Receives(dtype_policy=MIXED))
    graph, state = flax_nnx.split(layer)
    _, out = receives(X, state)
    assert type(out) is type(state)
    jax.tree.map(np.testing.assert_array_equal, out, state)
    with pytest.warns(DtypePolicyWarning, match="Receives can't be traced.* returns a GraphDef"):
        assert receives(X, graph)[1] is graph


def test_dropout_masks_differ_from_call_to_call_where_rngs_are_an_argument():
    class Drops(nnx.Module):
        def __init__(self):
            self.dropout = nnx.Dropout(0.5, deterministic=False)

        def __call__(self, x, rngs):
            return self.dropout(x, rngs=rngs)

    model, rngs = Drops(dtype_policy=MIXED), nnx.Rngs(0)
    x = jnp.ones((8, 8))
    masks = [np.asarray(model(x, rngs)) for _ in range(3)]
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[1], masks[2])
    assert rngs.default.count[...] == 3


def test_batch_statistics_of_an_argument_are_updated():
    norm = nnx.BatchNorm(4, dtype_policy=MIXED, rngs=nnx.Rngs(0))
    theirs = flax_nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    flax_and_ours = Receives(dtype_policy="inputs=keep,c=f32")(
        X, norm, lambda norm, x: (norm(x), theirs(x))
    )
    assert flax_and_ours[0].dtype == F32
    assert norm.mean[...].dtype == F32
    np.testing.assert_allclose(norm.mean[...], X.mean(0) * 0.01, rtol=1e-6)
    np.testing.assert_allclose(norm.mean[...], theirs.mean[...], rtol=1e-6)


def test_a_variable_written_inside_a_boundary_keeps_its_value_and_identity():
    class Counts(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self, x, other):
            self.count.set_value(self.count.get_value() + 1)
            other.set_value(other.get_value() + 2)
            return x

    model, other = Counts(dtype_policy=MIXED), nnx.Variable(jnp.zeros(()))
    model(X, other)
    model(X, other)
    assert (model.count.get_value(), other.get_value()) == (2.0, 4.0)
    assert other.get_value().dtype == F32


# --------------------------------------------------------------------------------------------------
# Attempts to break it
# --------------------------------------------------------------------------------------------------


def test_integer_inputs_reach_a_layer_as_they_are_and_leave_in_the_policy_s_dtype():
    ints = np.ones((2, 4), np.int32)
    for build in (
        lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
    ):
        with use_policy(MIXED):
            layer = build()
        assert layer(ints).dtype == BF16
    assert nnx.BatchNorm(4, dtype_policy=MIXED, rngs=nnx.Rngs(0))(ints).dtype == F32
    with use_policy(MIXED):
        assert nnx.Dropout(0.0)(ints).dtype == jnp.int32


@pytest.mark.parametrize("batch", [(0,), (0, 3), ()])
def test_empty_and_missing_batches_pass(batch):
    x = np.zeros((*batch, 4), np.float32)
    linear, norm = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    assert nnx.apply_policy(nnx.Sequential(linear, norm), MIXED)(x).shape == x.shape
    own = nnx.LayerNorm(4, dtype_policy="bf16", rngs=nnx.Rngs(0))
    assert (own(x).shape, own(x).dtype) == (x.shape, BF16)


def test_nan_stays_in_its_own_row():
    x = np.array(X)
    x[0, 1] = np.nan
    with use_policy(MIXED):
        model = nnx.Sequential(
            nnx.LayerNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        )
    out = np.asarray(model(x))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


def test_float64_and_python_inputs_are_cast_like_any_other():
    layer = nnx.Linear(4, 4, dtype_policy=MIXED, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X.astype(np.float64)), layer(X))
    model = Receives(dtype_policy="bf16")
    assert model(2.5, None)[0] == 2.5
    assert model(np.float32(2.5), None)[0].dtype == BF16


def test_x64_mode_runs_a_float64_policy_and_a_float32_one(monkeypatch):
    with jax.enable_x64(True):
        layer = nnx.Linear(4, 4, dtype_policy="float64", rngs=nnx.Rngs(0))
        norm = nnx.BatchNorm(4, dtype_policy="float64", rngs=nnx.Rngs(0))
        x = X.astype(np.float64)
        assert (
            layer(x).dtype
            == layer.kernel.dtype
            == norm(x).dtype
            == norm.mean[...].dtype
            == jnp.float64
        )
        np.testing.assert_allclose(norm.mean[...], x.mean(0) * 0.01, rtol=1e-14)
        narrow = nnx.Linear(4, 4, dtype_policy=MIXED, rngs=nnx.Rngs(0))
        assert narrow(x).dtype == F32
        with use_policy("p=f32,c=f32,o=f32,reduction=f64"):
            wide = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
            attention = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=False)
        assert wide(X).dtype == F32
        text = str(jax.make_jaxpr(pure(wide))(X))
        assert "f64[2]" in text
        assert re.search(r"f64\[[\d,]*\] = exp", str(jax.make_jaxpr(pure(attention))(X)))
    with pytest.raises(
        ValueError, match=r"^A policy asks for float64, but JAX runs with x64 disabled"
    ):
        nnx.Linear(4, 4, dtype_policy="float64", rngs=nnx.Rngs(0))


def test_recorded_errors_name_missing_arguments_as_flax_does():
    for layer in (
        nnx.Linear(4, 4, dtype_policy=MIXED, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(4, dtype_policy=MIXED, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, dtype_policy=MIXED),
    ):
        with pytest.raises(TypeError, match=r"missing (1|a) required .*argument: '(inputs|x)'"):
            layer()


def test_arguments_by_name_are_cast_too():
    with use_policy(MIXED):
        linear, norm = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0))
        drop = nnx.Dropout(0.0)
    assert linear(inputs=X).dtype == norm(x=X).dtype == drop(inputs=jnp.asarray(X)).dtype == BF16
