"""Policies for linen models that know nothing of us: their text stays as it is."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_nn
from policy import DtypePolicyWarning, Policy, PolicyRules, current_policy, use_policy
from tests.programs import apply, boundary_casts, named, operations

apply_policy = our_nn.apply_policy
KEY = jax.random.key(0)
X = jnp.ones((2, 3, 4))
TOKENS = jnp.zeros((2, 3), int)
MIXED = "mixed_bfloat16"
F16 = "p=f32,c=f16,o=f32"


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.LayerNorm()(nn.Dense(4)(x))))


class Setup(nn.Module):
    def setup(self):
        self.blocks = [Compact(), Compact()]
        self.norm = nn.BatchNorm(use_running_average=True)
        self.conv = nn.Conv(4, (3,))

    def __call__(self, x):
        for block in self.blocks:
            x = self.conv(self.norm(block(x)))
        return x

    def first(self, x):
        return self.blocks[0](x)


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4)
        return layer(layer(x))


class Tied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(5, 4)
        self.dense = nn.Dense(4)

    def __call__(self, tokens):
        return self.embed.attend(self.dense(self.embed(tokens)))


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4)(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return body()(x, None)[0]


class Rematerialised(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Compact)()(x)


class Vmapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.vmap(Compact, variable_axes={"params": 0}, split_rngs={"params": True})()(x)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(Compact)()(x)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2)(nn.RMSNorm()(x))


class MyDense(nn.Dense):
    """A user's subclass of a Flax layer."""

    @nn.compact
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Subclassed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return MyDense(3)(x)


class HandThreaded(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, dtype=self.dtype, param_dtype=jnp.float32)(x)


MODELS = {
    "compact": (Compact(), X),
    "setup": (Setup(), X),
    "shared": (Shared(), X),
    "tied embedding": (Tied(), TOKENS),
    "scanned": (Scanned(), X),
    "rematerialised": (Rematerialised(), X),
    "vmapped": (Vmapped(), X),
    "jitted": (Jitted(), X),
    "attention": (Attention(), X),
    "sequential": (nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(2)]), X),
    "root layer": (nn.Dense(3), X),
    "root subclass of a layer": (MyDense(3), X),
    "subclassed": (Subclassed(), X),
    "threaded by hand": (HandThreaded(), X),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", [MIXED, F16, "p=bf16,c=bf16,o=f32"])
def test_matmuls_parameters_and_outputs_obey_the_policy(name, policy):
    model, x = MODELS[name]
    ported, policy = apply_policy(model, policy), our_nn.Dense(1, dtype_policy=policy).dtype_policy
    assert isinstance(policy, Policy)
    variables = jax.eval_shape(lambda: ported.init(KEY, x))
    assert {leaf.dtype for leaf in jax.tree.leaves(variables["params"])} == {policy.param_dtype}
    assert jax.eval_shape(ported.apply, variables, x).dtype == policy.output_dtype
    dots = named(operations(ported.apply, variables, x), "dot_general", "conv_general_dilated")
    assert dots and {dtype for op in dots for dtype in op.inputs} == {policy.compute_dtype.name}


@pytest.mark.parametrize("name", MODELS)
def test_the_tree_stays(name):
    model, x = MODELS[name]
    plain, ported = (jax.eval_shape(m.init, KEY, x) for m in (model, apply_policy(model, MIXED)))
    assert plain == ported


@pytest.mark.parametrize("name", ["shared", "tied embedding", "scanned", "jitted"])
def test_the_initial_values_stay(name):
    model, x = MODELS[name]
    plain, ported = model.init(KEY, x), apply_policy(model, MIXED).init(KEY, x)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ported), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_has_one_boundary(name):
    model, x = MODELS[name]
    ported = apply_policy(model, MIXED)
    casts = boundary_casts(operations(ported.apply, jax.eval_shape(ported.init, KEY, x), x))
    assert {op.within for op in casts} <= {(), ("remat2",)}
    assert len(casts) <= 2


@pytest.mark.parametrize("name", ["compact", "setup", "scanned", "attention", "tied embedding"])
def test_a_ported_model_runs_the_program_of_the_same_model_written_with_ours(name):
    model, x = MODELS[name]
    ported = apply_policy(model, "float32")
    variables = ported.init(KEY, x)
    truth = model.apply(variables, x)
    np.testing.assert_allclose(ported.apply(variables, x), truth, rtol=1e-5, atol=1e-5)


