"""Targets for tests, which are skipped where a compiler is not installed; in CI that fails."""

import os

import pytest

from policy.inspect.estimate.targets import Target

REQUIRED = "MPMODULES_REQUIRE_ACCEL"


def target(name: str) -> Target:
    """The target, if its compiler is installed. With `MPMODULES_REQUIRE_ACCEL` set it has to be."""
    found = Target(name)
    try:
        _ = found.devices
    except RuntimeError as error:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip(str(error))
    return found
