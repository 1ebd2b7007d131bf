"""GPUs that code can be compiled for without having one: what XLA wants to know about each."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, from its maker's data sheet. Only `capability` and the memory sizes change what is compiled."""

    device_kind: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_second: int
    l2_cache_bytes: int
    dense_bf16_flops_per_clock: int  # of one tensor core

    @property
    def ptx_name(self) -> str:
        """As ptxas calls it, with the instructions that only this architecture has."""
        major, minor = self.capability
        return f"sm_{major}{minor}a"

    @property
    def xla_description(self) -> str:
        """XLA's `GpuTargetConfigProto`, in text form."""
        major, minor = self.capability
        return f"""
platform_name: "CUDA"
device_description_str: "{self.device_kind}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
gpu_device_info {{
  name: "{self.device_kind}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}a"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  core_count: {self.multiprocessors}
  fpus_per_core: 128
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {self.memory_bytes_per_second}
  l2_cache_size: {self.l2_cache_bytes}
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  scalar_unit_description {{ {self._rate(dtype=11, units=128, operations=1)} }}
  matrix_unit_description {{
    {self._rate(dtype=10, units=4, operations=self.dense_bf16_flops_per_clock)}
    {self._rate(dtype=16, units=4, operations=self.dense_bf16_flops_per_clock)}
  }}
}}
"""

    def _rate(self, *, dtype: int, units: int, operations: int) -> str:
        """`dtype` as XLA numbers them: 10 float16, 11 float32, 16 bfloat16."""
        value = f"clock_rate_ghz: {self.clock_ghz} units_per_core: {units} ops_per_clock: {operations}"
        return f"rate_infos {{ key: {dtype} value {{ {value} }} }}"


_GIB = 2**30
_MIB = 2**20

TARGETS = {
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 80 * _GIB, 3_352_000_000_000, 50 * _MIB, 512),
    "h200": Target("NVIDIA H200", (9, 0), 132, 1.98, 141 * _GIB, 4_800_000_000_000, 50 * _MIB, 512),
    "b200": Target("NVIDIA B200", (10, 0), 148, 1.965, 178 * _GIB, 7_672_000_000_000, 126 * _MIB, 1024),
    "b300": Target("NVIDIA B300", (10, 3), 148, 1.92, 268 * _GIB, 7_672_000_000_000, 126 * _MIB, 1024),
}
