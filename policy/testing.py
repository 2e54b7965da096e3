"""Assertions about dtypes and programs, for test suites. All but `assert_close_in_ulps` trace and run nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy.inspection.differentiating import with_gradients
from policy.inspection.operations import accumulation_of, is_inexact, kind_of, operands_of, sums
from policy.inspection.same_program import first_difference
from policy.inspection.walk import Site, walk
from policy.policy import dtype_to_names, parse_dtype
from policy.tracing import trace
from policy.ulps import ulps as ulps_of

DTypes = DTypeLike | Collection[DTypeLike]
_KNOWN = frozenset(name for names in dtype_to_names.values() for name in names)


def assert_reductions_in(
    fn: Any,
    args: Sequence[Any],
    dtype: DTypes,
    *,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    allow: Collection[str] = (),
) -> None:
    """Asserts that every sum of floating numbers runs in `dtype`.

    Sums are: reductions by addition or multiplication, cumulative and windowed ones, scatter-adds (the gradient of an
    embedding), and collectives that sum. Sums of one number, and scatters that say that no index stands twice, round
    nothing and are left out; so are maxima.

    Args:
      fn: any function of arrays, an nnx module or a method of one, or a function of nnx modules.
      args, kwargs: what it is called with; `jax.ShapeDtypeStruct` will do for any array.
      dtype: a dtype, or several that are right.
      backward: whether the gradients are asserted about as well; `policy.audit` says by what, and of what.
      allow: path patterns of what is left out: regular expressions that match a module's path in full, with or without
        the root's class, and hold for what is below it.

    Raises:
      AssertionError: names the path, the operation, its dtypes and its source line, of every one in another dtype; or
        there is no sum at all, so that nothing would be asserted.
      ValueError: a pattern in `allow` matches no path.
    """
    accepted = _names(dtype)
    sites = [site for site in _allowed(_sites(fn, args, kwargs, backward), allow) if _rounds(site)]
    _require_any(sites, "sum of floating numbers", "assert_reductions_in", allow)
    wrong = [site for site in sites if not set(operands_of(site.equation)) <= accepted]
    _require_none(wrong, f"should be summed in {_listed(accepted)}")


def assert_dots_in(
    fn: Any,
    args: Sequence[Any],
    dtype: DTypes,
    *,
    accumulation: DTypes | None = None,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    allow: Collection[str] = (),
) -> None:
    """Asserts that every floating matmul and convolution multiplies numbers of `dtype`.

    Args:
      dtype: a dtype, or several that are right: both operands have one of them.
      accumulation: what sums are declared to be made in, by `preferred_element_type` or the dot algorithm; "backend"
        is what a half matmul leaves open. None: not asserted.
      fn, args, kwargs, backward, allow: see `assert_reductions_in`.

    Raises:
      AssertionError, ValueError: as `assert_reductions_in`.
    """
    accepted = _names(dtype)
    sites = [site for site in _allowed(_sites(fn, args, kwargs, backward), allow) if _multiplies(site)]
    _require_any(sites, "matmul or convolution of floating numbers", "assert_dots_in", allow)
    wrong = [site for site in sites if not set(operands_of(site.equation)) <= accepted]
    _require_none(wrong, f"should multiply {_listed(accepted)}")
    if accumulation is not None:
        declared = _names(accumulation)
        wrong = [site for site in sites if accumulation_of(site.equation) not in declared]
        _require_none(wrong, f"should accumulate in {_listed(declared)}", accumulation_of)


def assert_same_program(
    f: Any,
    g: Any,
    args: Sequence[Any],
    *,
    g_args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Asserts that two functions are traced to one program.

    The same operations, with the same parameters and dtypes, on the same values in the same order. The names of
    variables and of jitted functions and source lines don't count; constants that are closed over count by their values.
    Of a custom derivative, what runs is compared, and not the rule: give `jax.grad` of both for that.

    Args:
      f, g: the functions; see `assert_reductions_in`.
      args, kwargs: what both are called with.
      g_args: what `g` is called with, where that is something else.

    Raises:
      AssertionError: shows the first difference: its path, operations, dtypes and source lines.
    """
    kwargs = dict(kwargs or {})
    jaxprs = (trace(fn, *given, **kwargs).jaxpr for fn, given in ((f, args), (g, args if g_args is None else g_args)))
    difference = first_difference(*jaxprs)
    if difference is not None:
        raise AssertionError(f"{_name(f)} and {_name(g)} are not the same program. {difference}")


