"""The linen module calls under way, and the check that every rule met a module."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as flax_nn
from flax.linen import summary as flax_summary

from mpmodules.tracing.linen_names import model_name
from policy.core.precedence import Effective
from policy.core.requested_dtypes import note_obeyed
from policy.core.scope import Scope


class _Calls(threading.local):
    """The module calls under way in this thread, and the modules that the root call has seen so
    far.
    """

    def __init__(self) -> None:
        self.paths: list[tuple[str, ...]] = []
        self.crossed: dict[str, Effective] = {}  # the boundaries below the outermost call, by path
        self.seen: dict[str, set[type]] | None = None
        self.validates = True  # whether Flax may run a setup to check it
        self.model = ""  # the name of the model that the root call is one of
        self.innermost: flax_nn.Module | None = None
        self.recorded: Recorded | None = None
        # Half-precision variables by the identities of the float32 ones that stand for them.
        self.half_states: dict[int, tuple[Any, Any]] = {}
        self.made: list[Any] = []  # the half-precision variables that the calls made

    def note_obeyed(self, module: flax_nn.Module, effective: Effective) -> None:
        """Notes the policy that a module obeys in a call, where a summary or a report is being
        made.
        """
        path = path_of(module)
        if path is not None:
            note_obeyed(model_of(module), "/".join(path), effective.policy)
        if self.recorded is not None:
            self.recorded.note(module, effective)


@dataclasses.dataclass
class RecordedCall:
    """A call of a module.

    Attributes:
      effective: the policy that the module obeys in it; None of one that is not ours.
      run: the arguments and the outputs of a layer in a trace of own code, in the dtypes that the
        layer computes in, as Flax's summaries represent them; None of other modules.
    """

    effective: Effective | None = None
    run: tuple[Any, Any, Any] | None = None


class Recorded:
    """The calls of Flax's modules and ours, in order.

    In each call, `intercept` runs first, outside of our boundary; `note` and `note_run` add what is
    known inside of it.
    """

    def __init__(self, shown: Callable[[flax_nn.Module, Effective], Effective]) -> None:
        self.calls: dict[tuple[tuple[str, ...], str], list[RecordedCall]] = {}
        self._shown = shown
        self._open: list[tuple[tuple[str, ...], str]] = []

    def intercept(
        self, next_fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
    ) -> Any:
        if context.method_name == "setup":
            return next_fun(*args, **kwargs)
        call = context.module.path, context.method_name
        self.calls.setdefault(call, []).append(RecordedCall())
        self._open.append(call)
        try:
            return next_fun(*args, **kwargs)
        finally:
            self._open.pop()

    def note(self, module: flax_nn.Module, effective: Effective) -> None:
        call = self._innermost(module)
        if call is not None and call.effective is None:
            call.effective = self._shown(module, effective)

    def note_run(
        self, module: flax_nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        call = self._innermost(module)
        if call is not None:
            call.run = flax_summary._represent_tree((args, kwargs, outputs))

    def _innermost(self, module: flax_nn.Module) -> RecordedCall | None:
        """Returns the innermost call under way, if it is of this module."""
        is_its = self._open and self._open[-1][0] == path_of(module)
        return self.calls[self._open[-1]][-1] if is_its else None


@contextlib.contextmanager
def recording(
    shown: Callable[[flax_nn.Module, Effective], Effective],
) -> Iterator[Recorded]:
    """Records the policies that the modules called in a block obey, as `shown` returns them."""
    outer, calls.recorded = calls.recorded, Recorded(shown)
    try:
        with flax_nn.intercept_methods(calls.recorded.intercept):
            yield calls.recorded
    finally:
        calls.recorded = outer


calls = _Calls()


@contextlib.contextmanager
def roots_unchecked() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Makes no call in a block a root's, and has no setup validated there.

    Yields a context that undoes both.
    """
    outer, validates = calls.seen, calls.validates
    calls.seen, calls.validates = {} if outer is None else outer, False
    try:
        yield lambda: _checked(outer, validates)
    finally:
        calls.seen, calls.validates = outer, validates


@contextlib.contextmanager
def _checked(seen: dict[str, set[type]] | None, validates: bool) -> Iterator[None]:
    before = calls.seen, calls.validates
    calls.seen, calls.validates = seen, validates
    try:
        yield
    finally:
        calls.seen, calls.validates = before


def is_innermost(module: flax_nn.Module) -> bool:
    """Returns whether the innermost call under way is of this instance, or of one that it stands in
    for.
    """
    return calls.innermost is not None and calls.innermost._state is module._state


def path_of(module: flax_nn.Module) -> tuple[str, ...] | None:
    """Returns the module's path from the root, or None for an unbound module."""
    return None if module.scope is None else module.path


def model_of(module: flax_nn.Module) -> str:
    """Returns the name of the model that a module is part of: its class's, or the one it was given.

    The copies of modules that Flax's transforms call know of nothing above: they are the root
    call's.
    """
    while isinstance(module.parent, flax_nn.Module):
        module = module.parent
    return calls.model if path_of(module) else model_name(module)


@contextlib.contextmanager
def call_under_way(module: Any, scope: Scope) -> Iterator[None]:
    """Notes the call, and after a root's call refuses rules that matched nothing in it."""
    path = module.path
    is_root = not path and calls.seen is None
    if is_root:
        calls.seen, calls.model = {}, model_name(module)
    outer, calls.innermost = calls.innermost, module
    calls.paths.append(path)
    try:
        if calls.seen is not None:
            note_seen(path, type(module))
        yield
        if is_root and scope.rules:
            _check_rules(module, scope)
    finally:
        calls.paths.pop()
        calls.innermost = outer
        if not calls.paths:
            calls.crossed.clear()
        if is_root:
            calls.seen, calls.model = None, ""


def note_seen(path: tuple[str, ...], cls: type) -> None:
    """Notes that a module was called, for the check of rules at the end of the root's call."""
    if calls.seen is not None:
        calls.seen.setdefault("/".join(path), set()).add(cls)


def _check_rules(root: Any, scope: Scope) -> None:
    """Checks the rules in force against the modules called and those that hold variables.

    Class rules are checked only where every module that holds variables was called: a call of one
    method of many, or of a cached inner jit, says nothing about the classes of the rest.
    """
    if scope.rules is None or not scope.rules.strict or calls.seen is None:
        return
    stored: set[str] = set()
    for collection in root.variables.values():
        _collect_paths(collection, (), stored)
    wholes = [
        path
        for path, classes in calls.seen.items()
        if any(getattr(cls, "_is_whole", False) for cls in classes)
    ]
    inside = tuple(f"{path}/" if path else "" for path in wholes)

    def can_obey(path: str) -> bool:
        return path in wholes or not path.startswith(inside)

    called = {path: classes for path, classes in calls.seen.items() if can_obey(path)}
    stored = set(filter(can_obey, stored))
    paths: dict[str, Any] = dict.fromkeys(stored) | called
    rules = scope.rules.of_model(
        model_name(root)
    )  # others may be meant for another model in the block
    rules.check(paths if stored <= set(called) else list(paths), model=model_name(root))


def _collect_paths(tree: Any, path: tuple[str, ...], into: set[str]) -> None:
    """Adds the path of each mapping below `tree` that holds something, prefixes included."""
    if isinstance(tree, Mapping):
        into.add("/".join(path))
        for name, child in tree.items():
            _collect_paths(child, (*path, str(name)), into)
