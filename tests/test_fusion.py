"""Every fusion on a small graph, and the optimizer on real exported graphs, against onnxruntime."""

import json
import sys

import numpy as np
import onnx_ir as ir
import pytest
from cases import NEWEST_OPSET, FusionCase, RealCase, real_cases
from fusion_cases import FUSION_CASES
from onnx.reference import ReferenceEvaluator
from support import answers, assert_same, says, stock, with_weights

from onnx_fuse import autodiff, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import inline, save, to_proto
from onnx_fuse.ir.build import const_array, text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops import OPS
from onnx_fuse.ops.fused.norm import canonical_norm
from onnx_fuse.ops.rules import consumers, through_row_views
from onnx_fuse.rewrite import packed_weights

# Relative to the largest value of the output. float32 reassociation over these K stays
# below 2e-5; float16 outputs hold 11 bits, and the norm's affine part rounds in float16 as well.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3}


@pytest.mark.parametrize("stale", ["Q, R", "5"])
@pytest.mark.parametrize("last", ["y = Relu (a)", "b = Identity (a) y = Relu (b)"])
def test_a_wrong_shape_in_the_file_changes_nothing(stale: str, last: str) -> None:
    """onnxruntime warns, and runs it."""
    text = (
        f"g (float[N, 6] x) => (float[M] y) <int64[1] to = {{-1}}, float[{stale}] a, float[12] b>"
    )
    proto = to_proto(text_model(f"{text} {{ a = Reshape (x, to) {last} }}"))
    model = load(proto)
    rewrite.optimize(model)
    x = np.arange(-6, 6, dtype=np.float32).reshape(2, 6)
    np.testing.assert_array_equal(run(model, {"x": x})["y"], np.maximum(x.reshape(-1), 0))


def test_a_matrix_drawn_at_random_is_an_operand_like_others() -> None:
    """Its node has no input."""
    model = text_model("""g (float[3, 2, 5] w) => (float[3, 2, 5] y)
        { r = RandomUniform <high = 2.0, low = 2.0, shape = [3, 2, 2]> () y = MatMul (r, w) }""")
    rewrite.optimize(model)
    w = np.arange(30, dtype=np.float32).reshape(3, 2, 5)
    expected = np.full((3, 2, 2), 2, np.float32) @ w
    np.testing.assert_array_equal(run(model, {"w": w})["y"], expected)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return answers(stock(model, optimized=True), feeds)


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(expected)
    for name, truth in expected.items():
        assert actual[name].dtype == truth.dtype, name
        assert actual[name].shape == truth.shape, name
        if truth.dtype.kind != "f":
            np.testing.assert_array_equal(actual[name], truth)
            continue
        bound = TOLERANCE[truth.dtype.name] * max(1.0, float(np.abs(truth).max()))
        error = np.abs(actual[name].astype(np.float64) - truth.astype(np.float64)).max()
        assert error <= bound, f"{name}: {error} > {bound}"


def fused_ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.domain == FUSE]


RUNNABLE = [case for case in FUSION_CASES if case.opset <= NEWEST_OPSET]
SIZES = ({"B": 2, "H": 3, "G": 1, "S": 6, "T": 5}, {"B": 3, "H": 2, "G": 2, "S": 7, "T": 9})


@pytest.mark.parametrize("case", RUNNABLE, ids=lambda c: c.name)
def test_fusion(case: FusionCase) -> None:
    original = load(case.model())
    model = load(case.model())
    pays_on_a_gpu = ["ConvAsGemm"] if case.level else []
    report = rewrite.optimize(model, level=case.level, fuse=pays_on_a_gpu)
    assert tuple(fused_ops(model)) == case.fused
    assert not {node.op_type for node in model.graph}.intersection(case.gone)
    assert says(report, case.reason), report.not_fused
    flat = inline(model)
    assert not fused_ops(flat)
    for sizes in SIZES:
        feeds = case.feeds(**sizes)
        expected = run(original, feeds)
        assert_close(run(model, feeds), expected)
        assert_close(run(flat, feeds), expected)


@pytest.mark.parametrize("case", RUNNABLE, ids=lambda c: c.name)
def test_training_keeps_every_weight(case: FusionCase) -> None:
    """With training=True each float initializer survives, as it is or inside a packed one."""
    original = load(case.model())
    wanted = {
        v.name: v.const_value.numpy()
        for v in original.graph.initializers.values()
        if v.const_value is not None and v.const_value.size > 1 and v.name in case.inputs
    }
    model = load(case.model())
    rewrite.optimize(model, training=True)
    found: dict[str, np.ndarray] = {}
    for value in model.graph.initializers.values():
        array = value.const_value.numpy() if value.const_value is not None else np.empty(0)
        unpacked = packed_weights.unpack(value, array)
        np.testing.assert_array_equal(packed_weights.pack(value, unpacked), array)
        found |= unpacked
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name or ""], array)


