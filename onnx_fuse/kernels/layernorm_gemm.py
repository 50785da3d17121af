"""LayerNormGemm candidates: y = act(LayerNormalization(x; gamma, beta, epsilon) op(w) + c).

Problem: m, n, k, dtype, trans_b, out_dtype as Gemm's; of its epilogue act, act_alpha, save_z,
residual, gate and bias (c is there).
Pointers: x gamma beta w c -> y (z); mean, rstd [m] float32 are written unless `stats`;
with `folded`: x wq cs cv instead of gamma beta w c. "r" is the residual.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import TypeAlias

from onnx_fuse.kernels.cublaslt import CublasLt
from onnx_fuse.kernels.gemm_cluster import Cluster, NormCluster
from onnx_fuse.kernels.gemm_portable import Mma, Simt, SimtSplitK, as_norm
from onnx_fuse.kernels.gemm_skinny import SmallM
from onnx_fuse.kernels.gemm_sm90 import SplitWgmma, Wgmma
from onnx_fuse.kernels.gemm_tf32 import Tf32
from onnx_fuse.kernels.gemm_transposed import TurnedTf32
from onnx_fuse.kernels.gemm_vector import Gemv
from onnx_fuse.kernels.kernel import Kernels, renamed
from onnx_fuse.kernels.norm_launches import fold, fold_seconds, row_stats
from onnx_fuse.kernels.rule_based import DelegatingKernel
from onnx_fuse.program.launch import Launch, Launches, Ptr
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig, Value

KEPT = ("act", "act_alpha", "save_z", "residual", "align", "bias_dtype", "gate")


def _pad(size: int) -> int:
    return ceil(size / 256) * 256


def gemm_problem(problem: GemmProblem, **values: Value) -> GemmProblem:
    """The Gemm inside a LayerNormGemm, with the epilogue that it keeps."""
    make = _plain_gemm if problem.trace is None else _gemm
    return make(problem, tuple(values.items()))


def _gemm(problem: GemmProblem, values: tuple[tuple[str, Value], ...]) -> GemmProblem:
    extras = problem.extras
    shared = {name: extras[name] for name in KEPT if extras.get(name)}
    shared |= {"static_b": True} if problem.static_b and problem.folded else {}
    return GemmProblem.of(
        "Gemm",
        m=problem.m, n=problem.n, k=problem.k, dtype=problem.dtype, out_dtype=problem.out,
        trans_b=problem.trans_b, math=problem.math, **(shared | dict(values)),
    )  # fmt: skip


_plain_gemm = lru_cache(1024)(_gemm)
"""The same for plain sizes: a product's every configuration asks for it."""


_APART = 1e-6
"""What a pass for the statistics has to gain: the product waits for its last rows."""


def stats_seconds(problem: GemmProblem, hw: Hardware) -> float:
    """Predicted seconds of the statistics: one read of x, whose short rows leave lanes idle."""
    size = ITEMSIZE[problem.dtype] * problem.m * max(problem.k, 512)
    return hw.launch_seconds + size / hw.bandwidth


def _rows(
    problem: GemmProblem, *, norm: bool = False, planes: int = 0, out_dtype: str = "bfloat16"
) -> Launch:
    """The pass over x that makes the statistics of its rows."""
    return row_stats(
        problem.m, problem.k, problem.dtype, epsilon=problem.epsilon, rms=problem.rms,
        align=problem.align, norm=norm, planes=planes, out_dtype=out_dtype,
    )  # fmt: skip


