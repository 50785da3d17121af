"""The portable Gemm candidates (SIMT, mma.sync), and what every Gemm candidate shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from math import ceil, prod

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.kernel import Kernel, renamed, roofline
from onnx_fuse.ops.activations import BY_KEY, activation_macros
from onnx_fuse.program.launch import Arg, Launches, Ptr, args
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.spec import GRID

HALVES = ("float16", "bfloat16")
CHOICES = frozenset((
    "row_scale", "layernorm", "row_bias", "exp", "save_z", "act", "gate", "dact", "save_act",
    "layer_scale", "dx", "dw", "accumulate", "moments", "column_sums", "column_moments", "parts",
    "rows", "ldy",
))  # fmt: skip
PORTABLE = CHOICES - {
    "row_scale", "exp", "save_act", "moments", "column_sums", "column_moments", "ldy",
}  # fmt: skip
"""The fields of a problem that the epilogues of portable kernels take."""
PLAIN = PORTABLE - {"row_bias", "dw", "parts"}
"""Those of an epilogue with a bias a column."""
VECTOR = frozenset(("layernorm", "save_z", "act", "save_act", "layer_scale"))
FLOAT8 = frozenset(("save_z", "act", "dact", "save_act", "layer_scale", "ldy"))
LIBRARY = frozenset(("save_act",))


ALL = CHOICES | {"bias", "beta", "residual", "batch", "planes", "trans_a"}
GOES_WITH = {
    "row_bias": ALL - {"row_scale", "bias", "layernorm", "dx", "dw"},
    "row_scale": ALL - {"row_bias", "bias", "layernorm", "dx", "dw"},
    "exp": frozenset(("bias", "ldy", "trans_a")),
    "gate": ALL - {"save_z", "beta", "dact", "dx", "dw", "residual", "accumulate", "moments",
                   "column_sums", "column_moments", "batch"},
    "moments": ALL - {"accumulate", "batch", "planes"},
    "column_sums": ALL - {"moments", "rows", "parts", "dw", "batch", "planes", "trans_a"},
    "column_moments": ALL - {"accumulate", "dw", "dx", "moments", "column_sums", "save_z",
                             "save_act", "rows", "parts", "ldy", "batch", "planes"},
    "ldy": ALL - {"beta", "dact", "dx", "dw", "residual", "batch"},
}  # fmt: skip
"""What else a problem may have beside such a field, in any kernel."""


def gate_refusal(problem: GemmProblem) -> str | None:
    """The reason why no epilogue makes the gated product; None where one can, or without a gate."""
    if problem.epilogue.gate and (problem.n % 16 or problem.trans_b or not problem.epilogue.act):
        return f"gates come in blocks of 8 columns, b's rows along k, with an act: n={problem.n}"
    return None


def half_refusal(problem: GemmProblem) -> str | None:
    """Why operands are not of 16 bits, or the result of no type that they give; None if so."""
    if problem.dtype not in HALVES:
        return f"for 16-bit operands, not {problem.dtype}"
    return result_refusal(problem)


def result_refusal(problem: GemmProblem) -> str | None:
    """Why no tensor core's sum is stored as the result's type; None where it is."""
    return None if problem.out in (*HALVES, "float32") else f"no {problem.out} result"


@cache
def _left_out(takes: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(CHOICES - takes))


def epilogue_refusal(problem: GemmProblem, takes: frozenset[str]) -> str | None:
    """Why an epilogue of these fields and one extra operand is not enough; None where it is."""
    if other := problem.among(*_left_out(takes)):
        return f"its epilogue has no {', '.join(other)}"
    for name in problem.among(*GOES_WITH):
        if other := problem.among(*sorted(ALL - GOES_WITH[name] - {name})):
            return f"{name} goes without {', '.join(other)}"
    if normed(problem) and problem.among("row_bias", "row_scale"):
        return "a residual's norm takes the numbers of rows"
    extra = problem.epilogue.among("beta", "dact", "dx", "dw", "residual")
    if len(extra) > 1:
        return f"the epilogue takes one extra operand, not {extra}"
    act = problem.epilogue.act
    return f"no activation {act!r}" if act and act not in BY_KEY else None


def plain_refusal(problem: GemmProblem) -> str | None:
    """Why an epilogue with one dense operand and a bias a column is not enough; None if it is."""
    if reason := epilogue_refusal(problem, PLAIN):
        return reason
    if problem.reads_c and problem.ldc != (problem.n, 1):
        return f"c is read as a dense [M, N], its strides are {problem.ldc}"
    return gate_refusal(problem)


def normed(problem: GemmProblem) -> bool:
    """Whether the residual is a LayerNormalization of c."""
    return problem.epilogue.residual == "norm"


def folds(problem: GemmProblem) -> bool:
    """Whether it is a LayerNormGemm by folded weights: cs and cv are float32, the bias is in cv."""
    return problem.op == "LayerNormGemm" and problem.folded


def epilogue_defines(problem: GemmProblem) -> dict[str, object]:
    """The epilogue's macros; defaults are left out, so that equal code has one key."""
    e, folded = problem.epilogue, folds(problem)
    macros: dict[str, object] = {
        "ALPHA": e.alpha != 1.0, "ROW_SCALE": e.row_scale, "EPI_LN": e.layernorm or folded,
        "EPI_BIAS": 2 if e.row_bias else e.bias and not folded, "EPI_C": e.beta != 0,
        "EPI_EXP": e.exp, "SAVE_Z": e.save_z or e.save_act, "SAVE_ACT": e.save_act,
        "EPI_DACT": e.dact, "EPI_DX": e.dx, "EPI_DW": 2 if e.dw == "turned" else e.dw,
        "EPI_RMS": problem.rms and (e.dx or bool(e.dw)), "ACCUMULATE": e.accumulate,
        "GATE": e.gate, "EPI_SCALE": e.layer_scale,
        "EPI_RES": 2 if normed(problem) else bool(e.residual),
    }  # fmt: skip
    return {name: v for name, v in macros.items() if v} | activation_macros(e.act)


