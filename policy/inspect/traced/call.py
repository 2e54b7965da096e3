"""Traces a user's call, with its gradients and under a policy, for all inspection tools."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from policy.autocasting.parameters import ParamsArgument, parameters, require_params
from policy.autocasting.transform import autocast
from policy.core.dtypes import INT8
from policy.core.messages import DtypePolicyWarning, require_function
from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules, RulesLike, as_rules
from policy.core.scope import is_unread, require_usable, use_policy
from policy.inspect.traced.authors import source_of
from policy.inspect.traced.float32 import drawn_in_half, in_float32, reference_of, wide_arguments
from policy.inspect.traced.matmul_operands import NO_CODES, Codes, codes_of
from policy.inspect.traced.placed import NO_REFERENCE, Reference
from policy.inspect.traced.program_facts import maker_of
from policy.inspect.traced.upcast import dtype_of, dtypes_of
from policy.programs.dtypes import holds_half, is_half
from policy.programs.frameworks import FRAMEWORKS, make_jaxpr
from policy.programs.jaxprs import opened
from policy.programs.primitives import MATMULS
from policy.programs.reading.walk import walk
from policy.programs.tracing.pure_calls import Arguments, is_array
from policy.programs.tracing.trace import (
    Lowered,
    Traced,
    function_name,
    lowered,
    trace,
    with_static,
    without_static,
)

Route = Literal["as written", "scope", "autocast"]
# Without this option XLA may leave out roundings.
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of any function or module as one of a function of its arguments alone.

    Attributes:
      fn: the function.
      arguments: the arguments of the call.
      params: the arguments that are parameters, in autocast's form: 0 for a lowered call.
      lowered: the call of a pure function that it was lowered to, or None.
      loss_scale: the factor of the loss before `under` differentiates it; None for no gradients.
    """

    fn: Callable[..., Any]
    arguments: Arguments
    params: ParamsArgument
    lowered: Lowered | None
    loss_scale: float | None = None

    @classmethod
    def of(
        cls, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: ParamsArgument
    ) -> Call:
        """Returns a call in this form.

        Raises:
          TypeError: `params` is neither positions or names of arguments nor a predicate.
          ValueError: `params` names arguments of a call of modules, which hold their parameters
            themselves.
        """
        require_params(params)
        call = lowered(fn, args, kwargs)
        if call is None:
            return Call(fn, Arguments.of(args, kwargs), params, None)
        if params is not None and not callable(params):
            raise ValueError(
                f"params={params!r} names arguments, but here the parameters are held by the "
                "function or its modules. Leave params out, or give a predicate on leaves."
            )
        params = 0 if params is None else params
        return Call(call.pure, Arguments.of(call.args, call.kwargs), params, call)

    @classmethod
    def measured(
        cls, what: str, fn: Any, args: Any, kwargs: Any, params: ParamsArgument, scale: float | None
    ) -> Call:
        """Returns the call of any function or module, for a tool `what` that runs it.

        `scale` is its loss scale. A lowered call returns the function's result without its new
        state, which is not measured.

        Raises:
          TypeError: `fn` is not a function; it is called without arrays, or with shapes; or
            `params` doesn't select arguments.
          ValueError: `params` names arguments of a call of modules.
        """
        require_function(fn, what)
        call = cls.of(fn, args, kwargs, params)
        if not call.arguments.arrays:
            raise TypeError(
                f"{what} measures a call on arrays, but its arguments contain no array."
            )
        for name, array in zip(call.arguments.names(), call.arguments.arrays, strict=True):
            if isinstance(array, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{what} runs the function, but {name} is a shape, "
                    f"{array.dtype.name}{list(array.shape)}: give an array. policy.audit takes "
                    "shapes."
                )
        of = call.lowered
        measured = call.fn if of is None else _returning(call.fn, of.result)
        return dataclasses.replace(call, fn=measured, loss_scale=scale)

    def differentiated(self) -> list[int]:
        """Returns the positions, among the arrays of the call, of those to differentiate by.

        They are the floating leaves of the parameters, or of all arguments if no parameter is
        floating. Without an explicit `params`, variables that a library declares to be no
        parameters (running statistics) are left out.
        """
        args, kwargs = self.arguments.filled(self.arguments.arrays)
        leaves = parameters(self.fn, self.params, args, kwargs)
        marks = list(itertools.compress(leaves, self.arguments.is_array))
        floating = [i for i, array in enumerate(self.arguments.arrays) if _is_floating(array)]
        if self.params is None:
            excluded = _no_parameters(args, kwargs)
            floating = [i for i in floating if not excluded[i]]
        return [i for i in floating if marks[i]] or floating

    def traced(self, floats: Callable[[Any], list[Any]] | None = None) -> tuple[Any, Any]:
        """Returns the program of the call, and the shape of its result.

        Gradients come after the result.

        Args:
          floats: returns what to differentiate of a result; its cotangents are ones. None: there
            are no gradients.

        Raises:
          ValueError: no argument is floating.
        """
        arrays = self.arguments.arrays
        chosen = [] if floats is None else self.differentiated()
        if floats is not None and not chosen:
            raise ValueError(
                "backward=True differentiates with respect to floating arguments, but the function "
                "is called with none."
            )

        def plain(*arrays: Any) -> Any:
            args, kwargs = self.arguments.filled(arrays)
            return with_static(self.fn(*args, **kwargs))

        # JAX's errors name the function
        plain.__name__ = function_name(self.fn)
        if floats is None:
            return make_jaxpr(plain, return_shape=True)(*arrays)
        both = _with_gradients(plain, chosen, floats)
        jaxpr, (shape, _) = make_jaxpr(both, return_shape=True)(*arrays)
        return jaxpr, shape

    def traced_under(
        self,
        floats: Callable[[Any], list[Any]] | None,
        policy: Policy | None,
        rules: PolicyRules | None,
        route: Route | None = None,
    ) -> tuple[Any, Any, Route]:
        """Returns the program of the call under a policy, the shape of its result, and how the
        policy is applied; see `traced`.

        A policy of half precision is applied by its scope, or, where that makes no matmul half
        precision, by autocast. None traces the program as it is written.

        Args:
          floats: as in `traced`.
          policy, rules: what to trace under.
          route: "scope" or "autocast", where that is known.
        """
        if policy is None:
            return *self.traced(floats), "as written"
        fn = self.fn
        if route != "autocast":
            # Where nothing reads the policy, the program is the one that autocast traces first.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", DtypePolicyWarning)
                with use_policy(policy, rules):
                    jaxpr, shape = self.traced(floats)
                    is_same = floats is None and is_unread()
            is_float32 = is_half(policy.compute_dtype) and not _multiplies_in_half(jaxpr)
            if route == "scope" or not is_float32:
                for warning in caught:
                    warnings.warn(warning.message, warning.category, stacklevel=5)
                return jaxpr, shape, "scope"
            fn = _replayed(fn, jaxpr, shape) if is_same else fn
        fn = autocast(fn, policy, params=self.params, rules=rules)
        return *dataclasses.replace(self, fn=fn).traced(floats), "autocast"

    def under(
        self, policy: Policy | None, rules: PolicyRules | None = None, route: Route | None = None
    ) -> Program:
        """Returns the program of the call, under a policy if there is one; see `traced_under`."""
        floats = None if self.loss_scale is None else self._scaled_loss
        jaxpr, shape, route = self.traced_under(floats, policy, rules, route)
        names = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(shape)]
        inputs = input_paths(self.arguments, self.lowered is not None)
        gradients = [] if floats is None else [inputs[i] for i in self.differentiated()]
        return Program(jaxpr, self.arguments, tuple(names), tuple(gradients), route)

    def _scaled_loss(self, out: Any) -> list[Any]:
        return [_loss(out).astype(jnp.float32) * self.loss_scale]

    def floating_results(self, out: Any) -> list[Any]:
        """Returns the leaves of a result that `audit` differentiates.

        Raises:
          ValueError: there are none.
        """
        primary = _primary(out if self.lowered is None else self.lowered.result(out))
        found = [leaf for leaf in jax.tree.leaves(primary) if _is_floating(leaf)]
        if not found:
            raise ValueError(
                "backward=True differentiates floating outputs, but the function returns none."
            )
        return found


