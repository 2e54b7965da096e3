"""Turns a case into pure functions: how its parameters are made, and what they give with inputs."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import use_policy
from policy.inspect.audit.audit import findings_of
from policy.inspect.audit.report import Finding
from policy.programs.reading.graph import Graph
from tests.mpmodules.table.cases import Case
from tests.programs import Operation, operations_of

OURS: dict[str, Any] = {"linen": linen, "nnx": nnx}
THEIRS: dict[str, Any] = {"linen": flax.linen, "nnx": flax.nnx}
DEPRECATIONS = [  # that Flax announces and that are no business of the table
    pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Module.sow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*value.*:DeprecationWarning"),
]
CALL_KEY = jax.random.key(1)


@dataclasses.dataclass(frozen=True)
class Program:
    """A layer as pure functions.

    Attributes:
      init: key -> (params, rest): the trainable parameters, and all other variables.
      apply: (params, rest, inputs) -> (out, variables that the call changed).
      inputs: what it is called with: arrays, and a cell's carry.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    apply: Callable[[Any, Any, Any], tuple[Any, Any]]
    inputs: tuple[Any, ...]


class LinenComposite(linen.Module):
    """A model that is nothing but the layer: the boundary is around it."""

    layer: Any
    method: str

    def __call__(self, *inputs: Any, **call: Any) -> Any:
        return getattr(self.layer, self.method)(*inputs, **call)


class NnxComposite(nnx.Module):
    def __init__(self, make: Callable[[], Any], method: str):
        self.layer = make()
        self.method = method

    def __call__(self, *inputs: Any, **call: Any) -> Any:
        return getattr(self.layer, self.method)(*inputs, **call)


def in_dtype(inputs: Any, dtype: Any) -> Any:
    """Inputs with their floating arrays in `dtype`."""
    cast = lambda x: jnp.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else x.dtype)  # noqa: E731
    return jax.tree.map(cast, inputs)


def program(
    api: str,
    case: Case,
    modules: Any = None,
    *,
    composite: bool = False,
    inputs_in: Any = jnp.float32,
    **dtypes: Any,
) -> Program:
    """The case in `api`, from our modules or from `modules`.

    Args:
      composite: whether the layer is called by a module around it, instead of as the root.
      inputs_in: what floating inputs are in.
      dtypes: dtype arguments for the layer.
    """
    make = linen_program if api == "linen" else nnx_program
    return make(case, OURS[api] if modules is None else modules, composite, inputs_in, dtypes)


def linen_program(
    case: Case, nn: Any, composite: bool, inputs_in: Any, dtypes: dict[str, Any]
) -> Program:
    layer = case.make(nn, **dtypes)
    model = LinenComposite(layer, case.method) if composite else layer
    carry = (layer.initialize_carry(CALL_KEY, case.inputs[0].shape),) if case.is_cell else ()
    first = (*carry, *in_dtype(case.inputs, inputs_in))
    method = "__call__" if composite else case.method
    sown = {name: value for name, value in case.call.items() if name != "sow_weights"}

    def init(key: jax.Array) -> tuple[Any, Any]:
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        variables = dict(model.init(rngs, *first, method=method, **sown))
        return variables.pop("params", {}), variables

    def apply(params: Any, rest: Any, inputs: Any) -> tuple[Any, Any]:
        how = {"rngs": {"dropout": CALL_KEY}, "mutable": ["batch_stats", "cache", "intermediates"]}
        return model.apply({"params": params, **rest}, *inputs, method=method, **how, **case.call)

    return Program(init, apply, (*carry, *in_dtype(case.called_with, inputs_in)))


