"""A convolution of patches that do not overlap, as a product of them in a training step."""

import pytest
from support import assert_same, normal, step_results, with_weights

from onnx_fuse import optim
from onnx_fuse.ir.build import text_model
from onnx_fuse.training.step import training_model

# attributes of the Conv, shapes of x and w, whether there is a bias; then whether it is a product
ROWS = {
    "patches": ("strides = [4, 4]", (2, 3, 8, 12), (5, 3, 4, 4), True, True),
    "no bias, not square": ("strides = [2, 8]", (2, 1, 4, 16), (6, 1, 2, 8), False, True),
    "of a signal": ("strides = [8]", (3, 2, 32), (4, 2, 8), True, True),
    "overlapping": ("strides = [2, 2]", (2, 3, 8, 12), (5, 3, 4, 4), True, False),
    "a rest": ("strides = [4, 4]", (2, 3, 9, 12), (5, 3, 4, 4), True, False),
    "padded": ("strides = [4, 4], pads = [2, 2, 2, 2]", (2, 3, 8, 12), (5, 3, 4, 4), True, False),
    "in groups": ("strides = [4, 4], group = 2", (2, 4, 8, 12), (6, 2, 4, 4), True, False),
    "dilated": ("strides = [4, 4], dilations = [2, 2]", (2, 3, 8, 12), (5, 3, 4, 4), True, False),
    "many channels": ("strides = [4, 4]", (2, 8, 8, 12), (5, 8, 4, 4), True, False),
    "single pixels": ("strides = [1, 1]", (2, 3, 8, 12), (5, 3, 1, 1), True, False),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_step_gives_the_loss_and_weights_of_the_convolution(name: str) -> None:
    attributes, x_shape, w_shape, biased, product = ROWS[name]
    weights = normal({"w": w_shape} | ({"b": w_shape[:1]} if biased else {}))
    shape = ",".join(map(str, ("B", *x_shape[1:])))
    given = ", ".join(f"float[{','.join(map(str, a.shape))}] {n}" for n, a in weights.items())
    text = f"""agraph (float[{shape}] x, {given}) => (float[B,F] y)
        {{ c = Conv <{attributes}> (x, {", ".join(weights)}) p = GlobalAveragePool (c)
           y = Flatten (p) }}"""
    feeds = normal({"x": x_shape, "labels": (x_shape[0], w_shape[0])}, seed=1) | weights
    found = []
    for fused in (False, True):
        model = with_weights(text_model(text), weights)
        step, spec = training_model(model, loss="mse", optimizer=optim.SGD(lr=0.5), fused=fused)
        kinds = {n.op_type for n in step.graph}
        assert ("Conv" in kinds) != (fused and product)
        found.append(step_results(step, spec, feeds))
    assert_same(*reversed(found), rtol=1e-5, atol=1e-5)
