"""validate: generated inputs, comparison, and blame with planted faults."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from lowering import program_of
from support import ENCODER, Cli, normal, table

from onnx_fuse import ops, rewrite
from onnx_fuse.autodiff.load import load as load_model
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.importer.shapes import fix_shapes, infer_shapes
from onnx_fuse.ir.build import Builder, const_array, text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.program.call import Program, dtype_of
from onnx_fuse.program.problem import CHIPS, Hardware
from onnx_fuse.runtime import ort
from onnx_fuse.session import load
from onnx_fuse.validation import request
from onnx_fuse.validation.arrays import Array, index_bound
from onnx_fuse.validation.blame import ORACLE, find_culprits
from onnx_fuse.validation.check import check_outputs
from onnx_fuse.validation.compare import TOLERANCES, difference, random_outputs, tolerance_of
from onnx_fuse.validation.gradients import check_gradients
from onnx_fuse.validation.inputs import Feeds, generate
from onnx_fuse.validation.reference import Reference, to_double
from onnx_fuse.validation.request import Request
from onnx_fuse.validation.values import values_of

Model = onnx_ir.Model


def ones(count: int) -> str:
    return "{" + ", ".join("1" * count) + "}"


def feeds_for(text: str, **shapes: list[int]) -> tuple[list[Feeds], list[str]]:
    model = text_model(text)
    fix_shapes(model, shapes)
    session = ort.session(model)
    notes: list[str] = []
    pairs = generate(model, lambda f: ort.run(session, f), notes=notes)
    return [feed for feed, _ in pairs], notes


# ---- generated inputs ------------------------------------------------------------------------


def test_every_dynamic_axis_is_seen_at_two_sizes_and_names_share_theirs() -> None:
    feeds, notes = feeds_for(
        "g (float[B, S, 4] x, float[S, T] m, float[B] b) => (float[B, T, 4] y) "
        "{ t = Transpose <perm = [1, 0]> (m)  z = MatMul (t, x)"
        "  a = Constant <value_ints = [1, 2]> ()  u = Unsqueeze (b, a)  y = Add (z, u) }"
    )
    for symbol, places in {"B": ("x0", "b0"), "S": ("x1", "m0"), "T": ("m1",)}.items():
        sizes = [{feed[p[0]].shape[int(p[1])] for p in places} for feed in feeds]
        assert all(len(size) == 1 for size in sizes), f"{symbol} is not one size"
        assert len(set.union(*sizes)) >= 2, f"{symbol} has one size only"
    assert len({feeds[0]["x"].shape[1], feeds[0]["m"].shape[1], feeds[0]["b"].shape[0]}) == 3
    assert notes == []


def test_ids_stay_within_what_they_index() -> None:
    text = (
        "g (int64[B, S] ids, int64[B, S] shifted, int32[B] label) => (float[B, S, 2] y, float z) "
        f"<float[5, 2] table = {ones(10)}, float[3, 2] other = {ones(6)}> {{"
        "  c = Cast <to = 7> (ids)  e = Gather (table, c)"
        "  two = Constant <value_int = -2> ()  k = Sub (shifted, two)  m = Constant <value_int = 3>"
        " ()  j = Mod (k, m)  f = Gather (other, j)  y = Add (e, f)  l = Cast <to = 7> (label)"
        "  r = ReduceMean <keepdims = 0> (y)  h = Gather <axis = 1> (table, l)"
        "  s = ReduceSum <keepdims = 0> (h)  z = Add (r, s) }"
    )
    model = text_model(text)
    bounds = {v.name: index_bound(v) for v in model.graph.inputs}
    assert bounds == {"ids": 5, "shifted": None, "label": 2}
    check = check_outputs(model, load(model))
    assert check.ok
    assert len({str(feed) for feed in check.feeds[:3]}) == 2  # no mask whose last row hides all


def test_masks_are_padded_on_the_right_and_positions_count_up() -> None:
    feeds, _ = feeds_for(
        "g (int64[B, S] attention_mask, bool[B, 1, S] keep, int64[B, S] position_ids,"
        " float[B, S] float_mask) => (float[B, 1, S] y)"
        f"<float[64] table = {ones(64)}> {{ a = Cast <to = 1> (attention_mask)"
        "  p = Gather (table, position_ids)  b = Add (a, p)  d = Add (b, float_mask)"
        "  one = Constant <value_ints = [1]> ()  c = Unsqueeze (d, one)"
        "  y = Where (keep, c, c) }"
    )
    for feed in feeds:
        mask = feed["attention_mask"]
        assert set(np.unique(mask)) == {0, 1}
        assert (np.diff(mask, axis=1) <= 0).all()
        assert mask[0].all()
        assert not mask[-1].all()
        assert mask[:, 0].all()
        np.testing.assert_array_equal(feed["keep"][:, 0], mask.astype(bool))
        np.testing.assert_array_equal(feed["position_ids"], np.arange(mask.shape[1]) + 0 * mask)
        np.testing.assert_array_equal(feed["float_mask"], np.where(mask, 0, -1e4))


def test_sizes_that_the_graph_wants_are_found() -> None:
    feeds, notes = feeds_for(
        "g (float[N, L] x) => (float[N, B, 8] y) "
        "{ s = Constant <value_ints = [0, -1, 8]> ()  y = Reshape (x, s) }"
    )
    assert {feed["x"].shape[1] % 8 for feed in feeds} == {0}
    assert len({feed["x"].shape[1] for feed in feeds}) == 2
    assert notes == []  # they were read off the graph


def test_an_axis_that_takes_one_size_only_is_named() -> None:
    feeds, notes = feeds_for(
        "g (float[N, L] x) => (float[N, 1] y) <float[7, 1] w = {1, 2, 3, 4, 5, 6, 7}>"
        " { y = MatMul (x, w) }"
    )
    assert {feed["x"].shape[1] for feed in feeds} == {7}
    assert any("only one size of the dynamic axes L" in note for note in notes)


def test_dimensions_may_be_expressions_of_others() -> None:
    model = text_model(
        "g (float[B, P] past, float[B, S] x, float[B, T] all) => (float[B, T] y)"
        "{ c = Concat <axis = 1> (past, x)  y = Add (c, all) }"
    )
    total = onnx_ir.SymbolicDim("P + S")
    model.graph.inputs[2].shape = onnx_ir.Shape([model.graph.inputs[2].shape[0], total])
    check = check_outputs(model, model)
    for feed in check.feeds:
        assert feed["all"][1] == feed["past"][1] + feed["x"][1]


def test_a_mask_whose_running_sum_is_a_position_stays_a_mask() -> None:
    """OPT's positions: cumsum(mask), which random ids up to the table's size would overrun."""
    feeds, _ = feeds_for(
        "g (int64[B, S] attention_mask) => (float[B, S] y)"
        f"<float[32] table = {ones(32)}, int64 one = {{1}}> {{"
        "  p = CumSum (attention_mask, one)  y = Gather (table, p) }"
    )
    for feed in feeds:
        assert set(np.unique(feed["attention_mask"])) == {0, 1}


def test_strings_are_words_that_the_graph_knows() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]> g (string[N] s) =>
      (int64[N] y) { y = ai.onnx.ml.LabelEncoder <keys_strings = ["up", "down"],
        values_int64s = [1, 2]> (s) }"""
    feeds, _ = feeds_for(text)
    assert {str(word) for feed in feeds for word in feed["s"]} <= {"up", "down", "other"}
    feeds, _ = feeds_for("g (string[N] s) => (string[N] y) { y = Identity (s) }")
    assert all(feed["s"].size for feed in feeds)


