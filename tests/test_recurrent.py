"""LSTM, GRU and RNN for our own kernels: the step operators' bodies, what is launched, the code."""

import numpy as np
import onnx_ir as ir
import pytest
from compiled import unclean
from gradient_loops import RECURRENT
from lowering import lowered
from support import assert_same
from test_gradients import build, draw, session

from onnx_fuse import autodiff
from onnx_fuse.guard import in_child
from onnx_fuse.ir.build import Builder, text_model
from onnx_fuse.lower.recurrent import recurrent
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime import ort
from onnx_fuse.session import load

KINDS = {
    "LSTM": (4, ""),
    "GRU": (3, ""),
    "GRU linear": (3, ", linear_before_reset = 1"),
    "RNN": (1, ""),
    "RNN relu": (1, ', activations = ["Relu"]'),
}


def node_of(kind: str, steps: int, batch: int, hidden: int) -> ir.Model:
    gates, more = KINDS[kind]
    return text_model(
        f"agraph (float[{steps},{batch},6] x, float[1,{gates * hidden},6] w, "
        f"float[1,{gates * hidden},{hidden}] r, float[1,{2 * gates * hidden}] b) => "
        f"(float[{steps},1,{batch},{hidden}] y) "
        f"{{ y = {kind.split()[0]} <hidden_size = {hidden}{more}> (x, w, r, b) }}"
    )


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.name)
def test_the_step_operators_bodies_are_the_node(case) -> None:
    arrays = draw(case)
    proto = build(case, arrays, dynamic=False)
    feeds = {v.name: arrays[v.name] for v in proto.graph.input}
    expected = session(proto).run(list(case.outputs), feeds)
    model = ir.serde.deserialize_model(proto)
    (node,) = model.graph
    op = Builder()
    shapes = [None if v is None else tuple(v.shape.numpy()) for v in node.inputs]
    results = recurrent(op, node, shapes, lambda i: None)
    assert results is not None
    assert sum(n.op_type.endswith("Steps") for n in op.nodes) == arrays["w"].shape[0]
    outputs = []
    for value, result in zip(node.outputs, results, strict=False):
        if value.name:
            result.name, result.type, result.shape = value.name, value.type, value.shape
            outputs.append(result)
    for i, inner in enumerate(op.nodes):
        for k, value in enumerate(inner.outputs):
            value.name = value.name or f"v{i}_{k}"
    model.graph.outputs.clear()
    model.graph.remove(node)
    model.graph.extend(op.nodes)
    model.graph.outputs.extend(outputs)
    found = session(model).run(list(case.outputs), feeds)
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_launches_do_not_grow_with_the_steps(kind: str) -> None:
    backward = autodiff.gradient(node_of(kind, 300, 2, 8), wrt=["x", "w", "r", "b"])
    program = lowered(backward)
    assert not program.fallbacks
    assert len(program.calls) < 30
    sources = [x.source for call in program.calls for x in call.launches]
    assert sources.count("recurrent/steps.cu") == sources.count("recurrent/steps_grad.cu") == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compile_without_spills(kind: str, dtype: str) -> None:
    """Weights in shared memory, too large for it, and without clusters."""
    shapes = [("H200", 2, 256)]
    if dtype == "float32":
        shapes += [("H200", 33, 130), ("H200", 2, 700), ("A100", 9, 100)]
    for chip, batch, hidden in shapes:
        backward = autodiff.gradient(node_of(kind, 2, batch, hidden), wrt=["x"])
        for value in (*backward.graph.inputs, *(v for n in backward.graph for v in n.outputs)):
            if value.dtype == ir.DataType.FLOAT:
                value.dtype = ir.DataType.from_numpy(np.dtype(dtype))
        for constant in backward.graph:
            if constant.op_type in ("Constant", "ConstantOfShape"):
                tensor = constant.attributes["value"].as_tensor()
                if tensor.dtype == ir.DataType.FLOAT:
                    array = tensor.numpy().astype(dtype)
                    constant.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))
        shapes_of = {v.name: (v.shape.numpy(), dtype) for v in backward.graph.inputs}
        hw = CHIPS[chip]
        program = lower(backward, shapes_of, hw)
        launches = [x for call in program.calls for x in call.launches]
        own = [x for x in launches if x.source.startswith("recurrent/")]
        assert {x.source for x in own} == {"recurrent/steps.cu", "recurrent/steps_grad.cu"}
        assert all(launch.smem <= hw.smem_per_block for launch in own)
        assert unclean(own, hw.arch) == []


