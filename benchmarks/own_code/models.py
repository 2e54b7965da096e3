"""One model for each snippet: in both APIs, ported, and as a plain function of arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

import mpmodules.linen
import mpmodules.nnx
from benchmarks.own_code.snippet import WIDTH, Param, Params, Snippet
from policy import DtypePolicyWarning

_LINEN, _NNX = "linen", "nnx"
OURS = (_LINEN, _NNX)
PORTS = (f"{_LINEN} port", f"{_NNX} port")
WAYS = (*OURS, *PORTS)
AUTOCAST, REFERENCE = "autocast", "float64"
Net = Callable[..., Any]  # of all parameters, the stream and the targets
_NORM = {"scale": Param((WIDTH,), 1.0, 0.2), "bias": Param((WIDTH,), 0.0, 0.2)}


def params_of(snippet: Snippet) -> dict[str, dict[str, Param]]:
    """Returns the parameters of a model: those of its norm, its own code and its Dense."""
    outputs = snippet.outputs
    head = {"kernel": Param((WIDTH, outputs)), "bias": Param((outputs,), 0.0, 0.2)}
    return {"norm": _NORM, "own": dict(snippet.params), "head": head}


def net_of(snippet: Snippet, way: str, policy: str) -> Net:
    """Returns a model as a function.

    Args:
      snippet: the own code.
      way: one of `WAYS`.
      policy: its name.
    """
    if way == _LINEN:
        return _linen(mpmodules.linen, snippet)(dtype_policy=policy).apply
    if way == _NNX:
        return _of_nnx(lambda: _nnx(mpmodules.nnx, snippet)(flax.nnx.Rngs(0), dtype_policy=policy))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DtypePolicyWarning)
        if way == PORTS[0]:
            model: Any = _linen(flax.linen, snippet)()
            return mpmodules.linen.apply_policy(model, policy, own_code="autocast").apply
        plain = _nnx(flax.nnx, snippet)
        port = mpmodules.nnx.apply_policy
        return _of_nnx(lambda: port(plain(flax.nnx.Rngs(0)), policy, own_code="autocast"))


def plain(snippet: Snippet, params: Params, x: Any, *targets: Any) -> Any:
    """Runs the model's maths on arrays, its norm and its Dense by hand."""
    params = params["params"]
    centered = x - x.mean(-1, keepdims=True)
    x = centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)
    x = x * params["norm"]["scale"] + params["norm"]["bias"]
    if not snippet.is_loss:
        x = snippet.body(params["own"], x, *targets)
    x = x @ params["head"]["kernel"] + params["head"]["bias"]
    return snippet.body(params["own"], x, *targets) if snippet.is_loss else x


def _linen(nn: Any, snippet: Snippet) -> Any:
    """Returns the model's class over `mpmodules.linen` or `flax.linen`."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x: Any, *targets: Any) -> Any:
            params = {name: self.param(name, p.init, p.shape) for name, p in snippet.params.items()}
            return snippet.body(params, x, *targets)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, *targets: Any) -> Any:
            own, head = Own(name="own"), nn.Dense(snippet.outputs, name="head")
            x = nn.LayerNorm(name="norm")(x)
            return own(head(x), *targets) if snippet.is_loss else head(own(x, *targets))

    return Model


def _nnx(nnx: Any, snippet: Snippet) -> Any:
    """Returns the model's class over `mpmodules.nnx` or `flax.nnx`."""

    class Own(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            for name, param in snippet.params.items():
                setattr(self, name, nnx.Param(param.init(rngs.params(), param.shape)))

        def __call__(self, x: Any, *targets: Any) -> Any:
            params = {name: getattr(self, name)[...] for name in snippet.params}
            return snippet.body(params, x, *targets)

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.own = Own(rngs)
            self.head = nnx.Linear(WIDTH, snippet.outputs, rngs=rngs)

        def __call__(self, x: Any, *targets: Any) -> Any:
            x = self.norm(x)
            if snippet.is_loss:
                return self.own(self.head(x), *targets)
            return self.head(self.own(x, *targets))

    return Model


def _of_nnx(build: Callable[[], Any]) -> Net:
    """Returns a function of a model's parameters as linen holds them."""
    graphdef, state = flax.nnx.split(flax.nnx.eval_shape(build))

    def net(params: Params, x: Any, *targets: Any) -> Any:
        drawn = jax.tree.map(lambda array: array, state)
        flax.nnx.replace_by_pure_dict(drawn, dict(params["params"]))
        return flax.nnx.merge(graphdef, drawn)(x, *targets)

    return net


def draw(snippet: Snippet, seed: int) -> tuple[Any, ...]:
    """Returns parameters, stream, the snippet's targets and the outputs' targets.

    The stream's numbers have 8 significant bits: a cast to half precision does not round them.
    """
    generator = np.random.default_rng(seed)
    params = {
        module: {name: param.draw(generator) for name, param in held.items()}
        for module, held in params_of(snippet).items()
    }
    x = jnp.asarray(generator.normal(size=snippet.shape), jnp.bfloat16).astype(jnp.float32)
    wanted = generator.normal(size=(*snippet.shape[:-1], snippet.outputs)).astype(np.float32)
    return {"params": params}, np.asarray(x), snippet.targets(generator), wanted
