"""Convolutions of float32 on tensor cores: tf32 and split bfloat16 against float64, equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from math_cases import only, widen
from onnx.reference import ReferenceEvaluator

from onnx_fuse.kernels import Choice, candidates
from onnx_fuse.lower.walk import lower
from onnx_fuse.onnx.build import text_model
from onnx_fuse.program.problem import Hardware
from onnx_fuse.program.problems import Conv
from onnx_fuse.runtime.executable import Executable

# |y - truth| as a part of the largest |truth|: a factor is rounded to 11 bits, or split in 8 + 8
TOLERANCE = {"tf32": 1e-3, "bf16x3": 2e-5}
# attributes, the shapes of x and of the filters
CASES: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("pads=[1,1,1,1]", (2, 72, 11, 12), (40, 72, 3, 3)),
    ("pads=[1,1,1,1], strides=[2,1], dilations=[1,2]", (2, 8, 14, 9), (130, 8, 3, 3)),
    ("pads=[3,3,3,3], strides=[2,2]", (2, 3, 29, 31), (64, 3, 7, 7)),
    ("pads=[1,1,1,1], group=4", (2, 64, 9, 9), (84, 16, 3, 3)),
    ("pads=[1,1,1,1]", (1, 512, 7, 7), (64, 512, 3, 3)),
)


@pytest.mark.parametrize("math", TOLERANCE)
@pytest.mark.parametrize("row", range(len(CASES)))
def test_each_tile(row: int, math: str) -> None:
    attributes, x, w = CASES[row]
    graph = f"agraph (float{list(x)} x, float{list(w)} w) => (float[n,m,h,v] y)"
    model = text_model(graph + f" {{ y = Conv <{attributes}> (x, w) }}")
    rng = np.random.default_rng(row)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", x), ("w", w))}
    (truth,) = ReferenceEvaluator(_in_float64(model)).run(
        None, {n: widen(a) for n, a in feeds.items()}
    )
    hw = Hardware.detect()
    shapes: Any = {n: (a.shape, "float32") for n, a in feeds.items()}
    calls = lower(model, shapes, hw, math=math).calls
    (problem,) = (c.problem for c in calls if isinstance(c.problem, Conv))
    assert problem.channels_last
    kernels = [k for k in candidates("Conv") if k.supports(problem, hw) is None]
    for kernel, how in ((k, how) for k in kernels for how in k.configs(problem, hw)):
        with only(Choice(kernel, how, 0.0, "each")):
            run = Executable(model, math=math)
            (y,), (again,) = run.run(None, feeds), run.run(None, feeds)
        assert y.tobytes() == again.tobytes(), how
        assert np.abs(y - truth).max() <= TOLERANCE[math] * np.abs(truth).max(), how


def _in_float64(model: ir.Model) -> Any:
    proto = ir.serde.serialize_model(model)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = 11
    return proto
