import importlib.util
import pathlib
import types
import unittest
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import DynamicLossScale, NoOpLossScale, StaticLossScale, all_finite, select_tree
from policy.grads.finiteness import _sum, _sum_by_matmul, all_squares_finite, fusion_barrier
from policy.grads.loss_scale import get_loss_scale, unscale_by_reciprocal, unscale_tree

FINITE, NOT = jnp.array(True), jnp.array(False)


def test_a_scale_by_a_fixed_number_or_none_has_no_leaves_and_never_changes():
    none, static = NoOpLossScale(), StaticLossScale(2.0**15)
    for scale in (none, static):
        assert scale.adjust(NOT) is scale
        assert jax.tree.leaves(scale) == []
    tree = {"a": jnp.float16(4.0), "n": jnp.int32(3), "k": jax.random.key(0)}
    assert none.scale(tree) is none.unscale(tree) is tree
    assert none.loss_scale == 1
    scaled = static.scale(tree)
    assert scaled["a"].dtype == jnp.float32
    assert scaled["a"] == 2.0**17  # float16 ends at 65504
    assert scaled["n"] == 3
    assert static.unscale(scaled)["a"] == 4.0


def test_unscaling_divides_so_that_no_scale_is_rounded_or_flushed():
    thirds = jnp.float32(3) * jnp.arange(1.0, 100.0, dtype=jnp.float32)
    np.testing.assert_array_equal(unscale_tree(thirds, 3), np.arange(1.0, 100.0, dtype=np.float32))
    assert unscale_tree(jnp.float32(2.0**127), 2.0**127) == 1.0


YES, NO = True, False
IN_STEPS, PATIENT = (
    {"loss_scale": 16.0, "period": 3},
    {"loss_scale": 64.0, "period": 2, "hysteresis": 2},
)


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize(
    ("fields", "flags", "expected"),
    [
        (IN_STEPS, [YES] * 7, [16, 16, 32, 32, 32, 64, 64]),
        # a fall starts the period anew
        (IN_STEPS, [YES, YES, NO, *[YES] * 3], [16, 16, 8, 8, 8, 16]),
        ({"loss_scale": 4.0, "min_loss_scale": 2.0}, [NO] * 3, [2, 2, 2]),
        ({"loss_scale": 2.0**-125, "min_loss_scale": 0.0}, [NO] * 2, [2.0**-126] * 2),
        ({"loss_scale": 8.0, "period": 1, "max_loss_scale": 16.0}, [YES] * 3, [16, 16, 16]),
        ({"loss_scale": 2.0**127, "period": 1}, [YES] * 2, [2.0**127] * 2),  # beyond float32
        (PATIENT, [NO] * 3, [64, 32, 16]),
        (PATIENT, [NO, YES, NO], [64, 64, 32]),
        # a period of finite steps restores the patience
        (PATIENT, [NO, YES, YES, NO, NO], [64, 64, 128, 128, 64]),
    ],
)
def test_the_scale_grows_falls_and_stays_within_its_bounds(fields, flags, expected):
    values: list[float] = []
    scale: Any = DynamicLossScale(**fields)
    assert len(jax.tree.leaves(scale)) == (3 if "hysteresis" in fields else 2)
    for flag in flags:
        scale = scale.adjust(jnp.array(flag))
        values.append(float(scale.loss_scale))
    assert values == expected


