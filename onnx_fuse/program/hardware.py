"""What is known of GPUs: rates, sizes, and how each compares with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

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


def _chip(
    name: str, arch: str, sms: int, smem: int, l2: int, tb: float, t: tuple[float, ...]
) -> Hardware:
    kinds = ("float64", "float32", "tf32", "bfloat16", "float16")
    rates = tuple((kind, rate * 1e12) for kind, rate in zip(kinds, t, strict=True))
    return Hardware(name, arch, sms, smem, l2 << 20, tb * 1e12, rates)


# Bandwidth (TB/s of a copy), TFLOP/s (fp64, fp32 SIMT, tf32, bf16, fp16) of a good kernel.
# H200 measured 2026-11: copy 4.3 TB/s, bf16 790 TFLOP/s, tf32 350, cuBLAS fp32 50. Others by
# datasheet, at the H200's fraction of it.
CHIPS: dict[str, Hardware] = {
    "H200": _chip("NVIDIA H200", "sm_90a", 132, 232448, 60, 4.3, (50, 50, 350, 790, 790)),
    "H100": _chip("NVIDIA H100 80GB HBM3", "sm_90a", 132, 232448, 50, 3.0, (50, 50, 350, 760, 760)),
    "A100": _chip("NVIDIA A100", "sm_80", 108, 166912, 40, 1.7, (17, 17, 125, 260, 260)),
    "B200": _chip("NVIDIA B200", "sm_100a", 148, 232448, 126, 7.0, (30, 60, 800, 1600, 1600)),
    "L4": _chip("NVIDIA L4", "sm_89", 58, 101376, 48, 0.27, (0.4, 22, 55, 110, 110)),
    "4090": _chip("NVIDIA GeForce RTX 4090", "sm_89", 128, 101376, 72, 0.9, (1, 60, 75, 150, 150)),
}  # fmt: skip


OLDEST = 80
"""The least compute capability that the kernels run on, as major * 10 + minor."""


def hold_capability(name: str, cc: int) -> None:
    """Raise DeviceError where a GPU, or an architecture, is older than what the kernels need."""
    if cc < OLDEST:
        raise DeviceError(
            f"{name} has compute capability {cc // 10}.{cc % 10}, and the kernels need "
            f"{OLDEST // 10}.{OLDEST % 10} (Ampere) or newer: use device 'cpu'"
        )
