"""Candidates of attention (`products.Attention`) and, on any GPU, of its gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, accumulator, defines
from onnx_fuse.kernels.cache_append import cache_macro, row_macros, step_args
from onnx_fuse.kernels.kernel import Kernel, Kernels, apart, launch, rename
from onnx_fuse.kernels.rule_based import Plan, Planned, numbered_tail
from onnx_fuse.program.contractions import Attention, AttentionGrad, CachedAttention
from onnx_fuse.program.launch import Arg, Launch, Launches, Ptr, TensorMap, args
from onnx_fuse.program.problem import FEW, ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.size import any_batch, upper_bound
from onnx_fuse.program.spec import GRID

ROWS, TILE = 64, 32  # of simt.cu


def _operands(p: Attention) -> tuple[Arg, ...]:
    none = (0, 0, 0, 0)
    made = args(
        "q k v mask mask2, i64 q_strides k_strides v_strides by by2, i32 heads group m n, "
        "f32 scale softcap lowest, f64 fill fill2", p,
        by=p.mask or none, by2=p.mask2 or none, heads=p.batch[1],
    )  # fmt: skip
    return (*made, *args("offsets, i32 packed", p)) if p.packed else made


def _strides(p: Attention, name: str) -> tuple[Arg, ...]:
    """(batch, head, row) of "y" or "dy"."""
    return args("i64 strides", strides=p.layout(name)[1])


def boxes(
    p: Attention, name: str, rows: int, shape: tuple[int, ...] = (), strides: tuple[int, ...] = ()
) -> TensorMap:
    """Boxes of `rows` rows and 64 columns of a tensor of [B, H, S, D]; 0 strides: a broadcast."""
    if not shape:
        shape, strides = p.layout(name)
    dtype = p.tail.dtype if name == "y" and p.tail else p.dtype
    size = ITEMSIZE[dtype]
    sizes = tuple(n if s else 1 for n, s in zip(shape, strides, strict=False))
    steps = tuple(s * size if n > 1 else 16 for n, s in zip(sizes, strides, strict=False))
    whole, box = (shape[3], *sizes[::-1]), (64, rows, 1, 1)
    return TensorMap(Ptr(name), dtype, whole, steps[::-1], box, 128 if size > 1 else 0)


def mask_boxes(p: Attention, rows: int) -> TensorMap:
    """Boxes of a mask's rows for 64 keys; of nothing where it has no row a query."""
    strides = (p.mask or (0, 0, 0))[:3]
    return boxes(p, "mask" if MMA.mask(p) == 1 else "none", rows, p.mask_shape, strides)


def half_refusal(p: Attention) -> str | None:
    """Why a kernel of 16-byte pieces of 16-bit floats cannot take a problem; None where it can."""
    if p.dtype not in ("float16", "bfloat16"):
        return f"{p.dtype} is no 16-bit float"
    if p.k % 8 or p.dv % 8:
        return f"head sizes {p.k}, {p.dv}: rows must be of 16-byte pieces"
    if any(s % 8 for name, strides in p.fields().items() if "strides" in name for s in strides):
        return "a stride is not a multiple of 16 bytes"
    return None


def joined_refusal(p: Attention) -> str | None:
    """Why a kernel that writes gradients of their own cannot; None where they are no views."""
    if p.packed or not isinstance(p, AttentionGrad):
        return None
    joined = p.dq_strides or p.dk_strides or p.dv_strides
    return "the gradients are parts of one tensor" if joined else None


def cache_refusal(p: Attention) -> str | None:
    """Why a kernel that knows no steps, sinks and codes cannot; None where there are none."""
    if p.tail:
        return f"it stores {p.tail.dtype}"
    if p.cache:
        return f"keys and values are steps in {p.cache}"
    return "a sink" if p.sink else None


def _narrow(p: Attention) -> str | None:
    """Why a kernel that knows no windows and lengths either cannot; None where there are none."""
    if reason := cache_refusal(p):
        return reason
    if p.lengths:
        return "sequences of lengths of their own"
    return "a window: it takes that for a mask" if p.window else None


UNBOUNDED = 1 << 29


def reach(p: Attention) -> tuple[Arg, ...]:
    """How many keys before and behind its own a query sees, as arguments; none without a window."""
    return args("i32 keys", keys=tuple(n if n >= 0 else UNBOUNDED for n in p.window))


def tma_refusal(p: Attention, hw: Hardware, names: Sequence[str]) -> str | None:
    """Why a kernel on wgmma and TMA cannot take the operands of these names; None where it can."""
    if reason := half_refusal(p):
        return reason
    if hw.cc != 90:
        return "wgmma is sm_90's"
    if reason := cache_refusal(p):
        return reason
    if p.packed and (p.window or (p.mask and (p.op != "Sdpa" or MMA.mask(p) == 2))):
        return "sequences with a window, a mask of one row, or a mask and a gradient"
    if p.mask2:
        return "two masks: it takes one"
    for name in names:
        shape, strides = p.layout(name)
        if any(n > 1 and not 0 < s < 2**39 for s, n in zip(strides, shape[:3], strict=True)):
            return f"{name} is broadcast, or too large for TMA"
    if MMA.mask(p) == 1 and not MMA.macros(p, KernelConfig())["MASK_PIECES"]:
        return "the mask's rows are not of aligned 16-byte pieces"
    return None


