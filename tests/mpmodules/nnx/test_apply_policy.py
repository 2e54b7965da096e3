"""`apply_policy` copies a built model, ours or not, under a policy: by path and class, or not at
all.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

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
    expected = {
        "": MIXED,
        "embed": get_policy("p=bf16,c=bf16"),
        "blocks/0": MIXED,
        "blocks/0/attn": MIXED,
        "blocks/0/attn/query": FULL,
        "blocks/0/attn/key": get_policy("f16"),
        "blocks/0/mlp/layers/0": MIXED,
        "blocks/0/mlp/layers/2": get_policy("p=bf16,c=f32"),
        "blocks/1": get_policy("f16"),
        "blocks/1/attn/query": get_policy("f16"),
        "blocks/1/mlp/layers/2": get_policy("f16"),
        "heads/a": MIXED,
        "heads/b": FULL,
    }
    assert {path: found[path] for path in expected} == expected
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
    for text, param, out in (
        ("bf16", BF16, BF16),
        ("mixed_float16", F32, F32),
        ("f32", F32, F32),
        ("f16", F16, F16),
    ):
        theirs = apply_policy(theirs, text)
        assert theirs.heads.a.kernel.dtype == param
        assert [x.dtype for x in theirs(IDS)] == [out, out]
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
    assert flax_nnx.to_flat_state(flax_nnx.state(tied)).paths == (
        flax_nnx.to_flat_state(flax_nnx.state(theirs)).paths
    )


def test_keep_explicit_keeps_a_dtype_that_a_layer_was_built_with():
    def build(module):
        rngs = module.Rngs(0)
        return module.Sequential(
            module.Linear(4, 4, dtype=F16, rngs=rngs),
            module.Linear(4, 4, rngs=rngs),
            module.Embed(4, 4, rngs=rngs),
        )

    for module in (flax_nnx, nnx):
        assert {layer.dtype for layer in apply_policy(build(module), MIXED).layers} == {
            jnp.dtype(BF16)
        }
        kept = build(module)
        for policy, found in ((MIXED, BF16), ("f32", F32), ("bf16", BF16)):
            with pytest.warns(
                DtypePolicyWarning, match="^Linear at 'layers/0' has an explicit dtype=float16"
            ):
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

    layer = flax_nnx.MultiHeadAttention(
        2, 4, decode=False, attention_fn=mine, rngs=flax_nnx.Rngs(0)
    )
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
