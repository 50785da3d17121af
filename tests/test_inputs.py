"""Generated inputs: sizes that the graph asks for, and values by what an input is for."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from support import Cli, table

from onnx_fuse import bench
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import save
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.sizes import evaluate, size, unknown
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime import ort
from onnx_fuse.session import InferenceSession, load
from onnx_fuse.validation.arrays import index_bound, role_of
from onnx_fuse.validation.check import check_outputs
from onnx_fuse.validation.inputs import Feeds, extremes, generate, read_feeds
from onnx_fuse.validation.sizes import System, larger, smaller

DECODERS = sorted((Path(__file__).parent / "data" / "decoders").glob("*.onnx"))


def feeds_for(text: str) -> tuple[list[Feeds], int]:
    """Feeds that onnxruntime took, and how many it was asked to take."""
    model = load(text_model(text))
    infer_shapes(model)
    session = ort.session(model)
    runs = []

    def run(feed: Feeds) -> list[object]:
        runs.append(feed)
        return ort.run(session, feed)

    return [feed for feed, _ in generate(model, run)], len(runs)


# (graph, what must hold of every feed): read off the graph, so that no size is refused first.
GRAPHS = table(globals())("""
a mask over past and sequence: lambda f: f["mask"].shape[1] == f["past"].shape[2] + f["k"].shape[2]
  g (float[B,2,P,4] past, float[B,2,S,4] k, float[B,S] q, float[B,T] mask) => (float[B,2,A,4] all,
  float[B,A] y) { all = Concat <axis = 2> (past, k) axes = Constant <value_ints = [1, 3]> ()
  n = ReduceSum <keepdims = 0> (all, axes) y = Add (n, mask) }
a scale for each channel: lambda f: f["x"].shape[1] == 3
  g (float[N,C] x) => (uint8[N,C] y) <float[3] s = {1, 2, 3}> { y = QuantizeLinear (x, s) }
lengths of a batch: lambda f: f["x"].shape[1] == 2
  g (float[T,N,4] x) => (float[T,N,4] y) <int64[2] n = {1, 0}> { y = ReverseSequence (x, n) }
a bias of rows: lambda f: len(f["x"]) == 3
  g (float[N,K] x, float[K,2] w) => (float[N,2] y) <float[3,1] c = {1, 2, 3}>
  { y = Gemm (x, w, c) }
offsets of each place: lambda f: f["o"].shape[::2] == (len(f["x"]), f["x"].shape[2] - 1)
  g (float[N,1,H,5] x, float[A,8,B,4] o) => (float[N,1,P,4] y) <float[1,1,2,2] w = {1, 2, 3, 4}>
  { y = DeformConv (x, w, o) }
equal sizes under different symbols: lambda f: f["key"].shape == f["value"].shape
  g (float[s1,2,s2,4] key, float[s3,2,s4,4] value) => (float[A,2,C,D] y)
  { t = Transpose <perm = [0, 1, 3, 2]> (key) y = MatMul (value, t)
  c = Concat <axis = 2> (key, value) z = Add (key, value) }
positions that pick from a mask by pairs: lambda f: f["mask"].shape == (len(f["x"]),
f["past"].shape[1] + f["x"].shape[1])
  g (int64[s43,s53] mask, float[s10,s15] past, float[s10,s70] x) => (int64[A,C] y)
  { ps = Shape <start = 1> (past) xs = Shape <start = 1> (x) n = Add (ps, xs)
  axes = Constant <value_ints = [0]> () t = Squeeze (n, axes) zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> () b1 = Shape <start = 0, end = 1> (x) b = Squeeze (b1, axes)
  k = Range (zero, t, one) r = Range (zero, b, one) a0 = Constant <value_ints = [0]> ()
  a1 = Constant <value_ints = [1]> () a2 = Constant <value_ints = [2]> () ku = Unsqueeze (k, a0)
  ru = Unsqueeze (r, a1) m = Max (ku, ru) sh = Shape (m) ke = Expand (ku, sh) re = Expand (ru, sh)
  kz = Unsqueeze (ke, a2) rz = Unsqueeze (re, a2) at = Concat <axis = 2> (rz, kz)
  y = GatherND (mask, at) }
