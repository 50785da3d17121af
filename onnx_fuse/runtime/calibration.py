"""The rates of a GPU that no table has: measured once, in a few seconds, and kept in the cache.

A chain of products in registers gives the peak of each type, a copy larger than the L2 cache the
memory's rate, and one of a part of it the cache's. Kernels of many threads reach a part of the
peak, as on the chips of the table.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from onnx_fuse import config
from onnx_fuse.cuda.launch import bind
from onnx_fuse.cuda.macros import defines
from onnx_fuse.errors import DeviceError
from onnx_fuse.files import private_folder, read_private
from onnx_fuse.program.launch import Launch, Num, Ptr
from onnx_fuse.program.problem import CHIPS, Hardware
from onnx_fuse.runtime import device

REACHED = 0.8
"""The part of a peak that a good kernel reaches: 790 of 989 TFLOP/s in bfloat16 (H200, 2026-11)."""
HOPPER = 1.6
"""What wgmma does for each product of mma.sync, which is what is measured: 989 of 620 TFLOP/s."""
_ROUNDS = 2000
_CHAINS = 8
_COPIED = 1 << 28
"""Bytes of the copy, unless the L2 cache is as large."""
_AGAIN = 32
"""Times that a copy within that cache is made in one launch, whose start then weighs little."""
# type -> (operations of a warp's chain in a round, what it computes)
_KINDS = {
    "float32": (16 * 64, "FMA"), "float64": (_CHAINS * 512, "DMMA"),
    "tf32": (_CHAINS * 2048, "TF32"), "bfloat16": (_CHAINS * 4096, "BF16"),
    "float16": (_CHAINS * 4096, "F16"),
}  # fmt: skip
PEAK = """#include "common.cuh"
#define EACH _Pragma("unroll") for (int i = 0; i < 8; i++)
extern "C" __global__ void __launch_bounds__(256) peak(float* out, int rounds) {
    after_previous_launch();
    float total = 0;
#if defined(FMA)
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = threadIdx.x + i;
    for (int r = 0; r < rounds; r++)
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = fmaf(x[i], 0.999f, 0.5f);
    for (int i = 0; i < 16; i++) total += x[i];
#elif defined(DMMA)
    double c[8][2] = {}, a = threadIdx.x, b = 0.5;
    for (int r = 0; r < rounds; r++)
        EACH asm volatile(
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%0,%1};"
            : "+d"(c[i][0]), "+d"(c[i][1]) : "d"(a), "d"(b));
    EACH total += (float)c[i][0];
#else
    float c[8][4] = {};
    u32 a = 0, b = 0;
    for (int r = 0; r < rounds; r++)
        EACH asm volatile(
            "mma.sync.aligned." SHAPE " {%0,%1,%2,%3},{%4,%4,%4,%4},{%5,%5},{%0,%1,%2,%3};"
            : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]) : "r"(a), "r"(b));
    EACH total += c[i][0];
#endif
    if (total == -1.0f) *out = total;  // never: so that nothing is left out
}
"""
_SHAPES = {
    "TF32": "m16n8k8.row.col.f32.tf32.tf32.f32", "BF16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "F16": "m16n8k16.row.col.f32.f16.f16.f32",
}  # fmt: skip
COPY = """#include "common.cuh"
extern "C" __global__ void __launch_bounds__(256)
    copy(const float4* x, float4* y, i64 n, int rounds) {
    after_previous_launch();
    for (int r = 0; r < rounds; r++)
        for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) y[i] = x[i];
}
"""


class Timer(Protocol):
    """What measures: a GPU's own (`GpuTimer`), or one that a test makes up."""

    def seconds(self, launch: Launch, nbytes: Mapping[str, int]) -> float:
        """Seconds of a launch whose operands are `nbytes` large. Raises DeviceError."""


@dataclass(frozen=True)
class Calibrated:
    """A GPU with the rates that costs are worked out with, and where they come from."""

    hw: Hardware
    source: str


def listed(hw: Hardware) -> bool:
    """Whether the table of chips has this GPU, so that nothing is measured."""
    return any(key in hw.name for key in CHIPS)