def test_no_field_is_lost_in_jit_or_a_tree_round_trip():
    fields = {"period": 7, "factor": 4, "min_loss_scale": 128.0, "max_loss_scale": 2.0**20}
    start = DynamicLossScale(256.0, **fields)
    assert [leaf.dtype for leaf in jax.tree.leaves(start)] == [jnp.float32, jnp.int32]
    for made in (jax.tree.map(lambda x: x, start), jax.jit(lambda s: s)(start)):
        assert {name: getattr(made, name) for name in fields} == fields
    assert jax.jit(lambda s: s.adjust(NOT))(start).loss_scale == 128.0  # jmp: 64, then 1


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), 1e39])
def test_a_scale_that_is_not_positive_is_rejected_where_it_is_used(scale):
    made, ones = StaticLossScale(scale), jnp.ones(2)
    for use in (
        lambda: made.scale(ones),
        lambda: made.unscale(ones),
        lambda: get_loss_scale(made),
        lambda: DynamicLossScale(np.float32(-1)).scale(ones),
    ):
        with pytest.raises(ValueError, match="loss_scale should be positive and finite, but got"):
            use()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hysteresis": 1.5}, "hysteresis should be a whole number from 1 to 2147483647, but"),
        ({"loss_scale": 16.0, "max_loss_scale": 8.0}, r"between .* and max_loss_scale=8\.0, but"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "should lie between 0 and max_loss_scale"),
    ],
)
def test_bad_settings_are_rejected_by_name(fields, text):
    with pytest.raises(ValueError, match=text):
        DynamicLossScale(**fields)


def test_get_loss_scale_reads_every_way_of_saying_it():
    assert get_loss_scale(None) == NoOpLossScale()
    assert isinstance(get_loss_scale("dynamic"), DynamicLossScale)
    assert get_loss_scale(8) == get_loss_scale(jnp.float32(8)) == StaticLossScale(8)
    kept = DynamicLossScale()
    assert get_loss_scale(kept) is kept
    with pytest.raises(TypeError, match="loss_scale should be None, 'dynamic', a positive number"):
        get_loss_scale(True)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_all_finite_sees_every_leaf(bad, dtype):
    tree = {"a": jnp.ones((2, 3), dtype), "b": jnp.ones(4, dtype)}
    others = {"n": jnp.arange(3), "k": jax.random.key(0)}
    assert all_finite(tree | others) and all_finite(others) and all_finite(None)
    for name, x in tree.items():
        assert not all_finite({**tree, **others, name: x.at[-1].set(bad)})


def test_select_tree_gates_and_rejects_what_is_no_boolean_scalar():
    a, b = {"x": jnp.ones(2), "n": jnp.int32(1)}, {"x": jnp.zeros(2), "n": jnp.int32(0)}
    for flag, chosen in ((FINITE, a), (NOT, b)):
        picked = jax.jit(select_tree)(flag, a, b)
        jax.tree.map(np.testing.assert_array_equal, picked, chosen)
    assert select_tree(FINITE, None, None) is None
    for pred in (jnp.ones(1, bool), jnp.float32(1)):
        with pytest.raises(AssertionError, match="expected boolean scalar for pred, but got"):
            select_tree(pred, a, b)


def test_the_fusion_barrier_keeps_the_flag_and_outlives_xlas_simplifications():
    assert fusion_barrier(FINITE) and not fusion_barrier(NOT)
    np.testing.assert_array_equal(jax.vmap(fusion_barrier)(jnp.array([True, False])), [True, False])
    compiled = jax.jit(fusion_barrier).lower(FINITE).compile().as_text()
    assert compiled is not None
    assert " sort(" in compiled  # without it the flag is inlined into every leaf's select


def test_unscaling_by_the_reciprocal_is_exact_for_every_power_of_two():
    x = np.random.default_rng(0).uniform(1, 2, size=64).astype(np.float32)
    unscale = jax.jit(unscale_by_reciprocal)
    for exponent in range(-126, 128):
        scale = np.float32(2.0**exponent)
        np.testing.assert_array_equal(unscale(x * scale, scale), x)
    # the reciprocal and the products are rounded: 2 ulps of 2^-23 at most
    for scale in (3.0, 1000.0, 1.7e38):
        np.testing.assert_allclose(unscale(x * np.float32(scale), scale), x, rtol=2.0**-22)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("scale", [None, 0.5, 2.0**15])