def type_defines(problem: GemmProblem) -> dict[str, str]:
    """T (operands), TO (result), TV (column vectors), TR (row vectors, where not float)."""
    dw = problem.epilogue.dw is True
    fp32_columns = problem.epilogue.layernorm or dw or normed(problem) or folds(problem)
    bias = problem.epilogue.bias_dtype or problem.dtype
    types = {"T": problem.dtype, "TO": problem.out, "TV": "float32" if fp32_columns else bias}
    if dw or problem.epilogue.row_bias:
        types["TR"] = problem.out if dw else bias
    return {name: C_TYPES[kind] for name, kind in types.items()}


def aligned(problem: GemmProblem) -> bool:
    """Whether every line of a and b starts at a multiple of 16 bytes."""
    size = ITEMSIZE[problem.dtype]
    steps = [*problem.ld, *problem.batch_strides("a", 0), *problem.batch_strides("b", 0)]
    dense = [problem.m * problem.k, problem.k * problem.n] if problem.batch else []
    return problem.align % 16 == 0 and all(step * size % 16 == 0 for step in [*steps, *dense])


def epilogue_args(problem: GemmProblem) -> tuple[Arg, ...]:
    """The arguments of an epilogue behind y, z and c: vectors of rows and columns, and numbers."""
    return args("row0 row1 row2 row3 col0 col1, f32 alpha beta act_alpha", problem.epilogue)


def as_norm(problem: GemmProblem, launches: Launches, **others: str) -> Launches:
    """The launches, a LayerNormGemm's with its names of operands, of which some are `others`."""
    if problem.op != "LayerNormGemm":
        return launches
    weights = {"b": "wq", "col1": "cv"} if problem.folded else {"b": "w", "col1": "c"}
    names = {"a": "x", "c": "r", "col0": "cs", **weights, **others}
    return renamed(launches, {name: Ptr(own) for name, own in names.items()})


def portable_args(problem: GemmProblem) -> tuple[Arg, ...]:
    """The arguments GEMM_PARAMS of gemm/portable.cuh, in order."""
    m, n, k = problem.m, problem.n, problem.k
    sizes = (1,) * (3 - len(problem.batch)) + problem.batch
    dense = {"a": m * k, "b": k * n, "c": m * n}
    a, b, c = (problem.batch_strides(name, size) for name, size in dense.items())
    made = args(
        "a b y, i32 m n k, i64 steps, i32 sizes, i64 a b, c, i64 c rows_of_c, z", problem,
        steps=problem.ld, sizes=sizes[1:], a=a, b=b, c=c, rows_of_c=problem.ldc,
    )  # fmt: skip
    return (*made, *epilogue_args(problem), Ptr("part"))


