"""Sums of rows: what is written of a table, positions in order, and sums onto another gradient."""

import numpy as np
import pytest
from lowering import program_of
from support import normal

from onnx_fuse import gradient
from onnx_fuse.autodiff.load import load
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates, refusals, select
from onnx_fuse.program.data_movement import PointwiseSums, ScatterND
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS

H200 = CHIPS["H200"]
RNG = np.random.default_rng(0)
IDS = RNG.integers(-40, 40, (9, 11))
ROWS = RNG.standard_normal((9, 11, 6)).astype(np.float32)
ADD = 'k = Unsqueeze (i, last) y = ScatterND <reduction = "add"> (z, k, u)'


def scatters(program) -> list[ScatterND]:
    return [c.problem for c in program.calls if isinstance(c.problem, ScatterND)]


def sums(rows: int) -> np.ndarray:
    found = np.zeros((rows, 6))
    np.add.at(found, IDS.reshape(-1), ROWS.reshape(-1, 6).astype(np.float64))
    return found


@pytest.mark.parametrize(
    ("zero", "rows", "fresh"),
    [("0.0", 40, True), ("0.0", 5000, True), ("-0.0", 40, False), ("1.0", 40, False)],
)
def test_zeros_are_written_with_the_sums(zero: str, rows: int, fresh: bool) -> None:
    """Not where they would be -0.0, which a row that nothing is added to keeps."""
    text = (
        f"agraph (int64[9,11] i, float[9,11,6] u) => (float[{rows},6] y) <int64[1] last = {{-1}}, "
        f"int64[2] shape = {{{rows}, 6}}> "
        f"{{ z = ConstantOfShape <value = float[1] {{{zero}}}> (shape) {ADD} }}"
    )
    feeds = {"i": IDS, "u": ROWS}
    program = program_of(load(text_model(text)), feeds)
    assert [p.fresh for p in scatters(program)] == [fresh]
    assert len(program.calls) == 2 - fresh
    got = interpret(program, feeds, {})["y"]
    np.testing.assert_allclose(got, sums(rows) + float(zero), rtol=0, atol=1e-5)  # float32 sums
    untouched = ~np.isin(np.arange(rows), IDS % rows)
    assert (np.signbit(got[untouched]) == (zero == "-0.0")).all()


def test_a_looked_up_table_that_is_multiplied_by_has_its_gradients_summed_in_one_place() -> None:
    """The product's gradient of w is what the rows are added to: no pass over w for their sum."""
    text = (
        "agraph (int64[9,11] i, float[9,11,300] v, float[9,11,300] u, float[40,99] x) => "
        "(float[40,300] y) <int64[1] last = {-1}, int64[2] shape = {40, 300}, "
        "int64[2] flat = {99, 300}> { r = Reshape (v, flat) "
        f"dw = MatMul (x, r) z = ConstantOfShape (shape) {ADD.replace('y =', 's =')} "
        "g = Add (dw, s) y = Neg (g) }"
    )
    shapes = {"v": (9, 11, 300), "u": (9, 11, 300), "x": (40, 99)}
    feeds = normal(shapes) | {"i": IDS}
    program = program_of(load(text_model(text)), feeds)
    assert [p.fresh for p in scatters(program)] == [False]
    assert [c.kernel for c in program.calls] == ["MatMul", "ScatterND", "Neg"]
    want = feeds["x"].astype(np.float64) @ feeds["v"].reshape(99, 300)
    np.add.at(want, IDS.reshape(-1), feeds["u"].reshape(99, 300).astype(np.float64))
    got = interpret(program, feeds, {})["y"]
    np.testing.assert_allclose(got, -want, rtol=0, atol=1e-4)  # products and sums in float32


POSITIONS = {
    "a range": "k = Range (zero, size, one)",
    "a slice of a constant": "e = Unsqueeze (size, axis) k = Slice (all, axis, e, axis)",
    "one after the first": "n = Add (size, one) k = Range (one, n, one)",
}


@pytest.mark.parametrize("how", POSITIONS)
def test_the_gradient_of_positions_is_a_column_sum(how: str) -> None:
    places = ",".join(map(str, range(16)))
    text = (
        "agraph (float[B,T,6] x, float[16,6] w) => (float[B,T,6] y) <int64 zero = {0}, "
        f"int64 one = {{1}}, int64[1] axis = {{0}}, int64[16] all = {{{places}}}> "
        "{ s = Shape <start = 1, end = 2> (x) size = Squeeze (s, axis) "
        f"{POSITIONS[how]} p = Gather (w, k) y = Mul (x, p) }}"
    )
    model = gradient(text_model(text), wrt=["w"])
    shapes = {"x": (3, 9, 6), "w": (16, 6), "y.grad": (3, 9, 6)}
    feeds = {n: RNG.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    program = program_of(load(model), feeds)
    assert not scatters(program)
    found = [type(c.problem) for c in program.calls]
    assert PointwiseSums in found, found  # the product with dy, and its sum over the batch


def test_what_sums_of_rows_are_made_by() -> None:
    """One launch that sorts where there are many, passes where there are more, a search of few."""
    grouped, last, passes, searched = (k.name for k in candidates("ScatterND"))
    usual = {"dims": (50257,), "inner": 768, "dtype": "bfloat16", "index": "int64"}
    for problem, kernel in (
        (ScatterND(16384, **usual, reduction="add", fresh=True), grouped),
        (ScatterND(16384, **usual, reduction="add"), grouped),
        (ScatterND(3, **usual, reduction="add", fresh=True), grouped),
        (ScatterND(3, **usual, reduction="add"), searched),
        (ScatterND(16384, **usual, reduction="max"), grouped),
        (ScatterND(16384, **usual), last),
        (ScatterND(3, **usual), searched),
        (ScatterND(50000, (200000,), 1, "float32", "int64", "add"), passes),
        (ScatterND(1 << 20, (1 << 20, 1 << 9), 1, "float32", "int64", "add"), passes),
        (ScatterND(1 << 20, (1 << 20, 1 << 12), 1, "float32", "int64", "add"), searched),
    ):
        choice = select("ScatterND", problem, H200)
        assert choice.kernel.name == kernel, (problem, refusals("ScatterND", problem, H200))
