"""Straight-through gradients of quantization, against differences of the graph that they are of.

That graph, the surrogate, has in the place of rounding what rounding adds, as a constant: it is
scale · (clip(x / scale + c + zero_point) - zero_point). Its differences are taken in float64.
"""

import numpy as np
import onnx_ir as ir
import pytest
from support import answers, stock

from onnx_fuse import gradient
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import add_initializer, text_model

TYPES = ["INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4", "FLOAT8E4M3FN", "FLOAT8E5M2"]
# by name: the shapes of x and of the scale, the attributes, and what shares a scale
LAYOUTS = {
    "tensor": ((2, 3, 4), (), "", lambda s: s),
    "a vector of one": ((2, 3, 4), (1,), "", lambda s: s),
    "axis": ((2, 3, 4), (3,), "axis = 1", lambda s: s[:, None]),
    "last axis": ((2, 4), (4,), "axis = -1", lambda s: s),
    "blocks": ((2, 8, 3), (2, 2, 3), "axis = 1, block_size = 4", lambda s: s.repeat(4, 1)),
    "blocks, the last one short": (
        (3, 7), (3, 2), "axis = -1, block_size = 4", lambda s: s.repeat(4, 1)[:, :7]
    ),
}  # fmt: skip
PAIR = "q = QuantizeLinear {a} (x, s) {views} d = DequantizeLinear {a} ({q}, s) y = Sin (d)"
VIEWS = (
    "n = Constant <value_ints = [0, -1]> () p = Reshape (q, n) t = Transpose (p)"
    " u = Transpose (t) m = Shape (x) v = Reshape (u, m)"
)


def case(kind, layout, *, views=False, dtype="float"):
    """The model of a pair, and feeds of it, of which some saturate on either side."""
    kind, (shape, scales, attributes, spread) = ir.DataType[kind], LAYOUTS[layout]
    rng = np.random.default_rng(3)
    a = f"<{attributes}>" if attributes else ""
    body = PAIR.format(a=a, q="v" if views else "q", views=VIEWS if views else "")
    model = text_model(
        f"g ({dtype}{[*shape]} x, {dtype}{[*scales]} s) => ({dtype}{[*shape]} y) {{ {body} }}"
        .replace("[]", "")
    )  # fmt: skip
    low, high = (float(v) for v in (kind.min, kind.max))
    integer = kind.is_integer()
    zero = rng.integers(max(low, -5), min(high, 6), scales) if integer else np.zeros(scales)
    z = add_initializer(model.graph, "z", np.asarray(zero).astype(kind.numpy()))
    for node in model.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.resize_inputs(3)
            node.replace_input_with(2, z)
    s = rng.uniform(0.5, 2, scales) / high
    codes = rng.integers(low + 1, high, shape) + rng.uniform(-0.4, 0.4, shape)
    codes = codes if integer else rng.uniform(low, high, shape) * 0.9
    codes.reshape(-1)[:4] = low * 1.5 - 9, high * 1.5 + 9, high * 2 + 5, low * 2 - 7
    x = (codes - spread(np.float64(zero))) * spread(s)
    wide = np.float16 if dtype == "float16" else np.float32
    return model, {"x": x.astype(wide), "s": np.asarray(s, wide)}, np.float64(zero), kind, spread


def surrogate(feeds, zero, kind, spread):
    """The function of x and scale in float64 whose rounding is that at `feeds`."""
    low, high = float(kind.min), float(kind.max)
    ratio = np.float64(feeds["x"]) / spread(np.float64(feeds["s"]))
    # numpy's cast of what is beyond float8 is no number, which `clip` takes care of before
    near = np.clip(ratio, low, high).astype(kind.numpy()).astype(float)
    added = (np.round(ratio) if kind.is_integer() else near) - ratio
    added = np.where(np.abs(ratio) > high, 0, added) if not kind.is_integer() else added

    def function(x, s):
        code = np.clip(x / spread(s) + added + spread(zero), low, high)
        return np.sin(spread(s) * (code - spread(zero)))

    return function


def check(model, feeds, zero, kind, spread, *, rtol=2e-5):
    function = surrogate(feeds, zero, kind, spread)
    base = {name: np.float64(array) for name, array in feeds.items()}
    found = answers(stock(model), feeds)["y"]
    np.testing.assert_allclose(found, function(**base), rtol=0, atol=rtol)
    rng = np.random.default_rng(5)
    dy = rng.standard_normal(found.shape).astype(found.dtype)
    grads = answers(stock(gradient(model, wrt=["x", "s"])), feeds | {"y.grad": dy})
    for name, array in base.items():
        got, expected = grads[f"{name}.grad"], np.zeros(array.shape)
        for i in np.ndindex(array.shape):
            step = np.zeros(array.shape)
            step[i] = 1e-5 * float(np.abs(base["s"]).min())
            ahead, behind = (function(**base | {name: array + k * step}) for k in (1, -1))
            expected[i] = np.vdot(np.float64(dy), ahead - behind) / (2 * step[i])
        assert got.dtype == feeds[name].dtype
        limit = rtol * (1 + np.abs(expected).max())
        np.testing.assert_allclose(got, expected, rtol=0, atol=limit, err_msg=name)
    assert not grads["x.grad"].reshape(-1)[:4].any()  # saturated
    assert grads["x.grad"].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TYPES)
def test_a_pair_passes_what_does_not_saturate(kind: str, layout: str) -> None:
    check(*case(kind, layout))


def test_views_stand_between_the_nodes_of_a_pair() -> None:
    check(*case("INT8", "tensor", views=True))


def test_a_pair_in_float16_sums_in_float32() -> None:
    check(*case("UINT16", "axis", dtype="float16"), rtol=2e-2)


def test_dynamic_quantization_passes_all() -> None:
    """Its surrogate is x, but for the rounding of the two ends of its range."""
    model = text_model("""g (float[3,4] x) => (float[3,4] y) {
      q, s, z = DynamicQuantizeLinear (x) y = DequantizeLinear (q, s, z) }""")
    x = np.linspace(-2, 3, 12, dtype=np.float32).reshape(3, 4)
    dy = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    dx = answers(stock(gradient(model, wrt=["x"])), {"x": x, "y.grad": dy})["x.grad"]
    scale = 5 / 255
    added = np.round(x / scale) - x / scale
    expected = dy.copy()
    expected[0, 0] -= np.vdot(dy, added) / 255
    expected[-1, -1] += np.vdot(dy, added) / 255
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_float_of_few_bits_is_not_rounded_to_it() -> None:
    model = text_model("""g (float[4] x) => (float[4] y) {
      q = Cast <to = 17> (x) y = Cast <to = 1> (q) }""")
    dy = np.float32([1e-4, 1 / 3, 1e4, -3])
    feeds = {"x": np.float32([0.3, 0.5, 1, 2]), "y.grad": dy}
    dx = answers(stock(gradient(model, wrt=["x"])), feeds)["x.grad"]
    np.testing.assert_array_equal(dx, dy)


def test_no_gradient_passes_what_computes_with_codes() -> None:
    model = text_model("""g (float[4] x) => (float[4] y) <float s = {0.1}, int8 z = {0}> {
      q = QuantizeLinear (x, s, z) y = Cast <to = 1> (q) }""")
    with pytest.raises(ModelError, match="it computes with the integers of a quantized tensor"):
        gradient(model, wrt=["x"])
