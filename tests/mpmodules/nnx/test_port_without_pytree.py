"""Ports of modules declared with ``pytree=False``, which hold their layers in plain lists, tuples
and dicts.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

from mpmodules import get_policy, nnx
from mpmodules.nnx import apply_policy
from tests.mpmodules.wings import NnxModel
from tests.programs import named

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
MIXED, FULL = get_policy("mixed_bfloat16"), get_policy("f32")
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Net(flax_nnx.Module, pytree=False):
    def __init__(self, *, rngs):
        layer = lambda: flax_nnx.Linear(4, 4, rngs=rngs)  # noqa: E731
        self.blocks = [
            {"linear": layer(), "norms": [flax_nnx.LayerNorm(4, rngs=rngs)]},
            {"linear": layer()},
        ]
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


def net():
    return Net(rngs=flax_nnx.Rngs(0))


def test_the_state_and_the_structure_of_the_graph_stay():
    model = net()
    before = flax_nnx.state(model)
    model = apply_policy(model, MIXED)
    after = flax_nnx.state(model)
    assert isinstance(model, Net)
    assert len(jax.tree.leaves(after)) == 11
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert (
        flax_nnx.graphdef(model)
        == flax_nnx.graphdef(apply_policy(net(), MIXED))
        != flax_nnx.graphdef(net())
    )
    copies = flax_nnx.merge(*flax_nnx.split(model)), pickle.loads(pickle.dumps(model))
    for twin in (*copies, flax_nnx.clone(model)):
        assert type(twin) is type(model) and twin.pair[0] is twin.shared["head"]
        np.testing.assert_array_equal(twin(X), model(X))


def test_layers_in_nested_lists_tuples_and_dicts_obey_rules_by_their_paths():
    rules = {"blocks/0/linear": "f32", "blocks/0/norms/0": "f16", "pair/1/0": "bf16"}
    model = apply_policy(net(), MIXED, rules)
    assert model.blocks[0]["linear"].dtype_policy == FULL
    assert model.blocks[0]["norms"][0].dtype_policy == get_policy("f16")
    assert model.blocks[1]["linear"].dtype_policy == model.pair[0].dtype_policy == MIXED
    assert model.pair[1][0].kernel.dtype == BF16 and model.blocks[1]["linear"].kernel.dtype == F32
    assert model(X).dtype == F32
    with pytest.raises(
        ValueError,
        match=r"Modules seen: blocks/0/linear, blocks/0/norms/0, .*pair/0, pair/1/0, shared",
    ):
        apply_policy(net(), MIXED, {"blocks/2": "f32"})


@pytest.mark.parametrize("path", ["pair/0", "shared/head"])
def test_a_shared_layer_stays_one_and_obeys_a_rule_of_each_of_its_paths(path):
    model = apply_policy(net(), "bf16", {path: "f32"})
    assert model.pair[0] is model.shared["head"]
    assert model.pair[0].dtype_policy == FULL
    assert model.scales[0].dtype == BF16  # a parameter in a list


def test_training_changes_the_parameters():
    model = apply_policy(net(), MIXED)
    before = jax.tree.map(np.asarray, flax_nnx.state(model, flax_nnx.Param))
    optimizer = flax_nnx.Optimizer(model, optax.sgd(0.1), wrt=flax_nnx.Param)
    gradients = flax_nnx.grad(lambda model: jnp.square(model(X) - 1).mean())(model)
    optimizer.update(model, gradients)
    after = flax_nnx.state(model, flax_nnx.Param)
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(changed))


def test_a_list_of_layers_below_a_module_that_is_a_pytree():
    class Outer(flax_nnx.Module):
        def __init__(self):
            self.nets = flax_nnx.List([net()])

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
