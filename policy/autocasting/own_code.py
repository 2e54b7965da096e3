"""A user's own code under a policy: traced in float32 and evaluated, around layers that obey
policies themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex_core
import numpy as np

from policy.autocasting.calls import HANDLERS, Recent
from policy.autocasting.evaluator import Evaluator
from policy.autocasting.requests import retracing, with_requests
from policy.autocasting.settings import Places, Settings
from policy.autocasting.values import CastValue, cast
from policy.core.dtypes import precision_around
from policy.core.policy import Policy
from policy.core.scope import Scope, current_scope, enter
from policy.programs.dtypes import F32, float_dtype
from policy.programs.jaxprs import (
    OpenJaxpr,
    is_unwritten,
    opened,
    repeated_programs,
    subprograms,
)
from policy.programs.primitives import CASTS, MOVES_DATA
from policy.programs.rewriting.interpreter import run_at_once
from policy.programs.rewriting.outlining import outlined
from policy.programs.thread import thread
from policy.programs.tracing.pure_calls import (
    Arguments,
    ArrayTree,
    PureCall,
    UnreturnableError,
    is_eager,
)

CANNOT_BE_TRACED = (
    UnreturnableError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Errors of code that needs the values of arrays, or returns an object that may hold some."""

ModuleCall = Callable[[Any, Any, Any], Any]
"""A pure function of parameters, other state and inputs."""


@dataclasses.dataclass(frozen=True)
class OwnCode:
    """A call of a user's code, traced in float32 except for layers, which obey their policies.

    Attributes:
      call: the program, and its operands in the dtypes that they are stored in.
      policy: the policy of the outermost module.
      kinds: for each operand, 0 of a parameter, 1 of other state, 2 of an input.
      scope: the one that it was traced in.
    """

    call: PureCall
    policy: Policy
    kinds: Sequence[int]
    scope: Scope

    @classmethod
    def traced(
        cls, call: ModuleCall, trees: Sequence[Any], arguments: Arguments, policy: Policy
    ) -> OwnCode:
        """Traces ``call(params, others, inputs)``; parameters and inputs are float32 to it.

        Args:
          call: the call.
          trees: its arguments.
          arguments: the same, divided into arrays and others.
          policy: the policy of the outermost module.

        Raises:
          the errors in `CANNOT_BE_TRACED`.
        """
        arrays = arguments.arrays
        sizes = [tree.num_leaves for tree in arguments.treedef.children()[0].children()]
        leaves = (kind for kind, size in enumerate(sizes) for _ in range(size))
        kinds = list(itertools.compress(leaves, arguments.is_array))
        is_float = [dtype is not None and dtype.itemsize >= 2 for dtype in map(float_dtype, arrays)]
        is_wide = [
            one and array.dtype.itemsize >= F32.itemsize
            for array, one, kind in zip(arrays, is_float, kinds, strict=True)
            if kind == 2
        ]

        def in_dtype(dtype: np.dtype) -> list[Any]:
            return [
                jax.eval_shape(lambda x: x.astype(dtype), x)
                if kind != 1 and one and x.dtype != dtype
                else x
                for x, one, kind in zip(arrays, is_float, kinds, strict=True)
            ]

        scope = dataclasses.replace(current_scope(), traces_own_code=True)
        half = policy.compute_dtype

        def inside(scope: Scope, *trees: Any) -> Any:
            wide = list(itertools.compress(ArrayTree.divided(trees[2])[0], is_wide))
            around, thread.wide = thread.wide, wide
            try:
                with enter(scope):
                    return call(*trees)
            finally:
                thread.wide = around

        def again() -> Any:
            second = functools.partial(inside, retracing(scope, half))
            given = {"arguments": arguments, "traced_as": in_dtype(half)}
            return PureCall.of(second, *trees, **given).jaxpr

        first = functools.partial(inside, scope)
        traced = PureCall.of(first, *trees, arguments=arguments, traced_as=in_dtype(F32))
        jaxpr = outlined(with_requests(traced.jaxpr, again, half))
        return cls(dataclasses.replace(traced, jaxpr=jaxpr), policy, kinds, scope)

    @functools.cached_property
    def opened(self) -> tuple[OpenJaxpr, list[Any]]:
        """The program as an open jaxpr, and its constants."""
        return opened(self.call.jaxpr)

    @functools.cached_property
    def states(self) -> list[int | None]:
        """For each output, the operand that it is a later state of; see `operands_kept`."""
        body, result = self.opened[0], self.call.result
        outputs = sum(result.is_array[: result.treedef.children()[0].num_leaves])
        first = self.kinds.index(2) if 2 in self.kinds else -1
        states = operands_kept(body, outputs, first)
        return [i if i is not None and self.kinds[i] == 2 else None for i in states]

    def evaluated(self, *arrays: Any) -> list[Any]:
        """Returns the results of the program on operands as they are stored.

        The outputs of ``call``, the first of its results, have the dtypes that they were
        computed in; state has the dtypes of the trace.
        """
        values, states = [], self.states
        outputs = len(states)
        body, consts = self.opened
        repeated, is_fixed = repeated_programs(body), is_unwritten(body, outputs)
        settings = Settings(self.policy, narrows_scans=True, around=precision_around())
        places = Places(settings, repeated)
        given = dict(zip(body.invars, arrays, strict=True))
        for array, variable, kind, is_buffer in zip(
            arrays, body.invars, self.kinds, is_fixed, strict=True
        ):
            is_wide = array.dtype == np.float64 and variable.aval.dtype == F32
            array = cast(array, F32) if is_wide else array
            weak, is_table = kind == 2 and self.policy.cast_inputs, kind == 1 and is_buffer
            values.append(CastValue(array, kind == 0, weak=weak, is_table=is_table))
        evaluator = Evaluator(settings, places, HANDLERS, scope=self.scope)
        evaluated = evaluator.run(body, list(map(evaluator.constant, consts)), values)

        def result_of(i: int, atom: Any, value: CastValue) -> Any:
            if not isinstance(atom, jex_core.Literal) and atom in given:
                return given[atom]
            if i < outputs and (state := states[i]) is not None:
                return cast(value.array, float_dtype(arrays[state]))
            return cast(value.array, None if i < outputs else float_dtype(atom.aval))

        return list(map(result_of, range(len(evaluated)), body.outvars, evaluated))


