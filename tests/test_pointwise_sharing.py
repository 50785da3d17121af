"""Pointwise calls that read the same tensors: joined, or their operands made again."""

from itertools import product

import numpy as np
import pytest
from lowering import program_of
from onnx.reference import ReferenceEvaluator
from support import drawn, table

from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.passes.pointwise_fusion import _meet

ROWS = table(globals(), at=2)("""
halves of a rotation: "float[6,8] x, float[4] c, float[4] s", "float[6,8] y",
["Mul+Mul+Sub+Mul+Mul+Add"]
  a, b = Split <axis = -1, num_outputs = 2> (x) ac = Mul (a, c) bs = Mul (b, s) first = Sub (ac, bs)
  bc = Mul (b, c) as = Mul (a, s) second = Add (bc, as) y = Concat <axis = -1> (first, second)
a factor that a product stands before: "float[6,8] g, float[6,8] u, float[8,8] w",
"float[6,8] dg, float[6,8] du, float[6,8] z", ["Sigmoid+Mul", "Sigmoid+Mul+Mul+Mul"]
  s = Sigmoid (g) h = Mul (s, u) z = MatMul (h, w) dh = MatMul (z, w) du = Mul (dh, s)
  hu = Mul (dh, u) dg = Mul (hu, g)
what is made is also an output: "float[6,8] g, float[6,8] u, float[8,8] w",
"float[6,8] s, float[6,8] du", ["Sigmoid", "Sigmoid+Mul+Mul"]
  s = Sigmoid (g) z = MatMul (s, w) gz = Mul (z, g) du = Mul (gz, s)
one reads what the other made: "float[6,8] x, float[8,8] w", "float[6,8] y, float[6,8] z", ["Exp",
"Div"]
  y = Exp (x) p = MatMul (y, w) z = Div (p, x)
only a row in common: "float[6,8] x, float[5,8] v, float[8] b", "float[6,8] y, float[5,8] z",
["Mul", "Sub"]
  y = Mul (x, b) z = Sub (v, b)
""")


@pytest.mark.parametrize("name", ROWS)
def test_calls_that_read_the_same_tensors(name: str) -> None:
    inputs, outputs, nodes, expected = ROWS[name]
    model = text_model(f"agraph ({inputs}) => ({outputs}) {{ {nodes} }}")
    feeds = drawn(model)
    program = program_of(model, feeds)
    steps = [[s.name for s in c.expression.steps] for c in program.calls if c.expression]
    assert ["+".join(names) for names in steps] == expected
    got = interpret(program, feeds, {})
    answers = ReferenceEvaluator(to_proto(model)).run(None, feeds)
    for value, answer in zip(model.graph.outputs, answers, strict=True):
        np.testing.assert_allclose(got[value.name], answer, rtol=1e-5, atol=1e-6)


def test_views_that_meet_are_found() -> None:
    """Against the sets of elements; a view that is said to be apart never shares one."""
    rng, apart = np.random.default_rng(0), 0
    for _ in range(3000):
        rank = int(rng.integers(1, 4))
        shape, strides = (tuple(rng.integers(low, 13, rank).tolist()) for low in (1, 0))
        shape = tuple(size % 4 + 1 for size in shape)
        offsets = rng.integers(0, 14, 2).tolist()
        views = [Tensor(0, "float32", shape, strides, offset) for offset in offsets]
        first, second = (
            {
                view.offset + sum(i * s for i, s in zip(at, strides, strict=True))
                for at in product(*map(range, shape))
            }
            for view in views
        )
        if not _meet(*views):
            apart += 1
            assert not first & second
    assert apart > 300
