"""A port's own code, in modules that know of no policy: where it multiplies or needs float32,
autocast runs it.

Such a port is traced with its own code in float32 and its layers in their policies' dtypes, each
handing on float32; autocast then runs the code between the layers. A port whose layers do all of
that is called as it is.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from mpmodules._references import is_reference
from policy.autocast import marks
from policy.autocast.own_code import Ported
from policy.policy import Policy
from policy.provenance import Source
from policy.scope import Scope, current_scope, enter

_MOST_DECISIONS = 1024
_MOST_CLASSES = 4  # listed in a warning
_ADVICE = (
    ". apply_policy runs that code under autocast. Pass own_code='autocast' to accept this, or "
    "own_code='keep' to leave the code in its own dtypes. With 'keep', dtype_fields=True sets the "
    "dtype attributes of such modules, and functions of `policy` (einsum, reductions) obey the "
    "policy in force."
)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision on the own code of a port's call.

    Attributes:
      autocasts: whether autocast is to run it.
      text: of the warning, or "".
    """

    autocasts: bool
    text: str = ""


LAYERS_ONLY, ASKED_FOR = Decision(False), Decision(True)


class Decisions:
    """The results of looking at the first call of each method of each ported model."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[Hashable, Decision] = collections.OrderedDict()
        self._told: dict[type, str] = {}
        self._lock = threading.Lock()

    def told(self, cls: type, text: str) -> str:
        """Returns the text of a class's first warning: other calls of it show other shares, and are
        not told again.
        """
        return self._told.setdefault(cls, text)

    def get(self, key: Hashable) -> Decision | None:
        """Returns the result for a call, or None."""
        try:
            return self._known.get(key)
        except TypeError:  # a field without a hash
            return None

    def put(self, key: Hashable, shown: Decision) -> None:
        """Stores the result for a call; a key without a hash is not stored."""
        try:
            with self._lock:
                self._known[key] = shown
                if len(self._known) > _MOST_DECISIONS:
                    self._known.popitem(last=False)
        except TypeError:
            return


def key_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Returns a key for a method's call: calls that may run other code have other structures, flags
    or modes.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_reference)
    return treedef, tuple(leaf if isinstance(leaf, (bool, str)) else None for leaf in leaves)


def run_inside(call: Callable[[], Any], scope: Scope, policy: Policy | None, source: Source) -> Any:
    """Calls a module that knows of no policy inside of a port that is traced for autocast: it is no
    boundary.

    Args:
      call: calls it.
      scope: the one in force.
      policy: the one that the module obeys.
      source: where the modules inside get it from, for summaries.
    """
    if policy is None:
        return call()
    inner = dataclasses.replace(scope, policy=policy, boundary_open=True)
    with enter(inner, source), marks.computes_in(policy.compute_dtype):
        return call()


def run_layer(call: Callable[[], Any], scope: Scope, given_carry: Any) -> Any:
    """Calls a module that obeys policies inside of a port that is traced for autocast, which leaves
    it as it is.

    Args:
      call: calls it, its inputs cast.
      scope: the one in force.
      given_carry: the carry that it is called with, or None.
    """
    with enter(dataclasses.replace(scope, hands_on_float32=False)), marks.layer():
        return marked(call(), given_carry)


def tracing() -> contextlib.AbstractContextManager[Any]:
    """Puts a scope in force in which layers hand on float32."""
    return enter(dataclasses.replace(current_scope(), hands_on_float32=True))


def marked(outputs: Any, carry: Any = None) -> Any:
    """Returns a layer's outputs in float32, marked for autocast.

    A carry keeps the dtypes of the one given.
    """
    if carry is not None and isinstance(outputs, tuple) and len(outputs) == 2:
        return _marked_carry(outputs[0], carry), marked(outputs[1])
    return jax.tree.map(
        lambda x: x if is_reference(x) else marks.handed_on(x), outputs, is_leaf=is_reference
    )


def _marked_carry(new: Any, given: Any) -> Any:
    if jax.tree.structure(new) != jax.tree.structure(given):
        return marked(new)
    return jax.tree.map(
        lambda x, old: x if x.dtype == getattr(old, "dtype", None) else marks.handed_on(x),
        new,
        given,
    )


def describe(
    name: str, call: Ported, classes: Mapping[tuple[str, ...], str], held: Mapping[str, float]
) -> Decision:
    """Returns the decision on a model's own code, and a warning with its share of the FLOPs and the
    remedies.

    Args:
      name: of the model's class.
      call: a call of the model.
      classes: the name of the class of the module at each path of the call's program.
      held: the share of the parameters that foreign modules hold themselves, by class.
    """
    by_class: collections.Counter[str] = collections.Counter()
    for path, flops in call.own_matmuls().items():
        by_class[_class_at(path, classes) or name] += flops
    if not by_class:
        return Decision(call.needs_float32())
    total = call.matmuls()
    flops = {cls: count / total for cls, count in by_class.items()}
    text = (
        f"{_shares(flops)} of the FLOPs of {name}'s matmuls are in code outside of layers "
        f"({_listed(flops)})"
    )
    if sum(held.values()) >= 0.005:
        text += f", whose modules hold {_shares(held)} of its parameters ({_listed(held)})"
    return Decision(True, text + _ADVICE)


def _shares(shares: Mapping[str, float]) -> str:
    return f"{sum(shares.values()):.0%}"


def _listed(shares: Mapping[str, float]) -> str:
    most = sorted(shares.items(), key=lambda item: -item[1])[:_MOST_CLASSES]
    return ", ".join(f"{name} {share:.0%}" for name, share in most)


def _class_at(path: tuple[str, ...], classes: Mapping[tuple[str, ...], str]) -> str | None:
    return next((classes[path[:n]] for n in range(len(path), -1, -1) if path[:n] in classes), None)
