"""Rules by module path, through every transformation that moves names about."""

import functools
import weakref
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy import PolicyRules, audit, full_precision, use_policy
from policy.autocasting.cast_flow import rule_of
from policy.autocasting.transform import autocast
from policy.programs.jaxprs import opened
from policy.programs.paths import path_of
from policy.programs.reading.walk import walk
from tests.policy.autocasting.models import BF16, KEY, SEQUENCE, SQUARE, normal
from tests.programs import named, operations


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return x + nn.Dense(8, name="down")(nn.tanh(nn.Dense(16, name="up")(x))), None


SCANNED: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}


class Net(nn.Module):
    remat: bool
    scan: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        block: Any = nn.remat(Block, prevent_cse=False) if self.remat else Block
        if self.scan:
            x, _ = nn.scan(block, **SCANNED)(name="layers")(x, None)
        else:
            for i in range(2):
                x, _ = block(name=f"layers_{i}")(x)
        return nn.Dense(3, name="head")(x)


def matmuls(fn: Any, *args: Any) -> Counter[tuple[str, str]]:
    """Counts the matmuls of each layer, by layer and dtype: told by shapes, not by the names under
    test.
    """
    found: Counter[tuple[str, str]] = Counter()

    for site in walk(jax.make_jaxpr(fn)(*args)):
        if site.name == "dot_general":
            variables = (*site.equation.invars, *site.equation.outvars)
            layer = "head" if any(3 in v.aval.shape for v in variables) else "block"
            found[layer, site.equation.invars[0].aval.dtype.name] += 1
    return found


def programs(fn: Any, **options: Any) -> dict[str, Any]:
    def loss(variables: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(fn(variables, x)))

    return {
        "forward": autocast(fn, BF16, **options),
        "grad(autocast)": jax.grad(autocast(loss, BF16, **options), (0, 1)),
        "autocast(grad)": autocast(jax.grad(loss, (0, 1)), BF16, params=0, **options),
        "jit(grad(autocast))": jax.jit(jax.grad(autocast(loss, BF16, **options), (0, 1))),
    }


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("scan", [False, True], ids=["", "scan"])
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_a_named_layer_is_in_float32_everywhere_and_no_other(remat, scan):
    net = Net(remat, scan)
    variables = jax.eval_shape(net.init, KEY, SEQUENCE)
    for rule, wide, half in (("head", "head", "block"), (r"layers(_\d)?/.*", "block", "head")):
        for program, fn in programs(net.apply, rules={rule: "f32"}).items():
            dtypes = set(matmuls(fn, variables, SEQUENCE))
            assert dtypes == {(wide, "float32"), (half, "bfloat16")}, program
    plain = programs(net.apply)
    for program, fn in programs(net.apply, rules={r"layers.*/up": "f32"}).items():
        found = matmuls(fn, variables, SEQUENCE)
        wide, half = found["block", "float32"], found["block", "bfloat16"]
        assert wide >= half > 0, program  # a checkpoint computes `up` again, and not always `down`
        assert wide + half == matmuls(plain[program], variables, SEQUENCE)["block", "bfloat16"]


class Methods(nn.Module):
    """A module with a method of its own, in the scopes ``Methods`` and ``Methods.encode``."""

    def setup(self) -> None:
        # `body` is a name of JAX's in compiled programs, not in these
        self.body, self.head = nn.Dense(8), nn.Dense(3)

    def encode(self, x: Any) -> Any:
        return self.body(x)

    def __call__(self, x: Any) -> Any:
        return self.head(self.encode(x))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("rule", ["body", "Methods:body"])
def test_a_layer_is_known_by_its_path_whatever_method_calls_it(rule):
    net = Methods()
    variables = jax.eval_shape(net.init, KEY, SEQUENCE)
    for program, fn in programs(net.apply, rules={rule: "f32"}).items():
        dtypes = set(matmuls(fn, variables, SEQUENCE))
        assert dtypes == {("block", "float32"), ("head", "bfloat16")}, program
    encode: Any = functools.partial(net.apply, method="encode")
    encode = autocast(encode, BF16, params=0, rules={rule: "f32"})
    assert set(matmuls(encode, variables, SEQUENCE)) == {("block", "float32")}