def test_gradients_are_float32_and_close():
    model = Shared()
    variables, x = model.init(KEY, X), jax.random.normal(KEY, X.shape)

    def gradient(model):
        return jax.jit(jax.grad(lambda v: jnp.square(model.apply(v, x)).mean()))(variables)

    for ours, theirs in zip(
        *(jax.tree.leaves(gradient(m)) for m in (apply_policy(model, MIXED), model)), strict=True
    ):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, atol=0.05 * float(jnp.abs(theirs).max()) + 1e-3)


# --- the instance ---------------------------------------------------------------------------------


def test_the_result_is_an_instance_of_the_models_class_with_its_name_and_fields():
    ported = apply_policy(HandThreaded(dtype=jnp.float16), MIXED)
    assert isinstance(ported, HandThreaded)
    assert type(ported).__name__ == "HandThreaded" and ported.dtype == jnp.float16
    assert ported.__call__.__doc__ == HandThreaded().__call__.__doc__


def test_equal_arguments_give_equal_models_of_one_class():
    a, b = (
        apply_policy(Compact(), text, {"Dense_0": "f32"}) for text in (MIXED, "p=f32,c=bf16,o=f32")
    )
    assert a == b and hash(a) == hash(b) and type(a) is type(b)
    assert a != apply_policy(Compact(), "bf16", {"Dense_0": "f32"}) and a != apply_policy(
        Compact(), MIXED
    )
    assert apply_policy(Compact(), MIXED) != Compact()


def test_pickle_copy_and_clone_keep_the_policy():
    ported = apply_policy(
        HandThreaded(jnp.float16), MIXED, PolicyRules({"Dense_0": "f32"}), keep_explicit=True
    )
    for copied in (
        pickle.loads(pickle.dumps(ported)),
        copy.copy(ported),
        copy.deepcopy(ported),
        ported.clone(),
    ):
        assert copied == ported and type(copied) is type(ported)


def test_a_second_policy_replaces_the_first():
    again = apply_policy(apply_policy(Compact(), MIXED), F16)
    assert again == apply_policy(Compact(), F16)
    ours = apply_policy(our_nn.Dense(3, dtype_policy="bf16"), F16)
    assert jax.eval_shape(lambda: ours.init_with_output(KEY, X)[0]).dtype == jnp.float32


def test_the_models_own_instance_is_not_touched():
    model = Setup()
    apply_policy(model, MIXED).init(KEY, X)
    assert model == Setup()
    assert jax.eval_shape(lambda: model.init_with_output(KEY, X)[0]).dtype == jnp.float32
    ops = operations(model.apply, jax.eval_shape(model.init, KEY, X), X)
    assert {op.inputs[0] for op in named(ops, "dot_general")} == {"float32"}


def test_layers_given_as_fields_are_not_touched():
    dense = nn.Dense(3)
    model = nn.Sequential([dense])
    apply_policy(model, MIXED).init(KEY, X)
    assert type(dense) is nn.Dense and dense.param_dtype == jnp.float32
    assert model.layers[0] is dense


FIRST = {
    "by name": "first",
    "as a function": Setup.first,
    "as a lambda": lambda module, x: module.first(x),
}


@pytest.mark.parametrize("method", FIRST.values(), ids=FIRST)
def test_another_method_is_a_boundary_too(method):
    ported = apply_policy(Setup(), MIXED)
    variables = jax.eval_shape(ported.init, KEY, X)
    ops = operations(lambda v, x: ported.apply(v, x, method=method), variables, X)
    assert (
        jax.eval_shape(lambda v, x: ported.apply(v, x, method=method), variables, X).dtype
        == jnp.float32
    )
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16", "bfloat16")}


def test_bind_works_and_a_submodule_taken_out_is_not_covered():
    ported = apply_policy(Setup(), MIXED)
    variables = ported.init(KEY, X)
    bound = ported.bind(variables)
    assert bound(X).dtype == jnp.float32
    assert {
        op.inputs[0] for op in named(operations(lambda x: bound.first(x), X), "dot_general")
    } == {"bfloat16"}
    (dot, *_) = named(operations(lambda x: ported.bind(variables).blocks[0](x), X), "dot_general")
    assert dot.inputs == ("float32", "float32")


