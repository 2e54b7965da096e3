"""What audits, assertions, comparisons and summaries say of layers that multiply in 8 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx
from jax import lax

import policy
from mpmodules import linen, nnx, use_policy
from policy.inspect.audit.finding_kinds import ACCUMULATOR, DEQUANTISED, UNSCALED
from policy.inspect.audit.render.html import page
from policy.testing import assert_dots_in, assert_matmuls_obey
from tests.mpmodules.test_eight_bits import EIGHT, LINEN, NNX, Net, X, error, loss_of, rngs

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


def shapes_of(layer: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """Returns a function of params and an input, and the params; shapes of linen's."""
    if isinstance(layer, flax_nnx.Module):
        return loss_of(layer)
    return layer.apply, jax.eval_shape(layer.init, jax.random.key(0), X)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("text", EIGHT)
def test_an_audit_finds_nothing_in_our_layers(text, name, place):
    with use_policy(text):
        run, params = shapes_of(LAYERS[name]())
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
    ("operation", "dtype", "kind"),
    [
        ("Fp8DotGeneralOp", jnp.bfloat16, DEQUANTISED),
        ("NANOOFp8DotGeneralOp", jnp.bfloat16, DEQUANTISED),
        ("Fp8DirectDotGeneralOp", jnp.float16, ACCUMULATOR),
        ("Fp8DirectDotGeneralOp", jnp.bfloat16, None),
    ],
)
def test_flaxs_own_operations_in_8_bits_are_told_apart(operation, dtype, kind):
    cls = getattr(flax.linen, operation, None) or getattr(flax.linen.fp8_ops, operation)
    layer = flax.linen.Dense(8, dtype=dtype, dot_general_cls=cls)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)

    def loss(params: Any, others: Any, x: Any) -> Any:
        y: Any = layer.apply({**others, "params": params}, x)
        return y.astype(jnp.float32).sum()

    others = {name: tree for name, tree in variables.items() if name != "params"}
    report = policy.audit(loss, variables["params"], others, X, backward=True, params=0)
    found = {(f.kind, f.is_backward) for f in report.findings}
    assert kind is None or {(kind, False), (kind, True)} <= found
    assert not {kind for kind, _ in found} & ({UNSCALED, DEQUANTISED, ACCUMULATOR} - {kind})


def test_an_audit_counts_flops_of_matmuls_by_width(tmp_path):
    model: Any = linen.apply_policy(Net(), "mixed_int8", rules={"stem|head": KEPT})
    params = jax.eval_shape(Net().init, jax.random.key(0), X)
    report = policy.audit(model.apply, params, X)
    dots = [op for op in report.operations if op.kind == "dot"]
    flops = {w: sum(op.flops for op in dots if op.operands[0] == w) for w in ("int8", "bfloat16")}
    assert report.matmul_flops_by_dtype == flops and all(flops.values())
    share = flops["int8"] / sum(flops.values())
    assert report.eight_bit_matmul_share == pytest.approx(share)
    assert report.matmul_shares == pytest.approx({"8 bits": share, "half": 1 - share})
    assert f"matmuls in 8 bits: {share:.1%} of their FLOPs (i8 {share:.1%}, bf16" in str(report)
    assert "head  " in str(report) and "; matmuls: 8 bits 100%" in str(report)
    shown = report.to_html()
    assert f"{share:.0%} of matmul FLOPs in 8 bits" in shown and "FLOPs of matmuls:" in shown
    assert f"matmuls: 8 bits {share:.0%}, half {1 - share:.0%}" in shown
    assert '<span class="chip float8">int8</span>' in shown
    report.save(tmp_path / "audit.json")
    read = json.loads((tmp_path / "audit.json").read_text())
    assert read["eight_bit_matmul_share"] == pytest.approx(share)
    plain = policy.audit(Net().apply, params, X)
    assert plain.matmul_shares == {"float32": 1.0} and "8 bits" not in str(plain)


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
    assert scaled == {"", "dense", "conv", "mix", "mix/query", "mix/key", "mix/value", "mix/out"}
    assert {shown[path] for path in ("own", "norm")} == {"p=f32,c=bf16,o=f32"}
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
    assert scaled == {"", "dense", "conv", "mix", *projections, "lora", *explicit}
    assert {shown[path] for path in ("own", "norm", "lora/lora")} == {"p=f32,c=bf16,o=f32"}


