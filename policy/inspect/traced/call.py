"""Traces a call under a policy into a program, for `compare` and `suggest`."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import require_function
from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules, as_rules
from policy.core.scope import RulesLike, require_usable
from policy.inspect.traced.float32 import in_float32, wide_arguments
from policy.inspect.traced.gradients import Around, PlainCall, as_it_is
from policy.inspect.traced.reference import reference_of
from policy.inspect.traced.under_policy import Route, under_policy
from policy.programs.dtypes import is_half
from policy.programs.jaxprs import opened
from policy.programs.reading.matmul_operands import NO_CODES, Codes, codes_of
from policy.programs.rewriting.placed_interpreter import NO_REFERENCE, Reference
from policy.programs.rewriting.upcast import dtypes_of
from policy.programs.tracing.trace import Arguments


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
      refused: the reason why the function can't be traced in float32; "" if it can.
      codes: its casts to 8 bits.
    """

    jaxpr: Any
    arguments: Arguments
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    route: Route = "as written"
    reference: Reference = NO_REFERENCE
    refused: str = ""
    codes: Codes = NO_CODES


@dataclasses.dataclass(frozen=True)
class Call(PlainCall):
    """A call to analyse, on arrays.

    Attributes:
      loss_scale: the factor of the loss before differentiation; None for no gradients.
    """

    loss_scale: float | None

    @classmethod
    def measured(
        cls,
        what: str,
        fn: Any,
        args: Any,
        kwargs: Any,
        params: ParamsArgument,
        loss_scale: float | None,
    ) -> Call:
        """Returns the call of any function or module, for the tool `what`.

        Raises:
          TypeError: `fn` is not a function; it is called without arrays, or with shapes; or
            `params` doesn't select arguments.
          ValueError: `params` names arguments of a call of modules.
        """
        require_function(fn, what)
        call = PlainCall.of(fn, args, kwargs, params)
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
        pure = call.fn
        if call.lowered is not None:
            pure = _returning(call.fn, call.lowered.result)
        return cls(pure, call.arguments, call.params, call.lowered, loss_scale)

    def program(self, around: Around = as_it_is) -> Program:
        """Returns the program of the call, as it is written; see `PlainCall.traced`."""
        scale = self.loss_scale
        scaled = lambda out: [_loss(out).astype(jnp.float32) * scale]  # noqa: E731
        jaxpr, shape, count = self.traced(None if scale is None else scaled, around)
        names = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(shape)]
        inputs = input_paths(self.arguments, self.lowered is not None)
        gradients = [inputs[i] for i in self.differentiated()] if count else []
        return Program(jaxpr, self.arguments, tuple(names), tuple(gradients))

    def under(
        self, policy: Policy | None, rules: PolicyRules | None = None, route: Route | None = None
    ) -> Program:
        """Returns the program of the call under a policy; see `under_policy`."""
        program, route = under_policy(self.program, policy, rules, route)
        return dataclasses.replace(program, route=route)


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


def _returning(pure: Callable[..., Any], result: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the function without the new state, which is no output to measure."""
    return lambda *args, **kwargs: result(pure(*args, **kwargs))


# flax.nnx hands in state: by the module, or the place of the argument that it is of; its numbers
# are their `value`.
_OF_STATE = re.compile(r"(?:0|1/\d+)/(.+?)(?:/value)?")


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
    matches = [_OF_STATE.fullmatch(path) if is_lowered else None for path in paths]
    short = [
        path if match is None else match[1] for path, match in zip(paths, matches, strict=True)
    ]
    return short if len(set(short)) == len(set(paths)) else paths


def leaf_path(path: Any) -> str:
    """Returns the path of a leaf, its keys joined by ``/``; "" for the tree itself."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def checked_policy(policy: Policy | str | None) -> Policy | None:
    """Returns the policy, parsed from its text form if needed.

    Raises:
      TypeError, ValueError: it is not a policy, or can't be honoured here.
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

    It is the program of the layers that obey the policy's scope, or else autocast's.

    Args:
      call: the call to trace.
      policy: None for the program as it is written.
      rules: the rules beside the policy.
    """
    return _with_reference(call, call.under(policy, rules))


def _with_reference(call: Call, program: Program) -> Program:
    """Returns the program with its differences from the same call's float32 trace.

    Code that names a half dtype explicitly may have no such trace; any exception then becomes
    `refused`.
    """
    codes = codes_of(program.jaxpr, call.differentiated())
    program = dataclasses.replace(program, codes=codes)
    if not any(map(is_half, dtypes_of(opened(program.jaxpr)[0]))):
        return program  # already float32
    arguments = dataclasses.replace(call.arguments, arrays=wide_arguments(call.arguments.arrays))
    wide, refused = None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wide_call = dataclasses.replace(call, arguments=arguments)
            wide = wide_call.program(lambda fn, _: in_float32(fn))
    except Exception as error:
        refused = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    reference = reference_of(program.jaxpr, None if wide is None else wide.jaxpr)
    return dataclasses.replace(program, reference=reference, refused=refused)


def short_text(policy: Policy) -> str:
    """Returns the policy's preset name, or its text form if it has none."""
    presets = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
    presets = (*presets, "mixed_float8", "mixed_int8")
    return next((name for name in presets if get_policy(name) == policy), str(policy))