def test_what_cannot_be_generated_is_said() -> None:
    with pytest.raises(ModelError, match=r"none of the .* tried N=7; .*: give inputs .*--dim"):
        feeds_for(
            "g (float[N, N] x) => (float[J, K] y) { s = Constant <value_ints = [71, 73]> ()"
            "  y = Reshape (x, s) }"
        )


def test_shapes_given_are_used_and_checked() -> None:
    text = "g (float[N, L] a, float[N] b) => (float[N, L] y) { y = Relu (a)  z = Relu (b) }"
    feeds, _ = feeds_for(text, a=[5, -1])
    assert {feed["a"].shape[0] for feed in feeds} == {feed["b"].shape[0] for feed in feeds} == {5}
    for wrong in ({"q": [1]}, {"a": [1]}, {"a": [1, 2], "b": [3]}):
        with pytest.raises(UsageError):
            feeds_for(text, **wrong)


# ---- comparison ------------------------------------------------------------------------------

FLOAT = TOLERANCES[onnx_ir.DataType.FLOAT]
HUGE, NAN, INF = 1e30, float("nan"), float("inf")
COMPARISONS = [
    ([1.0, 2.0], [1.0, 2.0], True, 0.0, "y[0]"),
    ([1.0, 2.0], [1.0, 2.00001], True, 1e-5, "y[1]"),
    ([1.0, 2.0], [1.001, 2.0], False, 1e-3, "y[0]"),
    ([1000.0, 1e-3], [1000.0, 2e-3], True, 1e-3, "y[1]"),
    ([[1.0], [HUGE]], [[1.0], [-HUGE]], False, 2e30, "y[1, 0]"),
    ([NAN, 1.0], [NAN, 1.0], True, 0.0, "y[0]"),
    ([1.0, NAN], [1.0, 0.0], False, INF, "y[1]"),
    ([1.0, 0.0], [1.0, NAN], False, INF, "y[1]"),
    ([INF, -INF], [INF, -INF], True, 0.0, "y[0]"),
    ([INF, -INF], [INF, INF], False, INF, "y[1]"),
    ([], [], True, 0.0, "y"),
]