# --------------------------------------------------------------------------------------------------
# Assertions
# --------------------------------------------------------------------------------------------------

KEPT = "p=f32,c=bf16,o=bf16"


@pytest.mark.parametrize("name", ["linen/attention", "nnx/attention", "linen/Einsum", "nnx/Linear"])
@pytest.mark.parametrize("text", [*EIGHT, "mixed_bfloat16"])
def test_assert_matmuls_obey_passes_for_our_layers(text, name):
    with use_policy(text):
        run, params = shapes_of(LAYERS[name]())
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
        assert_dots_in(run, (params, X), "f8", backward=True)
        with pytest.raises(AssertionError, match="2 operations should accumulate in float32"):
            assert_dots_in(run, (params, X), "f8", accumulation="f32", backward=True)


def test_rules_by_class_and_programs_without_a_matmul_of_a_parameter_are_refused():
    with pytest.raises(ValueError, match=r"one selects the class Dense, which .* Give a pattern"):
        assert_matmuls_obey(jnp.matmul, (X, X), "f32", rules={flax.linen.Dense: "bf16"})
    with pytest.raises(AssertionError, match="no matmul of a parameter: nothing would be"):
        assert_matmuls_obey(lambda w, x: w["a"] + x @ x.T, ({"a": 1.0}, X[0]), "f32")


# --------------------------------------------------------------------------------------------------
# Comparisons
# --------------------------------------------------------------------------------------------------


class Pair(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(8, name="head")(linen.relu(linen.Dense(16, name="up")(x)))


def losses(text: str, v: Any, x: Any) -> Any:
    def loss(v: Any) -> Any:
        with use_policy(text):
            return squares(v, x)

    return jax.grad(loss)(v)


def squares(v: Any, x: Any) -> Any:
    y: Any = Pair().apply(v, x)
    return (y.astype(jnp.float32) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "f32"])
@pytest.mark.parametrize("kind", ["f8", "i8"])
def test_compare_measures_the_error_that_8_bits_really_bring(kind, compute):
    text = f"p=f32,c={compute},o=f32,m={kind}"
    x = X[0]
    v = Pair().init(jax.random.key(0), x)
    real = jax.tree.map(error, losses(text, v, x), losses("float32", v, x))

    comparison = policy.compare(squares, v, x, policy=text, backward=True)
    found = [row.error for row in comparison.parameters]
    assert found == pytest.approx(jax.tree.leaves(real), rel=1e-2) and min(found) > 1e-3
    assert not comparison.unpaired and {row.path for row in comparison.activations} > {"up", "head"}
    assert {(one.path, one.operand) for one in comparison.codes} == {
        *((path, operand) for path in ("up", "head") for operand in ("input", "weight")),
        *((path, "cotangent") for path in ("up", "head")),
    }
    cotangents = {one.dtype for one in comparison.codes if one.operand == "cotangent"}
    assert cotangents == ({"int8"} if kind == "i8" else {"float8_e5m2"})


@pytest.mark.slow
def test_compare_counts_codes_that_saturate_and_that_vanish():
    x = jnp.ones((4, 16)).at[:, :4].set(1e-4).at[0, 8:].set(0.5)
    w = {"w": jnp.ones((16, 2)).at[0].set(0.0)}
    fn = lambda w, x: x @ w["w"]  # noqa: E731
    comparison = policy.compare(fn, w, x, policy="mixed_int8")
    shown = {one.operand: (one.saturated, one.underflow) for one in comparison.codes}
    assert shown["input"] == pytest.approx((40 / 64, 16 / 64))
    assert shown["weight"] == pytest.approx((30 / 32, 0))  # a weight that is zero does not vanish
    assert "operands in 8 bits" in str(comparison) and "62.50%     25.00%" in str(comparison)
    assert json.loads(comparison.to_json())["codes"][0]["saturated"] == 0.625
    page_ = page(policy.audit(fn, w, x, policy="mixed_int8"), comparison)
    assert "Operands in 8 bits" in page_ and "62.50%" in page_ and "in 8 bits" in page_


