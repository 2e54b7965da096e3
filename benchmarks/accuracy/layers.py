"""The layers of both APIs as cases: built from one description, with the same parameter values
everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import flax.linen as flax_linen
import flax.nnx as flax_nnx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accuracy.cases import Case, Precision, Program
from mpmodules import linen as our_linen
from mpmodules import nnx as our_nnx
from policy import use_policy

Values = Callable[[str, tuple[int, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer in one or both APIs.

    Attributes:
      linen: ``linen(nn, **dtypes)`` makes the layer from either linen API.
      nnx: ``nnx(nnx, rngs, **dtypes)`` likewise.
      call: keyword arguments of the call.
      method: what is called.
      operands: whether the parameters are operands of matmuls: then all columns, and the truth, get
        them rounded.
      norm: whether the layer takes `use_fast_variance`, which the truth does without.
      running_mean: the mean of the running means.
      same_tree: whether both APIs name their parameters alike; else each has values, and a truth,
        of its own.
    """

    linen: Callable[..., Any] | None = None
    nnx: Callable[..., Any] | None = None
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    method: str = "__call__"
    operands: bool = True
    norm: bool = False
    running_mean: float = 0.0
    same_tree: bool = True


def layer_case(
    name: str,
    layer: Layer,
    family: str,
    inputs: str,
    data: Callable[..., Any],
    *,
    gradient: str | None = None,
    **rest: Any,
) -> Case:
    """A case of a layer's output, or of the gradient of its parameter `gradient` (the last name in
    its path).
    """
    columns: dict[str, Program] = {}
    given = rest.get("given", "half")
    for api, flax, ours in (("linen", flax_linen, our_linen), ("nnx", flax_nnx, our_nnx)):
        if getattr(layer, api) is not None:
            columns[f"ours {api}"] = functools.partial(
                _run, api, ours, "ours", layer, gradient, given
            )
            columns[f"flax {api}"] = functools.partial(
                _run, api, flax, "flax", layer, gradient, given
            )
    truths = {
        "linen": functools.partial(_run, "linen", flax_linen, "truth", layer, gradient, given),
        "nnx": functools.partial(_run, "nnx", flax_nnx, "truth", layer, gradient, given),
    }
    truth = truths["linen" if layer.linen is not None else "nnx"]
    if not layer.same_tree:
        rest["truth_of_nnx"] = truths["nnx"]
    label = name if gradient is None else f"{name}, gradient of {gradient}"
    if family == "matmuls":
        rest = {"floor": 1.0} | rest
    values = functools.partial(_value, layer)
    return Case(
        label, inputs, family, data, columns, truth, gradient=gradient, values=values, **rest
    )


def _run(
    api: str,
    module: Any,
    role: str,
    layer: Layer,
    gradient: str | None,
    given: str,
    precision: Precision,
    *inputs: Any,
) -> Any:
    dtypes: dict[str, Any] = {}
    scope: Any = contextlib.nullcontext()
    if role == "truth":
        dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        if layer.norm:
            dtypes["use_fast_variance"] = False
    elif role == "flax":
        # What its users would write: matmuls in half, and a dtype of float32 where a norm is to
        # return that.
        dtypes = {"dtype": precision.operands if layer.operands else precision.output}
    elif precision.wide or given == "float32":
        dtypes = {"dtype_policy": precision.policy}  # a boundary of its own
    else:
        scope = use_policy(precision.policy)
    values = functools.partial(_value, layer, precision)
    with scope:
        run, params = (_linen if api == "linen" else _nnx)(module, layer, dtypes, values, inputs)
        if gradient is None:
            return jax.jit(run)(params, *inputs)
        return jax.jit(functools.partial(_gradient, run, gradient))(params, *inputs)


