"""Layers of both APIs under a policy with matmuls in 8 bits: programs, results and gradients; and
what audits, assertions, comparisons and summaries say of them.
"""

import collections
import contextlib
import json
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import policy
from mpmodules import linen, nnx, use_policy
from policy.inspect.audit.findings import ACCUMULATOR, UNSCALED
from policy.testing import assert_dots_in, assert_matmuls_obey
from tests.mpmodules.apis import APIS, BOTH, Text, dense, layer, layer_norm
from tests.mpmodules.test_summary import CONSOLE, cells
from tests.programs import named, operations

pytestmark = [
    pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning"),
    pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp:DeprecationWarning"),
]

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((4, 16, 32)), jnp.float32)
EIGHT = {"mixed_float8": ("float8_e4m3fn", "float8_e5m2"), "mixed_int8": ("int8", "int8")}
MXFP8, NVFP4 = (f"p=f32,c=bf16,o=f32,m={text}" for text in ("mxfp8", "nvfp4"))
BLOCKS = {MXFP8: ("float8_e4m3fn",) * 2, NVFP4: ("float4_e2m1fn",) * 2}
HALF, KEPT = ("bfloat16", "bfloat16"), "p=f32,c=bf16,o=bf16"


def of_nnx(name: str, *args: Any, **options: Any) -> Any:
    return lambda **k: getattr(nnx, name)(*args, **options, **k, rngs=flax_nnx.Rngs(0))


LAYERS: dict[str, Callable[..., Any]] = {
    "linen/Dense": lambda **k: linen.Dense(8, **k),
    "linen/Dense without a bias": lambda **k: linen.Dense(8, use_bias=False, **k),
    "linen/DenseGeneral": lambda **k: linen.DenseGeneral((2, 4), axis=(-2, -1), **k),
    "linen/DenseGeneral, batched": lambda **k: linen.DenseGeneral(4, axis=2, batch_dims=(0,), **k),
    "linen/Einsum": lambda **k: linen.Einsum((32, 5), "abc,cd->abd", **k),
    "linen/Einsum without a bias": lambda **k: linen.Einsum((32, 5), "...c,cd->...d", False, **k),
    "linen/Conv": lambda **k: linen.Conv(8, (3,), **k),
    "linen/Conv, strided": lambda **k: linen.Conv(
        8, (3,), 2, "CAUSAL", kernel_dilation=2, feature_group_count=2, use_bias=False, **k
    ),
    "nnx/Linear": of_nnx("Linear", 32, 8),
    "nnx/Linear without a bias": of_nnx("Linear", 32, 8, use_bias=False),
    "nnx/LinearGeneral": of_nnx("LinearGeneral", (16, 32), (2, 4), axis=(-2, -1)),
    "nnx/Einsum": of_nnx("Einsum", "abc,cd->abd", (32, 5), (5,)),
    "nnx/Conv": of_nnx("Conv", 32, 8, (3,)),
    "nnx/Conv, circular": of_nnx("Conv", 32, 8, (3,), padding="CIRCULAR"),
}
ATTENTION: dict[str, Callable[..., Any]] = {
    "linen/attention": lambda **k: linen.MultiHeadDotProductAttention(4, **k),
    "nnx/attention": of_nnx("MultiHeadAttention", 4, 32, decode=False),
}


def attention(width: int) -> Any:
    return layer(
        lambda nn: nn.MultiHeadDotProductAttention(4),
        lambda nnx, rngs: nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs),
    )


def net(self: Any, x: Any) -> Any:
    x = self.stem(self.conv(x))
    return self.head(jax.nn.relu(x + self.mix(self.norm(x))))


NET = Text(
    net,
    "Net",
    conv=layer(lambda nn: nn.Conv(32, (3,)), lambda nnx, rngs: nnx.Conv(32, 32, (3,), rngs=rngs)),
    stem=dense(32, 64),
    norm=layer_norm(64),
    mix=attention(64),
    head=dense(64, 8),
)


def dots(function: Any, *args: Any) -> collections.Counter[tuple[str, ...]]:
    """Returns the dtypes of both operands of each matmul and convolution of a program."""
    names = "dot_general", "conv_general_dilated", "scaled_dot"
    found = named(operations(function, *args), *names)
    return collections.Counter(op.inputs[:2] for op in found)


