"""A GPU of one's own figures, from a JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.inspect.estimate.chips import CHIPS, Chip
from policy.inspect.estimate.gpu_configs import GPUS, Gpu

_FIGURES = ("memory", "bandwidth", "peaks", "link_bandwidth", "source")
_DEVICE = (
    "name",
    "capability",
    "accelerated",
    "cores",
    "units_per_core",
    "clock_ghz",
    "l2_cache",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
)


def own_gpu(path: str) -> tuple[Chip, Gpu]:
    """Returns the figures of a GPU from a JSON file.

    The file holds one object: ``like``, the name of the GPU whose figures it shares, and those that
    differ: ``memory`` (bytes), ``bandwidth`` and ``link_bandwidth`` (bytes a second), ``peaks`` (an
    object of FLOP/s by dtype), ``source``, and of the device ``name``, ``capability`` (two whole
    numbers), ``accelerated``, ``cores``, ``units_per_core``, ``clock_ghz``, ``l2_cache``,
    ``shared_memory_per_core`` and ``shared_memory_per_block_optin``, as
    `policy.inspect.estimate.gpu_configs.Gpu` has them:

        {"like": "h100", "memory": 1e11, "peaks": {"bfloat16": 7.5e14}, "cores": 114}

    Raises:
      ValueError: the file can't be read, or holds something else; the message names it.
    """
    given = _object(path)
    like = given.pop("like", "h100")
    if like not in GPUS:
        raise ValueError(f"{path}: 'like' should be one of {', '.join(GPUS)}, but is {like!r}.")
    for name in given:
        if name not in (*_FIGURES, *_DEVICE):
            raise ValueError(
                f"{path}: unknown figure {name!r}. Known figures: like, "
                f"{', '.join((*_FIGURES, *_DEVICE))}."
            )
    base, device = CHIPS[like], GPUS[like]
    chip = dataclasses.replace(
        base,
        **{name: _checked(path, name, given[name], base) for name in _FIGURES if name in given},
    )
    changed = {name: _checked(path, name, given[name], device) for name in _DEVICE if name in given}
    gpu = dataclasses.replace(
        device, memory=int(chip.memory), memory_bandwidth=int(chip.bandwidth), **changed
    )
    return dataclasses.replace(chip, source=given.get("source", path)), gpu


def _object(path: str) -> dict[str, Any]:
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} should hold one JSON object, but holds a {type(given).__name__}.")
    return given


def _checked(path: str, name: str, value: Any, base: Chip | Gpu) -> Any:
    """Returns a figure in the type that it has in `base`."""
    like = getattr(base, name)
    if isinstance(like, Mapping):
        if isinstance(value, dict) and all(map(_is_positive, value.values())):
            return {**like, **{dtype: float(flops) for dtype, flops in value.items()}}
    elif isinstance(like, (str, bool)):
        if type(value) is type(like):
            return value
    elif isinstance(like, tuple):
        if isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value):
            return tuple(value)
    elif _is_positive(value):
        return type(like)(value)
    raise ValueError(f"{path}: {name!r} should have the form of {like!r}, but is {value!r}.")


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
