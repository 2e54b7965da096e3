"""The chips that programs are compiled for, and their published figures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from benchmarks.accel.gpu_configs import GPU_CONFIGS

INSTALL = (
    "python -m benchmarks accel needs the accelerators' compilers, which there are for Linux on "
    "x86: "
    "pip install 'mpmodules[accel]', or of a checkout '.[accel]'."
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device in JAX's count: a chip of v5p, v6e and v5e, half a chip of tpu7x.

    Attributes:
      platform: "tpu" or "cuda".
      memory: bytes.
      bandwidth: of that memory, bytes a second.
      flops: bfloat16 FLOP/s of the matmul units.
      link_bandwidth: of all links to other devices together, bytes a second, in one direction.
      clock: Hz of the matmul units, by which cycles become seconds; 0 where the compiler gives no
        cycles.
      source: the document of these figures.
    """

    platform: str
    memory: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    clock: float
    source: str


_GIB = 2.0**30
# A TPU's clock follows from its peak: FLOP/s / (2 * multiply-adds a cycle): 4 units of 128 x 128
# for v5e, 8 for v5p, 4 of 256 x 256 for v6e, 4 for each half of tpu7x.
CHIPS = {
    "v5e": Chip(
        "tpu", 16 * _GIB, 819e9, 197e12, 200e9, 1.5e9, "Google Cloud, TPU v5e: system architecture"
    ),
    "v5p": Chip(
        "tpu",
        95 * _GIB,
        2765e9,
        459e12,
        600e9,
        1.75e9,
        "Google Cloud, TPU v5p: system architecture",
    ),
    "v6e": Chip(
        "tpu",
        32 * _GIB,
        1640e9,
        918e12,
        400e9,
        1.75e9,
        "Google Cloud, TPU v6e: system architecture",
    ),
    "tpu7x": Chip(
        "tpu",
        96 * _GIB,
        3690e9,
        1153.5e12,
        300e9,
        2.2e9,
        "Google Cloud, TPU7x (Ironwood), half a chip",
    ),
    "h100": Chip("cuda", 80 * _GIB, 3350e9, 989.5e12, 450e9, 0.0, "NVIDIA H100 data sheet, 2024"),
    "a100": Chip("cuda", 80 * _GIB, 2039e9, 312e12, 300e9, 0.0, "NVIDIA A100 data sheet, 2022"),
    "b200": Chip(
        "cuda",
        180 * _GIB,
        8000e9,
        2250e12,
        900e9,
        0.0,
        "NVIDIA HGX B200 data sheet, 2025, an eighth of it",
    ),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A topology to compile for: ``v5e:2x2``, ``v5p:4x4x4``; ``h100`` or, of eight in one machine,
    ``h100:8``.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name.split(":")[0] not in CHIPS:
            raise ValueError(
                f"There is no target {self.name!r}. Chips: {', '.join(CHIPS)}; as in v5e:2x2 and "
                "h100:8."
            )

    @property
    def kind(self) -> str:
        return self.name.split(":")[0]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @functools.cached_property
    def devices(self) -> np.ndarray:
        """The devices of the topology, flat.

        Raises:
          RuntimeError: the compiler is not installed.
        """
        return np.array(_topology(self.name).devices).reshape(-1)

    def mesh(
        self, shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("data",)
    ) -> jax.sharding.Mesh:
        """Makes a mesh of all devices with axes of type Auto: XLA partitions over them."""
        devices = self.devices.reshape(shape or (-1,))
        return jax.sharding.Mesh(
            devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)
        )


_ONE_CHIP = {"v5e": "1x1", "v6e": "1x1", "v5p": "1x1x1", "tpu7x": "1x1x1"}


@functools.cache
def _topology(name: str) -> Any:
    kind, _, shape = name.partition(":")
    try:
        if CHIPS[kind].platform == "tpu":
            shape = shape or _ONE_CHIP[kind]
            # Hosts of two by two chips are the default, of which one chip is no multiple.
            host = {"chips_per_host_bounds": (1, 1, 1)} if shape == _ONE_CHIP[kind] else {}
            return topologies.get_topology_desc(
                platform="tpu", topology_name=f"{kind}:{shape}", **host
            )
        config = GPU_CONFIGS[kind]
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=config, topology=f"1x1x{shape or 1}"
        )
    except Exception as error:  # what a missing plugin raises differs by release
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RuntimeError(f"No compiler for {name}: {reason}. {INSTALL}") from error


def chosen(on: Sequence[str], default: Sequence[str], others: Sequence[str] = ()) -> list[Target]:
    """Returns the targets of a table: its default ones, or those that `on` names.

    Args:
      on: chips, as in ``v5e``, each of which is the topology of that chip among `default` and
        `others`; or targets.

    Raises:
      ValueError: a chip that there is not.
    """
    known = {name.split(":")[0]: name for name in (*default, *others)}
    return [Target(known.get(name, name)) for name in on or default]
