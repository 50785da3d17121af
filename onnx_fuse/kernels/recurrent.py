"""Recurrence: all steps in one launch, the weights kept in shared memory where they fit."""

from __future__ import annotations

from typing import Any

from onnx_fuse.kernels.kernel import Kernels, launch
from onnx_fuse.kernels.rule_based import HeuristicKernel, typed
from onnx_fuse.program.data_movement import Recurrence
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig

_PARTS = 8  # PARTS_MOST of steps.cuh


def _geometry(problem: Recurrence, hw: Hardware) -> tuple[dict[str, Any], int, int] | str:
    """(macros, blocks, bytes of shared memory) of the launch, or why there is none."""
    hidden, gates, batch, grad = problem.hidden, problem.gates, problem.batch, problem.grad
    item, acc = ITEMSIZE[problem.dtype], 8 if problem.dtype == "float64" else 4
    padded = -(-hidden // 4) * 4
    cluster = 1
    while hw.cc >= 90 and cluster < 8 and gates * padded * -(-hidden // cluster) * item > 1 << 14:
        cluster *= 2
    units = -(-hidden // cluster)
    block = 256 if (units if grad else gates * units) <= 128 else 512
    rows = 1
    while rows < 8 and -(-batch // rows) * cluster > hw.sm_count and 2 * rows * units <= 2 * block:
        rows *= 2

    def shared(rows: int) -> int:
        states = gates * padded if grad else 3 * padded
        return acc * rows * (states + _PARTS * (units if grad else gates * units))

    while rows > 1 and shared(rows) > hw.smem_per_block // 4:
        rows //= 2
    if units > 4 * block or shared(rows) > hw.smem_per_block:
        return f"{hidden} hidden units are more than its kernel takes"
    weights = gates * padded * units * item
    stored = shared(rows) + weights <= hw.smem_per_block
    macros = {
        **typed(problem), "HIDDEN": hidden, "UNITS": units, "BATCH": rows, "BLOCK": block,
        "CLUSTER": cluster, "STORED": stored,
    }  # fmt: skip
    return macros, -(-batch // rows) * cluster, shared(rows) + weights * stored


class RecurrentSteps(HeuristicKernel[Recurrence]):
    """recurrent/steps.cu and recurrent/steps_grad.cu.

    Operands: z rt rn bn h0 c0 lengths y h c; of the gradient z z2 before r rn c0 lengths dy dh_T
    dc_T cells dz dz2 dh0 dc0.
    """

    name = "steps"
    source = "recurrent/steps.cu"
    free_axes = "yz"

    def supports(self, problem: Recurrence, hw: Hardware) -> str | None:
        geometry = _geometry(problem, hw)
        return geometry if isinstance(geometry, str) else None

    def launch(self, problem: Recurrence, config: KernelConfig, hw: Hardware) -> Launches:
        geometry = _geometry(problem, hw)
        assert not isinstance(geometry, str)
        macros, blocks, smem = geometry
        names, end = "z rt rn bn h0 c0 lengths y h c", ""
        if problem.grad:
            names = "z z2 before r rn c0 lengths dy dh_T dc_T cells dz dz2 dh0 dc0"
            end = "_grad"
        return (launch(
            f"recurrent/steps{end}.cu", f"recurrent_steps{end}", blocks, macros["BLOCK"],
            *args(f"{names}, i32 steps batch", problem), smem=smem, cluster=macros["CLUSTER"],
            KIND=problem.kind, REVERSE=problem.reverse, **macros,
        ),)  # fmt: skip


KERNELS: Kernels = {"Recurrence": (RecurrentSteps(),)}
