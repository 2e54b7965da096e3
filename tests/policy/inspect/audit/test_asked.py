"""Float32 by a rule, a policy or an argument is no finding, unless at a lower precision; a report
says where no policy was in force.
"""

import functools
import json
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import audit, autocast, compare, full_precision, set_policy, use_policy

X = jnp.ones((2, 4))
HALF = "mixed_bfloat16"
RULES: Any = {"head": "f32"}


class OwnHead(linen.Module):
    precision: Any

    @linen.compact
    def __call__(self, x):
        w = self.param("w", linen.initializers.ones, (8, 3))
        return jnp.dot(x, w, precision=self.precision)


def linen_model(
    nn: Any, up: Any = None, cast: Any = None, own: Any = None, **head: Any
) -> tuple[Any, Any]:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="up", **(up or {}))(x)
            layer = functools.partial(nn.Dense, 3) if own is None else own
            return layer(name="head", **head)(x if cast is None else x.astype(cast))

    model = Net()
    return model, jax.eval_shape(model.init, jax.random.key(0), X)


def nnx_model(mod: Any, up: Any = None, **head: Any) -> Any:
    class Net(mod.Module):
        def __init__(self):
            rngs = flax_nnx.Rngs(0)
            self.up = mod.Linear(4, 8, rngs=rngs, **(up or {}))
            self.head = mod.Linear(8, 3, rngs=rngs, **head)

        def __call__(self, x):
            return self.head(self.up(x))

    return Net()


def kinds(report: Any) -> set[str]:
    """The kinds of findings, of a program that multiplies in half but for its head."""
    dots = [op for op in report.operations if op.kind == "dot"]
    found = {(op.path, dtype) for op in dots for dtype in op.operands}
    assert found == {("head", "float32"), ("up", "bfloat16")}, report
    return {f.kind for f in report.findings if f.path == "head" or f.kind.startswith("float32")}


HALF_ARGUMENT, FLOAT32_ARGUMENT = {"dtype": jnp.bfloat16}, {"dtype": jnp.float32}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("nn", [flax_linen, linen])
def test_a_rule_or_a_dtype_argument_makes_float32_no_finding(nn, backward):
    model, variables = linen_model(nn)
    told, _ = linen_model(nn, HALF_ARGUMENT, **FLOAT32_ARGUMENT)
    ported = linen.apply_policy(model, HALF, RULES)
    for fn, options in (
        (model.apply, {"policy": HALF, "rules": RULES}),
        (autocast(model.apply, HALF, rules=RULES), {}),
        (ported.apply, {}),
        (told.apply, {}),
    ):
        report = audit(fn, variables, X, backward=backward, **options)
        assert not kinds(report) - {"low-precision-reduction"}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("mod", [flax_nnx, nnx])
def test_a_rule_or_a_dtype_argument_makes_float32_no_finding_in_nnx(mod):
    assert not kinds(audit(nnx.apply_policy(nnx_model(mod), HALF, RULES), X))
    assert not kinds(audit(nnx_model(mod), X, policy=HALF, rules=RULES))
    assert not kinds(audit(nnx_model(mod, HALF_ARGUMENT, **FLOAT32_ARGUMENT), X))


@pytest.mark.parametrize("nn", [flax_linen, linen])
def test_float32_that_nobody_asked_for_is_a_finding_still(nn):
    model, variables = linen_model(nn, HALF_ARGUMENT, jnp.float32)
    assert {"float32-leak", "float32-matmul"} <= kinds(audit(model.apply, variables, X))


def half_ported_linen() -> tuple[Any, ...]:
    class Net(flax_linen.Module):
        @flax_linen.compact
        def __call__(self, x):
            x = linen.Dense(4, name="up")(x).astype(jnp.float32)
            w = self.param("w", jax.nn.initializers.ones, (4, 4))
            return flax_linen.Dense(4, name="head")(x) @ w

    return Net().apply, jax.eval_shape(Net().init, jax.random.key(0), X), X


def half_ported_nnx() -> tuple[Any, ...]:
    class Net(flax_nnx.Module):
        def __init__(self, rngs):
            self.up, self.head = nnx.Linear(4, 4, rngs=rngs), flax_nnx.Linear(4, 4, rngs=rngs)
            self.w = flax_nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x):
            return self.head(self.up(x).astype(jnp.float32)) @ self.w[...]

    return Net(flax_nnx.Rngs(0)), X


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "model", "layer"),
    [("linen", half_ported_linen, "Dense"), ("nnx", half_ported_nnx, "Linear")],
)
@pytest.mark.filterwarnings("ignore:Net of flax")
def test_a_module_that_an_import_of_flax_left_without_a_policy_is_named(api, model, layer):
    with use_policy("bfloat16"):
        report = audit(*model())
    found = [f for f in report.findings if f.kind == "float32-matmul"]
    assert all(f.source.startswith("test_asked.py:") for f in found)
    remedy = (
        f"obeys no policy: import {api} from mpmodules in its place, or call "
        f"mpmodules.{api}.apply_policy on the model."
    )
    named = {"head": f"flax.{api}.{layer}", "Net:": f"Net of flax.{api}"}
    assert [f.path for f in found] == list(named)
    assert all(f.message.endswith(f"{named[f.path]} {remedy}") for f in found)


