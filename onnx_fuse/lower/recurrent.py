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
from onnx_fuse.ops.rnn_unrolled import DEFAULT, Cell, activations
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.data_movement import Recurrence

MAX_STEPS = 1024
"""Steps that are written out at most."""


def recurrent(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """Y [T, D, B, H], Y_h and Y_c [D, B, H]; past a sequence's length the state stays, Y is 0."""
    kind, x, attributes = node.op_type, required(node.inputs[0]), node.attributes
    shape, sizes = shapes[0], shapes[2]
    layout, way = (
        attributes.get_int("layout", 0) == 1,
        attributes.get_string("direction", "forward"),
    )
    steps, batch = (shape[1], shape[0]) if layout else shape[:2]
    directions, _, hidden = sizes
    kinds, reason = steps_kind(node)
    if steps > 0 and batch > 0 and not reason:
        return _in_steps(op, node, kinds, steps, batch, hidden)
    acts, each = activations(node, directions), len(DEFAULT[kind])
    if not 0 < steps <= MAX_STEPS or acts is None:
        return None
    lengths = node.inputs[4] if len(node.inputs) > 4 else None
    if lengths is not None:
        lengths = op.Unsqueeze(lengths, [1])
    rows = op.Transpose(x, perm=[1, 0, 2]) if layout else x
    zeros = op.constant(np.zeros((batch, hidden), (x.dtype or ir.DataType.FLOAT).numpy()))
    ys, hs, cs = [], [], []
    for d in range(directions):
        cell = Cell(op, node, d, acts[d * each : (d + 1) * each])
        pair = []
        for state in (cell.h0, cell.c0):
            if state is not None and layout:
                state = op.Transpose(state, perm=[1, 0, 2])
            pair.append(zeros if state is None else cell.mine(state))
        cell.h, cell.c = pair
        products = cell.products(rows)
        states: dict[int, Any] = {}
        for t in range(steps)[:: -1 if way == "reverse" or d else 1]:
            h, c = cell.step(op.Gather(products, op.constant(np.int64(t)), axis=0))
            states[t] = h
            if lengths is not None:
                alive = op.Less(op.constant(np.int32(t)), lengths)
                states[t] = op.Where(alive, h, zeros)
                h = op.Where(alive, h, cell.h)
                c = None if c is None else op.Where(alive, c, cell.c)
            cell.h, cell.c = h, c
        first = op.constant([0])
        stack = op.Concat(*(op.Unsqueeze(states[t], first) for t in range(steps)), axis=0)
        ys.append(op.Unsqueeze(stack, [1]))
        hs.append(op.Unsqueeze(cell.h, first))
        cs.append(None if cell.c is None else op.Unsqueeze(cell.c, first))
    results = [op.Concat(*ys, axis=1), op.Concat(*hs, axis=0)]
    if kind == "LSTM":
        results.append(op.Concat(*cs, axis=0))
    if layout:
        results = [op.Transpose(results[0], perm=[2, 0, 1, 3])] + [
            op.Transpose(v, perm=[1, 0, 2]) for v in results[1:]
        ]
    return results


def _in_steps(
    op: Builder, node: ir.Node, kinds: Sequence[str], steps: int, batch: int, hidden: int
) -> Results:
    """The outputs by one step operator a direction."""
    x, w, r, b, lens, h0, c0 = (*node.inputs, *[None] * 7)[:7]
    assert x is not None
    dtype = (x.dtype or ir.DataType.FLOAT).numpy()
    layout = node.attributes.get_int("layout", 0) == 1
    lstm = node.op_type == "LSTM"
    lengths = op.constant(np.full(batch, steps, np.int32)) if lens is None else lens
    zeros = op.constant(np.zeros((batch, hidden), dtype))

    def swap(value: object) -> Any:
        return op.Transpose(value, perm=[1, 0, 2]) if layout and value is not None else value

    rows, h0, c0 = swap(x), swap(h0), swap(c0)
    directions = []
    for d, kind in enumerate(kinds):
        at = op.constant(np.int64(d))

        def mine(value: object, at: object = at) -> Any:
            return zeros if value is None else op.Gather(value, at, axis=0)

        z = op.MatMul(rows, op.Transpose(mine(w), perm=[1, 0]))
        new = op.constant(np.zeros(hidden, dtype))  # GRU: the bias of h Rᵀ under the reset gate
        if b is not None:
            of_x, of_h = op.Split(mine(b), num_outputs=2, axis=0, outputs=2)
            if kind == "GRULinearSteps":
                both, new = op.Split(of_h, [2 * hidden, hidden], axis=0, outputs=2)
                of_h = op.Concat(both, op.constant(np.zeros(hidden, dtype)), axis=0)
            z = op.Add(z, op.Add(of_x, of_h))
        rt = op.Transpose(mine(r), perm=[1, 0])
        weights = [rt]
        if kind == "GRULinearSteps":
            weights = [rt, new]
        elif kind == "GRUSteps":
            weights = list(op.Split(rt, [2 * hidden, hidden], axis=1, outputs=2))
        states = [mine(h0), *([mine(c0)] if lstm else [])]
        reverse = node.attributes.get_string("direction", "forward") == "reverse" or d == 1
        inputs = [z, *weights, *states, lengths]
        outputs = op.node(kind, inputs, domain=FUSE, outputs=2 + lstm, attributes=ways(reverse))
        for value in outputs:
            value.dtype = x.dtype
        y, *ends = outputs
        if lens is not None:  # an empty sequence ends in 0, as onnxruntime has it
            some = op.Unsqueeze(op.Greater(lens, op.constant(np.int32(0))), [1])
            ends = [op.Where(some, end, zeros) for end in ends]
        directions.append([op.Unsqueeze(y, [1]), *(op.Unsqueeze(end, [0]) for end in ends)])
    results = [
        part[0] if len(part) == 1 else op.Concat(*part, axis=1 if i == 0 else 0)
        for i, part in enumerate(zip(*directions, strict=True))
    ]
    if layout:
        results = [op.Transpose(results[0], perm=[2, 0, 1, 3]), *map(swap, results[1:])]
    return results


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
