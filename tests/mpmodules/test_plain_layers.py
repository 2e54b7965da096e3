"""Layers of plain Flax in a block of `use_policy` are told, also where other code obeyed the same
policy before; what is done right is silent.
"""

import warnings
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen, nnx
from policy import DtypePolicyWarning, autocast, use_policy, value_and_grad

P, KEY = "mixed_bfloat16", jax.random.key(0)


class Net(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(x.shape[-1], use_bias=False)(x)


class Around(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return jax.checkpoint(lambda x: x)(flax.linen.Dense(4)(x))


class XNet(flax.nnx.Module):
    def __init__(self, size: int):
        self.conv = flax.nnx.Conv(size, size, (1,), rngs=flax.nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return jax.checkpoint(self.conv)(x)


def rows(size: int) -> Any:
    return jnp.ones((2, size))


def summed(p: Any, x: Any) -> Any:
    y: Any = Net().apply(p, x)
    return y.sum()


def params(size: int) -> Any:
    return {"params": {"Dense_0": {"kernel": jnp.ones((size, size))}}}


def messages(run: Callable[[int], Any], size: int, *, times: int = 1) -> list[str]:
    """Returns what is told of blocks, after one in which the policy was obeyed."""
    with warnings.catch_warnings(record=True) as caught, jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("always")
        with use_policy(P):
            linen.Dense(3).init(KEY, rows(3))
        for _ in range(times):
            with use_policy(P):
                run(size)
    return [str(each.message) for each in caught if each.category is DtypePolicyWarning]


def student_in_a_block(n: int) -> Any:
    def step(p: Any, x: Any) -> Any:
        student: Any = linen.Dense(n).apply({"params": p["params"]["Dense_0"]}, x)
        return student - Net().apply(p, x)

    dense = {"kernel": jnp.ones((n, n)), "bias": jnp.ones(n)}
    return jax.jit(step).trace({"params": {"Dense_0": dense}}, rows(n))


PLAIN: dict[str, tuple[Callable[[int], Any], str]] = {
    "linen, jit": (lambda n: jax.jit(Net().apply)(params(n), rows(n)), "flax.linen.Dense"),
    "linen, eager": (lambda n: Net().apply(params(n), rows(n)), "flax.linen.Dense"),
    "linen, init": (lambda n: Net().init(KEY, rows(n)), "flax.linen.Dense"),
    "linen, shapes": (lambda n: jax.eval_shape(Net().apply, params(n), rows(n)), "linen.Dense"),
    "linen, gradients": (
        lambda n: value_and_grad(lambda p: summed(p, rows(n)))(params(n)),
        "flax.linen.Dense",
    ),
    "nnx, jit": (lambda n: flax.nnx.jit(XNet(n))(rows(n)), "flax.nnx.Conv"),
    "nnx, eager": (lambda n: XNet(n)(rows(n)), "flax.nnx.Conv"),
    "nnx, jax.jit of a lambda": (lambda n: jax.jit(lambda x: XNet(n)(x))(rows(n)), "flax.nnx.Conv"),
    "nnx, gradients": (
        lambda n: nnx.grad(lambda m: m(rows(n)).sum())(XNet(n)),
        "flax.nnx.Conv",
    ),
    "a teacher": (student_in_a_block, "flax.linen.Dense"),
    "decorated": (
        use_policy(P)(lambda n: jax.jit(Net().apply)(params(n), rows(n))),
        "flax.linen.Dense",
    ),
}


@pytest.mark.parametrize(("size", "name"), list(enumerate(PLAIN, 4)))
def test_layers_of_flax_are_told_once(size: int, name: str):
    run, layer = PLAIN[name]
    (message,) = messages(run, size, times=2)
    assert f"{layer} ran where" in message and "use_policy(None)" in message


def cached_step() -> Callable[[int], Any]:
    model = linen.apply_policy(Net(), P)
    return jax.jit(lambda n: model.apply(params(4), rows(4)), static_argnums=0)


def student_and_teacher(n: int) -> Any:
    student = linen.apply_policy(Net(), P)

    def step(p: Any, x: Any) -> Any:
        with use_policy(None):
            teacher: Any = Net().apply(p, x)
        return student.apply(p, x) - teacher

    return jax.jit(step).trace(params(n), rows(n))


RIGHT: dict[str, Callable[[int], Any]] = {
    "a cached step": cached_step(),
    "a function without a model": lambda n: jax.jit(lambda x: (x > 0).mean())(rows(n)),
    "a teacher in use_policy(None)": student_and_teacher,
    "only builds": lambda n: (linen.Dense(n), nnx.Linear(n, n, rngs=flax.nnx.Rngs(0))),
    "only builds Flax's, for a port": lambda n: nnx.apply_policy(XNet(n), P)(rows(n)),
    "autocast": lambda n: autocast(Net().apply)(params(n), rows(n)),
    "Flax's layer in a module of ours": lambda n: jax.jit(Around().init_with_output)(KEY, rows(n)),
    "a port": lambda n: jax.jit(linen.apply_policy(Net(), P).apply)(params(n), rows(n)),
    "autocast in a jit": lambda n: jax.jit(autocast(Net().apply))(params(n), rows(n)),
    "no policy inside": use_policy(None)(lambda n: jax.jit(Net().apply)(params(n), rows(n))),
    "a mask": lambda n: jax.jit(flax.linen.make_causal_mask)(rows(n)),
    "ours": lambda n: jax.jit(linen.Dense(n).init_with_output)(KEY, rows(n)),
    "a generator": use_policy(P)(lambda n: list(linen.Dense(n).init(KEY, rows(n)))),
}


@pytest.mark.parametrize(("size", "name"), list(enumerate(RIGHT, 20)))
def test_nothing_is_told_of_what_is_done_right(size: int, name: str):
    assert not messages(RIGHT[name], size, times=2)


def test_programs_of_code_before_the_block_are_not_told():
    teacher = jax.jit(Net().apply)
    jax.jit(lambda x: x + 1)
    teacher.trace(params(40), rows(40))
    assert not messages(lambda n: jax.jit(lambda x: x * x)(rows(n)), 40)
