"""`apply_policy` copies a built model, ours or not, under a policy: by path and class, or not at
all.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

from mpmodules import get_policy, nnx, use_policy
from mpmodules.nnx import apply_policy
from policy import DtypePolicyWarning
from tests.mpmodules.wings import NnxModel
from tests.programs import named

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
MIXED, HALF, FULL = get_policy("mixed_bfloat16"), get_policy("bf16"), get_policy("f32")
IDS = np.array([[0, 2, 1], [3, 3, 0]])


class Gated(flax_nnx.Linear):
    """A user's subclass of a layer of Flax's."""

    def __call__(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(x) * jax.nn.sigmoid(x)


class Block(flax_nnx.Module):
    def __init__(self, *, rngs):
        self.attn = flax_nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.norm = flax_nnx.LayerNorm(4, rngs=rngs)
        self.mlp = flax_nnx.Sequential(
            flax_nnx.Linear(4, 4, rngs=rngs), flax_nnx.gelu, Gated(4, 4, rngs=rngs)
        )

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(flax_nnx.Module):
    """A third-party model: it knows nothing of policies."""

    def __init__(self, *, rngs):
        self.embed = flax_nnx.Embed(4, 4, rngs=rngs)
        self.blocks = flax_nnx.List([Block(rngs=rngs), Block(rngs=rngs)])
        self.heads = flax_nnx.Dict(
            a=flax_nnx.Linear(4, 2, rngs=rngs), b=flax_nnx.Linear(4, 2, rngs=rngs)
        )
        self.bn = flax_nnx.BatchNorm(4, rngs=rngs)

    def features(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.bn(x)

    def __call__(self, ids):
        x = self.features(ids)
        return self.heads.a(x), self.heads.b(x)


@pytest.fixture(scope="module")
def built():
    return Model(rngs=flax_nnx.Rngs(0))


@pytest.fixture
def model(built):
    return flax_nnx.clone(built)


def policies(model):
    """Of every module but Flax's containers, which have no methods to obey one."""
    containers = (flax_nnx.List, flax_nnx.Dict)
    return {
        "/".join(map(str, path)): module.dtype_policy
        for path, module in flax_nnx.iter_modules(model)
        if not isinstance(module, containers)
    }


def test_rules_by_path_reach_lists_dicts_sequentials_and_layers_inside_attention(model):
    rules = {
        "blocks/0/attn/query": "f32",  # the first that matches wins
        "blocks/0/attn/(query|key)": "f16",
        "blocks/1": "f16",
        "blocks/0/mlp/layers/2": "p=bf16,c=f32",
        "heads/b": "f32",
        "embed": "p=bf16,c=bf16",
    }
    found = policies(apply_policy(model, "mixed_bfloat16", rules))
    others = {
        "embed": "p=bf16,c=bf16",
        "blocks/0/attn/query": "f32",
        "blocks/0/attn/key": "f16",
        "blocks/0/mlp/layers/2": "p=bf16,c=f32",
        "heads/b": "f32",
    }
    for path, policy in found.items():
        inherited = "f16" if path.startswith("blocks/1") else MIXED
        assert policy == get_policy(others.get(path, inherited)), path
    assert apply_policy(model, "f32", [("", "bf16")]).dtype_policy == HALF  # the root


def test_rules_by_class_take_flax_s_class_ours_a_user_s_and_their_subclasses(model):
    rules = {nnx.LayerNorm: "f32", Block: "f16", Gated: "bf16", flax_nnx.Linear: "f32"}
    found = policies(apply_policy(model, "mixed_bfloat16", rules))
    assert found["blocks/0/norm"] == found["heads/a"] == found["blocks/1/mlp/layers/0"] == FULL
    assert found["blocks/1/mlp/layers/2"] == HALF and found["embed"] == MIXED
    assert found["blocks/1/attn/out"] == get_policy("f16")


def test_errors_leave_the_model_as_it_was(model):
    before = flax_nnx.graphdef(model)
    for error, match, arguments in (
        (TypeError, r"^A policy should be a Policy or its text form", (None,)),
        (ValueError, r"^A policy asks for float64, but JAX runs", ("f32", {"embed": "f64"})),
    ):
        with pytest.raises(error, match=match):
            apply_policy(model, *arguments)
    assert flax_nnx.graphdef(model) == before
    with pytest.raises(TypeError, match=r"^apply_policy takes an nnx module here, but got .* dict"):
        apply_policy({}, "bf16")


def test_a_change_of_mind_goes_anywhere_from_anywhere(model):
    theirs = apply_policy(model, "mixed_bfloat16", {"heads/b": "f32", "blocks": "f16"})
    kernel = theirs.heads.a.kernel[...]
    assert theirs.heads.a.kernel.get_value() is model.heads.a.kernel.get_value()  # no copy
    for text, dtype in (("bf16", BF16), ("mixed_float16", F32), ("f32", F32), ("f16", F16)):
        theirs = apply_policy(theirs, text)
        assert theirs.heads.a.kernel.dtype == dtype
        assert [x.dtype for x in theirs(IDS)] == [dtype, dtype]
        assert set(policies(theirs).values()) == {get_policy(text)}  # the rules are forgotten
    np.testing.assert_allclose(theirs.heads.a.kernel[...].astype(F32), kernel, rtol=2**-7)


