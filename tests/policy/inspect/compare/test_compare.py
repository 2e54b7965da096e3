"""compare says of a function what running it twice says, in every kind of program."""

import functools
import json
import math
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mpmodules import linen as nn
from mpmodules import nnx
from policy import use_policy
from policy.inspect.compare import statistics
from policy.inspect.compare.compare import compare
from tests.policy.errors import normal, relative
from tests.programs import apply

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(0)


def half_model(w: Any, x: Any) -> Any:
    with jax.named_scope("first"):
        x = jnp.tanh(x.astype(BF16) @ w.astype(BF16))
    with jax.named_scope("second"):
        return jnp.sin(x @ w.astype(BF16)).astype(F32)


def paths(rows: Any) -> list[str]:
    return [row.path for row in rows]


# -------------------------------------------------------------------------------------- the numbers


@pytest.mark.slow
def test_the_statistics_of_two_arrays_are_what_numpy_says() -> None:
    reference = np.array([1.0, 2.0, 1e-9, 1e-5, 1e6, -3.0, 0.0, np.inf], np.float32)
    with np.errstate(over="ignore"):
        value = (reference * np.float32(1.001)).astype(np.float16)
    numbers = np.asarray(statistics.measured(value, jnp.asarray(reference)))
    found = dict(zip(statistics.NAMES, numbers, strict=True))
    names = ("underflow", "subnormal", "overflow", "undefined")
    assert [found[name] for name in names] == [1 / 8] * 4 and found["reference_largest"] == 1e6
    assert math.isinf(found["error"]) and found["distance"] == 1 and math.isinf(found["largest"])


@pytest.mark.slow
def test_error_and_cosine_are_those_of_the_vectors_and_fills_of_masks_are_left_out() -> None:
    truth = RNG.normal(size=(64,))
    value = truth + 0.1 * RNG.normal(size=(64,))
    fill = np.finfo(np.float32).min
    masked = [jnp.asarray(np.append(array, fill), F32) for array in (value, truth)]
    found = np.asarray(statistics.measured(masked[0], masked[1]), np.float64)
    cosine = value @ truth / np.linalg.norm(value) / np.linalg.norm(truth)
    np.testing.assert_allclose(found[:2], np.array([relative(value, truth), 1 - cosine]), rtol=1e-5)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("scale", "error"), [(1e-28, 1.0), (1e25, 0.0)])
def test_numbers_whose_squares_float32_does_not_hold_have_an_error_below_1e18(scale, error):
    reference = jnp.asarray([1.0, 2.0, -3.0], F32) * F32(scale)
    found = np.asarray(statistics.measured(jnp.zeros(3), reference))
    assert found[0] == error and found[2] == 1.0


@pytest.mark.slow
def test_each_row_says_what_running_the_function_twice_says() -> None:
    w, x = normal(8, 8), normal(4, 8)
    comparison = compare(half_model, w, x)
    half = jax.jit(lambda w, x: jnp.tanh(x.astype(BF16) @ w.astype(BF16)))(w, x)
    first = np.tanh(np.asarray(x, np.float64) @ np.asarray(w, np.float64))
    second = np.sin(first @ np.asarray(w, np.float64))
    assert paths(comparison.activations) == ["first", "second"] and comparison.route == "as written"
    rows = comparison["first"], comparison["second"]
    right = [relative(half, first), relative(jax.jit(half_model)(w, x), second)]
    np.testing.assert_allclose([row.error for row in rows], right, rtol=1e-3)
    assert (rows[0].entering, rows[1].entering) == (0, rows[0].error)
    assert comparison.error == comparison.outputs[0].error == rows[1].error
    assert (rows[0].dtype, rows[0].limit) == ("bfloat16", float(jnp.finfo(BF16).max))
    assert 0 < rows[0].largest <= 1 and rows[0].headroom < 1e-30
    assert comparison.first_jump is None


