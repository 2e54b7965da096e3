"""Assertions about dtypes and programs, for test suites.

All but `assert_close_in_ulps` only trace and run nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy.autocasting.parameters import ParamsArgument
from policy.core.dtypes import dtype_names, parse_dtype
from policy.core.policy import Policy, get_policy
from policy.core.precedence import reaching
from policy.core.rules import PolicyRules, matches
from policy.core.scope import RulesLike
from policy.inspect.audit.audit import findings_of
from policy.inspect.audit.checks.sums import terms_of
from policy.inspect.audit.findings import MIXED, PROMOTION, Finding, finding
from policy.inspect.audit.flow import is_cotangent, is_matmul
from policy.inspect.traced.call import Call, origin_of, parameters_of, traced_call
from policy.inspect.traced.equation_facts import accumulation_of, operands_of, sums
from policy.inspect.traced.matmul_operands import WeightMatmul, are_codes, weight_matmuls
from policy.inspect.traced.same_program import first_difference
from policy.programs.dtypes import HALVES, is_inexact_name
from policy.programs.paths import Path, spelled
from policy.programs.reading.graph import Graph, Node, is_joint
from policy.programs.tracing.trace import function_name, trace

__all__ = [
    "assert_close_in_ulps",
    "assert_dots_in",
    "assert_matmuls_obey",
    "assert_no_silent_promotion",
    "assert_params_keep_dtype",
    "assert_reductions_in",
    "assert_same_program",
]

DTypes = DTypeLike | Collection[DTypeLike]
# As in a policy's text: NumPy's f8 and i8 are float64 and int64.
_EIGHT_BITS = {"f8": ("float8_e4m3fn", "float8_e5m2"), "i8": ("int8",)}


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
    accepted = _accepted(dtype)
    nodes = _allowed(_graph(fn, args, kwargs, backward, params), allow)
    found = [node for node in nodes if sums(node.site.equation) and _is_floating(node)]
    found = [node for node in found if terms_of(node)]
    _require_any(found, "sum of floating numbers", allow)
    _require_dtypes(found, accepted, "be summed in")


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
    accepted = _accepted(dtype)
    nodes = _allowed(_graph(fn, args, kwargs, backward, params), allow)
    matmuls = [one for one in nodes if is_matmul(one) and (_is_floating(one) or are_codes(one))]
    _require_any(matmuls, "matmul or convolution of floating numbers", allow)
    _require_dtypes(matmuls, accepted, "multiply")
    if accumulation is not None:
        of = lambda equation: (accumulation_of(equation),)  # noqa: E731
        _require_dtypes(matmuls, _accepted(accumulation), "accumulate in", of)


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
    obeyed, ruled = get_policy(policy), PolicyRules(rules or {})
    for pattern, _ in ruled:
        if isinstance(pattern, type):
            raise ValueError(
                f"rules should select paths here, but one selects the class {pattern.__name__}, "
                "which a traced program does not show. Give a pattern of its paths."
            )
    graph = _graph(fn, args, kwargs, backward, params if backward else None)
    places = Call.of(fn, tuple(args), dict(kwargs or {}), params).differentiated()
    looked_at = set(_allowed(graph, allow))
    matmuls = [one for one in weight_matmuls(graph, places) if one.node in looked_at]
    _require_any(matmuls, "matmul of a parameter", allow)
    told = []
    for one in matmuls:
        expected = _multiplied(_policy_at(obeyed, ruled, one.node.path), one)
        if not expected.issuperset(operands_of(one.node.site.equation)):
            told.append(f"{_line_of(one.node)}\n    should be {_listed(expected)}")
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
    narrowed again before it is used elsewhere, as within a normalization, is accepted.

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
    nodes = _allowed(graph, allow)
    values = (value for node in nodes for value in (*node.inputs, *node.outputs))
    _require_any([v for v in values if v.dtype in HALVES], "half-precision value", allow)
    paths = {spelled(node.path) for node in nodes}
    found = [one for one in findings_of(graph) if one.kind in (PROMOTION, MIXED)]
    if told := [_line(one) for one in found if one.path in paths]:
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
    accepted = None if dtype is None else _accepted(dtype)
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
            should = _listed(accepted) if accepted else was
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
    others = args if g_args is None else g_args
    jaxprs = (trace(fn, *given, **kwargs).jaxpr for fn, given in ((f, args), (g, others)))
    difference = first_difference(*jaxprs)
    if difference is not None:
        names = f"{function_name(f)} and {function_name(g)}"
        raise AssertionError(f"{names} are not the same program. {difference}")


# --------------------------------------------------------------------------------------------------
# What is looked at, and what is accepted
# --------------------------------------------------------------------------------------------------


def _graph(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    backward: bool,
    params: ParamsArgument,
) -> Graph:
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(
            f"args should be a tuple of the function's arguments, but got a {type(args).__name__}."
        )
    traced, _ = traced_call(fn, tuple(args), dict(kwargs or {}), backward, params)
    return Graph(traced.jaxpr)


def _allowed(graph: Graph, allow: Collection[str]) -> list[Node]:
    """Returns the nodes of a program that no path pattern leaves out.

    Raises:
      ValueError: a pattern matches no path.
    """
    if isinstance(allow, str):
        raise TypeError(
            f"allow should be a collection of path patterns, such as ({allow!r},), but got the "
            "string itself."
        )
    nodes = [node for node in graph.nodes if not is_joint(node)]
    patterns = PolicyRules(dict.fromkeys(allow, "float32")).rules  # rejects malformed patterns
    paths = dict.fromkeys(node.path for node in nodes)
    left_out = set[Path]()
    for pattern, _ in patterns:
        found = [
            path
            for path in paths
            if path and any(matches(pattern, name, model=of) for of, name in reaching(path))
        ]
        if not found:
            known = ", ".join(sorted(spelled(path) for path in paths if path)) or "none"
            raise ValueError(f"allow: '{pattern}' matches no path. Paths: {known}.")
        left_out.update(found)
    return [node for node in nodes if node.path not in left_out]


def _policy_at(policy: Policy, rules: PolicyRules, path: Path) -> Policy:
    """Returns the policy of a path: that of the innermost one that a rule matches."""
    found = (rules.match(name, model=model) for model, name in reaching(path) if path)
    return next(filter(None, found), policy)


def _multiplied(policy: Policy, matmul: WeightMatmul) -> frozenset[str]:
    """Returns the dtypes of the operands of a matmul of a parameter under a policy."""
    by = policy.matmul
    if by is None or (by.weight_gradient == "compute" and matmul.weight is None):
        return frozenset((policy.compute_dtype.name,))
    gradients = [by.gradients.name] if is_cotangent(matmul.node) else []
    return frozenset((by.operands.name, *gradients))


def _is_floating(node: Node) -> bool:
    return any(map(is_inexact_name, operands_of(node.site.equation)))


def _accepted(dtype: DTypes) -> frozenset[str]:
    """Returns the names of one accepted dtype, or of several."""
    given: Any = dtype
    if isinstance(dtype, (str, type, np.dtype)) or not isinstance(dtype, Collection):
        given = [dtype]
    names = [name for one in given for name in _dtype_names(one)]
    if not names:
        raise ValueError("No accepted dtype was given: pass one or several, such as 'bf16'.")
    return frozenset(names)


def _dtype_names(dtype: Any) -> tuple[str, ...]:
    if isinstance(dtype, str) and (dtype in _EIGHT_BITS or dtype == "backend"):
        return _EIGHT_BITS.get(dtype, (dtype,))
    is_known = isinstance(dtype, str) and dtype in dtype_names()
    try:
        return ((parse_dtype(dtype) if is_known else jnp.dtype(dtype)).name,)
    except TypeError:
        raise TypeError(
            "dtype should be one dtype or several, such as 'bf16' or jnp.bfloat16, but got "
            f"{dtype!r}."
        ) from None


# --------------------------------------------------------------------------------------------------
# Messages
# --------------------------------------------------------------------------------------------------


def _require_any(found: Sequence[Any], what: str, allow: Collection[str]) -> None:
    """Raises an `AssertionError` if nothing would be asserted."""
    if not found:
        but = f" apart from those that allow={tuple(allow)!r} excludes" if allow else ""
        raise AssertionError(f"The program has no {what}{but}: nothing would be asserted.")


def _require_dtypes(
    nodes: Sequence[Node],
    accepted: frozenset[str],
    should: str,
    of: Callable[[Any], tuple[str, ...]] = operands_of,
) -> None:
    """Raises an `AssertionError` that lists the nodes with other dtypes than the accepted ones.

    Args:
      of: gives the dtypes of an equation.
    """
    wrong = [
        _line_of(node, of) for node in nodes if not accepted.issuperset(of(node.site.equation))
    ]
    if wrong:
        operations = f"{len(wrong)} operation{'s' if len(wrong) > 1 else ''}"
        lines = "\n".join(dict.fromkeys(wrong))
        raise AssertionError(f"{operations} should {should} {_listed(accepted)}:\n{lines}")


def _listed(dtypes: frozenset[str]) -> str:
    return " or ".join(sorted(dtypes))


def _line_of(node: Node, of: Callable[[Any], tuple[str, ...]] = operands_of) -> str:
    return _line(finding("", node, "", of(node.site.equation)))


def _line(found: Finding) -> str:
    """Returns the line of a message: operation, path, dtypes, pass and source line."""
    where = f"at '{found.path}'" if found.path else "outside of any module"
    backward = ", backward" if found.is_backward else ""
    source = found.source or "source line unknown"
    return f"  {found.primitive} {where} in {', '.join(found.dtypes)}{backward}: {source}"


# --------------------------------------------------------------------------------------------------
# Errors in units in the last place
# --------------------------------------------------------------------------------------------------


def spacing(size: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns the spacing of floats of `dtype` at magnitudes `size`, in float64.

    Below the smallest normal number it is the spacing of the subnormal numbers.
    """
    info = jnp.finfo(dtype)
    normal = np.maximum(np.abs(np.asarray(size, np.float64)), float(info.smallest_normal))
    return np.exp2(np.floor(np.log2(normal))) * float(info.eps)


