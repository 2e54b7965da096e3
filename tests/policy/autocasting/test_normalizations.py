"""Normalizations are found by what they compute, and nothing else is taken for one."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from policy.autocasting.regions import NOWHERE, Regions, regions_of
from policy.autocasting.transform import autocast
from policy.programs.jaxprs import opened
from tests.policy.autocasting.models import BF16, FULLS, HALVES, error, normal, reads

D = 8
SCALE, BIAS = jnp.linspace(0.5, 1.5, D), jnp.linspace(-1.0, 1.0, D)
P = {"scale": SCALE, "bias": BIAS, "w": normal(D, D, scale=D**-0.5), "gamma": jnp.asarray([1.5])}
STORED = {"mean": 0.1 * BIAS, "var": SCALE}
X = normal(4, 6, D)


def mean(x: Any, axis: Any = -1) -> Any:
    return jnp.mean(x, axis, keepdims=True)


def along(x: Any, like: Any) -> Any:
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)


def affine(p: Any, y: Any) -> Any:
    return y * along(p["scale"], y) + along(p["bias"], y)


def two_passes(x: Any) -> Any:
    centered = x - mean(x)
    return centered * lax.rsqrt(mean(jnp.square(centered)) + 1e-6)


def fast(x: Any) -> Any:
    variance = jnp.maximum(0.0, mean(jnp.square(x)) - jnp.square(mean(x)))
    return (x - mean(x)) * lax.rsqrt(variance + 1e-6)


def group_norm(x: Any) -> Any:
    grouped = x.reshape(4, 6, 2, D // 2)
    deviation = jnp.sqrt(jnp.var(grouped, (1, 3), keepdims=True) + 1e-6)
    return ((grouped - mean(grouped, (1, 3))) / deviation).reshape(x.shape)


@jax.custom_jvp
def variance_with_a_rule(x: Any) -> Any:
    return jnp.maximum(mean(x * x) - mean(x) ** 2, 0.0)


variance_with_a_rule.defjvp(
    lambda x, t: (variance_with_a_rule(*x), 2 * mean((x[0] - mean(x[0])) * t[0]))
)


@jax.custom_vjp
def with_a_rule(x: Any) -> Any:
    return two_passes(x)


def _backward(saved: Any, ct: Any) -> Any:
    y, deviation = saved
    return ((ct - mean(ct) - y * mean(ct * y)) / deviation,)


with_a_rule.defvjp(
    lambda x: (two_passes(x), (two_passes(x), jnp.std(x, -1, keepdims=True))), _backward
)


def in_chunks(x: Any) -> Any:
    """Adds up the squares of one column after the other."""
    add = lambda total, column: (total + jnp.sum(column * column, -1), None)  # noqa: E731
    total, _ = lax.scan(add, jnp.zeros(4), x.swapaxes(0, 1))
    return x * lax.rsqrt(total[:, None, None] / (6 * D) + 1e-6)


def over_devices(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    def local(x: Any) -> Any:
        first, second = lax.pmean(jnp.stack([jnp.mean(x, (0, 1)), jnp.mean(x * x, (0, 1))]), "i")
        return (x - along(first, x)) * lax.rsqrt(along(second - first * first, x) + 1e-6)

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def masked(x: Any) -> Any:
    mask = jnp.arange(6)[None, :, None] < 5
    first, var = (f(x, (0, 1), where=mask, keepdims=True) for f in (jnp.mean, jnp.var))
    return (x - first) * lax.rsqrt(var + 1e-6)


NORMS: dict[str, Any] = {
    "two passes": lambda p, x: affine(p, two_passes(x)),
    "one pass": lambda p, x: affine(p, fast(x)),
    "products for squares": lambda p, x: affine(
        p, (x - mean(x)) * lax.rsqrt(mean(x * x) - mean(x) ** 2 + 1e-6)
    ),
    "a scaled root": lambda p, x: (
        (x - mean(x)) * (lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * along(p["scale"], x))
    ),
    "a deviation": lambda p, x: affine(p, (x - mean(x)) / (x.std(-1, keepdims=True) + 1e-5)),
    "the inverse of a deviation": lambda p, x: (
        (x - mean(x)) * (1.0 / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5))
    ),
    "root mean square": lambda p, x: x * lax.rsqrt(mean(x * x) + 1e-6) * (1 + along(p["scale"], x)),
    "a norm that is scaled": lambda p, x: (
        x / jnp.linalg.norm(x, axis=-1, keepdims=True) * D**0.5 * along(p["scale"], x)
    ),
    "groups": lambda p, x: affine(p, group_norm(x)),
    "batches": lambda p, x: affine(
        p, (x - mean(x, (0, 1))) * lax.rsqrt(x.var((0, 1), keepdims=True) + 1e-6)
    ),
    "a mask": lambda p, x: affine(p, masked(x)),
    "a checkpoint": lambda p, x: jax.checkpoint(lambda p, x: affine(p, two_passes(x)))(p, x),
    "a rule for the variance": lambda p, x: (
        (x - mean(x)) * lax.rsqrt(variance_with_a_rule(x) + 1e-6)
    ),
    "a rule for all of it": lambda p, x: with_a_rule(x),
    "a scan over rows": lambda p, x: lax.scan(
        lambda _, row: (None, affine(p, two_passes(row))), None, x
    )[1],
    "sums in a scan": lambda p, x: in_chunks(x),
    "devices": lambda p, x: over_devices(x),
    "a vmap": lambda p, x: jax.vmap(jax.vmap(lambda row: affine(p, two_passes(row))))(x),
    "flax LayerNorm": lambda p, x: nn.LayerNorm().apply({"params": p}, x),
    "flax GroupNorm": lambda p, x: nn.GroupNorm(2).apply({"params": p}, x),
    "flax BatchNorm": lambda p, x: nn.BatchNorm(use_running_average=False).apply(
        {"params": p, "batch_stats": STORED}, x, mutable="batch_stats"
    )[0],
}
RUNNING: dict[str, Any] = {
    "flax BatchNorm": lambda p, s, x: nn.BatchNorm(use_running_average=True).apply(
        {"params": p, "batch_stats": s}, x
    ),
    "by hand": lambda p, s, x: affine(
        p, (x - along(s["mean"], x)) / jnp.sqrt(along(s["var"], x) + 1e-5)
    ),
    "folded": lambda p, s, x: folded(p, s, x),
}


def folded(p: Any, s: Any, x: Any) -> Any:
    scale = p["scale"] * lax.rsqrt(s["var"] + 1e-5)
    return x * along(scale, x) + along(p["bias"] - s["mean"] * scale, x)


def responded(p: Any, x: Any) -> Any:
    """ConvNeXt's global response: a quotient of roots multiplies x, none divides it."""
    root = jnp.sqrt(jnp.sum(x * x, 1, keepdims=True))
    return x * (root / (mean(root) + 1e-6)) * along(p["scale"], x) + along(p["bias"], x) + x


