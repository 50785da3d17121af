"""Float8Linear, with every activation: operands are rounded to float8, and so is its gradient.

    y = act(z), z = x8 · w8 + c      dx = g8 · w8ᵀ      dw = x8ᵀ · g8      dc = Σ_m g
for x [M, K], w [K, N], c [N] or one number, g = d loss / d z. v8 = s round(v / s) has the accuracy
of float8: e4m3 for x and w, whose largest number is 448, and e5m2 for g, with 57344. Each has its
own power of two s: the least of 2^-60 to 2^60 by which the largest number of the type reaches the
largest magnitude of v in the last HISTORY steps ("delayed scaling"). Where these are all zeros, as
before the first step, s is 1 for x and w, and 2^-16 for g, whose numbers are small where a loss is
a mean. What is larger than s allows becomes the largest, infinities too; a NaN stays.
The histories [HISTORY] are inputs, and each comes back with v's largest finite magnitude before it.
That of g comes back as its gradient: nothing else depends on it.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.build import dim, rank
from onnx_fuse.ir.constants import base_name
from onnx_fuse.ops.activations import ACTIVATIONS, Activation
from onnx_fuse.ops.fused.gradients import cotangents, dz_text, saved
from onnx_fuse.ops.opdef import OpDef, fused_op, register
from onnx_fuse.ops.rules import typed
from onnx_fuse.ops.shape_ops import Values, Writer

NAME = "Float8Linear"
HISTORY = 16
"""The number of steps whose largest magnitudes a scale follows from."""
MULTIPLE = 16
"""What the sizes of a product are multiples of: rows of float8 begin at multiples of 16 bytes."""
E4M3, E5M2 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2

_NUMBERS = """
    zero = Constant <value_float: float = 0.0> ()
    one = Constant <value_float: float = 1.0> ()
    two = Constant <value_float: float = 2.0> ()
    last = Constant <value_float: float = 1152921504606846976.0> ()
    largest = Constant <value_float: float = 3.4028234663852886e38> ()
    start = Constant <value_float: float = -60.0> ()
    to = Constant <value_float: float = 61.0> ()
    first = [0]
    end = [-1]
    powers = Pow (two, Range (start, to, one))
"""
_ROUND = """
    {v}top = ReduceMax <keepdims: int = 0> ({v}_history)
    {v}most = Constant <value_float: float = {most}> ()
    {v}those = Where (GreaterOrEqual (powers * {v}most, {v}top), powers, last)
    {v}least = ReduceMin <keepdims: int = 0> ({v}those)
    {v}none = Equal ({v}top, zero)
    {v}scale = Where ({v}none, Constant <value_float: float = {start}> (), {v}least)
    {v}wide = Cast <to: int = 1> ({v})
    {v}clipped = Clip ({v}wide / {v}scale, Neg ({v}most), {v}most)
    {v}abs = Abs ({v}wide)
    {v}magnitudes = Where (LessOrEqual ({v}abs, largest), {v}abs, zero)
    {v}newest = Unsqueeze (ReduceMax <keepdims: int = 0> ({v}magnitudes), first)
    {v}next = Concat <axis: int = 0> ({v}newest, Slice ({v}_history, first, end))
"""


def _round(v: str, kind: ir.DataType) -> str:
    most, start = (448.0, 1.0) if kind == E4M3 else (57344.0, 2.0**-16)
    return _ROUND.format(v=v, most=most, start=start)


_LINEAR = f"""{_NUMBERS}{_round("x", E4M3)}{_round("w", E4M3)}
    xt = Cast <to: int = {E4M3:d}> (Transpose <perm: ints = [1, 0]> (xclipped))
    wq = Cast <to: int = {E4M3:d}> (wclipped)
    xf = Cast <to: int = 1> (xt)
    wf = Cast <to: int = 1> (wq)
    xs = xf * xscale
    ws = wf * wscale
    product = CastLike (MatMul (Transpose <perm: ints = [1, 0]> (xs), ws), x)
"""
_GRADIENT = f"""{_NUMBERS}{_round("dz", E5M2)}
    g = Cast <to: int = 1> (Cast <to: int = {E5M2:d}> (dzclipped)) * dzscale
    xf = Cast <to: int = 1> (xt)
    wf = Cast <to: int = 1> (wq)
    xs = xf * xscale
    dx = CastLike (MatMul (g, Transpose <perm: ints = [1, 0]> (wf * wscale)), dy)
    dw = CastLike (MatMul (xs, g), dy)
    dc = CastLike (ReduceSum <keepdims: int = 0> (dzwide, first), dy)
"""
SAVED: tuple[str, ...] = ("xt", "wq", "xscale", "wscale")
"""x8 / s [K, M] and w8 / s [K, N] in e4m3, and both s: what the gradient reads."""


def _gradient(op: Writer, node: ir.Node, dys: Values) -> Values:
    """dx, dw and dc; the next history of g stands for its gradient."""
    cotangents(node, dys, 3)
    x, w, c, *_, history = node.inputs
    dy, act = dys[0], base_name(node).removeprefix(NAME)
    if dy is None or x is None or w is None or c is None or history is None:
        return [None] * 6
    inputs = [dy, *(saved(node, name) for name in SAVED), history]
    inputs += [saved(node, "z")] if act else []
    like = [x, ir.Value(type=x.type, shape=w.shape), ir.Value(type=x.type), history]
    like[2].shape = ir.Shape([dim(w, 1)])
    attributes = {k: a.value for k, a in node.attributes.items()}
    dx, dw, dc, following = op.emit(f"{NAME}{act}Grad", inputs, like, **attributes)
    if w.dtype is not None and w.dtype != x.dtype:
        dw = typed(op.Cast(dw, to=w.dtype.value), w, w.shape)
    return [dx, dw, dc if rank(c) == 1 else op.ReduceSum(dc, keepdims=0), None, None, following]


def _define(activation: Activation | None) -> tuple[OpDef, OpDef]:
    name, attributes, saves = NAME, [""], SAVED
    text = f"{_LINEAR}y = product + c"
    reads = "dy, xt, wq, xscale, wscale, dz_history"
    if activation is not None:
        name, attributes = name + activation.name, [activation.attributes]
        text = f"{_LINEAR}z = product + c\ny = {activation.forward}"
        saves = ("z", *SAVED)
        reads += ", z"
    inputs, outputs = "x, w, c, x_history, w_history, dz_history", "y, xnext, wnext"
    grads, gradient = "dx, dw, dc, dznext", dz_text(activation) + _GRADIENT
    return (
        fused_op(name, attributes, inputs, outputs, text, saves=saves, grad=_gradient),
        fused_op(name + "Grad", attributes, reads, grads, gradient),
    )


register(*(op for activation in (None, *ACTIVATIONS.values()) for op in _define(activation)))


def linear(
    op: Writer,
    act: str,
    operands: tuple[ir.Value, ir.Value, ir.Value],
    histories: tuple[ir.Value, ...],
    **attributes: object,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Emit y = act(x · w + c) in float8; returns y and the next histories of x and of w."""
    x, w, _ = operands
    y = ir.Value(type=x.type, shape=ir.Shape([dim(x, 0), dim(w, 1)]))
    like = [y, *histories[:2]]
    return op.emit(NAME + act, [*operands, *histories], like, **attributes)
