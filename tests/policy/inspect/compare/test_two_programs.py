"""compare beside another function or policy: figures are NumPy's of both programs' values."""

import json
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import policy
from mpmodules import linen, nnx, use_policy
from policy.inspect.compare import statistics
from policy.inspect.compare.compare import compare
from tests.policy.errors import normal, relative
from tests.programs import apply

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LENGTH, WIDTH = 5, 8


def rms(value: Any, other: Any) -> float:
    difference = np.asarray(value, np.float64) - np.asarray(other, np.float64)
    return float(np.sqrt(np.mean(difference**2)))


def paths(rows: Any) -> list[str]:
    return [row.path for row in rows]


# -------------------------------------------------------------------------------------- the numbers


def double(w: Any, x: Any, dtype: Any) -> Any:
    with jax.named_scope("first"):
        first = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
    with jax.named_scope("second"):
        return first, (first @ w.astype(dtype)).astype(F32)


@pytest.mark.slow
def test_rows_beside_another_function_are_those_of_running_both() -> None:
    w, x = normal(8, 8), normal(4, 8)
    half, wide = (lambda w, x, d=dtype: double(w, x, d) for dtype in (BF16, F16))
    found = compare(lambda w, x: half(w, x)[1], w, x, beside=lambda w, x: wide(w, x)[1])
    ours, theirs = (jax.jit(fn)(w, x) for fn in (half, wide))
    assert paths(found.activations) == ["first", "second"] and not found.alone
    for row, value, other in zip(found.activations, ours, theirs, strict=True):
        np.testing.assert_allclose(row.error, relative(value, other), rtol=1e-5)
        np.testing.assert_allclose(row.rms, rms(value, other), rtol=1e-5)
    assert found.rms == found.outputs[0].rms == found["second"].rms > 0
    assert found["first"].dtype == "bfloat16" and found["second"].entering == found["first"].error


@pytest.mark.slow
def test_log_probs_differ_by_their_rms_in_nats_and_impossible_tokens_are_left_out() -> None:
    logits = normal(16, 32, scale=4.0)
    logits = logits.at[3].set(-jnp.inf).at[3, 0].set(0)
    labels = jnp.arange(16)

    def log_probs(logits: Any, labels: Any) -> Any:
        losses = policy.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        return -losses

    rounded = lambda logits, labels: log_probs(logits.astype(BF16), labels)  # noqa: E731
    found = compare(rounded, logits, labels, beside=log_probs)
    both = [np.asarray(fn(logits, labels), np.float64) for fn in (rounded, log_probs)]
    kept = np.isfinite(both[1])
    np.testing.assert_allclose(found.rms, rms(both[0][kept], both[1][kept]), rtol=1e-4)
    assert kept.sum() == 15 and 1e-3 < found.rms < 0.1
    assert float(statistics.measured(jnp.full(2, jnp.inf), jnp.ones(2))[-1]) == np.inf


def test_float64_is_not_narrowed_beside_half() -> None:
    with jax.enable_x64():
        x = jnp.full(4, 1 + 1e-9)
        found = compare(lambda x: x, x, beside=lambda x: x.astype(F16))
    np.testing.assert_allclose(found.rms, 1e-9, rtol=1e-6)


# ------------------------------------------------------------------------- two policies of one call


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Dense(32, name="stem")(x))
        return linen.Dense(4, name="head")(linen.LayerNorm(name="norm")(x))


class XNet(nnx.Module):
    def __init__(self, rngs: Any):
        self.stem, self.head = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.norm(nnx.relu(self.stem(x))))


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        y = linen.Dense(16, name="up")(linen.LayerNorm(name="norm")(x))
        return x + linen.Dense(8, name="down")(linen.gelu(y)), None


