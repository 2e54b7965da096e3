"""A GPU of one's own figures, from a JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.inspect.estimate.chips import CHIPS, Chip

_FIGURES = ("memory", "bandwidth", "peaks", "link_bandwidth", "source")


def own_gpu(path: str) -> Chip:
    """Returns the figures of a GPU from a JSON file.

    The file holds one object: ``like``, the name of the GPU whose figures it shares, and those that
    differ: ``memory`` (bytes), ``bandwidth`` and ``link_bandwidth`` (bytes a second), ``peaks`` (an
    object of FLOP/s by dtype), ``source``, and of the device ``name``, ``capability`` (two whole
    numbers), ``accelerated``, ``cores``, ``units_per_core``, ``clock_ghz``, ``l2_cache``,
    ``shared_memory_per_core`` and ``shared_memory_per_block_optin``, as in `chips.toml`:

        {"like": "h100", "memory": 1e11, "peaks": {"bfloat16": 7.5e14}, "cores": 114}

    Raises:
      ValueError: the file can't be read, or holds something else; the message names it.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} should hold one JSON object, but holds a {type(given).__name__}.")
    like = given.pop("like", "h100")
    gpus = {name: chip for name, chip in CHIPS.items() if chip.platform == "cuda"}
    if like not in gpus:
        raise ValueError(f"{path}: 'like' should be one of {', '.join(gpus)}, but is {like!r}.")
    base = gpus[like]
    known = {**{name: getattr(base, name) for name in _FIGURES}, **base.device}
    del known["memory_bandwidth"]  # follows from the other
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"{path}: unknown figure {name!r}. Known figures: like, {', '.join(known)}."
            )
        if not _is_like(value, known[name]):
            raise ValueError(
                f"{path}: {name!r} should have the form of {known[name]!r}, but is {value!r}."
            )
        known[name] = {**known[name], **value} if name == "peaks" else value
    figures = {name: known.pop(name) for name in _FIGURES} | {"source": given.get("source", path)}
    device = {**known, "memory_bandwidth": int(figures["bandwidth"])}
    return dataclasses.replace(base, **figures, device=device)


def _is_like(value: Any, known: Any) -> bool:
    """Returns whether a figure has the form of another."""
    if isinstance(known, (str, bool)):
        return type(value) is type(known)
    if isinstance(known, list):
        return isinstance(value, list) and [type(n) for n in value] == [type(n) for n in known]
    if isinstance(known, Mapping):
        return isinstance(value, dict) and all(_is_like(part, 1.0) for part in value.values())
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
