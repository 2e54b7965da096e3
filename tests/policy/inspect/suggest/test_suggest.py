"""suggest: sensitive paths alone are kept in float32, and the rules have the predicted effect."""

import logging
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpmodules import linen as nn
from mpmodules import nnx
from policy import PolicyRules, autocast, get_policy, use_policy
from policy.inspect.suggest.suggest import suggest
from policy.inspect.suggest.trial import Emulated, Flags
from policy.inspect.traced.placed import PlacedValue
from tests.policy.errors import exactly, normal, relative
from tests.programs import apply

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def canceling(planted: tuple[int, ...], layers: int = 4) -> Any:
    """Residual layers of which some lose what they return in an offset."""

    def model(ws: Any, x: Any) -> Any:
        with jax.named_scope("Net"):
            for i in range(layers):
                with jax.named_scope(f"layer_{i}"):
                    with jax.named_scope("dense"):
                        y = jnp.tanh(x @ ws["w"][i])
                    with jax.named_scope("out"):
                        y = y @ ws["w"][i]
                        y = (y + F32(1000)) - F32(1000) if i in planted else y
                x = x + y
        return x

    return model


@pytest.fixture(scope="module")
def residual() -> tuple[Any, Any]:
    generator = np.random.default_rng(1)
    w = jnp.asarray(generator.normal(size=(4, 8, 8)) / 3, F32)
    return {"w": w}, jnp.asarray(generator.normal(size=(4, 8)), F32)


@pytest.mark.slow
def test_exactly_the_planted_layers_are_kept_by_the_rules_that_are_printed(residual, caplog):
    model = canceling((1, 2, 3))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        found = suggest(model, *residual, error=0.03, policy="mixed_bfloat16")
    messages = [record.getMessage() for record in caplog.records]
    assert sum("Finished XLA compilation" in text for text in messages) == 2
    assert found.runs <= 3 * len(found.evidence) and found.route == "autocast"
    assert sorted(found.paths) == ["layer_1/out", "layer_2/out", "layer_3/out"]
    assert found.without > 0.1 and found.error <= 0.03
    ruled = exactly(autocast(model, "mixed_bfloat16", rules=found.rules))
    error = relative(ruled(*residual), jax.jit(model)(*residual))
    assert error == pytest.approx(found.error, rel=1e-2)
    scope: dict[str, Any] = {}
    exec(str(found), scope)
    assert (
        scope["rules"]
        == found.rules
        == PolicyRules([(f"layer_{i}/out", "float32") for i in (1, 2, 3)])
    )
    assert 'autocast(fn, "mixed_bfloat16", rules=rules)' in str(found)
    assert "layer_0/dense" in str(found) and "kept in float32" in str(found)


