"""Normalizations of data far from zero, against float64, forward and backward, and their running
statistics: what Flax's get wrong in half precision, and ours of both APIs get right; what Flax's
take and reject; and batches without elements."""

from collections.abc import Callable
from typing import Any

import flax.linen as flax_linen
import flax.nnx as flax_nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors
from jax import export

from mpmodules import linen, nnx
from mpmodules.functions.normalization import Region, normalize
from policy.testing import assert_close_in_ulps

NORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "RMSNorm": {},
    "GroupNorm": {"num_groups": 2},
    "InstanceNorm": {},
    "BatchNorm": {"use_running_average": False},
}
APIS: dict[str, tuple[Any, Any]] = {"linen": (linen, flax_linen), "nnx": (nnx, flax_nnx)}
EPSILON = dict.fromkeys(NORMS, 1e-6) | {"BatchNorm": 1e-5}


def built(
    modules: Any, name: str, x: Any, *, features: Any = None, jit: bool = True, **options: Any
) -> tuple[Any, Callable[..., Any]]:
    """Returns the variables, and a call: variables and inputs to the result and new variables."""
    options = NORMS[name] | options
    wrap: Any = jax.jit if jit else lambda function: function
    if modules in (linen, flax_linen):
        layer = getattr(modules, name)(**options)

        def apply(variables: Any, *args: Any, **kwargs: Any) -> Any:
            return layer.apply(variables, *args, mutable=["batch_stats"], **kwargs)

        return layer.init(jax.random.key(0), x), wrap(apply)
    features = x.shape[-1] if features is None else features
    layer = getattr(modules, name)(features, rngs=flax_nnx.Rngs(0), **options)
    graph, state = flax_nnx.split(layer)

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        copy = flax_nnx.merge(graph, state, copy=True)
        return copy(*args, **kwargs), flax_nnx.state(copy)

    return state, wrap(call)


def normalized(modules: Any, name: str, x: Any, **options: Any) -> Any:
    variables, call = built(modules, name, x, **options)
    return call(variables, x)[0]


