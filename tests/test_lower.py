"""lower: Programs of real and small graphs, run by NumPy against onnxruntime; no GPU."""

import numpy as np
import pytest
from compiled import unclean
from lowering import (
    GRAPHS,
    H200,
    X,
    arrays,
    assert_program,
    interpreted,
    lowered,
    program_of,
    two_norms,
    weights_of,
    with_values,
)
from support import assert_near, drawn, stock

from onnx_fuse import rewrite, session
from onnx_fuse.cuda import pointwise
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import reduce as reduce_kernels
from onnx_fuse.kernels import site
from onnx_fuse.lower import context, elementwise, views, walk
from onnx_fuse.program.call import NeedsValues, Tensor, reshape_strides
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS, GemmProblem
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.states import SOUND, guarded
from onnx_fuse.training import optim
from onnx_fuse.training.backends import CombinedGradients
from onnx_fuse.training.options import TrainingOptions
from onnx_fuse.training.step import training_model
from onnx_fuse.training.trainer import Trainer


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("size", [10, 129, 256])
def test_a_fourier_transform_is_rounded_once(size, inverse):
    """float32, and 0 where the sum is: numpy's own in float32 has 1.9e-7 there at size 10."""
    text = f"agraph (float[1,{size},10,2] x) => (float[1,{size},10,2] y) <int64 at = {{1}}>"
    model = text_model(f"{text} {{ y = DFT <inverse = {inverse}> (x, , at) }}")
    x = np.zeros((1, size, 10, 2), np.float32)
    x[..., 0] = np.arange(size * 10).reshape(1, size, 10)
    y = interpret(program_of(model, {"x": x}), {"x": x}, weights_of(model))["y"]
    exact = (np.fft.ifft if inverse else np.fft.fft)(x[..., 0].astype(np.float64), axis=1)
    exact = np.stack([exact.real, exact.imag], -1)
    # half a unit of float32, and the sum's own error in double
    error = 2.0**-24 * np.abs(exact) + 1e-15 * size * np.abs(x).max()
    assert (np.abs(y - exact) <= error).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("scale", ["4", "1", "3,1", "4,3,4", "4,1,1", "1,3,1", ""])
