"""Policies for models that know nothing of us: their text stays as it is, and their own code runs
under autocast.
"""

import copy
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from policy import DtypePolicyWarning, PolicyRules, audit, autocast, compare, get_policy
from policy.testing import assert_same_program
from tests.mpmodules import own_code_models as models
from tests.mpmodules.apis import (
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
from tests.mpmodules.own_code_models import error
from tests.programs import assert_same_operations, boundary_casts, named

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


@pytest.mark.cases(slow=3)
@BOTH
@pytest.mark.parametrize("policy", [MIXED, F16, "p=bf16,c=bf16,o=f32"])
@pytest.mark.parametrize("name", MODELS)
def test_matmuls_parameters_and_outputs_obey_and_the_model_is_the_one_boundary(api, name, policy):
    (text, x), wanted = MODELS[name], get_policy(policy)
    model, plain = api.port(text, policy, None, x), api.theirs(text, x)
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


@pytest.mark.cases(slow=2)
@BOTH
@pytest.mark.parametrize("name", ["blocks", "attention", "tied embedding", "shared"])
def test_under_float32_a_port_gives_the_numbers_of_the_model_and_half_close_gradients(api, name):
    text, x = MODELS[name]
    ours, theirs = api.port(text, "float32", None, x), api.theirs(text, x)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    if name == "shared":
        gradients = (
            jax.jit(jax.grad(lambda p, m=m: jnp.square(m.pure(p, x)).mean()))(m.params)
            for m in (api.port(text, MIXED, None, x), theirs)
        )
        for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_allclose(a, b, atol=0.05 * float(jnp.abs(b).max()) + 1e-3)


@pytest.mark.cases(fast=1)
@BOTH
def test_statistics_stay_float32_and_change_and_another_method_is_a_boundary_too(api):
    model = api.port(BLOCKS, MIXED, None, ROWS)
    assert model(ROWS, method="features").dtype == jnp.float32
    assert set(model.dots(ROWS, method="features")) == {("bfloat16", "bfloat16")}
    text = Text(lambda self, x: self.norm(self.layer(x)), layer=dense(4, 4), norm=batch_norm(4))
    model = api.port(text, "bf16", None, ROWS)
    before = jax.tree.leaves(model.state)
    assert model(ROWS).dtype == jnp.bfloat16
    for leaf, old in zip(jax.tree.leaves(model.state), before, strict=True):
        assert leaf.dtype == jnp.float32 and not np.array_equal(leaf, old)


def identity(instance: Any) -> Any:
    """Returns what tells ports apart."""
    is_nnx = isinstance(instance, flax_nnx.Module)
    return (type(instance), flax_nnx.graphdef(instance) if is_nnx else instance)


@pytest.mark.slow
@BOTH
def test_a_port_is_of_the_models_class_and_the_model_is_not_touched(api):
    plain = api.theirs(BLOCKS, ROWS)
    before = identity(plain.instance)
    port = api.module.apply_policy(plain.instance, "bf16")
    assert isinstance(port, type(plain.instance)) and port is not plain.instance
    assert type(port).__name__ == "Blocks" and port.__call__.__doc__ == convolved.__doc__
    assert identity(plain.instance) == before != identity(port)
    assert plain(ROWS).dtype == jnp.float32 and set(plain.made().values()) == {"float32"}
    assert set(plain.dots(ROWS)) == {("float32", "float32")}


@pytest.mark.cases(fast=1)
@BOTH
def test_equal_arguments_give_equal_ports_and_a_second_policy_replaces_the_first(api):
    plain, rules, apply_policy = (
        api.theirs(BLOCKS, ROWS),
        {"conv": "f32"},
        api.module.apply_policy,
    )
    port = identity(apply_policy(plain.instance, MIXED, rules))
    assert port == identity(apply_policy(plain.instance, "p=f32,c=bf16,o=f32", rules))
    assert hash(port) == hash(identity(apply_policy(plain.instance, MIXED, rules)))
    others = [apply_policy(plain.instance, *given) for given in (("bf16", rules), (MIXED,), (F16,))]
    assert port not in [identity(other) for other in others]
    again = apply_policy(apply_policy(plain.instance, MIXED, rules), F16)
    assert identity(again) == identity(others[-1])


@pytest.mark.cases(fast=1, slow=6)
@BOTH
@pytest.mark.parametrize("way", ["ours", "port"])
@pytest.mark.parametrize("copied", ["pickle", "copy", "deepcopy", "clone"])
def test_copies_keep_the_policy(api, copied, way):
    if way == "port":
        text = Pair(models.Block, lambda: models.NnxBlock(RNGS(0)))
        rules = PolicyRules({"qkv": "f32"})
        instance = api.port(text, MIXED, rules, jnp.ones((2, 8, 16))).instance
    elif api.name == "linen":
        instance = api.module.LayerNorm(epsilon=1e-3, dtype_policy=MIXED)
    else:
        instance = api.module.LayerNorm(4, epsilon=1e-3, dtype_policy=MIXED, rngs=RNGS(0))
    copies = {
        "pickle": lambda: pickle.loads(pickle.dumps(instance)),
        "copy": lambda: copy.copy(instance),
        "deepcopy": lambda: copy.deepcopy(instance),
        "clone": lambda: flax_nnx.clone(instance) if api.name == "nnx" else instance.clone(),
    }
    assert identity(copies[copied]()) == identity(instance)


@pytest.mark.cases(fast=1)
@BOTH
def test_policies_of_our_own_layers_and_of_ports_inside_hold(api):
    own = Part(
        lambda self, nn, name: api.module.Dense(4, dtype_policy="f16"),
        lambda nnx, rngs: api.module.Linear(4, 4, dtype_policy="f16", rngs=rngs),
    )
    holds = Text(lambda self, x: self.theirs(self.own(x)), own=own, theirs=dense(4, 4))
    dots = api.port(holds, MIXED, None, ROWS).dots(ROWS)
    assert [name for name, _ in dots] == ["float16", "bfloat16"]

    port = api.port(BLOCK, F16, None, ROWS).instance
    inner = Part(lambda self, nn, name: port, lambda nnx, rngs: port)
    outer = Text(lambda self, x: self.last(self.inner(x)), inner=inner, last=dense(4, 4))
    dots = api.ours(outer, MIXED, ROWS).dots(ROWS)
    assert [name for name, _ in dots] == ["float16", "float16", "bfloat16"]


@pytest.mark.cases(fast=1)
@BOTH
def test_keep_explicit_keeps_the_dtypes_of_layers(api):
    inner = Text(lambda self, x: self.layer(x), "Inner", layer=dense(4, 4, dtype=jnp.float16))
    outer = Text(lambda self, x: self.last(self.inner(x)), inner=inner, last=dense(4, 4))
    with pytest.warns(DtypePolicyWarning, match=r"gives all layers .*\(dtype=float16\)"):
        replaced = api.port(outer, "bf16", None, ROWS)
        assert {name for name, _ in replaced.dots(ROWS)} == {"bfloat16"}
        assert set(replaced.made().values()) == {"bfloat16"}
    with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float16") as told:
        kept = api.port(outer, MIXED, None, ROWS, keep_explicit=True)
        assert [name for name, _ in kept.dots(ROWS)] == ["float16", "bfloat16"]
    assert len(told) == 1 and "at 'inner/layer'" in str(told[0].message)


@BOTH
def test_a_model_of_ours_is_ported_too(api):
    ours = api.ours(Text(lambda self, x: x @ self.w, w=weight(4, 4)), "f16", ROWS)
    ours.instance = api.module.apply_policy(ours.instance, MIXED)
    assert ours(ROWS).dtype == jnp.float32 and set(ours.made().values()) <= {"float32", "float16"}
    found = ours.audit(ROWS).operations
    dots = [op.operands for op in found if op.primitive == "dot_general"]
    assert dots == [("bfloat16", "bfloat16")]


@pytest.mark.cases(fast=1)
@BOTH
def test_rules_by_path_and_by_class_reach_flaxs_layers_and_modules(api):
    rules = [("block_1", "p=f16,c=f16,o=bf16"), (api.flax.BatchNorm, "p=f32,c=bf16,o=bf16")]
    made = api.port(BLOCKS, "bf16", rules, ROWS).made()
    expected = {"block_1": "float16", "norm": "float32"}
    assert made == {path: expected.get(path.split("/")[0], "bfloat16") for path in made}
    made = api.port(ATTENTION, "bf16", {"attention/query": "p=f16"}, ROWS).made()
    found = {path for path, dtype in made.items() if dtype == "float16"}
    assert found == {"attention/query/kernel", "attention/query/bias"}


@pytest.mark.cases(fast=1)
@BOTH
def test_a_rule_that_matches_nothing_is_an_error_that_lists_the_paths(api):
    rules = [("block_2", "f32"), (api.flax.Embed, "f32"), ("conv", "f32")]
    text = (
        r"^Rules 'block_2', Embed matched no module\. Modules seen: block_0, block_0/first, .*, "
        r"conv, norm\."
    )
    with pytest.raises(ValueError, match=text):
        api.port(BLOCKS, MIXED, rules, ROWS)(ROWS)
    with pytest.raises(ValueError, match=text):
        api.port(BLOCKS, MIXED, rules, ROWS).made()
    lenient = PolicyRules([("block_2", "f32")], strict=False)
    assert api.port(BLOCKS, MIXED, lenient, ROWS)(ROWS).dtype == jnp.float32


IDS = jnp.arange(16).reshape(2, 8)
X = jax.random.normal(jax.random.key(1), (2, 8, 16))
NET = Pair(models.Net, lambda: models.NnxNet(RNGS(0)))
ATTENDS = Pair(models.Block, lambda: models.NnxBlock(RNGS(0)))
PROJECTION = Text(lambda self, x: jnp.dot(x, jnp.asarray(self.w)), "Projection", w=weight(16, 16))
LAYERS = Text(
    lambda self, x: self.last(jax.nn.relu(self.norm(self.first(x)))),
    first=dense(16, 8),
    norm=layer_norm(8),
    last=dense(8, 4),
)


def loss_of(model: Any, x: jax.Array) -> Any:
    def loss(params):
        (out, *_) = jax.tree.leaves(model.pure(params, x))
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    return loss


def share(model: Any, x: jax.Array = X, **kwargs: Any) -> float:
    """Returns the share of float32 matmuls, forward and backward."""
    return model.audit(x, backward=True, **kwargs).f32_matmul_share


@pytest.mark.cases(slow=1)
@BOTH
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_nothing_is_left_in_float32_and_errors_are_those_of_autocast(api, policy):
    half, wide = api.port(NET, policy, None, IDS), api.theirs(NET, IDS)
    truth = loss_of(wide, IDS)
    found = half.audit(IDS, backward=True)
    assert found.f32_matmul_share == 0 and not found.findings
    assert not [path for path in found.paths if "policy_" in path]
    assert {"block/qkv", "block/norm"} <= set(found.paths)

    gradient = jax.jit(jax.grad(truth))(wide.params)
    ours = jax.jit(jax.grad(loss_of(half, IDS)))(half.params)
    alone = jax.jit(jax.grad(autocast(truth, policy, params=0)))(wide.params)
    assert 0 < error(ours, gradient) <= 1.1 * error(alone, gradient)
    out, expected = (jax.jit(model.pure)(model.params, IDS) for model in (half, wide))
    assert out.dtype == jnp.float32 and error(out, expected) < 0.05


@pytest.mark.cases(slow=1)
@BOTH
def test_compare_names_no_marks(api):
    model = api.port(NET, MIXED, None, IDS)
    found = compare(lambda params: model.pure(params, IDS), model.params)
    assert found.rows and "policy_" not in str(found)


@pytest.mark.cases(fast=1)
@BOTH
def test_own_code_runs_under_autocast_unless_it_is_kept_and_nothing_warns(api):
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("error")
        shares = {
            name: share(api.port(PROJECTION, MIXED, None, X, own_code=name))
            for name in (None, "autocast", "keep")
        }
    assert shares == {None: 0, "autocast": 0, "keep": 1}


@pytest.mark.cases(fast=1)
@BOTH
def test_values_and_options_that_contradict_are_rejected(api):
    with pytest.raises(
        ValueError, match="own_code should be 'autocast', 'keep' or None, but got 'auto'"
    ):
        api.port(LAYERS, MIXED, own_code="auto")
    rejected = "whatever the code names: leave out keep_explicit=True, or pass own_code='keep'"
    with pytest.raises(ValueError, match=rejected):
        api.port(LAYERS, MIXED, own_code="autocast", keep_explicit=True)


@pytest.mark.slow
@BOTH
def test_a_model_whose_layers_multiply_is_the_program_that_it_was(api):
    ours, kept = (api.port(LAYERS, MIXED, None, X, own_code=own) for own in (None, "keep"))
    assert_same_operations(ours.pure, kept.pure, ours.params, X, others=(kept.params, X))
    ours, kept = (api.port(NET, "float32", None, IDS, own_code=own) for own in (None, "keep"))
    assert_same_program(ours.pure, kept.pure, (ours.params, IDS))


@pytest.mark.cases(slow=1)
@BOTH
def test_rules_hold_for_own_code_and_for_layers_and_another_method_runs_under_autocast_too(api):
    model = api.port(NET, MIXED, {"block/qkv": "float32", "head": "float32"}, IDS)
    found = model.audit(IDS, backward=True).operations
    dots = [op for op in found if op.primitive == "dot_general"]
    assert {op.path for op in dots if "float32" in op.operands} == {"block/qkv", "head"}
    assert share(api.port(NET, MIXED, None, IDS), X, method="hidden") == 0


@pytest.mark.cases(slow=1)
@BOTH
def test_half_and_float64_parameters_and_inputs_are_taken_as_they_come(api):
    model = api.port(NET, "bfloat16", None, IDS)
    gradients = jax.eval_shape(jax.grad(model.total(IDS)), model.params)
    for tree in (model.params, gradients):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(tree)} == {"bfloat16"}
    assert set(model.made().values()) == {"bfloat16"}
    assert jax.eval_shape(model.pure, model.params, IDS).dtype == jnp.bfloat16
    assert share(model, IDS) == 0
    block = api.port(ATTENDS, MIXED, None, X)
    (out, *_) = jax.tree.leaves(jax.eval_shape(block.pure, block.params, X.astype(jnp.bfloat16)))
    assert out.dtype == jnp.float32
    with jax.enable_x64(True):
        model = api.port(PROJECTION, MIXED, None, X)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model.params)
        found = audit(model.pure, wide, X.astype(jnp.float64))
    dots = [op for op in found.operations if op.primitive == "dot_general"]
    assert {op.operands for op in dots} == {("bfloat16", "bfloat16")}


