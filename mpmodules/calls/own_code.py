"""A user's own code, in modules of ours and in ports, alike in both APIs.

The outermost call is traced with the code in float32 and the layers in their policies' dtypes, each
returning float32; autocast's rules then decide the dtypes of the code between the layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import linecache
import os
import traceback
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.core import Scope as FlaxScope
from flax.errors import TraceContextError, TransformedMethodReturnValueError
from jax import lax
from jax.typing import DTypeLike

from mpmodules.calls.boundary import (
    Api,
    MethodCall,
    as_given,
    cast_outputs,
    is_pair,
    keeps,
    map_carry,
    run_method,
    with_kept_outputs,
)
from mpmodules.calls.classes import derives_from, is_reference
from mpmodules.calls.plain_layers import LIBRARIES
from mpmodules.calls.under_way import linen_calls, nnx_calls
from mpmodules.functions.functional import mixing_allowed
from policy.autocasting import own_code
from policy.core.arrays import is_floating
from policy.core.messages import warn_once
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.scope import Scope, Source, computes_in_half, current_scope, enter, multiplying
from policy.programs import marks
from policy.programs.thread import during, thread

CANNOT_BE_TRACED = (
    *own_code.CANNOT_BE_TRACED,
    TransformedMethodReturnValueError,
    TraceContextError,
)
"""Errors of code that needs the values of arrays, or hands out what a trace can't."""


def run(
    owner: type,
    call: own_code.ModuleCall,
    trees: Sequence[Any],
    policy: Policy,
    *,
    key: Hashable = None,
) -> Any:
    """Runs an outermost call of a class as a pure function; see `policy.autocasting.own_code.run`.

    An error of the user's code ends on the user's line: the frames of the trace are left out.
    """
    if getattr(owner, "keep_inputs", ()):
        policy = policy.replace(cast_inputs=False)
    is_summary = linen_calls.recorded is not None or nnx_calls.recorded is not None
    try:
        with during(is_summary=True) if is_summary else contextlib.nullcontext():
            return own_code.run(call, trees, policy, key=key)
    except Exception as error:
        raise error.with_traceback(_of_others(error.__traceback__)) from error.__cause__


def run_kept(owner: type, error: BaseException, plainly: Callable[[], Any]) -> Any:
    """Runs a call that can't be traced in the dtypes that it meets, and tells once.

    Args:
      owner: the class of the module that is called.
      error: the error of the trace.
      plainly: calls the module.
    """
    with keeping(), mixing_allowed():  # the code is written for float32
        outputs = plainly()
    warn_once(
        f"{owner.__name__} can't be traced{_place_of(error)}, because its code {_reason(error)}. "
        "It runs in the dtypes that it meets instead, as with own_code='keep'. Use jnp.where or "
        "jax.lax.cond in place of a branch on a value, and jnp in place of numpy; or set "
        "own_code = 'keep' in the class to accept this."
    )
    return outputs


def in_float32(tree: Any) -> Any:
    """Returns arguments as own code sees them: half-precision arrays in float32."""
    return jax.tree.map(
        lambda x: marks.returned_if_half(x) if is_floating(x) and not is_reference(x) else x,
        tree,
        is_leaf=is_reference,
    )


def as_read(stored: Any, *, is_kept: bool, dtype: DTypeLike | None) -> Any:
    """Returns a parameter as own code reads it in a trace: in float32, in the dtype that it is
    stored in where no policy casts it, or in the one asked for.
    """
    if is_kept or dtype is not None:
        return marks.read_in(stored, dtype) if is_floating(stored) else stored
    return marks.returned_if_half(stored)


def keeping() -> Any:
    """Puts a scope in force in which own code runs in the dtypes that it meets."""
    return enter(dataclasses.replace(current_scope(), keeps_own_code=True))


