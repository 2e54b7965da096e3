"""A layer that computes in float32 and hands on what the code around it computes in."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen, nnx
from policy import Policy, get_policy, use_policy
from tests.programs import named, operations

X = jnp.ones((2, 4))
BOTH = [("f32", "float32"), ("f32_inside", "bfloat16"), ("float32_inside", "bfloat16")]


def test_the_policy_is_a_value_with_a_text_form() -> None:
    policy = get_policy("f32_inside")
    assert policy == Policy("f32", "f32", "caller") != get_policy("f32")
    assert str(policy) == "params=float32,compute=float32,output=caller"
    assert policy.short == "p=f32,c=f32,o=caller"
    for same in (get_policy(str(policy)), get_policy(policy.short)):
        assert same == policy == pickle.loads(pickle.dumps(policy))
    assert policy.output_dtype == jnp.float32 and policy.follows_caller
    assert policy.replace(compute_dtype="bf16").follows_caller
    assert not policy.with_output_dtype("f32").follows_caller
    with pytest.raises(ValueError, match="Unknown dtype 'caller'"):
        get_policy("p=caller")


class LinenNet(linen.Module):
    note: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = linen.Dense(4, name="inner")(x)
        self.note(y.dtype)
        return linen.Dense(3, name="head")(x + y.astype(x.dtype))


class NnxNet(nnx.Module):
    def __init__(self, note: Any, rngs: nnx.Rngs) -> None:
        self.note, self.inner, self.head = (
            note,
            nnx.Linear(4, 4, rngs=rngs),
            nnx.Linear(4, 3, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.inner(x)
        self.note(y.dtype)
        return self.head(x + y.astype(x.dtype))


def _net(wing: str, note: Any, rules: Any) -> Any:
    """A function of an input."""
    if wing == "nnx":
        return nnx.apply_policy(NnxNet(note, nnx.Rngs(0)), "mixed_bfloat16", rules)
    model = linen.apply_policy(LinenNet(note), "mixed_bfloat16", rules)
    return model.bind(model.init(jax.random.key(0), X))


@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.parametrize(("text", "dtype"), BOTH)
def test_a_layer_multiplies_in_float32_and_hands_on_half(wing: str, text: str, dtype: str) -> None:
    seen: list[Any] = []
    net = _net(wing, seen.append, {"inner": text})
    ops = named(operations(lambda x: net(x), X), "dot_general")
    assert [op.inputs for op in ops] == [("float32",) * 2, ("bfloat16",) * 2]
    assert set(seen) == {jnp.dtype(jnp.float32)} and net(X).dtype == jnp.float32  # as own code is


def test_a_root_returns_its_accumulator() -> None:
    half = X.astype(jnp.bfloat16)
    layer = linen.Dense(3, dtype_policy="f32_inside")
    assert layer.init_with_output(jax.random.key(0), half)[0].dtype == jnp.float32
    assert nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="f32_inside")(half).dtype == jnp.float32


class Step(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.add(*_promoted(x, linen.Dense(4, name="inner")(x))), None


def _promoted(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = max(
        x.dtype, y.dtype, key=lambda dtype: dtype.itemsize
    )  # as arithmetic does without strict promotion
    return x.astype(dtype), y.astype(dtype)


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        step = linen.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return step(name="steps")(x, None)[0]


def test_a_scans_carry_keeps_its_dtype_in_linen() -> None:
    with use_policy("mixed_bfloat16", {"steps/inner": "f32_inside"}):
        assert (
            jax.eval_shape(lambda: Scanned().init_with_output(jax.random.key(0), X)[0]).dtype
            == jnp.float32
        )
    with use_policy("mixed_bfloat16", {"steps/inner": "f32"}):  # own code reads it in its dtype
        jax.eval_shape(lambda: Scanned().init(jax.random.key(0), X))


class NnxStep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.add(*_promoted(x, self.inner(x)))


class NnxScanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.steps = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: NnxStep(rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        step = nnx.scan(lambda step, x: step(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return step(self.steps, x)


def test_a_scans_carry_keeps_its_dtype_in_nnx() -> None:
    model = nnx.apply_policy(
        NnxScanned(nnx.Rngs(0)), "mixed_bfloat16", {"steps/inner": "f32_inside"}
    )
    assert model(X).dtype == jnp.float32
    model = nnx.apply_policy(NnxScanned(nnx.Rngs(0)), "mixed_bfloat16", {"steps/inner": "f32"})
    assert model(X).dtype == jnp.float32  # own code reads the layer's result in its own dtype
