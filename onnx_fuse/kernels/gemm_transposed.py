"""Gemm candidates that transpose an operand before the product of another candidate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil
from typing import NamedTuple

from onnx_fuse.kernels.gemm_portable import SimtSplitK
from onnx_fuse.kernels.gemm_tf32 import Tf32
from onnx_fuse.kernels.kernel import launch, rename, roofline
from onnx_fuse.kernels.rule_based import DelegatingKernel
from onnx_fuse.program.call import INT32_LIMIT
from onnx_fuse.program.launch import Launch, Launches, Ptr, args
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig


class TransposedOperand(NamedTuple):
    """An operand's transpose: whose, its bytes, and the launch."""

    name: str
    nbytes: int
    launch: Launch


def _pitch(columns: int) -> int:
    """Elements from row to row of a transpose of float32: rows begin at multiples of 16 bytes."""
    return ceil(columns / 4) * 4


def _transpose(name: str, rows: int, columns: int, step: int) -> TransposedOperand:
    """[columns, rows], whose rows lie `step` apart, as [rows, columns].

    Sizes are compared with numbers alone: what is open stays so.
    """
    pitch = _pitch(columns)
    wide = columns * step >= INT32_LIMIT or rows * pitch >= INT32_LIMIT
    sizes = (rows, columns, step, pitch, 1, 1, *(0,) * 6)
    turning = launch(
        "indexing/transpose.cu", "transpose", ceil(rows / 32) * ceil(columns / 32), 256,
        *args(f"a0 y0, {'i64' if wide else 'i32'} sizes", sizes=sizes),
        IDX="i64" if wide else "int", T="u32", VEC=1,
    )  # fmt: skip
    return TransposedOperand(name, ceil(4 * rows * pitch / 256) * 256, turning)


class _TransposingGemm(DelegatingKernel[GemmProblem], ABC):
    """The product of another candidate, for which operands are transposed into the workspace."""

    inner: Tf32 | SimtSplitK

    @abstractmethod
    def _gemm(self, problem: GemmProblem) -> GemmProblem:
        """The product of operands that lie as `inner` reads them."""

    @abstractmethod
    def _copies(self, problem: GemmProblem) -> list[TransposedOperand]:
        """What is transposed first."""

    def _own_bytes(self, problem: GemmProblem) -> int:
        return sum(copy.nbytes for copy in self._copies(problem))

    def _refusal(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if any(size < 1 for size in (problem.m, problem.n, problem.k)):
            return "empty"
        return self.inner.supports(self._gemm(problem), hw)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """The product's, and a pass over each operand that is transposed."""
        copies = self._copies(problem)
        moved = 2 * sum(copy.nbytes for copy in copies)
        costs = hw.costs("indexing/transpose.cu")
        passes = roofline(hw, costs, moved, launches=0) + len(copies) * costs["start"]
        return self.inner.cost(self._gemm(problem), config, hw) + passes

    def _before(self, problem: GemmProblem, hw: Hardware) -> tuple[Launches, dict[str, Ptr]]:
        calls: list[Launch] = []
        names: dict[str, Ptr] = {}
        place = 0
        for name, nbytes, turning in self._copies(problem):
            names[name] = Ptr("workspace", place)
            calls.append(rename(turning, {"a0": Ptr(name), "y0": names[name]}))
            place += nbytes
        return tuple(calls), names

    def parts(self, problem: GemmProblem, config: KernelConfig) -> int:
        return self.inner.parts(problem, config)


class TurnedTf32(_TransposingGemm):
    """gemm/tf32_sm90.cu for operands whose k is not contiguous, as wgmma needs it in tf32."""

    name = "wgmma_tf32_turned"

    inner = Tf32()

    def _gemm(self, problem: GemmProblem) -> GemmProblem:
        lda, ldb = problem.ld
        both = problem.trans_a and not problem.trans_b
        return problem.replace(
            trans_a=False, trans_b=True, align=16 if both else problem.align,
            lda=_pitch(problem.k) if problem.trans_a else lda,
            ldb=ldb if problem.trans_b else _pitch(problem.k),
        )  # fmt: skip

    def _copies(self, problem: GemmProblem) -> list[TransposedOperand]:
        lda, ldb = problem.ld
        a = [_transpose("a", problem.m, problem.k, lda)] if problem.trans_a else []
        b = [] if problem.trans_b else [_transpose("b", problem.n, problem.k, ldb)]
        return a + b

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.math != "tf32" or problem.dtype != "float32":
            return f"only float32 by tf32, not {problem.dtype} {problem.math}"
        if problem.batch or (problem.trans_b and not problem.trans_a):
            return "single matrix multiplications of an operand to transpose"
        return self._refusal(problem, hw)


class TurnedFma(_TransposingGemm):
    """gemm/fma_sm80.cu for a b that lies along k, which it would read by pairs."""

    name = "fma_turned"

    inner = SimtSplitK()

    def _gemm(self, problem: GemmProblem) -> GemmProblem:
        return problem.replace(trans_b=False, ldb=_pitch(problem.n))

    def _copies(self, problem: GemmProblem) -> list[TransposedOperand]:
        return [_transpose("b", problem.k, problem.n, problem.ld[1])]

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.batch or not problem.trans_b or problem.dtype != "float32":
            return "single matrix multiplications in float32 of a b to transpose"
        if problem.n % 4:  # rows of the transpose would end in elements that nobody wrote
            return f"16 bytes of b's rows are read at once: n={problem.n}"
        return self._refusal(problem, hw)
