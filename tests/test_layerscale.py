"""Layer scale folded into a product's weight: where it may be, and what it rounds."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from test_attention import session

from onnx_fuse import passes
from onnx_fuse.onnx.build import text_model

K, N = 32, 8
ONES = np.linspace(0.05, 3.0, N)
# scale, dtype, level, whether it is folded
ROWS = {
    "float": (ONES, "float", 1, True),
    "double": (ONES, "double", 1, True),
    "float, nothing asked for": (ONES, "float", 0, False),
    "float16": (ONES, "float16", 2, False),
    "float16 at level 3": (ONES, "float16", 3, True),
    "as it begins": (np.full(N, 1e-6), "float", 1, True),
    "of both signs": (ONES * np.tile([1, -1], N // 2), "float", 1, True),
    "a zero": (ONES * (np.arange(N) != 3), "float", 1, False),
    "digits lost": (np.full(N, 1e-37), "float", 1, False),
    "digits lost in 16 bits": (np.full(N, 1e-5), "float16", 3, False),
    "beyond the range": (np.full(N, 3e38), "float", 1, False),
    "infinite": (np.where(np.arange(N) == 3, np.inf, ONES), "float", 1, False),
    "not a number": (np.where(np.arange(N) == 3, np.nan, ONES), "float", 1, False),
}
# of the largest magnitude in a row: a weight rounded once more, and another order of summation
BOUND = {"float": 1e-5, "double": 1e-13, "float16": 8e-3}


@pytest.mark.parametrize("row", ROWS)
def test_layer_scale(row: str) -> None:
    scale, dtype, level, folds = ROWS[row]
    model = text_model(
        f'<ir_version: 10, opset_import: ["" : 18]>\n'
        f"agraph ({dtype}[M,{K}] x, {dtype}[M,{N}] r, {dtype}[{K},{N}] w, {dtype}[{N}] b, "
        f"{dtype}[{N}] g) => ({dtype}[M,{N}] y) "
        "{ m = MatMul (x, w) z = Add (m, b) t = Mul (z, g) y = Add (r, t) }"
    )
    rng = np.random.default_rng(1)
    kind = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    shapes = {"w": (K, N), "b": (N,), "g": (N,)}
    for value in list(model.graph.inputs)[2:]:
        array = scale if value.name == "g" else rng.standard_normal(shapes[str(value.name)])
        with np.errstate(over="ignore"):
            value.const_value = ir.tensor(array.astype(kind), name=value.name)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    x, residual = (rng.standard_normal((6, n)).astype(kind) for n in (K, N))
    x[0], x[1, 3], x[2, 3], x[3, 3] = 0, np.nan, np.inf, -np.inf
    x[4] *= 2.0**-10
    feeds = {"x": x, "r": residual}
    expected = session(model)(feeds)
    report = passes.optimize(model, level=level)
    assert any(n.op_type == "Mul" for n in model.graph) != folds
    if not folds and level:
        said = [str(left) for left in report.not_fused if "scale" in str(left)]
        assert said, report.not_fused
    found = session(model)(feeds)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    with np.errstate(invalid="ignore"):
        largest = np.abs(np.where(np.isfinite(expected), expected, 0)).max()
    np.testing.assert_allclose(found, expected, atol=BOUND[dtype] * largest, equal_nan=True)