def test_compare_reads_codes_that_code_makes_by_hand():
    def fn(w: Any, x: Any, scale: Any) -> Any:
        codes = jnp.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn)
        weight = (w / (jnp.max(jnp.abs(w)) / 448)).astype(jnp.float8_e4m3fn)
        return lax.dot(codes, weight, preferred_element_type=jnp.float32)

    x = jnp.ones((2, 4)).at[0].set(1000.0)
    found = policy.compare(fn, jnp.eye(4), x, jnp.float32(1), params=0)
    shares = {one.operand: (one.saturated, one.underflow) for one in found.codes}
    assert shares == {"input": (0.5, 0.0), "weight": (0.25, 0.0)}


class Mixing(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Dense(32, name="stem")(x)
        return linen.MultiHeadDotProductAttention(4, name="mix")(linen.LayerNorm(name="norm")(x))


@pytest.mark.slow
def test_codes_that_attention_shares_are_of_each_projection_and_no_activation():
    params = Mixing().init(jax.random.key(0), X)
    found = policy.compare(Mixing().apply, params, X, policy="mixed_int8")
    inputs = [one.path for one in found.codes if one.operand == "input"]
    assert sorted(inputs) == ["mix/key", "mix/out", "mix/query", "mix/value", "stem"]
    assert not any(row.dtype == "int8" for row in found.rows)
    # a product of codes is in units of their scales: it is no counterpart of float32's
    assert "norm" not in found.unpaired and max(found["stem"].error, found["norm"].error) < 0.02


class OfHalves(linen.Module):
    """Code that has no trace in float32."""

    own_code = "keep"

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Dense(16, name="up")(x)
        if not self.is_initializing() and x.dtype != jnp.bfloat16:
            raise TypeError("This takes bfloat16.")
        return linen.Dense(8, name="head")(linen.relu(x))


@pytest.mark.slow
def test_code_without_a_trace_in_float32_is_compared_with_itself_without_the_codes():
    params = OfHalves().init(jax.random.key(0), X)
    truth = Pair().apply(params, X)
    found = policy.compare(OfHalves().apply, params, X, policy="mixed_int8")
    with use_policy("mixed_int8"):
        real = error(OfHalves().apply(params, X), truth)
    assert "can't be traced in float32" in found.notes[0]
    assert found.error == pytest.approx(real, rel=1e-2) and real > 5e-3


def test_suggest_keeps_convolutions_out():
    class Image(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.relu(linen.Conv(32, (3,), name="conv")(x))
            return linen.Dense(64, name="middle")(x)

    params = Image().init(jax.random.key(0), X)
    found = policy.suggest(
        Image().apply, params, X, policy="mixed_bfloat16", matmul="i8", error=0.05, smallest=16
    )
    with policy.use_policy("mixed_int8", found.rules):
        report = policy.audit(Image().apply, params, X)
    operands = {op.path: op.operands for op in report.operations if op.kind in MATMULS}
    assert operands == {"conv": ("bfloat16", "bfloat16"), "middle": ("int8", "int8")}


MATMULS = ("dot", "convolution")


def test_a_convolution_in_8_bits_is_compared_with_float32():
    class Image(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Conv(32, (3,), name="conv")(x)

    params = Image().init(jax.random.key(0), X)
    truth = Image().apply(params, X)
    for text in EIGHT:
        with use_policy(text):
            found = policy.compare(Image().apply, params, X)
            real = error(Image().apply(params, X), truth)
        assert found.error == pytest.approx(real, rel=1e-3)
        shown = {(row.path, row.operand) for row in found.codes}
        assert {("conv", "input"), ("conv", "weight")} <= shown
