"""The Hopper candidate of attention's gradient that makes its logits once."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_fuse.kernels.rule_based import Plan, Planned
from onnx_fuse.kernels.sdpa import boxes, common_macros, sequences, tma_refusal
from onnx_fuse.program.contractions import Attention
from onnx_fuse.program.launch import Ptr, TensorMap, args
from onnx_fuse.program.problem import Hardware, KernelConfig
from onnx_fuse.program.size import minimum

TILE, KEYS, LONGEST = 64, 128, 2048
_STAGES = 4
_SMEM = 2 * 32768 + 2 * 16384 + _STAGES * 16384 + 8 * 4096 + 128 + LONGEST * 8
_PACKED_SMEM = _SMEM + _STAGES * 8192 - LONGEST * 8 + KEYS * 16 + 16
"""Two blocks of keys and values, two tiles of dS, stages of queries and dy, parts of dq on their
way, barriers and the rows' numbers: of the most rows, for a block fills a multiprocessor anyway.
Of packed sequences stages have y, too, and two heads their rows' numbers and ends."""
_PART = TILE // 4 * 64 * 4
"""Bytes of a warp's part of a tile of dq's sums."""


class WgmmaGradJoint(Planned[Attention]):
    """sdpa/wgmma_grad_joint_sm90.cu: dq, dk, dv in 16-bit floats by five products a tile.

    `split` blocks of a cluster share the keys of a head; clusters take one head after another.
    """

    name, source, waits = "wgmma_joint", "sdpa/wgmma_grad_joint_sm90.cu", "later"
    version = 2

    def supports(self, problem: Attention, hw: Hardware) -> str | None:
        p = problem
        if reason := tma_refusal(p, hw, ("q", "k", "v", "y", "dy")):
            return reason
        if p.softcap or p.mask or p.window:
            return "a mask, a window or a softcap: they take registers that there are not"
        if p.packed and p.n > KEYS:
            return f"sequences one behind the other, of more than {KEYS} rows"
        if p.group > 1:
            return "queries' heads share keys, whose gradients it keeps for one"
        if min(p.k, p.dv) < 32 or max(p.k, p.dv) > 64:
            return "the head size is not from 32 to 64"
        if p.m > LONGEST:
            return f"shared memory has room for the rows of {LONGEST} queries"
        if p.causal and p.n > p.m:
            return "causal, with keys after the last query"
        return None

    def configs(self, problem: Attention, hw: Hardware) -> Sequence[KernelConfig]:
        """So many blocks a head, where each has keys."""
        return [KernelConfig.of(split=n) for n in (1, 2, 4) if n == 1 or problem.n > KEYS * (n - 1)]

    def cost(self, problem: Attention, config: KernelConfig, hw: Hardware) -> float:
        """A turn for each head of a cluster: its rows and sums, then its tiles; as on an H200."""
        p, split = problem, config.integer("split")
        tiles, blocks = -(-p.m // TILE), -(-p.n // KEYS)
        steps = tiles * (blocks + 1) / 2 if p.causal else tiles * blocks
        turns = -(-p.batches // self._most(split, hw))
        costs = self.numbers(hw)
        tile = 2 * TILE * KEYS * 5 * 64 * hw.sm_count / (hw.rate(p.dtype) * costs["math"])
        sums = costs["sums"] * tiles if blocks > 1 else 0.0
        turn = costs["turn"] + (sums + tile * steps) / split
        return hw.launch_seconds + costs["start"] + turns * turn

    def plan(self, problem: Attention, config: KernelConfig, hw: Hardware) -> Plan:
        """One launch of clusters that stay, and each block's sums of dq."""
        p, split = problem, config.integer("split")
        grid = minimum(p.batches, self._most(split, hw)) * split
        parts = grid * -(-p.m // TILE) * 4
        sums = TensorMap(
            Ptr("workspace"), "float32", (256, 4, parts), (1024, 4096), (256, 4, 1), swizzle=0
        )
        made = self.one(
            "sdpa_gradients_joint", grid, 384,
            *(boxes(p, name, TILE) for name in ("q", "dy", "k", "v")),
            *(boxes(p, name, 16) for name in ("dq", "dk", "dv")), sums,
            *args("y, i64 of_y, dy, i64 of_dy, lse workspace, i32 batches heads m n, f32 scale", p,
                  of_y=p.layout("y")[1], of_dy=p.layout("dy")[1], heads=p.batch[1]),
            *((boxes(p, "y", TILE), *sequences(p, "dq", "dk", "dv")) if p.packed else ()),
            smem=_PACKED_SMEM if p.packed else _SMEM, cluster=split, **common_macros(p),
            TILE=TILE, SPLIT=split, STAGES=_STAGES,
        )  # fmt: skip
        return made, parts * _PART

    def _most(self, split: int, hw: Hardware) -> int:
        """Clusters that surely run at once: 32 of four blocks did not, on an H200."""
        return hw.sm_count // split if split < 4 else hw.sm_count * 2 // 11
