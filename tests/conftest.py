"""The whole suite runs with strict dtype promotion, without rank promotion, and with warnings as errors."""

import os
import tempfile
from typing import Any

# A folder of compiled programs for each worker of a run, and for the processes that its tests start one at a time:
# compiling is the slow part of the suite, and most of its programs are the same few operations. JAX does not lock what
# it writes there, so workers do not share one. Set before JAX is imported.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _PROGRAMS = tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], worker)

import hypothesis
import jax
import numpy as np
import pytest

# The suite's random tests are the same in each run; those of `python -m tests.random_faults` come from its seed.
hypothesis.settings.register_profile("suite", max_examples=6, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "long", max_examples=int(os.environ.get("MPMODULES_RANDOM_EXAMPLES", "300")), deadline=None, database=None
)
hypothesis.settings.load_profile("suite")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """A file's tests run on one worker, where they share fixtures and traces; the files with most tests begin."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(autouse=True)
def no_global_policy():
    """Every test starts, and leaves, with no global policy."""
    from policy import set_policy

    set_policy(None)
    yield
    set_policy(None)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test draws from its module's generator as if it were the first, whatever ran before it."""
    if isinstance(getattr(request.module, "RNG", None), np.random.Generator):
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(0))
