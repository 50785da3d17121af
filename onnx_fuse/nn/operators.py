"""The operators behind the methods of Tensor: functions that emit a few ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import rank, required
from onnx_fuse.nn.dispatch import MODE, operation
from onnx_fuse.ops.rules import is_float
from onnx_fuse.ops.shape_ops import Writer, known_rank
from onnx_fuse.program.call import dtype_of

Axes: TypeAlias = tuple[int, ...]


def emitter(name: str, attributes: dict[str, Any] | None = None) -> Any:
    """A function of Tensors that is one node."""

    def build(op: Writer, *values: ir.Value) -> Any:
        return op.node(name, values, attributes=attributes)

    build.__name__ = name
    return operation(build)


@operation
def divide(op: Writer, a: ir.Value, b: ir.Value) -> Any:
    if is_float(a):
        return op.Div(a, b)
    return op.Div(op.Cast(a, to=1), op.Cast(b, to=1))


@operation
def floor_divide(op: Writer, a: ir.Value, b: ir.Value) -> Any:
    if not is_float(a):
        zero = op.CastLike(0, a)
        signed = required(a.dtype).name.startswith("INT")
        minus = op.Equal(b, op.CastLike(-1, b)) if signed else None
        # the least integer by -1 does not fit its type, which ends the process
        by = b if minus is None else op.Where(minus, op.CastLike(1, b), b)
        other = op.Xor(op.Less(a, zero), op.Less(by, zero))
        rounded = op.And(other, op.Not(op.Equal(op.Mod(a, by), zero)))
        quotient = op.Sub(op.Div(a, by), op.CastLike(rounded, a))
        return quotient if minus is None else op.Where(minus, op.Sub(zero, a), quotient)
    rest, other = _rest(op, a, b)
    quotient = op.Sub(op.Div(op.Sub(a, rest), b), op.CastLike(other, a))
    low = op.Floor(quotient)  # which the quotient's rounding may have made one too small
    low = op.Add(low, op.CastLike(op.Greater(op.Sub(quotient, low), 0.5), a))
    return op.Where(op.Equal(b, 0.0), op.Div(a, b), low)


def _rest(op: Writer, a: ir.Value, b: ir.Value) -> tuple[Any, Any]:
    """a - trunc(a / b) · b, exactly, and where it is not 0 and of another sign than b."""
    rest = op.Mod(a, b, fmod=1)
    other = op.Xor(op.Less(rest, 0.0), op.Less(b, 0.0))
    return rest, op.And(other, op.Not(op.Equal(rest, 0.0)))


@operation
def remainder(op: Writer, a: ir.Value, b: ir.Value) -> Any:
    if not is_float(a):
        return op.Mod(a, b)
    rest, other = _rest(op, a, b)
    return op.Where(other, op.Add(rest, b), rest)


@operation
def not_equal(op: Writer, a: ir.Value, b: ir.Value) -> Any:
    return op.Not(op.Equal(a, b))


def logical(boolean: str, bits: str) -> Callable[..., Any]:
    def build(op: Writer, *values: ir.Value) -> Any:
        return op.node(boolean if values[0].dtype == ir.DataType.BOOL else bits, values)

    build.__name__ = boolean
    return operation(build)


@operation
def reduce(op: Writer, x: ir.Value, *, kind: str, axes: Axes | None, keepdim: bool) -> Any:
    """A reduction; of integers, whose sums and products do not fit their type, an int64."""
    over = None if axes is None else op.constant(list(axes))
    if not is_float(x):
        x = op.Cast(x, to=7)
    if not required(x.dtype).is_integer() or not rank(x):
        return op.node(kind, [x, over], keepdims=int(keepdim))
    # modulo 2^64, as NumPy's: onnxruntime's ReduceSum and ReduceProd go through float64
    unit, how = ir.tensor([int(kind == "ReduceProd")]), "mul" if kind == "ReduceProd" else "add"
    for axis in axes or range(known_rank(x)):
        sizes = op.Shape(x, end=axis), op.constant([1]), op.Shape(x, start=axis + 1)
        first = op.ConstantOfShape(op.Concat(*sizes, axis=0), value=unit)
        places = op.ConstantOfShape(op.Shape(x), value=ir.tensor([0]))
        x = op.ScatterElements(first, places, x, axis=axis, reduction=how)
    return op.Identity(x) if keepdim else op.Squeeze(x, over)


@operation
def extreme(op: Writer, x: ir.Value, *, kind: str, axes: Axes | None, keepdim: bool) -> Any:
    """The largest or smallest element; NaN where there is one, which ONNX may leave out."""
    over, keep = None if axes is None else op.constant(list(axes)), int(keepdim)
    y = op.node(kind, [x, over], keepdims=keep)
    if not is_float(x):
        return y
    return op.Where(_any_nan(op, x, over, keep), op.CastLike(np.nan, x), y)


@operation
def place(op: Writer, x: ir.Value, *, kind: str, axis: int, keepdim: bool) -> Any:
    """The index of the largest or smallest element, or of the first NaN."""
    y = op.node(kind, [x], axis=axis, keepdims=int(keepdim))
    if not is_float(x):
        return y
    first = op.ArgMax(op.Cast(op.IsNaN(x), to=6), axis=axis, keepdims=int(keepdim))
    return op.Where(_any_nan(op, x, op.constant([axis]), int(keepdim)), first, y)


def _any_nan(op: Writer, x: ir.Value, axes: ir.Value | None, keep: int) -> Any:
    return op.Cast(op.ReduceMax(op.Cast(op.IsNaN(x), to=6), axes, keepdims=keep), to=9)


@operation
def variance(op: Writer, x: ir.Value, *, axes: Axes | None, keepdim: bool, correction: int) -> Any:
    """Σ (x - mean)² / (n - correction)."""
    over = None if axes is None else op.constant(list(axes))
    d = op.Sub(x, op.ReduceMean(x, over, keepdims=1))
    sizes = op.Shape(x) if over is None else op.Gather(op.Shape(x), over)
    n = op.Sub(op.ReduceProd(sizes, keepdims=0), op.constant(np.array(correction)))
    n = op.Max(n, op.constant(np.array(0)))
    return op.Div(op.ReduceSum(op.Mul(d, d), over, keepdims=int(keepdim)), op.CastLike(n, x))


@operation
def rsqrt(op: Writer, x: ir.Value) -> Any:
    return op.Reciprocal(op.Sqrt(x))


@operation
def einsum(op: Writer, *values: ir.Value, equation: str) -> Any:
    return op.Einsum(*values, equation=equation)


@operation
def cast(op: Writer, x: ir.Value, *, dtype: str) -> Any:
    return op.Cast(x, to=int(ir.DataType.from_numpy(dtype_of(dtype))))


clip, select = emitter("Clip"), emitter("Where")


@operation
def flatten(op: Writer, x: ir.Value, *, start: int, end: int) -> Any:
    if start == end:
        return op.Unsqueeze(x, [0]) if not rank(x) else op.Identity(x)
    if end == known_rank(x) - 1 and start == 1:
        return op.Flatten(x, axis=1)
    head, tail = op.Shape(x, start=0, end=start), op.Shape(x, start=end + 1)
    count = op.ReduceProd(op.Shape(x, start=start, end=end + 1), keepdims=1)
    return op.Reshape(x, op.Concat(head, count, tail, axis=0), allowzero=1)


_POWER = emitter("Pow")


@operation
def _whole_power(op: Writer, x: ir.Value, y: ir.Value, *, bits: int) -> Any:
    """x^y of integers modulo their width, as NumPy's: onnxruntime's Pow goes through float64."""
    base, rest = op.Cast(x, to=7), op.Cast(y, to=7)
    power, two = op.constant(np.array(1)), op.constant(np.array(2))
    for bit in range(bits):
        if bit:
            base, rest = op.Mul(base, base), op.Div(rest, two)
        power = op.Where(op.Cast(op.Mod(rest, two), to=9), op.Mul(power, base), power)
    return op.CastLike(power, x)


def power(x: Any, y: Any) -> Any:
    exponents = getattr(y, "_data", y)
    if exponents.dtype.kind not in "iu":
        return _POWER(x, y)
    bits = 8 * exponents.dtype.itemsize - 1
    if isinstance(exponents, np.ndarray | np.generic):
        if np.less(exponents, 0).any():
            raise UsageError("an integer to a negative power is no integer: take x.float()")
        if y is exponents or MODE.recorder is None:  # a capture may run with others
            bits = min(bits, 1 << (int(exponents.max(initial=1)).bit_length() - 1).bit_length())
    return _whole_power(x, y, bits=bits)
