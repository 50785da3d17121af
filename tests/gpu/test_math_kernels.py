"""Math kernels on the GPU: the cases of tests/math_cases.py against float64, equal bits twice."""

import os
import warnings

import numpy as np
import onnx_ir
import pytest
from math_cases import TOLERANCE, Case, cases, only, widen
from special_values import ROWS, assert_same, special_row

from onnx_fuse.cuda import nvrtc
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime.executable import Executable


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_case(case: Case) -> None:
    """Each kernel and configuration twice: equal bits, and within the tolerance of float64."""
    hw, truth = Hardware.detect(), case.oracle()
    if not os.environ.get("PYTEST_XDIST_WORKER"):  # whose processors are busy with other tests
        nvrtc.compile_all(case.launches(hw), hw.arch)
    check(case, truth)
    for choice in case.variants(case.program(hw), hw):
        with only(choice):
            check(case, truth)


def check(case: Case, truths: list[np.ndarray]) -> None:
    """Run `case` twice: equal bits, and within the type's tolerance of float64."""
    got, again = runs(case, case.arrays(), 2)
    for i, (y, twice, truth) in enumerate(zip(got, again, truths, strict=True)):
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


def runs(case: Case, arrays: list[np.ndarray | None], times: int) -> list[list[np.ndarray]]:
    model = onnx_ir.serde.deserialize_model(case.model(arrays))
    feeds = {v.name: arrays[int(v.name[1:])] for v in model.graph.inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback to onnxruntime would test nothing
        run = Executable(model)
        return [run.run(None, feeds) for _ in range(times)]


PACKED = [c for c in cases() if "Sdpa" in c.op and "Packed" in c.op and c.dtype == "float16"]


@pytest.mark.parametrize("case", PACKED, ids=lambda c: c.name)
def test_a_sequence_that_is_nan_stays_alone(case: Case) -> None:
    arrays = case.arrays()
    (offsets,) = (a for a in arrays if a.dtype == np.int32)
    tokens = arrays[0].shape[2]
    sequence = np.searchsorted(offsets, np.arange(tokens), side="right") - 1
    last = sequence == len(offsets) - 1  # rows behind the last sequence, which give 0
    hostile = last | (sequence % 2 == 1)
    spoilt = [a.copy() for a in arrays]
    for a in spoilt:
        if a.ndim == 4 and a.shape[2] == tokens:
            a[:, :, hostile] = np.nan
    hw = Hardware.detect()
    for choice in case.variants(case.program(hw), hw):
        with only(choice):
            (clean,), (found,) = runs(case, arrays, 1), runs(case, spoilt, 1)
        for a, b in zip(clean, found, strict=True):
            np.testing.assert_array_equal(a[:, :, ~hostile], b[:, :, ~hostile])
            if a.shape[3] != 2:  # no lse
                assert not b[:, :, last].any()


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_nan_infinities_and_zeros_have_onnxruntimes_answer(name: str, kind: str) -> None:
    model, feeds, wanted = special_row(name, kind)
    found = Executable(model).run(list(wanted), feeds)
    for y, want in zip(found, wanted.values(), strict=True):
        assert_same(y, want)
