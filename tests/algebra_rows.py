"""Cases of sums of products, of determinants, of Fourier transforms and of losses."""

from collections.abc import Iterator

import numpy as np
from window_gradients import Row

from onnx_fuse.ir.constants import FUSE

F32, F16, BF16, F64 = "float32", "float16", "bfloat16", "float64"
AXIS = np.array(1, np.int64)


def rows() -> Iterator[Row]:
    """The arguments of math_cases.Case."""
    yield from _einsums()
    yield from _determinants()
    yield from _transforms()
    yield from _losses()


def _einsums() -> Iterator[Row]:
    """Those that are no matrix product."""
    for equation, *sides in (
        ("ij,ij->i", (3000, 64), (3000, 64)),
        ("ij,ij->j", (70, 33), (70, 33)),
        ("bij,bij->b", (4, 33, 70), (4, 33, 70)),
        ("bij,bji->b", (4, 33, 70), (4, 70, 1)),
        ("ij,ij->", (300, 7), (300, 7)),
        ("i,i->", (200_000,), (200_000,)),
        ("i,ij->ij", (70,), (70, 33)),
        ("bi,bj->bji", (3, 5), (3, 1)),
        (",i->i", (), (7,)),
    ):
        for dtype in (F32, F16, "int32")[: 3 if equation == "ij,ij->i" else 2]:
            yield "Einsum", tuple(sides), {"equation": equation}, 1, dtype, "", equation
    yield "Einsum", ((5, 9), (5, 9)), {"equation": "ij,ij->i"}, 1, F64


def _determinants() -> Iterator[Row]:
    for dtype in (F32, F16):
        for shape in ((3, 5, 5), (2, 2, 40, 40), (1, 1)):
            if dtype == F32 or shape[-1] < 40:  # float16 overflows
                yield "Det", (shape,), {}, 1, dtype
    for shape in ((4, 7, 7), (1000, 2, 2), (70, 16, 16), (3, 32, 32), (2, 33, 33), (9, 0, 0)):
        yield "Det", (shape,), {}, 1, F64
    rng = np.random.default_rng(7)
    singular = rng.integers(-2, 3, (600, 4, 4)).astype(np.float32)
    yield "Det", (singular,), {}, 1, F32, "", "equal pivots, singular ones"
    hostile = rng.standard_normal((64, 3, 3)).astype(np.float32)
    hostile[5, 1, 2], hostile[9, 2, 0], hostile[12, 0, 0] = np.nan, np.inf, -np.inf
    yield "Det", (hostile,), {}, 1, F32, "", "not finite"


def _transforms() -> Iterator[Row]:
    """Lengths of one stage, of several, of no stages (7); rows and columns; parts of a signal."""
    for length in (1, 2, 3, 5, 6, 8, 10, 16, 60, 128, 512, 1024, 2187, 3125, 4096):
        for inverse in (0, 1) if length % 5 else (0,):
            how = {"inverse": inverse}
            yield "DFT", ((3, length, 2), None, AXIS), how, 1, F64, "", str(how)
    yield "DFT", ((2000, 64, 1), None, AXIS), {}, 1, F32, "", "many short"
    yield "DFT", ((3, 7, 1), None, AXIS), {}, 1, F32, "", "seven"
    yield "DFT", ((2, 1024, 5, 1), None, AXIS), {}, 1, F32, "", "columns"
    yield "DFT", ((2, 30, 33, 2), None, AXIS), {"inverse": 1}, 1, F64, "", "columns"
    for size in (9, 40):  # padded, cut
        for onesided in (0, 1):
            how = {"onesided": onesided}
            yield "DFT", ((5, size, 1), np.array(16), AXIS), how, 1, F32, "", str(how)
    step, length = np.array(5), np.array(16)
    for more in ({"onesided": 0}, {"onesided": 1}):
        for dtype in (F32, F64):
            window = np.linspace(0.1, 1, 16).astype(dtype)
            yield "STFT", ((2, 100, 1), step, window, length), more, 1, dtype, "", str(more)


def _losses() -> Iterator[Row]:
    rng = np.random.default_rng(1)
    for kind in ("none", "sum", "mean"):
        rows, planes = rng.integers(0, 9, 6), rng.integers(0, 9, (3, 4, 5))
        yield "SoftmaxCrossEntropyLoss", ((6, 9), rows), {"reduction": kind}
        attrs = {"reduction": kind, "ignore_index": 2}
        yield "SoftmaxCrossEntropyLoss", ((3, 9, 4, 5), planes, (9,)), attrs, 2
        yield "NegativeLogLikelihoodLoss", ((3, 9, 4, 5), planes, (9,)), attrs
        yield "NegativeLogLikelihoodLoss", ((0, 9), rows[:0]), {"reduction": kind}
    for dtype in (F32, F16):
        columns, planes = rng.integers(0, 130, (6, 1)), rng.integers(0, 9, (3, 1, 4, 5))
        for given in (((6, 130), columns, (6, 1)), ((3, 9, 4, 5), planes, (3, 1, 4, 5))):
            yield "SoftmaxCrossEntropyGrad", given, {}, 1, dtype, FUSE
    big = rng.integers(0, 50257, 40)
    yield "SoftmaxCrossEntropyLoss", ((40, 50257), big), {}, 2, F32, "", "vocabulary"
    yield "SoftmaxCrossEntropyLoss", ((40, 50257), big), {}, 1, BF16, "", "vocabulary"
