"""nnx's transforms under policies: one boundary each, outside of them, and no stale program."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx, use_policy
from tests.programs import boundary_casts, named, operations

X = np.ones((2, 4), np.float32)
MIXED = "mixed_bfloat16"
ONE_BOUNDARY = [("bfloat16", ()), ("float32", ())]


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.linear(x))


def pure(model):
    """A call of a copy of `model` that is made inside, so that it can be traced."""
    definition, state = flax_nnx.split(model)
    return lambda *args: flax_nnx.merge(definition, state, copy=True)(*args)


def casts(function) -> list[Any]:
    """What boundaries cast to, and inside which primitives."""
    return [(op.outputs[0], op.within) for op in boundary_casts(operations(function, X))]


def test_a_change_of_mind_retraces_nnx_jit_and_going_back_reuses_the_program():
    traces = []
    model = flax_nnx.Linear(4, 4, rngs=flax_nnx.Rngs(0))

    @flax_nnx.jit
    def forward(model, x):
        traces.append(None)
        return model(x)

    dtypes = [
        forward(nnx.apply_policy(model, policy), X).dtype
        for policy in ("p=f32,c=bf16", "f32", "p=f32,c=bf16")
    ]
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.bfloat16]
    assert len(traces) == 2


@pytest.mark.parametrize("repeat", [False, True])
def test_a_model_in_lax_scan_and_checkpoint_keeps_one_boundary(repeat):
    def scanned(x):
        return jax.lax.scan(lambda carry, _: (model(carry), None), x, length=3)[0]

    with use_policy(MIXED):
        model = Net(rngs=nnx.Rngs(0))
    run = scanned if repeat else jax.checkpoint(model)
    assert jax.eval_shape(run, X).dtype == jnp.float32
    assert [dtype for dtype, _ in casts(run)] == ["bfloat16", "float32"]


def remat_inside(method):
    return lambda self, x: nnx.remat(method)(self, x)


TRANSFORMS = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "remat inside": remat_inside,
    "vmap": lambda method: nnx.vmap(method, in_axes=(None, 0)),
}


@pytest.mark.parametrize("how", TRANSFORMS)
def test_a_transformed_method_has_one_cast_in_where_inputs_are_used_and_one_out(how):
    class Model(Net):
        __call__ = TRANSFORMS[how](Net.__call__)

    model = Model(rngs=nnx.Rngs(0), dtype_policy=MIXED)
    within = ("remat2",) if how.startswith("remat") else ()
    assert casts(pure(model)) == [("bfloat16", within), ("float32", ())]
    (dot,) = named(operations(pure(model), X), "dot_general")
    assert dot.inputs == ("bfloat16", "bfloat16")
    assert model(X).dtype == jnp.float32


def test_remat_saves_compute_dtype_residuals():
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

        @nnx.remat
        def block(self, x):
            return nnx.tanh(self.second(nnx.tanh(self.first(x))))

        def __call__(self, x):
            return self.block(x)

    with use_policy(MIXED):
        model = Model(rngs=nnx.Rngs(0))
    run = pure(model)
    text = str(jax.make_jaxpr(jax.grad(lambda x: run(x).sum()))(X))
    assert re.search(r"dot_general\[", text)
    assert not re.search(r"f32\[2,4\] = dot_general", text)


def test_a_method_that_scans_over_stacked_layers_has_one_boundary_and_a_compute_dtype_carry():
    class Stack(nnx.Module):
        def __init__(self, *, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def build(rngs):
                return Net(rngs=rngs)

            self.layers = build(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, layer):
                return layer(x)

            return run(x, self.layers)

    with use_policy(MIXED):
        stack = Stack(rngs=nnx.Rngs(0))
    assert stack.layers.linear.kernel.shape == (3, 4, 4)
    assert stack.layers.linear.kernel.dtype == jnp.float32
    assert stack.layers.dtype_policy == stack.dtype_policy
    assert casts(pure(stack)) == ONE_BOUNDARY
    assert stack(X).dtype == jnp.float32


@pytest.mark.parametrize("by", ["vmap", "jit", "eval_shape"])
def test_a_model_built_inside_a_transform_captures_the_policy_in_force(by):
    builders = {
        "vmap": lambda: flax_nnx.vmap(lambda key: Net(rngs=nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), 2)
        ),
        "jit": lambda: flax_nnx.jit(lambda: Net(rngs=nnx.Rngs(0)))(),
        "eval_shape": lambda: flax_nnx.eval_shape(lambda: Net(rngs=nnx.Rngs(0))),
    }
    with use_policy("bf16"):
        model = builders[by]()
    assert str(model.linear.dtype_policy) == "params=bfloat16,compute=bfloat16,output=bfloat16"
    assert model.linear.kernel.dtype == jnp.bfloat16
