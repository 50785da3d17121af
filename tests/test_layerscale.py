"""Layer scale folded into a product's weight: where it may be, and what it rounds."""

import numpy as np
import pytest
from lowering import program_of, weights_of
from support import drawn, says, with_weights
from test_attention import session

from onnx_fuse import rewrite
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import GemmProblem

K, N = 32, 8
ONES = np.linspace(0.05, 3.0, N)
# scale, dtype, level, the reason why it is not folded
ROWS = {
    "float": (ONES, "float", 1, ""),
    "double": (ONES, "double", 1, ""),
    "float, nothing asked for": (ONES, "float", 0, "residual"),
    "float16": (ONES, "float16", 2, "layer-scale"),
    "float16 at level 3": (ONES, "float16", 3, ""),
    "as it begins": (np.full(N, 1e-6), "float", 1, ""),
    "of both signs": (ONES * np.tile([1, -1], N // 2), "float", 1, ""),
    "a zero": (ONES * (np.arange(N) != 3), "float", 1, "not-finite"),
    "digits lost": (np.full(N, 1e-37), "float", 1, "not-finite"),
    "digits lost in 16 bits": (np.full(N, 1e-5), "float16", 3, "not-finite"),
    "beyond the range": (np.full(N, 3e38), "float", 1, "not-finite"),
    "infinite": (np.where(np.arange(N) == 3, np.inf, ONES), "float", 1, "not-finite"),
    "not a number": (np.where(np.arange(N) == 3, np.nan, ONES), "float", 1, "not-finite"),
}
# of the largest magnitude in a row: a weight rounded once more, and another order of summation
BOUND = {"float": 1e-5, "double": 1e-13, "float16": 8e-3}


@pytest.mark.parametrize("row", ROWS)
def test_layer_scale(row: str) -> None:
    scale, dtype, level, reason = ROWS[row]
    model = text_model(
        f'<ir_version: 10, opset_import: ["" : 18]>\n'
        f"agraph ({dtype}[M,{K}] x, {dtype}[M,{N}] r, {dtype}[{K},{N}] w, {dtype}[{N}] b, "
        f"{dtype}[{N}] g) => ({dtype}[M,{N}] y) "
        "{ m = MatMul (x, w) z = Add (m, b) t = Mul (z, g) y = Add (r, t) }"
    )
    rng = np.random.default_rng(1)
    kind = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    weights = {"w": rng.standard_normal((K, N)), "b": rng.standard_normal(N), "g": scale}
    with np.errstate(over="ignore"):
        with_weights(model, {name: array.astype(kind) for name, array in weights.items()})
    x, residual = (rng.standard_normal((6, n)).astype(kind) for n in (K, N))
    x[0], x[1, 3], x[2, 3], x[3, 3] = 0, np.nan, np.inf, -np.inf
    x[4] *= 2.0**-10
    feeds = {"x": x, "r": residual}
    expected = session(model)(feeds)
    report = rewrite.optimize(model, level=level)
    assert any(n.op_type == "Mul" for n in model.graph) == bool(reason)
    assert says(report, reason), report.not_fused
    found = session(model)(feeds)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    with np.errstate(invalid="ignore"):
        largest = np.abs(np.where(np.isfinite(expected), expected, 0)).max()
    np.testing.assert_allclose(found, expected, atol=BOUND[dtype] * largest, equal_nan=True)


AFTER = {
    "residual": ("y = Add (r, t)", 1),
    "residual first": ("y = Add (t, r)", 1),
    "nothing": ("y = Identity (t)", 1),
    "an activation": ("y = Relu (t)", 2),
    "itself": ("y = Add (t, z)", 2),
}


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(
    ("dtype", "given"), [("float16", False), ("float", True), ("double", True), ("bfloat16", True)]
)
def test_what_is_not_folded_is_scaled_in_the_products_epilogue(
    dtype: str, given: bool, after: str, level: int
) -> None:
    """16-bit weights at any level; and a scale that is an input, as one that trains."""
    tail, count = AFTER[after]
    model = text_model(
        f'<ir_version: 10, opset_import: ["" : 18]>\n'
        f"agraph ({dtype}[4,6,{K}] x, {dtype}[4,6,{N}] r, {dtype}[{K},{N}] w, {dtype}[{N}] b, "
        f"{dtype}[{N}] g) => ({dtype}[4,6,{N}] y) "
        "{ m = MatMul (x, w) z = Add (b, m) t = Mul (g, z) " + tail + " }"
    )
    feeds = drawn(model, seed=1)
    with_weights(model, {name: feeds.pop(name) for name in ("wb" if given else "wbg")})
    x, r, w, b, g = ((feeds | weights_of(model))[n].astype(np.float64) for n in "xrwbg")
    z = x @ w + b
    expected = {
        "nothing": z * g, "an activation": np.maximum(z * g, 0), "itself": z * g + z
    }.get(after, z * g + r)  # fmt: skip
    rewrite.optimize(model, level=level)
    program = program_of(model, feeds)
    assert len(program.calls) == count
    scaled = [
        bool(c.problem.epilogue.layer_scale)
        for c in program.calls
        if isinstance(c.problem, GemmProblem)
    ]
    assert scaled == [after != "itself"]
    found = interpret(program, feeds, weights_of(model))["y"].astype(np.float64)
    # stored results are rounded to 16 bits
    atol = {"float16": 2e-2, "bfloat16": 2e-1}.get(dtype, 1e-5)
    np.testing.assert_allclose(found, expected, atol=atol)