def standardized(p: Any, x: Any) -> Any:
    w = p["w"]
    return x @ ((w - mean(w, 0)) * lax.rsqrt(w.var(0, keepdims=True) + 1e-6) * along(p["scale"], w))


def demodulated(p: Any, x: Any) -> Any:
    w = p["w"][None] * jnp.tanh(mean(x, 1)).reshape(4, D, 1)
    return jnp.einsum("btd,bde->bte", x, w * lax.rsqrt(jnp.sum(w * w, 1, keepdims=True) + 1e-8))


NO_NORMS: dict[str, Any] = {
    "softmax": lambda p, x: jax.nn.softmax(x),
    "centring": lambda p, x: x - mean(x),
    "an L2 loss": lambda p, x: jnp.sum(jnp.square(x - along(p["bias"], x)), -1),
    "a root of an L2 loss": lambda p, x: jnp.sqrt(mean(jnp.square(x - jnp.roll(x, 1)))),
    "a deviation as a feature": lambda p, x: jnp.concatenate(
        [x, jnp.broadcast_to(x.std(-1, keepdims=True), x.shape)], -1
    ),
    "a pooling gate": lambda p, x: x / (1.0 + jnp.abs(mean(x, 1))),
    "squeeze and excite": lambda p, x: x * jax.nn.sigmoid(mean(x, 1) @ p["w"]),
    "a global response": responded,
    "standardized weights": standardized,
    "demodulated weights": demodulated,
    "a norm": lambda p, x: jnp.sum(x / jnp.linalg.norm(x, axis=-1, keepdims=True), -1),
    "clipping by a norm": lambda p, x: x * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(jnp.square(x)))),
    "standardized data": lambda p, x: (x - x.mean()) / (x.std() + 1e-6),
    "a temperature": lambda p, x: x * lax.rsqrt(p["gamma"][0]),
    "noise": lambda p, x: (
        jnp.sqrt(p["gamma"][0]) * x + jnp.sqrt(1 - 0.1 * p["gamma"][0]) * jnp.roll(x, 1)
    ),
    "multiplied by its deviation": lambda p, x: x * x.std(-1, keepdims=True),
    "divided by another's deviation": lambda p, x: x / jnp.tanh(x).std(-1, keepdims=True),
    "scaled and shifted": lambda p, x: x * along(p["scale"], x) + 1,
}


