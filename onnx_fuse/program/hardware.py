"""What is known of GPUs: rates, sizes, and how each compares with its neighbours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from onnx_fuse.errors import DeviceError


@dataclass(frozen=True)
class Hardware:
    """What select and the cost models know of a GPU; rates are achievable, not datasheet peaks.

    `flops` maps "float64", "float32", "tf32", "bfloat16", "float16" to operations a second.
    `l2_bandwidth` is that of what stays in the L2 cache, 0 where nobody has measured it.
    """

    name: str
    arch: str
    sm_count: int
    smem_per_block: int
    l2_bytes: int
    bandwidth: float
    flops: tuple[tuple[str, float], ...]
    launch_seconds: float = 2e-6
    driver: int = 0
    l2_bandwidth: float = 0.0

    @property
    def cached_bandwidth(self) -> float:
        """Bytes a second of what a launch reads that the one before it has left in the L2 cache."""
        return self.l2_bandwidth or 2 * self.bandwidth

    def rate(self, kind: str) -> float:
        """Operations a second of a Gemm in `kind`; those of 8 bits are twice float16's."""
        if kind in ("int8", "uint8", "float8_e4m3fn", "float8_e5m2"):
            return 2 * self.rate("float16")
        return self._rates.get(kind, self._rates["float32"])

    @cached_property
    def _rates(self) -> dict[str, float]:
        return dict(self.flops)

    def costs(self, kernel: str) -> Mapping[str, float]:
        """The numbers of a kernel's cost, by name: the H200's where nobody measured this GPU's."""
        return self._costs[kernel]

    @cached_property
    def _costs(self) -> dict[str, dict[str, float]]:
        return next((c for key, c in _COSTS.items() if key in self.name), _COSTS["H200"])

    @property
    def cc(self) -> int:
        """Compute capability as major * 10 + minor: sm_90a -> 90."""
        return int("".join(filter(str.isdigit, self.arch)))

    @classmethod
    def detect(cls, device_id: int = 0) -> Hardware:
        """The GPU `device_id`, completed from the table of known chips or scaled from one.

        Values of MIG slices and slower cards are capped at the measured ones. Raises DeviceError
        for a GPU that is too old.
        """
        from cuda.bindings import driver

        kind = driver.CUdevice_attribute
        driver.cuInit(0)

        def number(name: str) -> int:
            attribute = getattr(kind, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(driver.cuDeviceGetAttribute(attribute, device_id)[1])

        name = driver.cuDeviceGetName(256, device_id)[1].partition(b"\0")[0].decode()
        major, minor = (number(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        hold_capability(name, 10 * major + minor)
        sm_count = number("MULTIPROCESSOR_COUNT")
        # kHz * bits: two transfers a clock on every memory these chips use
        wide = number("MEMORY_CLOCK_RATE") * number("GLOBAL_MEMORY_BUS_WIDTH") * 250.0
        chip = next((hw for key, hw in CHIPS.items() if key in name), None)
        if chip is None:
            same = [hw for hw in CHIPS.values() if hw.cc <= major * 10 + minor] or [CHIPS["A100"]]
            chip = max(same, key=lambda hw: hw.cc)
            scale = sm_count / chip.sm_count
            bandwidth = 0.85 * wide if wide > 0 else chip.bandwidth * scale
        else:
            scale = min(1.0, sm_count / chip.sm_count)
            bandwidth = min(chip.bandwidth, 0.9 * wide) if wide > 0 else chip.bandwidth
        chip = replace(
            chip,
            bandwidth=bandwidth,
            flops=tuple((key, rate * scale) for key, rate in chip.flops),
        )
        return replace(
            chip,
            name=name,
            arch=f"sm_{major}{minor}" + ("a" if major >= 9 else ""),
            sm_count=sm_count,
            smem_per_block=number("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            l2_bytes=number("L2_CACHE_SIZE"),
            driver=int(driver.cuDriverGetVersion()[1]),
        )


FOLDER = Path(__file__).parent / "gpus"
"""A file for each GPU that is known: its sizes, the bytes of a copy a second, the operations a
second of a good kernel in each type, and the costs of kernels by name. The H200 was measured
(2026-11: copy 4.3 TB/s, bf16 790 TFLOP/s, tf32 350, cuBLAS fp32 50); others are by datasheet, at
the H200's fraction of it."""
_KNOWN = ("H200", "H100", "A100", "B200", "L4", "4090")
_FILES = {key: json.loads((FOLDER / f"{key}.json").read_text()) for key in _KNOWN}
_COSTS = {key: data.pop("costs") for key, data in _FILES.items() if "costs" in data}
CHIPS = {
    key: Hardware(**data | {"flops": tuple(data["flops"].items())}) for key, data in _FILES.items()
}


OLDEST = 80
"""The least compute capability that the kernels run on, as major * 10 + minor."""


def hold_capability(name: str, cc: int) -> None:
    """Raise DeviceError where a GPU, or an architecture, is older than what the kernels need."""
    if cc < OLDEST:
        raise DeviceError(
            f"{name} has compute capability {cc // 10}.{cc % 10}, and the kernels need "
            f"{OLDEST // 10}.{OLDEST % 10} (Ampere) or newer: use device 'cpu'"
        )
