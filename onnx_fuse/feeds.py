"""The feeds of a run, checked against a model's inputs and refused in onnxruntime's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.program.call import dtype_of
from onnx_fuse.runtime.tensor import DeviceTensor


class InputSpec:
    """An input as runs check it: name, onnxruntime's name of its type, NumPy's type, shape."""

    def __init__(self, value: Any) -> None:
        self.name: str = value.name
        self.type = value.type.removeprefix("tensor(").removesuffix(")")
        self.dtype = _numpy_dtype(self.type)
        self.shape = value.shape
        self._rank = len(value.shape or ())
        self._fixed = [(i, d) for i, d in enumerate(value.shape or ()) if isinstance(d, int)]

    def accepts(self, value: Any) -> bool:
        """Whether it is an array or a tensor of ours that fits: the usual case, seen at once."""
        kind = type(value)
        if (kind is not np.ndarray and kind is not DeviceTensor) or value.dtype is not self.dtype:
            return False
        shape = value.shape
        if len(shape) != self._rank:
            return False
        return not self._fixed or all(shape[axis] == size for axis, size in self._fixed)


def checked_feeds(inputs: Sequence[InputSpec], feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The feeds as arrays, checked against the inputs and refused in onnxruntime's own words."""
    required = [v.name for v in inputs]
    missing = [name for name in required if name not in feeds]
    if missing:
        raise ValueError(
            f"Required inputs ({missing}) are missing from input feed ({list(feeds)})."
        )
    for name in feeds:
        if name not in required:
            raise invalid(f"Invalid input name: {name}")
    arrays = {}
    for value in inputs:
        array = feeds[value.name]
        if not hasattr(array, "dtype"):
            array = np.asarray(array, dtype=value.dtype)
        actual = _onnx_name(array.dtype)
        if actual != value.type:
            raise invalid(
                f"Unexpected input data type. Actual: (tensor({actual})) , "
                f"expected: (tensor({value.type}))"
            )
        _check_shape(value.name, array.shape, value.shape)
        arrays[value.name] = array
    return arrays


def _check_shape(name: str, got: Sequence[int], expected: Sequence[Any] | None) -> None:
    if not expected:
        return
    if len(got) != len(expected):
        raise invalid(
            f"Invalid rank for input: {name} Got: {len(got)} Expected: {len(expected)} "
            "Please fix either the inputs/outputs or the model."
        )
    wrong = [
        f" index: {i} Got: {a} Expected: {b}\n"
        for i, (a, b) in enumerate(zip(got, expected, strict=True))
        if isinstance(b, int) and a != b
    ]
    if wrong:
        raise invalid(
            f"Got invalid dimensions for input: {name} for the following indices\n"
            f"{''.join(wrong)} Please fix either the inputs/outputs or the model."
        )


# NumPy's names of element types, where they are not the ONNX ones in lower case.
_NUMPY_NAMES = {
    **{"double": "float64", "float": "float32", "string": "object"},
    **{f"float8e{kind}": f"float8_e{kind}" for kind in ("4m3fn", "5m2", "4m3fnuz", "5m2fnuz")},
    **{"float8e8m0": "float8_e8m0fnu", "float4e2m1": "float4_e2m1fn"},
}
_ORT_NAMES = {theirs: name for name, theirs in _NUMPY_NAMES.items()}


def _onnx_name(dtype: np.dtype[Any]) -> str:
    return _ORT_NAMES.get(dtype.name, dtype.name)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return dtype_of(_NUMPY_NAMES.get(name, name))


def invalid(text: str) -> Exception:
    """onnxruntime's InvalidArgument, or UsageError where it is not installed."""
    try:
        from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
    except ImportError:  # onnx-fuse-runtime does without
        return UsageError(text)
    return InvalidArgument(f"[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : {text}")


def rows_of(feeds: Mapping[str, Any], name: str) -> int | None:
    """The size of an input's first axis, None where a run says what is wrong with its feed."""
    shape = getattr(feeds[name], "shape", None) or np.shape(feeds[name]) if name in feeds else ()
    return int(shape[0]) if shape else None
