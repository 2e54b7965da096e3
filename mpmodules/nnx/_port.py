"""Policies for built nnx models, ours or not: copies with other classes, attributes and dtypes."""

from __future__ import annotations

import copyreg
import functools
import inspect
from typing import Any, TypeVar, cast

import jax
from flax import nnx as flax_nnx

from mpmodules.calls.classes import (
    LAYER_OF,
    GivenDtypes,
    OwnCode,
    PortOptions,
    is_ours,
    layer_class,
    not_a_model,
    port_options,
    warn_where_dropped,
)
from mpmodules.nnx._call import children_of, install_boundaries, is_child
from mpmodules.nnx._layers.dot_product_attention import dot_product_attention
from mpmodules.nnx._module import Module
from mpmodules.nnx._quantized import quantized_like
from mpmodules.nnx._resolution import as_instance_of, carried, hold_policy, is_complex, of_rule
from mpmodules.tracing.nnx_rebuilding import Rebuilding, one_per_class, stand_in
from policy.core.arrays import cast_floating
from policy.core.policy import Policy
from policy.core.precedence import Effective, with_explicit_dtypes
from policy.core.rules import PolicyRules
from policy.core.scope import RulesLike, Source, current_scope
from policy.programs.frameworks import PORTS
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
    options = port_options(policy, rules, keep_explicit=keep_explicit, own_code=own_code)
    rules = options.rules or PolicyRules()
    paths = _paths(model)
    model_name = type(model).__name__
    rules.check({joined(path): {type(each)} for path, each in paths.items()}, model=model_name)
    given = options.policy, Source("argument", "apply_policy", own=True)
    inherited: dict[tuple[str, ...], tuple[Policy, Source]] = {}  # by the modules below each
    plan: dict[int, tuple[Any, Effective]] = {}
    for path, module in paths.items():
        where = joined(path) or type(module).__name__
        above = (path[:n] for n in range(len(path) - 1, -1, -1))
        from_above = next((inherited[each] for each in above if each in inherited), given)
        held, source = carried(module, path, rules, model_name) or from_above
        inherited[path] = held, source.for_those_inside(where)
        planned = plan.get(id(module))
        if planned is None or (source.own and source.kind == "rule" and not planned[1].source.own):
            is_kept = keep_explicit and _has_dtypes(module)
            plan[id(module)] = (
                module,
                with_explicit_dtypes(
                    held,
                    source=source,
                    dtype=_explicit_dtype(module) if is_kept else None,
                    what=type(module).__name__,
                    where=where,
                ),
            )
    noted = GivenDtypes(type(model), options.policy, is_kept=keep_explicit)
    for module, _ in plan.values():
        if not is_ours(type(module)) and _has_dtypes(module):
            noted.note(module, _explicit_dtype(module))
    copy = Rebuilding(class_in_port)
    ported = copy(model)
    for module, effective in plan.values():
        held = cast(Policy, effective.policy)
        adopt(copy(module), module, held, effective.source, options)
    stored: dict[int, Any] = {}  # what is shared stays shared
    for path, module in paths.items():
        policy = cast(Policy, plan[id(module)][1].policy)
        if policy.param_format is not None:
            store_quantized(copy(module), policy, path, stored)
    warn_where_dropped()
    return ported


def store_quantized(
    module: Any, policy: Policy, path: tuple[str, ...], stored: dict[int, Any]
) -> None:
    """Stores the parameters that a module holds itself in the 8 or 4 bits of a policy.

    Args:
      module: the module.
      policy: it has a `param_format`.
      path: of the module.
      stored: what variables were replaced by, by their identities; is added to.
    """
    for names, variable in children_of(module):
        if not isinstance(variable, flax_nnx.Param):
            continue
        made = stored.get(id(variable)) or quantized_like(module, variable, policy, (*path, *names))
        if made is None:
            continue
        stored[id(variable)] = made
        held, replaced = getattr(module, names[0]), {id(variable): made}
        after = jax.tree.map(lambda x, by=replaced: by.get(id(x), x), held, is_leaf=is_child)
        setattr(module, names[0], after)


def class_in_port(node: Any) -> type:
    """Returns the class that an object of a model has in a port of the model."""
    is_module = isinstance(node, flax_nnx.Module) and not _is_container(node)
    return ported_class(type(node)) if is_module else type(node)


def adopt(module: Any, given: Any, policy: Policy, source: Source, options: PortOptions) -> None:
    """Makes one module of a port obey `policy`: its dtype attributes and its own variables.

    Args:
      module: the module.
      given: the one that it is a copy of.
      policy: the policy.
      source: where the policy comes from.
      options: those of the port.
    """
    if _is_container(module):
        _cast_variables(module, policy)
        return
    if not is_ours(type(given)):
        if (dtype := _explicit_dtype(given)) is not None:
            module._explicit_dtype = dtype
        if getattr(module, "attention_fn", None) is flax_nnx.dot_product_attention:
            module.attention_fn = dot_product_attention
    if not is_ours(type(given)) or given._ported_code is not None:
        module._ported_code = options.own_code
    _obey(module, policy, source)


