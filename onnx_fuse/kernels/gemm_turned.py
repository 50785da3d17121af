"""Gemm candidates that transpose an operand before the product of another candidate."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from onnx_fuse.cuda.pointwise import launch_transpose
from onnx_fuse.kernels.gemm_portable import Fma
from onnx_fuse.kernels.gemm_tf32 import Tf32
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rows import rename
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problem import Config, Hardware, Launch, Problem, Ptr, ld

TRANSPOSE_RATE = 0.77
"""The share of the memory's rate at which an operand is transposed (H200, 2026-11)."""


class Copy(NamedTuple):
    """An operand's transpose: whose, its bytes, and the launch (None where tiles are too large)."""

    name: str
    nbytes: int
    launch: Launch | None


def _pitch(columns: int) -> int:
    """Elements from row to row of a transpose of float32: rows begin at multiples of 16 bytes."""
    return ceil(columns / 4) * 4


def _transpose(name: str, rows: int, columns: int, step: int) -> Copy:
    """[columns, rows], whose rows lie `step` apart, as [rows, columns]."""
    x = Tensor(0, "float32", (rows, columns), (1, step))
    y = Tensor(0, "float32", (rows, columns), (_pitch(columns), 1))
    nbytes = ceil(4 * rows * _pitch(columns) / 256) * 256
    return Copy(name, nbytes, launch_transpose(x, y))


class _Turned:
    """The product of `inner`, for which some operands are transposed into the workspace."""

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner

    def turned(self, problem: Problem) -> Problem:
        """The product that `inner` computes."""
        raise NotImplementedError

    def copies(self, problem: Problem) -> list[Copy]:
        """What is transposed first."""
        raise NotImplementedError

    def refusal(self, problem: Problem, hw: Hardware) -> str | None:
        """Why the product or a transpose is not served; None where they are."""
        if min(problem.m, problem.n, problem.k) < 1:
            return "empty"
        if reason := self.inner.supports(self.turned(problem), hw):
            return reason
        if any(copy.launch is None for copy in self.copies(problem)):
            return "too narrow to be transposed by tiles"
        return None

    def configs(self, problem: Problem, hw: Hardware) -> Sequence[Config]:
        """The product's."""
        return self.inner.configs(self.turned(problem), hw)

    def fits(self, problem: Problem, config: Config) -> bool:
        """Whether the product can run the configuration."""
        return self.inner.fits(self.turned(problem), config)

    def workspace(self, problem: Problem, config: Config, hw: Hardware) -> int:
        """The product's own, and the transposed operands."""
        own = self.inner.workspace(self.turned(problem), config, hw)
        return ceil(own / 256) * 256 + sum(copy.nbytes for copy in self.copies(problem))

    def cost(self, problem: Problem, config: Config, hw: Hardware) -> float:
        """The product's, and a pass over each operand that is transposed."""
        copies = self.copies(problem)
        moved = 2 * sum(copy.nbytes for copy in copies)
        passes = moved / (TRANSPOSE_RATE * hw.bandwidth) + len(copies) * hw.launch_seconds
        return self.inner.cost(self.turned(problem), config, hw) + passes

    def launch(self, problem: Problem, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """The transposes, then the product."""
        turned = self.turned(problem)
        place = ceil(self.inner.workspace(turned, config, hw) / 256) * 256
        calls: list[Launch] = []
        names: dict[str, Ptr] = {}
        for name, nbytes, launch in self.copies(problem):
            assert launch is not None
            names[name] = Ptr("workspace", place)
            calls.append(rename(launch, {"a0": Ptr(name), "y0": names[name]}))
            place += nbytes
        return (*calls, *(rename(x, names) for x in self.inner.launch(turned, config, hw)))


class TurnedTf32(_Turned):
    """gemm/tf32_sm90.cu for operands whose k is not contiguous, as wgmma needs it in tf32."""

    name = "wgmma_tf32_turned"

    def __init__(self) -> None:
        self.tf32 = Tf32()
        super().__init__(self.tf32)

    def turned(self, problem: Problem) -> Problem:
        """The product of rows along k."""
        lda, ldb = ld(problem)
        both = problem.trans_a and not problem.trans_b
        return problem.replace(
            trans_a=False, trans_b=True, align=16 if both else problem.align,
            lda=_pitch(problem.k) if problem.trans_a else lda,
            ldb=ldb if problem.trans_b else _pitch(problem.k),
        )  # fmt: skip

    def copies(self, problem: Problem) -> list[Copy]:
        """Those of a and b that do not lie along k."""
        lda, ldb = ld(problem)
        a = [_transpose("a", problem.m, problem.k, lda)] if problem.trans_a else []
        b = [] if problem.trans_b else [_transpose("b", problem.n, problem.k, ldb)]
        return a + b

    def supports(self, problem: Problem, hw: Hardware) -> str | None:
        """The reason why this kernel cannot serve `problem`, or None if it can."""
        if problem.batch or (problem.trans_b and not problem.trans_a):
            return "single products of an operand to transpose"
        return self.refusal(problem, hw)

    def parts(self, problem: Problem, config: Config) -> int:
        """How many [2, m] planes of "part" hold the sums of the rows of a weight's gradient."""
        return self.tf32.parts(problem, config)


class TurnedFma(_Turned):
    """gemm/fma_sm80.cu for a b that lies along k, which it would read by pairs."""

    name = "fma_turned"

    def __init__(self) -> None:
        super().__init__(Fma())

    def turned(self, problem: Problem) -> Problem:
        """The product with b's rows along n."""
        return problem.replace(trans_b=False, ldb=_pitch(problem.n))

    def copies(self, problem: Problem) -> list[Copy]:
        """That of b."""
        return [_transpose("b", problem.k, problem.n, ld(problem)[1])]

    def supports(self, problem: Problem, hw: Hardware) -> str | None:
        """The reason why this kernel cannot serve `problem`, or None if it can."""
        if problem.batch or not problem.trans_b or problem.dtype != "float32":
            return "single products in float32 of a b to transpose"
        return self.refusal(problem, hw)
