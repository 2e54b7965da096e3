"""Wrong input is refused where it is given, by name, value and way out; nothing is half-applied."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from policy import current_policy, use_policy

X = jnp.ones((2, 4))
KEY = jax.random.key(0)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


@pytest.mark.parametrize("make", [lambda **k: nn.Dense(3, **k), Net], ids=["Dense", "Net"])
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            "bf17",
            ValueError,
            "dtype_policy='bf17'): Unknown dtype 'bf17': it should be one of half",
        ),
        ("q=f32", ValueError, "dtype_policy='q=f32'): Unknown key 'q' in 'q=f32': it should be "),
        (3, TypeError, "dtype_policy=3): A policy should be a Policy or its text form"),
    ],
)
def test_a_bad_dtype_policy_is_refused_at_construction(make, given, error, text):
    with pytest.raises(error, match=re.escape(text)) as e:
        make(dtype_policy=given)
    assert str(e.value).startswith(("Dense(", "Net("))


@pytest.mark.parametrize(
    ("pattern", "error", "text"),
    [
        ("encoder/(", ValueError, "Rule 'encoder/(' is not a regular expression: "),
        (3, TypeError, "A rule's pattern should be a path pattern or a layer class, but got 3."),
    ],
)
def test_a_bad_rule_is_refused_where_it_is_given(pattern, error, text):
    with pytest.raises(error, match=re.escape(text)):
        use_policy(None, rules={pattern: "f32"})
    with pytest.raises(error, match=re.escape(text)):
        nn.apply_policy(flax_nn.Dense(3), "bf16", {pattern: "f32"})
    with pytest.raises(ValueError, match=re.escape("Rule 'head': Unknown dtype 'f31'")):
        use_policy(None, rules={"head": "f31"})


@pytest.mark.parametrize(
    "dtype", [jnp.int32, jnp.float8_e4m3fn, jnp.bool_], ids=lambda d: jnp.dtype(d).name
)
def test_a_dtype_that_a_layer_cannot_honour_is_refused_under_a_policy(dtype):
    name = jnp.dtype(dtype).name
    text = (
        f"Dense at 'Dense_0' can't use dtype={name} under a policy: it should be a floating dtype "
        "of at least 16 bits, such as bfloat16. 8-bit floats are for matmul operands only: use a "
        "policy with m=f8 for those."
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, dtype=dtype)(x)

    with pytest.raises(ValueError, match=re.escape(text)):
        Model(dtype_policy="mixed_bfloat16").init(KEY, X)
    with use_policy("bf16"), pytest.raises(ValueError, match=f"can't use param_dtype={name}"):
        nn.Embed(3, 4, param_dtype=dtype).init(KEY, jnp.zeros(2, int))
    assert current_policy() is None


def test_float64_without_x64_is_refused_when_used_and_not_when_made():
    model = Net(dtype_policy="f64")
    with pytest.raises(
        ValueError, match=r"A policy asks for float64, but JAX runs with x64 disabled"
    ):
        model.init(KEY, X)
    with pytest.raises(ValueError, match="A policy asks for float64"):
        nn.apply_policy(flax_nn.Dense(3), "f64")


def test_apply_policy_says_what_it_takes():
    with pytest.raises(TypeError, match=r"takes a linen module here, but got 3 of type int\."):
        nn.apply_policy(3, "bf16")  # type: ignore[type-var]
    bound = flax_nn.Dense(3).bind({"params": {}})
    with pytest.raises(ValueError, match="apply the policy before bind, init or apply"):
        nn.apply_policy(bound, "bf16")


# --- a function-form scan whose body is a boundary with another output dtype ----------------------


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


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


def test_a_function_form_scan_under_one_policy_carries_compute_dtype():
    out = jax.eval_shape(lambda: Stack(dtype_policy="mixed_bfloat16").init_with_output(KEY, X)[0])
    assert out.dtype == jnp.float32


def test_a_function_form_scan_over_a_boundary_with_another_output_dtype_says_what_to_do():
    model = Stack(policy="p=f32,c=f16,o=f16")
    with pytest.raises(TypeError, match="carry") as e:
        jax.eval_shape(lambda: model.init(KEY, X))
    (advice,) = (note for note in e.value.__notes__ if "casts its outputs" in note)
    assert "give it its caller's policy, lift its class (nn.scan(Block) in linen)" in advice


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