@pytest.mark.parametrize("case", real_cases(), ids=lambda c: c.name)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_real_graphs(case: RealCase, level: int) -> None:
    model = load(case.path)
    names = [[v.name for v in ends] for ends in (model.graph.inputs, model.graph.outputs)]
    shapes = [str(v.shape) for v in (*model.graph.inputs, *model.graph.outputs)]
    rewrite.optimize(model, level=level)
    assert [[v.name for v in e] for e in (model.graph.inputs, model.graph.outputs)] == names
    assert [str(v.shape) for v in (*model.graph.inputs, *model.graph.outputs)] == shapes
    for feeds, expected in case.feeds:
        assert_close(run(model, feeds), expected)
    if level == 2:
        assert_no_norm_left_before_a_gemm(model)


def assert_no_norm_left_before_a_gemm(model: ir.Model) -> None:
    for node in model.graph:
        if (
            node.op_type in ("MatMul", "Gemm")
            and node.inputs[1] in model.graph.initializers.values()
        ):
            below, _ = through_row_views(node.inputs[0])
            producer = below.producer() if below is not None else None
            assert canonical_norm(producer) is None, f"{producer} is left before {node}"


@pytest.mark.parametrize("case", real_cases(), ids=lambda c: c.name)
def test_inlined_real_graphs_hold_plain_onnx(case: RealCase) -> None:
    model = load(case.path)
    rewrite.optimize(model)
    flat = inline(model)
    assert {node.domain for node in flat.graph} == {""}
    for feeds, expected in case.feeds:
        assert_close(run(flat, feeds), expected)


def test_fused_file_loads_with_its_ops_and_a_forged_body_is_inlined(tmp_path) -> None:
    case = FUSION_CASES[0]
    model = load(case.model())
    rewrite.optimize(model)
    save(model, tmp_path / "fused.onnx")
    assert fused_ops(load(tmp_path / "fused.onnx")) == ["LayerNormGemm"]
    proto = to_proto(model)
    (body,) = proto.functions
    body.node[-1].op_type = "Sub"  # y = m - c, under our name
    forged = load(proto)
    assert fused_ops(forged) == []
    feeds = case.feeds(**SIZES[0])
    assert_close(run(forged, feeds), answers(stock(proto, optimized=True), feeds))


@pytest.mark.parametrize("training", [False, True])
def test_an_attention_node_stays_the_body_of_its_sdpa(tmp_path, training) -> None:
    text = """<ir_version: 10, opset_import: ["" : 23]>
    agraph (float[2,4,5,8] q, float[2,2,6,8] k, float[2,2,6,8] v, bool[2,1,5,6] mask)
    => (float[2,4,5,8] y) { y = Attention(q, k, v, mask) }"""
    model = text_model(text)
    rewrite.optimize(model, training=training)
    save(model, tmp_path / "fused.onnx")
    model = load(tmp_path / "fused.onnx")
    assert fused_ops(model) == ["GroupedSdpaMaskGuard"]
    (body,) = to_proto(model).functions
    assert [node.op_type for node in body.node] == ["Attention"]
    assert "Attention" in {node.op_type for node in inline(model).graph}


def test_an_op_without_a_newer_body_keeps_its_own_under_that_overload() -> None:
    case = FUSION_CASES[0]
    model = load(case.model())
    rewrite.optimize(model)
    proto = to_proto(model)
    for called in (*proto.graph.node, *proto.functions):
        if called.domain == FUSE:
            called.overload = "newer"
    feeds = case.feeds(**SIZES[0])
    loaded = load(proto)
    assert fused_ops(loaded) == ["LayerNormGemm"]
    assert_close(run(loaded, feeds), run(model, feeds))


