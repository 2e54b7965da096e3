"""The cost of autocast: the number of its casts, residuals, and equations that are rewritten once.

No derivative of an evaluated program sums in half precision.
"""

import itertools
from typing import Any

import flax.linen
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpmodules.linen import apply_policy
from policy.autocasting.transform import autocast
from policy.programs.rewriting import interpreter
from tests.policy.autocasting.models import BF16, POLICIES, error
from tests.programs import named, operations

XS, WS = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8), (8, 8)))
PARAMS = dict.fromkeys("abqkv", WS)
WIDE, NARROW = "float32", "bfloat16"


def casts_of(fn: Any, source: str, target: str) -> int:
    ops = named(operations(autocast_of(fn), PARAMS, XS), "convert_element_type")
    return sum((op.inputs, op.outputs) == ((source,), (target,)) for op in ops)


def saved(fn: Any, dtype: str) -> int:
    """Counts the activations in a dtype that the backward pass keeps beside inputs."""
    pulled = lambda p, x: jax.vjp(lambda p: jnp.sum(autocast_of(fn)(p, x)), p)[1]  # noqa: E731
    jaxpr = jax.make_jaxpr(pulled)(PARAMS, XS).jaxpr
    kept = {id(v): v.aval for v in jaxpr.outvars if not any(v is invar for invar in jaxpr.invars)}
    return sum((aval.dtype, aval.shape) == (dtype, XS.shape) for aval in kept.values())


def autocast_of(fn: Any) -> Any:
    return autocast(fn, BF16, params=0)


def normalized(x: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-3)


def test_readers_of_a_normalization_share_one_cast_and_one_saved_copy():
    def fn(w: Any, x: Any) -> Any:
        y = normalized(x)
        return (y @ w["q"]) * (y @ w["k"]) * (y @ w["v"])

    assert casts_of(fn, WIDE, NARROW) == 3 + 1
    assert saved(fn, NARROW) <= 1 + 4  # the copy, three products and one of two


def test_a_weight_is_cast_at_each_use():
    assert casts_of(lambda w, x: x @ w["a"] @ w["a"] @ w["a"], WIDE, NARROW) == 3 + 1


def test_a_half_value_is_widened_once_for_all_float32_readers():
    def fn(w: Any, x: Any) -> Any:
        y = x @ w["a"]
        return jnp.sum(jnp.exp(y)) + jnp.sum(jnp.square(y)) + jnp.sum(jnp.log1p(jnp.abs(y)))

    assert casts_of(fn, NARROW, WIDE) == 2  # y and its absolute value


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    "activation", [nn.relu, nn.silu, jax.checkpoint(jnp.tanh)], ids=["relu", "silu", "checkpoint"]
)
def test_a_function_of_a_normalization_saves_nothing_in_float32(activation):
    with_it, without = (
        saved(lambda w, x, fn=fn: fn(normalized(x @ w["a"])) @ w["b"], WIDE)
        for fn in (activation, lambda y: y)
    )
    assert with_it == without


@pytest.mark.parametrize(
    "activation",
    [nn.softplus, nn.elu, nn.selu, nn.log_sigmoid, jax.nn.mish],
    ids=lambda f: f.__name__,
)
def test_an_elementwise_function_in_float32_saves_its_input_alone(activation):
    assert saved(lambda w, x: activation(x @ w["a"]) @ w["b"], WIDE) == 0


NUMBERS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))
# One trace for all calls, as `policy.functions.checkpointing.cached_inline_jit` makes it.
once = jax.jit(doubled, inline=True)
rematerialized = jax.jit(jax.checkpoint(lambda x, scale: jnp.tanh(x) * scale), inline=True)


@pytest.fixture
def bodies(monkeypatch):
    """The programs rewritten as functions, in order."""
    seen = []
    init = interpreter.Body.__init__
    monkeypatch.setattr(
        interpreter.Body, "__init__", lambda self, *args: seen.append(args[1]) or init(self, *args)
    )
    return seen


def scaled(params, x):
    for scale in params:
        x = rematerialized(once(x), scale)
    return jnp.sum(x)


@pytest.mark.parametrize("times", [1, 5])
def test_equations_that_hold_the_same_program_are_rewritten_once(bodies, times):
    params = [jnp.full((1, 8), 0.1 * i) for i in range(1, times + 1)]
    jax.make_jaxpr(autocast_of(scaled))(params, NUMBERS)
    assert len(bodies) == 2


