"""Runs a file of tests in a process that has eight devices: how many there are is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAG = "--xla_force_host_platform_device_count=8"


def with_eight_devices(*command: str | Path) -> None:
    """Runs `python *command` from the repository's root on eight CPU devices. What it printed is the error's text."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr


def run_tests_on_eight_devices(file: Path) -> None:
    """Runs every test of `file`."""
    with_eight_devices("-m", "pytest", "-p", "no:cacheprovider", "--tb=short", file)