def measured(hw: Hardware, timer: Timer) -> Hardware:
    """The GPU with the rates that `timer` finds.

    Raises DeviceError where one cannot be measured, or is no rate.
    """
    blocks, flops = 4 * hw.sm_count, []
    for kind, (operations, macro) in _KINDS.items():
        macros = {macro: 1} | ({"SHAPE": f'"{_SHAPES[macro]}"'} if macro in _SHAPES else {})
        args = (Ptr("out"), Num("i32", _ROUNDS))
        grid, block = (blocks, 1, 1), (256, 1, 1)
        launch = Launch(PEAK, "peak", grid, block, args, defines(**macros), waits="first")
        total = 8 * blocks * _ROUNDS * operations
        rate = REACHED * total / _held(kind, timer.seconds(launch, {"out": 4}))
        flops.append((kind, rate * (HOPPER if hw.cc == 90 and macro in _SHAPES else 1)))
    bandwidth = _copied(hw, timer, max(_COPIED, 4 * hw.l2_bytes))
    cached = max(bandwidth, _copied(hw, timer, hw.l2_bytes // 4, _AGAIN))
    return replace(hw, flops=tuple(flops), bandwidth=bandwidth, l2_bandwidth=cached)


def _copied(hw: Hardware, timer: Timer, nbytes: int, rounds: int = 1) -> float:
    """Bytes a second, read and written, of a copy of about `nbytes`, `rounds` times in a launch."""
    nbytes = max(16, nbytes // 16 * 16)
    operands = (Ptr("x"), Ptr("y"), Num("i64", nbytes // 16), Num("i32", rounds))
    launch = Launch(COPY, "copy", (8 * hw.sm_count, 1, 1), (256, 1, 1), operands, waits="first")
    seconds = _held("a copy", timer.seconds(launch, {"x": nbytes, "y": nbytes}))
    return 2 * rounds * nbytes / seconds


def _held(what: str, seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise DeviceError(f"{what} took {seconds} seconds")
    return seconds


def calibrated(hw: Hardware, timer: Timer) -> Calibrated:
    """The GPU as the table has it, or as it was measured here or by an earlier process.

    Where it cannot be measured, its rates stay those scaled from another chip, and a warning says
    so. Of several processes that measure at once all take what the first one keeps.
    """
    if listed(hw):
        return Calibrated(hw, "rates of the table")
    place = _place(hw)
    rates = _kept(place, hw)
    if rates is None:
        try:
            fresh = measured(hw, timer)
        except DeviceError as error:
            reason = " ".join(str(error).split())[:200]
            warnings.warn(
                f"{hw.name}: its rates could not be measured ({reason}), so kernels are chosen by "
                "those of a similar GPU",
                stacklevel=2,
            )
            return Calibrated(hw, f"rates of a similar GPU: measuring failed: {reason}")
        _keep(place, fresh)
        stored = _kept(place, hw)
        if stored is None:
            return Calibrated(fresh, "rates measured on this GPU, which could not be cached")
        rates = stored
    return Calibrated(rates, f"rates measured on this GPU, cached in {place}")


def _place(hw: Hardware) -> Path:
    """The file of this GPU, for this part of it and this driver."""
    name = re.sub(r"\W+", "_", hw.name)
    folder: Path = config.CACHE_DIR.value / "chips"
    return folder / f"{name}.{hw.arch}.{hw.sm_count}.{hw.driver}.json"


def _kept(place: Path, hw: Hardware) -> Hardware | None:
    try:
        rates = json.loads(read_private(place))
        flops = tuple((kind, _held(kind, float(rates["flops"][kind]))) for kind in _KINDS)
        bandwidth = _held("a copy", float(rates["bandwidth"]))
        cached = _held("a copy", float(rates["l2_bandwidth"]))
    except (OSError, ValueError, TypeError, KeyError, DeviceError):
        return None
    return replace(hw, flops=flops, bandwidth=bandwidth, l2_bandwidth=cached)


def _keep(place: Path, hw: Hardware) -> None:
    """Write the file beside and link it, so that the first of several processes stays."""
    rates = {"flops": dict(hw.flops), "bandwidth": hw.bandwidth, "l2_bandwidth": hw.l2_bandwidth}
    text = json.dumps(rates)
    try:
        if not private_folder(place.parent):
            return
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
            file.write(text)
        try:
            if place.exists() and _kept(place, hw) is None:
                os.replace(file.name, place)
            else:
                os.link(file.name, place)
        except FileExistsError:
            pass
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)
    except OSError as error:
        warnings.warn(f"the rates of {hw.name} are not cached: {error}", stacklevel=2)


class GpuTimer:
    """Measures on a GPU itself, in a stream of its own."""

    def __init__(self, hw: Hardware, device_id: int) -> None:
        self._hw, self._device = hw, device_id

    def seconds(self, launch: Launch, nbytes: Mapping[str, int]) -> float:
        """The least of three means over ten launches."""
        device.start(self._device)
        stream = device.Stream()
        held = {name: device.Memory(size, "measuring") for name, size in nbytes.items()}
        pointers = {name: memory.address for name, memory in held.items()}
        bound = bind(launch, pointers, self._hw)
        times = [stream.timed(lambda: bound.enqueue(stream.handle), 10) for _ in range(3)]
        stream.wait("measuring")
        return min(times)


def of(device_id: int = 0) -> Calibrated:
    """The GPU `device_id` of this machine, measured at its first use where no table has it."""
    return _once(Hardware.detect(device_id), device_id)


@lru_cache(maxsize=64)
def _once(hw: Hardware, device_id: int) -> Calibrated:
    return calibrated(hw, GpuTimer(hw, device_id))
