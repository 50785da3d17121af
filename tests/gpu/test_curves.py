"""Activations and their slopes on the GPU, at every 16-bit value."""

import numpy as np
import pytest
from curves import CURVES, PIECEWISE
from on_device import TYPES, Memory, wide

from onnx_fuse.cuda.launch import BoundLaunch
from onnx_fuse.cuda.macros import defines
from onnx_fuse.ops.activations import BY_KEY, activation_macros
from onnx_fuse.program.launch import Launch, Ptr
from onnx_fuse.program.problem import ITEMSIZE, Hardware

ACTIVATE = """#define TO T
#include "gemm/epilogue.cuh"
extern "C" __global__ void activate(const T* x, T* y, T* slope) {
    after_previous_launch();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (PAIRS) ((u16*)y)[i] = gelu_f16x2(((const u32*)x)[i / 2]) >> i % 2 * 16;
    else y[i] = from_float<T>(act<T>(to_float(x[i]), ALPHA_));
    slope[i] = from_float<T>(times_slope<T>(1.0f, to_float(x[i]), ALPHA_));
}
"""


@pytest.mark.parametrize(
    ("act", "dtype", "pairs"),
    [(act, dtype, False) for act in CURVES for dtype in ("bfloat16", "float16")]
    + [("gelu", "float16", True)],
)
def test_an_activation_of_every_16_bit_value(
    act: str, dtype: str, pairs: bool, hw: Hardware
) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(TYPES[dtype])
    memory = Memory({"x": x, "y": np.zeros_like(x), "slope": np.zeros_like(x)})
    types = {"bfloat16": "bf16", "float16": "f16"}
    launch = Launch(
        ACTIVATE, "activate", (256, 1, 1), (256, 1, 1), (Ptr("x"), Ptr("y"), Ptr("slope")),
        defines(
            PAIRS=pairs, T=types[dtype], ALPHA_=f"{BY_KEY[act].alpha}f", **activation_macros(act)
        ),
    )  # fmt: skip
    pointers = {name: buffer.address for name, buffer in memory.buffers.items()}
    BoundLaunch(launch, pointers, hw).enqueue(memory.stream.handle)
    memory.stream.wait("activate")
    finite = np.isfinite(wide(x)) & (np.abs(wide(x)) < 1e30)
    z = wide(x)[finite]
    # half an ulp of the type (of the least normal number below it), and what the 16-bit forms may
    # be off: common.cuh says how far; a slope adds a second term
    half = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    off = {"bfloat16": (1.9e-4, 4e-4), "float16": (2.5e-5, 1e-4)}[dtype]
    off = (3.4e-4, off[1]) if pairs else off  # of f16's own arithmetic: ex2 alone by 2^-9.9 of e
    for name, want, allowed in zip(("y", "slope"), CURVES[act](z), off, strict=True):
        got = wide(memory.read(name))
        error = np.abs(got[finite] - want) - 1.01 * half * np.abs(want) - 1e-7
        error[np.abs(want) > 65504] = 0  # selu of the largest is beyond float16
        assert error.max() <= allowed, f"{name} at {z[error.argmax()]}"
        if name == "y" or act not in PIECEWISE:
            assert np.isnan(got[np.isnan(wide(x))]).all(), name
    top = wide(memory.read("y"))[wide(x) == np.inf]
    assert act in ("tanh", "sigmoid", "hard_sigmoid", "clipped_relu") or top == np.inf


def test_itemsizes_agree_with_numpy() -> None:
    assert all(np.dtype(dtype).itemsize == ITEMSIZE[name] for name, dtype in TYPES.items())