def _obey(module: Any, policy: Policy | None, source: Source) -> None:
    """Puts a policy on a module that can carry one."""
    if policy is not None:
        if _has_dtypes(module) and not any(map(is_complex, (module.dtype, module.param_dtype))):
            module.dtype = policy.compute_dtype
            module.param_dtype = policy.param_dtype
        _cast_variables(module, policy)
    if policy is not None or not hasattr(module, "dtype_policy") or module.dtype_policy is not None:
        hold_policy(module, policy, source)


def _cast_variables(module: Any, policy: Policy) -> None:
    for _, variable in children_of(module):
        if isinstance(variable, flax_nnx.Param):
            variable.set_value(cast_floating(variable.get_value(), policy.param_dtype))
        elif isinstance(variable, flax_nnx.Cache):
            # Keys and values are written into it as they are computed.
            variable.set_value(cast_floating(variable.get_value(), policy.compute_dtype))


def _has_dtypes(module: Any) -> bool:
    """Returns whether a module is a layer that was built with dtypes."""
    takes = _takes_dtypes(type(module))
    return takes and hasattr(module, "dtype") and hasattr(module, "param_dtype")


@functools.cache
def _takes_dtypes(cls: type) -> bool:
    """Returns whether a class is, or derives from, a layer of Flax's that is built with `dtype` and
    `param_dtype`.
    """
    names = {"dtype", "param_dtype"}
    return any(
        names <= set(inspect.signature(base.__init__).parameters)
        for base in cls.__mro__
        if base in LAYER_OF
    )


def _explicit_dtype(module: Any) -> Any:
    """Returns the dtype that a layer was given, or None.

    Flax's Embed fills in its table's where it was given none.
    """
    if is_ours(type(module)):
        return module._explicit_dtype
    if not _takes_dtypes(type(module)):
        return None
    dtype, embedding = getattr(module, "dtype", None), getattr(module, "embedding", None)
    return None if embedding is not None and dtype == embedding.dtype else dtype


def adopt_children(module: Any, policy: Policy | None) -> None:
    """Makes the Flax layers that a layer of ours has just built obey its policy, and the class
    rules in force.
    """
    rules = current_scope().rules
    source = module._policy_source.for_those_inside(type(module).__name__)
    for name, child in list(vars(module).items()):
        if layer_class(type(child)) is None or is_ours(type(child)):
            continue
        rule = rules.rule_for(None, type(child)) if rules else None
        ours: Any = as_instance_of(ported_class(type(child)), child)
        _obey(ours, *((policy, source) if rule is None else of_rule(rule)))
        ours._explicit_dtype = module._explicit_dtype  # it was given what the policy says
        setattr(module, name, ours)


# --------------------------------------------------------------------------------------------------
# The classes of ported modules: ours for Flax's layers, and subclasses of all others
#
# A subclass has the name of its base, derives from it and from a class of ours, and its public
# methods are boundaries. Looked up on the class, they are the functions of the base: code that asks
# whether a class overrides a method gets the same answer.
# --------------------------------------------------------------------------------------------------


@one_per_class
def ported_class(cls: Any) -> Any:
    """Returns the class of ported modules of a class: itself where it is one of ours."""
    if is_ours(cls):
        return cls
    if cls in LAYER_OF:
        return LAYER_OF[cls]
    ported = stand_in(
        cls, {"_ported_from": cls, "__reduce__": _reduced}, layer_class(cls) or Module
    )
    install_boundaries(ported, is_port=True)
    copyreg.pickle(type(ported), _reduced_class)  # type: ignore[arg-type]
    return ported


def _reduced(module: Any) -> Any:
    return _empty, (type(module)._ported_from,), module.__getstate__()


def _empty(cls: type) -> Any:
    return object.__new__(ported_class(cls))


def _reduced_class(cls: Any) -> Any:
    """Reduces a class for pickle: one that was made for a port, or else one that is found by name.

    Graph definitions hold classes.
    """
    made_from = vars(cls).get("_ported_from")
    return cls.__qualname__ if made_from is None else (ported_class, (made_from,))


def _is_container(module: Any) -> bool:
    """Returns whether a module can't carry a policy, or has no methods that would obey one.

    A Dict reads every attribute as an item of it, and a linen module in a bridge as a variable.
    """
    held = isinstance(module, flax_nnx.Dict | flax_nnx.bridge.ToNNX)
    return held or type(module) is flax_nnx.List


def call_with_policy(
    fn: Any, args: tuple[Any, ...], policy: Policy, rules: PolicyRules
) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns a call of nnx modules as one of their copies by `apply_policy`; None without any."""

    def is_model(leaf: Any) -> bool:
        return isinstance(leaf, flax_nnx.Module)

    def ported(leaf: Any) -> Any:
        return apply_policy(leaf, policy, rules) if is_model(leaf) else leaf

    owner = getattr(fn, "__self__", None)
    if not any(map(is_model, jax.tree.leaves((fn, owner, args), is_leaf=is_model))):
        return None
    own = getattr(ported(owner), fn.__name__) if is_model(owner) else ported(fn)
    return own, jax.tree.map(ported, args, is_leaf=is_model)


PORTS.append(call_with_policy)