def each_has_steps(steps: int, splits: int) -> bool:
    """Whether `steps` in equal parts, the last one shorter, leave none of `splits` without any."""
    # more than (splits - 1)^2 always do: asked first, since most of a class agree on that
    return steps > (splits - 1) ** 2 or (splits - 1) * ceil(steps / splits) < steps


def tile_seconds(
    problem: GemmProblem, bm: int, bn: int, per_sm: float, hw: Hardware, step: float, bk: int,
    ends: int = 0,
) -> float:  # fmt: skip
    """Whole waves of bm x bn tiles at `per_sm` operations/s, floored by bytes and latency.

    `ends`: the steps of k that the start and the end of a tile take.
    """
    tiles = ceil(problem.m / bm) * ceil(problem.n / bn) * problem.batches
    waves = ceil(tiles / hw.sm_count)
    work = waves * 2 * bm * bn * (problem.k + ends) / per_sm
    latency = ceil(problem.k / bk) * step
    # a few blocks can't draw the memory's whole rate
    fed = min(1.0, tiles / (0.7 * hw.sm_count))
    return max(work, latency, problem.bytes / hw.bandwidth / fed) + hw.launch_seconds


def slope_seconds(problem: GemmProblem, elements: float) -> float:
    """The time of act'(c) for a thread's last elements, which nothing hides (H200, 2026-11)."""
    return 4.6e-8 * elements if problem.epilogue.dact else 0.0


