"""References that pass a boundary by identity, modules that are shared or built before, and nnx's
transforms: one boundary each, outside of them, and no stale program.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx, use_policy
from policy import DtypePolicyWarning
from tests.mpmodules.apis import MIXED, NnxModel
from tests.programs import boundary_casts, operations

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def linear(**options):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0), **options)


def doubled(x: jax.Array) -> jax.Array:
    return x * 2


def test_a_shared_module_keeps_the_policy_it_was_built_under():
    class Shares(nnx.Module):
        def __init__(self):
            self.block = nnx.Sequential(linear(), nnx.relu)
            self.inner = nnx.Sequential(self.block, doubled)

        def __call__(self, x):
            return self.block(x), self.inner(x)

    shares = Shares(dtype_policy=MIXED)
    assert [out.dtype for out in shares(X)] == [F32, F32]
    assert NnxModel(shares).dots(X) == [("bfloat16", "bfloat16")] * 2
    with use_policy("f16"):
        outer = nnx.Sequential(shares.block, doubled)
    assert outer(X).dtype == F16
    assert NnxModel(outer).dots(X) == [("bfloat16", "bfloat16")]


class Receives(nnx.Module):
    def __call__(self, x, reference, call=None):
        return x, reference if call is None else call(reference, x)


@pytest.fixture
def receives() -> Any:
    return cast(Any, Receives(dtype_policy=MIXED))


REFERENCES = {
    "Rngs": lambda: nnx.Rngs(0),
    "RngStream": lambda: nnx.Rngs(0).dropout,
    "Variable": lambda: nnx.Param(jnp.ones(3)),
    "Module": lambda: flax_nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
    "List": lambda: nnx.List([nnx.Param(jnp.ones(3))]),
    "Ref": lambda: jax.new_ref(jnp.ones(3)),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_references_pass_the_boundary_by_identity(kind, receives):
    reference = REFERENCES[kind]()
    x, out = receives(X, reference)
    assert out is reference and x.dtype == F32
    assert receives(X, {"a": [reference]})[1]["a"][0] is reference


def test_a_reference_that_the_code_closes_over_is_returned_by_identity(receives):
    for reference in (nnx.Rngs(0), nnx.Param(jnp.ones(3)), linear()):
        _, (inside, (deeper,)) = receives(X, None, call=lambda _, x, r=reference: (r, [r]))
        assert inside is deeper is reference


def test_a_state_passes_by_value_and_a_graph_by_identity(receives):
    graph, state = flax_nnx.split(linear())
    _, out = receives(X, state)
    assert type(out) is type(state)
    jax.tree.map(np.testing.assert_array_equal, out, state)
    with pytest.warns(DtypePolicyWarning, match="Receives can't be traced.* returns a GraphDef"):
        assert receives(X, graph)[1] is graph


@pytest.mark.slow
def test_what_an_argument_holds_is_changed_as_by_flax():
    def call(given, x):
        norm, theirs, dropout, rngs, count = given
        count.set_value(count.get_value() + 2)
        return norm(x), theirs(x), dropout(jnp.ones((8, 8)), rngs=rngs)

    norm, theirs = (layers.BatchNorm(4, rngs=nnx.Rngs(0)) for layers in (nnx, flax_nnx))
    dropout, rngs, count = nnx.Dropout(0.5, deterministic=False), nnx.Rngs(0), nnx.Variable(0.0)
    model = Receives(dtype_policy="inputs=keep,c=f32")
    masks = [np.asarray(model(X, (norm, theirs, dropout, rngs, count), call)[1][2]) for _ in "ab"]
    assert not np.array_equal(*masks) and rngs.default.count[...] == 2
    assert count.get_value() == 4.0
    np.testing.assert_allclose(norm.mean[...], theirs.mean[...], rtol=1e-6)
    assert norm.mean[...].dtype == F32 and np.any(norm.mean[...] != 0)


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.linear(x))


def casts(function) -> list[Any]:
    """What boundaries cast to, and inside which primitives."""
    return [(op.outputs[0], op.within) for op in boundary_casts(operations(function, X))]


@pytest.mark.cases(fast=1)
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


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("how", TRANSFORMS)
def test_a_transformed_method_has_one_cast_in_where_inputs_are_used_and_one_out(how):
    class Model(Net):
        __call__ = TRANSFORMS[how](Net.__call__)

    model = Model(rngs=nnx.Rngs(0), dtype_policy=MIXED)
    within = ("remat2",) if how.startswith("remat") else ()
    pure = NnxModel(model)
    assert casts(functools.partial(pure.pure, pure.params)) == [
        ("bfloat16", within),
        ("float32", ()),
    ]
    assert pure.dots(X) == [("bfloat16", "bfloat16")]
    assert model(X).dtype == jnp.float32


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
    pure = NnxModel(stack)
    assert casts(functools.partial(pure.pure, pure.params)) == [
        ("bfloat16", ()),
        ("float32", ()),
    ]
    assert stack(X).dtype == jnp.float32


BUILDERS = {
    "vmap": lambda: nnx.vmap(lambda key: Net(rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 2)
    ),
    "jit": lambda: nnx.jit(lambda: Net(rngs=nnx.Rngs(0)))(),
    "eval_shape": lambda: nnx.eval_shape(lambda: Net(rngs=nnx.Rngs(0))),
}


@pytest.mark.slow
@pytest.mark.parametrize("by", BUILDERS)
def test_a_model_built_inside_a_transform_captures_the_policy_in_force(by):
    with use_policy("bf16"):
        model = BUILDERS[by]()
    assert str(model.linear.dtype_policy) == "params=bfloat16,compute=bfloat16,output=bfloat16"
    assert model.linear.kernel.dtype == jnp.bfloat16
