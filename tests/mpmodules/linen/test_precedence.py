"""Which policy a linen layer obeys where it is shared, bound, or called from several places.

`tests/mpmodules/test_precedence.py` has the levels of precedence, for both wings.
"""

from __future__ import annotations

import contextlib
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from policy import DtypePolicyWarning, use_policy
from tests.programs import named, operations

X = jnp.ones((2, 4))
KEY = jax.random.key(0)
BF16, F16, F32 = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16", "f32"


class Wrap(nn.Module):
    """A module around one layer, made by `make`."""

    make: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        return self.make(3, name="layer")(x)


def test_an_explicit_dtype_that_defeats_the_policy_warns_once_per_path():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("first", "second"):
                x = nn.Dense(4, dtype=jnp.float32, name=name)(x)
            return x

    with pytest.warns(DtypePolicyWarning) as told:
        for _ in range(3):
            jax.eval_shape(lambda: Net(dtype_policy="mixed_bfloat16").init(KEY, X))
    assert [str(w.message).partition(" has")[0] for w in told] == [
        "Dense at 'first'",
        "Dense at 'second'",
    ]


# --- the caller decides ---------------------------------------------------------------------------


def test_a_shared_layer_called_under_two_policies_in_one_trace_obeys_each_caller():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, name="shared")
            outs = []
            for policy in ("p=bf16,c=bf16,o=bf16", F16, F32, BF16):
                with use_policy(policy):
                    outs.append(layer(x))
            return outs

    out, variables = jax.eval_shape(lambda: Net().init_with_output(KEY, X))
    assert [o.dtype.name for o in out] == ["bfloat16", "float16", "float32", "bfloat16"]
    # its first caller decides what its parameters are stored in
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"bfloat16"}


def test_a_shared_layer_passed_to_two_modules_obeys_each():
    class Calls(nn.Module):
        @nn.compact
        def __call__(self, x, layer):
            return layer(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, name="shared")
            return Calls(dtype_policy=BF16)(x, layer), Calls(dtype_policy=F16)(x, layer), layer(x)

    out, variables = jax.eval_shape(lambda: Net().init_with_output(KEY, X))
    assert [o.dtype.name for o in out] == ["bfloat16", "float16", "float32"]
    assert list(variables["params"]) == ["shared"]


def test_resolution_does_not_outlive_the_call():
    layer = nn.Dense(3)
    variables = layer.init(KEY, X)
    bound = layer.bind(variables)
    for policy, expected in ((BF16, "bfloat16"), (F16, "float16"), (None, "float32")):
        with use_policy(policy):
            assert bound(X).dtype == expected
    assert (bound.dtype, bound.param_dtype) == (None, None)
    with use_policy(BF16), pytest.raises(Exception, match="shape"):
        bound(jnp.ones((2, 5)))
    assert (bound.dtype, bound.param_dtype) == (None, None)


class Parent(nn.Module):
    def setup(self):
        self.block = Wrap()
        self.embed = nn.Embed(5, 4)

    def __call__(self, x):
        return self.block(x) + self.embed(jnp.arange(2)).sum(-1, keepdims=True)


def test_a_bound_submodule_called_by_itself_obeys_its_parent_and_the_rules_in_force():
    for policy, rules in (("mixed_bfloat16", None), (None, {"block": BF16})):
        model = Parent(dtype_policy=policy)
        bound = model.bind(model.init(KEY, X))
        with use_policy(None, rules=rules) if rules else contextlib.nullcontext():
            (dot,) = named(operations(lambda x, bound=bound: bound.block(x), X), "dot_general")
        assert dot.inputs == ("bfloat16", "bfloat16")
        if policy:  # nothing is open: its call is a boundary, and a bare layer's is none
            assert bound.block(X).dtype == jnp.float32
            assert bound.embed(jnp.arange(2)).dtype == jnp.bfloat16


def test_an_open_call_wins_over_the_parent_chain():
    class Borrows(nn.Module):
        layer: Any

        @nn.compact
        def __call__(self, x):
            return self.layer(x)

    class Owner(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, name="owned")
            return Borrows(layer, dtype_policy=F16)(x), layer(x)

    out, variables = jax.eval_shape(lambda: Owner(dtype_policy=BF16).init_with_output(KEY, X))
    assert {o.dtype.name for o in out} == {"bfloat16"}  # the second boundary is the owner's
    dots = named(operations(Owner(dtype_policy=BF16).apply, variables, X), "dot_general")
    assert [dot.inputs[0] for dot in dots] == ["float16", "bfloat16"]


def test_a_sequential_stands_for_flaxs_class_in_isinstance_and_the_other_way_round():
    assert isinstance(nn.Dense(3), flax_nn.Dense) and isinstance(flax_nn.Dense(3), nn.Dense)
    assert isinstance(flax_nn.Dense(3), nn.Module) and isinstance(nn.Dense(3), flax_nn.Module)
    assert not isinstance(flax_nn.Dense(3), nn.Conv)
    assert issubclass(flax_nn.Dense, nn.Dense) and not issubclass(flax_nn.Dense, Wrap)
    assert not isinstance(flax_nn.Dense(3), Wrap)
