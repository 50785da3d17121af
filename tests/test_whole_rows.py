"""Products in 16 bits whose rows are no whole 16 bytes: copies for TMA, where they pay."""

import ml_dtypes
import numpy as np
import pytest
from lowering import program_of, weights_of
from support import with_weights

from onnx_fuse.ir.build import text_model
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import GemmProblem

# m, n, k; whether b is a weight, stored [N, K]; the copies, and the row strides of a, b and y
ROWS = {
    "a weight, packed once": (64, 1001, 256, True, False, 0, (256, 1008, 0)),
    "an operand, copied": (512, 1001, 1024, False, False, 1, (1024, 1008, 0)),
    "many rows, brought together": (4096, 4099, 256, True, False, 1, (256, 4104, 4104)),
    "k of an odd number": (512, 512, 1001, True, True, 1, (1008, 1008, 0)),
    "few numbers stay as they are": (5, 77, 96, False, False, 0, (96, 77, 0)),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_whole_16_bytes(case: str) -> None:
    m, n, k, weight, turned, copies, strides = ROWS[case]
    shape = (n, k) if turned else (k, n)
    model = text_model(
        f"agraph (bfloat16[M, {k}] x, bfloat16[{shape[0]}, {shape[1]}] w) => (bfloat16[M, {n}] y) "
        + ("{ t = Transpose (w) y = MatMul (x, t) }" if turned else "{ y = MatMul (x, w) }")
    )
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.integers(-2, 3, dims).astype(ml_dtypes.bfloat16)
        for name, dims in (("x", (m, k)), ("w", shape))
    }
    right = feeds["w"].T if turned else feeds["w"]
    want = feeds["x"].astype(np.float32) @ right.astype(np.float32)
    if weight:
        with_weights(model, {"w": feeds.pop("w")})
    program = program_of(model, feeds)
    (problem,) = (c.problem for c in program.calls if isinstance(c.problem, GemmProblem))
    assert (problem.lda, problem.ldb, problem.ldy) == strides
    assert len(program.calls) == 1 + copies
    got = interpret(program, feeds, weights_of(model))["y"]
    np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))
