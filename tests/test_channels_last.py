"""Convolutions in 16 bits run channels last: programs by NumPy against onnxruntime, no GPU."""

import group_norms
import numpy as np
import pytest
from lowering import H200, arrays, lowered, program_of, weights_of
from support import stock, table, with_weights

from onnx_fuse import gradient, rewrite
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import site
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problems import ChannelNorm, Conv, GroupGrad, Pool, Reduce
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model

# the shapes of x and of the weights, that of y, the nodes, and how many copies there may be
STRETCHES = table(globals(), at=2)("""
a residual block: {"x": (2, 16, 9, 8), "u": (16, 16, 3, 3), "v": (24, 16, 1, 1),
"w": (24, 16, 1, 1), "z": (24, 24, 3, 3)}, (2, 24, 9, 8), 2
  a = Conv<pads=[1,1,1,1]>(x, u) b = Relu(a) c = Conv(b, v) d = Conv<pads=[0,0,0,0]>(b, w)
  e = Add(c, d) f = Relu(e) g = Conv<pads=[1,1,1,1]>(f, z) y = Add(g, f)
a first layer of three channels: {"x": (2, 3, 13, 15), "u": (16, 3, 7, 7)}, (2, 16), 0
  a = Conv<pads=[3,3,3,3],strides=[2,2]>(x, u) b = Relu(a)
  c = MaxPool<kernel_shape=[3,3],strides=[2,2],pads=[1,1,1,1]>(b) d = GlobalAveragePool(c)
  y = Flatten(d)
patches: {"x": (2, 3, 16, 12), "u": (16, 3, 4, 4), "v": (24, 16, 2, 2)}, (2, 24, 2, 1), 1
  a = Conv<strides=[4,4]>(x, u) y = Conv<strides=[2,2]>(a, v)
patches beyond a descriptor's stride: {"x": (2, 3, 32, 48), "u": (16, 3, 16, 16)}, (2, 16, 2, 3), 2
  y = Conv<strides=[16,16]>(x, u)
channels of no whole 16 bytes, dilated: {"x": (1, 12, 9, 9), "u": (10, 12, 3, 3)}, (1, 10, 7, 7), 3
  y = Conv<dilations=[2,2],pads=[1,1,1,1]>(x, u)
depthwise, groups, an average pool: {"x": (2, 16, 8, 8), "u": (16, 1, 5, 5), "v": (32, 8, 3, 3)},
(2, 32, 4, 4), 2
  a = Conv<group=16,pads=[2,2,2,2]>(x, u) b = Sigmoid(a) c = Mul(a, b)
  d = Conv<group=2,pads=[1,1,1,1]>(c, v) y = AveragePool<kernel_shape=[2,2],strides=[2,2]>(d)
patches back to pixels, beside others: {"x": (2, 16, 6, 5), "u": (16, 16, 3, 3), "v": (16, 8, 2, 3),
"b": (8,), "z": (24, 8, 1, 1)}, (2, 32, 12, 15), 4
  a = Conv<pads=[1,1,1,1]>(x, u) c = ConvTranspose<strides=[2,3]>(a, v, b) d = Conv(c, z)
  y = Concat<axis=1>(d, c)
an enlarged image beside another: {"x": (1, 16, 4, 5), "u": (16, 16, 3, 3), "v": (8, 16, 1, 1)},
(1, 24, 8, 10), 3
  a = Conv<pads=[1,1,1,1]>(x, u) s = Constant<value = float[4] {1,1,2,2}>()
  b = Resize<mode="nearest",nearest_mode="floor">(a, , s) c = Conv(b, v) y = Concat<axis=1>(b, c)
an image enlarged by weights: {"x": (2, 16, 4, 5), "u": (16, 16, 3, 3)}, (2, 16, 7, 10), 2
  a = Conv<pads=[1,1,1,1]>(x, u) s = Constant<value = int64[4] {2,16,7,10}>()
  y = Resize<mode="linear">(a, , , s)
a row of pixels: {"x": (3, 8, 20), "u": (16, 8, 5)}, (3, 16, 20), 2
  y = Conv<pads=[2,2]>(x, u)
a volume: {"x": (1, 16, 4, 5, 6), "u": (16, 16, 3, 3, 3), "v": (24, 8, 1, 3, 1)}, (1, 24, 2, 2, 3),
2
  a = Conv<pads=[1,1,1,1,1,1]>(x, u) b = Relu(a)
  c = MaxPool<kernel_shape=[2,2,2],strides=[2,2,2]>(b) y = Conv<group=2,pads=[0,1,0,0,1,0]>(c, v)
sums over all pixels of channels, and over channels: {"x": (3, 16, 6, 6), "u": (32, 16, 3, 3)},
(3, 32, 6, 6), 1
  a = Conv<pads=[1,1,1,1]>(x, u) e = Constant<value = int64[3] {0,2,3}>() s = ReduceSum(a, e)
  f = Constant<value = int64[1] {1}>() t = ReduceMean(a, f) y = Add(s, t)
a reader that wants the pixels of a channel side by side: {"x": (2, 16, 6, 6), "u": (16, 16, 3, 3)},
(2, 16), 3
  a = Conv<pads=[1,1,1,1]>(x, u) s = Constant<value = int64[2] {2,-1}>() b = Reshape(a, s)
  t = Constant<value = int64[2] {0,16}>() n = Constant<value = int64[1] {0}>()
  e = Constant<value = int64[1] {16}>() o = Constant<value = int64[1] {1}>() y = Slice(b, n, e, o)
""") | {
    "a gate by the means of the channels": (
        {"x": (2, 16, 8, 8), "u": (16, 16, 3, 3), "v": (8, 16, 1, 1), "w": (16, 8, 1, 1)},
        (2, 32, 10, 8),
        "a = Conv<pads=[1,1,1,1]>(x, u) s = GlobalAveragePool(a) t = Conv(s, v) g = Conv(t, w)"
        " h = Sigmoid(g) m = Mul(a, h) c = Concat<axis=1>(m, a)"
        " p = Constant<value = int64[8] {0,0,1,0,0,0,1,0}>() y = Pad(c, p)",
        5,
    ),
    "images that a Transpose makes of pixels": (
        {"x": (2, 16, 6, 6), "u": (16, 16, 3, 3), "g": (16, 1, 1), "h": (16, 16)},
        (2, 16, 6, 6),
        "a = Conv<pads=[1,1,1,1]>(x, u) p = Transpose<perm=[0,2,3,1]>(a) t = MatMul(p, h)"
        " i = Transpose<perm=[0,3,1,2]>(t) m = Mul(i, g) s = Add(m, a)"
        " y = Conv<pads=[1,1,1,1]>(s, u)",
        2,
    ),
}


