"""The dtypes that a call runs in, read from its program."""

from __future__ import annotations

from typing import Any

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import require_function
from policy.core.policy import Policy
from policy.core.precedence import Asked, collecting
from policy.core.scope import RulesLike, current_scope
from policy.inspect.audit.findings import findings_of
from policy.inspect.audit.lost_constants import noticing
from policy.inspect.audit.operations import Operation
from policy.inspect.audit.report import Audit
from policy.inspect.audit.states import states_of
from policy.inspect.traced.call import checked_policy, checked_rules, short_text
from policy.inspect.traced.under_policy import traced_under
from policy.programs.operations import (
    accumulation_of,
    bytes_of,
    float32_precision_of,
    flops_of,
    kind_of,
    operands_of,
    result_of,
)
from policy.programs.paths import naming, spelled
from policy.programs.reading.graph import Graph, is_joint


def audit(
    fn: Any,
    *args: Any,
    policy: Policy | str | None = None,
    rules: RulesLike | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    **kwargs: Any,
) -> Audit:
    """Reports the dtypes of a call, operation by operation, and the findings about them.

    Nothing runs.

    The call is traced, and its program is read, sub-jaxprs included: jit, scan, while, cond,
    checkpoint, custom rules, shard_map. Dead code is left out, as XLA leaves it out. A kernel
    (`pallas_call`, a foreign function) is listed as "opaque" without its contents.

    Arguments and outputs that share a key path, shape and dtype are taken for the state of a loop,
    donated or not: a half-precision state that a call adds to, for the next call, is a finding.

    Matmuls in float32 are no finding if float32 was requested: by a rule, by the policy of the
    module or of a call, or by a layer's own dtype argument (for Flax's layers, if mpmodules is
    imported).

    >>> import jax.numpy as jnp
    >>> import policy
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.dot(x, w), dtype=jnp.float32)
    >>> report = policy.audit(loss, jnp.ones((8, 8), jnp.bfloat16), jnp.ones((2, 8), jnp.bfloat16))
    >>> report.findings
    ()
    >>> [op.operands for op in report.operations if op.kind == "dot"]
    [('bfloat16', 'bfloat16')]

    Args:
      fn: any function of arrays, an nnx module or a method of one, or a function of nnx modules;
        jitted or not.
      *args, **kwargs: the arguments of the call. Any array may be a `jax.ShapeDtypeStruct`: nothing
        is allocated.
      policy: the policy to audit under, applied as in `compare`: through layers that obey
        `use_policy`; if that makes no matmul half precision, through `autocast`. None: as it is
        written, under the policy in force.
      rules: policies by module path or layer class, beside `policy`.
      backward: whether to audit the gradients as well, of the floating outputs with cotangents of
        one. For a pair of a loss and aux, only the loss is differentiated. A function that calls
        `jax.grad` itself needs no `backward`.
      params: the arguments to differentiate by, as in `autocast`: positions or names of arguments,
        or a predicate on leaves. None: the `params` collection of a mapping that has one, the
        `nnx.Param`s of modules, otherwise the first positional argument if it is a container,
        without nnx's running statistics. If those contain nothing floating, every floating
        argument.

    Returns:
      An `Audit`: prints as a table, ``to_json()``, ``to_html()``, ``save(path)``.

    Raises:
      TypeError: `fn` can't be called, or `params` is of another kind; any exception of `fn` while
        it is traced.
      ValueError: the policy is malformed, or can't be honoured here; `rules` without `policy`, or a
        rule that matches nothing; `backward` without a floating output or argument; `params`
        without `backward`, or naming arguments where modules hold the parameters.
    """
    require_function(fn, "audit", takes="a function or a module")
    rules = checked_rules(rules, policy)
    policy = checked_policy(policy)
    scope = current_scope()
    around = (scope.policy, scope.rules) if policy is None else (policy, rules)
    with noticing() as lost, collecting(*around) as asked:
        traced, _ = traced_under(fn, args, kwargs, backward, params, policy, rules)
    graph = Graph(traced.jaxpr)
    with naming(node.site.path for node in graph.nodes):
        findings = findings_of(graph, lost, states_of(traced), asked)
        return Audit(operations_of(graph), findings, function_name(fn), _in_force(asked, graph))


def _in_force(asked: Asked, graph: Graph) -> str:
    """Returns the policy of a program, for `Audit.policy`.

    Programs traced earlier are recognised by their casts.
    """
    if asked.policy is not None:
        return short_text(asked.policy)
    return (
        "of modules"
        if asked.has_policies or any(node.site.is_placed for node in graph.nodes)
        else ""
    )


def function_name(fn: Any) -> str:
    """Returns the name of a function, or of the class of a module."""
    while hasattr(fn, "func"):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def operations_of(graph: Graph) -> tuple[Operation, ...]:
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
            float32_precision_of(equation),
        )
        total = totals.setdefault(key, [0, 0, 0])
        times = site.count * site.devices
        total[0] += site.count
        total[1] += flops_of(equation) * times
        total[2] += bytes_of(equation) * times
    return tuple(Operation(*key[:-1], *total, precision=key[-1]) for key, total in totals.items())
