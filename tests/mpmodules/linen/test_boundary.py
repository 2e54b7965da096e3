"""Boundaries of lifted classes, of methods as `apply` takes them, of references to nnx, and of
inner jits.
"""

import functools
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpmodules import linen as nn
from policy import DtypePolicyWarning, use_policy
from tests.mpmodules.apis import KEY, MIXED, compact
from tests.programs import apply, boundary_casts, named, operations

X = jnp.ones((2, 4))
AS_BF16, AS_F16 = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"
EACH: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SHARED: Any = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
IN_AXES: Any = (0, None)  # Flax says `int`


Block = compact(lambda x: nn.relu(nn.Dense(4)(x)))
ScanBody = compact(lambda carry, _: (Block()(carry), None))


class Setup(nn.Module):
    def setup(self):
        self.first, self.second = Block(), nn.Dense(3)

    def __call__(self, x):
        return self.second(self.first(x))


def shared(x: jax.Array) -> Any:
    block = Block()
    return block(block(x))


STYLES: dict[str, Any] = {
    "setup": Setup,
    "shared": compact(shared),
    "nested": compact(lambda x: compact(lambda x: Block()(x))()(x)),
    "passed as a field": lambda **options: nn.Sequential([Block()], **options),
    "scan": compact(lambda x: nn.scan(ScanBody, length=3, **EACH)()(x, None)[0]),
    "remat": compact(lambda x: nn.remat(Block)()(x)),
    "vmap": compact(lambda x: nn.vmap(Block, in_axes=0, **EACH)()(x)),
    "jit": compact(lambda x: nn.jit(Block)()(x)),
}


def casts_of(ops: Any) -> list[Any]:
    return [(op.outputs[0], op.within) for op in boundary_casts(ops)]


@pytest.mark.cases(fast=1, slow=4)
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


LIFTED: dict[str, tuple[Any, Any]] = {
    "scan": (nn.scan(ScanBody, length=3, **EACH), (X, None)),
    "scan of remat": (nn.scan(nn.remat(ScanBody), length=3, **EACH), (X, None)),
    "vmap": (nn.vmap(ScanBody, in_axes=IN_AXES, **SHARED), (X, None)),
    "remat of a layer": (functools.partial(nn.remat(nn.Dense), 3), (X,)),
    "jit of a layer": (functools.partial(nn.jit(nn.Dense), 3), (X,)),
    "vmap of a layer": (functools.partial(nn.vmap(nn.Dense, **SHARED), 3), (X,)),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("lift", LIFTED)
def test_a_lifted_class_with_a_policy_has_its_boundary_outside_of_the_transform(lift):
    cls, args = LIFTED[lift]
    model = cls(dtype_policy=MIXED)
    variables = model.init(KEY, *args)
    ops = operations(lambda v, x: model.apply(v, x, *args[1:]), variables, X)
    assert casts_of(ops) == [("bfloat16", ()), ("float32", ())]
    assert {op.outputs[0] for op in named(ops, "scan")} <= {"bfloat16"}
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16", "bfloat16")}
    (y, *_) = jax.tree.leaves(jax.eval_shape(model.apply, variables, *args))
    assert y.dtype == jnp.float32


def test_rematerialized_classes_hand_on_compute_dtype():
    twice = compact(lambda x: nn.remat(Block)()(nn.remat(Block)()(x)))
    for model, count in ((nn.remat(Block)(dtype_policy=MIXED), 1), (twice(dtype_policy=MIXED), 2)):
        variables = model.init(KEY, X)
        ops = operations(model.apply, variables, X)
        remats = [op for op in ops if "remat" in op.name or op.name == "checkpoint"]
        assert [op.outputs for op in remats] == [("bfloat16",)] * count
        assert all("bfloat16" in op.inputs for op in remats[1:])  # what backward keeps
        assert boundary_casts(ops)[-1].outputs == ("float32",)


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


@pytest.mark.cases(fast=1)
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
    assert [op.outputs for op in named(ops, "dot_general")] == [("bfloat16",)]


def test_references_passed_as_arguments_keep_their_identity():
    given = nnx.Rngs(0), nnx.Param(jnp.ones(2)), {"inside": flax_nn.Dense(2)}
    model = compact(lambda x, *references: (x, references))(dtype_policy=MIXED)
    with pytest.warns(DtypePolicyWarning, match="Model can't be traced.*returns a module or a var"):
        _, returned = apply(model, {}, X, *given)
    assert returned[0] is given[0] and returned[1] is given[1]
    assert returned[2]["inside"] is given[2]["inside"]


def test_an_nnx_dropout_passed_through_a_boundary_draws_a_new_mask_each_call():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model, x = compact(lambda x, dropout: dropout(x))(dtype_policy=MIXED), jnp.ones((64,))
    text = "changes an nnx object that is not part of the mod"
    with pytest.warns(DtypePolicyWarning, match=text):
        assert not np.array_equal(apply(model, {}, x, dropout), apply(model, {}, x, dropout))


@pytest.mark.slow
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


class Stack(nn.Module):
    """Scans a function over a block, with the block's own policy."""

    policy: Any = None
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        block = Block(dtype_policy=self.policy)
        scan = nn.scan(
            lambda block, carry, _: (block(carry), None),
            variable_broadcast="params",
            split_rngs={"params": False},
            length=2,
        )
        return scan(block, x.astype(self.dtype), None)[0]


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (Stack(dtype_policy=MIXED), "float32"),
        (Stack(policy=AS_F16, dtype=jnp.float16), "float16"),  # as the advice below says
    ],
)
def test_a_function_form_scan_carries_the_dtype_of_its_block(model, dtype):
    assert jax.eval_shape(lambda: model.init_with_output(KEY, X)[0]).dtype == dtype


