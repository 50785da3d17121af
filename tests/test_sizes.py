"""Sizes that are computed in the graph: what is followed of them is what onnxruntime computes."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from lowering import interpreted
from shape_graphs import SIZES, shape_graph
from support import stock, table

import onnx_fuse
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.rewrite import optimize
from onnx_fuse.rewrite.sizes import infer_reshapes
from onnx_fuse.runtime import ort

Array = np.ndarray[Any, Any]
HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
CONSTANTS = """<int64[1] one = {1}, int64[1] m = {-1}, int64[2] tt = {2, 2}, int64[1] zero = {0},
    int64[1] two = {2}, int64 one0 = {1}, int64[1] big = {9223372036854775807}>"""
# name: (inputs and outputs, nodes, what is fed)
GRAPHS = table(globals(), at=1)("""
a Concat along the second axis: "(float[a,3] x, float[n] z) => (float[k,l] y)",
{"x": np.ones((2, 3)), "z": np.arange(12)}
  s = Shape (x) u = Unsqueeze (s, one) c = Concat <axis = 1> (u, u) r = Reshape (c, m)
  t = Gather (r, one) e = Concat <axis = 0> (t, m) y = Reshape (z, e)
a row of a matrix: "(float[a,3,4,5] x) => (int64[k] y)", {"x": np.ones((2, 3, 4, 5))}
  s = Shape (x) u = Reshape (s, tt) g = Gather <axis = 0> (u, one0) y = Add (g, g)
a Slice of a matrix: "(float[a,3,4,5] x) => (int64[k,l] y)", {"x": np.ones((2, 3, 4, 5))}
  s = Shape (x) u = Reshape (s, tt) g = Slice (u, one, two) y = Add (g, g)
a column of a matrix: "(float[a,3,4,5] x, float[n] z) => (float[k,l] y)",
{"x": np.ones((2, 3, 4, 5)), "z": np.arange(15)}
  s = Shape (x) u = Reshape (s, tt) g = Gather <axis = 1> (u, one0) y = Reshape (z, g)
a Slice from a start that is fed: "(float[2,3,4,5] x, int64[1] st) => (int64 y)",
{"x": np.ones((2, 3, 4, 5)), "st": np.array([-2])}
  s = Shape (x) a = Slice (s, st, m) b = Slice (s, m, big) c = Concat <axis = 0> (m, a, b)
  r = Reshape (x, c) q = Shape (r) z = Size (q) y = Add (z, z)
the largest of one size and of three: "(float[a,b] x, float[n] z) => (float[k,l] y)",
{"x": np.ones((2, 3)), "z": np.arange(6)}
  s = Shape (x) a = Gather (s, zero) b = Gather (s, one) lone = Max (a) most = Max (lone, zero, b)
  e = Concat <axis = 0> (most, m) y = Reshape (z, e)
the places of a scalar: "(float x) => (int64[k] y)", {"x": np.array(2.0)}
  p = NonZero (x) s = Shape (p) y = Add (s, s)
a Range to a constant vector that a branch hides: "(float[2,3] x, float[3] z) => (int64[k] y)",
{"x": np.ones((2, 3)), "z": np.arange(3)}
  s = Size (x) b = Greater (s, one0) w = Cast <to = 7> (z) e = If (b)
  <then_branch = t () => (int64[p] c) { c = Identity (two) }, else_branch = f () => (int64[q] d) { d
  = Identity (w) }> o = Squeeze (zero) y = Range (o, e, one0)
an entry of another tensor, 0 beside a -1: "(float[a,4] x, float[b,2] z) => (int64[k] y)",
{"x": np.ones((3, 4)), "z": np.ones((0, 2))}
  s = Shape <end = 1> (z) e = Concat <axis = 0> (s, m) r = Reshape (x, e) t = Shape <end = 1> (r)
  d = Sub (t, s) y = Add (d, one)
a size of 0, which copies another beside a -1: "(float[a,4,t,16] x) => (int64[k] y)",
{"x": np.ones((2, 4, 0, 16))}
  s = Shape <start = 0, end = 1> (x) n = Shape <start = 2, end = 3> (x) e = Concat
  <axis = 0> (s, n, m) r = Reshape (x, e) w = Shape <start = 2> (r) y = Sub (w, one)
the same after a sum: "(float[a,4,t,16] x) => (int64[k] y)", {"x": np.ones((2, 4, 0, 16))}
  s = Shape <start = 0, end = 1> (x) n = Shape <start = 2, end = 3> (x) e = Concat
  <axis = 0> (s, n, m) r = Reshape (x, e) o = Transpose <perm = [0, 2, 1]> (r) q = MatMul (o, r)
  w = Shape <start = 1, end = 2> (q) y = Add (w, w)
two sizes of 0 without a -1: "(float[t,4,u] x) => (int64[k] y)", {"x": np.ones((0, 4, 0))}
  s = Shape <start = 0, end = 1> (x) n = Shape <start = 2, end = 3> (x) f = Constant
  <value = int64[1] {4}> () e = Concat <axis = 0> (n, s, f) r = Reshape (x, e) w = Shape
  <start = 1, end = 2> (r) d = Sub (w, s) y = Add (d, one)
a target whose size of 0 copies another: "(float[a,4,t,16] x, float[t,64] z) => (float[k,l] y)",
{"x": np.ones((2, 4, 0, 16)), "z": np.empty((0, 64))}
  s = Shape <start = 0, end = 1> (x) n = Shape <start = 2, end = 3> (x) e = Concat
  <axis = 0> (s, n, m) r = Reshape (x, e) w = Shape <start = 1> (r) y = Reshape
  <allowzero = 1> (z, w)