def test_tabulate_capture_and_interceptors_see_what_they_saw():
    def captured(model):
        _, state = model.apply(model.init(KEY, X), X, capture_intermediates=True)
        return jax.tree.structure(state["intermediates"])

    def calls_of(model):
        calls = []

        def note(next_fun, args, kwargs, context):
            if context.method_name != "setup":  # which runs before the call is traced, and in it
                name = type(context.module).__name__
                calls.append((name, context.method_name, context.module.path))
            return next_fun(*args, **kwargs)

        variables = model.init(KEY, X)
        with nn.intercept_methods(note):
            model.apply(variables, X)
        return calls

    for model in (Compact(), Setup(), Attention()):
        ported = apply_policy(model, MIXED)
        assert captured(ported) == captured(model)
        assert calls_of(ported) == calls_of(model)
    ported = apply_policy(Compact(), MIXED).tabulate(KEY, X, policy_columns=False)
    plain = Compact().tabulate(KEY, X)
    assert plain.count("Dense_0") == ported.count("Dense_0")


def test_jit_caches_key_on_the_policy():
    model = Jitted()
    variables = model.init(KEY, X)
    for policy, expected in (
        (MIXED, "bfloat16"),
        (F16, "float16"),
        ("f32", "float32"),
        (MIXED, "bfloat16"),
    ):
        ported = apply_policy(model, policy)
        assert {
            op.inputs[0] for op in named(operations(ported.apply, variables, X), "dot_general")
        } == {expected}


def test_a_ported_model_ignores_the_scope_around_it_and_leaves_none_behind():
    ported = apply_policy(Compact(), MIXED)
    with use_policy("f16"):
        ops = operations(ported.apply, jax.eval_shape(ported.init, KEY, X), X)
    assert {op.inputs[0] for op in named(ops, "dot_general")} == {"bfloat16"}
    assert current_policy() is None


def test_a_ported_model_may_stand_inside_a_model_of_ours():
    class Outer(our_nn.Module):
        inner: Any

        @our_nn.compact
        def __call__(self, x):
            return our_nn.Dense(2)(self.inner(x))

    model = Outer(apply_policy(Compact(), F16), dtype_policy=MIXED)
    dots = named(operations(model.apply, jax.eval_shape(model.init, KEY, X), X), "dot_general")
    assert [op.inputs[0] for op in dots] == ["float16", "float16", "bfloat16"]


# --- explicit dtypes ------------------------------------------------------------------------------


def test_explicit_dtypes_of_flax_layers_are_overridden_unless_kept():
    model = HandThreaded(jnp.float32)
    overridden = apply_policy(model, "bf16")
    variables = overridden.init(KEY, X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"bfloat16"}
    assert {
        op.inputs[0] for op in named(operations(overridden.apply, variables, X), "dot_general")
    } == {"bfloat16"}
    kept = apply_policy(model, "bf16", keep_explicit=True)
    with pytest.warns(
        DtypePolicyWarning, match=r"Dense at 'Dense_0' has an explicit dtype=float32"
    ):
        ops = operations(kept.apply, variables, X)
    assert {op.inputs[0] for op in named(ops, "dot_general")} == {"float32"}
    # an explicit param_dtype can't be told from the default, and never holds
    assert {
        leaf.dtype.name for leaf in jax.tree.leaves(jax.eval_shape(overridden.init, KEY, X))
    } == {"bfloat16"}


def test_our_own_layers_inside_keep_their_own_policies():
    model = nn.Sequential([our_nn.Dense(3, dtype_policy="f16"), nn.Dense(3)])
    ported = apply_policy(model, MIXED)
    dots = named(operations(ported.apply, jax.eval_shape(ported.init, KEY, X), X), "dot_general")
    assert [op.inputs[0] for op in dots] == ["float16", "bfloat16"]


# --- rules ----------------------------------------------------------------------------------------


def kernels(variables: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"])
    }