@pytest.mark.parametrize(("expected", "got", "ok", "max_abs", "where"), COMPARISONS)
def test_difference(
    expected: list[float], got: list[float], ok: bool, max_abs: float, where: str
) -> None:
    a, b = np.array(expected, np.float32), np.array(got, np.float32)
    found = difference("y", a, b, FLOAT)
    assert found.ok == ok
    assert found.where == where
    assert found.max_abs == pytest.approx(max_abs, rel=1e-2)


def test_integers_booleans_and_strings_must_be_equal() -> None:
    for a, b in (([1, 2], [1, 3]), ([True, False], [True, True]), (["a"], ["b"])):
        assert difference("y", np.array(a), np.array(a), FLOAT).ok
        assert not difference("y", np.array(a), np.array(b), FLOAT).ok


def test_another_shape_dtype_or_length_is_a_difference() -> None:
    x = np.ones((2, 3), np.float32)
    for y in (x[0], x.astype(np.float64), [x]):
        assert not difference("y", x, y, FLOAT).ok
    assert difference("y", [x, x], [x, x], FLOAT).ok
    worst = difference("y", [x, x], [x, x + 1], FLOAT)
    assert (worst.ok, worst.where) == (False, "y.1[0, 0]")


def test_the_coarsest_float_type_sets_the_tolerance() -> None:
    cast = "g (float[N] x) => (float[N] y) {{ h = Cast <to = {}> (x)  y = Cast <to = 1> (h) }}"
    for code, kind in ((1, "FLOAT"), (10, "FLOAT16"), (16, "BFLOAT16")):
        model = text_model(cast.format(code))
        infer_shapes(model)
        assert tolerance_of(model) == TOLERANCES[onnx_ir.DataType[kind]]


def test_random_outputs_are_found_and_only_their_shapes_compared() -> None:
    model = text_model(
        "g (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) { r = RandomNormalLike (x)"
        "  y = Add (x, r)  z = Relu (x) }"
    )
    assert random_outputs(model) == ["y"]
    check = check_outputs(model, model)
    assert check.ok
    assert any("random by design" in note and "y" in note for note in check.notes)
    dropout = (
        "g (float[N] x) => (float[N] y) { r = Constant <value_float = 0.5> ()"
        "  t = Constant <value = bool {%d}> ()  y = Dropout (x, r, t) }"
    )
    assert random_outputs(text_model(dropout % 1)) == ["y"]
    assert random_outputs(text_model(dropout % 0)) == []


# ---- blame -----------------------------------------------------------------------------------


def fused_encoder() -> Model:
    model = load(ENCODER)
    rewrite.optimize(model)
    return model


def nodes_of(model: Model, op: str) -> list[onnx_ir.Node]:
    return [n for n in model.graph if n.domain == FUSE and n.op_type.startswith(op)]


def wrong_bias(model: Model) -> str:
    """The last Gemm of a block gets the bias of another size-mate."""
    node = nodes_of(model, "Gemm")[1]
    bias = node.inputs[2]
    assert bias is not None
    other = const_array(bias)
    other = other + np.linspace(0, 0.5, other.size, dtype=np.float32)
    value = onnx_ir.Value(name="planted", const_value=onnx_ir.tensor(other, name="planted"))
    model.graph.register_initializer(value)
    node.replace_input_with(2, value)
    return node.outputs[0].name or ""


