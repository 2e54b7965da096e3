"""Rules by path and by class in linen models, and the error of a rule that matches nothing."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from policy import PolicyRules, current_policy, use_policy
from tests.programs import named, operations

X = jnp.ones((2, 3, 4))
KEY = jax.random.key(0)
BF16, F16 = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2, name="attn")(nn.LayerNorm(name="norm")(x))
        return nn.Dense(4, name="mlp")(x)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Layer(name=f"layer_{i}")(x)
        return x


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(Encoder(name="encoder")(x))


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


def test_a_path_rule_holds_for_the_subtree_and_for_nothing_else():
    with use_policy("mixed_bfloat16", rules={"encoder/layer_1": F16}):
        found = compute_dtypes()
    assert at(found, "layer_0/mlp") == {"bfloat16"}
    assert at(found, "layer_1/mlp") == {"float16"}
    assert at(found, "layer_1/attn/query") == {"float16"}
    assert at(found, "head") == {"bfloat16"}


def test_a_path_rule_reaches_the_layers_that_flax_creates_inside_attention():
    with use_policy("mixed_bfloat16", rules=[("encoder/layer_0/attn/query", "f32")]):
        found = compute_dtypes()
    assert at(found, "layer_0/attn/query") == {"float32"}
    assert at(found, "layer_0/attn/key") == {"bfloat16"}
    assert at(found, "layer_1/attn/query") == {"bfloat16"}


def test_a_path_rule_reaches_inside_attention_where_no_other_policy_holds():
    with use_policy(None, rules=[(".*/attn/query", "mixed_bfloat16")]):
        found = compute_dtypes()
    assert at(found, "layer_0/attn/query") == {"bfloat16"}
    assert at(found, "layer_0/attn/key") == {"float32"}


def test_layers_inside_attention_keep_the_dtypes_given_to_it_where_no_policy_holds():
    model = nn.MultiHeadDotProductAttention(2, dtype=jnp.float16, param_dtype=jnp.bfloat16)
    with use_policy(None, rules=PolicyRules({"nothing": "f32"}, strict=False)):
        variables = jax.eval_shape(lambda: model.init(KEY, X))
        found = matmuls(operations(model.apply, variables, X))
    assert at(found, "query") == {"float16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"bfloat16"}


def test_a_pattern_is_matched_in_full():
    with use_policy(
        None, rules=PolicyRules([("layer_1", BF16), ("encoder/layer", BF16)], strict=False)
    ):
        assert set().union(*compute_dtypes().values()) == {"float32"}


def test_at_one_module_the_first_rule_that_matches_wins():
    first, second = ("encoder/layer_0/mlp", "mixed_float16"), (".*/mlp", "mixed_bfloat16")
    with use_policy("f32", rules=[first, second]):
        found = compute_dtypes()
    assert at(found, "layer_0/mlp") == {"float16"} and at(found, "layer_1/mlp") == {"bfloat16"}
    with use_policy("f32", rules=PolicyRules([second, first])):
        assert at(compute_dtypes(), "layer_0/mlp") == {"bfloat16"}


def test_what_a_rule_says_holds_below_until_a_rule_matches_there():
    with use_policy(
        "f32", rules=[("encoder", "mixed_bfloat16"), ("encoder/layer_1/mlp", "p=f32,c=f16,o=bf16")]
    ):
        found = compute_dtypes()
    assert at(found, "layer_0/mlp") == {"bfloat16"} and at(found, "layer_1/attn/out") == {
        "bfloat16"
    }
    assert at(found, "layer_1/mlp") == {"float16"} and at(found, "head") == {"float32"}


def test_the_root_can_be_matched_by_the_empty_path():
    with use_policy(None, rules={"": BF16}):
        assert set().union(*compute_dtypes().values()) == {"bfloat16"}


@pytest.mark.parametrize("cls", [nn.Dense, flax_nn.Dense])
def test_a_class_rule_takes_our_class_and_flaxs_class_alike(cls):
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="ours")(x), nn.LayerNorm(name="norm")(x)

    with use_policy("f32", rules=[(cls, BF16)]):
        found = jax.eval_shape(lambda: Both().init_with_output(KEY, X)[0])
        seen = operations(lambda v: Both().apply(v, X), init(Both()))
    assert found[0].dtype == jnp.float32  # the model's own boundary
    assert {d for op in named(seen, "dot_general") for d in op.inputs} == {"bfloat16"}


def test_a_class_rule_matches_subclasses_and_user_modules():
    class Special(nn.Dense):
        pass

    with use_policy(None, rules=[(nn.Dense, BF16)]):
        assert at(compute_dtypes(nn.Sequential([Special(3, name="special")])), "") == {"bfloat16"}
    with use_policy("f32", rules=[(Layer, "mixed_bfloat16")]):
        found = compute_dtypes()
    assert at(found, "layer_0/mlp") == {"bfloat16"} and at(found, "head") == {"float32"}


def test_a_class_rule_keeps_every_norm_in_float32():
    with use_policy("bf16", rules=[(nn.LayerNorm, "f32")]):
        variables = init(Net())
    layer = variables["params"]["encoder"]["layer_0"]
    assert layer["norm"]["scale"].dtype == jnp.float32
    assert layer["mlp"]["kernel"].dtype == jnp.bfloat16


def test_rules_hold_under_a_lifted_class_and_in_a_scan():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4, name="dense")(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x = scanned(name="body")(x, None)[0]
            return nn.remat(Layer)(name="remat")(x)

    with use_policy("mixed_bfloat16", rules={"remat/mlp": "f32"}):
        found = compute_dtypes(Model())
    assert at(found, "body/dense") == {"bfloat16"}
    assert at(found, "remat/mlp") == {"float32"}
    with use_policy("mixed_bfloat16", rules={"body/dense": "p=f32,c=f32,o=bf16"}):
        assert at(compute_dtypes(Model()), "body/dense") == {"float32"}


def test_an_inner_scope_without_rules_keeps_the_outer_ones():
    with use_policy("mixed_bfloat16", rules={"head": "f32"}), use_policy(F16):
        found = compute_dtypes()
    assert at(found, "head") == {"float32"} and at(found, "layer_0/mlp") == {"float16"}


def test_a_rule_says_what_is_in_force_inside_the_module():
    seen = []

    class Asks(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(current_policy())
            return x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Asks(name="b")(Asks(name="a")(x))

    with use_policy(None, rules={"b": "bf16"}):
        init(Model())
    assert seen[0] is None and seen[1].compute_dtype == jnp.bfloat16


# --- rules that match nothing ---------------------------------------------------------------------

UNMATCHED = re.escape(
    "Rule 'encoder/.*nrom' matched no module. Modules seen: encoder, encoder/layer_0, "
)


def test_an_unmatched_rule_is_an_error_at_root_init_that_lists_the_paths():
    with (
        use_policy("mixed_bfloat16", rules={"encoder/.*nrom": "f32"}),
        pytest.raises(ValueError, match=UNMATCHED) as e,
    ):
        init(Net())
    assert str(e.value).endswith("encoder/layer_1/mlp, encoder/layer_1/norm, head.")
    assert "encoder/layer_0/attn/query" in str(e.value)


def test_an_unmatched_rule_is_an_error_at_apply_jitted_or_not():
    variables = init(Net())
    for apply in (Net().apply, jax.jit(Net().apply)):
        with (
            use_policy("bf16", rules={"encoder/.*nrom": "f32"}),
            pytest.raises(ValueError, match=UNMATCHED),
        ):
            jax.eval_shape(apply, variables, X)


def test_every_unmatched_rule_is_named_class_rules_too():
    rules = [("head", "f32"), ("nose", "f32"), (nn.Conv, "f32"), ("tail", "f32")]
    with (
        use_policy("bf16", rules=rules),
        pytest.raises(
            ValueError, match=r"Rules 'nose', Conv, 'tail' matched no module\. Modules seen: "
        ),
    ):
        init(Net())


def test_a_lenient_rule_may_match_nothing():
    with use_policy("mixed_bfloat16", rules=PolicyRules({"nose": "f32"}, strict=False)):
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


def test_a_cached_jitted_call_asks_no_questions():
    model, calls = nn.Sequential([nn.Dense(3)]), []

    def apply(variables, x):
        calls.append(1)
        return model.apply(variables, x)

    variables = model.init(KEY, X)
    jitted = jax.jit(apply)
    with use_policy("mixed_bfloat16", rules={"layers_0": "f32"}):
        assert jitted(variables, X).dtype == jitted(variables, X).dtype
    assert len(calls) == 1


def test_a_rule_into_a_jitted_block_is_checked_on_the_first_and_not_on_the_cached_call():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="mlp")(nn.LayerNorm()(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(Block)(name="block")(x)

    variables = Model().init(KEY, X)
    with use_policy("mixed_bfloat16", rules=[("block/mlp", "f32"), (nn.LayerNorm, "f32")]):
        for _ in range(3):
            Model().apply(variables, X)


def test_a_failed_check_leaves_nothing_behind():
    with (
        use_policy("bf16", rules={"nose": "f32"}),
        pytest.raises(ValueError, match="'nose' matched no module"),
    ):
        init(Net())
    with use_policy("bf16", rules={"head": "f32"}):
        init(Net())
    assert current_policy() is None


def test_an_error_inside_the_model_is_not_hidden_by_the_check():
    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise RuntimeError("on purpose")

    with use_policy(None, rules={"nose": "f32"}), pytest.raises(RuntimeError, match="on purpose"):
        init(Fails())


def test_a_root_of_flaxs_own_class_makes_each_of_our_modules_below_it_outermost():
    model = flax_nn.Sequential([Layer(name="a"), Layer(name="b")])
    with use_policy(
        "mixed_bfloat16", rules=PolicyRules({"layers_1/mlp|b/mlp": "f32"}, strict=False)
    ):
        found = compute_dtypes(model)
    assert {"bfloat16"} <= set().union(*found.values())
