"""Rotary embeddings half by half: the same bits, fewer passes, and what is left as it is."""

import llama
import numpy as np
import pytest
from lowering import program_of
from support import normal, run

from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.rewrite.rotation import split_rotations
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model

HEAD = """agraph (float[B,2,T,6] x, float[T,6] c, float[T,6] s) => (float[B,2,T,6] y)
<int64[1] zero = {0}, int64[1] half = {3}, int64[1] back = {-3}, int64[1] end = {99999},
int64[1] last = {-1}, int64[1] axis = {3}, int64[2] both = {3, 3}> {"""
SLICES = "f = Slice(x, zero, half, last) g = Slice(x, half, end, last) n = Neg(g) "
TURN = "t = Concat<axis=-1>(n, f) "
SUM = "a = Mul(x, c) b = Mul(t, s) y = Add(a, b) }"
ROWS = {
    "slices": (SLICES + TURN + SUM, 1),
    "a split": ("f, g = Split<axis=3>(x, both) n = Neg(g) " + TURN + SUM, 1),
    "other spellings": (
        "f = Slice(x, zero, half, axis) g = Slice(x, back, end, axis) n = Neg(g) "
        "t = Concat<axis=3>(n, f) a = Mul(c, x) b = Mul(s, t) y = Add(b, a) }",
        1,
    ),
    "turned the other way": (
        "f = Slice(x, zero, half, last) g = Slice(x, half, end, last) n = Neg(f) "
        "t = Concat<axis=-1>(g, n) " + SUM,
        0,
    ),
    "read twice": (SLICES + TURN + "a = Mul(x, c) b = Mul(t, s) d = Add(a, b) y = Add(d, t) }", 0),
    "another tensor's": (SLICES + TURN + "e = Exp(x) a = Mul(e, c) b = Mul(t, s) y = Add(a, b) }",
                         0),
    "thirds": (
        "f = Slice(x, zero, half, last) g = Slice(x, back, end, last) n = Neg(g) e = Exp(f) "
        "t = Concat<axis=-1>(n, e) " + SUM,
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_rotation_by_halves_has_the_same_bits(name: str) -> None:
    text, count = ROWS[name]
    model = text_model(HEAD + text)
    infer_shapes(model)
    feeds = normal({"x": (2, 2, 5, 6), "c": (5, 6), "s": (5, 6)})
    feeds["x"].reshape(-1)[:12] = [0, -0.0, np.inf, -np.inf, np.nan, 1e38, *[-0.0] * 6]
    feeds["s"][1] = [0, -0.0, 1e38, np.inf, 1, -1]
    (want,) = run(model, feeds, optimized=True)
    assert split_rotations(model) == count
    assert any(n.op_type == "Neg" for n in model.graph) == (not count)
    (got,) = run(model, feeds, optimized=True)
    np.testing.assert_array_equal(got, want)
    zeros = want == 0
    np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]))


def test_a_step_of_a_llama_copies_no_halves() -> None:
    """Forward and backward are a call for both halves, which writes to where they are read."""
    graph, spec = training_model(
        llama.build(llama.Config()), loss="cross_entropy", optimizer=optim.AdamW(), level=2,
        fused=True, precision="bf16",
    )  # fmt: skip
    feeds = {s.name: np.asarray(s.initial) for s in spec.states}
    feeds |= {n: np.zeros((2, 8), np.int64) for n in ("input_ids", "labels")}
    feeds |= {spec.lr: np.array(0.1, np.float32), spec.step: np.array(1)}
    calls = program_of(graph, feeds, state={s.next: s.name for s in spec.states if s.next}).calls
    halves = [c for c in calls if any(t.shape[-1:] == (8,) for _, t in c.writes)]
    assert len(halves) == 2 * 2 * 2  # blocks, q and k, forward and backward
    assert {c.kernel for c in halves} == {"Mul+Mul+Sub+Mul+Mul+Add", "Mul+Mul+Add+Mul+Neg+Mul+Add"}
