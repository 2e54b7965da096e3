"""Every way to ask for float32 inside of a half-precision model multiplies at the highest."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

from mpmodules import full_precision, linen, nnx, use_policy
from tests.matmul_precisions import precisions

MIXED = "mixed_bfloat16"
X = jnp.ones((2, 4, 8))
HALF, FLOAT32 = ("bfloat16", None), ("float32", None)
HIGHEST = ("float32", "highest")


class Inner(linen.Module):
    """Own code, with a layer in it that inherits."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(x @ self.param("w", linen.initializers.ones, (8, 8)))


class Kept(Inner):
    own_code: ClassVar[Literal["keep"] | None] = "keep"


class FlaxInner(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(8)(x @ self.param("w", flax.linen.initializers.ones, (8, 8)))


class Net(linen.Module):
    router: Callable[..., Any]

    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(self.router(name="router")(x))


class FlaxNet(flax.linen.Module):
    router: Callable[..., Any]

    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(8)(self.router(name="router")(x))


def linen_gradients(model: Any, *scope: Any) -> set[Any]:
    with use_policy(*scope) if scope else use_policy(None):
        variables = model.init(jax.random.key(0), X)
        loss = lambda v: model.apply(v, X).sum().astype(jnp.float32)  # noqa: E731
        return precisions(jax.grad(loss), variables)


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.MultiHeadDotProductAttention(2)(x, x)


class Island(linen.Module):
    @linen.compact
    def __call__(self, x):
        with full_precision():
            return linen.Dense(8)(x @ self.param("w", linen.initializers.ones, (8, 8)))


def rnn(**arguments: Any) -> Any:
    return linen.RNN(linen.GRUCell(8), **arguments)


def dense(**arguments: Any) -> Any:
    return linen.Dense(8, **arguments)


LINEN_LAYERS = {
    "Dense": dense,
    "Conv": lambda **arguments: linen.Conv(8, (3,), **arguments),
    "Einsum": lambda **arguments: linen.Einsum((8, 8), "...a,ab->...b", **arguments),
    "attention": Attention,
    "RNN": rnn,
    "own code": Inner,
    "kept code": Kept,
}


@pytest.mark.parametrize(
    "router",
    [
        lambda **name: dense(dtype_policy="float32", **name),
        lambda **name: dense(dtype=jnp.float32, **name),
        lambda **name: Inner(dtype_policy="float32", **name),
        Island,
    ],
    ids=["dtype_policy", "dtype", "own code's dtype_policy", "island"],
)
@pytest.mark.filterwarnings("ignore:Dense at 'router' has an explicit dtype")
def test_an_argument_and_an_island_in_linen(router):
    assert linen_gradients(Net(router), MIXED) == {HALF, HIGHEST}


def test_a_class_rule_in_linen():
    assert linen_gradients(Net(Inner), MIXED, {Inner: "float32"}) == {HALF, HIGHEST}


def test_a_precision_given_to_a_layer_or_a_policy_wins_in_linen():
    given = Net(lambda **name: dense(precision="high", **name))
    assert linen_gradients(given, MIXED, {"router": "float32"}) == {HALF, ("float32", "high")}
    by_rule = linen_gradients(Net(Inner), MIXED, {"router": "c=f32,o=f32,x=high"})
    assert by_rule == {HALF, ("float32", "high")}
    whole = linen_gradients(Net(Inner), "c=bf16,o=f32,x=BF16_BF16_F32", {"router": "float32"})
    assert whole == {("bfloat16", "BF16_BF16_F32"), HIGHEST}


def test_whole_float32_models_keep_jaxs_default_in_linen():
    for scope in ((), ("float32",)):
        assert linen_gradients(Net(Inner), *scope) == {FLOAT32}
        with jax.default_matmul_precision("high"):
            assert linen_gradients(Net(Inner), *scope) == {("float32", "high")}
    assert linen_gradients(Net(Inner), "float32", {"router": MIXED}) == {FLOAT32, HALF}
    assert linen_gradients(Net(Inner), "c=f32,x=highest") == {HIGHEST}


# --------------------------------------------------------------------------------------------------
# nnx
# --------------------------------------------------------------------------------------------------


class NnxInner(nnx.Module):
    def __init__(self, rngs):
        self.w, self.dense = nnx.Param(jnp.ones((8, 8))), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.dense(x @ self.w)


class NnxKept(NnxInner):
    own_code: ClassVar[Literal["keep"] | None] = "keep"


class NnxIsland(NnxInner):
    def __call__(self, x):
        with full_precision():
            return self.dense(x @ self.w)


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)

    def __call__(self, x):
        return self.attention(x)


class NnxNet(nnx.Module):
    def __init__(self, router, rngs):
        self.router, self.head = router(rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.router(x))


class FlaxNnxInner(flax.nnx.Module):
    def __init__(self, rngs):
        self.w, self.dense = flax.nnx.Param(jnp.ones((8, 8))), flax.nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.dense(x @ self.w)


class FlaxNnxNet(flax.nnx.Module):
    def __init__(self, router, rngs):
        self.router, self.head = router(rngs=rngs), flax.nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.router(x))


def nnx_gradients(model: Any) -> set[Any]:
    graph, state = nnx.split(model)
    return precisions(
        jax.grad(
            lambda state: nnx.merge(graph, state)(X).sum().astype(jnp.float32), allow_int=True
        ),
        state,
    )


def linear(**arguments: Any) -> Any:
    return nnx.Linear(8, 8, **arguments)


