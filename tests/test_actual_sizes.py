"""Sizes and values of Resize, Upsample and pools: onnxruntime's, in inference and in programs.

One model holds all nodes of a table, each with an input and an output of its own.
"""

from itertools import product

import numpy as np
import onnx
import pytest
from lowering import program_of, weights_of
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as errors
from support import answers, assert_near, stock, with_weights

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower import walk
from onnx_fuse.program.interpret import interpret
from onnx_fuse.validation.gradients import check_gradients
from onnx_fuse.validation.reference import Reference

SCALES = (0.3, 0.5, 0.7, 1.0, 1.2, 1.3, 2.0, 2.5)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
TRANSFORMS = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")


class Table:
    """A model of many nodes, and what they read."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[onnx.TensorProto] = []
        self.feeds: dict[str, np.ndarray] = {}

    def add(self, op: str, shape: tuple[int, ...], *more: object, **attributes: object) -> None:
        """A node that reads a random array of `shape`, and constants; None leaves one out."""
        k = len(self.nodes)
        rng = np.random.default_rng(k)
        self.feeds[f"x{k}"] = rng.standard_normal(shape).astype(np.float32)
        names = [f"x{k}"]
        for i, array in enumerate(more):
            names.append("" if array is None else f"c{k}_{i}")
            if array is not None:
                self.held.append(numpy_helper.from_array(np.asarray(array), names[-1]))
        self.nodes.append(helper.make_node(op, names, [f"y{k}"], f"n{k}", **attributes))

    def model(self) -> bytes:
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape)
            for name, x in self.feeds.items()
        ]
        types = {"i": TensorProto.INT64, "h": TensorProto.FLOAT16, "y": TensorProto.FLOAT}
        outputs = [
            helper.make_tensor_value_info(name, types[name[0]], None)
            for node in self.nodes
            for name in node.output
        ]
        graph = helper.make_graph(self.nodes, "table", inputs, outputs, self.held)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def pools(opset: int) -> Table:
    table = Table(opset)
    pads = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1))
    modes = [("NOTSET", around) for around in pads]
    modes += [(auto, (0, 0)) for auto in ("VALID", "SAME_UPPER", "SAME_LOWER")]
    for op, k, s, d, (auto, around), ceil in product(
        ("MaxPool", "AveragePool", "LpPool"), (1, 2, 3), (1, 2, 3), (1, 2), modes, (0, 1)
    ):
        since = {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[op]
        if (d > 1 and opset < since) or (ceil and opset < min(since, 10)):
            continue
        if op == "LpPool" and ceil and opset < 18:
            continue
        for size in (4, 7):
            reach = d * (k - 1) + 1
            if max(around) >= k or reach > size or (auto.startswith("SAME") and s > k):
                continue  # onnxruntime refuses the rest
            attributes: dict[str, object] = {"kernel_shape": [k], "strides": [s]}
            attributes |= {"pads": around} if auto == "NOTSET" else {"auto_pad": auto}
            attributes |= {"dilations": [d]} if d > 1 else {}
            attributes |= {"ceil_mode": 1} if ceil else {}
            table.add(op, (1, 1, size), **attributes)
    return table


def sampled_pools(opset: int) -> Table:
    """Pools of any window that onnxruntime takes: beyond the padding, in holes, with indices."""
    table, rng = Table(opset), np.random.default_rng(opset)
    while len(table.nodes) < 150:
        n, op = int(rng.integers(1, 3)), str(rng.choice(["MaxPool", "AveragePool", "LpPool"]))
        auto = str(rng.choice(["NOTSET"] * 3 + ["SAME_UPPER", "SAME_LOWER", "VALID"]))
        size, kernel, strides = (rng.integers(1, most, n) for most in (7, 5, 4))
        attributes: dict[str, object] = {"kernel_shape": kernel, "strides": strides}
        how = {"pads": rng.integers(0, 3, 2 * n)} if auto == "NOTSET" else {"auto_pad": auto}
        if opset >= {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[op]:
            attributes |= {"dilations": rng.integers(1, 3, n)}
        if op != "LpPool" or opset >= 18:
            attributes |= {"ceil_mode": int(rng.integers(2))}
        attributes |= {"count_include_pad": int(rng.integers(2))} if op == "AveragePool" else {}
        table.add(op, (1, 2, *size), **attributes, **how)
        if op == "MaxPool" and rng.integers(2):
            table.nodes[-1].output.append(f"i{len(table.nodes) - 1}")
        alone = Table(opset)
        name = table.nodes[-1].input[0]
        alone.nodes, alone.feeds = table.nodes[-1:], {name: table.feeds[name]}
        try:
            answers(stock(alone.model()), alone.feeds)
        except (errors.Fail, errors.InvalidArgument, errors.RuntimeException):
            table.feeds.pop(name)
            table.nodes.pop()
    return table


def pools_of_padding(opset: int) -> Table:
    """The largest of windows of which some lie in the padding alone, in float16."""
    table = Table(opset)
    window = {"kernel_shape": [3, 2], "dilations": [1, 2], "strides": [1, 3]}
    for size in (1, 2, 5):
        table.add("Cast", (1, 2, size, size), to=TensorProto.FLOAT16)
        half = table.nodes[-1].output[0] = f"h{size}"
        pool = helper.make_node("MaxPool", [half], [f"h{size}y"], auto_pad="SAME_LOWER", **window)
        table.nodes.append(pool)
    return table


def resizes(opset: int) -> Table:
    table = Table(opset)
    lengths = (2, 5, 7) if opset in (13, 18) else (1, 2, 3, 5, 8)
    if opset < 11:
        for size, scale, mode in product(range(1, 10), SCALES, ("nearest", "linear")):
            if opset == 10:
                table.add("Resize", (size, 2), np.float32([scale, 1]), mode=mode)
            elif scale >= 1 and opset == 9:
                table.add("Upsample", (size, 2), np.float32([scale, 1]), mode=mode)
            elif scale >= 1:
                table.add("Upsample", (size, 2), mode=mode, scales=[scale, 1.0])
        return table
    empty = np.float32([]) if opset < 13 else None
    transforms = [*TRANSFORMS]
    transforms += ["tf_half_pixel_for_nn"] if opset == 11 else []
    transforms += ["half_pixel_symmetric"] if opset >= 19 else []
    for size, scale, how in product(lengths, SCALES, transforms):
        key = "coordinate_transformation_mode"
        scales = np.float32([scale, 1])
        for nearest in NEAREST:
            table.add(
                "Resize", (size, 2), empty, scales, mode="nearest", nearest_mode=nearest,
                **{key: how},
            )  # fmt: skip
        table.add("Resize", (size, 2), empty, scales, mode="linear", **{key: how})
        table.add(
            "Resize", (size, 2), empty, scales, mode="cubic", exclude_outside=size % 2, **{key: how}
        )
        if opset >= 18:
            for mode in ("linear", "cubic"):
                table.add("Resize", (size, 2), empty, scales, mode=mode, antialias=1, **{key: how})
    for size, new, how, nearest in product(lengths[::2], (1, 2, 4, 9), transforms, NEAREST):
        sizes = np.int64([new, 2])
        table.add(
            "Resize", (size, 2), empty, empty, sizes, mode="nearest", nearest_mode=nearest,
            coordinate_transformation_mode=how,
        )  # fmt: skip
        for policy in ("not_larger", "not_smaller") if opset >= 18 else ():
            table.add(
                "Resize", (size, 2), None, None, sizes, mode="nearest", nearest_mode=nearest,
                coordinate_transformation_mode=how, keep_aspect_ratio_policy=policy,
            )  # fmt: skip
    return table


def turned(opset: int) -> Table:
    """ConvTransposes with SAME, output_padding and dilations, and to less than their images."""
    table = Table(opset)
    for sizes in ([3, 9], [7, 3], [2, 4]):
        weight = np.ones((1, 2, 1, 3), np.float32)
        table.add("ConvTranspose", (2, 1, 7, 8), weight, output_shape=sizes)
    for size, k, s, d, more, auto in product(
        (1, 2, 5), (1, 2, 3), (1, 2, 3), (1, 2), (0, 1), ("SAME_UPPER", "SAME_LOWER", "VALID")
    ):
        if more < s:
            table.add(
                "ConvTranspose", (1, 1, size), np.ones((1, 1, k), np.float32), strides=[s],
                dilations=[d], auto_pad=auto, output_padding=[more],
            )  # fmt: skip
    return table


def convolutions(opset: int) -> Table:
    """Convs with SAME, which cuts where the stride is larger than the kernel, and over nothing."""
    table = Table(opset)
    for size, k, s, auto in product((1, 5, 8), (1, 2, 3), (1, 2, 4, 6), SAME):
        weight = np.arange(1, k + 1, dtype=np.float32).reshape(1, 1, k)
        table.add("Conv", (1, 1, size), weight, strides=[s], auto_pad=auto)
    for op, (x, w), groups in product(
        ("Conv", "ConvTranspose"),
        (
            ((0, 4, 5), (4, 4, 3)), ((2, 0, 5), (4, 0, 3)), ((2, 0, 5), (32, 0, 1)),
            ((2, 4, 5), (0, 4, 3)), ((2, 4, 0), (4, 4, 3)),
        ),
        (1, 2),
    ):  # fmt: skip
        w = (w[0], w[1] // groups, w[2]) if op == "Conv" else (x[1], w[0] // groups, w[2])
        pads = [2, 2] if op == "Conv" and not x[2] else [0, 0]
        filters = w[0] if op == "Conv" else w[1] * groups
        bias = np.arange(filters, dtype=np.float32)
        table.add(op, x, np.ones(w, np.float32), bias, group=groups, pads=pads)
    return table


SAME = ("SAME_UPPER", "SAME_LOWER")


def slopes(opset: int) -> Table:
    """PRelu whose input is broadcast to the slope."""
    table = Table(opset)
    for x, slope in product(((1, 4, 1, 1), (3, 4, 1, 2)), ((3, 1, 1, 1), (3, 1, 5, 1), (5, 2))):
        table.add("PRelu", x, np.random.default_rng(len(slope)).random(slope, np.float32))
    return table


def broadcasts(opset: int) -> Table:
    """Letters of an Einsum with two sizes, and an Attention with one query and a mask's rows."""
    table, rng = Table(opset), np.random.default_rng(0)
    for one, other in (((1, 2, 3), (5, 2, 3)), ((5, 1, 3), (1, 2, 3)), ((5, 2, 3), (5, 2, 1))):
        for result in ("b", "bij", "ji"):
            held = rng.random(other, np.float32)
            table.add("Einsum", one, held, equation=f"bij,bij->{result}")
    k, v = rng.random((2, 2, 2, 3, 4), np.float32)
    for mask in ((5, 3), (1, 1, 5, 3), (5, 2)):
        table.add("Attention", (2, 4, 1, 4), k, v, rng.random(mask) < 0.7)
    return table


