"""The program of a call and of its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from policy.amp.parameters import parameters
from policy.names import make_jaxpr
from policy.tracing import Arguments, Lowered, Traced, lowered


def with_gradients(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Traces a call that returns what `fn` returns, and its gradients. See `audit` for by what, of what.

    The shape of the trace is that of what `fn` returns; the gradients come after it.

    Raises:
      ValueError: no argument, or no output, is floating.
    """
    call = lowered(fn, args, kwargs)
    if call is not None:
        fn, args, kwargs = call.pure, call.args, call.kwargs
    arguments = Arguments.of(args, kwargs)
    chosen = _chosen(fn, args, kwargs, arguments, is_pure_call=call is not None)
    has_state = call is not None and call.finish is not Lowered.finish  # it returns its new state beside its result

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
    return Traced(jaxpr, shape, arguments, None if call is not None else fn)


def _chosen(fn: Any, args: Any, kwargs: Any, arguments: Arguments, is_pure_call: bool) -> list[int]:
    """Returns the places of the arrays that gradients are taken by."""
    marks = parameters(fn, 0 if is_pure_call else None, args, kwargs)
    marks = [mark for mark, is_dynamic in zip(marks, arguments.is_array, strict=True) if is_dynamic]
    floating = [i for i, array in enumerate(arguments.arrays) if _is_floating(array)]
    chosen = [i for i in floating if marks[i]] or floating
    if not chosen:
        raise ValueError("backward=True differentiates by floating arguments, but the function is called with none.")
    return chosen


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