@pytest.mark.parametrize("bias", [None, "4", "1", "4,1,1"])
def test_the_scale_of_a_norm_is_broadcast(axis, scale, bias):
    text = f"g (float[4,3,4] x, float{f'[{scale}]' if scale else ''} s"
    text += f", float[{bias}] b" if bias else ""
    text += f") => (float[4,3,4] y, float[] m) {{ y, m = LayerNormalization <axis = {axis}> "
    model = text_model(text + f"(x, s{', b' if bias else ''}) }}")
    assert_program(model, drawn(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_gives_onnxruntimes_results(name):
    text, feeds = GRAPHS[name]
    assert_program(text_model(text), feeds)


# the four differ from the first by nothing, an attribute, the value of an input, a type
SUMS = """
agraph (float[3,3] x, double[3,3] z) => (float[1,3] a, float[1,3] b, float[3] c, float[3,1] d,
                                         double[1,3] e) {
    first = Constant<value_ints = [0]>()
    last = Constant<value_ints = [1]>()
    a = ReduceSum(x, first)
    n = Neg(x)
    b = ReduceSum(n, first)
    c = ReduceSum<keepdims = 0>(x, first)
    d = ReduceSum(x, last)
    e = ReduceSum(z, first)
}
"""


def test_equal_nodes_are_inferred_once(monkeypatch):
    """Those that differ by type, attribute or a small value are inferred by themselves."""
    model, asked, inner = text_model(SUMS), [], walk.Lowerer._infer_node

    def infer_node(self, node):
        asked.append(node.op_type)
        return inner(self, node)

    monkeypatch.setattr(walk.Lowerer, "_infer_node", infer_node)
    made = dict(lowered(model).outputs)
    assert asked.count("ReduceSum") == 4
    for value in model.graph.outputs:
        assert made[value.name].shape == tuple(value.shape)
        assert made[value.name].dtype == value.dtype.numpy().name


def test_rows_that_stand_apart_are_one_product():
    """As torch's MultiheadAttention asks for: a product for each place takes 20 times as long."""
    text, feeds = GRAPHS["a product of rows that stand apart"]
    model = text_model(text)
    program = program_of(model, feeds)
    [product] = [call.problem for call in program.calls if isinstance(call.problem, GemmProblem)]
    assert (product.m, product.batch) == (160, ())
    want = feeds["x"].swapaxes(0, 1) @ feeds["w"]
    np.testing.assert_allclose(interpret(program, feeds, {})["y"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("act", "bias"), [("", 1), ("Relu", 1), ("Gelu", 0), ("Tanh", 1)])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_a_filter_of_one_tap_is_a_product_with_all_that_follows(batch, act, bias, dtype, width):
    """Its bias a row of the product, the residual and the activation in the same epilogue.

    16-bit pixels of no whole 16 bytes a channel are copied to such rows first.
    """
    z = "y" if not act else "z"
    text = f"""agraph ({dtype}[{batch},24,7,{width}] x, {dtype}[32,24,1,1] w, {dtype}[32] b,
                       {dtype}[{batch},32,7,{width}] r) => ({dtype}[{batch},32,7,{width}] y)
    {{ c = Conv (x, w{", b" * bias}) {z} = Add (r, c) {f"y = {act} (z)" if act else ""} }}"""
    kind = {"float": "float32"}.get(dtype, dtype)
    shapes = {"x": (batch, 24, 7, width), "w": (32, 24, 1, 1), "b": (32,)}
    shapes["r"] = (batch, 32, 7, width)
    feeds = {n: a.astype(kind) for n, a in arrays(**shapes).items()}
    model = text_model(text)
    (expected,) = stock(model, optimized=True).run(None, feeds)
    rewrite.optimize(model)
    calls = program_of(model, feeds).calls
    copied = dtype == "float16" and width == 7
    assert [isinstance(c.problem, GemmProblem) for c in calls] == [False] * copied + [True]
    assert calls[-1].problem.op == "Gemm"
    assert calls[-1].problem.ldb == (56 if copied else 7 * width)
    (y,) = interpret(program_of(model, feeds), feeds, {}).values()
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol={"float16": 4e-2}.get(dtype, 1e-5))


def test_a_residual_stays_apart_where_no_kernel_adds_it_before_the_activation_as_fast():
    model = text_model("""agraph (float16[16,4096] x, float16[4096,4096] w, float16[16,4096] r)
    => (float16[16,4096] y) { m = MatMul (x, w) s = Add (m, r) y = Relu (s) }""")
    calls = lowered(model).calls
    product = next(c.problem for c in calls if isinstance(c.problem, GemmProblem))
    assert product.epilogue.residual or product.epilogue.beta == 1.0
    assert (len(calls) == 1) == bool(product.epilogue.act)


def test_the_floor_of_a_convolution_counts_its_products():
    text = (
        "agraph (float[2,64,32,32] x, float[64,64,3,3] w) => (float[2,64,32,32] y) "
        "{ y = Conv <pads = [1,1,1,1]> (x, w) }"
    )
    calls = lowered(text).calls
    floor = sum(site(call, H200).floor for call in calls)
    assert floor >= 2 * 2 * 64 * 32 * 32 * 64 * 9 / H200.rate("float32")


def test_the_copies_of_a_lowering_that_refuses_go_with_it(monkeypatch):
    def refuses(ctx, node):
        ctx.dense(node, 0)
        raise context.Unserved("unserved")

    table = {**elementwise.LOWERINGS, **views.LOWERINGS, ("", "Softmax"): refuses}
    monkeypatch.setattr(walk, "lowerings", lambda: table)
    monkeypatch.setattr(walk.Lowerer, "_body", lambda self, node: None)
    text = "agraph (float[3,4,6] x) => (float[6,4,3] y) "
    model, feeds = (
        text_model(text + "{ t = Transpose<perm=[2,1,0]>(x) y = Softmax(t) }"),
        {"x": X},
    )
    expected = np.exp(X.T) / np.exp(X.T).sum(-1, keepdims=True)
    got = interpret(program_of(model, feeds), feeds, {})
    np.testing.assert_allclose(got["y"], expected, rtol=1e-6)


def test_feeds_that_decide_about_shapes_are_asked_for():
    text = """agraph (float[6] x, int64[2] s) => (float[A,B] y)
    { e = Exp(x) t = Identity(s) y = Reshape(e, t) }"""
    model, feeds = text_model(text), {"x": np.zeros(6, np.float32), "s": np.array([2, 3])}
    with pytest.raises(NeedsValues) as needs:
        program_of(model, feeds)
    assert needs.value.names == ("s",)
    program = program_of(model, feeds, values={"s": feeds["s"]})
    assert not program.fallbacks
    assert dict(program.outputs)["y"].shape == (2, 3)


def test_large_feeds_are_not():
    text = "agraph (float[6] x, int64[200] s) => (int64[1,N] y) { y = NonZero(s) }"
    program = lowered(text)
    assert [stage.host for stage in program.stages] == [False]
    assert not program.fallbacks


def test_views_launch_nothing():
    program = lowered("""agraph (float[4,6] x) => (float[2,12] y)
    <int64[3] a = {2, 2, 6}, int64[2] b = {2, 12}>
    { r = Reshape(x, a) e = Exp(r) y = Reshape(e, b) }""")
    assert [call.kernel for call in program.calls] == ["Exp"]


def test_chain_is_one_kernel_that_stores_what_is_read_later():
    text = "agraph (float[8] x) => (float[8] y, float[8] z) { a = Exp(x) y = Neg(a) z = Mul(a, y) }"
    (call,) = lowered(text).calls
    assert [len(call.reads), len(call.writes)] == [1, 2]


def test_a_number_of_one_chain_is_worked_out_where_it_is_read():
    text = """agraph (float[8] x, float s) => (float[8] y) <float one = {1}>
        { r = Div(one, s) y = Mul(x, r) }"""
    (call,) = lowered(text).calls
    assert [len(call.reads), len(call.writes)] == [2, 1]
    stored = text.replace("=> (", "=> (float r, ")
    assert len(lowered(stored).calls) == 2  # many threads would store it


def test_equal_nodes_run_once():
    text = "agraph (float[8] x) => (float[8] y) { a = Softmax(x) b = Softmax(x) y = Add(a, b) }"
    assert len([c for c in lowered(text).calls if "Softmax" in c.kernel]) == 1


def test_program_is_a_function_of_its_arguments():
    text, feeds = GRAPHS["chain with broadcasting"]
    first, second = (program_of(text_model(text), feeds) for _ in range(2))
    assert str(first) == str(second)
    assert first.calls == second.calls


def test_names_never_reach_the_source():
    model = text_model("agraph (float[8] x) => (float[8] y) { z = Exp(x) y = Neg(z) }")
    for value in (*model.graph.inputs, *model.graph.outputs, model.graph[0].outputs[0]):
        value.name = f'{value.name}"; #error'
    for node in model.graph:
        node.name = "/* evil"
    for call in lowered(model).calls:
        for launch in call.launches:
            assert "evil" not in launch.source
            assert "#error" not in launch.source


_PARTS = "float[2,3,5,4] a, float[2,3,1,4] b, float[2,3,7,4] c"
CONCATS = {  # the nodes, the kernels of the program
    "keys and values": ("y = Concat<axis=2>(a, b) z = Concat<axis=2>(c, b)", ["Copy x4"]),
    "three parts": ("y = Concat<axis=2>(a, b, c) z = Neg(a)", ["Copy x3", "Neg"]),
    "of what one makes": (
        "y = Concat<axis=2>(a, b) z = Concat<axis=2>(y, c)", ["Copy x2", "Copy x2"],
    ),
    "of something made between": (
        "y = Concat<axis=2>(a, b) s = Softmax(y) z = Concat<axis=2>(s, c)",
        ["Copy x2", "Softmax", "Copy x2"],
    ),
    "in one piece": ("y = Concat<axis=0>(a, a) z = Neg(b)", ["Copy x2", "Neg"]),
    "the last axis": ("y = Concat(b, b) z = Concat<axis=3>(a, a)", ["Copy x4"]),
    "no runs": ("t = Transpose(a) u = Transpose(c) y = Concat<axis=1>(t, u) z = Neg(b)", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CONCATS)
def test_the_copies_of_a_concat_share_a_launch(name):
    nodes, kernels = CONCATS[name]
    nodes = nodes.replace("Concat(", "Concat<axis=-1>(")
    model = text_model(f"agraph ({_PARTS}) => (float[N,M,K,L] y, float[P,Q,R,S] z) {{ {nodes} }}")
    feeds = arrays(a=(2, 3, 5, 4), b=(2, 3, 1, 4), c=(2, 3, 7, 4))
    program = assert_program(model, feeds, atol=0)
    if kernels is not None:
        assert sorted(call.kernel for call in program.calls) == sorted(kernels)


CASTS = {  # the kernels of a row of GRAPHS: one of rows with gaps between them, one of vectors
    "parts of packed parameters that are cast": ["CastFloat16 x2", "CastFloat16 x4"],
    "casts of the parts of a packed gradient": ["Cast x3"],
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_of_packed_parts_share_a_launch(name):
    text, feeds = GRAPHS[name]
    program = program_of(text_model(text), feeds)
    assert sorted(call.kernel for call in program.calls) == CASTS[name]


@pytest.mark.parametrize(
    ("length", "at", "count"), [(8, 8, 1), (8, 4, 1), (4, 8, 1), (8, 6, 2), (6, 8, 2)]
)
def test_casts_share_a_launch_where_whole_accesses_fit(length, at, count):
    """Rows of whole 16-byte accesses alone, wherever the number lies that is read for all."""
    text = f"""agraph (float[6,64] x, float[3] all)
        => (float16[6,{length}] a, float16[6,{length}] b)
        <int64[2] s = {{0, {at}}}, int64[2] e = {{6, {at + length}}}, int64[2] t = {{0, 32}},
        int64[2] f = {{6, {32 + length}}}, int64 one = {{1}}> {{
        u = Slice(x, s, e) v = Slice(x, t, f) n = Gather(all, one)
        p = Mul(u, n) q = Mul(v, n) a = Cast<to=10>(p) b = Cast<to=10>(q) }}"""
    feeds = {
        "x": np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32),
        "all": np.array([1, 0.5, 3], np.float32),
    }
    program = program_of(text_model(text), feeds)
    assert len(program.calls) == count
    got, half = interpret(program, feeds, {}), feeds["x"] / 2
    np.testing.assert_array_equal(got["a"], half[:, at : at + length].astype(np.float16))
    np.testing.assert_array_equal(got["b"], half[:, 32 : 32 + length].astype(np.float16))


PIECES = "a = Cast<to=10>(x) b = Cast<to=10>(z) y = Concat<axis=0>(a, b)"


@pytest.mark.parametrize(("first", "nodes", "kernels"), [
    (16, PIECES, ["CastFloat16 x2"]),
    (4, PIECES, ["CastFloat16", "CastFloat16"]),  # the second could not be written 16 bytes at once
    (16, f"{PIECES} w = Tanh(y)", ["CastFloat16 x2", "Tanh"]),
])  # fmt: skip
def test_casts_into_parts_of_one_buffer_share_a_launch(first, nodes, kernels):
    """As those of the biases of a merged product."""
    more = ", float16[M] w" if "w =" in nodes else ""
    text = f"agraph (float[{first}] x, float[24] z) => (float16[N] y{more}) {{ {nodes} }}"
    feeds = arrays(x=(first,), z=(24,))
    program = program_of(text_model(text), feeds)
    assert [call.kernel for call in program.calls] == kernels
    got = interpret(program, feeds, {})["y"]
    np.testing.assert_array_equal(got, np.concatenate([feeds["x"], feeds["z"]]).astype("float16"))


def test_small_equal_calls_share_a_launch():
    text = "agraph (float[7,96] x, float[7,96] z) => (float[7,96] y, float[7,96] w) "
    text += "{ y = Softmax(x) w = Softmax(z) }"
    (call,) = lowered(text).calls
    assert call.launches[0].entry == "batched"


def test_the_gradient_of_a_batch_norm_takes_the_forwards_statistics():
    text = """agraph (float[8,4,6,6] x, float[4] s, float[4] b, float[4] m, float[4] v,
        float[8,4,6,6] dy) => (float[8,4,6,6] y, float[8,4,6,6] dx, float[4] ds, float[4] db) {
        y, rm, rv = BatchNormalization <training_mode = 1> (x, s, b, m, v)
        dx, ds, db = onnx_fuse.BatchNormGrad (dy, x, s) }"""
    entries = [launch.entry for call in lowered(text).calls for launch in call.launches]
    assert sum(entry.startswith("reduce_") for entry in entries) == 2  # once, in two passes
    assert {"channel_sums", "channel_params", "channel_dx"} <= set(entries)


def norm_graph(sizes: list[int], dtype: str = "float", short: str = "") -> str:
    """y = Σ g² over tensors of these sizes; every other one is `short` before a Cast."""
    types = [short if short and i % 2 else dtype for i in range(len(sizes))]
    inputs = ", ".join(f"{t}[{n}] g{i}" for i, (t, n) in enumerate(zip(types, sizes, strict=True)))
    squares = " ".join(f"w{i} = Cast <to = 1> (g{i})" for i, t in enumerate(types) if t != dtype)
    named = ["g" if t == dtype else "w" for t in types]
    squares += " ".join(
        f" s{i} = ReduceSumSquare <keepdims = 0> ({name}{i})" for i, name in enumerate(named)
    )
    terms = ", ".join(f"s{i}" for i in range(len(sizes)))
    return f"agraph ({inputs}) => ({dtype}[] y) {{ {squares} y = Sum({terms}) }}"


def test_a_global_norm_is_two_launches(monkeypatch):
    sizes = [1, 8192, 8193, 0, 20000]
    feeds = {f"g{i}": np.zeros(n, np.float32) for i, n in enumerate(sizes)}
    (call,) = program_of(text_model(norm_graph(sizes)), feeds).calls
    assert [(x.entry, x.grid[0]) for x in call.launches] == [
        ("sum_squares", 1 + 1 + 2 + 0 + 3),
        ("sum_squares_total", 1),
    ]
    assert unclean(call.launches[:1], "sm_80", "sm_90a", "sm_100a") == []
    monkeypatch.setattr(reduce_kernels, "ROWS", 2)  # a table holds so many: more take more launches
    (call,) = program_of(text_model(norm_graph(sizes)), feeds).calls
    assert [x.grid[0] for x in call.launches] == [2, 5, 1]
    parts = [x.args[-1].offset for x in call.launches[:2]]
    assert parts == [0, 8]
    # one that a Cast has widened is read as it was
    feeds |= {f"g{i}": np.zeros(sizes[i], np.float16) for i in (1, 3)}
    (call,) = program_of(text_model(norm_graph(sizes, short="float16")), feeds).calls
    assert call.problem.bytes == sum(array.nbytes for array in feeds.values())
    assert [x.grid[0] for x in call.launches] == [1 + 2, 3, 1, 1]  # by type
    feeds |= {f"g{i}": np.zeros(sizes[i], np.float32) for i in (1, 3)}
    # a sum of other things stays one expression
    other = norm_graph(sizes[:3]).replace("s0 = ReduceSumSquare", "s0 = ReduceSum")
    assert len(program_of(text_model(other), feeds).calls) > 1


def test_convolution_and_pooling_train_in_bfloat16():
    """Their gradients too: opset 21 has Conv, ConvTranspose and MaxPool in no bfloat16."""
    text = """agraph (float[2,3,9,9] x) => (float[2,4,4,4] y)
    <float[4,3,3,3] w = {W}> { c = Conv <pads = [1,1,1,1]> (x, w) r = Relu(c)
      y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r) }"""
    text = text.replace("{W}", "{" + ", ".join(["0.1"] * 108) + "}")
    graph, _ = training_model(
        text_model(text), loss="mse", optimizer=optim.SGD(lr=0.1), precision="bf16", fused=True
    )
    calls = lowered(graph).calls
    assert not any(call.host for call in calls)
    made = {t.dtype for c in calls if "Conv" in c.kernel for _, t in c.reads if len(t.shape) == 4}
    assert made == {"bfloat16"}


@pytest.mark.parametrize(
    ("rows", "hw", "count"),
    [(8192, H200, 1), ("rows", H200, 0), (64, H200, 0), (8192, CHIPS["A100"], 0)],
)
def test_a_trainers_float32_gradients_by_split_products_are_one_call(rows, hw, count):
    """Where that is faster than norm and product apart, behind a norm whose x has a gradient."""
    model = two_norms(rows)
    graph, _ = training_model(
        model, loss="mse", optimizer=optim.SGD(lr=0.1), precision="bf16x3", fused=True, level=1,
        whole=CombinedGradients(TrainingOptions(loss="mse", precision="bf16x3", hardware=hw)),
    )  # fmt: skip
    calls = lowered(graph, hw, 2048, math="bf16x3").calls
    ops = [call.problem.op for call in calls if isinstance(call.problem, GemmProblem)]
    assert ops.count("LayerNormGemmGrad") == count


@pytest.mark.parametrize(("rows", "k", "n", "turned"), [(100352, 96, 384, False),
                                                        (4096, 768, 3072, True)])  # fmt: skip
def test_a_weight_is_copied_where_its_gradient_has_few_tiles(rows, k, n, turned):
    """Sums of the columns of dW keep k, the rows here, from being split."""
    model = text_model(f"""agraph (bfloat16[{rows},{n}] dy, bfloat16[{rows},{k}] x,
        bfloat16[{k}] g, bfloat16[{k}] b, bfloat16[{n},{k}] v, bfloat16[{n}] c,
        float[{rows},1] m, float[{rows},1] r, bfloat16[{rows},{n}] z)
        => (bfloat16[{rows},{k}] dx, bfloat16[{k}] dg, bfloat16[{k}] db, bfloat16[{k},{n}] dw)
        {{ w = Transpose(v)
        dx, dg, db, dw, dc = onnx_fuse.LayerNormGemmGrad (dy, x, g, b, w, c, m, r, z) }}""")
    made = [c.problem for c in lowered(model).calls]
    (found,) = (p for p in made if isinstance(p, GemmProblem) and p.op == "LayerNormGemmGrad")
    assert found.trans_b == turned


@pytest.mark.parametrize("read", ["dx", "dx dw"])
def test_gradients_of_frozen_weights_are_not_made(read):
    """Behind a norm, too, where one call makes those of the rows and those of the weights."""
    types = {"dx": "bfloat16[8192,768] dx", "dw": "bfloat16[768,3072] dw"}
    model = text_model(f"""agraph (bfloat16[8192,3072] dy, bfloat16[8192,768] x,
        bfloat16[768] g, bfloat16[768] b, bfloat16[768,3072] w, bfloat16[3072] c,
        float[8192,1] m, float[8192,1] r, bfloat16[8192,3072] z)
        => ({", ".join(types[name] for name in read.split())})
        {{ dx, dg, db, dw, dc = onnx_fuse.LayerNormGemmGrad (dy, x, g, b, w, c, m, r, z) }}""")
    calls = lowered(model).calls
    (call,) = (c for c in calls if isinstance(c.problem, GemmProblem))
    assert call.problem.frozen == (read == "dx")
    names = " ".join(launch.entry for launch in call.launches)
    assert len(call.launches) == (2 if read == "dx" else 5), names


def test_calls_of_one_operator_take_its_body_in_turn(monkeypatch):
    """The numbers are those of a body for each call, with fewer bodies made."""
    numbers = [", ".join(map(str, np.linspace(-1, 1, n))) for n in (36, 36, 30)]
    text = """agraph (float[4,6] x) => (float[4,5] y)
    <float[6,6] a = {A}, float[6,6] b = {B}, float[6,5] c = {C}>
    { p = MatMul(x, a) q = Tanh(p) r = MatMul(q, b) s = Tanh(r) y = MatMul(s, c) }"""
    for name, row in zip("ABC", numbers, strict=True):
        text = text.replace(f"{{{name}}}", f"{{{row}}}")
    graph, spec = training_model(text_model(text), loss="mse", optimizer=optim.AdamW())
    rng = np.random.default_rng(0)
    feeds = {
        v.name: rng.random(v.shape.numpy()).astype(v.dtype.numpy()) for v in graph.graph.inputs
    }
    state = {s.next: s.name for s in spec.states if s.next}
    made = []
    inline = walk.inline
    monkeypatch.setattr(walk, "inline", lambda model: made.append(1) or inline(model))
    program = program_of(graph, feeds, state=state)
    few = len(made)
    monkeypatch.setattr(walk.Lowerer, "_call_key", lambda *_: None)
    apart = program_of(graph, feeds, state=state)
    assert len(made) - few == few + 1, "of three updates two are of one shape"
    got, want = (interpret(x, feeds, weights_of(graph)) for x in (program, apart))
    assert_near(got, want, rtol=1e-6, atol=1e-7)


def test_a_float16_step_overflows_and_recovers():
    """The training step's Program, its states in place, beside float32's on onnxruntime."""
    numbers = ", ".join(map(str, np.linspace(-1, 1, 30)))
    text = f"agraph (float[4,6] x) => (float[4,5] y) <float[6,5] w = {{{numbers}}}> "
    text += "{ p = MatMul(x, w) y = Tanh(p) }"
    options = {"loss": "mse", "optimizer": optim.AdamW(lr=0.02), "clip_norm": 1.0}
    graph, spec = training_model(text_model(text), precision="fp16", loss_scale=2.0**22, **options)
    successors = {s.next: s.name for s in spec.states if s.next}
    model, successors = guarded(graph, successors, [spec.loss])
    feeds = {"x": X[0], "labels": X[1, :, :5]}
    ends = {spec.lr: np.array(0.02, np.float32)}
    states = {SOUND: np.array(True)} | {s.name: np.asarray(s.initial) for s in spec.states}
    losses, scales = [], [2.0**22]
    for _ in range(20):
        arrays = {**feeds, **ends, **states}
        program = program_of(model, arrays, state=successors)
        found = interpret(program, arrays, weights_of(model))
        states = {name: found[after] for after, name in successors.items()}
        losses.append(float(found[spec.loss]))
        scales.append(float(states["loss_scale"]))
    skipped = 20 - int(states["loss_scale.updates"])
    assert 3 <= skipped <= 12
    assert scales == [2.0 ** (22 - min(i, skipped)) for i in range(21)]
    full = Trainer(text_model(text), **options)
    np.testing.assert_allclose(
        losses, [losses[0]] * skipped + [full.step(feeds) for _ in range(20 - skipped)], rtol=5e-3
    )


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_a_recurrence_of_no_steps_is_onnxruntimes(op, gates):
    ends = "float[T,1,2,4] y, float[1,2,4] h"
    text = f"agraph (float[T,2,3] x) => ({ends}) <float[1,{gates * 4},3] w = "
    text += f"{{{'1,' * (gates * 12 - 1)}1}}, float[1,{gates * 4},4] r = "
    text += f"{{{'1,' * (gates * 16 - 1)}1}}> {{ y, h = {op} <hidden_size = 4> (x, w, r) }}"
    model = text_model(text)
    found = [lowered(model, size=steps).fallbacks for steps in (0, 1)]
    assert found == [(f"{op}: no kernel",), ()]


def test_state_is_written_in_place():
    text = """agraph (float[8] w, float[8] g) => (float[8] w1) <float r = {0.5}>
    { s = Mul(g, r) w1 = Sub(w, s) }"""
    program = lowered(text, state={"w1": "w"})
    (call,) = program.calls
    assert dict(program.outputs)["w1"] == dict(program.inputs)["w"]
    assert call.writes[0][1].buffer == dict(program.inputs)["w"].buffer


@pytest.mark.parametrize(
    "nodes",
    [
        "a1 = Identity(b) b1 = Identity(a)",
        "a1 = Exp(b) b1 = Identity(a)",
        "a1 = Transpose(a) b1 = Add(a, b)",
    ],
)
def test_states_made_of_states_take_their_values_before(nodes):
    text = f"agraph (float[4,4] a, float[4,4] b) => (float[4,4] a1, float[4,4] b1) {{ {nodes} }}"
    model, feeds = text_model(text), arrays(a=(4, 4), b=(4, 4))
    want = session.InferenceSession(model, device="cpu").run(None, feeds)
    got = interpret(program_of(model, feeds, state={"a1": "a", "b1": "b"}), feeds, {})
    for name, value in zip(("a1", "b1"), want, strict=True):
        np.testing.assert_allclose(got[name], value, rtol=1e-6)


RESHAPES = [
    ((2, 3, 4), (12, 4, 1), (6, 4), (4, 1)),
    ((3, 2, 4), (4, 12, 1), (6, 4), None),
    ((3, 2, 4), (4, 12, 1), (3, 2, 2, 2), (4, 12, 2, 1)),
    ((4,), (0,), (2, 2), (0, 0)),
    ((1,), (5,), (), ()),
]


@pytest.mark.parametrize(("shape", "strides", "wanted", "expected"), RESHAPES)
def test_reshape_strides(shape, strides, wanted, expected):
    assert reshape_strides(shape, strides, wanted) == expected


def test_parts_and_places_of_a_tensor_are_numpys():
    memory = np.arange(40, dtype=np.float32)
    t = Tensor(0, "float32", (3, 4), (1, 6), 2)

    def read(view):
        steps = [step * memory.itemsize for step in view.strides]
        return np.lib.stride_tricks.as_strided(memory[view.offset :], view.shape, steps)

    whole = read(t)
    assert np.array_equal(read(t.part(1, 1, 2)), whole[:, 1:3])
    assert np.array_equal(read(t.part(1, 3, 2, -2)), whole[:, 3:0:-2])
    assert np.array_equal(read(t.at(0, 2)), whole[2])
    assert np.array_equal(read(t.first((2, 3))), whole[:2, :3])
    assert np.array_equal(read(t.view((3, 2, 2))), whole.reshape(3, 2, 2))
    with pytest.raises(ValueError, match="without a copy"):
        t.view((4, 3))


def test_width_follows_alignment():
    def width(offset, shape, strides):
        t = Tensor(0, "float32", shape, strides, offset)
        y = Tensor(1, "float32", shape, (shape[1], 1), 0)
        dims, s = pointwise.collapse(shape, [t.strides, y.strides])
        return pointwise.vector_width(dims, [t, y], s)

    assert width(0, (4, 8), (8, 1)) == 4
    assert width(2, (4, 8), (8, 1)) == 2
    assert width(0, (4, 8), (9, 1)) == 1
    assert width(0, (4, 6), (8, 1)) == 2


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("y = Add (x, z)", ((2, 3), (2, 4))),
        ("y = MatMul (x, z)", ((2, 3), (2, 4))),
        ("y = Gemm (x, z, r)", ((2, 3), (3, 4))),
        ("y = Concat <axis = 0> (x, z)", ((2, 3), (2, 4))),
        ("s = Constant <value_ints = [4, -1]> () u = Add (x, z) y = Reshape (u, s)", ((2, 3),) * 2),
        ("s = Constant <value_ints = [0, 0]> () y = Reshape (x, s)", ((3,), (3,))),
        ("i = Constant <value_ints = [0]> () y = Slice (x, i, i, i)", ((), (3,))),
        ("i = Constant <value_int = 0> () y = CumSum (x, i)", ((), (3,))),
        ('y = Einsum <equation = "ij -> i"> (x)', ((3,), (3,))),
        ("y = Conv (x, z)", ((1, 3, 4, 4), (2, 4, 3, 3))),
        ("d = Cast <to = 11> (z) y = Conv (x, d)", ((1, 3, 4, 4), (2, 3, 3, 3))),
        ("b = Cast <to = 9> (x) y = MaxPool <kernel_shape = [2]> (b)", ((1, 3, 4), (3,))),
        ("y = LayerNormalization (x, z)", ((2, 3), (4,))),
        ("y = onnx_fuse.Gemm (x, z, r)", ((2, 3), (4, 5))),
        ("y = onnx_fuse.LayerNormGemm (x, r, r, z, r)", ((2, 3), (4, 5))),
        ("y = onnx_fuse.Sdpa (x, z, z)", ((1, 2, 4, 8), (1, 2, 4, 6))),
    ],
)
def test_operands_that_do_not_fit_are_refused_not_read_past_their_end(text, shapes):
    x, z, y = (",".join(f"{n}{i}" for i in range(len(shapes[n == "z"]))) for n in "xzy")
    model = text_model(f"agraph (float[{x}] x, float[{z}] z, float[5] r) => (float[{y}] y)"
                          f"{{ {text} }}")  # fmt: skip
    feeds = {name: np.zeros(s, np.float32) for name, s in zip("xz", shapes, strict=True)}
    with pytest.raises(ModelError, match=r"node '.*' \(\w+\) of \[.*: (?!tuple index)"):
        program_of(model, feeds | {"r": np.zeros(5, np.float32)})


@pytest.mark.parametrize("length", [1, 3])
def test_a_split_without_its_axis_has_parts_of_one(length: int) -> None:
    """Where the last part is longer onnxruntime ends with the sizes of its tensors."""
    model = text_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n,4] x, int64 i) => (float[4] y) <int64 two = {2}>
        { s = SplitToSequence <axis = 0, keepdims = 0> (x, two)  y = SequenceAt (s, i) }"""
    )
    feeds = {"x": X[0, :length, :4], "i": np.array(-1)}
    if length == 1:
        found = interpreted(model, feeds)["y"]
        np.testing.assert_array_equal(found, ort.run(ort.session(model), feeds)[0], strict=True)
        return
    with pytest.raises(Exception, match="Tensor size"):
        ort.run(ort.session(model), feeds)
    with pytest.raises(ModelError, match="keepdims = 0 needs parts of 1"):
        interpreted(model, feeds)


@pytest.mark.parametrize(
    ("size", "host"), [((2, 2, 3, 4), False), ((1, 2, 3, 4), True), ((2, 2, 1, 4), True)]
)
def test_a_grid_of_a_size_that_is_fed_runs_by_kernels(size, host):
    """One of a size of one is onnxruntime's, as the body of the standard squeezes it."""
    model = text_model("""agraph (float[B,2,3] theta, int64[4] size) => (float[B,H,W,2] y) {
      y = AffineGrid (theta, size) }""")
    feeds = {**arrays(theta=(size[0], 2, 3)), "size": np.array(size)}
    assert any(call.host for call in with_values(model, feeds).calls) == host
    if not host:
        (expected,) = ort.run(stock(model), feeds)
        np.testing.assert_allclose(interpreted(model, feeds)["y"], expected, atol=1e-6)


@pytest.mark.parametrize("step", [-(2**63), 2**63 - 1])
def test_a_slice_whose_step_leaves_every_axis_has_one_element(step):
    model = text_model(
        f"""g (float[N,5] x) => (float[N,K] y) {{ a = Constant <value_ints = [1]> ()
        b = Constant <value_ints = [{3 if step > 0 else -1}]> ()
        e = Constant <value_ints = [{step}]> ()  y = Slice (x, b, e, a, e) }}"""
    )
    assert_program(model, arrays(x=(2, 5)))