def loss_of(layer: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """Returns a function of params and an input, and the params."""
    if isinstance(layer, flax_nnx.Module):
        graphdef, params = flax_nnx.split(layer, flax_nnx.Param)
        return lambda p, x: flax_nnx.merge(graphdef, p)(x), params
    return lambda p, x: layer.apply(p, x), layer.init(jax.random.key(0), X)


def squared(run: Any) -> Callable[[Any, Any], Any]:
    return lambda p, x: (run(p, x).astype(jnp.float32) ** 2).sum()


def error(found: Any, truth: Any) -> float:
    found, truth = (np.asarray(a, np.float64).ravel() for a in (found, truth))
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def in_8_bits(layers: Any) -> list[tuple[str, str]]:
    """Returns policies, and names of layers that multiply in 8 bits by them."""
    pairs = [(text, name) for text in EIGHT for name in layers]
    return pairs + [(text, name) for text in BLOCKS for name in layers if "Conv" not in name]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("text", "name"), in_8_bits(LAYERS))
def test_a_layer_multiplies_three_times_in_8_bits_and_is_near_float32(text, name):
    results = []
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    for policy_text in (text, "float32"):
        with use_policy(policy_text):
            run, params = loss_of(LAYERS[name]())
            grads = jax.grad(squared(run), (0, 1))
            results.append((run(params, X), *jax.tree.leaves(grads(params, X))))
            if policy_text == text:
                seen = dots(grads, params, X)
    operands, cotangents = (EIGHT | BLOCKS)[text]
    if "Conv" in name:  # JAX convolves no two dtypes
        cotangents = operands
    expected = collections.Counter({(operands, operands): 1})
    expected[cotangents, operands] += 2
    assert seen == expected
    for ours, truth in zip(*results, strict=True):
        bound = {"mixed_float8": 0.12, MXFP8: 0.1, NVFP4: 0.35}.get(text, 0.04)
        assert error(ours, truth) < bound


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", ["linen/Dense", "linen/Conv", "nnx/Linear", "nnx/Conv"])
def test_a_boundary_hands_on_the_accumulator(name):
    run, params = loss_of(LAYERS[name](dtype_policy="p=f32,c=bf16,o=f32,m=i8"))
    y = run(params, X)
    assert y.dtype == jnp.float32
    assert not jnp.array_equal(y, y.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_projects_in_8_bits_and_quantizes_its_input_once(name):
    with use_policy("mixed_float8"):
        run, params = loss_of(ATTENTION[name]())
        seen = dots(run, params, X)
        jaxpr = jax.make_jaxpr(run)(params, X)
    assert seen == {("float8_e4m3fn", "float8_e4m3fn"): 4, HALF: 2}
    casts = [
        equation.outvars[0].aval.shape
        for equation in jaxpr.eqns
        if equation.primitive.name == "convert_element_type"
        and equation.outvars[0].aval.dtype == jnp.float8_e4m3fn
    ]
    assert casts.count(X.shape) == 1 and len(casts) == 6  # of four weights, x, and the mixed values


@pytest.mark.cases(slow=1)
@BOTH
@pytest.mark.parametrize("way", ["autocast", "apply_policy"])
def test_rules_keep_layers_out_of_code_that_knows_no_policy(api, way):
    plain, rules = api.theirs(NET, X), {"stem|head": KEPT}
    if way == "autocast":
        model, run = plain, policy.autocast(plain.pure, "mixed_int8", params=0, rules=rules)
        whole = policy.autocast(plain.pure, "mixed_int8", params=0)
        assert dots(whole, plain.params, X) == {("int8", "int8"): 7, HALF: 2}
        if api.name == "nnx":
            return  # a state has no names of modules
        assert dots(run, model.params, X) == {("int8", "int8"): 5, HALF: 4}
    else:
        model = api.port(NET, "mixed_int8", rules | {api.flax.Conv: KEPT}, X)
        run = model.pure
        assert dots(run, model.params, X) == {("int8", "int8"): 4, HALF: 5}
    gradients = jax.grad(squared(run))(model.params, X)
    truth = jax.grad(squared(plain.pure))(plain.params, X)
    for ours, true in zip(*map(jax.tree.leaves, (gradients, truth)), strict=True):
        assert ours.dtype == jnp.float32
        if jnp.linalg.norm(true) > 1e-3:  # a key's bias has none
            assert error(ours, true) < 0.1


@pytest.mark.slow
def test_a_gradient_that_autocast_rewrites_multiplies_forward_alone_in_8_bits():
    plain = APIS["linen"].theirs(NET, X)
    gradient = jax.grad(lambda p: squared(plain.pure)(p, X))
    inside = dots(policy.autocast(gradient, "mixed_int8", params=0), plain.params)
    assert inside["int8", "int8"] == 7
    assert set(inside) == {("int8", "int8"), HALF}


@pytest.mark.parametrize(
    ("dot", "found"),
    [
        (lambda w, x: jnp.dot(x, w, precision="highest"), ("bfloat16", "bfloat16")),
        (lambda w, x: jnp.dot(x, w, preferred_element_type=jnp.float32), ("int8", "int8")),
    ],
)
def test_words_of_a_line_hold_under_a_policy_in_8_bits(dot, found):
    weight = jnp.cos(jnp.arange(64.0).reshape(8, 8))
    function = policy.autocast(dot, "mixed_int8", params=0)
    x = jnp.sin(jnp.arange(16.0).reshape(2, 8))
    assert set(dots(function, weight, x)) == {found}
    result = function(weight, x)
    assert (result != result.astype(jnp.bfloat16).astype(jnp.float32)).any()  # unrounded


def own(*args: Any, **kwargs: Any) -> Any:
    return lax.dot_general(*args, **kwargs)


OUT: dict[str, tuple[Any, Any, str]] = {
    "an operation of the user's": ({"dot_general": own}, None, "bfloat16"),
    "an explicit dtype": ({"dtype": jnp.float32}, None, "float32"),
    "an island": ({}, policy.full_precision(), "float32"),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", ["linen/Dense", "nnx/Linear"])
@pytest.mark.parametrize("how", OUT)
def test_a_layer_is_kept_out_by(how, name):
    options, block, dtype = OUT[how]
    with use_policy("mixed_float8"):
        run, params = loss_of(LAYERS[name](**options))
        with block or contextlib.nullcontext():
            assert dots(run, params, X) == {(dtype, dtype): 1}


@pytest.mark.slow
def test_transposed_and_local_convolutions_stay_in_compute_dtype():
    stay = (
        ("mixed_float8", linen.ConvTranspose(4, (3,))),
        ("mixed_float8", linen.ConvLocal(4, (3,))),
    )
    for text, stays in (*stay, *((text, linen.Conv(4, (3,))) for text in BLOCKS)):
        with use_policy(text):
            run, params = loss_of(stays)
            assert set(dots(run, params, X)) == {HALF}
            cast = policy.autocast(flax.linen.Conv(4, (3,)).apply, text, params=0)
            assert text not in BLOCKS or set(dots(cast, params, X)) == {HALF}


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return linen.Dense(32)(x), None


def linen_blocks() -> Any:
    block = linen.scan(
        linen.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
    )()
    params = block.init(jax.random.key(0), X, None)
    return lambda p: block.apply(p, X, None)[0].astype(jnp.float32).sum(), params


def nnx_blocks() -> Any:
    rngs = flax_nnx.Rngs(0).split(2)
    layers = flax_nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))(rngs)
    graphdef, params = flax_nnx.split(layers)

    def loss(p: Any) -> Any:
        def body(x: Any, one: Any) -> Any:
            run = jax.checkpoint(lambda x, one: flax_nnx.merge(graphdef, one)(x))
            return run(x, one).astype(x.dtype), None

        return lax.scan(body, X, p)[0].sum()

    return loss, params


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [linen_blocks, nnx_blocks])
def test_scanned_and_rematerialized_layers_multiply_in_8_bits(blocks):
    with use_policy("mixed_int8"):
        loss, params = blocks()
        seen, leaves = dots(jax.grad(loss), params), jax.tree.leaves(jax.grad(loss)(params))
    assert seen == {("int8", "int8"): 3}  # a product is not recomputed
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)


