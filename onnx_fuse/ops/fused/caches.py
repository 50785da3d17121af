"""Caches of keys and values that take new rows, in one operator with the rotation of these.

GrowingCache (k, v, past_key, past_value) -> present_key, present_value, all [B, H, tokens, D].
FixedCache also has places [B or 1, 1, S, 1] int64: where in past each new row goes.
The rotated ones also turn q and k by cos and sin, which broadcast to them, or to the first numbers
of each head, those with norms after an RMSNormalization of each head by q_scale and k_scale [D]. A
GPU's programs are lowered to them (`rewrite.caches`); no file has them.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.fused.norm import EPSILON
from onnx_fuse.ops.opdef import fused_op, register

_PRESENT = {
    "Growing": """
    present_key = Concat <axis: int = 2> (past_key, {k})
    present_value = Concat <axis: int = 2> (past_value, v)
""",
    "Fixed": """
    key_places = Expand (places, Shape ({k}))
    value_places = Expand (places, Shape (v))
    present_key = ScatterElements <axis: int = 2> (past_key, key_places, {k})
    present_value = ScatterElements <axis: int = 2> (past_value, value_places, v)
""",
}
_WIDTH = """
    last = [-1]
    none = [0]
    all = [9223372036854775807]
    width = Shape <start: int = -1> (cos)
"""
_ROTATED = """
    {x}_first = Slice ({x}, none, width, last)
    {x}_rest = Slice ({x}, width, all, last)
    {x}1, {x}2 = Split <axis: int = -1, num_outputs: int = 2> ({x}_first)
    {x}_turned = Concat <axis: int = -1> (Neg ({x}2), {x}1)
    {y} = Concat <axis: int = -1> ({x}_first * cos + {x}_turned * sin, {x}_rest)
"""
_NORMED = """
    {x}s = Cast <to: int = 1> ({x}_new)
    {x}v = ReduceMean <keepdims: int = 1> ({x}s * {x}s, last) + eps
    {x} = CastLike ({x}s / Sqrt ({x}v), {x}_new) * {x}_scale
"""
_NEW = "k, v, past_key, past_value"
_PRESENTS = "present_key, present_value"
PLAIN, ROTATED, NORM_ROTATED = "", "Rotated", "NormRotated"
CACHES: dict[tuple[str, bool], str] = {}
"""The operators by what they do to q and k, and whether they have places."""


def _define(how: str, form: str) -> None:
    name = CACHES[how, form == "Fixed"] = f"{how}{form}Cache"
    reads, writes, lines = _NEW, _PRESENTS, ""
    if how == NORM_ROTATED:
        lines = "eps = Constant <value_float: float = @epsilon> ()"
        lines += _NORMED.format(x="q") + _NORMED.format(x="k")
        reads = "q_new, k_new, v, past_key, past_value, cos, sin, q_scale, k_scale"
    elif how == ROTATED:
        reads = f"q, {_NEW}, cos, sin"
    if how:
        lines = _WIDTH + lines + _ROTATED.format(x="q", y="turned")
        lines += _ROTATED.format(x="k", y="key")
        writes = f"turned, {_PRESENTS}"
    reads += ", places" if form == "Fixed" else ""
    lines += _PRESENT[form].format(k="key" if how else "k")
    register(fused_op(name, [EPSILON] if how == NORM_ROTATED else [], reads, writes, lines))


for _form in _PRESENT:
    for _how in (PLAIN, ROTATED, NORM_ROTATED):
        _define(_how, _form)


def growing(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Each past and the present that is longer by the new tokens."""
    first = {name: 3 if how else 2 for (how, placed), name in CACHES.items() if not placed}
    for node in graph:
        if node.domain == FUSE and node.op_type in first:
            pasts = [v for v in node.inputs[first[node.op_type] :] if v is not None]
            yield from zip(pasts[:2], node.outputs[-2:], strict=True)
