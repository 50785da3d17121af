"""What tools/fuzz.py draws: every operator that is lowered; and what it takes for a fault."""

import numpy as np
import pytest
from fuzz_answers import coarsest, references
from fuzz_operators import OPERATORS, UNDRAWN
from support import parsed, table

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.table import lowerings
from onnx_fuse.ops import OPS


def test_every_operator_that_is_lowered_is_drawn() -> None:
    """All but those of fused operators, which rewriting makes of the others."""
    lowered = {name for domain, name in {*OPS, *lowerings()} if domain != FUSE}
    assert lowered - OPERATORS.keys() == UNDRAWN.keys()


# text of a graph: its input, and a right result that onnxruntime does not have
RESULTS = table(globals())("""
a Fourier sum that would be 0: (np.float32([[[1], [2]]]), np.float32([[[[1, 0], [-1, 0]]]]))
  (float[1,2,1] x) => (float[a,b,c,d] y) <int64 step = {1}, int64 n = {2}>
  { s = STFT (x, step, , n) y = Sign (s) }
a norm of one number: (np.float32([[[3.4242136]]]), np.float32([[[-0.27740598]]]))
  (float[1,1,1] x) => (float[1,1,1] y) <float[1] g = {1.0107595}, float[1] b = {-0.27740598}>
  { y = InstanceNormalization (x, g, b) }
""")


@pytest.mark.parametrize("name", RESULTS)
def test_what_rounding_alone_makes_is_no_fault(name: str) -> None:
    text, (x, right) = RESULTS[name]
    model = parsed(f"agraph {text}")
    (run,) = references(model, [{"x": x}], np.random.default_rng(0), False)
    assert (run.want[0] != right).any()
    assert not run.fault(model, [right], coarsest(model))
    assert run.fault(model, [right + np.float32(100)], coarsest(model))
