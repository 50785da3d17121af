"""Launches of a program run on the host: a CPU thread for each of a block, the blocks in turn."""

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cuda_on_host
import numpy as np

from onnx_fuse.program.call import Program, dtype_of
from onnx_fuse.program.launch import Launch, Num, Ptr

BEFORE = r"""
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
using std::fabs; using std::max; using std::min;
struct Barrier {
    std::mutex mutex; std::condition_variable turned; int total, here = 0, turn = 0;
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const int now = turn;
        if (++here == total) { here = 0; turn++; turned.notify_all(); }
        else turned.wait(lock, [&] { return turn != now; });
    }
};
static Barrier block, warps[32];
static char lanes[32][32][16];
static std::vector<double> dynamic;
#define __syncthreads() block.wait()  // these two are of one thread in cuda_on_host
#define __shfl_xor_sync(mask, ...) exchanged_xor(__VA_ARGS__)
template <class E> E exchanged(E x, int from) {
    const int warp = threadIdx.x / 32;
    std::memcpy(lanes[warp][threadIdx.x % 32], &x, sizeof(E));
    warps[warp].wait();
    std::memcpy(&x, lanes[warp][from], sizeof(E));
    warps[warp].wait();
    return x;
}
template <class E> E exchanged_xor(E x, int step, int = 32) {
    return exchanged(x, threadIdx.x % 32 ^ step);
}
template <class E> E __shfl_sync(unsigned, E x, int from, int width) {
    return exchanged(x, threadIdx.x % 32 / width * width + from);
}
static float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
static double __longlong_as_double(long long x) { double y; std::memcpy(&y, &x, 8); return y; }
struct Address { void* at; template <class T> operator T*() const { return (T*)at; } };
"""
AFTER = """
extern "C" void run(void** at) {{
    block.total = {threads};
    for (Barrier& warp : warps) warp.total = 32;
    dynamic.assign({smem} / 8 + 2, 0);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < {threads}; t++) threads.emplace_back([=] {{
        threadIdx.x = t;
        for (blockIdx.x = 0; blockIdx.x < {blocks}; blockIdx.x++) {{
            {entry}({arguments});
            block.wait();
        }}
    }});
    for (std::thread& thread : threads) thread.join();
}}
"""


def run(program: Program, feeds: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """The program's outputs, of inputs and weights by name.

    Its sources are files without PTX, whose shuffles are of whole warps.
    """
    memory = {b.id: _aligned(b.nbytes) for b in program.buffers}
    given = {b.id: feeds[b.name] for b in program.buffers if b.kind in ("input", "weight")}
    given |= program.constants
    for buffer, array in given.items():
        memory[buffer][: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for call in (*program.setup, *program.calls):
        operands = {"workspace": _aligned(call.workspace)}
        for name, t in (*call.reads, *call.writes):
            operands[name] = memory[t.buffer][t.offset * dtype_of(t.dtype).itemsize :]
        for launch in call.launches:
            _launch(launch, operands, folder)
    sizes = {name: (t, t.size * dtype_of(t.dtype).itemsize) for name, t in program.outputs}
    return {
        name: memory[t.buffer][:nbytes].view(dtype_of(t.dtype)).reshape(t.shape)
        for name, (t, nbytes) in sizes.items()
    }


def _aligned(nbytes: int) -> np.ndarray:
    whole = np.full(nbytes + 64, 0xA5, np.uint8)
    start = -whole.ctypes.data % 16
    return whole[start : start + nbytes + 16]


def _launch(launch: Launch, operands: Mapping[str, np.ndarray], folder: Path) -> None:
    pointers: list[int] = []
    arguments: list[str] = []
    for arg in launch.args:
        if isinstance(arg, Num):
            arguments.append(repr(arg.value))
            continue
        assert isinstance(arg, Ptr)
        operand = operands.get(arg.name)  # what no call reads has no address
        arguments.append(f"Address{{at[{len(pointers)}]}}")
        pointers.append(0 if operand is None else operand.ctypes.data + arg.offset)
    text = cuda_on_host.text_of(launch.source)
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1* \2 = (\1*)dynamic.data();", text)
    macros = "".join(f"#define {name} {value}\n" for name, value in launch.defines)
    after = AFTER.format(
        threads=launch.block[0], blocks=launch.grid[0], smem=launch.smem, entry=launch.entry,
        arguments=", ".join(arguments),
    )  # fmt: skip
    made: Any = cuda_on_host.library(BEFORE + macros + text + after, folder)
    made.run((ctypes.c_void_p * max(1, len(pointers)))(*pointers))
