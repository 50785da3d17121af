"""The Hopper Conv candidate for float32 products of tf32, over channels-last images.

Operands: x weight bias slope e1 e2 e3 y; e1 to e3 are laid out as y (`problems.Conv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from onnx_fuse.cuda.macros import as_defines
from onnx_fuse.kernels.conv_nhwc import (
    Chosen,
    epilogue_of,
    gathered,
    gathering,
    is_deep,
    row_of_weights,
    unboxed,
)
from onnx_fuse.kernels.gemm_tf32 import BK, Tf32
from onnx_fuse.kernels.norm_launches import rename
from onnx_fuse.kernels.rule_based import window_macros
from onnx_fuse.program.problem import (
    GemmProblem,
    Hardware,
    KernelConfig,
    Launches,
    Num,
    Ptr,
    TensorMap,
)
from onnx_fuse.program.problems import Conv


class Tf32Im2col(Chosen):
    """gemm/tf32_sm90.cu with a's tiles gathered by TMA: a step is 32 channels of a tap."""

    name = "wgmma_tf32"
    source = Tf32.source
    axes = 3
    maths = ("tf32",)

    def __init__(self) -> None:
        self.inner = Tf32()

    def _product(self, problem: Conv) -> GemmProblem:
        """The product of the same tiles, whose k is the taps' channels in whole steps."""
        epilogue = epilogue_of(problem)
        assert epilogue is not None
        return GemmProblem.of(
            "Gemm", m=problem.batch * prod(problem.outer), n=problem.filters,
            k=-(-problem.channels // BK) * BK * prod(problem.window.kernel), dtype=problem.dtype,
            trans_b=True, math=problem.math, epilogue=epilogue,
        )  # fmt: skip

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        """Refuse groups, what no epilogue does, and windows beyond the descriptor's fields."""
        if problem.groups > 1:
            return f"{problem.groups} groups"
        if epilogue_of(problem) is None:
            return "no epilogue of a product computes the operators after it"
        reason = super().supports(problem, hw) or unboxed(problem)
        return reason or self.inner.supports(self._product(problem), hw)

    def tiles(self, problem: Conv, hw: Hardware) -> Sequence[KernelConfig]:
        """The product's configurations."""
        return self.inner.configs(self._product(problem), hw)

    def seconds(self, problem: Conv, config: KernelConfig, hw: Hardware) -> float:
        """The time of the product, whose a is the images once and not tap by tap."""
        product = self._product(problem)
        window = zip(problem.inner, problem.outer, problem.window.kernel, strict=True)
        seen = prod(min(i, o * k) for i, o, k in window)
        read = 4 * (problem.batch * problem.channels * seen + product.n * product.k)
        return self.inner.seconds(product, config, hw, read)

    def fits(self, problem: Conv, config: KernelConfig) -> bool:
        """Whether each part of the sum has steps."""
        return not config.attrs or self.inner.fits(self._product(problem), config)

    def workspace(self, problem: Conv, config: KernelConfig, hw: Hardware) -> int:
        """The product's partial sums."""
        how = self.ruled(problem, config, hw)
        return self.inner.workspace(self._product(problem), how, hw)

    def launch(self, problem: Conv, config: KernelConfig, hw: Hardware) -> Launches:
        """The product's launches, its operands described as images and taps."""
        config = self.ruled(problem, config, hw)
        product, *rest = self.inner.launch(self._product(problem), config, hw)
        bn, _ = config.integers("tile")
        window, ldw = problem.window, row_of_weights(problem)
        taps = prod(window.kernel)
        filters = TensorMap(
            Ptr("weight"), "tf32", (ldw, problem.filters, taps), (4 * taps * ldw, 4 * ldw),
            (BK, bn, 1),
        )  # fmt: skip
        sizes = tuple(Num("i32", n) for n in problem.outer[0 if is_deep(problem) else 1 :])
        steps = Num("i32", -(-problem.channels // BK))
        args = (gathered(problem, 128), filters, *product.args[2:], *sizes, steps)
        macros = as_defines(
            dict(product.defines), {"IM2COL": 1}, gathering(problem), window_macros(window)
        )
        names = {"a": Ptr("x"), "c": Ptr("e1"), "col1": Ptr("bias")}
        launches = (replace(product, args=args, defines=macros), *rest)
        return tuple(rename(launch, names) for launch in launches)