def test_operands_of_another_dtype_are_another_program():
    def mixed(params, x):
        half = x @ params  # bfloat16
        return jnp.sum(once(half).astype(jnp.float32)) + jnp.sum(once(x))

    y = autocast_of(mixed)(jnp.eye(8), NUMBERS)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, 4 * jnp.sum(NUMBERS), rtol=1e-2, atol=0.05)


@pytest.mark.slow
def test_names_stay_those_of_each_layer():
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            for i in range(3):
                x = flax.linen.LayerNorm(name=f"norm_{i}")(x)
            return x

    model = apply_policy(Model(), "mixed_bfloat16")
    params = model.init(jax.random.key(0), NUMBERS)
    gradient = jax.grad(autocast_of(lambda p, x: jnp.sum(jnp.asarray(model.apply(p, x)))))
    roots = named(operations(gradient, params, NUMBERS), "rsqrt")
    found = {op.path.split("/")[-1] for op in roots}
    assert found == {"norm_0", "norm_1", "norm_2"}


RNG = np.random.default_rng(0)
SUMS = (
    *("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "scatter-add"),
    *("scatter-mul", "reduce_window_sum", "select_and_scatter_add"),
)


def positive(*shape: int) -> Any:
    return jnp.asarray(RNG.uniform(0.5, 1.5, size=shape), jnp.float32)


def sums_in_half(fn: Any, *args: Any) -> list[Any]:
    return [
        op
        for op in named(operations(fn, *args), *SUMS)
        if {"bfloat16", "float16"} & {*op.outputs} and op.terms != 1
    ]


ELEMENTWISE = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "max": lax.max,
    "pow": lax.pow,
    "atan2": lax.atan2,
    "select": lambda a, b: jnp.where(a > b, a, b),
    "clamp": lambda a, b: jnp.clip(a, 0.1 * b, b),
    "logaddexp": jnp.logaddexp,  # these two have a custom_jvp rule
    "xlogy": jax.scipy.special.xlogy,
}
T, D = 4, 5
SHAPES = [((T, D), (1, D)), ((T, D), ()), ((1, D), (T, 1)), ((2, T, D), (1, 1, 1))]
KINDS = ("half", "param", "float32", "constant")


def value_of(kind: str, which: int, params: Any, args: Any, constants: Any) -> Any:
    if kind == "half":  # an activation
        column = args[which].reshape(-1, 1) * jnp.ones((1, 2))
        return (column @ params["w"]).reshape(args[which].shape)
    return {"param": params["own"], "float32": args, "constant": constants}[kind][which]


@pytest.mark.cases(fast=1, slow=6)
@POLICIES
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_cotangents_of_a_broadcast_are_summed_in_float32(name, policy):
    for shapes, kinds in itertools.product(SHAPES, itertools.product(KINDS, KINDS)):
        if "half" not in kinds:
            continue
        out = np.broadcast_shapes(*shapes)
        args, constants = ([positive(*shape) for shape in shapes] for _ in range(2))
        params = {"w": positive(2, 1), "own": [positive(*shape) for shape in shapes]}
        weights = positive(*out)

        def loss(params, args, kinds=kinds, constants=constants, weights=weights):
            a, b = (value_of(kind, i, params, args, constants) for i, kind in enumerate(kinds))
            return jnp.sum(weights * ELEMENTWISE[name](a, b))

        grad = jax.grad(autocast(loss, policy, params=0), (0, 1))
        assert sums_in_half(grad, params, args) == [], (shapes, kinds)


ROWS = jnp.asarray([0, 0, 1, 2, 2, 2])


