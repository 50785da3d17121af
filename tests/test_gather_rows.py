"""Moves of whole rows to known places become one Gather, and nothing else does."""

import numpy as np
import onnx_ir as ir
import pytest
from test_attention import session

from onnx_fuse import rewrite
from onnx_fuse.ir.build import text_model
from onnx_fuse.rewrite.gather_rows import GATHER_ROWS


def ints(name: str, *values: int) -> str:
    return f"{name} = Constant <value_ints = {list(values)}> () "


def roll(x: str, y: str, by: int, axis: int) -> str:
    """torch.roll as its exporters write it."""
    at = f"{y}{axis}"
    return (
        ints(f"a{at}", axis) + ints(f"s{at}", by) + ints(f"e{at}", 2**62) + ints(f"z{at}", 0)
        + f"h{at} = Slice ({x}, s{at}, e{at}, a{at}) t{at} = Slice ({x}, z{at}, s{at}, a{at}) "
        + f"{y} = Concat <axis = {axis}> (h{at}, t{at}) "
    )  # fmt: skip


PAD = ints("p", 0, 0, 0, 0, 0, 1, 2, 0) + "x1 = Pad (x0, p) "
NO_PAD = "x1 = Identity (x0) "
FILL = (
    ints("i1", *([1, 1, 1, 1, 0, 0] * 5), *([0] * 6))
    + "f1 = Cast <to = 9> (i1) " + ints("m1", 1, 6, 6, 1) + "g1 = Reshape (f1, m1) "
    "row = Constant <value = T[4] {3, 0, 1, 2}> () x1 = Where (g1, y1, row) "
)  # fmt: skip
ROLL = roll("x1", "x2", 2, 1) + roll("x2", "x3", 1, 2)
WINDOWS = (
    ints("w", -1, 2, 3, 3, 2, 4) + "x4 = Reshape (x3, w) "
    "x5 = Transpose <perm = [0, 1, 3, 2, 4, 5]> (x4) "
    + ints("v", -1, 6, 4)
    + "x6 = Reshape (x5, v) "
)
# sizes of x0 [B,.,.,4], inner nodes from it to x6, how many Gathers there are then, moves left
ROWS: dict[str, tuple[str, str, int, str]] = {
    "padded, rolled, in windows": ("5,4", PAD + ROLL + WINDOWS, 1, ""),
    "rolled, in windows": ("6,6", NO_PAD + ROLL + WINDOWS, 1, ""),
    "rolled alone": ("6,6", NO_PAD + ROLL + "x6 = Identity (x3) ", 1, ""),
    "windows alone": ("6,6", NO_PAD + "x3 = Identity (x1) " + WINDOWS, 0, "Transpose"),
    "rows joined to longer ones": (
        "6,6",
        NO_PAD + ROLL + ints("w", 0, 9, 16) + "x6 = Reshape (x3, w) ",
        1,
        "",
    ),
    "padded by another number": (
        "5,4",
        "one = Constant <value = T[1] {1}> () " + PAD.replace("(x0, p)", "(x0, p, one)") + ROLL
        + WINDOWS,
        1,
        "Pad",
    ),
    "padded by reflection": (
        "5,4", PAD.replace("Pad (", 'Pad <mode = "reflect"> (') + ROLL + WINDOWS, 1, "Pad"
    ),
    "padded by a row": ("5,4", PAD.replace("x1 =", "y1 =") + FILL + ROLL + WINDOWS, 1, ""),
    "padded by a row, some of which are zeros": (
        "5,4", PAD.replace("x1 =", "y1 =") + FILL.replace("0, 0]", "1, 1]") + ROLL
        + WINDOWS,
        1,
        "Pad",
    ),
    "columns that roll": ("6,6", NO_PAD + ROLL + roll("x3", "x6", 1, 3), 1, "Slice Slice Concat"),
    "a batch that is cut": ("6,6", NO_PAD + ROLL + roll("x3", "x6", 1, 0), 1, "Slice Slice Concat"),
    "read in between": (
        "6,6", NO_PAD + ROLL + "u = Neg (x2) x6 = Concat <axis = 0> (x3, u) ", 2, "Concat"
    ),
    "places not known": (
        "6,6",
        NO_PAD + ROLL.replace("Slice (x1, sx21,", "Slice (x1, n,") + WINDOWS,
        0,
        "Slice Slice Slice Slice Concat Concat Transpose",
    ),
}  # fmt: skip


def model_of(row: str, kind: str, batch: str) -> ir.Model:
    sizes, moves, *_ = ROWS[row]
    text = (
        f"agraph ({kind}[{batch},{sizes},4] x, int64[1] n) => ({kind}[A,C,D] y) "
        f"{{ x0 = Identity (x) {moves} y = Neg (x6) }}"
    ).replace("T[", f"{kind}[")
    if kind == "bool":
        text = text.replace("Neg", "Not")
    model = text_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    model.graph.outputs[0].shape = None
    return model


@pytest.mark.parametrize("batch", ["B", "3", "1"])
@pytest.mark.parametrize("kind", ["float", "float16", "double", "int64", "bool"])
@pytest.mark.parametrize("row", ROWS)
def test_gather_rows(row: str, kind: str, batch: str) -> None:
    model = model_of(row, kind, batch)
    if kind == "bool" and "padded" in row:
        pytest.skip("onnxruntime pads no booleans")
    plain = session(model)
    report = rewrite.optimize(model)
    left = [n.op_type for n in model.graph if n.op_type in ("Pad", "Slice", "Concat", "Transpose")]
    if row != "a batch that is cut" or batch == "B":  # a fixed batch is rows like any other
        assert report.fusions.get(GATHER_ROWS, 0) == ROWS[row][2]
        assert sorted(left) == sorted(ROWS[row][3].split())
    found = session(model)
    for size in (1, 2, 5, 0) if batch == "B" else (int(batch),):
        high, wide = map(int, ROWS[row][0].split(","))
        x = np.random.default_rng(1).standard_normal((size, high, wide, 4)) * 3
        x.reshape(-1)[: 5 * (size > 0)] = [np.nan, np.inf, -np.inf, -0.0, 0.0][: 5 * (size > 0)]
        with np.errstate(invalid="ignore"):
            x = x.astype({"float": "float32", "double": "float64"}.get(kind, kind))
        feeds = {"x": x, "n": np.array([2], np.int64)}
        if size == 0 and "Reshape" in ROWS[row][1]:
            continue  # onnxruntime finds no -1 beside no elements
        expected, got = plain(feeds), found(feeds)
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def test_it_is_turned_off_and_not_for_training() -> None:
    for how in ({"level": 1}, {"skip": [GATHER_ROWS]}, {"training": True}):
        model = model_of("padded, rolled, in windows", "float", "B")
        assert GATHER_ROWS not in rewrite.optimize(model, **how).fusions  # type: ignore[arg-type]


def test_an_output_in_the_chain_ends_it() -> None:
    model = model_of("rolled, in windows", "float", "B")
    inner = next(n.outputs[0] for n in model.graph if n.op_type == "Concat")
    model.graph.outputs.append(inner)
    names = [v.name for v in model.graph.outputs]
    rewrite.optimize(model)
    assert [v.name for v in model.graph.outputs] == names
    x = np.random.default_rng(1).standard_normal((2, 6, 6, 4)).astype(np.float32)
    feeds = {"x": x, "n": np.array([2], np.int64)}
    want = np.roll(x, -2, 1)
    np.testing.assert_array_equal(session(model, 1)(feeds), want)