def parts_of_batch(problem: GemmProblem) -> list[tuple[GemmProblem, dict[str, Ptr]]]:
    """The problem in parts that a grid's z axis has room for, and where their operands begin."""
    most = GRID[2]
    if not problem.batch or problem.batches <= most:
        return [(problem, {})]
    m, n, k, axes = problem.m, problem.n, problem.k, len(problem.batch)
    inner = problem.batches // problem.batch[0]  # matrices at one place along the first axis
    size = max(1, most // inner)
    size_in, size_out = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out]
    a, b, c = (
        problem.batch_strides(name, dense)[3 - axes :]
        for name, dense in (("a", m * k), ("b", k * n), ("c", m * n))
    )
    rest = 1 if inner > most else 0  # the others by themselves where they are too many as well
    parts = []
    for first in range(0, problem.batch[0], size):
        length = min(size, int(problem.batch[0]) - first)
        part = problem.replace(
            batch=(length, *problem.batch[1:])[rest:],
            a_strides=a[rest:], b_strides=b[rest:], c_strides=c[rest:],
        )  # fmt: skip
        at = {
            "a": first * a[0] * size_in, "b": first * b[0] * size_in,
            "c": first * c[0] * size_out, "z": first * inner * m * n * size_out,
            "y": first * inner * m * (n // 2 if problem.epilogue.gate else n) * size_out,
        }  # fmt: skip
        parts += [
            (each, {name: Ptr(name, at[name] + more.get(name, Ptr(name)).offset) for name in at})
            for each, more in parts_of_batch(part)
        ]
    return parts


class _Portable(Kernel[GemmProblem], ABC):
    """What the two portable kernels share."""

    source: str
    entry: str

    def _refusal(self, problem: GemmProblem) -> str | None:
        if reason := epilogue_refusal(problem, PORTABLE):
            return reason
        if problem.epilogue.dw and (problem.epilogue.dw == "turned" or problem.batch):
            return "a weight's gradient is one matrix with sums of its rows"
        if len(problem.batch) > 3:
            return f"{len(problem.batch)} batch dims (at most 3)"
        if problem.epilogue.row_bias and problem.dtype == "float64":
            return f"a bias for each row in float, not {problem.dtype}"
        if any(size >= 2**31 for size in (problem.m, problem.n, problem.k)):
            return "a dimension of 2^31 or more"
        return gate_refusal(problem)

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, or one for each part of a batch that a grid has no room for."""
        parts = parts_of_batch(problem)
        if len(parts) == 1:
            return self._launch(problem, config)
        apart = (renamed(self._launch(part, config), at) for part, at in parts)
        return tuple(call for launches in apart for call in launches)

    def tile(self, config: KernelConfig) -> tuple[int, int]:
        """The rows and columns of a block's tile."""
        bm, bn, *_ = config.integers("tile")
        return bm, bn

    @abstractmethod
    def threads(self, config: KernelConfig) -> int:
        """The number of threads of a block."""

    @abstractmethod
    def _macros(self, problem: GemmProblem, config: KernelConfig) -> dict[str, object]:
        """The macros beside the layout's and the epilogue's."""

    def _smem(self, problem: GemmProblem, config: KernelConfig) -> int:
        return 0

    def _launch(
        self, problem: GemmProblem, config: KernelConfig, *more: Arg, cluster: int = 0,
        **macros: object,
    ) -> Launches:  # fmt: skip
        """The launch of a batch of at most 65,535 matrices, with `more` arguments and macros."""
        (bm, bn), split = self.tile(config), config.integer("split", 1)
        tiles = ceil(problem.m / bm) * ceil(problem.n / bn)
        return self.one(
            self.entry, (tiles * split, 1, problem.batches), self.threads(config),
            *portable_args(problem), *more, smem=self._smem(problem, config),
            cluster=cluster or split, TRANS_A=problem.trans_a, TRANS_B=problem.trans_b,
            **self._macros(problem, config), **epilogue_defines(problem), **macros,
        )  # fmt: skip

    def parts(self, problem: GemmProblem, config: KernelConfig) -> int:
        """How many [2, m] planes of "part" hold the sums of the rows of a weight's gradient."""
        return ceil(problem.n / self.tile(config)[1])


SIMT_TILES: dict[int, dict[str, int]] = {
    128: {"BM": 128, "BN": 128, "BK": 16, "TM": 8, "TN": 8},
    64: {"BM": 64, "BN": 64, "BK": 16, "TM": 4, "TN": 4},
    32: {"BM": 32, "BN": 32, "BK": 32, "TM": 2, "TN": 2},
}


class Simt(_Portable):
    """gemm/simt.cu: IEEE products on the ordinary cores; serves every problem."""

    name = "simt"
    source, entry = "gemm/simt.cu", "gemm_simt"
    free_axes = "y"

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.dtype.startswith("float8"):
            return f"no matrix multiplications of {problem.dtype} on ordinary cores"
        fancy = problem.epilogue.among("layernorm", "dx", "act", "dact")
        if fancy and problem.dtype not in ("float32", "float16", "bfloat16"):
            return f"no such epilogue in {problem.dtype}"
        return self._refusal(problem)

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """One config a tile size; 8-byte types keep to the smaller ones."""
        sizes = [64, 32] if ITEMSIZE[problem.dtype] == 8 else [128, 64, 32]
        return [KernelConfig.of(tile=size) for size in sizes]

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Predicted seconds: waves of blocks at the rate of FMAs."""
        size = config.integer("tile")
        kind = "float64" if problem.dtype == "float64" else "float32"
        costs = self.numbers(hw)
        per_sm = hw.rate(kind) * costs[f"tile_{size}"] / hw.sm_count
        slope = slope_seconds(problem, SIMT_TILES[size]["TM"] * SIMT_TILES[size]["TN"])
        # 401408 x 64 with k = 16 took 70 us, 100352 x 72 with k = 24 37 us (float16, H200, 2026-11)
        ends = 16 if ITEMSIZE[problem.dtype] == 2 else 0
        return tile_seconds(problem, size, size, per_sm, hw, costs["step"], 16, ends) + slope

    def tile(self, config: KernelConfig) -> tuple[int, int]:
        return config.integer("tile"), config.integer("tile")

    def threads(self, config: KernelConfig) -> int:
        tile = SIMT_TILES[config.integer("tile")]
        return tile["BM"] // tile["TM"] * (tile["BN"] // tile["TN"])

    def _macros(self, problem: GemmProblem, config: KernelConfig) -> dict[str, object]:
        vec = max(1, min(4, 16 // ITEMSIZE[problem.dtype])) if aligned(problem) else 1
        return {**type_defines(problem), **SIMT_TILES[config.integer("tile")], "VEC": vec}


# BM, BN -> teams, microseconds a wave takes for 64 of k and with trans_b (H200, 2026-11)
FMA_TILES: dict[tuple[int, ...], tuple[int, float, float]] = {
    (64, 64): (4, 1.75, 1.9),
    (32, 64): (4, 0.8, 0.88),
    (32, 32): (8, 0.53, 0.55),
}


class SimtSplitK(_Portable):
    """gemm/fma_sm80.cu: IEEE fp32 with k shared out among warps and blocks, for few tiles."""

    name = "fma"
    source, entry = "gemm/fma_sm80.cu", "gemm_fma"
    free_axes = "y"

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if {problem.dtype, problem.out} != {"float32"}:
            return f"{problem.dtype} -> {problem.out}: it computes only fp32"
        return self._refusal(problem)

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """Tiles, with k in as many parts as it has 64s and as a cluster may have blocks."""
        most = ceil(problem.k / 64) if hw.cc >= 90 else 1
        splits = [split for split in (1, 2, 4, 8) if split <= most]
        ways = [KernelConfig.of(tile=tile, split=split) for tile in FMA_TILES for split in splits]
        return [config for config in ways if self._smem(problem, config) <= hw.smem_per_block]

    def _stages(self, problem: GemmProblem, config: KernelConfig) -> tuple[int, int]:
        """How many tiles are on their way, and bytes of each: room is left for other blocks.

        Where a block's k is long, three blocks of 128 threads on a multiprocessor of Hopper, 75 KiB
        each, gain more than a third tile on its way does (H200, 2026-11).
        """
        (bm, bn), split = config.integers("tile"), config.integer("split")
        size = 256 * ((bm if problem.trans_a else bm + 4) + bn) + 16 * bn * problem.trans_b
        crowded = 3 * size + (4 * bm * bn if split > 1 else 0) > 75 << 10
        alike = self.threads(config) == 128 and split <= 2 and not problem.trans_a
        if alike and crowded and not self._room(problem, config) and problem.k >= 1024 * split:
            return 2, size
        return (4 if 4 * size <= 80 << 10 else 3 if 3 * size <= 96 << 10 else 2), size

    def _smem(self, problem: GemmProblem, config: KernelConfig) -> int:
        """Bytes for the stages of both tiles or the teams' sums, followed by the cluster's sums."""
        (bm, bn), split = config.integers("tile"), config.integer("split")
        tiles = prod(self._stages(problem, config))
        rest = (bm * bn if split > 1 else 0) + self._room(problem, config)
        return max(tiles, 4 * FMA_TILES[bm, bn][0] * bm * bn) + 4 * rest

    def _room(self, problem: GemmProblem, config: KernelConfig) -> int:
        """Further floats of shared memory."""
        return 0

    def threads(self, config: KernelConfig) -> int:
        bm, bn = config.integers("tile")
        return FMA_TILES[bm, bn][0] * bm * bn // 64

    def fits(self, problem: GemmProblem, config: KernelConfig) -> bool:
        """Whether each of the blocks that share k has a part of it."""
        split = config.integer("split")
        return split == 1 or split <= ceil(problem.k / 64)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Waves of parts of k, a launch, and the sum of the parts."""
        (bm, bn), split = config.integers("tile"), config.integer("split")
        blocks = ceil(problem.m / bm) * ceil(problem.n / bn) * problem.batches * split
        waves = ceil(blocks / hw.sm_count)
        if split > 2 and 2 * blocks > hw.sm_count:
            waves *= 2  # blocks of larger clusters share multiprocessors while others idle
        slower = 50e12 / hw.rate("float32") * 132 / hw.sm_count
        groups, *each = FMA_TILES[bm, bn]
        work = waves * ceil(ceil(problem.k / 64) / split) * each[problem.trans_b] * 1e-6 * slower
        share = self.numbers(hw)["exchange"] if split > 1 else 0.0
        slope = slope_seconds(problem, 64 / groups / split)
        return max(work + share, problem.bytes / hw.bandwidth) + hw.launch_seconds + slope

    def _macros(self, problem: GemmProblem, config: KernelConfig) -> dict[str, object]:
        (bm, bn), vec = config.integers("tile"), 4 if aligned(problem) else 1
        lying = (
            problem.m if problem.trans_a else problem.k,
            problem.k if problem.trans_b else problem.n,
        )
        return {
            "BM": bm, "BN": bn, "GROUPS": FMA_TILES[bm, bn][0], "SPLIT": config.integer("split"),
            "STAGES": self._stages(problem, config)[0], "VEC": vec, "WIDE": problem.n % 4 == 0,
            "EVEN": all(size % vec == 0 for size in lying), "TV": type_defines(problem)["TV"],
        }  # fmt: skip


# BM, BN, WM, WN -> share of the full rate that the tile reaches on Hopper
MMA_TILES: dict[tuple[int, ...], float] = {
    (128, 128, 64, 32): 0.5,
    (64, 128, 32, 32): 0.38,
    (64, 64, 32, 32): 0.28,
    (32, 64, 16, 32): 0.16,
    (16, 64, 16, 16): 0.09,
}


class Mma(_Portable):
    """gemm/mma_sm80.cu: mma.sync; 16-bit operands, tf32, or fp32 as split bf16."""

    name = "mma"
    source, entry = "gemm/mma_sm80.cu", "gemm_mma"
    free_axes = "y"

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.dtype not in (*HALVES, "float32"):
            return f"no tensor core matrix multiplications for {problem.dtype}"
        if problem.dtype == "float32" and problem.math not in ("tf32", "bf16x3"):
            return f"matrix multiplications asked for are {problem.math}"
        return result_refusal(problem) or self._refusal(problem)

    def parts(self, problem: GemmProblem, config: KernelConfig) -> int:
        """How many [2, m] planes of "part" hold the sums of the rows of a weight's gradient."""
        _, bn, _, wn = config.integers("tile")
        return ceil(problem.n / bn) * (bn // wn)

    def threads(self, config: KernelConfig) -> int:
        bm, bn, wm, wn = config.integers("tile")
        return 32 * (bm // wm) * (bn // wn)

    def _macros(self, problem: GemmProblem, config: KernelConfig) -> dict[str, object]:
        bm, bn, wm, wn = config.integers("tile")
        vec = 16 // ITEMSIZE[problem.dtype] if aligned(problem) else 1
        split = problem.dtype == "float32" and problem.math == "bf16x3"
        stages = config.integer("stages")
        tile = {"BM": bm, "BN": bn, "WM": wm, "WN": wn, "BK": 32, "STAGES": stages, "VEC": vec}
        return {**type_defines(problem), **tile, "SPLIT": 3 if split else None}

    def _smem(self, problem: GemmProblem, config: KernelConfig) -> int:
        (bm, bn), size = self.tile(config), ITEMSIZE[problem.dtype]

        def tile(rows: int, contiguous_k: bool) -> int:
            pad = 8 if size == 2 or not contiguous_k else 4
            return (rows * (32 + pad) if contiguous_k else 32 * (rows + pad)) * size

        return config.integer("stages") * (
            tile(bm, not problem.trans_a) + tile(bn, problem.trans_b)
        )

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        every = [
            KernelConfig.of(tile=tile, stages=stages) for tile in MMA_TILES for stages in (4, 2)
        ]
        fit = [how for how in every if self._smem(problem, how) <= hw.smem_per_block]
        return [
            how for how in fit if how.integer("stages") == 4 or how.replace(stages=4) not in fit
        ]

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Tensor-core waves, at the tile's share of the full rate."""
        bm, bn, wm, wn = tile = config.integers("tile")
        kind = "tf32" if problem.dtype == "float32" else problem.dtype
        costs = self.numbers(hw)
        share = MMA_TILES[tile] * (costs["tf32"] if problem.dtype == "float32" else 1.0)
        if hw.cc < 90:
            share = min(1.0, 1.8 * share)  # rates there are mma.sync's own
        if problem.math == "bf16x3" and problem.dtype == "float32":
            share *= costs["bf16x3"]
        per_sm = hw.rate(kind) * share / hw.sm_count
        seconds = tile_seconds(problem, bm, bn, per_sm, hw, costs["step"], 32)
        # one row against 235 MB of weights at 0.69 of a copy's rate (H200, 2026-11)
        seconds = max(seconds, roofline(hw, costs, problem.bytes))
        # results leave one by one, and so do operands come whose lines are not aligned: a time for
        # a wave of 128 x 128, and one for 32 of k (16 bits)
        tiles = ceil(problem.m / bm) * ceil(problem.n / bn) * problem.batches
        waves = ceil(tiles / hw.sm_count)
        if waves > 1:
            seconds += waves * costs["store"] * bm * bn / 128**2
        if problem.dtype != "float32" and not aligned(problem):
            seconds += waves * ceil(problem.k / 32) * costs["ragged"] * (bm + bn) / 256
        return seconds + slope_seconds(problem, wm * wn / 32)
