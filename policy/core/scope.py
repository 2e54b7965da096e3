"""The policy in force: one context that is part of JAX's jit cache key.

Blocks and decorators put a scope of this thread in force.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from policy.core.arrays import cast_floating, is_inexact, require_available
from policy.core.blocks import Block, is_suspended
from policy.core.dtypes import HIGHEST, backend, backend_of
from policy.core.messages import instruction_after, require_function, warn_once
from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules, RulesLike, as_rules
from policy.programs.frameworks import is_reference
from policy.programs.marks import BOUNDARY, ISLAND, NO_POLICY, returned
from policy.programs.thread import during, thread

F = TypeVar("F", bound=Callable[..., Any])

# --------------------------------------------------------------------------------------------------
# The provenance of policies
# --------------------------------------------------------------------------------------------------

ProvenanceKind = Literal["argument", "rule", "enclosing module", "scope", "global", "none"]


@dataclasses.dataclass(frozen=True)
class Source:
    """The provenance of a module's policy.

    Sources compare equal if their `own` is equal: the rest is for people, and the structure of a
    model must not depend on it.

    Attributes:
      kind: the origin of the policy.
      detail: the argument's name, the rule's pattern, or the enclosing module's path.
      own: whether the module itself has the policy, by an argument or a rule, rather than
        inheriting it.
      dtypes: dtype arguments that override the policy, as ``dtype=float32``.
    """

    kind: ProvenanceKind = dataclasses.field(compare=False)
    detail: str = dataclasses.field(default="", compare=False)
    own: bool = False
    dtypes: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        source = f"{self.kind}: {self.detail}" if self.detail else self.kind
        return f"argument: {self.dtypes}; else {source}" if self.dtypes else source

    def for_those_inside(self, where: str) -> Source:
        """Returns the source for a module that inherits the policy inside the module at `where`."""
        if self.kind == "argument" or self.dtypes:
            return Source("enclosing module", where)
        return dataclasses.replace(self, own=False)


NO_SOURCE = Source("none")


# --------------------------------------------------------------------------------------------------
# The context
# --------------------------------------------------------------------------------------------------


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
      attention_axes: the axes of a mesh that split attention's queries, or None.
      attention_policy: the policy of attention functions in code that autocast traces in float32,
        outside of modules with policies; or None.
      options: other values that change the traces of a model under the policy; used as a key only.
      source: the provenance of the policy, for summaries. It is no part of the key.
    """

    policy: Policy | None = None
    rules: PolicyRules | None = None
    boundary_open: bool = False
    traces_own_code: bool = False
    keeps_own_code: bool = False
    in_full_precision: bool = False
    backend: tuple[str, str] | None = None
    attention_axes: PartitionSpec | None = None
    attention_policy: Policy | None = None
    options: Hashable = None
    source: Source = dataclasses.field(default=Source("global"), compare=False)

    def held(self, policy: Policy | None) -> Policy | None:
        """Returns a module's policy as it holds here: in an island, the island's version."""
        return in_island(policy) if self.in_full_precision else policy

    def crosses(self, policy: Policy | None) -> bool:
        """Returns whether a call that obeys `policy` is a boundary: its policy differs from the one
        in force, or no boundary is open yet.
        """
        return policy is not None and (not self.boundary_open or policy != self.policy)

    def names(self, policy: Policy | None, source: Source) -> bool:
        """Returns whether an argument or a rule names a module that is called here, with another
        policy than the one in force, if perhaps an equal one: its output_dtype then holds for the
        module's results.

        Args:
          policy: the module's.
          source: its provenance.
        """
        is_same_rule = (source.kind, source.detail) == (self.source.kind, self.source.detail)
        is_other = source.own and source.detail != "apply_policy" and not is_same_rule
        return is_other and policy is not self.policy

    def entered(
        self, policy: Policy | None, base: Policy | None, source: Source, *, is_layer: bool
    ) -> Policy | None:
        """Returns the policy in whose dtypes a call takes its inputs and returns its outputs; None
        where the call is no boundary.

        A bare layer is a boundary only by a policy of its own.

        Args:
          policy: the policy that the module obeys.
          base: the policy before the module's explicit dtype arguments.
          source: the provenance of the policy.
          is_layer: whether the module is a bare layer.
        """
        crosses = self.crosses(policy if is_layer else base) or self.names(base, source)
        return policy if crosses and (source.own or not is_layer) else None

    def within(self, policy: Policy | None, *, crosses: bool = True) -> Scope:
        """Returns the scope for the body of a call that obeys `policy`, and crossed into it or not.

        Where it obeys none, that is this scope.
        """
        if policy is None:
            return self
        if not crosses:
            return self if policy == self.policy else dataclasses.replace(self, policy=policy)
        return dataclasses.replace(self, policy=policy, boundary_open=True, attention_policy=None)

    def returned(self, policy: Policy) -> Policy:
        """Returns the policy whose output_dtype holds for a call that crossed into `policy`."""
        if not policy.follows_caller:
            return policy
        caller = self.policy if self.boundary_open else None
        return policy.replace(output_dtype=(caller or policy).compute_dtype)