@pytest.mark.slow
def test_gradients_are_those_of_running_the_derivative_twice() -> None:
    w, x = normal(8, 8), normal(4, 8)
    loss = lambda params, x: jnp.square(half_model(params["w"], x)).sum()  # noqa: E731
    comparison = compare(loss, {"w": w}, x, backward=True)
    half = jax.jit(jax.grad(loss))({"w": w}, x)["w"]
    wide = lambda w: jnp.square(jnp.sin(jnp.tanh(x @ w) @ w)).sum()  # noqa: E731
    assert paths(comparison.parameters) == ["w"]
    assert paths(comparison.gradients) == ["second", "first"]
    right = relative(half, jax.jit(jax.grad(wide))(w))
    np.testing.assert_allclose(comparison.parameters[0].error, right, rtol=1e-2)
    assert comparison.gradients[0].error > 0


@pytest.mark.slow
def test_a_loss_scale_lifts_gradients_out_of_the_underflow() -> None:
    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope("dense"):
            y = x.astype(F16) @ w.astype(F16)
        return 1e-10 * jnp.sum(y.astype(F32))

    lost, kept = (
        compare(loss, normal(4, 4), normal(4, 4), backward=True, loss_scale=scale)
        for scale in (1.0, 2.0**24)
    )
    assert lost["dense"].error < 1e-3
    assert lost.parameters[0].underflow == lost.parameters[0].error == 1.0
    assert kept.parameters[0].underflow == 0 and kept.parameters[0].error < 1e-2


# -------------------------------------------------------------------------- where the error is made


def deep(layers: int, x: Any, ws: Any, dtype: Any, planted: int | None = None) -> Any:
    """Pre-norm attention and feed-forward blocks; one multiplies by what float16 can't hold."""
    x = x.astype(dtype)
    with jax.named_scope("Net"):
        for i in range(layers):
            with jax.named_scope(f"layer_{i}"):
                with jax.named_scope("attention"):
                    size = jnp.sqrt(jnp.mean(jnp.square(x.astype(F32)), -1, keepdims=True))
                    y = x / size.astype(dtype)
                    weights = jax.nn.softmax((y @ y.T).astype(F32) * F32(0.1)).astype(dtype)
                    x = x + weights @ y
                with jax.named_scope("dense"):
                    y = x @ ws[i % 2].astype(dtype)
                    y = y * jnp.asarray(3e4, dtype) * jnp.asarray(1e3, dtype) if i == planted else y
                x = x + y * jnp.asarray(0.1, dtype)
        return x.astype(F32)


@pytest.fixture(scope="module")
def weights() -> Any:
    generator = np.random.default_rng(1)
    return tuple(jnp.asarray(generator.normal(size=s), F32) for s in ((4, 8), (2, 8, 8)))


@pytest.mark.slow
def test_an_overflow_at_depth_is_named_and_its_successors_are_not(weights: Any) -> None:
    comparison = compare(lambda x, ws: deep(6, x, ws, F16, planted=3), *weights)
    assert comparison.first_jump == "layer_3/dense" and comparison.jump_step is None
    row = comparison["layer_3/dense"]
    assert row.is_jump and row.overflow > 0 and math.isinf(row.error) and row.entering < 0.01
    assert not comparison["layer_2/dense"].is_jump and not comparison["layer_4/dense"].is_jump
    assert "The error jumps first at layer_3/dense, in mul, test_compare.py:" in str(comparison)


@pytest.mark.slow
def test_a_clean_model_jumps_nowhere_in_either_half_dtype(weights: Any) -> None:
    for dtype in (F16, BF16):
        comparison = compare(lambda x, ws, dtype=dtype: deep(2, x, ws, dtype), *weights)
        assert comparison.first_jump is None and "The error jumps nowhere." in str(comparison)
        assert all(0 < row.error < 0.05 for row in comparison.activations)


@pytest.mark.slow
def test_an_overflow_in_one_step_of_a_scan_is_named_with_its_step() -> None:
    def layers(x: Any, scales: Any) -> Any:
        def layer(x: Any, scale: Any) -> Any:
            with jax.named_scope("block"):
                x = x * scale.astype(F16)
            return x, None

        with jax.named_scope("layers"):
            return lax.scan(layer, x.astype(F16), scales)[0].astype(F32).sum()

    scales = jnp.asarray([1.0, 1.5, 1.5, 6e4, 1.0], F32)
    comparison = compare(layers, normal(4, scale=9.0), scales)
    steps = comparison["layers/block"].steps
    assert comparison.first_jump == "layers/block" and comparison.jump_step == 3
    assert max(steps[:3]) < 0.01 and steps[3] == steps[4] == math.inf
    assert "at layers/block, step 3 of its scan" in str(comparison)
    scales = scales.at[3].set(jnp.nan)
    assert compare(layers, normal(4), scales).notes[0].startswith("NaN in the inputs: args[1].")