class Branch(nn.Module):
    """A Dense whose results float16 can't hold, if its kernel is large."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.LayerNorm(name="norm")(nn.Dense(8, name="up")(x))


class Model(nn.Module):
    layers: int = 4

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(self.layers):
            x = x + Branch(name=f"branch_{i}")(x)
        return nn.Dense(4, name="head")(x)


@pytest.mark.slow
def test_exactly_the_layer_of_ours_that_overflows_is_kept_by_rules_of_the_scope() -> None:
    model, x = Model(), normal(4, 8)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    kernel = variables["params"]["branch_2"]["up"]["kernel"]
    variables["params"]["branch_2"]["up"]["kernel"] = kernel * 1e5
    found = suggest(model.apply, variables, x, error=0.01, policy="mixed_float16")
    assert found.route == "scope" and found.without == np.inf and found.error <= 0.01
    assert found.paths == ("branch_2/up",)
    assert found.rules == PolicyRules([("branch_2/up", "float32")])
    called = lambda v, x: apply(model, v, x)  # noqa: E731
    with use_policy("mixed_float16", found.rules):
        ruled = exactly(called)(variables, x)
    assert relative(ruled, jax.jit(called)(variables, x)) <= 0.01


class Centered(nn.Module):
    """Loses what its layer returns in an offset, or does not."""

    offset: float

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return (nn.Dense(8, name="dense")(x) + self.offset) - self.offset


class KeptCentered(Centered):
    own_code: ClassVar[Literal["keep"] | None] = "keep"


class Sum(nn.Module):
    layer: ClassVar[Any] = Centered

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(3):
            x = x + jnp.tanh(self.layer(3000.0 * (i == 1), name=f"layer_{i}")(x))
        return x


class KeptSum(Sum):
    """A sum whose lines run in the dtypes that they meet: strict promotion is for them."""

    own_code: ClassVar[Literal["keep"] | None] = "keep"
    layer: ClassVar[Any] = KeptCentered


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("model", "output"), [(Sum(), "float32"), (KeptSum(), "bfloat16")])
def test_a_module_is_kept_without_its_layers_and_returns_half_to_kept_code_that_is_strict(
    model: Any, output: str
) -> None:
    x = normal(4, 8)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    found = suggest(model.apply, variables, x, error=0.03, policy="mixed_bfloat16")
    assert found.paths == ("layer_1",)
    assert found.error <= 0.03 < found.without
    full = f"params=float32,compute=float32,output={output}"
    assert found.rules == PolicyRules([("layer_1", full), ("layer_1/dense", "mixed_bfloat16")])


@pytest.mark.slow
def test_a_policy_that_meets_the_budget_needs_no_rules(residual: Any) -> None:
    found = suggest(canceling(()), *residual, error=0.03, policy="mixed_bfloat16")
    assert found.rules == PolicyRules([]) and found.paths == () and found.runs == 2
    assert "rules = PolicyRules([])" in str(found)
    assert found.error == pytest.approx(found.without, rel=0.5)


@pytest.mark.slow
def test_layers_of_a_scan_are_one_candidate_and_gradients_have_a_budget_of_their_own() -> None:
    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            with jax.named_scope("block"):
                with jax.named_scope("dense"):
                    y = x @ w
                with jax.named_scope("offset"):
                    y = (jnp.tanh(y) * params["scale"] + F32(500)) - F32(500)
            return x + y, None

        with jax.named_scope("layers"):
            x, _ = lax.scan(layer, x, params["w"])
        with jax.named_scope("loss"):
            return jnp.square(x).mean()

    params = {"w": normal(3, 8, 8, scale=0.3), "scale": jnp.ones((4, 8))}
    found = suggest(loss, params, normal(4, 8), error=0.05, policy="mixed_bfloat16", backward=True)
    assert found.of == "gradients" and found.paths == ("layers/block/offset",)
    assert found.error <= 0.05


def test_code_in_half_by_itself_is_confirmed_in_its_own_dtypes() -> None:
    def model(w: Any, x: Any) -> Any:
        with jax.named_scope("first"):
            x = x.astype(F16) @ w.astype(F16)
        with jax.named_scope("large"):
            x = jnp.exp(x * F16(30)) / F16(1e3)
        with jax.named_scope("last"):
            return jnp.log1p(x.astype(F32))

    w = jnp.eye(4)
    found = suggest(model, w, jnp.asarray([[0.1, 0.2, 0.3, 0.5]]), error=0.1)
    assert found.route == "as written" and found.policy == "" and found.paths == ("large",)
    assert found.error <= 0.1 and found.without == np.inf
    assert found.rules == PolicyRules([("large", "float32")])


def test_rules_of_code_that_names_float16_are_in_float16() -> None:
    def model(w: Any, x: Any) -> Any:
        with jax.named_scope("block"):
            x = jnp.exp(x.astype(F16) * F16(30)) / F16(1e3)
            with jax.named_scope("inner"):
                x = jnp.dot(jnp.log1p(x), w.astype(F16))
        return x.astype(F32)

    found = suggest(model, jnp.eye(4), jnp.asarray([[0.1, 0.2, 0.3, 0.5]]), error=0.1)
    assert found.paths == ("block",)
    half = get_policy("mixed_float16")
    assert found.rules == PolicyRules([("block", "float32"), ("block/inner", half)])


def test_a_pool_that_adds_up_in_half_is_seen_though_a_rounded_sum_would_not_show_it() -> None:
    def model(x: Any) -> Any:
        with jax.named_scope("scaled"):
            x = x.astype(BF16) * BF16(2)
        with jax.named_scope("pool"):
            return lax.reduce_window(x, BF16(0), lax.add, (64, 64), (64, 64), "VALID").astype(F32)

    found = suggest(model, jnp.ones((64, 64)), error=0.01)
    assert found.paths == ("pool",) and found.without > 0.5 and found.error == 0


def _in_half(x: Any) -> Any:
    with jax.named_scope("log"):
        return jnp.log(x.astype(F16))


def _half_outside(x: Any) -> Any:
    with jax.named_scope("cast"):
        x = x.astype(F16)
    return x * F16(0.1)


@pytest.mark.parametrize(
    ("fn", "options", "text"),
    [
        (jnp.sin, {"error": "1%"}, "error should be a positive number.* but got '1%'"),
        (jnp.sin, {"params": 1.5}, "params should be positions or names"),
        (jnp.sin, {"backward": True}, "backward=True differentiates a loss"),
        (jnp.sin, {}, "No part of this call runs in half precision"),
        (lambda x: jnp.outer(x, x) @ x, {"policy": "bf16"}, "and no operation in half precision"),
        (lambda x: _in_half(-x), {}, r"returns infinities or NaN in float32"),
        (_half_outside, {"error": 1e-9}, "No rules meet an error of 1e-09: with"),
    ],
)
def test_a_call_without_rules_to_find_is_rejected_by_name(fn: Any, options: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        suggest(fn, F32(np.full(3, 0.3)), **({"error": 1.0} | options))


@pytest.mark.slow
def test_a_policy_that_a_built_nnx_model_does_not_obey_is_rejected_with_the_way_out() -> None:
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0), dtype_policy="mixed_float16")
    with pytest.raises(ValueError, match=r"No module .* obeys the policy given.* Leave out"):
        suggest(model, jnp.ones((2, 3)), error=1.0, policy="mixed_float16")
    assert suggest(model, jnp.ones((2, 3)), error=1.0).error < 1.0


class Offset(nn.Module):
    """Lines of its own lose digits in half precision, and its layer does not."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return (nn.Dense(8, name="dense")(x) + 300) - 300


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8, name="head")(Offset(name="offset")(x))


