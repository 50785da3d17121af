"""Caches of keys and values that take new rows, in one operator with the rotation of these.

GrowingCache (k, v, past_key, past_value) -> present_key, present_value, all [B, H, tokens, D].
FixedCache also has places [B or 1, 1, S, 1] int64: where in past each new row goes.
The rotated ones also turn q and k by cos and sin, which broadcast to them. A GPU's programs
are lowered to them (`rewrite.caches`); no file has them.
"""

from __future__ import annotations

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
_ROTATED = """
    {x}1, {x}2 = Split <axis: int = -1, num_outputs: int = 2> ({x})
    {x}_turned = Concat <axis: int = -1> (Neg ({x}2), {x}1)
    {y} = {x} * cos + {x}_turned * sin
"""
_TURNED = _ROTATED.format(x="q", y="turned") + _ROTATED.format(x="k", y="key")
_NEW = "k, v, past_key, past_value"
_PRESENTS = "present_key, present_value"
CACHES: dict[tuple[bool, bool], str] = {}
"""The operators by whether they rotate and whether they have places."""


def _define(form: str, *, rotates: bool) -> None:
    name = f"{'Rotated' if rotates else ''}{form}Cache"
    CACHES[rotates, form == "Fixed"] = name
    reads = f"q, {_NEW}, cos, sin" if rotates else _NEW
    reads += ", places" if form == "Fixed" else ""
    writes = f"turned, {_PRESENTS}" if rotates else _PRESENTS
    lines = _TURNED * rotates + _PRESENT[form].format(k="key" if rotates else "k")
    register(fused_op(name, [], reads, writes, lines))


for _form in _PRESENT:
    _define(_form, rotates=False)
    _define(_form, rotates=True)
