"""The reference of half precision: the function in float32, its constants before rounding."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

from mpmodules import linen as nn
from mpmodules import nnx
from policy import get_policy
from policy.core.scope import current_policy, use_policy
from policy.inspect.compare.compare import compare
from policy.inspect.suggest.suggest import suggest
from policy.inspect.traced.call import Call, program_of
from policy.inspect.traced.float32 import in_float32
from tests.policy.autocasting.models import MODELS
from tests.policy.errors import normal, relative
from tests.programs import apply

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32

# ---------------------------------------------------------- the error of constants, against float64


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _scanned(x: Any) -> Any:
    return lax.scan(lambda y, _: (y * 0.7 + 0.1, None), x, None, length=3)[0]


def _scanned_exactly(x: Any) -> Any:
    for _ in range(3):
        x = x * 0.7 + 0.1
    return x


def _branched(x: Any) -> Any:
    return lax.cond(jnp.sum(x.astype(F32)) < 1e9, lambda x: 0.3 * x, lambda x: x, x)


def _table(x: Any) -> Any:
    return x * jnp.asarray([[0.1, 0.2, 0.3, 0.7]], x.dtype)


def _normed(x: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-3)


# In half precision, and what it is in float64.
TRUTHS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "gelu": (jax.nn.gelu, gelu),
    "gelu in jit": (jax.jit(lambda x: 0.1 * jax.nn.gelu(x)), lambda x: 0.1 * gelu(x)),
    "a scale": (lambda x: 0.1 * x, lambda x: 0.1 * x),
    "a third": (lambda x: x / 3.0 + 1e-3, lambda x: x / 3 + 1e-3),
    "an epsilon": (_normed, lambda x: x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-3)),
    "a table": (_table, lambda x: x * np.array([0.1, 0.2, 0.3, 0.7])),
    "in a scan": (_scanned, _scanned_exactly),
    "in a branch": (_branched, lambda x: 0.3 * x),
    "in a checkpoint": (jax.checkpoint(lambda x: jnp.sin(0.7 * x)), lambda x: np.sin(0.7 * x)),
    "the smallest number": (lambda x: x + 1e-9, lambda x: x + 1e-9),
}


@pytest.mark.cases(fast=1, slow=15)
@pytest.mark.parametrize("dtype", (F16, BF16))
@pytest.mark.parametrize("name", TRUTHS)
def test_errors_are_those_against_float64_though_constants_were_rounded(name, dtype):
    fn, truth = TRUTHS[name]

    def half(x: Any) -> Any:
        with jax.named_scope("named"):
            return fn(x.astype(dtype)).astype(F32)

    x = normal(8, 4)
    comparison = compare(half, x)
    right = relative(jax.jit(half)(x), truth(np.asarray(x, np.float64)))
    np.testing.assert_allclose([comparison.error, comparison["named"].error], right, rtol=2e-3)
    assert comparison.unpaired == () and right > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (F16, BF16))
def test_gradients_are_measured_against_those_of_float64s_constants(dtype: Any) -> None:
    def wide(x: Any) -> Any:
        y, _ = lax.scan(lambda y, _: (jax.nn.gelu(y) * 0.7, None), x, None, length=2)
        return jnp.sum(y.astype(F32))

    def loss(x: Any) -> Any:
        with jax.named_scope("named"):
            return wide(x.astype(dtype))

    x = normal(8, 4)
    comparison = compare(loss, x, backward=True)
    error = relative(jax.jit(jax.grad(loss))(x), jax.jit(jax.grad(wide))(x))
    np.testing.assert_allclose(comparison.parameters[0].error, error, rtol=1e-2)
    assert comparison.unpaired == ()


# -------------------------------------------------------------- what is NaN in half precision alone


class Scaled(nn.Module):
    """Divides by its largest activation, which is zero: the epsilon is none in float16."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.relu(nn.Dense(8, name="up")(x))
        return nn.Dense(4, name="down")(h / (jnp.max(h) + 1e-8))


class KeptScaled(Scaled):
    own_code: ClassVar[Literal["keep"] | None] = "keep"


class FlaxScaled(flax_nn.Module):
    @flax_nn.compact
    def __call__(self, x: Any) -> Any:
        h = flax_nn.relu(flax_nn.Dense(8, name="up", dtype=F16)(x))
        return flax_nn.Dense(4, name="down", dtype=F16)(h / (jnp.max(h) + 1e-8))


