"""What audits, assertions, comparisons and summaries say of layers that multiply in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import policy
from mpmodules import linen, nnx, use_policy
from policy.audit.finding_kinds import ACCUMULATOR, DEQUANTISED, UNSCALED
from policy.testing import assert_dots_in, assert_matmuls_obey
from tests.mpmodules.test_eight_bits import EIGHT, LINEN, NNX, Net, X, loss_of, rngs

pytestmark = [
    pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning"),
    pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp:DeprecationWarning"),
]

LAYERS: dict[str, Callable[[], Any]] = {
    **{f"linen/{name}": make for name, make in LINEN.items()},
    **{f"nnx/{name}": make for name, make in NNX.items()},
    "linen/attention": lambda: linen.MultiHeadDotProductAttention(4),
    "nnx/attention": lambda: nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs()),
    "nnx/LoRALinear": lambda: nnx.LoRALinear(32, 8, lora_rank=2, rngs=rngs()),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda run: run,
    "jit in remat in scan": lambda run: (
        lambda p, x: lax.scan(
            lambda n, row: (n + 1, jax.checkpoint(jax.jit(run))(p, row)), 0, x[None]
        )[1]
    ),
    "vmap": lambda run: lambda p, x: jax.vmap(run, (None, 0))(p, x[None]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("text", EIGHT)
def test_an_audit_finds_nothing_in_our_layers(text, name, place):
    with use_policy(text):
        run, params = loss_of(LAYERS[name]())
        report = policy.audit(PLACES[place](run), params, X, backward=True, params=(0, 1))
    assert not report.findings, str(report)
    assert report.eight_bit_matmul_share > 0.3 and any(op.is_backward for op in report.operations)


@pytest.mark.parametrize("text", EIGHT)
@pytest.mark.parametrize("way", ["autocast", "apply_policy"])
def test_an_audit_finds_nothing_in_flaxs_layers_under_a_policy(way, text):
    params = jax.eval_shape(Net().init, jax.random.key(0), X)
    if way == "autocast":
        report = policy.audit(Net().apply, params, X, policy=text, backward=True)
    else:
        run: Any = linen.apply_policy(Net(), text).apply
        report = policy.audit(run, params, X, backward=True)
    assert not report.findings, str(report)
    assert 0.5 < report.eight_bit_matmul_share < 1


def test_a_policy_is_applied_by_the_scope_where_every_matmul_is_of_int8():
    layer = linen.Dense(8)
    params = layer.init(jax.random.key(0), X)
    report = policy.audit(layer.apply, params, X, policy="p=f32,c=bf16,o=f32,m=i8")
    (dot,) = (op for op in report.operations if op.kind == "dot")
    assert dot.operands == ("int8", "int8") and dot.result == "int32"
    # the accumulator is returned: autocast would round it to bfloat16
    assert not any(op.kind == "cast" and op.result == "bfloat16" for op in report.operations[-4:])


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("Fp8DotGeneralOp", DEQUANTISED),
        ("NANOOFp8DotGeneralOp", DEQUANTISED),
        ("Fp8DirectDotGeneralOp", ACCUMULATOR),
    ],
)
def test_flaxs_own_operations_in_8_bits_are_told_apart(operation, kind):
    cls = getattr(flax.linen, operation, None) or getattr(flax.linen.fp8_ops, operation)
    layer = flax.linen.Dense(8, dtype=jnp.bfloat16, dot_general_cls=cls)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)

    def loss(params: Any, others: Any, x: Any) -> Any:
        return layer.apply({**others, "params": params}, x).astype(jnp.float32).sum()

    others = {name: tree for name, tree in variables.items() if name != "params"}
    report = policy.audit(loss, variables["params"], others, X, backward=True, params=0)
    found = {(f.kind, f.is_backward) for f in report.findings}
    assert {(kind, False), (kind, True)} <= found
    assert not {kind for kind, _ in found} & ({UNSCALED, DEQUANTISED, ACCUMULATOR} - {kind})


# --------------------------------------------------------------------------------------------------
# Summaries
# --------------------------------------------------------------------------------------------------

CONSOLE = {"width": 240, "no_color": True, "force_terminal": False}


def own_dot(*args: Any, **kwargs: Any) -> Any:
    return lax.dot_general(*args, **kwargs)


class LinenParts(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(32, (3,), name="conv")(x)
        x = linen.Dense(32, name="dense")(x)
        x = linen.Dense(32, name="own", dot_general=own_dot)(x)
        x = linen.MultiHeadDotProductAttention(4, name="mix")(x)
        x = linen.LayerNorm(name="norm")(x)
        x = linen.Dense(32, name="explicit", dtype=jnp.float32)(x)
        with policy.full_precision():
            x = linen.Dense(32, name="island")(x)
        return linen.Dense(8, name="ruled")(x)


class NnxParts(nnx.Module):
    def __init__(self) -> None:
        r = rngs()
        self.conv = nnx.Conv(32, 32, (3,), rngs=r)
        self.dense = nnx.Linear(32, 32, rngs=r)
        self.own = nnx.Linear(32, 32, dot_general=own_dot, rngs=r)
        self.mix = nnx.MultiHeadAttention(4, 32, decode=False, rngs=r)
        self.norm = nnx.LayerNorm(32, rngs=r)
        self.explicit = nnx.Linear(32, 32, dtype=jnp.float32, rngs=r)
        self.lora = nnx.LoRALinear(32, 32, lora_rank=2, rngs=r)

    def __call__(self, x: Any) -> Any:
        for part in (self.conv, self.dense, self.own, self.mix, self.norm, self.explicit):
            x = part(x)
        return self.lora(x)


def policies_in(table: str) -> dict[str, str]:
    """Returns the column of policies by path."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
    return {row[0]: row[2] for row in rows if len(row) > 3 and row[1]}


