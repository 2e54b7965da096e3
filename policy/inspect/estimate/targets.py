"""Devices to compile for: TPU topologies and GPUs that need not be there, and those at hand; and
their published figures (`chips.toml`), by which bytes and FLOPs become seconds.

A kernel takes no less than its matmuls take at the peak of their dtypes, and no less than its bytes
take at the memory's bandwidth [1]. Launches, caches and the work of other units are left out: a run
takes longer than the sum over its kernels.

[1] Williams, Waterman, Patterson: Roofline. Communications of the ACM, 2009.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import string
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import topologies

from policy.inspect.hlo.costs import Costs, Exchanged, ExchangeTime, KernelTime

Platform = Literal["tpu", "cuda", "cpu"]
_FIGURES = ("memory", "bandwidth", "peaks", "link_bandwidth", "source")
INSTALL = (
    "The compilers for TPUs and GPUs run on x86 Linux without an accelerator: "
    "pip install 'mpmodules[accel]'."
)
# What the compilers read when they are loaded: there is no accelerator to look for.
_ABSENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def _resource(name: str) -> str:
    """Returns the text of a file of this package."""
    return resources.files("policy.inspect.estimate").joinpath(name).read_text(encoding="utf-8")


# In names such as v4-16 Google counts the cores of these chips, which have two.
_NAMED_BY_CORES = ("v2", "v3", "v4", "v5p")


# --------------------------------------------------------------------------------------------------
# Published figures
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device in JAX's count: a chip of v5p, v6e and v5e, half a chip of v4 and tpu7x.

    Attributes:
      platform: "tpu", "cuda" or "cpu".
      memory: bytes that programs may take: on a TPU what its compiler leaves them.
      bandwidth: of that memory, bytes a second; 0 where none is published.
      peaks: FLOP/s of the matmul units by the operands' dtype. Float32 is what a matmul of default
        precision takes: TF32 on a GPU, one pass of bfloat16 on a TPU. "float32, high" and
        "float32, highest" are three and six passes on a TPU; on a GPU the first is TF32, and the
        second the peak of its other units. Empty where none is published.
      link_bandwidth: of all links to other devices together, bytes a second, in one direction; 0
        where none is published.
      clock: Hz of the matmul units, by which cycles become seconds; 0 where the compiler gives no
        cycles.
      source: the document of these figures.
      kinds: parts of the names that JAX has for the device.
      axes: of a topology of TPUs.
      largest: the chips of their largest topology.
      device: what XLA's compiler is told of a GPU.
    """

    platform: Platform
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    link_bandwidth: float
    clock: float
    source: str
    kinds: tuple[str, ...] = ()
    axes: int = 0
    largest: int = 0
    device: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Returns FLOP/s of matmuls of operands in `dtype`; of an unlisted one those of float32.

        A precision may follow the dtype, as in "float32, highest"; or passes, of which "float32,
        bfloat16 x3" takes three of another's. TF32 is float32 of default precision.
        """
        base, _, precision = dtype.partition(", ")
        multiplied, has_passes, passes = precision.partition(" x")
        if has_passes:
            return self.peak(multiplied) / int(passes)
        names = (dtype, base, "float32")
        return next((self.peaks[name] for name in names if name in self.peaks), 0.0)

    def target_config(self) -> str:
        """Writes the figures of a GPU as the text of XLA's `GpuTargetConfigProto`."""
        device = dict(self.device)
        major, minor = device.pop("capability")
        return string.Template(_resource("gpu_target_config.txtpb")).substitute(
            device,
            memory=int(self.memory),
            major=major,
            minor=minor,
            feature="ACCELERATED_FEATURES" if device["accelerated"] else "NONE",
        )


def _chip(table: dict[str, Any]) -> Chip:
    half = table["peaks"]["bfloat16"]
    if table["platform"] == "tpu":
        peaks = {"float32": half, "float32, high": half / 3, "float32, highest": half / 6}
    else:
        peaks = {"float16": half, "float32": half / 2}
    return Chip(**{"clock": 0.0, **table, "peaks": {**peaks, **table["peaks"]}})


