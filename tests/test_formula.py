"""Formulas in the bodies of operators: the nodes that they stand for, and what they leave alone."""

import onnx_ir as ir
import pytest

from onnx_fuse.ir.build import Builder
from onnx_fuse.ops.formula import emitted, written_out
from onnx_fuse.ops.shape_ops import Writer

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
    "a number has the type of what is beside it, once a formula": (
        "y = Where(x < 0, @alpha, 1) * (1 - x)",
        "y_1 = Constant <value: tensor = double {0.0}> ()\ny_2 = CastLike (y_1, x)\n"
        "y_3 = Less (x, y_2)\ny_4 = Constant <value_float: float = @alpha> ()\n"
        "y_5 = CastLike (y_4, x)\ny_6 = Constant <value: tensor = double {1.0}> ()\n"
        "y_7 = CastLike (y_6, x)\ny_8 = Where (y_3, y_5, y_7)\ny_9 = Sub (y_7, x)\n"
        "y = Mul (y_8, y_9)",
    ),
    "numbers alone make a number": (
        "y = -x * (2 * -0.5)",
        "y_1 = Neg (x)\ny_2 = Constant <value: tensor = double {-1.0}> ()\n"
        "y_3 = CastLike (y_2, y_1)\ny = Mul (y_1, y_3)",
    ),
    "a number without end": (
        "y = Max(x, -inf)",
        "y_1 = Constant <value: tensor = double {-inf}> ()\n"
        "y_2 = CastLike (y_1, x)\ny = Max (x, y_2)",
    ),
    "two formulas in a line": ("a = x * x; y = a + a", "a = Mul (x, x)\ny = Add (a, a)"),
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


def test_formulas_are_what_a_builder_makes_of_them() -> None:
    """Numbers in the type of x, attributes by the standard's defaults; a factor of 1 is none."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.DOUBLE))
    op, node = Builder(), ir.node("ThresholdedRelu", [x])
    text = "half = 1 / 2; m = ReduceMax <keepdims = 0> (x, [1]); Where(m > half, m * @alpha, 0)"
    y = emitted(text, op, node, x=x)
    assert [n.op_type for n in op.nodes] == [
        *("Constant", "ReduceMax", "Constant", "Greater", "Constant", "Where")
    ]
    assert [(v.const_value.dtype.name, v.const_value.numpy().tolist()) for n in op.nodes
            for v in n.outputs if n.op_type == "Constant" and v.const_value] == [
        ("INT64", [1]), ("DOUBLE", 0.5), ("DOUBLE", 0.0)
    ]  # fmt: skip
    assert op.nodes[1].attributes["keepdims"].value == 0
    assert y.producer().inputs[1] is op.nodes[1].outputs[0]


def test_attributes_may_be_numbers_without_end() -> None:
    op = Builder()
    emitted("ThresholdedRelu <alpha = -inf> (x); Elu <alpha = inf> (x)", op, x=ir.Value(name="x"))
    assert [node.attributes["alpha"].value for node in op.nodes] == [float("-inf"), float("inf")]


def test_a_line_may_give_several_values_and_name_several_outputs() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    op = Writer()
    low, y = op.formula("low, high = Split <num_outputs = 2> (x); y = high * 2; low, y", x=x)
    assert [n.op_type for n in op.nodes] == ["Split", "Constant", "Mul"]
    assert low is op.nodes[0].outputs[0]
    assert y is op.nodes[2].outputs[0]
    assert op.nodes[2].inputs[0] is op.nodes[0].outputs[1]


def test_a_builder_makes_nodes_of_operators_alone() -> None:
    with pytest.raises(AttributeError, match="size_of"):
        Builder().size_of(None, 0)


def test_numbers_of_patterns_have_no_type() -> None:
    assert written_out("y = x + 3", typed=False) == (
        "y_1 = Constant <value: tensor = double {3.0}> ()\ny = Add (x, y_1)"
    )


def test_text_that_is_no_formula_makes_no_nodes() -> None:
    with pytest.raises(ValueError, match="this is no formula: x \\* "):
        emitted("x * ", Builder(), x=None)


def test_a_formula_that_is_not_closed_is_left_for_the_parser_to_refuse() -> None:
    assert written_out("y = Add (a, b * c") == "y = Add (a, b * c"