def wrong_epsilon(model: Model) -> str:
    node = nodes_of(model, "LayerNormGemm")[0]
    node.attributes["epsilon"] = onnx_ir.AttrFloat32("epsilon", 1.0)
    return node.outputs[0].name or ""


def wrong_operand(model: Model) -> str:
    node = nodes_of(model, "SdpaMask")[1]
    q, k = node.inputs[0], node.inputs[2]
    node.replace_input_with(0, k)
    node.replace_input_with(2, q)
    return node.outputs[0].name or ""


PLANTS: list[Callable[[Model], str]] = [wrong_bias, wrong_epsilon, wrong_operand]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda f: f.__name__)
def test_a_planted_wrong_fusion_is_named(plant: Callable[[Model], str]) -> None:
    model = fused_encoder()
    name = plant(model)
    check = check_outputs(ENCODER, model, Request(blame=True))
    assert not check.ok
    assert len(check.culprits) == 1
    [culprit] = check.culprits
    assert culprit.confirmed
    assert any(name == n.outputs[0].name for n in model.graph if n.name in culprit.nodes)


def test_two_planted_faults_are_both_named() -> None:
    model = fused_encoder()
    names = {wrong_bias(model), wrong_epsilon(model)}
    check = check_outputs(ENCODER, model, Request(blame=True))
    found = {n.outputs[0].name for c in check.culprits for n in model.graph if n.name in c.nodes}
    assert names <= found
    assert all(c.confirmed for c in check.culprits)


def test_a_wrong_body_in_the_file_is_named(cli: Cli, saved: Callable[..., Path]) -> None:
    proto = to_proto(fused_encoder())
    body = next(f for f in proto.functions if f.name.startswith("LayerNormGemmGelu"))
    gelu = next(n for n in body.node if n.op_type == "Gelu")
    gelu.op_type = "Relu"
    del gelu.attribute[:]
    result = cli("validate", saved(proto), "--against", ENCODER, "--blame")
    assert result.code == 3
    assert body.name in result.err
    assert "confirmed" in result.out


