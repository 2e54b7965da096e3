"""Runs `examples/sharded_training.py` on several meshes in one process that has eight devices.

    python tests/examples/sharded_runs.py RUNS RESULTS

RUNS is a JSON file of [name, number of devices, arguments]; RESULTS becomes one of name to result.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import pytest
import sharded_training


def run(devices: int, arguments: list[str]) -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: devices)  # a mesh takes the first ones
        result = sharded_training.main(arguments)
    assert result is not None
    return dataclasses.asdict(result)


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    results = {name: run(devices, arguments) for name, devices, arguments in runs}
    Path(sys.argv[2]).write_text(json.dumps(results))
