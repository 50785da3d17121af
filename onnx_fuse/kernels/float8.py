"""Float8: a tensor rounded to float8 by the scale of earlier steps, as rows and as columns."""

from __future__ import annotations

from math import ceil

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.kernel import Kernels, roofline
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import Hardware, KernelConfig
from onnx_fuse.program.problems import Float8


class Rounding(HeuristicKernel[Float8]):
    """quant/float8.cu. Operands: x history q qt scale next part."""

    source, waits = "quant/float8.cu", "later"

    def supports(self, problem: Float8, hw: Hardware) -> str | None:
        if hw.cc < 89:
            return f"float8 needs sm_89, this is {hw.arch}"
        if problem.m % 16 or problem.k % 16:
            return f"rows and columns of float8 are multiples of 16, not {problem.m} x {problem.k}"
        if problem.dtype not in ("float32", "float16", "bfloat16"):
            return f"no float8 of {problem.dtype}"
        return None

    def cost(self, problem: Float8, config: KernelConfig, hw: Hardware) -> float:
        return roofline(hw, self.numbers(hw), problem.bytes)

    def launch(self, problem: Float8, config: KernelConfig, hw: Hardware) -> Launches:
        grid = (ceil(problem.k / 128), ceil(problem.m / 128), 1)
        return self.one(
            "quantize_float8", grid, 256,
            *args("x history, i32 m k, q qt scale next part sync", problem), sync=8,
            T=C_TYPES[problem.dtype], E5M2=problem.kind == "float8_e5m2", HISTORY=problem.steps,
        )  # fmt: skip


KERNELS: Kernels = {"Float8": (Rounding(),)}
