"""Paths are one language: rules accept the paths that any tool prints, in Linen and in nnx."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from mpmodules import linen, nnx
from policy import PolicyRules, audit, autocast, compare, suggest, use_policy
from policy.inspect.suggest.patterns import code_of
from policy.programs.paths import joined
from policy.sharding import collectives_of
from policy.testing import assert_dots_in

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4)), jnp.float32)
HALF = "mixed_bfloat16"
WIDE_INSIDE = "p=f32,c=f32,o=bf16"  # hands on half, as the carry of a scan must
SHARED = ("", "first", "tail", "Net", "head")
MODULES = {
    "linen": {
        *SHARED,
        *("blocks_0", "blocks_0/up", "blocks_1", "blocks_1/up", "tail/layers_0", "tail/layers_1"),
        *("scanned", "scanned/up"),
    },
    "nnx": {
        *SHARED,
        *("blocks", "blocks/0", "blocks/0/up", "blocks/1", "blocks/1/up"),
        *("tail/layers", "tail/layers/0", "tail/layers/1"),
    },
}


def linen_model(nn: Any) -> Any:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(4, name="up")(x)) + x

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4, name="up")(x), None

    class Net(nn.Module):
        def setup(self):
            self.first = nn.Dense(4)
            self.blocks = [Block(), Block()]
            self.tail = nn.Sequential([nn.Dense(4), nn.Dense(4)])
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            self.scanned = nn.scan(Step, length=2, **options)()
            self.Net = nn.Dense(4)  # as its model is called
            self.head = nn.Dense(3)

        def __call__(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            x, _ = self.scanned(self.tail(x), None)
            return self.head(self.Net(2 * x))

    return Net()


def nnx_model(mod: Any) -> Any:
    linear = lambda width=4: mod.Linear(4, width, rngs=flax_nnx.Rngs(0))  # noqa: E731

    class Block(mod.Module):
        def __init__(self):
            self.up = linear()

        def __call__(self, x):
            return jnp.tanh(self.up(x)) + x

    class Net(mod.Module):
        def __init__(self):
            self.first, self.Net, self.head = linear(), linear(), linear(3)
            self.blocks = flax_nnx.List([Block(), Block()])
            self.tail = mod.Sequential(linear(), linear())

        def __call__(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.Net(2 * self.tail(x)))

    return Net()


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "Flax's linen": ("linen", lambda: linen_model(flax_linen)),
    "linen": ("linen", lambda: linen_model(linen)),
    "Flax's nnx": ("nnx", lambda: nnx_model(flax_nnx)),
    "nnx": ("nnx", lambda: nnx_model(nnx)),
}
EACH = pytest.mark.parametrize("kind", MODELS)


def called(model: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if isinstance(model, flax_nnx.Module):
        return model, (X,)
    return model.apply, (model.init(jax.random.key(0), X), X)


def trained(model: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if isinstance(model, flax_nnx.Module):

        def nnx_step(model: Any, x: Any) -> Any:
            return flax_nnx.value_and_grad(lambda model: model(x).astype(jnp.float32).mean())(model)

        return nnx_step, (model, X)
    variables, tx = model.init(jax.random.key(0), X), optax.sgd(0.1)

    @jax.jit
    def step(variables: Any, state: Any, x: Any) -> Any:
        loss = lambda variables: model.apply(variables, x).astype(jnp.float32).mean()  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(variables), state)
        return optax.apply_updates(variables, updates), state

    return step, (variables, tx.init(variables), X)


def modules_of(rules: PolicyRules, modules: Iterable[str], model: str = "Net") -> set[str]:
    return {path for path in modules if rules.match(path, model=model) is not None}


def assert_pasted(printed: Iterable[str], modules: Iterable[str]) -> None:
    """Each printed path is a rule that matches exactly the module of that path; "" is outside of
    all.
    """
    pasted = {path: modules_of(PolicyRules({path: "f32"}), modules) for path in printed if path}
    assert pasted and pasted == {path: {path.removeprefix("Net:")} for path in pasted}


@pytest.mark.cases(slow=1)
@EACH
def test_every_tool_prints_paths_that_rules_take(kind):
    api, make = MODELS[kind]
    model = make()
    fn, args = called(model)
    step, given = trained(model)
    for report in (audit(fn, *args, backward=True), audit(step, *given)):
        assert {"Net:", "head", "Net"} < set(report.paths)
        assert_pasted(report.paths, MODULES[api])
    records = autocast(fn, HALF).explain(*args).records
    assert_pasted({record.path for record in records}, MODULES[api])
    mean: Any = lambda *args: args[0](*args[1:]).mean()  # noqa: E731
    loss = mean if api == "nnx" else functools.partial(mean, fn)
    given = (fn, *args) if api == "nnx" else args
    comparison = compare(loss, *given, policy=HALF, backward=True)
    rows = (*comparison.activations, *comparison.gradients)
    assert_pasted({row.path for row in rows}, MODULES[api])
    assert comparison.first_jump is None or comparison[comparison.first_jump] in rows
    found = suggest(fn, *args, policy=HALF, error=1e-6)
    assert_pasted({evidence.path for evidence in found.evidence}, MODULES[api])


def dots(report: Any, dtype: str = "float") -> set[str]:
    found = (op for op in report.operations if op.kind == "dot")
    return {op.path for op in found if any(dtype in operand for operand in op.operands)}


def wide_dots(report: Any) -> set[str]:
    return dots(report, "float32")


@pytest.mark.cases(slow=2)
@EACH
@pytest.mark.parametrize("way", ["scope", "port", "autocast", "audit"])
def test_a_printed_path_puts_its_module_and_what_is_below_in_float32_and_nothing_else(kind, way):
    api, make = MODELS[kind]
    fn, args = called(make())
    every = dots(audit(fn, *args))

    def under(rules: Any) -> Any:
        if way == "autocast":
            if api == "nnx":  # a module that a function holds is none of its arguments
                return audit(lambda model, x: autocast(model, HALF, rules=rules)(x), fn, *args)
            return audit(autocast(fn, HALF, rules=rules), *args)
        if way == "audit":
            return audit(fn, *args, policy=HALF, rules=rules)
        if way == "scope":
            with use_policy(HALF, rules):
                return audit(fn, *args)
        apply_policy = linen.apply_policy if api == "linen" else nnx.apply_policy
        model = apply_policy(make(), HALF, rules)
        return audit(*((model.apply, *args) if api == "linen" else (model, X)))

    if way == "scope" and kind != "linen":
        pytest.skip("a scope reaches linen's layers of ours alone")
    lists = ("blocks_1", "tail") if api == "linen" else ("blocks", "blocks/1", "tail/layers")
    for path in ("first", *lists, "Net", "Net:", ""):
        found = wide_dots(under({path: WIDE_INSIDE}))
        inside = path.removesuffix("Net:")
        below = {one for one in every if not inside or f"{one}/".startswith(f"{inside}/")}
        assert below and found == below, path


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("mod", [flax_linen, linen])
def test_rules_with_the_class_are_told_how_paths_begin(mod):
    model = linen_model(mod)
    fn, args = called(model)
    rules: Any = {"Net/head": "f32"}
    for run in (
        lambda: autocast(fn, HALF, rules=rules)(*args),
        lambda: linen.apply_policy(model, HALF, rules).apply(*args),
        lambda: nnx.apply_policy(nnx_model(flax_nnx), HALF, rules),
    ):
        told = r"'Net/head' matched no module\. .* leave out the model's class: write 'head'\."
        with pytest.raises(ValueError, match=told):
            run()


# --------------------------------------------------------------------------------------------------
# Several models, none, and scopes
# --------------------------------------------------------------------------------------------------


class LinenGenerator(flax_linen.Module):
    @flax_linen.compact
    def __call__(self, x):
        return flax_linen.Dense(4, name="out")(x)


class LinenCritic(LinenGenerator):
    pass


class NnxGenerator(flax_nnx.Module):
    def __init__(self):
        self.out = flax_nnx.Linear(4, 4, rngs=flax_nnx.Rngs(0))

    def __call__(self, x):
        return self.out(x)


class NnxCritic(NnxGenerator):
    pass


@pytest.mark.slow
def test_models_of_one_program_are_told_apart_by_their_classes():
    generator, critic = LinenGenerator(), LinenCritic()
    variables = [model.init(jax.random.key(0), X) for model in (generator, critic)]
    apply: Any = critic.apply
    fn = lambda g, c, x: apply(c, 2 * generator.apply(g, x)).mean()  # noqa: E731
    args = (*variables, X)
    paths = {"LinenGenerator:out", "LinenCritic:out"}
    assert dots(audit(fn, *args)) == paths
    assert paths < {record.path for record in autocast(fn, HALF).explain(*args).records}
    assert paths < {row.path for row in compare(fn, *args, policy=HALF).activations}
    found = suggest(fn, *args, policy=HALF, error=1e-6)
    assert paths <= {evidence.path for evidence in found.evidence} and str(found).count(":out")
    for path in paths:
        assert wide_dots(audit(fn, *args, policy=HALF, rules={path: "f32"})) == {path}
        assert wide_dots(audit(autocast(fn, HALF, rules={path: "f32"}), *args)) == {path}
    assert wide_dots(audit(autocast(fn, HALF, rules={"out": "f32"}), *args)) == paths
    with pytest.raises(ValueError, match="'Other:out' matched no module"):
        autocast(fn, HALF, rules={"Other:out": "f32"})(*args)
    of_nnx = lambda g, c, x: c(g(x)).mean()  # noqa: E731
    seen = dots(audit(of_nnx, NnxGenerator(), NnxCritic(), X))
    assert seen == {"NnxGenerator:out", "NnxCritic:out"}
    _ = nnx.apply_policy(NnxCritic(), HALF, {"NnxCritic:out": "f32"})
    with pytest.raises(ValueError, match="'NnxGenerator:out' matched no module"):
        nnx.apply_policy(NnxCritic(), HALF, {"NnxGenerator:out": "f32"})


def test_models_of_one_class_are_told_apart_by_the_names_that_they_were_given():
    actor, critic = flax_linen.Dense(4, name="actor"), flax_linen.Dense(4, name="critic")
    variables = actor.init(jax.random.key(0), X)
    fn = lambda v, x: critic.apply(v, actor.apply(v, x))  # noqa: E731
    assert dots(audit(fn, variables, X)) == {"actor:", "critic:"}
    ruled = autocast(fn, HALF, rules={"critic:": "f32"})
    assert wide_dots(audit(ruled, variables, X)) == {"critic:"}


def test_scopes_around_a_model_are_no_part_of_its_paths():
    fn, args = called(linen_model(flax_linen))

    def loss(*args: Any) -> Any:
        with jax.named_scope("loss"):
            return (fn(*args) ** 2).mean()

    without = {*audit(fn, *args, backward=True).paths} - {""}
    assert {*audit(loss, *args, backward=True).paths} == {*without, "loss"}


def test_collectives_name_the_path_of_rules():
    class Reduced(flax_linen.Module):
        @flax_linen.compact
        def __call__(self, x):
            return jax.lax.psum(x, "data")

    net: Any = flax_linen.Sequential([Reduced()])
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs: Any = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec()}
    fn = jax.shard_map(lambda x: net.apply({}, x), mesh=mesh, **specs)
    (found,) = collectives_of(fn, jax.ShapeDtypeStruct((2, 4), jnp.float32), stage="traced")
    assert found.path == "layers_0" and str(found).endswith("at 'layers_0'")


# --------------------------------------------------------------------------------------------------
# Names that are no identifiers have rows of their own, and rules name them
# --------------------------------------------------------------------------------------------------


_WORDS = r"""
a conv-1 a.b a.attend b.c.d layers.0.self_attn 1x1 f(x) jvp(x) a(b b) x[0] [b] a* a|b ^$
a:b a=b <b> it's q"q a\b {x} a,b ij,jk->ik # %d u/v w//x /y p/p x.y/z
"""
NAMES = (*_WORDS.split(), "my layer")
FEW = ("a", "my layer", "conv-1", "a.b", "f(x)", 'q"q', "[b]", "/y//")
X3 = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.float32)
APIS = {"Flax's linen": flax_linen, "linen": linen, "Flax's nnx": flax_nnx, "nnx": nnx}
EACH_API = pytest.mark.parametrize("api", APIS)


def named_model(api: str, names: tuple[str, ...] = FEW) -> tuple[Any, Any, tuple[Any, ...]]:
    mod: Any = APIS[api]
    if api.endswith("linen"):

        class LinenNet(mod.Module):
            @mod.compact
            def __call__(self, x):
                for name in names:
                    x = mod.Dense(3, name=name)(x)
                return x

        net = LinenNet()
        return net, net.apply, (jax.eval_shape(net.init, jax.random.key(0), X3), X3)

    class NnxNet(mod.Module):
        def __init__(self):
            for name in names:
                setattr(self, name, mod.Linear(3, 3, rngs=flax_nnx.Rngs(0)))

        def __call__(self, x):
            for name in names:
                x = getattr(self, name)(x)
            return x

    model = NnxNet()
    return model, model, (X3,)


def arrays_of(args: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.37, leaf.dtype), args)


def ported_with(api: str, model: tuple[Any, Any, Any], pattern: str) -> Any:
    apply_policy = linen.apply_policy if api.endswith("linen") else nnx.apply_policy
    ported = apply_policy(model[0], HALF, {pattern: "float32"})
    return ported.apply if api.endswith("linen") else ported


def assert_rows(paths: Any, names: tuple[str, ...] = FEW) -> None:
    """Every module has one, and none has another."""
    expected = {joined([name]) for name in names}
    assert {path for path in paths if path and not path.endswith("Net:")} == expected


@pytest.mark.cases(slow=3)
@EACH_API
def test_audit_has_a_row_for_each(api):
    _, fn, args = named_model(api, NAMES)
    report = audit(fn, *args, backward=True)
    assert_rows(report.paths, NAMES)
    assert all(part in str(report) for name in NAMES for part in name.split("/"))


@pytest.mark.cases(slow=2)
@EACH_API
def test_compare_suggest_and_explain_have_a_row_for_each_and_rules_name_them(api):
    _, fn, args = named_model(api)
    arrays = arrays_of(args)
    assert_rows(row.path for row in compare(fn, *arrays, policy=HALF).activations)
    found = suggest(fn, *arrays, policy=HALF, error=1e-6)
    assert_rows(evidence.path for evidence in found.evidence)
    namespace: dict[str, Any] = {"PolicyRules": PolicyRules}
    exec(f"rules = {found.code()}", namespace)
    assert namespace["rules"] == found.rules
    assert_rows(record.path for record in autocast(fn, HALF).explain(*args).records)


@pytest.mark.cases(fast=1, slow=9)
@EACH_API
@pytest.mark.parametrize("name", FEW)
def test_autocast_ports_and_assertions_obey_patterns_of_each(api, name):
    _, fn, args = model = named_model(api)
    name = joined([name])
    report = autocast(fn, HALF, rules={re.escape(name): "float32"}).explain(*args)
    assert [record.path for record in report.wide_matmuls] == [name]
    ported = ported_with(api, model, re.escape(name))
    with pytest.raises(AssertionError, match=re.escape(f"at '{name}'")):
        assert_dots_in(ported, args, "bfloat16")
    assert_dots_in(ported, args, "bfloat16", allow=[re.escape(name)])


@pytest.mark.cases(slow=3)
@EACH_API
@pytest.mark.parametrize(("pattern", "wide"), [("a", ["a", "a/b"]), ("a/b", ["a/b"])])
def test_a_slash_in_a_name_divides_it_for_rules_and_for_tools(api, pattern, wide):
    _, fn, args = model = named_model(api, ("a", "a//b", "ab", "c"))
    report = autocast(fn, HALF, rules={pattern: "float32"}).explain(*args)
    assert [record.path for record in report.wide_matmuls] == wide
    ported = ported_with(api, model, pattern)
    dots = [op for op in audit(ported, *args).operations if op.primitive == "dot_general"]
    assert [op.path for op in dots if "float32" in op.operands] == wide


@pytest.mark.cases(fast=1)
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
        report = audit(net.apply, jax.eval_shape(net.init, jax.random.key(0), X3), X3)
        assert report.paths == (path,)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("api", ["Flax's linen", "linen"])
def test_names_are_known_where_params_are_closed_over_and_where_jit_traced_before(api):
    _, fn, (variables, x) = named_model(api)
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