def nnx_program(
    case: Case, modules: Any, composite: bool, inputs_in: Any, dtypes: dict[str, Any]
) -> Program:
    graphs: list[Any] = []
    method = "__call__" if composite else case.method

    def make(key: jax.Array) -> Any:
        layer = case.make(modules, flax.nnx.Rngs(key), **dtypes)
        if case.prepare is not None:
            case.prepare(layer)
        return layer

    def init(key: jax.Array) -> tuple[Any, Any]:
        layer = NnxComposite(lambda: make(key), case.method) if composite else make(key)
        graph, params, rest = flax.nnx.split(layer, flax.nnx.Param, ...)
        graphs[:] = [graph]
        return params, rest

    def apply(params: Any, rest: Any, inputs: Any) -> tuple[Any, Any]:
        model = flax.nnx.merge(graphs[-1], params, jax.tree.map(lambda x: x, rest), copy=True)
        out = getattr(model, method)(*inputs, **case.call)
        return out, flax.nnx.to_pure_dict(flax.nnx.state(model, flax.nnx.Not(flax.nnx.Param)))

    carry: tuple[Any, ...] = ()
    if case.is_cell:
        carry = (make(CALL_KEY).initialize_carry(case.inputs[0].shape, flax.nnx.Rngs(0)),)
    return Program(init, apply, (*carry, *in_dtype(case.called_with, inputs_in)))


Built = tuple[Callable[..., Any], Any, tuple[Any, ...]]


def built(
    api: str, case: Case, policy: str | None = None, modules: Any = None, **options: Any
) -> Built:
    """Returns a call in a scope, of parameters and inputs; the parameters; and the inputs."""
    with scope_of(policy):
        run = program(api, case, modules, **options)
        params, rest = jax.jit(run.init)(jax.random.key(0))

    def call(params: Any, *inputs: Any) -> Any:
        with scope_of(policy):
            return run.apply(params, rest, inputs)[0]

    return call, params, run.inputs


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a case is under a policy, without running it.

    Attributes:
      params, rest, out, state: the types of what init and the call give.
      param_gradients, input_gradients: the types of the gradients.
      inputs: the types of the floating inputs.
      init, ops: the operations of init; of the call and its gradients.
      findings: what an audit of the call and its gradients finds.
    """

    params: Any
    rest: Any
    out: Any
    state: Any
    param_gradients: Any
    inputs: Any
    input_gradients: Any
    init: list[Operation]
    ops: list[Operation]
    findings: tuple[Finding, ...]


def scope_of(policy: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if policy is None else use_policy(policy)


def traced(api: str, case: Case, policy: Any, **options: Any) -> Trace:
    """The case under a policy, or None; `options` are those of `program`."""
    with scope_of(policy):
        return _trace(program(api, case, **options))


def _trace(run: Program) -> Trace:
    init, (params, rest) = jax.make_jaxpr(run.init, return_shape=True)(jax.random.key(0))
    floats = floating(run.inputs)

    def both_ways(params: Any, rest: Any, floats: Any) -> Any:
        def out_of(params: Any, floats: Any) -> Any:
            return run.apply(params, rest, with_floats(run.inputs, floats))

        out, backward, state = jax.vjp(out_of, params, floats, has_aux=True)
        return out, state, backward(jax.tree.map(jnp.ones_like, out))

    jaxpr, (out, state, gradients) = jax.make_jaxpr(both_ways, return_shape=True)(
        params, rest, floats
    )
    types = (params, rest, out, state, gradients[0], floats, gradients[1])
    return Trace(*types, operations_of(init), operations_of(jaxpr), findings_of(Graph(jaxpr)))


def floating(inputs: Any) -> dict[int, Any]:
    """Returns the floating leaves of inputs, by place."""
    leaves = jax.tree.leaves(inputs)
    return {i: x for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)}


def with_floats(inputs: Any, floats: dict[int, Any]) -> Any:
    """Returns inputs with other floating leaves."""
    leaves, treedef = jax.tree.flatten(inputs)
    return jax.tree.unflatten(treedef, [floats.get(i, x) for i, x in enumerate(leaves)])


def dtypes_of(tree: Any) -> set[str]:
    """The names of a tree's floating dtypes."""
    return {x.dtype.name for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)}
