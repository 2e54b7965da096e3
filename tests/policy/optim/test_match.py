"""`match_updates`: casts where it is told to, and is not there elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy.optim import match_updates
from policy.testing import assert_same_program

NAMES = (  # those that optax's pull request 1687 lists
    *("adam", "amsgrad", "adamax", "rms", "stddev", "belief", "yogi", "radam", "lion", "adan"),
    "novograd",
)
PAIRS = [
    (jnp.float32, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32),
    (jnp.float16, jnp.float16),
    (jnp.float32, jnp.float32),
]


@pytest.fixture(autouse=True)
def optaxs_own_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def tree(dtype):
    return {"b": jnp.ones(2, dtype), "w": jnp.ones((2, 3), dtype)}


def dtypes_of(transform, params, gradients):
    updates, _ = jax.eval_shape(
        lambda p, g: transform.update(g, transform.init(p), p), params, gradients
    )
    return {leaf.dtype.name for leaf in jax.tree.leaves(updates)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("params", "gradients"), PAIRS)
def test_updates_have_the_dtype_that_was_asked_for(name, params, gradients):
    tx = getattr(optax, f"scale_by_{name}")()
    if name == "novograd" and params != gradients and params == jnp.bfloat16:
        pytest.skip("optax 0.2.8's own update raises: its cond has a bfloat16 and a float32 branch")
    names = {
        "grads": jnp.dtype(gradients).name,
        "params": jnp.dtype(params).name,
        "bfloat16": "bfloat16",
    }
    for to, expected in names.items():
        assert dtypes_of(match_updates(tx, to), tree(params), tree(gradients)) == {expected}


@pytest.mark.parametrize("name", NAMES)
def test_where_dtypes_agree_the_program_is_the_same(name):
    tx = getattr(optax, f"scale_by_{name}")()
    for dtype in (jnp.float32, jnp.float64):
        with jax.enable_x64(dtype == jnp.float64):
            params = tree(dtype)
            state = tx.init(params)
            for to in ("grads", "params", dtype):
                for strict in (False, True):
                    assert_same_program(
                        match_updates(tx, to, strict=strict).update,
                        tx.update,
                        (params, state, params),
                    )


def test_the_state_is_the_transforms_own_and_extra_arguments_reach_it():
    adam = optax.adam(1e-3)
    params, gradients = tree(jnp.float32), tree(jnp.bfloat16)
    matched = match_updates(adam, "grads")
    _, state = adam.update(gradients, adam.init(params), params)
    _, ours = matched.update(gradients, matched.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, state, ours)
    seen: list[Any] = []

    def update(
        updates: Any, state: Any, params: Any = None, *, value: Any, **extra_args: Any
    ) -> Any:
        seen.append(value)
        return updates, state

    extended: Any = optax.GradientTransformationExtraArgs
    needs = extended(optax.identity().init, update)
    match_updates(needs, "grads").update(gradients, needs.init(params), params, value=3)
    assert seen == [3]


def test_strict_refuses_a_lossy_cast_by_name():
    params, gradients = tree(jnp.float32), tree(jnp.bfloat16)
    tx = match_updates(optax.scale_by_adam(), "grads", strict=True)
    state = tx.init(params)
    text = (
        r"would lose digits or range: b from float32 to bfloat16, "
        r"w from float32 to bfloat16\. Ask for a wider"
    )
    with pytest.raises(TypeError, match=text):
        tx.update(gradients, state, params)
    for source, target, lossy in (
        (jnp.bfloat16, jnp.float32, False),
        (jnp.float16, jnp.float32, False),
        (jnp.bfloat16, jnp.float16, True),
        (jnp.float16, jnp.bfloat16, True),
    ):
        tx = match_updates(optax.identity(), target, strict=True)
        if lossy:
            with pytest.raises(TypeError, match="would lose digits or range"):
                tx.update(tree(source), tx.init(params), params)
        else:
            assert dtypes_of(tx, params, tree(source)) == {jnp.dtype(target).name}
