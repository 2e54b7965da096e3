"""An environment with published packages, on CPU, without torch: pinned wheels, and files of
repositories at pinned commits.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Checkout:
    """Files of a repository that publishes no package, or one that imports more than its models.

    Attributes:
      url: to clone.
      files: the paths of its files, by commit.
    """

    url: str
    files: Mapping[str, Sequence[str]]

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


_TEXT = "big_vision/models/proj/image_text"
_LAYERS, _BASELINES = "scenic/model_lib/layers", "scenic/projects/baselines"
CHECKOUTS = (
    Checkout(
        "https://github.com/google-research/big_vision",
        {
            "5f95305cdb93f8da81fb21178a5024cff5ad4f96": (
                "big_vision/models/vit.py",
                f"{_TEXT}/text_transformer.py",
                f"{_TEXT}/two_towers.py",
            )
        },
    ),
    Checkout(
        "https://github.com/google-research/scenic",
        {
            "0cce82dbc32df69b6017021cc2992b3f82248a05": (
                f"{_LAYERS}/attention_layers.py",
                f"{_LAYERS}/nn_layers.py",
                f"{_BASELINES}/resnet.py",
                f"{_BASELINES}/vit.py",
            )
        },
    ),
    Checkout(
        "https://github.com/jax-ml/bonsai",
        {"0b78c94677589dcdc545ed504cebb64a9ded9383": ("bonsai/models/vit/modeling.py",)},
    ),
    Checkout(
        "https://github.com/google/tunix",
        {
            "ce63a9fd65f02c4c398e74f000f98371c1575eb6": (
                "tunix/models/llama3/model.py",
                "tunix/models/qwen3/model.py",
                "tunix/generate/mappings.py",
                "tunix/utils/compat.py",
                "tunix/utils/env_utils.py",
            )
        },
    ),
)


def sources_of(python: Path) -> Path:
    """Returns the folder of an environment that has the files of repositories."""
    return python.parents[1] / "sources"


def check_out(checkout: Checkout, clones: Path | None, folder: Path) -> None:
    """Writes the files of a repository into `folder`.

    Args:
      clones: a folder with a clone of each repository, by its name; None clones it from its URL.

    Raises:
      subprocess.CalledProcessError: it can't be cloned, or has no such file.
    """
    with tempfile.TemporaryDirectory() as made:
        clone = Path(made) if clones is None else clones / checkout.name
        if clones is None:
            command = [
                "git",
                "clone",
                "--quiet",
                "--bare",
                "--filter=blob:none",
                checkout.url,
                made,
            ]
            subprocess.run(command, check=True)
        for commit, paths in checkout.files.items():
            for path in paths:
                command = ["git", "-C", str(clone), "show", f"{commit}:{path}"]
                text = subprocess.run(command, check=True, capture_output=True).stdout
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text)


def python_of(folder: Path) -> Path:
    """Returns the interpreter of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make(folder: Path, clones: Path | None = None) -> Path:
    """Makes an environment in `folder`, unless one is there, and returns its interpreter.

    Args:
      folder: of the environment.
      clones: as in `check_out`.

    Raises:
      subprocess.CalledProcessError: a package can't be installed, or a repository not cloned.
    """
    python, done = python_of(folder), folder / "packages.txt"
    wanted = "\n".join((*NEEDED, *PACKAGES, *map(str, CHECKOUTS)))
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
    for checkout in CHECKOUTS:
        check_out(checkout, clones, sources_of(python))
    done.write_text(wanted)
    return python


def run(python: Path, arguments: Sequence[str]) -> int:
    """Runs a module of this repository in an environment, on CPU, and returns its exit status."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(sources_of(python)))),
        "JAX_PLATFORMS": "cpu",
        "TOKENIZERS_PARALLELIZM": "false",
    }
    return subprocess.run(
        [str(python), "-W", "ignore", "-m", *arguments], cwd=ROOT, env=variables, check=False
    ).returncode