# Made once, at import: a second user context would retrace everything that was cached before it.
_context = jax.make_user_context(Scope())


# The policies that code has read, and those of blocks that none has read yet, by identity. They
# are no part of the scope: a jitted function that is cached reads nothing.
_read: set[Policy] = set()
_unread: dict[int, Policy] = {}


def current_scope() -> Scope:
    """Returns the scope in force in this thread."""
    scope = _context.value
    if _unread and id(scope.policy) in _unread:
        _read.add(_unread.pop(id(scope.policy), scope.policy))
    return scope


def is_unread() -> bool:
    """Returns whether no code has read the policy in force, neither in its block nor before."""
    return id(_context.value.policy) in _unread


def is_lost_in_own_code() -> bool:
    """Returns whether code obeys the policy in force only where it is a module's, or reads it."""
    scope = _context.value
    is_own = not (scope.boundary_open or scope.traces_own_code or scope.keeps_own_code)
    return is_own and scope.policy is not None and not is_float32(scope.policy)


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
    return current_scope().policy


def enter(scope: Scope, source: Source | None = None) -> contextlib.AbstractContextManager[Any]:
    """Puts `scope` in force for a block. A scope equal to the current one is not entered again.

    Args:
      source: the provenance of its policy, for summaries; None keeps the current source.
    """
    outer = _context.value
    scope = dataclasses.replace(
        scope, backend=scope.backend or outer.backend, source=source or outer.source
    )
    if scope == outer and scope.source is outer.source:
        return contextlib.nullcontext()
    return _context(scope)  # a fresh context for each entry: one object can't be entered twice


@contextlib.contextmanager
def traced_for(device: Any):
    """Traces a block's programs for a device that need not be there.

    ``half``, ``m=8bit`` and operations that differ by backend are those of this device.
    """
    found = backend_of(device)
    if found == backend():
        yield
        return
    with during(backend=found), enter(dataclasses.replace(current_scope(), backend=found)):
        yield


def _checked(
    policy: Policy | str | None, rules: RulesLike | None
) -> tuple[Policy | None, PolicyRules | None]:
    policy = None if policy is None else get_policy(policy)
    rules = as_rules(rules)
    for used in (policy, *(rule_policy for _, rule_policy in rules or ())):
        if used is not None:
            require_usable(used)
    return policy, rules


def require_usable(policy: Policy) -> Policy:
    """Returns `policy`, or raises if this process can't honor it.

    Raises:
      ValueError: a field is float64 while x64 is disabled.
    """
    for field in ("param_dtype", "compute_dtype", "output_dtype", "reduction_dtype"):
        if (dtype := getattr(policy, field)).itemsize == 8:
            require_available(dtype)
    return policy


def require_attention_axes(axes: PartitionSpec | None) -> PartitionSpec | None:
    """Returns `axes`, or raises where they split more than the batch and the heads of queries.

    Raises:
      TypeError: they are no `PartitionSpec`.
      ValueError: they split the length or the width of heads, or have more than four entries.
    """
    if axes is None:
        return None
    if not isinstance(axes, PartitionSpec):
        raise TypeError(
            "attention_axes should be the jax.sharding.PartitionSpec of queries, (batch, length, "
            f"heads, width), but got {axes!r}."
        )
    if len(axes) > 4 or any(entry is not None for entry in (*axes[1:2], *axes[3:4])):
        raise ValueError(
            f"attention_axes={axes} should name axes of the batch and the heads alone, as in "
            'PartitionSpec("data", None, "model"): a kernel attends to whole sequences.'
        )
    return axes