def ulps_of(actual: Any, desired: np.ndarray, dtype: DTypeLike, floor: float) -> np.ndarray:
    """Returns the errors in ulps: ``|actual - desired| / spacing(max(|desired|, floor))``.

    Args:
      actual: floating, of any dtype.
      desired: the true values, in float64.
      dtype: the dtype whose ulps are counted.
      floor: the magnitude below which an ulp gets no smaller. A number near zero that results from
        a subtraction has no correct digits left in any dtype.

    Returns:
      float64 of the shape of `desired`. An infinity counts as the number after the largest of the
      dtype, and is right where the truth rounds to it. A NaN is right where the truth is NaN or
      rounds to NaN (as in float8_e4m3fn, which has no infinity); elsewhere its error is infinite.
    """
    actual, desired = np.asarray(actual).astype(np.float64), np.asarray(desired, np.float64)
    largest = float(jnp.finfo(dtype).max)
    with np.errstate(all="ignore"):
        rounded = desired.astype(jnp.dtype(dtype)).astype(np.float64)
        after = largest + spacing(np.asarray(largest), dtype)
        reached = np.where(np.isinf(actual), np.copysign(after, actual), actual)
        error = np.abs(reached - desired) / spacing(np.maximum(np.abs(desired), floor), dtype)
        error = np.where(np.isnan(error), np.inf, error)
    is_right = (actual == desired) | ((actual == rounded) & ~np.isfinite(rounded))
    is_right |= np.isnan(actual) & np.isnan(rounded)
    return np.where(is_right, 0.0, error)


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
    told: list[str] = []
    for (path, leaf), truth in zip(leaves, truths, strict=True):
        told += _messages(jax.tree_util.keystr(path), leaf, truth, ulps, dtype, floor)
    if told:
        raise AssertionError("\n".join(told))