def test_tabulate_shows_8_bits_where_a_linen_layer_multiplies_in_them():
    rules = {"ruled": "p=f32,c=bf16,o=f32"}
    with use_policy("mixed_float8", rules=rules):
        table = LinenParts().tabulate(jax.random.key(0), X, console_kwargs=CONSOLE, depth=2)
    shown = policies_in(table)
    scaled = {path for path, text in shown.items() if text.endswith("m=f8")}
    assert scaled == {"", "dense", "mix", "mix/query", "mix/key", "mix/value", "mix/out"}
    assert {shown[path] for path in ("conv", "own", "norm")} == {"p=f32,c=bf16,o=f32"}
    assert shown["explicit"] == "p=f32,c=f32,o=f32" == shown["island"]


@pytest.mark.parametrize("way", ["ours", "apply_policy"])
def test_tabulate_shows_8_bits_where_an_nnx_layer_multiplies_in_them(way):
    if way == "ours":
        with use_policy("mixed_int8"):
            model: Any = NnxParts()
    else:
        model = nnx.apply_policy(NnxParts(), "mixed_int8")
    shown = policies_in(nnx.tabulate(model, X, console_kwargs=CONSOLE))
    scaled = {path for path, text in shown.items() if text.endswith("m=i8")}
    projections = {"mix/query", "mix/key", "mix/value", "mix/out"}
    # `apply_policy` overrides the dtype argument of a layer that was built before
    explicit = {"explicit"} if way == "apply_policy" else set[str]()
    assert scaled == {"", "dense", "mix", *projections, "lora", *explicit}
    assert {shown[path] for path in ("conv", "own", "norm", "lora/lora")} == {"p=f32,c=bf16,o=f32"}


# --------------------------------------------------------------------------------------------------
# Assertions
# --------------------------------------------------------------------------------------------------

KEPT = "p=f32,c=bf16,o=bf16"


@pytest.mark.parametrize("name", ["linen/attention", "nnx/attention", "linen/Einsum", "nnx/Linear"])
@pytest.mark.parametrize("text", [*EIGHT, "mixed_bfloat16"])
def test_assert_matmuls_obey_passes_for_our_layers(text, name):
    with use_policy(text):
        run, params = loss_of(LAYERS[name]())
        assert_matmuls_obey(run, (params, X), text, backward=True, params=0)
    other = "mixed_bfloat16" if text in EIGHT else "mixed_int8"
    with use_policy(text), pytest.raises(AssertionError, match="do not obey"):
        assert_matmuls_obey(run, (params, X), other, params=0)


def test_assert_matmuls_obey_takes_the_rules_of_a_model():
    model: Any = linen.apply_policy(Net(), "mixed_float8", rules={"stem|head": KEPT})
    args = (jax.eval_shape(Net().init, jax.random.key(0), X), X)
    rules = {"stem": KEPT, "head": KEPT}
    assert_matmuls_obey(model.apply, args, "mixed_float8", rules=rules, backward=True)
    assert_matmuls_obey(model.apply, args, "mixed_float8", backward=True, allow=("stem|head",))
    with pytest.raises(AssertionError) as raised:
        assert_matmuls_obey(model.apply, args, "mixed_float8", rules={"stem": KEPT}, backward=True)
    told = str(raised.value)
    # forward, and the gradients of its kernel and its input
    assert told.startswith("3 of 17 matmuls of parameters do not obey") and "at 'head'" in told
    assert "should be float8_e4m3fn or float8_e5m2" in told and "stem" not in told


def test_weight_gradients_in_compute_dtype_are_asserted():
    with use_policy("p=f32,c=bf16,o=f32,m=i8:compute"):
        run, params = loss_of(LAYERS["nnx/Linear"]())
        args = (params, X.astype(jnp.bfloat16))
        assert_matmuls_obey(run, args, "p=f32,c=bf16,o=f32,m=i8:compute", backward=True, params=0)
        with pytest.raises(AssertionError, match=r"1 of 2 matmuls .*\n.*\n    should be int8"):
            assert_matmuls_obey(run, args, "mixed_int8", backward=True, params=0)


def test_assert_dots_in_counts_8_bit_codes_by_their_short_names():
    with use_policy("mixed_int8"):
        run, params = loss_of(LAYERS["nnx/Linear"]())
        assert_dots_in(run, (params, X), "i8", accumulation="int32", backward=True)
        with pytest.raises(AssertionError, match=r"should multiply bfloat16:\n.* in int8, int8"):
            assert_dots_in(run, (params, X), "bf16")
    with use_policy("mixed_float8"):
        run, params = loss_of(LAYERS["nnx/Linear"]())
        assert_dots_in(run, (params, X), "f8", accumulation="f32", backward=True)


def test_rules_by_class_and_programs_without_a_matmul_of_a_parameter_are_refused():
    with pytest.raises(ValueError, match=r"does not know the class Dense. Give a pattern"):
        assert_matmuls_obey(jnp.matmul, (X, X), "f32", rules={flax.linen.Dense: "bf16"})
    with pytest.raises(AssertionError, match="no matmul of a parameter: nothing would be"):
        assert_matmuls_obey(lambda w, x: w["a"] + x @ x.T, ({"a": 1.0}, X[0]), "f32")
