"""Every model, by family: the models of a family are measured in one process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from benchmarks.packages.cases import Case

# Each file of `benchmarks.packages.models`, the names of its cases up to the colon, and the modules
# they import.
FAMILIES = {
    "transformers": {"transformers": "transformers"},
    "diffusers": {"diffusers": "diffusers"},
    "flaxmodels": {"flaxmodels": "flaxmodels"},
    "graphs": {"jraphx": "jraphx", "e3x": "e3x"},
    "sequences": {
        "mamba2-jax": "mamba2_jax",
        "recurrentgemma": "recurrentgemma",
        "dantinox": "dantinox",
        "memorax": "memorax",
    },
    "vision": {"jaxnn": "jaxnn", "flaxdiff": "flaxdiff"},
    "policies": {"rejax": "rejax", "nnx-ppo": "nnx_ppo"},
    "trainers": {name: name for name in ("big_vision", "scenic", "bonsai", "tunix")},
}


def cases(family: str, only: Sequence[str] = ()) -> Iterator[Case]:
    """Yields the cases of a family whose names have one of `only` in them; all of them for none."""
    for case in importlib.import_module(f"benchmarks.packages.models.{family}").cases():
        if not only or any(name.lower() in case.name.lower() for name in only):
            yield case


def modules(family: str) -> tuple[str, ...]:
    """Returns the modules whose imports are to be swapped: the packages', and the file that builds
    their models.
    """
    return (*FAMILIES[family].values(), f"benchmarks.packages.models.{family}")
