"""Parameters that a user's nnx module holds, and the calls that read them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Hashable, Iterator
from typing import Any, cast

import jax
from flax import nnx as flax_nnx
from flax.errors import TraceContextError

from mpmodules._own_code import key_of_call
from mpmodules._own_parameters import is_written_by_user, warn_of_unknown_names
from mpmodules._references import is_reference
from mpmodules.nnx._pure_calls import StatefulCall
from mpmodules.nnx._registry import is_ours
from policy._jaxpr.pure_calls import UnreturnableError
from policy.casting import cast_floating, is_floating
from policy.grads.parameter_reads import (
    CANNOT_BE_TRACED,
    needs_float32_sums,
    read_parameter,
    with_float32_sums,
)
from policy.islands import as_in_force
from policy.policy import Policy
from policy.scope import current_scope

# --------------------------------------------------------------------------------------------------
# Whose parameters they are
# --------------------------------------------------------------------------------------------------


def is_users(cls: type) -> bool:
    """Returns whether a class of ours is one that a user wrote, and derives from none of Flax's
    layers.
    """
    return is_ours(cls) and is_written_by_user(cls, flax_nnx.Module)


def own_params(module: Any) -> Iterator[tuple[str, flax_nnx.Param]]:
    """Yields the parameters that a module holds itself, in lists, tuples and dicts too, by
    attribute.
    """
    for name, attribute in vars(module).items():
        if not name.startswith(("_pytree__", "_object__")):
            yield from ((name, param) for param in _params_in(attribute))


def _params_in(value: Any) -> Iterator[flax_nnx.Param]:
    """Yields the parameters that an attribute of a module is, or holds in containers, but none of
    other modules.
    """
    if isinstance(value, flax_nnx.Param):
        yield value
    elif isinstance(value, list | tuple | dict):
        for leaf in jax.tree.leaves(value, is_leaf=is_reference):
            if isinstance(leaf, flax_nnx.Param) or _is_container(leaf):
                yield from _params_in(leaf)
    elif _is_container(value):
        for held in vars(value).values():
            yield from _params_in(held)


def _is_container(value: Any) -> bool:
    is_pytree = isinstance(value, flax_nnx.Pytree) and not isinstance(value, flax_nnx.Module)
    return is_pytree or isinstance(value, flax_nnx.List | flax_nnx.Dict)


def touched_params(module: Any) -> Iterator[flax_nnx.Param]:
    """Yields the parameters of a user's module that follow its policy: those whose names it does
    not keep.
    """
    return (param for name, param in own_params(module) if name not in type(module).keep_params)


def store_in_param_dtype(module: Any, policy: Policy | None, arguments: Any) -> None:
    """Casts the parameters that a user's module has just made to param_dtype.

    Args:
      module: the module, just built.
      policy: its policy.
      arguments: those that it was built with; parameters among them are shared, and stay as they
        are.
    """
    if not is_users(type(module)):
        return
    if type(module).keep_params:
        warn_of_unknown_names(type(module), (name for name, _ in own_params(module)), "the module")
    if policy is None:
        return
    shared = {id(leaf) for leaf in _variables(arguments)}
    for param in touched_params(module):
        if id(param) not in shared:
            param.set_raw_value(cast_floating(param.get_raw_value(), policy.param_dtype))
        if reads.marks_new and _USERS not in param.get_metadata():
            param.set_metadata(_USERS, None)


def _variables(tree: Any) -> Iterator[Any]:
    for leaf in jax.tree.leaves(tree, is_leaf=is_reference):
        if isinstance(leaf, flax_nnx.Variable):
            yield leaf
        elif isinstance(leaf, flax_nnx.Module):
            yield from (
                node for _, node in flax_nnx.iter_graph(leaf) if isinstance(node, flax_nnx.Variable)
            )


# --------------------------------------------------------------------------------------------------
# Reads
# --------------------------------------------------------------------------------------------------

# Metadata of a copied parameter that a user's module holds, its path; copies of the copy have it
# too.
_USERS = "policy_users_own"


class _Reads(threading.local):
    """The reads in this thread.

    Attributes:
      policy: the policy of the user's module whose method is running; None in a layer's, and where
        no policy holds.
      are_marked: whether a call of a user's module is under way: calls in it make no copies.
      marks_new: whether its modules are copies, whose parameters of a user's tell so; new ones are
        to be like them.
    """

    policy: Policy | None = None
    are_marked: bool = False
    marks_new: bool = False


reads = _Reads()
_get_value, _set_value, _getattr = (
    getattr(flax_nnx.Param, n) for n in ("get_value", "set_value", "__getattr__")
)


class _Written(BaseException):
    """Ends a call that writes to a parameter which it reads in compute_dtype.

    No `except Exception` of its stops it.
    """


@contextlib.contextmanager
def reading(module: Any, policy: Policy | None) -> Iterator[None]:
    """Puts the policy in force under which a method of `module` reads parameters.

    A layer reads them as stored.
    """
    outer, reads.policy = reads.policy, policy if is_users(type(module)) else None
    try:
        yield
    finally:
        reads.policy = outer


def _is_read(param: Any) -> bool:
    return reads.policy is not None and _USERS in object.__getattribute__(param, "_var_metadata")


def _read(param: Any, value: Any) -> Any:
    asked = param.get_metadata().get("compute_dtype")
    policy = cast(Policy, as_in_force(reads.policy, current_scope()))
    return read_parameter(value, policy.compute_dtype if asked is None else asked)


def _value_for_reader(self: Any, **index: Any) -> Any:
    if not _is_read(self):
        return _get_value(self, **index)
    if not current_scope().marks_reads:
        return _read(self, _get_value(self, **index))
    value = _read(
        self, _get_value(self)
    )  # read first: the rows of a half table are summed up in float32
    return value[index["index"]] if index and index["index"] is not ... else value


def _attribute_for_reader(self: Any, name: str) -> Any:
    if not _is_read(self) or name in object.__getattribute__(self, "_var_metadata"):
        return _getattr(self, name)
    return getattr(_read(self, self.get_raw_value()), name)


def _set_by_writer(self: Any, value: Any, **index: Any) -> None:
    if _is_read(self):
        path = self.get_metadata()[_USERS]
        if path is not None:
            raise _Written(path)
        self.del_metadata(_USERS)  # made in this very call
    _set_value(self, value, **index)


# Flax has one class of parameters, which its modules, states and filters know; outside of our calls
# it is as before.
flax_nnx.Param.get_value = _value_for_reader
flax_nnx.Param.set_value = _set_by_writer
flax_nnx.Param.__getattr__ = _attribute_for_reader


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------

_written: dict[
    Hashable, frozenset[str]
] = {}  # the parameters that a method writes back, by their paths


def reads_own_params(module: Any) -> bool:
    """Returns whether a call may read parameters of users' modules in another dtype than they are
    stored in.
    """
    if (
        reads.are_marked
        or not is_users(type(module))
        or not isinstance(module.dtype_policy, Policy)
    ):
        return False  # a text that was set by hand is refused where the call begins
    modules: list[Any] = [node for _, node in flax_nnx.iter_modules(module) if is_users(type(node))]
    params = [param for node in modules for param in touched_params(node)]
    stored = {
        leaf.dtype for param in params for leaf in jax.tree.leaves(param) if is_floating(leaf)
    }
    computed = {
        node.dtype_policy.compute_dtype for node in modules if isinstance(node.dtype_policy, Policy)
    }
    dtypes = stored | computed
    return bool(stored) and (len(dtypes) > 1 or any(dtype.itemsize < 4 for dtype in dtypes))


def call_reading(module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a method in which users' modules read parameters.

    Their gradients are summed in float32.

    A parameter that the call writes back, as an average that is kept by hand, is read as stored.

    Args:
      module: the module.
      name: the method's name.
      args, kwargs: its arguments.
    """
    call = StatefulCall.of_method(module, name, args, kwargs)
    policy = as_in_force(module.dtype_policy, current_scope())
    key = type(module), name, key_of_call(args, kwargs)
    written = _written_by(key)
    while True:
        try:
            return call.finish(
                _run(call, written, is_traced=needs_float32_sums(policy, *call.trees))
            )
        except UnreturnableError:
            return _as_it_is(module, name, args, kwargs)
        except _Written as write:
            written = written | {write.args[0]}
            with contextlib.suppress(TypeError):  # an argument without a hash
                _written[key] = written