class NnxOffset(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return (self.dense(x) + 300) - 300


class NnxOuter(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.offset, self.head = NnxOffset(rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.offset(x))


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_model_that_carries_its_policy_has_rules_in_it_and_their_error(
    api: str,
) -> None:
    x = normal(4, 8)
    carried = "mixed_float16"
    if api == "linen":
        outer = Outer(dtype_policy=carried)
        variables = jax.jit(outer.init)(jax.random.key(0), x)
        found = suggest(outer.apply, variables, x, error=1e-2)
        with use_policy(carried, found.rules):
            result = exactly(outer.apply)(variables, x)
        truth = jax.jit(Outer().apply)(variables, x)
    else:
        model = NnxOuter(nnx.Rngs(0), dtype_policy=carried)
        found = suggest(model, x, error=1e-2)
        result = exactly(nnx.apply_policy(model, carried, found.rules))(x)
        truth = nnx.apply_policy(model, "float32")(x)
    assert found.policy == carried and f'"{carried}", rules)' in str(found)
    policies = {str(pattern): policy for pattern, policy in found.rules}
    assert set(policies) == {"offset", "offset/dense"}
    assert policies["offset/dense"] == get_policy(carried)
    assert found.error <= 1e-2 < found.without
    assert relative(result, truth) == pytest.approx(found.error, rel=0.05)


@pytest.mark.slow
def test_the_carry_of_a_while_loop_is_rounded_where_its_flag_says_so() -> None:
    def decayed(w: Any, x: Any) -> Any:
        with jax.named_scope("Net"):
            return lax.while_loop(lambda x: x.sum() > 1, lambda x: jnp.tanh(x @ w), x)

    w, x = (0.5 * jnp.eye(4)).astype(BF16), jnp.linspace(0, 1, 4).astype(BF16)
    program = jax.make_jaxpr(decayed)(w, x)

    def emulated(is_wide: bool) -> Any:
        flags = Flags(np.array([is_wide, is_wide]), np.array(True))
        values = [PlacedValue([array.astype(F32)]) for array in (w, x)]
        return Emulated(flags, {("Net",): 1}).run(program.jaxpr, [], values)[0].arrays[0]

    np.testing.assert_array_equal(emulated(False), decayed(w, x).astype(F32))
    np.testing.assert_allclose(emulated(True), decayed(w.astype(F32), x.astype(F32)), rtol=1e-6)


class Slashes(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("a/0", "a/1"):
            x = nn.Dense(8, name=name)(x)
        return x


@pytest.mark.slow
def test_rules_name_modules_with_a_slash_in_their_names_and_not_the_part_before_it() -> None:
    model, x = Slashes(), jnp.ones((2, 8))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    suggestion = suggest(model.apply, variables, x, policy="mixed_bfloat16", error=1e-6)
    assert suggestion.error == 0 and [pattern for pattern, _ in suggestion.rules] == [r"a/\d+"]
