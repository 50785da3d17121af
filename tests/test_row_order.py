"""Attention whose module turns its rows around: the turns go, and the numbers stay."""

import numpy as np
import pytest
from lowering import program_of
from support import assert_same, drawn, stock

from onnx_fuse import rewrite
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.call import Call

HEADS, WIDTH, TOKENS = 4, 32, 7


def ints(name: str, *values: int) -> str:
    return f"{name} = Constant<value = int64[{len(values)}] {{{','.join(map(str, values))}}}>()\n"


def attention(batch: int, also: str = "") -> str:
    """A block of PyTorch's MultiheadAttention with the batch first, as its exporter writes it."""
    rows, each = TOKENS * batch, WIDTH // HEADS
    parts = "".join(
        f"i{n} = Constant<value = int64 {{{i}}}>() {n}0 = Gather<axis = 0>(parts, i{n})\n"
        f"{n}1 = Reshape({n}0, heads) {n}2 = Transpose<perm = [1,0,2]>({n}1)\n"
        for i, n in enumerate("qkv")
    )
    return (
        f"agraph (float[{batch},{TOKENS},{WIDTH}] x, float[{WIDTH}] g, float[{WIDTH}] b,"
        f" float[{WIDTH},{3 * WIDTH}] w, float[{3 * WIDTH}] c, float[{WIDTH},{WIDTH}] u,"
        f" float[{WIDTH}] d) => (float[{batch},{TOKENS},{WIDTH}] y"
        f"{also and ', float[a,m,n] z'}) {{\n"
        + ints("split", TOKENS, batch, 3, WIDTH)
        + ints("zero", 0)
        + ints("last", -2)
        + ints("heads", TOKENS, batch * HEADS, each)
        + ints("four", batch, HEADS, TOKENS, each)
        + ints("turned", batch, HEADS, each, TOKENS)
        + ints("flat", rows, WIDTH)
        + ints("three", TOKENS, batch, WIDTH)
        + "h = LayerNormalization(x, g, b) t = Transpose<perm = [1,0,2]>(h)\n"
        "m = MatMul(t, w) a = Add(m, c) s = Reshape(a, split) e = Unsqueeze(s, zero)\n"
        "f = Transpose<perm = [3,1,2,0,4]>(e) parts = Squeeze(f, last)\n"
        + parts
        + "q = Reshape(q2, four) v = Reshape(v2, four)\n"
        "k3 = Transpose<perm = [0,2,1]>(k2) k = Reshape(k3, turned)\n"
        "r = Constant<value = float {0.6}>() qs = Mul(q, r) ks = Mul(k, r) l = MatMul(qs, ks)\n"
        "p = Softmax<axis = -1>(l) o = MatMul(p, v) o2 = Transpose<perm = [2,0,1,3]>(o)\n"
        "o3 = Reshape(o2, flat) n = Gemm<transB = 1>(o3, u, d) n2 = Reshape(n, three)\n"
        f"n3 = Transpose<perm = [1,0,2]>(n2) y = Add(n3, x) {also} }}"
    )


def optimized(text: str) -> tuple[list[np.ndarray], list[np.ndarray], list[str], list[Call]]:
    """What onnxruntime makes of the graph before and after, its operators, and the calls."""
    model = text_model(text)
    feeds = drawn(model)

    def run() -> list[np.ndarray]:
        return list(stock(model, optimized=True).run(None, feeds))

    before = run()
    rewrite.optimize(model)
    return before, run(), [n.op_type for n in model.graph], list(program_of(model, feeds).calls)


@pytest.mark.parametrize("batch", [1, 3])
def test_no_row_is_copied(batch: int) -> None:
    before, after, ops, calls = optimized(attention(batch))
    np.testing.assert_array_equal(before[0], after[0])
    assert {"Sdpa", "LayerNormGemm"} <= set(ops)
    assert not [str(c) for c in calls if c.expression is not None], "a copy, or an Add by itself"


def test_rows_that_others_read_stay_as_they_are() -> None:
    """The turned rows are an output, and so is what the heads are merged to."""
    for also in ("z = Neg(n2)", "z = Neg(q2)", "z = Reshape(o3, three)"):
        before, after, _, _ = optimized(attention(3, also))
        assert_same(before, after)


# a chain of views: the shape of x, then perms (tuples) and shapes (lists)
CHAINS: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...] | list[int], ...], int], ...] = (
    ((7, 3, 32), ([7, 12, 8], (1, 0, 2), [3, 4, 7, 8]), 2),
    ((7, 1, 32), ([7, 4, 8], (1, 0, 2), [1, 4, 7, 8]), 2),
    ((7, 3, 32), ([7, 12, 8], (1, 0, 2), (0, 2, 1), [3, 4, 8, 7]), 2),
    ((6, 4), ([2, 3, 4], (1, 0, 2), [6, 4]), 3),  # the result is no view of x
    ((6, 4), ([4, 6], (1, 0), [4, 6]), 3),  # the sizes have no common factors
    ((1, 1, 1), ([1, 1], (1, 0), [1]), 1),
    ((2, 3, 4), ([24, 1], (1, 0), [2, 3, 4]), 0),
)


@pytest.mark.parametrize("row", range(len(CHAINS)))
def test_views_that_undo_each_other(row: int) -> None:
    shape, steps, left = CHAINS[row]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    text, want, name = "", x, "x"
    for i, step in enumerate(steps):
        perm = isinstance(step, tuple)
        want = want.transpose(step) if perm else want.reshape(step)
        call = f"Transpose<perm = {list(step)}>({name})" if perm else f"Reshape({name}, s{i})"
        text += ("" if perm else ints(f"s{i}", *step)) + f"v{i} = {call}\n"
        name = f"v{i}"
    graph = f"agraph (float{list(shape)} x) => (float{list(want.shape)} y)"
    model = text_model(f"{graph} {{ {text} y = Neg({name}) }}")
    rewrite.optimize(model)
    views = [n.op_type for n in model.graph if n.op_type in ("Reshape", "Transpose")]
    (found,) = stock(model, optimized=True).run(None, {"x": x})
    np.testing.assert_array_equal(found, -want)
    assert len(views) == left, views