def _returning(pure: Callable[..., Any], result: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the function without the new state, which is no output to measure."""
    return lambda *args, **kwargs: result(pure(*args, **kwargs))


def _with_gradients(
    plain: Callable[..., Any], chosen: Sequence[int], floats: Callable[[Any], list[Any]]
) -> Callable[..., tuple[Any, Sequence[Any]]]:
    def both(*arrays: Any) -> tuple[Any, Sequence[Any]]:
        def of_chosen(*values: Any) -> tuple[list[Any], Any]:
            given = dict(zip(chosen, values, strict=True))
            out = plain(*(given.get(i, array) for i, array in enumerate(arrays)))
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
    policy: Policy | None = None,
    rules: PolicyRules | None = None,
    route: Route | None = None,
) -> tuple[Traced, Route]:
    """Traces a call, and with `backward` its gradients too; and returns how a policy is applied.

    See `audit` for the differentiated inputs and outputs, and `Call.traced_under`. The shape of the
    trace is that of `fn`'s result; the gradients come after it.

    Raises:
      TypeError: `params` doesn't select arguments.
      ValueError: `params` without `backward`; no argument, or no output, is floating.
    """
    if params is not None and not backward:
        raise ValueError(
            f"params={params!r} selects the arguments to differentiate, so it needs backward=True."
        )

    call = Call.of(fn, args, kwargs, params)
    floats = call.floating_results if backward else None
    jaxpr, shape, route = call.traced_under(floats, policy, rules, route)
    return Traced(jaxpr, shape, call.arguments, None if call.lowered else fn), route


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


# --------------------------------------------------------------------------------------------------
# Under a policy
# --------------------------------------------------------------------------------------------------


def _replayed(fn: Callable[..., Any], jaxpr: Any, shape: Any) -> Callable[..., Any]:
    """Returns a function that runs the program of `fn` on arrays of its types, and else `fn`."""

    @functools.wraps(fn, updated=())
    def replayed(*args: Any, **kwargs: Any) -> Any:
        arrays = Arguments.of(args, kwargs).arrays
        if list(map(jax.typeof, arrays)) != list(jaxpr.in_avals):
            return fn(*args, **kwargs)
        results = jex_core.jaxpr_as_fun(jaxpr)(*arrays)
        return without_static(jax.tree.unflatten(jax.tree.structure(shape), results))

    return replayed


def _multiplies_in_half(jaxpr: Any) -> bool:
    """Returns whether a program has a matmul or convolution of half operands, or of 8-bit ones."""
    matmuls = (site.equation for site in walk(jaxpr) if site.name in MATMULS)
    operands = (atom for equation in matmuls for atom in equation.invars)
    return any(holds_half(atom.aval) or dtype_of(atom) == INT8 for atom in operands)


# --------------------------------------------------------------------------------------------------
# Programs on arrays, to run beside float32
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A call as a program of its arrays.

    Attributes:
      jaxpr: the closed jaxpr.
      arguments: the arguments of the call.
      outputs: the name of each output.
      gradients: the name of each gradient, which come after the outputs.
      route: the origin of its half precision: as it is written, by the scope of a policy, or by
        autocast.
      reference: its differences from the function in float32.
      rejected: the reason why the function can't be traced in float32; "" if it can.
      codes: its casts to 8 bits.
    """

    jaxpr: Any
    arguments: Arguments
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    route: Route = "as written"
    reference: Reference = NO_REFERENCE
    rejected: str = ""
    codes: Codes = NO_CODES

    def note_on_draws(self) -> str:
        """Returns a sentence on the random numbers that it draws in half precision; "" for none."""
        if not (dtypes := drawn_in_half(self.jaxpr)):
            return ""
        return (
            f"Random numbers are drawn in {' and '.join(dtypes)}, and the reference is given the "
            "same ones: no error shows what their few values change. Draw in float32 where it "
            "matters, as for rare events and for ranks."
        )

    def compiled(self, run: Callable[..., Any], *before: Any) -> Any:
        """Compiles a function of `before` and of the program's arrays, with all its roundings."""
        staged = jax.jit(run).lower(*before, *self.arguments.arrays)
        return staged.compile(compiler_options=COMPILER_OPTIONS)


def _loss(out: Any) -> Any:
    """Returns the loss from a function's result: all of it, or the first of a tuple.

    Raises:
      TypeError: it is not a floating scalar.
    """
    loss = out
    while isinstance(loss, tuple) and loss:
        loss = loss[0]
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        found = type(loss).__name__ if dtype is None else f"{dtype.name}{list(shape or ())}"
        raise TypeError(
            "backward=True differentiates a loss: the function should return a floating scalar, or "
            f"(loss, aux), but returned {found}. Return the loss, or leave out backward=True."
        )
    return loss


# flax.nnx hands in state: by the module, or the place of the argument that it is of; its numbers
# are their `value`.
_OF_STATE = re.compile(r"\A(?:0|1/\d+)/(.+?)(?:/value)?\Z")


def input_paths(arguments: Arguments, is_lowered: bool) -> list[str]:
    """Returns each array's path: ``params/Dense_0/kernel``, or ``args[1]`` for a bare array.

    Args:
      arguments: of a call.
      is_lowered: whether their first are the state of modules.
    """
    tree = jax.tree.unflatten(arguments.treedef, list(arguments.is_array))
    keys = [path for path, dynamic in jax.tree_util.tree_leaves_with_path(tree) if dynamic]
    paths = [
        leaf_path(path[2:]) or name for path, name in zip(keys, arguments.names(), strict=True)
    ]
    short = [_OF_STATE.sub(r"\1", path) for path in paths]
    return short if is_lowered and len(set(short)) == len(set(paths)) else paths


def leaf_path(path: Any) -> str:
    """Returns the path of a leaf, its keys joined by ``/``; "" for the tree itself."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def checked_policy(policy: Policy | str | None) -> Policy | None:
    """Returns the policy, parsed from its text form if needed.

    Raises:
      TypeError, ValueError: it is not a policy, or can't be honored here.
    """
    return None if policy is None else require_usable(get_policy(policy))


def checked_rules(rules: RulesLike | None, policy: Policy | str | None) -> PolicyRules | None:
    """Returns the rules as `PolicyRules`.

    Raises:
      TypeError, ValueError: they are malformed, or given without a policy.
    """
    if rules is not None and policy is None:
        raise ValueError(
            "rules= makes exceptions to a policy, but policy= is missing: pass it too, such as "
            "policy='mixed_bfloat16'."
        )
    return as_rules(rules)


def program_of(call: Call, policy: Policy | None, rules: PolicyRules | None = None) -> Program:
    """Returns the program under a policy, with its differences from the function in float32.

    It is the program of the layers that obey the policy's scope, or else autocast's. Code that
    names a half dtype explicitly may have no float32 trace; any exception of that becomes
    `rejected`.

    Args:
      call: the call to trace.
      policy: None for the program as it is written.
      rules: the rules beside the policy.
    """
    program = call.under(policy, rules)
    codes = codes_of(program.jaxpr, call.differentiated())
    program = dataclasses.replace(program, codes=codes)
    if not any(map(is_half, dtypes_of(opened(program.jaxpr)[0]))):
        return program  # already float32
    arguments = dataclasses.replace(call.arguments, arrays=wide_arguments(call.arguments.arrays))
    wide, rejected = None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wide_call = dataclasses.replace(call, fn=in_float32(call.fn), arguments=arguments)
            wide = wide_call.under(None)
    except Exception as error:
        rejected = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    reference = reference_of(program.jaxpr, None if wide is None else wide.jaxpr)
    return dataclasses.replace(program, reference=reference, rejected=rejected)


def short_text(policy: Policy) -> str:
    """Returns the policy's preset name, or its text form if it has none."""
    return _preset_names().get(policy, str(policy))


@functools.cache
def _preset_names() -> dict[Policy, str]:
    names = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
    return {get_policy(name): name for name in (*names, "mixed_float8", "mixed_int8")}


# --------------------------------------------------------------------------------------------------
# Dtypes of parameters
# --------------------------------------------------------------------------------------------------


def parameters_of(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: int, returned: int, keeps: bool
) -> tuple[dict[str, str], dict[str, tuple[int, str]], Any]:
    """Returns incoming dtypes by name, outgoing places and dtypes by name, and the program.

    Unless `keeps`, the outgoing parameters stand for the incoming ones.
    """
    call, traced = lowered(fn, args, kwargs), trace(fn, *args, **kwargs)
    dtypes = [str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(traced.shape)]
    places = jax.tree.unflatten(jax.tree.structure(traced.shape), range(len(dtypes)))
    # modules, whose state is handed in and out
    has_state = call is not None and call.finish is not type(call).finish
    if has_state or isinstance(places, tuple):
        places = places[1 if has_state else returned]
    after = {name: (place, dtypes[place]) for name, place in _named(places)}
    if not (has_state or keeps):
        return {name: dtype for name, (_, dtype) in after.items()}, after, traced.jaxpr
    given = args[params] if call is None or not has_state else call.args[0]
    return {name: str(jnp.result_type(leaf)) for name, leaf in _named(given)}, after, traced.jaxpr


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a tree with their paths."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path) or "the parameter", leaf


def origin_of(jaxpr: Any, place: int) -> str:
    """Returns the operation that makes a program's output, and its source line."""
    equation = maker_of(jaxpr, place)
    if equation is None:
        return "an argument"
    return f"{equation.primitive.name}, {source_of(equation) or 'source line unknown'}"