class Carried:
    """A cell whose carry is one array."""

    @property
    def num_feature_axes(self):
        return 1


class Cell(Carried, flax_linen.RNNCellBase):
    """A cell that multiplies by itself."""

    @flax_linen.compact
    def __call__(self, carry, x):
        project = models.Projection
        carry = jnp.tanh(project(16, name="x")(x) + project(16, name="h")(carry))
        return carry, carry

    @flax_linen.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], 16))


class NnxCell(Carried, flax_nnx.RNNCellBase):
    """A cell that multiplies by itself, and calls a module that does."""

    def __init__(self):
        self.project = PROJECTION.nnx(flax_nnx, RNGS(0))
        self.h = flax_nnx.Param(jnp.eye(16))

    def __call__(self, carry, inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        carry = jnp.tanh(self.project(inputs) + carry @ self.h[...])
        return carry, carry

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):  # pyright: ignore
        return jnp.zeros((*input_shape[:-1], 16))


def rnn() -> Any:
    return flax_linen.RNN(Cell())


def nnx_rnn() -> Any:
    return flax_nnx.RNN(NnxCell())


LOOPS = {
    "RNN": Pair(rnn, nnx_rnn),
    "Bidirectional": Pair(
        lambda: flax_linen.Bidirectional(rnn(), rnn()),
        lambda: flax_nnx.Bidirectional(nnx_rnn(), nnx_rnn()),
    ),
    "layers' cells": Pair(
        lambda: flax_linen.Sequential(
            [models.Projection(16), flax_linen.RNN(flax_linen.GRUCell(16))]
        ),
        lambda: flax_nnx.Sequential(
            PROJECTION.nnx(flax_nnx, RNGS(0)),
            flax_nnx.RNN(flax_nnx.GRUCell(16, 16, rngs=RNGS(0))),
        ),
    ),
}


@pytest.mark.cases(slow=1)
@BOTH
@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_a_cell(api, name):
    half, wide = api.port(LOOPS[name], MIXED, None, X), api.theirs(LOOPS[name], X)
    with jax.numpy_dtype_promotion("standard"):  # Flax's GRU
        assert share(half) == 0
        out, truth = (jax.jit(model.pure)(model.params, X) for model in (half, wide))
    assert out.dtype == jnp.float32 and error(out, truth) < 0.02


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
@pytest.mark.parametrize("first", [X[..., :3], X[:0]], ids=["fails", "empty"])
def test_a_call_that_fails_or_is_empty_decides_nothing_for_others(api, first):
    own = Text(lambda self, x: self.layer(x) @ self.w, layer=dense(16, 16), w=weight(16, 16))
    model = api.port(own, MIXED, None, X)
    if first.size:
        with pytest.raises(Exception, match=r"shape|incompatible|contracting"):
            model(first)
    else:
        model(first)
    assert share(model) == 0
