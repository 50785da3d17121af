"""The feeds of a run, checked against a model's inputs and refused in onnxruntime's words."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.program.call import dtype_of
from onnx_fuse.runtime.deployed import Deployed
from onnx_fuse.runtime.tensor import Argument, DeviceTensor

if TYPE_CHECKING:
    import onnx_ir as ir


class InputSpec:
    """An input as runs check it: name, onnxruntime's name of its type, NumPy's type, shape."""

    def __init__(self, value: Argument) -> None:
        self.name: str = value.name
        self.type = value.type.removeprefix("tensor(").removesuffix(")")
        self.dtype = dtype_of(_NUMPY_NAMES.get(self.type, self.type))
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
        actual = _ORT_NAMES.get(array.dtype.name, array.dtype.name)
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


SharedSizes = dict[str, list[tuple[str, int]]]


def shared_sizes(inputs: Sequence[Any]) -> SharedSizes:
    """The inputs' axes by the name of their size, where several inputs have one of that name."""
    places: SharedSizes = {}
    for end in inputs:
        for axis, size in enumerate(end.shape or ()):
            if isinstance(size, str):
                places.setdefault(size, []).append((end.name, axis))
    return {size: axes for size, axes in places.items() if len({n for n, _ in axes}) > 1}


def warn_of_different(shared: SharedSizes, feeds: Mapping[str, Any]) -> None:
    """Warn where sizes of one name, by which the graph was optimized, are not equal."""
    for size, axes in shared.items():
        # no arrays, or not of the model's ranks: the run says so
        with contextlib.suppress(AttributeError, LookupError):
            if len({feeds[name].shape[axis] for name, axis in axes}) > 1:
                text = f"inputs have different sizes in dimensions that the model calls '{size}'"
                warnings.warn(text, stacklevel=2)
                return


def argument(value: ir.Value) -> Argument:
    """An input or output of a graph as onnxruntime describes it."""
    name = value.dtype.name.lower() if value.dtype is not None else ""
    shape = [
        d if isinstance(d, int) else d.value
        for d in (value.shape if value.shape is not None else ())
    ]
    return Argument(value.name or "", f"tensor({name})", shape)


@dataclass(frozen=True)
class Interface:
    """The inputs that must be fed, those that may be, with their defaults, and the outputs."""

    inputs: list[Argument]
    overridable: list[Argument]
    outputs: list[Argument]
    defaults: dict[str, np.ndarray[Any, Any]]

    @classmethod
    def of_graph(cls, model: ir.Model, hidden: Collection[str] = ()) -> Interface:
        """Those of a graph but for `hidden` inputs, which the session itself feeds."""
        from onnx_fuse.ir.build import defaults, required_inputs

        arrays = defaults(model)
        overridable = [argument(v) for v in model.graph.inputs if v.name in arrays]
        inputs = [argument(v) for v in required_inputs(model) if v.name not in hidden]
        return cls(inputs, overridable, [argument(v) for v in model.graph.outputs], arrays)

    @classmethod
    def of_compiled(cls, compiled: Deployed) -> Interface:
        arrays = compiled.defaults
        inputs = [end for end in compiled.inputs if end.name not in arrays]
        overridable = [end for end in compiled.inputs if end.name in arrays]
        return cls(inputs, overridable, compiled.outputs, arrays)