@pytest.mark.slow
def test_underflow_and_cancellation_are_jumps_of_the_layers_that_make_them() -> None:
    def small(x: Any) -> Any:
        with jax.named_scope("fine"):
            x = x.astype(F16) * F16(0.5)
        with jax.named_scope("small"):
            x = x * F16(1e-4) * F16(1e-4)
        with jax.named_scope("after"):
            return x * F16(1e4)

    def cancels(x: Any) -> Any:
        with jax.named_scope("fine"):
            x = x.astype(BF16) + BF16(1000)
        with jax.named_scope("centered"):
            return x - BF16(1000)

    lost = compare(small, normal(32))
    assert lost.first_jump == "small" and lost["small"].underflow == 1.0
    assert lost["after"].is_jump is False
    assert compare(cancels, normal(32)).first_jump == "centered"


# ---------------------------------------------------------------------------- every kind of program


def _cond(x: Any, flag: Any) -> Any:
    return lax.cond(flag[0] > 0, lambda x: jnp.sin(x), lambda x: jnp.cos(x) * 2, x)


def _cond_on_half(x: Any, flag: Any) -> Any:
    return lax.cond(jnp.sum(x.astype(F32)) > 0, lambda x: jnp.sin(x), lambda x: jnp.cos(x) * 2, x)


def _while(x: Any, flag: Any) -> Any:
    step = lambda c: (c[0] + 1, jnp.sin(c[1]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < flag.shape[0], step, (0, x))[1]


def _while_on_half(x: Any, flag: Any) -> Any:
    is_large = lambda x: jnp.sum(jnp.abs(x.astype(F32))) > 1.0  # noqa: E731
    return lax.while_loop(is_large, lambda x: x * jnp.asarray(0.5, x.dtype), x)


def _whiles(x: Any, flag: Any) -> Any:
    step = lambda c: (c[0] + 1, jnp.sin(c[1]))  # noqa: E731
    rows = jnp.arange(x.shape[0])
    run = lambda n, x: lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]  # noqa: E731
    return jax.vmap(run)(rows, x)


def _nested_scans(x: Any, flag: Any) -> Any:
    inner = lambda x, _: (jnp.sin(x) + x, None)  # noqa: E731
    outer = lambda x, _: (lax.scan(inner, x, None, length=2)[0], x)  # noqa: E731
    x, ys = lax.scan(outer, x, None, length=3, reverse=True)
    return x + ys[0]


def _remat(x: Any, flag: Any) -> Any:
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x)


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


def _custom(x: Any, flag: Any) -> Any:
    return jax.nn.relu(_clipped(x)) + jax.jit(jax.nn.silu)(x)


def _scattered(x: Any, flag: Any) -> Any:
    y = x.at[jnp.asarray([0, 0])].add(x[:2]).at[1].apply(jnp.sin)
    return y + jnp.cumsum(x, 0) + lax.reduce_window(x, BF16(0), lax.add, (1, 3), (1, 1), "SAME")


def _sorted(x: Any, flag: Any) -> Any:
    values, order = lax.top_k(jnp.sin(x), 2)
    return jnp.take_along_axis(x, order, -1) * values


