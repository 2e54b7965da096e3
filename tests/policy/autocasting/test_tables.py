"""Float32 tables beside half-precision activations: constants, positions, buffers and noise do not
widen what follows; states, arguments and numbers out of range do.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import autocast, use_policy
from tests.policy.autocasting.models import POLICIES, half_of, largest_error, normals
from tests.programs import named, operations

B, T, D = 2, 4, 8
normal = normals(2)
TABLE, FULL, X, W = (np.asarray(normal(*s)) for s in ((1, T, D), (B, T, D), (B, T, D), (D, D)))


def sinusoids(h):
    angles = jnp.arange(T, dtype=h.dtype)[:, None] * jnp.exp(-jnp.arange(0, D, 2) / D)[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)[None]


def grid(h):
    """Sinusoids of integer positions, as `jnp.einsum("m,d->md", positions, rates)` makes them."""
    rates = 1.0 / 10_000.0 ** jnp.linspace(0, 1, D, dtype=h.dtype)
    none: Any = (((), ()), ((), ()))
    angles = jax.lax.dot_general(jnp.arange(T), rates, none, preferred_element_type=h.dtype)
    return jnp.sin(angles)[None]


def noise(h):
    return jax.random.normal(jax.random.key(0), h.shape)


ADDED: dict[str, Callable[[Any], Any]] = {
    "a numpy table": lambda h: h + TABLE,
    "a table of its shape": lambda h: h - jnp.asarray(FULL),
    "sinusoids": lambda h: h + sinusoids(h),
    "sinusoids of integers": lambda h: h + grid(h),
    "a factor": lambda h: h * jnp.linspace(0.5, 1, T)[None, :, None],
    "a quotient": lambda h: h / (1 + jnp.abs(TABLE)),
    "a selection": lambda h: jnp.where(h > 0, h, FULL),
    "rows": lambda h: h.at[:, :2].set(FULL[:, :2]),
    "looked up rows": lambda h: h + jnp.asarray(TABLE[0])[jnp.arange(T)][None],
    "noise": lambda h: h + 0.1 * noise(h),
    "an image": lambda h: h + jnp.arange(D, dtype=jnp.uint8)[None, None].astype(h.dtype) / 255,
    "a table in a checkpoint": lambda h: jax.checkpoint(lambda h: h + TABLE)(h),
    "a table in a branch": lambda h: jax.lax.cond(
        h[0, 0, 0] > 0, lambda h: h + TABLE, lambda h: h * 2.0, h
    ),
}


def stream(w: Any, h: Any) -> Any:
    """Adds a matmul's result to an activation."""
    with jax.named_scope("stream"):
        h = h + jax.nn.relu(h @ w)
    return h @ w


def with_stream(added: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: stream(w, added(x @ w))


def in_linen(nn: Any, run: Any) -> Any:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return run(self.param("w", lambda _: jnp.asarray(W)), x)

    return Model()


def in_nnx(nn: Any, run: Any) -> Any:
    class Model(nn.Module):
        def __init__(self):
            self.w = nn.Param(jnp.asarray(W))

        def __call__(self, x):
            return run(self.w[...], x)

    return Model()


def _own_linen(run: Any, policy: str) -> Any:
    def call(w, x):
        with use_policy(policy):
            return in_linen(linen, run).apply({"params": {"w": w}}, x)

    return call


def _own_nnx(run: Any, policy: str) -> Any:
    with use_policy(policy):
        return _of_nnx(in_nnx(nnx, run))


def _of_nnx(model: Any) -> Any:
    graph, _ = flax_nnx.split(model)
    return lambda w, x: flax_nnx.merge(graph, flax_nnx.State({"w": flax_nnx.Param(w)}))(x)


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "autocast": lambda run, policy: autocast(run, policy, params=0),
    "linen": _own_linen,
    "port": lambda run, policy: (
        lambda w, x: linen.apply_policy(in_linen(flax_nn, run), policy).apply(
            {"params": {"w": w}}, x
        )
    ),
    "nnx": _own_nnx,
    "port of nnx": lambda run, policy: _of_nnx(nnx.apply_policy(in_nnx(flax_nnx, run), policy)),
}


def stream_of(fn: Any, *args: Any) -> str:
    adds = named(operations(fn, *args), "add")
    return next(op.outputs[0] for op in reversed(adds) if op.path.endswith("stream"))


@pytest.mark.cases(fast=1, slow=7)
@POLICIES
@pytest.mark.parametrize("name", ADDED)
def test_a_table_leaves_the_activations_after_it_in_half_and_none_is_saved_in_float32(name, policy):
    half = half_of(policy)
    run = with_stream(ADDED[name])
    truth = run(jnp.asarray(W), jnp.asarray(X))
    for way in WAYS if name in ("a numpy table", "sinusoids", "noise") else ("autocast", "linen"):
        fn = WAYS[way](run, policy)
        assert stream_of(fn, W, X) == half, way
        assert largest_error(fn(W, X), truth) < (4e-2 if half == "bfloat16" else 5e-3), way
    for way in ("autocast", "linen"):
        _, backward = jax.eval_shape(lambda w, way=way: jax.vjp(WAYS[way](run, policy), w, X), W)
        wide = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape[:1] == (B,)]
        wide = [leaf for leaf in wide if leaf.dtype == jnp.float32 and leaf.ndim == 3]
        assert len(wide) <= 1, way  # the input