def run_in_trace(
    api: Api, call: MethodCall, effective: Effective, inner: Source, scope: Scope
) -> Any:
    """Runs a call inside of a trace of the code around it.

    Args:
      api: the API of the module.
      call: the call.
      effective: the policy that the module obeys.
      inner: the source of the policy of the modules inside.
      scope: the one that the call is made in.
    """
    if call.is_of_layer or keeps(call.module):
        return _run_layer(api, call, effective, scope)
    policy = effective.base
    if policy is None:
        return api.run_own_code(call, effective)
    is_named = scope.names(policy, effective.source)
    inside = enter(dataclasses.replace(scope, policy=policy, boundary_open=True), inner)
    # In half precision the trace, which is in float32, can't hold the precision: the mark does.
    half = computes_in_half(policy)
    precise = contextlib.nullcontext() if half else multiplying(policy, scope.policy)
    mark = marks.computes_in(
        policy.compute_dtype, policy.matmul, policy.precision if half else None
    )
    with inside, mark, precise:
        outputs = api.run_own_code(call, effective)
    if not scope.boundary_open or (policy == scope.policy and not is_named):
        return outputs
    # Another policy's: the code around it reads it in its own dtype, or as this one returns it.
    is_wide = policy.output_dtype.itemsize > policy.compute_dtype.itemsize
    return _marked(outputs, keeps=is_named and is_wide)


def _run_layer(api: Api, call: MethodCall, effective: Effective, around: Scope) -> Any:
    """Calls a layer inside of a trace of own code: its dtypes are its policy's."""
    policy = effective.policy
    keeps_own_code = around.keeps_own_code or keeps(call.module)
    scope = dataclasses.replace(around, traces_own_code=False, keeps_own_code=keeps_own_code)
    with enter(scope), marks.layer():
        given = call if policy is None or _comes_wide(call) else call.with_inputs_cast(policy)
        outputs = run_method(api, given, scope)
        if api.calls.recorded is not None:
            api.calls.recorded(given, outputs)
    is_asked = around.names(effective.base, effective.source) or _is_asked(call.module)
    is_kept = policy is not None and is_asked and computes_in_half(policy)
    return _marked(outputs, call.carry()[1], keeps=is_kept)


def _is_asked(layer: Any) -> bool:
    """Returns whether arguments of a matmul layer say which dtype its result has."""
    names = ("preferred_element_type", "dot_general", "dot_general_cls", "conv_general_dilated")
    given = (getattr(layer, name, None) for name in names)
    return any(x not in (None, lax.dot_general, lax.conv_general_dilated) for x in given)


def _comes_wide(call: MethodCall) -> bool:
    """Returns whether a layer that widens its input is given a float32 result of another: its
    statistics are then those of unrounded numbers.
    """
    widens = getattr(type(call.module), "_takes_inputs_as_they_come", False)
    return widens and bool(call.args) and marks.is_wide_result(call.args[0])


def _marked(outputs: Any, carry: Any = None, *, keeps: bool = False) -> Any:
    """Returns outputs in float32, marked for the code around; a carry has the dtypes of the one
    given. With `keeps`, those in float32 are read as such.
    """
    if carry is not None and is_pair(outputs):
        return _marked_carry(outputs[0], carry), _marked(outputs[1], keeps=keeps)

    def marked(x: Any) -> Any:
        if is_reference(x):
            return x
        is_kept = keeps and is_floating(x) and x.dtype.itemsize >= 4
        return marks.read_in(x, None) if is_kept else marks.returned(x)

    return jax.tree.map(marked, outputs, is_leaf=is_reference)


def _marked_carry(new: Any, given: Any) -> Any:
    if jax.tree.structure(new) != jax.tree.structure(given):
        return _marked(new)

    def marked(x: Any, old: Any) -> Any:
        return x if x.dtype == getattr(old, "dtype", None) else marks.returned(x)

    return jax.tree.map(marked, new, given)


def outputs_of(call: MethodCall, scope: Scope, policy: Policy, outputs: Any) -> Any:
    """Returns the outputs of an outermost call in the dtypes that its caller is to get.

    These are output_dtype, and inside of a module's call compute_dtype of the caller. State, such
    as a cache, keeps the dtypes in which it came.

    Args:
      call: the call.
      scope: the one that it was called in.
      policy: the one that it obeyed.
      outputs: in the dtypes that they were computed in.
    """
    states, thread.states = thread.states, ()
    returned = scope.returned(policy)
    has_carry, given_carry = call.carry()
    if has_carry and is_pair(outputs):
        outputs = map_carry(as_given, outputs[0], given_carry), outputs[1]
    if scope.boundary_open and scope.policy is not None:
        returned = policy.replace(output_dtype=scope.policy.compute_dtype)
    outputs, kept = with_kept_outputs(call, outputs)
    return cast_outputs(returned, outputs, has_carry=has_carry, kept=(*states, *kept))


