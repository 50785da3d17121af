"""Caches of keys and values that grow by a Concat, in one operator with the rotation of new rows.

GrowingCache (k, v, past_key, past_value) -> present_key, present_value, all [B, H, tokens, D].
RotatedGrowingCache also turns q and k by cos and sin, which broadcast to them. A GPU's programs
are lowered to them (`rewrite.caches`); no file has them.
"""

from __future__ import annotations

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.fused.gradients import body
from onnx_fuse.ops.opdef import OpDef, register

PLAIN, ROTATED = "GrowingCache", "RotatedGrowingCache"
_PRESENT = """
    present_key = Concat <axis: int = 2> (past_key, {k})
    present_value = Concat <axis: int = 2> (past_value, v)
"""
_ROTATED = """
    {x}1, {x}2 = Split <axis: int = -1, num_outputs: int = 2> ({x})
    {x}_turned = Concat <axis: int = -1> (Neg ({x}2), {x}1)
    {y} = {x} * cos + {x}_turned * sin
"""
_TURNED = _ROTATED.format(x="q", y="turned") + _ROTATED.format(x="k", y="key")
_NEW = "k, v, past_key, past_value"
_PRESENTS = "present_key, present_value"

register(
    OpDef(PLAIN, FUSE, body=body(PLAIN, "", _NEW, _PRESENTS, _PRESENT.format(k="k"))),
    OpDef(
        ROTATED,
        FUSE,
        body=body(
            ROTATED, "", f"q, {_NEW}, cos, sin", f"turned, {_PRESENTS}",
            _TURNED + _PRESENT.format(k="key"),
        ),
    ),
)  # fmt: skip