# --------------------------------------------------------------------------------------------------
# Outputs that are state: a cache or carry that came in as an argument
# --------------------------------------------------------------------------------------------------

_HANDS_ON = MOVES_DATA | CASTS


def operands_kept(body: OpenJaxpr, outputs: int, first: int) -> list[int | None]:
    """Returns, for each output that is state, the argument that it was; None for other outputs.

    It is the argument itself, the argument with new values written at some places, or the carry of
    a loop that starts with it. JAX gives all of these the dtype of the argument.

    Args:
      body: the program.
      outputs: the number of its outputs to look at, the first ones.
      first: the first input. It is state where values are written in it, and not where it is
        returned or carried through a loop, as activations are.
    """
    numbers = {variable: i for i, variable in enumerate(body.invars)}
    found = []
    for atom in body.outvars[:outputs]:
        origin, is_written = _origin(body, atom)
        place = None if isinstance(origin, jex_core.Literal) else numbers.get(origin)
        is_same = place is not None and body.invars[place].aval == atom.aval
        found.append(place if is_same and (is_written or place != first) else None)
    return found


def _origin(body: OpenJaxpr, atom: Any) -> tuple[Any, bool]:
    """Returns the variable whose values an output holds, in part, and whether others are written
    in it.
    """
    makers = {variable: equation for equation in body.eqns for variable in equation.outvars}
    is_written = False
    while not isinstance(atom, jex_core.Literal) and (equation := makers.get(atom)) is not None:
        name, inside = equation.primitive.name, subprograms(equation)
        place = equation.outvars.index(atom)
        writes = name == "dynamic_update_slice" or name.startswith("scatter")
        operand = 0 if writes or name in _HANDS_ON else None
        if name == "concatenate":  # a cache that is rolled or shifted
            operand = int(np.argmax([each.aval.size for each in equation.invars]))
        is_written |= writes
        if inside and name != "cond" and not name.startswith("scatter"):
            operand, writes = _through(inside, place)
            is_written |= writes
        if operand is None:
            break
        atom = equation.invars[operand]
    return atom, is_written