def test_a_model_that_is_flax_s_alone_is_named_under_a_policy():
    model = flax_linen.Dense(4)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert not audit(model.apply, variables, X).findings
    for policy, expected in (("mixed_bfloat16", {"float32-matmul"}), ("float32", set())):
        with use_policy(policy):
            found = audit(model.apply, variables, X).findings
        assert {finding.kind for finding in found} == expected
        assert all("flax.linen.Dense obeys no policy" in finding.message for finding in found)


def test_a_rule_of_a_scope_holds_for_what_was_traced_before():
    model, variables = linen_model(linen)
    step = jax.jit(model.apply)
    with use_policy(HALF, RULES):
        step.lower(variables, X)
        assert not kinds(audit(step, variables, X))


def test_a_policy_of_a_layer_and_an_island_make_float32_no_finding():
    model, variables = linen_model(linen, dtype_policy="f32")
    assert not kinds(audit(model.apply, variables, X, policy=HALF))

    def fn(w, x):
        with jax.named_scope("up"):
            x = x @ w
        with jax.named_scope("head"):
            return full_precision(lambda x: x @ w)(x)

    assert not kinds(audit(autocast(fn, HALF), jnp.eye(4), X))


def test_no_findings_without_a_policy_says_so():
    model, variables = linen_model(linen)
    report = audit(model.apply, variables, X)
    assert report.policy == json.loads(report.to_json())["policy"] == ""
    assert str(report).startswith("audit of apply: no findings, and no policy was in force\n")
    for found, policy in (
        (audit(model.apply, variables, X, policy=HALF), HALF),
        (audit(autocast(model.apply, HALF), variables, X), "of modules"),
        (audit(linen.apply_policy(model, HALF).apply, variables, X), "of modules"),
        (audit(nnx_model(nnx, dtype_policy=HALF), X), "of modules"),
    ):
        assert found.policy == policy and "no policy" not in str(found)
    jitted = jax.jit(linen.apply_policy(model, HALF).apply)
    jitted.lower(variables, X)  # what was traced before is known by its casts
    assert audit(jitted, variables, X).policy == "of modules"
    with use_policy(HALF):
        assert audit(model.apply, variables, X).policy == HALF
    set_policy(HALF)
    try:
        assert audit(model.apply, variables, X).policy == HALF
    finally:
        set_policy(None)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("tool", [audit, compare])
def test_rules_go_with_a_policy(tool):
    model, _ = linen_model(linen)
    variables = model.init(jax.random.key(0), X)
    told = r"rules= makes exceptions to a policy, but policy= is missing: pass it too"
    with pytest.raises(ValueError, match=told):
        tool(model.apply, variables, X, rules=RULES)


# --------------------------------------------------------------------------------------------------
# Float32 at a lower precision
# --------------------------------------------------------------------------------------------------


def found(precision: Any, rule: str, base: str = HALF, backward: bool = False) -> Any:
    model, variables = linen_model(linen, own=OwnHead, precision=precision)
    with use_policy(base, {"head": rule}):
        report = audit(model.apply, variables, X, backward=backward)
    return [each for each in report.findings if each.kind == "default-precision"]


def test_the_authors_default_precision_in_a_float32_rule_is_found_with_its_line():
    (forward,) = found("default", "float32")
    assert forward.path == "head" and "test_asked.py" in forward.source
    assert "x=default" in forward.message and forward.primitive == "dot_general"
    assert any(each.is_backward for each in found("default", "float32", backward=True))
    assert found(("highest", "default"), "float32") and not found(("highest", "high"), "float32")


def test_it_is_found_in_nnx_and_in_islands():
    model = nnx.apply_policy(nnx_model(nnx, precision="default"), HALF, {"head": "float32"})
    (finding,) = (each for each in audit(model, X).findings if each.kind == "default-precision")
    assert finding.path == "head"

    def island(w, x):
        y = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        with full_precision():
            return jnp.dot(y.astype(jnp.float32), w, precision="default")

    with use_policy(HALF):
        kinds = {each.kind for each in audit(island, jnp.ones((4, 4)), X).findings}
    assert "default-precision" in kinds


@pytest.mark.parametrize(
    ("precision", "rule", "base"),
    [
        (None, "float32", HALF),
        ("high", "float32", HALF),
        ("highest", "f32_inside", HALF),
        ("default", "c=f32,o=f32,x=default", HALF),
        (None, "c=f32,o=f32,x=default", HALF),
        ("default", "float32", "float32"),
        ("default", HALF, HALF),
        (None, HALF, "float32"),
    ],
)
def test_other_precisions_and_whole_float32_models_are_no_finding(precision, rule, base):
    assert found(precision, rule, base) == []


def test_an_operation_shows_the_precision_of_its_float32_matmul():
    fn = lambda x, y: jnp.dot(x, y, precision="highest") + x @ y  # noqa: E731
    report = audit(fn, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert {op.precision for op in report.operations} == {"highest", "default", ""}
    assert "dot_general, highest" in str(report)
    mixed = audit(lambda x, y: jnp.dot(x, y, precision=("default", "highest")), X, X.T)
    assert [op.precision for op in mixed.operations] == ["highest, default"]
    half = audit(jnp.dot, X.astype(jnp.bfloat16), X.T.astype(jnp.bfloat16))
    assert [op.precision for op in half.operations] == [""]
