"""Policies for built nnx models, ours or not: attributes are set, parameters cast, and methods made boundaries."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from mpmodules._port_options import OwnCode, PortOptions, may_be_set, not_a_model, port_options, spelled_as
from mpmodules.nnx._entries import is_container, layer_class, port_of
from mpmodules.nnx._obeying import LAYER_OF, is_ours, obeys_policies
from mpmodules.nnx._own_code import OwnCodeOf
from policy.casting import cast_floating
from policy.policy import Policy
from policy.precedence import Effective, with_explicit_dtypes
from policy.provenance import NO_SOURCE, Source
from policy.rules import Pattern, PolicyRules, name_of
from policy.scope import RulesLike, current_scope

M = TypeVar("M", bound=flax_nnx.Module)

# Classes of Flax's that stand in `LAYER_OF`, and are no layers: what they hold does the work.
_CALL_WHAT_THEY_HOLD = flax_nnx.Sequential, flax_nnx.Bidirectional, flax_nnx.RNNCellBase


def _effective(module: Any, policy: Policy | None, source: Source, options: PortOptions, *, where: str) -> Effective:
    """Returns the policy that a module is to obey, with its own dtype where that is kept."""
    if policy is None or not (_takes_dtypes(type(module)) and _has_dtypes(module)):
        return Effective(policy, policy, source)
    return with_explicit_dtypes(
        policy,
        source=source,
        dtype=_explicit_dtype(module) if options.keep_explicit else None,
        what=type(module).__name__,
        where=where,
    )


def _adopt(module: Any, policy: Policy, source: Source, options: PortOptions, *, is_root: bool) -> None:
    """Makes one built module obey `policy`: its methods, its dtype attributes and its own variables."""
    if is_container(module):
        _cast_variables(module, policy)
        return
    if not is_ours(type(module)):
        is_foreign = not _is_layer(type(module))
        _put_port(module, casts_outputs=options.cast_submodules and is_foreign and not is_root)
        if is_foreign or _calls_foreign_cell(module):
            module._own_code = OwnCodeOf(options.own_code)
        if is_foreign and options.dtype_fields:
            _set_dtype_fields(module, policy)
    _obey(module, policy, source)


def _calls_foreign_cell(module: Any) -> bool:
    """Returns whether a module is a loop over a recurrent cell that is none of Flax's or ours."""
    return isinstance(module, flax_nnx.RNN) and not (is_ours(type(module.cell)) or _is_layer(type(module.cell)))


@functools.cache
def _is_layer(cls: type) -> bool:
    """Returns whether a class is, or derives from, a layer of Flax's: one that does more than call what it holds."""
    ours = layer_class(cls)
    return ours is not None and ours._upstream_class not in _CALL_WHAT_THEY_HOLD


def _put_port(module: Any, *, casts_outputs: bool = False) -> None:
    """Makes a module of a class that is not ours one that carries a policy; its class stays."""
    port = port_of(type(module), casts_outputs)
    explicit = _explicit_dtype(module)
    module._policy_port = port
    if explicit is not None:
        module._explicit_dtype = explicit
    _replace_attention(module)


def _obey(module: Any, policy: Policy | None, source: Source) -> None:
    """Puts a policy on a module that can carry one."""
    if policy is not None:
        is_layer = _takes_dtypes(type(module)) and _has_dtypes(module)
        if is_layer and not any(_is_complex(dtype) for dtype in (module.dtype, module.param_dtype)):
            module.dtype = policy.compute_dtype
            module.param_dtype = policy.param_dtype
        _cast_variables(module, policy)
    if policy is not None or not hasattr(module, "dtype_policy") or module.dtype_policy is not None:
        module.dtype_policy = policy
        module._policy_source = NO_SOURCE if policy is None else source


def _cast_variables(module: Any, policy: Policy) -> None:
    for _, variable in _children(module):
        if isinstance(variable, flax_nnx.Param):
            variable.set_value(cast_floating(variable.get_value(), policy.param_dtype))
        elif isinstance(variable, flax_nnx.Cache):  # keys and values are written into it as they are computed
            variable.set_value(cast_floating(variable.get_value(), policy.compute_dtype))


