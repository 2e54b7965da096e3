"""The report of an autocast: parameters, casts, and operations left in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from policy.autocasting.transform import autocast
from tests.policy.autocasting.models import BF16, SQUARE, normal

X = normal(4, 8)


def test_parameters_are_named_as_they_were_given():
    fn = lambda variables, x, scale: x @ variables["params"]["w"] * scale + variables["stats"]["m"]  # noqa: E731
    variables = {"params": {"w": SQUARE}, "stats": {"m": jnp.zeros((1, 8))}}
    scale = jnp.ones((1, 8))
    assert autocast(fn, BF16).explain(variables, X, scale).parameters == ["args[0]['params']['w']"]
    assert autocast(fn, BF16, params=(0, "scale")).explain(
        variables, X, scale=scale
    ).parameters == [
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

    shapes = jax.eval_shape(lambda: ({"w": SQUARE}, X))
    report = autocast(fn, BF16).explain(*shapes)
    found = {(r.path, r.primitive, r.done, r.dtypes): count for r, count in report.records.items()}
    assert found["up", "dot_general", "bfloat16", ("bfloat16",)] == 2
    assert found["up", "exp", "float32", ("float32",)] == 1
    wide = autocast(fn, BF16, rules={"up": "f32"}).explain(*shapes)
    assert [(record.path, record.primitive) for record in wide.wide_matmuls] == [
        ("up", "dot_general")
    ]
    assert not report.wide_matmuls


def test_a_program_that_is_left_as_it_is_is_reported_where_it_holds_a_matmul():
    @jax.custom_batching.custom_vmap
    def product(x, w):
        return jnp.tanh(x @ w)

    @jax.custom_batching.custom_vmap
    def sine(x):
        return jnp.sin(x)

    product.def_vmap(lambda size, batched, x, w: (jnp.tanh(x @ w), True))
    sine.def_vmap(lambda size, batched, x: (jnp.sin(x), True))
    report = autocast(lambda w, x: sine(product(x, w)), BF16).explain(SQUARE, X)
    assert [record.primitive for record in report.opaque_matmuls] == ["custom_vmap_call"]
    assert sum(r.primitive == "custom_vmap_call" for r in report.records) == 2
    assert "opaque, contains a matmul" in str(report)
    called = autocast(
        lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x), BF16
    )
    assert not called.explain(X).opaque_matmuls
