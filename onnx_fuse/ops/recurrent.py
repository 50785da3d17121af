"""Gradients of LSTM, GRU and RNN (formulas: the ONNX specification of each, opset 22).

All states h are in the output Y, so the gates of every step come again from products over all steps
at once; only what passes from step to step backwards is sequential, and is one operator of ours a
direction (`ops/fused/recurrent.py`). It gives dz, the gradient of the sums that the activations
take, of which all others are products over all steps:

    dX = dz W     dW = dzᵀ X     dR = dzᵀ H'     dB = Σ dz        (H': the states before each step)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, given
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import Tensor, Values, Writer, arguments, fail, text

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}

BACK = {
    "LSTMStepsGrad": (4, 1),
    "GRUStepsGrad": (5, 1),
    "GRULinearStepsGrad": (5, 2),
    "RNNTanhStepsGrad": (3, 1),
    "RNNReluStepsGrad": (3, 1),
}
"""Values that a gradient reads and writes at each step, the step's number among them."""


def steps_kind(node: ir.Node) -> tuple[list[str], str]:
    """The step operators of ours that compute the node's directions, and "" or why there is none.

    "LSTMSteps", "GRUSteps", "GRULinearSteps" (linear_before_reset), "RNNTanhSteps", "RNNReluSteps".
    """
    kind, default = node.op_type, DEFAULTS[node.op_type]
    count = 2 if text(node, "direction", "forward") == "bidirectional" else 1
    names = [a.lower() for a in node.attributes.get_strings("activations", ()) or default * count]
    each = [tuple(names[i * len(default) : (i + 1) * len(default)]) for i in range(count)]
    if node.attributes.get_float("clip", 0.0):
        return [], "its gates are clipped"
    if given(node, 7) is not None:
        return [], "it has peepholes"
    if node.attributes.get_int("input_forget", 0):
        return [], "its input and forget gates are coupled"
    if len(names) != count * len(default) or any(
        a != default and (kind != "RNN" or a != ("relu",)) for a in each
    ):
        return [], f"its activations are {', '.join(names)}, not {', '.join(default)}"
    if kind == "RNN":
        return [f"RNN{a[0].capitalize()}Steps" for a in each], ""
    linear = kind == "GRU" and node.attributes.get_int("linear_before_reset", 0) != 0
    return [f"{kind}{'Linear' if linear else ''}Steps"] * count, ""


def ways(reverse: bool, back: tuple[int, int] | None = None) -> dict[str, list[int]]:
    """The attributes of a step operator that say in which direction time is read and written.

    `back`: how many values the pass backwards reads and writes at each step, of a gradient.
    """
    if back is None:
        return {"reads": [int(reverse)] * 2, "writes": [int(reverse)]}
    reads, writes = ([int(not reverse)] * n for n in back)
    return {**ways(reverse), "reads_back": reads, "writes_back": writes}


def of_direction(op: Builder, value: Tensor, direction: int, count: int, axis: int = 0) -> Tensor:
    """The part of one direction, without the axis of directions."""
    if count == 1:
        return op.Squeeze(value, [axis])
    return op.Gather(value, op.constant(np.int64(direction)), axis=axis)


class _Direction:
    """One direction of a node: its operands, the states before each step, its gradients."""

    def __init__(self, grad: _Recurrent, index: int) -> None:
        op = self.op = grad.op
        self.grad, self.count = grad, grad.count
        self.reverse = text(grad.node, "direction", "forward") == "reverse" or index == 1
        self.w, self.r, b, self.h0, self.c0 = (
            None if v is None else of_direction(op, v, index, grad.count)
            for v in (grad.w, grad.r, grad.b, grad.h0, grad.c0)
        )
        self.b = b
        self.h0 = grad.zeros if self.h0 is None else self.h0
        self.c0 = grad.zeros if self.c0 is None else self.c0
        y = of_direction(op, grad.y, index, grad.count, 1)
        first = op.Unsqueeze(self.h0, [0])
        if self.reverse:
            before = op.Slice(op.Concat(y, first, axis=0), [1], [2**62], [0])
            if grad.sequence_lens is not None:  # past the end Y is 0, and its first state is h0
                starts = op.Equal(op.Add(grad.times, op.constant(np.int32(1))), grad.lengths)
                before = op.Where(op.Unsqueeze(starts, [2]), first, before)
        else:
            before = op.Slice(op.Concat(first, y, axis=0), [0], [-1], [0])
        before.shape = y.shape
        self.before = before

    def halves(self) -> list[Tensor]:
        """The biases of W and of R, [gates H] each; none where there are none."""
        if self.b is None:
            return []
        return list(self.op.Split(self.b, axis=0, num_outputs=2, outputs=2))

    def of_inputs(self) -> Tensor:
        """X Wᵀ + b of all steps, [T, B, gates H]."""
        op = self.op
        z = op.MatMul(self.grad.x, op.Transpose(self.w, perm=[1, 0]))
        return op.Add(z, self.halves()[0]) if self.b is not None else z

    def of_states(self, states: Tensor, r: Tensor, bias: Tensor | None) -> Tensor:
        """H' Rᵀ + b of all steps."""
        z = self.op.MatMul(states, self.op.Transpose(r, perm=[1, 0]))
        return z if bias is None else self.op.Add(z, bias)

    def rows(self, value: Tensor, width: object) -> Tensor:
        """All steps and sequences as the rows of a matrix."""
        return self.op.reshape(value, [-1, width])


