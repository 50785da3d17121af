"""Pointwise results that are summed: graphs as ONNX text, and what they come to in float64."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from curves import CURVES
from support import normal

from onnx_fuse.program.passes import pointwise_sums

TYPES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
OVER = {  # what is added up: the axes, kept or not, the bias's shape
    "columns": ("0", 0, "{n}"), "rows": ("1", 1, "{m},1"), "all": ("0, 1", 0, ""),
}  # fmt: skip
TOLERANCE = {"float": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}
"""Of the norm: float32 sums of up to 8192 terms, or the result's rounding."""


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums join the call that stores their terms, faster or not."""
    monkeypatch.setattr(pointwise_sums, "joins", lambda *_: True)


def text_of(m: int, n: int, dtype: str, over: str) -> str:
    """dz = dy gelu'(z) s, twice that, and the sum of dz; s is one number a row."""
    axes, kept, shape = OVER[over]
    return f"""agraph ({dtype}[{m},{n}] dy, {dtype}[{m},{n}] z, {dtype}[{m},1] s)
        => ({dtype}[{m},{n}] dz, {dtype}[{m},{n}] dc, {dtype}[{shape.format(m=m, n=n)}] db)
        <int64[{len(axes.split(","))}] axes = {{{axes}}}> {{
        t = onnx_fuse.GeluGrad (dy, z) dz = Mul (t, s) dc = Add (dz, dz)
        db = ReduceSum <keepdims = {kept}> (dz, axes) }}"""


def feeds_of(m: int, n: int, dtype: str) -> dict[str, Any]:
    """Operands of a shape."""
    return normal({"dy": (m, n), "z": (m, n), "s": (m, 1)}, m + n, TYPES[dtype])


def wanted(feeds: dict[str, Any], dz: Any, over: str) -> dict[str, Any]:
    """The results in float64; the sums are those of `dz` as it was stored."""
    dy, z, s = (feeds[k].astype(np.float64) for k in ("dy", "z", "s"))
    made, stored = dy * CURVES["gelu"](z)[1] * s, dz.astype(np.float64)
    axis = {"columns": 0, "rows": 1, "all": None}[over]
    return {"dz": made, "dc": 2 * made, "db": stored.sum(axis, keepdims=over == "rows")}
