"""Which policy a linen layer obeys: by rules, where it is shared, bound or called from several
places, and where none is in force any more.

`tests/mpmodules/test_precedence.py` has the levels of precedence, for both APIs.
"""

import contextlib
import gc
import re
import weakref
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from policy import (
    DtypePolicyWarning,
    PolicyRules,
    audit,
    autocast,
    compare,
    current_policy,
    set_policy,
    use_policy,
)
from tests.mpmodules.apis import KEY, MIXED, compact
from tests.programs import named, operations

X = jnp.ones((2, 3, 4))
BF16, F16 = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"


class Special(nn.Dense):
    """A user's subclass of a layer."""


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2, name="attn")(nn.LayerNorm(name="norm")(x))
        return Special(4, name="mlp")(x)


Encoder = compact(lambda x: Layer(name="layer_1")(Layer(name="layer_0")(x)))
Net = compact(lambda x: nn.Dense(2, name="head")(Encoder(name="encoder")(x)))


def init(model: Any) -> Any:
    """The variables' shapes: what a rule matches is known once the model is traced."""
    return jax.eval_shape(lambda: model.init(KEY, X))


def compute_dtypes(model: Any = None) -> dict[str, set[str]]:
    """For each layer's path in `model` (a `Net`): the dtypes of its matmuls' operands."""
    model = Net() if model is None else model
    return matmuls(operations(model.apply, init(model), X))