SMALL = [LAYERS[name] for name in ("linen/Dense", "linen/Conv", "nnx/Linear", "nnx/Conv")]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    "policy", ["mixed_int8", "mixed_float8", "p=f32,c=bf16,o=f32,m=i8:compute", *BLOCKS]
)
@pytest.mark.parametrize("made", [*SMALL, *ATTENTION.values()])
def test_gradients_of_replicated_params_inside_of_shard_map_are_those_outside(made, policy):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    by_data = PartitionSpec("data")
    with use_policy(policy):
        run, params = loss_of(made())
        loss = squared(run)

        def mapped(params: Any, x: jax.Array) -> Any:
            mean = lambda *args: jax.lax.pmean(loss(*args), "data")  # noqa: E731
            return jax.grad(mean, argnums=(0, 1))(params, x)

        specs = (PartitionSpec(), by_data)
        inside = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=specs)(params, X)
        outside = jax.grad(loss, argnums=(0, 1))(params, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), inside, outside
    )


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize("policy", ["mixed_int8", "mixed_float8"])
@pytest.mark.parametrize("made", SMALL)
def test_large_inputs_times_small_weights_are_finite(made, policy):
    with use_policy(policy):
        apply, params = loss_of(made())
        # powers of two: the codes are the same
        small = jax.tree.map(lambda x: 2.0**-13 * x, params)
        large = apply(small, 2.0**123 * X)
        expected = 2.0**110 * np.asarray(apply(params, X), np.float32)
    assert np.abs(X).max() * 2.0**123 > 1e37
    np.testing.assert_allclose(np.asarray(large, np.float32), expected, rtol=1e-6)


