"""Attention on hostile values: what is fused gives what the graph gave, or stays with a reason."""

import re
from collections.abc import Callable
from itertools import product

import math_cases
import numpy as np
import onnx_ir as ir
import pytest
from cases import NEWEST_OPSET, FusionCase
from fusion_cases import FUSION_CASES
from lowering import program_of, weights_of
from onnx.reference import ReferenceEvaluator
from support import answers, says, stock, table

from onnx_fuse import autodiff, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.importer.save import inline, to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.kernels import sdpa
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.contractions import Attention
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS

NAMES = {"float": np.float32, "float16": np.float16, "double": np.float64}
# The same sums in another order; the products' own operands are never larger than 1e3.
TOLERANCE = {"float": 2e-6, "float16": 2e-3, "double": 1e-14}
QKV = "T[B,H,S,8] q, T[B,H,K,8] k, T[B,H,K,8] v"
SCORES = "kt = Transpose <perm = [0,1,3,2]> (k) s = MatMul (q, kt) "
REST = " p = Softmax <axis = -1> (z) y = MatMul (p, v)"
GUARD = (
    " p = Softmax <axis = -1> (z) i = IsNaN (p) o_d = Constant <value = double {0}> () "
    "o = Cast <to = CODE> (o_d) g = Where (i, o, p) y = MatMul (g, v)"
)


def constant(name: str, value: float, shape: str = "") -> str:
    """A constant of type T; the text form has no numbers of 16 bits."""
    made = f"{name}_d = Constant <value = double{shape} {{{value!r}}}> () "
    return f"{made}{name} = Cast <to = CODE> ({name}_d) "


QUARTER, THREE = constant("f", 0.25), constant("c", 3.0)
NIL, OFF = constant("nil", 0.0), constant("off", -np.inf)
# further inputs, the operator it becomes; what lies between the product and the softmax
GRAPHS = table(globals())("""
where: "bool[B,1,S,K] keep", "SdpaWhere"
  z = Where (keep, s, low)
where_swapped: "bool[B,1,S,K] drop", "SdpaWhere"
  z = Where (drop, low, s)
where_not: "bool[1,1,S,K] drop", "SdpaWhere"
  n = Not (drop) z = Where (n, s, low)
where_by_key: "bool[B,1,1,K] keep", "SdpaWhere"
  z = Where (keep, s, low)
where_two: "bool[S,K] keep, bool[B,1,1,K] drop", "SdpaWhere"
  w = Where (keep, s, low) z = Where (drop, low, w)
where_scaled: "bool[B,1,S,K] keep", "SdpaWhere"
  $QUARTER w = Where (keep, s, low) z = Mul (w, f)
where_mask: "bool[S,K] keep, T[B,1,1,K] mask", "SdpaWhereMask"
  w = Where (keep, s, low) z = Add (w, mask)
mask_where: "bool[S,K] keep, T[B,1,1,K] mask", "SdpaMaskWhere"
  w = Add (s, mask) z = Where (keep, w, low)
# a sum in the file, and one here
made_mask: "bool[B,1,S,K] keep", "SdpaMask"
  $NIL m = Where (keep, nil, low) z = Add (s, m)
mask: "T[B,1,S,K] mask", "SdpaMask"
  z = Add (s, mask)
mask_mask: "T[B,1,S,K] mask, T[1,H,S,K] bias", "SdpaMaskMask"
  w = Add (mask, s) z = Add (w, bias)
mask_of_nothing_and_infinity_mask_mask: "bool[S,K] keep, T[B,1,1,K] mask, T[1,H,S,K] bias",
"SdpaMaskMask"
  $NIL $OFF open = Where (keep, nil, off) u = Add (s, open) w = Add (u, mask) z = Add (w, bias)
softcap_where: "bool[B,1,S,K] keep", "SdpaSoftcapWhere"
  $THREE d = Div (s, c) t = Tanh (d) u = Mul (c, t) z = Where (keep, u, low)
plain: "", "Sdpa"
  z = Identity (s)
""")
FILLS = {
    "float": (-1e9, -1e4, -3.4028234663852886e38, -np.inf, 0.0, np.inf),
    "float16": (-65504.0, -1e4, -np.inf),
    "double": (-1e9, -1.7976931348623157e308),
}
SIZES = {"B": 2, "H": 3, "S": 4, "K": 5}


