"""Quantized operators on the GPU: onnxruntime's answers, the same bits where they are integers."""

import os
import warnings

import ml_dtypes
import numpy as np
import onnx
import pytest
from float8_cases import CODES8, FLOATS_OF_CODES
from math_cases import only
from quant_cases import CASES, FLOATS8, KINDS, Quantized, quantized

from onnx_fuse.autodiff.load import load
from onnx_fuse.cuda import nvrtc
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime.executable import Executable


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """All modules at once, in threads: one at a time would take minutes. Each of several processes
    compiles those of its own tests.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    hw = Hardware.detect()
    launches = set()
    for item in request.session.items:
        if item.module == request.module and "case" in item.callspec.params:
            case = item.callspec.params["case"]
            programs = [case.program(hw)]
            for choice in case.variants(programs[0], hw):
                with only(choice):
                    programs.append(case.program(hw))
            launches |= {x for p in programs for call in p.calls for x in call.launches}
    nvrtc.compile_all(launches, hw.arch, workers=16)


def run(model: bytes, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs, the same bits twice."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback to onnxruntime would test nothing
        runner = Executable(load(model))
        got, again = runner.run(None, feeds), runner.run(None, feeds)
    for y, twice in zip(got, again, strict=True):
        assert y.tobytes() == twice.tobytes()
    return list(got)


@pytest.mark.parametrize("case", [*CASES, *CODES8, *FLOATS_OF_CODES], ids=lambda c: c.name)
def test_case(case: Quantized) -> None:
    names = [v.name for v in onnx.load_from_string(case.model).graph.output]
    want = case.expected()
    for name, y, expected in zip(names, run(case.model, case.feeds), want, strict=True):
        case.check(name, y, expected)
    hw = Hardware.detect()
    for choice in case.variants(case.program(hw), hw):
        with only(choice):
            got = run(case.model, case.feeds)
        for name, y, expected in zip(names, got, want, strict=True):
            case.check(f"{choice.kernel.name} {choice.config} {name}", y, expected)


@pytest.mark.parametrize("kind", [*FLOATS8, "float4_e2m1fn"])
def test_every_float_is_rounded_to_the_nearest(kind: str) -> None:
    """A Cast there and back, of numbers all over float32's range; NaN beyond the largest."""
    bits = np.arange(0, 2**32, 49999, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), np.arange(-1024, 1024, dtype=np.float32) / 256])
    x = x[np.isfinite(x) & (np.abs(x) < 1e5)]
    dtype = getattr(ml_dtypes, kind)
    to = KINDS.get(kind, onnx.TensorProto.FLOAT4E2M1)
    nodes = f"q = Cast <to = {to}, saturate = 0> (x) y = Cast <to = 1> (q)"
    case = quantized(kind, nodes, {"x": x}, {"y": ("float32", x.shape)}, opset=25)
    (y,) = run(case.model, case.feeds)
    np.testing.assert_array_equal(y, x.astype(dtype).astype(np.float32))
