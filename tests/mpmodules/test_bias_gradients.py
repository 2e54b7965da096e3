"""The gradients of biases, and of the scales and biases of norms: summed in float32, returned in
param_dtype."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from mpmodules.functions import functional
from policy import get_policy, use_policy
from tests.mpmodules.table.cases import CASES as TABLE
from tests.mpmodules.table.cases import Case, layer
from tests.mpmodules.table.running import OURS, THEIRS, program
from tests.programs import frozen_biases, named, operations

KEY = jax.random.key(0)
EACH_API = pytest.mark.parametrize("api", OURS)

ROWS, GRID = np.ones((3, 5, 4), np.float32), np.ones((2, 6, 6, 4), np.float32)
MATMULS = "Dense DenseGeneral Linear LinearGeneral Einsum Conv ConvLocal ConvTranspose LoRALinear"
# Of the table those with a bias, and inputs of other batches.
CASES = [(w, c) for w, c in TABLE if c.layer in MATMULS.split() and c.setting != "without bias"]
CASES += [
    ("linen", layer("Einsum", "apart", (4, 5), "a b c, c d -> d a b", inputs=(ROWS,))),
    ("nnx", layer("Einsum", "apart", "a b c, c d -> d a b", (4, 5), (5,), inputs=(ROWS,))),
    ("linen", layer("Conv", "of one image", 6, (3, 3), inputs=(GRID[0],))),
    ("nnx", layer("Conv", "of one image", 4, 6, (3, 3), inputs=(GRID[0],))),
    ("linen", layer("Conv", "of batches", 6, (3, 3), inputs=(GRID[None],))),
]
EACH_LAYER = pytest.mark.parametrize(("api", "case"), CASES, ids=[f"{w}-{c}" for w, c in CASES])


def pure(api: str, case: Case, layers: Any, **options: Any) -> tuple[Callable, Any]:
    """Returns a layer as a function of its parameters and input, and its parameters."""
    run = program(api, case, layers[api], **options)
    params, rest = jax.jit(run.init)(KEY)
    return lambda params, x: run.apply(params, rest, (x,))[0], params


def gradient(run: Callable, params: Any, x: jax.Array, weights: jax.Array) -> dict[str, Any]:
    """Returns the gradients of a weighted sum of the outputs, by the parameters' last names."""
    total = lambda params: jnp.sum(run(params, x).astype(jnp.float32) * weights)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(jax.grad(total)(params))
    return {[key.key for key in path if hasattr(key, "key")][-1]: leaf for path, leaf in leaves}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("text", ("mixed_bfloat16", "mixed_float16", "bfloat16"))
@EACH_LAYER
def test_a_bias_gradient_is_summed_in_float32(api, case, text):
    policy, x = get_policy(text), jax.random.normal(KEY, case.inputs[0].shape)
    exact, params = pure(api, case, THEIRS)
    weights = 1 + jax.random.uniform(KEY, exact(params, x).shape)
    # the cotangent that arrives is half
    rounded = weights.astype(policy.compute_dtype).astype(jnp.float32)
    expected = gradient(exact, params, x, rounded)["bias"]
    with use_policy(policy):
        run, params = pure(api, case, OURS)
        found = gradient(run, params, x, weights)["bias"]
        ops = operations(lambda p: gradient(run, p, x, weights), params)
    assert found.dtype == policy.param_dtype
    eps = float(jnp.finfo(policy.param_dtype).eps)
    tolerance = 2 * eps if eps > 1e-6 else 1e-5
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=tolerance)
    assert {op.inputs[0] for op in named(ops, "reduce_sum")} == {"float32"}


DENSE = {"linen": layer("Dense", "", 6), "nnx": layer("Linear", "", 4, 6)}
NARROW = {"linen": layer("Dense", "", 1), "nnx": layer("Linear", "", 4, 1)}


@pytest.mark.slow
@EACH_API
def test_a_bias_gradient_beyond_float16_is_finite(api):
    x, weights = jnp.zeros((70000, 4)), jnp.ones((70000, 1))
    run, params = pure(api, NARROW[api], OURS, dtype_policy="p=f32,c=f16,o=f16")
    assert float(gradient(run, params, x, weights)["bias"][0]) == 70000


@pytest.mark.cases(fast=1, slow=4)
@EACH_LAYER
def test_but_for_biases_an_explicit_half_dtype_gives_upstreams_program(api, case):
    half = {"dtype": jnp.bfloat16}
    half |= {"lora_dtype": jnp.bfloat16} if case.layer == "LoRALinear" else {}

    def text(layers: Any) -> str:
        run, params = pure(api, case, layers, **half)
        loss = lambda p, x: jnp.square(run(frozen_biases(p), x).astype(jnp.float32)).sum()  # noqa: E731
        both = lambda p, x: (run(p, x), jax.grad(loss, (0, 1))(p, x))  # noqa: E731
        return jax.jit(both).lower(params, jnp.asarray(case.inputs[0], jnp.bfloat16)).as_text()

    assert text(OURS) == text(THEIRS)


