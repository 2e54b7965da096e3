"""The policies that modules obey, and the dtypes that a report collects of them.

Framework-free: facts about modules come in as arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy.core.messages import warn_once
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.core.scope import NO_SOURCE, Source, require_usable
from policy.programs.paths import Path, divided, joined, once
from policy.programs.thread import during, thread

# --------------------------------------------------------------------------------------------------
# Precedence of policies, rules and dtype arguments
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Effective:
    """The policy that one module obeys in one call.

    Attributes:
      policy: the effective policy, with explicit dtype arguments inserted field by field; None
        without a policy.
      base: the policy before the explicit arguments; it decides whether the call is a boundary.
      source: the provenance of the policy.
      dtype: an explicit computation dtype that no policy can hold (complex); otherwise None.
    """

    policy: Policy | None
    base: Policy | None
    source: Source
    dtype: np.dtype | None = None


def with_explicit_dtypes(
    base: Policy | None,
    *,
    source: Source,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    what: str,
    where: str,
) -> Effective:
    """Returns the effective policy of a layer, formed field by field.

    An explicit `dtype` replaces compute_dtype, and also output_dtype if the layer inherits its
    policy; an explicit `param_dtype` replaces param_dtype. If they disagree with `base`, the layer
    obeys them and a `DtypePolicyWarning` is emitted, once for each `where`.

    Args:
      base: the policy that holds without the arguments, or None.
      source: the provenance of `base`.
      dtype, param_dtype: the layer's own dtype arguments; None if they were not given.
      what: the layer's class, for messages.
      where: the layer's path, for messages.

    Raises:
      ValueError: under a policy, an argument is a dtype that no layer can compute in.
    """
    if base is None:
        return Effective(None, None, NO_SOURCE)
    require_usable(base)
    changes: dict[str, Any] = {}
    kept, defeated = None, []
    for argument, field, given in (
        ("dtype", "compute_dtype", dtype),
        ("param_dtype", "param_dtype", param_dtype),
    ):
        if given is None:
            continue
        explicit = jnp.dtype(given)
        if explicit != getattr(base, field):
            defeated.append(f"{argument}={explicit.name}")
        if jnp.issubdtype(explicit, jnp.complexfloating):
            kept = explicit if argument == "dtype" else kept
            continue
        if not jnp.issubdtype(explicit, jnp.floating) or explicit.itemsize < 2:
            raise ValueError(
                f"{what} at '{where}' can't use {argument}={explicit.name} under a policy: it "
                "should be a floating dtype of at least 16 bits, such as bfloat16. 8-bit floats "
                "are for matmul operands only: use a policy with m=f8 for those."
            )
        changes[field] = explicit
    if "compute_dtype" in changes:
        if changes["compute_dtype"] != base.compute_dtype:
            changes["matmul"] = None
        if not source.own:
            changes["output_dtype"] = changes["compute_dtype"]
    policy = base.replace(**changes) if changes else base
    if defeated:
        verb = "overrides" if len(defeated) == 1 else "override"
        warn_once(
            f"{what} at '{where}' has an explicit {' and '.join(defeated)}, which {verb} the "
            f"policy in force, '{base}'. "
            "Delete the argument to let the policy decide, or give the layer a dtype_policy."
        )
        source = dataclasses.replace(source, dtypes=", ".join(defeated))
    return Effective(policy, base, source, kept)


def warn_of_autocast(module: Any, policy: Policy | None) -> None:
    """Warns of a module that obeys another half-precision policy than the autocast around it."""
    given = thread.autocast
    if policy is None or policy.compute_dtype == given.compute_dtype:
        return
    if max(policy.compute_dtype.itemsize, given.compute_dtype.itemsize) < 4:
        warn_once(
            f"{type(module).__name__} obeys '{policy}', its own policy or that in force, which "
            f"wins over the autocast around it, '{given}'. Leave out one of the two."
        )


# --------------------------------------------------------------------------------------------------
# Compute dtypes and precisions requested by rules, policies and arguments
# --------------------------------------------------------------------------------------------------


Request = tuple[np.dtype, str | None]
"""A compute dtype, and the precision of matmuls in it; None is no request for one."""


def _of(policy: Policy) -> Request:
    return policy.compute_dtype, policy.precision


@dataclasses.dataclass
class Asked:
    """The dtypes requested in one trace.

    Attributes:
      policy: the policy around the trace, or None.
      rules: the rules around the trace, or None.
      has_policies: whether a module or function in the trace obeyed a policy.
      obeyed: the requests of modules that obey a policy, by model and path.
      given: those of layers that were given a dtype as an argument, by model and path.
      remedies: the sentences on modules that can obey no policy, "" of others, by model and path.
      of_models: the policies of whole models.
    """

    policy: Policy | None = None
    rules: PolicyRules | None = None
    has_policies: bool = False
    obeyed: dict[tuple[str, str], set[Request]] = dataclasses.field(default_factory=dict)
    given: dict[tuple[str, str], set[Request]] = dataclasses.field(default_factory=dict)
    remedies: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    of_models: set[Policy] = dataclasses.field(default_factory=set)

    def is_wide(self, path: Path) -> bool:
        """Returns whether the innermost request at a path is float32 or wider."""
        return any(dtype.itemsize >= 4 for dtype, _ in self._innermost(path))

    def has_precision(self, path: Path) -> bool:
        """Returns whether the innermost request at a path names a precision."""
        return any(precision is not None for _, precision in self._innermost(path))

    def is_wide_in_half(self, path: Path) -> bool:
        """Returns whether the innermost request at a path is float32 or wider, and one around it
        is half precision.
        """
        first, *around = [*self._requests(path)] or [()]
        is_half = any(dtype.itemsize < 4 for each in around for dtype, _ in each)
        return is_half and any(dtype.itemsize >= 4 for dtype, _ in first)

    def is_half(self, path: Path) -> bool:
        """Returns whether the innermost request at a path is half precision."""
        return any(dtype.itemsize < 4 for dtype, _ in self._innermost(path))

    def remedy(self, path: Path) -> str:
        """Returns the sentence on the innermost module at a path; "" where one on the path can obey
        policies, none is known, or no policy is in force.
        """
        found = [
            self.remedies[key]
            for model, below in reaching(path)
            for key in ((model, below), ("", below))
            if key in self.remedies
        ]
        return found[0] if found and all(found) and self.has_policies else ""

    def _innermost(self, path: Path) -> Collection[Request]:
        return next(self._requests(path), ())

    def _requests(self, path: Path) -> Iterator[Collection[Request]]:
        """Yields the requests at a path, the innermost first."""
        for model, below in reaching(path):
            found = self._at(model, below)
            if found:
                yield found
        if self.policy is not None:
            yield (_of(self.policy),)

    def _at(self, model: str, path: str) -> Collection[Request] | None:
        for noted in (self.obeyed, self.given):
            found = noted.get((model, path)) or noted.get(("", path))
            if found:
                return found
        # Modules traced earlier were not recorded, but the rules apply to them too.
        policy = None if self.rules is None else self.rules.match(path, model=model)
        return None if policy is None else (_of(policy),)


def reaching(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the models and paths from the innermost at a path to the model itself."""
    model, below = divided(path) or ("", path)
    below = once(below)
    for length in range(len(below), -1, -1):
        yield model, joined(below[:length])


@contextlib.contextmanager
def collecting(policy: Policy | None, rules: PolicyRules | None) -> Iterator[Asked]:
    """Collects the dtypes requested in a block, in this thread."""
    asked = Asked(policy, rules, has_policies=policy is not None)
    with during(asked=asked):
        yield asked


def note_obeyed(model: str, path: str, policy: Policy | None) -> None:
    """Records the policy that a module obeys in a call, if a collection is open."""
    asked = thread.asked
    if asked is not None and policy is not None:
        asked.has_policies = True
        asked.obeyed.setdefault((model, path), set()).add(_of(policy))
        if not path:
            asked.of_models.add(policy)


def note_given(model: str, path: str, dtype: DTypeLike | None) -> None:
    """Records the dtype that a layer was given as an argument, if a collection is open."""
    asked = thread.asked
    if asked is not None and dtype is not None:
        asked.given.setdefault((model, path), set()).add((np.dtype(dtype), None))


def note_remedy(model: str, path: str, sentence: str) -> None:
    """Records what to do about a module that can obey no policy, if a collection is open.

    `sentence` is "" of a module that can.
    """
    if thread.asked is not None:
        thread.asked.remedies[model, path] = sentence
