"""The whole suite runs with strict dtype promotion, without rank promotion, and with warnings as
errors.
"""

import ctypes
import gc
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
# XLA's own passes are as always, but LLVM optimises less: it takes half of the time of a compile,
# and kernels run once here. At level 0 fused and eager programs would round differently.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_backend_optimization_level=1".strip()

import hypothesis
import jax
import numpy as np
import pytest

from tests import fast_part

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
        config.option.markexpr = "not slow"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that are not in the fast part, before `-m` chooses among them."""
    fast_part.mark(items, fast_part.durations())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """A file's tests run on one worker, where they share fixtures and traces; the files with most
    tests begin.
    """
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped() -> Iterator[None]:
    """Frees the compiled programs of a file after its last test: the next file's are other ones."""
    yield
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


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
