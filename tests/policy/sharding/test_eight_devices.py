"""The step across devices, on eight of them."""

from pathlib import Path

from tests.eight_devices import run_tests_on_eight_devices


def test_the_step_across_devices_on_eight_of_them():
    run_tests_on_eight_devices(Path(__file__).with_name("on_eight_devices.py"))