def test_rules_by_path_and_by_class_reach_flaxs_layers_and_modules():
    rules = [("blocks_1", "p=f16,c=f16,o=bf16"), (nn.BatchNorm, "p=f32,c=bf16,o=bf16")]
    found = kernels(jax.eval_shape(lambda: apply_policy(Setup(), "bf16", rules).init(KEY, X)))
    assert (
        found["blocks_0/Dense_0/kernel"] == "bfloat16"
        and found["blocks_1/Dense_0/kernel"] == "float16"
    )
    assert found["blocks_1/LayerNorm_0/scale"] == "float16" and found["norm/scale"] == "float32"


def test_a_rule_reaches_a_layer_inside_flaxs_attention():
    ported = apply_policy(
        Attention(), MIXED, {"MultiHeadDotProductAttention_0/query": "p=f16,c=f32,o=bf16"}
    )
    found = kernels(jax.eval_shape(lambda: ported.init(KEY, X)))
    assert found["MultiHeadDotProductAttention_0/query/kernel"] == "float16"
    assert found["MultiHeadDotProductAttention_0/key/kernel"] == "float32"


def test_a_rule_reaches_inside_scanned_rematerialised_and_jitted_modules():
    for model, path in (
        (Scanned(), "ScanBody_0/Dense_0"),
        (Rematerialised(), "CheckpointCompact_0/Dense_0"),
    ):
        paths = [
            p
            for p in kernels(jax.eval_shape(lambda m=model: m.init(KEY, X)))
            if p.endswith("Dense_0/kernel")
        ]
        assert paths == [f"{path}/kernel"]
        ported = apply_policy(model, MIXED, {path: "p=f16,c=f16,o=bf16"})
        assert (
            kernels(jax.eval_shape(lambda m=ported: m.init(KEY, X)))[f"{path}/kernel"] == "float16"
        )


def test_a_rule_that_matches_nothing_is_an_error_that_lists_the_paths():
    ported = apply_policy(Setup(), MIXED, [("blocks_2", "f32"), (nn.Embed, "f32")])
    text = (
        r"Rules 'blocks_2', Embed matched no module\. Modules seen: blocks_0, blocks_0/Dense_0, "
        r".*, conv, norm\."
    )
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(ported.init, KEY, X)
    variables = jax.eval_shape(Setup().init, KEY, X)
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(ported.apply, variables, X)
    lenient = PolicyRules([("blocks_2", "f32")], strict=False)
    jax.eval_shape(apply_policy(Setup(), MIXED, lenient).init, KEY, X)


# --- what users do --------------------------------------------------------------------------------


def test_batch_statistics_and_dropout_work():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
            return nn.Dropout(0.5)(x, deterministic=not train)

    ported = apply_policy(Model(), "bf16")
    variables = ported.init(KEY, X, False)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables["batch_stats"])} == {"float32"}
    out, updated = apply(ported, variables, X, True, rngs={"dropout": KEY}, mutable=["batch_stats"])
    assert out.dtype == jnp.bfloat16
    assert not np.array_equal(updated["batch_stats"]["BatchNorm_0"]["mean"], jnp.zeros(4))


def test_a_function_that_flax_offers_sums_in_float32_unless_own_code_is_kept():
    class Pools(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.avg_pool(nn.Dense(3)(x), (2,))

    with jax.numpy_dtype_promotion("standard"):
        variables = jax.eval_shape(Pools().init, KEY, X)
    for ported, dtype in (
        (apply_policy(Pools(), MIXED), "float32"),
        (apply_policy(Pools(), MIXED, own_code="keep"), "bfloat16"),
    ):
        with jax.numpy_dtype_promotion("standard"):  # Flax's avg_pool divides a half by an integer
            ops = operations(ported.apply, variables, X)
        assert named(ops, "reduce_window_sum")[0].inputs == (dtype,)


def test_inside_jax_transformations():
    ported = apply_policy(Compact(), MIXED)
    variables = ported.init(KEY, X)
    assert (
        jax.vmap(functools.partial(apply, ported), in_axes=(None, 0))(variables, X).dtype
        == jnp.float32
    )
    assert jax.jit(functools.partial(apply, ported))(variables, X).dtype == jnp.float32
    step = jax.checkpoint(lambda v: apply(ported, v, X).sum())
    assert {leaf.dtype.name for leaf in jax.tree.leaves(jax.grad(step)(variables))} == {"float32"}
