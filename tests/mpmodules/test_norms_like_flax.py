"""What Flax's normalisations take and refuse, ours of half inputs under a policy take and refuse as
well.
"""

from __future__ import annotations

from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import export

from mpmodules import linen, nnx
from policy import use_policy

RNG = np.random.default_rng(0)
OPTIONS: dict[str, dict[str, Any]] = {
    "BatchNorm": {"use_running_average": False},
    "GroupNorm": {"num_groups": 2},
    "InstanceNorm": {},
    "LayerNorm": {},
}
SHAPE = (2, 3, 5, 4)


def half(*shape: int) -> jax.Array:
    return jnp.asarray(3 + RNG.normal(size=shape), jnp.bfloat16)


def linen_layer(name: str, module: Any = linen, **options: Any) -> Any:
    policy = {"dtype_policy": "mixed_bfloat16"} if module is linen else {}
    return getattr(module, name)(**OPTIONS[name] | options, **policy)


def nnx_layer(name: str, features: Any = SHAPE[-1], module: Any = nnx, **options: Any) -> Any:
    with use_policy("mixed_bfloat16"):
        return getattr(module, name)(features, **OPTIONS[name] | options, rngs=flax_nnx.Rngs(0))


def outcome(call: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """The result in float32, or the kind of the error."""
    try:
        return np.asarray(call(x, *args, **kwargs), np.float32)
    except Exception as error:
        return type(error)


def assert_like_flax(
    wing: str, name: str, x: jax.Array, *args: Any, features: Any = None, **options: Any
) -> None:
    kwargs = options.pop("kwargs", {})
    if wing == "linen":
        found, expected = (
            outcome(
                lambda x, *a, m=m, **k: m.init_with_output(jax.random.key(0), x, *a, **k)[0],
                y,
                *args,
                **kwargs,
            )
            for m, y in (
                (linen_layer(name, **options), x),
                (linen_layer(name, flax_linen, **options), wide(x)),
            )
        )
    else:
        features = x.shape[-1:] if features is None else features
        features = features[0] if len(features) == 1 else features
        found, expected = (
            outcome(
                lambda x, *a, m=m, **k: nnx_layer(name, features, m, **options)(x, *a, **k),
                y,
                *args,
                **kwargs,
            )
            for m, y in ((nnx, x), (flax_nnx, wide(x)))
        )
    if isinstance(expected, type):
        assert found is expected
    else:
        np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.03)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


# --- epsilon --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_epsilon_may_be_traced_and_differentiated(name):
    x = half(2, 5, 4)

    def loss(epsilon, layer, x):
        y, _ = layer.init_with_output(jax.random.key(0), x)
        return jnp.sum(jnp.asarray(y, jnp.float32) ** 2)

    def of(module, x):
        return jax.jit(
            jax.value_and_grad(lambda e: loss(e, linen_layer(name, module, epsilon=e), x))
        )(jnp.float32(0.1))

    np.testing.assert_allclose(of(linen, x), of(flax_linen, wide(x)), rtol=1e-2)


@pytest.mark.parametrize(
    "epsilon", [np.float32(0.1), np.asarray(0.1, np.float32), jnp.float32(0.1), 1, 0]
)
def test_epsilon_may_be_any_number_or_array(epsilon):
    x = half(2, 5, 4)
    found = nnx_layer("LayerNorm", epsilon=epsilon)(x)
    expected = nnx_layer("LayerNorm", epsilon=float(epsilon))(x)
    np.testing.assert_array_equal(found, expected)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_a_program_of_symbolic_sizes_is_exported(name):
    layer, x = linen_layer(name), half(3, 5, 4)
    variables = layer.init(jax.random.key(0), x)

    def run(x):
        return layer.apply(variables, x, mutable=["batch_stats"])

    batch, length = export.symbolic_shape("batch, length")
    symbolic = jax.ShapeDtypeStruct((batch, length, 4), x.dtype)
    exported = export.export(jax.jit(run))(symbolic)
    for ours, plain in zip(jax.tree.leaves(exported.call(x)), jax.tree.leaves(run(x)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(), (4,)])
def test_few_axes_are_taken_or_refused_as_by_flax(wing, name, shape):
    assert_like_flax(wing, name, half(*shape), features=(shape or (1,))[-1:])


@pytest.mark.parametrize(
    "axes", [None, (1, -1), (2, 3), (1, 2, 3), (1, 2), -1, (0, 1, 2, 3), (0, 1, 3)]
)
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_groups_over_other_axes_are_those_of_flax(wing, axes):
    assert_like_flax(wing, "GroupNorm", half(*SHAPE), reduction_axes=axes)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LayerNorm", {"reduction_axes": (5,)}),
        ("LayerNorm", {"feature_axes": (5,)}),
        ("InstanceNorm", {"feature_axes": 0}),
        ("InstanceNorm", {"feature_axes": -4}),
        ("BatchNorm", {"axis": 4}),
    ],
)
def test_axes_that_flax_refuses_are_refused(wing, name, options):
    axis = next(iter(options.values()))
    axis = axis[0] if isinstance(axis, tuple) else axis
    assert_like_flax(wing, name, half(*SHAPE), features=(SHAPE[axis % 4],), **options)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((None, None), {}),
        ((), {"other": 1}),
        ((), {"x": 1}),
        ((None,), {"use_running_average": None}),
    ],
)
def test_arguments_that_flax_refuses_are_refused(wing, name, args, kwargs):
    with pytest.raises(TypeError, match="argument"):
        if wing == "linen":
            linen_layer(name).init_with_output(jax.random.key(0), half(2, 4), *args, **kwargs)
        else:
            nnx_layer(name)(half(2, 4), *args, **kwargs)


# --- running statistics ---------------------------------------------------------------------------


def test_running_statistics_that_are_stored_in_half_are_averaged_in_float32():
    layer, x = linen_layer("BatchNorm", momentum=0.75), half(2, 5, 4)
    variables = layer.init(jax.random.key(0), x)
    stored = variables | {
        "batch_stats": jax.tree.map(lambda s: s.astype("float16"), variables["batch_stats"])
    }
    updated = [layer.apply(v, x, mutable=["batch_stats"])[1] for v in (variables, stored)]
    jax.tree.map(np.testing.assert_array_equal, *updated)  # 0 and 1 are the same in half
    assert {leaf.dtype for leaf in jax.tree.leaves(updated[1])} == {jnp.dtype(jnp.float32)}


def test_nnx_keeps_the_dtype_that_running_statistics_are_stored_in():
    layer, x = nnx_layer("BatchNorm", momentum=0.75), half(2, 5, 4)
    for variable in (layer.mean, layer.var):
        variable.set_value(variable[...].astype("float16"))
    layer(x)
    assert {layer.mean[...].dtype, layer.var[...].dtype} == {jnp.dtype("float16")}
    np.testing.assert_allclose(
        layer.mean[...], 0.25 * np.asarray(x, np.float64).mean((0, 1)), rtol=1e-3
    )


def test_a_user_s_variable_is_asked():
    class Held(linen.BatchNorm):
        def variable(self, col: str, name: str, *args: Any, **kwargs: Any) -> Any:
            self.sow("asked", name, True)
            return super().variable(col, name, *args, **kwargs)

    layer, x = Held(use_running_average=False, dtype_policy="mixed_bfloat16"), half(2, 4)
    variables = layer.init(jax.random.key(0), x)
    _, updated = layer.apply(variables, x, mutable=["batch_stats", "asked"])
    assert set(updated["asked"]) == {"mean", "var"}
