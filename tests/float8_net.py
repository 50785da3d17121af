"""A small network whose products train in float8."""

import numpy as np
import onnx_ir as ir
from support import with_weights

from onnx_fuse.ir.build import text_model

NET = (
    "agraph (float[B,32] x, float[32,H] w, float[H] c, float[H,16] v, float[16] d)"
    " => (float[B,16] y) "
    f"<float[32] s = {{{', '.join(['1'] * 32)}}}, float[32] b = {{{', '.join(['0'] * 32)}}}> {{"
    " n = LayerNormalization(x, s, b) h = MatMul(n, w) hb = Add(h, c) a = Relu(hb)"
    " p = MatMul(a, v) y = Add(p, d) }"
)


def net(hidden: int = 48) -> ir.Model:
    """A norm, a product with bias and activation, and a product with bias."""
    rng = np.random.default_rng(0)
    shapes = {"w": (32, hidden), "c": (hidden,), "v": (hidden, 16), "d": (16,)}
    arrays = {n: (rng.standard_normal(s) * 0.2).astype(np.float32) for n, s in shapes.items()}
    return with_weights(text_model(NET.replace("H", str(hidden))), arrays)
