"""Sizes that data decides: the stages behind a program, run by NumPy and onnxruntime; no GPU."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowering import with_values
from support import answers, assert_near, assert_same, stock, table

from onnx_fuse import InferenceSession
from onnx_fuse.ir.build import all_nodes, text_model
from onnx_fuse.lower import walk
from onnx_fuse.ops.bodies import carries_body
from onnx_fuse.program.call import NeedsValues
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.rewrite import optimize

H200 = CHIPS["H200"]
RNG = np.random.default_rng(0)
X = RNG.integers(-1, 2, (3, 5, 4)).astype(np.float32)
X[0, 0, :2] = np.nan, -0.0
ROWS = RNG.integers(0, 2, (9, 3)).astype(np.float32)
LONG_ROWS = RNG.integers(0, 2, (40, 9)).astype(np.float32)
LONG_ROWS[:, 2:] = 0
LONG_ROWS[3::7, 5] = -0.0
KEPT = np.array([True, False, True, False, False])

# text of a graph and its feeds: one row a way in which data decides about sizes
GRAPHS = table(globals())("""
nonzero: {"x": X}
  (float[3,5,4] x) => (int64[3,N] y) { y = NonZero (x) }
nonzero of nothing but zeros: {"x": X}
  (float[3,5,4] x) => (int64[3,N] y) { z = Sub (x, x) w = IsNaN (z) v = Not (w) f = Xor (v, v)
  y = NonZero (f) }
compress along an axis: {"x": X, "c": KEPT}
  (float[3,5,4] x, bool[5] c) => (float[3,N,4] y) { y = Compress <axis = 1> (x, c) }
compress with a short condition: {"x": X, "c": KEPT}
  (float[3,5,4] x, bool[5] c) => (float[N] y) { y = Compress (x, c) }
unique elements: {"x": X}
  (float[3,5,4] x) => (float[N] y, int64[N] i, int64[M] j, int64[N] k) { a = Abs (x) b = IsNaN (a)
  z = Constant <value = float {7}> () d = Where (b, z, a) y, i, j, k = Unique (d) }
unique elements as they come: {"x": ROWS}
  (float[9,3] x) => (float[N] y, int64[N] i, int64[M] j, int64[N] k) { t = Constant
  <value = float {2}> () d = Sub (t, x) y, i, j, k = Unique <sorted = 0> (d) }
unique rows: {"x": ROWS}
  (float[9,3] x) => (float[N,3] y, int64[N] i, int64[M] j, int64[N] k) { y, i, j, k = Unique
  <axis = 0> (x) }
unique columns as they come: {"x": ROWS}
  (float[9,3] x) => (float[9,N] y, int64[N] i, int64[M] j, int64[N] k) { y, i, j, k = Unique
  <axis = 1, sorted = 0> (x) }
unique rows of many numbers: {"x": LONG_ROWS}
  (float[40,9] x) => (float[N,9] y, int64[N] i, int64[M] j, int64[N] k) { y, i, j, k = Unique
  <axis = 0> (x) }
unique columns of many numbers as they come: {"x": LONG_ROWS.T.copy()}
  (float[9,40] x) => (float[9,N] y, int64[N] i, int64[M] j, int64[N] k) { y, i, j, k = Unique
  <axis = 1, sorted = 0> (x) }
a stage behind a stage: {"x": np.nan_to_num(X)}
  (float[3,5,4] x) => (int64[2,M] y) { n = NonZero (x) t = Transpose (n) two = Constant
  <value_ints = [1]> () r = GatherND (x, t) z = Add (r, r) p = Relu (z) q = Unsqueeze (p, two)
  y = NonZero (q) }
a computed trip count of Range, and what reads it: {"x": np.nan_to_num(X)}
  (float[3,5,4] x) => (int64[N] y) { s = ReduceMax <keepdims = 0> (x) n = Cast <to = 7> (s)
  zero = Constant <value = int64 {0}> () one = Constant <value = int64 {1}> () five = Constant
  <value = int64 {5}> () m = Add (n, five) r = Range (zero, m, one) y = Mul (r, m) }
a computed condition: {"x": np.nan_to_num(X)}
  (float[3,5,4] x) => (float[3,5,4] y) { s = ReduceSum <keepdims = 0> (x) zero = Constant
  <value = float {0}> () c = Less (s, zero) y = If (c)
  <then_branch = a () => (float[3,5,4] p) { p = Neg (x) }, else_branch = b () => (float[3,5,4] q) {
  q = Abs (x) }> }