columns of what is squeezed by no axes: lambda f: f["x"].shape[1] == len(f["w"])
  g (float[1,N,1] x, float[M,2] w) => (float[1,2] y) <int64[0] none = {}> { v = Squeeze (x, none)
  axes = Constant <value_ints = [1]> () u = Unsqueeze (v, axes) t = Transpose <perm = [1, 0]> (u)
  y = MatMul (t, w) }
windows of 7: lambda f: f["x"].shape[1] % 7 == f["x"].shape[2] % 7 == 0
  g (float[N,H,W] x) => (float[N,A,7,C,7] y) { y0 = Shape (x) s = Constant <value_ints = [7]> ()
  n = Shape <end = 1> (x) h = Shape <start = 1, end = 2> (x) w = Shape <start = 2> (x)
  a = Div (h, s) c = Div (w, s) to = Concat <axis = 0> (n, a, s, c, s) y = Reshape (x, to) }
reflected edges: lambda f: f["x"].shape[1] > 20
  g (float[N,L] x) => (float[N,M] y) { p = Constant <value_ints = [0, 20, 0, 20]> ()
  y = Pad <mode = "reflect"> (x, p) }
halved twice and put together again: lambda f: f["x"].shape[2] % 4 == f["x"].shape[3] % 4 == 0
  g (float[N,1,H,W] x) => (float[N,1,H,W] y)
  { a = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)
  b = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (a)
  r = Constant <value = float[0] {}> () s = Constant <value = float[4] {1, 1, 4, 4}> ()
  u = Resize <mode = "nearest"> (b, r, s) y = Add (x, u) }
a kernel wider than small images: lambda f: f["x"].shape[2] >= 41
  g (float[N,1,L] x) => (float[N,1,M] y) { y = MaxPool <kernel_shape = [41]> (x) }
positions within their table: lambda f: f["past"].shape[1] + f["x"].shape[1] <= 12
  g (float[B,P] past, float[B,S] x) => (float[S,2] y) <float[12,2] table =
  {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}> { ps = Shape <start = 1> (past)
  xs = Shape <start = 1> (x) n = Add (ps, xs) axes = Constant <value_ints = [0]> ()
  t = Squeeze (n, axes) p = Squeeze (ps, axes) one = Constant <value_int = 1> ()
  at = Range (p, t, one) y = Gather (table, at) }
attention over a past: lambda f: f["m"].shape[1] == f["pk"].shape[2] + f["k"].shape[2]
  <ir_version: 10, opset_import: ["" : 23]> g (float[B,2,S,4] q, float[C,2,K,4] k, float[D,2,L,4] v,
  float[E,2,P,4] pk, float[F,2,R,4] pv, bool[S,T] m) => (float[B,2,S,4] y)
  { y, a, b = Attention (q, k, v, m, pk, pv) }
positions in a flat mask: lambda f: f["mask"].shape[1] == f["past"].shape[1] + f["x"].shape[1]
  g (int64[B,T] mask, float[B,P] past, float[B,S] x) => (int64[A] y) { xs = Shape <start = 1> (x)
  ps = Shape <start = 1> (past) n = Add (ps, xs) axes = Constant <value_ints = [0]> ()
  t = Squeeze (n, axes) zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
  b1 = Shape <end = 1> (mask) b = Squeeze (b1, axes) k = Range (zero, t, one) last = Sub (b, one)
  w1 = Shape <start = 1> (mask) w = Squeeze (w1, axes) from = Mul (last, w) at = Add (k, from)
  all = Constant <value_ints = [-1]> () flat = Reshape (mask, all) y = Gather (flat, at) }