@pytest.mark.slow
def test_backward_keeps_nothing_for_a_bias():
    x = jnp.zeros((8, 4), jnp.bfloat16)
    for layers in (OURS, THEIRS):
        run, params = pure("linen", DENSE["linen"], layers, dtype=jnp.bfloat16)
        _, backward = jax.vjp(run, params, x)
        kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.size > 1]
        assert sorted((leaf.dtype.name, leaf.shape) for leaf in kept) == [
            ("bfloat16", (4, 6)),
            ("bfloat16", (8, 4)),
        ]


@pytest.mark.slow
def test_forward_mode_and_vmap_agree_with_upstream():
    x = jax.random.normal(KEY, (3, 4)).astype(jnp.bfloat16)
    found = []
    for layers in (OURS, THEIRS):
        run, params = pure("linen", DENSE["linen"], layers, dtype=jnp.bfloat16)
        rows = lambda p, run=run: jax.vmap(lambda x: run(p, x))(x)  # noqa: E731
        found.append(jax.jvp(rows, (params,), (params,)))
    jax.tree.map(np.testing.assert_array_equal, *found)


RNG = np.random.default_rng(0)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("scanned", (False, True))
@pytest.mark.parametrize("half", ("bfloat16", "float16"))
def test_second_derivatives_reach_a_bias_also_through_a_scan(half, scanned):
    x, bias = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((4, 3), (3,)))

    def added(x, bias):
        return functional.add_bias(x.astype(half), bias.astype(half), (1, 3), stored=bias)

    def twice(add, x, bias):
        step = lambda x, _: (jnp.tanh(add(x, bias).astype(jnp.float32)), None)  # noqa: E731
        if scanned:
            return jax.lax.scan(step, x, length=2)[0]
        return step(step(x, None)[0], None)[0]

    def penalty(add):
        slope = jax.grad(lambda x, bias: jnp.sum(twice(add, x, bias)))
        return jax.grad(lambda bias: jnp.sum(slope(x, bias) ** 2))(bias)

    found, truth = penalty(added), penalty(lambda x, bias: x + bias[None])
    np.testing.assert_allclose(found, truth, atol=2e-2 * float(jnp.max(jnp.abs(truth))))


class LinenRow(linen.Module):
    """Parameters that meet one row of a batch in all ways."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        ones = linen.initializers.ones
        token, shift, scale = (self.param(name, ones, (1, 4)) for name in NAMES)
        return row(linen.Dense(4, bias_init=ones, kernel_init=ones)(x), token, shift, scale)


class NnxRow(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        ones = nnx.initializers.ones
        self.dense = nnx.Linear(1, 4, bias_init=ones, kernel_init=ones, rngs=rngs)
        self.token, self.shift, self.scale = (nnx.Param(jnp.ones((1, 4))) for _ in NAMES)

    def __call__(self, x: jax.Array) -> jax.Array:
        return row(self.dense(x), *(one[...] for one in (self.token, self.shift, self.scale)))


NAMES = "token", "shift", "scale"


def row(h: Any, token: Any, shift: Any, scale: Any) -> Any:
    h = jnp.concatenate([token, (h + shift) * scale])
    return jnp.where(jnp.arange(2)[:, None] > 5, token, h)


@pytest.mark.parametrize("transform", (jax.vmap, lambda f: jax.jit(jax.vmap(jax.jit(f)))))
@EACH_API
def test_a_mapped_model_sums_gradients_in_float32(api, transform):
    """Each is a number of rows that bfloat16 can't count to."""
    rows = 4097
    x = jnp.zeros((rows, 1, 1))
    with use_policy("mixed_bfloat16"):
        if api == "linen":
            params = LinenRow().init(KEY, x[0])["params"]
            apply = lambda params, x: LinenRow().apply({"params": params}, x)  # noqa: E731
        else:
            graph, params = nnx.split(NnxRow(nnx.Rngs(0)))
            apply = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
        loss = lambda p: jnp.sum(transform(lambda x: apply(p, x))(x))  # noqa: E731
        grads = jax.grad(loss)(params)
        found = {jax.tree_util.keystr(path): g for path, g in jax.tree.leaves_with_path(grads)}
    for path, gradient in found.items():
        wanted = 0 if "kernel" in path else 2 * rows if "scale" in path else rows
        np.testing.assert_array_equal(gradient, np.full_like(gradient, wanted), path)