a -1 beside a size of 0 that is another: "(float[a,48] x) => (int64[k] q)", {"x": np.ones((0, 48))}
  r = Shape <end = 1> (x) d = Add (r, r) f = Concat <axis = 0> (d, m) w = Reshape
  <allowzero = 1> (x, f) t = Shape (w) q = Add (t, t)
a sum of sizes beside a -1: "(float[a,4,t] x, float[a,4,u] z) => (int64[k] y, float[a,4,v] c)",
{"x": np.ones((2, 4, 0)), "z": np.ones((2, 4, 3))}
  c = Concat <axis = 2> (x, z) s = Shape <start = 2> (x) w = Shape <start = 2, end = 3> (z)
  n = Add (s, w) e = Concat <axis = 0> (m, n) r = Reshape (c, e) q = Shape <end = 1> (r)
  y = Add (q, q)
two results of one name: "(float[t] x, float[u] z) => (float[r] a, float[r] b, int64[k] y)",
{"x": np.ones(1), "z": np.ones(3)}
  a = Concat <axis = 0> (x, x) b = Concat <axis = 0> (x, z) s = Shape (a) w = Shape (b)
  y = Sub (w, s)
a size as a condition: "(float[a] x, float[n] z) => (float[k,l] y)",
{"x": np.ones(3), "z": np.arange(6)}
  s = Shape (x) b = Cast <to = 9> (s) i = Cast <to = 7> (b) e = Concat <axis = 0> (i, m)
  y = Reshape (z, e)
""") | {
    **{
        f"a -1 beside a size of 0, taken as it is, of {shape}": (
            "(float[a,b,48] x) => (float[h,i,j,k] y, float[l,m,n] w, int64[k] q)",
            """r = Shape <end = 2> (x)  d = Constant <value = int64[1] {12}> ()
            e = Concat <axis = 0> (r, m, d)  f = Concat <axis = 0> (r, m)
            y = Reshape <allowzero = 1> (x, e)  v = Reshape <allowzero = 1> (y, f)
            w = Neg (v)  t = Shape (w)  q = Add (t, t)""",
            {"x": np.ones(shape)},
        )
        for shape in ((2, 3, 48), (0, 3, 48), (2, 0, 48), (0, 0, 48))
    }
}


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_entries_have_places_in_a_tensor_of_its_rank(name: str, level: int) -> None:
    ends, nodes, given = GRAPHS[name]
    model = text_model(f"{HEAD}g {ends} {CONSTANTS} {{{nodes}}}")
    feeds = {k: a if k == "st" else a.astype(np.float32) for k, a in given.items()}
    expected = ort.run(ort.session(load(model), as_written=True), feeds)
    graph = load(model)
    optimize(graph, level=level)
    for y, want in zip(ort.run(ort.session(graph), feeds), expected, strict=True):
        np.testing.assert_array_equal(y, want, strict=True)
    found = interpreted(load(model), feeds)
    for value, want in zip(model.graph.outputs, expected, strict=True):
        np.testing.assert_array_equal(found[value.name], want, strict=True)


def outputs(session: Any, feeds: dict[str, Array]) -> list[Array] | None:
    """The outputs; None where onnxruntime finds that the sizes do not fit."""
    try:
        return ort.run(session, feeds)
    except Exception as error:
        if not ort.is_fault(error):
            raise
        return None


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_random_arithmetic_of_shapes_is_onnxruntimes(seed: int) -> None:
    runs = 0
    for each in range(seed, seed + 10):
        grown = shape_graph(each)
        model, rng = grown.model(), np.random.default_rng(each)
        original = stock(model.SerializeToString())
        graph = load(model)
        optimize(graph, level=each % 4)
        fused = stock(to_proto(graph, shapes=False).SerializeToString())
        for i in range(6):
            free = {s: int(rng.choice(SIZES)) for s in grown.sizes}
            feeds = grown.feeds(free if i else grown.sizes)
            expected = outputs(original, feeds)
            if expected is not None:  # sizes that do not fit are no case
                runs += 1
                for y, want in zip(ort.run(fused, feeds), expected, strict=True):
                    np.testing.assert_array_equal(y, want, err_msg=f"{each}, {feeds}", strict=True)
    assert runs > 10


SHORT = f"""{HEAD}g (float[1,1,n] x) => (float[a,b,c] y)
<float[1,1,7] w = {{1, 1, 1, 1, 1, 1, 1}}, int64[1] zero = {{0}}, int64[1] far = {{9}},
 int64[1] two = {{2}}>
{{ c = Conv (x, w)  y = Slice (c, zero, far, two) }}"""


def test_a_size_that_ends_inference_is_an_error_of_one_sentence() -> None:
    with pytest.raises(ModelError, match="below 0"):
        onnx_fuse.optimize(text_model(SHORT.replace("1,1,n", "1,1,2")))
    assert onnx_fuse.optimize(text_model(SHORT)) is not None


def test_a_node_that_is_read_no_more_does_not_count_as_a_change() -> None:
    model = text_model(
        """agraph (float[B, 4] x) => (float[B, 4] y)
            { s = Shape (x)  same = Reshape (x, s)  y = Relu (same) }"""
    )
    infer_shapes(model)
    assert infer_reshapes(model)
    assert not infer_reshapes(model)  # the Reshape stands there still, without a reader


def test_known_sizes_are_not_inferred_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_fuse.importer.shapes.inferred", None)
    model = text_model(f"{HEAD} g (float[a,4] x) => (float[a,4] y) {{ y = Relu (x) }}")
    infer_shapes(model)
    model.graph.outputs[0].shape = ir.Shape(["b", 4])  # no input's: inference may know more
    with pytest.raises(TypeError):
        infer_shapes(model)