def _written_by(key: Hashable) -> frozenset[str]:
    try:
        return _written.get(key, frozenset())
    except TypeError:  # an argument without a hash
        return frozenset()


def _as_it_is(module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a method of the module itself, which reads parameters as stored: its outputs may hold
    them.
    """
    outer, reads.are_marked = reads.are_marked, True
    try:
        return getattr(module, name)(*args, **kwargs)
    finally:
        reads.are_marked = outer


def _run(call: StatefulCall, written: frozenset[str], *, is_traced: bool) -> Any:
    pure = call.inside(functools.partial(_marked, call, written))
    if is_traced:
        try:
            return with_float32_sums(pure, *call.trees)
        except (
            *CANNOT_BE_TRACED,
            TraceContextError,
        ):  # the latter: it writes to a variable outside of the module
            pass
    return pure(*call.trees)


@contextlib.contextmanager
def _marked(call: StatefulCall, written: frozenset[str]) -> Iterator[None]:
    """Notes on the parameters of users' modules that they are, for a block that calls copies of the
    modules.
    """
    nodes, call.copies = call.copies, ()  # they may hold tracers
    copies = [node for node in nodes if isinstance(node, flax_nnx.Module)]
    params = {path: param for node in copies for path, param in _users_params(node)}
    for path, param in params.items():
        if path not in written:
            param.set_metadata(_USERS, path)
    outer, reads.are_marked, reads.marks_new = reads.are_marked, True, True
    try:
        yield
    finally:
        reads.are_marked, reads.marks_new = outer, False
        returned, call.copies = call.copies, ()
        for _, node in flax_nnx.iter_graph((nodes, returned)):
            if isinstance(node, flax_nnx.Param) and _USERS in node.get_metadata():
                node.del_metadata(_USERS)


def _users_params(root: Any) -> Iterator[tuple[str, flax_nnx.Param]]:
    """Yields the parameters that follow the policies of users' modules in a module, itself
    included, by their paths.
    """
    for path, module in flax_nnx.iter_modules(root):
        if is_users(type(module)):
            for i, param in enumerate(touched_params(module)):
                yield "/".join(map(str, (*path, i))), param
