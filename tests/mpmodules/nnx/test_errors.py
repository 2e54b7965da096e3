"""Wrong input is refused where it is given: by name, value and way out."""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx, use_policy

BUILDERS = {
    "Linear": lambda **k: nnx.Linear(4, 4, rngs=nnx.Rngs(0), **k),
    "LayerNorm": lambda **k: nnx.LayerNorm(4, rngs=nnx.Rngs(0), **k),
    "Embed": lambda **k: nnx.Embed(4, 4, rngs=nnx.Rngs(0), **k),
    "Conv": lambda **k: nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0), **k),
    "MultiHeadAttention": lambda **k: nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), **k),
    "Dropout": lambda **k: nnx.Dropout(0.5, **k),
    "Sequential": lambda **k: nnx.Sequential(**k),
}
TEXT_FORM = r"A policy should be a Policy or its text form such as 'mixed_bfloat16' or "
REFUSED = [
    (jnp.bfloat16, TypeError, TEXT_FORM),
    ("bf15", ValueError, r"Unknown dtype 'bf15': it should be one of half, bfloat16, bf16"),
    ("params=f32,comp=bf16", ValueError, r"Unknown key 'comp' in 'params=f32,comp=bf16': it sho"),
    ("f64", ValueError, r"A policy asks for float64, but JAX runs with x64 disabled"),
]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("given", "error", "match"), REFUSED, ids=[str(case[0]) for case in REFUSED]
)
def test_a_dtype_policy_that_is_none_is_refused_by_name(name, given, error, match):
    prefix = r"^" if given == "f64" else rf"^{name}\(dtype_policy=.*\): "
    with pytest.raises(error, match=prefix + match):
        BUILDERS[name](dtype_policy=given)


@pytest.mark.parametrize("argument", ["dtype", "param_dtype"])
@pytest.mark.parametrize(
    "dtype", [jnp.int8, jnp.bool_, jnp.float8_e4m3fn], ids=["int8", "bool", "float8"]
)
@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "Embed", "Conv", "MultiHeadAttention"])
def test_a_dtype_that_a_layer_can_t_honour_is_refused_under_a_policy(name, dtype, argument):
    expected = (
        rf"^{name} at '{name}' can't use {argument}={jnp.dtype(dtype).name} under a policy: it "
        r"should be a floating dtype of at least 16 bits, such as bfloat16\. 8-bit floats are for "
        r"matmul operands only: use a policy with m=f8 for those\.$"
    )
    with pytest.raises(ValueError, match=expected), use_policy("mixed_bfloat16"):
        BUILDERS[name](**{argument: dtype})


def test_a_scope_is_refused_before_anything_is_built():
    for rules, error, match in (
        ({"head(": "f32"}, ValueError, r"^Rule 'head\(' is not a regular expression: "),
        ({nnx.Linear: "bf15"}, ValueError, r"^Rule Linear: Unknown dtype 'bf15'"),
        (
            {3: "f32"},
            TypeError,
            r"^A rule's pattern should be a path pattern or a layer class, but",
        ),
    ):
        with pytest.raises(error, match=match):
            use_policy("f32", rules=rules)


def test_float64_with_x64_disabled_is_refused_when_used():
    expected = r"^A policy asks for float64, but JAX runs with x64 disabled"
    with pytest.raises(ValueError, match=expected):
        use_policy("float64")
    with pytest.raises(ValueError, match=expected):
        nnx.apply_policy(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "float64")


def test_attention_refuses_shapes_that_do_not_fit():
    q, k = jnp.zeros((1, 3, 4, 8), jnp.bfloat16), jnp.zeros((1, 5, 3, 8), jnp.bfloat16)
    for arguments, options, match in (
        ((q, k, k), {}, r"^Query heads \(4\) must be a multiple of key heads \(3\)"),
        ((q, k[0], k[0]), {}, r"^q, k, v must have same rank, but got 4, 3, 3\.$"),
        ((q, q[:, :2], q), {}, r"^k, v lengths must match, but got 2 and 3\.$"),
        ((q, q, q), {"dropout_rate": 0.5}, r"^dropout_rng is required"),
    ):
        with pytest.raises(ValueError, match=match):
            nnx.dot_product_attention(*arguments, **options)


def test_flax_s_own_errors_pass_through():
    layer = nnx.Dropout(0.5, deterministic=False, dtype_policy="bf16")
    with pytest.raises(ValueError, match="rngs"):
        layer(jnp.ones((2, 2)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtype_polcy'"):
        nnx.Linear(4, 4, dtype_polcy="bf16", rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtype_policy'"):
        flax_nnx.Linear(4, 4, dtype_policy="bf16", rngs=flax_nnx.Rngs(0))  # pyright: ignore[reportCallIssue]