ALL_LAYERS: dict[str, Callable[..., Any]] = {
    **LAYERS,
    **ATTENTION,
    "nnx/LoRALinear": of_nnx("LoRALinear", 32, 8, lora_rank=2),
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


@pytest.mark.cases(fast=2, slow=16)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("text", "name"), in_8_bits(ALL_LAYERS))
def test_an_audit_finds_nothing_in_our_layers(text, name, place):
    with use_policy(text):
        run, params = shapes_of(ALL_LAYERS[name]())
        report = policy.audit(PLACES[place](run), params, X, backward=True, params=(0, 1))
    assert not report.findings, str(report)
    assert report.eight_bit_matmul_share > 0.3 and any(op.is_backward for op in report.operations)


@pytest.mark.cases(slow=1)
@BOTH
@pytest.mark.parametrize("text", EIGHT)
@pytest.mark.parametrize("way", ["autocast", "apply_policy"])
def test_an_audit_finds_nothing_in_flaxs_layers_under_a_policy(api, way, text):
    if way == "autocast":
        plain = api.theirs(NET, X)
        report = policy.audit(plain.pure, plain.params, X, policy=text, backward=True)
    else:
        model = api.port(NET, text, None, X)
        report = policy.audit(model.pure, model.params, X, backward=True)
    assert not report.findings, str(report)
    assert 0.5 < report.eight_bit_matmul_share < 1


def test_a_policy_is_applied_by_the_scope_where_every_matmul_is_of_int8():
    run, params = loss_of(linen.Dense(8))
    report = policy.audit(run, params, X, policy="p=f32,c=bf16,o=f32,m=i8")
    (dot,) = (op for op in report.operations if op.kind == "dot")
    assert dot.operands == ("int8", "int8") and dot.result == "int32"


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize(
    ("operation", "dtype", "kind"),
    [
        ("Fp8DirectDotGeneralOp", jnp.float16, ACCUMULATOR),
        ("Fp8DirectDotGeneralOp", jnp.bfloat16, None),
    ],
)
def test_flaxs_own_operations_in_8_bits_are_told_apart(operation, dtype, kind):
    cls = getattr(flax.linen, operation, None) or getattr(flax.linen.fp8_ops, operation)
    layer = flax.linen.Dense(8, dtype=dtype, dot_general_cls=cls)
    others = dict(jax.eval_shape(layer.init, jax.random.key(0), X))
    params = others.pop("params")

    def loss(params: Any, others: Any, x: Any) -> Any:
        y: Any = layer.apply({**others, "params": params}, x)
        return y.astype(jnp.float32).sum()

    report = policy.audit(loss, params, others, X, backward=True, params=0)
    found = {(f.kind, f.is_backward) for f in report.findings}
    assert kind is None or {(kind, False), (kind, True)} <= found
    assert not {kind for kind, _ in found} & ({UNSCALED, ACCUMULATOR} - {kind})