def test_a_rule_for_what_an_island_holds_matches_it():
    net = Methods()
    variables = jax.eval_shape(net.init, KEY, SEQUENCE)
    rules = {"body": "mixed_float16", "Methods:head": "bf16"}
    fn = autocast(full_precision(net.apply), BF16, rules=rules)
    assert {dtype for _, dtype in matmuls(fn, variables, SEQUENCE)} == {"float32"}


def scoped(w: Any, x: Any) -> Any:
    with jax.named_scope("first"):
        x = jnp.tanh(x @ w)
    step = jax.checkpoint(lambda x: jnp.tanh(x @ w))
    with jax.named_scope("second"), jax.named_scope("inner"):
        return lax.scan(lambda x, _: (step(x), None), x, None, length=2)[0]


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("rule", ["second", "second/inner", "second/.*"])
def test_scopes_of_plain_functions_are_paths_too(rule):
    w, x = SQUARE, normal(4, 8)
    for program, fn in programs(scoped, rules={rule: "f32"}).items():
        found = named(operations(fn, w, x), "dot_general")
        dtypes = {("first" in op.path, "second" in op.path, op.inputs[0]) for op in found}
        assert dtypes == {(True, False, "bfloat16"), (False, True, "float32")}, program


@pytest.mark.parametrize(
    ("name_stack", "above", "path"),
    [
        ("", (), ()),
        ("Net/layer_0/Dense_0", (), ("Net", "layer_0", "Dense_0")),
        ("jvp(Net)/layer_0", (), ("Net", "layer_0")),
        ("transpose(jvp(Net))/layer_0", (), ("Net", "layer_0")),
        ("Net/jvp(Net)/layer_0", (), ("Net", "layer_0")),
        ("Net/vmap(heads)/d", (), ("Net", "heads", "d")),
        ("Net/layer_0/...qhd,...khd->...hqk", (), ("Net", "layer_0")),
        ("Net/checkpoint/layer_0", (), ("Net", "layer_0")),
        ("Net/rematted_computation/layer_0", (), ("Net", "layer_0")),
        ("Net/jit(relu)/x", (), ("Net", "x")),
        ("Net/Net.encode/layer_0", (), ("Net", "layer_0")),
        ("Net.encode/layer_0", (), ("Net", "layer_0")),
        ("Net.encode/layer_0", ("Net",), ("Net", "layer_0")),
        ("transpose(jvp(Net.encode))/layer_0.call/up", (), ("Net", "layer_0", "up")),
        ("Net/ab...,b->...", (), ("Net",)),
        ("Net/layer_0", ("Net",), ("Net", "layer_0")),
        ("layer_0/up", ("Net",), ("Net", "layer_0", "up")),
        ("layer_0/up", ("Net", "layer_0"), ("Net", "layer_0", "up")),
        ("transpose(jvp(Net))/layer_0", ("Net", "layer_0"), ("Net", "layer_0")),
        ("transpose(jvp())", ("Net", "layer_0"), ("Net", "layer_0")),
        ("", ("Net", "layer_0"), ("Net", "layer_0")),
        ("Net/my layer", (), ("Net", "my layer")),
        ("transpose(jvp(Net))/f(x)/g", (), ("Net", "f(x)", "g")),
        ("transpose(jvp(f(x)))/a(b", (), ("f(x)", "a(b")),
        ("Net/conv.1x1", (), ("Net", "conv.1x1")),
        ("Net/Net.<lambda>/layer", (), ("Net", "layer")),
        ("encoder.block/x", (), ("encoder.block", "x")),
        ("Net/ab,bc->ac", (), ("Net",)),
        ("vmap(Net)/<lambda>/x", (), ("Net", "x")),
        ("Net/transpose(jvp(inner))", (), ("Net", "inner")),
        ("jvp(Net)/checkpoint/transpose(jvp(Net))/Dense_0", (), ("Net", "Dense_0")),
        ("jvp(Net)/policy_autocast", (), ("Net",)),
    ],
)
def test_a_path_is_read_from_a_name_stack(name_stack, above, path):
    assert path_of(name_stack, above) == path


def carried(fn: Any, *args: Any) -> set[str]:
    dtypes: set[str] = set()
    for site in walk(jax.make_jaxpr(fn)(*args)):
        if site.name == "scan":
            body, _ = opened(site.equation.params["jaxpr"])
            pairs = zip(site.equation.outvars, body.outvars, strict=True)
            dtypes |= {o.aval.dtype.name for o, i in pairs if o.aval.ndim == i.aval.ndim == 2}
    return dtypes


