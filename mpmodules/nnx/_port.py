"""Policies for built nnx models, ours or not: copies with other classes, attributes and dtypes."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from flax import nnx as flax_nnx

from mpmodules.calls.port_options import OwnCode, not_a_model, port_options
from mpmodules.nnx._adoption import adopt, children_of, class_in_port, effective_in_port
from mpmodules.nnx._resolution import carried
from mpmodules.tracing.nnx_rebuilding import Rebuilding
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.rules import PolicyRules
from policy.core.scope import RulesLike, Source
from policy.programs.paths import joined

M = TypeVar("M", bound=flax_nnx.Module)


def _paths(module: flax_nnx.Module) -> dict[tuple[str, ...], flax_nnx.Module]:
    """Returns every path to every module, shared ones included, from the root down."""
    found: dict[tuple[str, ...], flax_nnx.Module] = {}

    def visit(node: Any, path: tuple[str, ...], above: frozenset[int]) -> None:
        if isinstance(node, flax_nnx.Module):
            found[path] = node
        for keys, child in children_of(node):
            # A cycle ends where it closes.
            if not isinstance(child, flax_nnx.Variable) and id(child) not in above:
                visit(child, (*path, *keys), above | {id(child)})

    visit(module, (), frozenset({id(module)}))
    return {path: found[path] for path in sorted(found, key=len)}


def apply_policy(
    model: M,
    policy: Policy | str,
    rules: RulesLike | None = None,
    *,
    keep_explicit: bool = False,
    own_code: OwnCode = None,
) -> M:
    """Returns a copy of a built nnx model under a policy and rules, without an edit.

    Every layer obeys the policy, or the first rule that matches its path or class, or a rule that
    holds above it; a submodule that was built with its own `dtype_policy=` keeps that. A module
    that is shared obeys the first rule that matches one of its paths. Floating parameters are cast
    to param_dtype and decoding caches to compute_dtype, statistics are not.

    The model given stays as it is, and shares the arrays whose dtype does not change. In the copy
    Flax's layers are ours, and each other module is of a subclass of its class, with the same name,
    whose public methods are boundaries. ``isinstance`` holds, ``type(x) is nnx.Linear`` does not.
    Paths and the state tree are the same, and what is shared in the model is shared in the copy.
    Make optimizers for the copy: those of the model given hold state for its own parameters.

    Args:
      model: an nnx module, Flax's own or ours.
      policy: a Policy or its text form.
      rules: `PolicyRules` or an argument for them. A module's path is the names of the attributes
        and the indices that lead to it, joined by ``/``.
      keep_explicit: whether an explicit `dtype` of a layer, Flax's or ours, holds against the
        policy. A param_dtype can't be told from the default and never does.
      own_code: the treatment of code that no layer runs. "autocast": it is traced in float32 and
        runs by the rules of `policy.autocast`, under the policies that hold at each module; layers
        run as layers. "keep": it runs in the dtypes that it meets, and nothing is traced. None: as
        "autocast", or as "keep" beside `keep_explicit`.

    Returns:
      The copy. It can be pickled, split and merged, and given another policy by a further call.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: a rule matches nothing (the paths are listed), the policy or rules are malformed,
        `own_code` is none of the above, or options contradict each other.

    Example:
      >>> model = flax.nnx.Linear(4, 3, rngs=flax.nnx.Rngs(0))
      >>> model = nnx.apply_policy(model, "params=bfloat16,compute=bfloat16")
      >>> model.kernel[...].dtype
      dtype(bfloat16)
    """
    if not isinstance(model, flax_nnx.Module):
        raise not_a_model(model, "an nnx module", other="mpmodules.linen")
    options = port_options(
        policy,
        rules,
        keep_explicit=keep_explicit,
        own_code=own_code,
    )
    rules = options.rules or PolicyRules()
    paths = _paths(model)
    model_name = type(model).__name__
    classes: dict[str, set[type]] = {}
    for path, module in paths.items():
        classes.setdefault(joined(path), set()).add(type(module))
    rules.check(classes, model=model_name)
    holding: dict[
        tuple[str, ...], tuple[Policy, Source]
    ] = {}  # what the modules below each inherit
    plan: dict[int, tuple[Any, Effective]] = {}
    for path, module in paths.items():
        where = joined(path) or type(module).__name__
        held, source = carried(module, path, rules, model_name) or (
            next(holding[path[:n]] for n in range(len(path) - 1, -1, -1) if path[:n] in holding)
            if path
            else (options.policy, Source("argument", "apply_policy", own=True))
        )
        holding[path] = held, source.for_those_inside(where)
        planned = plan.get(id(module))
        if planned is None or (source.own and source.kind == "rule" and not planned[1].source.own):
            plan[id(module)] = module, effective_in_port(module, held, source, options, where=where)
    copy = Rebuilding(class_in_port)
    ported = copy(model)
    for module, effective in plan.values():
        held = cast(Policy, effective.policy)
        adopt(copy(module), module, held, effective.source, options)
    return ported
