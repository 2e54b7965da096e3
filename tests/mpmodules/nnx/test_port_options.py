"""Options of `apply_policy`: dtype attributes of modules that are not layers, and casts of what
they hand on.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import get_policy, nnx, use_policy
from mpmodules.nnx import apply_policy
from policy import DtypePolicyWarning
from tests.programs import named, operations

BF16, F16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
MIXED = get_policy("mixed_bfloat16")
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Projection(flax_nnx.Module):
    """A foreign module that multiplies by itself, in a dtype of its own."""

    param_dtype: Any = None

    def __init__(self, dtype=jnp.float32):
        self.dtype = dtype
        self.kernel = flax_nnx.Param(jnp.eye(4))

    def __call__(self, x):
        return jnp.asarray(x, self.dtype) @ self.kernel[...].astype(self.dtype)


class Holds(flax_nnx.Module):
    def __init__(self, *layers):
        self.layers = flax_nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def matmuls(model):
    return [op.inputs[0] for op in named(operations(lambda x: model(x), X), "dot_general")]


def test_dtype_fields_of_foreign_modules_follow_the_policy_at_their_path():
    plain = apply_policy(Holds(Projection(), Projection()), MIXED, own_code="keep")
    assert matmuls(plain) == ["float32"] * 2 and plain.layers[0].dtype == F32
    model = apply_policy(
        Holds(Projection(), Projection(None), Projection()),
        MIXED,
        {"layers/2": "f16"},
        dtype_fields=True,
    )
    assert matmuls(model) == ["bfloat16", "bfloat16", "float16"]
    assert [layer.dtype for layer in model.layers] == [BF16, BF16, F16]
    assert [layer.param_dtype for layer in model.layers] == [F32, F32, F16]
    assert Projection.param_dtype is None
    model = apply_policy(model, "f32", dtype_fields=True)
    assert matmuls(model) == ["float32"] * 3


def test_fields_that_hold_no_floating_dtype_are_left():
    class Odd(flax_nnx.Module):
        def __init__(self, dtype):
            self.dtype = dtype

        @property
        def param_dtype(self):
            return jnp.float32

        def __call__(self, x):
            return x

    for left in (jnp.complex64, jnp.int32, "fp", 3):
        assert apply_policy(Odd(left), MIXED, dtype_fields=True).dtype == left
        assert apply_policy(Odd(left), MIXED).dtype == left
    assert apply_policy(Odd(jnp.int32), MIXED, keep_explicit=True).dtype_policy == MIXED


def test_a_dtype_field_is_spelled_as_it_was():
    pairs = (
        ("float32", "bfloat16"),
        (F32, BF16),
        (None, BF16),
        (jnp.float32, jnp.bfloat16),
        (np.float32, jnp.bfloat16),
    )
    for given, expected in pairs:
        model = apply_policy(Projection(given), MIXED, dtype_fields=True)
        assert model.dtype == expected and type(model.dtype) is type(expected)
        if callable(given):
            assert model.dtype(0.5).dtype == BF16


def test_dtype_fields_are_not_kept_and_replaced_at_once():
    model = Holds(Projection(jnp.float16))
    with pytest.raises(
        ValueError,
        match=r"keep_explicit=True keeps the dtypes .* and dtype_fields=True replaces them",
    ):
        apply_policy(model, MIXED, keep_explicit=True, dtype_fields=True)
    assert not hasattr(model, "dtype_policy") and model.layers[0].dtype == F16


def test_keep_explicit_leaves_foreign_modules_and_keeps_the_dtypes_of_layers_inside_of_them():
    class Threads(flax_nnx.Module):
        param_dtype = jnp.float32

        def __init__(self, dtype, *, rngs):
            self.dtype = dtype
            self.linear = flax_nnx.Linear(4, 4, dtype=dtype, rngs=rngs)

        def __call__(self, x):
            assert x.dtype == BF16  # the model's boundary, none of its own
            return self.linear(x)

    model = Holds(Threads(jnp.float16, rngs=flax_nnx.Rngs(0)))
    with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float16") as told:
        model = apply_policy(model, MIXED, keep_explicit=True)
    assert len(told) == 1 and "Linear at 'layers/0/linear'" in str(told[0].message)
    assert matmuls(model) == ["float16"] and model.layers[0].dtype is jnp.float16


def test_dtype_fields_of_modules_of_ours_are_their_own():
    class Ours(nnx.Module):
        def __init__(self):
            self.dtype = jnp.float32

        def __call__(self, x):
            return x

    assert apply_policy(Ours(), MIXED, dtype_fields=True).dtype is jnp.float32


def test_parameters_that_a_foreign_module_holds_follow_param_dtype():
    model = apply_policy(Holds(Projection(), Projection()), "bf16", {"layers/1": "p=f32,c=bf16"})
    assert [layer.kernel.dtype for layer in model.layers] == [BF16, F32]


class Branches(flax_nnx.Module):
    """Adds a branch that computes in float32 to one of a layer, which refuses two dtypes."""

    def __init__(self, *, rngs):
        self.wide = Projection()
        self.half = flax_nnx.Linear(4, 4, rngs=rngs)
        self.seen = ()

    def __call__(self, x):
        wide, half = self.wide(x), self.half(x)
        self.seen = (wide.dtype.name, half.dtype.name)
        return jax.lax.add(wide, half)


def test_branches_of_two_dtypes_meet_in_compute_dtype_where_that_is_asked_for():
    with pytest.raises(TypeError, match="add requires arguments to have"):
        apply_policy(Branches(rngs=flax_nnx.Rngs(0)), MIXED, own_code="keep")(X)
    model = apply_policy(Branches(rngs=flax_nnx.Rngs(0)), MIXED, cast_submodules=True)
    assert model(X).dtype == F32
    assert model.seen == ("bfloat16", "bfloat16")
    assert model.wide(X).dtype == F32  # called from outside it is a boundary
    model = apply_policy(model, MIXED, own_code="keep")
    with pytest.raises(TypeError, match="add requires arguments to have"):
        model(X)


def test_a_branch_with_a_policy_of_its_own_is_handed_on_in_its_caller_s_dtype():
    rules = {"wide": "f32"}
    model = apply_policy(Branches(rngs=flax_nnx.Rngs(0)), MIXED, rules, cast_submodules=True)
    assert model(X).dtype == F32 and model.seen == ("bfloat16", "bfloat16")


def test_flax_s_sequential_is_cast_and_a_class_that_derives_from_a_layer_is_not():
    class Wide(flax_nnx.Linear):
        def __call__(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().__call__(x).astype(F32)

    class Calls(flax_nnx.Module):
        def __init__(self, *, rngs):
            self.wide = Wide(4, 4, rngs=rngs)
            self.layers = flax_nnx.Sequential(self.wide, jnp.sin)
            self.seen = ()

        def __call__(self, x):
            wide, layers = self.wide(x), self.layers(x)
            self.seen = (wide.dtype.name, layers.dtype.name)
            return layers

    model = apply_policy(Calls(rngs=flax_nnx.Rngs(0)), MIXED, cast_submodules=True)
    assert model(X).dtype == F32 and model.seen == ("float32", "bfloat16")


def test_methods_that_a_module_calls_itself_layers_and_carries_are_not_cast():
    class Cell(flax_nnx.RNNCellBase):
        def __call__(self, carry, x):
            y = self.step(carry, x)
            assert y.dtype == F32  # a method of its own
            return y, y

        def step(self, carry, x):
            return carry + x.astype(F32)

    class Outer(flax_nnx.Module):
        def __init__(self):
            self.cell = Cell()

        def __call__(self, x):
            carry, y = self.cell(jnp.zeros(x.shape, F32), x)
            assert (carry.dtype, y.dtype) == (F32, BF16)
            return y

    assert apply_policy(Outer(), MIXED, cast_submodules=True)(X).dtype == F32


# --------------------------------------------------------------------------------------------------
# Calls while a module is being built
# --------------------------------------------------------------------------------------------------


def test_a_method_that_init_calls_does_not_warn_that_the_module_has_no_policy():
    class Built(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.width = self.features(jnp.ones((1, 4))).shape[-1]

        def features(self, x):
            return self.linear(x)

        def __call__(self, x):
            return self.features(x)

    class Derived(nnx.Linear):
        def __init__(self, *, rngs):
            super().__init__(4, 4, rngs=rngs)
            self.width = self(jnp.ones((1, 4))).shape[-1]

    with warnings.catch_warnings(), use_policy(MIXED):
        warnings.simplefilter("error")
        models = [
            Built(rngs=nnx.Rngs(0)),
            Built(rngs=nnx.Rngs(0), dtype_policy="bf16"),
            Derived(rngs=nnx.Rngs(0)),
        ]
    assert [model.dtype_policy for model in models] == [MIXED, get_policy("bf16"), MIXED]


def test_another_module_that_was_built_under_no_policy_still_warns_when_init_calls_it():
    plain = nnx.Sequential(lambda x: x)

    class Calls(nnx.Module):
        def __init__(self):
            self.width = plain(jnp.ones((1, 4))).shape[-1]

    with (
        use_policy(MIXED),
        pytest.warns(DtypePolicyWarning, match="^Sequential was built under no policy"),
    ):
        Calls()
