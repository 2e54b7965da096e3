"""Wrong input is rejected where it is given, by name, value and way out; none is half-applied."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import re
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen, nnx
from policy import current_policy, use_policy
from tests.mpmodules.apis import BOTH

X = jnp.ones((2, 4))
KEY = jax.random.key(0)
SIZES = {
    "Dense": (4,),
    "Linear": (4, 4),
    "Embed": (4, 4),
    "Conv": (4, (3,)),
    "MultiHeadAttention": (2, 4),
    "Dropout": (0.5,),
    "Sequential": (),
}
LAYERS = [("linen", name) for name in ("Dense", "Conv", "Dropout")]
LAYERS += [("nnx", name) for name in ("Linear", "MultiHeadAttention", "Dropout", "Sequential")]


def made(api: str, name: str, **options: Any) -> Any:
    if api == "linen":
        return getattr(linen, name)(*SIZES[name], **options)
    rngs = {} if name == "Sequential" else {"rngs": nnx.Rngs(0)}
    return getattr(nnx, name)(*SIZES[name], **rngs, **options)


@pytest.mark.parametrize(("api", "name"), LAYERS)
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (jnp.bfloat16, TypeError, "A policy should be a Policy or its text form such as 'mixed_b"),
        ("bf15", ValueError, "Unknown dtype 'bf15': it should be one of half, bfloat16, bf16"),
        ("q=f32", ValueError, "Unknown key 'q' in 'q=f32': it should be "),
    ],
)
def test_a_dtype_policy_that_is_none_is_rejected_by_name(api, name, given, error, text):
    with pytest.raises(error, match=rf"^{name}\(dtype_policy=.*\): {re.escape(text)}"):
        made(api, name, dtype_policy=given)


@pytest.mark.cases(fast=2, slow=6)
@pytest.mark.parametrize("argument", ["dtype", "param_dtype"])
@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize(("api", "name"), [("linen", "Dense"), ("nnx", "Linear"), ("nnx", "Embed")])
def test_a_dtype_that_a_layer_cannot_honor_is_rejected_under_a_policy(api, name, dtype, argument):
    text = re.escape(
        f"{name} at '{name}' can't use {argument}={dtype} under a policy: it should be a floating "
        "dtype of at least 16 bits, such as bfloat16. 8-bit floats are for matmul operands only: "
        "use a policy with m=f8 for those."
    )
    with use_policy("mixed_bfloat16"), pytest.raises(ValueError, match=f"^{text}"):
        layer = made(api, name, **{argument: jnp.dtype(dtype)})
        layer.init(KEY, X)
    assert current_policy() is None


@pytest.mark.cases(fast=1)
@BOTH
def test_a_bad_rule_is_rejected_where_it_is_given(api):
    layer = made(*{"linen": ("linen", "Dense"), "nnx": ("nnx", "Linear")}[api.name])
    for rules, error, text in (
        ({"head(": "f32"}, ValueError, "Rule 'head(' is not a regular expression: "),
        ({3: "f32"}, TypeError, "A rule's pattern should be a path pattern or a layer class, but"),
        ({type(layer): "f31"}, ValueError, f"Rule {type(layer).__name__}: Unknown dtype 'f31'"),
    ):
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            use_policy("f32", rules=rules)
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            api.module.apply_policy(layer, "bf16", rules)


@BOTH
def test_float64_without_x64_is_rejected_when_used(api):
    rejected = pytest.raises(ValueError, match=r"^A policy asks for float64, but JAX runs with x64")
    name = {"linen": "Dense", "nnx": "Linear"}[api.name]
    with rejected:
        api.module.apply_policy(made(api.name, name), "float64")
    with rejected:
        made(api.name, name, dtype_policy="f64").init(KEY, X)


@pytest.mark.cases(fast=1)
@BOTH
def test_apply_policy_takes_a_module_of_its_api_that_is_not_bound(api):
    with pytest.raises(
        TypeError, match=rf"takes an? {api.name} module here, but got 3 of type int"
    ):
        api.module.apply_policy(3, "bf16")
    with pytest.raises(TypeError, match=r"^A policy should be a Policy or its text form"):
        layer = flax.linen.Dense(3) if api.name == "linen" else nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        api.module.apply_policy(layer, None)
    if api.name == "linen":
        bound = flax.linen.Dense(3).bind({"params": {}})
        with pytest.raises(ValueError, match="apply the policy before bind, init or apply"):
            linen.apply_policy(bound, "bf16")