CHIPS: dict[str, Chip] = {
    name: _chip(table) for name, table in tomllib.loads(_resource("chips.toml")).items()
}


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


# --------------------------------------------------------------------------------------------------
# Times by published figures
# --------------------------------------------------------------------------------------------------


def kernel_time(chip: Chip) -> KernelTime | None:
    """Returns the `kernel_time` of `costs_of` for a chip's programs: the roofline in cycles of the
    chip's clock, or in seconds where it has none.

    It takes the FLOPs of a kernel's matmuls and convolutions by the dtype that is multiplied, as
    `Costs.flops` has them ("bfloat16", "float32, highest", "float32, bfloat16 x3"), and the bytes
    that it reads and writes.

    Returns:
      None where the chip's figures are not published, as a processor's.
    """
    if not chip.bandwidth or not chip.peaks:
        return None

    def time(flops: Mapping[str, float], moved: float) -> float:
        computing = sum(amount / chip.peak(dtype) for dtype, amount in flops.items())
        return max(computing, moved / chip.bandwidth) * (chip.clock or 1.0)

    return time


def compute_seconds(chip: Chip, costs: Costs) -> float | None:
    """Returns the seconds of a program's kernels, one after another.

    Args:
      chip: the device that the program was compiled for.
      costs: of `costs_of(text, kernel_time(chip))`.

    Returns:
      None where the chip has neither cycles nor published peaks.
    """
    if not chip.bandwidth or not chip.peaks:
        return None
    return costs.time / (chip.clock or 1.0)


def overlapped_seconds(chip: Chip, costs: Costs) -> float | None:
    """Returns the seconds of a program's kernels and exchanges, where exchanges run beside the
    kernels that the program's schedule has between their start and their end.

    Args:
      chip: the device that the program was compiled for.
      costs: of `costs_of(text, kernel_time(chip), exchange_time(chip))`.

    Returns:
      None where `compute_seconds` or the time of an exchange is unknown.
    """
    is_known = chip.bandwidth and chip.peaks and (chip.link_bandwidth or not costs.collectives)
    return costs.elapsed / (chip.clock or 1.0) if is_known else None


def exchange_time(chip: Chip) -> ExchangeTime:
    """Returns the `exchange_time` of `costs_of` for a chip's programs: `exchange_seconds`, in
    cycles of the chip's clock where it has one.
    """

    def time(sent: Exchanged) -> float | None:
        seconds = exchange_seconds(chip, sent)
        return None if seconds is None else seconds * (chip.clock or 1.0)

    return time


def exchange_seconds(chip: Chip, collectives: Exchanged) -> float | None:
    """Returns the seconds of collectives: an all-reduce sends its result twice, the others once.

    This is the limit of a ring of many devices; a ring of n sends ``(n - 1) / n`` of it.

    Returns:
      None where there are collectives and the bandwidth of the chip's links is not published.
    """
    sent = sum(
        size * (2 if operation == "all-reduce" else 1)
        for (operation, _), size in collectives.items()
    )
    if not sent:
        return 0.0
    return sent / chip.link_bandwidth if chip.link_bandwidth else None


# --------------------------------------------------------------------------------------------------
# Targets
# --------------------------------------------------------------------------------------------------


