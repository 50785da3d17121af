"""Every gradient rule against central differences through onnxruntime: one row per op and variant.

Each row runs twice, with static shapes and with every axis dynamic, under its own symbol. The
difference quotient is of fourth order, (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h: in float64 it
is exact to some 1e-10. Rows in float32 (onnxruntime has no float64 CPU kernel of the op, or of one
in its gradient) are exact to the rounding of f over h, some 1e-5 of the sum of |dy y|.
"""

from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
from gradient_layers import ATTENTION, GRID, LOSS, NORM, QUANTIZED, RESIZE
from gradient_loops import LOOPS, OTHER_RECURRENT, RECURRENT
from gradient_rows import BINARY, F32, F64, INDEXING, MATMUL, REDUCE, SHAPE, UNARY, rng, within
from gradient_windows import CONV, POOL
from onnx import TensorProto, helper, numpy_helper
from support import assert_near, parsed, stock

from onnx_fuse import autodiff, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import text_model

onnxruntime.set_default_logger_severity(4)
STEP = {F64: 2.0**-10, F32: 2.0**-6}
TOLERANCE = {F64: 1e-8, F32: 3e-5}
ROWS = [
    *(*UNARY, *BINARY, *MATMUL, *REDUCE, *SHAPE, *INDEXING, *NORM),
    *(*CONV, *POOL, *RESIZE, *GRID, *ATTENTION, *QUANTIZED, *LOSS, *RECURRENT, *LOOPS),
    *OTHER_RECURRENT,
]


def symbolic(name, array, axes):
    """The shape with a symbol for each dynamic axis (True for all)."""
    chosen = range(array.ndim) if axes is True else axes or ()
    return [f"{name}{i}" if i in chosen else size for i, size in enumerate(array.shape)]


def build(case, arrays, dynamic):
    """The row as a model; float arrays are inputs, others initializers unless `runtime`."""
    function = onnx.parser.parse_function(
        f'<opset_import: ["" : {case.opset}], domain: "t">\nf ({", ".join(arrays)}) => '
        f"({', '.join(case.outputs)}) {{\n{case.body}\n}}"
    )
    inputs, initializers = [], []
    for name, array in arrays.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        if name in case.fixed or (array.dtype.kind != "f" and name not in case.runtime):
            initializers.append(numpy_helper.from_array(array, name))
            continue
        shape = symbolic(name, array, dynamic and name not in case.static and case.dynamic)
        inputs.append(helper.make_tensor_value_info(name, kind, shape))
    kind = TensorProto.DOUBLE if case.dtype is F64 else TensorProto.FLOAT
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in case.outputs]
    graph = helper.make_graph(list(function.node), "g", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", case.opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    feeds = {i.name: arrays[i.name] for i in inputs}
    for value, found in zip(
        graph.output, session(model).run(list(case.outputs), feeds), strict=True
    ):
        shape = symbolic(value.name, found, dynamic and case.dynamic)
        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shape))
    del model.graph.output[:]
    model.graph.output.extend(graph.output)
    return model


session = partial(stock, optimized=True)


def draw(case):
    generator = rng(7)
    arrays = {}
    for name, value in case.inputs.items():
        array = generator.standard_normal(value) if isinstance(value, tuple) else np.asarray(value)
        cast = array.dtype.kind == "f" and name not in case.fixed
        arrays[name] = array.astype(case.dtype) if cast else array
        if name in case.fixed and array.dtype == np.float64 and case.dtype is F32:
            arrays[name] = array.astype(np.float32)
    return arrays


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_against_differences(case, dynamic):
    arrays = draw(case)
    model = build(case, arrays, dynamic)
    forward = session(model)
    fed = {i.name for i in forward.get_inputs()}
    feeds = {name: array for name, array in arrays.items() if name in fed}
    wrt = [name for name, array in feeds.items() if array.dtype.kind == "f"]
    outputs = forward.run(list(case.outputs), feeds)
    generator = rng(11)
    dys = [np.asarray(generator.standard_normal(y.shape), case.dtype) for y in outputs]

    def objective(step, direction):
        moved = {
            name: np.asarray(feeds[name] + step * direction[name], case.dtype)
            if name in direction
            else feeds[name]
            for name in feeds
        }
        found = forward.run(list(case.outputs), moved)
        return sum(
            float(np.vdot(np.float64(dy), np.float64(y))) for dy, y in zip(dys, found, strict=True)
        )

    backward = session(autodiff.gradient(model, wrt=wrt))
    cotangents = {f"{name}.grad": dy for name, dy in zip(case.outputs, dys, strict=True)}
    grads = dict(
        zip(
            wrt,
            backward.run([f"{name}.grad" for name in wrt], {**feeds, **cotangents}),
            strict=True,
        )
    )
    for name in wrt:
        assert grads[name].shape == feeds[name].shape
        assert grads[name].dtype == feeds[name].dtype
    h = STEP[case.dtype]
    scale = sum(float(np.abs(dy * y).sum()) for dy, y in zip(dys, outputs, strict=True)) + 1
    for names in (*([name] for name in wrt), wrt):
        for _ in range(3):
            direction = {n: np.asarray(generator.uniform(-1, 1, feeds[n].shape)) for n in names}
            f = [objective(k * h, direction) for k in (-2, -1, 1, 2)]
            expected = (8 * (f[2] - f[1]) - (f[3] - f[0])) / (12 * h)
            got = sum(float(np.vdot(direction[n], np.float64(grads[n]))) for n in names)
            assert got == pytest.approx(expected, abs=TOLERANCE[case.dtype] * scale), names


