"""Snapshots on eight devices, in a process of its own."""

from pathlib import Path

import pytest

from tests.eight_devices import run_tests_on_eight_devices


@pytest.mark.slow
def test_on_eight_devices():
    run_tests_on_eight_devices(Path(__file__).parent / "on_eight_devices.py")
