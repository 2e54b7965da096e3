"""What Flax's normalisations take and refuse, ours of half inputs under a policy take and refuse as
well.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors
from jax import export

from mpmodules import linen, nnx
from tests.mpmodules.norm_layers import NORMS, WINGS, built, leaves_named, normalised

RNG = np.random.default_rng(0)
MIXED: dict[str, Any] = {"dtype_policy": "mixed_bfloat16"}
NAMES = [name for name in NORMS if name != "RMSNorm"]
SHAPE = (2, 3, 5, 4)
EACH_WING = pytest.mark.parametrize("wing", WINGS)
EACH_NAME = pytest.mark.parametrize("name", NAMES)


def half(*shape: int) -> jax.Array:
    return jnp.asarray(3 + RNG.normal(size=shape), jnp.bfloat16)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def outcome(modules: Any, name: str, x: jax.Array, **options: Any) -> Any:
    """The result in float32, or the kind of the error."""
    try:
        return np.asarray(normalised(modules, name, x, jit=False, **options), np.float32)
    except Exception as error:
        return type(error)


def assert_like_flax(wing: str, name: str, x: jax.Array, **options: Any) -> None:
    ours, theirs = WINGS[wing]
    found = outcome(ours, name, x, **options, **MIXED)
    expected = outcome(theirs, name, wide(x), **options)
    if isinstance(expected, type):
        assert found is expected
    else:
        np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.03)


# --- epsilon --------------------------------------------------------------------------------------


@EACH_WING
@EACH_NAME
def test_epsilon_may_be_traced_and_differentiated(wing, name):
    def of(modules: Any, x: jax.Array, **options: Any) -> Any:
        def loss(epsilon: jax.Array) -> jax.Array:
            y = normalised(modules, name, x, jit=False, epsilon=epsilon, **options)
            return jnp.sum(wide(y) ** 2)

        return jax.jit(jax.value_and_grad(loss))(jnp.float32(0.1))

    x, (ours, theirs) = half(2, 5, 4), WINGS[wing]
    np.testing.assert_allclose(of(ours, x, **MIXED), of(theirs, wide(x)), rtol=1e-2)


@pytest.mark.parametrize("epsilon", [np.asarray(0.1, np.float32), jnp.float32(0.1), 1, 0])
def test_epsilon_may_be_any_number_or_array(epsilon):
    x = half(2, 5, 4)
    found = normalised(nnx, "LayerNorm", x, epsilon=epsilon, **MIXED)
    expected = normalised(nnx, "LayerNorm", x, epsilon=float(epsilon), **MIXED)
    np.testing.assert_array_equal(found, expected)


# --- shapes ---------------------------------------------------------------------------------------


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


@EACH_WING
@EACH_NAME
@pytest.mark.parametrize("shape", [(), (4,)])
def test_few_axes_are_taken_or_refused_as_by_flax(wing, name, shape):
    assert_like_flax(wing, name, half(*shape), features=(shape or (1,))[-1])


GROUPS = (None, (1, -1), (2, 3), (1, 2, 3), (1, 2), -1, (0, 1, 2, 3), (0, 1, 3))
AXES: list[tuple[str, dict[str, Any]]] = [
    *(("GroupNorm", {"reduction_axes": axes}) for axes in GROUPS),
    ("LayerNorm", {"reduction_axes": (5,)}),
    ("LayerNorm", {"feature_axes": (5,)}),
    ("InstanceNorm", {"feature_axes": 0}),
    ("InstanceNorm", {"feature_axes": -4}),
    ("BatchNorm", {"axis": 4}),
]


@EACH_WING
@pytest.mark.parametrize(("name", "options"), AXES)
def test_other_axes_are_taken_or_refused_as_by_flax(wing, name, options):
    axis = next(iter(options.values()))
    axis = axis[0] if isinstance(axis, tuple) else axis
    features = SHAPE[-1 if name == "GroupNorm" else axis % 4]
    assert_like_flax(wing, name, half(*SHAPE), features=features, **options)


@EACH_WING
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
def test_arguments_that_flax_refuses_are_refused(wing, name, args, kwargs):
    x = half(2, 4)
    variables, call = built(WINGS[wing][0], name, x, jit=False, **MIXED)
    with pytest.raises(TypeError, match="argument"):
        call(variables, x, *args, **kwargs)


@EACH_WING
@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8)])
@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm"])
def test_nothing_normalises_to_nothing(wing, name, shape):
    x = jnp.zeros(shape, "bfloat16")
    assert normalised(WINGS[wing][0], name, x, dtype_policy="bf16").shape == shape


# --- running statistics ---------------------------------------------------------------------------


@EACH_WING
def test_running_statistics_that_are_stored_in_half_are_averaged_in_float32(wing):
    """nnx keeps the dtype that they are stored in, as Flax does."""
    x = half(2, 5, 4)
    variables, call = built(WINGS[wing][0], "BatchNorm", x, momentum=0.75, **MIXED)
    stored = jax.tree.map(lambda s: s.astype("float16"), variables)  # 0 and 1 are the same in half
    wide_ones, found = (leaves_named(call(v, x)[1], "mean", "var") for v in (variables, stored))
    kept = jnp.dtype("float32" if wing == "linen" else "float16")
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
def test_flax_refuses_a_variable_that_is_missing_or_of_another_shape(change, error):
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
