"""Recurrent carries: boundaries leave them uncast, and a cell returns its carry in the dtype of the one given."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mpmodules._references import is_reference
from mpmodules.functional import is_wider
from policy import boundary
from policy.casting import cast_array, cast_floating, is_floating
from policy.policy import Policy
from policy.precedence import Effective


def cast_inputs(
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_step: bool,
    is_loop: bool,
    keep: Collection[str],
    signature: Callable[[], inspect.Signature],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Casts a boundary's inputs, but not the carry of a cell's step (its first argument) or of a loop over one.

    Args:
      is_step: whether the call is a cell's, from carry and input to carry and output.
      is_loop: whether the call runs a cell over a sequence, and may take an `initial_carry`.
      keep, signature: as in `policy.boundary.cast_inputs`.
    """
    carry = args[:1] if is_step else ()

    def without_carry() -> inspect.Signature:
        full = signature()
        return full.replace(parameters=list(full.parameters.values())[len(carry) :])

    named = ("carry",) if is_step else ("initial_carry",) if is_loop else ()
    args, kwargs = boundary.cast_inputs(
        policy,
        args[len(carry) :],
        kwargs,
        is_leaf=is_reference,
        keep=(*keep, *named),
        signature=without_carry,
    )
    return (*carry, *args), kwargs


def cast_outputs(policy: Policy, outputs: Any, *, has_carry: bool) -> Any:
    """Casts a boundary's outputs, but not the carry where there is one: the first of a pair."""
    if has_carry and is_pair(outputs):
        return outputs[0], boundary.cast_outputs(policy, outputs[1], is_leaf=is_reference)
    return boundary.cast_outputs(policy, outputs, is_leaf=is_reference)


def returns_carry(loop: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether a call of an RNN returns its carry beside its output."""
    asked = kwargs.get("return_carry")
    return bool(loop.return_carry if asked is None else asked)


def given_carry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the carry that a cell is called with: its first argument, or `carry=`."""
    return args[0] if args else kwargs.get("carry")


def with_carry(carry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a cell's arguments with another carry in place of the one given."""
    return ((carry, *args[1:]), kwargs) if args else (args, kwargs | {"carry": carry})


def handed_on(new: Any, given: Any) -> Any:
    """Casts a cell's new carry to the dtypes of the one given, wherever these are wider.

    Thus a float32 carry keeps its type through a loop of half-precision steps. A carry is never rounded to a narrower
    dtype of the first one.
    """
    if jax.tree.structure(new) != jax.tree.structure(given):
        return new
    return jax.tree.map(_as_wide, new, given)


def _as_wide(new: Any, given: Any) -> Any:
    if not (is_floating(new) and is_floating(given) and is_wider(given.dtype, new.dtype)):
        return new
    return cast_array(new, given.dtype)


def hand_on_outputs(outputs: Any, given: Any) -> Any:
    """Applies `handed_on` to the carry in a cell's outputs."""
    if not is_pair(outputs):
        return outputs
    return handed_on(outputs[0], given), outputs[1]


def is_pair(outputs: Any) -> bool:
    """Returns whether a call returned a carry and an output, as cells do."""
    return isinstance(outputs, tuple) and len(outputs) == 2


def step_in(
    dtype: DTypeLike | None,
    step: Callable[..., tuple[Any, Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    """Runs one step of a Flax cell with carry and output in `dtype`.

    Args:
      dtype: the cell's computation dtype. None (infer it), or one that is not floating, leaves the step as it is.
      step: the cell's ``__call__``, from carry and input to carry and output.
      args, kwargs: its arguments.

    Returns:
      The new carry, in `dtype` or in the wider dtype that the given one had, and the output in `dtype`.
    """
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return step(*args, **kwargs)
    given = given_carry(args, kwargs)
    args, kwargs = with_carry(cast_floating(given, dtype), args, kwargs)
    return hand_on_outputs(cast_floating(step(*args, **kwargs), dtype), given)


def indexing_lengths(seq_lengths: Any) -> Any:
    """Casts a loop's lengths to JAX's default integer dtype, that of the indices which Flax adds them to.

    In x64 mode strict promotion refuses int64 indices with int32 lengths.
    """
    if seq_lengths is None or not jnp.issubdtype(jnp.result_type(seq_lengths), jnp.integer):
        return seq_lengths
    return jnp.asarray(seq_lengths, jax.dtypes.canonicalize_dtype(int))


_ADVICE = "Modules inside are boundaries with a policy of their own"


@contextlib.contextmanager
def scan_explained(crossed: Mapping[str, Effective], at: str | None = None, *, lifting: str = "") -> Iterator[None]:
    """Adds, to JAX's error for a scan whose carry changes its dtype, the boundaries inside that change dtypes.

    Args:
      crossed: the boundaries crossed, by path or class; read when the error arrives.
      at: the path of the boundary whose call this is: those below it are named. None names all.
      lifting: for the message, another remedy that the wing has.
    """
    try:
        yield
    except TypeError as error:
        below = f"{at}/" if at else ""
        inside = {name: effective for name, effective in crossed.items() if name != at and name.startswith(below)}
        explained = any(note.startswith(_ADVICE) for note in getattr(error, "__notes__", ()))
        if inside and "carry" in str(error) and not explained:
            listed = ", ".join(f"'{name}' ({_described(inside[name])})" for name in sorted(inside))
            error.add_note(
                f"{_ADVICE}: {listed}. A layer inside of a model keeps float32 to itself under the policy "
                "'f32_inside', and hands on what the code around it computes in. Where one is the body of a scan, "
                f"give it the policy that its caller obeys, {lifting}or cast the carry to its output_dtype before the "
                "scan."
            )
        raise


def _described(effective: Effective) -> str:
    policy, source = effective.policy, effective.source
    returned = "nothing of its own" if policy is None else policy.output_dtype.name
    by = f" by {source.kind} {source.detail}".rstrip() if source.own else ""
    return f"returns {returned}{by}"
