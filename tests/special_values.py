"""NaN, infinities and zeros of both signs, at each place among three, as onnxruntime has them.

Where its own answer hangs on the length of its vectors, the axis or the order in memory, it is no
rule. ReduceMax, ReduceMin and MaxPool drop a NaN in some places of a row and keep it in others, and
have NumPy's answer here. A NaN is the largest number of a TopK, as in 1.32 (1.30 keeps it where it
is compared). No row asks for these: a Unique loses what its tree compares with a NaN; a
LogSoftmax of float64 has 46.05 beside one; of +0 and -0, Max, Min and the extremes of rows have
either, by dtype, place and the operand that is repeated; and ReduceSum of nothing but -0 has the
sign that its axis decides.
"""

import re
from itertools import product

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import ort

TRIPLES = np.array(list(product([np.nan, 1, -1, 0.0, -0.0, np.inf, -np.inf], repeat=3)))
N = len(TRIPLES)
_ALONE = "Relu LeakyRelu Elu Selu ThresholdedRelu Sign Hardmax HardSwish HardSigmoid Abs Round"
_PLACED = """ArgMax <axis = 1>; ArgMin <axis = 1>; ArgMax <axis = 1, select_last_index = 1>
ArgMin <axis = 1, select_last_index = 1>; onnx_fuse.ArgMaxFinite"""
_LARGEST = """T[N,2] y, int64[N,2] i) <int64[1] k = {2}> { y, i = TopK <largest = HOW> (x, k) }"""
_SUMMED = "T[N,3] y) <int64 a = {1}> { y = CumSum <HOW> (x, a) }"
_CLIPPED = """T[N,3] y) <float l = {LOW}, float h = {HIGH}> { low = CastLike (l, x)
high = CastLike (h, x) y = Clip (x, low, high) }"""
_REDUCED = "T[N] y) <int64[1] a = {1}> { y = HOW <keepdims = 0> (x, a) }"
_POOLED = """T[N] y) <int64[1] a = {1}> { u = Unsqueeze (x, a) v = MaxPool <kernel_shape = [3]> (u)
y = Squeeze (v) }"""
# outputs and nodes, of x [N, 3]
_OF_ROWS = {
    **{name: f"T[N,3] y) {{ y = {name} (x) }}" for name in _ALONE.split()},
    **{name: f"int64[N,1] y) {{ y = {name} (x) }}" for name in re.split(";|\n", _PLACED)},
    **{f"TopK {how}": _LARGEST.replace("HOW", how) for how in "01"},
    **{how: _SUMMED.replace("HOW", how) for how in ("exclusive = 0", "exclusive = 1")},
    **{f"Clip to {b}": _CLIPPED.replace("LOW", a).replace("HIGH", b) for a, b in ("01", "00")},
    **{how: _REDUCED.replace("HOW", how) for how in ("ReduceMax", "ReduceMin")},
    "MaxPool": _POOLED,
}
# inputs, outputs and nodes; the first of three is what is there, the others are updates
_SCATTERS = {
    "rows": """T[N,1] x, int64[N,2] j, T[N,2] u) => (T[N,1] y)
    { y = ScatterElements <axis = 1, reduction = HOW> (x, j, u) }""",
    "columns": """T[1,N] x, int64[2,N] j, T[2,N] u) => (T[1,N] y)
    { y = ScatterElements <reduction = HOW> (x, j, u) }""",
    "tuples": """T[N] x, int64[M,1] j, T[M] u) => (T[N] y)
    { y = ScatterND <reduction = HOW> (x, j, u) }""",
}
ROWS = [*product(_OF_ROWS, ("float", "float16")), *product(_SCATTERS, ("float",))]
Arrays = dict[str, np.ndarray]


def special_row(name: str, kind: str) -> tuple[ir.Model, Arrays, Arrays]:
    """The graph, its feeds, and its outputs by onnxruntime."""
    x = TRIPLES.astype({"float": "f", "float16": "e"}[kind])
    feeds, text = {"x": x}, f"T[N,3] x) => ({_OF_ROWS.get(name)}"
    if name in _SCATTERS:
        text = _SCATTERS[name].replace("HOW", '"min"' if name == "columns" else '"max"')
        feeds = {"x": x[:, :1], "j": np.zeros((N, 2), np.int64), "u": x[:, 1:]}
    if name == "columns":
        feeds = {key: array.T for key, array in feeds.items()}
    elif name == "tuples":
        feeds = {"x": x[:, 0], "j": np.arange(2 * N)[:, None] // 2, "u": x[:, 1:].reshape(-1)}
    for letter, meaning in (("T", kind), ("N", str(N)), ("M", str(2 * N))):
        text = re.sub(rf"\b{letter}\b", meaning, text)
    model = text_model(f'<ir_version: 10, opset_import: ["" : 20]> g ({text}')
    if name in ("ReduceMax", "ReduceMin", "MaxPool"):
        x += 0  # without -0
        return model, feeds, {"y": (np.min if name == "ReduceMin" else np.max)(x, 1)}
    if name.startswith("TopK"):
        sign = -1 if name == "TopK 1" else 1
        order = np.lexsort((sign * np.where(np.isnan(x), 0, x), sign * np.isnan(x)), axis=1)[:, :2]
        return model, feeds, {"y": np.take_along_axis(x, order, 1), "i": order}
    feeds = {key: np.ascontiguousarray(array) for key, array in feeds.items()}
    names = [str(value.name) for value in model.graph.outputs]
    return model, feeds, dict(zip(names, ort.run(ort.session(model), feeds), strict=True))


def assert_same(found: np.ndarray, want: np.ndarray) -> None:
    """Equal within a rounding; NaN where NaN is, and zeros of the same sign."""
    rounding = 4 * np.finfo(want.dtype).eps if want.dtype.kind == "f" else 0
    np.testing.assert_allclose(found, want, rtol=rounding, atol=0, strict=True)
    np.testing.assert_array_equal(*(np.signbit(array[want == 0]) for array in (found, want)))
