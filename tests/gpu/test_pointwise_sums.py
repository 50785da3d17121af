"""Pointwise calls that also sum a result, on a GPU: beside float64, and the same bits each time."""

import numpy as np
import pytest
from curves import CURVES
from on_device import error
from sums_rows import OVER, TOLERANCE, always, feeds_of, text_of, wanted
from support import drawn

import onnx_fuse as of
from onnx_fuse import autodiff
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.data_movement import PointwiseSums
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.session import load

__all__ = ["always"]  # a fixture
pytestmark = pytest.mark.usefixtures("always")


@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize(("m", "n"), [(1, 7), (32, 64), (1000, 130), (4100, 33), (8192, 3072)])
def test_results_and_their_sums(m: int, n: int, over: str, dtype: str) -> None:
    feeds = feeds_of(m, n, dtype)
    executable = Executable(text_model(text_of(m, n, dtype, over)))
    runs = [executable.run(None, feeds) for _ in range(3)]
    (program,) = executable.programs()
    assert m == 1 or [type(call.problem) for call in program.calls] == [PointwiseSums]
    found = dict(zip(("dz", "dc", "db"), runs[0], strict=True))
    for name, want in wanted(feeds, found["dz"], over).items():
        assert error(found[name], want) <= TOLERANCE[dtype], name
    for run in runs[1:]:
        assert [y.tobytes() for y in run] == [y.tobytes() for y in runs[0]]


def test_what_is_not_finite_reaches_the_sums_of_its_own_row() -> None:
    feeds = feeds_of(300, 130, "float")
    feeds["dy"][7, 3], feeds["dy"][40, 129] = np.nan, np.inf
    for over, bad in (("columns", [3, 129]), ("rows", [7, 40])):
        executable = Executable(text_model(text_of(300, 130, "float", over)))
        sums = executable.run(None, feeds)[2].reshape(-1)
        assert np.flatnonzero(~np.isfinite(sums)).tolist() == bad


@pytest.mark.parametrize("shape", [(136,), (1,), (), (200, 1), (200, 136)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, -2.0)])
def test_gradients_of_a_plan(alpha: float, beta: float, dtype: str, shape: tuple[int, ...]) -> None:
    """y = gelu(alpha x w + beta c): c has a number a column, one for all, one a row, or all."""
    rng = np.random.default_rng(1)
    shapes = {"x": (200, 72), "w": (72, 136), "c": shape}
    given = {k: rng.standard_normal(s).astype(dtype) for k, s in shapes.items()}
    dy = rng.standard_normal((200, 136)).astype(dtype)
    plan = of.plan("GemmGelu", shapes, dtype, save=("z",), device="cuda", alpha=alpha, beta=beta)
    y = plan.forward(*given.values()).numpy()
    x, w, c = (v.astype(np.float64) for v in given.values())
    value, slope = CURVES["gelu"](alpha * x @ w + beta * c)
    dz = dy.astype(np.float64) * slope
    axes = tuple(i for i in range(2) if len(shape) < 2 - i or shape[i - 2 + len(shape)] == 1)
    dc = beta * (dz.sum(axes).reshape(shape) if axes else dz)
    want = {"x": alpha * dz @ w.T, "w": alpha * x.T @ dz, "c": dc}
    bound = {"float32": 5e-6, "float16": 3e-3}[dtype]  # z, of which gelu' is taken, is rounded
    assert error(y, value) <= bound
    first, second = plan.backward(dy), plan.backward(dy)
    for name, value in want.items():
        assert error(first[name].numpy(), value) <= bound, name
        assert first[name].numpy().tobytes() == second[name].numpy().tobytes()


@pytest.mark.parametrize("bias", ["136", "1", "200,1"])
def test_gradients_of_z_c_and_bias_are_one_launch_in_float32(bias: str) -> None:
    """y = gelu(0.5 x w - 2 c + b) of all of c and a bias b: dz, dc and db come from one kernel."""
    text = f"""agraph (float[200,72] x, float[72,136] w, float[200,136] c, float[{bias}] b)
        => (float[200,136] y) {{ p = Gemm <alpha = 0.5, beta = -2.0> (x, w, c) z = Add (p, b)
        y = Gelu (z) }}"""
    graph = autodiff.gradient(load(text_model(text)), wrt=["x", "w", "c", "b"])
    feeds = drawn(graph, seed=2)
    executable = Executable(graph)
    names = [v.name for v in graph.graph.outputs]
    runs = [dict(zip(names, executable.run(None, feeds), strict=True)) for _ in range(3)]
    (program,) = executable.programs()
    (call,) = (call for call in program.calls if isinstance(call.problem, PointwiseSums))
    assert len(call.launches) == 1
    assert len(program.calls) == 4  # the forward's product, this one, and the products of dx and dw
    x, w, c, b = (feeds[name].astype(np.float64) for name in ("x", "w", "c", "b"))
    dz = feeds["y.grad"] * CURVES["gelu"](0.5 * x @ w - 2.0 * c + b)[1]
    db = dz.sum(0 if bias == "136" else (1 if "," in bias else None)).reshape(b.shape)
    want = {"x": 0.5 * dz @ w.T, "w": 0.5 * x.T @ dz, "c": -2.0 * dz, "b": db}
    for name, value in want.items():
        assert error(runs[0][f"{name}.grad"], value) <= 5e-6, name
    for run in runs[1:]:
        assert all(run[name].tobytes() == runs[0][name].tobytes() for name in names)