MOVES: dict[str, Any] = {
    "top_k": lambda h: lax.top_k(h, 3)[0],
    "sort": lambda h: jnp.sort(h, 0),
    "sort of pairs": lambda h: lax.sort((h, h * 2.0), num_keys=1)[1],
    "gather": lambda h: h[ROWS],
    "tile": lambda h: jnp.tile(h, (2, 1)),
    "take_along_axis": lambda h: jnp.take_along_axis(h, jnp.ones((6, 1), int), 1),
    "dynamic_slice": lambda h: lax.dynamic_slice(h, (jnp.argmax(h[0]) % 3, 0), (2, 4)),
    "dynamic_update_slice": lambda h: lax.dynamic_update_slice(h, h[:2] * 3.0, (jnp.argmax(h), 0)),
    "concatenate": lambda h: jnp.concatenate([h, h[:2], h]),
    "cumsum": lambda h: jnp.cumsum(h, 0),
    "cumprod": lambda h: jnp.cumprod(h, 0),
    "cummax": lambda h: lax.cummax(h, 0),
    "segment_sum": lambda h: jax.ops.segment_sum(h, ROWS, 3),
    "half at add": lambda h: h.at[ROWS].add(h),
    "max": lambda h: h / jnp.abs(h).max(-1, keepdims=True),
    "min": lambda h: h - h.min(0, keepdims=True),
    "wide max pool": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (5, 1), (1, 1), "SAME"),
    "pad with an activation": lambda h: lax.pad(h, h[0, 0], [(1, 1, 0), (0, 0, 0)]),
    "reflect": lambda h: jnp.pad(h, 1, mode="reflect"),
    "film": lambda h: h * (1 + h[:1]) + h[1:2],
    "film of a norm": lambda h: normalized(h) * h[:1] + h[:1],
    "squeeze and excite": lambda h: h * jax.nn.sigmoid(h.mean(0, keepdims=True)),
    "position biases": lambda h: jax.nn.softmax(h[None] + h[:3][ROWS].T[:, :, None]),
    "in a scan": lambda h: lax.scan(lambda c, row: (c, row * h[0, 0] + c), 0.0, h)[1],
    "in a vmap": lambda h: jax.vmap(lambda row: lax.top_k(row * h[0, 0], 2)[0])(h),
    "in a checkpoint": lambda h: jax.checkpoint(lambda h: jnp.tanh(0.1 * (h + h[:1])))(h),
}
ORDERED = {"top_k", "sort", "sort of pairs", "max", "min", "in a vmap"}
ORDERED |= {"cummax", "wide max pool"}  # gradients that other ties move elsewhere
W, X = positive(3, 4), positive(6, 3)


def loss_of(name: str) -> Any:
    def loss(w, x):
        y = MOVES[name](x @ w)
        return jnp.sum(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * y)

    return loss


@pytest.mark.cases(fast=1, slow=9)
@POLICIES
@pytest.mark.parametrize("name", MOVES)
def test_the_cotangents_of_what_is_moved_are_summed_in_float32(name, policy):
    fn = autocast(loss_of(name), policy, params=0)
    assert sums_in_half(jax.grad(fn, (0, 1)), W, X) == []
    assert sums_in_half(autocast(jax.grad(loss_of(name), (0, 1)), policy, params=0), W, X) == []
    found, truth = jax.grad(fn)(W, X), jax.grad(loss_of(name))(W, X)
    if name not in ORDERED:
        assert error(found, truth) < (4e-2 if policy == BF16 else 5e-3)


def test_the_gradient_of_a_maximum_counts_more_ties_than_half_precision_has_numbers_for():
    fn = autocast_of(lambda w, x: jnp.sum((x.T @ w).max(0)))
    found = jax.grad(fn, 1)(jnp.ones((1, 2)), jnp.ones((1, 300)))
    np.testing.assert_allclose(found.sum(), 2.0, rtol=4e-3)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", ["max", "min", "wide max pool", "top_k", "sort", "film"])
def test_no_float32_copy_is_saved(name):
    x, w = positive(64, 3), positive(3, 64)
    fn = autocast(lambda w, x: MOVES[name](x @ w).sum(), BF16, params=0)
    saved = jax.tree.leaves(jax.vjp(fn, w, x)[1])
    assert [a.shape for a in saved if a.size >= 64 * 64 and a.dtype == jnp.float32] == []


def test_tangents_are_those_of_float32_and_a_map_changes_nothing():
    fn, plain = (cast(lambda w, x: MOVES["film"](x @ w)) for cast in (autocast_of, lambda f: f))
    found, true = (jax.jvp(f, (W, X), (W, X))[1] for f in (fn, plain))
    assert error(found, true) < 5e-2
    mapped = jax.vmap(fn, (None, 0))(W, jnp.stack([X, 2 * X]))
    np.testing.assert_array_equal(mapped[0], fn(W, X))


@pytest.mark.slow
def test_a_small_array_that_is_not_differentiated_has_no_tangent():
    fn = autocast_of(lambda w, x: (x @ w) * lax.stop_gradient(x[:1] @ w) / (x[1:2] @ w))
    for i in range(2):
        gradient = jax.grad(lambda *args: jnp.sum(fn(*args)), i)(W, X)
        assert np.all(np.isfinite(gradient))