def _set_dtype_fields(module: Any, policy: Policy) -> None:
    """Sets the dtype attributes of a module that is no layer to what the policy says."""
    for name, dtype in (("dtype", policy.compute_dtype), ("param_dtype", policy.param_dtype)):
        value = inspect.getattr_static(module, name, NotImplemented)
        if may_be_set(value):
            setattr(module, name, spelled_as(value, dtype))


def _has_dtypes(module: Any) -> bool:
    return hasattr(module, "dtype") and hasattr(module, "param_dtype")


@functools.cache
def _takes_dtypes(cls: type) -> bool:
    """Returns whether a class is, or derives from, a layer of Flax's that is built with `dtype` and `param_dtype`."""
    names = {"dtype", "param_dtype"}
    return any(names <= set(inspect.signature(base.__init__).parameters) for base in cls.__mro__ if base in LAYER_OF)


def _is_complex(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


def _explicit_dtype(module: Any) -> Any:
    """Returns the dtype that a layer was given, or None; Flax's Embed fills in its table's where it was given none."""
    if obeys_policies(module):
        return getattr(module, "_explicit_dtype", None)
    if not _takes_dtypes(type(module)):
        return None
    dtype, embedding = getattr(module, "dtype", None), getattr(module, "embedding", None)
    return None if embedding is not None and dtype == embedding.dtype else dtype


def _replace_attention(module: Any) -> None:
    if getattr(module, "attention_fn", None) is flax_nnx.dot_product_attention:
        from mpmodules.nnx._attention import dot_product_attention  # imported late: that file adopts with this one

        module.attention_fn = dot_product_attention


def adopt_children(module: Any, policy: Policy | None) -> None:
    """Makes the Flax layers that a layer of ours has just built obey its policy, and the class rules in force."""
    rules = current_scope().rules
    for path, child in flax_nnx.iter_modules(module):
        if not path or obeys_policies(child) or layer_class(type(child)) is None:
            continue
        rule = rules.rule_for(None, type(child)) if rules else None
        inherited = policy, module._policy_source.for_those_inside(type(module).__name__)
        if type(child) in LAYER_OF:  # nobody has seen it yet: it can become ours
            object.__setattr__(child, "__class__", LAYER_OF[type(child)])
            _replace_attention(child)
        else:
            _put_port(child)
        _obey(child, *(inherited if rule is None else _of_rule(rule)))
        cast(Any, child)._explicit_dtype = module._explicit_dtype  # the child was given what the policy says


def _children(node: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the modules and variables that a node holds, in lists, tuples and dicts too, and the keys to each."""
    held = vars(node)
    if getattr(node, "_pytree__is_pytree", False):
        held = {name: held[name] for name, is_data in node._pytree__nodes.items() if is_data and name in held}
    leaves = jax.tree_util.tree_leaves_with_path(held, is_leaf=_is_child)
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf)
        for path, leaf in leaves
        if _is_child(leaf)
    ]


def _is_child(x: Any) -> bool:
    return isinstance(x, flax_nnx.Pytree | flax_nnx.Variable)


def _paths(module: flax_nnx.Module) -> dict[tuple[str, ...], flax_nnx.Module]:
    """Returns every path to every module, shared ones included, from the root down."""
    found: dict[tuple[str, ...], flax_nnx.Module] = {}

    def visit(node: Any, path: tuple[str, ...], above: frozenset[int]) -> None:
        if isinstance(node, flax_nnx.Module):
            found[path] = node
        for keys, child in _children(node):
            if not isinstance(child, flax_nnx.Variable) and id(child) not in above:  # a cycle ends where it closes
                visit(child, (*path, *keys), above | {id(child)})

    visit(module, (), frozenset({id(module)}))
    return {path: found[path] for path in sorted(found, key=len)}


def apply_policy(
    model: M,
    policy: Policy | str,
    rules: RulesLike | None = None,
    *,
    keep_explicit: bool = False,
    dtype_fields: bool = False,
    cast_submodules: bool = False,
    own_code: OwnCode = None,
) -> M:
    """Puts a built nnx model under a policy and rules, in place, and returns it.

    Every layer obeys the policy, or the first rule that matches its path or class, or a rule that holds above it; a
    submodule that was built with its own `dtype_policy=` keeps that. A module that is shared obeys the first rule that
    matches one of its paths. Floating parameters are cast to param_dtype and decoding caches to compute_dtype,
    statistics are not. Public methods of Flax's modules, and of classes derived from them, become boundaries; Flax's
    layers run as ours do. Modules keep their classes: methods are wrapped in the class that defines them, once, and
    behave as before for other instances.

    Args:
      model: an nnx module, Flax's own or ours.
      policy: a Policy or its text form.
      rules: `PolicyRules` or an argument for them. A module's path is the names of the attributes and the indices
        that lead to it, joined by ``/``.
      keep_explicit: whether an explicit `dtype` of a layer, Flax's or ours, holds against the policy. A param_dtype
        can't be told from the default and never does.
      dtype_fields: whether to set the attributes `dtype` and `param_dtype` of modules that are neither ours nor layers
        of Flax's to compute_dtype and param_dtype, for models that hand ``self.dtype`` on to functions and casts. An
        attribute that holds a floating dtype or None is set, to a name, a scalar type or a `np.dtype` as it was.
      cast_submodules: whether the floating outputs of modules below the root that are neither ours nor layers of
        Flax's (its `Sequential` and `Bidirectional` are none) are cast to the compute_dtype of the module that calls
        them, so that branches in float32 and in half meet in one dtype. A cell's carry keeps the dtype that it was
        given in.
      own_code: what happens to matmuls and convolutions that no layer makes. "autocast": the model's own code runs
        under `policy.autocast`, traced in float32, by the policies that hold at each module; layers run as layers.
        "keep": it runs in the dtypes that it meets. None: under autocast where there are such matmuls, of which
        a warning tells once, and where the code adds up rows or computes exponentials, logarithms or roots, which half
        precision can't bear. As "keep" beside the three options above.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: a rule matches nothing (the paths are listed), the policy or rules are malformed, `own_code` is none
        of the above, or options contradict each other. The model is then as it was.
    """
    if not isinstance(model, flax_nnx.Module):
        raise not_a_model(model, "an nnx module", other="mpmodules.linen")
    options = port_options(
        policy,
        rules,
        keep_explicit=keep_explicit,
        dtype_fields=dtype_fields,
        cast_submodules=cast_submodules,
        own_code=own_code,
    )
    rules = options.rules or PolicyRules()
    paths = _paths(model)
    model_name = type(model).__name__
    rules.check({"/".join(path): type(module) for path, module in paths.items()}, model=model_name)
    holding: dict[tuple[str, ...], tuple[Policy, Source]] = {}  # what the modules below each inherit
    plan: dict[int, tuple[Any, Effective]] = {}
    for path, module in paths.items():
        where = "/".join(path) or type(module).__name__
        held, source = _carried(module, path, rules, model_name) or (
            next(holding[path[:n]] for n in range(len(path) - 1, -1, -1) if path[:n] in holding)
            if path
            else (options.policy, Source("argument", "apply_policy", own=True))
        )
        holding[path] = held, source.for_those_inside(where)
        planned = plan.get(id(module))
        if planned is None or (source.own and source.kind == "rule" and not planned[1].own):
            plan[id(module)] = module, _effective(module, held, source, options, where=where)
    for module, effective in plan.values():
        _adopt(module, cast(Policy, effective.policy), effective.source, options, is_root=module is model)
    return model


def _carried(module: Any, path: tuple[str, ...], rules: PolicyRules, model: str) -> tuple[Any, Source] | None:
    """Returns the policy of a module below the root, from its own `dtype_policy=` or else a rule, and its source."""
    source: Source = getattr(module, "_policy_source", NO_SOURCE)
    if path and source.own and source.kind == "argument":
        return module.dtype_policy, source
    rule = rules.rule_for("/".join(path), type(module), model=model)
    return None if rule is None else _of_rule(rule)


def _of_rule(rule: tuple[Pattern, Policy]) -> tuple[Policy, Source]:
    return rule[1], Source("rule", name_of(rule[0]), own=True)
