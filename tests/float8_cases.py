"""Models that quantize to float8 between their layers, and what must be close to onnxruntime's."""

from typing import Any

import ml_dtypes
import numpy as np
from quant_cases import HOSTILE, Quantized, quantized, written


def codes8(
    op: str, x: tuple[int, ...], w: tuple[int, ...], act: str = "", saturate: int = 1, **attrs: Any
) -> Quantized:  # fmt: skip
    """`op` of x and w in float8, and perhaps of their result and a norm, from codes to codes."""
    rng, kind = np.random.default_rng(sum(x) + sum(w)), ml_dtypes.float8_e4m3fn
    turned = op == "MatMul" or (op == "Gemm" and not attrs.get("transB"))
    filters, axis = (w[-1], len(w) - 1) if turned else (w[0], 0)
    depth = np.prod(w) / filters
    weight = rng.standard_normal(w) * 60
    weight[(..., 3) if axis else 3] = 0
    weights = {
        "w": weight.astype(np.float32).astype(kind), "s": np.float32(0.02), "z": np.zeros((), kind),
        "sw": rng.uniform(0.5, 1, filters).astype(np.float32) / np.float32(depth),
        "sy": np.float32(0.004 if act == "Sigmoid" else 0.7 / depth**0.5),  # some saturate
        "b": rng.standard_normal(filters).astype(np.float32),
    }  # fmt: skip
    numbers = (rng.standard_normal(x) * 3).astype(np.float32)
    if numbers.size:  # in one row or channel
        numbers.reshape(-1)[: len(HOSTILE)] = HOSTILE
    nodes = f"""
        q = QuantizeLinear (x, s, z) fx = DequantizeLinear (q, s, z)
        fw = DequantizeLinear <axis = {axis}> (w, sw)
        m = {op} {written(attrs)} (fx, fw{", b" if op != "MatMul" else ""})
        v = {act or "Identity"} (m) p = QuantizeLinear <saturate = {saturate}> (v, sy, z)
    """
    outputs = {"p": (kind.__name__, tuple(f"d{i}" for i in range(len(x))))}
    held = {n: np.asarray(a) for n, a in weights.items()}
    name = f"float8 codes {op} {x} {w} {act} {saturate} {attrs}"
    # the tensor core sums with 14 bits, and y is rounded to a step
    how = {"tolerance": 2.0**-11, "relative": 1 / 7, "newest": True}
    return quantized(name, nodes, {"x": numbers}, outputs, held, **how)


def rows8() -> Quantized:
    """As `rows`, in float8: a product, a GELU, a product, a sum and its norm as codes."""
    rng, kind = np.random.default_rng(6), ml_dtypes.float8_e4m3fn
    rows = {
        "s": 0.01, "b": np.linspace(-2, 2, 64), "sw": rng.uniform(0.5, 1, 64) / 400,
        "sv": rng.uniform(0.5, 1, 32) / 600, "one": np.linspace(0.5, 2, 32),
    }  # fmt: skip
    held = {n: np.asarray(a, np.float32) for n, a in rows.items()} | {"z": np.zeros((), kind)}
    for name, shape in (("w", (32, 64)), ("v", (64, 32))):
        held[name] = (rng.standard_normal(shape) * 60).astype(np.float32).astype(kind)
    nodes = """
        q0 = QuantizeLinear (x, s, z) fx = DequantizeLinear (q0, s, z)
        fw = DequantizeLinear <axis = 1> (w, sw) m = MatMul (fx, fw) a = Add (m, b) g = Gelu (a)
        q1 = QuantizeLinear (g, s, z) d1 = DequantizeLinear (q1, s, z)
        fv = DequantizeLinear <axis = 1> (v, sv) n = MatMul (d1, fv) r = Add (n, x)
        l = LayerNormalization (r, one, one) q2 = QuantizeLinear (l, s, z)
        y = DequantizeLinear (q2, s, z)
    """
    feeds = {"x": rng.standard_normal((2, 5, 32)).astype(np.float32)}
    how = {"tolerance": 2.0**-6, "relative": 1 / 7, "newest": True}
    return quantized("float8 rows", nodes, feeds, {"y": ("float32", (2, 5, 32))}, held, **how)


CODES8 = [
    codes8("MatMul", (3, 5, 32), (32, 48)),
    codes8("MatMul", (2, 5, 32), (32, 48), saturate=0),
    codes8("MatMul", (137, 208), (208, 320), act="Gelu"),
    codes8("MatMul", (1, 1040), (1040, 64), act="Relu"),
    codes8("MatMul", (0, 32), (32, 48)),
    codes8("Gemm", (5, 64), (48, 64), act="Sigmoid", transB=1),
    codes8("Gemm", (70, 64), (64, 304)),
    codes8("Conv", (2, 32, 9, 8), (64, 32, 3, 3), act="Relu", pads=[1] * 4, strides=[2, 1]),
    codes8("Conv", (1, 48, 7, 7), (48, 48, 1, 1)),
    rows8(),
]
"""Calls of codes of float8; and what is not, of sizes that no kernel serves."""
FLOATS_OF_CODES = [
    codes8("MatMul", (3, 5, 30), (30, 48)),
    codes8("MatMul", (3, 5, 32), (32, 17)),
    codes8("Conv", (2, 3, 9, 8), (16, 3, 3, 3), pads=[1] * 4),
    codes8("Conv", (2, 32, 9, 8), (64, 16, 3, 3), group=2),
]
