"""Math kernels on the GPU: the cases of tests/math_cases.py against float64, equal bits twice."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from math_cases import F16, TOLERANCE, Case, cases, widen


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """All modules at once, in threads: one at a time would take minutes."""
    from onnx_fuse.kernels import jit
    from onnx_fuse.problem import Hardware

    hw = Hardware.detect()
    chosen = [
        x.callspec.params["case"] for x in request.session.items if x.module == request.module
    ]
    launches = {x for case in chosen for call in case.program(hw).calls for x in call.launches}
    jit.compile_all(launches, hw.arch, workers=16)


def check(case: Case) -> None:
    """Run `case` twice: equal bits, and within the type's tolerance of float64."""
    from onnx_fuse import ir
    from onnx_fuse.runtime.executable import Executable

    arrays = case.arrays()
    model = ir.ir.serde.deserialize_model(case.model(arrays))
    feeds = {v.name: arrays[int(v.name[1:])] for v in model.graph.inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback to onnxruntime would test nothing
        run = Executable(model)
        got, again = run.run(None, feeds), run.run(None, feeds)
    for i, (y, twice, truth) in enumerate(zip(got, again, case.oracle(), strict=True)):
        assert y.tobytes() == twice.tobytes(), f"output {i} differs from run to run"
        assert y.shape == truth.shape, f"output {i}: {y.shape}, not {truth.shape}"
        if y.dtype.kind in "iub":
            np.testing.assert_array_equal(y, truth, err_msg=f"output {i}")
            continue
        y, allowed = widen(y), max(TOLERANCE[case.dtype], TOLERANCE[y.dtype.name])
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(truth), err_msg=f"output {i}")
        finite = np.isfinite(truth)
        largest = np.abs(truth[finite]).max(initial=1e-30)
        error = np.abs(y - truth)[finite].max(initial=0.0) / largest
        assert error <= allowed, (
            f"output {i}: error {error:.1e} of the largest, {allowed:.0e} allowed"
        )


@pytest.mark.parametrize("i", range(4))
def test_every_configuration_of_attention(i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_fuse.kernels import sdpa

    every = sdpa.Mma.configs
    monkeypatch.setattr(sdpa.Mma, "configs", lambda *given: every(*given)[i : i + 1])
    for case in cases():
        if "Sdpa" in case.name and case.dtype == F16 and "Grad" not in case.name:
            check(case)


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_case(case: Case) -> None:
    check(case)
