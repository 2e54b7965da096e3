"""Every way to ask for float32 inside of a half-precision model multiplies at the highest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpmodules import full_precision, linen, nnx
from tests.matmul_precisions import precisions
from tests.mpmodules.wings import BOTH, MIXED, ONES, WINGS, NnxModel, Part, Text, dense, weight
from tests.mpmodules.wings import layer as part_of

X = jnp.ones((2, 4, 8))
HALF, FLOAT32 = ("bfloat16", None), ("float32", None)
HIGHEST, HIGH = ("float32", "highest"), ("float32", "high")
explicit = pytest.mark.filterwarnings("ignore:.* has an explicit dtype:policy.DtypePolicyWarning")


def island(self: Any, x: jax.Array) -> jax.Array:
    with full_precision():
        return self.dense(x @ self.w)


PARTS: dict[str, Any] = {"w": weight(8, 8, init=ONES), "dense": dense(8, 8)}
INNER = Text(lambda self, x: self.dense(x @ self.w), "Inner", **PARTS)
KEPT = Text(INNER.call, "Kept", {"own_code": "keep"}, **PARTS)
LinenInner, NnxInner = INNER.linen_class(linen), INNER.nnx_class(nnx)


def inner(**options: Any) -> Part:
    """A module of own code with a layer in it that inherits; its class is ours, and one."""
    return part_of(
        lambda nn: LinenInner(**options), lambda nnx, rngs: NnxInner(rngs=rngs, **options)
    )


LAYERS: dict[str, Any] = {
    "Dense": dense(8, 8),
    "Conv": part_of(lambda nn: nn.Conv(8, (3,)), lambda nnx, rngs: nnx.Conv(8, 8, (3,), rngs=rngs)),
    "Einsum": part_of(
        lambda nn: nn.Einsum((8, 8), "...a,ab->...b"),
        lambda nnx, rngs: nnx.Einsum("...a,ab->...b", (8, 8), rngs=rngs),
    ),
    "LoRALinear": part_of(
        lambda nn: nn.DenseGeneral(8),  # linen has no LoRALinear
        lambda nnx, rngs: nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs),
    ),
    "attention": part_of(
        lambda nn: nn.MultiHeadDotProductAttention(2),
        lambda nnx, rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
    ),
    "RNN": part_of(
        lambda nn: nn.RNN(nn.GRUCell(8)),
        lambda nnx, rngs: nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs), rngs=rngs),
    ),
    "own code": INNER,
    "kept code": KEPT,
}


def net(router: Any) -> Text:
    return Text(lambda self, x: self.head(self.router(x)), "Net", router=router, head=dense(8, 8))


def gradients(model: Any) -> set[Any]:
    """Returns the dtypes and precisions of the matmuls of a model's gradient."""
    return precisions(jax.grad(model.total(X)), model.params)


def ruled(wing: Any, router: Any, rule: str, policy: str = MIXED) -> set[Any]:
    """Returns those of a model of ours of which a rule decides for the router, by its path."""
    if wing.name == "linen":
        return gradients(wing.scoped(net(router), policy, {"router": rule}, X))
    instance = net(router).nnx_class(nnx)(rngs=nnx.Rngs(0))
    return gradients(NnxModel(nnx.apply_policy(instance, policy, {"router": rule})))


ARGUMENTS = {
    "dtype_policy": dense(8, 8, dtype_policy="float32"),
    "dtype": dense(8, 8, dtype=jnp.float32),
    "own code's dtype_policy": inner(dtype_policy="float32"),
    "island": Text(island, "Island", **PARTS),
}


@explicit
@BOTH
@pytest.mark.parametrize("how", ARGUMENTS)
def test_an_argument_and_an_island(wing, how):
    assert gradients(wing.ours(net(ARGUMENTS[how]), MIXED, X)) == {HALF, HIGHEST}


@BOTH
@pytest.mark.parametrize("rule", ["float32", "f32_inside"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_rule_by_path(wing, layer, rule):
    assert ruled(wing, LAYERS[layer], rule) == {HALF, HIGHEST}


@BOTH
def test_a_rule_by_class(wing):
    rules = {LinenInner if wing.name == "linen" else NnxInner: "float32"}
    assert gradients(wing.scoped(net(inner()), MIXED, rules, X)) == {HALF, HIGHEST}


@BOTH
@pytest.mark.parametrize("own_code", [None, "keep"])
@pytest.mark.parametrize("layer", ["Dense", "own code"])
def test_a_rule_of_a_port(wing, layer, own_code):
    text = net(LAYERS[layer])
    ported = wing.port(text, MIXED, {"router": "float32"}, X, own_code=own_code)
    assert gradients(ported) == {HALF, HIGHEST}


@BOTH
def test_a_precision_given_to_a_layer_or_a_policy_wins(wing):
    assert ruled(wing, dense(8, 8, precision="high"), "float32") == {HALF, HIGH}
    assert ruled(wing, INNER, "c=f32,o=f32,x=high") == {HALF, HIGH}
    whole = ruled(wing, INNER, "float32", "c=bf16,o=f32,x=BF16_BF16_F32")
    assert whole == {("bfloat16", "BF16_BF16_F32"), HIGHEST}


@BOTH
def test_whole_float32_models_keep_jaxs_default(wing):
    for policy in (None, "float32"):
        model = wing.ours(net(INNER), policy, X)
        assert gradients(model) == {FLOAT32}
        with jax.default_matmul_precision("high"):
            assert gradients(model) == {HIGH}
    assert ruled(wing, INNER, MIXED, "float32") == {FLOAT32, HALF}
    assert gradients(wing.ours(net(INNER), "c=f32,x=high", X)) == {HIGH}


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


@BOTH
@pytest.mark.parametrize("function", [with_vjp, with_jvp])
def test_derivative_rules_of_own_code_multiply_at_the_highest_precision(wing, function):
    router = Text(lambda self, x: function(x, jnp.asarray(self.w)), "Router", w=weight(8, 8))
    assert ruled(wing, router, "float32") == {HALF, HIGHEST}


def test_a_root_in_float32_by_a_rule_multiplies_at_the_highest_around_half_modules():
    model = WINGS["linen"].scoped(net(INNER), MIXED, {"Net:": "float32", "router": MIXED}, X)
    found = gradients(model)
    assert HIGHEST in found and FLOAT32 not in found
