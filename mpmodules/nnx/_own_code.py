"""Calls of nnx ports whose own code multiplies: traced as pure functions and autocast."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import nnx as flax_nnx

from mpmodules._boundary import cast_outputs
from mpmodules._own_code import ASKED_FOR, LAYERS_ONLY, Decision, describe, key_of_call, tracing
from mpmodules._port_options import OwnCode
from mpmodules.nnx._pure_calls import StatefulCall
from policy.autocast.own_code import traced
from policy.policy import Policy
from policy.precedence import warn_once


class OwnCodeOf:
    """The choice of how a foreign module's own code runs in a port, and the results of looking at
    its methods' calls.

    It is static metadata of the module: copies share it, and two are equal where the code runs
    alike.

    Attributes:
      asked: "autocast", "keep", or None: under autocast where the code multiplies, or needs
        float32.
    """

    def __init__(self, asked: OwnCode):
        self.asked: OwnCode = asked
        self.known: dict[Hashable, Decision] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnCodeOf) and other.asked == self.asked

    def __hash__(self) -> int:
        return hash((OwnCodeOf, self.asked))

    def __repr__(self) -> str:
        return f"OwnCodeOf({self.asked!r})"

    def __reduce__(self) -> Any:
        return OwnCodeOf, (self.asked,)


def own_code_of(module: Any) -> OwnCodeOf | None:
    """Returns the note on a foreign module of a port; None of other modules."""
    return vars(module).get("_own_code")


def call_port(
    module: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    note: OwnCodeOf,
    *,
    plainly: Callable[[], Any],
    inside: Callable[[], AbstractContextManager[None]],
) -> Any:
    """Calls the outermost method of a port, its own code under autocast where it multiplies.

    Args:
      module: a foreign module of the port.
      name: the method's name.
      args, kwargs: its arguments.
      note: the module's.
      plainly: calls the method as it is.
      inside: a context in which calls are no outermost ones.
    """
    if note.asked == "keep":
        return plainly()
    policy: Policy = module.dtype_policy
    key = name, key_of_call(args, kwargs)
    shown = ASKED_FOR if note.asked else note.known.get(key)
    if shown == LAYERS_ONLY:
        return plainly()
    try:
        with inside():
            call = StatefulCall.of_method(module, name, args, kwargs, named=True)
            ported = traced(call.inside(tracing), *call.trees)
    except Exception:
        if shown is not None:
            raise
        # Code that asks for another dtype, or one with an error, is called as it is: it says itself
        # what is wrong.
        outputs = plainly()
        note.known[key] = LAYERS_ONLY  # not before: what fails in either way shows nothing
        return outputs
    if shown is None:
        shown = note.known[key] = describe(
            type(module).__name__, ported, *_classes_and_shares(module)
        )
        if not shown.autocasts:
            return plainly()
    if shown.text:  # by the first call, whose shares may be others
        warn_once(next(known.text for known in note.known.values() if known.text))
    return cast_outputs(policy, call.finish(ported.run(policy)), has_carry=False)


def _classes_and_shares(module: Any) -> tuple[dict[tuple[str, ...], str], dict[str, float]]:
    """Returns the class of the module at each path, and the shares of the parameters that foreign
    ones hold.
    """
    name, total = type(module).__name__, 0
    classes: dict[tuple[str, ...], str] = {}
    sizes: collections.Counter[str] = collections.Counter()
    for path, child in flax_nnx.iter_modules(module):
        classes[(name, *map(str, path))] = type(child).__name__
        for _, value in flax_nnx.iter_children(child):
            if isinstance(value, flax_nnx.Param):
                size = sum(leaf.size for leaf in jax.tree.leaves(value))
                total += size
                if own_code_of(child) is not None:
                    sizes[type(child).__name__] += size
    return classes, {cls: size / total for cls, size in sizes.items()} if total else {}