def _messages(
    path: str, actual: Any, desired: Any, allowed: float, dtype: DTypeLike | None, floor: float
) -> Iterator[str]:
    """Yields what is wrong with one array, or with each part of a complex one.

    Raises:
      ValueError: the shapes differ.
    """
    leaf, truth, name = np.asarray(actual), np.asarray(desired), path or "The array"
    if leaf.shape != truth.shape:
        raise ValueError(f"{name} should be of shape {truth.shape}, but is of shape {leaf.shape}.")
    if np.iscomplexobj(leaf) or np.iscomplexobj(truth):
        own = dtype or np.real(leaf).dtype
        for part, of in ("real", np.real), ("imag", np.imag):
            yield from _messages(f"{name}.{part}", of(leaf), of(truth), allowed, own, floor)
        return
    if dtype is None and not jnp.issubdtype(leaf.dtype, jnp.floating):
        if not np.array_equal(leaf, truth):
            yield f"{name}: {leaf.dtype} numbers should be equal, but are not."
        return
    in_dtype = jnp.dtype(leaf.dtype if dtype is None else dtype)
    error = ulps_of(leaf, np.asarray(truth, np.float64), in_dtype, floor)
    wrong = int((error > allowed).sum())
    if wrong:
        worst = np.unravel_index(int(error.argmax()), error.shape)
        index = f", at {tuple(map(int, worst))}," if error.ndim else ""
        yield (
            f"{name}: {wrong} of {error.size} numbers are off by more than {allowed:g} ulps of "
            f"{in_dtype.name}. The worst{index} is off by {error[worst]:.3g} ulps: got "
            f"{leaf[worst]}, expected {truth[worst]}."
        )
