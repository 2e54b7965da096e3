"""Boundaries of lifted classes, of methods as `apply` takes them, and of references to nnx."""

from __future__ import annotations

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpmodules import linen as nn
from policy import DtypePolicyWarning, use_policy
from tests.programs import apply, boundary_casts, named, operations

MIXED = "mixed_bfloat16"
X = jnp.ones((2, 4))
KEY = jax.random.key(0)
EACH: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SHARED: Any = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
IN_AXES: Any = (0, None)  # Flax says `int`


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(4)(x))


class ScanBody(nn.Module):
    @nn.compact
    def __call__(self, carry, _):
        return Block()(carry), None


class Holder(nn.Module):
    block: Any

    @nn.compact
    def __call__(self, x):
        return self.block(x)


class Setup(nn.Module):
    def setup(self):
        self.first, self.second = Block(), nn.Dense(3)

    def __call__(self, x):
        return self.second(self.first(x))


def compact(body: Any) -> Any:
    """Returns a class whose `__call__` is `body`."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return body(x)

    return Model


def shared(x: jax.Array) -> Any:
    block = Block()
    return block(block(x))


STYLES: dict[str, Any] = {
    "setup": Setup,
    "shared": compact(shared),
    "nested": compact(lambda x: compact(lambda x: Block()(x))()(x)),
    "passed as a field": lambda **options: Holder(Block(), **options),
    "scan": compact(lambda x: nn.scan(ScanBody, length=3, **EACH)()(x, None)[0]),
    "remat": compact(lambda x: nn.remat(Block)()(x)),
    "vmap": compact(lambda x: nn.vmap(Block, in_axes=0, **EACH)()(x)),
    "jit": compact(lambda x: nn.jit(Block)()(x)),
}


def casts_of(ops: Any) -> list[Any]:
    return [(op.outputs[0], op.within) for op in boundary_casts(ops)]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_has_one_boundary_half_matmuls_and_the_parameters_that_it_has_without(style):
    model, plain = STYLES[style](dtype_policy=MIXED), STYLES[style]()
    variables = model.init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, variables, plain.init(KEY, X))
    ops = operations(model.apply, variables, X)
    within = ("remat2",) if style == "remat" else ()  # inputs are cast where they are used
    assert casts_of(ops) == [("bfloat16", within), ("float32", ())]
    dots = {(*op.inputs, *op.outputs) for op in named(ops, "dot_general")}
    assert dots == {("bfloat16",) * 3}


LIFTED: dict[str, Any] = {
    "scan": lambda: nn.scan(ScanBody, length=3, **EACH),
    "scan of remat": lambda: nn.scan(nn.remat(ScanBody), length=3, **EACH),
    "vmap": lambda: nn.vmap(ScanBody, in_axes=IN_AXES, **SHARED),
}


@pytest.mark.parametrize("lift", LIFTED)
def test_a_lifted_class_with_a_policy_has_one_boundary_outside_of_the_transform(lift):
    model = LIFTED[lift]()(dtype_policy=MIXED)
    variables = model.init(KEY, X, None)
    ops = operations(lambda v, x: model.apply(v, x, None)[0], variables, X)
    assert casts_of(ops) == [("bfloat16", ()), ("float32", ())]
    assert {op.outputs[0] for op in named(ops, "scan")} <= {"bfloat16"}


def test_rematerialised_classes_hand_on_compute_dtype():
    twice = compact(lambda x: nn.remat(Block)()(nn.remat(Block)()(x)))
    for model, count in ((nn.remat(Block)(dtype_policy=MIXED), 1), (twice(dtype_policy=MIXED), 2)):
        variables = model.init(KEY, X)
        ops = operations(model.apply, variables, X)
        remats = [op for op in ops if "remat" in op.name or op.name == "checkpoint"]
        assert [op.outputs for op in remats] == [("bfloat16",)] * count
        assert all("bfloat16" in op.inputs for op in remats[1:])  # what backward keeps
        assert boundary_casts(ops)[-1].outputs == ("float32",)


@pytest.mark.parametrize("lift", [nn.remat, nn.jit, lambda cls: nn.vmap(cls, **SHARED)])
def test_a_lifted_layer_with_a_policy_of_its_own_is_a_boundary_outside(lift):
    model = lift(nn.Dense)(3, dtype_policy=MIXED)
    variables = model.init(KEY, X)
    ops = operations(model.apply, variables, X)
    assert {op.within for op in boundary_casts(ops)} == {()}
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float32
    (dot,) = named(ops, "dot_general")
    assert dot.inputs == ("bfloat16", "bfloat16")


# --- methods --------------------------------------------------------------------------------------


class AutoEncoder(nn.Module):
    def setup(self):
        self.encoder = nn.Dense(2)

    def encode(self, x):
        return self.encoder(x)

    def __call__(self, x):
        return self.encode(x)

    @nn.nowrap
    def unwrapped(self, x):
        return self.encoder(x)


METHODS = {
    "by name": "encode",
    "as a function": AutoEncoder.encode,
    "as a bound method": AutoEncoder().encode,
    "as a lambda": lambda module, x: module.encode(x),
}


@pytest.mark.parametrize("how", METHODS)
def test_a_public_method_is_a_boundary_however_it_is_named(how):
    model = AutoEncoder(dtype_policy=MIXED)
    variables = model.init(KEY, X)
    ops = operations(lambda v, x: model.apply(v, x, method=METHODS[how]), variables, X)
    assert casts_of(ops) == [("bfloat16", ()), ("float32", ())]
    assert model.bind(variables).encode(X).dtype == model.bind(variables)(X).dtype == jnp.float32


def test_an_unwrapped_method_is_no_boundary_but_its_layers_obey():
    model = AutoEncoder(dtype_policy=MIXED)
    variables = model.init(KEY, X)
    ops = operations(lambda v, x: model.apply(v, x, method="unwrapped"), variables, X)
    assert boundary_casts(ops) == []
    (dot,) = named(ops, "dot_general")
    assert dot.outputs == ("bfloat16",)


def test_a_layers_super_call_crosses_once():
    class Scaled(nn.Dense):
        @nn.compact
        def __call__(self, inputs):
            out = super().__call__(inputs)
            return out * jnp.asarray(2, out.dtype)

    model = Scaled(3, dtype_policy=MIXED)
    ops = operations(model.apply, model.init(KEY, X), X)
    assert casts_of(ops) == [("bfloat16", ()), ("float32", ())]


# --- references and modules of Flax's -------------------------------------------------------------


class Calls(nn.Module):
    call: Any

    @nn.compact
    def __call__(self, x, *references):
        return self.call(x, *references)


def test_references_passed_as_arguments_keep_their_identity():
    given = nnx.Rngs(0), nnx.Param(jnp.ones(2)), {"inside": flax_nn.Dense(2)}
    model = Calls(lambda x, *references: (x, references), dtype_policy=MIXED)
    with pytest.warns(DtypePolicyWarning, match="Calls can't be traced.*returns a module or a var"):
        _, returned = apply(model, {}, X, *given)
    assert returned[0] is given[0] and returned[1] is given[1]
    assert returned[2]["inside"] is given[2]["inside"]


def test_an_nnx_dropout_passed_through_a_boundary_draws_a_new_mask_each_call():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model, x = Calls(lambda x, dropout: dropout(x), dtype_policy=MIXED), jnp.ones((64,))
    text = "changes an nnx object that is not part of the mod"
    with pytest.warns(DtypePolicyWarning, match=text):
        assert not np.array_equal(apply(model, {}, x, dropout), apply(model, {}, x, dropout))


def test_our_modules_directly_below_a_composite_of_flax_are_outermost():
    def model(**fields):
        return flax_nn.Sequential([Block(**fields), Block()])

    own, scoped = model(dtype_policy=MIXED), model()
    variables = own.init(KEY, X)
    ops = operations(own.apply, variables, X)
    assert [op.inputs[0] for op in named(ops, "dot_general")] == ["bfloat16", "float32"]
    with use_policy(MIXED):
        ops = operations(scoped.apply, variables, X)
        assert jax.eval_shape(scoped.apply, variables, X).dtype == jnp.float32
    assert [op.inputs[0] for op in named(ops, "dot_general")] == ["bfloat16"] * 2
    assert len(boundary_casts(ops)) == 4
