"""A small network whose products train in float8."""

import numpy as np
import onnx_ir as ir

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
    model, rng = text_model(NET), np.random.default_rng(0)
    shapes = {"w": (32, hidden), "c": (hidden,), "v": (hidden, 16), "d": (16,)}
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape) * 0.2).astype(np.float32)
        value = next(v for v in model.graph.inputs if v.name == name)
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=name)
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
        model.graph.register_initializer(value)
    return model