# What no gradient is told of without sizes, and the same of what onnx says wrong (1.23).
NEEDS_SIZES = (
    "its step or the length of its frames is not constant",
    "its signal is complex, or may be",
    "the number of its blocks is not known",
    "the size of its kernel is not known",
    "its numbers of heads are not static",
    "with a dynamic number of channels",
)
WRONG_SIZES = {  # inference gives them a last axis of size 0
    *("Attention 3-D", "Attention 3-D causal, mask")
}


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_a_gradient_without_any_size_loads(case):
    if case.name in WRONG_SIZES:
        pytest.skip("onnx.shape_inference takes an unknown width for 0")
    model = build(case, draw(case), dynamic=True)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    floats = (TensorProto.FLOAT, TensorProto.DOUBLE)
    wrt = [v.name for v in model.graph.input if v.type.tensor_type.elem_type in floats]
    reason = ""
    try:
        session(autodiff.gradient(model, wrt=wrt))
    except ModelError as error:
        reason = str(error)
    assert not reason or reason.endswith(NEEDS_SIZES)


def test_sums_of_rows_in_16_bits_run_on_the_cpu():
    """An embedding's gradient: onnxruntime's CPU has scattered sums of 32 and 64 bits alone."""
    text = (
        '<ir_version: 10, opset_import: ["" : 23]>\n'
        "g (int32[3] i, int64[3, 1] e) => (float16[3, 2] y, float16[3, 2] z, float16[2, 3] k) "
        "{ y = Gather (w, i) z = GatherND (u, e) k = Gather <axis = 1> (v, i) }"
    )
    model = onnx.parser.parse_model(text)
    for name, shape in (("w", (4, 2)), ("v", (2, 4)), ("u", (4, 2))):
        array = within(-1, 1, *shape).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    i = np.array([3, 0, 3], np.int32)
    dy = np.array([[1, 2], [3, 4], [5, 6]], np.float16)
    feeds = {"i": i, "e": np.int64(i)[:, None], "y.grad": dy, "z.grad": dy, "k.grad": dy.T}
    dw, dv, du = session(autodiff.gradient(model)).run(["w.grad", "v.grad", "u.grad"], feeds)
    expected = np.array([[3, 4], [0, 0], [0, 0], [6, 8]], np.float16)
    for got in (dw, dv.T, du):
        np.testing.assert_array_equal(got, expected, strict=True)


def test_a_clamp_in_float16_keeps_the_gradient():
    """onnxruntime computes the sum in float32 and rounds it for one of its readers alone."""
    model = parsed(
        "g (float16[64] a, float16[64] b) "
        "=> (float16[64] y) { low = Constant <value_float = -9.0> ()"
        "  high = Constant <value_float = 9.0> ()  l = CastLike (low, a)  h = CastLike (high, a)"
        "  s = Add (a, b)  m = Max (s, l)  y = Min (m, h) }"
    )
    rng = np.random.default_rng(0)
    feeds = {name: rng.uniform(-1, 1, 64).astype(np.float16) for name in "ab"}
    backward = session(autodiff.gradient(model, wrt=["a"]))
    [found] = backward.run(["a.grad"], feeds | {"y.grad": np.ones(64, np.float16)})
    np.testing.assert_array_equal(found, 1)


WEIGHTS = "double[8] g, double[8] b, double[8,3] w, double[3] c"
IN_DOUBLE = {
    "LayerNormGemm": "n = LayerNormalization (x, g, b) m = MatMul (n, w) y = Add (m, c)",
    "LayerNormGemmRelu": "n = LayerNormalization (x, g, b) t = Gemm (n, w, c) y = Relu (t)",
    "SkipLayerNorm": """s = Add (x, e) n = LayerNormalization (s, g, b) o = Mul (s, n)
      m = MatMul (o, w) y = Add (m, c)""",
}


@pytest.mark.parametrize("name", IN_DOUBLE)
def test_gradients_of_fused_norms_are_exact_in_double(name):
    """LayerNormalization gives its mean and deviation in float32, whatever x is."""
    extra = ", double[5,8] e" if " e)" in IN_DOUBLE[name] else ""
    model = parsed(
        f"f (double[5,8] x, {WEIGHTS}{extra}) => (double[5,3] y) {{ {IN_DOUBLE[name]} }}"
    )
    feeds = {v.name: rng(i).standard_normal(shape_of(v)) for i, v in enumerate(model.graph.input)}
    seeds = {**feeds, "y.grad": rng(9).standard_normal((5, 3))}
    fused = load(model)
    rewrite.optimize(fused, training=True)
    assert name in {node.op_type for node in fused.graph}
    expected, got = (
        dict(zip(names, session(gradient).run(names, seeds), strict=True))
        for gradient in (autodiff.gradient(m, wrt=[*feeds]) for m in (model, fused))
        for names in [[f"{v}.grad" for v in feeds]]
    )
    assert_near(got, expected, rtol=1e-11, atol=1e-13)


def plain_and_fused(text, feeds, wanted=""):
    """(model, gradients by input) of a loss, without and with operators of ours in its backward."""
    found = []
    for fused in (False, True):
        model = text_model(text)
        inputs = [v for v in model.graph.inputs if v.name in (wanted.split() or feeds)]
        loss = {model.graph.outputs[0]: None}
        gradients = autodiff.backward(model, loss, inputs, fused=fused)
        model.graph.outputs.extend(gradients.values())
        names = [v.name for v in gradients.values()]
        made = session(model).run(names, feeds)
        found.append((model, dict(zip(gradients, made, strict=True))))
    return found


def shape_of(info):
    return [d.dim_value for d in info.type.tensor_type.shape.dim]
