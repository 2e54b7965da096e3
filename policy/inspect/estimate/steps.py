"""The rows of an estimate, and the step of each: a user's call, made and traced under a policy."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import require_function
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.core.scope import use_policy
from policy.inspect.traced.call import Route, checked_policy, input_paths, short_text, traced_call
from policy.inspect.traced.program_facts import donated_inputs
from policy.programs.frameworks import FRAMEWORKS
from policy.programs.tracing.pure_calls import is_array
from policy.programs.tracing.trace import Traced, function_name, lowered, origins_of

RowLike = Policy | str | None | tuple[Policy | str | None, Mapping[str, Any]]


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A row to estimate.

    Attributes:
      name: its name in the table.
      policy: the policy to trace under; None for the policy in force.
      options: keyword arguments of the example.
      remat: the name of the checkpoint policy among the options; "" if a search gave none.
      mesh: the axes of the mesh and their sizes; None for those of the arguments.
    """

    name: str
    policy: Policy | None
    options: Mapping[str, Any]
    remat: str = ""
    mesh: Mapping[str, int] | None = None

    @property
    def policy_text(self) -> str:
        return "" if self.policy is None else short_text(self.policy)

    @property
    def batch(self) -> int | None:
        """The number of examples of a step, if the options have it."""
        batch = self.options.get("batch")
        return batch if type(batch) is int else None


def rows_of(
    policies: Sequence[RowLike] | Mapping[str, RowLike] | Policy | str,
) -> tuple[Candidate, ...]:
    """Returns the rows that `policies` asks for.

    Raises:
      TypeError: there are no rows, or an item is neither a policy nor a pair of a policy and a
        mapping.
      ValueError: two rows have one name; a text is no policy.
    """
    if isinstance(policies, (Policy, str)):
        policies = (policies,)
    if not isinstance(policies, (list, tuple, Mapping)) or not policies:
        raise TypeError(
            "policies should be a sequence of policies, or a mapping from names to them, such as "
            f"('float32', 'mixed_bfloat16'), but got {policies!r}."
        )
    items = policies.items() if isinstance(policies, Mapping) else ((None, p) for p in policies)
    found: dict[str, Candidate] = {}
    for name, item in items:
        given, options = item if isinstance(item, tuple) and len(item) == 2 else (item, {})
        if isinstance(given, tuple) or not isinstance(options, Mapping):
            raise TypeError(
                "An item of policies should be a policy, or a pair of a policy and a dict of "
                "options, as in ('bfloat16', {'master_weights': 'remainder'}), but got "
                f"{item!r}."
            )
        policy = checked_policy(given)
        if name is None:
            text = "as written" if policy is None else short_text(policy)
            name = ", ".join([text, *(f"{key}={value}" for key, value in options.items())])
        if name in found:
            raise ValueError(
                f"Two rows are named {name!r}: drop one, or give policies as a mapping from names."
            )
        found[name] = Candidate(name, policy, dict(options))
    return tuple(found.values())


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MadeCall:
    """A function and its arguments under one policy.

    Attributes:
      fn: the function.
      args, kwargs: its arguments; arrays may be shapes.
      is_made: whether any of it was made under the policy.
    """

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_made: bool


def made_call(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    row: Candidate,
    rules: PolicyRules | None,
    mesh: jax.sharding.Mesh,
) -> MadeCall:
    """Makes the call of a row: runs an example, and the functions that build arguments.

    Raises:
      TypeError: `fn` is no function; an example returns something else, or takes other options.
      ValueError: there are options for a function that is no example.
    """
    require_function(fn, "estimate", takes="a function or a module")
    scope = contextlib.nullcontext() if row.policy is None else use_policy(row.policy, rules)
    with scope:
        made = None if args or kwargs else _run_example(fn, row, mesh)
        if made is not None:
            fn, args, kwargs = made
        elif row.options:
            raise ValueError(
                f"The row {row.name!r} has options, which go to an example as keyword arguments: "
                "give estimate a function that returns (function, args), in place of the function "
                "and its arguments."
            )
        eval_shape = FRAMEWORKS[-1].eval_shape if FRAMEWORKS else jax.eval_shape
        built = tuple(eval_shape(arg) if _is_builder(arg) else arg for arg in args)
    return MadeCall(fn, built, dict(kwargs), made is not None or any(map(_is_builder, args)))