TABLES = {
    "broadcasts": (broadcasts, 26),
    "convolutions": (convolutions, 22),
    **{f"pools of opset {v}": (pools, v) for v in (10, 22)},
    **{f"sampled pools of opset {v}": (sampled_pools, v) for v in (11, 18, 19, 22)},
    **{f"resizes of opset {v}": (resizes, v) for v in (7, 9, 10, 11, 13, 18, 19)},
    "transposed convolutions": (turned, 11),
    "pools of padding": (pools_of_padding, 22),
    "slopes": (slopes, 16),
}


@pytest.fixture
def calls_apart(monkeypatch):
    """Calls stay apart, as nodes are: to join hundreds takes longer than all else."""
    monkeypatch.setattr(walk.program_passes, "run", lambda calls, keep, low: calls)


@pytest.mark.usefixtures("calls_apart")
@pytest.mark.parametrize("name", TABLES)
def test_sizes_and_values_are_onnxruntimes(name):
    make, opset = TABLES[name]
    table = make(opset)
    expected = answers(stock(table.model()), table.feeds)
    model = load(table.model())
    infer_shapes(model)
    for node in model.graph:
        y = node.outputs[0]
        if y.is_graph_output() and y.shape is not None:
            actual = expected[y.name].shape
            known = [(d, n) for d, n in zip(y.shape, actual, strict=True) if isinstance(d, int)]
            assert all(d == n for d, n in known), (node.op_type, node.attributes, actual)
    rewrite.optimize(model, level=2)
    optimized = answers(stock(model), table.feeds)
    assert_near(optimized, expected, rtol=1e-6, atol=1e-6)
    program = program_of(model, table.feeds)
    got = interpret(program, table.feeds, weights_of(model))
    assert_near(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("calls_apart")
@pytest.mark.parametrize("opset", [11, 18])
def test_the_evaluator_of_gradient_checks_resizes_as_onnxruntime_does(opset):
    table = resizes(opset)
    expected = answers(stock(table.model()), table.feeds)
    found = Reference(load(table.model())).run(list(expected), table.feeds)
    assert_near(dict(zip(expected, found, strict=True)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", ["20,30", "h,w"])
def test_gradients_behind_sizes_that_inference_has_wrong(size):
    rng = np.random.default_rng(0)
    model = text_model(f"""g (float[2,1,{size}] x, float[3,1,3,3] w) => (float[] y)
    <float[4] sc = {{1,1,1.3,1.3}}>
    {{ r = Resize <mode = "linear"> (x, "", sc)
       p = MaxPool <kernel_shape = [1,1], strides = [2,2], ceil_mode = 1> (r)
       y = Conv <pads = [1,1,1,1]> (p, w) }}""")
    feeds = {
        "x": rng.standard_normal((2, 1, 20, 30)).astype(np.float32),
        "w": rng.standard_normal((3, 1, 3, 3)).astype(np.float32),
    }
    with_weights(model, {"w": feeds.pop("w")})
    check = check_gradients(model, feeds=feeds)
    assert check.ok
    assert [e.tensor for e in check.errors] == ["w"]


RESIZED = """g (float[1,1,3,3] x) => (float[1,1,3,3] y)
  <float[4] sc = {1, 1, 1.7, 1.7}, float[1,1,2,2] w = {1, 2, 3, 4}>
  { r = Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (w, "", sc)
  y = Add (r, x) }"""
RANKED = """g (float[B,3] x) => (float[D] y) <float[3] w = {1, 2, 3}, int64 zero = {0}>
  { z = Mul (x, w)  s = Shape (z)  n = Size (s)  t = Equal (n, zero)
  y = If (t) <then_branch = a () => (float[] p) { p = Squeeze (z) },
    else_branch = b () => (float[D] q) { q = Identity (z) }> }"""


def test_the_gradient_of_a_weight_that_scales_resize():
    assert check_gradients(text_model(RESIZED)).ok


BUCKETS = """g (float[N,2] x) => (float[N,2] y)
  <float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float eight = {8}, float c = {2.7725887}>
  { n = Shape <end = 1> (x)  f = Cast <to = 1> (n)  h = Div (f, eight)  l = Log (h)
  q = Div (l, c)  m = Mul (q, eight)  i = Cast <to = 7> (m)  r = Gather (w, i)  y = Mul (x, r) }"""


def test_the_bucket_of_a_distance_is_one_in_float64_too():
    feeds = {"x": np.ones((16, 2), np.float32)}
    assert check_gradients(text_model(BUCKETS), feeds=feeds).ok


def test_an_end_has_the_rank_of_the_branch_that_is_taken():
    model = text_model(RANKED)
    rewrite.optimize(model, level=0)
    assert str(model.graph.outputs[0].shape) == "[B,3]"
