"""Runs code in a process of its own, as where eight devices are needed: how many there are is fixed
when JAX starts.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_python(*command: str | Path, **variables: str) -> str:
    """Runs `python *command` on the CPU from the repository's root. Returns what it printed; a
    failure shows that.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables
    program = [sys.executable, *command]
    options = {"env": environment, "cwd": ROOT, "timeout": 600}
    result = subprocess.run(program, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_tests_on_eight_devices(file: Path) -> None:
    """Runs every test of `file`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run_python("-m", "pytest", "-p", "no:cacheprovider", "--tb=short", file, XLA_FLAGS=flags)