a loop that ends by what it computes: {"x": np.nan_to_num(X), "n": np.array(10 ** 9)}
  (float[3,5,4] x, int64 n) => (float[3,5,4] y, float[N,3,5,4] z, int64[N] k) { yes = Constant
  <value_int = 1> () c = Cast <to = 9> (yes) y, z, k = Loop (n, c, x)
  <body = b (int64 i, bool t, float[3,5,4] s) => (bool more, float[3,5,4] so, float[3,5,4] r, int64
  j) { so = Add (s, x) r = Mul (s, so) j = Add (i, i) m = ReduceMax <keepdims = 0> (so) six =
  Constant <value = float {6}> () more = Less (m, six) }> }
a loop of no trip count that grows what it hands on, and a node behind it: {"x": np.nan_to_num(X)}
  (float[3,5,4] x) => (float[N] y) { flat = Constant <value_ints = [-1]> () v = Reshape (x, flat)
  a = Abs (v) t = ReduceSum <keepdims = 0> (a) f = Constant <value = float {3.5}> () e = Mul (t, f)
  l = Loop (, , a)
  <body = b (int64 i, bool g, float[K] s) => (bool more, float[M] so) { so = Concat <axis = 0> (s,
  a) n = ReduceSum <keepdims = 0> (so) more = Less (n, e) }> y = Neg (l) }
a loop whose condition is false before its first pass: {"x": np.nan_to_num(X)}
  (float[3,5,4] x) => (float[3,5,4] y, float[N,3,4] z) { m = ReduceMax <keepdims = 0> (x)
  big = Constant <value = float {99}> () c = Greater (m, big) y, z = Loop (, c, x)
  <body = b (int64 i, bool t, float[3,5,4] s) => (bool t, float[3,5,4] s, float[3,4] r) { one =
  Constant <value_ints = [1]> () r = ReduceSum <keepdims = 0> (s, one) }> }
a loop whose body hands on what it was given, in a loop: {"x": np.nan_to_num(X), "n": np.array(3)}
  (float[3,5,4] x, int64 n) => (float[3,5,4] y, float[3,5,4] w) { s = ReduceMax <keepdims = 0> (x)
  y, w = Loop (n, , x, x)
  <body = b (int64 i, bool t, float[3,5,4] p, float[3,5,4] q) => (bool more, float[3,5,4] po,
  float[3,5,4] p) { hundred = Constant <value = float {100}> () po = Loop (, , p) <body = d (int64
  k, bool u, float[3,5,4] e) => (bool f, float[3,5,4] eo) { eo = Add (e, s) g = ReduceMax <keepdims
  = 0> (eo) five = Constant <value = float {5}> () f = Less (g, five) }> h = ReduceMax <keepdims =
  0> (po) more = Less (h, hundred) }> }
sequences of what a stage makes, and of shapes: {"x": np.nan_to_num(X), "c": np.arange(15) % 4 == 1}
  (float[3,5,4] x, bool[15] c) => (float[N,4] y) { s = SplitToSequence <axis = 1, keepdims = 0> (x)
  two = Constant <value = int64 {-2}> () a = SequenceAt (s, two) n = NonZero (a) t = Transpose (n)
  m = ReduceMax <keepdims = 0> (t) e = SequenceErase (s, two) f = SequenceInsert (e, a)
  w = ConcatFromSequence <axis = 0> (f) z = Abs (w) k = Compress <axis = 0> (z, c) y = Neg (k) }
nonzero of many tiles: {"x": np.random.default_rng(7).random((3, 100000)) < 0.3}
  (bool[3,100000] x) => (int64[2,N] y) { y = NonZero (x) }
a shape that a stage decides: {"x": X}
  (float[3,5,4] x) => (int64[2] y) { n = NonZero (x) y = Shape (n) }
