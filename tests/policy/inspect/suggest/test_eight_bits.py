"""suggest: the layers that run in 8 bits meet the budget as predicted, in both wings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen as nn
from mpmodules import nnx
from policy import PolicyRules, ScaledMatmul, autocast, use_policy
from policy.core.policy import get_policy
from policy.inspect.suggest.applied import out_of_8_bits
from policy.inspect.suggest.eight_bits import SMALLEST
from policy.inspect.suggest.patterns import patterns_of
from policy.inspect.suggest.suggest import suggest
from tests.policy.errors import exactly, relative

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 32)), jnp.float32)
MIXED, KEPT = "mixed_bfloat16", "params=float32,compute=bfloat16,output=bfloat16"


class Net(nn.Module):
    """Its stem has an input whose one column is large: int8 loses the others, float8 does not."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(32, name="stem")(x.at[:, 0].mul(300.0)) / 100
        x = x + nn.Dense(32, name="block")(nn.relu(x))
        return nn.Dense(4, name="head")(x)


@pytest.fixture(scope="module")
def variables() -> Any:
    params: Any = Net().init(jax.random.key(0), X)
    kernel = params["params"]["stem"]["kernel"]
    params["params"]["stem"]["kernel"] = kernel.at[0].mul(1e-3)
    return params


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f8", "i8"])
def test_a_layer_that_int8_spoils_is_kept_out_and_the_rules_hold_when_applied(kind, variables):
    found = suggest(Net().apply, variables, X, error=0.06, policy=MIXED, matmul=kind, smallest=16)
    assert found.policy == {"f8": "mixed_float8", "i8": "mixed_int8"}[kind]
    stem = {"f8": "", "i8": "budget"}[kind]
    kept = [("head", KEPT), *([("stem", KEPT)] if stem else [])]
    assert found.rules == PolicyRules(kept)
    why = {layer.path: layer.kept for layer in found.layers}
    assert why == {"stem": stem, "block": "", "head": "too small to gain"}
    sizes = {layer.path: (layer.contraction, layer.outputs) for layer in found.layers}
    assert sizes["stem"] == (32, 32) and sizes["head"] == (32, 4)
    assert sum(layer.cost for layer in found.layers) == pytest.approx(1)
    alone = {layer.path: layer.alone for layer in found.layers}
    assert (alone["stem"] > 0.06) == bool(stem)
    assert 0.06 > alone["block"] > 1e-3
    # the emulation is what the rules give
    assert found.emulated == pytest.approx(found.error, rel=1e-3) and found.error <= 0.06
    with use_policy(found.policy, found.rules):
        y = exactly(lambda v: Net().apply(v, X))(variables)
    assert relative(y, Net().apply(variables, X)) == pytest.approx(found.error, rel=1e-2)
    scope: dict[str, Any] = {}
    exec(str(found), scope)
    assert scope["rules"] == found.rules and f"them and m={kind}" in str(found)
    assert "kept: too small to gain" in str(found) and "(too small: below 16)" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["mixed_float8", "p=f32,c=bf16,o=f32,m=mxfp8", "p=f32,c=bf16,o=f32,m=nvfp4"]
)
def test_gradients_are_emulated_as_the_backward_matmuls_compute_them(text, variables):
    def loss(v: Any, x: Any) -> Any:
        y: Any = Net().apply(v, x)
        return jnp.square(y.astype(jnp.float32)).mean()

    given = get_policy(text)
    found = suggest(loss, variables, X, error=0.8, policy=given, backward=True, smallest=4)
    assert get_policy(found.policy) == given and found.rules == PolicyRules([])
    assert all(layer.runs_in_8_bits for layer in found.layers)
    assert found.emulated == pytest.approx(found.error, rel=1e-3) and found.error > 0.02
    with use_policy(given):
        grads = exactly(jax.grad(loss))(variables, X)
    truth = jax.grad(loss)(variables, X)
    assert relative(grads, truth) == pytest.approx(found.error, rel=1e-2)


