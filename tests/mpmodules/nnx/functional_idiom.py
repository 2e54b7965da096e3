"""Steps of the functional idiom of nnx under autocast; exits with an error where one differs from
`jax.jit`'s.

python -m tests.mpmodules.nnx.functional_idiom [MODULE TO IMPORT FIRST]
"""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from policy import autocast

X = jnp.sin(jnp.arange(4 * 8, dtype=jnp.float32)).reshape(4, 8)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.drop, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.drop(jax.nn.relu(self.norm(self.inner(x)))))


graphdef, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)


def with_state(copy: bool):
    def loss(params, rest, x):
        model = nnx.merge(graphdef, params, rest, copy=copy)
        value = jnp.mean(jnp.square(model(x)))
        return value, nnx.state(model, nnx.Not(nnx.Param))

    return loss


def numbers(array) -> np.ndarray:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def near(found, true) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(true)
    floats = []
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating):
            floats.append(np.stack([np.ravel(a), np.ravel(b)]))
        else:
            np.testing.assert_array_equal(numbers(a), numbers(b))  # how often a key was drawn from
    ours, theirs = np.concatenate(floats, axis=1)
    assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs)


def trained(step):
    """Four steps in a scan, which hand on the state."""

    def body(carry, x):
        params, rest = carry
        grads, rest = step(params, rest, x)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest), None

    return lambda params, rest, x: jax.lax.scan(body, (params, rest), jnp.stack([x] * 4))[0]


def check(copy: bool) -> None:
    loss = with_state(copy)
    before = list(map(numbers, jax.tree.leaves(rest)))
    half = autocast(loss, "mixed_bfloat16")
    for of in (lambda fn: fn, lambda fn: jax.grad(fn, has_aux=True)):
        true = of(jax.jit(loss))(params, rest, X)
        near(of(half)(params, rest, X), true)
        near(jax.jit(of(half))(params, rest, X), true)
    step, plain = jax.grad(half, has_aux=True), jax.grad(jax.jit(loss), has_aux=True)
    near(trained(step)(params, rest, X), trained(plain)(params, rest, X))
    for a, b in zip(jax.tree.leaves(rest), before, strict=True):
        np.testing.assert_array_equal(numbers(a), b)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for copy in (True, False):
        check(copy)
    assert ("mpmodules" in sys.modules) == bool(sys.argv[1:])
    print("done")