def all_zero(model: Any) -> tuple[Any, Any]:
    x = -jnp.abs(normal(4, 8))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    variables["params"]["up"]["kernel"] = jnp.abs(variables["params"]["up"]["kernel"])
    variables["params"]["down"]["bias"] = jnp.arange(4.0)
    return variables, x


@pytest.mark.slow
def test_own_code_divides_in_float32_which_holds_the_epsilon() -> None:
    comparison = compare(Scaled().apply, *all_zero(Scaled()), policy="mixed_float16")
    assert comparison.error == 0 and comparison.first_jump is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "policy"), [(KeptScaled(), "mixed_float16"), (FlaxScaled(), None)]
)
def test_an_epsilon_that_float16_does_not_hold_is_half_precisions_fault(model, policy):
    variables, x = all_zero(model)
    comparison = compare(model.apply, variables, x, policy=policy)
    name = f"{type(model).__name__}:"
    (output,) = comparison.outputs
    assert comparison.error == np.inf and comparison.first_jump == name
    assert output.overflow == 1 and output.undefined == 0
    assert comparison.notes == comparison.unpaired == ()
    found = suggest(model.apply, variables, x, error=1e-2, policy=policy)
    assert found.paths == (name,) and found.without == np.inf and found.error <= 1e-2
    if policy is None:
        return
    with use_policy(policy, found.rules):
        assert jnp.isfinite(jax.jit(lambda v, x: apply(model, v, x))(variables, x)).all()


# --------------------------------------------- layers that compute in another way in half precision


class Block(nn.Module):
    """Normalizations, attention, and gradients of biases: others in half precision."""

    attends: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.attends:
            y = nn.LayerNorm(name="norm")(x)
            x = x + nn.MultiHeadDotProductAttention(2, name="attention")(y)
        y = nn.gelu(nn.Dense(16, name="up")(nn.RMSNorm(name="rms")(x)))
        return x + nn.Dense(8, name="down")(y)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        step = nn.remat(lambda block, x, _: (block(x), None))
        scan = nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan(Block(attends=False, name="blocks"), x, None)[0]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("model", "policy"), [(Block(), "mixed_float16"), (Scanned(), "mixed_bfloat16")]
)
def test_a_transformer_pairs_in_its_gradients_too(model: Any, policy: str) -> None:
    x, weights = 2 + normal(2, 4, 8), normal(2, 4, 8)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    loss = lambda v, x: jnp.sum(jnp.sin(apply(model, v, x).astype(F32)) * weights)  # noqa: E731
    comparison = compare(loss, variables, x, policy=policy, backward=True)
    assert comparison.unpaired == () and comparison.route == "scope"
    wide = jax.jit(jax.grad(loss))(variables, x)
    with use_policy(policy):
        half = jax.jit(jax.grad(loss))(variables, x)
    leaves = zip(jax.tree.leaves(half), jax.tree.leaves(wide), strict=True)
    for row, (value, truth) in zip(comparison.parameters, leaves, strict=True):
        if "key/bias" not in row.path:  # zero but for rounding
            right = relative(value, truth)
            np.testing.assert_allclose(row.error, right, rtol=0.05, err_msg=row.path)