class use_policy(Block):
    """Puts a policy and rules in force for a block, or as a decorator for each call.

    linen modules obey the policy in force where they are called, nnx modules the one in force where
    they were built. An inner block without rules keeps the outer ones; ``use_policy(None)`` puts no
    policy in force. The scope belongs to this thread: a new thread sees the global policy. It is
    part of JAX's jit cache key, so a jitted function is retraced under another policy and its first
    program is reused afterwards. A warning is given for a `use_policy` object that is dropped
    without having been entered, at the end of a block whose policy nothing has read, and, by
    `mpmodules`, where a layer of Flax's own runs in one. ``use_policy(None)`` around the call of a
    model that is to stay as it is, such as a teacher, is silent.

    As a decorator of an async function or a generator it holds for each step, and not while the
    function is suspended. A block in an async function is rejected, because other tasks of the
    thread would see its policy; a block in a generator emits a warning.

    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     policy.compute_dtype()
    dtype(bfloat16)
    >>> policy.compute_dtype() is None
    True

    Args:
      policy: a Policy, its text form, or None.
      rules: `PolicyRules`, or an argument for their constructor.
      attention_axes: the `PartitionSpec` of attention's queries, (batch, length, heads, width),
        over the automatic axes of the mesh. It lets fused kernels run in programs that XLA
        partitions. Length and width have to be None. Without it an inner block keeps the outer one.

    Raises:
      ValueError, TypeError: the policy, the rules or `attention_axes` are malformed, or ask for
        float64 while x64 is disabled.
      RuntimeError: a block is entered in an async function.
    """

    _name = "use_policy"

    def __init__(
        self,
        policy: Policy | str | None,
        rules: RulesLike | None = None,
        *,
        attention_axes: PartitionSpec | None = None,
    ):
        self._policy, self._rules = _checked(policy, rules)
        self._axes = require_attention_axes(attention_axes)
        self._is_used = False

    def __reduce__(self) -> tuple[Any, ...]:
        self._is_used = True
        make = functools.partial(use_policy, attention_axes=self._axes)
        return make, (self._policy, self._rules)

    def _opened(self) -> contextlib.AbstractContextManager[Policy | None]:
        return _in_force(self._policy, self._rules, self._axes)

    def _left(self, *, is_of_transforms: bool = False) -> None:
        policy = self._policy
        if is_of_transforms and policy is not None and not is_float32(policy):
            warn_once(
                f"use_policy('{policy}') is around jax.jit alone, and holds for nothing: a jitted "
                "function obeys the policy in force where it is called. Put the block around its "
                "calls."
            )
            _unread.pop(id(policy), None)
            return
        if policy == _context.value.policy or _unread.pop(id(policy), None) is None:
            return
        if policy not in _read:
            warn_once(
                f"Nothing obeyed use_policy('{policy}'): no layer of mpmodules was called or built "
                "in its block, and no code read the policy. Flax's own layers and JAX's operations "
                "obey none: import linen or nnx from mpmodules, or call its apply_policy on the "
                "model, or policy.autocast on the function. The block belongs around the calls of "
                "a linen model or the construction of an nnx model."
            )


@contextlib.contextmanager
def _in_force(
    policy: Policy | None, rules: PolicyRules | None, attention_axes: PartitionSpec | None
) -> Iterator[Policy | None]:
    outer = _context.value
    if policy == outer.policy:
        policy = outer.policy  # by whose identity a read of it is known
    else:
        current_scope()  # is read: the block inside keeps the rest of it
        if policy and policy not in _read and not is_float32(policy):
            _unread[id(policy)] = policy
    scope = dataclasses.replace(
        outer,
        policy=policy,
        rules=outer.rules if rules is None else rules,
        attention_axes=outer.attention_axes if attention_axes is None else attention_axes,
    )
    is_within = outer.policy is not None or thread.autocast is not None
    leaves = is_within and (policy is None or is_float32(policy))
    mark = jax.named_scope(NO_POLICY) if leaves else contextlib.nullcontext()
    precise = multiplying(policy, outer.policy) if leaves and policy else contextlib.nullcontext()
    with mark, precise, enter(scope, Source("scope")):
        yield policy


