"""The error of a function-form scan whose body is a boundary with another output dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn

X = jnp.ones((2, 4))
KEY = jax.random.key(0)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


class Stack(nn.Module):
    """Scans a function over a block, with the block's own policy."""

    policy: Any = None

    @nn.compact
    def __call__(self, x):
        block = Block(dtype_policy=self.policy)
        scan = nn.scan(
            lambda block, carry, _: (block(carry), None),
            variable_broadcast="params",
            split_rngs={"params": False},
            length=2,
        )
        return scan(block, x, None)[0]


def test_a_function_form_scan_under_one_policy_carries_compute_dtype():
    out = jax.eval_shape(lambda: Stack(dtype_policy="mixed_bfloat16").init_with_output(KEY, X)[0])
    assert out.dtype == jnp.float32


def test_a_function_form_scan_over_a_boundary_with_another_output_dtype_says_what_to_do():
    model = Stack(policy="p=f32,c=f16,o=f16")
    with pytest.raises(TypeError, match="carry") as e:
        jax.eval_shape(lambda: model.init(KEY, X))
    (advice,) = (note for note in e.value.__notes__ if "casts its outputs" in note)
    assert "give it its caller's policy, lift its class (nn.scan(Block) in linen)" in advice


def test_a_scan_whose_carry_changes_its_shape_is_left_to_jax():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.lax.scan(lambda carry, _: (carry[:1], None), nn.Dense(4)(x), None, length=2)

    with pytest.raises(TypeError, match="shapes do not match") as caught:
        Model().init(KEY, X)
    assert not any("casts its outputs" in note for note in caught.value.__notes__)


def test_the_advice_for_a_scan_works():
    class Cast(Stack):
        @nn.compact
        def __call__(self, x):
            return super().__call__(x.astype(jnp.float16))

    out = jax.eval_shape(lambda: Cast(policy="p=f32,c=f16,o=f16").init_with_output(KEY, X)[0])
    assert out.dtype == jnp.float16


def test_a_type_error_of_the_models_own_gets_no_advice():
    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x):
            Block(dtype_policy="bf16")(x)
            raise TypeError("something else")

    with pytest.raises(TypeError, match="something else") as e:
        Fails().init(KEY, X)
    assert not any("casts its outputs" in note for note in getattr(e.value, "__notes__", []))
