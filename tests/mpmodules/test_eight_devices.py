"""Models of both APIs on eight devices."""

from pathlib import Path

import pytest

from tests.eight_devices import run_tests_on_eight_devices


@pytest.mark.slow
def test_linen_and_nnx_models_on_eight_devices():
    run_tests_on_eight_devices(Path(__file__).with_name("on_eight_devices.py"))
