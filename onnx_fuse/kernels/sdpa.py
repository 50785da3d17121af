"""Sdpa, its masked, causal and grouped relatives, and their gradients: registry ops Sdpa, SdpaGrad.

The Problem: m queries, n keys, k head size, batch (B, H); attrs `dv` value head size, `group` query
heads a key head, `causal`, `guard`, `scale`, strides `q_strides`, `k_strides`, `v_strides` (batch,
head, row) and `mask` (batch, head, row, column; empty: none). Pointers: q k v mask, y lse; SdpaGrad
has dy y lse, dq dk dv, and delta in the workspace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir import FUSE
from onnx_fuse.kernels.gemm_portable import C_TYPES
from onnx_fuse.kernels.reduce import FLOATS, accumulator, defines
from onnx_fuse.llir import Context, Lowering, Tensor
from onnx_fuse.problem import ITEMSIZE, Arg, Config, Hardware, Launch, Num, Problem, Ptr

ROWS, TILE = 64, 32  # of simt.cu


def _operands(p: Problem) -> tuple[Arg, ...]:
    strides = [s for name in "qkv" for s in p.integers(f"{name}_strides")]
    strides += p.integers("mask") or (0, 0, 0, 0)
    scale = p.attr("scale", 1.0)
    assert isinstance(scale, float)
    return (
        *map(Ptr, ("q", "k", "v", "mask")),
        *(Num("i64", s) for s in strides),
        *(Num("i32", n) for n in (p.batch[1], p.integer("group", 1), p.m, p.n)),
        Num("f32", scale),
    )


def _macros(p: Problem) -> dict[str, object]:
    return {
        "T": C_TYPES[p.dtype], "D": p.k, "DV": p.integer("dv"), "MASK": bool(p.attr("mask", ())),
        "CAUSAL": bool(p.attr("causal")), "GUARD": bool(p.attr("guard")),
    }  # fmt: skip


def _flops(p: Problem) -> int:
    """Of both products of the forward; the gradient does three and a half times that."""
    whole = 2 * p.batches * p.m * p.n * (p.k + p.integer("dv"))
    whole = whole // 2 if p.attr("causal") else whole
    return whole * 7 // 2 if p.op == "SdpaGrad" else whole


class _Attention(ABC):
    """What both candidates share: the launches of forward and backward."""

    name: str
    source: str

    @abstractmethod
    def rows(self, config: Config) -> int:
        """Rows of queries (or keys) a block owns."""

    @abstractmethod
    def smem(self, p: Problem, config: Config, entry: str) -> int:
        """Dynamic shared memory of an entry, in bytes."""

    @abstractmethod
    def macros(self, p: Problem, config: Config) -> dict[str, object]:
        """-D macros of the source."""

    @abstractmethod
    def threads(self, config: Config) -> int:
        """Threads a block."""

    def sources(self) -> tuple[str, ...]:
        return (self.source, "sdpa/simt.cu")

    def workspace(self, problem: Problem, config: Config, hw: Hardware) -> int:
        if problem.op == "Sdpa":
            return 0
        size = ITEMSIZE["float64" if problem.dtype == "float64" else "float32"]
        return problem.batches * problem.m * size

    def launch(self, problem: Problem, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        p, macros = problem, defines(**self.macros(problem, config))
        batch, heads = p.batch
        operands, rows = _operands(p), self.rows(config)
        over_queries = (-(-p.m // rows), heads, batch)
        over_keys = (-(-p.n // rows), heads // p.integer("group", 1), batch)
        block = (self.threads(config), 1, 1)

        def one(entry: str, grid: tuple[int, int, int], *more: str) -> Launch:
            arguments = (*operands, *map(Ptr, more))
            smem = self.smem(p, config, entry)
            return Launch(self.source, entry, grid, block, arguments, macros, smem)

        if p.op == "Sdpa":
            return (one("sdpa_forward", over_queries, "y", "lse"),)
        count = p.batches * p.m
        simt = defines(**_macros(p), ACC=accumulator(p.dtype))
        delta = Launch(
            "sdpa/simt.cu", "sdpa_delta", (-(-count // 8), 1, 1), (256, 1, 1),
            (*map(Ptr, ("dy", "y", "workspace")), Num("i64", count)), simt,
        )  # fmt: skip
        return (
            delta,
            one("sdpa_dq", over_queries, "dy", "lse", "workspace", "dq"),
            one("sdpa_dkv", over_keys, "dy", "lse", "workspace", "dk", "dv"),
        )


# (op, masked) -> largest head size -> (row tiles a warp, tile): what registers hold without a spill
_TILES = {
    ("Sdpa", False): (
        (64, ((2, 64), (2, 32), (1, 64))), (128, ((2, 32), (1, 64), (1, 32))), (256, ((1, 32),)),
    ),
    ("Sdpa", True): (
        (64, ((2, 64), (2, 32), (1, 64))), (128, ((1, 64), (1, 32))), (256, ((1, 32),)),
    ),
    ("SdpaGrad", False): ((64, ((2, 32), (1, 64), (1, 32))), (128, ((1, 32),))),
    ("SdpaGrad", True): ((64, ((1, 64), (1, 32))), (128, ((1, 32),))),
}  # fmt: skip


class Mma(_Attention):
    """sdpa/mma_sm80.cu: 16-bit floats on mma.sync."""

    name, source = "mma", "sdpa/mma_sm80.cu"

    def supports(self, problem: Problem, hw: Hardware) -> str | None:
        p = problem
        if p.dtype not in ("float16", "bfloat16"):
            return f"{p.dtype} is no 16-bit float"
        if hw.cc < 80:
            return "mma.sync on bfloat16 needs sm_80"
        if p.k % 8 or p.integer("dv") % 8:
            return f"head sizes {p.k}, {p.integer('dv')}: rows must be of 16-byte pieces"
        if any(s % 8 for name in "qkv" for s in p.integers(f"{name}_strides")):
            return "a stride is not a multiple of 16 bytes"
        return None if self.configs(p, hw) else "the head size is too large for shared memory"

    def configs(self, problem: Problem, hw: Hardware) -> Sequence[Config]:
        grad, wide = problem.op == "SdpaGrad", max(problem.k, problem.integer("dv"))
        tiles = next(
            (t for limit, t in _TILES[problem.op, self.mask(problem) > 0] if wide <= limit), ()
        )
        entries = ("sdpa_dq", "sdpa_dkv") if grad else ("sdpa_forward",)
        found = [Config.of(mt=mt, tile=tile, warps=w) for mt, tile in tiles for w in (4, 2)]
        return [
            c for c in found if max(self.smem(problem, c, e) for e in entries) <= hw.smem_per_block
        ]

    def cost(self, problem: Problem, config: Config, hw: Hardware) -> float:
        # a block's warps cover 16 mt rows each; two row tiles share what they read
        blocks = problem.batches * -(-problem.m // self.rows(config))
        share = (0.30 if config.integer("mt") == 2 else 0.22) - 64 / 10**4 / config.integer("tile")
        alone = config.integer("warps") / 8  # of an SM's rate, where it has one block only
        busy = min(1.0, max(alone, blocks / hw.sm_count * alone))
        padded = blocks * self.rows(config) / (problem.batches * problem.m)
        rate = hw.rate(problem.dtype) * share * busy * min(1.0, blocks / hw.sm_count)
        return hw.launch_seconds + _flops(problem) * padded / rate

    def rows(self, config: Config) -> int:
        return 16 * config.integer("warps") * config.integer("mt")

    def threads(self, config: Config) -> int:
        return 32 * config.integer("warps")

    def smem(self, p: Problem, config: Config, entry: str) -> int:
        d, v = (-(-n // 16) * 16 + 8 for n in (p.k, p.integer("dv")))
        rows, tile = self.rows(config), config.integer("tile")
        own = rows * d if entry == "sdpa_forward" else rows * (d + v)
        high, wide = (tile, rows) if entry == "sdpa_dkv" else (rows, tile)
        mask = self.mask(p) and (1 if self.mask(p) == 2 else high) * (wide + 8)
        return 2 * (own + 2 * tile * (d + v) + 2 * mask)

    def mask(self, p: Problem) -> int:
        """0 none, 1 a row a query, 2 one row for every query."""
        strides = p.integers("mask")
        return 0 if not strides else 1 if strides[2] or p.m == 1 else 2

    def macros(self, p: Problem, config: Config) -> dict[str, object]:
        how = {name.upper(): config.integer(name) for name in ("warps", "mt", "tile")}
        strides = p.integers("mask")
        pieces = strides[-1:] == (1,) and p.n % 8 == 0 and all(s % 8 == 0 for s in strides[:3])
        more = {"FORWARD": p.op == "Sdpa", "MASK": self.mask(p), "MASK_PIECES": pieces}
        return {**_macros(p), **how, **more}


class Simt(_Attention):
    """sdpa/simt.cu: any float type and head size, IEEE products."""

    name, source = "simt", "sdpa/simt.cu"

    def supports(self, problem: Problem, hw: Hardware) -> str | None:
        if problem.dtype not in FLOATS:
            return f"no kernel for {problem.dtype}"
        entries = ("sdpa_dq", "sdpa_dkv") if problem.op == "SdpaGrad" else ("sdpa_forward",)
        need = max(self.smem(problem, Config(), e) for e in entries)
        if need > hw.smem_per_block:
            return f"head size {problem.k} needs {need} bytes of shared memory"
        return None

    def configs(self, problem: Problem, hw: Hardware) -> Sequence[Config]:
        return (Config(),)

    def cost(self, problem: Problem, config: Config, hw: Hardware) -> float:
        rate = hw.rate("float64" if problem.dtype == "float64" else "float32") * 0.25
        blocks = problem.batches * -(-problem.m // ROWS)
        padded = blocks * ROWS / (problem.batches * problem.m)
        rate *= min(1.0, blocks / hw.sm_count)
        return hw.launch_seconds + _flops(problem) * padded / rate

    def rows(self, config: Config) -> int:
        return ROWS

    def threads(self, config: Config) -> int:
        return 256

    def smem(self, p: Problem, config: Config, entry: str) -> int:
        d, v = p.k + 4, p.integer("dv") + 4
        own = ROWS * d if entry == "sdpa_forward" else ROWS * (d + v)
        size = ITEMSIZE["float64" if p.dtype == "float64" else "float32"]
        return size * (own + TILE * (d + v) + ROWS * (TILE + 1))

    def macros(self, p: Problem, config: Config) -> dict[str, object]:
        return {**_macros(p), "ACC": accumulator(p.dtype)}


KERNELS = {"Sdpa": (Mma(), Simt()), "SdpaGrad": (Mma(), Simt())}


# ---- lowering ---------------------------------------------------------------------------------


def _rows(ctx: Context, node: ir.Node, i: int) -> Tensor:
    """Input `i` [B, H, S, D] with contiguous, aligned rows: heads split by a view stay one."""
    x = ctx.view(node, i)
    size = ITEMSIZE[x.dtype]
    aligned = x.offset * size % 16 == 0 and all(s * size % 16 == 0 for s in x.strides[:3])
    return x if x.strides[3] == 1 and aligned else ctx.contiguous(x)


def _problem(
    ctx: Context, node: ir.Node, op: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Problem:
    kind = node.op_type.split("_")[0]
    batch, heads, queries, width = q.shape
    scale = ctx.attr(node, "scale", width**-0.5 if kind == "Attention" else 1.0)
    causal = "Causal" in kind or bool(ctx.attr(node, "is_causal", 0))
    return Problem.of(
        op, m=queries, n=k.shape[2], k=width, batch=(batch, heads), dtype=q.dtype, dv=v.shape[3],
        group=heads // k.shape[1], causal=causal, guard="Guard" in kind,
        scale=float(scale), q_strides=q.strides[:3],
        k_strides=k.strides[:3], v_strides=v.strides[:3],
        mask=() if mask is None else mask.strides,
    )  # fmt: skip


def _mask(ctx: Context, node: ir.Node, i: int, q: Tensor, k: Tensor) -> Tensor | None:
    if not ctx.has(node, i):
        return None
    mask = ctx.view(node, i)
    aligned = mask.offset * ITEMSIZE[mask.dtype] % 16 == 0
    return (mask if aligned else ctx.contiguous(mask)).expand((*q.shape[:3], k.shape[2]))


def sdpa(ctx: Context, node: ir.Node) -> str | None:
    """y = softmax(scale q kᵀ + mask) v, the S x T matrix never in memory."""
    exposed = node.op_type.split("_")[1:]
    if exposed not in ([], ["lse"]):
        return f"it returns {', '.join(exposed)}"
    if len(ctx.view(node, 0).shape) != 4:
        return "its operands are not [B, H, S, D]"
    q, k, v = (_rows(ctx, node, i) for i in range(3))
    mask = _mask(ctx, node, 3, q, k)
    y = ctx.output(node, 0, (*q.shape[:3], v.shape[3]), q.dtype)
    writes = {"y": y}
    if exposed:
        writes["lse"] = ctx.output(node, 1, q.shape[:3], "float32")
    if not prod(y.shape) or not k.shape[2]:
        return "it is empty"
    reads = {"q": q, "k": k, "v": v} | ({"mask": mask} if mask is not None else {})
    return ctx.select(node, _problem(ctx, node, "Sdpa", q, k, v, mask), reads, writes)


def attention(ctx: Context, node: ir.Node) -> str | None:
    """ai.onnx Attention of heads that stand apart, without mask, past or softcap.

    A sliding window becomes a mask known at lowering.
    """
    if len(ctx.view(node, 0).shape) != 4 or any(ctx.has(node, i) for i in range(3, 7)):
        return "it has a mask or a past, or its heads are not apart"
    if any(ctx.wants(node, i) for i in range(1, 4)) or ctx.attr(node, "softcap", 0.0):
        return "it has a softcap, or returns more than the attention"
    q, k, v = (_rows(ctx, node, i) for i in range(3))
    shape = (*q.shape[:3], v.shape[3])
    if not prod(shape) or not k.shape[2] or len({q.dtype, k.dtype, v.dtype}) > 1:
        return "it is empty, or its types differ"
    reads = {"q": q, "k": k, "v": v}
    left, right = (ctx.attr(node, f"{side}_window_size", -1) for side in ("left", "right"))
    if left >= 0 or right >= 0:
        ahead = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]
        seen = (ahead >= -left) if left >= 0 else np.ones_like(ahead, bool)
        seen &= (ahead <= right) if right >= 0 else True
        if ctx.attr(node, "is_causal", 0):
            seen &= ahead <= 0
        if not seen.any(1).all():
            return "a query sees no key through its window"
        low = np.where(seen, 0, -np.inf).astype(q.dtype)
        reads["mask"] = ctx.constant(low).expand((*q.shape[:3], k.shape[2]))
    y = ctx.output(node, 0, shape, q.dtype)
    problem = _problem(ctx, node, "Sdpa", q, k, v, reads.get("mask"))
    if "mask" in reads:
        problem = problem.having(causal=False)
    return ctx.select(node, problem, reads, {"y": y})


def sdpa_grad(ctx: Context, node: ir.Node) -> str | None:
    """dq, dk, dv from dy, y and the saved log-sum-exp."""
    dy, y, lse = (ctx.dense(node, i) for i in range(3))
    q, k, v = (_rows(ctx, node, i) for i in range(3, 6))
    mask = _mask(ctx, node, 6, q, k)
    shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    writes = {n: ctx.output(node, i, s, q.dtype) for i, (n, s) in enumerate(shapes.items())}
    if not (prod(q.shape) and prod(k.shape) and prod(v.shape)):
        return "it is empty"
    reads = {"q": q, "k": k, "v": v, "dy": dy, "y": y, "lse": lse}
    reads |= {"mask": mask} if mask is not None else {}
    return ctx.select(node, _problem(ctx, node, "SdpaGrad", q, k, v, mask), reads, writes)


_NAMES = [
    g + "Sdpa" + kind for g in ("", "Grouped") for kind in ("", "Mask", "MaskGuard", "Causal")
]
LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "Attention"): attention,
    **{(FUSE, name): sdpa for name in _NAMES},
    **{(FUSE, f"{name}Grad"): sdpa_grad for name in _NAMES},
}
