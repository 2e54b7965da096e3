"""Assertions about dtypes and programs, for test suites.

All but `assert_close_in_ulps` only trace and run nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from policy.autocasting.parameters import ParamsArgument
from policy.core.policy import Policy, get_policy
from policy.core.scope import RulesLike
from policy.inspect.audit.assertions import (
    DTypes,
    accepted_dtypes,
    allowed,
    line,
    line_of,
    listed,
    multiplies,
    require_any,
    require_dtypes,
    rounds_a_result,
)
from policy.inspect.audit.audit import function_name
from policy.inspect.audit.finding_kinds import MIXED, PROMOTION
from policy.inspect.audit.findings import findings_of
from policy.inspect.audit.weights import multiplied_dtypes, path_rules, policy_at
from policy.inspect.traced.gradients import PlainCall, traced_call
from policy.inspect.traced.kept_dtypes import origin_of, parameters_of
from policy.inspect.ulps import ulp_error_message
from policy.programs.dtypes import HALVES, is_inexact_name
from policy.programs.operations import accumulation_of, operands_of
from policy.programs.paths import spelled
from policy.programs.reading.graph import Graph
from policy.programs.reading.matmul_operands import weight_matmuls
from policy.programs.reading.same_program import first_difference
from policy.programs.tracing.trace import trace

__all__ = [
    "assert_close_in_ulps",
    "assert_dots_in",
    "assert_matmuls_obey",
    "assert_no_silent_promotion",
    "assert_params_keep_dtype",
    "assert_reductions_in",
    "assert_same_program",
]


def __dir__() -> list[str]:
    return list(__all__)


def assert_reductions_in(
    fn: Any,
    args: Sequence[Any],
    dtype: DTypes,
    *,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    allow: Collection[str] = (),
) -> None:
    """Asserts that every sum of floating numbers runs in `dtype`.

    Sums are reductions by addition or multiplication, cumulative and windowed ones, scatter-adds
    (the gradient of an embedding), and collectives that sum. Operations that round nothing are
    skipped, as in an audit: sums of one number, scatters to distinct indices, and maxima.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> from policy.inspect.testing import assert_reductions_in
    >>> assert_reductions_in(reductions.softmax, (jnp.ones((2, 8), jnp.bfloat16),), "f32")

    Args:
      fn: any function of arrays, an nnx module or a method of one, or a function of nnx modules.
      args, kwargs: the arguments of the call; any array may be a `jax.ShapeDtypeStruct`.
      dtype: the accepted dtype, or several.
      backward: whether to check the gradients as well; defined as in `policy.audit`.
      params: the arguments that gradients are taken by; see `policy.audit`.
      allow: path patterns to leave out: regular expressions that must match a module's full path,
        as in rules, and that include everything below it.

    Raises:
      AssertionError: names the path, operation, dtypes and source line of every sum in another
        dtype; or the program has no sum, so that nothing would be asserted.
      ValueError: a pattern in `allow` matches no path.
    """
    accepted = accepted_dtypes(dtype)
    nodes = allowed(_graph(fn, args, kwargs, backward, params), allow)
    sums_of_floats = [node for node in nodes if rounds_a_result(node)]
    require_any(sums_of_floats, "sum of floating numbers", allow)
    require_dtypes(sums_of_floats, accepted, "be summed in")


def assert_dots_in(
    fn: Any,
    args: Sequence[Any],
    dtype: DTypes,
    *,
    accumulation: DTypes | None = None,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    allow: Collection[str] = (),
) -> None:
    """Asserts that every floating matmul and convolution multiplies numbers of `dtype`.

    Those of 8-bit codes of floating numbers count: "f8" accepts float8_e4m3fn and float8_e5m2,
    and "i8" int8. `assert_matmuls_obey` looks at matmuls of parameters alone.

    >>> import jax.numpy as jnp
    >>> from policy.inspect.testing import assert_dots_in
    >>> x = jnp.ones((2, 2), jnp.bfloat16)
    >>> assert_dots_in(jnp.matmul, (x, x), "bf16")

    Args:
      dtype: the accepted dtype, or several: both operands have one of them.
      accumulation: the accepted accumulation dtypes, as declared by `preferred_element_type` or the
        dot algorithm; "backend" is a half-precision matmul's that declares none. None: not
        asserted.
      fn, args, kwargs, backward, params, allow: see `assert_reductions_in`.

    Raises:
      AssertionError, ValueError: as `assert_reductions_in`.
    """
    accepted = accepted_dtypes(dtype)
    nodes = allowed(_graph(fn, args, kwargs, backward, params), allow)
    matmuls = [node for node in nodes if multiplies(node)]
    require_any(matmuls, "matmul or convolution of floating numbers", allow)
    require_dtypes(matmuls, accepted, "multiply")
    if accumulation is not None:
        declared = accepted_dtypes(accumulation)
        require_dtypes(
            matmuls, declared, "accumulate in", lambda equation: (accumulation_of(equation),)
        )


def assert_matmuls_obey(
    fn: Any,
    args: Sequence[Any],
    policy: Policy | str,
    *,
    rules: RulesLike | None = None,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    allow: Collection[str] = (),
) -> None:
    """Asserts that every matmul of a parameter multiplies the dtypes that a policy says.

    These are the 8-bit dtypes of its ``m=``, those of cotangents in the backward pass included, or
    compute_dtype without one. Matmuls of activations, such as attention's, and convolutions are
    not looked at. The function is traced as it is: the policy is not applied.

    >>> import warnings
    >>> import jax.numpy as jnp
    >>> import policy
    >>> from policy.inspect.testing import assert_matmuls_obey
    >>> warnings.simplefilter("ignore", policy.DtypePolicyWarning)  # a CPU emulates 8 bits
    >>> fn = policy.autocast(lambda w, x: x @ w["up"] @ w["head"], "mixed_int8", params=0)
    >>> w = {"up": jnp.ones((8, 8)), "head": jnp.ones((8, 2))}
    >>> assert_matmuls_obey(fn, (w, jnp.ones((4, 8))), "mixed_int8")

    Args:
      policy: the policy, or its text form.
      rules: the policies of some paths, as the program has them: by patterns, not by classes.
      params: the arguments that are parameters; see `policy.audit`. Without `backward` too.
      fn, args, kwargs, backward, allow: see `assert_reductions_in`.

    Raises:
      AssertionError: names the path, operation, dtypes and source line of every matmul in other
        dtypes; or no matmul has a parameter, so that nothing would be asserted.
      ValueError: a pattern in `allow` matches no path; a rule is about a class.
    """
    obeyed, ruled = get_policy(policy), path_rules(rules)
    graph = _graph(fn, args, kwargs, backward, params if backward else None)
    places = PlainCall.of(fn, tuple(args), dict(kwargs or {}), params).differentiated()
    looked_at = set(map(id, allowed(graph, allow)))
    matmuls = [one for one in weight_matmuls(graph, places) if id(one.node) in looked_at]
    require_any(matmuls, "matmul of a parameter", allow)
    told = []
    for one in matmuls:
        expected = multiplied_dtypes(policy_at(obeyed, ruled, one.node.site.path), one)
        found = operands_of(one.node.site.equation)
        if not set(found) <= expected:
            told.append(f"{line_of(one.node.site, found)}\n    should be {listed(expected)}")
    if told:
        raise AssertionError(
            f"{len(told)} of {len(matmuls)} matmuls of parameters do not obey '{obeyed}':\n"
            + "\n".join(dict.fromkeys(told))
        )


def assert_no_silent_promotion(
    fn: Any,
    args: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    allow: Collection[str] = (),
) -> None:
    """Asserts that no bfloat16 or float16 meets float32 without an explicit cast.

    These are the findings "silent-promotion" and "mixed-matmul" of `policy.audit`. A result that is
    narrowed again before it is used elsewhere, as within a normalisation, is accepted.

    >>> import jax.numpy as jnp
    >>> from policy.inspect.testing import assert_no_silent_promotion
    >>> assert_no_silent_promotion(lambda x: 2 * x, (jnp.ones(2, jnp.bfloat16),))

    Args:
      fn, args, kwargs, backward, params, allow: see `assert_reductions_in`.

    Raises:
      AssertionError: names the path, operation, dtypes and source line of every promotion; or
        nothing runs in half precision, so that nothing would be asserted.
      ValueError: a pattern in `allow` matches no path.
    """
    graph = _graph(fn, args, kwargs, backward, params)
    nodes = allowed(graph, allow)
    values = (value for node in nodes for value in (*node.inputs, *node.outputs))
    require_any([v for v in values if v.dtype in HALVES], "half-precision value", allow)
    paths = {spelled(node.site.path) for node in nodes}
    told = [
        line(f.primitive, f.path, f.dtypes, f.is_backward, f.source)
        for f in findings_of(graph)
        if f.kind in (PROMOTION, MIXED) and f.path in paths
    ]
    if told:
        raise AssertionError(
            "bfloat16 or float16 is combined with float32 without an explicit cast:\n"
            + "\n".join(told)
        )


def assert_params_keep_dtype(
    fn: Any,
    args: Sequence[Any],
    dtype: DTypes | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    params: int = 0,
    returned: int = 0,
) -> None:
    """Asserts that a step keeps its parameters' dtypes, or that an init returns `dtype`.

    `assert_params_keep_dtype(step, (params, state, batch))`: each floating leaf of the argument
    `params` comes back, at its place in the tree, in its own dtype. `assert_params_keep_dtype(init,
    (key, x), "f32")`: each floating leaf of the result has `dtype`. A function with nnx modules
    among its arguments changes them in place: afterwards each of their floating `nnx.Param`s has
    its own dtype, or `dtype`.

    >>> import jax.numpy as jnp
    >>> from policy.inspect.testing import assert_params_keep_dtype
    >>> step = lambda params: {"w": params["w"] * 2}
    >>> assert_params_keep_dtype(step, ({"w": jnp.ones(2, jnp.bfloat16)},))

    Args:
      fn: the step, or the init; see `assert_reductions_in`.
      args, kwargs: the arguments of the call; any array may be a `jax.ShapeDtypeStruct`.
      dtype: the accepted dtype, or several; None: the dtype of the parameter that went in.
      params: the position in `args` of the parameters.
      returned: the position of the parameters in a returned tuple. Any other result is taken whole.

    Raises:
      AssertionError: names each changed parameter, both dtypes, and the operation and source line
        that made it; or a parameter is not returned; or there is no floating one, so that nothing
        would be asserted.
    """
    accepted = None if dtype is None else accepted_dtypes(dtype)
    before, after, jaxpr = parameters_of(
        fn, tuple(args), dict(kwargs or {}), params, returned, accepted is None
    )
    if not any(is_inexact_name(str(dtype)) for dtype in before.values()):
        raise AssertionError(
            "assert_params_keep_dtype found no floating parameter: nothing would be asserted."
        )
    told = []
    for name, was in before.items():
        if name not in after:
            told.append(f"  {name}: {was} is not returned")
            continue
        place, now = after[name]
        if is_inexact_name(was) and now not in (accepted or {was}):
            should = listed(accepted) if accepted else was
            told.append(f"  {name}: {now} instead of {should}, from {origin_of(jaxpr, place)}")
    if told:
        raise AssertionError(
            f"{len(told)} of {len(before)} parameters of {function_name(fn)} do not come back in "
            "the right dtype:\n" + "\n".join(told)
        )


def assert_same_program(
    f: Any,
    g: Any,
    args: Sequence[Any],
    *,
    g_args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Asserts that two functions are traced to one program.

    The programs have the same operations, with the same parameters and dtypes, on the same values
    in the same order. Names of variables and jitted functions and source lines are ignored;
    closed-over constants are compared by value. Of a custom derivative the primal program is
    compared, not the rule: pass `jax.grad` of both functions for that.

    >>> import jax.numpy as jnp
    >>> from policy.inspect.testing import assert_same_program
    >>> assert_same_program(lambda x: x + 1, lambda y: y + 1, (jnp.ones(2),))

    Args:
      f, g: the functions; see `assert_reductions_in`.
      args, kwargs: the arguments of both calls.
      g_args: the arguments of `g`, if they differ.

    Raises:
      AssertionError: shows the first difference: its path, operations, dtypes and source lines.
    """
    kwargs = dict(kwargs or {})
    jaxprs = (
        trace(fn, *given, **kwargs).jaxpr
        for fn, given in ((f, args), (g, args if g_args is None else g_args))
    )
    difference = first_difference(*jaxprs)
    if difference is not None:
        names = f"{function_name(f)} and {function_name(g)}"
        raise AssertionError(f"{names} are not the same program. {difference}")


