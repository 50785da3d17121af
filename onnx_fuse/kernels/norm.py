"""Norm, NormGrad, NormGradSums: a row a team of threads, in registers where it fits; few long rows
by many blocks each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_fuse.cuda.macros import pow2
from onnx_fuse.kernels.kernel import Kernels, P
from onnx_fuse.kernels.rule_based import (
    HeuristicKernel,
    Plan,
    Planned,
    access_width,
    block_of,
    cut,
    numbered_tail,
    row_items,
    tail_macros,
    team_size,
    thread_choices,
    typed,
    whole_sectors,
)
from onnx_fuse.program.launch import Arg, Launches, Ptr, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.problems import Norm, NormGrad, NormGradSums
from onnx_fuse.program.size import any_batch, maximum, minimum, upper_bound

_KEPT = 40  # elements of a row a thread may hold in registers, half as many of float64
_GRAD_KEPT = 16  # of dy and x each, in the gradient
_GRAD_THREADS = 202752  # of a norm gradient's row loops: fixed, for sums of the shape alone
_GRAD_BLOCK, _GRAD_SUMS = 512, 32768  # threads of teams that share a part, bytes where they add up
_FEW, _LONG = 128, 32768  # rows that leave the chip idle, and elements of one worth cutting
_THREADS = 256  # of a chunk
_SHARE = 320  # bytes of the weights of few columns that a thread may have in registers


def _unheld(columns: int, held: int, dtype: str) -> str | None:
    """The reason why a thread's registers do not hold its share of a product's columns, or None."""
    if not columns or 0 < held * columns * ITEMSIZE[dtype] <= _SHARE:
        return None
    return f"a thread's registers do not hold its share of {columns} columns"


def grad_shape(problem: NormGrad, threads: int = 0) -> tuple[int, int, int]:
    """Elements an access, threads a row (`threads`, if not 0) and accesses a thread."""
    length, dtype = problem.length, problem.dtype
    vec = access_width(length, dtype, problem.param)
    if not threads:
        each = vec * (2 if ITEMSIZE[dtype] == 2 else 4)
        threads = min(1024, max(32, pow2(-(-length // each))))
        # few rows: more threads each, or a block would wait for memory
        if upper_bound(problem.rows) <= 2048:
            threads = max(threads, min(128, pow2(-(-length // vec))))
    return vec, threads, -(-length // (vec * threads))


def grad_teams(problem: NormGrad, threads: int = 0) -> int:
    """Teams of a block, each with rows of its own; the block leaves one part.

    1,024 parts of 768 columns took a 6 MB write, and as much to read: more than x and dy do.
    """
    vec, threads, items = grad_shape(problem, threads)
    wide = 2 if problem.dtype == "float64" else 1  # which takes as many more registers
    teams = max(1, _GRAD_BLOCK // (threads * wide))
    while teams > 1 and teams * vec * items * threads * 4 * wide > _GRAD_SUMS:
        teams //= 2
    return teams


def grad_parts(problem: NormGrad) -> int:
    """Enough blocks to fill a GPU, few enough that their parts weigh little beside x.

    More rows have no fewer: a layout for the largest size of a class serves all of it. Few long
    rows are one part: a block has a strip of the columns of all of them.
    """
    rows = problem.rows
    if _few_and_long(problem):
        return 1
    most = _GRAD_THREADS // grad_shape(problem)[1]
    # a team that takes row after row waits for each: 12 us of a step for 2,048 rows of 768 by 384
    # teams, 7.5 by 1,024 (H200, 2026-11)
    few = minimum(rows, maximum(384, minimum(1024, -(-rows // 2))))
    teams = minimum(maximum(few, -(-rows // 8)), most)
    return -(-teams // grad_teams(problem))


def _kept(dtype: str) -> int:
    return _KEPT // (2 if dtype == "float64" else 1)


def _few_and_long(problem: Norm | NormGrad) -> bool:
    return any_batch(problem.rows) < _FEW and problem.length >= _LONG


def _uncut(problem: Norm | NormGrad) -> str | None:
    """The reason why rows are not cut into chunks for several blocks each, or None.

    It names sizes, which only `supports` may do without a guard on them.
    """
    if _few_and_long(problem):
        return None
    return f"{problem.rows} rows of {problem.length} are not few and long"


def _macros(problem: Norm) -> dict[str, Any]:
    types = typed(problem, P="param", M="stat")
    return types | {"RMS": problem.rms, "RESIDUAL": problem.residual, "AFFINE": problem.affine}


class NormChunks(Planned[Norm], HeuristicKernel[Norm]):
    """layernorm/parts.cu: few long rows. Operands: those of `NormRow` without w, c and z."""

    name = "parts"
    source = "layernorm/parts.cu"

    def supports(self, problem: Norm, hw: Hardware) -> str | None:
        if problem.affine == 2:
            return "scale and bias are numbers a channel"
        if problem.columns:
            return f"a Gemm with {problem.columns} columns needs a row in one block"
        return _uncut(problem) or super().supports(problem, hw)

    def moved(self, problem: Norm) -> int:
        """x is read twice, and a residual."""
        tensor = problem.rows * problem.length * ITEMSIZE[problem.dtype]
        return problem.bytes + tensor * (2 if problem.residual else 1)

    def plan(self, problem: Norm, config: KernelConfig, hw: Hardware) -> Plan:
        """What each chunk has, three accumulators, and the row by what all of its chunks have."""
        read = (problem.dtype, problem.param if problem.affine else problem.dtype)
        vec = access_width(problem.length, *read)
        chunk, chunks = cut(problem.rows, problem.length, vec)
        items = row_items(chunk, vec, _THREADS, _kept(problem.dtype))
        macros = _macros(problem) | {"VEC": vec, "ITEMS": items, "BLOCK": _THREADS}
        macros |= tail_macros(problem.tail)

        def each(entry: str, names: str, more: str = "") -> Launches:
            made = args(f"{names} workspace, i64 length chunk chunks{more}", problem,
                        chunk=chunk, chunks=chunks)  # fmt: skip
            return self.one(entry, problem.rows * chunks, _THREADS, *made, **macros)

        names = "x residual scale bias e1 e2 e3 y mean rstd"
        parts = each("norm_parts", "x residual sum")
        return parts + each("norm_apply", names, ", f32 epsilon"), 24 * problem.rows * chunks


class NormRow(HeuristicKernel[Norm]):
    """layernorm/row.cu. Operands: x residual scale bias e1 e2 e3 w c y sum mean rstd z."""

    name = "row"
    source, version = "layernorm/row.cu", 2
    free_axes = "yz"

    def supports(self, problem: Norm, hw: Hardware) -> str | None:
        """Rows of any length; few columns where registers hold their weights."""
        vec, _, items = self._shape(problem, KernelConfig.of())
        return super().supports(problem, hw) or _unheld(problem.columns, vec * items, problem.dtype)

    def configs(self, problem: Norm, hw: Hardware) -> Sequence[KernelConfig]:
        return [how for how in thread_choices(self._shape(problem, KernelConfig.of())[1])
                if self.fits(problem, how)]  # fmt: skip

    def cost(self, problem: Norm, config: KernelConfig, hw: Hardware) -> float:
        """Each row reads the weights of few columns again."""
        again = problem.flops / 2 * ITEMSIZE[problem.dtype]
        return super().cost(problem, config, hw) + again / hw.bandwidth

    def fits(self, problem: Norm, config: KernelConfig) -> bool:
        vec, _, items = self._shape(problem, config)
        return _unheld(problem.columns, vec * items, problem.dtype) is None

    def _shape(self, problem: Norm, config: KernelConfig) -> tuple[int, int, int]:
        """Elements an access, threads a row, accesses that a thread keeps."""
        length, x = problem.length, problem.dtype
        vec = access_width(length, x, problem.param if problem.affine == 1 else x)
        if problem.affine == 2:
            vec = min(vec, access_width(problem.inner, x))
        threads = config.integer("team") or team_size(problem.rows, length, vec)
        return vec, threads, row_items(length, vec, threads, _kept(x))

    def launch(self, problem: Norm, config: KernelConfig, hw: Hardware) -> Launches:
        vec, threads, items = self._shape(problem, config)
        vec, items = whole_sectors(problem.tail, problem.dtype, vec, items)
        block = block_of(threads)
        macros = _macros(problem) | {"VEC": vec, "ITEMS": items, "TEAM": threads, "BLOCK": block}
        text = "x residual scale bias e1 e2 e3 w c y sum mean rstd z"
        made = args(f"{text}, i64 rows length groups channels inner, f32 epsilon", problem)
        numbers, of_tail = numbered_tail(problem.tail)
        return self.one(
            "layernorm_row", -(-problem.rows * threads // block), block, *made, *numbers, **macros,
            PRODUCT=problem.columns or None, TURNED=problem.turned if problem.columns else None,
            **of_tail,
        )  # fmt: skip


def _grad_macros(problem: NormGrad) -> dict[str, Any]:
    types = typed(problem, P="param", M="stat")
    return types | {"RMS": problem.rms, "SKIP": problem.skip}


class _NormGradKernel(HeuristicKernel[P]):
    """A candidate of layernorm/grad.cu."""

    name = "row"
    source, version = "layernorm/grad.cu", 2
    free_axes = "z"

    def _macros(self, problem: NormGrad, config: KernelConfig) -> dict[str, Any]:
        vec, threads, items = grad_shape(problem, config.integer("team"))
        teams = grad_teams(problem, threads)
        return _grad_macros(problem) | {"VEC": vec, "ITEMS": items, "TEAM": threads, "TEAMS": teams}


class GradRow(_NormGradKernel[NormGrad]):
    """Operands: x dy scale mean rstd ds e1 e2 e3 b dx part."""

    def supports(self, problem: NormGrad, hw: Hardware) -> str | None:
        vec, _, items = grad_shape(problem)
        if items * vec > _GRAD_KEPT:
            return f"rows of {problem.length} do not fit in registers"
        return super().supports(problem, hw) or _unheld(problem.k, vec * items, problem.dtype)

    def configs(self, problem: NormGrad, hw: Hardware) -> Sequence[KernelConfig]:
        return [
            how for how in thread_choices(grad_shape(problem)[1], 32) if self.fits(problem, how)
        ]

    def cost(self, problem: NormGrad, config: KernelConfig, hw: Hardware) -> float:
        """Each row reads the matrix that makes dy of few columns again."""
        again = problem.flops / 2 * ITEMSIZE[problem.dtype]
        # rows of 768 and rows of 96 were measured
        share = self.numbers(hw)["short" if problem.length <= 128 else "memory"]
        return problem.floor(hw) / share + hw.launch_seconds + again / hw.bandwidth

    def fits(self, problem: NormGrad, config: KernelConfig) -> bool:
        vec, _, items = grad_shape(problem, config.integer("team"))
        held = vec * items
        return held <= _GRAD_KEPT and _unheld(problem.k, held, problem.dtype) is None

    def launch(self, problem: NormGrad, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch; its blocks leave the parts."""
        macros = self._macros(problem, config)
        vec, threads, items = grad_shape(problem, config.integer("team"))
        macros["VEC"], macros["ITEMS"] = whole_sectors(problem.tail, problem.dtype, vec, items)
        names = "x dy scale mean rstd ds e1 e2 e3 b dx part"
        return self.one(
            "layernorm_dx", problem.parts, threads * macros["TEAMS"],
            *args(f"{names}, i64 rows length", problem), **macros, **tail_macros(problem.tail),
            PRODUCT=problem.k or None, TURNED=problem.turned if problem.k else None,
        )  # fmt: skip


