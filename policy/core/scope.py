"""The policy in force: one context that is part of JAX's jit cache key."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax

from policy.core.casting import require_available
from policy.core.compat import set_global
from policy.core.matmul_dtypes import assumed_backend, backend, backend_of
from policy.core.policy import Policy, get_policy
from policy.core.provenance import Source, coming_from, source_in_force
from policy.core.rules import PolicyRules, RulesLike


@dataclasses.dataclass(frozen=True)
class Scope:
    """The complete contents of the context.

    It is a key of every trace, so a counter here would retrace at each call.

    Attributes:
      policy: the policy in force, or None.
      rules: the rules in force, or None.
      boundary_open: True inside a module's call whose inputs have been cast to the policy.
      traces_own_code: True while a user's code is traced in float32, for autocast to evaluate;
        layers return float32 to it.
      keeps_own_code: True while a user's code runs in the dtypes that it meets, without a trace.
      in_full_precision: True inside a `full_precision` block, where compute_dtype is
        reduction_dtype.
      backend: the platform and kind of the devices to trace for, if they are not the default ones.
      options: other values that change the traces of a model under the policy; used as a key only.
    """

    policy: Policy | None = None
    rules: PolicyRules | None = None
    boundary_open: bool = False
    traces_own_code: bool = False
    keeps_own_code: bool = False
    in_full_precision: bool = False
    backend: tuple[str, str] | None = None
    options: Hashable = None


# Made once, at import: a second user context would retrace everything that was cached before it.
_context = jax.make_user_context(Scope())


def current_scope() -> Scope:
    """Returns the scope in force in this thread."""
    return _context.value


def current_policy() -> Policy | None:
    """Returns the policy in force in this thread, or None.

    It is that of the innermost `use_policy` block or open module call, otherwise the global one.

    >>> import policy
    >>> policy.current_policy() is None
    True
    >>> with policy.use_policy("bfloat16"):
    ...     policy.current_policy().compute_dtype
    dtype(bfloat16)
    """
    return _context.value.policy


@contextlib.contextmanager
def enter(scope: Scope, source: Source | None = None):
    """Puts `scope` in force for a block. A scope equal to the current one is not entered again.

    Args:
      source: the provenance of its policy, for summaries; None keeps the current source.
    """
    outer = _context.value
    if scope.backend is None:
        scope = dataclasses.replace(scope, backend=outer.backend)
    with coming_from(source_in_force() if source is None else source):
        if scope == outer:
            yield
        else:
            # a fresh context object for each entry: one object can't be entered twice
            with _context(scope):
                yield


@contextlib.contextmanager
def traced_for(device: Any):
    """Traces a block's programs for a device that need not be there.

    ``half``, ``m=8bit`` and operations that differ by backend are those of this device.
    """
    found = backend_of(device)
    if found == backend():
        yield
        return
    with assumed_backend(found), enter(dataclasses.replace(current_scope(), backend=found)):
        yield


def _checked(
    policy: Policy | str | None, rules: RulesLike | None
) -> tuple[Policy | None, PolicyRules | None]:
    policy = None if policy is None else get_policy(policy)
    rules = (
        None
        if rules is None
        else PolicyRules(rules)
        if not isinstance(rules, PolicyRules)
        else rules
    )
    for used in (policy, *(rule_policy for _, rule_policy in rules or ())):
        if used is not None:
            require_usable(used)
    return policy, rules


def require_usable(policy: Policy) -> Policy:
    """Returns `policy`, or raises if this process can't honour it.

    Raises:
      ValueError: a field is float64 while x64 is disabled.
    """
    for field in ("param_dtype", "compute_dtype", "output_dtype", "reduction_dtype"):
        require_available(getattr(policy, field))
    return policy


class use_policy(contextlib.ContextDecorator):
    """Puts a policy and rules in force for a block, or as a decorator for each call.

    linen modules obey the policy in force where they are called, nnx modules the one in force where
    they were built. An inner block without rules keeps the outer ones; ``use_policy(None)`` puts no
    policy in force. The scope belongs to this thread: a new thread sees the global policy. It is
    part of JAX's jit cache key, so a jitted function is retraced under another policy and its first
    program is reused afterwards. A `use_policy` object that is dropped without having been entered
    emits a warning, since it has no effect.

    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     policy.compute_dtype()
    dtype(bfloat16)
    >>> policy.compute_dtype() is None
    True

    Args:
      policy: a Policy, its text form, or None.
      rules: `PolicyRules`, or an argument for their constructor.

    Raises:
      ValueError, TypeError: the policy or the rules are malformed, or ask for float64 while x64 is
        disabled.
    """

    def __init__(self, policy: Policy | str | None, rules: RulesLike | None = None):
        self._policy, self._rules = _checked(policy, rules)
        self._entered = threading.local()  # one object may be entered again, and by several threads
        self._is_used = False

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `function` so that each call runs in a block of its own."""
        self._is_used = True
        return super().__call__(function)

    def __del__(self) -> None:
        if not getattr(self, "_is_used", True):
            warnings.warn(
                f"use_policy({str(self._policy)!r}) was called without a `with` block, so it had "
                "no effect. Write `with use_policy(...):` around the calls, or set_policy(...) for "
                "the whole process.",
                stacklevel=2,
            )

    def __enter__(self) -> Policy | None:
        self._is_used = True
        outer = current_scope()
        rules = outer.rules if self._rules is None else self._rules
        entered = enter(
            dataclasses.replace(outer, policy=self._policy, rules=rules), Source("scope")
        )
        entered.__enter__()
        self._entered.__dict__.setdefault("stack", []).append(entered)
        return self._policy

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.stack.pop().__exit__(*exception)


def set_policy(policy: Policy | str | None, rules: RulesLike | None = None) -> None:
    """Sets the global policy and rules, in force in every thread outside of `use_policy` blocks.

    ``set_policy(None)`` removes them. Jitted functions are retraced where the policy changed.

    >>> import policy
    >>> policy.set_policy("mixed_bfloat16")
    >>> policy.current_policy().short
    'p=f32,c=bf16,o=f32'
    >>> policy.set_policy(None)

    Args:
      policy: a Policy, its text form, or None.
      rules: `PolicyRules`, or an argument for their constructor.

    Raises:
      ValueError, TypeError: the policy or the rules are malformed, or ask for float64 while x64 is
        disabled.
    """
    policy, rules = _checked(policy, rules)
    set_global(_context, Scope(policy, rules))
