"""LayerNormGemmGrad: the gradients of y = act(LN(x; gamma, beta) w + c), two GEMMs, no atomics.

    dz = dy act'(z)    c1[m] = (1/K) sum_n dz cs    c2[m] = (1/K) sum_n dz (z - cv)    dc = sum_m dz
    dx = rstd (dz wqᵀ - c1 - xh c2)           epilogue of the first GEMM, which also writes xh
    G  = xhᵀ dz;  dw = gamma G + beta dc      epilogue of the second, with the row sums of
    dgamma = sum_n w G,  dbeta = sum_n w dc   each tile; one ordered sum ends it

Problem: m, n, k, dtype of the forward (w and dw are [k, n], or [n, k] with trans_b), and its
activation in the epilogue. With `frozen` only dx is made.
Pointers: dy x gamma beta w c mean rstd z (wq cs cv add) -> dx dgamma dbeta dw dc. rms: RMSNorm's,
where mean, beta and c1 are 0 and beta, mean and dbeta unbound.

On Hopper float32 goes by bf16x3 or bf16x6: dz, xh and wq are split into bf16 planes by the passes
that make them, once for both products. The portable products take float32 as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TypeAlias, TypeVar

from onnx_fuse.kernels.gemm_portable import Mma, Simt, SimtSplitK
from onnx_fuse.kernels.gemm_skinny import SmallM
from onnx_fuse.kernels.gemm_sm90 import PLANES, Wgmma
from onnx_fuse.kernels.gemm_tf32 import Tf32
from onnx_fuse.kernels.gemm_transposed import TurnedTf32
from onnx_fuse.kernels.kernel import Kernels, WorkspaceArena, rename, renamed, roofline
from onnx_fuse.kernels.layernorm_gemm_grad_small import FewRowsGrad
from onnx_fuse.kernels.norm_launches import fold, fold_planes, row_dots, row_stats, sum_parts
from onnx_fuse.kernels.rule_based import Plan, Planned
from onnx_fuse.program.launch import Launches, Ptr
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.size import maximum

OfWeights: TypeAlias = Wgmma | Mma | SimtSplitK | Simt | Tf32 | TurnedTf32
Product: TypeAlias = OfWeights | SmallM

K = TypeVar("K")
Part: TypeAlias = tuple[K, GemmProblem, KernelConfig]
"""A product's kernel, problem and configuration."""


