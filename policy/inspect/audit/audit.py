"""The dtypes that a call runs in, read from its program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import require_function
from policy.core.policy import Policy
from policy.core.precedence import Asked, collecting
from policy.core.scope import RulesLike, current_scope
from policy.inspect.audit.checks import carries, discrete, eight_bits, functions, sums, widening
from policy.inspect.audit.findings import FINDING_KINDS, Finding
from policy.inspect.audit.flow import Flow, Lost, State, noticing, states_of
from policy.inspect.audit.operations import operations_of
from policy.inspect.audit.report import Audit
from policy.inspect.traced.call import checked_policy, checked_rules, short_text, traced_call
from policy.programs.marks import attention_of
from policy.programs.paths import naming, spelled
from policy.programs.reading.graph import Graph
from policy.programs.reading.walk import walk
from policy.programs.tracing.trace import function_name

_CHECKS = (
    sums.low_precision_reductions,
    functions.low_precision_functions,
    discrete.constants_out_of_range,
    discrete.rounded_integers,
    discrete.rounded_choices,
    eight_bits.unscaled_casts,
    eight_bits.narrow_accumulators,
    carries.narrowed_carries,
    carries.narrowed_states,
    widening.mixed_matmuls,
    widening.silent_promotions,
    widening.float32_matmuls,
    widening.default_precisions,
    widening.float32_residuals,
)


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
      An `Audit`: prints as a table, ``to_json()``.

    Raises:
      TypeError: `fn` can't be called, or `params` is of another kind; any exception of `fn` while
        it is traced.
      ValueError: the policy is malformed, or can't be honored here; `rules` without `policy`, or a
        rule that matches nothing; `backward` without a floating output or argument; `params`
        without `backward`, or naming arguments where modules hold the parameters.
    """
    require_function(fn, "audit", takes="a function or a module")
    rules = checked_rules(rules, policy)
    policy = checked_policy(policy)
    scope = current_scope()
    around = (scope.policy, scope.rules) if policy is None else (policy, rules)
    with noticing() as lost, collecting(*around) as asked:
        traced, _ = traced_call(fn, args, kwargs, backward, params, policy, rules)
    graph = Graph(traced.jaxpr)
    has_policies = asked.has_policies or any(node.site.is_placed for node in graph.nodes)
    in_force = "of modules" if has_policies else ""  # known by their casts if traced before
    if asked.policy is not None:
        in_force = short_text(asked.policy)
    with naming(node.path for node in graph.nodes):
        findings = findings_of(graph, lost, states_of(traced), asked)
        attention = _attention_of(traced.jaxpr)
        return Audit(operations_of(graph), findings, function_name(fn), in_force, attention)


def _attention_of(jaxpr: Any) -> dict[str, str]:
    """Returns the programs of attention by module path, in program order."""
    found: dict[str, list[str]] = {}
    for site in walk(jaxpr):
        program = attention_of(site.equation.source_info.name_stack)
        programs = found.setdefault(spelled(site.path), []) if program else []
        if program and program not in programs:
            programs.append(program)
    return {path: "; ".join(programs) for path, programs in found.items()}


def findings_of(
    graph: Graph, lost: Lost | None = None, states: Sequence[State] = (), asked: Asked | None = None
) -> tuple[Finding, ...]:
    """Returns the findings of every check, sorted by gravity, then in program order.

    Findings that differ in their count only are one.

    Args:
      lost: the constants noted by `noticing` while the program was traced.
      states: arguments and outputs of the call that may be one state.
      asked: the dtypes requested while the program was traced, which are exempt from findings.
    """
    flow = Flow(graph, lost or Lost(), states, asked or Asked())
    counts: dict[Finding, int] = {}
    for check in _CHECKS:
        for finding in check(flow):
            key = dataclasses.replace(finding, count=0)
            counts[key] = counts.get(key, 0) + finding.count
    gravity = {kind: i for i, kind in enumerate(FINDING_KINDS)}
    found = [dataclasses.replace(finding, count=count) for finding, count in counts.items()]
    return tuple(sorted(found, key=lambda finding: gravity[finding.kind]))