def assert_close_in_ulps(
    actual: Any, desired: Any, ulps: float, dtype: DTypeLike | None = None, *, floor: float = 0.0
) -> None:
    """Asserts that numbers are right to so many units in the last place.

    An ulp is the distance between neighbours at the magnitude of what is right, in the dtype of `actual`: below its
    normal numbers the distance of its subnormal ones. An infinity counts as the number after the largest, and a NaN is
    right where the truth is one, or can't be anything else in that dtype.

    Args:
      actual: an array, or a tree of them. Integers and booleans are to be equal; complex numbers are compared by parts.
      desired: a tree of the same structure and shapes: the truth, best in float64.
      ulps: how many are allowed.
      dtype: whose ulps; by default those of each array's own dtype.
      floor: the magnitude below which an ulp gets no smaller.

    Raises:
      AssertionError: names the array's path, the number and the index of the worst one, and how many are wrong.
      ValueError: there is nothing to compare, or the trees or shapes are not the same.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(actual)
    truths, other = jax.tree.flatten(desired)
    if treedef != other:
        raise ValueError(f"The trees should be of one structure, but are {treedef} and {other}.")
    if not leaves:
        raise ValueError("assert_close_in_ulps was given no array: nothing would be asserted.")
    told = [
        message
        for (path, leaf), truth in zip(leaves, truths, strict=True)
        if (message := _off(jax.tree_util.keystr(path), leaf, truth, ulps, dtype, floor))
    ]
    if told:
        raise AssertionError("\n".join(told))


# ---------------------------------------------------------------------------------------------------------------------
# Which equations, and what is said of them
# ---------------------------------------------------------------------------------------------------------------------


def _sites(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, backward: bool) -> list[Site]:
    if isinstance(args, (str, jax.Array, np.ndarray, jax.ShapeDtypeStruct)) or not isinstance(args, Sequence):
        raise TypeError(f"args should be a tuple of the function's arguments, but got a {type(args).__name__}.")
    kwargs = dict(kwargs or {})
    jaxpr = with_gradients(fn, tuple(args), kwargs) if backward else trace(fn, *args, **kwargs).jaxpr
    return list(walk(jaxpr))


def _rounds(site: Site) -> bool:
    equation = site.equation
    if not sums(equation) or not any(map(is_inexact, operands_of(equation))) or equation.params.get("unique_indices"):
        return False
    shape: Any = getattr(equation.invars[0].aval, "shape", ())
    axes = equation.params.get("axes") if site.name.startswith("reduce_") else None
    return not (axes is not None and all(isinstance(axis, int) and shape[axis] == 1 for axis in axes))


def _multiplies(site: Site) -> bool:
    return kind_of(site.name) in ("dot", "convolution") and any(map(is_inexact, operands_of(site.equation)))


def _allowed(sites: list[Site], allow: Collection[str]) -> list[Site]:
    """The sites that no pattern leaves out."""
    if isinstance(allow, str):
        raise TypeError(f"allow should be a collection of path patterns, as ({allow!r},), but got the string itself.")
    patterns = {pattern: re.compile(pattern) for pattern in allow}
    known = {site.path: list(_names_of(site.path)) for site in sites} if patterns else {}
    matched = {
        path: {pattern for pattern, regex in patterns.items() if any(map(regex.fullmatch, names))}
        for path, names in known.items()
    }
    unmatched = sorted(set(patterns).difference(*matched.values()))
    if unmatched:
        paths = ", ".join(sorted({"/".join(path) for path in known if path})) or "none"
        raise ValueError(f"allow: '{unmatched[0]}' matches no path. Paths: {paths}.")
    return [site for site in sites if not matched.get(site.path)]


def _names_of(path: Sequence[str]) -> Iterator[str]:
    """What rules know a path and those above it by: with the root's class name and without."""
    for length in range(1, len(path) + 1):
        yield "/".join(path[:length])
        yield "/".join(path[1:length])


