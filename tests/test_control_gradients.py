"""Gradients through Loops whose states have names for sizes."""

from __future__ import annotations

import pytest

from onnx_fuse import autodiff
from onnx_fuse.errors import ModelError
from onnx_fuse.onnx.build import text_model
from onnx_fuse.validation import check_gradients


def test_a_state_that_grows_is_refused():
    text = """agraph (float[2] x, int64 n) => (float[M] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[P] s) => (bool d, float[Q] t) {
            d = Identity (c)
            t = Concat <axis = 0> (s, x)
        }>
    }"""
    with pytest.raises(ModelError, match=r"\(Loop\): its state 'x' changes its shape from step"):
        autodiff.gradient(text_model(text), wrt=["x"])


def test_a_loop_whose_state_has_two_names_for_a_size():
    # As PyTorch's scripted loops are exported; behind it a norm, which needs the state's rank.
    text = """agraph (float[T,B,3] x) => (float[M,3] y)
      <float[3,3] w = {0.3,-0.2,0.1,0.4,0.2,-0.5,0.1,0.3,-0.1}, float[3] scale = {1,2,0.5}> {
        at = Constant <value_int = 0> () on = Constant <value = bool {1}> ()
        sizes = Shape (x) trips = Gather (sizes, at)
        first = Gather (x, at) shape = Shape (first) start = ConstantOfShape (shape)
        h = Loop (trips, on, start) <body = b (int64 i, bool c, float[B,3] s)
            => (bool d, float[Tanh_dim_0, Tanh_dim_1] t) {
                d = Identity (on)
                p = MatMul (s, w) row = Gather (x, i) z = Add (p, row)
                t = Tanh (z)
            }>
        y = LayerNormalization (h, scale)
    }"""
    check = check_gradients(text_model(text), dims={"T": 4, "B": 2})
    assert [(e.tensor, e.ok) for e in check.errors] == [("w", True), ("scale", True)]
    assert all(abs(e.expected) > 1e-3 for e in check.errors)