class _Recurrent:
    """The gradient of one node; `answers` in the order of its inputs."""

    def __init__(self, op: Writer, node: ir.Node, dys: Values) -> None:
        kinds, reason = steps_kind(node)
        if reason:
            raise fail(node, reason)
        self.op, self.node = op, node
        x, self.w, self.r, self.b, self.sequence_lens, self.h0, self.c0 = arguments(node, 7)
        self.count, self.gates = len(kinds), GATES[node.op_type]
        self.layout = node.attributes.get_int("layout", 0) == 1
        if not node.outputs[0].name:
            node.outputs[0].name = op.fresh(f"{node.name or node.op_type}.y")
        y = op.output(node, 0, x.dtype, "y")
        grads = [*dys, None, None, None][:3]
        if self.layout:
            x, (y, grads[0]) = self.swap(x), [self.steps_first(v) for v in (y, grads[0])]
            self.h0, self.c0, *grads[1:] = (self.swap(v) for v in (self.h0, self.c0, *grads[1:]))
        self.x, self.y, self.dtype = x, y, x.dtype
        hidden = dim(self.r, 2) or node.attributes.get_int("hidden_size", 0)
        if not hidden:
            raise fail(node, "its hidden size is not known")
        self.hidden: int = hidden
        self.steps, self.batch, self.width = op.sizes_of(x)
        self.zeros = op.filled(op.vector([self.batch, self.hidden]), self.dtype)
        length = op.size_of(x, 0)
        self.lengths = self.sequence_lens
        if self.sequence_lens is None:
            count = op.Cast(length, to=int(ir.DataType.INT32))
            self.lengths = op.Expand(count, op.vector([self.batch]))
        times = op.Cast(op.counted(length), to=int(ir.DataType.INT32))
        self.times = op.Unsqueeze(times, [1])
        parts = [self.direction(kind, i, grads) for i, kind in enumerate(kinds)]
        first = op.constant([0])
        stacked = [
            None
            if part[0] is None
            else op.Concat(*(op.Unsqueeze(p, first) for p in part), axis=0)
            if self.count > 1
            else op.Unsqueeze(part[0], first)
            for part in list(zip(*parts, strict=True))[1:]
        ]
        dx = parts[0][0] if self.count == 1 else op.Add(parts[0][0], parts[1][0])
        dw, dr, db, dh0, dc0 = stacked
        if self.layout:
            dx, dh0, dc0 = self.swap(dx), self.swap(dh0), self.swap(dc0)
        self.answers = [dx, dw, dr, db, None, dh0, dc0]

    def swap(self, value: Tensor) -> Tensor:
        return None if value is None else self.op.Transpose(value, perm=[1, 0, 2])

    def steps_first(self, value: Tensor) -> Tensor:
        return None if value is None else self.op.Transpose(value, perm=[1, 2, 0, 3])

    def direction(self, kind: str, index: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """dX, dW, dR, dB, dh0 and dc0 (None where there are none) of one direction."""
        op, way = self.op, _Direction(self, index)
        dy, dh, dc = (
            None if g is None else of_direction(op, g, index, self.count, axis)
            for g, axis in zip(grads, (1, 0, 0), strict=True)
        )
        if dy is None:
            dy = op.filled(op.vector([self.steps, self.batch, self.hidden]), self.dtype)
        dh, dc = (self.zeros if g is None else g for g in (dh, dc))
        # onnxruntime's last state of an empty sequence is 0, not h0
        if self.sequence_lens is not None or not isinstance(self.steps, int) or self.steps == 0:
            some = op.Greater(self.lengths, op.constant(np.int32(0)))
            some = op.Unsqueeze(some, [1])
            dh, dc = (op.Where(some, g, self.zeros) for g in (dh, dc))
        cores = {"GRULinearSteps": self.gru_linear, "GRUSteps": self.gru}
        core = cores.get(kind, self.one_sum)
        dz, dzh, dr, dh0, dc0 = core(kind, way, dy, dh, dc)
        width = self.gates * self.hidden
        flat = way.rows(dz, width)
        dx = op.MatMul(dz, way.w)
        dw = op.Gemm(flat, way.rows(self.x, self.width), transA=1)
        db = None
        if way.b is not None:
            axes = op.constant([0, 1])
            sums = [op.ReduceSum(g, axes, keepdims=0) for g in (dz, dzh)]
            db = op.Concat(*sums, axis=0)
        return [dx, dw, dr, db, dh0, dc0]

    def like(self, sizes: Sequence[Any]) -> Any:
        """Type and shape of a step operator's output."""
        shape = ir.Shape([s if isinstance(s, int) else None for s in sizes])
        return ir.Value(type=ir.TensorType(self.dtype or ir.DataType.FLOAT), shape=shape)

    def core(self, kind: str, way: _Direction, inputs: list[Tensor], like: list[Any]) -> Any:
        """The gradients of the steps: dz of all steps, and dh of the state before the first."""
        name = f"{kind}Grad"
        return self.op.emit(name, inputs, like, **ways(way.reverse, BACK[name]))

    def ends(self, gates: int | None = None) -> tuple[Any, Any]:
        width = (gates or self.gates) * self.hidden
        return self.like([self.steps, self.batch, width]), self.like([self.batch, self.hidden])

    def recurrent_weights(self, way: _Direction, dz: Tensor, states: Tensor, gates: int) -> Tensor:
        """dzᵀ H', summed over all steps and sequences."""
        flat = way.rows(dz, gates * self.hidden)
        return self.op.Gemm(flat, way.rows(states, self.hidden), transA=1)

    def one_sum(
        self, kind: str, way: _Direction, dy: Tensor, dh: Tensor, dc: Tensor
    ) -> list[Tensor]:
        """LSTM and RNN, all of whose gates take the one sum z = x + h Rᵀ + b."""
        bias = way.halves()[1:] or [None]
        z = self.op.Add(way.of_inputs(), way.of_states(way.before, way.r, bias[0]))
        steps, state = self.ends()
        cell = [way.c0] if kind == "LSTMSteps" else []
        inputs = [z, way.r, *cell, self.lengths, dy, dh, *([dc] if cell else [])]
        dz, dh0, *dc0 = self.core(kind, way, inputs, [steps, state, *([state] if cell else [])])
        dr = self.recurrent_weights(way, dz, way.before, self.gates)
        return [dz, dz, dr, dh0, dc0[0] if cell else None]

    def gru_linear(
        self, kind: str, way: _Direction, dy: Tensor, dh: Tensor, dc: Tensor
    ) -> list[Tensor]:
        """n = tanh(x + r ⊙ (h Rᵀ + b)): R has the gradient of its own product, dzh."""
        bias = way.halves()[1:] or [None]
        of_states = way.of_states(way.before, way.r, bias[0])
        steps, state = self.ends()
        inputs = [way.of_inputs(), of_states, way.before, way.r, self.lengths, dy, dh]
        dz, dzh, dh0 = self.core(kind, way, inputs, [steps, steps, state])
        return [dz, dzh, self.recurrent_weights(way, dzh, way.before, 3), dh0, None]

    def gru(self, kind: str, way: _Direction, dy: Tensor, dh: Tensor, dc: Tensor) -> list[Tensor]:
        """n = tanh(x + (r ⊙ h) Rᵀ + b): the third of R that makes n reads r ⊙ h."""
        op, hidden = self.op, self.hidden
        sizes = op.constant([2 * hidden, hidden])
        r_gates, r_new = op.Split(way.r, sizes, axis=0, outputs=2)
        halves = way.halves()
        b_gates, b_new = op.Split(halves[1], sizes, axis=0, outputs=2) if halves else (None, None)
        x_gates, x_new = op.Split(way.of_inputs(), sizes, axis=2, outputs=2)
        gates = op.Add(x_gates, way.of_states(way.before, r_gates, b_gates))
        reset = op.Sigmoid(op.Slice(gates, [hidden], [2 * hidden], [2]))
        reset_state = op.Mul(reset, way.before)
        new = op.Add(x_new, way.of_states(reset_state, r_new, b_new))
        steps, state = self.ends()
        inputs = [gates, new, way.before, r_gates, r_new, self.lengths, dy, dh]
        dz, dh0 = self.core(kind, way, inputs, [steps, state])
        d_gates, d_new = op.Split(dz, sizes, axis=2, outputs=2)
        dr = op.Concat(
            self.recurrent_weights(way, d_gates, way.before, 2),
            self.recurrent_weights(way, d_new, reset_state, 1),
            axis=0,
        )
        return [dz, dz, dr, dh0, None]


def _recurrent(op: Writer, node: ir.Node, dys: Values) -> Values:
    return [
        None if g is None else op.to_type(g, v.dtype if v is not None else None)
        for g, v in zip(_Recurrent(op, node, dys).answers, arguments(node, 7), strict=True)
    ]


register(*(OpDef(name, grad=_recurrent) for name in GATES))
