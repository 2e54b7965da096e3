"""The program of a call and of its gradients, and what gradients are taken by: one rule for all inspection tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from policy._jaxpr.module_names import make_jaxpr
from policy._jaxpr.trace import Arguments, Lowered, Traced, is_array, lowered, traced_around
from policy.parameters import Params, parameters, require_params

# How libraries tell that a node of a tree holds an array that is no parameter, as nnx's BatchStat does.
NO_PARAMETERS: list[Callable[[Any], bool]] = []


def require_differentiable_by(params: Params) -> None:
    """Checks the argument `params` of an inspection tool.

    Raises:
      TypeError: it is neither positions or names of arguments nor a predicate.
    """
    try:
        require_params(params)
    except TypeError:
        raise TypeError(
            "params should say which arguments are parameters: positions, names, or a predicate on leaves, but got a "
            f"{type(params).__name__}. If the function has an argument of that name, hand it in by position, or call "
            "the function in a lambda."
        ) from None


def places_of_parameters(
    fn: Any, params: Params, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments
) -> list[int]:
    """Returns the places, among the arrays of a call, of those that gradients are taken by.

    They are the floating leaves of the parameters, or, where none of these is floating, of all arguments. Where nobody
    said which arguments are parameters, variables that a library tells to be none (running statistics) are left out.

    Args:
      fn: a function of its arguments alone.
      params: which arguments are parameters, as autocast takes it: 0 for a call that was lowered.
      args, kwargs: what it is called with.
      arguments: the same, apart.
    """
    marks = [m for m, is_one in zip(parameters(fn, params, args, kwargs), arguments.is_array, strict=True) if is_one]
    excluded = _no_parameters(args, kwargs) if params is None else [False] * len(marks)
    floating = [i for i, array in enumerate(arguments.arrays) if _is_floating(array) and not excluded[i]]
    return [i for i in floating if marks[i]] or floating


def _no_parameters(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
    """Returns which arrays of a call are in nodes that hold no parameter."""
    excludes = lambda node: any(is_none(node) for is_none in NO_PARAMETERS)  # noqa: E731
    nodes = jax.tree.leaves((args, kwargs), is_leaf=excludes)
    return [excludes(node) for node in nodes for leaf in jax.tree.leaves(node) if is_array(leaf)]


def explicit_or_lowered(params: Params, call: Lowered | None) -> Params:
    """Returns which arguments of a call, or of what it was lowered to, are parameters.

    Raises:
      TypeError: as `require_differentiable_by` does.
      ValueError: `params` names arguments of a call of modules, which hold their parameters themselves.
    """
    require_differentiable_by(params)
    if call is None or callable(params):
        return params
    if params is not None:
        raise ValueError(
            f"params={params!r} names arguments, but the parameters are those that the function or its modules hold. "
            "Leave params out, or give a predicate on leaves."
        )
    return 0


Around = Callable[[Callable[..., Any], Params], Callable[..., Any]]


def traced_call(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backward: bool,
    params: Params,
    around: Around = lambda fn, params: fn,
) -> Traced:
    """Traces a call, and with `backward` its gradients too. See `audit` for by what, of what.

    The shape of the trace is that of what `fn` returns; the gradients come after it.

    Args:
      around: makes another function of the function of arrays that is traced, and of which arguments are parameters.

    Raises:
      TypeError: `params` is of no kind that says which arguments are parameters.
      ValueError: `params` without `backward`; no argument, or no output, is floating.
    """
    if backward:
        return _with_gradients(fn, args, kwargs, params, around)
    require_differentiable_by(params)
    if params is not None:
        raise ValueError(f"params={params!r} says what gradients are taken by: give backward=True with it.")
    return traced_around(fn, args, kwargs, lambda pure, is_lowered: around(pure, 0 if is_lowered else None))


def _with_gradients(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: Params, around: Around) -> Traced:
    call = lowered(fn, args, kwargs)
    params = explicit_or_lowered(params, call)
    if call is not None:
        fn, args, kwargs = call.pure, call.args, call.kwargs
    arguments = Arguments.of(args, kwargs)
    chosen = places_of_parameters(fn, params, args, kwargs, arguments)
    if not chosen:
        raise ValueError("backward=True differentiates by floating arguments, but the function is called with none.")
    has_state = call is not None and call.finish is not Lowered.finish  # it returns its new state beside its result
    called, fn = fn, around(fn, params)

    def both(*arrays: Any) -> Any:
        def of_chosen(*values: Any) -> Any:
            given = dict(zip(chosen, values, strict=True))
            new_args, new_kwargs = arguments.filled([given.get(i, array) for i, array in enumerate(arrays)])
            out = fn(*new_args, **new_kwargs)
            primary = _primary(out[0] if has_state else out)
            floats = [leaf for leaf in jax.tree.leaves(primary) if _is_floating(leaf)]
            return floats, out

        floats, backward, out = jax.vjp(of_chosen, *(arrays[i] for i in chosen), has_aux=True)
        if not floats:
            raise ValueError("backward=True differentiates floating outputs, but the function returns none.")
        return out, backward([jnp.ones_like(leaf) for leaf in floats])

    jaxpr, (shape, _) = make_jaxpr(both, return_shape=True)(*arguments.arrays)
    return Traced(jaxpr, shape, arguments, None if call is not None else called)


def _primary(out: Any) -> Any:
    """Returns the differentiated part of an output: the first of a pair of a loss, or an array, and anything."""
    if isinstance(out, tuple) and len(out) == 2:
        first, second = out
        is_loss = _is_floating(first) and not jnp.shape(first)
        if is_loss or (_is_floating(first) and isinstance(second, Mapping)):
            return first
    return out


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
