"""autocast goes by what a program computes: models make the same programs whatever their modules
are called.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from policy.autocasting.transform import autocast
from policy.programs.reading.walk import walk
from tests.mpmodules.apis import APIS, BOTH, ONES, Pair, Text, dense, layer, layer_norm, weight

NEUTRAL = ("a", "b", "c", "d")
OF_NORMS = ("bn", "diagnorm", "ln_f", "norm1")
X = jnp.ones((2, 6, 6, 8))
CONV = layer(lambda nn: nn.Conv(8, (3, 3)), lambda nnx, rngs: nnx.Conv(8, 8, (3, 3), rngs=rngs))
GROUP_NORM = layer(lambda nn: nn.GroupNorm(2), lambda nnx, rngs: nnx.GroupNorm(8, 2, rngs=rngs))
RMS_NORM = layer(lambda nn: nn.RMSNorm(), lambda nnx, rngs: nnx.RMSNorm(8, rngs=rngs))
ATTENTION = layer(
    lambda nn: nn.MultiHeadDotProductAttention(2),
    lambda nnx, rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
)


def evaluates(running: bool) -> Any:
    return layer(
        lambda nn: nn.BatchNorm(use_running_average=running),
        lambda nnx, rngs: nnx.BatchNorm(8, use_running_average=running, rngs=rngs),
    )


def by_hand(normalizes: bool) -> Text:
    """A module that scales and shifts, and normalizes before that if it is to."""

    def call(self: Any, x: jax.Array) -> jax.Array:
        if normalizes:
            roots = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            x = (x - x.mean(-1, keepdims=True)) * roots
        return x * self.scale + self.shift

    parts: dict[str, Any] = {name: weight(1, 1, 1, 8, init=ONES) for name in ("scale", "shift")}
    return Text(call, "ByHand", **parts)


def call(x: jax.Array, a: Any, b: Any, c: Any, d: Any) -> jax.Array:
    x = jax.nn.relu(b(a(x)))
    return c(x) + jax.nn.sigmoid(d(x.mean((1, 2), keepdims=True)))


# The parts, in one order, so that renaming doesn't move parameters about.
MODELS: dict[str, tuple[Any, ...]] = {
    "batch norm": (CONV, evaluates(False), dense(8, 8), dense(8, 8)),
    "batch norm in evaluation": (CONV, evaluates(True), dense(8, 8), dense(8, 8)),
    "group norm": (CONV, GROUP_NORM, dense(8, 8), dense(8, 8)),
    "attention": (layer_norm(8), ATTENTION, RMS_NORM, dense(8, 8)),
    "by hand": (dense(8, 8), by_hand(True), by_hand(False), dense(8, 8)),
}


def text(model: str, names: tuple[str, ...]) -> Text:
    parts: dict[str, Any] = dict(zip(names, MODELS[model], strict=True))
    return Text(lambda self, x: call(x, *(getattr(self, name) for name in names)), **parts)


def program(model: Any, kind: str, x: jax.Array) -> list[Any]:
    """The equations of a model's program in order: primitives, dtypes and shapes, no names."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(model.pure(params, x))

    programs: dict[str, Any] = {
        "forward": autocast(model.pure, "mixed_bfloat16", params=0),
        "grad(autocast)": jax.grad(autocast(loss, "mixed_bfloat16", params=0)),
        "autocast(grad)": autocast(jax.grad(loss), "mixed_bfloat16", params=0),
    }
    sites = list(walk(jax.make_jaxpr(programs[kind])(model.params, x)))
    atoms = [(*site.equation.invars, *site.equation.outvars) for site in sites]
    types = [[str(atom.aval) for atom in each] for each in atoms]
    return [(site.name, site.inside, each) for site, each in zip(sites, types, strict=True)]


KINDS = pytest.mark.parametrize("kind", ["forward", "grad(autocast)", "autocast(grad)"])


def assert_renaming_changes_nothing(kind: str, x: jax.Array, *models: Any) -> None:
    first, second = (program(model, kind, x) for model in models)
    assert first == second
    assert [row for row in first if row[0] in ("dot_general", "conv_general_dilated")]


@pytest.mark.cases(slow=2)
@BOTH
@KINDS
@pytest.mark.parametrize("model", MODELS)
def test_renaming_every_module_changes_nothing(api, model, kind):
    models = (api.theirs(text(model, names), X) for names in (NEUTRAL, OF_NORMS))
    assert_renaming_changes_nothing(kind, X, *models)


class Scanned(nn.Module):
    """Blocks that are scanned over, whose modules have names that are given."""

    names: tuple[str, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        norm, linear, scanned, _ = self.names

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x: Any, _: Any) -> Any:
                return x + nn.tanh(nn.Dense(8, name=linear)(nn.LayerNorm(name=norm)(x))), None

        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(nn.remat(Block), length=3, **split)(name=scanned)(x, None)[0]


@pytest.mark.cases(slow=2)
@KINDS
def test_renaming_scanned_modules_changes_nothing(kind):
    pairs = (Pair(lambda n=n: Scanned(n), int) for n in (NEUTRAL, OF_NORMS))
    assert_renaming_changes_nothing(kind, X, *(APIS["linen"].theirs(pair, X) for pair in pairs))
