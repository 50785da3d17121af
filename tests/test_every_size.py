"""Programs over open sizes, at sizes of 0, 1 and more: equal to closed ones and to onnxruntime."""

from __future__ import annotations

import pytest
from open_sizes import Subject, prove

from onnx_fuse import passes
from onnx_fuse.onnx.build import text_model

# text of a graph: each row names the decision that its sizes take
GRAPHS = {
    "a count of one, broadcast over a batch": """
        agraph (float[B,S,4] x, int64[B,1] start) => (int64[B,S] y) <int64 one = {1}> {
            zero = Constant<value_int = 0>() step = Constant<value_int = 1>() dims = Shape(x)
            length = Gather(dims, one) places = Range(zero, length, step) y = Add(start, places) }
        """,
    "a count of one between axes": """
        agraph (float[B,S,T] x) => (float[B,S,T] y) <int64 at = {1}> {
            zero = Constant<value_int = 0>() step = Constant<value_int = 3>() dims = Shape(x)
            size = Gather(dims, at) limit = Mul(size, step) places = Range(zero, limit, step)
            axes = Constant<value_ints = [1]>() column = Unsqueeze(places, axes)
            f = Cast<to = 1>(column) y = Add(x, f) }
        """,
    "counts in a mask": """
        agraph (float[B,S,T] x) => (float[B,S,T] y, bool[S,T] m) {
            zero = Constant<value_int = 0>() one = Constant<value_int = 1>() dims = Shape(x)
            two = Constant<value_int = 2>() s = Gather(dims, one) t = Gather(dims, two)
            rows = Range(zero, s, one) columns = Range(zero, t, one)
            axes = Constant<value_ints = [1]>() column = Unsqueeze(rows, axes)
            m = LessOrEqual(columns, column) low = Constant<value_float = -1e30>()
            y = Where(m, x, low) }
        """,
    "a count behind a product": """
        agraph (float[B,S,4] x, float[4,T] w) => (float[B,S,T] y) {
            zero = Constant<value_int = 0>() one = Constant<value_int = 1>() dims = Shape(w)
            t = Gather(dims, one) places = Range(zero, t, one) f = Cast<to = 1>(places)
            z = MatMul(x, w) a = Add(z, f) y = Tanh(a) }
        """,
    "a count that is summed": """
        agraph (float[B,S] x) => (float[1,S] y, float[B,S] z) {
            zero = Constant<value_int = 0>() one = Constant<value_int = 1>() dims = Shape(x)
            s = Gather(dims, one) places = Range(zero, s, one) f = Cast<to = 1>(places)
            z = Mul(x, f) axes = Constant<value_ints = [0]>() y = ReduceSum(z, axes) }
        """,
    "Hardmax": "agraph (float[B,S] x) => (float[B,S] y) { y = Hardmax<axis = -1>(x) }",
    "reversed sequences": """
        agraph (float[S,B,4] x) => (float[S,B,4] y) {
            at = Constant<value_ints = [0]>() to = Constant<value_ints = [1]>() dims = Shape(x)
            s = Slice(dims, at, to) end = Constant<value_ints = [2]>() b = Slice(dims, to, end)
            n = Expand(s, b) y = ReverseSequence<time_axis = 0, batch_axis = 1>(x, n) }
        """,
    "a Fourier transform": """
        agraph (float[B,S,1] x) => (float[B,S,2] y) { axis = Constant<value_int = 1>()
            y = DFT(x, , axis) }
        """,
    "one element of a Concat": """
        agraph (float[N] x, float[1] v) => (float y) <int64 k = {1}> {
            c = Concat <axis = 0> (v, x, v) y = Gather(c, k) }
        """,
    "attention whose batches broadcast": """
        agraph (float[1,S,4] q, float[B,T,4] k, float[B,T,4] v) => (float[B,S,4] y) {
            t = Transpose <perm = [0, 2, 1]> (k) s = MatMul(q, t) w = Softmax <axis = -1> (s)
            y = MatMul(w, v) }
        """,
    "attention whose heads broadcast": """
        agraph (float[B,1,S,4] q, float[C,H,T,4] k, float[B,H,T,4] v) => (float[B,H,S,4] y) {
            t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(q, t) w = Softmax <axis = -1> (s)
            y = MatMul(w, v) }
        """,
    "attention of one key, broadcast by its mask": """
        agraph (float[B,1,S,4] q, float[B,1,T,4] k, float[B,1,2,4] v) => (float[B,1,S,4] y)
        <float[1,1,1,2] mask = {0.5, -0.5}, float[1] zero = {0}> {
            t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(q, t) z = Add(s, mask)
            w = Softmax <axis = -1> (z) nan = IsNaN(w) g = Where(nan, zero, w) y = MatMul(g, v) }
        """,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_small_graphs(name: str) -> None:
    model = text_model(GRAPHS[name])
    graph = text_model(GRAPHS[name])
    passes.optimize(graph, level=2)
    report = prove(Subject(name, model, graph), 24)
    assert not report.faults
    assert report.counts["shapes"] >= 5
    assert report.counts["results"] or report.counts["not interpreted"]
