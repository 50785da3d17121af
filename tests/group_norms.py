"""Cases of the gradient of a group normalization: channels first, and between convolutions."""

from collections.abc import Iterator

import numpy as np
from window_gradients import Row

from onnx_fuse.ir.constants import FUSE

F32, F16, BF16, F64 = "float32", "float16", "bfloat16", "float64"

GRAD = """agraph (float16[{n},16,{h},8] x, float16[{c},16,3,3] u, float16[{c}] s,
    float16[{c}] b, float16[{n},{c},{h},8] t)
    => (float16[{n},{c},{h},8] dx, float16[{c}] ds, float16[{c}] db) {{
    a = Conv<pads=[1,1,1,1]>(x, u) d = Tanh(t)
    dx, ds, db = onnx_fuse.GroupNorm{act}Grad<num_groups={g}>(d, a, s, b) }}"""
"""The gradient behind a convolution of 16-bit floats, whose images have their channels last."""
GROUPED = ((2, 9, 32, 4), (1, 200, 20, 2), (3, 5, 40, 40), (2, 16, 320, 32))
"""(images, rows of 8 pixels, channels, groups): accesses of 8 and of 4 channels, several parts of
an image, groups that share an access, a group a channel, and more channels than a block has."""


def rows() -> Iterator[Row]:
    """The arguments of math_cases.Case."""
    for dtype in (F32, F16, BF16, F64):
        # a warp a channel, blocks in parts, a group a channel, no pixels, a group of all channels
        for shape, groups in (
            ((2, 16, 5, 7), 4), ((1, 6, 80, 104), 2), ((3, 8, 12, 16), 8), ((70, 12), 3),
            ((2, 12, 3), 1),
        ):  # fmt: skip
            scale = np.linspace(0.5, 2, shape[1]).astype(F64 if dtype == F64 else F32)
            how = {"num_groups": groups}
            yield "GroupNormGrad", (shape, shape, scale, scale), how, 3, dtype, FUSE, ""
    for act, dtype in (("Silu", F32), ("Silu", F16), ("Silu", BF16), ("Gelu", F16), ("Relu", BF16)):
        for shape, groups in (((2, 16, 5, 7), 4), ((1, 64, 40, 52), 32)):
            given = (shape, shape, (shape[1], 1, 1), (shape[1], 1, 1))
            yield f"GroupNorm{act}Grad", given, {"num_groups": groups}, 3, dtype, FUSE, ""
