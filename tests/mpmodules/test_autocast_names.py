"""autocast goes by what a program computes: five models make the same programs whatever their
modules are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx
from jax import lax

import mpmodules.nnx  # noqa: F401  # names nnx modules
from policy.autocasting.transform import autocast
from policy.programs.walk import walk

Names = tuple[str, ...]
# In one order, so that renaming doesn't move parameters about.
NAMES: dict[str, Names] = {
    "neutral": ("a", "b", "c", "d", "e", "f", "g", "h"),
    "of normalisations": ("bn", "bn_1", "diagnorm", "ln", "ln_f", "norm", "norm1", "norm_x"),
}
KEY = jax.random.key(0)
X, IMAGE = jnp.ones((2, 4, 8)), jnp.ones((2, 6, 6, 8))
MODELS: dict[str, Callable[[Names], tuple[Any, Any, Any]]] = {}


def linen(x: Any = X, **call: Any) -> Callable[[Any], Any]:
    """Registers a model of flax.linen: ``call(names, x)``, in a compact method."""

    def register(forward: Any) -> Any:
        class Model(nn.Module):
            names: Names

            @nn.compact
            def __call__(self, x: Any) -> Any:
                return forward(self.names, x)

        def made(names: Names) -> tuple[Any, Any, Any]:
            model = Model(names)
            fn = lambda variables, x: model.apply(variables, x, **call)  # noqa: E731
            return fn, jax.eval_shape(model.init, KEY, x), x

        MODELS[forward.__name__] = made
        return forward

    return register


def of_nnx(x: Any = X) -> Callable[[Any], Any]:
    """Registers a model of flax.nnx: its layers by place, and a function of them."""

    def register(build: Any) -> Any:
        def made(names: Names) -> tuple[Any, Any, Any]:
            layers, forward = build(flax_nnx.Rngs(0))

            class Model(flax_nnx.Module):
                def __init__(self) -> None:
                    for name, layer in zip(names, layers, strict=False):
                        setattr(self, name, layer)

                def __call__(self, x: Any) -> Any:
                    return forward(
                        [getattr(self, name) for name, _ in zip(names, layers, strict=False)], x
                    )

            return (lambda model, x: model(x)), Model(), x

        MODELS[build.__name__] = made
        return build

    return register


@linen(IMAGE, mutable="batch_stats")
def conv_and_batch_norm(names: Names, x: Any) -> Any:
    x = nn.relu(
        nn.BatchNorm(use_running_average=False, name=names[1])(nn.Conv(8, (3, 3), name=names[0])(x))
    )
    return nn.Dense(4, name=names[2])(x.mean((1, 2)))


@linen()
def layer_norm_and_mlp(names: Names, x: Any) -> Any:
    h = nn.Dense(16, name=names[1])(nn.LayerNorm(name=names[0])(x))
    return x + nn.Dense(8, name=names[2])(nn.gelu(h)) * nn.Dense(8, name=names[3])(x)


class ByHand(nn.Module):
    """A module that scales and shifts, and normalises before that if it is to."""

    normalises: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scale, bias = (
            self.param(name, nn.initializers.ones, (1, 1, 8)) for name in ("scale", "shift")
        )
        if self.normalises:
            x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return x * scale + bias


@linen()
def by_hand(names: Names, x: Any) -> Any:
    x = nn.Dense(8, name=names[0])(x)
    return nn.tanh(ByHand(False, name=names[2])(nn.tanh(ByHand(True, name=names[1])(x))))


@linen()
def scanned_blocks(names: Names, x: Any) -> Any:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + nn.tanh(nn.Dense(8, name=names[1])(nn.LayerNorm(name=names[0])(x))), None

    blocks = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )
    return blocks(name=names[2])(x, None)[0]


@of_nnx()
def nnx_layer_norms(rngs: Any) -> Any:
    layers = [
        flax_nnx.LayerNorm(8, rngs=rngs),
        flax_nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
        flax_nnx.RMSNorm(8, rngs=rngs),
        flax_nnx.Linear(8, 8, rngs=rngs),
    ]

    def forward(layers: Any, x: Any) -> Any:
        x = x + layers[1](layers[0](x))
        return x + jax.nn.gelu(layers[3](layers[2](x)))

    return layers, forward


def program(model: str, kind: str, names: Names) -> list[Any]:
    """The equations of a model's program in order: primitives, dtypes and shapes, no names."""
    fn, params, x = MODELS[model](names)
    is_nnx = isinstance(params, flax_nnx.Module)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jax.tree.leaves(fn(params, x))[0])

    programs: dict[str, Any] = {
        "forward": autocast(fn, "mixed_bfloat16"),
        "grad(autocast)": (flax_nnx.grad if is_nnx else jax.grad)(autocast(loss, "mixed_bfloat16")),
        "autocast(grad)": autocast((flax_nnx.grad if is_nnx else jax.grad)(loss), "mixed_bfloat16"),
    }
    if is_nnx:
        graph, state = flax_nnx.split(params)
        jaxpr = jax.make_jaxpr(
            lambda state: programs[kind](flax_nnx.merge(graph, state, copy=True), x)
        )(state)
    else:
        jaxpr = jax.make_jaxpr(programs[kind])(params, x)
    return [
        (
            site.name,
            site.inside,
            *(str(v.aval) for v in (*site.equation.invars, *site.equation.outvars)),
        )
        for site in walk(jaxpr)
    ]


@pytest.mark.parametrize("kind", ["forward", "grad(autocast)", "autocast(grad)"])
@pytest.mark.parametrize("model", MODELS)
def test_renaming_every_module_changes_nothing(model, kind):
    neutral, named = (program(model, kind, names) for names in NAMES.values())
    assert neutral == named
    assert [row for row in neutral if row[0] in ("dot_general", "conv_general_dilated")]
