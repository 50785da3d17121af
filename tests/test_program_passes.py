"""Passes over the calls of a Program: what is fused, folded, merged, and what is left."""

from dataclasses import replace
from pathlib import Path

import math_cases
import numpy as np
import onnx_ir
import pytest
from lowering import GRAPHS, H200, RNG, arrays, lowered, program_of, weights_of
from support import with_weights

from onnx_fuse import autodiff, rewrite, session
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower import linear, walk
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.passes import copy_fusion
from onnx_fuse.program.problem import CHIPS, GemmProblem, Hardware
from onnx_fuse.rewrite.precision import lower_precision
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model


def test_a_residual_is_added_in_the_product():
    text = """agraph (float[4,64] x, float[4,64] r, float[64,64] w) => (float[4,64] y)
    { a = MatMul(x, w) y = Add(r, a) }"""
    program = lowered(text)
    (call,) = program.calls
    assert call.problem.epilogue.residual
    assert dict(call.reads)["c"] == dict(program.inputs)["r"]


def post_norm_model(text: str, dtype=np.float16, width: int = 768, rows: int = 256, batch: int = 1):
    """A graph over x [batch, rows / batch, width]; its other names are weights."""
    model = text_model(f"agraph ({text}")
    shapes = {"g": (width,), "b": (width,), "c": (width,), "w": (width,) * 2, "v": (width,) * 2}
    read = [v for node in model.graph for v in node.inputs if not v.producer()]
    weights = {}
    for name in dict.fromkeys(v.name for v in read if not v.is_graph_input()):
        array = RNG.standard_normal(shapes[name[0]]) / len(shapes[name[0]]) ** 4
        weights[name] = array.astype(dtype)
    with_weights(model, weights)
    x = RNG.standard_normal((batch, rows // batch, width)) * 2 + 1
    return model, {"x": x.astype(dtype)}


POST_NORM = """float16[B,M,768] x) => (float16[B,M,768] y)
{ p = onnx_fuse.Gemm (x, w0, c0) q = onnx_fuse.Gemm (p, v0, b0) s = Add (q, x)
  h = LayerNormalization (s, g, b1)
  f = onnx_fuse.GemmRelu (h, w1, c1) o = onnx_fuse.Gemm (f, v1, b2) t = Add (h, o)
  y = LayerNormalization (t, g2, b3) }"""


def post_norm_value(given: dict[str, np.ndarray]) -> np.ndarray:
    """y of POST_NORM in float64."""
    wide = {k: v.astype(np.float64) for k, v in given.items()}

    def norm(s, g, b):
        centred = s - s.mean(-1, keepdims=True)
        return centred / np.sqrt(s.var(-1, keepdims=True) + 1e-5) * wide[g] + wide[b]

    def product(a, w, c):
        return a @ wide[w] + wide[c]

    x = wide["x"]
    h = norm(product(product(x, "w0", "c0"), "v0", "b0") + x, "g", "b1")
    t = product(np.maximum(product(h, "w1", "c1"), 0), "v1", "b2") + h
    return norm(t, "g2", "b3")


@pytest.mark.parametrize(
    "text",
    [
        POST_NORM,
        POST_NORM.replace("o = onnx_fuse.Gemm (f, v1, b2)", "r = MatMul (f, v1) o = Add (r, b2)"),
    ],
    ids=["", "bias added"],
)
@pytest.mark.parametrize(("batch", "rows"), [(1, 8), (4, 256), (1, 256), (2, 4096)])
def test_a_norm_is_left_to_the_products_that_read_it(batch, rows, text):
    model, feeds = post_norm_model(text, rows=rows, batch=batch)
    program = program_of(model, feeds)
    first, maker, reader, after, last = program.calls
    assert reader.problem.op == "LayerNormGemm"
    assert after.problem.epilogue.residual == "norm"
    assert last.kernel == "LayerNormalization", "an output"
    many = rows > 1000
    assert bool(maker.problem.epilogue.moments) == bool(reader.problem.parts) == many
    assert not first.problem.epilogue.moments
    got = interpret(program, feeds, weights_of(model))["y"]
    want = post_norm_value(weights_of(model) | feeds)
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


KEPT_NORMS = {
    "read by more than products": POST_NORM.replace(
        "y = LayerNormalization (t,", "e = Exp (h) d = Mul (e, t) y = LayerNormalization (d,"
    ),
    "an output": POST_NORM.replace("768] y)", "768] y, float16[B,M,768] h)"),
    "the residual first": """float16[B,M,768] x, float16[B,M,768] f)
    => (float16[B,M,768] t, float16[B,M,768] y)
{ h = LayerNormalization (x, g, b1) o = onnx_fuse.Gemm (f, v1, b2) t = Add (h, o)
  y = onnx_fuse.GemmRelu (h, w1, c1) }""",
    "an activation before": POST_NORM.replace("o = onnx_fuse.Gemm", "o = onnx_fuse.GemmRelu"),
    "transposed": POST_NORM.replace(
        "f = onnx_fuse.GemmRelu (h,",
        "k = Transpose <perm = [0, 2, 1]> (h) f = onnx_fuse.GemmRelu (k,",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT_NORMS)
def test_a_norm_that_something_else_reads_stays(name):
    square = name == "transposed"
    model, feeds = post_norm_model(KEPT_NORMS[name], rows=768 if square else 128)
    if name == "the residual first":
        feeds["f"] = np.ones((1, 128, 768), np.float16)
    calls = program_of(model, feeds).calls
    assert sum(c.kernel == "LayerNormalization" for c in calls) == (1 if "first" in name else 2)
    assert {c.problem.op for c in calls if isinstance(c.problem, GemmProblem)} == {"Gemm"}


def test_a_norm_whose_parameters_are_trained_stays():
    model, feeds = post_norm_model(POST_NORM)
    for state in ({"y": "g"}, {"y": "b2"}, {"y": "w1"}):
        calls = program_of(model, feeds, state=state).calls
        assert sum(c.kernel == "LayerNormalization" for c in calls) == 2


def test_a_forced_kernel_that_takes_no_norm_keeps_it():
    model, feeds = post_norm_model(POST_NORM)
    calls = program_of(model, feeds, prefs={"LayerNormGemm": "apply_mma"}).calls
    assert sum(c.kernel == "LayerNormalization" for c in calls) == 2


def norm_model(norm: str):
    """<norm>Gemm of x [B, 64] in float16, and the values of its weights."""
    shapes = {"gamma": (64,), "beta": (64,), "w": (64, 32), "c": (32,)}
    if norm == "RMSNorm":
        del shapes["beta"]
    model = text_model(
        "agraph (float16[B,64] x) => (float16[B,32] y) "
        f"{{ y = {FUSE}.{norm}Gemm(x, {', '.join(shapes)}) }}"
    )
    values = {name: RNG.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    return with_weights(model, values), values


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_an_inference_program_reads_weights_with_the_norm_folded_in(norm):
    model, values = norm_model(norm)

    def found(rows, **options):
        program = program_of(model, {"x": np.zeros((rows, 64), np.float16)}, **options)
        call = next(c for c in program.calls if isinstance(c.problem, GemmProblem))
        assert {name for name, _ in call.writes} == {"y", "mean", "rstd"}
        names = {b.id: b.name for b in program.buffers}
        reads = {name: (names[t.buffer], program.constants.get(t.buffer)) for name, t in call.reads}
        return call.problem, reads

    wide = {name: value.astype(np.float64) for name, value in values.items()}
    wq = (wide["gamma"][:, None] * wide["w"]).astype(np.float16)
    cv = wide.get("beta", np.zeros(64)) @ wide["w"] + wide["c"]
    problem, reads = found(3)
    assert problem.folded
    assert problem.static_b
    np.testing.assert_array_equal(reads["wq"][1], wq)
    sums = wq.astype(np.float64).sum(0) * (norm == "LayerNorm")  # an RMSNorm's mean is 0
    np.testing.assert_allclose(reads["cs"][1], sums, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(reads["cv"][1], cv, rtol=1e-6, atol=1e-6)
    again = found(40)[1]
    assert all(again[name][0] == reads[name][0] for name in ("wq", "cs", "cv"))
    assert not found(64, state={"y": "w"})[0].folded, "w is replaced"
    model = model.clone()
    model.graph.initializers["w"].const_value = onnx_ir.tensor(-values["w"], name="w")
    np.testing.assert_array_equal(found(3)[1]["wq"][1], -wq)
    large = np.full_like(values["w"], 65504)
    model.graph.initializers["w"].const_value = onnx_ir.tensor(large, name="w")
    assert not any(found(rows)[0].folded for rows in (3, 40)), "a number of wq is beyond float16"


def test_a_head_is_kept_once_in_the_order_that_one_row_wants() -> None:
    """Weights beyond the L2 cache, for every number of rows; smaller ones for one row alone."""
    model = text_model(f"""g (float16[B,2048] x) => (float16[B,1536] y)
        {{ y = {FUSE}.RMSNormGemm (x, gamma, w, c) }}""")
    shapes = {"gamma": 2048, "w": (2048, 1536), "c": 1536}
    model = with_weights(model, {name: np.ones(s, np.float16) for name, s in shapes.items()})

    def weights(rows: int, hw: Hardware) -> tuple[bool, tuple[int, ...]]:
        (call,) = program_of(model, {"x": np.zeros((rows, 2048), np.float16)}, hw).calls
        return call.problem.trans_b, dict(call.reads)["wq"].shape

    turned, plain = (True, (1536, 2048)), (False, (2048, 1536))
    assert [weights(rows, H200) for rows in (1, 2, 512)] == [turned, plain, plain]
    small = replace(H200, l2_bytes=1 << 20)
    assert [weights(rows, small) for rows in (1, 2, 8, 512)] == [turned] * 4


@pytest.mark.parametrize(
    ("dtype", "math"),
    [("bfloat16", "ieee"), *(("float", how) for how in ("ieee", "tf32", "bf16x3", "bf16x6"))],
)
@pytest.mark.parametrize("act", ["", "Gelu"])
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_norm_before_a_product_has_one_gradient_call(dtype, math, act, norm):
    layer = norm == "LayerNorm"
    text = f"""agraph ({dtype}[32,128] dy, {dtype}[32,64] x, {dtype}[64] s,
        {f"{dtype}[64] b," if layer else ""} {dtype}[64,128] w, {dtype}[128] c,
        {"float[32,1] mean," if layer else ""} float[32,1] rstd, {dtype}[32,128] z)
    => ({dtype}[32,64] dx, {dtype}[64] ds, {f"{dtype}[64] db," if layer else ""}
        {dtype}[64,128] dw, {dtype}[128] dc)
    {{ dx, ds, {"db," if layer else ""} dw, dc = onnx_fuse.{norm}Gemm{act}Grad
       (dy, x, s, {"b," if layer else ""} w, c, {"mean," if layer else ""} rstd, z) }}"""
    model = text_model(text)
    calls = lowered(model, math=math).calls
    kinds = [call.problem.op for call in calls if isinstance(call.problem, GemmProblem)]
    assert kinds == ["LayerNormGemmGrad"]
    assert calls[0].problem.epilogue.act == act.lower()
    assert bool(calls[0].problem.rms) != layer
    names = ["dy", "x", "gamma", "beta", "w", "c", "mean", "rstd", "z"]
    names = [name for name in names if layer or name not in ("beta", "mean")]
    assert [name for name, _ in calls[0].reads] == names
    assert ("dbeta" in dict(calls[0].writes)) == layer


GRADIENT = """agraph ({d}[{m},{n}] dy, {d}[{m},{k}] x, {d}[{k}] s,
        {d}[{k}] b, {d}[{k},{n}] w, {d}[{n}] c, float[{m},1] mean, float[{m},1] rstd,
        {d}[{m},{n}] z)
    => ({d}[{m},{k}] dx, {d}[{k}] ds, {d}[{k}] db, {d}[{k},{n}] dw, {d}[{n}] dc)
    {{ dx, ds, db, dw, dc = onnx_fuse.LayerNormGemmGrad (dy, x, s, b, w, c, mean, rstd, z) }}"""


def gradient_program(shape, dtype, chip, math):
    m, k, n = shape
    model = text_model(GRADIENT.format(m=m, k=k, n=n, d=dtype))
    return lowered(model, CHIPS[chip], math=math)


@pytest.mark.parametrize("chip", ["A100", "L4", "H200", "B200"])
@pytest.mark.parametrize(
    ("dtype", "math"),
    [
        ("bfloat16", "ieee"),
        ("float16", "ieee"),
        *(("float", p) for p in ("ieee", "tf32", "bf16x3")),
    ],
)
@pytest.mark.parametrize(
    "shape", [(8192, 768, 3072), (8192, 64, 64), (64, 60, 130), (1, 100, 77)], ids=str
)
def test_a_gradient_behind_a_norm_is_one_call_on_every_chip(shape, dtype, math, chip):
    program = gradient_program(shape, dtype, chip, math)
    (call,) = program.calls
    assert call.problem.op == "LayerNormGemmGrad"
    assert not program.in_parts
    if (chip != "H200" and shape[0] > 4096) or (dtype == "float" and math != "bf16x3"):
        assert call.why.startswith("portable"), call.why


@pytest.mark.parametrize(("rows", "folds"), [(8192, 1), (64, 0)])
def test_a_step_folds_the_weights_once_where_that_pays(rows, folds):
    sizes = {"gamma": (2048,), "beta": (2048,), "w": (2048, 2048), "c": (2048,)}
    model = text_model(
        """agraph (bfloat16[M,2048] x, bfloat16[2048] gamma, bfloat16[2048] beta,
        bfloat16[2048,2048] w, bfloat16[2048] c) => (bfloat16[M,2048] y)
        { h = LayerNormalization (x, gamma, beta)  p = MatMul (h, w)  y = Add (p, c) }"""
    )
    rewrite.optimize(model)
    graph = autodiff.gradient(model, wrt=["x", *sizes])
    shapes = dict.fromkeys(("x", "y.grad"), (rows, 2048)) | sizes
    program = walk.lower(graph, {name: (s, "bfloat16") for name, s in shapes.items()}, H200)
    entries = [launch.entry for call in program.calls for launch in call.launches]
    assert entries.count("fold_columns") == folds
    forward, backward = (call for call in program.calls if isinstance(call.problem, GemmProblem))
    assert forward.problem.folded == backward.problem.folded == folds
    if folds:
        names = ("wq", "cs", "cv")
        assert all(dict(forward.reads)[name] == dict(backward.reads)[name] for name in names)


def test_the_weights_of_a_mixed_precision_step_fold_in_one_launch(monkeypatch):
    """It reads the float32 masters and writes their 16-bit copies too, which have no cast then."""
    monkeypatch.setattr(linear, "_fold_pays", lambda *asked: True)
    shapes = {"g1": [16], "b1": [16], "w1": [16, 24], "c1": [24],
              "g2": [24], "b2": [24], "w2": [24, 8], "c2": [8]}  # fmt: skip
    weights = (
        f"float{shape} {name} = {{{', '.join(['0.5'] * int(np.prod(shape)))}}}"
        for name, shape in shapes.items()
    )
    graph, spec = training_model(
        text_model(
            f"""agraph (float[40,16] x) => (float[40,8] y) <{", ".join(weights)}> {{
            h = LayerNormalization (x, g1, b1)  p = MatMul (h, w1)  s = Add (p, c1)
            k = LayerNormalization (s, g2, b2)  q = MatMul (k, w2)  y = Add (q, c2) }}"""
        ),
        loss="mse", optimizer=optim.SGD(lr=0.1), precision="bf16", fused=True, level=1,
    )  # fmt: skip
    program = lowered(graph, state={s.next: s.name for s in spec.states if s.next})
    (fold,) = (call for call in program.calls if call.kernel.startswith("Fold"))
    assert [launch.entry for launch in fold.launches] == ["fold_columns"]
    first, inputs = program.calls.index(fold), dict(program.inputs)
    reads, writes = dict(fold.reads), dict(fold.writes)
    made = {t.buffer: j for j, c in enumerate(program.calls) for _, t in c.writes}
    for i, w in enumerate(("w1", "w2")):
        assert reads[f"w.{i}"].buffer == inputs[w].buffer
        assert made[reads[f"gamma.{i}"].buffer] < first
        for name in ("low", "wq"):
            tensor = writes[f"{name}.{i}"]
            assert tensor.dtype == "bfloat16"
            assert made[tensor.buffer] == first
            users = [c for c in program.calls for _, t in c.reads if t.buffer == tensor.buffer]
            assert users
            assert min(map(program.calls.index, users)) > first


def test_an_encoder_layer_moves_nothing():
    """Heads split and merged by strides, positions by a view: in a layer only what computes."""
    model = session.load(Path(__file__).parents[1] / "models/encoder.onnx")
    rewrite.optimize(model)
    lower_precision(model, onnx_ir.DataType.FLOAT16)
    names = ("input_ids", "attention_mask", "token_type_ids")
    program = program_of(model, {name: np.ones((1, 64), np.int64) for name in names})
    layer = ["LayerNormGemm", "SdpaMask", "Gemm", "LayerNormGemmGelu", "Gemm"]
    kernels = [c.kernel for c in program.calls if not c.kernel.startswith("CastFloat16+Sub")]
    assert kernels[:11] == ["Gather+Gather+Add+Add", *layer, *layer]
    assert "Copy" not in kernels


def test_a_launch_calls_early_for_one_whose_blocks_fill_a_multiprocessor():
    text = """agraph (float16[4096,768] x, float16[768,3072] v, float16[3072,3072] w,
                     float16[3072] s) => (float16[4096,3072] y)
    { a = MatMul(x, v) b = MatMul(a, w) y = LayerNormalization(b, s) }"""
    calls = lowered(text).calls
    assert [call.kernel for call in calls] == ["MatMul", "MatMul", "LayerNormalization"]
    early = [dict(call.launches[0].defines).get("NEXT_ALONE") for call in calls]
    assert early == ["1", None, None]


@pytest.mark.parametrize("also", ["t = Neg(x)", "t = Neg(z)", "an output"])
def test_an_activation_is_applied_in_the_product(also):
    read_again, t = "x" not in also, "z" if also == "an output" else "t"
    text = f"""agraph (float[4,64] x, float[64,64] w, float[64] c)
    => (float[4,64] y, float[4,64] {t})
    {{ z = Gemm(x, w, c) y = Gelu(z) {also if t == "t" else ""} }}"""
    calls = lowered(text).calls
    (product,) = [call for call in calls if isinstance(call.problem, GemmProblem)]
    assert len(calls) == (2 if t == "t" else 1)
    assert product.problem.epilogue.act == "gelu"
    assert bool(product.problem.epilogue.save_z) == read_again == ("z" in dict(product.writes))


def test_a_norms_backward_takes_in_what_follows_it():
    """dx of a LayerNorm times act'(z): one launch writes the product alone."""
    text = """agraph (float[6,64] dy, float[6,64] x, float[64] s, float[6,1] m, float[6,1] r,
                     float[6,64] z) => (float[6,64] y, float[64] ds, float[64] db)
    { dx, ds, db = onnx_fuse.LayerNormGrad(dy, x, s, m, r) e = Exp(z) h = Add(e, z)
      y = Mul(dx, h) }"""
    program = lowered(text)
    main, finish = program.calls
    assert main.kernel == "LayerNormGrad+Exp+Add+Mul"
    assert set(dict(main.writes)) == {"dx", "part"}
    assert dict(main.writes)["dx"] == dict(program.outputs)["y"]
    assert dict(main.reads)["e1"] == dict(program.inputs)["z"]
    macros = dict(main.launches[0].defines)
    assert macros["OPERANDS"] == "1"
    assert "m_exp(v1)" in macros["SUFFIX(v0, v1, v2, v3)"]
    assert finish.kernel == "LayerNormGrad"


@pytest.mark.parametrize(("also", "kernel"), [
    ("y = Cast<to=1>(n)", "LayerNormalization+Cast"),
    ("c = Add(r, n) y = Cast<to=1>(c)", "LayerNormalization+Add+Cast"),
    ("h = Relu(n) m = Softmax(n) c = Add(h, m) y = Cast<to=1>(c)", "LayerNormalization"),
    ("c = Add(n, b) y = Cast<to=1>(c)", "LayerNormalization"),
])  # fmt: skip
def test_a_norm_stores_what_its_one_reader_makes_of_it(also, kernel):
    text = f"""agraph (float16[9,64] x, float16[64] g, float16[64] b, float16[9,64] r)
    => (float[9,64] y) {{ t = Tanh(x) n = LayerNormalization(t, g, b) {also} }}"""
    program = lowered(text)
    (norm,) = [c for c in program.calls if c.kernel.startswith("LayerNormalization")]
    assert norm.kernel == kernel
    if "+" in kernel:
        assert dict(norm.writes)["y"] == dict(program.outputs)["y"]
        assert dict(norm.launches[0].defines)["TY"] == "float"
        assert not norm.inplace, "rows of x are half as long as those of y"


@pytest.mark.parametrize(("nodes", "rows", "wide"), [
    ("z = Gemm(x, w, c) y = Cast<to=1>(z)", 32, True),
    ("z = Gemm(x, w, c) y = Cast<to=1>(z)", 2048, False),
    ("p = Gemm(x, w, c) z = Tanh(p) y = Cast<to=1>(z)", 32, True),
    ("p = Gemm(x, w, c) z = Add(p, r) y = Cast<to=1>(z)", 32, False),
    ("z = Gemm(x, w, c) t = Softmax(z) u = Mul(t, z) y = Cast<to=1>(u)", 32, False),
])  # fmt: skip
def test_a_product_stores_the_type_that_its_one_reader_wants(nodes, rows, wide):
    ends = f"float16[{rows},64] x, float16[64,64] w, float16[64] c, float16[{rows},64] r"
    calls = lowered(f"agraph ({ends}) => (float[{rows},64] y) {{ {nodes} }}").calls
    (product,) = [call for call in calls if isinstance(call.problem, GemmProblem)]
    assert (product.problem.out == "float32") == wide == (len(calls) == 1)


def norm_grad_of_a_product(k, turned, also=""):
    """(text, feeds) of the gradient of a norm whose dy is a product over k."""
    b = (64, k) if turned else (k, 64)
    text = f"""agraph (float[40,{k}] a, float{list(b)} b, float[40,64] x, float[64] s,
                     float[40,1] m, float[40,1] r) => (float[40,64] dx, float[64] ds, float[64] db
                     {", float[40,64] t" if also else ""})
    {{ dy = Gemm <transB = {int(turned)}> (a, b) {also}
      dx, ds, db = onnx_fuse.LayerNormGrad(dy, x, s, m, r) }}"""
    return text, arrays(a=(40, k), b=b, x=(40, 64), s=(64,), m=(40, 1), r=(40, 1))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("k", "also", "taken"), [(10, "", True), (16, "", True), (17, "", False),
                                                  (10, "t = Neg(dy)", False)])  # fmt: skip
def test_a_norms_backward_makes_rows_of_dy_from_few_columns(k, also, taken, turned):
    """dy = a · b over a classifier's classes has no launch, where nothing else reads it."""
    text, feeds = norm_grad_of_a_product(k, turned, also)
    program = program_of(text_model(text), feeds)
    kernels = [call.kernel for call in program.calls]
    assert ("Gemm" not in kernels) == taken
    assert ("Gemm+LayerNormGrad" in kernels) == taken
    if taken:
        main, given = program.calls[0], dict(program.inputs)
        assert dict(main.reads)["dy"] == given["a"]
        assert dict(main.reads)["b"].buffer == given["b"].buffer
        assert dict(main.launches[0].defines)["TURNED"] == str(int(turned))
        assert all(read != "dy" for _, read in main.inplace)


def product_of_a_norm(n, turned, also="", of="w", dtype="float32", shape=(40, 64)):
    """(text, feeds) of a product of n columns behind a norm."""
    (m, k), kind = shape, dtype.removesuffix("32")
    text = f"""agraph ({kind}[{m},{k}] x, {kind}[{k}] s, {kind}[{k}] b, {kind}[{n}] c,
                     {kind}{[n, k] if turned else [k, n]} w) => ({kind}[{m},{n}] z
                     {f", {kind}[{m},{k}] t" if "t = " in also else ""})
    {{ y = LayerNormalization(x, s, b) {also} z = Gemm <transB = {int(turned)}> (y, {of}, c) }}"""
    given = arrays(x=shape, s=(k,), b=(k,), w=(n, k) if turned else (k, n), c=(n,))
    return text, {name: array.astype(dtype) for name, array in given.items()}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("n", "more", "taken"), [
    (10, {}, True), (16, {"also": "t = Relu(y)"}, True), (10, {"dtype": "float16"}, True),
    (10, {"shape": (2000, 64)}, True),
    (17, {}, False), (10, {"shape": (4096, 512)}, False), (10, {"shape": (4, 20000)}, False),
    (10, {"also": "v = Tanh(w)", "of": "v"}, False),  # made behind the norm
])  # fmt: skip
def test_a_norm_makes_a_product_of_few_columns(n, more, taken, turned):
    """z = y · w + c over a classifier's classes has no launch, and y is stored where it is read."""
    text, feeds = product_of_a_norm(n, turned, **more)
    program = program_of(text_model(text), feeds)
    fused = [call for call in program.calls if call.kernel == "LayerNormalization+Gemm"]
    assert len(fused) == taken
    assert any(isinstance(call.problem, GemmProblem) for call in program.calls) != taken
    for norm in fused:
        writes, given = dict(norm.writes), dict(program.inputs)
        assert writes["z"] == dict(program.outputs)["z"]
        assert ("y" in writes) == ("also" in more)
        assert dict(norm.reads)["w"].buffer == given["w"].buffer
        assert dict(norm.launches[0].defines)["TURNED"] == str(int(turned))


@pytest.mark.parametrize(
    ("row", "column"),
    [("4", "bias"), ("5,1", ""), ("2,5,1", "row_bias"), ("2,1,1", ""), ("2,5,4", "residual")],
)
def test_a_row_or_column_added_to_a_product_is_its_bias(row, column):
    text = f"""agraph (float[2,5,3] x, float[3,4] w, float[{row}] c) => (float[2,5,4] y)
    {{ z = MatMul(x, w) y = Add(c, z) }}"""
    feeds = arrays(x=(2, 5, 3), w=(3, 4), c=tuple(map(int, row.split(","))))
    program = program_of(text_model(text), feeds)
    want = feeds["x"] @ feeds["w"] + feeds["c"]
    np.testing.assert_allclose(interpret(program, feeds, {})["y"], want, rtol=1e-5, atol=1e-5)
    calls = program.calls
    (product,) = [call for call in calls if isinstance(call.problem, GemmProblem)]
    assert len(calls) == (1 if column else 2)
    kinds = ("bias", "row_bias", "residual")
    assert set(product.problem.epilogue.among(*kinds)) == {column} - {""}
    assert ("col1" in dict(product.reads)) == (column == "bias")
    assert ("row0" in dict(product.reads)) == (column == "row_bias")


def test_large_tensors_that_are_ready_last_are_updated_apart():
    """w - g for several w: the large ones do not wait for what makes the others' gradients."""
    text = """agraph (float[256,256] g, float[256,256] u, float[256,256] v, float[256,256] w,
                      float[4] s, float[5] t, float[4] h, float[5] k)
    => (float[256,256] u1, float[256,256] v1, float[256,256] w1, float[4] s1, float[5] t1)
    { a = Softmax(g) b = Softmax(a) c = Softmax(b)
      h1 = Softmax(h) h2 = Softmax(h1) h3 = Softmax(h2) h4 = Softmax(h3) k1 = Softmax(k)
      u1 = Sub(u, a) v1 = Sub(v, b) w1 = Sub(w, c) s1 = Sub(s, h4) t1 = Sub(t, k1) }"""
    program = lowered(text, state={f"{name}1": name for name in "uvwst"})
    name = {t.buffer: name for name, t in program.inputs}
    updates = [{name[t.buffer] for _, t in call.writes} for call in program.calls
               if call.kernel.startswith("Sub")]  # fmt: skip
    assert updates == [{"u", "v"}, {"w"}, {"s", "t"}]


@pytest.mark.parametrize("first", [False, True])
def test_a_norms_backward_writes_no_state_that_is_read_after_it(first):
    """h' = dx z replaces h, and so waits for what reads h."""
    read = "t = Softmax(h)"
    text = f"""agraph (float[6,64] dy, float[6,64] x, float[64] s, float[6,1] m, float[6,1] r,
                      float[6,64] z, float[6,64] h)
    => (float[6,64] new, float[64] ds, float[64] db, float[6,64] t)
    {{ {read if first else ""} dx, ds, db = onnx_fuse.LayerNormGrad(dy, x, s, m, r)
      {"" if first else read} new = Mul(dx, z) }}"""
    program = lowered(text, state={"new": "h"})
    state = dict(program.inputs)["h"].buffer
    (wrote,) = [i for i, c in enumerate(program.calls) for _, t in c.writes if t.buffer == state]
    (reader,) = [i for i, c in enumerate(program.calls) for _, t in c.reads if t.buffer == state]
    assert reader < wrote
    assert (program.calls[wrote].kernel == "LayerNormGrad+Mul") == first


@pytest.mark.parametrize(
    ("nodes", "op"),
    [
        ("h = RMSNormalization (x, s)  y = MatMul (h, w)", "LayerNormGemm"),
        ("h = LayerNormalization (x, s)  y = MatMul (h, w)", "LayerNormGemm"),
        ("z = MatMul (x, w)  y = Gelu (z)", "Gemm"),
        ("z = MatMul (x, w)  b = Add (z, c)  y = Gelu (b)", "Gemm"),
    ],
)
def test_a_product_without_a_bias_has_the_kernel_of_one_with_it(nodes, op):
    text = f"""agraph (float16[40,64] x, float16[64] s, float16[64,72] w, float16[1] c)
    => (float16[40,72] y) {{ {nodes} }}"""
    model = text_model(text)
    rewrite.optimize(model)
    program = lowered(model)
    (call,) = [call for call in program.calls if isinstance(call.problem, GemmProblem)]
    assert call.problem.op == op
    bias = dict(call.reads)["c" if op == "LayerNormGemm" else "col1"]
    assert bias.shape == (72,)
    if "(z, c)" in nodes:  # a number that is known when it runs
        (copy,) = [other for other in program.calls if other is not call]
        assert copy.writes[0][1] == bias
    else:
        assert len(program.calls) == 1
        assert not program.constants[bias.buffer].any()


BLOCK_GRAD = """agraph (bfloat16[M,256] g, bfloat16[512,256] v, bfloat16[M,256] x, bfloat16[256] s,
    bfloat16[256] b, bfloat16[256,512] w, bfloat16[512] c, float[M,1] mean, float[M,1] rstd,
    bfloat16[M,512] z) => (bfloat16[M,256] y, bfloat16[256,512] dw MORE)
{ r = Neg(g) dh = Gemm <transB = 1> (r, v)
  dx, ds, db, dw, dc = onnx_fuse.LayerNormGemmGeluGrad (dh, x, s, b, w, c, mean, rstd, z)
  y = Add(ORDER) NODE }"""
"""Backward of y = x + gelu(LN(x) w + c) v: what it gives to x."""


def block_gradient(rows, more="", node="", order="dx, r"):
    text = BLOCK_GRAD.replace("MORE", more).replace("NODE", node).replace("ORDER", order)
    model = text_model(text.replace("M,", f"{rows},"))
    program = lowered(model)
    product, grad = (call for call in program.calls if isinstance(call.problem, GemmProblem))
    return program, product, grad


@pytest.mark.parametrize(("also", "moved"), [("", True), (", bfloat16[64,512] dh", False)])
def test_a_product_stores_its_result_times_the_slope_of_the_activation_before(also, moved):
    program, product, grad = block_gradient(64, also)
    assert bool(product.problem.epilogue.dact) == moved
    assert product.problem.epilogue.act == ("gelu" if moved else "")
    assert grad.problem.epilogue.act == ("" if moved else "gelu")
    z = dict(program.inputs)["z"]
    assert dict(product.reads).get("c") == (z if moved else None)
    assert dict(grad.reads)["dy"].buffer == product.writes[0][1].buffer


HIDDEN_GRAD = """agraph (bfloat16[M,K] dy, bfloat16[N,K] v, bfloat16[M,128] x,
    bfloat16[128,N] w, bfloat16[M,N] z) => (bfloat16[M,128] dx, bfloat16[128,N] dw MORE)
{ dh = Gemm <transB = 1> (dy, v)  dx, dw, dc = onnx_fuse.GemmSiluGrad (dh, x, w, z) }"""
"""Backward of y = silu(x w + c) v to its first layer."""


def hidden_gradient(rows, width, inner, more, inputs=128):
    text = HIDDEN_GRAD.replace("MORE", more).replace("M,", f"{rows},").replace("128", str(inputs))
    for name, size in (("K", width), ("N", inner)):
        text = text.replace(f"{name}]", f"{size}]").replace(f"[{name},", f"[{size},")
    return text_model(text)


@pytest.mark.parametrize(
    ("rows", "inputs", "more", "sums"),
    [(8, 128, "", False), (4100, 128, "", False), (4100, 128, ", bfloat16[N] dc", True),
     (2048, 768, ", bfloat16[N] dc", True)],
)  # fmt: skip
def test_an_activations_gradient_is_made_before_and_its_bias_summed_after(rows, inputs, more, sums):
    """The product before multiplies by the slope; the one behind sums up the bias's gradient."""
    model = hidden_gradient(rows, 768, 3072, more, inputs)
    program = lowered(model)
    first, *products = (call for call in program.calls if isinstance(call.problem, GemmProblem))
    assert (first.problem.epilogue.dact, first.problem.epilogue.act) == (True, "silu")
    assert dict(first.reads)["c"] == dict(program.inputs)["z"]
    dz = dict(first.writes)["y"].buffer
    assert all(dz in {t.buffer for _, t in call.reads} for call in products)
    assert any(call.problem.epilogue.column_sums for call in products) == sums
    entries = [launch.entry for call in program.calls for launch in call.launches]
    assert "act_grad_rows" not in entries
    assert entries.count("sum_parts") == sums


@pytest.mark.parametrize("order", ["dx, r", "r, dx"])
@pytest.mark.parametrize(
    ("rows", "also", "node", "way"),
    [
        (64, "", "", "apart"),
        (64, ", bfloat16[64,256] t", "t = Softmax(r)", "apart"),
        (64, ", bfloat16[64,256] dx", "", ""),
        (8192, "", "", "here"),
        (8192, ", bfloat16[8192,256] r", "", ""),  # no kernel for so many rows reads it elsewhere
        (8192, ", bfloat16[8192,256] t", "e = Exp(dw) f = ReduceMax(e) t = Add(r, f)", ""),
    ],
)
def test_a_residuals_gradient_is_added_where_dx_is_stored(rows, also, node, way, order):
    program, product, grad = block_gradient(rows, also, node, order)
    assert grad.problem.add == way
    y = dict(program.outputs)["y"].buffer
    adds = [call for call in program.calls if call.kernel.startswith("Add")]
    if not way:
        assert y in {t.buffer for call in adds for _, t in call.writes}
        return
    assert not adds
    assert dict(grad.writes)["dx"].buffer == y
    added = dict(grad.reads)["add"].buffer
    assert (added == y) == (way == "here")
    assert dict(product.reads)["a"].buffer == added


@pytest.mark.parametrize(("rows", "sums"), [(1, 0), (33, 1)])
def test_an_activations_gradient_is_one_pass_and_two_products_at_any_rows(rows, sums):
    case = math_cases.Case(
        "GemmGeluGrad", ((rows, 72), (rows, 40), (40, 72), (rows, 72)), {}, 3, "bfloat16",
        math_cases.FUSE,
    )  # fmt: skip
    calls = case.program().calls
    entries = [
        call.launches[0].entry for call in calls if not isinstance(call.problem, GemmProblem)
    ]
    assert entries == ["act_grad_rows"] + ["sum_parts"] * sums
    dx, dw = (call.problem for call in calls if isinstance(call.problem, GemmProblem))
    assert (dx.m, dx.n, dx.k) == (rows, 40, 72)
    # of one row, too, x is a transpose whose rows TMA can read
    assert (dw.m, dw.n, dw.k, dw.trans_a, dw.lda) == (40, 72, rows, True, 40)


@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (32, 0)])
@pytest.mark.parametrize("op", ["LayerNormGemm", "LayerNormGemmGelu", "GemmGelu"])
def test_gradients_of_empty_products_are_their_bodies(op, rows, columns):
    m, n, norm = rows, columns, op.startswith("LayerNorm")
    vectors = "float16[64] s, float16[64] b," if norm else ""
    more = f"float16[{n}] c, float[{m},1] mean, float[{m},1] rstd," if norm else ""
    extra = "float16[64] ds, float16[64] db," if norm else ""
    text = f"""agraph (float16[{m},{n}] dy, float16[{m},64] x, {vectors} float16[64,{n}] w, {more}
        float16[{m},{n}] z) => (float16[{m},64] dx, {extra} float16[64,{n}] dw, float16[{n}] dc)
    {{ dx, {"ds, db," if norm else ""} dw, dc = onnx_fuse.{op}Grad
       (dy, x, {"s, b," if norm else ""} w, {"c, mean, rstd," if norm else ""} z) }}"""
    model = text_model(text)
    program = lowered(model)
    assert not any(
        call.problem is not None and call.problem.op.endswith("Grad") for call in program.calls
    )
    assert [t.shape for _, t in program.outputs] == [tuple(v.shape) for v in model.graph.outputs]


def test_pieces_go_where_the_copy_behind_them_puts_them() -> None:
    """Both chains write into the result; where something else reads the whole, a copy stays."""
    counts = {"pieces that a Transpose rearranges": 2, "pieces of which one is read apart": 5}
    for name, count in counts.items():
        text, feeds = GRAPHS[name]
        calls = program_of(text_model(text), feeds).calls
        assert sum(len(c.writes) for c in calls) == count, "\n".join(map(str, calls))


def test_each_part_of_a_wide_concat_is_looked_at_a_few_times(monkeypatch) -> None:
    """Not once for each pair of parts: thousands would take hours."""
    looked, piece_of = [], copy_fusion.piece_of
    monkeypatch.setattr(copy_fusion, "piece_of", lambda call: looked.append(call) or piece_of(call))
    count = 300
    parts = ", ".join("xz"[i % 2] for i in range(count))
    model = text_model(
        f"g (float[2,4] x, float[2,4] z) => (float[2,{4 * count}] y)"
        f" {{ y = Concat <axis = 1> ({parts}) }}"
    )
    program = lowered(model)
    feeds = {"x": np.ones((2, 4), np.float32), "z": np.zeros((2, 4), np.float32)}
    y = interpret(program, feeds, {})["y"]
    assert np.array_equal(y, np.tile(np.repeat(np.float32([1, 0]), 4), (2, count // 2)))
    assert len(program.calls) == 2  # a launch copies 256
    assert len(looked) < 10 * count