def test_a_fault_that_shows_only_in_place_is_found_by_bisection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A runtime that spoils one fused op, though only where the whole graph runs."""
    model = fused_encoder()
    victim = nodes_of(model, "SdpaMask")[0].outputs[0].name
    runs = []
    plain = values_of

    def spoiled(
        model: Model, feeds: Feeds, names: list[str], *_: object, **options: object
    ) -> object:
        runs.append(len(names))
        values = plain(model, feeds, names)
        whole = not any(v.name.endswith(ORACLE) for v in model.graph.inputs)
        alive = any(n.domain == FUSE and n.outputs[0].name == victim for n in model.graph)
        if whole and alive and len(names) == 2:
            return {name: value + 1 for name, value in values.items()}
        return values

    monkeypatch.setattr("onnx_fuse.validation.values.values_of", spoiled)
    feeds = check_outputs(ENCODER, model).feeds[0]
    arrays = {name: np.ones(shape, np.int64) for name, shape in feeds.items()}
    [culprit] = find_culprits(ENCODER, model, arrays, FLOAT)
    assert culprit.output == victim
    fused = sum(n.domain == FUSE for n in model.graph)
    assert len(runs) <= 5 + int(np.ceil(np.log2(fused))) + 1


def test_without_a_difference_there_is_nobody_to_blame() -> None:
    check = check_outputs(ENCODER, fused_encoder(), Request(blame=True))
    assert check.ok
    assert check.culprits == []
    assert check.to_dict()["ok"] is True


# ---- gradients -------------------------------------------------------------------------------


def test_every_gradient_of_the_encoder_has_the_slope_it_says() -> None:
    check = check_gradients(ENCODER)
    assert check.ok, check.failed
    parameters = [
        v for v in load_model(ENCODER).graph.initializers.values() if "const." not in v.name
    ]
    assert {e.tensor for e in check.errors} >= {v.name for v in parameters}


class Gpu:
    """A session on a GPU whose kernels round to bfloat16, and of which one errs."""

    wrong = ""

    def __init__(self, model: onnx_ir.Model, **options: object) -> None:
        assert options["precision"] == "bf16"
        self.model = model

    def run(self, names: list[str], feeds: Feeds, options: object) -> list[Array]:
        found = values_of(self.model, feeds, names)
        rounded = {n: y.astype(dtype_of("bfloat16")).astype(y.dtype) for n, y in found.items()}
        return [y * (1.3 if n == self.wrong else 1) for n, y in rounded.items()]

    def program(self, feeds: Feeds) -> tuple[Program, Hardware]:
        arrays = {name: np.asarray(array) for name, array in feeds.items()}
        return program_of(self.model.clone(), arrays), CHIPS["H200"]


def test_a_kernel_that_errs_in_a_precision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """g (float[4,16] x) => (float[4,16] y) <float[16] s = {SCALES}, float[16] b = {SCALES}>
    { h = LayerNormalization <axis = -1> (x, s, b) y = Tanh(h) }"""
    model = text_model(text.replace("SCALES", ", ".join(["1"] * 16)))
    monkeypatch.setattr(request, "InferenceSession", Gpu)
    found = check_gradients(model, device="cuda", precision="bf16")
    assert found.ok, found.failed
    monkeypatch.setattr(Gpu, "wrong", "s, its gradient")
    (error,) = check_gradients(model, device="cuda", precision="bf16").failed
    assert error.tensor == "s"
    assert "ReduceSum" in error.kernel


def test_a_wrong_gradient_rule_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    key = (FUSE, "SkipLayerNorm")
    right = ops.OPS[key]

    def wrong(op: Builder, node: onnx_ir.Node, dys: list[onnx_ir.Value | None]) -> object:
        dx, *rest = right.grad(op, node, dys)
        return [op.Mul(dx, 1.01), *rest]

    monkeypatch.setitem(ops.OPS, key, dataclasses.replace(right, grad=wrong))
    assert "the gradient of '" in cli.fails(3, "validate", ENCODER, "--grad")


@pytest.mark.parametrize(
    ("text", "x"),
    [
        # the kink of the Relu is 1e-6 from where it is: within the first step, beyond the second
        ("float[N] x) => (float[N] y) <float[2] w = {1.000001, 3}> "
         "{ one = Constant <value_float = 1.0> () z = Mul (x, w) d = Sub (z, one) y = Relu (d) }",
         np.ones(2, np.float32)),
        # onnxruntime has no float64 Celu: NumPy runs the graph
        ("float[N,3] x) => (float[N,2] y) <float[3] w = {1, 2, 3}, int64[2,2] i = {2, 0, 1, 1}> "
         "{ z = Mul (x, w) c = Celu (z) y = GatherElements <axis = -1> (c, i) }",
         np.float32([[1, -2, 0.5], [0.25, 1, -1]])),
        # the gradient of a Pad has negative ones
        ("float[N,3] x) => (float[N,4] y) <float[3] w = {1, 2, 3}, int64[4] p = {0, 2, 0, -1}> "
         "{ z = Mul (x, w) c = Celu (z) y = Pad (c, p) }",
         np.float32([[1, -2, 0.5], [0.25, 1, -1]])),
        # nor a Conv, here of channels last; the body of GroupNormalization casts to float32
        ("float[N,3,2] x) => (float[N,2,3] y) <float[2] w = {1, 2}, float[2,2,1] k = {1,2,3,5}> "
         "{ t = Transpose <perm = [0,2,1]> (x) c = Conv (t, k)"
         " g = GroupNormalization <num_groups = 1> (c, w, w) y = Mul (g, g) }",
         np.arange(6, dtype=np.float32).reshape(1, 3, 2) % 4),
        # 1, 2 and 3 by their bits
        ("float16[N,3] x) => (float16[N,3] y) <float16[3] w = {15360, 16384, 16896}> "
         "{ z = Mul (x, w) e = Tanh (z) s = Exp (e) p = Mul (s, z) y = Sin (p) }",
         np.float16([[0.1, -0.7, 0.3]])),
        # NaN in the output, of which no difference can be taken
        ("float[N,2] x) => (float[N,2] y) <float[2] w = {2, 3}> { z = Mul (x, w) y = Sqrt (z) }",
         np.float32([[1, -1], [2, 0.5]])),
    ],
)  # fmt: skip
def test_right_gradients_pass(text: str, x: Array) -> None:
    check = check_gradients(text_model(f"g ({text}"), feeds={"x": x})
    assert check.errors
    assert check.ok, check.failed


ABSORBING = text_model(
    "g (float[3,2] x) => (float[3,3] y) <float[2,3] w = {0.3, -0.7, 0.5, 0.2, 0.9, -0.4},"
    " float[3,3] mask = {0, -3.4e38, 0, -3.4e38, -3.4e38, -3.4e38, 0, 0, -3.4e38}>"
    " { s = MatMul (x, w)  m = Add (s, mask)  y = Softmax (m) }"
)


def test_a_mask_that_absorbs_a_whole_row_of_scores_is_no_wrong_gradient() -> None:
    check = check_gradients(ABSORBING, feeds={"x": np.float32([[1, 2], [-1, 0.5], [0.3, -2]])})
    assert check.ok, check.failed
    assert "the slopes of 1 tensors are compared with masks of -100000" in check.notes[0]


def test_behind_a_mask_that_absorbs_a_wrong_gradient_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    softmax = ops.OPS["", "Softmax"]
    wrong = dataclasses.replace(softmax, grad=lambda op, node, dys: [op.Mul(dys[0], dys[0])])
    monkeypatch.setitem(ops.OPS, ("", "Softmax"), wrong)
    check = check_gradients(ABSORBING, feeds={"x": np.float32([[1, 2], [-1, 0.5], [0.3, -2]])})
    assert [e.tensor for e in check.failed] == ["w"]


def test_a_gradient_behind_16_bits_has_their_limit() -> None:
    """A float32 weight that float16 values are multiplied by, and GELU's constants in bfloat16."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8)).astype(np.float16)
    text = (
        "g (float16[N,8] x) => (float[N,3] y) <float16[8] s = {1, 3, 2, 5, 6, 7, 1, 1}, "
        f"float[8,3] w = {{{', '.join(['0.3', '-0.2', '0.7'] * 8)}}}> {{ "
        'h = Mul (x, s)  g = Gelu <approximate = "tanh"> (h)  f = Cast <to = 1> (g)'
        "  y = MatMul (f, w) }"
    )
    for kind, array in (("float16", x), ("bfloat16", x.astype(onnx_ir.DataType.BFLOAT16.numpy()))):
        check = check_gradients(text_model(text.replace("float16", kind)), feeds={"x": array})
        assert {e.tensor for e in check.errors} == {"s", "w"}
        assert check.ok, check.failed