@pytest.mark.cases(fast=1)
@POLICIES
@pytest.mark.parametrize("einsum", [False, True])
def test_positions_times_frequencies_are_float32s(policy, einsum):
    frequencies = np.float32(1.0) / 3 ** np.arange(4, dtype=np.float32)

    def angles(w, x):
        positions = jnp.arange(600, dtype=x.dtype)
        if einsum:
            return jnp.einsum("t,f->tf", positions, frequencies)
        return positions[:, None] * frequencies[None]

    truth = np.arange(600)[:, None] * frequencies[None]
    for way in WAYS:
        fn = WAYS[way](angles, policy)
        assert largest_error(fn(W, X), truth) < 1e-6, way
        assert not named(operations(fn, W, X), "dot_general"), way


@POLICIES
def test_integers_times_frequencies_are_float32s_where_they_are_inputs(policy):
    """Positions that a caller hands over, as those of packed texts."""
    positions, frequencies = np.arange(300, 600), np.float32(1.0) / 3 ** np.arange(4)
    frequencies = frequencies.astype(np.float32)
    angles = autocast(lambda p: jnp.einsum("t,f->tf", p, frequencies), policy)
    with jax.numpy_dtype_promotion("standard"):
        found = angles(positions)
    assert largest_error(found, positions[:, None] * frequencies[None]) < 1e-6


@pytest.mark.cases(fast=1)
@POLICIES
def test_a_difference_from_a_constant_is_rounded_once(policy):
    """Targets that a loss closes over: their differences are those of float32."""
    targets, x = np.asarray(normal(64, D)), normal(64, D)

    def loss(w, x):
        return jnp.mean(jnp.square(x @ w - targets))

    prediction = np.asarray(autocast(lambda w, x: x @ w, policy, params=0)(W, x), np.float64)
    found = autocast(loss, policy, params=0)(W, x)
    assert largest_error(found, np.mean((prediction - targets) ** 2)) < 1e-6


class Averaging(flax_nn.Module):
    """Adds a buffer, and updates a running average of the activations."""

    @flax_nn.compact
    def __call__(self, x):
        w = self.param("w", lambda _: jnp.asarray(W))
        table = self.variable("buffers", "table", lambda: jnp.asarray(TABLE))
        average = self.variable("averages", "a", jnp.zeros, (D,))
        h = x @ w + table.value
        if self.is_mutable_collection("averages"):
            average.value = 0.99 * average.value + 0.01 * h[0, 0]
        return stream(w, h)


@pytest.mark.cases(fast=1)
@POLICIES
@pytest.mark.parametrize("way", ["port", "autocast"])
def test_a_buffer_is_a_table_and_a_running_average_is_float32(policy, way):
    model, half = Averaging(), half_of(policy)
    variables = model.init(jax.random.key(0), X)
    variables = {**variables, "averages": {"a": jnp.full((D,), 1 + 2.0**-12)}}

    called = linen.apply_policy(model, policy) if way == "port" else model

    def updated(variables, x):
        return called.apply(variables, x, mutable=["averages"])

    fn: Any = updated if way == "port" else autocast(updated, policy)
    assert stream_of(fn, variables, X) == half
    found = fn(variables, 0 * X)[1]["averages"]["a"]
    kept = 0.99 * (1 + 2.0**-12) + 0.01 * TABLE[0, 0].astype(np.float64)
    assert found.dtype == jnp.float32
    assert largest_error(found, kept) < 1e-4  # the units of half precision are larger


class Buffer(flax_nnx.Variable):
    """State that no call writes."""


@POLICIES
@pytest.mark.parametrize("way", ["own", "port", "autocast"])
def test_an_nnx_variable_that_no_call_writes_is_a_table(policy, way):
    def of(nn: Any) -> Any:
        class Model(nn.Module):
            def __init__(self):
                self.w, self.table = nn.Param(jnp.asarray(W)), Buffer(jnp.asarray(TABLE))

            def __call__(self, x):
                return stream(self.w[...], x @ self.w[...] + self.table[...])

        return Model()

    with use_policy(policy):
        model = of(nnx) if way == "own" else of(flax_nnx)
    model = nnx.apply_policy(model, policy) if way == "port" else model
    graph, state = flax_nnx.split(model)
    call = lambda model, x: model(x)  # noqa: E731
    call = autocast(call, policy) if way == "autocast" else call
    fn = lambda state, x: call(flax_nnx.merge(graph, state), x)  # noqa: E731
    assert stream_of(fn, state, X) == half_of(policy)


@pytest.mark.cases(fast=1)
@POLICIES
def test_a_scaled_input_begins_a_stream(policy):
    scaled = lambda w, x: stream(w, stream(w, (x - 0.5) / 0.25) @ w)  # noqa: E731
    assert stream_of(_own_linen(scaled, policy), W, X) == half_of(policy)
