"""Modules that users write, and the parameters of theirs that `keep_params` leaves to their own
dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

from mpmodules.calls.constructors import require_names
from mpmodules.calls.defined_in import package_of
from policy.core.policy_warnings import warn_once


@functools.cache
def is_written_by_user(cls: type, upstream: type) -> bool:
    """Returns whether a class of ours is one that a user wrote, and derives from none of Flax's
    layers.

    Args:
      cls: a class of modules.
      upstream: Flax's base class of modules.
    """
    return getattr(cls, "_upstream_class", None) is upstream and package_of(cls) != "mpmodules"


def require_keep_params(cls: type) -> None:
    """Refuses a class whose own `keep_params` is no collection of names.

    Raises:
      TypeError: it is one text, or holds something that is no text.
    """
    require_names(cls, "keep_params", vars(cls).get("keep_params", ()), example="scale")


def warn_of_unknown_names(cls: type, params: Iterable[str], where: str) -> None:
    """Warns of names in a class's `keep_params` that a module of it has no parameter of.

    Args:
      cls: the class.
      params: the names of the module's parameters.
      where: how the message names the module.
    """
    keep: Collection[str] = getattr(cls, "keep_params", ())
    known = sorted(set(params))
    unknown = sorted(set(keep) - set(known))
    if unknown:
        warn_once(
            f"{cls.__name__}.keep_params names {', '.join(unknown)}, but {where} has no such "
            f"parameter. It has: {', '.join(known) or 'none'}."
        )