def _hint(kind: str) -> str:
    """Returns a sentence on the target that an unknown kind of device may stand for, or nothing."""
    if kind in ("tpu", "gpu", "cuda"):
        like = "v5e:2x2" if kind == "tpu" else "h100"
        return f" Name the chip: {like!r}, or 'here' for the devices of this process."
    chip, dash, count = kind.partition("-")
    if dash and chip in CHIPS and count.isdigit():
        if not CHIPS[chip].axes:
            return f" Did you mean '{chip}:{count}'?"
        chips = int(count) // 2 if chip in _NAMED_BY_CORES else int(count)
        shape = _square(chip, max(chips, 1))
        return f" The topology follows a colon: {kind} has {chips} chips, as in {shape!r}."
    near = difflib.get_close_matches(kind.lower(), [*CHIPS, "cpu", "here"], 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _square(chip: str, count: int) -> str:
    """Returns the topology of `count` chips whose sides are nearest to each other."""
    sides = []
    for axes in range(CHIPS[chip].axes, 0, -1):
        side = next(n for n in range(round(count ** (1 / axes)), 0, -1) if count % n == 0)
        sides.append(side)
        count //= side
    return f"{chip}:{'x'.join(map(str, sides))}"


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for, by name.

    >>> from policy.inspect.estimate.targets import Target
    >>> Target("v5e:4x4").kind, Target("h100:8").chip.platform
    ('v5e', 'cuda')

    Attributes:
      name: a TPU topology, ``v5e:2x2`` or ``v5p:4x4x4``, whose chip alone is one of them; a GPU,
        ``h100``, or several in one machine, ``h100:8``; a JSON file of a GPU's figures,
        ``my.json:8`` (see `own_gpu`); ``cpu`` for the processor at
        hand, or ``here`` for the devices of JAX's default backend.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"A target is a text, such as 'v5e:4x4', but got {self.name!r}.")
        kind, shape = _split(self.name)
        chip = CHIPS.get(kind)
        if chip is not None and chip.axes:
            if ":" in self.name:
                _require_torus(self.name, kind, shape, chip)
        elif kind in ("cpu", "here"):
            if shape:
                raise ValueError(
                    f"The target {self.name!r} should be {kind!r} alone: its devices are those "
                    "that JAX has. XLA_FLAGS=--xla_force_host_platform_device_count=8 divides a "
                    "processor into 8 devices."
                )
        elif chip is not None or kind.endswith(".json"):
            if shape and not re.fullmatch(r"[1-9]\d*", shape):
                raise ValueError(
                    f"The target {self.name!r} should end in a number of devices, as in {kind}:8."
                )
        else:
            raise ValueError(
                f"There is no target {self.name!r}.{_hint(kind)} Chips: {', '.join(CHIPS)}, as in "
                "v5e:4x4 and h100:8; a .json file of a GPU's figures; 'cpu'; and 'here'."
            )

    @property
    def kind(self) -> str:
        """The chip's name, "cpu", "here", or the file of a GPU's figures."""
        return _split(self.name)[0]

    @functools.cached_property
    def chip(self) -> Chip:
        """The published figures of a device.

        Raises:
          ValueError: the file of a GPU's figures can't be read.
        """
        if self.kind.endswith(".json"):
            return own_gpu(self.kind)
        return CHIPS[self.kind] if self.kind in CHIPS else _chip_of(self.devices[0])

    @property
    def platform(self) -> str:
        """The platform to lower for: "tpu", "cuda", "rocm" or "cpu"."""
        return self.chip.platform

    @property
    def timing(self) -> str:
        """The source of seconds: "the compiler's cycles", "a roofline of published peaks", or "" if
        there is none.
        """
        if self.chip.clock:
            return "the compiler's cycles"
        return "a roofline of published peaks" if self.chip.peaks else ""

    @functools.cached_property
    def devices(self) -> np.ndarray:
        """The devices of the topology, flat.

        Raises:
          RuntimeError: the compiler is not installed, or JAX finds no devices here.
          ValueError: the compiler has no such topology.
        """
        if self.kind in ("cpu", "here"):
            return np.array(jax.devices("cpu" if self.kind == "cpu" else None))
        return np.array(_topology(self.name).devices).reshape(-1)

    def mesh(self, sizes: Mapping[str, int] | None = None) -> jax.sharding.Mesh:
        """Makes a mesh of all devices with axes of type Auto: XLA partitions over them.

        Args:
          sizes: of the axes by name; None for one axis, "data".

        Raises:
          ValueError: the sizes do not multiply to the number of devices.
        """
        sizes = {"data": self.devices.size} if sizes is None else sizes
        count = math.prod(sizes.values())
        if count != self.devices.size:
            raise ValueError(
                f"A mesh of {axes_text(sizes)} has {count} devices, but {self.name} has "
                f"{self.devices.size}."
            )
        return jax.sharding.Mesh(
            self.devices.reshape(tuple(sizes.values())),
            tuple(sizes),
            axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
        )


def axes_text(sizes: Mapping[Any, int]) -> str:
    """Returns the axes of a mesh and their sizes: "data=4, fsdp=2"."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _split(name: str) -> tuple[str, str]:
    """Returns the chip and the shape of a target's name; a file's name may hold colons."""
    kind, _, shape = name.rpartition(":") if ":" in name else (name, "", "")
    return (name, "") if name.endswith(".json") else (kind, shape)


def _require_torus(name: str, kind: str, shape: str, chip: Chip) -> None:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or shape.count("x") + 1 != chip.axes:
        raise ValueError(
            f"The target {name!r} should have {chip.axes} axes of chips, as in {_example(kind)}; "
            f"{kind} alone is one chip."
        )
    chips = math.prod(map(int, shape.split("x")))
    if chips > chip.largest:
        raise ValueError(
            f"The target {name!r} has {chips} chips, but the largest topology of {kind} has "
            f"{chip.largest}."
        )


def _example(kind: str) -> str:
    return f"{kind}:{'x'.join(['4'] * CHIPS[kind].axes)}"


@functools.cache
def _topology(name: str) -> Any:
    kind, shape = _split(name)
    chip = CHIPS[kind] if kind in CHIPS else own_gpu(kind)
    if chip.axes:
        one = "x".join("1" * chip.axes)
        options: dict[str, Any] = {"platform": "tpu", "topology_name": f"{kind}:{shape or one}"}
        if shape in ("", one):  # no multiple of the default, hosts of two by two chips
            options["chips_per_host_bounds"] = (1, 1, 1)
    else:
        options = {"platform": "cuda", "topology_name": "", "topology": f"1x1x{shape or 1}"}
        options["target_config"] = chip.target_config()
    try:
        with _without_accelerators():
            return topologies.get_topology_desc(**options)
    except Exception as error:  # what a missing plugin raises differs by release
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "INVALID_ARGUMENT" not in reason:
            raise RuntimeError(f"No compiler for {name}: {reason}. {INSTALL}") from error
        even = f" A host has 2 x 2 chips: give sides that are even, as in {_example(kind)}."
        advice = f"{even} {kind} alone is one chip." if chip.axes else ""
        raise ValueError(f"There is no topology {name!r}: {reason}.{advice}") from None


@contextlib.contextmanager
def _without_accelerators() -> Iterator[None]:
    """Sets what the compilers read where they are loaded, unless it is set."""
    added = {name: value for name, value in _ABSENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _chip_of(device: Any) -> Chip:
    """Returns the figures of a device at hand: published ones where they are known, and the memory
    that it reports.
    """
    kind = device.device_kind.upper()
    known = [(part, chip) for chip in CHIPS.values() for part in chip.kinds if part.upper() in kind]
    if known:
        chip = max(known, key=lambda named: len(named[0]))[1]
    else:
        platform: Any = "cuda" if device.platform == "gpu" else device.platform
        chip = Chip(platform, 0.0, 0.0, {}, 0.0, 0.0, device.device_kind)
    if chip.platform == "cpu":
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # no such figure on this system
            memory = 0
        return dataclasses.replace(chip, memory=float(memory))
    reported = (device.memory_stats() or {}).get("bytes_limit")
    return dataclasses.replace(chip, memory=float(reported)) if reported else chip