class Deep(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = linen.scan(linen.remat(Layer), length=3, **options)(name="layers")(x, None)
        return linen.Dense(4, name="head")(x)


def plain(params: Any, x: Any) -> Any:
    for name in ("stem", "head"):
        with jax.named_scope(name):
            x = jnp.tanh(x @ params[name])
    return x


def loss_of(api: str) -> tuple[Any, Any]:
    """Returns a loss and its first argument; an nnx model captures its policy."""
    if api in ("linen", "scanned"):
        net = Net() if api == "linen" else Deep()
        variables = net.init(jax.random.key(0), normal(4, 8))
        return lambda v, x: jnp.square(apply(net, v, x)).mean(), variables
    if api == "nnx":
        return lambda model, x: jnp.square(model(x)).mean(), XNet(nnx.Rngs(0))
    params = {"stem": normal(8, 8), "head": normal(8, 4)}
    return lambda params, x: jnp.square(plain(params, x)).mean(), params


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("api", ["linen", "nnx", "plain", "scanned"])
def test_beside_the_policy_float32_is_beside_float32_forward_and_backward(api: str) -> None:
    loss, params = loss_of(api)
    options: Any = {"policy": "mixed_bfloat16", "backward": True, "loss_scale": 8.0}
    beside: Any = "float32"
    if api == "nnx":
        beside = loss, params, normal(4, 8)
        params = nnx.apply_policy(params, options.pop("policy"))
    right = compare(loss, params, normal(4, 8), **options)
    found = compare(loss, params, normal(4, 8), beside=beside, **options)
    assert found.beside and not right.beside and found.route == right.route
    assert [(r.kind, r.path) for r in found.rows] == [(r.kind, r.path) for r in right.rows]
    errors = [[row.error for row in each.rows] for each in (found, right)]
    np.testing.assert_allclose(*errors, rtol=0.03)
    assert found.parameters and found.gradients and found.first_jump is None


@pytest.mark.slow
def test_float16_is_nearer_than_bfloat16_and_rules_are_the_compared_policys_alone() -> None:
    model = lambda x: Net().apply(variables, x)  # noqa: E731
    variables, x = Net().init(jax.random.key(0), normal(4, 8)), normal(4, 8)
    half, brain = (
        compare(model, x, policy=name, beside="float32") for name in ("mixed_float16", "bfloat16")
    )
    assert brain["head"].error > 4 * half["head"].error > 0
    options: Any = {"policy": "mixed_float16", "beside": "mixed_float16"}
    assert "Nothing differs from mixed_float16." in str(compare(model, x, **options))
    ruled = compare(model, x, rules={"head": "float32"}, **options)
    assert ruled["norm"].error == 0 < ruled["head"].error


# ----------------------------------------------------------------- a trainer, and a sampler's cache


class Decoder(linen.Module):
    decode: bool
    gain: float = 1.0

    @linen.compact
    def __call__(self, x: Any) -> Any:
        mask = None if self.decode else linen.make_causal_mask(x[..., 0])
        y = linen.LayerNorm(name="norm")(x)
        attention = linen.MultiHeadDotProductAttention(2, decode=self.decode, name="attention")
        x = x + attention(y, mask=mask)
        return x + linen.Dense(WIDTH, name="mlp")(x) * self.gain


class XDecoder(nnx.Module):
    def __init__(self, rngs: Any):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, decode: bool = False, gain: float = 1.0) -> Any:
        mask = None if decode else nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask, decode=decode)
        return x + self.mlp(x) * gain


