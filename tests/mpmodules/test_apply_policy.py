"""Policies for models that know nothing of us: their text stays as it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from policy import DtypePolicyWarning, PolicyRules, get_policy
from tests.mpmodules import own_code_models as models
from tests.mpmodules.wings import (
    BOTH,
    KEY,
    MIXED,
    Pair,
    Part,
    Text,
    batch_norm,
    dense,
    layer,
    layer_norm,
    weight,
)
from tests.programs import boundary_casts, named

F16 = "p=f32,c=f16,o=f32"
RNGS = flax_nnx.Rngs
ROWS = jax.random.normal(KEY, (2, 3, 4))
TOKENS = jnp.zeros((2, 3), int)


class LinenDouble(flax_linen.Dense):
    """A user's subclass of a Flax layer."""

    @flax_linen.compact
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class NnxDouble(flax_nnx.Linear):
    """A user's subclass of a Flax layer."""

    def __call__(self, inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * super().__call__(inputs)


def convolved(self, x):
    for block in (self.block_0, self.block_1):
        x = self.conv(self.norm(block(x)))
    return x


BLOCK = Text(
    lambda self, x: self.last(jax.nn.relu(self.norm(self.first(x)))),
    "Block",
    first=dense(4, 4),
    norm=layer_norm(4),
    last=dense(4, 4),
)
BLOCKS = Text(
    convolved,
    "Blocks",
    {"features": lambda self, x: self.block_0(x)},
    block_0=BLOCK,
    block_1=BLOCK,
    norm=batch_norm(4, use_running_average=True),
    conv=layer(lambda nn: nn.Conv(4, (3,)), lambda nnx, rngs: nnx.Conv(4, 4, (3,), rngs=rngs)),
)
ATTENTION = Text(
    lambda self, x: self.attention(self.norm(x)),
    norm=layer(lambda nn: nn.RMSNorm(), lambda nnx, rngs: nnx.RMSNorm(4, rngs=rngs)),
    attention=layer(
        lambda nn: nn.MultiHeadDotProductAttention(2),
        lambda nnx, rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
    ),
)
DOUBLE = Part(lambda self, nn, name: LinenDouble(4), lambda nnx, rngs: NnxDouble(4, 4, rngs=rngs))
SHARED = Text(lambda self, x: self.layer(self.layer(x)), "Shared", layer=dense(4, 4))
TIED = Text(
    lambda self, tokens: self.embed.attend(self.dense(self.embed(tokens))),
    embed=layer(lambda nn: nn.Embed(5, 4), lambda nnx, rngs: nnx.Embed(5, 4, rngs=rngs)),
    dense=dense(4, 4),
)
SEQUENTIAL = Pair(
    lambda: flax_linen.Sequential([flax_linen.Dense(4), flax_linen.relu, LinenDouble(2)]),
    lambda: flax_nnx.Sequential(
        flax_nnx.Linear(4, 4, rngs=RNGS(0)), flax_nnx.relu, NnxDouble(4, 2, rngs=RNGS(0))
    ),
)
THREADED = dense(4, 3, dtype=jnp.float32, param_dtype=jnp.float32)
ROOT_DOUBLE = Pair(lambda: LinenDouble(4), lambda: NnxDouble(4, 4, rngs=RNGS(0)))
MODELS: dict[str, Any] = {
    "blocks": (BLOCKS, ROWS),
    "shared": (SHARED, ROWS),
    "tied embedding": (TIED, TOKENS),
    "attention": (ATTENTION, ROWS),
    "sequential": (SEQUENTIAL, ROWS),
    "root layer": (
        Pair(lambda: flax_linen.Dense(3), lambda: flax_nnx.Linear(4, 3, rngs=RNGS(0))),
        ROWS,
    ),
    "root subclass of a layer": (ROOT_DOUBLE, ROWS),
    "subclass of a layer": (Text(lambda self, x: self.double(x), double=DOUBLE), ROWS),
    "threaded by hand": (Text(lambda self, x: self.layer(x), layer=THREADED), ROWS),
}


@BOTH
@pytest.mark.parametrize("policy", [MIXED, F16, "p=bf16,c=bf16,o=f32"])
@pytest.mark.parametrize("name", MODELS)
def test_matmuls_parameters_and_outputs_obey_and_the_model_is_the_one_boundary(wing, name, policy):
    (text, x), wanted = MODELS[name], get_policy(policy)
    model, plain = wing.port(text, policy, None, x), wing.theirs(text, x)
    assert model.made() == dict.fromkeys(plain.made(), wanted.param_dtype.name)
    assert jax.eval_shape(model.pure, model.params, x).dtype == wanted.output_dtype
    ops = model.operations(x)
    products = named(ops, "dot_general", "conv_general_dilated")
    compute, wide = wanted.compute_dtype.name, "float32"
    assert products and {op.inputs[0] for op in products} <= {compute, wide}
    if name != "attention":  # nnx's sums of values by exponential are of float32
        assert {op.inputs for op in products} == {(compute, compute)}
    if wanted.param_dtype == jnp.float32:  # others are cast at their uses
        casts = boundary_casts(ops)
        assert {op.within for op in casts} <= {()} and len(casts) <= 2


@BOTH
@pytest.mark.parametrize("name", ["blocks", "attention", "tied embedding", "shared"])
def test_under_float32_a_port_gives_the_numbers_of_the_model_and_half_close_gradients(wing, name):
    text, x = MODELS[name]
    ours, theirs = wing.port(text, "float32", None, x), wing.theirs(text, x)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    if name == "shared":
        gradients = (
            jax.jit(jax.grad(lambda p, m=m: jnp.square(m.pure(p, x)).mean()))(m.params)
            for m in (wing.port(text, MIXED, None, x), theirs)
        )
        for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_allclose(a, b, atol=0.05 * float(jnp.abs(b).max()) + 1e-3)


@BOTH
def test_statistics_stay_float32_and_change_and_another_method_is_a_boundary_too(wing):
    model = wing.port(BLOCKS, MIXED, None, ROWS)
    assert model(ROWS, method="features").dtype == jnp.float32
    assert set(model.dots(ROWS, method="features")) == {("bfloat16", "bfloat16")}
    text = Text(lambda self, x: self.norm(self.layer(x)), layer=dense(4, 4), norm=batch_norm(4))
    model = wing.port(text, "bf16", None, ROWS)
    before = jax.tree.leaves(model.state)
    assert model(ROWS).dtype == jnp.bfloat16
    for leaf, old in zip(jax.tree.leaves(model.state), before, strict=True):
        assert leaf.dtype == jnp.float32 and not np.array_equal(leaf, old)


# --- the instance ---------------------------------------------------------------------------------


def identity(instance: Any) -> Any:
    """Returns what tells ports apart."""
    is_nnx = isinstance(instance, flax_nnx.Module)
    return (type(instance), flax_nnx.graphdef(instance) if is_nnx else instance)


@BOTH
def test_a_port_is_of_the_models_class_and_the_model_is_not_touched(wing):
    plain = wing.theirs(BLOCKS, ROWS)
    before = identity(plain.instance)
    port = wing.module.apply_policy(plain.instance, "bf16")
    assert isinstance(port, type(plain.instance)) and port is not plain.instance
    assert type(port).__name__ == "Blocks" and port.__call__.__doc__ == convolved.__doc__
    assert identity(plain.instance) == before != identity(port)
    assert plain(ROWS).dtype == jnp.float32 and set(plain.made().values()) == {"float32"}
    assert set(plain.dots(ROWS)) == {("float32", "float32")}


@BOTH
def test_equal_arguments_give_equal_ports_and_a_second_policy_replaces_the_first(wing):
    plain, rules, apply_policy = (
        wing.theirs(BLOCKS, ROWS),
        {"conv": "f32"},
        wing.module.apply_policy,
    )
    port = identity(apply_policy(plain.instance, MIXED, rules))
    assert port == identity(apply_policy(plain.instance, "p=f32,c=bf16,o=f32", rules))
    assert hash(port) == hash(identity(apply_policy(plain.instance, MIXED, rules)))
    others = [apply_policy(plain.instance, *given) for given in (("bf16", rules), (MIXED,), (F16,))]
    assert port not in [identity(other) for other in others]
    again = apply_policy(apply_policy(plain.instance, MIXED, rules), F16)
    assert identity(again) == identity(others[-1])


@BOTH
@pytest.mark.parametrize("copied", ["pickle", "copy", "deepcopy", "clone"])
def test_copies_keep_the_policy(wing, copied):
    text = Pair(models.Block, lambda: models.NnxBlock(RNGS(0)))
    rules = PolicyRules({"qkv": "f32"})
    port = wing.port(text, MIXED, rules, jnp.ones((2, 8, 16))).instance
    copies = {
        "pickle": lambda: pickle.loads(pickle.dumps(port)),
        "copy": lambda: copy.copy(port),
        "deepcopy": lambda: copy.deepcopy(port),
        "clone": lambda: flax_nnx.clone(port) if wing.name == "nnx" else port.clone(),
    }
    assert identity(copies[copied]()) == identity(port)


@BOTH
def test_policies_of_our_own_layers_and_of_ports_inside_hold(wing):
    own = Part(
        lambda self, nn, name: wing.module.Dense(4, dtype_policy="f16"),
        lambda nnx, rngs: wing.module.Linear(4, 4, dtype_policy="f16", rngs=rngs),
    )
    holds = Text(lambda self, x: self.theirs(self.own(x)), own=own, theirs=dense(4, 4))
    dots = wing.port(holds, MIXED, None, ROWS).dots(ROWS)
    assert [name for name, _ in dots] == ["float16", "bfloat16"]

    port = wing.port(BLOCK, F16, None, ROWS).instance
    inner = Part(lambda self, nn, name: port, lambda nnx, rngs: port)
    outer = Text(lambda self, x: self.last(self.inner(x)), inner=inner, last=dense(4, 4))
    dots = wing.ours(outer, MIXED, ROWS).dots(ROWS)
    assert [name for name, _ in dots] == ["float16", "float16", "bfloat16"]


@BOTH
def test_keep_explicit_keeps_the_dtypes_of_layers(wing):
    inner = Text(lambda self, x: self.layer(x), "Inner", layer=dense(4, 4, dtype=jnp.float16))
    outer = Text(lambda self, x: self.last(self.inner(x)), inner=inner, last=dense(4, 4))
    replaced = wing.port(outer, "bf16", None, ROWS)
    assert {name for name, _ in replaced.dots(ROWS)} == {"bfloat16"}
    assert set(replaced.made().values()) == {"bfloat16"}
    with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float16") as told:
        kept = wing.port(outer, MIXED, None, ROWS, keep_explicit=True)
        assert [name for name, _ in kept.dots(ROWS)] == ["float16", "bfloat16"]
    assert len(told) == 1 and "at 'inner/layer'" in str(told[0].message)


@BOTH
def test_a_model_of_ours_is_ported_too(wing):
    ours = wing.ours(Text(lambda self, x: x @ self.w, w=weight(4, 4)), "f16", ROWS)
    ours.instance = wing.module.apply_policy(ours.instance, MIXED)
    assert ours(ROWS).dtype == jnp.float32 and set(ours.made().values()) <= {"float32", "float16"}
    found = ours.audit(ROWS).operations
    dots = [op.operands for op in found if op.primitive == "dot_general"]
    assert dots == [("bfloat16", "bfloat16")]


# --- rules ----------------------------------------------------------------------------------------


@BOTH
def test_rules_by_path_and_by_class_reach_flaxs_layers_and_modules(wing):
    rules = [("block_1", "p=f16,c=f16,o=bf16"), (wing.flax.BatchNorm, "p=f32,c=bf16,o=bf16")]
    made = wing.port(BLOCKS, "bf16", rules, ROWS).made()
    expected = {"block_1": "float16", "norm": "float32"}
    assert made == {path: expected.get(path.split("/")[0], "bfloat16") for path in made}
    made = wing.port(ATTENTION, "bf16", {"attention/query": "p=f16"}, ROWS).made()
    found = {path for path, dtype in made.items() if dtype == "float16"}
    assert found == {"attention/query/kernel", "attention/query/bias"}


@BOTH
def test_a_rule_that_matches_nothing_is_an_error_that_lists_the_paths(wing):
    rules = [("block_2", "f32"), (wing.flax.Embed, "f32"), ("conv", "f32")]
    text = (
        r"^Rules 'block_2', Embed matched no module\. Modules seen: block_0, block_0/first, .*, "
        r"conv, norm\."
    )
    with pytest.raises(ValueError, match=text):
        wing.port(BLOCKS, MIXED, rules, ROWS)(ROWS)
    with pytest.raises(ValueError, match=text):
        wing.port(BLOCKS, MIXED, rules, ROWS).made()
    lenient = PolicyRules([("block_2", "f32")], strict=False)
    assert wing.port(BLOCKS, MIXED, lenient, ROWS)(ROWS).dtype == jnp.float32
