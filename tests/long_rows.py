"""Cases of few long rows, which several blocks share, and of many updates of the same elements."""

from collections.abc import Iterator

import numpy as np
from window_gradients import Row

from onnx_fuse.ir.constants import FUSE

F32, F16, BF16, F64 = "float32", "float16", "bfloat16", "float64"


def rows() -> Iterator[Row]:
    """The arguments of math_cases.Case."""
    rng = np.random.default_rng(9)
    last = np.array(1, np.int64)
    for how in ({}, {"exclusive": 1, "reverse": 1}):
        yield "CumSum", ((1, 40001), last), how, 1, F32, "", f"long {how}"
        yield "CumSum", ((2, 40000), last), how, 1, "int64", "", f"long {how}"
        yield "CumSum", ((20000, 3), np.array(0, np.int64)), how, 1, F64, "", f"long {how}"
    for shape, k in (((1, 100001), 50), ((3, 40000, 2), 7), ((1, 40000), 2048), ((1, 40000), 5000)):
        for largest in (0, 1):
            how = {"axis": 1, "largest": largest}
            yield "TopK", (shape, np.array([k])), how, 2, F32, "", f"long {k} {largest}"
    for dtype in ("int8", "int64", F16, F64):  # many equal ones: the first of them by index
        yield "TopK", ((2, 30000), np.array([50])), {}, 2, dtype, "", "long ties"
        yield "TopK", ((2, 9000), np.array([9000])), {"largest": 0}, 2, dtype, "", "whole ties"
    for op, dtype in (("Softmax", F32), ("LogSoftmax", F16), ("Softmax", BF16), ("Softmax", F64)):
        yield op, ((3, 40003),), {}, 1, dtype, "", "long"
        yield op, ((1, 65536),), {}, 1, dtype, "", "long"
    for dtype in (F32, F16):
        yield "ArgMaxFinite", ((2, 100000),), {}, 1, dtype, FUSE, "long"
    yield from _norms()
    yield "NonZero", (rng.random((70, 600)) < 0.3,), {}, 1, F32, "", "many"
    yield from _updates(rng)


def _norms() -> Iterator[Row]:
    """LayerNormalization, RMSNormalization, their residual forms and gradients."""
    for dtype, rows, k in ((F32, 3, 40004), (BF16, 1, 65543), (F64, 2, 33000), (F16, 2, 40000)):
        x, w = (rows, k), (k,)
        stat = np.ones((rows, 1), np.float64 if dtype == F64 else np.float32)
        given = (x, x, w, stat / 2, stat * 2)
        yield "LayerNormalization", (x, w, w), {}, 3 if dtype == F32 else 1, dtype, "", "long"
        if dtype != F64:  # whose oracle rounds the statistics to float32
            yield "LayerNormGrad", given, {}, 3, dtype, FUSE, "long"
    yield "SkipLayerNorm", (x, x, w, w), {}, 2, F32, FUSE, "long"
    yield "SkipLayerNormGrad", (x, *given), {}, 3, F16, FUSE, "long"
    yield "RMSNormalization", (x, w), {}, 1, F32, FUSE, "long"
    yield "RMSNormalizationGrad", (x, x, w, stat * 2), {}, 2, F32, FUSE, "long"


def _updates(rng: np.random.Generator) -> Iterator[Row]:
    """Some elements get many updates, most few, some none; an index may count from the end."""
    lines = np.minimum(rng.integers(-900, 900, (3, 4000)), rng.integers(-900, 900, (3, 4000)))
    columns = lines.reshape(4000, 3) % 700
    tuples = np.stack([rng.integers(-7, 7, 5000), rng.integers(0, 50, 5000)], -1)
    for reduction in ("none", "add", "mul", "max", "min"):
        how = {"reduction": reduction}
        for dtype in (F32, F16, "int8", "int64") if reduction != "mul" else (F32, "int64"):
            given = ((3, 900), lines, (3, 4000))
            yield "ScatterElements", given, {"axis": 1, **how}, 1, dtype, "", f"many {reduction}"
        given = ((700, 3), columns.astype(np.int32), (4000, 3))
        yield "ScatterElements", given, {"axis": 0, **how}, 1, F64, "", f"columns {reduction}"
        given = ((7, 50, 24), tuples, (5000, 24))
        yield "ScatterND", given, how, 1, F32, "", f"many {reduction}"
    short = rng.integers(-33, 33, (301, 75))  # a warp a line
    for reduction, dtype in (("none", F16), ("add", BF16), ("mul", "int32"), ("max", F64)):
        given = ((301, 33), short, (301, 75))
        how = {"axis": 1, "reduction": reduction}
        yield "ScatterElements", given, how, 1, dtype, "", f"short {reduction}"
    runs = np.repeat(np.arange(40), [8000, *[1, 9, 500] * 13])[None]  # of several tiles, in one
    for dtype in (F32, "int64"):
        given = ((1, 40), runs % 37, runs.shape)
        how = {"axis": 1, "reduction": "add"}
        yield "ScatterElements", given, how, 1, dtype, "", "runs"
    same = np.full((1, 9000), 2)
    given = ((1, 40), same, (1, 9000))
    how = {"axis": 1, "reduction": "max"}
    yield "ScatterElements", given, how, 1, F32, "", "one element"
    rows = rng.integers(0, 90000, (3000, 1))
    yield "ScatterND", ((90000, 2), rows, (3000, 2)), {"reduction": "min"}, 1, F32, "", "far apart"
