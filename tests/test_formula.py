"""Formulas in the bodies of operators: the nodes that they stand for, and what they leave alone."""

import pytest

from onnx_fuse.ops.formula import written_out

FORMULAS = {
    "the sign that binds more comes first": ("y = a + b * c", "y_1 = Mul (b, c)\ny = Add (a, y_1)"),
    "equal signs from the left": ("y = a - b - c", "y_1 = Sub (a, b)\ny = Sub (y_1, c)"),
    "brackets": ("y = a / (b - c)", "y_1 = Sub (b, c)\ny = Div (a, y_1)"),
    "a call within a call": (
        "y = Reshape <allowzero: int = 1> (Neg (x), [0, -1])",
        "y_1 = Neg (x)\ny_2 = Constant <value_ints: ints = [0, -1]> ()\n"
        "y = Reshape <allowzero: int = 1> (y_1, y_2)",
    ),
    "several results": (
        "a, b = Split <axis = -1, num_outputs = 2> (x * s)",
        "a_1 = Mul (x, s)\na, b = Split <axis = -1, num_outputs = 2> (a_1)",
    ),
    "a list alone": ("first = [0]", "first = Constant <value_ints: ints = [0]> ()"),
}
TEXTS = (
    "Update <rate: float = 0.1> (w, g) => (w1) {",
    "h_T, y = Scan <num_scan_inputs = 2, body = step (h, z) => (hn, yt) {",
    "full = Conv <strides: ints = @dilations,",
    "zero = Constant <value = int64 {0}>",
)


@pytest.mark.parametrize("case", FORMULAS)
def test_a_formula_is_its_nodes_in_order(case: str) -> None:
    formula, nodes = FORMULAS[case]
    assert written_out(f"  {formula}") == nodes


@pytest.mark.parametrize("line", TEXTS)
def test_other_lines_stay_as_they_are(line: str) -> None:
    assert written_out(line) == line


def test_a_formula_that_is_not_closed_is_left_for_the_parser_to_refuse() -> None:
    assert written_out("y = Add (a, b * c") == "y = Add (a, b * c"
