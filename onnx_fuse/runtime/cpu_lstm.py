"""An LSTM that trains on onnxruntime's CPU: its steps keep what their gradients read.

The usual graph computes all gates again for the backward, and each of its steps takes 28 operators.
Here the forward is a Scan, too, that gives the derivatives of a step beside its results, and a step
backwards takes 10. States lie as [H, B]: the weights are then the first operand of a step's
product, which MLAS reads where it is. It packs the second one, here the small one, at each call.
A NaN shows in the results; onnxruntime's LSTM (1.32) gives the limits of the gates in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, given, rank
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ops.formula import emitted
from onnx_fuse.ops.recurrent import of_direction

_STEP = """s = Gemm(r, h, z); zi, zo, zf, zg = Split <num_outputs = 4, axis = 0> (s)
i = Sigmoid(zi); o = Sigmoid(zo); f = Sigmoid(zf); g = Tanh(zg)
entered = i * g; kept = f * c; new = kept + entered; t = Tanh(new); y = o * t; h1 = Identity(y)
di = entered * (1 - i); do = y * (1 - o); df = kept * (1 - f); dg = i - entered * g; dt = o - y * t
h1, new, y, dt, do, di, df, dg, f"""
"""The new states, y, and what the gradients of c, h and z are multiplied by: σ' = σ (1 - σ)."""
_STEP_BACK = """all = dh + dy; of_c = dc + all * dt
a = of_c * di; b = all * do; e = of_c * df; g = of_c * dg
dz = Concat <axis = 0> (a, b, e, g); dh0 = MatMul(rt, dz); dc0 = of_c * f
dh0, dc0, dz"""


def keep_derivatives(lstm: ir.Node) -> None:
    """Replace an LSTM and the LSTMStepsGrad of each direction, where nothing is cut short."""
    x, weights = given(lstm, 0), given(lstm, 2)
    if x is None or weights is None or x.dtype != ir.DataType.FLOAT or not dim(x, 0):
        return
    if given(lstm, 4) is not None or lstm.attributes.get_int("layout", 0) == 1:
        return
    if sum(reader.op_type == "LSTM" for reader, _ in weights.uses()) > 1:
        return
    parts = [node for node, _ in weights.uses() if node.op_type in ("Squeeze", "Gather")]
    uses = [use for part in parts for use in part.outputs[0].uses()]
    grads = [node for node, index in uses if node.op_type == "LSTMStepsGrad" and index == 1]
    count = dim(weights, 0)
    if len(grads) != count:
        return
    grads.sort(key=lambda node: node.attributes["reads"].as_ints())  # a second one is in reverse
    op = Builder()
    ends = [_forward(op, lstm, i, grad) for i, grad in enumerate(grads)]
    results = [
        op.Concat(*(op.Unsqueeze(v, [axis]) for v in each), axis=axis)
        for axis, each in zip((1, 0, 0), list(zip(*ends, strict=True))[:3], strict=True)
    ]
    replace_node(lstm, op.nodes, results)
    for grad, (*_, derivatives) in zip(grads, ends, strict=True):
        _backward(grad, derivatives)


def _forward(op: Builder, lstm: ir.Node, index: int, grad: ir.Node) -> tuple[Any, ...]:
    """Y [T, B, H], Y_h and Y_c [B, H] of a direction, and the derivatives, [T, H, B] each."""
    count = dim(lstm.inputs[2], 0) or 1
    x, w, r, b, _, *states = (given(lstm, i) for i in range(7))
    w, r = (of_direction(op, v, index, count) for v in (w, r))
    z = op.MatMul(w, op.Transpose(x, perm=[0, 2, 1]))
    if b is not None:
        halves = op.Split(of_direction(op, b, index, count), axis=0, num_outputs=2, outputs=2)
        z = op.Add(z, op.Unsqueeze(op.Add(*halves), [1]))
    none = op.Concat(op.Shape(r, start=1, end=2), op.Shape(x, start=1, end=2), axis=0)
    first = [
        op.Expand(op.constant(0.0), none)
        if v is None
        else op.Transpose(of_direction(op, v, index, count), perm=[1, 0])
        for v in states
    ]
    reverse = grad.attributes["reads"].as_ints()[0]
    h, c, y, *derivatives = _scan(
        *(op, f"{grad.name}.forward", _STEP, {"h": first[0], "c": first[1]}, {"z": z}, reverse),
        r=r,
    )
    ends = op.Transpose(y, perm=[0, 2, 1]), *(op.Transpose(v, perm=[1, 0]) for v in (h, c))
    return *ends, derivatives


def _backward(grad: ir.Node, derivatives: Sequence[ir.Value]) -> None:
    op, (_, r, _, _, dy, *ends) = Builder(), grad.inputs
    states = {k: op.Transpose(v, perm=[1, 0]) for k, v in zip(("dh", "dc"), ends, strict=True)}
    scanned = dict(zip(("dt", "do", "di", "df", "dg", "f"), derivatives, strict=True))
    scanned["dy"] = op.Transpose(dy, perm=[0, 2, 1])
    reverse = 1 - grad.attributes["reads"].as_ints()[0]
    weights = op.Transpose(r, perm=[1, 0])
    dh, dc, dz = _scan(op, str(grad.name), _STEP_BACK, states, scanned, reverse, rt=weights)
    dh, dc = (op.Transpose(v, perm=[1, 0]) for v in (dh, dc))
    # [gates H, T B]: what products over all steps read, of which onnxruntime drops a Transpose
    by_step = op.Transpose(dz, perm=[1, 0, 2])
    wide = op.Reshape(by_step, op.Concat(op.Shape(dz, start=1, end=2), [-1], axis=0))
    flat = op.Transpose(wide, perm=[1, 0])
    rows = op.Transpose(dz, perm=[0, 2, 1])
    sums = op.ReduceSum(wide, [1], keepdims=0)
    for reader, _ in list(grad.outputs[0].uses()):
        axes = const_array(reader.inputs[1]) if reader.op_type == "ReduceSum" else None
        if reader.op_type == "Reshape" and rank(reader.outputs[0]) == 2:
            replace_node(reader, [], [flat])
        elif axes is not None and axes.tolist() == [0, 1]:
            replace_node(reader, [], [sums])
    replace_node(grad, op.nodes, [rows, dh, dc])


def _scan(
    op: Builder,
    name: str,
    text: str,
    states: dict[str, ir.Value],
    scanned: dict[str, ir.Value],
    reverse: int,
    **outer: ir.Value,
) -> Sequence[ir.Value]:
    """The last states, and what `text` gives beside them at each step, of `scanned` by its name."""
    inner, inputs = Builder(), {name: ir.Value(name="") for name in (*states, *scanned)}
    ends = emitted(text, inner, **inputs, **outer)
    values = [*inputs.values(), *(v for node in inner.nodes for v in node.outputs)]
    for i, value in enumerate(values):
        value.name, value.dtype = f"{name}.step.{i}", ir.DataType.FLOAT
    body = ir.Graph([*inputs.values()], ends, nodes=inner.nodes, name=f"{name}.step")
    way = {
        "scan_input_directions": [reverse] * len(scanned),
        "scan_output_directions": [reverse] * (len(ends) - len(states)),
    }
    results: Sequence[ir.Value] = op.node(
        "Scan", [*states.values(), *scanned.values()], outputs=len(ends),
        attributes={"body": body, "num_scan_inputs": len(scanned), **way},
    )  # fmt: skip
    return results