def test_one_element_whose_square_is_not_finite_is_seen_in_any_leaf(dtype, scale):
    tree = {"a": jnp.ones((2, 3)), "b": jnp.ones(4, dtype), "c": jnp.bfloat16(1)}
    finite = jax.jit(lambda tree: all_squares_finite(tree, scale))
    assert finite(tree)
    assert all_squares_finite({}, scale)
    beyond = 1.9e19 * (scale or 1)
    for value in (np.nan, np.inf, -np.inf, beyond, -beyond):
        if np.isfinite(value) and dtype == jnp.float16:
            continue
        assert not finite({**tree, "b": tree["b"].at[2].set(value)})
        assert not finite({**tree, "c": jnp.bfloat16(value)})


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize(
    ("tree", "scale", "is_finite"),
    [
        (jnp.full(4096, 1.8e19), None, True),  # each square is finite, their sum is not
        (jnp.full(4096, 1.8e19, jnp.bfloat16), None, True),
        (jnp.zeros(2).at[1].set(3e38), 2.0**70, True),
        # the magnitudes of a scaled leaf are added up, a leaf by itself
        ([jnp.float32(3e38), jnp.float32(-3e38)], 2.0**127, True),
        (jnp.full(2, 3e38), 2.0**127, False),
        (jnp.full(16, 2e18), 1.0, False),
        (jnp.full(16, 2e18), None, True),
        (jnp.complex64(1.4e19 + 1.4e19j), None, False),  # the squared magnitude
        (jnp.full(4, 65504, jnp.float16), 1.0, True),
        (jnp.full(4, 65504, jnp.float16), 2.0**-50, False),
    ],
)
def test_squares_are_of_true_gradients(tree, scale, is_finite):
    assert all_squares_finite(tree, scale) == is_finite


def test_squares_of_float64_are_taken_in_float64():
    with jax.enable_x64(True):
        for value, is_finite in ((1e150, True), (1e156, False), (np.inf, False)):
            assert all_squares_finite(jnp.full(2, value), 8.0) == is_finite


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("shape", [(512, 256), (256, 512), (2, 256, 256), (64,), (3, 3, 128, 256)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("value", [1.0, np.inf, -np.inf, np.nan])
def test_the_sum_by_matmul_is_finite_where_the_sum_is(shape, value, dtype):
    magnitudes = jnp.abs(jnp.full(shape, 0.5, dtype).at[(1,) * len(shape)].set(value))
    total, expected = _sum_by_matmul(magnitudes), _sum(magnitudes)  # the former runs on TPUs
    assert total.dtype == jnp.float32
    assert jnp.isfinite(total) == jnp.isfinite(expected) == np.isfinite(value)
    np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("scale", "healed"), [(0.0, 1.0), (-8.0, 1.0), (np.nan, 1.0), (np.inf, 2.0**20)]
)
def test_a_scale_that_was_overwritten_comes_back(scale, healed):
    structure = jax.tree.structure(DynamicLossScale(max_loss_scale=2.0**20))
    broken = structure.unflatten([jnp.float32(scale), jnp.int32(0)])
    assert broken.adjust(False).loss_scale == healed


@pytest.mark.slow
def test_jmps_own_tests_pass():
    pytest.importorskip("absl.testing.absltest")
    found = importlib.util.find_spec("jmp")
    path = pathlib.Path(str(found and found.origin)).parent / "_src" / "loss_scale_test.py"
    if not path.exists():
        pytest.skip("jmp is not installed")
    text = path.read_text()
    text = text.replace("from jmp._src import loss_scale as jmp", "import policy as jmp")
    module = types.ModuleType("jmp_loss_scale_test")
    exec(compile(text, str(path), "exec"), module.__dict__)
    outcome = unittest.TestResult()
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own arithmetic overflows
        unittest.defaultTestLoader.loadTestsFromModule(module).run(outcome)
    assert outcome.testsRun >= 20
    assert not outcome.errors + outcome.failures
