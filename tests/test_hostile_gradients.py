"""Gradient checks on inputs that hold NaN or infinity: what is not finite is left out, and told."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import Cli

from onnx_fuse import ops
from onnx_fuse.ir.build import text_model
from onnx_fuse.validation.gradients import check_gradients

SCALED = "g (float[N,3] x) => (float[N,3] y) <float[3] w = {1, 2, 3}> { y = Mul (x, w) }"
LAYER = """g (float[N,3] x) => (float[N,2] y)
  <float[3,2] w = {0.1, 0.2, 0.3, 0.05, -0.1, 0.2}, float[2] b = {0.2, -0.4}>
  { z = MatMul (x, w) a = Add (z, b) y = Tanh (a) }"""
TWO = """g (float[N,3] x, float[N,3] u) => (float[N,3] y, float[N,3] v)
  <float[3] w = {1, 2, 3}, float[3] s = {2, 1, 4}> { y = Mul (x, w) t = Mul (u, s) v = Sin (t) }"""
MASKED = """g (float[N,3] x, float[N,3] mask) => (float[N,3] y) <float[3] w = {1, 2, 3}>
  { z = Mul (x, w) m = Add (z, mask) y = Softmax (m) }"""
GUARDED = f"""{MASKED[:-1].replace("y =", "p =")} n = IsNaN (p)
  zero = Constant <value_float = 0.0> () y = Where (n, zero, p) }}"""
BRANCH = f"""{GUARDED[:-24]} c = ReduceMax <keepdims = 0> (m) t = Less (c, zero) y = If (t)
  <then_branch = a () => (float[N,3] b) {{ b = Abs (p) }},
  else_branch = a () => (float[N,3] b) {{ b = Where (n, zero, p) }}> }}"""
NAN, INF = np.nan, np.inf
PLAIN = [[1, 2, 0.5], [0.3, -1, 2]]

# (the graph, its inputs, tensors that are compared, numbers that are left out of how many)
ROWS = {
    "NaN of one weight": (SCALED, {"x": [[NAN, 1, 2], [1, 2, 0.5]]}, {"w"}, "1 of 3"),
    "infinity of one weight": (SCALED, {"x": [[1, -INF, 2], [1, 2, 0.5]]}, {"w"}, "1 of 3"),
    "NaN of all": (LAYER, {"x": [[NAN, 1, 2], [1, 2, 0.5]]}, set(), "8 of 8"),
    "behind a Tanh": (LAYER, {"x": [[INF, 1, 2], [1, 2, 0.5]]}, {"w", "b"}, "2 of 8"),
    "one branch": (TWO, {"x": [[NAN] * 3] * 2, "u": PLAIN}, {"s"}, "3 of 6"),
    "a mask": (MASKED, {"x": PLAIN, "mask": [[0, -INF, 0], [0, 0, -INF]]}, {"w"}, ""),
    "a mask of all": (MASKED, {"x": PLAIN, "mask": [[-INF] * 3, [0, 0, 0]]}, set(), "3 of 3"),
    "a guarded mask of all": (GUARDED, {"x": PLAIN, "mask": [[-INF] * 3, [0, 0, 0]]}, {"w"}, ""),
    "a guard in a branch": (BRANCH, {"x": PLAIN, "mask": PLAIN}, {"w"}, ""),
    "a masked row of it": (BRANCH, {"x": PLAIN, "mask": [[-INF] * 3, [0, 0, 0]]}, {"w"}, ""),
    "plain": (LAYER, {"x": PLAIN}, {"w", "b"}, ""),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_not_finite_is_left_out(
    name: str, cli: Cli, saved: Callable[..., Path], tmp_path: Path
) -> None:
    text, feeds, compared, left_out = ROWS[name]
    arrays = {k: np.float32(a) for k, a in feeds.items()}
    for every in (False, True):
        check = check_gradients(text_model(text), feeds=arrays, every=every)
        assert check.ok, check.failed
        assert {e.tensor for e in check.errors} == compared
        notes = [note for note in check.notes if "left out" in note]
        assert [note.partition(" numbers")[0] for note in notes] == [left_out] * bool(left_out)
    np.savez(tmp_path / "in.npz", **arrays)
    given = ("--inputs", tmp_path / "in.npz")
    model, out = saved(text), tmp_path / "grad.onnx"
    for words in (("validate", model, "--grad"), ("gradient", model, "--check", "-o", out)):
        result = cli.done(*words, *given)
        assert ("left out" in " ".join(result.split())) == bool(left_out)


@pytest.mark.parametrize("name", ["NaN of one weight", "one branch", "a mask"])
@pytest.mark.parametrize("factor", [1.01, NAN])
def test_a_wrong_gradient_is_found_among_them(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that makes NaN of finite numbers is wrong, but where the inputs may excuse it."""
    text, feeds, compared, _ = ROWS[name]
    kind = {"one branch": "Sin", "a mask": "Softmax"}.get(name, "Mul")
    right = ops.OPS["", kind]

    def wrong(op, node, dys):
        return [None if g is None else op.Mul(g, factor) for g in right.grad(op, node, dys)]

    monkeypatch.setitem(ops.OPS, ("", kind), dataclasses.replace(right, grad=wrong))
    arrays = {k: np.float32(a) for k, a in feeds.items()}
    check = check_gradients(text_model(text), feeds=arrays)
    if factor == factor or name == "a mask":
        assert {e.tensor for e in check.failed} == compared
    else:
        assert "left out" in check.notes[-1]