@pytest.mark.parametrize(("alpha", "act"), [("", "Silu"), ("<alpha = 1.5>", "QuickGelu")])
def test_the_operator_of_opset_28_is_a_gated_unit(alpha: str, act: str) -> None:
    """SwiGLU (a, b) = a sigmoid(alpha a) b, which no onnxruntime has yet."""
    text = (
        f'<ir_version: 10, opset_import: ["" : 28]> g (float[B,6] x) => (float[B,8] y) '
        f"{{ a = MatMul (x, w) b = MatMul (x, v) y = SwiGLU {alpha} (a, b) }}"
    )
    rng = np.random.default_rng(2)
    model = text_model(text)
    with_weights(model, {n: rng.standard_normal((6, 8)).astype(np.float32) for n in "wv"})
    x = rng.standard_normal((3, 6)).astype(np.float32)
    a, b = (x @ v.const_value.numpy() for v in model.graph.initializers.values())
    model = load(model)
    rewrite.optimize(model)
    assert fused_ops(model) == [f"GateFirstGemm{act}"]
    flat = inline(model)
    flat.graph.opset_imports[""] = 21  # its operators are all older
    got = run(flat, {"x": x})["y"]
    np.testing.assert_allclose(
        got, a / (1 + np.exp(-(1.5 if alpha else 1) * a)) * b, rtol=1e-5, atol=1e-6
    )


def test_skip_and_fuse_select_by_name() -> None:
    case = next(c for c in FUSION_CASES if c.name == "merge_query_key_value")
    model = load(case.model())
    rewrite.optimize(model, skip=["MergedGemm"])
    assert fused_ops(model) == ["LayerNormGemm"] * 3
    model = load(case.model())
    rewrite.optimize(model, level=0, fuse=["Gemm"])
    assert fused_ops(model) == ["LayerNormGemm"] * 3
    with pytest.raises(UsageError, match=r"unknown fusion 'Gem' \(did you mean 'Gem[a-z]*"):
        rewrite.optimize(model, skip=["Gem"])


def test_level_3_folds_the_affine_part() -> None:
    case = FUSION_CASES[0]
    model = load(case.model())
    rewrite.optimize(model, level=3)
    (node,) = [n for n in model.graph if n.op_type == "LayerNormGemm"]
    scale = node.inputs[1]
    assert (scale.const_value.numpy() == 1).all()
    feeds = case.feeds(**SIZES[0])
    assert_close(run(model, feeds), run(load(case.model()), feeds))


def test_constants_are_compared_exactly() -> None:
    """An epsilon of 1e-12 is no zero: dropping it would divide by zero on a constant row."""
    case = next(c for c in FUSION_CASES if c.name == "norm_written_out_pow_div")
    model = load(case.model())
    rewrite.optimize(model)
    (node,) = [n for n in model.graph if n.op_type == "LayerNormGemm"]
    assert node.attributes["epsilon"].as_float() == pytest.approx(1e-12)


def test_packed_weights_remember_their_origin() -> None:
    case = next(c for c in FUSION_CASES if c.name == "merge_query_key_value")
    model = load(case.model())
    rewrite.optimize(model)
    (node,) = [n for n in model.graph if n.op_type == "LayerNormGemm"]
    weight = node.inputs[3]
    record = json.loads(weight.metadata_props["onnx_fuse.packed"])
    assert [p["name"] for p in record["parts"]] == ["w", "w1", "w2"]
    assert not consumers(model.graph.initializers["w"]) if "w" in model.graph.initializers else True


def test_tied_weights_stay_tied_in_training() -> None:
    """A weight two Gemms read is packed by nodes: as two copies it would part ways."""
    model = text_model(
        """agraph (float[N,8] x, float[8,8] w, float[8] c) => (float[N,8] y)
          { a = Gemm <transB = 1> (x, w, c)  h = Relu (a)  b = Gemm <transB = 1> (h, w, c)
          y = Tanh (b) }"""
    )
    rng = np.random.default_rng(0)
    with_weights(model, lambda v: rng.standard_normal(v.shape.numpy()).astype(np.float32))
    feeds = {"x": rng.standard_normal((3, 8)).astype(np.float32)}
    expected = run(load(model), feeds)
    for training, transposes in ((False, 0), (True, 1)):
        fused = load(model)
        rewrite.optimize(fused, training=training)
        assert fused_ops(fused) == ["GemmRelu", "GemmTanh"]
        assert sum(n.op_type == "Transpose" for n in fused.graph) == transposes
        assert_close(run(fused, feeds), expected)
        gradients = autodiff.gradient(fused)
        names = [o.name for o in gradients.graph.outputs if o.name.endswith(".grad")]
        assert sorted(names) == ["c.grad", "w.grad"]


def test_a_scalar_parameter_is_not_folded_in_training() -> None:
    """exp(logit_scale) of contrastive models: one number, and trained all the same."""
    model = text_model(
        "agraph (float[N,4] x) => (float[N,4] y) <float s = {0.5}> { e = Exp (s) y = Mul (x, e) }"
    )
    for training, exps in ((False, 0), (True, 1)):
        fused = load(model)
        rewrite.optimize(fused, training=training)
        assert sum(n.op_type == "Exp" for n in fused.graph) == exps