""")


def test_positions_are_lowered_for_their_number_alone() -> None:
    """Not for where they stand: other counts of the tiles before are the same program."""
    model = text_model("agraph (bool[9000] x) => (int64[1,N] y) { y = NonZero (x) }")
    (stage,) = walk.lower(model, {"x": ((9000,), "bool")}, H200).stages
    inner = ir.from_proto(onnx.ModelProto.FromString(stage.model))
    shapes = {name: (t.shape, t.dtype) for name, t in stage.inputs if t is not None}
    with pytest.raises(NeedsValues) as needs:
        walk.lower(inner, shapes, H200)
    assert [shapes[name][0] for name in needs.value.names] == [(1,)]


# onnxruntime makes what waits for values, and the sequences that this reads
SEQUENCES = table(globals())("""
a loop over an empty sequence, as long as values say: {"x": np.nan_to_num(X)}
  (float[3,5,4] x) => (float[N,5,4] y, int64 l) { zero = Constant <value = int64 {0}> ()
  count = Size (x) some = Less (zero, count) s = SequenceEmpty () q = Loop (, some, s)
  <body = b (int64 i, bool t, seq(float[A,B]) a) => (bool more, seq(float[C,D]) e) {
  row = Gather (x, i) w = ReduceSum <keepdims = 0> (row) more = Less (w, w)
  e = SequenceInsert (a, row) }> l = SequenceLength (q)
  y = ConcatFromSequence <axis = 0, new_axis = 1> (q) }
branches that read a sequence: {"x": np.nan_to_num(X)}
  (float[3,5,4] x) => (float[N,5,4] y, float[6,5,4] z) { a = Relu (x) s = SequenceConstruct (a, x)
  m = ReduceMax <keepdims = 0> (x) big = Constant <value = float {99}> () c = Greater (m, big)
  q = If (c) <then_branch = p () => (o) { o = SequenceInsert (s, x) }, else_branch = r () => (o) {
  o = SequenceErase (s) }> y = ConcatFromSequence <axis = 0> (q)
  z = ConcatFromSequence <axis = 0> (s) }
an element whose place is computed: {"x": np.nan_to_num(X)}
  (float[3,5,4] x) => (float[3,5,4] y) { a = Relu (x) s = SequenceConstruct (a, x)
  t = Identity (s) m = ReduceMin <keepdims = 0> (a) i = Cast <to = 7> (m) e = SequenceAt (t, i)
  y = Neg (e) }