""")


@pytest.mark.parametrize("name", GRAPHS)
def test_sizes_are_read_off_the_graph(name: str) -> None:
    text, holds = GRAPHS[name]
    feeds, runs = feeds_for(text)
    assert all(holds(feed) for feed in feeds)
    assert runs == len(feeds)  # none was refused
    for name, array in feeds[0].items():
        assert any(feed[name].shape != array.shape for feed in feeds)


def test_a_name_that_is_a_sum_is_one() -> None:
    model = text_model("g (float[P] a, float[S] b, float[T] c) => (float[P] y) { y = Relu (a) }")
    model.graph.inputs[2].shape = onnx_ir.Shape([onnx_ir.SymbolicDim("P + S - 1")])
    for feed, _ in generate(model, lambda f: [np.ones(1)]):
        assert len(feed["c"]) == len(feed["a"]) + len(feed["b"]) - 1


BRANCH = (
    "g (float[B,P] past, float[B,S] x, float[B,T] mask, {kind} flag) => (float[B,T] y) {{ {head}"
    "  y = If (c) <then_branch = t () => (float[B,T] ty) {{"
    "    j = Concat <axis = 1> (past, x)  ty = Add (j, mask) }},"
    "  else_branch = e () => (float[B,T] ey) {{ ey = Add (x, mask) }}> }}"
)


@pytest.mark.parametrize(
    ("kind", "head", "values"),
    [
        ("bool[1]", "c = Identity (flag)", {False, True}),
        ("int64", "k = Constant <value_int = 16> ()  c = Equal (flag, k)", {16, 0}),
    ],
)
def test_both_branches_get_the_sizes_that_they_take(kind: str, head: str, values: set[int]) -> None:
    feeds, runs = feeds_for(BRANCH.format(kind=kind, head=head))
    assert runs == len(feeds)
    assert {feed["flag"].item() for feed in feeds} == values
    for feed in feeds:
        cached = feed["past"].shape[1] if feed["flag"].item() in (True, 16) else 0
        assert feed["mask"].shape[1] == cached + feed["x"].shape[1]


def test_ids_stay_in_bounds_through_arithmetic() -> None:
    model = text_model(
        "g (int64[B] a, int64[B] b, int64[B] c, int64[B] d) => (float[B] y)"
        "<float[10] table = {0,1,2,3,4,5,6,7,8,9}> { two = Constant <value_int = 2> ()"
        "  p = Add (a, two)  y = Gather (table, p)  q = Sub (b, two)  z = Gather (table, q)"
        "  r = Mul (c, two)  s = Add (r, two)  v = Gather (table, s)  m = Mod (d, two)"
        "  w = Gather (table, m) }"
    )
    assert [index_bound(v) for v in model.graph.inputs] == [8, 12, 4, None]


ROLES = [
    ("int64[B,S] ids", "y = Gather (table, ids)", "ids"),
    ("int64[B,S] position_ids", "y = Gather (table, position_ids)", "positions"),
    ("int64[B,S] attention_mask", "y = Cast <to = 1> (attention_mask)", "mask"),
    (
        "int64[B,S] a",
        "axis = Constant <value_int = 1> ()  n = CumSum (a, axis)"
        "  y = Gather (table, n)  b = Cast <to = 9> (a)",
        "mask",
    ),
    ("bool[B,S,S] keep", "y = Cast <to = 1> (keep)", "mask"),
    ("uint8[B,S] image", "y = Cast <to = 1> (image)", "pixels"),
    ("float[B,S] x", "y = Relu (x)", "plain"),
    ("float[B,S] m", "z = Add (m, table)  y = Softmax (z)", "added"),
    ("float[B,S] bias_mask", "u = Identity (bias_mask)  y = Add (u, u)", "added"),
    (
        "int64[B,2] shapes",
        "first = Constant <value_ints = [0]> ()  last = Constant <value_ints = [1]> ()"
        "  one = Slice (shapes, first, last)  s = Squeeze (one)  y = Expand (table, s)",
        "sizes",
    ),
    ("float[B,S] pad_mask", "y = Mul (pad_mask, pad_mask)", "mask"),
]


@pytest.mark.parametrize(("given", "body", "kind"), ROLES)
def test_what_an_input_is_for(given: str, body: str, kind: str) -> None:
    model = text_model(f"g ({given}) => (float[B,S] y) <float[1] table = {{1}}> {{ {body} }}")
    assert role_of(model.graph.inputs[0]).kind == kind


MASKED = (
    "g (float[B,2,S,4] q, float[B,2,T,4] k, {kind} mask) => (float[B,2,S,4] y) {{"
    "  kt = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul (q, kt)  {apply}"
    "  p = Softmax (z)  y = MatMul (p, k) }}"
)
LOW = "low = Constant <value_float = -1e9> ()"


@pytest.mark.parametrize(
    ("kind", "apply"),
    [
        ("bool[B,1,S,T]", f"{LOW}  z = Where (mask, s, low)"),
        ("bool[B,1,1,T]", f"{LOW}  z = Where (mask, low, s)"),
        ("bool[S,T]", "low = Constant <value = float {-inf}> ()  z = Where (mask, low, s)"),
        ("float[B,1,S,T]", "z = Add (s, mask)"),
    ],
)
def test_a_third_feed_hides_a_whole_row(kind: str, apply: str) -> None:
    model = load(text_model(MASKED.format(kind=kind, apply=apply)))
    session = ort.session(model)
    [(feed, y), *_] = generate(model, lambda f: ort.run(session, f))
    assert np.isfinite(y[0]).all()
    what, hidden = extremes(model, feed)[0]
    assert "hides everything" in what
    row = hidden["mask"][(-1,) * (hidden["mask"].ndim - 1)]
    assert len(np.unique(row)) == 1
    [p] = ort.run(session, hidden)
    rest = np.isfinite(p).all()
    assert rest or "inf" in apply  # the original's own NaN is compared as such
    check = check_outputs(model, model)
    assert check.ok
    assert len(check.feeds) >= 3


def test_other_floats_get_both_zeros_other_magnitudes_and_nan() -> None:
    model = text_model("g (float[B,S] x) => (float[B,S] y) { y = Relu (x) }")
    [(_, feed), (_, of_nan)] = extremes(model, {"x": np.full((3, 20), 2, np.float32)})
    x = feed["x"]
    zeros = x[x == 0]
    assert np.signbit(zeros).any()
    assert not np.signbit(zeros).all()
    assert np.abs(x).max() / np.abs(x[x != 0]).min() > 1e4
    np.testing.assert_array_equal(np.isnan(of_nan["x"]).all(1), [False, False, True])


# ---- decoders --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*bfloat16 kernels")
@pytest.mark.parametrize("path", DECODERS, ids=lambda p: p.stem)
def test_decoders_with_a_cache_need_no_option(path: Path) -> None:
    """optimize and its check, run, and the program of a GPU, on generated inputs alone."""
    check = check_outputs(path, path)
    assert check.ok
    assert not any("refused" in note or "one size" in note for note in check.notes)
    for feed in check.feeds:
        past = [shape[2] for name, shape in feed.items() if name.endswith("key")]
        if "attention_mask" in feed and "use_cache_branch" not in feed:
            assert feed["attention_mask"][1] == past[0] + feed["input_ids"][1]
    assert bench.run_once(load(path)).outputs
    if "merged" not in path.name:
        assert bench.program(load(path), CHIPS["H200"]).calls


# ---- sizes -----------------------------------------------------------------------------------


def test_sizes_compute_as_numbers_do() -> None:
    n, m = size("n"), size("m")
    at = {"n": 13, "m": 5}
    rows = [
        ((n + 3) * (m - 1), 64),
        ((n * m + 2 * n) / n, 7),
        ((n + 3) // 4, 4),
        (-(-n // 4), 4),
        (n % 4, 1),
        ((4 * n + 6) // 4, 14),
        (smaller(n, m), 5),
        (larger(n, m + 20), 25),
        (n * Fraction(1, 2) // 1, 6),
        ((n * n - n) // m, 31),
    ]
    for value, number in rows:
        assert evaluate(value, at) == number, value
    assert evaluate(unknown() + n, at) is None
    assert (n * m + 2 * n) / n == m + 2
    assert smaller(n, n + 1) == n


def test_long_chains_of_sizes_become_unknown() -> None:
    p = size("n") + 1
    q = size("n")
    for _ in range(200):
        p, q = p * p, (q // 3 + 1) // 2
    assert evaluate(p, {"n": 2}) is None
    assert evaluate(q, {"n": 2}) is None


def test_equations_are_solved_for_the_sum() -> None:
    system = System(["P", "S", "T"])
    system.require("equal", size("T"), size("P") + size("S"))
    assert system.resolve(size("T")) == size("P") + size("S")
    assert not system.violated({"P": 2, "S": 3})
    system.require("equal", size("P") * 2, size(7))
    assert system.violated({"P": 2, "S": 3})


def test_inputs_with_a_default_need_no_feed() -> None:
    model = text_model(
        "g (float[N,3] x, float[3] w) => (float[N,3] y) <float[3] w = {1,2,3}> { y = Mul (x, w) }"
    )
    feeds = [feed for feed, _ in generate(model, lambda f: [np.ones(1)])]
    assert [list(feed) for feed in feeds] == [["x"]] * 2


def test_an_input_too_large_is_said() -> None:
    model = text_model("g (float[70000,70000] x) => (float[A,B] y) { y = Relu (x) }")
    with pytest.raises(ModelError, match="too large to generate: give inputs"):
        generate(model, lambda f: [np.ones(1)])


def test_scales_that_are_fed_enlarge() -> None:
    model = text_model(
        "g (float[1,2,3,3] x, float[4] s) => (float[1,2,H,W] y) "
        '{ y = Resize <mode = "linear"> (x, , s) }'
    )
    feeds = [feed for feed, _ in generate(model, lambda f: [np.ones(1)])]
    assert all(feed["s"].tolist() == [1, 1, 2, 2] for feed in feeds)


# ---- files of inputs -------------------------------------------------------------------------

X, IDS = np.ones((2, 4), np.float32), np.array([0, 3])
FILES: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "another size": ({"x": np.ones((2, 5), np.float32), "i": IDS}, r"takes the shape \[B, 4\]"),
    "another rank": ({"x": X[None], "i": IDS}, r"the array has \[1, 2, 4\]"),
    "a scalar": ({"x": np.float32(1), "i": IDS}, r"the array has \[\]"),
    "float64": ({"x": X.astype(np.float64), "i": IDS}, "takes float32, the array is float64"),
    "int32 indices": ({"x": X, "i": IDS.astype(np.int32)}, "takes int64, the array is int32"),
    "text": ({"x": X.astype(str), "i": IDS}, "takes float32"),
    "complex numbers": ({"x": X + 1j, "i": IDS}, "the array is complex64"),
    "dates": ({"x": np.zeros((2, 4), "M8[s]"), "i": IDS}, "the array is datetime64"),
    "no array for an input": ({"x": X}, r"has no array for input 'i' \(it has \['x'\]\)"),
    "another name": ({"x": X, "indices": IDS}, "has no array for input 'i'"),
    "nothing": ({}, "has no array for input 'x'"),
}


def test_arrays_that_fit_are_taken(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", x=X.astype(">f4"), i=IDS, more=X)
    with pytest.warns(UserWarning, match=r"f.npz: left out, since no input has its name: 'more'"):
        found = read_feeds(tmp_path / "f.npz", text_model(FED))
    assert found["x"].dtype == np.float32
    assert found["x"].dtype.isnative
    assert list(found) == ["x", "i"]


FED = "g (float[B,4] x, int64[B] i) => (float[B,4] y) { c = Cast <to = 1> (i)  y = Add (x, x) }"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    arrays, reason = FILES[name]
    np.savez(tmp_path / "f.npz", **arrays)
    with pytest.raises(ModelError, match=reason):
        read_feeds(tmp_path / "f.npz", text_model(FED))


def test_a_single_array_and_other_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", X)
    (tmp_path / "text.npz").write_text("no arrays")
    for name, reason in (("f.npy", "one unnamed array"), ("text.npz", "not an .npz file"),
                         ("none.npz", "no such file")):  # fmt: skip
        with pytest.raises(ModelError, match=reason):
            read_feeds(tmp_path / name, text_model(FED))


def test_a_gradient_check_draws_what_a_file_of_inputs_lacks(tmp_path: Path, cli: Cli) -> None:
    path, out = tmp_path / "m.onnx", tmp_path / "g.onnx"
    weight = "<float[4,2] w = {1,2,3,4,5,6,7,8}>"
    save(text_model(f"g (float[B,4] x) => (float[B,2] y) {weight} {{ y = MatMul (x, w) }}"), path)
    np.savez(tmp_path / "f.npz", x=X)
    result = cli.done("gradient", path, "-o", out, "--check", "--inputs", tmp_path / "f.npz")
    assert "gradients ok: 1 tensors" in result


def test_a_sequence_is_given_in_python_alone(cli: Cli, tmp_path: Path) -> None:
    path, out, given = tmp_path / "m.onnx", tmp_path / "o.onnx", tmp_path / "f.npz"
    text = "g (seq(float[N,2]) s) => (float[N,M] y) { y = ConcatFromSequence <axis = 1> (s) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}'), path)
    np.savez(given, s=np.ones((3, 2, 2), np.float32))
    for more in ((), ("--inputs", given)):
        assert "input 's' is a sequence of tensors" in cli.line(
            1, "optimize", path, "-o", out, *more
        )
    assert cli("optimize", path, "-o", out, "--no-check").code == 0
    x = np.ones((2, 2), np.float32)
    assert InferenceSession(out, device="cpu").run(None, {"s": [x, x]})[0].shape == (2, 4)