GRADIENTS = [
    c
    for c in RUNNABLE
    if "attention" in c.name or c.name.startswith(("conv_", "group_norm", "glu", "scale"))
]


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda c: c.name)
def test_gradients_of_inputs_and_weights_are_those_of_the_plain_graph(case: FusionCase) -> None:
    answers = []
    for fuse in (False, True):
        model = load(case.model())
        names = [*model.graph.initializers, *(v.name for v in model.graph.inputs)]
        wrt = [str(n) for n in names if n in case.fed or f" {n}" in case.inputs]
        if "attention" in case.name:
            floats = [v.name for v in model.graph.inputs if v.dtype == ir.DataType.FLOAT]
            wrt = [str(n) for n in floats if n != "mask"]
        if fuse:
            rewrite.optimize(model, training=True)
        backward = autodiff.gradient(model, wrt=wrt)
        feeds = case.feeds(**SIZES[0])
        rng = np.random.default_rng(3)
        for name, value in run(model, feeds).items():
            feeds[f"{name}.grad"] = rng.standard_normal(value.shape).astype(value.dtype)
        found = run(backward, feeds)
        answers.append({n: found[f"{n}.grad"] for n in wrt})
    assert_close(answers[1], answers[0])


def test_the_report_counts_fused_ops_by_name() -> None:
    case = next(c for c in FUSION_CASES if c.name == "norm_read_by_a_residual")
    model = load(case.model())
    report = rewrite.optimize(model)
    assert report.fusions == {"LayerNormGemm": 1}
    assert any("is now also an output of" in note for note in report.notes)


@pytest.mark.parametrize(
    ("body", "gone"),
    [
        # a mask as torch.zeros and assignments to parts of it write it
        ("t = Transpose (z) m = ScatterND (t, at, row) y = Add (x, m)", True),
        # the same number over and over is made when it runs
        ("t = Unsqueeze (z, zero) m = Squeeze (t, zero) y = Add (x, m)", False),
        ("y = Add (x, z)", False),
    ],
)
def test_what_is_worked_out_of_a_filled_tensor_is_folded(body: str, gone: bool) -> None:
    row = ", ".join(map(str, range(20)))
    model = text_model(f"""agraph (float[20,20] x) => (float[20,20] y)
    <int64[2] sizes = {{20, 20}}, int64[1,1] at = {{3}}, int64[1] zero = {{0}},
     float[1,20] row = {{{row}}}>
    {{ z = ConstantOfShape <value = float[1] {{2}}> (sizes) {body} }}""")
    expected = ReferenceEvaluator(to_proto(model)).run(None, {"x": np.ones((20, 20), np.float32)})
    rewrite.optimize(model)
    kinds = [n.op_type for n in model.graph]
    assert kinds == (["Add"] if gone else ["ConstantOfShape", *kinds[1:-1], "Add"])
    held = [v.const_value.size for v in model.graph.initializers.values()]
    assert max(held) == (400 if gone else 2)
    found = ReferenceEvaluator(to_proto(model)).run(None, {"x": np.ones((20, 20), np.float32)})
    np.testing.assert_array_equal(found[0], expected[0])


def test_padding_that_depends_on_the_padding_before_is_folded() -> None:
    """(4 - size % 4) % 4 in three layers: each is known once the layer before it is."""
    layer = """ s{i} = Shape <start = 1, end = 2> (x{i})  m{i} = Mod (s{i}, four)
      d{i} = Sub (four, m{i})  e{i} = Mod (d{i}, four)  p{i} = Concat <axis = 0> (zero, e{i})
      g{i} = Pad (x{i}, p{i}, fill, along)  n{i} = LayerNormalization (g{i}, g, b)
      h{i} = MatMul (n{i}, w)  x{j} = Add (h{i}, c)"""
    layers = "".join(layer.format(i=i, j=i + 1) for i in range(4))
    text = (
        "h (float[B,8,4] x0, float[4] g, float[4] b, float[4,4] w, float[4] c) => (float[B,8,4] x4)"
        " <int64[1] four = {4}, int64[1] zero = {0}, float fill = {0}, int64[1] along = {1}>"
        f" {{{layers} }}"
    )
    model = text_model(text)
    report = rewrite.optimize(model)
    assert report.fusions == {"LayerNormGemm": 4}
    assert not [node for node in model.graph if node.op_type == "Pad"]


