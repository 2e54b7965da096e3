"""Blocks of code and decorated functions, also those that run in steps: generators, coroutines.

JAX holds its contexts by thread. A coroutine or generator that is suspended inside of a block would
leave the scope in force for the other code of the thread, so a block is entered anew for each of
its steps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Generator
from typing import Any, ClassVar

from policy.programs.thread import thread


class Block(contextlib.ContextDecorator):
    """Base class of blocks; one may be entered again, and by several threads.

    As a decorator, it holds during each step of a coroutine, generator or async generator, and not
    while that is suspended. As a ``with`` block, it is refused in an async function.
    """

    _name: ClassVar[str]

    def _opened(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that puts the scope in force."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        opened = self._opened()
        self._refuse_suspension(sys._getframe(1))
        entered = opened.__enter__()
        thread.blocks.append(opened)
        return entered

    def __exit__(self, *exception: Any) -> bool | None:
        return thread.blocks.pop().__exit__(*exception)

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `func` so that each call, or each step of it, runs in a block of its own."""
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
        return super().__call__(func)

    def _refuse_suspension(self, frame: types.FrameType) -> None:
        code, name, runner = frame.f_code, self._name, frame.f_back
        if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise RuntimeError(
                f"{name} was entered in the async function {code.co_name!r}: while that awaits, "
                f"other tasks would run under its scope. Decorate the function with {name}(...) "
                "instead, or put the block into a function that is not async."
            )
        # A generator of `contextlib.contextmanager`, or a fixture of pytest, is a block itself.
        module = "" if runner is None else runner.f_globals.get("__name__", "")
        is_block = module.partition(".")[0] in ("contextlib", "_pytest")
        if code.co_flags & inspect.CO_GENERATOR and not is_block:
            warnings.warn(
                f"{name} was entered in the generator {code.co_name!r}: while that is suspended, "
                f"the code around it runs under its scope. Decorate the generator with "
                f"{name}(...) instead.",
                stacklevel=3,
            )


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