def test_an_audit_counts_flops_of_matmuls_by_width():
    model = APIS["linen"].port(NET, "mixed_int8", {"stem|head": KEPT}, X)
    report = policy.audit(model.pure, model.params, X)
    found = [op for op in report.operations if op.kind in ("dot", "convolution")]
    flops = {w: sum(op.flops for op in found if op.operands[0] == w) for w in ("int8", "bfloat16")}
    assert report.matmul_flops_by_dtype == flops and all(flops.values())
    share = flops["int8"] / sum(flops.values())
    assert report.eight_bit_matmul_share == pytest.approx(share) and report.f32_matmul_share == 0
    assert report.matmul_shares == pytest.approx({"8 bits": share, "half": 1 - share})
    assert f"matmuls in 8 bits: {share:.1%} of their FLOPs (i8 {share:.1%}, bf16" in str(report)
    assert "; matmuls: 8 bits 100%" in str(report) and "i8 i8" in str(report)
    read = json.loads(report.to_json())
    assert read["eight_bit_matmul_share"] == pytest.approx(share)
    plain = policy.audit(APIS["linen"].theirs(NET, X).pure, model.params, X)
    assert plain.matmul_shares == {"float32": 1.0} and "8 bits" not in str(plain)


def parts(self: Any, x: Any) -> Any:
    x = self.ruled(self.explicit(self.norm(self.mix(self.own(self.dense(self.conv(x)))))))
    with policy.full_precision():
        return self.island(x)


parts.__name__ = "__call__"  # Flax's tables name other methods
PARTS = Text(
    parts,
    conv=layer(lambda nn: nn.Conv(32, (3,)), lambda nnx, rngs: nnx.Conv(32, 32, (3,), rngs=rngs)),
    dense=dense(32, 32),
    own=dense(32, 32, dot_general=own),
    mix=attention(32),
    norm=layer_norm(32),
    explicit=dense(32, 32, dtype=jnp.float32),
    ruled=dense(32, 32),
    island=dense(32, 32),
)
SCALED = {"", "dense", "conv", "mix", "mix/query", "mix/key", "mix/value", "mix/out"}
PLAIN = "p=f32,c=bf16,o=f32"