def sequences(p: Attention, *results: str) -> tuple[Arg, ...]:
    """Where a kernel on TMA finds sequences, and writes rows of `results`; none if not packed."""
    if not p.packed:
        return ()
    ends = ((Ptr(name), *_strides(p, name)[1:]) for name in results)
    return (*args("offsets, i32 packed", p), *(arg for end in ends for arg in end))


def common_macros(p: Attention) -> dict[str, object]:
    return {
        "T": C_TYPES[p.dtype], "D": p.k, "DV": p.dv,
        "MASK": bool(p.mask), "MASK2": bool(p.mask2),
        "KEEP": p.keep, "KEEP2": p.keep2,
        "SOFTCAP": p.softcap != 0, "CAUSAL": p.causal, "PACKED": p.packed != 0,
        "GUARD": p.guard, "FLOOR": p.lowest != 0,
    }  # fmt: skip


class _Attention(Planned[Attention], ABC):
    """What both candidates share: the launches of forward and backward."""

    source: str

    @abstractmethod
    def rows(self, config: KernelConfig) -> int:
        """Rows of queries (or keys) a block owns."""

    @abstractmethod
    def smem(self, p: Attention, config: KernelConfig, entry: str) -> int:
        """Dynamic shared memory of an entry, in bytes."""

    @abstractmethod
    def macros(self, p: Attention, config: KernelConfig) -> dict[str, object]:
        """-D macros of the source."""

    @abstractmethod
    def threads(self, config: KernelConfig) -> int:
        """The number of threads of a block."""

    def plan(self, problem: Attention, config: KernelConfig, hw: Hardware) -> Plan:
        p, macros = problem, self.macros(problem, config)
        rows, threads = self.rows(config), self.threads(config)
        grad = p.op == "SdpaGrad"
        arguments = (*_operands(p), *map(Ptr, ("dy",) * grad))
        strides = _strides(p, "dy" if grad else "y")

        def each(entry: str, tall: int, group: int, *more: str) -> list[Launch]:
            smem = self.smem(p, config, entry)
            made = (*arguments, *map(Ptr, more), *strides)
            parts = [name for name in more if p.packed and name in ("dq", "dk", "dv")]
            made = (*made, *(arg for name in parts for arg in _strides(p, name)))
            launches = []
            for size, at in parts_of_batch(p):
                grid = (-(-tall // rows), size[1] // group, size[0])
                (one,) = self.one(entry, grid, threads, *made, smem=smem, **macros)
                launches.append(rename(one, at) if at else one)
            return launches

        if not grad:
            return tuple(each("sdpa_forward", p.m, 1, "y", "lse")), 0
        count, queries = p.rows, p.packed or p.m
        delta = launch(
            "sdpa/simt.cu", "sdpa_delta", -(-count // 8), 256,
            *args("dy y workspace, i64 count, i32 heads queries", p, count=count, heads=p.batch[1],
                  queries=queries),
            *_strides(p, "dy"), *_strides(p, "y"), **common_macros(p), ACC=accumulator(p.dtype),
        )  # fmt: skip
        dq = each("sdpa_dq", p.m, 1, "lse", "workspace", "dq")
        dkv = each("sdpa_dkv", p.n, p.group, "lse", "workspace", "dk", "dv")
        return (delta, *dq, *dkv), count * (8 if p.dtype == "float64" else 4)


def parts_of_batch(p: Attention) -> list[tuple[tuple[int, int], dict[str, Ptr]]]:
    """The batch in parts of (B, H) that the y and z axes of a grid have room for, and where the
    operands of each begin. A part has whole groups of heads.
    """
    batch, heads = p.batch
    if batch <= GRID[2] and heads <= GRID[1]:
        return [((batch, heads), {})]
    size = ITEMSIZE[p.dtype]
    names = ("q", "k", "v", "y", "dq", "dk", "dv", *(("dy",) if p.op == "SdpaGrad" else ()))
    strides = {name: p.layout(name)[1] for name in names}
    strides |= {name: by for name, by in (("mask", p.mask), ("mask2", p.mask2)) if by}
    steps = {name: (by[0] * size, by[1] * size) for name, by in strides.items()}
    for name, wide in (("lse", 8), ("workspace", 8 if p.dtype == "float64" else 4)):
        steps[name] = (p.m * heads * wide, p.m * wide)
    shared = {"k", "v", "dk", "dv"}  # by the heads of a group
    parts = []
    most = max(1, GRID[1] // p.group) * p.group
    for b in range(0, batch, GRID[2]):
        for h in range(0, heads, most):
            place = {
                name: b * over + (h // p.group if name in shared else h) * each
                for name, (over, each) in steps.items()
            }
            part = min(GRID[2], int(batch) - b), min(most, int(heads) - h)
            parts.append((part, {name: Ptr(name, at) for name, at in place.items()}))
    return parts


# (op, masked) -> largest head size -> (row tiles a warp, tile, warps, split, stages, blocks an SM):
# what registers hold without a spill
_SPLIT = (1, 32, 4, 1, 2, 1)
_NARROW = ((2, 32, 4, 0, 2, 3), (1, 64, 4, 0, 2, 4), _SPLIT)
_WIDE = ((1, 32, 4, 0, 2, 1), _SPLIT)
_HUGE = ((1, 32, 4, 0, 2, 1), (1, 32, 2, 0, 2, 1))
_GRAD = ((1, 64, 4), (1, 64, 2), (1, 32, 4), (1, 32, 2))
_TILES = {
    ("Sdpa", False): ((64, _NARROW), (128, ((2, 32, 4, 0, 2, 1), *_WIDE)), (256, _HUGE)),
    ("Sdpa", True): ((64, _NARROW), (128, _WIDE), (256, _HUGE)),
    ("SdpaGrad", False): (
        (64, ((2, 32, 4), (2, 32, 2), *_GRAD)), (128, ((1, 32, 4), (1, 32, 2))),
    ),
    ("SdpaGrad", True): ((64, _GRAD), (128, ((1, 32, 4), (1, 32, 2)))),
}  # fmt: skip
_FIELDS = ("mt", "tile", "warps", "split", "stages", "blocks")


SINGLE = 2e-12
"""A logit's share of a mask that is read by single elements: windows of 49 tokens (1024 x 3 heads
of 32) took 18 us, and 64 with two masks (H200, 2026-11)."""


_UNEVEN = {"Sdpa": 1.3, "SdpaGrad": 2.0}
"""What sequences of other lengths take of the time of as many alike: 9.4 us of 7.5 and 35 of 15 for
2,048 tokens in 32, 90 of 51 for the gradient of 2,800 in 8 (H200, 2026-11)."""


class SdpaMma(_Attention):
    """sdpa/mma_sm80.cu: 16-bit floats on mma.sync."""

    name, source = "mma", "sdpa/mma_sm80.cu"

    def supports(self, problem: Attention, hw: Hardware) -> str | None:
        if reason := half_refusal(problem) or joined_refusal(problem) or _narrow(problem):
            return reason
        return None if self.configs(problem, hw) else "the head size is too large for shared memory"

    def configs(self, problem: Attention, hw: Hardware) -> Sequence[KernelConfig]:
        grad, wide = problem.op == "SdpaGrad", max(problem.k, problem.dv)
        more = self.mask(problem) > 0 or problem.softcap != 0 or (grad and problem.packed != 0)
        tiles = next((t for limit, t in _TILES[problem.op, more] if wide <= limit), ())
        entries = ("sdpa_dq", "sdpa_dkv") if grad else ("sdpa_forward",)
        if grad and wide > 64 and problem.mask2:
            tiles = ((1, 16, 4), (1, 16, 2))
        ways = [KernelConfig.of(**dict(zip(_FIELDS, tile, strict=False))) for tile in tiles]
        return [
            c for c in ways if max(self.smem(problem, c, e) for e in entries) <= hw.smem_per_block
        ]

    def cost(self, problem: Attention, config: KernelConfig, hw: Hardware) -> float:
        p, rows, mt = problem.typical, self.rows(config), config.integer("mt")
        blocks = p.batches * -(-p.m // rows)
        padded = blocks * rows / (p.batches * p.m) * (_UNEVEN[p.op] if problem.packed else 1.0)
        if p.op == "Sdpa":
            return hw.launch_seconds + self._forward(p, config, hw, padded)
        # a block's warps cover 16 mt rows each; two row tiles share what they read
        share = (0.30 if mt == 2 else 0.22) - 64 / 10**4 / config.integer("tile")
        alone = config.integer("warps") / 8  # of an SM's rate, where it has one block only
        busy = min(1.0, max(alone, blocks / hw.sm_count * alone))
        rate = hw.rate(p.dtype) * share * busy * min(1.0, blocks / hw.sm_count)
        return hw.launch_seconds + p.flops * padded / rate

    def _forward(self, p: Attention, config: KernelConfig, hw: Hardware, padded: float) -> float:
        """One block's walk over the keys, or all blocks' products and reads; as on an H200."""
        mt, split, rows = config.integer("mt"), config.integer("split"), self.rows(config)
        width, tiles = p.k + p.dv, -(-p.m // rows)
        steps = p.n / (config.integer("warps") if split else 1)
        alone = (0.6e-6 if split else 1.3e-6) + steps * 17e-9 * mt * width / 128
        share = 0.105 if split else (0.23 if width <= 128 else 0.28 + 0.03 * mt)
        cut = 1 + rows / p.n if p.causal else 1.0  # what the diagonal's blocks do in vain
        read = 2 * p.batches * width * (p.m + p.n * tiles)
        tile = config.integer("tile")  # a whole one is computed for the last keys
        cut *= 1.0 if split or p.m <= FEW else -(-p.n // tile) * tile / p.n
        together = p.flops * padded * cut / (hw.rate(p.dtype) * share) + 0.1 * read / hw.bandwidth
        masks = bool(p.mask) + bool(p.mask2)
        if masks and not self.macros(p, config)["MASK_PIECES"]:
            together += masks * SINGLE * p.batches * p.m * padded * -(-p.n // tile) * tile
        return max(alone, together)

    def rows(self, config: KernelConfig) -> int:
        warps = 1 if config.integer("split") else config.integer("warps")
        return 16 * config.integer("mt") * warps

    def threads(self, config: KernelConfig) -> int:
        return 32 * config.integer("warps")

    def smem(self, p: Attention, config: KernelConfig, entry: str) -> int:
        d, v = (-(-n // 16) * 16 + 8 for n in (p.k, p.dv))
        rows, tile, warps = self.rows(config), config.integer("tile"), config.integer("warps")
        high, wide = (tile, rows) if entry == "sdpa_dkv" else (rows, tile)
        mask = sum(
            (1 if kind == 2 else high) * (wide + 8)
            for kind in (self.mask(p), self.mask(p, "mask2"))
            if kind
        )
        if entry != "sdpa_forward":
            return 2 * (rows * (d + v) + 2 * tile * (d + v) + 2 * mask)
        teams = warps if config.integer("split") else 1
        tiles = 2 * teams * (rows * d + config.integer("stages") * (tile * (d + v) + mask))
        return max(tiles, teams * rows * (v - 4) * 4 if teams > 1 else rows * v * 2)

    def mask(self, p: Attention, name: str = "mask") -> int:
        """0 none, 1 a row a query, 2 one row for every query."""
        strides = p.mask if name == "mask" else p.mask2
        return 0 if not strides else 1 if strides[2] or p.m == 1 else 2

    def macros(self, p: Attention, config: KernelConfig) -> dict[str, object]:
        how = {name.upper(): value for name, value in config.attrs}
        masks = p.mask, p.mask2
        pieces = masks[0] != () and all(
            strides[-1:] == (1,) and p.n % 8 == 0 and all(s % 8 == 0 for s in strides[:3])
            for strides in masks
            if strides
        )
        more: dict[str, object] = {"FORWARD": p.op == "Sdpa", "MASK_PIECES": pieces}
        more |= {"MASK": self.mask(p), "MASK2": self.mask(p, "mask2")}
        return {**common_macros(p), **how, **more}


# largest head size -> ((fewest, most keys), (warpgroups, rounds, tile, stages, pingpong, blocks an
# SM)): what registers hold without a spill, and what was fastest on an H200
_ANY = 1 << 40
_WIDTHS = (32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 256)  # of the second product
_PROMPT = (65, 80)  # keys of one tile, as the 77 tokens of a prompt
_SHORT = (  # of heads up to 64, against keys of one tile
    *((_PROMPT, (wgs, rounds, 80, 1, 0, blocks))
      for wgs, rounds, blocks in ((2, 1, 2), (1, 2, 4), (1, 1, 4))),
    *(((low, most), (wgs, rounds, most, 1, 0, blocks)) for low, most in ((1, 64), (65, 128))
      for wgs, rounds, blocks in ((2, 1, 2), (1, 2, 3), (1, 1, 4))),
)  # fmt: skip
_ALONE, _PAIR = ((129, _ANY), (1, 1, 128, 2, 0, 3)), ((129, _ANY), (2, 1, 128, 2, 1, 1))
_THREE = ((129, _ANY), (3, 1, 128, 2, 0, 1))
_SPARSE = (  # of sequences that end early: fewer keys in vain, or most blocks on an SM
    ((65, _ANY), (1, 1, 64, 2, 0, 4)), ((65, 128), (1, 1, 128, 1, 0, 5)),
)  # fmt: skip
_HOPPER: dict[int, tuple[tuple[tuple[int, int], tuple[int, ...]], ...]] = {
    32: (*_SHORT, _ALONE),
    48: ((_PROMPT, (2, 2, 80, 1, 0, 2)), *_SHORT, _THREE, _PAIR, _ALONE),
    64: (*_SHORT, _ALONE),
    80: ((_PROMPT, (1, 1, 80, 1, 0, 3)), ((1, 128), (1, 1, 128, 1, 0, 2)), _PAIR),
    128: (((1, 128), (1, 1, 128, 1, 0, 2)), _PAIR),
    160: (
        (_PROMPT, (1, 1, 80, 1, 0, 2)),
        ((81, 512), (1, 1, 64, 2, 0, 1)),
        ((65, _ANY), (2, 1, 64, 2, 1, 1)),
    ),
    256: (((65, _ANY), (2, 1, 64, 2, 1, 1)),),
}  # fmt: skip


class Wgmma(Kernel[Attention]):
    """sdpa/wgmma_sm90.cu: the forward in 16-bit floats on Hopper's wgmma and TMA."""

    name, source, version, waits = "wgmma", "sdpa/wgmma_sm90.cu", 2, "later"
    early = defines(NEXT_ALONE=1)

    def supports(self, problem: Attention, hw: Hardware) -> str | None:
        p = problem
        if reason := tma_refusal(replace(p, tail=None), hw, ("q", "k", "v", "y")):
            return reason
        if p.tail and (p.dv % 16 or any(s % 16 for s in p.layout("y")[1])):
            return "rows of codes must be of 16-byte pieces"
        if p.m == 1:  # and a cache of any length is then of one kind; `lengths` too
            return "one query leaves its tile empty"
        if p.lengths and (p.causal or p.mask or (p.window and p.window[1])):
            return "lengths with another mask"
        if p.scale <= 0:
            return "the largest product is the largest logit for positive scales only"
        return None if self.configs(p, hw) else "the head size is too large, or the keys too few"

    def configs(self, problem: Attention, hw: Hardware) -> Sequence[KernelConfig]:
        p, wide = problem, max(problem.k, problem.dv)
        names = ("wgs", "rounds", "tile", "stages", "pingpong", "blocks")
        tiles = next((tiles for limit, tiles in _HOPPER.items() if wide <= limit), ())
        if p.packed and wide <= 64:
            tiles += _SPARSE[: 1 if p.causal else 2]  # five causal blocks have too few registers
        configs = [
            KernelConfig.of(**dict(zip(names, tile, strict=True)))
            for (fewest, most), tile in tiles
            # the boxes of a mask are of 64 keys; queries that are the keys would be parted into
            # one more class of lengths
            if not (tile[2] % 64 and (p.mask or p.m == p.n)) and fewest <= p.n <= most
            # a mask's row takes registers that three warpgroups, or blocks of sequences, lack
            if not p.mask or (tile[0] < 3 and not (p.packed and tile[5] == 3))
            # all warpgroups come to the end of the keys at once
            if tile[1] == 1 or not (p.lengths or p.packed)
        ]
        # both take more registers than a third block leaves
        if (p.keep and MMA.mask(p) == 2) or ((p.lengths or p.packed) and p.softcap):
            configs = [c.replace(blocks=min(c.integer("blocks"), 2)) for c in configs]
        return [c for c in configs if self.smem(p, c) <= hw.smem_per_block]

    def cost(self, problem: Attention, config: KernelConfig, hw: Hardware) -> float:
        """Tiles of queries by tiles of keys, then what is read once and again; as on an H200."""
        p, tile, most = problem.typical, config.integer("tile"), config.integer("blocks")
        row_tiles = config.integer("wgs") * config.integer("rounds")
        high = -(-p.m // (64 * row_tiles))
        blocks, width = p.batches * high, p.k + p.dv
        # a tile's products, and its exponentials at 16 a clock
        columns = -(-p.k // 16) * 16 + next((n for n in _WIDTHS if p.dv <= n), p.dv)
        one = 64 * tile * (2 * columns * hw.sm_count / hw.rate(p.dtype) + 1 / 30e9)
        one *= 1.6 if width > 256 else 1.1 if p.n > tile and p.causal else 1.0
        triangle = p.causal or p.lengths
        keys = (p.n + 64 * row_tiles) / 2 if triangle else p.seen(p.n, 64 * row_tiles + tile)
        waves = blocks / (hw.sm_count * most)
        waves = -(-blocks // hw.sm_count) / most if waves <= 1 else max(2.0, waves)
        if waves > 1 and config.integer("wgs") * most == 1:
            one *= 1.4  # nothing runs beside its softmax
        # TMA loads a row of keys in so many clocks, be it full or not, and the tiles of a block
        # share it: heads of 40 took 276 us with one tile, 160 with two, 148 with three
        if p.n > tile and 32 < max(p.k, p.dv) < 64:
            one *= {1: 1.9, 2: 1.15}.get(row_tiles, 1.05)
        tiles = max(1.0, keys / tile)
        chain = config.integer("rounds") * (1.5 * tiles - 0.7) * one  # of one warpgroup
        products = max(chain, waves * most * row_tiles * tiles * one)
        once, again = (2 * p.batches * width * (p.m + p.n * n) / hw.bandwidth for n in (1, high))
        seconds = hw.launch_seconds + 1e-7 + products + 0.8 * once + 0.05 * again
        # a few queries leave its tile empty, and mma.sync then serves a cache of any length alike
        return 4 * seconds if p.m <= FEW else seconds

    def smem(self, p: Attention, config: KernelConfig) -> int:
        """Queries (results leave from there), then stages of keys, values and mask, barriers."""
        d, v = (-(-n // 64) for n in (p.k, p.dv))
        tile, stages = config.integer("tile"), config.integer("stages")
        tiles = config.integer("wgs") * config.integer("rounds")
        mask = (0, tiles * tile * 128, tile * 4)[MMA.mask(p)]
        return tiles * max(d, v) * 8192 + stages * ((d + v) * tile * 128 + mask + 32) + tiles * 8

    def launch(self, problem: Attention, config: KernelConfig, hw: Hardware) -> Launches:
        p, (batch, heads) = problem, problem.batch
        wgs, tile = config.integer("wgs"), config.integer("tile")
        tiles, one = wgs * config.integer("rounds"), p.n <= tile
        loaded = tile if not p.packed else 32 if one else 64  # rows of a box of keys

        strides = p.mask or (0, 0, 0, 0)
        made: tuple[Arg, ...] = (
            boxes(p, "q", 64), boxes(p, "k", loaded), boxes(p, "v", loaded), boxes(p, "y", 16),
            mask_boxes(p, 64),
            *args("mask, i64 by, v, i64 v_strides, lse, i32 group m n, f32 scale softcap lowest, "
                  "f64 fill", p, by=(*strides[:2], strides[3])),
            *(reach(replace(p, window=p.window or (-1, 0))) if p.lengths else reach(p)),
            *((Ptr("lengths"),) if p.lengths else ()), *sequences(p, "y"),
        )  # fmt: skip
        numbers, of_tail = numbered_tail(p.tail) if p.tail else ([], {})
        how = {name.upper(): value for name, value in config.attrs}
        macros = common_macros(p) | how | of_tail | {
            "MASK": MMA.mask(p), "ONE": one, "WINDOW": bool(p.window or p.lengths) or None,
            "LENGTHS": p.lengths or None, "LOADED": loaded if p.packed else None,
        }  # fmt: skip
        grid = (-(-p.m // (64 * tiles)), heads, batch)
        loaders = 0 if wgs == 1 or one else 128  # INLINE in the source
        smem = self.smem(p, config)
        grid = grid[1:] + grid[:1] if p.packed else grid
        return self.one(
            "sdpa_wgmma", grid, 128 * wgs + loaders, *made, *numbers, smem=smem, **macros
        )


class Simt(_Attention):
    """sdpa/simt.cu: any float type and head size, IEEE products."""

    name, source, version = "simt", "sdpa/simt.cu", 2

    def supports(self, problem: Attention, hw: Hardware) -> str | None:
        if problem.dtype not in FLOATS:
            return f"no kernel for {problem.dtype}"
        if reason := joined_refusal(problem) or _narrow(problem):
            return reason
        entries = ("sdpa_dq", "sdpa_dkv") if problem.op == "SdpaGrad" else ("sdpa_forward",)
        need = max(self.smem(problem, KernelConfig(), e) for e in entries)
        if need > hw.smem_per_block:
            return f"head size {problem.k} needs {need} bytes of shared memory"
        return None

    def configs(self, problem: Attention, hw: Hardware) -> Sequence[KernelConfig]:
        return (KernelConfig(),)

    def cost(self, problem: Attention, config: KernelConfig, hw: Hardware) -> float:
        rate = hw.rate("float64" if problem.dtype == "float64" else "float32") * 0.35
        p = problem.typical
        blocks = p.batches * -(-p.m // ROWS)
        padded = blocks * ROWS / (p.batches * p.m)
        flops, each = p.flops * padded, rate / hw.sm_count
        last = 2 * flops / blocks / each if p.causal else 0.0  # the longest block comes last
        return hw.launch_seconds + flops / (rate * min(1.0, blocks / hw.sm_count)) + last

    def rows(self, config: KernelConfig) -> int:
        return ROWS

    def threads(self, config: KernelConfig) -> int:
        return 256

    def smem(self, p: Attention, config: KernelConfig, entry: str) -> int:
        d, v = p.k + 4, p.dv + 4
        lines = ROWS * d if entry == "sdpa_forward" else ROWS * (d + v)
        size = ITEMSIZE["float64" if p.dtype == "float64" else "float32"]
        return size * (lines + TILE * (d + v) + ROWS * (TILE + 1))

    def macros(self, p: Attention, config: KernelConfig) -> dict[str, object]:
        return {**common_macros(p), "ACC": accumulator(p.dtype)}


class OneQuery(Kernel[Attention]):
    """sdpa/one_query.cu: the forward of one query in 16-bit floats, keys shared by a cluster."""

    name, source, version, waits = "one_query", "sdpa/one_query.cu", 7, "later"

    def supports(self, problem: Attention, hw: Hardware) -> str | None:
        p = problem
        if p.packed or p.m != 1 or p.tail:
            return "for one query a sequence, of floats"
        if isinstance(p, CachedAttention):
            append, p = p.parts
            if p.guard == 2:
                return "it reads a row of the cache that is being written"
            if any(s % 8 for s in (*append.q_strides, *append.k_strides, *append.v_strides)):
                return "a stride is not a multiple of 16 bytes"
            if append.half * (2 if append.interleaved else 1) % 8:
                return "its angles are not those of whole 16-byte pieces"
        if p.lengths and (p.causal or p.mask2 or (p.window and p.window[1])):
            return "lengths with another mask"
        plain = replace(p, lengths=False, window=()) if p.lengths else p
        if (p.cache or p.sink) and p.guard == 2:
            return "rows whose weights are no numbers, and steps or a sink"
        if reason := MMA.supports(replace(plain, cache="", sink=False), hw):
            return reason
        if p.k != p.dv or p.k not in (8, 16, 32, 64, 128, 256):
            return f"head sizes {p.k}, {p.dv}: lanes share a row, a power of two of them"
        return None

    def configs(self, problem: Attention, hw: Hardware) -> Sequence[KernelConfig]:
        """Warps of a block, blocks that share keys, heads of a block."""
        heads = max(n for n in range(1, 9) if problem.group % n == 0)
        shared = [{"cluster": n} for n in (1, 2, 4, 8)] if hw.cc >= 90 else [{}]
        ways = [(warps, cluster) for warps in (1, 2, 4, 8) for cluster in shared]
        configs = [KernelConfig.of(warps=warps, heads=heads, **cluster) for warps, cluster in ways]
        fitting = [c for c in configs if self._smem(problem, c) <= hw.smem_per_block // 2]
        return [c for c in fitting if c.integer("warps") >= 4] or fitting

    def fits(self, problem: Attention, config: KernelConfig) -> bool:
        """Whether half of the multiprocessors have blocks, keys are few, or no more can share."""
        if config.integer("cluster") in (0, 8) or problem.n <= 32 * self._parts(config):
            return True
        return any_batch(self._blocks(problem, config)) >= 60

    def _blocks(self, problem: Attention, config: KernelConfig) -> int:
        return (config.integer("cluster") or 1) * problem.batches // config.integer("heads")

    def _spread(self, problem: Attention, config: KernelConfig) -> int:
        """The blocks, and the multiprocessors that clusters leave: they fit into 14 to 18 each."""
        blocks = self._blocks(problem, config)
        return blocks * 7 // 6 if config.integer("cluster") > 2 else blocks

    def _parts(self, config: KernelConfig) -> int:
        return config.integer("warps") * (config.integer("cluster") or 1)

    def _smem(self, problem: Attention, config: KernelConfig) -> int:
        """A ring of keys and values for each warp, and what warps hand to the block that merges."""
        slots = -(-config.integer("heads") // (config.integer("cluster") or 1))
        pieces = 32 * (2 * ceil(problem.k / 32) + 4 * ceil(problem.k / 64))
        ring = 8 * ITEMSIZE[problem.cache_dtype] * pieces * 2 * config.integer("warps")
        return ring + slots * self._parts(config) * (problem.k + 4) * 4

    def cost(self, problem: Attention, config: KernelConfig, hw: Hardware) -> float:
        """Turns of 16 keys of a warp, or the bytes; what blocks begin and end with.

        Fitted to 190 timings within tokens of decoders on an H200 (2026-11). A cache of `lengths`
        is taken to be half full; a new row of it waits for its angles.
        """
        p, warps, cluster = problem, config.integer("warps"), config.integer("cluster") or 1
        keys = ceil(p.n / 2) if p.lengths else p.n
        turns = ceil(keys / (16 * self._parts(config)))
        blocks = ceil(self._spread(p, config) / hw.sm_count)
        room = max(1, min(17 // warps, hw.smem_per_block // (self._smem(p, config) + 1024)))
        busy = warps * min(room, blocks)
        turn = (0.5 + p.k / 128) * (1.7e-7 + 6.2e-8 * busy)
        numbers = 2 * p.batches // p.group * keys * p.k / hw.bandwidth
        stream = 1.3 * ITEMSIZE[p.cache_dtype] * numbers * (1 + 2 / busy)
        again = 0.39 * ITEMSIZE[p.dtype] * numbers * (p.group / config.integer("heads") - 1)
        begun = 2.2e-6 + 1e-7 * (warps + cluster.bit_length()) + 1.2e-6 * (blocks - 1)
        begun += 3e-7 * isinstance(p, CachedAttention)
        return begun + max(turns * turn * ceil(blocks / room), stream) + again

    def launch(self, problem: Attention, config: KernelConfig, hw: Hardware) -> Launches:
        p, cluster = problem, config.integer("cluster") or 1
        batch, heads = p.batch
        how = {"CLUSTER": 1, **{name.upper(): value for name, value in config.attrs}}
        made = (*_operands(p), *args("y lse"), *_strides(p, "y"))
        if p.lengths:
            left = p.window[0] if p.window else UNBOUNDED
            made = (*made, *args("lengths, i32 left", left=left))
        if isinstance(p, CachedAttention) and (append := p.append):
            made = (*made, *args(
                "new_key new_value lengths cos sin q_scale k_scale positions present_key "
                "present_value, i64 kb kh vb vh, i32 context, f32 epsilon", append,
                kb=append.k_strides[0], kh=append.k_strides[1],
                vb=append.v_strides[0], vh=append.v_strides[1],
            ))  # fmt: skip
            how |= {"APPEND": 1, "KEEP_PAST": append.keep, **row_macros(append)}
        made += (*step_args(p), *(args("sink") if p.sink else ()))
        smem = max(self._smem(p, config), apart(self._spread(p, config), hw))
        return self.one(
            "sdpa_one_query", (cluster, heads // config.integer("heads"), batch),
            32 * config.integer("warps"), *made, smem=smem, cluster=cluster,
            **common_macros(p), **how, **cache_macro(p), LENGTHS=p.lengths or None,
            SINK=p.sink or None,
        )  # fmt: skip


class Direct(Kernel[Attention]):
    """sdpa/direct_sm80.cu: the forward of few keys in 16-bit floats, nothing staged."""

    name, source = "direct", "sdpa/direct_sm80.cu"
    KEYS = 256
    """The most keys: a warp holds two steps of 16 in registers, and rescales for two more."""

    def supports(self, problem: Attention, hw: Hardware) -> str | None:
        p = problem
        if hw.cc != 90:
            return "it was measured only on sm_90"
        if reason := half_refusal(p) or _narrow(p):
            return reason
        if p.packed and p.mask:
            return "a mask of sequences, which may end within two of its elements"
        if (p.k, p.dv) != (64, 64):
            return f"heads of {p.k} and {p.dv} numbers, not of 64"
        if p.mask2:
            return "two masks: it takes one"
        if upper_bound(p.m) <= FEW:
            return "few queries leave its warps empty, and may have keys of any number"
        if upper_bound(p.n) > self.KEYS:
            return f"{p.n} keys (at most {self.KEYS})"
        steps = [p.layout(name)[1][2] for name in "qkv"] + list(p.mask[3:])
        if any(step >= 1 << 30 for step in steps):
            return f"strides of {steps}: they are 31 bits"
        return None

    def configs(self, problem: Attention, hw: Hardware) -> Sequence[KernelConfig]:
        """Tiles of 16 queries a block, and the warps that share a tile's keys."""
        return [KernelConfig.of(tiles=tiles, sharers=4) for tiles in (1, 2)]

    def cost(self, problem: Attention, config: KernelConfig, hw: Hardware) -> float:
        """What gives each shape of BERT-base on an H200 its fastest kernel (docs/kernel-notes.md).

        One tile a block where all keys are one step of its warps, two where they are many.
        """
        p, tiles = problem.typical, config.integer("tiles")
        share = p.batches * -(-p.m // (16 * tiles)) / hw.sm_count
        if tiles == 1:
            more = 0.0 if p.n <= 64 else 0.6e-6 + 15e-9 * (p.n - 64)
            seconds = 0.2e-6 + 0.55e-6 * share + more
        else:
            seconds = 0.95e-6 + 0.2e-6 * share + 4e-9 * max(0, p.n - 128)
        return hw.launch_seconds + seconds + (1e-6 * share if share > 1 else 0.0)

    def launch(self, problem: Attention, config: KernelConfig, hw: Hardware) -> Launches:
        p, (batch, heads) = problem, problem.batch
        tiles, sharers = config.integer("tiles"), config.integer("sharers")
        how = {
            "TILES": tiles, "SHARERS": sharers, "CHUNKS": -(-upper_bound(p.n) // (16 * sharers)),
            "MASK": MMA.mask(p), "MASK_PIECES": MMA.macros(p, KernelConfig())["MASK_PIECES"],
            "GROUPED": p.group > 1,
        }  # fmt: skip
        made = (*_operands(p), *args("y lse"), *_strides(p, "y"))
        grid, macros = (-(-p.m // (16 * tiles)), heads, batch), {**common_macros(p), **how}
        return self.one("sdpa_direct", grid, 32 * sharers * tiles, *made, **macros)


MMA, SIMT, ONE_QUERY = SdpaMma(), Simt(), OneQuery()
KERNELS: Kernels = {
    "Sdpa": (Wgmma(), ONE_QUERY, Direct(), MMA, SIMT),
    "CachedAttention": (ONE_QUERY,),
}