def _dropped(x: Any, flag: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    noise = jax.random.normal(jax.random.key(1), x.shape, BF16)
    return jnp.where(keep, jnp.sin(x), BF16(0)) + noise


def _bits(x: Any, flag: Any) -> Any:
    bits = lax.bitcast_convert_type(jnp.sin(x), jnp.uint16) & jnp.uint16(0xFFF0)
    rounded = lax.reduce_precision(x, 8, 7) + lax.reduce_precision(x, 8, 3)
    return lax.bitcast_convert_type(bits, BF16) + rounded


def _platform(x: Any, flag: Any) -> Any:
    return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


def _linear(x: Any, flag: Any) -> Any:
    y = jnp.einsum("ij,kj->ik", x, x, preferred_element_type=F32)
    z = lax.dot_general(flag, flag, (((0,), (0,)), ((), ())), precision="BF16_BF16_F32")
    conv = lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME")[0, 0]
    return conv + (y[:, :1] + z).astype(BF16)


LOOPS = (_while, _while_on_half, _whiles, _nested_scans)
BRANCHES = (_cond, _cond_on_half, *LOOPS, _remat, _custom, _platform)
PROGRAMS = {f.__name__: f for f in (*BRANCHES, _scattered, _sorted, _dropped, _bits, _linear)}


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_outputs_of_both_programs_are_those_of_running_each_by_itself(name: str) -> None:
    """The float32 program is the same function with its half dtypes taken for float32."""
    fn, flag = PROGRAMS[name], jnp.ones(3)

    def of(dtype: Any) -> Any:
        def named(x: Any, flag: Any) -> Any:
            with jax.named_scope("named"):
                return fn(jnp.tanh(x.astype(dtype)), flag).astype(F32)

        return named

    x = normal(4, 4)
    comparison = compare(of(BF16), x, flag)
    half = jax.jit(of(BF16))(x, flag)
    error = comparison["named"].error
    assert 0 < error < 0.05 and comparison.error == error
    if name in ("_bits", "_dropped", "_linear", "_scattered", "_while_on_half"):
        return  # float32 draws other numbers, has other bits
    with jax.numpy_dtype_promotion("standard"):
        wide = jax.jit(of(F32))(x, flag)
    np.testing.assert_allclose(error, relative(half, wide), rtol=1e-2)


def test_host_callbacks_that_return_nothing_fire_once_and_others_in_both_programs() -> None:
    seen: list[Any] = []

    def host(x: Any) -> Any:
        seen.append(np.asarray(x))
        return np.asarray(x)

    def fn(x: Any) -> Any:
        with jax.named_scope("called"):
            x = jnp.sin(x.astype(BF16))
            jax.debug.callback(lambda x: seen.append(np.asarray(x)), x)
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            y = jax.pure_callback(host, shape, x)
            step = lambda y, _: (jax.pure_callback(host, shape, y), None)  # noqa: E731
            twice = lambda y: lax.scan(step, y, None, length=2)[0]  # noqa: E731
            return lax.cond(jnp.sum(x) > 0, twice, lambda y: y, y).astype(F32)

    comparison = compare(fn, jnp.abs(normal(4)))
    jax.effects_barrier()
    assert len(seen) == 4 + 3 and comparison.error < 0.01


@pytest.mark.slow
def test_statistics_inside_shard_map_are_those_of_the_whole_arrays() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def block(x: Any) -> Any:
        with jax.named_scope("block"):
            y = jnp.sin(x.astype(BF16))
        with jax.named_scope("sum"):
            return lax.psum(jnp.cos(y), "d").astype(F32)

    mapped = jax.shard_map(block, mesh=mesh, in_specs=P("d"), out_specs=P())
    x = normal(4, 4)
    comparison = compare(mapped, x)
    truth = np.cos(np.sin(np.asarray(x, np.float64)))
    assert paths(comparison.activations) == ["block", "sum"]
    assert 0 < comparison["block"].error < 0.01
    np.testing.assert_allclose(comparison.error, relative(jax.jit(mapped)(x), truth), rtol=1e-3)
    with_gradients = compare(lambda x: jnp.sum(mapped(x)), x, backward=True)
    assert paths(with_gradients.gradients) == ["sum", "block"]
    assert with_gradients.parameters[0].error > 0


@pytest.mark.slow
def test_what_is_computed_again_in_a_checkpoint_has_no_second_row() -> None:
    def loss(w: Any, x: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            with jax.named_scope("layer"):
                return jnp.tanh(x @ w), None

        with jax.named_scope("Net"):
            x, _ = lax.scan(jax.checkpoint(layer), x, None, length=3)
        return jnp.sum(x)

    w, x = normal(4, 4), normal(2, 4)
    comparison = compare(loss, w, x, policy="mixed_bfloat16", backward=True)
    assert paths(comparison.activations) == ["Net:", "layer", ""]
    assert paths(comparison.gradients) == ["Net:", "layer"] and comparison.route == "autocast"
    assert len(comparison["layer"].steps) == 3 == len(comparison.gradients[1].steps)


@pytest.mark.slow
def test_a_scan_whose_gradients_underflow_says_so() -> None:
    def loss(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            with jax.named_scope("layer"):
                return jnp.tanh(x.astype(F16) @ w.astype(F16)).astype(F32), None

        with jax.named_scope("Net"):
            return 1e-9 * jnp.sum(lax.scan(layer, x, w)[0])

    comparison = compare(loss, normal(2, 32, 32), normal(2, 32), backward=True)
    assert comparison.parameters[0].underflow > 0.9 and comparison.parameters[0].error > 0.9


# ------------------------------------------------------------------------------------------- models


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2, name="head")(nn.gelu(nn.Dense(8, name="body")(x)))


@pytest.mark.slow
def test_layers_of_ours_obey_the_policy_and_boundary_casts_are_no_module() -> None:
    model, x = Model(), normal(4, 8)
    comparison = compare(model.apply, model.init(jax.random.key(0), x), x, policy="mixed_bfloat16")
    assert comparison.route == "scope" and comparison.policy == "mixed_bfloat16"
    assert paths(comparison.activations) == ["Model:", "body", "head"]


@pytest.mark.slow
def test_flax_models_are_compared_under_autocast_or_as_they_are_written() -> None:
    x = normal(4, 8)
    for dtype, given, route in ((None, "mixed_float16", "autocast"), (BF16, None, "as written")):
        model = flax_nn.Sequential([flax_nn.Dense(8, dtype=dtype), flax_nn.Dense(2, dtype=dtype)])
        loss = lambda v, x, model=model: jnp.mean(jnp.square(apply(model, v, x).astype(F32)))  # noqa: E731
        comparison = compare(loss, model.init(jax.random.key(0), x), x, policy=given, backward=True)
        assert comparison.route == route and {row.path for row in comparison.parameters} == {
            f"params/layers_{i}/{name}" for i in (0, 1) for name in ("kernel", "bias")
        }
        assert paths(comparison.gradients) == ["Sequential:", "layers_1", "layers_0"]
        assert 0 < comparison["layers_1"].error < 0.02


@pytest.mark.slow
def test_nnx_models_are_named_and_keep_their_state() -> None:
    class Net(flax_nnx.Module):
        def __init__(self, rngs: flax_nnx.Rngs):
            self.layer = flax_nnx.Linear(8, 8, rngs=rngs)
            self.norm = flax_nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(self.layer(x))

    model, x = Net(flax_nnx.Rngs(0)), normal(4, 8)
    before = np.asarray(model.norm.mean[...])
    comparison = compare(model, x, policy="mixed_bfloat16")
    assert {"Net:", "layer", "norm"} <= set(paths(comparison.activations))
    np.testing.assert_array_equal(before, np.asarray(model.norm.mean[...]))
    loss = lambda model, x: jnp.mean(jnp.square(model(x)))  # noqa: E731
    trained = compare(loss, model, x, policy="mixed_bfloat16", backward=True)
    assert {"layer/kernel", "layer/bias"} <= {row.path for row in trained.parameters}


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
def test_a_model_that_carries_a_policy_is_compared_under_it_or_not_at_all(api: str) -> None:
    carried, x = "mixed_bfloat16", normal(4, 8)
    if api == "linen":
        model: Any = nn.Dense(4, dtype_policy=carried)
        given = model.apply, jax.jit(model.init)(jax.random.key(0), x), x
    else:
        given = nnx.Linear(8, 4, rngs=nnx.Rngs(0), dtype_policy=carried), x
    with pytest.raises(ValueError, match="changes nothing here: the model obeys 'mixed_bfloat16'"):
        compare(*given, policy="mixed_float16")
    found = compare(*given, policy="p=f32,c=bf16,o=bf16")
    assert found.policy == carried and "under mixed_bfloat16" in str(found)
    assert found.error == compare(*given).error > 1e-3
    rules = {"bias": "float32"}
    if api == "nnx":  # it looks up no rules, so a report with them in its head would be a false one
        with pytest.raises(ValueError, match=r"rules= changes nothing here: .* 'mixed_bfloat16'"):
            compare(*given, policy=carried, rules=rules)


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
def test_the_head_names_the_policies_of_all_models_that_carry_one() -> None:
    x = normal(4, 8)
    first, second = (
        nnx.Linear(8, 4, rngs=nnx.Rngs(0), dtype_policy=carried)
        for carried in ("mixed_float16", "mixed_bfloat16")
    )
    both = lambda first, second, x: first(x) + second(x)  # noqa: E731
    found = compare(both, first, second, x, policy="mixed_float16")
    assert found.policy == "mixed_bfloat16 and mixed_float16"


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_weight_that_is_2_percent_off_is_the_first_jump_and_roundings_of_a_deep_model_none(
    policy,
):
    model, x = Blocks(), normal(16, 8)
    variables = jax.jit(model.init)(jax.random.key(1), x)
    assert compare(model.apply, variables, x, policy=policy).first_jump is None
    stale = jax.tree.map(jnp.array, variables)
    stale["params"]["up_2"]["kernel"] *= 1.02
    with use_policy(policy):
        found = compare(model.apply, stale, x, beside=(model.apply, variables, x))
    assert found.first_jump == "up_2"


class Blocks(nn.Module):
    """Residual blocks, whose sums no layer makes."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(4):
            y = nn.LayerNorm(name=f"norm_{i}")(x)
            x = x + nn.Dense(8, name=f"down_{i}")(nn.gelu(nn.Dense(16, name=f"up_{i}")(y)))
        return x


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_errors_in_a_deep_model_are_those_of_the_jitted_program_at_its_boundaries(policy: str):
    model, x = Blocks(), normal(16, 8)
    variables = jax.jit(model.init)(jax.random.key(0), x)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs(policy: str, variables: Any) -> Any:
        with use_policy(policy):
            return model.apply(variables, x, capture_intermediates=True)[1]["intermediates"]

    ours, wide = outputs(policy, variables), outputs("float32", variables)
    found = compare(model.apply, variables, x, policy=policy)
    for name in ("up_0", "down_0", "norm_1", "down_1", "norm_3", "down_3"):
        value, other = (side[name]["__call__"][0] for side in (ours, wide))
        assert found[name].error == pytest.approx(relative(value, other), rel=0.05)


# --------------------------------------------------------------- what is said, and what is rejected


def test_a_comparison_is_text_and_json() -> None:
    comparison = compare(half_model, normal(8, 8), normal(4, 8))
    assert str(comparison).splitlines()[0] == "half_model (by its own dtypes) against float32"
    found = json.loads(comparison.to_json())
    assert [row["path"] for row in found["rows"]] == ["first", "second", ""]
    infinite = compare(lambda x: x.astype(F16) * F16(1e4), normal(4, scale=100.0))
    assert json.loads(infinite.to_json())["rows"][0]["error"] == "inf"
    assert infinite.first_jump == "" and "at (outside of any module)" in str(infinite)


def test_a_comparison_with_nothing_in_half_says_so_and_has_no_error() -> None:
    comparison, note = compare(lambda x: jnp.sin(x), normal(4)), "Nothing differs from float32: the"
    assert comparison.error == 0 and comparison.notes == (f"{note} policy changes nothing here.",)


def test_nan_in_the_inputs_and_in_float32_itself_are_reported() -> None:
    comparison = compare(lambda x: jnp.log(x.astype(F16)), jnp.asarray([1.0, jnp.nan, -1.0]))
    assert comparison.notes[0].startswith("NaN in the inputs: args[0]. Values that depend on it")
    assert "float32 itself is infinite or NaN in 1 rows; the first is ''." in str(comparison)
    assert comparison.outputs[0].undefined == pytest.approx(2 / 3)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((None, 1.0), {}, "compare takes a function, but got None of type NoneType."),
        ((jnp.sin, 1.0), {}, "measures a call on arrays, but its arguments contain no array"),
        ((jnp.sum, np.arange(3)), {"backward": True}, "is called with none"),
        ((jnp.sin, np.ones(3)), {"loss_scale": 0}, "loss_scale should be a positive number"),
    ],
)
def test_what_can_not_be_compared_is_rejected_by_name(arguments, options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        compare(*arguments, **options)


@pytest.mark.slow
def test_a_row_that_is_not_there_is_rejected_with_those_that_are() -> None:
    with pytest.raises(KeyError, match=r"No row 'third'\. Rows: first, second"):
        compare(half_model, normal(8, 8), normal(4, 8))["third"]