""")


@pytest.mark.parametrize("name", SEQUENCES)
def test_onnxruntime_is_handed_no_sequence(name: str) -> None:
    text, feeds = SEQUENCES[name]
    model = text_model(f"agraph {text}")
    for output in model.graph.outputs:
        output.shape = None
    program = with_values(model, feeds)
    assert any(stage.host for stage in program.stages)
    assert_near(interpret(program, feeds, {}, with_values), answers(stock(model), feeds))


def test_a_sequence_may_have_been_made_in_any_number_of_steps() -> None:
    steps = "".join(f"s{i + 1} = SequenceInsert (s{i}, x)\n" for i in range(1200))
    model = text_model(f"""agraph (float[2] x) => (float[2] y) {{ s0 = SequenceConstruct (x)
        {steps} m = ReduceMin <keepdims = 0> (x) i = Cast <to = 7> (m)
        y = SequenceAt (s1200, i) }}""")
    feeds = {"x": np.array([1, 2], np.float32)}
    assert any(stage.host for stage in with_values(model, feeds).stages)


@pytest.mark.parametrize("name", GRAPHS)
def test_stages_give_onnxruntimes_results(name: str) -> None:
    text, feeds = GRAPHS[name]
    model = text_model(f"agraph {text}")
    names = [v.name for v in model.graph.outputs]
    expected = stock(model, optimized=True).run(names, feeds)
    program = with_values(model, feeds)
    assert program.stages or "shape" in name
    assert not any(stage.host for stage in program.stages)
    got = interpret(program, feeds, {}, with_values)
    for output, want in zip(names, expected, strict=True):
        assert got[output].dtype == want.dtype
        np.testing.assert_array_equal(got[output], want, err_msg=output)


STRINGS = """agraph (float[N,5,4] x) => (float[N,5,2] y, string[N,5,2] s)
    <float[4,2] w = {1, 0, 2, 1, -1, 3, 1, 1}>
    { a = MatMul (x, w) s = Cast <to = 8> (a) b = Cast <to = 1> (s) y = Neg (b) }"""


@pytest.mark.usefixtures("gpu")
def test_strings_between_numbers_are_a_stage_of_onnxruntimes() -> None:
    model = text_model(STRINGS)
    session, expected = InferenceSession(model, device="cuda"), stock(model, optimized=True)
    assert [stage.host for stage in with_values(model, {"x": X}).stages] == [True]
    for x in np.nan_to_num(X), X[:0], X[1:2]:  # of no row, no call writes what the stage reads
        assert_same(session.run(None, {"x": x}), expected.run(None, {"x": x}))


def test_strings_that_are_fed_are_known_to_lowering() -> None:
    """A device has no place for them; what they are looked up in may be a constant of strings."""
    model = text_model(
        """agraph (string[N] s, float[2] x) => (float[N] y)
        <int64[1] axes = {1}, string[2] known = {"a", "b"}>
        { at = Unsqueeze (s, axes) same = Equal (at, known) there = Cast <to = 1> (same)
          r = Relu (x) y = MatMul (there, r) }"""
    )
    feeds = {"s": np.array(["b", "c", "a"], object), "x": np.array([2, 3], "f")}
    shapes = {name: (array.shape, array.dtype.name) for name, array in feeds.items()}
    with pytest.raises(NeedsValues, match="s"):
        walk.lower(model, shapes, H200)
    for words in (feeds["s"], feeds["s"].astype(str)):
        program = walk.lower(model, shapes, H200, values={"s": words})
        got = interpret(program, {"x": feeds["x"]}, {}, with_values)
        np.testing.assert_array_equal(got["y"], [3, 0, 2])


def test_a_body_with_a_deferred_node_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage knows nodes and values by name: a call of which some is deferred has its own body."""
    model = text_model(
        """<ir_version: 10, opset_import: ["" : 21, "onnx_fuse" : 1]>
        agraph (float[4,6] x, float[4,6] y) => (float[4,6] p, float[4,6] q, float[4,6] r)
        { p = onnx_fuse.Two(x) q = onnx_fuse.Two(y) r = onnx_fuse.Two(x) }"""
    )
    lowerer = walk.Lowerer(model, dict.fromkeys("xy", ((4, 6), "float32")), H200)
    for value in model.graph.inputs:
        lowerer.slots[value] = walk.Slot(tensor=lowerer.scratch("float32", (4, 6)))
    bodies: list[ir.Graph] = []
    text = "agraph (float[4,6] a) => (float[4,6] c) { b = Neg(a) c = Exp(b) }"

    def body(_: ir.Node) -> ir.Graph:
        bodies.append(text_model(text).graph)
        return bodies[-1]

    monkeypatch.setattr(lowerer, "_body", body)
    node, first, second, third = lowerer._node, *model.graph
    # of the second call the node before the last is deferred, and so the one behind it
    monkeypatch.setattr(
        lowerer,
        "_node",
        lambda n: lowerer._defer(n) if owner is second and n.op_type == "Neg" else node(n),
    )
    for owner in (first, second, third):
        assert lowerer._expand(owner)
    _, two, _ = bodies
    assert [n.op_type for n in lowerer.later] == ["Neg", "Exp", "Identity"]
    assert all(n in two for n in lowerer.later[:2])
    assert lowerer.slots[second.outputs[0]].later
    assert not lowerer.slots[third.outputs[0]].later
    assert len(lowerer.calls) == 4


@pytest.mark.parametrize("op", ["If", "Loop"])
def test_a_later_stage_carries_the_bodies_of_operators_inside_it(op: str) -> None:
    """onnxruntime may run it, or the part of it that no kernel serves."""
    norm = "v = LayerNormalization (t, g) m = MatMul (v, w)"
    inner = {
        "If": f"y = If (c) <then_branch = a () => (float[K,4] m) {{ {norm} }}, "
        "else_branch = b () => (float[K,4] n) { n = Neg (t) }>",
        "Loop": f"y = Loop (, c, t) <body = b (int64 i, bool q, float[K,4] s) => "
        f"(bool more, float[K,4] m) {{ {norm} k = ReduceMax <keepdims = 0> (m) "
        "e = Constant <value = float {9}> () more = Less (k, e) }>",
    }
    model = text_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,4] x, bool[N] keep) => (float[K,4] y)
        <float[4] g = {{1, 2, 3, 4}}, float[4,4] w = {{{", ".join(map(str, range(16)))}}}>
        {{ t = Compress <axis = 0> (x, keep) p = ReduceMax <keepdims = 0> (t)
        z = Constant <value = float {{0}}> () c = Less (z, p) {inner[op]} }}"""
    )
    optimize(model, level=2)
    assert any(map(carries_body, all_nodes(model.graph)))
    program = with_values(model, {"x": np.ones((3, 4), np.float32), "keep": np.ones(3, bool)})
    (stage,) = program.stages
    held = onnx.load_model_from_string(stage.model)
    assert {f.name for f in held.functions} >= {"LayerNormGemm"}
