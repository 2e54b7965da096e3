"""The dtypes that a call runs in, read from its program."""

from __future__ import annotations

from typing import Any

from policy.amp.parameters import Params
from policy.inspection.costs import bytes_of, flops_of
from policy.inspection.differentiating import traced_call
from policy.inspection.findings import findings_of
from policy.inspection.graph import Graph, is_joint
from policy.inspection.lost import noticing
from policy.inspection.operations import accumulation_of, kind_of, operands_of, result_of
from policy.inspection.report import Audit, Operation
from policy.inspection.states import states_of
from policy.paths import naming, spelled


def audit(fn: Any, *args: Any, backward: bool = False, params: Params = None, **kwargs: Any) -> Audit:
    """Reports the dtypes that a call would run in, operation by operation, and what is wrong with them. Nothing runs.

    The call is traced, and its program read, with those inside it: jit, scan, while, cond, checkpoint, custom rules,
    shard_map. What no result depends on is left out, as XLA leaves it out. A kernel (`pallas_call`, a foreign function)
    is listed as "opaque", and not looked into.

    Arguments and outputs that share a key path, shape and dtype are read as what a loop carries, donated or not: a
    state in half precision that a call adds to, for the next call, is a finding.

    Args:
      fn: any function of arrays, an nnx module or a method of one, or a function of nnx modules; jitted or not.
      *args, **kwargs: what it is called with. `jax.ShapeDtypeStruct` will do for any array: nothing is allocated.
      backward: whether its gradients are audited as well, of the floating outputs with cotangents of one. Of a pair of
        a loss and anything else, the loss alone counts. A function that calls `jax.grad` itself needs no `backward`.
      params: what gradients are taken by, as `autocast` takes it: positions or names of arguments, or a predicate on
        leaves. None: the `params` collection of a mapping that has one, the `nnx.Param`s of modules, else the first
        positional argument if it is a container, running statistics of nnx left out. Where those hold nothing floating
        it is every floating argument.

    Returns:
      An `Audit`: prints as a table, ``to_json()``, ``to_html()``, ``save(path)``.

    Raises:
      TypeError: `fn` can't be called, `params` is of none of these kinds; whatever `fn` raises when it is traced.
      ValueError: `backward`, and there is nothing floating to differentiate, or by; `params` without `backward`, or
        naming arguments where modules hold the parameters.
    """
    if not callable(fn):
        raise TypeError(f"audit takes a function or a module, but got {fn!r} of type {type(fn).__name__}.")
    with noticing() as lost:
        traced = traced_call(fn, args, kwargs, backward, params)
    graph = Graph(traced.jaxpr)
    with naming(node.site.path for node in graph.nodes):
        return Audit(_operations(graph), findings_of(graph, lost, states_of(traced)), _name(fn))


def _name(fn: Any) -> str:
    while hasattr(fn, "func"):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _operations(graph: Graph) -> tuple[Operation, ...]:
    """Returns the operations of a program; equal ones at one place and line are one row."""
    totals: dict[tuple[Any, ...], list[int]] = {}
    for node in graph.nodes:
        if is_joint(node):
            continue
        equation, site = node.site.equation, node.site
        kind = kind_of(site.name)
        key = (
            spelled(site.path),
            kind,
            site.name,
            operands_of(equation),
            accumulation_of(equation),
            result_of(equation),
            "" if kind == "other" else site.source,
            site.is_backward,
        )
        total = totals.setdefault(key, [0, 0, 0])
        times = site.count * site.devices
        total[0] += site.count
        total[1] += flops_of(equation) * times
        total[2] += bytes_of(equation) * times
    return tuple(Operation(*key, *total) for key, total in totals.items())
