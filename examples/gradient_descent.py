"""Train with onnxruntime alone: `python examples/gradient_descent.py`.

`onnx_fuse.gradient` writes the backward of a model as ONNX. Whoever can run an ONNX file can then
train it; here that is stock onnxruntime, and gradient descent is three lines of NumPy. The model
learns y = 3 a - 2 b + 1.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort

import onnx_fuse as of

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
line (float[batch, 2] x) => (float[batch, 1] y)
<float[2, 1] w = {0.0, 0.0}, float[1] b = {0.0}>
{ y = Gemm (x, w, b) }
"""


def main() -> None:
    backward = of.gradient(onnx.parser.parse_model(MODEL), loss="mse", wrt=["w", "b"])
    # Weights become inputs, so that each run takes its own.
    for weight in list(backward.graph.initializer):
        if weight.name in ("w", "b"):
            value = onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
            backward.graph.input.append(value)
            backward.graph.initializer.remove(weight)
    session = ort.InferenceSession(backward.SerializeToString())
    label = next(v.name for v in session.get_inputs() if v.name not in ("x", "w", "b"))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 2)).astype(np.float32)
    y = x @ np.array([[3.0], [-2.0]], np.float32) + 1
    weights = {"w": np.zeros((2, 1), np.float32), "b": np.zeros(1, np.float32)}
    for step in range(100):
        feeds = {"x": x, label: y, **weights}
        loss, dw, db = session.run(["loss", "w.grad", "b.grad"], feeds)
        weights = {"w": weights["w"] - 0.1 * dw, "b": weights["b"] - 0.1 * db}
        if step % 25 == 0:
            print(f"step {step:2}: loss {loss:.4f}")
    a, b = weights["w"].ravel()
    print(f"learned y = {a:.2f} a {b:+.2f} b {weights['b'][0]:+.2f}")


if __name__ == "__main__":
    main()