def linen_calls(gain: float) -> tuple[Any, Any, Any]:
    """Returns a trainer, a sampler that scans tokens with a cache, and their first argument."""

    def trainer(params: Any, x: Any) -> Any:
        return Decoder(False).apply({"params": params}, x)

    def sampler(params: Any, x: Any) -> Any:
        model = Decoder(True, gain)
        cache = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0), x)["cache"])

        def step(cache: Any, x: Any) -> Any:
            variables = {"params": params, "cache": cache}
            y, state = model.apply(variables, x[:, None], mutable=["cache"])
            return state["cache"], y[:, 0]

        return lax.scan(step, cache, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    x = jnp.ones((2, LENGTH, WIDTH))
    return trainer, sampler, Decoder(False).init(jax.random.key(0), x)["params"]


def nnx_calls(gain: float) -> tuple[Any, Any, Any]:
    def trainer(model: Any, x: Any) -> Any:
        return model(x)

    def sampler(model: Any, x: Any) -> Any:
        model.attention.init_cache(x.shape, F32)
        graph, cache, rest = nnx.split(model, nnx.Cache, ...)

        def step(cache: Any, x: Any) -> Any:
            model = nnx.merge(graph, cache, rest)
            y = model(x[:, None], decode=True, gain=gain)
            return nnx.state(model, nnx.Cache), y[:, 0]

        return lax.scan(step, cache, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    return trainer, sampler, XDecoder(nnx.Rngs(0))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("calls", [linen_calls, nnx_calls])
def test_a_sampler_with_a_cache_is_compared_module_by_module(calls: Any) -> None:
    x = normal(2, LENGTH, WIDTH)
    trainer, sampler, params = calls(1.0)
    found = compare(trainer, params, x, beside=sampler)
    parts = ["query", "key", "value", "out"]
    every = ["norm", *(f"attention/{part}" for part in parts), "attention", "mlp"]
    assert set(every) <= set(paths(found.activations)) and found.alone == ()
    assert found.rms < 1e-6 and found.outputs[0].steps == found["mlp"].steps == ()
    trainer, sampler, params = calls(1.5)
    found = compare(trainer, params, x, beside=sampler)
    assert found["attention"].error < 1e-6 and found["mlp"].error < 1e-6 and found.rms > 0.1


@pytest.mark.slow
def test_the_first_module_whose_parameters_differ_is_the_first_jump() -> None:
    variables, x = Net().init(jax.random.key(0), normal(4, 8)), normal(4, 8)
    other = jax.tree.map(jnp.array, variables)
    other["params"]["norm"]["scale"] *= 1.01
    found = compare(Net().apply, variables, x, beside=(Net().apply, other, x))
    assert found.first_jump == "norm" and found["stem"].error == 0
    np.testing.assert_allclose(found["norm"].error, 1 / 101, rtol=1e-3)
    model, after = XNet(nnx.Rngs(0)), XNet(nnx.Rngs(0))
    after.head.kernel[...] *= 1.01
    assert compare(model, x, beside=(after, x)).first_jump == "head"


@pytest.mark.slow
def test_a_port_is_compared_with_the_original_and_its_gradients_too() -> None:
    class Original(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x: Any) -> Any:
            x = flax.linen.relu(flax.linen.Dense(32, name="stem")(x))
            return flax.linen.Dense(4, name="head")(flax.linen.LayerNorm(name="norm")(x))

    def loss(model: Any) -> Any:
        return lambda variables, x: jnp.square(model.apply(variables, x)).mean()

    variables, x = Net().init(jax.random.key(0), normal(4, 8)), normal(4, 8)
    found = compare(loss(Net()), variables, x, backward=True, beside=loss(Original()))
    assert {"Net:", "stem", "norm", "head"} <= set(paths(found.activations))
    assert len(found.parameters) == 6 and {"stem", "norm", "head"} <= set(paths(found.gradients))
    assert found.alone == () and max(row.error for row in found.rows) < 1e-5
    with use_policy("mixed_bfloat16"):  # the port follows it, Flax's layers don't
        found = compare(loss(Net()), variables, x, backward=True, beside=loss(Original()))
    assert all(1e-4 < row.error < 0.1 for row in (*found.parameters, *found.activations))


# -------------------------------------------------------------------------------- kinds of programs


def test_scanned_layers_are_compared_step_by_step() -> None:
    def layers(x: Any, ws: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            with jax.named_scope("block"):
                return jnp.tanh(x @ w), None

        return lax.scan(layer, x, ws)[0]

    ws = normal(3, 8, 8)
    found = compare(layers, normal(4, 8), ws, beside=(layers, normal(4, 8), ws.at[1:].mul(1.01)))
    steps = found["block"].steps
    assert found.first_jump == "block" and found.jump_step == 1
    assert steps[0] == 0 < steps[1] and len(steps) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "keeps_axis"), [(2, True), (2, False), (LENGTH, False)])
def test_a_scan_over_tokens_stands_for_an_axis_where_one_alone_can(rows: int, keeps_axis: bool):
    def layers(x: Any, ws: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            with jax.named_scope("block"):
                return jnp.tanh(x @ w), None

        return lax.scan(layer, x, ws)[0]

    def by_token(x: Any, ws: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            y = layers(x[:, None], ws)[:, 0] if keeps_axis else layers(x, ws)
            return None, y

        return lax.scan(step, None, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    for pair in ((layers, by_token), (by_token, layers)):
        found = compare(pair[0], normal(rows, LENGTH, 8), normal(3, 8, 8), beside=pair[1])
        if rows == LENGTH:  # the tokens may be the first axis or the second
            assert found.alone == ("block",) and found.error < 1e-6
        else:
            assert len(found["block"].steps) == 3 and found["block"].error < 1e-6


def test_modules_without_a_counterpart_are_listed_and_outputs_compared() -> None:
    def loops(x: Any) -> Any:
        with jax.named_scope("shared"):
            x = jnp.sin(x)
        with jax.named_scope("late"):
            return jnp.cos(x)

    def whiles(x: Any) -> Any:
        with jax.named_scope("shared"):
            x = jnp.sin(x)
        with jax.named_scope("early"):
            x = jnp.cos(x)
        return lax.while_loop(lambda x: x[0] < 0, lambda x: x + 1, x)

    found = compare(loops, jnp.ones(4), beside=whiles)
    assert found.alone == ("late", "early") and paths(found.activations)[0] == "shared"
    assert "Without a counterpart, in loops alone: 'late'." in str(found)
    assert "in whiles alone: 'early'." in str(found) and found.error == 0


def test_a_cast_that_one_program_has_moves_no_partner() -> None:
    def pair(x: Any, casts: bool) -> Any:
        with jax.named_scope("both"):
            a, b = jnp.sin(x), jnp.cos(x)
        with jax.named_scope("reader"):
            a = a.astype(BF16).astype(F32) if casts else a
            return a - b

    found = compare(lambda x: pair(x, True), normal(16), beside=lambda x: pair(x, False))
    assert found["both"].error == 0 < found["reader"].error


def test_values_on_devices_of_a_mesh_and_in_checkpoints_and_branches_are_compared() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("x"), out_specs=P("x"))

    def run(x: Any, flag: Any) -> Any:
        with jax.named_scope("mapped"):
            x = mapped(x)
        with jax.named_scope("branch"):
            x = lax.cond(flag, jnp.cos, jnp.tanh, x)
        with jax.named_scope("kept"):
            return jax.checkpoint(jnp.exp)(x)

    x, flags = normal(4), (jnp.array(True), jnp.array(False))
    found = compare(run, x, flags[0], beside=(run, x, flags[1]))
    right = relative(np.cos(np.sin(x)), np.tanh(np.sin(x)))
    assert paths(found.activations) == ["mapped", "branch", "kept"]
    assert found["mapped"].error == 0 and found.first_jump == "branch"
    np.testing.assert_allclose(found["branch"].error, right, rtol=1e-5)


def test_both_programs_multiply_as_the_device() -> None:
    w, x = normal(16, 16), normal(4, 16)
    precise = lambda w, x: jnp.dot(x, w, precision="highest")  # noqa: E731
    found = compare(lambda w, x: x @ w, w, x, on="tpu", beside=precise)
    assert 1e-3 < found.error < 1e-2
    assert compare(lambda w, x: x @ w, w, x, on="tpu", beside=lambda w, x: x @ w).error == 0


@pytest.mark.slow
def test_the_text_the_picture_and_json_name_the_reference() -> None:
    def trainer(x: Any) -> Any:
        return jnp.sin(x) * jnp.float32(1.1)

    def sampler(x: Any) -> Any:
        return jnp.sin(x)

    found = compare(trainer, jnp.ones(4), beside=sampler)
    head, *_ = str(found).splitlines()
    assert head == "trainer (by its own dtypes) against sampler"
    assert "rms" in str(found)
    plain = json.loads(found.to_json())
    assert plain["beside"] == "sampler" and plain["rows"][-1]["rms"] == found.rms
    assert "rms" not in str(compare(trainer, jnp.ones(4)))
    step = optax.sgd(1.0)
    assert compare(step.update, jnp.ones(4), step.init(jnp.ones(4)), beside="float32").error == 0