class TwoGemms(Planned[GemmProblem]):
    """The gradients on Hopper's GEMM."""

    name = "two_gemms"

    def __init__(self) -> None:
        self.inner = Wgmma()
        # tiles: a row's tiles run at once and add up c1, c2 and dbias's parts themselves
        self.for_dx: Mapping[str, Product] = {
            "tiles": self.inner, "wgmma": self.inner, "skinny": SmallM(),
        }  # fmt: skip
        self.for_dw: Mapping[str, OfWeights] = {"wgmma": self.inner}

    def _planes(self, problem: GemmProblem) -> int:
        """bf16 planes of an fp32 operand; 0 for 16-bit ones."""
        return PLANES.get(problem.math, 0) if problem.dtype == "float32" else 0

    def _types(self, problem: GemmProblem) -> dict[str, str | int]:
        if planes := self._planes(problem):
            return {"dtype": "bfloat16", "out_dtype": "float32", "planes": planes}
        return {"dtype": problem.dtype}

    def _dx(self, problem: GemmProblem, kernel: str = "wgmma") -> GemmProblem:
        return GemmProblem.of(
            "Gemm", m=problem.m, n=problem.k, k=problem.n, trans_b=not problem.trans_b, dx=True,
            save_z=not self._planes(problem), rows="tiles" if kernel == "tiles" else "",
            accumulate=bool(problem.add),
            rms=problem.rms, **self._types(problem),
        )  # fmt: skip

    def _dw(self, problem: GemmProblem) -> GemmProblem:
        sizes = (problem.n, problem.k) if problem.trans_b else (problem.k, problem.n)
        return GemmProblem.of(
            "Gemm", m=sizes[0], n=sizes[1], k=problem.m, trans_a=True,
            dw="turned" if problem.trans_b else True, rms=problem.rms, **self._types(problem),
        )  # fmt: skip

    def _refusal(self, problem: GemmProblem) -> str | None:
        """Why neither of two products makes the gradients; None where both do."""
        if problem.add == "apart":
            return "dx is added to what is there, not to another tensor"
        if problem.dtype == "float32" and problem.folded:
            return "fp32 weights are folded here"
        return None

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.trans_b and (problem.dtype == "float32" or problem.folded):
            return "w is [k, n]"
        if problem.dtype == "float32" and not self._planes(problem):
            return f"fp32 by bf16x3 or bf16x6, not {problem.math}"
        if reason := self._refusal(problem):
            return reason
        if problem.k % 8 or problem.n % 8:
            return f"k={problem.k}, n={problem.n}: only rows of multiples of 8 are 16-byte aligned"
        if problem.align % 16:
            return "operands are not 16-byte aligned"
        dx, dw = self._dx(problem), self._dw(problem)
        return self.inner.supports(dx, hw) or self.inner.supports(dw, hw)

    def _products(
        self, problem: GemmProblem, config: KernelConfig
    ) -> tuple[Part[Product], Part[OfWeights]]:
        def part(prefix: str) -> KernelConfig:
            keys = [(key, value) for key, value in config.attrs if key.startswith(prefix)]
            return KernelConfig(tuple((key.removeprefix(prefix), value) for key, value in keys))

        dx, dw = part("dx_"), part("dw_")
        name = dx.text("kernel")
        of_weights = self.for_dw[dw.text("kernel")], self._dw(problem), dw
        return (self.for_dx[name], self._dx(problem, name), dx), of_weights

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """The few best pairs of the two GEMMs' configurations: their choices are independent."""

        def best(gemms: Mapping[str, GemmProblem]) -> list[KernelConfig]:
            every = [
                (how.replace(kernel=name), self._cost(gemm, how.replace(kernel=name), hw))
                for name, gemm in gemms.items()
                if (kernel := self._product(gemm, name)).supports(gemm, hw) is None
                for how in kernel.configs(gemm, hw)
            ]
            return [how for how, _ in sorted(every, key=lambda pair: pair[1])][:6]

        names = [name for name in self.for_dx if name != "tiles" or not problem.epilogue.act]
        names = ["wgmma"] if self._planes(problem) else names
        dx = best({name: self._dx(problem, name) for name in names})
        dw = best({name: self._dw(problem) for name in self.for_dw})
        pairs = [(dx[0], how) for how in dw] + [(how, dw[0]) for how in dx[1:]]
        return [
            KernelConfig.of(
                **{f"dx_{key}": value for key, value in first.attrs},
                **{f"dw_{key}": value for key, value in second.attrs},
            )
            for first, second in pairs
        ]

    def _product(self, gemm: GemmProblem, name: str) -> Product:
        return (self.for_dw if gemm.epilogue.dw else self.for_dx)[name]

    def fits(self, problem: GemmProblem, config: KernelConfig) -> bool:
        products = self._products(problem, config)
        return all(kernel.fits(gemm, how) for kernel, gemm, how in products)

    def _cost(self, gemm: GemmProblem, how: KernelConfig, hw: Hardware) -> float:
        """A product, and before dx the pass over dy and z where its tiles do not make the dots."""
        seconds = self._product(gemm, how.text("kernel")).cost(gemm, how, hw)
        if gemm.epilogue.dw or gemm.rows:
            return seconds
        planes, fed = gemm.planes, hw.costs("layernorm_gemm_grad")["dots"]
        if planes:  # 16 rows a block of the dots, few of which cannot draw the memory's whole rate
            fed *= min(1.0, 2 * ceil(gemm.m / 16) / hw.sm_count)
        moved = 2 * (ITEMSIZE[gemm.out] + planes) * gemm.m * gemm.k
        return seconds + moved / (fed * hw.bandwidth) + hw.launch_seconds

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Both GEMMs, what their epilogues move, one pass over dy and z, the fold, small sums."""
        (_, gemm_dx, dx), (_, gemm_dw, dw) = self._products(problem, config)
        m, n, k, size = problem.m, problem.n, problem.k, ITEMSIZE[problem.dtype]
        planes = self._planes(problem)
        low = 2 * planes or size
        moved = (size + low) * m * k + size * k * n
        moved += 0 if problem.folded else (size + low) * k * n
        moved += low * m * n if problem.epilogue.act and not planes else 0
        moved += size * m * k if problem.add else 0
        moved += size * m * k if planes else 0  # xh by a pass of its own
        moved += 16 * ceil(n / 16) * k if problem.trans_b else 0  # sums of columns, there and back
        others = 0.0 if problem.frozen else self._cost(gemm_dw, dw, hw)
        passes = roofline(hw, hw.costs("layernorm_gemm_grad"), moved, launches=6 if planes else 4)
        return self._cost(gemm_dx, dx, hw) + others + passes

    def plan(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Plan:
        """Fold, row dots, dbias, dx, (xh,) dw, the last sums."""
        m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
        act, planes = problem.epilogue.act, self._planes(problem)
        size = 2 * planes or ITEMSIZE[dtype]
        products = self._products(problem, config)
        (product_dx, gemm_dx, how_dx), (product_dw, gemm_dw, how_dw) = products
        in_rows = bool(gemm_dx.rows)
        dots, rows = row_dots(
            m, n, k, dtype, act=act, act_alpha=problem.epilogue.act_alpha, planes=planes,
            align=problem.align,
        )  # fmt: skip
        arena = WorkspaceArena()
        xh, dz = (
            arena.allocate(size * m * k),
            arena.allocate(size * m * n) if act or planes else Ptr("dy"),
        )
        dc, wq, cs, cv = arena.allocate(4 * n), Ptr("wq"), Ptr("cs"), Ptr("cv")
        if not problem.folded:
            wq, cs, cv = arena.allocate(size * k * n), arena.allocate(4 * n), arena.allocate(4 * n)
        c1, c2 = arena.allocate(4 * m), arena.allocate(4 * m)
        if in_rows:
            rows = self.inner.row_tiles(gemm_dx, how_dx)
        # partial sums of the fold, of dbias, of a split k: one after the other
        tiles = product_dw.parts(gemm_dw, how_dw)
        turned = not problem.trans_b and not gemm_dx.trans_b
        whole, strips = fold_planes(k, n, planes, align=problem.align, turned=turned)
        scratch = 4 * rows * n
        for room in (
            8 * strips * n if dtype == "float32" else 0,
            product_dx.workspace(gemm_dx, how_dx, hw),
            product_dw.workspace(gemm_dw, how_dw, hw),
        ):
            scratch = maximum(scratch, room)
        part, dots_part = arena.allocate(scratch), arena.allocate(8 * tiles * k)
        first = rename(dots, {"cs": cs, "cv": cv, "dz": dz, "c1": c1, "c2": c2, "part": part})
        db = rename(sum_parts(rows, n, 1, dtype), {"part": part, "wide": dc, "out0": Ptr("dc")})
        folds: Launches = ()
        if dtype == "float32":
            folds = (whole, sum_parts(strips, n, 2, "float32"))
        elif not problem.folded:
            folds = (fold(k, n, dtype, problem.trans_b, hw, align=problem.align),)
        normed = row_stats(
            m, k, dtype, stats=False, norm=True, given=True, planes=planes,
            rms=problem.rms,
        )  # fmt: skip
        ends: dict[str, Ptr] = {"y": Ptr("dw"), "c": Ptr("w"), "part": dots_part, "workspace": part}
        if problem.trans_b:
            beta = Ptr("gamma" if problem.rms else "beta")  # which RMSNorm does not use
            ends |= {"a": dz, "b": xh, "row0": dc, "col0": Ptr("gamma"), "col1": beta}
        else:
            ends |= {"a": xh, "b": dz, "row0": Ptr("gamma"), "row1": Ptr("beta"), "col1": dc}
        calls = [
            *renamed(folds, {
                "wq": wq, "cs": cs, "cv": cv, "part": part, "out0": cs, "out1": cv,
                "wide": Ptr("none"),
            }),
            *(() if in_rows else (first,) if problem.frozen else (first, db)),
            *renamed(product_dx.launch(gemm_dx, how_dx, hw), {
                "a": dz, "b": wq, "y": Ptr("dx"), "z": xh, "c": Ptr("x"), "row0": Ptr("rstd"),
                "row1": Ptr("mean"), "row2": c1, "row3": c2, "workspace": part, "part": part,
            }),
        ]  # fmt: skip
        if problem.frozen:
            return tuple(calls), arena.size
        calls += [
            *((db,) if in_rows else ()),
            *renamed((normed,) * bool(planes),
                     {"out": xh, "gamma": Ptr("none"), "beta": Ptr("none")}),
            *renamed(product_dw.launch(gemm_dw, how_dw, hw), ends),
            rename(sum_parts(tiles, k, 2, dtype), {
                "part": dots_part, "wide": Ptr("none"), "out0": Ptr("dgamma"), "out1": Ptr("dbeta"),
            }),
        ]  # fmt: skip
        return tuple(calls), arena.size


class PortableTwoGemms(TwoGemms):
    """The gradients on mma.sync, or on ordinary cores: any sizes and alignment, every chip.

    16-bit types, and float32 by tf32 (on Hopper by wgmma), bf16x3 or IEEE products. Other ways to
    split float32 than those of mma.sync take IEEE products, which are more exact. gemm/fma_sm80.cu
    reads folded weights along their lines: the fold leaves them transposed.
    """

    name = "portable"

    def __init__(self) -> None:
        super().__init__()
        every: dict[str, OfWeights] = {"mma": Mma(), "fma": SimtSplitK(), "simt": Simt()}
        self.for_dx, self.for_dw = every | {"wgmma_tf32": Tf32()}, every | {
            "wgmma_tf32_turned": TurnedTf32(),
        }  # fmt: skip

    def _planes(self, problem: GemmProblem) -> int:
        return 0

    def _types(self, problem: GemmProblem) -> dict[str, str | int]:
        return {"dtype": problem.dtype, "math": problem.math, "align": problem.align}

    def _dx(self, problem: GemmProblem, kernel: str = "") -> GemmProblem:
        return super()._dx(problem).replace(save_z=not problem.frozen, trans_b=kernel != "fma")

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.trans_b:
            return "w is [k, n]"
        if problem.dtype not in ("float32", "float16", "bfloat16"):
            return f"no row statistics in {problem.dtype}"
        if reason := self._refusal(problem):
            return reason
        if any(size < 1 for size in (problem.m, problem.n, problem.k)):
            return "empty"
        gemms = self._dx(problem, "simt"), self._dw(problem)
        return next((why for gemm in gemms if (why := Simt().supports(gemm, hw))), None)

    def _cost(self, gemm: GemmProblem, how: KernelConfig, hw: Hardware) -> float:
        """A product, what its epilogue reads and writes beside its result."""
        seconds = self._product(gemm, how.text("kernel")).cost(gemm, how, hw)
        moved = gemm.m * gemm.n * (1 + gemm.epilogue.save_z) * ITEMSIZE[gemm.out]
        return seconds + moved / (hw.costs("layernorm_gemm_grad in 32 bits")["dots"] * hw.bandwidth)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Both products, the fold of the weights, the pass over dy and z, the last sums."""
        (_, gemm_dx, dx), (product, gemm, dw) = self._products(problem, config)
        m, n, k, size = problem.m, problem.n, problem.k, ITEMSIZE[problem.dtype]
        seconds = self._cost(gemm_dx, dx, hw)
        launches = 1 if problem.folded else 2 if problem.dtype != "float32" else 3
        moved = 0.0 if problem.folded else 2.0 * size * k * n
        if not problem.frozen:
            seconds += self._cost(gemm, dw, hw)
            moved += 16 * k * product.parts(gemm, dw)
            launches += 2
        # 16 rows a block of the dots, few of which cannot draw the memory's whole rate; small
        # launches take 3.5 us, and there is one more of them (H200, 2026-11)
        fed = min(1.0, ceil(m / 16) / hw.sm_count)
        moved += (3 if problem.epilogue.act else 2) * size * m * n / fed
        costs = hw.costs("layernorm_gemm_grad in 32 bits")
        passes = roofline(hw, costs, moved, launches=0)
        return seconds + passes + costs["launch"] * launches * hw.launch_seconds


KERNELS: Kernels = {
    "LayerNormGemmGrad": (FewRowsGrad(), TwoGemms(), PortableTwoGemms()),
}
