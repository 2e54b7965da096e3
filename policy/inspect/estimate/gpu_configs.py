"""Published figures of GPUs for XLA's compiler, as the text of its `GpuTargetConfigProto`.

Source of the figures: OpenXLA, `xla/backends/gpu/target_config/specs/` (`h100_sxm.txtpb`,
`a100_sxm_80.txtpb`, `b200.txtpb`), which are read from the devices themselves. An H200 is an H100
with the memory of its data sheet.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Published figures of one device.

    Attributes:
      name: the device's own.
      capability: its compute capability.
      accelerated: whether code for that very architecture may be made ("sm_90a").
      cores: streaming multiprocessors.
      units_per_core: float32 units of each.
      clock_ghz: of the cores.
      memory, memory_bandwidth, l2_cache: bytes, bytes a second, bytes.
      shared_memory_per_core, shared_memory_per_block_optin: bytes.
      dnn: cuDNN's version.
    """

    name: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    units_per_core: int
    clock_ghz: float
    memory: int
    memory_bandwidth: int
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    dnn: tuple[int, int, int]

    def text(self) -> str:
        """Writes the figures as a text proto."""
        feature = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.units_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bandwidth}
  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: {self.dnn[0]} minor: {self.dnn[1]} patch: {self.dnn[2]} }}
device_description_str: "{self.name}"
"""


GPUS = {
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        accelerated=True,
        cores=132,
        units_per_core=128,
        clock_ghz=1.98,
        memory=84942979072,
        memory_bandwidth=3352320000000,
        l2_cache=52428800,
        shared_memory_per_core=233472,
        shared_memory_per_block_optin=232448,
        dnn=(9, 10, 0),
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        capability=(9, 0),
        accelerated=True,
        cores=132,
        units_per_core=128,
        clock_ghz=1.98,
        memory=150754820096,
        memory_bandwidth=4800000000000,
        l2_cache=52428800,
        shared_memory_per_core=233472,
        shared_memory_per_block_optin=232448,
        dnn=(9, 10, 0),
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        accelerated=False,
        cores=108,
        units_per_core=64,
        clock_ghz=1.41,
        memory=85100068864,
        memory_bandwidth=2039040000000,
        l2_cache=41943040,
        shared_memory_per_core=167936,
        shared_memory_per_block_optin=166912,
        dnn=(9, 10, 0),
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=(10, 0),
        accelerated=True,
        cores=148,
        units_per_core=128,
        clock_ghz=1.965,
        memory=191514411008,
        memory_bandwidth=7672320000000,
        l2_cache=132644864,
        shared_memory_per_core=233472,
        shared_memory_per_block_optin=232448,
        dnn=(9, 10, 0),
    ),
}
