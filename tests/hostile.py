"""Hostile numbers for the rows of FUSION_CASES: a rewrite is exact on all of them, or refused.

A row is run in the float types that onnxruntime computes on a CPU, at every level, written out too,
against the graph as it came, by onnxruntime at the same optimization level of its own.
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import onnxruntime
from cases import FusionCase
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    NotImplemented,
)
from support import answers, stock

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.importer.save import inline, to_proto
from onnx_fuse.ir.build import const_array

TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "float64": ir.DataType.DOUBLE,
}
FEEDS = ("nan", "infinite", "signed_zero", "huge", "tiny", "masked", "empty")
# Relative to the largest finite number of the output: roundings of sums over some 24 terms, and in
# 16 bits one more of each step between (onnxruntime computes those in float32 and rounds each).
TOLERANCE = {"float32": 3e-5, "float64": 1e-12, "float16": 1.5e-2}
_SIZES = {"B": 3, "H": 2, "G": 2, "S": 7, "T": 9}


def in_type(case: FusionCase, dtype: ir.DataType) -> ir.Model:
    """The row's graph with all its float32 tensors in `dtype`."""
    model = case.model()
    own = ir.DataType.FLOAT
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) == own.value:
            node.attributes["to"] = ir.AttrInt64("to", dtype.value)
        held = node.attributes.get("value")
        if held is not None and held.as_tensor().dtype == own:
            tensor = ir.tensor(_clipped(held.as_tensor().numpy(), dtype))
            node.attributes["value"] = ir.AttrTensor("value", tensor)
        for value in node.outputs:
            value.type = None if value.dtype == own else value.type
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        if value.dtype == own or value.dtype is None:
            value.type = ir.TensorType(dtype)
        array = const_array(value)
        if array is not None and array.dtype == np.float32:
            value.const_value = ir.tensor(_clipped(array, dtype), name=value.name)
    return model


def _clipped(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """As an exporter casts: a lowest float32 becomes the lowest number of fewer bits."""
    finite = np.clip(array, float(dtype.min), float(dtype.max))
    return np.where(np.isfinite(array), finite, array).astype(dtype.numpy())


def feeds(case: FusionCase, dtype: ir.DataType) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Named inputs: in each float one, hostile numbers in some places of some rows."""
    inputs = case.model().graph.inputs
    batched = [v.name for v in inputs if v.shape and str(v.shape[0]) == "B"]
    plain = case.feeds(**_SIZES)
    kind = dtype.numpy()
    # so far from the ends that a sum of squares over a row overflows or vanishes in every type
    huge, tiny = {"e": (1e4, 1e-6), "d": (1e200, 1e-200)}.get(np.dtype(kind).char, (1e30, 1e-30))
    for name in FEEDS:
        if case.spared(name, np.dtype(kind).name):
            continue
        found = {}
        for key, array in plain.items():
            made = array.copy()
            rows = made.reshape(-1, made.shape[-1]) if made.ndim else made.reshape(1, 1)
            if made.dtype == np.bool_:
                rows[0] = False
            elif made.dtype.kind == "f":
                match name:
                    case "nan":
                        rows[1 % len(rows), 0] = np.nan
                    case "infinite":
                        rows[0, -1], rows[-1, 0] = np.inf, -np.inf
                    case "signed_zero":
                        rows[::2] = -0.0
                    case "huge":
                        rows[0] *= huge
                    case "tiny":
                        rows[::2] *= tiny
                    case "masked" if key == "mask":
                        rows[0], rows[1, 0] = -np.inf, np.inf
                        rows[2] = float(dtype.min)
            found[key] = made.astype(kind) if made.dtype.kind == "f" else made
        if name == "empty":
            if not batched:
                continue
            found = {key: a[:0] if key in batched else a for key, a in found.items()}
        yield name, found


def differences(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> list[str]:
    """What is not the same: shapes, types, places of NaN and of infinities, signs of 0, numbers."""
    said = []
    for name, wanted in truth.items():
        got = found[name]
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            said.append(f"{name}: {got.dtype}{got.shape} for {wanted.dtype}{wanted.shape}")
            continue
        tolerance = TOLERANCE.get(wanted.dtype.name)
        if tolerance is None:
            said += [f"{name}: other integers"] if (got != wanted).any() else []
            continue
        got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        finite = np.isfinite(wanted)
        if (np.isnan(got) != np.isnan(wanted)).any():
            said.append(f"{name}: NaN in {np.isnan(got).sum()} for {np.isnan(wanted).sum()} places")
        elif (got[~finite] != wanted[~finite])[~np.isnan(wanted[~finite])].any():
            said.append(f"{name}: other infinities")
        elif not np.isfinite(got[finite]).all():
            said.append(f"{name}: infinities where numbers were")
        elif finite.any():
            error = np.abs(got - wanted)[finite].max()
            largest = np.abs(wanted[finite]).max()
            if error > tolerance * largest:
                said.append(f"{name}: off by {error} of {largest}")
            zeros = finite & (wanted == 0) & (got == 0)
            if (np.signbit(got) != np.signbit(wanted))[zeros].any():
                said.append(f"{name}: zeros of another sign")
    return said


REFUSED = (Fail, InvalidArgument, InvalidGraph, NotImplemented)


def sessions(proto: bytes) -> list[onnxruntime.InferenceSession]:
    """The model node by node, and as onnxruntime optimizes it."""
    return [stock(proto), stock(proto, optimized=True)]


def check(case: FusionCase, dtype: ir.DataType) -> list[str] | None:
    """Where an optimized graph differs from the original, at any level, written out or not.

    None where onnxruntime has no such graph in this type.
    """
    source = in_type(case, dtype)
    original = to_proto(source).SerializeToString()
    try:
        expected = sessions(original)
    except REFUSED:
        return None
    seen, models, loaded = {original}, [], load(source)
    # what level 2 leaves out of 0 and 1 is the same in every type
    for level in rewrite.LEVELS if dtype == ir.DataType.FLOAT else (2, 3):
        model = loaded.clone()
        rewrite.optimize(model, level=level)
        for title in (f"level {level}", f"level {level} written out"):
            proto = to_proto(model).SerializeToString()
            if proto in seen:
                break
            seen.add(proto)
            models.append((title, sessions(proto)))
            model = inline(model)
    wrong = []
    for name, given in feeds(case, dtype):
        for k, own in enumerate(("node by node", "optimized")):
            try:
                truth = answers(expected[k], given)
            except REFUSED:
                continue
            for title, optimized in models:
                try:
                    said = differences(answers(optimized[k], given), truth)
                except REFUSED as error:
                    said = [str(error)]
                wrong += [f"{name}, {title}, {own}: {difference}" for difference in said]
    return wrong