def model_of(between: str, inputs: str, kind: str, rest: str, fill: float) -> ir.Model:
    more = f", {inputs}" if inputs else ""
    body = SCORES + constant("low", fill, "[1,1,1,1]") + between + rest
    # one symbol stands for one size
    text = f"agraph ({QKV}{more}) => (T[B,H,S,8] y) {{ {body} }}".replace("T[", f"{kind}[")
    text = text.replace("CODE", str({"float": 1, "float16": 10, "double": 11}[kind]))
    return text_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


def feeds_of(model: ir.Model, case: str, sizes: dict[str, int] | None = None) -> dict:
    """Inputs with a row that is masked whole; `case` says what is hostile in them."""
    rng, feeds = np.random.default_rng(5), {}
    for value in model.graph.inputs:
        shape = [d if isinstance(d, int) else (sizes or SIZES)[str(d)] for d in value.shape]
        name, dtype = str(value.name), value.dtype.numpy()
        if name in ("keep", "drop"):
            feeds[name] = (rng.random(shape) < 0.6) ^ (name == "drop")
            feeds[name][..., :1, :] = name == "drop"
        else:
            feeds[name] = rng.standard_normal(shape).astype(dtype)
        if name == "mask" and feeds[name].size:
            feeds[name][..., :1, :] = np.finfo(dtype).min
            feeds[name][..., -1:, 1:] = -np.inf
    many = {"large": 8.0, "larger": 20.0, "tiny": 1e-20, "minus zero": -0.0}
    q, k, v = (feeds[n] for n in "qkv")
    if case in many:
        q *= many[case]
    for what, number in (("nan", np.nan), ("inf", np.inf), ("-inf", -np.inf)):
        for name, array in (("q", q), ("k", k), ("v", v), ("mask", feeds.get("mask"))):
            if case == f"{what} in {name}" and array is not None:
                array[0, ..., -1, 2] = number
    if case == "mask -inf" and "mask" in feeds:
        feeds["mask"][..., :2, :] = -np.inf
    return feeds


def session(model: ir.Model, output: int = 0) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """What onnxruntime makes of `model`: one output as a function of the feeds."""
    made = stock(model, optimized=True)
    return lambda feeds: made.run(None, feeds)[output]


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return session(model)(feeds)


def fused_ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.domain == FUSE]


def assert_same(got: np.ndarray, expected: np.ndarray, kind: str, note: object) -> None:
    assert got.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), err_msg=str(note))
    np.testing.assert_array_equal(got[np.isinf(expected)], expected[np.isinf(expected)])
    largest = max(1.0, np.abs(expected[finite].astype(np.float64)).max(initial=0))
    np.testing.assert_allclose(
        got[finite], expected[finite], rtol=0, atol=TOLERANCE[kind] * largest, err_msg=str(note)
    )