def _linen(
    nn: Any, layer: Layer, dtypes: dict[str, Any], values: Values, inputs: tuple[Any, ...]
) -> Any:
    assert layer.linen is not None
    module, key = layer.linen(nn, **dtypes), jax.random.key(0)
    init = functools.partial(module.init, method=layer.method, **layer.call)
    variables: Any = _filled(jax.eval_shape(init, key, *inputs), values)
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def run(params: Any, *inputs: Any) -> Any:
        variables = {"params": params, **rest}
        out = module.apply(variables, *inputs, method=layer.method, mutable=[*rest], **layer.call)
        return out[0]

    return run, variables.get("params", {})


def _nnx(
    nnx: Any, layer: Layer, dtypes: dict[str, Any], values: Values, inputs: tuple[Any, ...]
) -> Any:
    assert layer.nnx is not None
    make = layer.nnx
    abstract = nnx.eval_shape(lambda: make(nnx, nnx.Rngs(0), **dtypes))
    graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
    params, rest = _filled(params, values), _filled(rest, values)

    def run(params: Any, *inputs: Any) -> Any:
        model = nnx.merge(
            graphdef, params, jax.tree.map(lambda x: x, rest)
        )  # variables of this trace's own
        return getattr(model, layer.method)(*inputs, **layer.call)

    return run, params


def _gradient(run: Callable[..., Any], name: str, params: Any, *inputs: Any) -> Any:
    """The gradient of the parameter called `name`; the cotangent is a fixed one that every half
    dtype holds exactly.
    """
    y, backward = jax.vjp(lambda params: run(params, *inputs), params)
    (found,) = [
        x
        for path, x in jax.tree.leaves_with_path(backward(cotangent(y))[0])
        if _path(path).endswith(name)
    ]
    return found


def cotangent(y: Any) -> Any:
    """Multiples of 1/16 between 1/16 and 1, most of them positive: their sums do not cancel."""
    pattern = (np.arange(y.size) * 7919 % 16 + 1) / 16 * np.where(np.arange(y.size) % 5 == 0, -1, 1)
    return jnp.asarray(pattern.reshape(y.shape), y.dtype)


def _filled(abstract: Any, values: Values) -> Any:
    """A tree of arrays in place of a tree of shapes and dtypes."""

    def fill(path: Any, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        # Through float32, in which parameters are stored, so that the truth has no digits that the
        # others lack.
        return jnp.asarray(
            values(_path(path), leaf.shape).astype(np.float32).astype(np.float64), leaf.dtype
        )

    return jax.tree_util.tree_map_with_path(fill, abstract)


# What is in the paths of one API only.
_NOT_NAMES = ("params", "batch_stats", "value", "raw_value", "layer_instance", "Dense_0", "cell")


def _path(path: Any) -> str:
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))) for key in path]
    names = [
        str(name) for key in keys for name in (key if isinstance(key, tuple) else (key,))
    ]  # nnx has tuples as keys
    return "/".join(
        name for name in names if name not in ("params", "batch_stats", "value", "raw_value")
    )


def _value(layer: Layer, precision: Precision, path: str, shape: tuple[int, ...]) -> np.ndarray:
    """The value of a parameter or statistic, in float64: a function of the end of its path and of
    its shape.
    """
    name = path.rsplit("/", 1)[-1]
    end = "/".join(path.split("/")[-2:])
    noise = np.random.default_rng(zlib.crc32(f"{end}{shape}".encode())).normal(size=shape)
    fan_in = max(int(np.prod(shape[:-1])), 1)
    named: dict[str, np.ndarray] = {
        "scale": 1 + 0.1 * noise,
        "bias": 0.1 * noise,
        "mean": layer.running_mean + 0.1 * noise,
        "var": 1 + 0.1 * np.abs(noise),
        "embedding": noise,
        "negative_slope": 0.01 + 0 * noise,
        "sigma": 1 + 0 * noise,
        "u": noise,
    }
    value = np.asarray(named.get(name, noise / np.sqrt(fan_in)))
    if layer.operands:
        value = value.astype(jnp.dtype(precision.operands)).astype(np.float64)
    return value
