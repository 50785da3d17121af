"""Rules as text: what a formula matches, what it becomes, and the reasons of near misses."""

import pytest
from support import table

from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.patterns import Formula, Spellings, text_rule
from onnx_fuse.ops.rules import Rewriter, nodes_in_order
from onnx_fuse.rewrite.canonicalize import clean

SWISH = Formula("x * Sigmoid (x)", "Swish (x)")
SLOPED = Formula("x * Sigmoid (x * alpha)", "Swish <alpha: float = @alpha> (x)")
HALF = Formula("0.5 * x * (Tanh (x) + 1)", "Mish (x)")
CLIPPED = Formula("Clip (x + 3, 0, 6) * 0.1", "Celu (x)")
MAXIMUM = Formula("Max (Neg (x), z)", "PRelu (z, x)")
HARD = Formula("HardSigmoid <alpha: float = @a> (Neg (x))", "Celu <alpha: float = @a> (x)")
NUMBERS = {
    "zero": 0, "minus": "-0.0", "tenth": 0.1, "quarter": 0.25, "half": 0.5, "near": 0.5005,
    "one": 1, "two": 2, "three": 3, "six": 6,
}  # fmt: skip

ROWS = table(globals(), at=1)("""
as it is written: SWISH, "Swish"
  s = Sigmoid (x) y = Mul (x, s)
in another order: SWISH, "Swish"
  s = Sigmoid (x) y = Mul (s, x)
of another value: SWISH, "Sigmoid Mul"
  s = Sigmoid (z) y = Mul (x, s)
of a product that is read twice: SWISH, "Mul Swish"
  p = Mul (x, z) s = Sigmoid (p) y = Mul (s, p)
products in any order: HALF, "Mish"
  t = Tanh (x) u = Add (one, t) h = Mul (u, x) y = Mul (h, half)
a quotient for a product: HALF, "Mish"
  t = Tanh (x) u = Add (t, one) h = Div (u, two) y = Mul (h, x)
constants folded together: HALF, "Mish"
  t = Tanh (x) u = Add (t, one) q = Mul (x, quarter) h = Mul (u, q) y = Mul (h, two)
a sum that loses the sign of a zero: HALF, "t: unlike Mish"
  t = Tanh (x) h = Mul (x, half) p = Mul (h, t) y = Add (p, h)
a constant that is near: HALF, "t: near Mish"
  t = Tanh (x) u = Add (t, one) h = Mul (u, x) y = Mul (h, near)
a constant that is not near: HALF, "Tanh Add Mul Mul"
  t = Tanh (x) u = Add (t, one) h = Mul (u, x) y = Mul (h, two)
the constant of an operator: CLIPPED, "Celu"
  a = Add (x, three) c = Clip (a, zero, six) y = Mul (c, tenth)
a zero of another sign: CLIPPED, "c: near Celu"
  a = Add (x, three) c = Clip (a, minus, six) y = Mul (c, tenth)
a constant for an attribute: SLOPED, "Swish 2"
  p = Mul (two, x) s = Sigmoid (p) y = Mul (x, s)
a constant that no attribute holds: SLOPED, f"s: not-float32 factor {1 / 3} float"
  p = Div (x, three) s = Sigmoid (p) y = Mul (x, s)
an attribute: HARD, "Celu 0.25"
  n = Neg (x) y = HardSigmoid <alpha = 0.25> (n)
an attribute by default: HARD, "Celu 0.2"
  n = Neg (x) y = HardSigmoid (n)
an operator whose operands may change places: MAXIMUM, "PRelu"
  n = Neg (x) y = Max (z, n)
an inner value that is an output: SWISH, "v: other-readers 'v'"
  v = Sigmoid (x) y = Mul (x, v)
""")


@pytest.mark.parametrize("row", ROWS)
def test_a_formula_matches(row: str) -> None:
    formula, nodes, expected = ROWS[row]
    constants = ", ".join(f"float {name} = {{{value}}}" for name, value in NUMBERS.items())
    more = ", float[B,8] v" if " v = " in f" {nodes}" else ""
    model = text_model(
        f"g (float[B,8] x, float[B,8] z) => (float[B,8] y{more}) <{constants}> {{ {nodes} }}"
    )
    for value in (v for node in model.graph for v in node.outputs):
        value.dtype, value.shape = model.graph.inputs[0].dtype, model.graph.inputs[0].shape
    rw, rule = Rewriter(model), text_rule("Test", 0, [formula], "readers")
    for node in nodes_in_order(model.graph, rule.anchors):
        rule.apply(rw, node)
    clean(model)
    said = [
        " ".join([f"{stay.nodes[0]}: {stay.reason.code}", *(str(v) for _, v in stay.reason.values)])
        for stay in rw.refusals
    ]
    names = [
        " ".join([n.op_type, *(f"{a.value:.6g}" for a in n.attributes.values())])
        for n in model.graph
    ]
    assert expected in (" ".join(names), *said)


@pytest.mark.parametrize(
    ("nodes", "fixed_rank", "root"),
    [
        ("s = Sqrt (x) y = Div (z, s)", True, "x"),
        ("p = Pow (x, half) i = Identity (p) y = Div (z, i)", True, "x"),
        ("p = Pow (x, wide) y = Div (z, p)", False, "x"),
        ("p = Pow (x, wide) y = Div (z, p)", True, None),
        ("p = Pow (x, two) y = Div (z, p)", True, None),
    ],
)
def test_an_operator_stands_for_several_formulas(
    nodes: str, fixed_rank: bool, root: str | None
) -> None:
    model = text_model(
        "g (float[8] x, float[8] z) => (float[8] y) <float half = {0.5}, float two = {2}, "
        f"float[1,1] wide = {{0.5}}> {{ {nodes} }}"
    )
    table = {"Root": {"Sqrt (v)": None, "Pow (v, 0.5)": lambda values: values["v"].name == "x"}}
    spellings = Spellings(table, fixed_rank=fixed_rank)
    for value in (v for node in model.graph for v in node.outputs):
        value.dtype, value.shape = model.graph.inputs[0].dtype, model.graph.inputs[0].shape
    values = spellings.find("a / Root (b)", model.graph.outputs[0])
    assert (None if values is None else values["b"].name) == root
