"""Faults, norms, shardings and donation on eight devices."""

from pathlib import Path

from tests.eight_devices import run_tests_on_eight_devices


def test_faults_norms_and_shardings_on_eight_devices():
    run_tests_on_eight_devices(Path(__file__).with_name("on_eight_devices.py"))