@pytest.mark.parametrize("known", [True, False], ids=["weights", "inputs"])
@pytest.mark.parametrize("name", STRETCHES)
def test_a_stretch_gives_onnxruntimes_results(name, known):
    """The convolutions and pools are channels last, and nothing between them is copied."""
    shapes, y, nodes, copies = STRETCHES[name]
    given = ", ".join(f"float16[{','.join(map(str, s))}] {n}" for n, s in shapes.items())
    text = f"agraph ({given}) => (float16[{','.join(map(str, y))}] y) {{ {nodes} }}"
    model = text_model(text)
    feeds = {n: a.astype(np.float16) for n, a in arrays(**shapes).items()}
    (want,) = stock(model, optimized=True).run(None, feeds)
    if known:
        with_weights(model, lambda value: feeds.pop(value.name))
    rewrite.optimize(model)
    program = program_of(model, feeds)
    assert not program.fallbacks
    for call in program.calls:
        if isinstance(call.problem, Conv):
            assert call.problem.channels_last
            assert site(call, H200).op.endswith(", channels last")  # which --explain shows
        if isinstance(call.problem, Pool):
            assert call.problem.channels
    if known:  # else weights are copied too
        moves = [c for c in program.calls if c.expression is not None and not c.expression.steps]
        assert len(moves) <= copies, "\n".join(map(str, program.calls))
    found = interpret(program, feeds, weights_of(model))["y"]
    # a few roundings to float16 of sums of up to 400 products of numbers about 1
    scale = np.abs(want.astype(np.float64)).max()
    assert np.abs(found.astype(np.float64) - want).max() <= 4e-3 * scale


OPEN = """agraph (float16[N,16,H,W] x, float16[16,16,3,3] u) => (float16[N,16,H,W] y) {
    a = Conv<pads=[1,1,1,1]>(x, u)  b = Tanh(a)  c = Conv<pads=[1,1,1,1]>(b, u)  d = Add(b, c)
    e = Tanh(d)  f = Conv<pads=[1,1,1,1]>(e, u)  g = Add(e, f)  y = Conv<pads=[1,1,1,1]>(g, u) }"""


