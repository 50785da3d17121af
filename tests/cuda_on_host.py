"""CUDA functions compiled for the host: their text is C++, but for a few intrinsics and PTX."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from onnx_fuse.cuda.source import source_root

HOST = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
using std::max, std::min;
#define __device__
#define __forceinline__ inline
struct float2 { float x, y; };
struct HostIndex { unsigned x = 0, y = 0, z = 0; };
static thread_local HostIndex threadIdx, blockIdx;
static HostIndex gridDim;
static inline void __syncthreads() {}
template <class E> E __shfl_xor_sync(unsigned, E x, int) { return x; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
static inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
#define __expf expf  // glibc declares the name
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
"""
PTX = {
    "ex2.approx.ftz.f32": "y = exp2f(x);",
    "rcp.approx.ftz.f32": "y = 1.0f / y;",
    "max.NaN.f32": "x = x != x || x > y ? x : y;",
}
"""An instruction of PTX -> what it does to the variables of the function around it."""


def _in_c(text: str) -> str:
    """The text with its PTX in C; what has no such form is left out, and nobody may call it."""

    def plain(match: re.Match[str]) -> str:
        return next((c for name, c in PTX.items() if f'"{name} ' in match[0]), "")

    text = re.sub(r"asm(?: volatile)?\s*\(.*?\);", plain, text, flags=re.DOTALL)
    return text.replace("__CUDA_ARCH__", "800")


def text_of(path: str) -> str:
    """A source under cuda_src, or a text, with what it includes, each once, as C++ of the host."""
    seen: set[str] = set()

    def expanded(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = name if "\n" in name else (source_root() / name).read_text()
        text = text.replace("#pragma once", "")
        return re.sub(r'#include "(.+)"', lambda match: expanded(match[1]), text)

    return _in_c(expanded(path))


def library(text: str, folder: Path) -> ctypes.CDLL:
    """C++ text as a library, behind what stands for CUDA's own functions."""
    source = folder / "host.cpp"
    made = folder / f"{len(list(folder.iterdir()))}.so"  # the loader takes one name for one library
    source.write_text(HOST + text)
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the CUDA text of activations is tried by a C++ compiler: install g++"
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
    done = subprocess.run(
        [*command, "-o", str(made), str(source)], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[:2000]
    return ctypes.CDLL(str(made))


def over(function: Any, *arrays: np.ndarray) -> np.ndarray:
    """The results of f(n, arrays..., y) of flat arrays of one type."""
    y = np.empty_like(arrays[0])
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (*arrays, y)]
    function(ctypes.c_long(y.size), *pointers)
    return y
