"""Repeated calls without jit: what was traced is kept, and state is right at each of them."""

import dataclasses
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors

from mpmodules import linen as nn
from policy import use_policy

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 8))
MIXED = "mixed_bfloat16"
traced: list[Any] = []


@dataclasses.dataclass
class Config:
    width: int = 8


def net(nn: Any) -> Any:
    class Net(nn.Module):
        scale: Any = 1.0
        config: Any = None
        inner: Any = None

        def setup(self):
            self.dense = nn.Dense(8)
            self.norm = nn.BatchNorm()
            self.dropout = nn.Dropout(0.5)

        def __call__(self, x, train=False, power=1):
            traced.append(x.shape)
            width = 8 if self.config is None else self.config.width
            x = self.dense(x[..., :width]) if width == 8 else x
            x = x if self.inner is None else self.inner(x)
            x = self.norm(x / self.scale, use_running_average=not train)
            self.sow("intermediates", "root", jnp.sqrt(jnp.mean(x * x)))
            return self.dropout(x, deterministic=not train) ** power

        def half(self, x):
            traced.append("half")
            return 0.5 * self.dense(x)

    return Net


OURS, THEIRS = net(nn), net(flax_nn)


def ours(**fields):
    return OURS(**fields, dtype_policy=MIXED)


def port(**fields):
    return nn.apply_policy(THEIRS(**fields), MIXED)


@pytest.fixture(scope="module")
def variables():
    return jax.jit(THEIRS().init)(KEY, X)


@pytest.fixture(autouse=True)
def classes_that_nothing_is_kept_of(monkeypatch, variables):
    monkeypatch.setitem(globals(), "OURS", net(nn))
    monkeypatch.setitem(globals(), "THEIRS", net(flax_nn))
    traced.clear()


def close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=0.1)


WAYS = pytest.mark.parametrize("make", [ours, port])


def different() -> list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]]:
    """Returns fields, arguments and options of calls that are each traced apart."""
    return [
        ({}, (X,), {}),
        ({}, (X[:2],), {}),
        ({}, (X.astype(jnp.bfloat16),), {}),
        ({}, (X, False, 2), {}),
        ({}, (X,), {"power": 2.0}),
        ({}, (X,), {"mutable": ["intermediates"]}),
        ({"scale": 2.0}, (X,), {}),
        ({"scale": 2}, (X,), {}),
        ({"inner": jnp.sin}, (X,), {}),
        ({"config": Config()}, (X,), {}),
        ({}, (X,), {"method": "half"}),
    ]


@pytest.mark.slow
@WAYS
def test_what_differs_is_traced(make, variables):
    for _ in range(3):
        for fields, args, options in different():
            make(**fields).apply(variables, *args, **options)
        assert len(traced) == len(different())


def test_another_policy_is_traced(variables):
    model = OURS()
    for policy, dtype in (("bf16", "bfloat16"), ("f16", "float16"), ("bf16", "bfloat16")):
        with use_policy(policy):
            assert model.apply(variables, X).dtype == dtype
    assert len(traced) == 2
    with use_policy("bf16", {"dense": "f32"}):
        model.apply(variables, X)
    assert len(traced) == 3


@pytest.mark.cases(fast=1)
@WAYS
def test_a_config_that_changed_is_read_again(make, variables):
    config = Config()
    model = make(config=config)
    model.apply(variables, X)
    config.width = 4
    close(model.apply(variables, X), THEIRS(config=config).apply(variables, X))


@pytest.mark.cases(fast=1)
@WAYS
def test_random_streams_and_statistics_are_flaxs_at_each_call(make, variables):
    model = make()
    state = theirs = variables
    for i in range(3):
        rngs = {"dropout": jax.random.key(i)}
        y, updated = model.apply(state, X, True, rngs=rngs, mutable=["batch_stats"])
        expected, new = THEIRS().apply(theirs, X, True, rngs=rngs, mutable=["batch_stats"])
        close(y, expected)
        close(updated, new)
        np.testing.assert_array_equal(y == 0, expected == 0)
        state, theirs = state | updated, theirs | new
    assert len(traced) == 1 + 3
    with pytest.raises(errors.InvalidRngError):
        model.apply(variables, X, True, mutable=["batch_stats"])


@pytest.mark.cases(fast=1)
@WAYS
def test_a_bound_model_draws_other_numbers_at_each_call(make, variables):
    def masks(model):
        bound = model.bind(variables, rngs={"dropout": KEY}, mutable=["batch_stats"])
        return [np.asarray(bound(X, True)) == 0 for _ in range(4)]

    first, again, expected = masks(make()), masks(make()), masks(THEIRS())
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, expected)
    assert not np.array_equal(first[-1], first[-2])


@pytest.mark.cases(fast=1)
@WAYS
def test_sown_values_and_captures_are_those_of_the_call(make, variables):
    model = make()
    for scale in (1.0, 3.0):
        for options in ({"mutable": ["intermediates"]}, {"capture_intermediates": True}):
            _, state = model.apply(variables, X * scale, **options)
            _, expected = THEIRS().apply(variables, X * scale, **options)
            assert jax.tree.structure(state) == jax.tree.structure(expected)
            close(state["intermediates"]["root"], expected["intermediates"]["root"])


@WAYS
def test_an_interceptor_sees_every_call(make, variables):
    model, seen = make(), []

    def note(next_fun, args, kwargs, context):
        seen.append(context.method_name)
        return next_fun(*args, **kwargs) * (2 if context.method_name == "__call__" else 1)

    plain = model.apply(variables, X)
    with flax_nn.intercept_methods(
        lambda f, a, k, c: f(*a, **k) if c.method_name == "setup" else note(f, a, k, c)
    ):
        twice = [model.apply(variables, X) for _ in range(2)]
    assert seen.count("__call__") == 2 * 4
    assert not np.array_equal(plain, twice[0])
    np.testing.assert_array_equal(*twice)
    np.testing.assert_array_equal(plain, model.apply(variables, X))


def test_no_program_holds_arrays_of_a_call(variables):
    class Around(flax_nn.Module):
        """A module of Flax's, which no policy traces, around one that is traced."""

        @flax_nn.compact
        def __call__(self, x):
            shift = self.param("shift", flax_nn.initializers.ones, ())
            return Shifts(lambda y: y + shift, dtype_policy=MIXED)(x)

    class Shifts(nn.Module):
        function: Any

        @nn.compact
        def __call__(self, x):
            return self.function(x)

    for value in (1.0, 2.0):
        y: Any = Around().apply({"params": {"shift": jnp.asarray(value)}}, X)
        np.testing.assert_allclose(y, X + value, atol=0.02)
    jax.jit(ours().apply)(variables, X)
    ours().apply(variables, X)
    jax.vmap(lambda x: ours().apply(variables, x))(X[None])
    ours().apply(variables, X)


@pytest.mark.slow
def test_rules_are_checked_at_each_call(variables):
    class Root(nn.Module):
        own_code = "keep"

        def setup(self):
            self.net = OURS()

        def __call__(self, x):
            return self.net(x)

    model, nested = Root(), jax.tree.map(lambda x: x, {k: {"net": v} for k, v in variables.items()})
    with use_policy(MIXED, {"net/dropout": "f32"}):
        for _ in range(2):
            model.apply(nested, X)
