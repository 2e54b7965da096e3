"""Runs `examples/sharded_training.py` on several meshes in one process that has eight devices.

    python tests/examples/sharded_runs.py RUNS RESULTS

RUNS is a JSON file of [name, number of devices, arguments]; RESULTS becomes one of name to result,
or to null where the run died.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import pytest
import sharded_training


class Died(Exception):
    """In place of the end of this process."""


def die(code: int) -> None:
    raise Died(code)


def run(devices: int, arguments: list[str]) -> dict[str, object] | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: devices)  # a mesh takes the first ones
        patch.setattr(sharded_training.os, "_exit", die)
        try:
            result = sharded_training.main(arguments)
        except Died:
            return None
    assert result is not None
    return dataclasses.asdict(result)


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    results = {name: run(devices, arguments) for name, devices, arguments in runs}
    Path(sys.argv[2]).write_text(json.dumps(results))
