"""The Hopper candidate of attention's gradient by two launches, and all of SdpaGrad's."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_fuse.kernels.rule_based import Plan, Planned
from onnx_fuse.kernels.sdpa import (
    MMA,
    SIMT,
    boxes,
    common_macros,
    mask_boxes,
    reach,
    sequences,
    tma_refusal,
)
from onnx_fuse.kernels.sdpa_grad_joint_sm90 import WgmmaGradJoint
from onnx_fuse.program.contractions import Attention
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import Hardware, KernelConfig

TILE = 64

# largest head size, kind of mask (`SdpaMma.mask`) -> (warpgroups of keys, of queries, the blocks of
# queries on an SM), the fastest first: what registers and shared memory hold without a spill
_CONFIGS = {
    (64, 0): ((2, 2, 2),), (64, 1): ((2, 3, 1),), (64, 2): ((2, 2, 1),),
    (128, 0): ((2, 3, 1), (2, 2, 1)), (128, 1): ((2, 2, 1),), (128, 2): ((2, 2, 1),),
}  # fmt: skip
_SPARSE = (1, 1, 4)  # of short sequences, by which no warpgroup of a block is without rows
_ALONE = {1: 0.7, 2: 0.82, 3: 0.9, 4: 1.0}
"""An SM's rate by the warpgroups on it, in parts of that with four."""


class WgmmaGrad(Planned[Attention]):
    """sdpa/wgmma_grad_sm90.cu: dq, dk, dv in 16-bit floats on Hopper's wgmma and TMA.

    Two launches: the queries' gradients, which leave the sums of dy y, then those of the keys.
    """

    name, source, version, waits = "wgmma", "sdpa/wgmma_grad_sm90.cu", 2, "later"

    def supports(self, problem: Attention, hw: Hardware) -> str | None:
        p = problem
        if reason := tma_refusal(p, hw, ("q", "k", "v", "y", "dy")):
            return reason
        if p.softcap:
            return "a softcap: its slope takes registers that there are not"
        return None if self.configs(p, hw) else "the head size is too large"

    def configs(self, problem: Attention, hw: Hardware) -> Sequence[KernelConfig]:
        wide, mask = max(problem.k, problem.dv), MMA.mask(problem)
        rows = next(
            (rows for (limit, kind), rows in _CONFIGS.items() if wide <= limit and kind == mask), ()
        )
        if problem.packed and wide <= 64 and problem.m <= 128:
            rows = (_SPARSE, *rows)
        return [
            KernelConfig.of(**dict(zip(("keys", "queries", "blocks"), row, strict=True)))
            for row in rows
        ]

    def cost(self, problem: Attention, config: KernelConfig, hw: Hardware) -> float:
        """Four products of keys' tiles and three of queries'; as on an H200."""
        p = problem.typical
        width = sum(-(-n // 64) * 64 for n in (p.k, p.dv))
        # parts of the chip's rate (tiles of 64 columns are narrow), start, and a block's own
        costs, kind = self.numbers(hw), "narrow" if width <= 128 else "wide"
        share, start, each = costs[kind], costs[f"{kind}_start"], costs.get(f"{kind}_block", 0.0)
        seconds = hw.launch_seconds + start + 2 * p.batches * p.m * p.dv / hw.bandwidth
        beside = _ALONE[config.integer("queries") * config.integer("blocks")]
        for length, other, count, products, at_once in (
            (p.n, p.m, config.integer("keys"), 2.0, 2 // config.integer("keys")),
            (p.m, p.n, config.integer("queries"), 1.5 / beside, config.integer("blocks")),
        ):
            rows = -(-length // (64 * count)) * 64 * count
            seen = p.seen(other, 64 * count)
            steps = (other + 64 * count) / 2 if p.causal else -(-seen // 64) * 64
            turns = p.batches * rows / (64 * count) / hw.sm_count
            busy, seconds = min(1.0, turns), seconds + each * max(1.0, turns) / at_once
            work = 2 * p.batches * rows * steps * width * products
            seconds += work / (hw.rate(p.dtype) * share * busy)
        # a mask is loaded for each tile (40 us in place of 25 for BERT's 32 x 128 tokens on an
        # H200, 2026-11)
        return seconds * (costs["mask"] if p.mask else 1.0)

    def plan(self, problem: Attention, config: KernelConfig, hw: Hardware) -> Plan:
        """The gradients of queries, which leave what those of keys and values take: for each query
        of whole tiles what makes its row of logits probabilities.
        """
        queries, keys = (self._gradients(problem, config, keys) for keys in (False, True))
        return queries + keys, problem.batches * self._padded(problem) * self._row(problem)

    def _gradients(self, p: Attention, config: KernelConfig, keys: bool) -> Launches:
        (batch, heads), group = p.batch, p.group
        resident, other = (("k", "v"), ("q", "dy")) if keys else (("q", "dy"), ("k", "v"))
        results = ("dk", "dv") if keys else ("dq", "none")
        count = config.integer("keys" if keys else "queries")
        mask = p.mask or (0, 0, 0, 0)
        made = (
            *(boxes(p, name, 64) for name in resident), *(boxes(p, name, TILE) for name in other),
            *(boxes(p, name, 16) for name in results), mask_boxes(p, TILE if keys else 64),
            *args("mask, i64 by, y, i64 steps, lse workspace, i32 group m n padded, "
                  "f32 scale lowest, f64 fill", p, by=(*mask[:2], mask[3]),
                  steps=p.layout("y")[1], padded=self._padded(p)),
            *reach(p), *sequences(p, *results),
        )  # fmt: skip
        rows, over = (p.n, heads // group) if keys else (p.m, heads)
        grid = (-(-rows // (64 * count)), over, batch)
        macros = common_macros(p) | {"MASK": MMA.mask(p), "WINDOW": bool(p.window) or None}
        return self.one(
            "sdpa_gradients", grid[1:] + grid[:1] if p.packed else grid, 128 * count, *made,
            smem=self._smem(p, config, keys), KEYS=keys, TILE=TILE, WGS=count,
            STAGES=self._stages(p, config), BLOCKS=1 if keys else config.integer("blocks"),
            **macros,
        )  # fmt: skip

    def _stages(self, p: Attention, config: KernelConfig) -> int:
        if config.integer("blocks") > 2:
            return 2
        return 4 if max(p.k, p.dv) <= 64 else 3

    def _padded(self, p: Attention) -> int:
        return -(-p.m // TILE) * TILE

    def _row(self, p: Attention) -> int:
        """Bytes of a row of the workspace."""
        return 12 if p.mask else 8

    def _smem(self, p: Attention, config: KernelConfig, keys: bool) -> int:
        """The owned rows (results leave from there), stages of tiles, mask and rows, barriers."""
        boxes, stages = sum(-(-n // 64) for n in (p.k, p.dv)), self._stages(p, config)
        count = config.integer("keys" if keys else "queries")
        tile = boxes * TILE * 128 + (count * TILE * 128 if MMA.mask(p) == 1 else 0)
        rows = TILE * self._row(p) if keys else 0
        return count * boxes * 8192 + stages * (tile + rows + 16) + 8


KERNELS = {"SdpaGrad": (WgmmaGrad(), WgmmaGradJoint(), MMA, SIMT)}
