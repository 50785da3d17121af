"""LayerNormLeafGrad: every gradient of W behind a LayerNormalization whose x needs none, in fp32.

With G = dtᵀ · xh and dc = Σ dt: dw = gamma G + beta dc, dgamma = Σ W G, dbeta = Σ W dc over the
axis that dt and W share. W is [n, k] (m = n, n = k of the problem) or, `turned`, [k, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from onnx_fuse.kernels.gemm_portable import SimtSplitK
from onnx_fuse.kernels.kernel import Kernels, renamed
from onnx_fuse.kernels.norm_launches import sum_parts
from onnx_fuse.program.launch import Launches, Ptr
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig


class WeightOnlyGrad(SimtSplitK):
    """gemm/fma_sm80.cu with LEAF, and the sum of its parts."""

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """The configurations whose blocks hold all of k, joined in clusters where possible."""
        whole = [how for how in super().configs(problem, hw) if how.integer("split") == 1]
        most = 8 if hw.cc >= 90 else 0
        return [
            how.replace(join=parts if (parts := self._parts(problem, how)[0]) <= most else 0)
            for how in whole
        ]

    def _parts(self, problem: GemmProblem, config: KernelConfig) -> tuple[int, int]:
        bm, bn = config.integers("tile")
        if problem.turned:
            return ceil(problem.n / bn), problem.m
        return ceil(problem.m / bm), problem.n

    def workspace(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> int:
        return 0 if config.integer("join") else 8 * prod(self._parts(problem, config))

    def _room(self, problem: GemmProblem, config: KernelConfig) -> int:
        """Further floats of shared memory: each thread's sums of dt, and their totals."""
        bm, bn = config.integers("tile")
        met = 2 * config.integer("join") * (bm if problem.turned else bn)
        return 4 * self.threads(config) + met

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """The seconds of the product, of reading W once more, and of the sum of the parts."""
        more = ITEMSIZE[problem.dtype] * problem.m * problem.n / hw.bandwidth
        alone = 0.0 if config.integer("join") else hw.launch_seconds
        return super().cost(problem, config, hw) + more + alone

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        join = config.integer("join")
        own = map(Ptr, ("gamma", "beta", "dc", "dgamma", "dbeta"))
        leaf = 2 if problem.turned else 1
        launches = self._launch(problem, config, *own, cluster=join, LEAF=leaf, JOIN=join)
        if not join:
            launches += (sum_parts(*self._parts(problem, config), 2, "float32"),)
        names = {"y": "dw", "c": "w", "part": "workspace", "out0": "dgamma", "out1": "dbeta"}
        return renamed(launches, {name: Ptr(operand) for name, operand in names.items()})


KERNELS: Kernels = {"LayerNormLeafGrad": (WeightOnlyGrad(),)}
