"""Runs `on_eight_devices.py` in a process of its own: the number of devices is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_step_across_devices_on_eight_of_them():
    file = Path(__file__).with_name("on_eight_devices.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(file)]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    result = subprocess.run(
        command, env=environment, cwd=file.parents[2], capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
