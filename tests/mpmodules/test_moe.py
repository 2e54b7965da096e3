"""Mixtures of experts in a user's own code: routers, kernels in 8 bits, and rows of no expert."""

from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpmodules import linen, nnx, use_policy
from policy import audit
from policy.inspect.audit.findings import CHOICE
from tests.programs import named, operations

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

TOKENS, WIDTH, EXPERTS, CHOSEN = 256, 16, 8, 2
X = jnp.asarray(np.random.default_rng(0).normal(size=(TOKENS, WIDTH)), jnp.float32)
INIT = jax.nn.initializers.lecun_normal(batch_axis=0)
RULES = {".*router": "float32"}


def moe(x: Any, logits: Any, up: Any, down: Any, capacity: int | None = None) -> tuple[Any, Any]:
    """Returns the sum of each token's experts, and which they are.

    With a capacity, further rows of an expert are dropped: they stand at the end, and hold NaN.
    """
    weights, experts = lax.top_k(jax.nn.softmax(logits), CHOSEN)
    sizes = jnp.bincount(experts.ravel(), length=EXPERTS)
    order = jnp.argsort(experts.ravel())
    is_kept = jnp.full(order.shape, True)
    if capacity is not None:
        place = jnp.arange(order.size) - (jnp.cumsum(sizes) - sizes)[experts.ravel()[order]]
        order = order[jnp.argsort(place >= capacity)]
        sizes = jnp.minimum(sizes, capacity)
        is_kept = jnp.arange(order.size) < sizes.sum()
    rows = jnp.where(is_kept[:, None], x[order // CHOSEN], jnp.nan)
    y = lax.ragged_dot(jnp.tanh(lax.ragged_dot(rows, up, sizes)), down, sizes)
    y = jnp.where(is_kept[:, None], y * weights.ravel()[order][:, None], 0)
    return jnp.zeros_like(x).at[order // CHOSEN].add(y), experts


def one_hot_moe(x: Any, logits: Any, up: Any, down: Any, capacity: int = 96) -> tuple[Any, Any]:
    """`moe`, by einsums over one-hot arrays."""
    weights, experts = lax.top_k(jax.nn.softmax(logits), CHOSEN)
    hot = jax.nn.one_hot(experts, EXPERTS)
    place = (jnp.cumsum(hot.reshape(-1, EXPERTS), 0).reshape(hot.shape) - 1) * hot
    places = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
    dispatch = jnp.einsum("tke,tkc->tec", hot, places)
    combine = jnp.einsum("tk,tke,tkc->tec", weights, hot, places)
    rows = jnp.einsum("td,tec->ecd", x, dispatch)
    hidden = jnp.tanh(jnp.einsum("ecd,edh->ech", rows, up))
    return jnp.einsum("tec,ech,ehd->td", combine, hidden, down), experts


def linen_model(nn: Any, layer: Any, **options: Any) -> Any:
    class MoE(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            up = self.param("up", INIT, (EXPERTS, WIDTH, 32))
            down = self.param("down", INIT, (EXPERTS, 32, WIDTH))
            logits = nn.Dense(EXPERTS, use_bias=False, name="router")(x)
            return layer(x, logits, up, down, **options)

    return MoE()


def nnx_model(nnx: Any, layer: Any, **options: Any) -> Any:
    class MoE(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.up = nnx.Param(INIT(rngs.params(), (EXPERTS, WIDTH, 32)))
            self.down = nnx.Param(INIT(rngs.params(), (EXPERTS, 32, WIDTH)))
            self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return layer(x, self.router(x), self.up[...], self.down[...], **options)

    return MoE(rngs=nnx.Rngs(0))


def run_of(way: str, policy: str, rules: Any = None, layer: Any = moe, **options: Any) -> Any:
    """Returns a pure function of parameters and inputs, and parameters."""
    if "linen" in way:
        model = linen_model(flax.linen if "port" in way else linen, layer, **options)
        params = model.init(jax.random.key(0), X)
        if "port" in way:
            model = linen.apply_policy(model, policy, rules=rules)

        def call(params: Any, x: Any) -> Any:
            with use_policy(None if "port" in way else policy, None if "port" in way else rules):
                return model.apply(params, x)

        return call, params
    built = nnx_model(flax.nnx if "port" in way else nnx, layer, **options)
    graph, params = nnx.split(nnx.apply_policy(built, policy, rules=rules))
    return lambda params, x: nnx.merge(graph, params)(x), params


ways = pytest.mark.parametrize("way", ("linen", "linen port", "nnx", "nnx port"))


@pytest.mark.cases(slow=1)
@ways
def test_a_router_with_a_rule_chooses_as_in_float32(way):
    truth, params = run_of(way, "float32")
    rounded, kept = (run_of(way, "mixed_bfloat16", rules)[0] for rules in (None, RULES))
    expected = truth(params, X)[1]
    np.testing.assert_array_equal(kept(params, X)[1], expected)
    assert np.sum(rounded(params, X)[1] != expected) > 0
    found = [audit(run, params, X) for run in (rounded, kept)]
    choices = [[f.primitive for f in each.findings if f.kind == CHOICE] for each in found]
    assert choices == [["top_k"], []]
    dots = [op for op in found[1].operations if op.kind == "dot"]
    assert {op.precision for op in dots if op.operands[0] == "float32"} == {"highest"}


def gradients(run: Any, params: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.square(run(params, x)[0]).mean()

    return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(params, X))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("way", "policy", "bound"),
    [
        ("linen", "mixed_bfloat16", 0.02),
        ("nnx", "mixed_float8", 0.15),
        ("linen port", "mixed_int8", 0.05),
        ("nnx port", "mixed_int8", 0.05),
    ],
)
def test_gradients_are_near_those_of_float32_whatever_dropped_rows_hold(way, policy, bound):
    truth, params = run_of(way, "float32", capacity=50)
    run, _ = run_of(way, policy, RULES, capacity=50)
    for ours, exact in zip(gradients(run, params), gradients(truth, params), strict=True):
        assert np.linalg.norm(ours - exact) < bound * np.linalg.norm(exact)
    matmuls = [op.inputs[0] for op in named(operations(run, params, X), "ragged_dot_general")]
    expected = {"mixed_bfloat16": "bfloat16", "mixed_int8": "int8"}.get(policy, "float8_e4m3fn")
    assert matmuls == [expected, expected]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("way", ("linen", "nnx"))
def test_of_one_hot_einsums_the_kernels_alone_are_multiplied_in_8_bits(way):
    truth, params = run_of(way, "float32", layer=one_hot_moe)
    run, _ = run_of(way, "mixed_int8", RULES, layer=one_hot_moe)
    dots = [op.inputs[0] for op in named(operations(run, params, X), "dot_general")]
    assert dots.count("int8") == 2 and dots.count("bfloat16") > 2
    exact = truth(params, X)[0]
    assert np.linalg.norm(run(params, X)[0] - exact) < 0.03 * np.linalg.norm(exact)