class FoldWeights(DelegatingKernel[GemmProblem]):
    """LayerNorm folded into the weights and the epilogue of a 16-bit GEMM; x is never rewritten."""

    def __init__(self, inner: Wgmma | Mma) -> None:
        self.inner = inner
        self.name = f"fold_{inner.name}"

    def _gemm(self, problem: GemmProblem, *, apart: bool = False) -> GemmProblem:
        """The product, with the statistics made beside it unless they are made `apart`."""
        if problem.stats or apart or isinstance(self.inner, Mma):
            return gemm_problem(problem, layernorm=True)
        how: dict[str, Value] = {"rows": "rms" if problem.rms else "stats"}
        if parts := problem.parts:
            how = {"parts": parts}
        epsilon = problem.epsilon
        return gemm_problem(problem, layernorm=True, epsilon=epsilon, **how)

    def _side(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> bool:
        """Whether the GEMM makes the statistics itself, which it cannot where k is split.

        Its idle warps have few rows in flight at a time, so that a pass of its own may be faster.
        """
        return self._how(problem.upper_bound(), config, hw)[0]

    def _how(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> tuple[bool, float]:
        """The answer of `_side` for plain sizes, and the seconds of product and statistics so."""
        gemm = self._gemm(problem)
        if not (gemm.rows or gemm.parts) or config.integer("splits", 1) > 1:
            side = False
        elif gemm.parts or not isinstance(self.inner, Wgmma):
            side = True
        else:
            beside = self.inner.cost(gemm, config, hw)
            plain = self.inner.cost(self._gemm(problem, apart=True), config, hw)
            apart = plain + stats_seconds(problem, hw)
            side = beside <= apart + _APART
            return side, beside if side else apart
        apart = not (problem.stats or side)
        seconds = self.inner.cost(self._gemm(problem, apart=apart), config, hw)
        return side, seconds + stats_seconds(problem, hw) if apart else seconds

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.dtype not in ("bfloat16", "float16"):
            # the tensor core would round x, and the error would grow with |mean| / std
            return f"the fold is exact for 16-bit x only, not {problem.dtype}"
        if problem.parts and isinstance(self.inner, Mma):
            return "no statistics of parts"
        return self.inner.supports(self._gemm(problem), hw)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """The GEMM, one read of x, and the weights' preparation where it is not done before."""
        _, seconds = self._how(problem, config, hw)
        if not problem.folded:
            seconds += fold_seconds(problem.k, problem.n, problem.dtype, hw)
        return seconds

    def _sizes(self, problem: GemmProblem) -> tuple[int, int]:
        """Bytes of wq, and of cs (and cv), in the workspace."""
        if problem.folded:
            return 0, 0
        wq = ITEMSIZE[problem.dtype] * problem.k * problem.n
        return _pad(wq), _pad(4 * problem.n)

    def _own_bytes(self, problem: GemmProblem) -> int:
        wq, cs = self._sizes(problem)
        return wq + 2 * cs

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        apart = not problem.stats and not self._side(problem, config, hw)
        rows = (_rows(problem),) if apart else ()
        product = self.inner.launch(self._gemm(problem, apart=apart), config, hw)
        product = as_norm(problem.replace(folded=True), product, row0="rstd", row1="mean")
        if problem.folded:
            return rows + product
        shape = (problem.k, problem.n, problem.dtype, problem.trans_b)
        calls, (wq, cs) = (fold(*shape, hw, align=problem.align), *product), self._sizes(problem)
        places = {"wq": 0, "cs": wq, "cv": wq + cs, "workspace": self._own_bytes(problem)}
        return rows + renamed(calls, {name: Ptr("workspace", at) for name, at in places.items()})


Product: TypeAlias = (
    Cluster | Wgmma | SplitWgmma | Tf32 | TurnedTf32 | CublasLt | Mma | SimtSplitK | Simt
)


class ApplyNorm(DelegatingKernel[GemmProblem]):
    """The plain way: rows normalised into the workspace, then any Gemm; serves every problem.

    fp32 tensors through SplitWgmma skip the copy: the pass that normalises writes the planes.
    """

    def __init__(self, inner: Product) -> None:
        self.inner = inner
        self.name = f"apply_{inner.name}"

    def _gemm(self, problem: GemmProblem) -> GemmProblem:
        # the weights are older than the launch before, the normalisation: they may be read ahead
        ahead = {"static_b": True} if isinstance(self.inner, Cluster | Wgmma) else {}
        return gemm_problem(problem, bias=bool(problem.epilogue.bias), **ahead)

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.folded:
            return "the weights are folded: gamma and beta are not given"
        if problem.dtype not in ("float32", "bfloat16", "float16"):
            return f"no row statistics in {problem.dtype}"
        return self.inner.supports(self._gemm(problem), hw)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """The GEMM, and x read and written once; a cluster's start then hides behind nothing."""
        seconds = self.inner.cost(self._gemm(problem), config, hw)
        costs = hw.costs("norm ahead of a product")
        seconds += costs["cluster" if isinstance(self.inner, Cluster) else "start"]
        return seconds + 2 * stats_seconds(problem, hw) - hw.launch_seconds

    def _own_bytes(self, problem: GemmProblem) -> int:
        if isinstance(self.inner, SplitWgmma):
            return 0
        return _pad(ITEMSIZE[problem.dtype] * problem.m * problem.k)

    def _before(self, problem: GemmProblem, hw: Hardware) -> tuple[Launches, dict[str, Ptr]]:
        inner, planes, kind = self.inner, 1, problem.dtype
        if isinstance(inner, SplitWgmma):
            planes, kind = inner.planes(self._gemm(problem)), "bfloat16"
        norm, rows = _rows(problem, norm=True, planes=planes, out_dtype=kind), Ptr("workspace")
        names = {"a": rows, "b": Ptr("w"), "col1": Ptr("c"), "c": Ptr("r")}
        return renamed((norm,), {"out": rows}), names

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        norm, *product = super().launch(problem, config, hw)
        # SplitWgmma's first makes a's planes at the workspace's start: the norm takes its place
        return (norm, *product[isinstance(self.inner, SplitWgmma) :])


KERNELS: Kernels = {
    "LayerNormGemm": (
        Cluster(), NormCluster(), Gemv(), SmallM(), FoldWeights(Wgmma()), ApplyNorm(SplitWgmma()),
        FoldWeights(Mma()), ApplyNorm(Cluster()), ApplyNorm(Wgmma()), ApplyNorm(Tf32()),
        ApplyNorm(TurnedTf32()), ApplyNorm(CublasLt()), ApplyNorm(Mma()), ApplyNorm(SimtSplitK()),
        ApplyNorm(Simt()),
    ),
}  # fmt: skip