def matmuls(ops: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for op in named(ops, "dot_general"):
        path = "/".join(part for part in op.path.split("/") if re.fullmatch(r"[a-z_]+(_\d)?", part))
        found.setdefault(path, set()).update(op.inputs)
    return found


def at(found: dict[str, set[str]], path: str) -> set[str]:
    matches = [dtypes for name, dtypes in found.items() if name.endswith(path)]
    assert matches, f"{path} is not among {sorted(found)}"
    return set().union(*matches)


FIRST, SECOND = ("encoder/layer_0/mlp", "mixed_float16"), (".*/mlp", MIXED)
# The policy in force, rules, and the dtypes that layers at the ends of paths multiply in.
RULES: dict[str, tuple[Any, Any, str]] = {
    "a subtree and nothing else": (
        MIXED,
        {"encoder/layer_1": F16},
        "layer_0/mlp=bfloat16 layer_1/mlp=float16 layer_1/attn/query=float16 head=bfloat16",
    ),
    "layers that Flax creates inside attention": (
        MIXED,
        [("encoder/layer_0/attn/query", "f32")],
        "layer_0/attn/query=float32 layer_0/attn/key=bfloat16 layer_1/attn/query=bfloat16",
    ),
    "inside attention where no other policy holds": (
        None,
        [(".*/attn/query", MIXED)],
        "layer_0/attn/query=bfloat16 layer_0/attn/key=float32",
    ),
    "a pattern is matched in full, and a lenient one may match nothing": (
        None,
        PolicyRules([("layer_1", BF16), ("encoder/layer", BF16)], strict=False),
        "=float32",
    ),
    "the first that matches wins": (
        "f32",
        [FIRST, SECOND],
        "layer_0/mlp=float16 layer_1/mlp=bfloat16",
    ),
    "the first that matches wins, in any order": (
        "f32",
        PolicyRules([SECOND, FIRST], strict=False),
        "mlp=bfloat16",
    ),
    "what a rule says holds below until a rule matches there": (
        "f32",
        [("encoder", MIXED), ("encoder/layer_1/mlp", "p=f32,c=f16,o=bf16")],
        "layer_0/mlp=bfloat16 layer_1/attn/out=bfloat16 layer_1/mlp=float16 head=float32",
    ),
    "the root": (None, {"": BF16}, "=bfloat16"),
    "our class, and its subclasses": ("f32", {nn.Dense: BF16}, "mlp=bfloat16"),
    "Flax's class": ("f32", {flax_nn.Dense: BF16}, "mlp=bfloat16 query=float32"),
    "a user's class": (
        "f32",
        [(Layer, MIXED)],
        "layer_0/mlp=bfloat16 layer_0/attn/out=bfloat16 head=float32",
    ),
}


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize("what", RULES)
def test_rules_reach(what):
    policy, rules, text = RULES[what]
    expected = dict(each.split("=") for each in text.split())
    with use_policy(policy, rules=rules):
        found = compute_dtypes()
    assert {path: at(found, path) for path in expected} == {
        path: {dtype} for path, dtype in expected.items()
    }
    assert current_policy() is None


def test_layers_inside_attention_keep_the_dtypes_given_to_it_where_no_policy_holds():
    model = nn.MultiHeadDotProductAttention(2, dtype=jnp.float16, param_dtype=jnp.bfloat16)
    with use_policy(None, rules=PolicyRules({"nothing": "f32"}, strict=False)):
        variables = jax.eval_shape(lambda: model.init(KEY, X))
        found = matmuls(operations(model.apply, variables, X))
    assert at(found, "query") == {"float16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"bfloat16"}


def test_rules_hold_under_a_lifted_class_and_in_a_scan():
    body = compact(lambda x, _: (nn.Dense(4, name="dense")(x), None))
    each: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    scanned = nn.scan(body, length=2, **each)
    Model = compact(lambda x: nn.remat(Layer)(name="remat")(scanned(name="body")(x, None)[0]))
    with use_policy("mixed_bfloat16", rules={"remat/mlp": "f32"}):
        found = compute_dtypes(Model())
    assert at(found, "body/dense") == {"bfloat16"}
    assert at(found, "remat/mlp") == {"float32"}
    with use_policy("mixed_bfloat16", rules={"body/dense": "p=f32,c=f32,o=bf16"}):
        assert at(compute_dtypes(Model()), "body/dense") == {"float32"}


@pytest.mark.slow
def test_rules_that_match_nothing_are_an_error_that_names_them_and_lists_the_paths():
    rules = [("head", "f32"), ("encoder/.*nrom", "f32"), (nn.Conv, "f32"), ("tail", "f32")]
    text = re.escape(
        "Rules 'encoder/.*nrom', Conv, 'tail' matched no module. Modules seen: encoder, "
    )
    variables = init(Net())
    for apply in (lambda v, x: init(Net()), Net().apply, jax.jit(Net().apply)):
        with use_policy("bf16", rules=rules), pytest.raises(ValueError, match=text) as e:
            jax.eval_shape(apply, variables, X)
        assert "encoder/layer_1/mlp, encoder/layer_1/norm, head. Rules for" in str(e.value)
        assert "encoder/layer_0/attn/query" in str(e.value)
        assert current_policy() is None
    with use_policy("bf16", rules={"head": "f32"}):  # a failed check leaves nothing behind
        init(Net())


def test_a_rule_that_only_another_method_would_reach_is_known_from_the_variables():
    class TwoHeads(nn.Module):
        def setup(self):
            self.left, self.right = nn.Dense(2), nn.Dense(2)

        def __call__(self, x):
            return self.left(x), self.right(x)

        def only_left(self, x):
            return self.left(x)

    variables = init(TwoHeads())
    with use_policy(None, rules={"right": "bf16"}):
        jax.eval_shape(lambda v: TwoHeads().apply(v, X, method="only_left"), variables)
    with (
        use_policy(None, rules={"middle": "bf16"}),
        pytest.raises(ValueError, match="Rule 'middle' matched no module"),
    ):
        jax.eval_shape(lambda v: TwoHeads().apply(v, X, method="only_left"), variables)


def test_a_rule_into_a_jitted_block_is_checked_on_the_first_and_not_on_the_cached_call():
    block = nn.jit(compact(lambda x: nn.Dense(4, name="mlp")(nn.LayerNorm()(x))))
    Model = compact(lambda x: block(name="block")(x))
    variables = Model().init(KEY, X)
    with use_policy("mixed_bfloat16", rules=[("block/mlp", "f32"), (nn.LayerNorm, "f32")]):
        for _ in range(3):
            Model().apply(variables, X)


@pytest.mark.slow
def test_an_error_inside_the_model_is_not_hidden_by_the_check():
    def fail(x):
        raise RuntimeError("on purpose")

    with use_policy(None, rules={"nose": "f32"}), pytest.raises(RuntimeError, match="on purpose"):
        init(compact(fail)())


ROWS = jnp.ones((2, 4))


def test_an_explicit_dtype_that_defeats_the_policy_warns_once_per_path():
    layer = lambda name: nn.Dense(4, dtype=jnp.float32, name=name)  # noqa: E731
    twice = compact(lambda x: layer("second")(layer("first")(x)))
    with pytest.warns(DtypePolicyWarning) as told:
        for _ in range(3):
            jax.eval_shape(lambda: twice(dtype_policy="mixed_bfloat16").init(KEY, ROWS))
    assert [str(w.message).partition(" has")[0] for w in told] == [
        "Dense at 'first'",
        "Dense at 'second'",
    ]


def test_a_shared_layer_called_under_two_policies_in_one_trace_obeys_each_caller():
    def call(x):
        layer = nn.Dense(4, name="shared")
        outs = []
        for policy in ("p=bf16,c=bf16,o=bf16", F16, "f32", BF16):
            with use_policy(policy):
                outs.append(layer(x))
        return outs

    out, variables = jax.eval_shape(lambda: compact(call)().init_with_output(KEY, ROWS))
    assert [o.dtype.name for o in out] == ["bfloat16", "float16", "float32", "bfloat16"]
    # its first caller decides what its parameters are stored in
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"bfloat16"}


def test_resolution_does_not_outlive_the_call():
    layer = nn.Dense(3)
    variables = layer.init(KEY, ROWS)
    bound = layer.bind(variables)
    for policy, expected in ((BF16, "bfloat16"), (F16, "float16"), (None, "float32")):
        with use_policy(policy):
            assert bound(ROWS).dtype == expected
    assert (bound.dtype, bound.param_dtype) == (None, None)
    with use_policy(BF16), pytest.raises(Exception, match="shape"):
        bound(jnp.ones((2, 5)))
    assert (bound.dtype, bound.param_dtype) == (None, None)


class Parent(nn.Module):
    def setup(self):
        self.block = compact(lambda x: nn.Dense(3)(x))()
        self.embed = nn.Embed(5, 4)

    def __call__(self, x):
        return self.block(x) + self.embed(jnp.arange(2)).sum(-1, keepdims=True)


def test_a_bound_submodule_called_by_itself_obeys_its_parent_and_the_rules_in_force():
    for policy, rules in (("mixed_bfloat16", None), (None, {"block": BF16})):
        model = Parent(dtype_policy=policy)
        bound = model.bind(model.init(KEY, ROWS))
        with use_policy(None, rules=rules) if rules else contextlib.nullcontext():
            (dot,) = named(operations(lambda x, bound=bound: bound.block(x), ROWS), "dot_general")
        assert dot.inputs == ("bfloat16", "bfloat16")
        if policy:  # nothing is open: its call is a boundary, and a bare layer's is none
            assert bound.block(ROWS).dtype == jnp.float32
            assert bound.embed(jnp.arange(2)).dtype == jnp.bfloat16


def test_an_open_call_wins_over_the_parent_chain():
    class Owner(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, name="owned")
            return nn.Sequential([layer], dtype_policy=F16)(x), layer(x)

    out, variables = jax.eval_shape(lambda: Owner(dtype_policy=BF16).init_with_output(KEY, ROWS))
    assert {o.dtype.name for o in out} == {"bfloat16"}  # the second boundary is the owner's
    dots = named(operations(Owner(dtype_policy=BF16).apply, variables, ROWS), "dot_general")
    assert [dot.inputs[0] for dot in dots] == ["float16", "bfloat16"]


TEXT = (
    r"^Small was initialized under 'params=float32,compute=bfloat16,.*', but is applied with no "
    r"policy in force, so "
)


def small() -> Any:
    """A class of its own, of which no model was initialized yet."""

    class Small(nn.Module):
        is_training: bool = True

        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    return Small


def initialized(policy: Any = MIXED, cls: Any = None) -> Any:
    cls = cls or small()
    with use_policy(policy):
        return cls, cls().init(KEY, ROWS)


def test_apply_without_the_policy_of_init_warns_once_for_a_class_whatever_the_instance():
    net, variables = initialized()
    with pytest.warns(DtypePolicyWarning, match=TEXT) as told:
        net(is_training=False).apply(variables, ROWS)
        net().apply(variables, ROWS)
        jax.jit(net().apply)(variables, ROWS)
        net().bind(variables)(ROWS)
    assert len(told) == 1
    jitted, bound = jax.jit(net().apply), net().bind(variables)
    for call in (lambda: jitted(variables, ROWS), lambda: bound(ROWS)):
        with pytest.warns(DtypePolicyWarning, match=TEXT):
            call()


def test_apply_without_the_policy_of_init_computes_as_flax_does():
    net, variables = initialized("p=bf16,c=f32,o=f32")
    x = ROWS.astype(jnp.bfloat16)
    with pytest.warns(DtypePolicyWarning, match="^Small was initialized"):
        y: Any = net().apply(variables, x)
    expected: Any = flax_nn.Dense(3).apply({"params": variables["params"]["Dense_0"]}, x)
    assert y.dtype == expected.dtype == jnp.bfloat16
    assert jnp.array_equal(y, expected)


def test_a_traced_init_and_the_global_policy_count():
    for make in (jax.jit, lambda init: lambda *args: jax.eval_shape(init, *args)):
        net = small()
        set_policy("mixed_bfloat16")
        make(net().init)(KEY, ROWS)
        variables = {"params": {"Dense_0": nn.Dense(3).init(KEY, ROWS)["params"]}}
        net().apply(variables, ROWS)
        set_policy(None)
        text = r"If no policy is intended, call it inside use_policy\(None\)\."
        with pytest.warns(DtypePolicyWarning, match=text):
            net().apply(variables, ROWS)


def test_a_block_around_the_call_is_an_answer_whatever_it_says():
    net, variables = initialized()
    for policy in (None, "float32", "mixed_bfloat16", "float16"):
        with use_policy(policy):
            net().apply(variables, ROWS)
            jax.jit(lambda v, x: net().apply(v, x))(variables, ROWS)
    autocast(net().apply, MIXED)(variables, ROWS)  # which is one, too


@pytest.mark.slow
def test_other_models_summaries_and_reports_are_silent():
    net, variables = initialized()
    other = small()
    other().apply(variables, ROWS)  # another class
    wide = {"params": {"Dense_0": nn.Dense(3).init(KEY, jnp.ones((2, 9)))["params"]}}
    net().apply(wide, jnp.ones((2, 9)))  # another model of the class
    net().init(KEY, ROWS)  # made again, without: it is meant for both
    net().apply(variables, ROWS)
    initialized(cls=net)
    net().apply(variables, ROWS)
    net, variables = initialized("float32")  # which computes as no policy does
    net().apply(variables, ROWS)
    for model in (net(dtype_policy=MIXED), nn.apply_policy(net(), MIXED)):
        with use_policy("float16"):
            own = model.init(KEY, ROWS)
        assert jax.eval_shape(model.apply, own, ROWS).dtype == jnp.float32
    net, variables = initialized()
    with use_policy(MIXED):
        net().tabulate(KEY, ROWS)
        audit(net().apply, variables, ROWS)
    compare(net().apply, variables, ROWS, policy=MIXED)


@pytest.mark.slow
def test_nothing_is_kept_of_a_model_that_is_gone():
    model = small()()
    with use_policy(MIXED):
        model.init(KEY, ROWS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