def regions(fn: Any, *args: Any) -> Regions:
    body, _ = opened(jax.make_jaxpr(fn)(*args))
    is_param = [i == 0 for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return regions_of(body, is_param, returns=False)


def marked(found: Regions) -> int:
    return len(found.applies) + sum(map(marked, found.programs.values()))


@pytest.mark.parametrize("name", NO_NORMS)
def test_nothing_else_is_taken_for_one(name):
    assert regions(NO_NORMS[name], P, X) == NOWHERE
    assert regions(lambda p, x: NO_NORMS[name](p, x @ p["w"]), P, X) == NOWHERE


def test_data_that_are_standardized_are_normalized_for_a_matmul_alone():
    targets = lambda p, x, y: jnp.mean(jnp.square(x @ p["w"] - two_passes(y)))  # noqa: E731
    stored = lambda p, s, x: (x - along(s["mean"], x)) / jnp.sqrt(along(s["var"], x))  # noqa: E731
    assert regions(targets, P, X, X) == regions(stored, P, STORED, X) == NOWHERE
    assert marked(regions(lambda p, x: two_passes(x).reshape(-1, D) @ p["w"], P, X)) >= 1


def test_rows_of_a_table_are_normalized():
    tokens = jnp.arange(4) % 3

    def fn(p: Any) -> Any:
        return jnp.atan(affine(p, two_passes(p["w"][tokens] + p["w"][:4])))

    assert marked(regions(fn, P)) >= 1
    assert reads("atan", autocast(fn, BF16), P) == {HALF}


HALF = ("bfloat16",)
FLOATS = ("bfloat16", "float16", "float32")


@pytest.mark.cases(fast=8)
@pytest.mark.parametrize("name", NORMS)
def test_it_runs_in_float32_and_hands_on_half(name):
    fn = autocast(lambda p, x: jnp.tanh(NORMS[name](p, x @ p["w"])) @ p["w"], BF16)
    assert reads("tanh", fn, P, X) == {HALF}
    arithmetic = reads("mul div square rsqrt sqrt sub reduce_sum integer_pow", fn, P, X)
    assert {dtype for dtypes in arithmetic for dtype in dtypes if dtype in FLOATS} == {"float32"}
    assert reads("dot_general", fn, P, X) == {HALVES}


@pytest.mark.parametrize("name", RUNNING)
def test_one_by_running_statistics_does_so_too(name):
    fn = autocast(lambda p, s, x: jnp.tanh(RUNNING[name](p, s, x @ p["w"])) @ p["w"], BF16)
    assert reads("tanh", fn, P, STORED, X) == {HALF}
    assert reads("mul sub div", fn, P, STORED, X) == {FULLS}


DIFFERENTIATED = ("two passes", "products for squares", "groups", "a rule for the variance")
DIFFERENTIATED += ("a rule for all of it", "a scan over rows", "sums in a scan", "flax LayerNorm")
DIFFERENTIATED += ("flax BatchNorm",)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_those_of_float32_to_the_rounding_of_the_matmuls(name):
    weights = jnp.sin(jnp.arange(X.size, dtype=jnp.float32)).reshape(X.shape)

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(NORMS[name](p, 3 * (x @ p["w"]) + 1)) @ p["w"] * weights)

    of_it, in_it = jax.grad(autocast(loss, BF16), (0, 1)), autocast(jax.grad(loss, (0, 1)), BF16)
    gradients = jax.jit(lambda p, x: (of_it(p, x), in_it(p, x), jax.grad(loss, (0, 1))(p, x)))(P, X)
    *found, true = (ravel_pytree(tree)[0] for tree in gradients)
    assert max(error(one, true) for one in found) < 2e-2


def test_paths_that_are_named_are_normalizations():
    def fn(p: Any, x: Any) -> Any:
        with jax.named_scope("modulated"):
            y = x @ p["w"] * along(p["scale"], x) + along(p["bias"], x)
        return jnp.atan(y)

    assert reads("add", autocast(fn, BF16), P, X) == {HALVES}
    found = autocast(fn, BF16, normalizes=["modulated"])
    assert reads("add mul", found, P, X) == {FULLS} and reads("atan", found, P, X) == {HALF}
    report = found.explain(P, X)
    assert {r.done for r in report.records if r.primitive == "add"} == {"float32, read in half"}


@pytest.mark.slow
def test_a_rule_for_its_path_decides():
    def fn(p: Any, x: Any) -> Any:
        with jax.named_scope("inner"):
            return jnp.tanh(affine(p, two_passes(x @ p["w"]))) @ p["w"]

    ruled = autocast(fn, BF16, rules={"inner": "f32"})
    assert reads("dot_general tanh", ruled, P, X) == {FULLS, ("float32",)}
    assert reads("tanh", autocast(fn, BF16, preset="conservative"), P, X) == {("float32",)}