def test_the_gradient_of_an_addition_of_open_sizes_keeps_the_order():
    """It is summed over the axes that were broadcast, which turn out to be none."""
    model = gradient(text_model(OPEN), wrt=["x"])
    assert any(node.op_type == "ReduceSum" for node in model.graph)
    shapes = {"x": (2, 16, 9, 8), "u": (16, 16, 3, 3), "y.grad": (2, 16, 9, 8)}
    feeds = {n: (a / 4).astype(np.float16) for n, a in arrays(**shapes).items()}
    (want,) = stock(model, optimized=True).run(["x.grad"], feeds)
    program = program_of(model, feeds)
    assert not [c for c in program.calls if any("ReduceSum" in node for node in c.nodes)]
    found = interpret(program, feeds, weights_of(model))["x.grad"].astype(np.float64)
    # roundings to float16 of sums of 144 products, in four layers
    assert np.abs(found - want).max() <= 4e-3 * np.abs(want.astype(np.float64)).max()


GROUP_NORM = """agraph (float16[2,16,9,8] x, float16[32,16,3,3] u, float16[32,32,3,3] v,
                       float16[32] s, float16[32] b) => (float16[2,32,9,8] y) {
    a = Conv<pads=[1,1,1,1]>(x, u) n = GroupNormalization<num_groups=4>(a, s, b)
    g = Sigmoid(n) h = Mul(n, g) y = Conv<pads=[1,1,1,1]>(h, v) }"""


def test_a_group_norm_between_two_convolutions_copies_nothing():
    """Its statistics are of columns, and the pass that applies them has the activation."""
    model = text_model(GROUP_NORM)
    rewrite.optimize(model)
    kernels = [c.kernel.partition(" ")[0] for c in lowered(model).calls]
    first, last = kernels.index("Conv"), len(kernels) - 1 - kernels[::-1].index("Conv")
    between = kernels[first + 1 : last]
    assert between.count("Copy") <= 1, kernels  # of the second filter, which is an input
    assert not any(k in ("Silu", "Sigmoid", "Mul") for k in between), kernels


@pytest.mark.parametrize("act", ["", "Silu"])
@pytest.mark.parametrize("row", group_norms.GROUPED, ids=str)
def test_the_gradient_of_a_group_norm_stays_in_the_stretch(row: tuple[int, ...], act: str) -> None:
    """It takes two passes over the images, and writes dx in their order."""
    sizes = dict(zip("nhcg", row, strict=True))
    text = group_norms.GRAD.format(act=act, **sizes)
    problems = [c.problem for c in lowered(text).calls]
    grads = [p for p in problems if isinstance(p, GroupGrad)]
    assert [p.stage for p in grads] == ["sums", "params", "dx"]
    assert all(p.last for p in grads)


STEP = """agraph (float[2,16,8,8] x, float[32,16,3,3] u, float[32,1,1] s,
                  float[32,1,1] b, float[16,32,3,3] v) => (float[2,16,8,8] y)
    <int64[3] by_group = {0, 8, -1}, float[8] one = {1, 1, 1, 1, 1, 1, 1, 1},
     float[8] zero = {0, 0, 0, 0, 0, 0, 0, 0}> {
    a = Conv<pads=[1,1,1,1]>(x, u) whole = Shape(a) g = Reshape(a, by_group)
    i = InstanceNormalization<epsilon=0.001>(g, one, zero) n = Reshape(i, whole)
    m = Mul(n, s) z = Add(m, b) e = Sigmoid(z) h = Mul(z, e) y = Conv<pads=[1,1,1,1]>(h, v) }"""


def test_a_step_takes_the_moments_of_a_group_norm_once() -> None:
    """As exporters write it, with SiLU: two passes backward, and three that make the statistics."""
    model = with_weights(text_model(STEP), lambda v: np.full(v.shape.numpy(), 0.5, np.float32))
    graph, _ = training_model(
        model, loss="mse", optimizer=optim.SGD(lr=0.1), precision="bf16", level=2, fused=True
    )
    problems = [c.problem for c in lowered(graph, size=2).calls]
    grads = [p for p in problems if isinstance(p, GroupGrad)]
    assert [(p.stage, p.act, p.last) for p in grads] == [
        (stage, "silu", True) for stage in ("sums", "params", "dx")
    ]
    moments = [p for p in problems if isinstance(p, Reduce) and p.reducer == "Moments"]
    assert sum(not p.from_state for p in moments) == 1
    assert sum(isinstance(p, ChannelNorm) for p in problems) == 1
