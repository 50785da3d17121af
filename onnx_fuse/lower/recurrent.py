"""RNN, GRU and LSTM: one product for all inputs, then all steps of a direction in one launch.

The steps and their gradients are operators of ours (`ops/rnn_scan.py`) with a kernel each. A node
with peepholes, clipped or coupled gates or other activations is written out over its steps instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.context import Context, Lowering, floats
from onnx_fuse.lower.selection import Known, Results, Shapes
from onnx_fuse.ops.recurrent import steps_kind, ways
from onnx_fuse.ops.rnn_unrolled import Written, activations
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.data_movement import Recurrence

MAX_STEPS = 1024
"""Steps that are written out at most."""


def recurrent(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """Y [T, D, B, H], Y_h and Y_c [D, B, H]; past a sequence's length the state stays, Y is 0."""
    layout = node.attributes.get_int("layout", 0) == 1
    steps, batch = shapes[0][1::-1] if layout else shapes[0][:2]
    directions, _, hidden = shapes[2]
    sizes = steps, batch, hidden
    kinds, reason = steps_kind(node)
    if steps > 0 and batch > 0 and not reason:
        return _InSteps(op, node, kinds, sizes).results
    acts = activations(node, directions)
    if not 0 < steps <= MAX_STEPS or acts is None:
        return None
    return Written(op, node, acts, sizes).results


class _InSteps(Written):
    """A node by one step operator a direction."""

    def __init__(
        self, op: Builder, node: ir.Node, kinds: Sequence[str], sizes: tuple[int, int, int]
    ) -> None:
        self.kinds = kinds
        super().__init__(op, node, sizes=sizes)

    def walked(self, i: int, reverse: bool) -> Sequence[ir.Value]:
        """The last states [B, H] of direction `i`, and its rows [T, B, H]."""
        op, kind, (steps, batch, hidden) = self.op, self.kinds[i], required(self.sizes)
        dtype, at = self.dtype.numpy(), op.constant(np.int64(i))
        zeros = op.constant(np.zeros((batch, hidden), dtype))

        def mine(value: ir.Value | None) -> Any:
            return zeros if value is None else op.Gather(value, at, axis=0)

        z = op.MatMul(self.rows, op.Transpose(mine(self.w), perm=[1, 0]))
        new = op.constant(np.zeros(hidden, dtype))  # GRU: the bias of h Rᵀ under the reset gate
        if self.b is not None:
            of_x, of_h = op.Split(mine(self.b), num_outputs=2, axis=0, outputs=2)
            if kind == "GRULinearSteps":
                both, new = op.Split(of_h, [2 * hidden, hidden], axis=0, outputs=2)
                of_h = op.Concat(both, op.constant(np.zeros(hidden, dtype)), axis=0)
            z = op.Add(z, op.Add(of_x, of_h))
        weights = [op.Transpose(mine(self.r), perm=[1, 0])]
        if kind == "GRULinearSteps":
            weights.append(new)
        elif kind == "GRUSteps":
            weights = list(op.Split(*weights, [2 * hidden, hidden], axis=1, outputs=2))
        lengths = self.lengths
        if lengths is None:
            lengths = op.constant(np.full(batch, steps, np.int32))
        inputs = [z, *weights, *map(mine, self.states), lengths]
        count = 1 + len(self.states)
        y, *ends = op.node(kind, inputs, domain=FUSE, outputs=count, attributes=ways(reverse))
        for value in (y, *ends):
            value.dtype = self.dtype
        return [*ends, y]


# ---- kernels ---------------------------------------------------------------------------------

_KINDS = {
    "LSTMSteps": (0, ("z", "rt", "h0", "c0", "lengths")),
    "GRUSteps": (1, ("z", "rt", "rn", "h0", "lengths")),
    "GRULinearSteps": (2, ("z", "rt", "bn", "h0", "lengths")),
    "RNNTanhSteps": (3, ("z", "rt", "h0", "lengths")),
    "RNNReluSteps": (4, ("z", "rt", "h0", "lengths")),
}
_GRADS = {
    "LSTMStepsGrad": (0, ("z", "r", "c0", "lengths", "dy", "dh_T", "dc_T")),
    "GRUStepsGrad": (1, ("z", "z2", "before", "r", "rn", "lengths", "dy", "dh_T")),
    "GRULinearStepsGrad": (2, ("z", "z2", "before", "r", "lengths", "dy", "dh_T")),
    "RNNTanhStepsGrad": (3, ("z", "r", "lengths", "dy", "dh_T")),
    "RNNReluStepsGrad": (4, ("z", "r", "lengths", "dy", "dh_T")),
}
"""Number of the kind in steps.cuh, and what the kernel calls the inputs."""


def _launch(
    ctx: Context, node: ir.Node, grad: bool, reads: dict[str, Tensor], writes: dict[str, Tensor]
) -> None:
    z, batch = reads["z"], reads["lengths"].shape[0]
    number, _ = (_GRADS if grad else _KINDS)[node.op_type]
    gates = {0: 4, 1: 3, 2: 3}.get(number, 1)
    hidden = (reads["dy"] if grad else reads["h0"]).shape[-1]
    floats(z, *(t for name, t in reads.items() if name != "lengths"))
    if grad and number == 0:
        cell_dtype = "float64" if z.dtype == "float64" else "float32"
        writes["cells"] = ctx.scratch(cell_dtype, (z.shape[0], batch, hidden))
    problem = Recurrence(
        number, gates, z.shape[0], batch, hidden, z.dtype, bool(ctx.attr(node, "reads")[0]), grad
    )
    ctx.select(node, problem, reads, writes)


def steps(ctx: Context, node: ir.Node) -> None:
    """y of all steps and the last states."""
    reads = {name: ctx.dense(node, i) for i, name in enumerate(_KINDS[node.op_type][1])}
    z, h0 = reads["z"], reads["h0"]
    outputs = {"y": (*z.shape[:2], h0.shape[-1]), "h": h0.shape, "c": h0.shape}
    writes = {
        name: ctx.output(node, i, shape, z.dtype)
        for i, (name, shape) in enumerate(outputs.items())
        if i < len(node.outputs)
    }
    _launch(ctx, node, False, reads, writes)


def steps_grad(ctx: Context, node: ir.Node) -> None:
    """The gradients of the sums of all steps, and of the first states."""
    number, names = _GRADS[node.op_type]
    reads = {name: ctx.dense(node, i) for i, name in enumerate(names)}
    z, dh = reads["z"], reads["dh_T"]
    gates = {0: 4, 1: 3, 2: 3}.get(number, 1)
    wide = (*z.shape[:2], gates * dh.shape[-1])
    outputs = {"dz": wide, **({"dz2": wide} if number == 2 else {}), "dh0": dh.shape}
    outputs |= {"dc0": dh.shape} if number == 0 else {}
    writes = {
        name: ctx.output(node, i, shape, z.dtype) for i, (name, shape) in enumerate(outputs.items())
    }
    if writes["dz"].size:
        _launch(ctx, node, True, reads, writes)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    **{(FUSE, name): steps for name in _KINDS},
    **{(FUSE, name): steps_grad for name in _GRADS},
}
