"""Float32 matmuls at the default precision, where float32 was asked for in half precision."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policy
from mpmodules import linen, nnx, use_policy
from policy import audit

X = jnp.ones((4, 8))
MIXED = "mixed_bfloat16"


class Router(linen.Module):
    precision: Any = None

    @linen.compact
    def __call__(self, x):
        w = self.param("w", linen.initializers.ones, (8, 8))
        return jnp.dot(x, w, precision=self.precision)


class Net(linen.Module):
    precision: Any = None

    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(Router(self.precision, name="router")(x))


class NnxRouter(nnx.Module):
    def __init__(self, precision, **_: Any):
        self.w, self.precision = nnx.Param(jnp.ones((8, 8))), precision

    def __call__(self, x):
        return jnp.dot(x, self.w[...], precision=self.precision)


class NnxNet(nnx.Module):
    def __init__(self, precision, rngs):
        self.router = NnxRouter(precision)
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.router(x))


def found(precision: Any, rule: str, base: str = MIXED, backward: bool = False) -> Any:
    model = Net(precision)
    with use_policy(base, {"router": rule}):
        variables = model.init(jax.random.key(0), X)
        report = audit(model.apply, variables, X, backward=backward)
    return [each for each in report.findings if each.kind == "default-precision"]


def test_the_authors_default_precision_in_a_float32_rule_is_found_with_its_line():
    (forward,) = found("default", "float32")
    assert forward.path == "router" and "test_default_precision.py" in forward.source
    assert "x=default" in forward.message and forward.primitive == "dot_general"
    assert any(each.is_backward for each in found("default", "float32", backward=True))
    assert found(("highest", "default"), "float32") and not found(("highest", "high"), "float32")


def test_it_is_found_in_nnx_and_in_islands():
    model = nnx.apply_policy(NnxNet("default", nnx.Rngs(0)), MIXED, {"router": "float32"})
    (finding,) = (each for each in audit(model, X).findings if each.kind == "default-precision")
    assert finding.path == "router"

    def island(w, x):
        y = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        with policy.full_precision():
            return jnp.dot(y.astype(jnp.float32), w, precision="default")

    with use_policy(MIXED):
        kinds = {each.kind for each in audit(island, jnp.ones((8, 8)), X).findings}
    assert "default-precision" in kinds


@pytest.mark.parametrize(
    ("precision", "rule", "base"),
    [
        (None, "float32", MIXED),
        ("high", "float32", MIXED),
        ("highest", "f32_inside", MIXED),
        ("default", "c=f32,o=f32,x=default", MIXED),
        (None, "c=f32,o=f32,x=default", MIXED),
        ("default", "float32", "float32"),
        ("default", MIXED, MIXED),
        (None, MIXED, "float32"),
    ],
)
def test_other_precisions_and_whole_float32_models_are_no_finding(precision, rule, base):
    assert found(precision, rule, base) == []


def test_an_operation_shows_the_precision_of_its_float32_matmul():
    fn = lambda x, y: jnp.dot(x, y, precision="highest") + x @ y  # noqa: E731
    report = audit(fn, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert {op.precision for op in report.operations} == {"highest", "default", ""}
    assert "dot_general, highest" in str(report) and "dot_general, highest" in report.to_html()
    mixed = audit(lambda x, y: jnp.dot(x, y, precision=("default", "highest")), X, X.T)
    assert [op.precision for op in mixed.operations] == ["highest, default"]
    half = audit(jnp.dot, X.astype(jnp.bfloat16), X.T.astype(jnp.bfloat16))
    assert [op.precision for op in half.operations] == [""]