def set_policy(
    policy: Policy | str | None,
    rules: RulesLike | None = None,
    *,
    attention_axes: PartitionSpec | None = None,
) -> None:
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
      attention_axes: see `use_policy`.

    Raises:
      ValueError, TypeError: the policy, the rules or `attention_axes` are malformed, or ask for
        float64 while x64 is disabled.
      TypeError: it is called in a ``with`` statement.
    """
    text = repr(str(policy))
    if instruction_after(sys._getframe(1)) == "BEFORE_WITH":
        raise TypeError(f"set_policy({text}) opens no block. Write `with use_policy({text}):`.")
    policy, rules = _checked(policy, rules)
    axes = require_attention_axes(attention_axes)
    with jex_core.take_current_trace() as trace:
        if type(trace).__name__ == "DynamicJaxprTrace":
            warn_once(
                f"set_policy({text}) in a traced function is no part of its program, whose later "
                "calls set nothing. Call it outside, or write a use_policy block in the function."
            )
    if policy is not None:
        _read.add(policy)
    # The method is public since jax 0.10.1; before that it belongs to the wrapped object.
    holder: Any = _context
    holder = holder if hasattr(holder, "set_global") else holder._obj
    holder.set_global(Scope(policy, rules, attention_axes=axes))


# --------------------------------------------------------------------------------------------------
# The dtypes of the policy in force
# --------------------------------------------------------------------------------------------------


def param_dtype() -> np.dtype | None:
    """Returns the dtype of stored parameters under the policy in force; None without a policy.

    In a method of a linen or nnx module, the policy in force is the one that the module obeys.
    JAX's functions take None for their default, and Flax's layers take it for "as the inputs are".

    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     policy.param_dtype()
    dtype('float32')
    >>> policy.param_dtype() is None
    True
    """
    return getattr(current_policy(), "param_dtype", None)


def compute_dtype() -> np.dtype | None:
    """Returns the dtype of matmuls and activations under the policy in force; None without one.

    Cast a table that was computed in float32 to it, so that the table doesn't widen the activations
    that it is multiplied with. Inside `full_precision` it is reduction_dtype.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     cos = jnp.cos(jnp.arange(4.0)).astype(policy.compute_dtype())
    >>> cos.dtype
    dtype(bfloat16)
    """
    return getattr(current_policy(), "compute_dtype", None)


def output_dtype() -> np.dtype | None:
    """Returns the dtype that the policy in force returns to code outside; None without a policy.

    >>> import policy
    >>> with policy.use_policy("p=f32,c=bf16,o=bf16"):
    ...     policy.output_dtype()
    dtype(bfloat16)
    """
    return getattr(current_policy(), "output_dtype", None)


def reduction_dtype() -> np.dtype | None:
    """Returns the dtype of statistics, softmaxes and sums in force; None without a policy.

    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     policy.reduction_dtype()
    dtype('float32')
    """
    return getattr(current_policy(), "reduction_dtype", None)


def reduction_dtype_of(*arrays: ArrayLike) -> np.dtype:
    """Returns the dtype for a reduction of `arrays`, never narrower than they are.

    It is the policy's reduction_dtype, or float32 without a policy.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.reduction_dtype_of(jnp.ones(2, jnp.bfloat16))
    dtype('float32')
    """
    policy = current_policy()
    dtype = jnp.dtype(jnp.float32) if policy is None else require_available(policy.reduction_dtype)
    return widest([dtype, *(jnp.result_type(x) for x in arrays if is_inexact(x))])


def widest(dtypes: Sequence[Any]) -> np.dtype:
    """Returns the dtype that holds the numbers of all."""
    # a question about dtypes, not a promotion of anyone's arrays
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(functools.reduce(jnp.promote_types, dtypes))


# --------------------------------------------------------------------------------------------------
# Full-precision islands, and what float32 inside of half precision means
# --------------------------------------------------------------------------------------------------


def in_island(policy: Policy | None) -> Policy | None:
    """Returns `policy` as it holds in an island: computing and returning reduction_dtype."""
    if policy is None:
        return None
    wide = policy.reduction_dtype
    return policy.replace(compute_dtype=wide, output_dtype=wide, reduction_dtype=wide, matmul=None)


def precision_within(policy: Policy | None, around: Policy | None) -> str | None:
    """Returns the precision of the matmuls of a module, or None for JAX's default.

    By default a TPU multiplies float32 operands in one pass of bfloat16, an NVIDIA GPU in TF32.
    A module that is asked for float32 in a half-precision model multiplies at the highest
    precision.

    It is the policy's own; else the highest where the policy computes in at least float32 and the
    one around it in half precision.

    Args:
      policy: the policy that the module obeys, or None.
      around: the policy in force where it is called, or None.
    """
    if policy is None or policy.precision is not None:
        return None if policy is None else policy.precision
    is_island = policy.compute_dtype.itemsize >= 4 and computes_in_half(around)
    return HIGHEST if is_island else None


def is_float32(policy: Policy) -> bool:
    """Returns whether a policy stores, computes and returns float32: layers do so without one."""
    dtypes = {policy.param_dtype, policy.compute_dtype, policy.output_dtype}
    return dtypes == {jnp.dtype(jnp.float32)} and policy.param_format is None


def computes_in_half(policy: Policy | None, rules: PolicyRules | None = None) -> bool:
    """Returns whether a policy, or that of a rule beside it, computes in half precision."""
    if policy is None:
        return False
    held = (policy, *(ruled for _, ruled in rules or ()))
    return any(each.compute_dtype.itemsize < 4 for each in held)


def multiplying(
    policy: Policy | None, around: Policy | None
) -> contextlib.AbstractContextManager[Any]:
    """Puts the precision of a module's matmuls in force for its call; see `precision_within`.

    A precision that is given to a layer or to an operation wins.
    """
    config: Any = jax.config
    precision = precision_within(policy, around)
    if precision is None or precision == config.jax_default_matmul_precision:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(precision)


@overload
def full_precision(fn: F) -> F: ...
@overload
def full_precision(fn: None = None) -> _Island: ...
def full_precision(fn: F | None = None) -> F | _Island:
    """Opens an island in which compute_dtype is reduction_dtype (float32 in mixed precision).

    ``with full_precision():`` is a block and ``@full_precision`` decorates a function. Inside,
    modules and their layers compute and return reduction_dtype whatever their own policies are,
    parameters of users' modules are read in it, `policy.compute_dtype` returns it, and autocast
    runs operations in float32. An explicit `dtype` argument of a layer still holds.

    A block casts no arrays: operations on half-precision arrays alone stay in half precision unless
    the code casts to `policy.compute_dtype`. A function is also a boundary: in a module's call
    under a policy, its floating arguments are cast to reduction_dtype and its floating outputs to
    the compute_dtype of the surrounding code.

    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     with policy.full_precision():
    ...         policy.compute_dtype()
    dtype('float32')

    Args:
      fn: the function. None returns a block, which can also be used as a decorator without casts.

    Raises:
      TypeError: `fn` is not a function, or is async or a generator.
      RuntimeError: a block is entered in an async function.
    """
    if fn is None:
        return _Island()
    require_function(fn, "full_precision")
    if is_suspended(fn):
        raise TypeError(
            f"full_precision takes a function of arrays, but {fn.__name__} is async or a "
            "generator: decorate it with @full_precision(), which casts nothing."
        )

    @functools.wraps(fn)
    def island(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope.policy is None or not scope.boundary_open:
            with _Island():
                return fn(*args, **kwargs)
        with jax.named_scope(BOUNDARY):
            args, kwargs = _cast((args, kwargs), scope.policy.reduction_dtype)
        with _Island():
            outputs = fn(*args, **kwargs)
        if scope.traces_own_code:
            return jax.tree.map(returned, outputs)
        with jax.named_scope(BOUNDARY):
            return _cast(outputs, scope.policy.compute_dtype)

    return island  # type: ignore[return-value]


def _cast(tree: Any, dtype: DTypeLike) -> Any:
    return cast_floating(tree, dtype, is_leaf=is_reference)


class _Island(Block):
    """An island as a block."""

    _name = "full_precision"

    def __init__(self) -> None:
        self._is_used = False

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        scope = current_scope()
        policy = in_island(scope.policy)
        inside = dataclasses.replace(
            scope, policy=policy, in_full_precision=True, attention_policy=None
        )
        with jax.named_scope(ISLAND), enter(inside), multiplying(policy, scope.policy):
            yield
