"""Blocks of code and decorated functions, also those that run in steps: generators, coroutines.

JAX holds its contexts by thread. A coroutine or generator that is suspended inside of a block would
leave the scope in force for the other code of the thread, so a block is entered anew for each of
its steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Generator
from typing import Any, ClassVar

from policy.core.messages import calls_transforms_alone, require_function
from policy.programs.thread import thread


@dataclasses.dataclass
class _Entered:
    """A block under way; `block` is None where it was left before one inside it.

    Attributes:
      code, offset: where it was entered.
    """

    block: Block | None
    opened: contextlib.AbstractContextManager[Any]
    code: types.CodeType
    offset: int


class Block:
    """Base class of blocks; one may be entered again, and by several threads.

    As a decorator, it holds during each step of a coroutine, generator or async generator, and not
    while that is suspended. As a ``with`` block, it is rejected in an async function. A block that
    is left before one inside it, by a suspended generator, ends with that. One that is dropped
    without having been entered emits a warning.
    """

    _name: ClassVar[str]
    _is_used = True  # False once it is made, until it is entered or decorates

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                f"{self._name}(...) was called without a `with` block, so it had no effect. Write "
                f"`with {self._name}(...):` around the calls, or decorate a function with it.",
                stacklevel=2,
            )

    def _left(self, *, is_of_transforms: bool = False) -> None:
        """Is called at the end of a block, or of a decorated call, that raised nothing.

        Args:
          is_of_transforms: whether the block called `jax.jit` and other transforms alone.
        """

    def _opened(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that puts the scope in force."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._is_used = True
        opened = self._opened()
        frame = sys._getframe(1)
        self._reject_suspension(frame)
        entered = opened.__enter__()
        thread.blocks.append(_Entered(self, opened, frame.f_code, frame.f_lasti))
        return entered

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        blocks = thread.blocks
        left = next((each for each in reversed(blocks) if each.block is self), None)
        if left is None:
            raise RuntimeError(
                f"{self._name} was left in a thread that has not entered it. Use a `with` block, "
                "which enters and leaves it in one thread."
            )
        left.block = None
        while blocks and blocks[-1].block is None:
            blocks.pop().opened.__exit__(None, None, None)
        if error is None:
            frame = sys._getframe(1)
            is_here = frame.f_code is left.code
            place = left.code, left.offset, frame.f_lasti
            self._left(is_of_transforms=is_here and calls_transforms_alone(*place))

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `func` so that each call, or each step of it, runs in a block of its own."""
        self._is_used = True
        if isinstance(func, (classmethod, staticmethod)):
            method: Any = type(func)(self(func.__func__))
            return method
        require_function(func, f"@{self._name}(...)")
        if inspect.isasyncgenfunction(func):
            return _async_generator(self, func)
        if inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                return await _awaited(self, func(*args, **kwargs))

            return coroutine
        if inspect.isgeneratorfunction(func):

            @functools.wraps(func)
            def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                return (yield from _steps(self, func(*args, **kwargs)))

            return generator

        @functools.wraps(func)
        def function(*args: Any, **kwargs: Any) -> Any:
            with self._opened():
                result = func(*args, **kwargs)
            # A lambda, partial or wrapper returned before the code that it calls has run.
            if inspect.isasyncgen(result):
                return _async_generator(self, lambda: result)()
            if inspect.iscoroutine(result):
                return _coroutine(self, result)
            if inspect.isgenerator(result):
                return _steps(self, result)
            self._left()
            return result

        return function

    def _reject_suspension(self, frame: types.FrameType) -> None:
        # A generator of `contextlib.contextmanager`, or a fixture of pytest, is a block itself, and
        # so is an ExitStack: the code that enters these is asked.
        level = 3
        while frame.f_back is not None and _is_of_block(frame):
            frame, level = frame.f_back, level + 1
        code, name = frame.f_code, self._name
        if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise RuntimeError(
                f"{name} was entered in the async function {code.co_name!r}: while that awaits, "
                f"other tasks would run under its scope. Decorate the function with {name}(...) "
                "instead, or put the block into a function that is not async."
            )
        if code.co_flags & inspect.CO_GENERATOR:
            warnings.warn(
                f"{name} was entered in the generator {code.co_name!r}: while that is suspended, "
                f"the code around it runs under its scope. Decorate the generator with "
                f"{name}(...) instead.",
                stacklevel=level,
            )


def _is_of_block(frame: types.FrameType) -> bool:
    is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
    runner = frame.f_back if is_generator else frame
    module = "" if runner is None else runner.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("contextlib", "_pytest")


def is_suspended(func: Callable[..., Any]) -> bool:
    """Returns whether a function's calls return before its code has run: async ones, generators."""
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    return any(is_kind(func) for is_kind in kinds)


def _steps(block: Block, steps: Any) -> Generator[Any, Any, Any]:
    """Runs a generator or coroutine to its end, each step in a block of its own."""
    resume = functools.partial(steps.send, None)
    while True:
        try:
            with block._opened():
                yielded = resume()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield yielded
        except GeneratorExit:
            with block._opened():
                steps.close()
            raise
        except BaseException as error:
            resume = functools.partial(steps.throw, error)
        else:
            resume = functools.partial(steps.send, sent)


_awaited = types.coroutine(_steps)


async def _coroutine(block: Block, coroutine: Any) -> Any:
    return await _awaited(block, coroutine)


def _async_generator(block: Block, func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def generator(*args: Any, **kwargs: Any) -> Any:
        values = func(*args, **kwargs)
        step = values.asend(None)
        while True:
            try:
                value = await _awaited(block, step)
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except GeneratorExit:
                await _awaited(block, values.aclose())
                raise
            except BaseException as error:
                step = values.athrow(error)
            else:
                step = values.asend(sent)

    return generator
