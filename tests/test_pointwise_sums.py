"""A pointwise call that also sums a result, without a GPU: the program, its numbers, its code."""

from typing import Any

import numpy as np
import pytest
from compiled import unclean
from lowering import lowered, program_of
from sums_rows import OVER, TOLERANCE, always, feeds_of, text_of, wanted

from onnx_fuse import autodiff
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.data_movement import PointwiseSums
from onnx_fuse.program.interpret import interpret
from onnx_fuse.session import load

__all__ = ["always"]  # a fixture


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize(("m", "n"), [(32, 64), (1030, 77)])
def test_one_call_stores_and_sums(m: int, n: int, over: str, dtype: str) -> None:
    feeds = feeds_of(m, n, dtype)
    program = program_of(text_model(text_of(m, n, dtype, over)), feeds)
    (call,) = program.calls
    assert isinstance(call.problem, PointwiseSums)
    assert call.problem.over == over
    assert len(call.launches) == 1
    found: dict[str, Any] = interpret(program, feeds, {})
    for name, want in wanted(feeds, found["dz"], over).items():
        error = np.linalg.norm(found[name] - want) / np.linalg.norm(want)
        assert error <= TOLERANCE[dtype], name


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("over", OVER)
def test_its_code_spills_nothing(over: str, dtype: str) -> None:
    for m, n in ((64, 64), (64, 77)):
        program = program_of(text_model(text_of(m, n, dtype, over)), feeds_of(m, n, dtype))
        (call,) = program.calls
        (launch,) = call.launches
        assert unclean([launch], "sm_80", "sm_90a", "sm_100a") == []


@pytest.mark.parametrize(
    ("m", "n", "over", "joined"),  # beside one another on an H200, in float32: us of one and of two
    [
        (8192, 3072, "columns", True),  # 115 and 128
        (8192, 3072, "rows", True),  # 114 and 125
        (8192, 3072, "all", True),  # 117 and 127
        (8192, 768, "rows", True),  # 31 and 32
        (512, 256, "rows", True),  # 3.7 and 4.4
        (512, 256, "all", True),  # 3.4 and 4.1
        (512, 256, "columns", False),  # 5.8 and 5.1
        (512, 3072, "all", False),  # 10.7 and 9.1
        (8192, 128, "columns", False),  # 35 and 10
        (65536, 64, "rows", False),  # 28 and 24
    ],
)
def test_sums_join_where_that_is_faster(m: int, n: int, over: str, joined: bool) -> None:
    model = text_model(text_of(m, n, "float", over))
    calls = lowered(model).calls
    assert any(isinstance(call.problem, PointwiseSums) for call in calls) == joined


@pytest.mark.parametrize("shape", ["64", "1", "32,1", "32,64"])
def test_gradients_of_z_c_and_bias_are_one_launch(shape: str) -> None:
    """y = gelu(a b + c), in float32; the rest of the backward is the two products."""
    model = load(
        text_model(f"""agraph (float[32,16] x, float[16,64] w, float[{shape}] c)
        => (float[32,64] y) {{ y = onnx_fuse.GemmGelu (x, w, c) }}""")
    )
    graph = autodiff.gradient(model, wrt=["x", "w", "c"])
    program = lowered(graph)
    calls = program.calls
    names = [type(call.problem).__name__ for call in calls]
    behind = names[names.index("GemmProblem") + 1 :]
    kind = "Pointwise" if shape == "32,64" else "PointwiseSums"  # whose gradient is dz itself
    assert behind == [kind, "GemmProblem", "GemmProblem"]
    assert all(len(call.launches) == 1 for call in calls)


def test_alpha_beta_c_and_a_bias_are_one_launch() -> None:
    model = load(
        text_model("""agraph (float[32,16] x, float[16,64] w, float[32,64] c, float[64] b)
        => (float[32,64] y) { p = Gemm <alpha = 0.5, beta = 2.0> (x, w, c) z = Add (p, b)
        y = Gelu (z) }""")
    )
    graph = autodiff.gradient(model, wrt=["x", "w", "c", "b"])
    program = lowered(graph)
    calls = program.calls
    (call,) = (c for c in calls if isinstance(c.problem, PointwiseSums))
    assert {"c.grad", "b.grad"} <= {b.name for b in program.buffers}
    assert len(call.launches) == 1
    assert len(calls) == 4  # two products more, and the forward's


@pytest.mark.parametrize(
    "nodes",
    [
        "dz = Relu (x) db = ReduceMax <keepdims = 0> (dz, axes)",
        "dz = Relu (x) e = Neg (x) db = ReduceSum <keepdims = 0> (e, axes) f = Relu (db)",
    ],
)
def test_other_reductions_stay_calls_of_their_own(nodes: str) -> None:
    calls = lowered(f"""agraph (double[64,32] x) => (double[64,32] dz, double[32] db)
        <int64[1] axes = {{0}}> {{ {nodes} }}""").calls
    assert not any(isinstance(call.problem, PointwiseSums) for call in calls)
