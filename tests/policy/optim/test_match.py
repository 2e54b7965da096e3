"""`match_updates`: casts where it is told to, and is not there elsewhere."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy.optim import match_updates
from policy.testing import assert_same_program
from tests.policy.optim.steps import dtypes

NAMES = (  # those that optax's pull request 1687 lists
    *("adam", "amsgrad", "adamax", "rms", "stddev", "belief", "yogi", "radam", "lion", "adan"),
    "novograd",
)
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
PAIRS = [(F32, BF16), (BF16, F32), (F16, F16), (F32, F32)]


@pytest.fixture(autouse=True)
def optaxs_own_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def tree(dtype):
    return {"b": jnp.ones(2, dtype), "w": jnp.ones((2, 3), dtype)}


def dtypes_of(transform, params, gradients):
    step = lambda p, g: transform.update(g, transform.init(p), p)[0]  # noqa: E731
    return set(dtypes(jax.eval_shape(step, params, gradients)))


@pytest.mark.cases(fast=7, slow=8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("params", "gradients"), PAIRS)
def test_updates_have_the_dtype_that_was_asked_for(name, params, gradients):
    tx = getattr(optax, f"scale_by_{name}")()
    if name == "novograd" and params != gradients and params == jnp.bfloat16:
        pytest.skip("optax 0.2.8's own update raises: its cond has a bfloat16 and a float32 branch")
    of_grads, of_params = (jnp.dtype(dtype).name for dtype in (gradients, params))
    for to, expected in (("grads", of_grads), ("params", of_params), ("bfloat16", "bfloat16")):
        assert dtypes_of(match_updates(tx, to), tree(params), tree(gradients)) == {expected}


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize("name", NAMES)
def test_where_dtypes_agree_the_program_is_the_same(name):
    tx = getattr(optax, f"scale_by_{name}")()
    for dtype in (jnp.float32, jnp.float64):
        with jax.enable_x64(dtype == jnp.float64):
            params = tree(dtype)
            args = params, tx.init(params), params
            for to, strict in itertools.product(("grads", "params", dtype), (False, True)):
                ours = match_updates(tx, to, strict=strict)
                assert_same_program(ours.update, tx.update, args)


@pytest.mark.slow
def test_the_state_is_the_transforms_own_and_extra_arguments_reach_it():
    adam = optax.adam(1e-3)
    params, gradients = tree(jnp.float32), tree(jnp.bfloat16)
    matched = match_updates(adam, "grads")
    _, state = adam.update(gradients, adam.init(params), params)
    _, ours = matched.update(gradients, matched.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, state, ours)
    seen: list[Any] = []

    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        seen.append(value)
        return updates, state

    both: Any = optax.identity().init, update
    needs = optax.GradientTransformationExtraArgs(*both)
    match_updates(needs, "grads").update(gradients, needs.init(params), params, value=3)
    assert seen == [3]


@pytest.mark.slow
def test_strict_rejects_a_lossy_cast_by_name():
    params, gradients = tree(jnp.float32), tree(jnp.bfloat16)
    tx = match_updates(optax.scale_by_adam(), "grads", strict=True)
    state = tx.init(params)
    text = r"range: b from float32 to bfloat16, w from float32 to bfloat16\. Ask for a wider"
    with pytest.raises(TypeError, match=text):
        tx.update(gradients, state, params)
    for source, other in ((BF16, F16), (F16, BF16)):
        narrow, wide = (match_updates(optax.identity(), to, strict=True) for to in (other, F32))
        with pytest.raises(TypeError, match="would lose digits or range"):
            narrow.update(tree(source), narrow.init(params), params)
        assert dtypes_of(wide, params, tree(source)) == {"float32"}
