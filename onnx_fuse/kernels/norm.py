"""Norm, NormGrad, NormGradSums: a row a team of threads, in registers where it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_fuse.cuda.macros import C_TYPES, accumulator, defines, pow2
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import (
    RuleBased,
    access_width,
    block_of,
    row_items,
    tail_macros,
    team_size,
    thread_choices,
    whole_sectors,
)
from onnx_fuse.program.problem import ITEMSIZE, Config, Hardware, Launch, Num, Ptr
from onnx_fuse.program.problems import Norm, NormGrad, NormGradSums
from onnx_fuse.program.size import maximum, minimum, upper_bound

_KEPT = 40  # elements of a row a thread may hold in registers
_GRAD_KEPT = 16  # of dy and x each, in the gradient
_GRAD_THREADS = 202752  # of a norm gradient's row loops: fixed, for sums of the shape alone
_SHARE = 320  # bytes of the weights of few columns that a thread may have in registers


def _unheld(columns: int, held: int, dtype: str) -> str | None:
    """The reason why a thread's registers do not hold its share of a product's columns, or None."""
    if not columns or 0 < held * columns * ITEMSIZE[dtype] <= _SHARE:
        return None
    return f"a thread's registers do not hold its share of {columns} columns"


def grad_shape(problem: NormGrad, threads: int = 0) -> tuple[int, int, int]:
    """Elements an access, threads a row (`threads`, if not 0) and accesses a thread."""
    length, dtype = problem.length, problem.dtype
    vec = min(access_width(length, dtype), access_width(length, problem.param))
    if not threads:
        each = vec * (2 if ITEMSIZE[dtype] == 2 else 4)
        threads = min(1024, max(32, pow2(-(-length // each))))
        # few rows: more threads each, or a block would wait for memory
        if upper_bound(problem.rows) <= 2048:
            threads = max(threads, min(128, pow2(-(-length // vec))))
    return vec, threads, -(-length // (vec * threads))


def grad_parts(problem: NormGrad) -> int:
    """Enough blocks to fill a GPU, few enough that their parts weigh little beside x.

    More rows have no fewer: a layout for the largest size of a class serves all of it.
    """
    rows = problem.rows
    most = _GRAD_THREADS // grad_shape(problem)[1]
    return minimum(minimum(rows, maximum(384, -(-rows // 8))), most)


class Row(RuleBased):
    """layernorm/row.cu. Operands: x residual scale bias e1 e2 e3 w c y sum mean rstd z."""

    name = "row"
    source = "layernorm/row.cu"
    free_axes = "yz"

    def supports(self, problem: Norm, hw: Hardware) -> str | None:
        """Rows of any length; few columns where registers hold their weights."""
        vec, _, items = self._shape(problem, Config.of())
        return super().supports(problem, hw) or _unheld(problem.columns, vec * items, problem.dtype)

    def configs(self, problem: Norm, hw: Hardware) -> Sequence[Config]:
        """Half or twice the threads a row too."""
        return [how for how in thread_choices(self._shape(problem, Config.of())[1])
                if self.fits(problem, how)]  # fmt: skip

    def cost(self, problem: Norm, config: Config, hw: Hardware) -> float:
        """Each row reads the weights of few columns again."""
        again = problem.flops / 2 * ITEMSIZE[problem.dtype]
        return super().cost(problem, config, hw) + again / hw.bandwidth

    def fits(self, problem: Norm, config: Config) -> bool:
        """Whether the registers still hold the weights of few columns."""
        vec, _, items = self._shape(problem, config)
        return _unheld(problem.columns, vec * items, problem.dtype) is None

    def _shape(self, problem: Norm, config: Config) -> tuple[int, int, int]:
        """Elements an access, threads a row, accesses that a thread keeps."""
        length, x = problem.length, problem.dtype
        vec = min(
            access_width(length, x), access_width(problem.inner, x) if problem.affine == 2 else 16
        )
        if problem.affine == 1:
            vec = min(vec, access_width(length, problem.param))
        threads = config.integer("team") or team_size(problem.rows, length, vec)
        return vec, threads, row_items(length, vec, threads, _KEPT)

    def launch(self, problem: Norm, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        rows, length, x = problem.rows, problem.length, problem.dtype
        vec, threads, items = self._shape(problem, config)
        vec, items = whole_sectors(problem.tail, x, vec, items)
        block = block_of(threads)
        names = ("x", "residual", "scale", "bias", "e1", "e2", "e3", "w", "c", "y", "sum", "mean",
                 "rstd", "z")  # fmt: skip
        numbers = (rows, length, problem.groups, problem.channels, problem.inner)
        macros: dict[str, Any] = {
            "T": C_TYPES[x], "P": C_TYPES[problem.param], "M": C_TYPES[problem.stat],
            "ACC": accumulator(x), "VEC": vec, "ITEMS": items, "TEAM": threads, "BLOCK": block,
            "RMS": problem.rms, "RESIDUAL": problem.residual, "AFFINE": problem.affine,
        }  # fmt: skip
        if problem.columns:
            macros |= {"PRODUCT": problem.columns, "TURNED": problem.turned}
        return self.one(
            "layernorm_row", -(-rows * threads // block), block, *map(Ptr, names),
            *(Num("i64", n) for n in numbers), Num("f32", problem.epsilon),
            **macros, **tail_macros(problem.tail),
        )  # fmt: skip


class _Grad(RuleBased):
    """A candidate of layernorm/grad.cu."""

    name = "row"
    source = "layernorm/grad.cu"
    free_axes = "z"

    def _macros(self, problem: NormGrad, config: Config) -> dict[str, Any]:
        vec, threads, items = grad_shape(problem, config.integer("team"))
        return {
            "T": C_TYPES[problem.dtype], "P": C_TYPES[problem.param], "M": C_TYPES[problem.stat],
            "ACC": accumulator(problem.dtype), "VEC": vec, "ITEMS": items, "TEAM": threads,
            "RMS": problem.rms, "SKIP": problem.skip,
        }  # fmt: skip


class GradRow(_Grad):
    """Operands: x dy scale mean rstd ds e1 e2 e3 b dx part."""

    def supports(self, problem: NormGrad, hw: Hardware) -> str | None:
        """Rows that fit in registers."""
        vec, _, items = grad_shape(problem)
        if items * vec > _GRAD_KEPT:
            return f"rows of {problem.length} do not fit in registers"
        return super().supports(problem, hw) or _unheld(problem.k, vec * items, problem.dtype)

    def configs(self, problem: NormGrad, hw: Hardware) -> Sequence[Config]:
        """Half or twice the threads a row too."""
        return [
            how for how in thread_choices(grad_shape(problem)[1], 32) if self.fits(problem, how)
        ]

    def cost(self, problem: NormGrad, config: Config, hw: Hardware) -> float:
        """Each row reads the matrix that makes dy of few columns again."""
        again = problem.flops / 2 * ITEMSIZE[problem.dtype]
        # 0.48 of a copy's rate for rows of 768, 0.31 for rows of 96 (H200, 2026-11)
        share = 0.31 if problem.length <= 128 else 0.48
        return problem.floor(hw) / share + hw.launch_seconds + again / hw.bandwidth

    def fits(self, problem: NormGrad, config: Config) -> bool:
        """Whether a row still fits in registers."""
        vec, _, items = grad_shape(problem, config.integer("team"))
        held = vec * items
        return held <= _GRAD_KEPT and _unheld(problem.k, held, problem.dtype) is None

    def launch(self, problem: NormGrad, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch; its blocks are the parts."""
        macros = self._macros(problem, config)
        vec, threads, items = grad_shape(problem, config.integer("team"))
        macros["VEC"], macros["ITEMS"] = whole_sectors(problem.tail, problem.dtype, vec, items)
        if problem.k:
            macros |= {"PRODUCT": problem.k, "TURNED": problem.turned}
        names = ("x", "dy", "scale", "mean", "rstd", "ds", "e1", "e2", "e3", "b", "dx", "part")
        return self.one(
            "layernorm_dx", problem.parts, threads, *map(Ptr, names), Num("i64", problem.rows),
            Num("i64", problem.length), **macros, **tail_macros(problem.tail),
        )  # fmt: skip


class GradSums(_Grad):
    """The sums of the parts. Operands: part dscale dbias."""

    def launch(self, problem: NormGradSums, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        grad = problem.grad
        return (Launch(
            self.source, "layernorm_dparams", (-(-grad.length // 32), problem.outputs, 1),
            (1024, 1, 1),
            (*map(Ptr, ("part", "dscale", "dbias")), Num("i32", grad.parts),
             Num("i64", grad.length)),
            defines(**self._macros(grad, Config.of())),
        ),)  # fmt: skip


KERNELS: dict[str, Sequence[Kernel]] = {
    "Norm": (Row(),),
    "NormGrad": (GradRow(),),
    "NormGradSums": (GradSums(),),
}
