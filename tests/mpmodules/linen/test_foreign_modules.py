"""Parameters of modules inside of a port that are no layers."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_nn
from tests.mpmodules.wings import dtypes
from tests.programs import apply, named, operations

apply_policy = functools.partial(
    our_nn.apply_policy, own_code="keep"
)  # what autocast does is no matter here
KEY = jax.random.key(0)
X = jnp.ones((2, 4))
MIXED = "mixed_bfloat16"
HALF = "p=f16,c=bf16,o=f32"


def initialised(model: Any) -> dict[str, str]:
    """Dtypes of the variables that `model.init` makes, by path, collections included."""
    return dtypes(jax.eval_shape(model.init, KEY, X))


def matmuls(model: Any, *args: Any, gradient: bool = False) -> set[str]:
    """Dtypes of the operands of the model's matmuls, and on request of those of its gradient."""
    args = args or (X,)
    variables = jax.eval_shape(model.init, KEY, *args)

    def loss(variables, *args):
        leaves = jax.tree.leaves(apply(model, variables, *args))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)

    ops = operations(jax.grad(loss, allow_int=True) if gradient else loss, variables, *args)
    dots = named(ops, "dot_general")
    assert len(dots) >= (2 if gradient else 1)
    return {dtype for op in dots for dtype in op.inputs}


# --- parameters -----------------------------------------------------------------------------------


class Kernel(nn.Module):
    """A matmul with parameters of its own, and with some that no policy is for."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 4))
        self.param("steps", lambda key: jnp.zeros((), jnp.int32))
        self.param("phase", lambda key: jnp.ones((2,), jnp.complex64))
        self.variable("batch_stats", "mean", jnp.zeros, (4,))
        return x @ kernel.astype(x.dtype)


class InSetup(nn.Module):
    def setup(self):
        self.kernel = self.param("kernel", nn.initializers.orthogonal(), (4, 4))
        self.bias = self.variable("params", "bias", lambda: jnp.zeros((4,)))

    def __call__(self, x):
        return x @ self.kernel.astype(x.dtype) + self.bias.value.astype(x.dtype)[None]


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones_init(), ("in", "out"))
        kernel: Any = self.param(name="kernel", init_fn=init, shape=(4, 4))  # type: ignore[call-overload]
        return x @ kernel.astype(x.dtype)


class Step(nn.Module):
    @nn.compact
    def __call__(self, carry, _):
        return Kernel()(carry), None


def lifted(lift: str) -> Any:
    shared: dict[str, Any] = {
        "variable_axes": {"params": 0, "batch_stats": 0},
        "split_rngs": {"params": True},
    }
    if lift == "scan":
        return nn.scan(Step, length=3, **shared)
    return {"remat": nn.remat, "jit": nn.jit, "vmap": lambda cls: nn.vmap(cls, **shared)}[lift](
        Kernel
    )


class Lifts(nn.Module):
    lift: str

    @nn.compact
    def __call__(self, x):
        block = lifted(self.lift)()
        return block(x, None)[0] if self.lift == "scan" else block(x)


class Holds(nn.Module):
    part: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(self.part(x))


LIFTS = ("scan", "remat", "vmap", "jit")
MODELS = {"compact": Kernel(), "setup": InSetup(), "boxed": Boxed(), "inside": Holds(InSetup())}
MODELS |= {lift: Lifts(lift) for lift in LIFTS} | {
    f"root {lift}": lifted(lift)() for lift in LIFTS if lift != "scan"
}


def expected(name: str, dtype: str) -> str:
    others = {"steps": "int32", "phase": "complex64"}
    return next(
        (kind for part, kind in others.items() if part in name),
        "float32" if "stats" in name else dtype,
    )


@pytest.mark.parametrize("name", MODELS)
def test_parameters_that_a_module_creates_itself_come_in_param_dtype(name):
    model = MODELS[name]
    plain = initialised(model)
    assert "float32" in plain.values()
    for policy, dtype in ((HALF, "float16"), ("bfloat16", "bfloat16"), (MIXED, "float32")):
        port = apply_policy(model, policy)
        assert initialised(port) == {name: expected(name, dtype) for name in plain}
    port = apply_policy(model, "bfloat16")
    assert matmuls(port) == matmuls(port, gradient=True) == {"bfloat16"}


@pytest.mark.parametrize("name", ["compact", "setup", "boxed", "scan", "vmap"])
def test_their_values_are_those_of_the_initialisers_in_float32_rounded(name):
    plain, half, mixed = (
        model.init(KEY, X)
        for model in (
            MODELS[name],
            apply_policy(MODELS[name], HALF),
            apply_policy(MODELS[name], MIXED),
        )
    )
    assert jax.tree.structure(plain) == jax.tree.structure(half)
    for written, rounded, same in zip(*map(jax.tree.leaves, (plain, half, mixed)), strict=True):
        np.testing.assert_array_equal(
            np.asarray(rounded), np.asarray(written.astype(rounded.dtype))
        )
        np.testing.assert_array_equal(same, written)


def test_parameters_that_apply_is_given_stay_as_they_are():
    variables = Kernel().init(KEY, X)
    model = apply_policy(Kernel(), "bf16")
    _, updated = model.apply(variables, X, mutable=["params"])
    assert dtypes(updated["params"])["kernel"] == "float32"
    given: Any = jax.tree.map(lambda leaf: leaf, updated)
    np.testing.assert_array_equal(given["params"]["kernel"], variables["params"]["kernel"])
    _, made = jax.eval_shape(lambda: model.apply({}, X, mutable=True, rngs={"params": KEY}))
    assert dtypes(made["params"])["kernel"] == "bfloat16"