def test_a_shared_variable_stays_shared_and_is_cast_once():
    class Tied(flax_nnx.Module):
        def __init__(self, *, rngs):
            self.embed = flax_nnx.Embed(4, 4, rngs=rngs)
            self.head = flax_nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.head.kernel = self.embed.embedding
            self.table = flax_nnx.data({"again": self.embed.embedding})

        def __call__(self, ids):
            return self.head(self.embed(ids))

    theirs = Tied(rngs=flax_nnx.Rngs(0))
    tied = apply_policy(theirs, "bf16")
    assert tied.head.kernel is tied.embed.embedding is tied.table["again"]
    assert tied.head.kernel.dtype == BF16 and theirs.head.kernel.dtype == F32
    paths = [flax_nnx.to_flat_state(flax_nnx.state(model)).paths for model in (tied, theirs)]
    assert paths[0] == paths[1]


def test_keep_explicit_keeps_a_dtype_that_a_layer_was_built_with():
    def build(module):
        rngs = module.Rngs(0)
        return module.Sequential(
            module.Linear(4, 4, dtype=F16, rngs=rngs),
            module.Linear(4, 4, rngs=rngs),
            module.Embed(4, 4, rngs=rngs),
        )

    for module in (flax_nnx, nnx):
        assert all(layer.dtype == BF16 for layer in apply_policy(build(module), MIXED).layers)
        kept = build(module)
        for policy, found in ((MIXED, BF16), ("f32", F32), ("bf16", BF16)):
            text = "^Linear at 'layers/0' has an explicit dtype=float16"
            with pytest.warns(DtypePolicyWarning, match=text):
                kept = apply_policy(kept, policy, keep_explicit=True)
            assert [layer.dtype for layer in kept.layers] == [F16, found, found]
    with use_policy("mixed_bfloat16"):  # which is no dtype that was given
        ours: Any = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    assert apply_policy(ours, "f16", keep_explicit=True).layers[0].dtype == F16


def test_an_attention_fn_of_the_user_s_own_stays_in_place():
    calls = []

    def mine(query, key, value, **options):
        calls.append(query.dtype)
        return value

    options = {"decode": False, "attention_fn": mine}
    layer = flax_nnx.MultiHeadAttention(2, 4, rngs=flax_nnx.Rngs(0), **options)
    apply_policy(layer, "mixed_bfloat16")(np.ones((1, 3, 4), np.float32))
    assert calls == [BF16]


def test_split_merged_and_abstract_models_get_and_keep_a_policy(model):
    definition, state = flax_nnx.split(model)
    theirs = apply_policy(flax_nnx.merge(definition, state, copy=True), "mixed_bfloat16")
    again = flax_nnx.merge(*flax_nnx.split(theirs))
    assert policies(again) == policies(theirs)
    assert [x.dtype for x in again(IDS)] == [F32, F32]
    abstract = apply_policy(flax_nnx.eval_shape(lambda: Model(rngs=flax_nnx.Rngs(0))), "bf16")
    params = jax.tree.leaves(flax_nnx.state(abstract, flax_nnx.Param))
    assert {leaf.dtype for leaf in params} == {jnp.dtype(BF16)}


def test_an_optimizer_made_for_the_copy_trains_it_alone(model):
    before = jax.tree.map(np.asarray, flax_nnx.state(model, flax_nnx.Param))
    ported = apply_policy(model, "mixed_bfloat16")
    optimizer = flax_nnx.Optimizer(ported, optax.sgd(0.1), wrt=flax_nnx.Param)

    @flax_nnx.jit
    def step(model, optimizer):
        loss_of = lambda model: sum(jnp.square(x - 1).mean() for x in model(IDS))  # noqa: E731
        loss, gradients = flax_nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(ported, optimizer)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert np.any(ported.heads.a.kernel[...] != model.heads.a.kernel[...])
    jax.tree.map(np.testing.assert_array_equal, before, flax_nnx.state(model, flax_nnx.Param))


def test_bare_parameters_of_a_module_are_cast_and_cycles_end():
    class Bare(flax_nnx.Module):
        def __init__(self):
            self.position = flax_nnx.Param(jnp.ones(4))
            self.stack = flax_nnx.data([flax_nnx.Linear(4, 4, rngs=flax_nnx.Rngs(0))])
            self.me = self

        def __call__(self, x):
            return self.stack[0](x + self.position[None])

    bare = apply_policy(Bare(), "bf16", {"stack/0": "p=f32,c=bf16"})
    assert bare.position[...].dtype == BF16
    assert bare.stack[0].kernel.dtype == F32
    assert bare(np.ones((2, 4), np.float32)).dtype == BF16