def _chunk_macros(problem: NormGrad) -> dict[str, Any]:
    vec = access_width(problem.length, problem.dtype, problem.param)
    return _grad_macros(problem) | {"VEC": vec, "BLOCK": _THREADS} | tail_macros(problem.tail)


class GradChunks(Planned[NormGrad], HeuristicKernel[NormGrad]):
    """layernorm/grad_parts.cu: few long rows. Operands: those of `GradRow` without b."""

    name = "parts"
    source = "layernorm/grad_parts.cu"

    def supports(self, problem: NormGrad, hw: Hardware) -> str | None:
        """Rows that are too few for a block each to fill the chip, of which dy is there."""
        if problem.k:
            return "dy is the matrix multiplication of a row with a matrix"
        if reason := _uncut(problem):
            return reason
        return super().supports(problem, hw) if problem.parts == 1 else f"{problem.parts} parts"

    def moved(self, problem: NormGrad) -> int:
        """x and dy are read twice where dx is wanted."""
        tensor = problem.rows * problem.length * ITEMSIZE[problem.dtype]
        return problem.bytes + 2 * tensor * problem.dx

    def plan(self, problem: NormGrad, config: KernelConfig, hw: Hardware) -> Plan:
        """The averages of each row by its chunks, where dx is wanted, and the columns' strips.

        Each chunk has two accumulators, and behind them each row.
        """
        macros, rows = _chunk_macros(problem), problem.rows
        vec: int = macros["VEC"]
        chunk, chunks = cut(rows, problem.length, vec)
        parts, whole = Ptr("workspace"), Ptr("workspace", 16 * rows * chunks)

        def one(entry: str, blocks: int, *made: Arg) -> Launches:
            return self.one(entry, blocks, _THREADS, *made, **macros)

        operands = args("x dy scale mean rstd")
        numbers = args("i64 length chunk chunks", problem, chunk=chunk, chunks=chunks)
        sums = (
            *one("dx_parts", rows * chunks, *operands, parts, *numbers),
            *one("dx_merge", rows, parts, whole, numbers[0], numbers[2]),
        )
        strips = one(
            "dx_apply", -(-problem.length // (vec * _THREADS)), *operands, *args("ds e1 e2 e3"),
            whole, *args("dx part, i64 rows length", problem),
        )  # fmt: skip
        return sums + strips if problem.dx else strips, 16 * rows * (chunks + 1)


class GradRounds(HeuristicKernel[NormGradSums]):
    """The one part that few long rows leave, rounded. Operands: part dscale dbias."""

    name = "parts"
    source = "layernorm/grad_parts.cu"

    def supports(self, problem: NormGradSums, hw: Hardware) -> str | None:
        return _uncut(problem.grad)

    def launch(self, problem: NormGradSums, config: KernelConfig, hw: Hardware) -> Launches:
        grad = problem.grad
        grid = (-(-grad.length // _THREADS), problem.outputs, 1)
        made = args("part dscale dbias, i64 length", grad)
        return self.one("round_params", grid, _THREADS, *made, **_chunk_macros(grad))


class GradSums(_NormGradKernel[NormGradSums]):
    """The sums of the parts. Operands: part dscale dbias."""

    def supports(self, problem: NormGradSums, hw: Hardware) -> str | None:
        """Sums of several parts, or of rows that one block each has."""
        return "it has one part of a long row" if _few_and_long(problem.grad) else None

    def launch(self, problem: NormGradSums, config: KernelConfig, hw: Hardware) -> Launches:
        grad, macros = problem.grad, self._macros(problem.grad, KernelConfig.of())
        grid = (-(-grad.length // 32), problem.outputs, 1)
        made = args("part dscale dbias, i32 parts, i64 length", grad)
        return self.one("layernorm_dparams", grid, 1024, *made, **macros)


KERNELS: Kernels = {
    "Norm": (NormChunks(), NormRow()),
    "NormGrad": (GradChunks(), GradRow()),
    "NormGradSums": (GradRounds(), GradSums()),
}