def test_a_function_form_scan_over_a_boundary_with_another_output_dtype_says_what_to_do():
    with pytest.raises(TypeError, match="carry") as e:
        jax.eval_shape(lambda: Stack(policy=AS_F16).init(KEY, X))
    (advice,) = (note for note in e.value.__notes__ if "casts its outputs" in note)
    assert "give it its caller's policy, lift its class (nn.scan(Block) in linen)" in advice


def halves(x):
    halved = lambda carry, _: (carry[:1], None)  # noqa: E731
    return jax.lax.scan(halved, nn.Dense(4)(x), None, length=2)


def fail(x):
    Block(dtype_policy="bf16")(x)
    raise TypeError("something else")


@pytest.mark.parametrize(
    ("body", "text"), [(halves, "shapes do not match"), (fail, "something else")]
)
def test_a_type_error_for_another_reason_gets_no_advice(body, text):
    with pytest.raises(TypeError, match=text) as e:
        compact(body)().init(KEY, X)
    assert not any("casts its outputs" in note for note in getattr(e.value, "__notes__", []))


ABA = ((AS_BF16, "bfloat16"), (AS_F16, "float16"), (AS_BF16, "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nn.jit class", "nn.jit method"])
def test_an_inner_jit_follows_the_scope(kind):
    class Block(nn.Module):
        def body(self, x):
            return nn.Dense(3)(x) * 2

        @nn.compact
        def __call__(self, x):
            return nn.jit(Block.body)(self, x) if kind == "nn.jit method" else self.body(x)

    cls = nn.jit(Block) if kind == "nn.jit class" else Block

    model = compact(lambda x: cls()(cls()(x)))()
    variables = model.init(KEY, X)
    run: Any = functools.partial(apply, model)
    for policy, expected in ABA:
        with use_policy(policy):
            assert run(variables, X).dtype == expected
            ops = named(operations(run, variables, X), "dot_general", "mul")
        assert {op.inputs[0] for op in ops} == {expected}


def test_a_layers_fields_hold_what_the_user_gave_also_during_a_call():
    seen: list[Any] = []

    def product(*args: Any, **options: Any) -> Any:
        seen.append((layer.dtype, layer.param_dtype, args[0].dtype))
        return jax.lax.dot_general(*args, **options)

    unbound = nn.Dense(3, dot_general=product, dtype_policy="p=f32,c=bf16")
    layer = unbound.bind({"params": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}})
    layer(jnp.ones((2, 4)))
    assert seen == [(None, None, jnp.bfloat16)]