CASES = (
    *("", "large", "larger", "tiny", "minus zero", "mask -inf"),
    *(f"{what} in {name}" for what in ("nan", "inf", "-inf") for name in ("q", "k", "v", "mask")),
)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("guarded", [False, True], ids=["", "guarded"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_hostile_values(graph: str, guarded: bool, kind: str) -> None:
    between, inputs, fused = GRAPHS[graph]
    fills = FILLS[kind] if "low" in between else (0.0,)
    for fill in fills:
        original = model_of(between, inputs, kind, GUARD if guarded else REST, fill)
        model = load(original)
        rewrite.optimize(model, own_kernels=True)  # which takes names of sizes for sizes
        if kind == "double" and "Tanh" in between:
            assert not fused_ops(model)
            continue
        assert fused_ops(model) == [fused + ("NanGuard" if guarded else "")]
        plain, whole, flat = map(session, (original, model, inline(model)))
        for case in CASES:
            if case.endswith("mask") and "mask" not in inputs:
                continue
            feeds = feeds_of(original, case)
            expected = plain(feeds)
            assert_same(whole(feeds), expected, kind, (fill, case))
            assert_same(flat(feeds), expected, kind, (fill, case))


@pytest.mark.parametrize("graph", ["plain", "where", "mask"])
@pytest.mark.parametrize("guarded", [False, True], ids=["", "guarded"])
@pytest.mark.parametrize("empty", ["B", "S", "K"])
def test_zero_sizes(graph: str, guarded: bool, empty: str) -> None:
    between, inputs, _ = GRAPHS[graph]
    original = model_of(between, inputs, "float", GUARD if guarded else REST, -1e9)
    model = load(original)
    rewrite.optimize(model)
    assert fused_ops(model)
    feeds = feeds_of(original, "", {**SIZES, empty: 0})
    assert_same(run(model, feeds), run(original, feeds), "float", empty)


@pytest.mark.parametrize("empty", ["B", "S", "T"])
def test_zero_sizes_of_grouped_heads(empty: str) -> None:
    case = next(c for c in FUSION_CASES if c.name == "attention_one_key_head_for_all")
    original, model = load(case.model()), load(case.model())
    rewrite.optimize(model)
    assert fused_ops(model) == ["GroupedSdpa"]
    feeds = case.feeds(**{"B": 2, "S": 3, "T": 4, empty: 0})
    assert_same(run(model, feeds), run(original, feeds), "float", empty)


CASTS = {
    # the scores are of float16, as large as 100: in float32 throughout, they would differ
    "a softmax in float32": (
        "w = Cast <to = 1> (z) p = Softmax <axis = -1> (w) n = Cast <to = 10> (p)", "SdpaWideMask"
    ),
    # exporters of float16 write float16 -> float32 -> float16 behind a softmax in float16
    "there and back again": (
        "u = Cast <to = 1> (z) d = Cast <to = 10> (u) p = Softmax <axis = -1> (d)"
        " w = Cast <to = 1> (p) n = Cast <to = 10> (w)", "SdpaMask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CASTS)
def test_casts_around_a_softmax_count_where_they_round(name: str, training: bool) -> None:
    nodes, fused = CASTS[name]
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    agraph ({QKV}, T[B,1,S,K] mask) => (T[B,H,S,8] y)
    {{ {SCORES} z = Add (s, mask) {nodes} y = MatMul (n, v) }}""".replace("T[", "float16[")
    original, model = text_model(text), load(text_model(text))
    rewrite.optimize(model, training=training)
    assert fused_ops(model) == [fused]
    plain, whole = session(original), session(model)
    for case in ("", "large", "larger", "nan in q", "inf in mask"):
        feeds = feeds_of(original, case)
        np.testing.assert_array_equal(whole(feeds), plain(feeds))


# text between the product and v, and why it stays; the dtype of all inputs is float
STAYS = {
    "z = Clip (s, lo, hi) p = Softmax (z) y = MatMul (p, v)": "between: Clip",
    "c = Cast <to = 11> (s) d = Softmax (c) p = Cast <to = 1> (d) y = MatMul (p, v)":
        "weights-type",
    "m = Add (s, wide4) n = Sub (m, wide4) z = Add (n, wide4) p = Softmax (z) y = MatMul (p, v)":
        "masks: 3",
    "p = Softmax (s) r = Mul (p, hi) y = MatMul (p, v) u = Add (r, r)":
        "other-readers: the weights",
    "p = Softmax (s) r = Mul (p, hi) y = MatMul (r, v)": "weights-reader: Mul",
    "z = Mul (s, s) p = Softmax (z) y = MatMul (p, v)": "tensor-scale: 's'",
    "z = Mul (s, zero) p = Softmax (z) y = MatMul (p, v)": "score-scale: multiplied by 0",
    "z = Add (s, wide) p = Softmax (z) p4 = Squeeze (p, at) y = MatMul (p4, v)": "adds-axes: Add",
    "p = Softmax (s) pt = Transpose <perm = [1,0,2,3]> (p) y = MatMul (pt, v)":
        "mixing-view: a Transpose",
    "p = Softmax (s) pt = Transpose <perm = [0,1,3,2]> (p) y = MatMul (pt, v)": "sums-queries",
    "e = Exp (s) p = Softmax (e) y = MatMul (p, v)": "between: Exp",
    "f = Reshape (s, flat) p = Softmax (f) b = Reshape (p, four) y = MatMul (b, v)":
        "mixing-view: a Reshape",
    "n = IsNaN (s) z = Where (n, wide4, s) p = Softmax (z) y = MatMul (p, v)": "fill",
}  # fmt: skip


@pytest.mark.parametrize(("between", "reason"), STAYS.items())
def test_what_stays_has_a_reason(between: str, reason: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    agraph (float[2,2,4,8] q, float[2,2,4,8] k, float[2,2,4,8] v) => (float[A,C,E,F] y)
    <float lo = {{-1}}, float hi = {{2}}, float zero = {{0}}, float[1,1,1,1,1] wide = {{1}},
     int64[1] at = {{0}}, int64[2] flat = {{-1,16}}, int64[4] four = {{2,2,4,4}},
     float[1,1,1,4] wide4 = {{1,2,3,4}}> {{ {SCORES} {between} }}"""
    if "u = " in between:
        text = text.replace("=> (float[A,C,E,F] y)", "=> (float[A,C,E,F] y, float[G,I,J,L] u)")
    original = text_model(text)
    model = load(original)
    report = rewrite.optimize(model)
    assert fused_ops(model) == []
    assert says(report, reason), report.not_fused
    feeds = feeds_of(original, "")
    np.testing.assert_allclose(run(model, feeds), run(original, feeds), rtol=1e-5, atol=1e-6)


def test_what_is_refused_has_no_readers_left() -> None:
    """Nodes that a rule makes before it refuses would count among the readers of what they read."""
    text = """agraph (double[2,6,8] q, double[2,8,6] k, double[2,6,8] v, double[2,2,3,2,1] a)
      => (double[2,6,8] y) <int64[5] apart = {-1, 2, 3, 2, 3}, int64[3] whole = {-1, 6, 6}> {
        s = MatMul (q, k) s5 = Reshape (s, apart) z5 = Add (s5, a) z = Reshape (z5, whole)
        p = Softmax (z) y = MatMul (p, v) }"""
    model = load(text_model(text))
    report = rewrite.optimize(model, training=True)
    assert says(report, "double-gradient")
    nodes = set(model.graph)
    for value in (*model.graph.inputs, *(v for node in nodes for v in node.outputs)):
        assert {node for node, _ in value.uses()} <= nodes


def test_a_softmax_between_no_products_is_no_attention() -> None:
    text = """agraph (float[N,8] x, float[8,4] w) => (float[N,4] y) {
      s = MatMul (x, w) y = Softmax (s) }"""
    (left,) = rewrite.optimize(load(text_model(text))).not_fused
    assert left.code == "no-attention"


# ---- the standard's node -------------------------------------------------------------------------

NODES = {
    # attributes, further inputs, the operator; q [2,4,3,8], k and v [2,2,5,8]
    "causal": ("is_causal = 1", "", "GroupedSdpaCausal"),
    "causal_and_mask": ("is_causal = 1", "float[2,1,3,5] m", "GroupedSdpaCausalMaskGuard"),
    "causal_and_bool": ("is_causal = 1", "bool[3,5] m", "GroupedSdpaCausalMaskGuard"),
    "softcap": ("softcap = 1.5", "", "GroupedSdpaSoftcap"),
    "softcap_and_mask": ("softcap = 1.5", "bool[2,4,3,5] m", "GroupedSdpaSoftcapMaskGuard"),
    "past": ("scale = 0.3", "bool[2,1,3,9] m, past", "GroupedSdpaMaskGuard"),
    "past_causal": ("is_causal = 1", ", past", "GroupedSdpaMaskGuard"),
    "past_causal_and_wide": ("is_causal = 1", "double[2,1,3,9] m, past", "GroupedSdpaMaskGuard"),
    "causal_and_half": ("is_causal = 1", "float16[2,1,3,5] m", "GroupedSdpaCausalMaskGuard"),
    "past_alone": ("scale = 0.3", ", past", "GroupedSdpa"),
    # masks that onnxruntime adds by the operator's function, which broadcasts them
    "integers_of_one_row": ("scale = 0.3", "int64[5] m", "GroupedSdpaMaskGuard"),
    "integers_of_a_batch": ("scale = 0.3", "int64[2,1,1,5] m", "GroupedSdpaMaskGuard"),
}


def node_model(opset: int, attributes: str, more: str, presents: bool = False) -> ir.Model:
    """One Attention with inputs beside q, k and v; `presents` are results where it has a past."""
    inputs = ["float[2,4,3,8] q, float[2,2,5,8] k, float[2,2,5,8] v"]
    inputs += re.findall(r"\w+\[.*?\] \w", more)
    given, past = [part[-1] for part in inputs[1:]], "past" in more
    inputs += ["float[2,2,4,8] pk, float[2,2,4,8] pv"] if past else []
    call = ["q, k, v", "m" if "m" in given else "", "pk, pv" if past else ",", "n" * ("n" in given)]
    shapes = {"y": "2,4,3,8"} | (
        dict.fromkeys(("nk", "nv"), "2,2,9,8") if presents and past else {}
    )
    outputs = ", ".join(f"float[{shape}] {name}" for name, shape in shapes.items())
    return text_model(f"""<ir_version: 10, opset_import: ["" : {opset}]>
        agraph ({", ".join(inputs)}) => ({outputs})
        {{ {", ".join(shapes)} = Attention <{attributes}> ({", ".join(call).rstrip(" ,")}) }}""")


def node_feeds(model: ir.Model) -> dict[str, np.ndarray]:
    """Random inputs, of 4 where a size is open; the mask `m` hides a whole row."""
    rng, feeds = np.random.default_rng(2), {}
    for value in model.graph.inputs:
        shape = tuple(4 if isinstance(d, ir.SymbolicDim) else d for d in value.shape)
        array = rng.standard_normal(shape, "f")
        hides = value.dtype == ir.DataType.BOOL
        feeds[str(value.name)] = array > 0 if hides else array.astype(value.dtype.numpy())
    if "m" in feeds and feeds["m"].dtype.kind != "i":
        feeds["m"][..., 1, :] = False if feeds["m"].dtype == bool else -np.inf
    return feeds


@pytest.mark.skipif(NEWEST_OPSET < 23, reason="this onnxruntime has no Attention")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NODES)
def test_attention_nodes(name: str, training: bool) -> None:
    attributes, more, fused = NODES[name]
    original = node_model(23, attributes, more, presents=True)
    model = load(original)
    rewrite.optimize(model, training=training)
    assert fused_ops(model) == [fused]
    plain = load(to_proto(model))
    for node in plain.graph:
        node.overload = ""  # the body of a training graph
    feeds = node_feeds(original)
    expected = run(original, feeds)
    for made in (model, plain):
        assert_same(run(made, feeds), expected, "float", name)


SIGHTS = {
    # opset, attributes, inputs beside q [2,4,3,8], k and v [2,2,5,8]
    "window": (25, "left_window_size = 1", ""),
    "window_both_ways": (25, "left_window_size = 1, right_window_size = 2", ""),
    "window_ahead": (25, "right_window_size = 1", "bool[2,1,3,5] m"),
    "window_causal": (25, "is_causal = 1, left_window_size = 1", "float[4,3,5] m"),
    "window_past": (25, "is_causal = 1, left_window_size = 2", "float[3,9] m, past"),
    "causal_and_mask_of_nan": (25, "is_causal = 1", "float[3,5] m"),
    "lengths": (24, "scale = 0.3", "int64[2] n"),
    "lengths_causal": (24, "is_causal = 1", "bool[3,5] m, int64[2] n"),
    "lengths_window": (25, "left_window_size = 1", "float[2,1,3,4] m, int64[2] n"),
    "mask_of_no_length": (24, "scale = 0.3", "float[2,1,3,M] m"),
    "mask_that_is_short": (25, "scale = 0.3", "bool[3,3] m"),
    "mask_of_one_column": (25, "scale = 0.3", "float[2,1,3,1] m"),
    "mask_of_no_length_past": (25, "is_causal = 1", "bool[3,M] m, past"),
}


@pytest.mark.parametrize("name", SIGHTS)
def test_attention_nodes_that_see_some_of_their_keys(name: str) -> None:
    """Windows, lengths and masks that may be short, compared with the standard's reference."""
    opset, attributes, more = SIGHTS[name]
    if opset > NEWEST_OPSET:
        pytest.skip("this onnxruntime has no such Attention")
    original = node_model(opset, attributes, more)
    model = load(original)
    rewrite.optimize(model)
    assert len(fused_ops(model)) == 1
    feeds = node_feeds(original)
    if "n" in feeds:
        feeds["n"] = np.array([4, 2])
    if "nan" in name:
        feeds["m"][0, 4] = np.nan
    expected = ReferenceEvaluator(to_proto(original)).run(None, feeds)[0]
    assert_same(run(model, feeds), expected, "float", name)
    program = program_of(model, feeds)
    assert not program.fallbacks
    assert_same(interpret(program, feeds, weights_of(model))["y"], expected, "float", name)


# ---- kernels -------------------------------------------------------------------------------------


LOWERED = [c for c in FUSION_CASES if c.name.startswith("attention") and "S" in "".join(c.fused)]
LOWERED = [c for c in LOWERED if c.opset <= NEWEST_OPSET]


@pytest.mark.parametrize(
    ("case", "gradient"),
    [pytest.param(c, g, id=f"{c.name}{'-gradient' * g}") for c in LOWERED for g in (False, True)],
)
def test_lowered_programs_agree(case: FusionCase, gradient: bool) -> None:
    """The program of a GPU, its attention by NumPy from what the kernel is told."""
    model = load(case.model())
    rewrite.optimize(model, training=gradient)
    feeds = case.feeds(B=2, H=2, G=1, S=6, T=5)
    if gradient:
        floats = [v.name for v in model.graph.inputs if v.dtype == ir.DataType.FLOAT]
        for name, y in answers(stock(model, optimized=True), feeds).items():
            feeds[f"{name}.grad"] = np.cos(np.arange(y.size, dtype="f")).reshape(y.shape)
        model = autodiff.gradient(model, wrt=[str(n) for n in floats if n != "mask"])
        feeds = {str(v.name): feeds[str(v.name)] for v in model.graph.inputs}
    program = program_of(model, feeds)
    assert not program.fallbacks
    got = interpret(program, feeds, weights_of(model))
    for i, value in enumerate(model.graph.outputs):
        expected = session(model, i)(feeds)
        assert_same(got[value.name], expected, "float", value.name)


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ("where", {"keep": True, "fill": -1e9}),
        ("where_mask", {"keep": True, "fill": -1e9, "mask2": (5, 0, 0, 1)}),
        ("mask_where", {"keep2": True, "fill2": -1e9, "mask2": (0, 0, 5, 1)}),
        ("softcap_where", {"softcap": 3.0, "keep": True}),
        ("mask", {"guard": 0}),
    ],
)
def test_a_kernel_is_told_of_every_step(graph: str, found: dict[str, object]) -> None:
    between, inputs, _ = GRAPHS[graph]
    model = load(model_of(between, inputs, "float", REST, -1e9))
    rewrite.optimize(model)
    feeds = feeds_of(model, "")
    program = program_of(model, feeds)
    (problem,) = [call.problem for call in program.calls if isinstance(call.problem, Attention)]
    assert found.items() <= problem.fields().items()
    assert not program.fallbacks
    assert sdpa.SIMT.supports(problem, CHIPS["H200"]) is None


STACKED = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float16[B,S,48] qkv) => (float16[B,S,16] y) {
    parts = Constant <value_ints = [0, 0, 3, 2, 8]> ()
    qkv5 = Reshape (qkv, parts)
    stacked = Transpose <perm = [2, 0, 3, 1, 4]> (qkv5)
    q5, k5, v5 = Split <axis = 0, num_outputs = 3> (stacked)
    first = Constant <value_ints = [0]> ()
    q = Squeeze (q5, first) k = Squeeze (k5, first) v = Squeeze (v5, first)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y4 = MatMul (p, v)
    y3 = Transpose <perm = [0, 2, 1, 3]> (y4)
    flat = Constant <value_ints = [0, 0, 16]> ()
    y = Reshape (y3, flat) }"""
MERGED = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float16[B,S,48] qkv) => (float16[B,S,16] y) {
    q3, k3, v3 = Split <axis = -1, num_outputs = 3> (qkv)
    heads = Constant <value_ints = [0, 0, 2, 8]> ()
    q4 = Reshape (q3, heads) k4 = Reshape (k3, heads) v4 = Reshape (v3, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q4)
    kt = Transpose <perm = [0, 2, 3, 1]> (k4)
    v = Transpose <perm = [0, 2, 1, 3]> (v4)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y4 = MatMul (p, v)
    y3 = Transpose <perm = [0, 2, 1, 3]> (y4)
    flat = Constant <value_ints = [0, 0, 16]> ()
    y = Reshape (y3, flat) }"""


