"""Blocks and decorators in code that is suspended: coroutines, generators, async generators."""

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from policy import current_policy, full_precision, get_policy, use_policy
from policy.core.scope import current_scope

HALF = get_policy("bf16")
BLOCKS: dict[str, Callable[[], Any]] = {
    "use_policy": lambda: use_policy("bf16"),
    "full_precision": full_precision,
}
blocks = pytest.mark.parametrize("name", BLOCKS)


def is_in_force(name: str) -> bool:
    scope = current_scope()
    return scope.policy == HALF if name == "use_policy" else scope.in_full_precision


@blocks
def test_a_block_in_an_async_function_is_rejected_by_name(name):
    async def evaluate():
        with BLOCKS[name]():
            await asyncio.sleep(0)

    async def stream():
        with BLOCKS[name]():
            yield

    with pytest.raises(RuntimeError, match=f"{name} .*'evaluate'.*Decorate"):
        asyncio.run(evaluate())
    with pytest.raises(RuntimeError, match=f"{name} .*'stream'.*Decorate"):
        asyncio.run(anext(stream()))
    assert not is_in_force(name)


@blocks
def test_a_block_in_a_block_of_an_async_function_is_rejected_by_the_function_s_name(name):
    @contextlib.contextmanager
    def block():
        with BLOCKS[name]():
            yield is_in_force(name)

    async def through_a_context_manager():
        with block():
            await asyncio.sleep(0)

    async def through_a_stack():
        with contextlib.ExitStack() as stack:
            stack.enter_context(BLOCKS[name]())
            await asyncio.sleep(0)

    for function in (through_a_context_manager, through_a_stack):
        with pytest.raises(RuntimeError, match=f"{name} .*{function.__name__!r}"):
            asyncio.run(function())
        assert not is_in_force(name)

    def batches():
        with block():
            yield

    with pytest.warns(UserWarning, match=f"{name} .*generator 'batches'"):
        list(batches())


@blocks
def test_a_function_called_by_an_async_one_has_blocks(name):
    def inner():
        with BLOCKS[name]():
            return is_in_force(name)

    async def outer():
        return inner(), is_in_force(name)

    assert asyncio.run(outer()) == (True, False)


@blocks
def test_a_decorated_task_holds_its_scope_and_no_other_task_sees_it(name):
    seen: list[tuple[str, bool]] = []

    async def see(who: str) -> str:
        for _ in range(3):
            seen.append((who, is_in_force(name)))
            await asyncio.sleep(0)
        return who

    async def both():
        return await asyncio.gather(BLOCKS[name]()(see)("inside"), see("outside"))

    assert asyncio.run(both()) == ["inside", "outside"]
    assert seen == 3 * [("inside", True), ("outside", False)]


def test_a_decorated_task_that_is_canceled_or_fails_leaves_its_scope():
    log = []

    @use_policy("bf16")
    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append(current_policy())
            raise ValueError("canceled") from None

    async def cancel():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert current_policy() is None
        task.cancel()
        with pytest.raises(ValueError, match="canceled"):
            await task
        return current_policy()

    assert asyncio.run(cancel()) is None and log == [HALF]


@blocks
def test_a_decorated_generator_holds_its_scope_in_its_own_steps(name):
    @BLOCKS[name]()
    def batches() -> Iterator[Any]:
        sent = yield is_in_force(name)
        try:
            yield sent, is_in_force(name)
        except KeyError:
            yield "caught", is_in_force(name)
        finally:
            log.append(is_in_force(name))

    log: list[bool] = []
    generator: Any = batches()
    assert next(generator) and not is_in_force(name)
    assert generator.send(7) == (7, True) and not is_in_force(name)
    assert generator.throw(KeyError()) == ("caught", True) and not is_in_force(name)
    generator.close()
    assert log == [True] and not is_in_force(name)


def test_a_decorated_async_generator_holds_its_scope_in_its_own_steps():
    log = []

    @use_policy("bf16")
    async def stream() -> AsyncIterator[Any]:
        try:
            await asyncio.sleep(0)
            sent = yield current_policy()
            try:
                yield sent, current_policy()
            except KeyError:
                yield "caught", current_policy()
        finally:
            log.append(current_policy())

    async def use():
        values: Any = stream()
        assert await anext(values) == HALF and current_policy() is None
        assert await values.asend(7) == (7, HALF) and current_policy() is None
        assert await values.athrow(KeyError()) == ("caught", HALF)
        await values.aclose()
        assert [value async for value in stream()] == [HALF, (None, HALF)]
        return current_policy()

    assert asyncio.run(use()) is None and log == [HALF, HALF]


@blocks
def test_what_a_decorated_callable_leaves_to_run_later_holds_the_scope_too(name):
    class Generator:
        def __call__(self):
            yield is_in_force(name)

    async def evaluate():
        await asyncio.sleep(0)
        return is_in_force(name)

    async def stream():
        yield is_in_force(name)

    async def first(function):
        return await anext(function())

    decorate = BLOCKS[name]()
    assert list(decorate(Generator())()) == [True]
    assert list(decorate(lambda: Generator()())()) == [True]
    assert asyncio.run(decorate(lambda: evaluate())())
    assert asyncio.run(first(decorate(lambda: stream())))
    assert not is_in_force(name)


@blocks
def test_methods_of_every_kind_are_decorated_and_no_other_object(name):
    class Model:
        @BLOCKS[name]()
        @classmethod
        def of_class(cls):
            return cls.__name__, is_in_force(name)

        @staticmethod
        @BLOCKS[name]()
        def above():
            return is_in_force(name)

        @BLOCKS[name]()
        @staticmethod
        def below():
            return is_in_force(name)

    assert Model.of_class() == Model().of_class() == ("Model", True)
    assert Model.above() and Model().below()
    for wrong in (Model, property(is_in_force), None):
        with pytest.raises(TypeError, match=rf"@{name}\(...\) takes a function, but got"):
            BLOCKS[name]()(wrong)


def test_blocks_that_are_left_in_another_order_end_with_the_innermost():
    outer, inner = use_policy("bf16"), use_policy("f16")
    with use_policy("f32"):
        outer.__enter__()
        inner.__enter__()
        assert current_policy() == get_policy("f16")
        outer.__exit__(None, None, None)
        assert current_policy() == get_policy("f16")
        inner.__exit__(None, None, None)
        assert current_policy() == get_policy("f32")
    with pytest.raises(RuntimeError, match="use_policy was left in a thread that has not entered"):
        outer.__exit__(None, None, None)


@blocks
def test_a_block_in_a_generator_warns_unless_the_generator_is_a_block_itself(name):
    def batches():
        with BLOCKS[name]():
            yield is_in_force(name)

    with pytest.warns(UserWarning, match=f"{name} .*generator 'batches'.*Decorate"):
        assert [*batches()] == [True]
    with contextlib.contextmanager(batches)() as inside:
        assert inside and is_in_force(name)
    assert not is_in_force(name)


@pytest.fixture
def in_half():
    with use_policy("bf16"):
        yield


def test_a_fixture_is_a_block(in_half):
    assert current_policy() == HALF


def test_a_function_of_arrays_is_an_island_and_a_suspended_one_is_rejected():
    async def evaluate(): ...

    def batches():
        yield

    for func in (evaluate, batches):
        with pytest.raises(TypeError, match=rf"{func.__name__} is async.*@full_precision\(\)"):
            full_precision(func)


def test_a_scope_is_pickled():
    scope = use_policy("bf16", {"head": "f32"})
    with pickle.loads(pickle.dumps(scope)) as entered:
        assert entered == HALF == current_policy() and "head" in str(current_scope().rules)
