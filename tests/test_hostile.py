"""Rows of FUSION_CASES, and rows that are nearly such, on hostile numbers: see hostile.py."""

import hostile
import pytest
from cases import NEWEST_OPSET, FusionCase
from exact_cases import EXACT_CASES
from fusion_cases import FUSION_CASES
from support import says

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load

ROWS = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in (*FUSION_CASES, *EXACT_CASES)
    if case.opset <= NEWEST_OPSET
    for dtype in hostile.TYPES
]


@pytest.mark.parametrize(("case", "dtype"), ROWS)
def test_hostile_numbers(case: FusionCase, dtype: str) -> None:
    if reason := case.spared("", dtype):
        pytest.skip(reason)
    wrong = hostile.check(case, hostile.TYPES[dtype])
    if wrong is None:
        pytest.skip(f"onnxruntime has no such graph in {dtype}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", EXACT_CASES, ids=lambda c: c.name)
def test_what_is_nearly_a_fused_operator_says_why_it_stays(case: FusionCase) -> None:
    if case.opset > NEWEST_OPSET:
        pytest.skip("onnxruntime is older")
    model = load(case.model())
    report = rewrite.optimize(model, level=case.level)
    assert tuple(n.op_type for n in model.graph if n.domain == "onnx_fuse") == case.fused
    assert not {node.op_type for node in model.graph}.intersection(case.gone)
    assert says(report, case.reason), report.not_fused