def assert_close_in_ulps(
    actual: Any, desired: Any, ulps: float, dtype: DTypeLike | None = None, *, floor: float = 0.0
) -> None:
    """Asserts that numbers are correct to a number of units in the last place.

    An ulp is the spacing of floats at the magnitude of the true value, in the dtype of `actual`;
    below the smallest normal number it is the spacing of the subnormal ones. An infinity counts as
    the number after the largest. A NaN is right where the truth is NaN, or can't be represented
    otherwise in that dtype.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from policy.inspect.testing import assert_close_in_ulps
    >>> assert_close_in_ulps(jnp.bfloat16(1 / 3), np.float64(1 / 3), 0.5)

    Args:
      actual: an array, or a tree of arrays. Integers and booleans must be equal; complex numbers
        are compared by parts.
      desired: a tree of the same structure and shapes with the true values, preferably in float64.
      ulps: the allowed error in ulps.
      dtype: the dtype whose ulps are counted; by default each array's own.
      floor: the magnitude below which an ulp gets no smaller.

    Raises:
      AssertionError: names the array's path, the number and index of the worst error, and the count
        of wrong numbers.
      ValueError: there is nothing to compare, or the trees or shapes differ.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(actual)
    truths, other = jax.tree.flatten(desired)
    if treedef != other:
        raise ValueError(f"The trees should have one structure, but have {treedef} and {other}.")
    if not leaves:
        raise ValueError("assert_close_in_ulps was given no array: nothing would be asserted.")
    told = [
        message
        for (path, leaf), truth in zip(leaves, truths, strict=True)
        if (
            message := ulp_error_message(
                jax.tree_util.keystr(path), leaf, truth, ulps, dtype, floor
            )
        )
    ]
    if told:
        raise AssertionError("\n".join(told))


def _graph(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    backward: bool,
    params: ParamsArgument,
) -> Graph:
    if isinstance(args, (str, jax.Array, np.ndarray, jax.ShapeDtypeStruct)) or not isinstance(
        args, Sequence
    ):
        raise TypeError(
            f"args should be a tuple of the function's arguments, but got a {type(args).__name__}."
        )
    return Graph(traced_call(fn, tuple(args), dict(kwargs or {}), backward, params).jaxpr)
