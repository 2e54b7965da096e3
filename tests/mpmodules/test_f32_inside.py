"""A layer that computes in float32 and hands on what the code around it computes in."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen, nnx
from policy import Policy, get_policy, use_policy
from tests.mpmodules.wings import BOTH, MIXED, Text, dense

X = jnp.ones((2, 4))


def test_the_policy_is_a_value_with_a_text_form():
    policy = get_policy("f32_inside")
    assert policy == Policy("f32", "f32", "caller") != get_policy("f32")
    assert str(policy) == "params=float32,compute=float32,output=caller"
    assert policy.short == "p=f32,c=f32,o=caller"
    for same in (get_policy(str(policy)), get_policy(policy.short)):
        assert same == policy == pickle.loads(pickle.dumps(policy))
    assert policy.output_dtype == jnp.float32 and policy.follows_caller
    assert policy.replace(compute_dtype="bf16").follows_caller
    assert not policy.with_output_dtype("f32").follows_caller
    with pytest.raises(ValueError, match=r"'caller'.*should be a floating dtype"):
        get_policy("p=caller")


@BOTH
@pytest.mark.parametrize("text", ["f32", "f32_inside", "float32_inside"])
def test_a_layer_multiplies_in_float32_and_hands_on_half(wing, text):
    seen: list[str] = []

    def call(self: Any, x: jax.Array) -> jax.Array:
        y = self.inner(x)
        seen.append(y.dtype.name)
        return self.head(x + y.astype(x.dtype))

    net = Text(call, inner=dense(4, 4), head=dense(4, 3))
    model = wing.port(net, MIXED, {"inner": text}, X)
    seen.clear()
    assert model.dots(X) == [("float32",) * 2, ("bfloat16",) * 2]
    assert set(seen) == {"float32"} and model(X).dtype == jnp.float32  # as own code is


def test_a_root_returns_its_accumulator():
    half = X.astype(jnp.bfloat16)
    layer = linen.Dense(3, dtype_policy="f32_inside")
    assert layer.init_with_output(jax.random.key(0), half)[0].dtype == jnp.float32
    assert nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="f32_inside")(half).dtype == jnp.float32


class Step(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = linen.Dense(4, name="inner")(x)
        return x.astype(jnp.float32) + y.astype(jnp.float32), None


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        step = linen.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return step(name="steps")(x, None)[0]


class NnxStep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) + self.inner(x).astype(jnp.float32)


class NnxScanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.steps = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: NnxStep(rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        step = nnx.scan(lambda step, x: step(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return step(self.steps, x)


@pytest.mark.parametrize("text", ["f32_inside", "f32"])  # own code reads either in its own dtype
def test_a_scans_carry_keeps_its_dtype(text):
    rules = {"steps/inner": text}
    with use_policy(MIXED, rules):
        out, _ = jax.eval_shape(lambda: Scanned().init_with_output(jax.random.key(0), X))
    model = nnx.apply_policy(NnxScanned(nnx.Rngs(0)), MIXED, rules)
    assert out.dtype == model(X).dtype == jnp.float32


def test_a_scan_whose_body_changes_its_carrys_dtype_is_explained_where_code_is_kept():
    class Block(NnxStep):
        own_code = "keep"

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(x)

    class Model(nnx.Module):
        own_code = "keep"

        def __init__(self, rngs: nnx.Rngs) -> None:
            self.block = Block(rngs, dtype_policy=MIXED)  # pyright: ignore[reportCallIssue]

        def __call__(self, x: jax.Array) -> jax.Array:
            body = lambda block, x, _: (block(x), None)  # noqa: E731
            scan = nnx.scan(body, in_axes=(None, nnx.Carry, 0))
            return scan(self.block, x, jnp.arange(2))[0]

    model = Model(nnx.Rngs(0), dtype_policy="bfloat16")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="carry") as caught:
        model(X)
    (note,) = (note for note in caught.value.__notes__ if "casts its outputs" in note)
    assert "cast the carry to its output_dtype" in note