def _run_example(
    fn: Callable[..., Any], row: Candidate, mesh: jax.sharding.Mesh
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Returns the function and arguments that an example returns; None if `fn` is no example."""
    if required_arguments(fn) is None:
        return None
    takes_mesh = "mesh" in inspect.signature(fn).parameters
    made = fn(**row.options, **({"mesh": mesh} if takes_mesh else {}))
    return None if are_results(made) and not row.options else example_call(made, function_name(fn))


def required_arguments(fn: Callable[..., Any]) -> list[str] | None:
    """Returns the names of a function's required arguments; None if it has no signature."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def are_results(made: Any) -> bool:
    """Returns whether a value looks like a computation's result: arrays, and nothing else."""
    leaves = jax.tree.leaves(made)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)


def example_call(made: Any, name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the function, the arguments and the keyword arguments that an example returns.

    Raises:
      TypeError: it returns something else.
    """
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        function, args, kwargs = made if len(made) == 3 else (*made, {})
        if isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping):
            return function, tuple(args), dict(kwargs)
    told = f"a {type(made).__name__}"
    if isinstance(made, tuple):
        told += f" of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    raise TypeError(
        f"{name}() should return (function, args) or (function, args, kwargs), args a tuple and "
        f"kwargs a dict, but returned {told}."
    )


def _is_builder(arg: Any) -> bool:
    """Returns whether an argument is a function that builds one: no module, no tree of arrays."""
    if not callable(arg) or isinstance(arg, type) or any(map(is_array, jax.tree.leaves(arg))):
        return False
    return required_arguments(arg) == []


# --------------------------------------------------------------------------------------------------
# Steps
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """A call as a program of its arrays.

    Attributes:
      traced: the program.
      names: the path of each array.
      origins: the positional argument that each array is of; None for arrays of keyword arguments
        and of a module that is called.
      donated: the arrays that may be overwritten.
      repeated: the arrays that are the same as an earlier one.
      route: how the policy is applied: "scope", "autocast" or "as written".
    """

    traced: Traced
    names: tuple[str, ...]
    origins: tuple[int | None, ...]
    donated: tuple[int, ...]
    repeated: tuple[int, ...]
    route: str


def traced_step(
    call: MadeCall,
    row: Candidate,
    rules: PolicyRules | None,
    donate: int | Sequence[int] | None,
    backward: bool,
    params: ParamsArgument,
    route: Route | None = None,
) -> Step:
    """Traces the call of a row.

    Args:
      donate: positions of arguments that may be overwritten; None for those that a jitted function
        donates.
      route: how the policy is applied, where that is known.

    Raises:
      TypeError, ValueError: as `policy.audit` does, and where `donate` names no arguments.
    """
    positions = _positions(donate, len(call.args))
    rules = rules if row.policy is not None else None
    traced, route = traced_call(
        call.fn, call.args, call.kwargs, backward, params, row.policy, rules, route
    )
    pure = lowered(call.fn, call.args, call.kwargs)
    every = origins_of(call.args, call.kwargs) if pure is None else pure.origins()
    arrays = zip(every, traced.arguments.is_array, strict=True)
    origins = tuple(origin for origin, is_one in arrays if is_one)
    if positions is None:
        donated = donated_inputs(traced.jaxpr, is_wrapped=route == "autocast")
    else:
        donated = tuple(i for i, origin in enumerate(origins) if origin in positions)
    names = tuple(
        traced.arguments.names() if pure is None else input_paths(traced.arguments, is_lowered=True)
    )
    return Step(traced, names, origins, donated, _repeated(traced, names, donated), route)


def _repeated(traced: Traced, names: Sequence[str], donated: Collection[int]) -> tuple[int, ...]:
    """Returns the arrays that were given before.

    Raises:
      ValueError: one of them is donated, which leaves the other without a buffer.
    """
    first: dict[int, int] = {}
    found = []
    for i, array in enumerate(traced.arguments.arrays):
        before = first.setdefault(id(array), i)
        if before == i or not isinstance(array, jax.Array):
            continue
        if i in donated or before in donated:
            raise ValueError(
                f"{names[before]} and {names[i]} are the same array, and it is donated: JAX can't "
                "overwrite an array that is still an argument. Give a copy, or leave it out of "
                "donate."
            )
        found.append(i)
    return tuple(found)


def _positions(donate: int | Sequence[int] | None, count: int) -> tuple[int, ...] | None:
    if donate is None:
        return None
    given = (donate,) if isinstance(donate, int) else tuple(donate)
    if any(type(position) is not int or not -count <= position < count for position in given):
        raise ValueError(
            f"donate should be positions of the {count} arguments, such as (0, 1), but got "
            f"{donate!r}."
        )
    return tuple(position % count for position in given)
