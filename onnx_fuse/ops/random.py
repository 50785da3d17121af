"""Dropout and the random generators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import const_array, given
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.opdef import NoGrad, OpDef, no_grad, register
from onnx_fuse.ops.shape_ops import Values, Writer


def _dropout(op: Writer, node: ir.Node, dys: Values) -> Values:
    """dx = dy · mask / (1 - ratio) in training, dy otherwise."""
    dy, training, ratio = dys[0], given(node, 2), given(node, 1)
    on = const_array(training)
    if training is None or (on is not None and not on.any()):
        return [dy]
    mask = op.output(node, 1, ir.DataType.BOOL, "mask")
    mask.shape = node.outputs[0].shape
    number = const_array(ratio)
    masked = op.Mul(dy, op.to_like(mask, dy))
    if on is not None and (ratio is None or number is not None):
        share = 0.5 if number is None else float(np.asarray(number).reshape(-1)[0])
        return [op.Mul(masked, 1 / (1 - share) if share < 1 else 0.0)]
    ratio = op.constant(0.5, dy.dtype) if ratio is None else op.to_like(ratio, dy)
    scale = op.Where(training, op.Reciprocal(op.Sub(1.0, ratio)), op.constant(1.0, dy.dtype))
    return [op.Mul(masked, scale)]


register(OpDef("Dropout", grad=_dropout))
no_grad(
    "its result is drawn at random",
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Bernoulli", "Multinomial"),
)


def _mix(x: str, y: str) -> str:
    """SplitMix64's finisher: y scatters the bits of x; needs the constants of `_DROPOUT_SCALE`."""
    lines = []
    for i, (shift, factor) in enumerate([("n30", "f1"), ("n27", "f2")]):
        lines += [
            f'{x}s{i} = BitShift <direction = "RIGHT"> ({x if not i else f"{x}m0"}, {shift})',
            f"{x}x{i} = BitwiseXor ({x if not i else f'{x}m0'}, {x}s{i})",
            f"{x}m{i} = Mul ({x}x{i}, {factor})",
        ]
    last = f'{x}s2 = BitShift <direction = "RIGHT"> ({x}m1, n31)'
    return "\n".join([*lines, last, f"{y} = BitwiseXor ({x}m1, {x}s2)"])


def _uint64(**constants: int) -> str:
    # The text format has no literals from 2^63 on: they come as the int64 of the same bits.
    wrapped = {k: v - (1 << 64) if v >> 63 else v for k, v in constants.items()}
    return "\n".join(
        f"{k}_i = Constant <value = int64 {{{v}}}> ()\n{k} = Cast <to = 13> ({k}_i)"
        for k, v in wrapped.items()
    )


# scale[i] = 1 / (1 - ratio) where u[i] >= ratio, else 0; u = top 24 bits of a hash of (rng, stream,
# i): the same on every device, and a function of the step alone, so that a resumed run draws alike.
_DROPOUT_SCALE = f"""DropoutScale <stream: int = 0> (shape, ratio, rng) => (scale) {{
    {_uint64(f1=0xBF58476D1CE4E5B9, f2=0x94D049BB133111EB, golden=0x9E3779B97F4A7C15)}
    {_uint64(n30=30, n27=27, n31=31, n40=40)}
    stream_u = Cast <to = 13> (Constant <value_int: int = @stream> ())
    key = Cast <to = 13> (rng) * golden + stream_u
    {_mix("key", "start")}
    zero = Constant <value = int64 {{0}}> ()
    one = Constant <value = int64 {{1}}> ()
    stride = Cast <to = 13> (Range (zero, ReduceProd <keepdims = 0> (shape), one)) * golden
    counter = stride + start
    {_mix("counter", "bits")}
    number = Cast <to = 1> (BitShift <direction = "RIGHT"> (bits, n40))
    u = number * Constant <value = float {{5.9604644775390625e-08}}> ()
    ratio_f = Cast <to = 1> (ratio)
    keep = GreaterOrEqual (u, ratio_f)
    one_f = Constant <value = float {{1.0}}> ()
    none = Constant <value = float {{0.0}}> ()
    scale = Reshape (Where (keep, one_f / (one_f - ratio_f), none), shape)
}}"""
register(OpDef("DropoutScale", FUSE, _DROPOUT_SCALE, grad=NoGrad("its result is drawn at random")))
