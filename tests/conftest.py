"""The whole suite runs with strict dtype promotion, without rank promotion, and with warnings as
errors.
"""

import collections
import ctypes
import gc
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

# A folder of compiled programs for each worker of a run, and for the processes that its tests start
# one at a time: compiling is the slow part of the suite, and most of its programs are the same few
# operations. JAX does not lock what it writes there, so workers do not share one. Set before JAX is
# imported.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _PROGRAMS = tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
        os.environ["JAX_COMPILATION_CACHE_DIR"], worker
    )
# XLA's own passes are as always, but the kernels of the CPU are made in less time: they run once
# here. LLVM optimizes less (at level 0 fused and eager programs would round differently), and
# fusions do not pass through MLIR, which takes half of the time of a compile. The second flag is
# known to jaxlib 0.10 only.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    _flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1".strip()
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        _flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = _flags

import hypothesis
import jax
import numpy as np
import pytest

# The suite's random tests are the same in each run; those of `python -m tests.random_faults` come
# from its seed.
hypothesis.settings.register_profile(
    "suite", max_examples=6, derandomize=True, deadline=None, database=None
)
hypothesis.settings.register_profile(
    "long",
    max_examples=int(os.environ.get("MPMODULES_RANDOM_EXAMPLES", "300")),
    deadline=None,
    database=None,
)
hypothesis.settings.load_profile("suite")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Runs the fast part where neither files nor marks are named."""
    names_nothing = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if names_nothing and not config.option.markexpr and not config.option.keyword:
        config.option.markexpr = "not slow and not exhaustive"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases of tests with `pytest.mark.cases` as slow or exhaustive, before `-m` chooses
    among them.
    """
    tables: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    marks: dict[str, pytest.Mark] = {}
    for item in items:
        if mark := item.get_closest_marker("cases"):
            name = item.nodeid.partition("[")[0]
            tables[name].append(item)
            marks[name] = mark
    for name, cases in tables.items():
        counts = marks[name].kwargs
        fast = spread(counts.get("fast", 0), cases)
        others = [case for case in cases if case not in fast]
        slow = spread(counts.get("slow", len(others)), others)
        for case in others:
            case.add_marker("slow" if case in slow else "exhaustive")


def spread(count: int, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns `count` of the cases, or all if there are fewer, spread over their list."""
    count = min(count, len(cases))
    return [cases[position * len(cases) // count] for position in range(count)]


def pytest_collection_finish() -> None:
    """Leaves modules and collected tests out of all later garbage collections, and lets these
    come less often: each walks through all objects that are left.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """A file's tests run on one worker, where they share fixtures and traces."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped() -> Iterator[None]:
    """Frees the compiled programs of a file after its last test, and forgets the names of its
    models: the next file's are other ones.
    """
    from policy.programs import paths

    yield
    jax.clear_caches()
    paths.forget()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True, scope="session")
def a_loss_scale_was_used() -> None:
    """Warnings of a forgotten loss scale are the same in any order of the tests: those of a traced
    step are for processes that used none.
    """
    from policy.grads.loss_scale import note_use

    note_use()


@pytest.fixture(autouse=True)
def no_global_policy():
    """Every test starts, and leaves, with no global policy."""
    from policy import set_policy

    set_policy(None)
    yield
    set_policy(None)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each test draws from its module's generator as if it were the first that runs."""
    if isinstance(getattr(request.module, "RNG", None), np.random.Generator):
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(0))
