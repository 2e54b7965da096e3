"""The program of a call and of its gradients, shared by all inspection tools."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from policy.autocasting.parameters import ParamsArgument, parameters, require_params
from policy.programs.frameworks import FRAMEWORKS, make_jaxpr
from policy.programs.tracing.trace import Arguments, Lowered, Traced, is_array, lowered

Around = Callable[[Callable[..., Any], ParamsArgument], Callable[..., Any]]


def as_it_is(fn: Callable[..., Any], params: ParamsArgument) -> Callable[..., Any]:
    """Returns a function without a wrapper."""
    return fn


@dataclasses.dataclass(frozen=True)
class PlainCall:
    """A call of any function or module as one of a function of its arguments alone.

    Attributes:
      fn: the function.
      arguments: the arguments of the call.
      params: the arguments that are parameters, in autocast's form: 0 for a lowered call.
      lowered: the call of a pure function that it was lowered to, or None.
    """

    fn: Callable[..., Any]
    arguments: Arguments
    params: ParamsArgument
    lowered: Lowered | None

    @classmethod
    def of(
        cls, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: ParamsArgument
    ) -> PlainCall:
        """Returns a call in this form.

        Raises:
          TypeError: `params` is neither positions or names of arguments nor a predicate.
          ValueError: `params` names arguments of a call of modules, which hold their parameters
            themselves.
        """
        require_params(params)
        call = lowered(fn, args, kwargs)
        if call is None:
            return PlainCall(fn, Arguments.of(args, kwargs), params, None)
        if params is not None and not callable(params):
            raise ValueError(
                f"params={params!r} names arguments, but here the parameters are held by the "
                "function or its modules. Leave params out, or give a predicate on leaves."
            )
        params = 0 if params is None else params
        return PlainCall(call.pure, Arguments.of(call.args, call.kwargs), params, call)

    def differentiated(self) -> list[int]:
        """Returns the positions, among the arrays of the call, of those to differentiate by.

        They are the floating leaves of the parameters, or of all arguments if no parameter is
        floating. Without an explicit `params`, variables that a library declares to be no
        parameters (running statistics) are left out.
        """
        args, kwargs = self.arguments.filled(self.arguments.arrays)
        every = zip(
            parameters(self.fn, self.params, args, kwargs), self.arguments.is_array, strict=True
        )
        marks = [mark for mark, is_one in every if is_one]
        excluded = _no_parameters(args, kwargs) if self.params is None else [False] * len(marks)
        arrays = zip(self.arguments.arrays, excluded, strict=True)
        floating = [
            i for i, (array, is_out) in enumerate(arrays) if _is_floating(array) and not is_out
        ]
        return [i for i in floating if marks[i]] or floating

    def traced(
        self, floats: Callable[[Any], list[Any]] | None = None, around: Around = as_it_is
    ) -> tuple[Any, Any, int]:
        """Returns the program of the call, the shape of its result, and the number of gradients.

        Gradients come after the result.

        Args:
          floats: returns what to differentiate of a result; its cotangents are ones. None: there
            are no gradients.
          around: wraps the function, given the arguments that are parameters.

        Raises:
          ValueError: no argument is floating.
        """
        fn, chosen = around(self.fn, self.params), [] if floats is None else self.differentiated()
        if floats is not None and not chosen:
            raise ValueError(
                "backward=True differentiates with respect to floating arguments, but the function "
                "is called with none."
            )

        def plain(*arrays: Any) -> tuple[Any, Sequence[Any]]:
            args, kwargs = self.arguments.filled(arrays)
            return fn(*args, **kwargs), ()

        # JAX's errors name the function
        plain.__name__ = getattr(self.fn, "__name__", type(self.fn).__name__)
        both = plain if floats is None else _with_gradients(plain, chosen, floats)
        jaxpr, (shape, _) = make_jaxpr(both, return_shape=True)(*self.arguments.arrays)
        return jaxpr, shape, len(chosen)


def _with_gradients(
    plain: Callable[..., Any], chosen: Sequence[int], floats: Callable[[Any], list[Any]]
) -> Callable[..., tuple[Any, Sequence[Any]]]:
    def both(*arrays: Any) -> tuple[Any, Sequence[Any]]:
        def of_chosen(*values: Any) -> tuple[list[Any], Any]:
            given = dict(zip(chosen, values, strict=True))
            out, _ = plain(*(given.get(i, array) for i, array in enumerate(arrays)))
            return floats(out), out

        found, backward, out = jax.vjp(of_chosen, *(arrays[i] for i in chosen), has_aux=True)
        return out, backward([jnp.ones_like(leaf) for leaf in found])

    return both


def _no_parameters(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
    """Returns, for each array of a call, whether it is in a node that holds no parameter."""
    excludes = lambda node: any(each.is_no_parameter(node) for each in FRAMEWORKS)  # noqa: E731
    nodes = jax.tree.leaves((args, kwargs), is_leaf=excludes)
    return [excludes(node) for node in nodes for leaf in jax.tree.leaves(node) if is_array(leaf)]


def traced_call(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backward: bool,
    params: ParamsArgument,
    around: Around = as_it_is,
) -> Traced:
    """Traces a call, and with `backward` its gradients too.

    See `audit` for the differentiated inputs and outputs. The shape of the trace is that of `fn`'s
    result; the gradients come after it.

    Args:
      around: wraps the traced function of arrays, given the arguments that are parameters.

    Raises:
      TypeError: `params` doesn't select arguments.
      ValueError: `params` without `backward`; no argument, or no output, is floating.
    """
    if params is not None and not backward:
        raise ValueError(
            f"params={params!r} selects the arguments to differentiate, so it needs backward=True."
        )
    call = PlainCall.of(fn, args, kwargs, params)
    jaxpr, shape, _ = call.traced(functools.partial(_floats, call) if backward else None, around)
    return Traced(jaxpr, shape, call.arguments, None if call.lowered else fn)


def _floats(call: PlainCall, out: Any) -> list[Any]:
    """Returns the differentiated leaves of a result.

    Raises:
      ValueError: there are none.
    """
    primary = _primary(out if call.lowered is None else call.lowered.result(out))
    found = [leaf for leaf in jax.tree.leaves(primary) if _is_floating(leaf)]
    if not found:
        raise ValueError(
            "backward=True differentiates floating outputs, but the function returns none."
        )
    return found


def _primary(out: Any) -> Any:
    """Returns the differentiated part of an output: the first of (loss or array, aux), or all."""
    if isinstance(out, tuple) and len(out) == 2:
        first, second = out
        is_loss = _is_floating(first) and not jnp.shape(first)
        if is_loss or (_is_floating(first) and isinstance(second, Mapping)):
            return first
    return out


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
