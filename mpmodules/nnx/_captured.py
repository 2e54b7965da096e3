"""Capture of a policy while a module is built: where it comes from, and who does not follow it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
from flax import nnx as flax_nnx

from mpmodules._references import is_reference
from mpmodules.nnx._obeying import obeys_policies
from policy.policy import Policy
from policy.precedence import warn_once
from policy.provenance import Source
from policy.scope import Scope


@dataclasses.dataclass
class Frame:
    """One construction: the source of its policy, whether it is captured yet, and the module."""

    source: Source
    captured: bool = False
    module: Any = None


class _Building(threading.local):
    """The modules under construction in this thread, innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []


building = _Building()


def refuse_children_from_outside(module: Any, policy: Policy, arguments: Any) -> None:
    """Refuses a policy given to a container whose children were built before it, which it can't reach."""
    given = [x for x in jax.tree.leaves(arguments, is_leaf=is_reference) if isinstance(x, flax_nnx.Module)]
    strangers = sorted(
        {
            type(child).__name__
            for outside in given
            for _, child in flax_nnx.iter_modules(outside)
            if (hasattr(child, "param_dtype") or obeys_policies(child)) and not _follows(child, policy)
        }
    )
    if strangers:
        raise ValueError(
            f"{type(module).__name__}(dtype_policy='{policy}'): {', '.join(strangers)} had been built before, under "
            "another policy or none, and a parameter's dtype can't follow. Build them inside, or in a use_policy "
            "block, or call mpmodules.nnx.apply_policy(model, policy) on the whole."
        )


def _follows(child: Any, policy: Policy) -> bool:
    """Returns whether a built module obeys `policy`, its own dtype arguments aside, or carries one of its own."""
    captured = getattr(child, "dtype_policy", None)
    if captured is None or child._policy_source.own:
        return captured is not None
    return _captured_from(child, policy)


def _captured_from(module: Any, policy: Policy) -> bool:
    """Returns whether a module captured `policy`, its own dtype arguments aside."""
    captured = module.dtype_policy
    if captured is None:
        return False
    same: dict[str, Any] = {}
    if getattr(module, "_explicit_dtype", None) is not None:
        same |= {"compute_dtype": policy.compute_dtype, "output_dtype": policy.output_dtype, "reduction_dtype": None}
    if getattr(module, "_explicit_param_dtype", None) is not None:
        same["param_dtype"] = policy.param_dtype
    return captured.replace(**same) == policy.replace(**{name: value for name, value in same.items() if value is None})


def warn_of_scope(module: Any, scope: Scope) -> None:
    """Warns where a built module is called in a scope whose policy it did not capture."""
    if any(frame.module is module for frame in building.frames):  # its policy is captured when it is built
        return
    if scope.policy is not None and not scope.boundary_open and not _captured_from(module, scope.policy):
        captured = "no policy" if module.dtype_policy is None else f"'{module.dtype_policy}'"
        warn_once(
            f"{type(module).__name__} was built under {captured}, and the scope around this call, '{scope.policy}', "
            "changes no nnx layer: build the model in the scope, or call mpmodules.nnx.apply_policy(model, policy)."
        )