def test_empty_outputs_are_said_to_compare_nothing(cli: Cli, saved: Callable[..., Path]) -> None:
    path = saved(
        "g (float[3,4] x) => (float[N] y) { big = Constant <value_float = 99.0> ()"
        "  c = Greater (x, big)  flat = Constant <value_ints = [-1]> ()  f = Reshape (c, flat)"
        "  y = Compress (x, f) }"
    )
    result = cli("validate", path)
    assert result.code == 0
    assert "make y empty, so no values of it are compared" in " ".join(result.out.split())
    assert cli("run", path).code == 0


def test_a_graph_that_nothing_runs_in_float64_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Poor:
        def run(self, names: None, feeds: Feeds) -> list[Array]:
            raise TypeError("no such kernel")

    monkeypatch.setattr("onnx_fuse.validation.reference.Reference", lambda model: Poor())
    text = "g (float[N,2,3] x) => (float[N,2,3] y) <float[2,2,1] k = {1,2,3,5}> { y = Conv (x, k) }"
    with pytest.raises(ModelError, match=r"float64.*no such kernel"):
        check_gradients(text_model(text))


UNCHECKED = {
    "an output that is no tensor": (
        '<ir_version: 10, opset_import: ["" : 24, "ai.onnx.ml" : 3]>\n'
        "g (float[2,2] x) => (float[2,2] p, seq(map(int64, float)) y) <float[2] w = {1, 2}> "
        "{ p = Mul (x, w) y = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5]> (p) }",
        [[1, 2], [3, 4]],
        r"output 'y' is not a tensor: ZipMap '.*', its node, has no gradient",
    ),
    "another number of results": (
        '<ir_version: 10, opset_import: ["" : 24]>\n'
        "g (float[2] x) => (float[N] y) <float[2] w = {2, 3}> {"
        " far = Constant <value_float = 1e8> () up = Add (x, far) s = Sub (up, far)"
        " zero = Constant <value_float = 0.0> () c = Greater (s, zero) p = Mul (x, w)"
        " at = Constant <value_ints = [0]> () i = Cast <to = 7> (c)"
        " z = Add (p, s) n = ReduceSum (i, at) y = Slice (z, at, n) }",  # s is no size alone
        [1, 100],
        r"output 'y' has shape \[2\] in float64 and \[1\] in its own type",
    ),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_no_difference_checks_is_said_so(name: str) -> None:
    text, x, said = UNCHECKED[name]
    with pytest.raises(ModelError, match=said):
        check_gradients(onnx.parser.parse_model(text), feeds={"x": np.float32(x)})


SELECTED = {
    "a condition": ("", "y = Compress <axis = 0> (z, c)"),
    "places": (
        "",
        "p = NonZero (c) at = Constant <value_int = 0> () r = Gather (p, at) y = Gather (z, r)",
    ),
    "boxes": (
        ", float[1,2,4] b = {0,0,1,1,5,5,6,6}, int64 m = {2}, float t = {0.5}",
        "k = Constant <value_ints = [1, 1, 2]> () f = Cast <to = 1> (c) g = Reshape (f, k)"
        " n = NonMaxSuppression (b, g, m, t, t)"
        " two = Constant <value_int = 2> () r = Gather <axis = 1> (n, two) y = Gather (z, r)",
    ),
}


@pytest.mark.parametrize("name", SELECTED)
def test_what_float64_would_select_otherwise_is_held(name: str) -> None:
    more, nodes = SELECTED[name]
    model = text_model(
        f"g (float[2] x) => (float[N] y) <float[2] w = {{2, 3}}{more}> {{"
        " far = Constant <value_float = 1e8> () up = Add (x, far) s = Sub (up, far)"
        f" zero = Constant <value_float = 0.0> () c = Greater (s, zero) z = Mul (x, w) {nodes} }}"
    )
    check = check_gradients(model, feeds={"x": np.float32([1, 100])})
    assert [(e.tensor, e.ok) for e in check.errors] == [("w", True)]
    assert abs(check.errors[0].expected) > 1e-3
    assert "is held: gradients are those of the elements that the model selects" in check.notes[0]


@pytest.mark.parametrize(("stash", "limit"), [(1, 5e-5), (11, 1e-9)])
def test_statistics_in_float32_bound_what_a_float64_graph_keeps(stash: int, limit: float) -> None:
    model = text_model(
        "g (double[N,4] x, double[4] s) => (double[N,4] y) "
        f"{{ y = LayerNormalization <stash_type = {stash}> (x, s) }}"
    )
    assert tolerance_of(model).rtol == limit


REFERENCE = table(globals())("""
groups: [(2, 4, 9), (8, 1, 3), (8,)]
  Conv <group = 4, pads = [1,2], strides = [2]> (x, w, b)
dilations: [(1, 6, 9, 8), (4, 3, 3, 2)]
  Conv <group = 2, dilations = [2,1]> (x, w)
padded like upper: [(1, 6, 9, 8), (4, 6, 3, 2), (4,)]
  Conv <auto_pad = "SAME_UPPER", strides = [2,3]> (x, w, b)
padded like lower: [(1, 6, 9, 8), (4, 6, 3, 2)]
  Conv <auto_pad = "SAME_LOWER"> (x, w)
cut like upper: [(1, 3, 10, 8), (4, 3, 2, 1)]
  Conv <auto_pad = "SAME_UPPER", strides = [5,4]> (x, w)
cut like lower: [(1, 3, 10, 5), (4, 3, 2, 1)]
  Conv <auto_pad = "SAME_LOWER", strides = [5,5]> (x, w)
volumes: [(1, 2, 5, 6, 4), (3, 2, 2, 3, 2), (3,)]
  Conv <pads = [0,1,1,1,0,0]> (x, w, b)
turned: [(2, 4, 5, 6), (4, 2, 3, 2), (4,)]
  ConvTranspose <group = 2, pads = [1,0,1,1], strides = [2,3], output_padding = [1,0]> (x, w, b)
turned dilations: [(1, 3, 7), (3, 2, 3)]
  ConvTranspose <dilations = [2]> (x, w)
turned to the same sizes: [(1, 3, 5, 4), (3, 2, 3, 4)]
  ConvTranspose <auto_pad = "SAME_LOWER", strides = [2,3]> (x, w)
turned to a shape: [(1, 3, 5), (3, 2, 4)]
  ConvTranspose <auto_pad = "SAME_UPPER", output_shape = [9], strides = [2]> (x, w)
channels side by side: [(2, 7, 4, 3)]
  LRN <size = 5, alpha = 0.5, bias = 2.0> (x)
scan backwards: [(3, 5), (1,), (3,)]
  Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
  scan_output_axes = [-1], scan_output_directions = [1], body = f (float[3] s, float[3] r)
  => (float[3] t, float[3] u) { t = Add (s, r)  u = Mul (t, r) }> (b, x)
""")


@pytest.mark.parametrize("values", [[-1, 0.5, 2], [3, 4, 5], [-3, -1, -2], [0, 0, 0]])
def test_the_reference_quantizes_as_onnxruntime_does(values: list[float]) -> None:
    model = text_model(
        "g (float[3] x) => (uint8[3] q, float s, uint8 z) { q, s, z = DynamicQuantizeLinear (x) }"
    )
    feeds = {"x": np.array(values, np.float32)}
    pairs = zip(ort.run(ort.session(model), feeds), Reference(model).run(None, feeds), strict=True)
    for want, got in pairs:
        assert want.dtype == got.dtype
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("shape", [(2, 12), (2, 12, 1), (1, 9, 2)])
@pytest.mark.parametrize("more", ["(x, s, w)", "(x, s, w, n)", "<onesided = 0> (x, s, , n)"])
def test_the_reference_transforms_frames(shape: tuple[int, ...], more: str) -> None:
    if shape[-1] == 2:
        more = more if more[0] == "<" else f"<onesided = 0> {more}"
    model = text_model(f"""g (float[{",".join(map(str, shape))}] x) => (float[B,F,K,2] y)
        <float[4] w = {{0.5,1,2,0.25}}, int64 s = {{3}}, int64 n = {{4}}> {{ y = STFT {more} }}""")
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    [want] = ort.run(ort.session(model), feeds)
    np.testing.assert_allclose(Reference(model).run(None, feeds)[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_gives_onnxruntimes_results(name: str) -> None:
    node, shapes = REFERENCE[name]
    results = "last, y" if "Scan" in node else "y"
    given = ", ".join(
        f"float[{','.join(map(str, shape))}] {k}" for k, shape in zip("xwb", shapes, strict=False)
    )
    model = text_model(f"g ({given}) => (float y) {{ {results} = {node} }}")
    feeds = normal(dict(zip("xwb", shapes, strict=False)))
    model.graph.outputs[0].shape = None
    [want] = ort.run(ort.session(model), feeds)
    np.testing.assert_allclose(Reference(model).run(None, feeds)[0], want, rtol=1e-4, atol=1e-5)


def test_boxes_are_chosen_in_float32_amid_float64() -> None:
    model = text_model("""g (float[1,3,4] b, float[1,1,3] s) => (int64[M,3] y) {
        m = Mul (b, b)  n = Constant <value_int = 3> ()  o = Constant <value_float = 0.5> ()
        y = NonMaxSuppression (m, s, n, o) }""")
    feeds = {"b": np.array([[[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3]]]),
             "s": np.array([[[0.5, 0.6, 0.7]]])}  # fmt: skip
    [y] = ort.run(ort.session(to_double(model)), feeds)
    np.testing.assert_array_equal(y, [[0, 0, 2], [0, 0, 1]])


def test_wide_floats_compute_wide() -> None:
    model = text_model(
        "g (float[N] x) => (float[N] y) { c = Constant <value_float = 0.1> ()"
        "  h = Cast <to = 10> (x)  f = Cast <to = 1> (h)  y = Mul (f, c) }"
    )
    x = np.array([1 + 1e-9])
    [y] = ort.run(ort.session(to_double(model)), {"x": x})
    np.testing.assert_allclose(y, x * np.float64(np.float32(0.1)), rtol=1e-15)


def test_the_coarser_of_types_and_precision_sets_the_tolerance() -> None:
    single = text_model("g (float[4] x) => (float[4] y) { y = Relu (x) }")
    half = text_model("g (bfloat16[4] x) => (bfloat16[4] y) { y = Relu (x) }")
    own = tolerance_of(single)
    assert tolerance_of(single, "bf16x3") == own
    assert own.rtol < tolerance_of(single, "tf32").rtol
    assert tolerance_of(single, "bf16") == tolerance_of(half)
    assert tolerance_of(half, "fp16") == tolerance_of(half)
