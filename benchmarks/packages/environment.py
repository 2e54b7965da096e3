"""An environment with published packages: pinned wheels, on CPU, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What the models need: the packages' own demands on each other contradict, and most of them are met
# by none.
NEEDED = (
    *(
        "jax==0.10.2",
        "jaxlib==0.10.2",
        "flax==0.12.8",
        "optax==0.2.8",
        "transformers==4.49.0",
        "diffusers==0.32.2",
    ),
    *(
        "chex==0.1.92",
        "distrax==0.1.9",
        "einops==0.8.2",
        "h5py==3.16.0",
        "jaxtyping==0.3.9",
        "more-itertools==11.2.1",
    ),
    *("numpy==2.3.5", "sympy==1.14.0", "typeguard==2.13.3"),
)
PACKAGES = (
    *(
        "dantinox==0.4.14",
        "e3x==1.0.2",
        "flashbax==0.1.3",
        "flaxdiff==0.2.11",
        "flaxmodels==0.1.3",
        "jaxnn==0.2.0",
    ),
    *("jraphx==0.1.0", "mamba2-jax==1.1.2", "memorax==1.0.1", "nnx-ppo==0.3.0"),
    *("recurrentgemma==1.0.1", "rejax==0.1.3"),
)


def python_of(folder: Path) -> Path:
    """Returns the interpreter of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make(folder: Path) -> Path:
    """Makes an environment in `folder`, unless one is there, and returns its interpreter.

    Raises:
      subprocess.CalledProcessError: a package can't be installed.
    """
    python, done = python_of(folder), folder / "packages.txt"
    wanted = "\n".join((*NEEDED, *PACKAGES))
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"making an environment in {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
    ]
    subprocess.run([*pip, *NEEDED], check=True)
    subprocess.run([*pip, "--no-deps", *PACKAGES], check=True)
    done.write_text(wanted)
    return python


def run(python: Path, arguments: Sequence[str]) -> int:
    """Runs a module of this repository in an environment, on CPU, and returns its exit status."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "TOKENIZERS_PARALLELIZM": "false",
    }
    return subprocess.run(
        [str(python), "-W", "ignore", "-m", *arguments], cwd=ROOT, env=variables, check=False
    ).returncode