def test_complex_layers_keep_their_dtypes():
    layer = flax_nnx.Linear(4, 4, param_dtype=jnp.complex64, rngs=flax_nnx.Rngs(0))
    layer = apply_policy(layer, "bf16")
    assert layer.kernel.dtype == jnp.complex64
    assert layer(np.ones((2, 4), np.complex64)).dtype == jnp.complex64


def test_a_model_with_a_metaclass_of_its_own_is_adopted():
    class Meta(type(flax_nnx.Module)):
        pass

    class Theirs(flax_nnx.Module, metaclass=Meta):
        def __init__(self, *, rngs):
            self.linear = flax_nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    theirs = apply_policy(Theirs(rngs=flax_nnx.Rngs(0)), "mixed_bfloat16")
    assert theirs(np.ones((2, 4), np.float32)).dtype == F32
    assert isinstance(type(theirs), Meta)


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Plain(flax_nnx.Module, pytree=False):
    def __init__(self, *, rngs):
        layer = lambda: flax_nnx.Linear(4, 4, rngs=rngs)  # noqa: E731
        norms = [flax_nnx.LayerNorm(4, rngs=rngs)]
        self.blocks = [{"linear": layer(), "norms": norms}, {"linear": layer()}]
        self.pair = (layer(), [layer()])
        self.shared = {"head": self.pair[0]}
        self.scales = [flax_nnx.Param(jnp.ones(4))]
        self.sizes = [1, "two"]

    def __call__(self, x):
        for block in self.blocks:
            x = block["linear"](x)
            for norm in block.get("norms", []):
                x = norm(x)
        x = self.pair[1][0](flax_nnx.relu(self.pair[0](x)))
        return self.shared["head"](x * self.scales[0][...].astype(x.dtype)[None])


def plain():
    return Plain(rngs=flax_nnx.Rngs(0))


def test_the_state_and_the_structure_of_the_graph_stay():
    model = plain()
    before = flax_nnx.state(model)
    model = apply_policy(model, MIXED)
    after = flax_nnx.state(model)
    assert isinstance(model, Plain)
    assert len(jax.tree.leaves(after)) == 11
    assert jax.tree.structure(after) == jax.tree.structure(before)
    again = flax_nnx.graphdef(apply_policy(plain(), MIXED))
    assert flax_nnx.graphdef(model) == again != flax_nnx.graphdef(plain())
    copies = flax_nnx.merge(*flax_nnx.split(model)), pickle.loads(pickle.dumps(model))
    for twin in (*copies, flax_nnx.clone(model)):
        assert type(twin) is type(model) and twin.pair[0] is twin.shared["head"]
        np.testing.assert_array_equal(twin(X), model(X))


def test_layers_in_nested_lists_tuples_and_dicts_obey_rules_by_their_paths():
    rules = {"blocks/0/linear": "f32", "blocks/0/norms/0": "f16", "pair/1/0": "bf16"}
    model = apply_policy(plain(), MIXED, rules)
    assert model.blocks[0]["linear"].dtype_policy == FULL
    assert model.blocks[0]["norms"][0].dtype_policy == get_policy("f16")
    assert model.blocks[1]["linear"].dtype_policy == model.pair[0].dtype_policy == MIXED
    assert model.pair[1][0].kernel.dtype == BF16 and model.blocks[1]["linear"].kernel.dtype == F32
    assert model(X).dtype == F32
    text = r"Modules seen: blocks/0/linear, blocks/0/norms/0, .*pair/0, pair/1/0, shared"
    with pytest.raises(ValueError, match=text):
        apply_policy(plain(), MIXED, {"blocks/2": "f32"})


@pytest.mark.parametrize("path", ["pair/0", "shared/head"])
def test_a_shared_layer_stays_one_and_obeys_a_rule_of_each_of_its_paths(path):
    model = apply_policy(plain(), "bf16", {path: "f32"})
    assert model.pair[0] is model.shared["head"]
    assert model.pair[0].dtype_policy == FULL
    assert model.scales[0].dtype == BF16  # a parameter in a list


def test_a_list_of_layers_below_a_module_that_is_a_pytree():
    class Outer(flax_nnx.Module):
        def __init__(self):
            self.nets = flax_nnx.List([plain()])

        def __call__(self, x):
            return self.nets[0](x)

    outer = apply_policy(Outer(), MIXED, {"nets/0/blocks/1/linear": "f32"})
    assert outer.nets[0].blocks[1]["linear"].dtype_policy == FULL
    assert len(jax.tree.leaves(flax_nnx.state(outer))) == 11
    assert outer(X).dtype == F32 and isinstance(outer.nets[0].pair[0], nnx.Linear)


def test_one_that_derives_from_a_layer_runs_as_ours_does():
    class Dense(flax_nnx.Linear, pytree=False):
        def __init__(self, *, rngs):
            super().__init__(4, 4, rngs=rngs)
            self.notes = [1, 2]

    layer = NnxModel(apply_policy(Dense(rngs=flax_nnx.Rngs(0)), MIXED))
    assert isinstance(layer.instance, Dense) and layer(X).dtype == F32
    (dot,) = named(layer.operations(X), "dot_general")
    assert dot.outputs == ("float32",)  # the accumulator