def test_tabulate_shows_8_bits_where_a_linen_layer_multiplies_in_them():
    with use_policy("mixed_float8", rules={"ruled": PLAIN}):
        model = PARTS.linen_class(linen)()
        table = model.tabulate(jax.random.key(0), X, console_kwargs=CONSOLE, depth=2)
    shown = {path: text for path, (text, _) in cells(table).items()}
    assert {path for path, text in shown.items() if text.endswith("m=f8")} == SCALED
    assert {shown[path] for path in ("own", "norm", "ruled")} == {PLAIN}
    assert shown["explicit"] == "p=f32,c=f32,o=f32" == shown["island"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ours", "apply_policy"])
def test_tabulate_shows_8_bits_where_an_nnx_layer_multiplies_in_them(way):
    with use_policy("mixed_int8" if way == "ours" else None):
        model: Any = PARTS.nnx_class(nnx)(rngs=nnx.Rngs(0))
    if way == "apply_policy":
        model = nnx.apply_policy(model, "mixed_int8", {"ruled": PLAIN})
    table = nnx.tabulate(model, X, console_kwargs=CONSOLE)
    shown = {path: text for path, (text, _) in cells(table).items()}
    # `apply_policy` overrides the dtype argument of a layer that was built before
    more = {"explicit"} if way == "apply_policy" else {"ruled"}
    assert {p for p, text in shown.items() if text.endswith("m=i8")} - {"island"} == SCALED | more
    assert {shown[path] for path in ("own", "norm")} == {PLAIN}


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("name", ["linen/attention", "nnx/attention", "linen/Einsum", "nnx/Linear"])
@pytest.mark.parametrize("text", [*EIGHT, *BLOCKS, "mixed_bfloat16"])
def test_assert_matmuls_obey_passes_for_our_layers(text, name):
    other = "mixed_int8" if text == "mixed_bfloat16" else "mixed_bfloat16"
    with use_policy(text):
        run, params = shapes_of(ALL_LAYERS[name]())
        assert_matmuls_obey(run, (params, X), text, backward=True, params=0)
        with pytest.raises(AssertionError, match="do not obey"):
            assert_matmuls_obey(run, (params, X), other, params=0)


def test_assert_matmuls_obey_takes_the_rules_of_a_model():
    model = APIS["linen"].port(NET, "mixed_float8", {"stem|head": KEPT}, X)
    run, args = model.pure, (model.params, X)
    rules = {"stem": KEPT, "head": KEPT}
    assert_matmuls_obey(run, args, "mixed_float8", rules=rules, backward=True)
    assert_matmuls_obey(run, args, "mixed_float8", backward=True, allow=("stem|head",))
    with pytest.raises(AssertionError) as raised:
        assert_matmuls_obey(run, args, "mixed_float8", rules={"stem": KEPT}, backward=True)
    told = str(raised.value)
    # forward, and the gradients of its kernel and its input
    assert told.startswith("3 of ") and "at 'head'" in told
    assert "should be float8_e4m3fn or float8_e5m2" in told and "stem" not in told


def test_weight_gradients_in_compute_dtype_are_asserted():
    with use_policy("p=f32,c=bf16,o=f32,m=i8:compute"):
        run, params = loss_of(ALL_LAYERS["nnx/Linear"]())
        args = (params, X.astype(jnp.bfloat16))
        assert_matmuls_obey(run, args, "p=f32,c=bf16,o=f32,m=i8:compute", backward=True, params=0)
        with pytest.raises(AssertionError, match=r"1 of 2 matmuls .*\n.*\n    should be int8"):
            assert_matmuls_obey(run, args, "mixed_int8", backward=True, params=0)


def test_assert_dots_in_counts_8_bit_codes_by_their_short_names():
    with use_policy("mixed_int8"):
        run, params = loss_of(ALL_LAYERS["nnx/Linear"]())
        assert_dots_in(run, (params, X), "i8", accumulation="int32", backward=True)
        with pytest.raises(AssertionError, match=r"should multiply bfloat16:\n.* in int8, int8"):
            assert_dots_in(run, (params, X), "bf16")
    with use_policy("mixed_float8"):
        run, params = loss_of(ALL_LAYERS["nnx/Linear"]())
        assert_dots_in(run, (params, X), "f8", backward=True)
        with pytest.raises(AssertionError, match="2 operations should accumulate in float32"):
            assert_dots_in(run, (params, X), "f8", accumulation="f32", backward=True)


def test_rules_by_class_and_programs_without_a_matmul_of_a_parameter_are_rejected():
    with pytest.raises(ValueError, match=r"one selects the class Dense, which .* Give a pattern"):
        assert_matmuls_obey(jnp.matmul, (X, X), "f32", rules={flax.linen.Dense: "bf16"})
    with pytest.raises(AssertionError, match="no matmul of a parameter: nothing would be"):
        assert_matmuls_obey(lambda w, x: w["a"] + x @ x.T, ({"a": 1.0}, X[0]), "f32")


class Pair(linen.Module):
    """A convolution and a matmul; code that asks for half has no trace in float32."""

    asks: bool = False
    own_code = "keep"

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(16, (3,), name="up")(x)
        if self.asks and not self.is_initializing() and x.dtype != jnp.bfloat16:
            raise TypeError("This takes bfloat16.")
        return linen.Dense(8, name="head")(linen.relu(x))


def squares(v: Any, x: Any) -> Any:
    y: Any = Pair().apply(v, x)
    return (y.astype(jnp.float32) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "f32"])
@pytest.mark.parametrize("kind", ["f8", "i8", "mxfp8", "nvfp4"])
def test_compare_measures_the_error_that_8_bits_really_bring(kind, compute):
    text, x = f"p=f32,c={compute},o=f32,m={kind}", X[:1]
    v = Pair().init(jax.random.key(0), x)
    gradients = []
    for scope in (text, "float32"):
        with use_policy(scope):
            gradients.append(jax.grad(squares)(v, x))
    real = jax.tree.map(error, *gradients)
    comparison = policy.compare(squares, v, x, policy=text, backward=True)
    found = [row.error for row in comparison.parameters]
    # XLA:CPU multiplies nvfp4's blocks in bfloat16: exact of codes, 0.003 off of the reference's
    # numbers, which are none. mxfp8 is 2% off in one row; the cause is not known.
    rel = 1e-2 if kind in ("f8", "i8") else 3e-2
    assert found == pytest.approx(jax.tree.leaves(real), rel=rel) and min(found) > 1e-3
    assert not comparison.unpaired and {row.path for row in comparison.activations} > {"up", "head"}
    layers = ("up", "head") if kind in ("f8", "i8") else ("head",)
    operands = [(path, o) for path in layers for o in ("input", "weight", "cotangent")]
    assert {(one.path, one.operand) for one in comparison.codes} == set(operands)
    of_matmul = [one for one in comparison.codes if one.path == "head"]
    cotangents = {one.dtype for one in of_matmul if one.operand == "cotangent"}
    by: Any = policy.get_policy(text).matmul
    assert cotangents == {str(by.gradients)}


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