class Layers(nn.Module):
    """A layer of each kind after a matmul, by which it obeys the scope."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(8)(x)
        layers = {
            "LayerNorm": nn.LayerNorm(),
            "GroupNorm": nn.GroupNorm(2),
            "BatchNorm": nn.BatchNorm(use_running_average=False),
            "attention": nn.MultiHeadDotProductAttention(2),
            "LSTM": nn.RNN(nn.OptimizedLSTMCell(4)),
            "GRU": nn.RNN(nn.GRUCell(4)),
            "Conv": nn.Conv(4, (3,)),
            "WeightNorm": nn.WeightNorm(nn.Dense(4)),
        }
        return {name: layer(x) for name, layer in layers.items()}


@pytest.mark.slow
def test_every_kind_of_layer_pairs_and_its_reference_is_what_float32_computes() -> None:
    layers, x, policy = Layers(), 3 + normal(2, 5, 8), "mixed_float16"
    variables = jax.jit(layers.init)(jax.random.key(0), x)
    call = lambda v, x: layers.apply(v, x, mutable=["batch_stats"])[0]  # noqa: E731

    def loss(v: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y.astype(F32))) for y in jax.tree.leaves(call(v, x)))

    backward = Call.measured("compare", loss, (variables, x), {}, None, 1.0)
    assert program_of(backward, get_policy(policy)).reference.unpaired == ()
    forward = compare(call, variables, x, policy=policy)
    assert forward.unpaired == () and len(forward.outputs) == 8
    with use_policy(policy):
        half = jax.jit(call)(variables, x)
    wide = jax.jit(call)(variables, x)
    for row in forward.outputs:
        truth = relative(half[row.path], wide[row.path])
        np.testing.assert_allclose(row.error, truth, rtol=0.02, err_msg=row.path)


@pytest.mark.slow
def test_an_nnx_model_that_holds_its_policy_pairs() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: flax_nnx.Rngs):
            self.norm, self.layer = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return 0.1 * self.layer(self.norm(x))

    with use_policy("mixed_float16"):
        model = Net(flax_nnx.Rngs(0))
    comparison = compare(model, normal(4, 8))
    assert comparison.unpaired == () and comparison.route == "as written"
    assert 0 < comparison.error < 1e-2


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_under_autocast_has_all_constants_of_its_float32_trace(name: str) -> None:
    params, x, fn = MODELS[name].params, MODELS[name].x, MODELS[name].fn
    loss = lambda params, x: jnp.sum(jnp.abs(fn(params, x)).astype(F32))  # noqa: E731
    call = Call.measured("compare", loss, (params, x), {}, None, 1.0)
    program = program_of(call, get_policy("mixed_float16"))
    assert program.rejected == "" and program.reference.unpaired == ()


# ------------------------------------------------------------------ constants without a counterpart


def test_code_that_has_no_float32_trace_is_compared_with_itself_widened_and_that_is_said() -> None:
    def picky(x: Any) -> Any:
        with jax.named_scope("picky"):
            y = x.astype(F16)
            if y.dtype != F16:
                raise TypeError("I take float16 only.")
            return 0.1 * y

    comparison = compare(picky, normal(8))
    assert comparison.unpaired == ("picky",) and comparison.error > 0
    assert "can't be traced in float32 (TypeError: I take float16 only.)" in comparison.notes[0]
    assert comparison.notes[0] in str(comparison) and '"unpaired": [' in comparison.to_json()


def test_constants_beside_a_half_dtype_that_a_jitted_function_names_stay_rounded() -> None:
    @jax.jit
    def half(x: Any) -> Any:
        with jax.named_scope("named"):
            return x.astype(F16) * 0.1 * 2

    x = normal(64)
    comparison = compare(half, x)
    assert comparison.unpaired == ("named",)
    assert "no counterpart in float32 at 'named'" in str(comparison)
    truth = 2 * np.float64(F16(0.1)) * np.asarray(x, np.float64)
    np.testing.assert_allclose(comparison.error, relative(half(x), truth), rtol=2e-3)


def test_a_function_in_float32_sees_no_half_dtype_and_later_traces_do() -> None:
    def fn(x: Any) -> Any:
        assert x.astype(F16).dtype == jnp.zeros(3, BF16).dtype == F32
        with use_policy("mixed_bfloat16"):
            assert current_policy() is not None
            return half(x.astype(F16))

    half = jax.jit(lambda x: x * 0.1)
    with pytest.raises(RuntimeError, match="inside"):
        jax.eval_shape(in_float32(lambda x: jax.jit(raising)(x)), normal(4))
    assert jax.eval_shape(in_float32(fn), normal(4)).dtype == F32
    assert jax.eval_shape(half, jnp.zeros(3, F16)).dtype == F16
    assert jax.eval_shape(lambda x: x.astype(F16), normal(4)).dtype == F16


def raising(x: Any) -> Any:
    raise RuntimeError("inside")


DRAWS: dict[str, Any] = {
    "gamma": lambda key, x: jax.random.gamma(key, 2.0, x.shape, x.dtype),
    "dirichlet": lambda key, x: jax.random.dirichlet(key, jnp.ones(8, x.dtype), (64,), x.dtype),
    "normal": lambda key, x: jax.random.normal(key, x.shape, x.dtype),
    "gumbel": lambda key, x: jnp.tanh(jax.random.gumbel(key, x.shape, x.dtype)),
    "dropout": lambda key, x: jnp.where(jax.random.uniform(key, x.shape, x.dtype) < 0.9, x, 0),
}


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("draw", DRAWS)
def test_float32_draws_the_same_numbers_as_half_precision(draw, dtype):
    """Of 512 elements in bfloat16, four are the smallest draw, of which float32 has another."""
    x = jax.random.normal(jax.random.key(1), (64, 8)).astype(dtype)
    found = compare(DRAWS[draw], jax.random.key(2), x)
    assert found.error < 8 * jnp.finfo(dtype).eps, found
    note = found.notes[0]
    assert note.startswith(f"Random numbers are drawn in {dtype}") and "Draw in float32" in note
