"""Cases of the gradients of convolutions and pools, and a small network that has all of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir
from support import with_weights

from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE

F32, F16, BF16, F64 = "float32", "float16", "bfloat16", "float64"
Row = tuple[str, tuple[Any, ...], dict[str, Any], int, str, str, str]


def _row(
    op: str, inputs: tuple[Any, ...], attrs: dict[str, Any], outputs: int, dtype: str,
    domain: str = "", note: str = "",
) -> Row:  # fmt: skip
    return op, inputs, attrs, outputs, dtype, domain, note


def rows() -> Iterator[Row]:
    """The arguments of math_cases.Case.

    They are of ConvTranspose, the gradient of a Conv's image, ConvWeightGrad and MaxPoolGrad.
    """
    for dtype in (F16, BF16):  # one convolution for each phase of the strides
        both = {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 0]}
        for x, w, how in (
            ((2, 64, 9, 8), (64, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
            ((2, 64, 9, 8), (64, 32, 3, 3), both),
            ((2, 24, 9, 8), (24, 32, 4, 5), {"strides": [2, 3], "dilations": [1, 2]}),
            ((2, 24, 6, 5), (24, 32, 3, 3), {"strides": [2, 2], "dilations": [2, 2]}),
            ((2, 64, 5, 4), (64, 32, 1, 1), {"strides": [2, 2], "output_padding": [1, 0]}),
            ((2, 64, 5, 4), (64, 32, 1, 1), {}),
            ((2, 6, 9, 8), (6, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 6}),
            ((2, 6, 5, 4), (6, 1, 3, 3), {"strides": [2, 2], "group": 6}),
            ((2, 64, 9), (64, 32, 4), {"strides": [2], "pads": [1, 1]}),
        ):
            yield _row("ConvTranspose", (x, w), how, 1, dtype, note="-".join(how))
        # channels first: groups that share channels, and three axes
        how = {"group": 2, "pads": [1, 0, 1, 1]}
        yield _row("ConvTranspose", ((2, 32, 7, 5), (32, 12, 3, 3)), how, 1, dtype)
        yield _row("Conv", ((1, 16, 5, 6, 7), (24, 16, 2, 3, 2)), {}, 1, dtype, note="3-D")
        deep = {
            "group": 2,
            "pads": [1, 0, 2, 1, 1, 2],
            "strides": [2, 1, 1],
            "dilations": [1, 1, 2],
        }
        yield _row("Conv", ((2, 32, 5, 6, 7), (24, 16, 3, 2, 3)), deep, 1, dtype, note="3-D groups")
        how = {"strides": [2, 2, 1], "pads": [1] * 6}
        yield _row("ConvTranspose", ((1, 16, 3, 4, 5), (16, 8, 3, 3, 3)), how, 1, dtype, note="3-D")
    square = {"kernel_shape": [3, 3], "strides": [1, 1], "dilations": [1, 1], "pads": [1] * 4}
    square |= {"group": 1, "swap": [1, 0, 2, 3]}
    one = {"kernel_shape": [1, 1], "pads": [0] * 4}
    for dtype in (F16, BF16):
        for dy, x, how in (
            ((2, 16, 9, 8), (2, 24, 9, 8), {}),
            ((3, 72, 5, 4), (3, 136, 9, 8), {"strides": [2, 2]}),
            ((3, 72, 5, 8), (3, 40, 9, 8), {"strides": [2, 1], **one}),
            ((2, 16, 5, 7), (2, 24, 9, 8), {"dilations": [2, 1], "pads": [0, 0, 0, 1]}),
            ((3, 32, 9, 8), (3, 48, 9, 8), {"group": 2}),
            ((4, 128, 28, 28), (4, 64, 28, 28), one),
            ((3, 136, 31, 17), (3, 96, 31, 17), {}),  # blocks of channels and of pixels cut
            ((2, 264, 9, 8), (2, 320, 17, 15), {"strides": [2, 2]}),
            ((3, 64, 9, 13), (3, 3, 18, 26), {"strides": [2, 2], "kernel_shape": [7, 7],
                                              "pads": [3] * 4}),  # rows of a filter
            ((3, 70, 9, 8), (3, 70, 9, 8), {"group": 70}),
            ((2, 6, 5, 4), (2, 6, 9, 8), {"group": 6, "strides": [2, 2]}),
            ((6, 64, 17), (6, 8, 19), {"kernel_shape": [3], "pads": [0, 0], "strides": [1],
                                       "dilations": [1], "swap": [1, 0, 2]}),
        ):  # fmt: skip
            yield _row("ConvWeightGrad", (dy, x), square | how, 1, dtype, FUSE)
        cube = {"kernel_shape": [3] * 3, "strides": [1] * 3, "dilations": [1] * 3, "pads": [1] * 6}
        cube |= {"group": 1, "swap": [1, 0, 2, 3, 4]}
        for dy, x, how in (
            ((2, 72, 4, 5, 7), (2, 40, 4, 5, 7), {}),
            ((2, 136, 3, 4, 3), (2, 96, 6, 7, 5), {"strides": [2, 2, 2]}),
            ((3, 16, 3, 5, 4), (3, 64, 5, 5, 8), {
                "kernel_shape": [2, 3, 4], "dilations": [2, 1, 1], "strides": [1, 1, 2],
                "pads": [0, 1, 1, 0, 1, 2],
            }),
        ):  # fmt: skip
            yield _row("ConvWeightGrad", (dy, x), cube | how, 1, dtype, FUSE, note="3-D")
    seven = square | {"kernel_shape": [7, 7], "pads": [3] * 4, "group": 66}
    for dtype in (F32, F16, BF16, F64):
        yield _row("ConvWeightGrad", ((5, 66, 14, 15), (5, 66, 14, 15)), seven, 1, dtype, FUSE)
    for dtype in (F32, F16, BF16, F64):
        for how in ({}, {"dilations": [2, 1], "ceil_mode": 1}, {"auto_pad": "SAME_UPPER"}):
            attrs = {"kernel_shape": [3, 2], "strides": [2, 1], **how}
            attrs |= {} if "auto_pad" in how else {"pads": [1, 1, 1, 0]}
            given = ((2, 3, 5, 16), (2, 3, 9 if "auto_pad" in how else 10, 16))
            yield _row("MaxPoolGrad", given, attrs, 1, dtype, FUSE, note="-".join(how))
    how = {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}
    yield _row("MaxPoolGrad", ((1, 2, 2, 2, 2), (1, 2, 5, 5, 5)), how, 1, F32, FUSE, note="3-D")
    how = {"kernel_shape": [17, 16], "strides": [2, 1], "pads": [1, 1, 1, 1]}
    yield _row("MaxPoolGrad", ((1, 2, 5, 11), (1, 2, 24, 24)), how, 1, F32, FUSE, note="many taps")


def network() -> onnx_ir.Model:
    """x [4, 3, 32, 32] -> y [4, 32]: convolutions with norms, a MaxPool and a residual sum."""
    rng = np.random.default_rng(7)
    body: list[str] = []
    weights: dict[str, np.ndarray] = {}

    def layer(y: str, x: str, filters: int, channels: int, taps: int, stride: int = 1) -> None:
        shape, pad = (filters, channels, taps, taps), taps // 2
        weights[f"w{y}"] = rng.standard_normal(shape) / np.sqrt(channels * taps * taps)
        weights[f"s{y}"], weights[f"b{y}"] = (
            rng.uniform(0.5, 1.5, filters),
            rng.normal(size=filters),
        )
        weights[f"m{y}"], weights[f"v{y}"] = np.zeros(filters), np.ones(filters)
        body.append(
            f"c{y} = Conv <pads=[{pad},{pad},{pad},{pad}], strides=[{stride},{stride}]> ({x}, w{y})"
            f" n{y} = BatchNormalization (c{y}, s{y}, b{y}, m{y}, v{y})"
        )

    layer("a", "x", 16, 3, 7, 2)
    body.append("r = Relu(na) p = MaxPool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]> (r)")
    layer("b", "p", 16, 16, 3, 2)
    body.append("q = Relu(nb)")
    layer("c", "q", 32, 16, 1)
    layer("d", "p", 32, 16, 1, 2)
    body.append("t = Add(nc, nd) u = Relu(t) g = GlobalAveragePool(u) y = Flatten(g)")
    held = ", ".join(f"float{list(a.shape)} {name}" for name, a in weights.items())
    model = text_model(
        f"agraph (float[4,3,32,32] x, {held}) => (float[4,32] y) {{ {' '.join(body)} }}"
    )
    return with_weights(model, lambda v: weights[v.name].astype(np.float32))