def _require_any(sites: list[Site], what: str, assertion: str, allow: Collection[str]) -> None:
    if not sites:
        but = f" but for what allow={tuple(allow)!r} leaves out" if allow else ""
        raise AssertionError(f"{assertion} was given a program without any {what}{but}: nothing would be asserted.")


def _require_none(wrong: list[Site], should: str, of: Callable[[Any], str] | None = None) -> None:
    if wrong:
        told = dict.fromkeys(_told(site, of) for site in wrong)
        raise AssertionError(
            f"{len(wrong)} {'operation' if len(wrong) == 1 else 'operations'} {should}:\n" + "\n".join(told)
        )


def _told(site: Site, of: Callable[[Any], str] | None) -> str:
    path = f"at '{'/'.join(site.path)}'" if site.path else "outside of any module"
    dtypes = of(site.equation) if of else ", ".join(operands_of(site.equation))
    backward = ", backward" if site.is_backward else ""
    return f"  {site.name} {path} in {dtypes}{backward}: {site.source or 'source line unknown'}"


def _names(dtype: DTypes) -> frozenset[str]:
    """The names of the dtypes that are right."""
    given = [dtype] if isinstance(dtype, (str, type, np.dtype)) or not isinstance(dtype, Collection) else list(dtype)
    if not given:
        raise ValueError("No dtype was given that would be right.")
    return frozenset(map(_dtype_name, given))


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str) and (dtype in _KNOWN or dtype == "backend"):
        return dtype if dtype == "backend" else parse_dtype(dtype).name
    return jnp.dtype(dtype).name


def _listed(dtypes: frozenset[str]) -> str:
    return " or ".join(sorted(dtypes))


def _name(fn: Any) -> str:
    while hasattr(fn, "func"):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


def _off(path: str, leaf: Any, truth: Any, allowed: float, dtype: DTypeLike | None, floor: float) -> str:
    """What is wrong with one array; "" where nothing is."""
    leaf, truth = np.asarray(leaf), np.asarray(truth)
    if leaf.shape != truth.shape:
        raise ValueError(f"{path or 'The array'} should be of shape {truth.shape}, but is of shape {leaf.shape}.")
    if np.iscomplexobj(leaf) or np.iscomplexobj(truth):
        own = np.empty((), leaf.dtype).real.dtype if np.iscomplexobj(leaf) else leaf.dtype
        parts = (
            _off(f"{path}.{name}", getattr(leaf, name), getattr(truth, name), allowed, dtype or own, floor)
            for name in ("real", "imag")
        )
        return "\n".join(filter(None, parts))
    if dtype is None and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return (
            "" if np.array_equal(leaf, truth) else f"{path or 'The array'}: {leaf.dtype}s should be equal, but are not."
        )
    in_dtype = jnp.dtype(leaf.dtype if dtype is None else dtype)
    error = ulps_of(leaf, np.asarray(truth, np.float64), in_dtype, floor=floor)
    wrong = int((error > allowed).sum())
    if not wrong:
        return ""
    worst = np.unravel_index(int(error.argmax()), error.shape)
    index = f", at {tuple(map(int, worst))}," if error.ndim else ""
    return (
        f"{path or 'The array'}: {wrong} of {error.size} numbers are off by more than {allowed:g} ulps of {in_dtype.name}; "
        f"the worst{index} by {error[worst]:.3g}: {leaf[worst]} where {truth[worst]} is right."
    )