@pytest.mark.parametrize("text", [MERGED, STACKED], ids=["merged", "stacked"])
@pytest.mark.parametrize("chip", ["H200", "A100"])
def test_the_gradient_of_a_merged_product_is_written_in_place(chip: str, text: str) -> None:
    """By the kernel that writes strided gradients; another one's are joined by copies."""
    model = text_model(text)
    rewrite.optimize(model, training=True)
    gradient = autodiff.gradient(model, wrt=["qkv"])
    rng = np.random.default_rng(2)
    shapes = {str(v.name): (2, 9, 48 if v.name == "qkv" else 16) for v in gradient.graph.inputs}
    feeds = {n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
    program = lower(gradient, {n: (s, "float16") for n, s in shapes.items()}, CHIPS[chip])
    (backward,) = [c for c in program.calls if getattr(c.problem, "op", "") == "SdpaGrad"]
    joined = len({t.buffer for _, t in backward.writes}) == 1
    assert joined == (chip == "H200")
    assert any("Copy" in c.kernel for c in program.calls) != joined
    got = interpret(program, feeds, {})
    for i, value in enumerate(gradient.graph.outputs):
        assert_same(got[value.name], session(gradient, i)(feeds), "float16", value.name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "kind",
    ["PackedGuard", "GroupedSdpaPackedGuard", "CausalPackedGuard", "PackedNanGuard", "PackedMask",
     "SoftcapPackedMask", "GroupedSdpaPackedMaskGuard"],
)  # fmt: skip
def test_what_is_no_number_stays_in_its_packed_sequence(kind: str, dtype: str) -> None:
    """In bodies, whose 0 weights would make NaN of it elsewhere."""
    grouped, kind = kind.startswith("Grouped"), kind.removeprefix("GroupedSdpa")
    rng = np.random.default_rng(3)
    offsets, mask = np.int32([0, 4, 4, 9]), rng.standard_normal((3, 1, 5, 5)).astype(dtype)
    masks = [offsets, np.zeros((3, 5), np.int64), *([mask] if "Mask" in kind else [])]
    row = (rng, kind, (1, 4, 2 if grouped else 4), (11, 11), (8, 8), dtype, masks)
    case = next(iter(math_cases._sdpa(*row)))
    arrays = case.arrays()
    model = to_proto(load(case.model(arrays)))
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    want = stock(model).run(None, {v.name: feeds[v.name] for v in model.graph.input})[0]
    for name, value in product(("x0", "x1", "x2"), (np.nan, np.inf)):
        hostile = feeds | {name: feeds[name].copy()}
        hostile[name][0, 1, 5] = value
        y = stock(model).run(None, {v.name: hostile[v.name] for v in model.graph.input})[0]
        np.testing.assert_array_equal(np.delete(y, range(4, 9), 2), np.delete(want, range(4, 9), 2))
        if "Nan" not in kind or name == "x2":
            assert not np.isfinite(y[:, :, 4:9]).all()
