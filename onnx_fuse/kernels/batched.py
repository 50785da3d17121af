"""One launch for several calls: equal problems over other pointers, or an expression over tensors.

The operand "name" of call i is bound as "name.i".
"""

from __future__ import annotations

from math import prod

from onnx_fuse.cuda.pointwise import SCALAR, launch_many
from onnx_fuse.kernels import Selection, named
from onnx_fuse.kernels.kernel import Candidate, Kernels
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.program.data_movement import BatchedCalls, CopyMany, PointwiseMany
from onnx_fuse.program.launch import Launch, Launches, Num, Ptr, Table
from onnx_fuse.program.problem import AnyProblem, Hardware, KernelConfig


def free_axis(kernel: Candidate, launch: Launch) -> str | None:
    """A grid axis that the kernel does not look at and the launch does not use, None for none.

    A candidate declares those that its kernel does not look at as `free_axes`, of "y" and "z".
    """
    axes: str = getattr(kernel, "free_axes", "")
    return next((axis for axis in axes if launch.grid["xyz".index(axis)] == 1), None)


def can_batch(choice: Selection, problem: AnyProblem, hw: Hardware) -> bool:
    """Whether a grid of several may run the kernel chosen: one launch of plain pointers."""
    if choice.workspace(problem, hw):
        return False
    launches = choice.launch(problem, hw)
    if len(launches) != 1:
        return False
    (launch,) = launches
    plain = all(isinstance(a, Num) or a == Ptr(getattr(a, "name", "")) for a in launch.args)
    alone = launch.cluster > 1 or launch.smem or "\n" in launch.source or not launch.source
    return plain and not alone and free_axis(choice.kernel, launch) is not None


class BatchedKernel(HeuristicKernel[BatchedCalls]):
    """The kernel as a device function, which is called once for each row of a table of pointers."""

    name = "batched"

    def launch(self, problem: BatchedCalls, config: KernelConfig, hw: Hardware) -> Launches:
        kernel = named(problem.problem.op, problem.kernel)
        (launch,) = kernel.launch(problem.problem, problem.config, hw)
        axis, count, bound = free_axis(kernel, launch), problem.count, problem.bound
        pointers = [arg for arg in launch.args if isinstance(arg, Ptr)]
        rows = 1 << (count - 1).bit_length()  # few distinct sources for many counts
        words: list[Ptr | int] = []
        for i in range(count):
            words += [Ptr(f"{p.name}.{i}") if p.name in bound else 0 for p in pointers]
        words += [0] * ((rows - count) * len(pointers))
        parameters, passed, numbers = [], [], []
        for i, arg in enumerate(launch.args):
            if isinstance(arg, Num):
                parameters.append(f", {SCALAR[arg.ctype]} n{i}")
                passed.append(f"n{i}")
                numbers.append(arg)
            else:
                column = sum(isinstance(a, Ptr) for a in launch.args[:i])
                passed.append(f"CallPointer{{rows.at[blockIdx.{axis}].p[{column}]}}")
        bounds = f"__attribute__((launch_bounds({prod(launch.block)}, 1)))"
        source = f"""// its kernels become functions of the device
#undef __global__
#undef __launch_bounds__
#define __global__ __device__ inline
#define __launch_bounds__(...)
#include "{launch.source}"
struct CallPointer {{
    u64 p;
    template <class Pointee> __device__ operator Pointee*() const {{ return (Pointee*)p; }}
}};
struct CallPointers {{ u64 p[{len(pointers)}]; }};
struct CallTable {{ CallPointers at[{rows}]; }};
extern "C" __attribute__((global)) void {bounds}
    batched(const __grid_constant__ CallTable rows{"".join(parameters)}) {{
    after_previous_launch();
    {launch.entry}({", ".join(passed)});
}}
"""
        x, y, z = launch.grid
        grid = (x, count, z) if axis == "y" else (x, y, count)
        table = Table(tuple(words))
        return (Launch(
            source, "batched", grid, launch.block, (table, *numbers), launch.defines, waits="first",
        ),)  # fmt: skip


class MultiTensor(HeuristicKernel[PointwiseMany]):
    """A kernel generated for an expression, over a table of flat tensors."""

    name = "generated"

    def launch(self, problem: PointwiseMany, config: KernelConfig, hw: Hardware) -> Launches:
        return (launch_many(problem.expression, problem.shared, problem.items),)


class MultiCopy(HeuristicKernel[CopyMany]):
    """Runs of elements at strides, over a table of copies (cuda_src/indexing/pieces.cu)."""

    name, source = "pieces", "indexing/pieces.cu"
    threads, each = 256, 2
    """Threads of a block, and accesses of 16 bytes that each of them makes: as in the source."""

    def launch(self, problem: CopyMany, config: KernelConfig, hw: Hardware) -> Launches:
        count = len(problem.pieces)
        rows = 1 << (count - 1).bit_length()  # few distinct sources for many counts
        words: list[Ptr | int] = []
        blocks = 0
        for i, p in enumerate(problem.pieces):
            words += [Ptr(f"0.{i}"), Ptr(f"1.{i}"), p.n, *p.sizes, *p.x, *p.y, blocks]
            nbytes = p.n * p.sizes[0] * p.sizes[1] * problem.itemsize
            blocks += -(-nbytes // (16 * self.threads * self.each))
        words += [0] * ((rows - count) * 10)
        unit = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[problem.itemsize]
        made = (Table(tuple(words)), Num("i32", count))
        return self.one("copy_pieces", blocks, self.threads, *made, T=unit, ROWS=rows)


KERNELS: Kernels = {
    "BatchedCalls": (BatchedKernel(),),
    "PointwiseMany": (MultiTensor(),),
    "CopyMany": (MultiCopy(),),
}