def _through(inside: Sequence[Any], place: int) -> tuple[int | None, bool]:
    """Returns the operand of an equation that an output of its program is, if any, and whether the
    program writes values in it.
    """
    one = inside[-1]
    if one.operands is None:
        return None, False
    if one.role == "loop":
        return (one.operands[one.carry.start + place] if place < one.carried else None), False
    origin, is_written = _origin(one.body, one.body.outvars[place])
    arguments = list(one.body.invars)
    return (one.operands[arguments.index(origin)] if origin in arguments else None), is_written


# --------------------------------------------------------------------------------------------------
# Calls that are repeated without jit
# --------------------------------------------------------------------------------------------------

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type, types.FunctionType)

_kept: Recent[tuple[Callable[..., list[Any]], PureCall, list[int | None]]] = Recent(256)
"""Evaluated programs, the calls that they are of, without their operands, and their states."""


def run(call: ModuleCall, trees: Sequence[Any], policy: Policy, *, key: Hashable) -> Any:
    """Runs ``call(params, others, inputs)``, a user's own code, under a policy.

    Outside of `jax.jit`, the program is kept for calls with the same key, structure and shapes.

    Args:
      call: returns its outputs, and then its state.
      trees: its arguments.
      policy: the policy of the outermost module.
      key: equal for calls that run the same code; None keeps nothing.

    Returns:
      The results of the call. Those that are state are in `thread.states`, too.

    Raises:
      the errors in `CANNOT_BE_TRACED`.
    """
    arguments = Arguments.of(tuple(trees), {})
    key = _key(key, arguments, policy)
    try:
        kept = None if key is None else _kept.get(key)
    except TypeError:  # it is not hashable
        key = kept = None
    if kept is None:
        own = OwnCode.traced(call, trees, arguments, policy)
        consts = own.call.jaxpr.consts
        of_a_trace = any(isinstance(const, jax.core.Tracer) for const in consts)
        if key is None or own.call.changed or of_a_trace:
            return _returned(own.call, own.states, own.evaluated(*arguments.arrays))
        own = dataclasses.replace(own, call=dataclasses.replace(own.call, arrays=()))
        program = run_at_once(jax.make_jaxpr(own.evaluated)(*arguments.arrays))
        kept = _kept.keep(key, (program, own.call, own.states))
    program, pure, states = kept
    return _returned(pure, states, program(*arguments.arrays))


def _returned(pure: PureCall, states: Sequence[int | None], results: Sequence[Any]) -> Any:
    kept = zip(results, states, strict=False)
    thread.states = [array for array, state in kept if state is not None]
    return pure.returned(results)


def _key(key: Hashable, arguments: Arguments, policy: Policy) -> Hashable:
    """Returns a key for a call's program, or None for one that is not kept.

    It may not be hashable.
    """
    is_simple = all(isinstance(leaf, _SIMPLE) for leaf in arguments.static)
    if key is None or not is_simple or not all(map(is_eager, arguments.arrays)):
        return None
    avals = tuple(map(jax.typeof, arguments.arrays))
    config: Any = jax.config
    promotions = config.jax_numpy_dtype_promotion, config.jax_numpy_rank_promotion
    settings = config.jax_enable_x64, config.jax_default_matmul_precision, *promotions
    mesh = jax.sharding.get_abstract_mesh()
    return key, arguments.key, avals, policy, current_scope(), settings, mesh
