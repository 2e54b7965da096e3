"""Modules whose names are no identifiers have rows of their own in every tool, and rules can name
them.
"""

from __future__ import annotations

import re
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import PolicyRules, audit, autocast, compare, suggest
from policy.inspect.suggest.patterns import code_of
from policy.programs.paths import joined, path_of
from policy.testing import assert_dots_in

_WORDS = r"""
a conv-1 a.b a.attend b.c.d layers.0.self_attn 1x1 f(x) jvp(x) a(b b) x[0] [b] a* a|b ^$
a:b a=b <b> it's q"q a\b {x} a,b ij,jk->ik # %d u/v w//x /y p/p x.y/z
"""
NAMES = (*_WORDS.split(), "my layer")
FEW = ("a", "my layer", "conv-1", "a.b", "f(x)", 'q"q', "[b]", "/y//")
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.float32)
HALF = "mixed_bfloat16"
WINGS = {"Flax's linen": flax_linen, "linen": linen, "Flax's nnx": flax_nnx, "nnx": nnx}
EACH_WING = pytest.mark.parametrize("wing", WINGS)


def model_of(wing: str, names: tuple[str, ...] = FEW) -> tuple[Any, Any, tuple[Any, ...]]:
    """A model of layers with these names, and a call of it."""
    mod: Any = WINGS[wing]
    if wing.endswith("linen"):

        class LinenNet(mod.Module):
            @mod.compact
            def __call__(self, x):
                for name in names:
                    x = mod.Dense(3, name=name)(x)
                return x

        net = LinenNet()
        return net, net.apply, (jax.eval_shape(net.init, jax.random.key(0), X), X)

    class NnxNet(mod.Module):
        def __init__(self):
            for name in names:
                setattr(self, name, mod.Linear(3, 3, rngs=flax_nnx.Rngs(0)))

        def __call__(self, x):
            for name in names:
                x = getattr(self, name)(x)
            return x

    model = NnxNet()
    return model, model, (X,)


def arrays_of(args: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.37, leaf.dtype), args)


def ported_with(wing: str, model: tuple[Any, Any, Any], pattern: str) -> Any:
    apply_policy = linen.apply_policy if wing.endswith("linen") else nnx.apply_policy
    ported = apply_policy(model[0], HALF, {pattern: "float32"})
    return ported.apply if wing.endswith("linen") else ported


def assert_rows(paths: Any, names: tuple[str, ...] = FEW) -> None:
    """Every module has one, and none has another."""
    expected = {joined([name]) for name in names}
    assert {path for path in paths if path and not path.endswith("Net:")} == expected


@EACH_WING
def test_audit_has_a_row_for_each(wing):
    _, fn, args = model_of(wing, NAMES)
    report = audit(fn, *args, backward=True)
    assert_rows(report.paths, NAMES)
    assert all(part in str(report) for name in NAMES for part in name.split("/"))
    assert "<b>" not in report.to_html().replace("&lt;b&gt;", "")


@EACH_WING
def test_compare_suggest_and_explain_have_a_row_for_each_and_rules_name_them(wing):
    _, fn, args = model_of(wing)
    arrays = arrays_of(args)
    assert_rows(row.path for row in compare(fn, *arrays, policy=HALF).activations)
    found = suggest(fn, *arrays, policy=HALF, error=1e-6)
    assert_rows(evidence.path for evidence in found.evidence)
    namespace: dict[str, Any] = {"PolicyRules": PolicyRules}
    exec(f"rules = {found.code()}", namespace)
    assert namespace["rules"] == found.rules
    assert_rows(record.path for record in autocast(fn, HALF).explain(*args).records)


@EACH_WING
@pytest.mark.parametrize("name", FEW)
def test_autocast_ports_and_assertions_obey_patterns_of_each(wing, name):
    _, fn, args = model = model_of(wing)
    name = joined([name])
    report = autocast(fn, HALF, rules={re.escape(name): "float32"}).explain(*args)
    assert [record.path for record in report.wide_matmuls] == [name]
    ported = ported_with(wing, model, re.escape(name))
    with pytest.raises(AssertionError, match=re.escape(f"at '{name}'")):
        assert_dots_in(ported, args, "bfloat16")
    assert_dots_in(ported, args, "bfloat16", allow=[re.escape(name)])


@EACH_WING
@pytest.mark.parametrize(("pattern", "wide"), [("a", ["a", "a/b"]), ("a/b", ["a/b"])])
def test_a_slash_in_a_name_divides_it_for_rules_and_for_tools(wing, pattern, wide):
    _, fn, args = model = model_of(wing, ("a", "a//b", "ab", "c"))
    report = autocast(fn, HALF, rules={pattern: "float32"}).explain(*args)
    assert [record.path for record in report.wide_matmuls] == wide
    ported = ported_with(wing, model, pattern)
    dots = [op for op in audit(ported, *args).operations if op.primitive == "dot_general"]
    assert [op.path for op in dots if "float32" in op.operands] == wide


@pytest.mark.parametrize("name", ["a", "a/b", "a/a"])
def test_a_model_whose_call_calls_its_base_class_has_one_path(name):
    class Shifted(linen.Dense):
        @linen.compact
        def __call__(self, x):
            return super().__call__(x) + 1

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Shifted(3, name=name)(x)

    for net, path in (Net(), name), (Shifted(3, name=name), f"{name}:"):
        report = audit(net.apply, jax.eval_shape(net.init, jax.random.key(0), X), X)
        assert report.paths == (path,)


@pytest.mark.parametrize("wing", ["Flax's linen", "linen"])
def test_names_are_known_where_params_are_closed_over_and_where_jit_traced_before(wing):
    _, fn, (variables, x) = model_of(wing)
    variables = arrays_of(variables)
    assert_rows(audit(lambda x: fn(variables, x), x).paths)
    jitted = jax.jit(fn)
    jitted.lower(variables, x)
    assert_rows(audit(jitted, variables, x).paths)


def test_rules_from_texts_may_have_names_with_equals_signs():
    rules = PolicyRules.from_texts(["a=b=f32", "c=p=f32,c=bf16,o=f32", r"d\=e=bf16"])
    assert [pattern for pattern, _ in rules] == ["a=b", "c", r"d\=e"]


def test_the_code_of_rules_is_python_whatever_the_name():
    for pattern in ("a", r"a\.b", 'q"q', 'q"\\d', "it's", "a\nb", "tail\\\\"):
        found = eval(code_of([(pattern, "f32")]), {"PolicyRules": PolicyRules})
        assert found == PolicyRules([(pattern, "f32")])


STACKS = {
    "Net/my layer": "Net | my layer",
    "transpose(jvp(Net))/f(x)/g": "Net | f(x) | g",
    "transpose(jvp(f(x)))/a(b": "f(x) | a(b",
    "Net/conv.1x1": "Net | conv.1x1",
    "Net/Net.<lambda>/layer": "Net | layer",
    "encoder.block/x": "encoder.block | x",
    "Net/ab,bc->ac": "Net",
    "vmap(Net)/<lambda>/x": "Net | x",
    "Net/transpose(jvp(inner))": "Net | inner",
    "jvp(Net)/checkpoint/transpose(jvp(Net))/Dense_0": "Net | Dense_0",
    "jvp(Net)/policy_autocast": "Net",
}


def test_a_name_stack_is_read_whatever_the_names_and_derivatives():
    assert {stack: " | ".join(path_of(stack)) for stack in STACKS} == STACKS
