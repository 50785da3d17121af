"""Calibration: batches of a file or made up, and the ranges of activations on them."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError, UsageError, unknown
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import required_inputs
from onnx_fuse.runtime import ort
from onnx_fuse.validation.inputs import Feeds, generate, read_feeds

METHODS = ("minmax", "entropy", "percentile")
"""onnxruntime's methods to find ranges, by the names that users give."""
LABELS = "labels"
"""The array of the rows' labels, for a metric."""
_ROWS = 16
"""Rows of a batch where the model leaves their number open."""
MADE_UP = (
    "no calibration data was given: the ranges are those of random inputs, and real ones differ; "
    "give some hundred typical inputs (--calibrate DATA.npz) before the file is used"
)


def rows(
    model: ir.Model, data: str | os.PathLike[str] | Mapping[str, Array], labelled: bool
) -> list[tuple[Feeds, Array | None]]:
    """The `batches` of data, each with its labels where it is `labelled` and has some.

    Raises as `batches` does.
    """
    inputs = {v.name for v in model.graph.inputs}
    beside = [LABELS] if labelled and LABELS not in inputs else []
    pairs = []
    for batch in batches(model, data, beside):
        labels = batch.pop(LABELS, None) if beside else batch.get(LABELS)
        pairs.append((batch, labels if labelled else None))
    return pairs


def batches(
    model: ir.Model,
    data: str | os.PathLike[str] | Mapping[str, Array],
    beside: Sequence[str] = (),
) -> list[Feeds]:
    """An .npz file, or arrays, of many rows as batches that the model takes, or of 16 rows.

    The arrays named in `beside` are kept where they are there, though no input has their name.
    Raises ModelError or UsageError where they do not fit the model.
    """
    arrays = (
        dict(data)
        if isinstance(data, Mapping)
        else read_feeds(data, _open_batch(model), beside=beside)
    )
    inputs = required_inputs(model)
    missing = [v.name for v in inputs if v.name not in arrays]
    if missing:
        raise ModelError(f"the calibration data has no array for input '{missing[0]}'")
    kept = [*(v.name or "" for v in model.graph.inputs), *beside]
    arrays = {name: arrays[name] for name in kept if name in arrays}
    rows = {len(arrays[name]) for name in (*(v.name or "" for v in inputs), *beside)
            if name in arrays and arrays[name].ndim}  # fmt: skip
    first = [v.shape[0] for v in inputs if v.shape is not None and len(v.shape)]
    fixed = {size for size in first if isinstance(size, int)}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ModelError(f"'{name}' holds NaN in the calibration data: leave those rows out")
    if rows == {0}:
        raise UsageError("the calibration data has no rows: give some hundred typical ones")
    if len(rows) != 1 or len(first) < len(inputs) or len(fixed) > 1:
        return [dict(arrays)]
    size, count = next(iter(fixed), _ROWS), rows.pop()
    if fixed and count % size:
        raise UsageError(
            f"the calibration data has {count} rows, and the model takes batches of {size}: give "
            "a multiple of it"
        )
    return [
        {name: array[i : i + size] for name, array in arrays.items()} for i in range(0, count, size)
    ]


def _open_batch(model: ir.Model) -> ir.Model:
    model = model.clone()
    for value in required_inputs(model):
        if value.shape is not None and len(value.shape):
            value.shape = ir.Shape([None, *list(value.shape)[1:]])
    return model


def made_up(model: ir.Model) -> list[Feeds]:
    """Random inputs within what the graph takes, of several sizes where sizes are open.

    They have 16 rows or more together.
    """
    session, batches = ort.session(model, as_written=True), list[Feeds]()
    try:
        while sum(map(_rows, batches)) < _ROWS:
            pairs = generate(model, lambda feeds: ort.run(session, feeds), seed=len(batches))
            batches += [feeds for feeds, _ in pairs]
        return batches
    except ModelError as error:
        reason = str(error).partition(": give inputs")[0]
        raise ModelError(f"{reason}: give calibration data (--calibrate DATA.npz)") from error


def _rows(feeds: Feeds) -> int:
    return max((len(array) for array in feeds.values() if np.ndim(array)), default=1) or 1


def ranges(model: ir.Model, feeds: Sequence[Feeds], method: str, operators: Sequence[str]) -> Any:
    """onnxruntime's TensorsData: the range of each tensor that these operators read or make."""
    from onnxruntime.quantization import CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator

    if method not in METHODS:
        raise UsageError(unknown("calibration method", method, METHODS))

    printed = redirect_stdout(io.StringIO())  # histograms tell how far they are
    with tempfile.TemporaryDirectory(prefix="onnx_fuse.") as folder, printed:
        path = Path(folder) / "model.onnx"
        save(model, path, external=True)
        calibrator = create_calibrator(
            path,
            list(operators),
            augmented_model_path=str(Path(folder) / "augmented.onnx"),
            calibrate_method=next(m for m in CalibrationMethod if m.name.lower() == method),
            use_external_data_format=True,
        )
        with ort.faults("the model on the calibration data"):
            for batch in feeds:  # those of one call must be of one size
                reader = SimpleNamespace(get_next=partial(next, iter([batch]), None))
                calibrator.collect_data(reader)
        return calibrator.compute_data()
