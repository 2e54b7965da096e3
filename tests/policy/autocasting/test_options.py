"""Options of autocast: ways to keep operations in float32, reports, and what is rejected."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy import DtypePolicyWarning, full_precision, use_policy
from policy.autocasting.transform import autocast
from policy.programs.primitives import CATEGORY_OF
from tests.policy.autocasting.models import BF16, FULLS, HALVES, dots, layer, normal, reads
from tests.policy.autocasting.models import SQUARE as W
from tests.programs import named, operations

X = normal(4, 8)


ISLANDS: dict[str, Any] = {
    "full_precision": full_precision(layer),
    "enabled=False": autocast(layer, BF16, enabled=False),
    "jitted": jax.jit(full_precision(layer)),
    "of what is jitted": full_precision(jax.jit(layer)),
    "checkpointed": jax.checkpoint(full_precision(layer)),
    "of a checkpoint": full_precision(jax.checkpoint(layer)),
    "in a scan": lambda w, x: lax.scan(
        lambda x, _: (full_precision(layer)(w, x), None), x, None, length=2
    )[0],
    "of a scan": full_precision(
        lambda w, x: lax.scan(lambda x, _: (layer(w, x), None), x, None, length=2)[0]
    ),
    "of a branch": full_precision(lambda w, x: lax.cond(x[0, 0] > 0, layer, lambda w, x: x, w, x)),
    "mapped": jax.vmap(full_precision(layer), (None, 0)),
    "of a map": full_precision(jax.vmap(layer, (None, 0))),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", ISLANDS)
def test_an_island_is_in_float32_forward_and_backward(name):
    def loss(w, x):
        return jnp.sum(layer(w, ISLANDS[name](w, layer(w, x))))

    cast = autocast(loss, BF16)
    gradient = jax.grad(cast, (0, 1))
    programs = {
        "forward": (cast, 1, 2),
        "grad(autocast)": (gradient, 3, 6),
        "autocast(grad)": (autocast(jax.grad(loss, (0, 1)), BF16), 3, 6),
        "jit(grad(autocast))": (jax.jit(gradient), 3, 6),
    }
    for program, (fn, full, half) in programs.items():
        found = dots(fn, W, X)
        assert found.count(HALVES) == half, program
        # a checkpoint computes its matmul again
        assert full <= found.count(FULLS) == len(found) - half <= full + 1, program


def test_outside_of_autocast_an_island_is_the_function():
    assert dots(full_precision(layer), W, X) == [FULLS]
    assert full_precision(layer).__name__ == "layer"
    with use_policy(BF16):
        assert dots(autocast(layer, enabled=False), W, X) == [FULLS]
        assert dots(autocast(enabled=False)(layer), W, X) == [FULLS]


def test_the_innermost_autocast_decides():
    inner = full_precision(autocast(layer, "mixed_float16"))
    fn = autocast(lambda w, x: inner(w, layer(w, x)), BF16)
    with pytest.warns(DtypePolicyWarning, match="own policy wins"):
        assert dots(fn, W, X) == [HALVES, ("float16", "float16")]


def test_what_an_island_returns_is_kept_in_float32_until_the_next_matmul():
    def fn(w, x):
        h = full_precision(layer)(w, x)
        return jnp.sin(h) * h @ w

    assert reads("sin mul", autocast(fn, BF16), W, X) == {("float32",), FULLS}


def test_primitives_are_moved_by_name():
    def fn(w, x):
        return jnp.exp(jnp.tanh(x @ w))

    def dtypes(**options: Any) -> list[str]:
        ops = operations(autocast(fn, BF16, **options), W, X)
        return [named(ops, name)[0].inputs[0] for name in ("dot_general", "tanh", "exp")]

    assert dtypes() == ["bfloat16", "bfloat16", "float32"]
    assert dtypes(allow=["exp"]) == ["bfloat16", "bfloat16", "bfloat16"]
    assert dtypes(deny=["tanh"]) == ["bfloat16", "float32", "float32"]
    assert dtypes(deny=["dot_general"]) == ["float32", "float32", "float32"]
    assert dtypes(opaque=["dot_general", "tanh"]) == ["float32", "float32", "float32"]
    assert dtypes(opaque=["tanh"], allow=["exp"]) == ["bfloat16", "float32", "float32"]


@pytest.mark.slow
def test_a_bias_widens_activations_in_the_conservative_preset_only():
    def fn(params, x):
        return jnp.tanh(x @ params["w"] + params["b"][None]) @ params["w"].T

    params = {"w": W, "b": jnp.ones(8)}
    for preset, dtype in (("memory", "bfloat16"), ("conservative", "float32")):
        found: Any = autocast(fn, BF16, preset=preset)  # type: ignore[arg-type]
        assert reads("dot_general tanh", found, params, X) == {HALVES, (dtype,)}


@pytest.mark.slow
def test_a_higher_order_primitive_that_is_opaque_runs_as_it_was_traced():
    def fn(w, x):
        return lax.scan(lambda x, _: (layer(w, x), None), x @ w, None, length=2)[0]

    assert dots(autocast(fn, BF16), W, X) == [HALVES, HALVES]
    assert dots(autocast(fn, BF16, opaque=["scan"]), W, X) == [HALVES, FULLS]


def test_parameters_are_named_as_they_were_given():
    fn = lambda variables, x, scale: x @ variables["params"]["w"] * scale + variables["stats"]["m"]  # noqa: E731
    variables = {"params": {"w": W}, "stats": {"m": jnp.zeros((1, 8))}}
    scale = jnp.ones((1, 8))
    assert autocast(fn, BF16).explain(variables, X, scale).parameters == ["args[0]['params']['w']"]
    report = autocast(fn, BF16, params=(0, "scale")).explain(variables, X, scale=scale)
    assert report.parameters == [
        "args[0]['params']['w']",
        "args[0]['stats']['m']",
        "kwargs['scale']",
    ]
    assert autocast(lambda x: x, BF16).explain(X).parameters == []
    assert str(autocast(lambda x: x, BF16).explain(X)).splitlines()[0] == "parameters: none"


def test_it_takes_shapes_and_counts_each_kind_of_operation():
    def fn(params, x):
        with jax.named_scope("Net"), jax.named_scope("up"):
            return jnp.exp(x @ params["w"] @ params["w"])

    shapes = jax.eval_shape(lambda: ({"w": W}, X))
    report = autocast(fn, BF16).explain(*shapes)
    found = {(r.path, r.primitive, r.done, r.dtypes): count for r, count in report.records.items()}
    assert found["up", "dot_general", "bfloat16", ("bfloat16",)] == 2
    assert found["up", "exp", "float32", ("float32",)] == 1
    wide = autocast(fn, BF16, rules={"up": "f32"}).explain(*shapes)
    assert [(one.path, one.primitive) for one in wide.wide_matmuls] == [("up", "dot_general")]
    assert not report.wide_matmuls


@pytest.mark.slow
def test_a_program_that_is_left_as_it_is_is_reported_where_it_holds_a_matmul():
    @jax.custom_batching.custom_vmap
    def product(x, w):
        return jnp.tanh(x @ w)

    @jax.custom_batching.custom_vmap
    def sine(x):
        return jnp.sin(x)

    product.def_vmap(lambda size, batched, x, w: (jnp.tanh(x @ w), True))
    sine.def_vmap(lambda size, batched, x: (jnp.sin(x), True))
    report = autocast(lambda w, x: sine(product(x, w)), BF16).explain(W, X)
    assert [record.primitive for record in report.opaque_matmuls] == ["custom_vmap_call"]
    assert sum(r.primitive == "custom_vmap_call" for r in report.records) == 2
    assert "opaque, contains a matmul" in str(report)
    called = autocast(lambda x: jax.pure_callback(np.tanh, jax.typeof(x), x), BF16)
    assert not called.explain(X).opaque_matmuls


def scoped_layer(params: Any, x: Any) -> Any:
    with jax.named_scope("Net"), jax.named_scope("layer"):
        return jnp.tanh(x @ params)


def called(**options: Any) -> Any:
    return lambda: autocast(scoped_layer, BF16, **options)(W, X)


# Other mistakes are in tests/mistakes/programs.py
REJECTED: dict[str, tuple[Any, type[Exception], str]] = {
    "a position of params": (called(params=(0, 2)), ValueError, "called with 2 positional"),
    "a path that matches nothing": (called(normalizes=("elsewhere",)), ValueError, "'elsewhere'"),
    "a result that is no array": (
        lambda: autocast(lambda x: {"h": x, "name": "h"}, BF16)(X),
        TypeError,
        "not a valid JAX type",
    ),
    "a mistake in the function": (
        lambda: autocast(scoped_layer, BF16)(W[:3], X),
        TypeError,
        "dot_general",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_wrong_input_is_rejected(name):
    call, error, match = REJECTED[name]
    with pytest.raises(error, match=match):
        call()


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("params", [-2, "params", ["params"], (0,)])
def test_params_are_named_by_position_or_name(params):
    assert autocast(scoped_layer, BF16, params=params)(W, X).shape == (4, 8)
    assert autocast(scoped_layer, BF16, params="params")(params=W, x=X).shape == (4, 8)


def test_an_unknown_primitive_is_opaque_or_rejected(monkeypatch):
    monkeypatch.delitem(CATEGORY_OF, "tanh")
    assert autocast(scoped_layer, BF16)(W, X).dtype == jnp.float32
    with pytest.raises(
        NotImplementedError, match=r"no category for the primitive 'tanh'.*opaque=, allow= or deny="
    ):
        autocast(scoped_layer, BF16, on_unknown="raise")(W, X)
    ruled = jax.custom_vjp(jnp.sin)
    ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.tanh(x),))
    inside = autocast(lambda w, x: ruled(x @ w).sum(), BF16, on_unknown="raise")
    assert inside(W, X).shape == ()
    with pytest.raises(NotImplementedError, match="no category for the primitive 'tanh'"):
        jax.grad(inside)(W, X)
