"""LSTM, GRU and RNN on the GPU: outputs and gradients as onnxruntime's."""

from dataclasses import dataclass

import numpy as np
import pytest
from gradient_loops import RECURRENT
from gradient_rows import Row, row
from test_gradients import build, draw, session

from onnx_fuse import autodiff
from onnx_fuse.kernels import Selection
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import Hardware
from onnx_fuse.session import load


def sized(kind: str, call: str, steps: int, batch: int, width: int, hidden: int) -> Row:
    """A node of these sizes, its weights as large as training starts with."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * hidden
    generator, reach = np.random.default_rng(hidden), hidden**-0.5
    shapes = {"w": (1, gates, width), "r": (1, gates, hidden), "b": (1, 2 * gates)}
    arrays = {k: generator.uniform(-reach, reach, v) for k, v in shapes.items()}
    return row(
        f"{kind} {call} {steps} {batch} {width} {hidden}",
        f"y, h = {kind} <hidden_size = {hidden}{', ' * bool(call)}{call}> (x, w, r, b)",
        x=(steps, batch, width),
        **arrays,
        outputs=("y", "h"),
        dtype=np.float32,
    )


# Widths that are no multiple of 4 or of a cluster, weights in and out of shared memory.
SIZED = [
    sized(kind, call, *sizes)
    for sizes in ((7, 3, 5, 37), (3, 33, 16, 130), (3, 300, 8, 64), (3, 2, 8, 260), (3, 2, 8, 700))
    for kind, call in (
        ("LSTM", ""),
        ("GRU", 'direction = "reverse"'),
        ("GRU", "linear_before_reset = 1"),
        ("RNN", ""),
    )
]


@dataclass(frozen=True)
class Recurrent:
    """A row of the gradients' table; tools/sanitize.py asks what it launches."""

    row: Row

    def program(self, hw: Hardware) -> Program:
        arrays = draw(self.row)
        model = build(self.row, arrays, dynamic=False)
        wrt = [v.name for v in model.graph.input if arrays[v.name].dtype.kind == "f"]
        backward = autodiff.gradient(model, wrt=wrt)
        shapes = {v.name: (v.shape.numpy(), v.dtype.numpy().name) for v in backward.graph.inputs}
        return lower(backward, shapes, hw)

    def variants(self, program: Program, hw: Hardware) -> list[Selection]:
        return []


CASES = [Recurrent(case) for case in (*RECURRENT, *SIZED)]


def executable(model):
    from onnx_fuse.runtime.executable import Executable

    return Executable(model)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.row.name)
def test_outputs_and_gradients(case: Recurrent) -> None:
    arrays = draw(case.row)
    model = build(case.row, arrays, dynamic=False)
    names = [v.name for v in model.graph.input]
    outputs = list(case.row.outputs)
    feeds = {k: v for k, v in arrays.items() if k in names}
    expected = session(model).run(outputs, feeds)
    for y, want in zip(executable(load(model)).run(outputs, feeds), expected, strict=True):
        np.testing.assert_allclose(y, want, rtol=0, atol=2e-5 * max(1, np.abs(want).max()))
    wrt = [name for name in names if feeds[name].dtype.kind == "f"]
    generator = np.random.default_rng(3)
    feeds |= {
        f"{name}.grad": generator.standard_normal(y.shape).astype(np.float32)
        for name, y in zip(outputs, expected, strict=True)
    }
    grads = [f"{name}.grad" for name in wrt]
    backward = autodiff.gradient(model, wrt=wrt)
    expected = session(backward).run(grads, feeds)
    runner = executable(backward)
    got, again = runner.run(grads, feeds), runner.run(grads, feeds)
    for name, dx, twice, want in zip(wrt, got, again, expected, strict=True):
        assert dx.tobytes() == twice.tobytes()
        limit = 5e-5 * max(1, np.abs(want).max())
        np.testing.assert_allclose(dx, want, rtol=0, atol=limit, err_msg=name)
