"""Convolutions of float32 on tensor cores, and their weights' gradients, against float64."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from math_cases import only, widen
from onnx.reference import ReferenceEvaluator

from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import Selection, candidates
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.problem import Hardware
from onnx_fuse.program.problems import Conv, ConvWeightGrad
from onnx_fuse.runtime.executable import Executable

# |y - truth| as a part of the largest |truth|: a factor is rounded to 11 bits, or split in 8 + 8;
# and a result of 16 bits is
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
        with only(Selection(kernel, how, 0.0, "each")):
            run = Executable(model, math=math)
            (y,), (again,) = run.run(None, feeds), run.run(None, feeds)
        assert y.tobytes() == again.tobytes(), how
        assert np.abs(y - truth).max() <= TOLERANCE[math] * np.abs(truth).max(), how


# attributes but the filter's size, the shapes of dy and x
GRADIENTS: tuple[tuple[dict[str, int], tuple[int, ...], tuple[int, ...]], ...] = (
    ({"pad": 1}, (3, 72, 11, 12), (3, 40, 11, 12)),
    ({"pad": 1, "stride": 2}, (2, 136, 9, 8), (2, 200, 17, 16)),
    ({"pad": 2, "dilation": 2}, (2, 64, 31, 17), (2, 64, 31, 17)),
    ({"pad": 3, "stride": 2}, (3, 64, 9, 13), (3, 3, 18, 26)),  # rows of a filter
    ({"pad": 0}, (3, 768, 9, 8), (3, 1024, 9, 8)),  # a product
)


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("row", range(len(GRADIENTS)))
def test_each_tile_of_a_gradient_of_weights(row: int, kind: str) -> None:
    """In tf32 and in 16 bits."""
    how, dy, x = GRADIENTS[row]
    pad, stride, dilation = how["pad"], how.get("stride", 1), how.get("dilation", 1)
    size, dtype = {0: 1, 3: 7}.get(pad, 3), "float32" if kind == "float" else kind
    attributes = f"pads={[pad] * 4}, strides={[stride] * 2}, dilations={[dilation] * 2}"
    model = text_model(
        f"agraph ({kind}{list(dy)} dy, {kind}{list(x)} x) => ({kind}{[dy[1], x[1], size, size]} dw)"
        f" {{ dw = onnx_fuse.ConvWeightGrad <{attributes}, kernel_shape={[size] * 2}, group=1,"
        " swap=[1,0,2,3]> (dy, x) }"
    )
    rng = np.random.default_rng(row)
    feeds = {n: rng.standard_normal(s).astype(dtype) for n, s in (("dy", dy), ("x", x))}
    padded = np.pad(widen(feeds["x"]), ((0, 0), (0, 0), (pad, pad + stride), (pad, pad + stride)))
    truth = np.zeros((dy[1], x[1], size, size))
    for a, b in np.ndindex(size, size):
        rows, columns = (
            slice(at * dilation, at * dilation + stride * (dy[axis] - 1) + 1, stride)
            for at, axis in ((a, 2), (b, 3))
        )
        seen = padded[:, :, rows, columns]
        truth[:, :, a, b] = np.einsum("nmij,ncij->mc", widen(feeds["dy"]), seen, optimize=True)
    hw = Hardware.detect()
    shapes: Any = {n: (a.shape, dtype) for n, a in feeds.items()}
    calls = lower(model, shapes, hw, math="tf32").calls
    (problem,) = (c.problem for c in calls if isinstance(c.problem, ConvWeightGrad))
    kernels = [k for k in candidates("ConvWeightGrad") if k.supports(problem, hw) is None]
    narrow = ["product"] * (size == 1) + ["wgmma"]
    assert [k.name for k in kernels] == (narrow if dtype == "float16" else []) + ["mma"]
    for kernel, config in ((k, c) for k in kernels for c in k.configs(problem, hw)):
        with only(Selection(kernel, config, 0.0, "each")):
            run = Executable(model, math="tf32")
            (dw,), (again,) = run.run(None, feeds), run.run(None, feeds)
        assert dw.tobytes() == again.tobytes(), config
        assert np.abs(dw - truth).max() <= TOLERANCE["tf32"] * np.abs(truth).max(), config


def _in_float64(model: ir.Model) -> Any:
    proto = ir.serde.serialize_model(model)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = 11
    return proto
