"""Where a module's inputs are cast to compute_dtype and its outputs to output_dtype, and where they
are not.
"""

from __future__ import annotations

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpmodules import linen as nn
from policy import DtypePolicyWarning, Policy, current_policy, use_policy
from tests.programs import apply, boundary_casts, named, operations

MIXED = Policy("f32", "bf16", "f32")
X = jnp.ones((2, 4))
KEY = jax.random.key(0)


def noting(seen: list[str], **fields: Any) -> Any:
    """An identity that notes the dtype it is handed."""

    class Note(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(x.dtype.name)
            return x

    return Note(**fields)


def shapes(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Output shapes and dtypes of a fresh model, without running it."""
    return jax.eval_shape(lambda: model.init_with_output(KEY, *args, **kwargs)[0])


# --- one boundary for the whole model -------------------------------------------------------------


class Block(nn.Module):
    width: int = 4
    note: Any = None

    @nn.compact
    def __call__(self, x):
        if self.note is not None:
            self.note(("in", x.dtype.name))
        x = nn.relu(nn.Dense(self.width)(x))
        if self.note is not None:
            self.note(("out", x.dtype.name))
        return x


class Net(nn.Module):
    note: Any = None
    inner_policy: Any = None

    @nn.compact
    def __call__(self, x):
        x = Block(note=self.note)(x)
        x = Block(note=self.note, dtype_policy=self.inner_policy)(x)
        x = Block(note=self.note)(x)
        return nn.Dense(3)(x)


def test_activations_are_in_compute_dtype_between_layers_and_logits_in_output_dtype():
    model = Net(dtype_policy=MIXED)
    ops = operations(model.apply, model.init(KEY, X), X)
    assert {op.outputs for op in ops if op.name != "convert_element_type"} == {("bfloat16",)}
    assert shapes(model, X).dtype == jnp.float32


def test_a_users_code_sees_float32_everywhere():
    seen: list[Any] = []
    model = Net(note=seen.append, inner_policy="bf16", dtype_policy=MIXED)
    variables = model.init(KEY, X)
    jax.eval_shape(model.apply, variables, X.astype(jnp.bfloat16))
    jax.eval_shape(lambda v: model.bind(v)(X), variables)
    assert len(seen) == 18 and {dtype for _, dtype in seen} == {"float32"}


def test_a_scope_gives_the_same_boundary_as_a_policy_of_the_models_own():
    model = Net()
    variables = model.init(KEY, X)
    own = jax.jit(Net(dtype_policy=MIXED).apply).lower(variables, X).as_text()
    with use_policy(MIXED):
        assert jax.jit(model.apply).lower(variables, X).as_text() == own


def test_a_float32_submodule_runs_in_float32_between_blocks_in_half():
    model = Net(inner_policy="f32", dtype_policy=MIXED)
    variables = model.init(KEY, X)
    ops = operations(model.apply, variables, X)
    assert [op.inputs[0] for op in named(ops, "dot_general", "max")] == [
        "bfloat16", "bfloat16",  # a layer, and relu after it
        "float32", "float32",
        "bfloat16", "bfloat16",
        "bfloat16",
    ]  # fmt: skip
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float32


def test_a_nested_module_with_an_equal_policy_is_no_boundary():
    same = "params=float32,compute=bfloat16,output=float32"
    model = Net(inner_policy=same, dtype_policy="mixed_bfloat16")
    variables = model.init(KEY, X)
    ops = operations(model.apply, variables, X)
    assert len(boundary_casts(ops)) == 2
    assert {op.outputs for op in ops if op.name != "convert_element_type"} == {("bfloat16",)}


def test_current_policy_in_a_module_is_the_one_that_it_obeys():
    seen = []

    class Asks(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(current_policy())
            return x

    shapes(nn.Sequential([Asks(), Asks(dtype_policy="f16"), Asks()], dtype_policy=MIXED), X)
    assert [str(policy) for policy in seen] == [
        str(MIXED),
        "params=float16,compute=float16,output=float16",
        str(MIXED),
    ]
    assert current_policy() is None


def test_a_module_stays_under_its_policy_whatever_its_body_raises():
    class Fails(nn.Module):
        def __call__(self, x):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        shapes(Fails(dtype_policy=MIXED), X)
    assert current_policy() is None
    assert shapes(noting([], dtype_policy=MIXED), X).dtype == jnp.float32


# --- styles ---------------------------------------------------------------------------------------


def setup_style():
    class Model(nn.Module):
        def setup(self):
            self.first = Block()
            self.second = nn.Dense(3)

        def __call__(self, x):
            return self.second(self.first(x))

    return Model


def shared():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = Block()
            return block(block(x))

    return Model


def nested():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Block()(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner()(Inner()(x))

    return Model


def passed_as_field():
    class Holder(nn.Module):
        block: Any

        @nn.compact
        def __call__(self, x):
            return self.block(x)

    def make(**kwargs):
        return Holder(Block(), **kwargs)

    return make


class ScanBody(nn.Module):
    @nn.compact
    def __call__(self, carry, _):
        return Block()(carry), None


def scanned():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = nn.scan(
                ScanBody, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )()
            return body(x, None)[0]

    return Model


def rematerialised():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(Block)()(x)

    return Model


def vmapped():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.vmap(
                Block, in_axes=0, variable_axes={"params": 0}, split_rngs={"params": True}
            )()(x)

    return Model


def jitted():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(Block)()(x)

    return Model


STYLES = {
    make.__name__: make
    for make in (
        setup_style,
        shared,
        nested,
        passed_as_field,
        scanned,
        rematerialised,
        vmapped,
        jitted,
    )
}


@pytest.mark.parametrize("style", STYLES)
def test_every_style_has_one_boundary_and_matmuls_in_compute_dtype(style):
    model = STYLES[style]()(dtype_policy=MIXED)
    variables = model.init(KEY, X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float32"}
    ops = operations(model.apply, variables, X)
    assert [op.outputs for op in boundary_casts(ops)] == [("bfloat16",), ("float32",)]
    within = ("remat2",) if style == "rematerialised" else ()  # inputs are cast where they are used
    assert [op.within for op in boundary_casts(ops)] == [within, ()]
    dots = named(ops, "dot_general")
    assert dots and all(
        op.inputs == ("bfloat16", "bfloat16") and op.outputs == ("bfloat16",) for op in dots
    )


@pytest.mark.parametrize("style", STYLES)
def test_every_style_keeps_upstreams_tree_and_values(style):
    ours = STYLES[style]()(dtype_policy=MIXED).init(KEY, X)
    plain = STYLES[style]()().init(KEY, X)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


# --- the boundary of a lifted class stands outside of the transform -------------------------------


SCAN = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
IN_AXES: Any = (0, None)  # Flax says `int`
LIFTED = {
    "scan": lambda: nn.scan(ScanBody, **SCAN),
    "scan of remat": lambda: nn.scan(nn.remat(ScanBody), **SCAN),
    "vmap": lambda: nn.vmap(
        ScanBody, in_axes=IN_AXES, variable_axes={"params": None}, split_rngs={"params": False}
    ),
}


@pytest.mark.parametrize("lift", LIFTED)
def test_a_lifted_class_with_a_policy_has_one_boundary_outside_of_the_transform(lift):
    model = LIFTED[lift]()(dtype_policy=MIXED)
    variables = model.init(KEY, X, None)
    ops = operations(lambda v, x: model.apply(v, x, None)[0], variables, X)
    casts = [(op.outputs, op.within) for op in boundary_casts(ops)]
    assert casts == [(("bfloat16",), ()), (("float32",), ())]
    assert {op.outputs[0] for op in named(ops, "scan")} <= {"bfloat16"}


def test_rematerialised_classes_hand_on_compute_dtype():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(Block)()(nn.remat(Block)()(x))

    for model, count in ((nn.remat(Block)(dtype_policy=MIXED), 1), (Model(dtype_policy=MIXED), 2)):
        variables = model.init(KEY, X)
        ops = operations(model.apply, variables, X)
        remats = [op for op in ops if "remat" in op.name or op.name == "checkpoint"]
        assert [op.outputs for op in remats] == [("bfloat16",)] * count
        assert all("bfloat16" in op.inputs for op in remats[1:])  # what backward keeps
        assert boundary_casts(ops)[-1].outputs == ("float32",)


@pytest.mark.parametrize("lift", ["remat", "jit", "vmap"])
def test_a_lifted_layer_with_a_policy_of_its_own_is_a_boundary_outside(lift):
    transforms = {
        "remat": nn.remat,
        "jit": nn.jit,
        "vmap": lambda cls: nn.vmap(
            cls, variable_axes={"params": None}, split_rngs={"params": False}
        ),
    }
    model = transforms[lift](nn.Dense)(3, dtype_policy=MIXED)
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
        self.decoder = nn.Dense(4)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)

    def __call__(self, x):
        return self.decode(self.encode(x))

    def _private(self, x):
        return self.encoder(x)

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def made(cls, **kwargs):
        return cls(**kwargs)

    @nn.nowrap
    def unwrapped(self, x):
        return self.encoder(x)


def auto_encoder():
    model = AutoEncoder(dtype_policy=MIXED)
    return model, model.init(KEY, X)


METHODS = {
    "by call": "__call__",
    "by name": "encode",
    "as a function": AutoEncoder.encode,
    "as a bound method": AutoEncoder().encode,
    "as a lambda": lambda module, x: module.encode(x),
}


@pytest.mark.parametrize("how", METHODS)
def test_a_public_method_is_a_boundary_however_it_is_named(how):
    model, variables = auto_encoder()
    ops = operations(lambda v, x: model.apply(v, x, method=METHODS[how]), variables, X)
    assert [op.outputs for op in boundary_casts(ops)] == [("bfloat16",), ("float32",)]


def test_a_public_method_of_a_bound_module_is_a_boundary():
    model, variables = auto_encoder()
    assert model.bind(variables).encode(X).dtype == jnp.float32
    assert model.bind(variables)(X).dtype == jnp.float32


@pytest.mark.parametrize("name", ["_private", "unwrapped"])
def test_private_and_unwrapped_methods_are_no_boundary_but_their_layers_obey(name):
    model, variables = auto_encoder()
    ops = operations(lambda v, x: model.apply(v, x, method=name), variables, X)
    assert boundary_casts(ops) == []
    (dot,) = named(ops, "dot_general")
    assert dot.outputs == ("bfloat16",)


def test_helpers_static_and_class_methods_and_properties_are_no_boundary():
    class Cell(AutoEncoder):
        @property
        def width(self):
            return 3

        @nn.nowrap
        def helper(self):
            return None

        def initialize_carry(self, x):
            return jnp.zeros(x.shape, jnp.float32)

        def __call__(self, x):
            carry = self.initialize_carry(x)
            assert carry.dtype == jnp.float32 and self.width == 3 and self.helper() is None
            return carry + self.double(x.astype(jnp.float32))

    assert shapes(Cell(dtype_policy="bf16"), X).dtype == jnp.bfloat16
    assert AutoEncoder.double(X).dtype == jnp.float32
    assert AutoEncoder.made(dtype_policy=MIXED).dtype_policy == MIXED


def test_a_super_call_crosses_once():
    class Base(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) * 3

    class Derived(Base):
        @nn.compact
        def __call__(self, x):
            return super().__call__(x) * 2

    model = Derived(dtype_policy=MIXED)
    ops = operations(model.apply, model.init(KEY, X), X)
    assert [op.outputs for op in boundary_casts(ops)] == [("bfloat16",), ("float32",)]
    assert [op.outputs for op in named(ops, "mul")] == [("bfloat16",)] * 2


def test_a_layers_super_call_crosses_once_and_keeps_the_accumulator_inside():
    class Scaled(nn.Dense):
        @nn.compact
        def __call__(self, inputs):
            out = super().__call__(inputs)
            return out * jnp.asarray(2, out.dtype)

    model = Scaled(3, dtype_policy=MIXED)
    variables = model.init(KEY, X)
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float32
    ops = operations(model.apply, variables, X)
    assert [op.outputs for op in boundary_casts(ops)] == [("bfloat16",), ("float32",)]


# --- inputs that are left alone -------------------------------------------------------------------


class Diffusion(nn.Module):
    @nn.compact
    def __call__(self, x, t, *rest, scale=None):
        note = [each.dtype.name for each in (x, t, *rest, scale) if each is not None]
        return nn.Dense(2)(x), t, note


class Kept(Diffusion):
    keep_inputs = ("t", "rest")


class Narrower(Kept):
    """Inherits the names."""


HALF_X = X.astype(jnp.bfloat16)
CALLS = {
    "positional": lambda model, t: model.apply(VARIABLES, HALF_X, t, scale=X),
    "keyword": lambda model, t: model.apply(VARIABLES, HALF_X, t=t, scale=X),
    "variadic": lambda model, t: model.apply(VARIABLES, HALF_X, t, t, t),
}
VARIABLES = Diffusion().init(KEY, X, X[0])


@pytest.mark.parametrize("own_code", ["autocast", "keep"])
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("cls", [Kept, Narrower])
def test_named_inputs_come_as_they_are(cls, how, own_code):
    class Model(cls):
        pass

    Model.own_code = own_code
    t = jnp.float32([999.0, 1001.0])
    out, kept, note = CALLS[how](Model(dtype_policy=MIXED), t)
    assert out.dtype == jnp.float32 and np.array_equal(kept, t)
    others = "bfloat16" if own_code == "keep" else "float32"
    count = 2 if how == "variadic" else 0
    assert note == [others, "float32", *["float32"] * count, *[others] * (not count)]


@pytest.mark.parametrize("cls", [Diffusion, Kept])
def test_timesteps_that_bfloat16_cannot_tell_apart_stay_apart(cls):
    t = jnp.float32([999.0, 1001.0])
    model = cls(dtype_policy=MIXED)
    for _, kept, _ in (
        model.init_with_output(KEY, X, t)[0],
        model.apply(VARIABLES, X, t),
        jax.jit(lambda t: (*model.apply(VARIABLES, X, t)[:2], None))(t),
    ):
        assert kept[0] != kept[1]
    assert len(set(np.asarray(t.astype(jnp.bfloat16)).tolist())) == 1


def test_a_policy_that_keeps_inputs_casts_none_and_layers_still_compute_in_compute_dtype():
    class Model(nn.Module):
        own_code = "keep"

        @nn.compact
        def __call__(self, x):
            y = nn.Dense(3)(x)
            seen.extend([x.dtype.name, y.dtype.name])
            return y

    seen: list[str] = []
    model = Model(dtype_policy="p=f32,c=bf16,o=f32,inputs=keep")
    assert shapes(model, X).dtype == jnp.float32
    assert seen == ["float32", "bfloat16"]


def test_integers_booleans_keys_and_other_things_pass_through():
    tokens, mask, key = jnp.arange(3), jnp.ones(3, bool), jax.random.key(1)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, batch, flag, text):
            assert batch["x"].dtype == jnp.float32
            assert (batch["tokens"].dtype, batch["mask"].dtype) == (tokens.dtype, mask.dtype)
            assert jnp.issubdtype(batch["key"].dtype, jax.dtypes.prng_key)
            assert batch["z"].dtype == jnp.complex64
            assert batch["float"] == 1.5 and isinstance(batch["float"], float)
            assert flag is None and text == "text"
            return batch | {"x": batch["x"] * 2}

    batch = {
        "x": X,
        "tokens": tokens,
        "mask": mask,
        "key": key,
        "z": X.astype(jnp.complex64),
        "float": 1.5,
    }
    out = apply(Model(dtype_policy="bf16"), {}, batch, None, "text")
    assert out["x"].dtype == jnp.bfloat16 and out["float"] == 1.5
    assert (out["tokens"].dtype, out["z"].dtype) == (tokens.dtype, jnp.complex64)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_inputs_are_arrays_of_float32(dtype):
    seen: list[str] = []
    out = apply(noting(seen, dtype_policy="bf16"), {}, np.ones((2, 2), dtype))
    assert seen == ["float32"] and out.dtype == jnp.bfloat16


def test_nan_and_infinity_pass_through_a_boundary():
    out = noting([], dtype_policy=MIXED).apply({}, jnp.float32([jnp.nan, jnp.inf, -jnp.inf, 0]))
    np.testing.assert_array_equal(out, [np.nan, np.inf, -np.inf, 0])


# --- references survive ---------------------------------------------------------------------------


def test_references_passed_as_arguments_keep_their_identity():
    rngs = nnx.Rngs(0)
    variable = nnx.Param(jnp.ones(2))
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    module = flax_nn.Dense(2)
    given = (rngs, variable, dropout, {"inside": module})
    seen: list[Any] = []

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, *references):
            seen.append(references)
            return x, references

    with pytest.warns(DtypePolicyWarning, match="Model can't be traced.*returns a module or a var"):
        _, returned = apply(Model(dtype_policy=MIXED), {}, X, *given)
    for references in (seen[-1], returned):
        assert references[0] is rngs and references[1] is variable and references[2] is dropout
        assert references[3]["inside"] is module


def test_an_nnx_dropout_passed_through_a_boundary_draws_a_new_mask_each_call():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, dropout):
            return dropout(x)

    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model, x = Model(dtype_policy=MIXED), jnp.ones((64,))
    with pytest.warns(
        DtypePolicyWarning, match="changes an nnx object that is not part of the mod"
    ):
        assert not np.array_equal(apply(model, {}, x, dropout), apply(model, {}, x, dropout))


def test_a_bound_submodule_passed_as_an_argument_keeps_its_variables():
    class Uses(nn.Module):
        @nn.compact
        def __call__(self, x, layer):
            return layer(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, name="shared")
            return Uses()(layer(x), layer)

    model = Model(dtype_policy=MIXED)
    variables = model.init(KEY, X)
    assert list(variables["params"]) == ["shared"]
    assert all(
        op.outputs == ("bfloat16",)
        for op in named(operations(model.apply, variables, X), "dot_general")
    )


def test_batch_statistics_are_updated_inside_a_boundary():
    model = nn.Sequential(
        [nn.BatchNorm(use_running_average=False, momentum=0.5)], dtype_policy=MIXED
    )
    variables = model.init(KEY, X)
    _, updated = model.apply(variables, 3 * X, mutable=["batch_stats"])
    np.testing.assert_array_equal(updated["batch_stats"]["layers_0"]["mean"], 1.5)


# --- a bare layer ---------------------------------------------------------------------------------


def test_a_bare_layer_under_a_scope_returns_compute_dtype_and_casts_nothing_back():
    with use_policy(MIXED):
        model = nn.Dense(3)
        variables = model.init(KEY, X)
        assert boundary_casts(operations(model.apply, variables, X)) == []
        assert jax.eval_shape(model.apply, variables, X).dtype == jnp.bfloat16


def test_a_layer_whose_own_policy_equals_the_one_in_force_is_no_boundary():
    model = nn.Sequential([nn.Dense(3, dtype_policy=MIXED), nn.relu], dtype_policy=MIXED)
    ops = operations(model.apply, model.init(KEY, X), X)
    assert [op.outputs for op in boundary_casts(ops)] == [("bfloat16",), ("float32",)]
    assert [op.outputs for op in named(ops, "dot_general", "max")] == [("bfloat16",)] * 2


# --- what the scope does not reach ----------------------------------------------------------------


def test_a_function_between_layers_is_own_code():
    seen = []

    def function(x):
        seen.append(x.dtype.name)
        return x * 2

    model = nn.Sequential([nn.Dense(3), function], dtype_policy=MIXED)
    ops = operations(model.apply, model.init(KEY, X), X)
    assert [op.outputs for op in named(ops, "mul")] == [("bfloat16",)]
    assert set(seen) == {"float32"}


def test_our_modules_directly_below_a_composite_of_flax_are_outermost():
    def model(**fields):
        return flax_nn.Sequential([Block(**fields), Block()])

    own, scoped = model(dtype_policy=MIXED), model()
    variables = own.init(KEY, X)
    ops = operations(own.apply, variables, X)
    assert [op.inputs[0] for op in named(ops, "dot_general")] == ["bfloat16", "float32"]
    with use_policy(MIXED):
        ops = operations(scoped.apply, variables, X)
        assert shapes(scoped, X).dtype == jnp.float32
    assert [op.inputs[0] for op in named(ops, "dot_general")] == ["bfloat16"] * 2
    assert len(boundary_casts(ops)) == 4
