"""Every row of FUSION_CASES on hostile numbers: see hostile.py."""

from __future__ import annotations

import hostile
import numpy as np
import onnxruntime
import pytest
from cases import FUSION_CASES, NEWEST_OPSET, FusionCase
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    NotImplemented,
)

from onnx_fuse import passes
from onnx_fuse.onnx.load import load
from onnx_fuse.onnx.save import inline, to_proto

RUNNABLE = [case for case in FUSION_CASES if case.opset <= NEWEST_OPSET]
LEVELS = (
    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
)
_REFUSED = (Fail, InvalidArgument, InvalidGraph, NotImplemented)


def sessions(proto: bytes) -> list[onnxruntime.InferenceSession]:
    """The model at each of onnxruntime's levels."""
    found = []
    for level in LEVELS:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = level
        options.intra_op_num_threads = 1
        found.append(onnxruntime.InferenceSession(proto, options))
    return found


def answers(
    session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    names = [o.name for o in session.get_outputs()]
    values = {
        k: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(v.view(np.uint16), 16)
        if v.dtype.name == "bfloat16"
        else onnxruntime.OrtValue.ortvalue_from_numpy(v)
        for k, v in feeds.items()
    }
    found = session.run_with_ort_values(names, values)
    return {k: v.numpy() for k, v in zip(names, found, strict=True)}


# Rows that are known to differ, and why; a row that no longer does fails until it leaves the table.
_ADDED = "a mask by Where becomes an added one, under which NaN and infinite scores show"
OPEN = {
    ("attention_mask_and_guard", "float16 float32 float64"): "NaN of a query is not guarded",
    ("attention_mask_by_where", "float16 float32 float64"): _ADDED,
    ("attention_where_before_the_scale", "float32 float64"): _ADDED,
    ("attention_scaled_operands", "float64"): "the scale is a float32 attribute",
    ("attention_grouped_heads", "float16 float32 float64"): "its body reshapes no empty batch",
    ("attention_one_key_head_for_all", "float16 float32 float64"): "as attention_grouped_heads",
}
_OPEN = {(name, t): why for (name, types), why in OPEN.items() for t in types.split()}
ROWS = [
    pytest.param(
        case,
        dtype,
        id=f"{case.name}-{dtype}",
        marks=[pytest.mark.xfail(strict=True, reason=_OPEN[case.name, dtype])]
        if (case.name, dtype) in _OPEN
        else [],
    )
    for case in RUNNABLE
    for dtype in hostile.TYPES
]


@pytest.mark.parametrize(("case", "dtype"), ROWS)
def test_hostile_numbers(case: FusionCase, dtype: str) -> None:
    if reason := case.spared("", dtype):
        pytest.skip(reason)
    kind = hostile.TYPES[dtype]
    original = to_proto(hostile.in_type(case, kind)).SerializeToString()
    try:
        expected = sessions(original)
    except _REFUSED as error:
        pytest.skip(f"onnxruntime has no such graph in {dtype}: {str(error)[:100]}")
    seen = {original}
    models = []
    for level in passes.LEVELS:
        for flat in (False, True):
            model = load(hostile.in_type(case, kind))
            passes.optimize(model, level=level)
            proto = to_proto(inline(model) if flat else model).SerializeToString()
            if proto not in seen:
                models.append((f"level {level}{' written out' if flat else ''}", sessions(proto)))
            seen.add(proto)
    wrong = []
    for name, feeds in hostile.feeds(case, kind):
        for own, session in zip(LEVELS, expected, strict=True):
            try:
                truth = answers(session, feeds)
            except _REFUSED:
                continue
            for title, pair in models:
                found = answers(pair[LEVELS.index(own)], feeds)
                said = hostile.differences(found, truth)
                wrong += [f"{name}, {title}, {own.name}: {difference}" for difference in said]
    assert not wrong, "\n".join(wrong)