@pytest.mark.parametrize(("columns", "fused"), [(1025, False), (1032, True)])
def test_a_large_product_whose_gradient_has_no_kernel_trains_without_its_norm(columns, fused):
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[8,1024] x, float[1024] gamma, '
        f"float[1024] beta, float[1024,{columns}] w) => (float[8,{columns}] y) "
        "{ h = LayerNormalization (x, gamma, beta) y = MatMul (h, w) }"
    )
    for training in (False, True):
        model = text_model(text)
        found = rewrite.optimize(model, level=1, training=training)
        assert ("LayerNormGemm" in found.fusions) == (fused or not training)
        assert says(found, "gradient-rows") == (training and not fused)


def test_every_second_body_is_one() -> None:
    """The body that a file asks for by overload: its names are not those of the first."""
    for (domain, name), definition in OPS.items():
        if domain == FUSE and definition.newer:
            assert len(definition.function(overload="newer")), name


@pytest.mark.parametrize(
    ("sizes", "target"),
    [
        ("n, two, three", [0, 2, 3]),
        ("n, three, two", [0, 3, 2]),
        ("two, n, three", None),  # a size in another place is no copy
        ("n, rest, three", [0, -1, 3]),
    ],
)
@pytest.mark.parametrize("how", ["", "<allowzero = 1> "])
def test_a_reshape_to_sizes_of_its_own_input_has_a_constant_target(
    sizes: str, target: list[int] | None, how: str
) -> None:
    model = text_model(
        '<ir_version: 10, opset_import: ["" : 21]> agraph (float[N,5] x) => (float[A,B,C] y) '
        "<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3},"
        " int64[1] rest = {-1}, int64[4] by = {0, 0, 0, 1}>"
        " { p = Pad (x, by) s = Shape (x) n = Slice (s, zero, one)"
        f" t = Concat <axis = 0> ({sizes}) r = Reshape {how}(p, t) y = Neg (r) }}"
    )
    before = stock(model, optimized=True)
    rewrite.optimize(model)
    (reshape,) = [n for n in model.graph if n.op_type == "Reshape"]
    found = const_array(reshape.inputs[1])
    if how and target == [0, -1, 3]:
        target = [0, 2, 3]  # beside a 0 that is copied no -1 is found
    assert (None if found is None else found.tolist()) == target
    after = stock(model, optimized=True)
    for rows in (2, 4, 0):
        x = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
        if rows == 0 and "rest" in sizes and not how:
            continue  # nothing is left to find a size by
        np.testing.assert_array_equal(after.run(None, {"x": x})[0], before.run(None, {"x": x})[0])


def test_a_shape_of_the_weights_is_no_reader_of_theirs() -> None:
    """As onnxruntime's optimizer writes a view by the weights' own sizes."""
    model = text_model(
        '<ir_version: 10, opset_import: ["" : 21]> agraph (float[B,S,8] q, float[B,T,8] k,'
        " float[B,T,8] v) => (float[B,S,8] y, int64[3] n) { kt = Transpose <perm = [0,2,1]> (k)"
        " s = MatMul (q, kt) p = Softmax (s) n = Shape (p) y = MatMul (p, v) }"
    )
    before = stock(model, optimized=True)
    assert rewrite.optimize(model).fusions == {"Sdpa": 1}
    after = stock(model, optimized=True)
    rng = np.random.default_rng(2)
    rows = {"q": 3, "k": 5, "v": 5}
    feeds = {n: rng.standard_normal((2, r, 8)).astype(np.float32) for n, r in rows.items()}
    assert_same(after.run(None, feeds), before.run(None, feeds), rtol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ("t = Transpose <perm = [1, 0]> (x) c = Cast <to = 10> (t) y = Cast <to = 1> (c)", 3),
        ("t = Transpose <perm = [0, 1]> (x) y = Neg (t)", 1),
        ("c = Cast <to = 1> (x) y = Neg (c)", 1),
        ("t = Transpose <perm = [1, 0]> (x) y = Transpose <perm = [1, 0]> (t)", 1),  # an Identity
        ("t = Transpose <perm = [1, 0]> (x) n = Neg (t) y = Transpose <perm = [1, 0]> (n)", 3),
    ],
)
def test_rules_of_onnxscript_are_loaded_where_one_applies(
    nodes: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = text_model(f"g (float[N, 6] x) => (float[M, K] y) {{ {nodes} }}")
    if left == 3:  # its import takes longer than most graphs
        monkeypatch.setitem(sys.modules, "onnxscript.rewriter", None)
    rewrite.optimize(model, level=2)
    assert len(model.graph) == left