NNX_LAYERS = {
    "Linear": linear,
    "Conv": lambda **arguments: nnx.Conv(8, 8, (3,), **arguments),
    "Einsum": lambda **arguments: nnx.Einsum("...a,ab->...b", (8, 8), **arguments),
    "LoRALinear": lambda **arguments: nnx.LoRALinear(8, 8, lora_rank=2, **arguments),
    "attention": NnxAttention,
    "RNN": lambda rngs, **arguments: nnx.RNN(
        nnx.GRUCell(8, 8, rngs=rngs, **arguments), rngs=rngs, **arguments
    ),
    "own code": NnxInner,
    "kept code": NnxKept,
}


@pytest.mark.parametrize("layer", NNX_LAYERS)
def test_an_argument_in_nnx(layer):
    router = lambda rngs: NNX_LAYERS[layer](rngs=rngs, dtype_policy="float32")  # noqa: E731
    assert nnx_gradients(NnxNet(router, nnx.Rngs(0), dtype_policy=MIXED)) == {HALF, HIGHEST}


LAYERS = [("linen", name) for name in LINEN_LAYERS] + [("nnx", name) for name in NNX_LAYERS]


@pytest.mark.parametrize("rule", ["float32", "f32_inside"])
@pytest.mark.parametrize(("wing", "layer"), LAYERS)
def test_a_rule(wing, layer, rule):
    if wing == "linen":
        found = linen_gradients(Net(LINEN_LAYERS[layer]), MIXED, {"router": rule})
    else:
        model = NnxNet(NNX_LAYERS[layer], nnx.Rngs(0))
        found = nnx_gradients(nnx.apply_policy(model, MIXED, {"router": rule}))
    assert found == {HALF, HIGHEST}


@pytest.mark.parametrize("own_code", [None, "keep"])
@pytest.mark.parametrize("router", ["layer", "own code"])
def test_a_port(router, own_code):
    is_layer, rule = router == "layer", {"router": "float32"}
    inner = (lambda name: flax.linen.Dense(8, name=name)) if is_layer else FlaxInner
    ported = linen.apply_policy(FlaxNet(inner), MIXED, rule, own_code=own_code)
    assert linen_gradients(ported) == {HALF, HIGHEST}
    inner = (lambda rngs: flax.nnx.Linear(8, 8, rngs=rngs)) if is_layer else FlaxNnxInner
    model = FlaxNnxNet(inner, flax.nnx.Rngs(0))
    ported = nnx.apply_policy(model, MIXED, rule, own_code=own_code)
    assert nnx_gradients(ported) == {HALF, HIGHEST}


@pytest.mark.filterwarnings("ignore:Linear at 'Linear' has an explicit dtype")
def test_a_dtype_a_class_rule_and_an_island_in_nnx():
    router = lambda rngs: linear(rngs=rngs, dtype=jnp.float32)  # noqa: E731
    assert nnx_gradients(NnxNet(router, nnx.Rngs(0), dtype_policy=MIXED)) == {HALF, HIGHEST}
    with use_policy(MIXED, {NnxInner: "float32"}):
        ruled = NnxNet(NnxInner, nnx.Rngs(0))
    assert nnx_gradients(ruled) == {HALF, HIGHEST}
    island = NnxNet(NnxIsland, nnx.Rngs(0), dtype_policy=MIXED)
    assert nnx_gradients(island) == {HALF, HIGHEST}


def test_whole_float32_models_keep_jaxs_default_in_nnx():
    for policy in (None, "float32"):
        assert nnx_gradients(NnxNet(NnxInner, nnx.Rngs(0), dtype_policy=policy)) == {FLOAT32}
    high = NnxNet(NnxInner, nnx.Rngs(0), dtype_policy="c=f32,x=high")
    assert nnx_gradients(high) == {("float32", "high")}


def test_a_precision_given_to_a_layer_wins_in_nnx():
    router = lambda rngs: linear(rngs=rngs, dtype_policy="float32", precision="high")  # noqa: E731
    found = nnx_gradients(NnxNet(router, nnx.Rngs(0), dtype_policy=MIXED))
    assert found == {HALF, ("float32", "high")}


# --------------------------------------------------------------------------------------------------
# Functions with derivative rules of their own
# --------------------------------------------------------------------------------------------------


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, ct: (ct @ saved[1].T, jnp.einsum("abi,abj->ij", saved[0], ct)),
)


@jax.custom_jvp
def with_jvp(x, w):
    return x @ w


@with_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


@pytest.mark.parametrize("function", [with_vjp, with_jvp])
def test_derivative_rules_of_own_code_multiply_at_the_highest_precision(function):
    class Router(linen.Module):
        @linen.compact
        def __call__(self, x):
            return function(x, self.param("w", linen.initializers.ones, (8, 8)))

    class NnxRouter(NnxInner):
        def __call__(self, x):
            return function(x, self.w[...])

    assert linen_gradients(Net(Router), MIXED, {"router": "float32"}) == {HALF, HIGHEST}
    model = nnx.apply_policy(NnxNet(NnxRouter, nnx.Rngs(0)), MIXED, {"router": "float32"})
    assert nnx_gradients(model) == {HALF, HIGHEST}


def test_a_root_in_float32_by_a_rule_multiplies_at_the_highest_around_half_modules():
    found = linen_gradients(Net(Inner), MIXED, {"Net:": "float32", "router": MIXED})
    assert ("float32", "highest") in found and FLOAT32 not in found