class FlaxNet(flax_nnx.Module):
    def __init__(self) -> None:
        r = flax_nnx.Rngs(0)
        self.stem = flax_nnx.Linear(32, 32, rngs=r)
        self.blocks = flax_nnx.List([flax_nnx.Linear(32, 32, rngs=r) for _ in range(2)])
        self.norm = flax_nnx.LayerNorm(32, rngs=r)
        self.head = flax_nnx.Linear(32, 4, rngs=r)

    def __call__(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(jax.nn.relu(self.norm(x)))
        return self.head(x)


@pytest.mark.slow
def test_rules_of_an_nnx_model_hold_by_autocast_and_by_apply_policy():
    model = FlaxNet()
    truth = model(X)
    by = ScaledMatmul("float8_e4m3fn", "float8_e5m2")
    found = suggest(model, X, error=0.03, policy=MIXED, matmul=by, smallest=32)
    assert found.route == "autocast" and found.policy == "mixed_float8"
    kept = {layer.path for layer in found.layers if not layer.runs_in_8_bits}
    assert "head" in kept and len(kept) < 4, "some of it runs in 8 bits"
    cast = autocast(model, found.policy, rules=found.rules)
    assert 0 < relative(cast(X), truth) <= 0.03
    model = nnx.apply_policy(model, found.policy, rules=found.rules)
    assert 0 < relative(model(X), truth) <= 0.03


@pytest.mark.slow
def test_a_path_in_float32_and_layers_in_8_bits_have_rules_side_by_side():
    class Offset(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + nn.Dense(32, name="up")(x)
            x = (nn.Dense(32, name="centred")(x) + 1000.0) - 1000.0
            return nn.Dense(32, name="down")(x)

    params = Offset().init(jax.random.key(0), X)
    found = suggest(Offset().apply, params, X, error=0.06, policy=MIXED, matmul="f8", smallest=1)
    why = {layer.path: layer.kept for layer in found.layers}
    assert found.error <= 0.06 and "Offset:" in found.paths
    assert set(why) == {"up", "centred", "down"} and "" in why.values()


@pytest.mark.slow
def test_small_layers_and_tight_budgets_leave_the_policy_as_it_is(variables):
    small = suggest(Net().apply, variables, X, error=0.06, policy=MIXED, matmul="f8")
    assert small.smallest == SMALLEST == 2048 and small.policy == MIXED
    assert {layer.kept for layer in small.layers} == {"too small to gain"}
    assert small.rules == PolicyRules([]) and "m=f8" in str(small)
    tight = suggest(Net().apply, variables, X, error=0.006, policy=MIXED, matmul="f8", smallest=1)
    assert tight.policy == MIXED and {layer.kept for layer in tight.layers} == {"budget"}
    assert tight.error <= 0.006


def _named(w: Any, x: Any) -> Any:
    with jax.named_scope("up"):
        return x @ x.T @ w


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"matmul": 8, "policy": MIXED}, "should be a ScaledMatmul, its text such as 'f8', or"),
        ({"matmul": "f8"}, "matmul='f8' applies to layers .* policy= is missing: pass it too"),
        ({"matmul": "i8", "policy": "mixed_float8"}, "matmul='i8' disagrees with the policy"),
        ({"matmul": "i8", "policy": "float32"}, "computes in float32: give a policy"),
        ({"matmul": "i8", "policy": MIXED}, "m=i8 applies to matmuls of a parameter inside"),
    ],
)
def test_what_8_bits_are_not_found_for_is_refused_by_name(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        suggest(_named, X[:16], X, error=0.1, **options)


def test_rules_of_three_states_match_their_paths_alone():
    states = {
        ("Net", "stem"): "half",
        ("Net", "block_0", "up"): "8 bits",
        ("Net", "block_1", "up"): "half",
        ("Net", "block_1", "norm"): "float32",
        ("Net", "head"): "half",
    }
    outer, inner = [("head", "half"), ("stem", "half")], ("block_1/norm", "float32")
    assert patterns_of(states, "8 bits") == [*outer, inner, ("block_1/up", "half")]
    half = out_of_8_bits([("Net",), ("Net", "head")], get_policy("mixed_int8"))
    assert (str(half("Net:")), str(half("head"))) == (str(get_policy(MIXED)), KEPT)