def carried_in(model: nn.Module, rules: Any) -> set[str]:
    variables = jax.eval_shape(model.init, KEY, SQUARE)
    return carried(autocast(model.apply, BF16, rules=rules), variables, SQUARE)


LAYERS = PolicyRules({"layers": "bfloat16"})


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_a_rule_for_scanned_layers_narrows_what_each_hands_to_the_next(remat: bool):
    net = Net(remat, scan=True)
    variables = jax.eval_shape(net.init, KEY, SQUARE)
    for rules in (None, {"layers": BF16}, {"layers/up": "bf16"}):
        assert carried_in(net, rules) == {"float32"}
    for name, program in programs(net.apply, rules=LAYERS).items():
        assert "bfloat16" in carried(program, variables, SQUARE), name
    assert carried_in(net, LAYERS) == {"bfloat16"}


def test_a_running_sum_beside_narrowed_layers_keeps_float32():
    class Summed(nn.Module):
        @nn.compact
        def __call__(self, carry: Any, _: Any) -> Any:
            x, total = carry
            x = x + nn.Dense(8)(x)
            return (x, total + jnp.exp(x)), None

    class Holder(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            layers = nn.scan(Summed, **SCANNED)(name="layers")
            return layers((x, jnp.zeros_like(x)), None)[0]

    assert carried_in(Holder(), LAYERS) == {"bfloat16", "float32"}


def test_a_rule_for_a_module_leaves_its_own_loops_alone():
    class Sums(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.Dense(8)(x)
            return lax.fori_loop(0, 3, lambda _, total: total + y, jnp.zeros_like(y))

    assert carried_in(Sums(), {"Sums:": "bfloat16"}) == {"float32"}


def test_without_a_policy_of_its_own_the_rules_of_the_scope_hold():
    net = Net(remat=False, scan=False)
    variables = jax.eval_shape(net.init, KEY, SQUARE)
    program = autocast(net.apply)
    for rules, block, head in (
        ({"layers_.*": "float32", "elsewhere": "float16"}, "float32", "bfloat16"),
        ({"head": "float32"}, "bfloat16", "float32"),
    ):
        with use_policy(BF16, rules):
            found = matmuls(program, variables, SQUARE)
        assert found == {("block", block): 4, ("head", head): 1}


class Doubled(nn.Dense):
    """A layer whose call calls its base class's: flax.linen writes its name twice."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
@pytest.mark.parametrize("rule", ["SelfAttention_0/query", "attend/query"])
def test_a_layer_that_calls_its_base_class_goes_by_the_path_of_its_params(rule: str):
    class Attends(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            name = None if rule.startswith("Self") else "attend"
            return Doubled(8)(nn.SelfAttention(2, name=name)(x))

    model = Attends()
    variables = jax.eval_shape(model.init, KEY, SEQUENCE)
    program = autocast(model.apply, BF16, rules={rule: "float32", "Doubled_0": "float32"})
    wide = {r.path for r in program.explain(variables, SEQUENCE).wide_matmuls}
    assert {path.rpartition("/")[2] for path in wide} == {"query", "Doubled_0"}
    operations = audit(model.apply, variables, SEQUENCE).operations
    assert {"Doubled_0", rule} <= {each.path for each in operations if each.kind == "dot"}


def doubled(x: Any) -> Any:
    return 2.0 * x


def with_jvp() -> Any:
    function = jax.custom_jvp(doubled)
    function.defjvp(lambda primals, tangents: (doubled(*primals), doubled(*tangents)))
    return function


def with_vjp() -> Any:
    function = jax.custom_vjp(doubled)
    function.defvjp(lambda x: (doubled(x), None), lambda _, g: (doubled(g),))
    return function


@pytest.mark.parametrize("make", [with_jvp, with_vjp])
def test_the_equation_of_a_function_holds_the_derivative_rule_that_requests_are_read_from(make):
    """JAX names the equation's parameters, and may rename them."""
    (equation,) = jax.make_jaxpr(make())(1.0).eqns
    rule = rule_of(equation)
    assert callable(rule) and weakref.ref(rule)() is rule


def test_an_equation_without_a_derivative_rule_has_none():
    (equation,) = jax.make_jaxpr(doubled)(1.0).eqns
    assert rule_of(equation) is None