# --------------------------------------------------------------------------------------------------
# Keys of programs
# --------------------------------------------------------------------------------------------------


class _Bare(linen.Module):
    """A module without fields or code of its own."""


FLAX_STATE = frozenset(vars(_Bare(parent=None)))


_HELD = (linen.Variable, FlaxScope, nnx.Pytree, nnx.Variable)


def key_of(value: Any, seen: dict[int, int]) -> Hashable:
    """Returns a key of a bound module, or of a static value: equal where the code of both runs
    alike, on other variables.

    Args:
      value: the module or value.
      seen: the numbers of the objects that it is in, by their identities.

    Raises:
      TypeError: it holds arrays, variables, or values that are not hashable.
    """
    is_array = isinstance(value, jax.Array | np.ndarray)
    if is_array or inspect.ismethod(value) or derives_from(type(value), *_HELD):
        raise TypeError(f"{type(value).__name__} is not static.")
    if isinstance(value, str | type | types.ModuleType | None):
        return value
    if isinstance(value, float):  # 1, 1.0 and True are equal, and -0.0 is 0.0
        return float, value.hex()
    if isinstance(value, tuple | list):
        return type(value), tuple(key_of(item, seen) for item in value)
    if isinstance(value, dict) or derives_from(type(value), Mapping):
        return type(value), tuple((key, key_of(item, seen)) for key, item in value.items())
    if isinstance(value, nnx.graph.Static):
        return nnx.graph.Static, key_of(value.value, seen)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(key_of(item, seen) for item in value)
    if isinstance(value, functools.partial):
        return functools.partial, key_of((value.func, value.args, value.keywords), seen)
    is_module = isinstance(value, linen.Module)
    by_value = type(value).__hash__ not in (None, object.__hash__)
    if not is_module and (by_value or callable(value) or not hasattr(value, "__dict__")):
        return type(value), value
    if id(value) in seen:
        return type(value), seen[id(value)]
    seen[id(value)] = len(seen)
    if is_module:
        return _of_module(value, seen)
    return type(value), key_of(vars(value), seen)  # an object whose attributes may change


def _of_module(module: Any, seen: dict[int, int]) -> Hashable:
    scope, state = module.scope, module._state
    place = None if scope is None else (scope.path, scope.name)
    flaxs = FLAX_STATE | {"scope"}
    parts = [
        {name: value for name, value in vars(module).items() if name not in flaxs},
        (module.name, state.in_compact_method, state.in_setup, int(state.setup_called)),
        state.autoname_cursor,
    ]
    if scope is not None:
        parts += [scope.mutable, scope.flags, scope.rng_counters]
    return type(module), place, key_of(parts, seen)


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------


def _of_others(frames: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the frames of this library, except for its first one."""
    kept: list[types.TracebackType] = []
    while frames is not None:
        if not kept or not frames.tb_frame.f_code.co_filename.startswith(LIBRARIES[:2]):
            kept.append(frames)
        frames = frames.tb_next
    result = None
    for each in reversed(kept):
        result = types.TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


def _place_of(error: BaseException) -> str:
    """Returns the line of the user's code that raised an error, for a message."""
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(LIBRARIES)
    ]
    if not places:
        return ""
    file, line = places[-1]
    source = linecache.getline(file, line).strip()
    return f" at {os.path.basename(file)}:{line} (`{source}`)" if source else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, own_code.UnreturnableError):
        return f"returns a {error.name}, which may hold arrays and is no pytree"
    if isinstance(error, TransformedMethodReturnValueError):
        return "returns a module or a variable"
    if isinstance(error, TraceContextError):
        return "changes an nnx object that is not part of the module"
    return "needs the values of arrays"
