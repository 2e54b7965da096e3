"""A call of one API runs no code of the other's, also where classes are asked about."""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mpmodules
from mpmodules import linen, nnx

ROOT = pathlib.Path(mpmodules.__path__[0])


def files_of_a_call(call: Callable[[], Any]) -> set[str]:
    """Returns the packages of mpmodules that a call runs code of."""
    seen: set[str] = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    files = (pathlib.Path(name) for name in seen)
    return {file.relative_to(ROOT).parts[0] for file in files if file.is_relative_to(ROOT)}


def first_call_of_linen() -> Any:
    class Own(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> Any:
            x = linen.Sequential([linen.Dense(4), linen.relu])(x)
            return x @ self.param("w", linen.initializers.ones, (4, 4))

    x, model = jnp.ones((2, 4)), Own(dtype_policy="mixed_bfloat16")
    return model.apply(model.init(jax.random.key(0), x), x)


def first_call_of_nnx() -> Any:
    class Own(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.inner = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu)
            self.w = nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x: jax.Array) -> Any:
            return self.inner(x) @ self.w[...]

    return Own(nnx.Rngs(0), dtype_policy="mixed_bfloat16")(jnp.ones((2, 4)))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("call", "api", "other"),
    [(first_call_of_linen, "linen", "nnx"), (first_call_of_nnx, "nnx", "linen")],
)
def test_a_first_call_runs_nothing_of_the_other_api(call, api, other):
    found = files_of_a_call(call)
    assert api in found and other not in found