def leaves_named(tree: Any, *names: str) -> list[Any]:
    """Returns the leaves whose paths hold one of the names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [x for path, x in leaves if any(f"'{n}'" in jax.tree_util.keystr(path) for n in names)]


def exact(name: str, x: Any) -> np.ndarray:
    """The result of a fresh layer, in float64."""
    x = np.asarray(x, np.float64)
    shape, last = x.shape, x.ndim - 1
    if name == "RMSNorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON[name])
    if name == "GroupNorm":
        x = x.reshape(*shape[:-1], 2, shape[-1] // 2)
    axes = {
        "LayerNorm": (last,),
        "GroupNorm": (*range(1, last), last + 1),
        "InstanceNorm": tuple(range(1, last)),
        "BatchNorm": tuple(range(last)),
    }[name]
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return ((x - mean) / np.sqrt(variance + EPSILON[name])).reshape(shape)


HALVES = ["bfloat16", "float16"]
RNG = np.random.default_rng(0)
SHAPE = (4, 5, 5, 8)
MEANS = np.linspace(-1500.0, 1500.0, 8)  # another for each channel
OF_A_MEAN = [name for name in NORMS if name != "RMSNorm"]
both_apis = pytest.mark.parametrize("api", [linen, nnx], ids=["linen", "nnx"])


def images(half: str) -> jax.Array:
    return jnp.asarray(MEANS * 0.6 + RNG.normal(size=SHAPE) * (1 + np.arange(8)), half)


def far_from_zero(offset: float = 1000.0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.asarray(offset + np.random.default_rng(0).normal(size=shape), np.float32)


def with_values(variables: Any, **values: Any) -> Any:
    """Puts other values in the variables of those names."""

    def value(path: Any, leaf: Any) -> Any:
        names = [name for name in values if f"'{name}'" in jax.tree_util.keystr(path)]
        return jnp.full_like(leaf, values[names[0]]) if names else leaf

    return jax.tree_util.tree_map_with_path(value, variables)


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize("data", ["offset channels", "far from zero", "far from zero in float32"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NORMS)
@both_apis
def test_norms_are_within_one_ulp_of_the_output_dtype_far_from_zero(api, name, half, data):
    x = images(half) if data == "offset channels" else jnp.asarray(far_from_zero(), half)
    x = jnp.asarray(far_from_zero()) if data.endswith("float32") else x
    y = normalized(api, name, x, dtype_policy=f"p=f32,c={half},o={half}")
    assert y.dtype == half
    # Next to zero, float32's own last place at 1000 is what limits it.
    floor = 2.0**-5 if data == "offset channels" else 0.5
    assert_close_in_ulps(y, exact(name, x), 1, half, floor=floor)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", NORMS)
@both_apis
def test_norms_that_return_float32_round_nothing_and_have_float64s_gradients(api, name, policy):
    x = far_from_zero(shape=(4, 4, 4, 8))
    # A rounding of the input to bfloat16 would be off by 4.
    variables, call = built(api, name, x, dtype_policy=policy)
    y = call(variables, x)[0]
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact(name, x), atol=3e-4)
    weights = np.random.default_rng(1).normal(size=x.shape)
    found = jax.grad(lambda x: (call(variables, x)[0] * jnp.asarray(weights, "float32")).sum())(x)
    assert found.dtype == jnp.float32
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        variables, call = built(flax_linen, name, x, dtype=jnp.float64, jit=False)
        truth = jax.grad(lambda x: (call(variables, x)[0] * weights).sum())(x.astype(np.float64))
    assert truth.dtype == jnp.float64
    np.testing.assert_allclose(found, truth, atol=5e-4 * np.abs(truth).max())


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", OF_A_MEAN)
@both_apis
def test_a_fast_variance_given_by_the_user_is_obeyed(api, name):
    x = far_from_zero(shape=(64, 256))[:, None]
    theirs = APIS["linen" if api is linen else "nnx"][1]
    for fast, policy in ((True, "float32"), (False, "float32"), (False, None)):
        ours = normalized(api, name, x, dtype_policy=policy, use_fast_variance=fast)
        expected = normalized(theirs, name, x, use_fast_variance=fast)
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=0 if fast else 1e-6)
    chosen = normalized(api, name, x, dtype_policy="float32", use_fast_variance=None)
    np.testing.assert_array_equal(chosen, normalized(api, name, x, dtype_policy="float32"))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", NORMS)
@both_apis
def test_a_scale_that_half_cannot_hold_is_read_in_float32(api, name):
    x = far_from_zero(0.0)
    variables, call = built(api, name, x, dtype_policy="mixed_bfloat16")
    scaled = with_values(variables, scale=1.003)  # 1 in bfloat16
    before, after = call(variables, x)[0], call(scaled, x)[0]
    np.testing.assert_allclose(after, np.float32(1.003) * before, rtol=1e-6)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("half", HALVES)
@both_apis
def test_running_statistics_are_those_of_the_input_as_it_came(api, half):
    x = images(half)
    variables, call = built(api, "BatchNorm", x, momentum=0.75, dtype_policy=f"p=f32,c={half}")
    updated, wide = call(variables, x)[1], np.asarray(x, np.float64)
    mean, variance = leaves_named(updated, "mean", "var")
    assert {mean.dtype, variance.dtype} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(mean, 0.25 * wide.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(variance, 0.75 + 0.25 * wide.var((0, 1, 2)), rtol=1e-5)


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize("policy", ["c=f16", "mixed_float16", None])
@pytest.mark.parametrize("training", [True, False])
@both_apis
def test_batch_norm_of_a_large_variance_in_float16_is_exact(api, training, policy):
    x = np.asarray(300 * np.random.default_rng(0).normal(size=(256, 4)), np.float16)
    given = {"dtype": jnp.float16} if policy is None else {"dtype_policy": policy}
    variables, call = built(api, "BatchNorm", x, **given | {"use_running_average": not training})
    y, updated = call(with_values(variables, mean=0.25, var=1e5), x)
    running = (np.asarray(x, np.float64) - 0.25) / np.sqrt(1e5 + 1e-5)
    truth = exact("BatchNorm", x) if training else running
    assert_close_in_ulps(y, truth, 1, jnp.float16, floor=0.5)
    (found,) = leaves_named(updated, "var")
    expected = 0.99 * 1e5 + 0.01 * np.asarray(x, np.float64).var(0) if training else 1e5
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@both_apis
def test_masked_and_distributed_norms_take_two_passes_and_stay_accurate(api):
    x = far_from_zero(shape=(64, 256))
    mask = jnp.arange(256)[None] < 128
    variables, call = built(api, "LayerNorm", x, dtype_policy="float32")
    kept = np.asarray(x, np.float64)[:, :128]
    deviation = np.asarray(x, np.float64) - kept.mean(-1, keepdims=True)
    truth = deviation / np.sqrt(kept.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(call(variables, x, mask=mask)[0], truth, atol=1e-3)

    def over_devices(name: str, x: Any, **options: Any) -> Any:
        return jax.vmap(
            lambda x: normalized(api, name, x, axis_name="devices", **options), axis_name="devices"
        )(x)

    halves = jnp.asarray(x).reshape(64, 2, 128).swapaxes(0, 1)
    plain: dict[str, Any] = {"use_scale": False, "use_bias": False, "dtype_policy": "float32"}
    joined = over_devices("LayerNorm", halves, **plain).swapaxes(0, 1).reshape(64, 256)
    np.testing.assert_allclose(joined, exact("LayerNorm", x), atol=1e-3)
    x = images("float16")
    y = over_devices("BatchNorm", x[:, None], dtype_policy="f16")[:, 0]
    assert_close_in_ulps(y, exact("BatchNorm", x), 8, floor=2.0**-5)  # its data is not shifted


def test_statistics_that_may_not_be_written_are_rejected_as_by_flax():
    x, layer = images("bfloat16"), linen.BatchNorm(use_running_average=False, dtype_policy="bf16")
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(errors.ModifyScopeVariableError):
        layer.apply(variables, x)


def test_gradients_of_channels_that_are_all_but_constant_are_float64s():
    """One element of 200 lies apart, so that the mean is far closer to the others than they are to
    each other.
    """
    apart = jnp.asarray([302.0, 298.0, 1000.0, 0.0], jnp.bfloat16)
    x = jnp.full((200, 4), 300.0, jnp.bfloat16).at[17].set(apart)
    weight, ones = jnp.asarray(1 + RNG.normal(size=x.shape), jnp.bfloat16), jnp.ones((1, 4))

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        y, _, _ = normalize(x, scale, None, region=Region((0,)), epsilon=1e-5, dtype=jnp.bfloat16)
        return jnp.sum(y.astype(jnp.float32) * weight.astype(jnp.float32))

    by_x, by_scale = jax.jit(jax.grad(loss, (0, 1)))(x, ones)
    wide, ct = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    normal, root = exact("BatchNorm", x), 1 / np.sqrt(wide.var(0) + 1e-5)
    along = (ct * normal).mean(0)
    np.testing.assert_allclose(by_scale[0], along * 200, rtol=1e-4, atol=1e-3)
    truth = root * (ct - ct.mean(0) - normal * along)
    by_x = np.asarray(by_x, np.float64)
    np.testing.assert_allclose(by_x, truth, rtol=2**-8, atol=1e-4 * root.max())


MIXED: dict[str, Any] = {"dtype_policy": "mixed_bfloat16"}
FOUR_AXES = (2, 3, 5, 4)
EACH_API = pytest.mark.parametrize("api", APIS)
EACH_NAME = pytest.mark.parametrize("name", OF_A_MEAN)


def half(*shape: int) -> jax.Array:
    return jnp.asarray(3 + RNG.normal(size=shape), jnp.bfloat16)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def outcome(modules: Any, name: str, x: jax.Array, **options: Any) -> Any:
    """The result in float32, or the kind of the error."""
    try:
        return np.asarray(normalized(modules, name, x, jit=False, **options), np.float32)
    except Exception as error:
        return type(error)


def assert_like_flax(api: str, name: str, x: jax.Array, **options: Any) -> None:
    ours, theirs = APIS[api]
    found = outcome(ours, name, x, **options, **MIXED)
    expected = outcome(theirs, name, wide(x), **options)
    if isinstance(expected, type):
        assert found is expected
    else:
        np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.03)


@pytest.mark.cases(fast=1)
@EACH_API
@EACH_NAME
def test_epsilon_may_be_traced_and_differentiated(api, name):
    def of(modules: Any, x: jax.Array, **options: Any) -> Any:
        def loss(epsilon: jax.Array) -> jax.Array:
            y = normalized(modules, name, x, jit=False, epsilon=epsilon, **options)
            return jnp.sum(wide(y) ** 2)

        return jax.jit(jax.value_and_grad(loss))(jnp.float32(0.1))

    x, (ours, theirs) = half(2, 5, 4), APIS[api]
    np.testing.assert_allclose(of(ours, x, **MIXED), of(theirs, wide(x)), rtol=1e-2)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("epsilon", [np.asarray(0.1, np.float32), jnp.float32(0.1), 1, 0])
def test_epsilon_may_be_any_number_or_array(epsilon):
    x = half(2, 5, 4)
    found = normalized(nnx, "LayerNorm", x, epsilon=epsilon, **MIXED)
    expected = normalized(nnx, "LayerNorm", x, epsilon=float(epsilon), **MIXED)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.cases(slow=3)
@EACH_NAME
def test_a_program_of_symbolic_sizes_is_exported(name):
    x = half(3, 5, 4)
    variables, call = built(linen, name, x, **MIXED)
    batch, length = export.symbolic_shape("batch, length")
    symbolic = jax.ShapeDtypeStruct((batch, length, 4), x.dtype)
    exported = export.export(jax.jit(lambda x: call(variables, x)))(symbolic)
    plain = call(variables, x)
    for ours, theirs in zip(*map(jax.tree.leaves, (exported.call(x), plain)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.cases(fast=1, slow=6)
@EACH_API
@EACH_NAME
@pytest.mark.parametrize("shape", [(), (4,)])
def test_few_axes_are_taken_or_rejected_as_by_flax(api, name, shape):
    assert_like_flax(api, name, half(*shape), features=(shape or (1,))[-1])


GROUPS = (None, (1, -1), (2, 3), (1, 2, 3), (1, 2), -1, (0, 1, 2, 3), (0, 1, 3))
AXES: list[tuple[str, dict[str, Any]]] = [
    *(("GroupNorm", {"reduction_axes": axes}) for axes in GROUPS),
    ("LayerNorm", {"reduction_axes": (5,)}),
    ("LayerNorm", {"feature_axes": (5,)}),
    ("InstanceNorm", {"feature_axes": 0}),
    ("InstanceNorm", {"feature_axes": -4}),
    ("BatchNorm", {"axis": 4}),
]


@pytest.mark.cases(fast=1, slow=5)
@EACH_API
@pytest.mark.parametrize(("name", "options"), AXES)
def test_other_axes_are_taken_or_rejected_as_by_flax(api, name, options):
    axis = next(iter(options.values()))
    axis = axis[0] if isinstance(axis, tuple) else axis
    features = FOUR_AXES[-1 if name == "GroupNorm" else axis % 4]
    assert_like_flax(api, name, half(*FOUR_AXES), features=features, **options)


@pytest.mark.cases(fast=3, slow=8)
@EACH_API
@EACH_NAME
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((None, None), {}),
        ((), {"other": 1}),
        ((), {"x": 1}),
        ((None,), {"use_running_average": None}),
    ],
)
def test_arguments_that_flax_rejects_are_rejected(api, name, args, kwargs):
    x = half(2, 4)
    variables, call = built(APIS[api][0], name, x, jit=False, **MIXED)
    with pytest.raises(TypeError, match="argument"):
        call(variables, x, *args, **kwargs)


@pytest.mark.cases(fast=1)
@EACH_API
@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8)])
@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm"])
def test_nothing_normalizes_to_nothing(api, name, shape):
    x = jnp.zeros(shape, "bfloat16")
    assert normalized(APIS[api][0], name, x, dtype_policy="bf16").shape == shape


@pytest.mark.cases(fast=1)
@EACH_API
def test_running_statistics_that_are_stored_in_half_are_averaged_in_float32(api):
    """nnx keeps the dtype that they are stored in, as Flax does."""
    x = half(2, 5, 4)
    variables, call = built(APIS[api][0], "BatchNorm", x, momentum=0.75, **MIXED)
    stored = jax.tree.map(lambda s: s.astype("float16"), variables)  # 0 and 1 are the same in half
    wide_ones, found = (leaves_named(call(v, x)[1], "mean", "var") for v in (variables, stored))
    kept = jnp.dtype("float32" if api == "linen" else "float16")
    assert {leaf.dtype for leaf in found} == {kept}
    for a, b in zip(found, wide_ones, strict=True):
        np.testing.assert_array_equal(a, b.astype(kept))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda scale: {"bias": scale}, errors.ScopeParamNotFoundError),
        (lambda scale: {"scale": scale[:3]}, errors.ScopeParamShapeError),
    ],
)
def test_flax_rejects_a_variable_that_is_missing_or_of_another_shape(change, error):
    x = half(2, 8)
    variables, call = built(linen, "LayerNorm", x, use_bias=False, **MIXED)
    with pytest.raises(error):
        call({"params": change(variables["params"]["scale"])}, x)


def test_a_users_variable_is_asked():
    class Held(linen.BatchNorm):
        def variable(self, col: str, name: str, *args: Any, **kwargs: Any) -> Any:
            self.sow("asked", name, True)
            return super().variable(col, name, *args, **kwargs)

    layer, x = Held(use_running_average=False, **MIXED), half(2, 4)
    variables = layer.init(jax.random.key(0), x)
    _, updated = layer.apply(variables, x, mutable=["batch_stats", "asked"])
    assert set(updated["asked"]) == {"mean", "var"}


FEATURES = 3
VALUES = {
    "scale": np.full(FEATURES, 1.5, np.float32),
    "bias": np.full(FEATURES, 0.1, np.float32),
    "mean": np.asarray([0.5, -1.0, 2.0], np.float32),
    "var": np.asarray([2.0, 0.25, 1.0], np.float32),
}
MEAN, VARIANCE = VALUES["mean"], VALUES["var"]
POLICIES = ["float32", "mixed_bfloat16", "bfloat16", "mixed_float16", "p=f16,c=f16,o=f32"]
X = np.asarray(np.random.default_rng(0).normal(2, 3, (4, 5, FEATURES)), np.float32)
MASKS: dict[str, Any] = {
    "all": np.zeros((4, 5, FEATURES), bool),
    "rows": np.zeros((4, 1, 1), bool),
    "one feature": np.ones(X.shape, bool) & (np.arange(3) != 1),
}


def step(
    api: str, x: Any, policy: str | None, mask: Any = None, flax: bool = False, **options: Any
) -> dict[str, Any]:
    """Returns a training call's result, its running statistics, and the gradients of a weighted sum
    of squares, in float32: without weights, the gradient by the input is zero but for epsilon.
    """
    given: dict[str, Any] = {} if policy is None else {"dtype_policy": policy}
    modules = APIS[api][flax]
    like = jnp.zeros((1, FEATURES))
    variables, call = built(modules, "BatchNorm", like, jit=False, **options, **given)
    variables = with_values(variables, **VALUES)

    def loss(variables: Any, x: Any) -> tuple[Any, Any]:
        y, after = call(variables, x, mask=mask)
        weights = 1 + jnp.sin(jax.lax.stop_gradient(x).astype(jnp.float32)) / 2
        squares = weights * jnp.square(y.astype(jnp.float32))
        return squares.sum(where=None if mask is None else mask), (y, after)

    gradients, (y, after) = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
    found = {"y": y, "x": gradients[1]}
    found |= {name: leaves_named(gradients[0], name)[0] for name in ("scale", "bias")}
    found |= {name: leaves_named(after, name)[0] for name in ("mean", "var")}
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


def assert_kept(found: dict[str, Any]) -> None:
    np.testing.assert_array_equal(found["mean"], MEAN)
    np.testing.assert_array_equal(found["var"], VARIANCE)
    assert all(np.isfinite(value).all() for value in found.values())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_fast_variance": True},
    {"use_fast_variance": False},
    {"momentum": 0.0},
    {"dtype": jnp.float32},
]


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.filterwarnings("ignore:.* has an explicit dtype:policy.DtypePolicyWarning")
@EACH_API
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_batch_leaves_running_statistics_as_they_were(api, policy, dtype):
    assert_kept(step(api, jnp.zeros((0, FEATURES), dtype), policy))
    if (policy, dtype) == ("mixed_bfloat16", "bfloat16"):
        for options in OPTIONS:
            assert_kept(step(api, jnp.zeros((4, 0, FEATURES), dtype), policy, **options))


@pytest.mark.cases(slow=3)
@EACH_API
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_where_a_mask_keeps_nothing_the_running_statistics_stay_and_normalize(api, policy, mask):
    dtype = "bfloat16" if "bfloat16" in policy else "float32"
    x = jnp.asarray(X, dtype)
    found = step(api, x, policy, mask=MASKS[mask])
    if mask == "one feature":
        assert (found["mean"][1], found["var"][1]) == (MEAN[1], VARIANCE[1])
        wide = np.asarray(x, np.float32)[..., 0].mean()
        np.testing.assert_allclose(found["mean"][0], 0.99 * MEAN[0] + 0.01 * wide, rtol=1e-5)
        assert all(np.isfinite(value).all() for value in found.values())
        return
    assert_kept(found)
    expected = (np.asarray(x, np.float32) - MEAN) / np.sqrt(VARIANCE + 1e-5) * 1.5 + 0.1
    np.testing.assert_allclose(found["y"], expected, rtol=1e-2, atol=2e-2)


@pytest.mark.cases(slow=3)
@EACH_API
@pytest.mark.parametrize("fast", [True, False])
def test_a_mask_that_keeps_something_does_what_flax_does(api, fast):
    options: dict[str, Any] = {"mask": X[..., :1] > 1, "use_fast_variance": fast}
    found = step(api, jnp.asarray(X), "float32", **options)
    expected = step(api, jnp.asarray(X), None, flax=True, **options)
    assert float(jnp.abs(expected["x"]).max()) > 0.1
    for name, value in expected.items():
        # Beside float64, both are off by up to 7e-6 of the largest number: a fast variance cancels.
        most = 2e-5 * float(jnp.abs(value).max())
        np.testing.assert_allclose(found[name], value, rtol=0, atol=most, err_msg=name)


@pytest.mark.cases(slow=1)
@EACH_API
def test_devices_whose_mask_keeps_nothing_are_left_out(api):
    mask = np.ones(X.shape, bool)
    mask[1], mask[2] = False, False

    def everywhere(x: Any, mask: Any) -> dict[str, Any]:
        call = jax.vmap(
            lambda x, mask: step(api, x, "float32", mask=mask, axis_name="devices"),
            axis_name="devices",
        )
        return {name: np.asarray(value) for name, value in call(x[:, None], mask[:, None]).items()}

    found, expected = everywhere(X, mask), everywhere(X[[0, 3]], mask[[0, 3]])
    for name in ("mean", "var"):
        np.testing.assert_allclose(found[name][1], expected[name][0], rtol=1e-5)
    np.testing.assert_allclose(found["y"][[0, 3]], expected["y"], rtol=1e-5)
    assert_kept({name: value[0] for name, value in everywhere(X, np.zeros(X.shape, bool)).items()})


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("fast", [None, True, False])
@EACH_API
def test_statistics_over_devices_are_those_of_all_rows_that_a_mask_keeps(api, fast):
    mask = np.arange(X[..., :1].size).reshape(4, 5, 1) % 4 > np.arange(4).reshape(4, 1, 1) - 1
    options: dict[str, Any] = {} if fast is None else {"use_fast_variance": fast}
    found = jax.vmap(
        lambda x, mask: step(api, x, "float32", mask=mask, axis_name="devices", **options),
        axis_name="devices",
    )(X, mask)
    assert len({int(each.sum()) for each in mask}) > 2
    expected = step(api, X.reshape(-1, FEATURES), "float32", mask=mask.reshape(-1, 1), **options)
    for name in ("mean", "var"):
        np.testing.assert_allclose(found[name], [expected[name]] * 4, rtol=1e-5)
    kept = np.broadcast_to(mask, X.shape).reshape(-1, FEATURES)
    for name in ("y", "x"):
        values = np.asarray(found[name]).reshape(-1, FEATURES)
        np.testing.assert_allclose(values[kept], expected[name][kept], rtol=1e-5, atol=1e-5)


@pytest.mark.cases(slow=1)
@EACH_API
def test_without_a_policy_an_empty_batch_is_flaxs(api):
    found = step(api, jnp.zeros((0, FEATURES)), None)
    expected = step(api, jnp.zeros((0, FEATURES)), None, flax=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert name not in ("mean", "var") or np.isnan(value).all()


@pytest.mark.parametrize("name", ["LayerNorm", "InstanceNorm"])
@EACH_API
def test_a_port_computes_the_variance_in_two_passes_where_its_author_asks_for_it(api, name):
    ours, theirs = APIS[api]

    def program(**options: Any) -> str:
        if api == "linen":
            port = ours.apply_policy(getattr(theirs, name)(**options), "float32")
            return str(jax.make_jaxpr(port.init_with_output)(jax.random.key(0), X))
        layer = getattr(theirs, name)(FEATURES, **options, rngs=theirs.Rngs(0))
        return str(jax.make_jaxpr(ours.apply_policy(layer, "float32"))(X))

    assert program(use_fast_variance=False) != program(use_fast_variance=True) == program()