@pytest.mark.slow
def test_compare_reads_codes_that_code_makes_by_hand():
    def fn(w: Any, x: Any, scale: Any) -> Any:
        codes = jnp.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn)
        weight = (w / (jnp.max(jnp.abs(w)) / 448)).astype(jnp.float8_e4m3fn)
        return lax.dot(codes, weight, preferred_element_type=jnp.float32)

    x = jnp.ones((2, 4)).at[0].set(1000.0)
    found = policy.compare(fn, jnp.eye(4), x, jnp.float32(1), params=0)
    shares = {one.operand: (one.saturated, one.underflow) for one in found.codes}
    assert shares == {"input": (0.5, 0.0), "weight": (0.25, 0.0)}


@pytest.mark.slow
def test_codes_that_attention_shares_are_of_each_projection_and_no_activation():
    model = APIS["linen"].theirs(NET, X)
    found = policy.compare(model.pure, model.params, X, policy="mixed_int8")
    inputs = [one.path for one in found.codes if one.operand == "input"]
    projections = ["mix/key", "mix/out", "mix/query", "mix/value"]
    assert sorted(inputs) == ["conv", "head", *projections, "stem"]
    assert not any(row.dtype == "int8" for row in found.rows)
    # a product of codes is in units of their scales: it is no counterpart of float32's
    assert "norm" not in found.unpaired and max(found["stem"].error, found["norm"].error) < 0.03


@pytest.mark.slow
def test_code_without_a_trace_in_float32_is_compared_with_itself_without_the_codes():
    params = Pair(True).init(jax.random.key(0), X)
    truth = Pair().apply(params, X)
    found = policy.compare(Pair(True).apply, params, X, policy="mixed_int8")
    with use_policy("mixed_int8"):
        real = error(Pair(True).apply(params, X), truth)
    assert "can't be traced in float32" in found.notes[0]
    assert found.error == pytest.approx(real, rel=1e-2) and real > 5e-3


OWG = "_overwrite_with_gradient"
SQUARE = jnp.asarray(RNG.normal(size=(16, 16)), jnp.bfloat16)


def leaves_equal(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("grads", ["float32", "compute"])
def test_flaxs_collection_of_scales_takes_the_value_that_plain_jax_gives_it(grads):
    model: Any = linen.Dense(16, dot_general_cls=flax.linen.Fp8DirectDotGeneralOp)
    with use_policy("mixed_bfloat16"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variables = model.init(jax.random.key(0), SQUARE)

    def loss_fn(variables, x, factor=1.0):
        with use_policy("mixed_bfloat16"):
            return jnp.square(model.apply(variables, x).astype(jnp.float32)).mean() * factor

    tx = policy.mixed_precision(
        optax.adamw(1e-2, weight_decay=0.1),
        "mixed_bfloat16",
        loss_scale="dynamic",
        clip_global_norm=1e-3,
    )
    opt_state = tx.init(variables)
    assert len(jax.tree.leaves(opt_state.inner)) == 5  # a count, two moments of kernel and bias

    @jax.jit
    def step(variables, opt_state, factor):
        scale = policy.loss_scale_of(opt_state)
        differentiated = policy.value_and_grad(loss_fn, loss_scale=scale, grads=grads)
        _, gradients = differentiated(variables, SQUARE, factor)
        return policy.apply_gradients(tx, variables, opt_state, gradients)

    new, after, finite = step(variables, opt_state, 1.0)
    assert finite
    expected = jax.grad(loss_fn)(variables, SQUARE)[OWG]
    found = jax.tree_util.tree_leaves_with_path(new[OWG])
    for (path, ours), theirs in zip(found, jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        if "output_grad" not in jax.tree_util.keystr(path):  # whose scale follows the loss scale
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert not leaves_equal(new[OWG], variables[OWG])
    assert not leaves_equal(new["params"], variables["params"])

    skipped, after, finite = step(new, after, np.nan)
    assert not finite
    assert leaves_equal(skipped, new)  # the collection keeps its old value too
    assert after.skipped == 1