@pytest.mark.parametrize("way", ["forward", "bidirectional"])
@pytest.mark.parametrize("operands", ["x, w, r", "x, w, r, , l, h0"])
@pytest.mark.parametrize("kind", [k for k in KINDS if "RNN" not in k])
def test_sequences_of_nothing_do_not_end_the_process(kind: str, operands: str, way: str) -> None:
    """As onnxruntime's RNN takes them: without a step y is empty, and the last state is 0."""
    (gates, more), count = KINDS[kind], 1 + (way == "bidirectional")
    model = text_model(
        f"agraph (float[T,B,I] x, float[{count},{gates * 3},I] w, float[{count},{gates * 3},3] r, "
        f"int32[B] l, float[{count},B,3] h0) => (float[T,{count},B,3] y, float[{count},B,3] h) "
        f'{{ y, h = {kind.split()[0]} <hidden_size = 3, direction = "{way}"{more}> ({operands}) }}'
    )

    def feeds(steps: int, batch: int, width: int, number: int) -> dict[str, np.ndarray]:
        arrays = {"x": np.full((steps, batch, width), number), "h0": np.ones((count, batch, 3))}
        arrays["w"] = np.full((count, gates * 3, width), number)
        arrays["r"] = np.linspace(-1, 1, count * gates * 9).reshape(count, gates * 3, 3)
        lengths = {"l": np.full(batch, steps, np.int32)}
        return {name: a.astype(np.float32) for name, a in arrays.items()} | lengths

    def run() -> list[list[np.ndarray]]:
        opened = ort.session(model)
        sizes = ((0, 2, 2, 1), (2, 0, 2, 1), (0, 0, 0, 1), (2, 2, 0, 1), (2, 2, 1, 0))
        return [opened.run(None, feeds(*each)) for each in sizes]

    *nothing, without_input, of_zeros = in_child(run)
    for (y, h), (steps, batch) in zip(nothing, ((0, 2), (2, 0), (0, 0)), strict=True):
        assert y.shape == (steps, count, batch, 3)
        np.testing.assert_array_equal(h, np.zeros((count, batch, 3), np.float32), strict=True)
    assert_same(without_input, of_zeros, rtol=1e-6)


@pytest.mark.parametrize(("axis", "end"), [(0, 0), (1, 0), (-1, -1), (-2, 1)])
def test_a_scan_of_no_steps_does_not_end_the_process(axis: int, end: int) -> None:
    """Its states are the first ones, its results empty; with steps it is what it was."""
    x, y = (("N,3" if each in (0, -2) else "3,N") for each in (axis, end))
    model = text_model(f"""agraph (float s, float[3] a, float[{x}] x)
        => (float t, float[3] b, float[{y}] y) {{ t, b, y = Scan <num_scan_inputs = 1,
        scan_input_axes = [{axis}], scan_output_axes = [{end}], body = body (float p, float[3] q,
        float[3] v) => (float o, float[3] c, float[3] d)
        {{ o = Mul (p, p) c = Add (q, v) d = Mul (c, a) }}> (s, a, x) }}""")

    def run() -> list[list[np.ndarray]]:
        opened, first = ort.session(model), {"s": np.array(3, "f"), "a": np.arange(3, dtype="f")}
        xs = [np.ones((n, 3) if axis in (0, -2) else (3, n), np.float32) for n in (0, 2)]
        return [opened.run(None, first | {"x": each}) for each in xs]

    (t, b, empty), (t2, b2, full) = in_child(run)
    rows = np.array([[0, 2, 6], [0, 3, 8]], np.float32)
    assert (float(t), float(t2), b.tolist(), b2.tolist()) == (3, 81, [0, 1, 2], [2, 3, 4])
    assert empty.shape == ((0, 3) if end == 0 else (3, 0))
    np.testing.assert_array_equal(full if end == 0 else full.T, rows)


def test_an_empty_sequence_of_a_written_out_node_ends_in_zeros() -> None:
    """Peepholes have no step operator: the steps are written out."""
    model = text_model(
        "agraph (float[3,2,6] x, float[2,16,6] w, float[2,16,4] r, int32[2] l, float[2,2,4] h0, "
        "float[2,2,4] c0, float[2,12] p) => (float[3,2,2,4] y, float[2,2,4] h, float[2,2,4] c) {"
        ' y, h, c = LSTM <hidden_size = 4, direction = "bidirectional"> (x, w, r, , l, h0, c0, p) }'
    )
    rng, lengths = np.random.default_rng(0), {"l": np.array([0, 2], np.int32)}
    feeds = {v.name: rng.standard_normal(v.shape.numpy(), np.float32) for v in model.graph.inputs}
    expected = ort.run(ort.session(model.clone()), feeds | lengths)
    answers = interpret(lowered(load(model)), feeds | lengths, {})
    assert_same([answers[name] for name in "yhc"], expected, rtol=1e-5, atol=1e-6)
