"""Tensor: an array in host or GPU memory, with the operators of ONNX and a gradient."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.nn import dispatch, operators
from onnx_fuse.nn.arrays import (
    Dims,
    DType,
    Sizes,
    as_array,
    axes_of,
    axis_of,
    exported,
    ints,
    is_float,
    np_name,
    number_of,
    of_one,
    ones_like,
    placed,
    within,
)
from onnx_fuse.nn.dispatch import MODE, no_grad, op_call, unrecorded
from onnx_fuse.nn.runner import Array
from onnx_fuse.program.call import dtype_of

Number: TypeAlias = "bool | int | float"
Method: TypeAlias = "Callable[[Tensor], Tensor]"


def _unary(name: str, text: str, call: Method | None = None, integers: str = "") -> Method:
    """A method; `integers` become "float32" first, or stay the "same"."""
    call = call or operators.emitter(name)

    def method(self: Tensor) -> Tensor:
        if integers and not is_float(self._data.dtype):
            return self if integers == "same" else call(self.float())
        return call(self)

    method.__doc__ = text
    return method


def _converted(to: str, text: str) -> Method:
    def method(self: Tensor) -> Tensor:
        return self.to(to)

    method.__doc__ = text
    return method


def _binary(
    call: Callable[..., Any], text: str, *, swapped: bool = False
) -> Callable[[Tensor, Any], Tensor]:
    def method(self: Tensor, other: object) -> Any:
        if not isinstance(other, Tensor) or other._data.dtype is not self._data.dtype:
            if not isinstance(other, _OPERANDS):
                return NotImplemented
            self, other = promoted(self, other)
        return call(other, self) if swapped else call(self, other)

    method.__doc__ = text
    return method


class Tensor:
    """An array with gradients: NumPy's and PyTorch's names, ONNX's operators.

    The elements are immutable: an operator makes a new Tensor, and `copy_` gives this one the
    elements of another. Views share memory with what they are views of.

    Args:
        data: An array, a number, nested lists, another Tensor, or what has DLPack, whose memory is
            shared. Python's floats become float32 and its integers int64.
        dtype: The element type, such as "float32" or "bfloat16"; None keeps that of the data.
        device: "cpu", "cuda" or "cuda:1"; None leaves the data where it is.
        requires_grad: Whether `backward` gives it a gradient.
    """

    __array_ufunc__ = None  # NumPy's operators leave `array * tensor` to the Tensor, on the tape
    __slots__ = ("__weakref__", "_data", "_edge", "_index", "grad", "requires_grad")

    _data: Array
    grad: Tensor | None
    requires_grad: bool

    def __init__(
        self,
        data: object,
        dtype: DType | None = None,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> None:
        if isinstance(data, Tensor) and MODE.recorder is not None:
            data = data.detach() if dtype is None else data.detach().to(dtype)
            MODE.recorder.same(data, self)
        array = as_array(data)
        if dtype is not None and array.dtype != dtype_of(np_name(dtype)):
            array = Tensor(array).to(dtype)._data
        self._data, self._edge, self._index = placed(array, device), None, 0
        self.grad, self.requires_grad = None, False
        if requires_grad:
            self.requires_grad_()

    # ---- what it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes. A capture that reads them holds for these sizes only."""
        if MODE.recorder is not None:
            MODE.recorder.sizes_read(self)
        return tuple(self._data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type, as NumPy's."""
        return self._data.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._data.shape)

    @property
    def device(self) -> str:
        """ "cpu", or "cuda:0" for the first GPU."""
        data = self._data
        return "cpu" if type(data) is np.ndarray else f"cuda:{data.device_id}"

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operator made it."""
        return self._edge is None

    def size(self, dim: int | None = None) -> Any:
        """The size of axis `dim`, or the whole shape."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of axes."""
        return self.ndim

    def numel(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a Tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        with unrecorded():
            text = np.array2string(np.asarray(self.numpy()), separator=", ", threshold=40)
        more = "" if self.device == "cpu" else f", device='{self.device}'"
        more += ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({text}, dtype={self._data.dtype.name}{more})"

    # ---- its elements ----

    def numpy(self) -> np.ndarray[Any, Any]:
        """The elements as a NumPy array, which shares the memory of a host tensor."""
        if MODE.recorder is not None:
            MODE.recorder.values_read(self)
        data = self._data
        return data if type(data) is np.ndarray else data.numpy()

    def __array__(self, dtype: DType | None = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **options: object) -> Any:
        return exported(self._data, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        data = self._data
        return (1, 0) if type(data) is np.ndarray else data.__dlpack_device__()

    def item(self) -> Any:
        """The one element as a Python number."""
        return self.numpy().item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        return self.numpy().tolist()

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        if self._data.dtype.kind not in "iu":
            raise TypeError("only a Tensor of one integer can be an index")
        return int(self.item())

    # ---- gradients ----

    def requires_grad_(self, on: bool = True) -> Tensor:
        """Ask for a gradient of this leaf, or (`on=False`) no longer; returns itself."""
        if on and not is_float(self._data.dtype):
            raise UsageError(f"a Tensor of {self._data.dtype.name} has no gradient")
        self.requires_grad = on
        return self

    def detach(self) -> Tensor:
        """The same elements without a gradient."""
        detached = _wrap(self._data, None, 0)
        if MODE.recorder is not None:
            MODE.recorder.same(self, detached)
        return detached

    def backward(self, gradient: Tensor | None = None) -> None:
        """Add to the `grad` of each leaf that requires one the gradient of this tensor by it.

        Args:
            gradient: The gradient of this tensor, of its shape; None is 1, for a scalar.

        Raises:
            UsageError: No gradient is wanted, or passes an operator, or `gradient` does not fit.
        """
        if not self.requires_grad:
            raise UsageError("nothing that this Tensor was computed from requires a gradient")
        if self._edge is None:  # a leaf's gradient by itself, through an operator as all others
            return self.clone().backward(gradient)
        shape = getattr(getattr(gradient, "_data", gradient), "shape", ())
        if shape != self._data.shape or not isinstance(gradient, Tensor | None):
            raise UsageError(f"backward() of a Tensor {[*self._data.shape]} needs one of its shape")
        with unrecorded(), no_grad():
            dy = ones_like(self._data) if gradient is None else gradient._data
            grads = dispatch.gradients(self._edge, self._index, dy)
        new = [(leaf, _wrap(array, None, 0)) for leaf, array in grads]
        if MODE.recorder is not None:
            MODE.recorder.backward(self, gradient, new)
        with no_grad():
            for leaf, grad in new:
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad

    def copy_(self, source: object) -> Tensor:
        """Give this leaf the elements of `source`, cast to its dtype; returns itself."""
        if self._edge is not None:
            raise UsageError("copy_ is for leaves: this Tensor is the result of an operator")
        with no_grad():
            if not isinstance(source, Tensor):
                source = Tensor(np.array(Tensor(source)._data), device=self.device)
            new = source.to(self._data.dtype).to(self.device).detach()
            if new._data.shape != self._data.shape:
                new = new.expand(*self._data.shape)
        self._data = new._data
        if MODE.recorder is not None:
            MODE.recorder.assigned(self, new)
        return self

    # ---- types and places ----

    def to(self, to: DType) -> Tensor:
        """The elements in the dtype `to`, or on the device "cpu", "cuda" or "cuda:N"."""
        if isinstance(to, str) and to.partition(":")[0] in ("cpu", "cuda"):
            here = to in (self.device, self.device.partition(":")[0])
            return self if here else self._on_device(to)
        dtype = dtype_of(np_name(to))
        if dtype == self._data.dtype:
            return self
        return operators.cast(self, dtype=dtype.name)

    def _on_device(self, device: str) -> Tensor:
        if MODE.recorder is not None and MODE.recorder.knows(self):
            raise UsageError("a captured function cannot move its tensors to another device")
        if self._edge is not None and MODE.grad:
            raise UsageError(
                "a gradient does not pass from one device to another: move the tensor before the "
                "computation, or its .detach()"
            )
        return Tensor(placed(self._data, device), requires_grad=self.requires_grad)

    astype = to

    float = _converted("float32", "The elements as float32.")
    half = _converted("float16", "The elements as float16.")
    bfloat16 = _converted("bfloat16", "The elements as bfloat16.")
    double = _converted("float64", "The elements as float64.")
    long = _converted("int64", "The elements as int64.")
    cpu = _converted("cpu", "The tensor in host memory.")
    cuda = _converted("cuda", "The tensor in the memory of the first GPU.")

    # ---- arithmetic ----

    __add__ = _binary(operators.emitter("Add"), "The sum with `other`.")
    __radd__ = __add__
    __sub__ = _binary(operators.emitter("Sub"), "The difference from `other`.")
    __rsub__ = _binary(operators.emitter("Sub"), "The difference from `other`.", swapped=True)
    __mul__ = _binary(operators.emitter("Mul"), "The product of each element with `other`'s.")
    __rmul__ = __mul__
    __truediv__ = _binary(operators.divide, "The quotient by `other`, of integers in float32.")
    __rtruediv__ = _binary(operators.divide, "Quotient.", swapped=True)
    __floordiv__ = _binary(operators.floor_divide, "Quotient, rounded down.")
    __rfloordiv__ = _binary(operators.floor_divide, "Quotient, rounded down.", swapped=True)
    __mod__ = _binary(operators.remainder, "Remainder, with the divisor's sign.")
    __rmod__ = _binary(operators.remainder, "Remainder, with the divisor's sign.", swapped=True)
    __pow__ = _binary(operators.power, "Each element to the power of `other`.")
    __rpow__ = _binary(operators.power, "Each element to the power of `other`.", swapped=True)
    __matmul__ = _binary(operators.emitter("MatMul"), "The matrix multiplication with `other`.")
    __rmatmul__ = _binary(
        operators.emitter("MatMul"), "The matrix multiplication with `other`.", swapped=True
    )
    __and__ = _binary(operators.logical("And", "BitwiseAnd"), "Logical or bitwise and.")
    __or__ = _binary(operators.logical("Or", "BitwiseOr"), "Logical or bitwise or.")
    __xor__ = _binary(operators.logical("Xor", "BitwiseXor"), "Logical or bitwise exclusive or.")
    __lt__ = _binary(operators.emitter("Less"), "Less.")
    __le__ = _binary(operators.emitter("LessOrEqual"), "Less or equal.")
    __gt__ = _binary(operators.emitter("Greater"), "Greater.")
    __ge__ = _binary(operators.emitter("GreaterOrEqual"), "Greater or equal.")
    __eq__: Any = _binary(operators.emitter("Equal"), "Equal, for each element.")
    __ne__: Any = _binary(operators.not_equal, "Not equal, for each element.")
    __hash__ = object.__hash__
    maximum = _binary(operators.emitter("Max"), "The larger of each element and `other`'s.")
    minimum = _binary(operators.emitter("Min"), "The smaller of each element and `other`'s.")
    __invert__ = _unary(
        "Not", "Not, logical or of each bit.", operators.logical("Not", "BitwiseNot")
    )
    __neg__ = _unary("Neg", "The elements with the other sign.")
    __abs__ = _unary("Abs", "The absolute value of each element.")
    neg = __neg__
    abs = __abs__
    add = __add__
    sub = __sub__
    mul = __mul__
    div = __truediv__
    pow = __pow__
    matmul = __matmul__
    exp = _unary("Exp", "e to the power of each element.", integers="float32")
    log = _unary("Log", "The natural logarithm of each element.", integers="float32")
    sqrt = _unary("Sqrt", "The square root of each element.", integers="float32")
    rsqrt = _unary("rsqrt", "1 / √x of each element.", operators.rsqrt, "float32")
    sin = _unary("Sin", "The sine of each element.", integers="float32")
    cos = _unary("Cos", "The cosine of each element.", integers="float32")
    tanh = _unary("Tanh", "The hyperbolic tangent of each element.", integers="float32")
    sigmoid = _unary("Sigmoid", "1 / (1 + exp(-x)).", integers="float32")
    relu = _unary("Relu", "The larger of x and 0.")
    erf = _unary("Erf", "The error function of each element.", integers="float32")
    floor = _unary("Floor", "The largest integer that is not larger.", integers="same")
    ceil = _unary("Ceil", "The smallest integer that is not smaller.", integers="same")
    round = _unary("Round", "The nearest integer, of two the even one.", integers="same")
    sign = _unary("Sign", "-1, 0 or 1.")
    reciprocal = _unary("Reciprocal", "1 / x of each element.", integers="float32")
    isnan = _unary("IsNaN", "Whether each element is not a number.", integers="float32")

    def clamp(self, min: Number | None = None, max: Number | None = None) -> Tensor:
        """The elements limited to `min` from below and to `max` from above."""
        dtype = self._data.dtype
        if not is_float(dtype) and any(isinstance(b, float) for b in (min, max)):
            return self.float().clamp(min, max)
        if any(b is not None and b != b for b in (min, max)):
            return self * np.nan
        # of a missing bound onnxruntime makes the largest finite number
        open_ends = [-np.inf if min is None else min, np.inf if max is None else max]
        limits = open_ends if is_float(dtype) else [min, max]
        bounds = [None if b is None else np.array(b, dtype) for b in limits]
        return operators.clip(self, *bounds)

    clip = clamp

    @of_one
    def softmax(self, dim: int = -1) -> Tensor:
        """exp(x) / Σ exp(x) along axis `dim`."""
        return op_call("Softmax", [self], {"axis": dim})

    @of_one
    def log_softmax(self, dim: int = -1) -> Tensor:
        """x - log Σ exp(x) along axis `dim`."""
        return op_call("LogSoftmax", [self], {"axis": dim})

    def masked_fill(self, mask: Tensor, value: Number) -> Tensor:
        """The elements with `value` where the boolean `mask` is true."""
        return operators.select(mask, number_of(value, self._data.dtype), self)

    # ---- reductions ----

    def _reduced(self, kind: str, dim: Dims, keepdim: bool) -> Any:
        return operators.reduce(self, kind=kind, axes=axes_of(dim, self.ndim), keepdim=keepdim)

    def _floating(self, action: str) -> Tensor:
        """Itself. Raises UsageError for integers, whose `action` would be rounded to one."""
        if not is_float(self._data.dtype):
            raise UsageError(f"the {action} of a Tensor of {self._data.dtype.name}: take x.float()")
        return self

    def _extreme(self, kind: str, dim: Dims, keepdim: bool) -> Any:
        axes = axes_of(dim, self.ndim)
        if any(self._data.shape[a] == 0 for a in axes or range(self.ndim)):
            raise UsageError("the axis is empty: it has no largest or smallest element")
        return operators.extreme(self, kind=kind, axes=axes, keepdim=keepdim)

    def sum(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The sum over axes `dim` (one, several or all), which `keepdim` leaves with size 1."""
        return self._reduced("ReduceSum", dim, keepdim)

    def mean(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The mean over axes `dim`, as in `sum`, with `keepdim` as there: NaN of no elements.

        Raises UsageError for integers.
        """
        if 0 in self._floating("mean")._data.shape:
            return self.sum(dim, keepdim) / 0.0
        return self._reduced("ReduceMean", dim, keepdim)

    def prod(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The product over axes `dim`, with `keepdim` as in `sum`."""
        return self._reduced("ReduceProd", dim, keepdim)

    def amax(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The largest element over axes `dim`, with `keepdim` as in `sum`."""
        return self._extreme("ReduceMax", dim, keepdim)

    def amin(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The smallest element over axes `dim`, with `keepdim` as in `sum`."""
        return self._extreme("ReduceMin", dim, keepdim)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The largest element; along an axis `dim` the pair (values, their indices) (`keepdim`)."""
        return self.amax() if dim is None else self._at(self.argmax(dim, True), dim, keepdim)

    def min(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The smallest element; with `dim` the pair (values, indices), as in `max` (`keepdim`)."""
        return self.amin() if dim is None else self._at(self.argmin(dim, True), dim, keepdim)

    def _at(self, index: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
        """The elements at `index` [.., 1, ..], which alone have the gradient, and the index."""
        at = {"axis": dim}
        values = op_call("GatherElements", [self, index], at) if self.ndim else self.clone()
        return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))

    def var(self, dim: Dims = None, keepdim: bool = False, correction: int = 1) -> Tensor:
        """Σ (x - mean)² / (n - `correction`) over axes `dim`, with `keepdim` as in `sum`."""
        axes = axes_of(dim, self._floating("variance").ndim)
        return operators.variance(self, axes=axes, keepdim=keepdim, correction=correction)

    def std(self, dim: Dims = None, keepdim: bool = False, correction: int = 1) -> Tensor:
        """The square root of `var`, with the same `dim`, `keepdim` and `correction`."""
        return self.var(dim, keepdim, correction).sqrt()

    def _arg(self, kind: str, dim: int | None, keepdim: bool) -> Tensor:
        x = self.reshape(-1) if dim is None or not self.ndim else self
        axis = axis_of(dim or 0, self.ndim if dim is not None else 1)
        if x._data.shape[axis] == 0:
            raise UsageError("the axis is empty: it has no largest or smallest element")
        return operators.place(x, kind=kind, axis=axis, keepdim=keepdim and x is self)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The index (int64) of the first largest element along `dim`, or of all (`keepdim`)."""
        return self._arg("ArgMax", dim, keepdim)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The index (int64) of the first smallest element along `dim`, or of all (`keepdim`)."""
        return self._arg("ArgMin", dim, keepdim)

    def logsumexp(self, dim: Dims, keepdim: bool = False) -> Tensor:
        """log Σ exp(x) over axes `dim`, with `keepdim` as in `sum`."""
        return self._floating("logsumexp")._reduced("ReduceLogSumExp", dim, keepdim)

    def norm(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """√Σ x² over axes `dim`, with `keepdim` as in `sum`."""
        return self._floating("norm")._reduced("ReduceL2", dim, keepdim)

    def sort(self, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
        """The elements in order along `dim` (`descending` or not), and their indices."""
        return self.topk(self.shape[axis_of(dim, self.ndim)] if self.ndim else 1, dim, descending)

    @of_one
    def cumsum(self, dim: int) -> Tensor:
        """The running sum along axis `dim`."""
        x = self if is_float(self._data.dtype) else self.long()
        return op_call("CumSum", [x, np.array(axis_of(dim, self.ndim))])

    @of_one
    def topk(self, k: int, dim: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
        """The `k` largest (or not `largest`) elements along `dim`, and their indices, in order."""
        if k < 0:
            raise UsageError(f"topk needs a number of elements of at least 0, not {k}")
        attributes = {"axis": dim, "largest": int(largest)}
        values, indices = op_call("TopK", [self, [k]], attributes, outputs=2)
        return values, indices

    def any(self) -> Tensor:
        """Whether an element is not 0."""
        return self.to("bool").sum() > 0

    def all(self) -> Tensor:
        """Whether no element is 0."""
        return (~self.to("bool")).sum() == 0

    # ---- shapes ----

    def reshape(self, *shape: Sizes) -> Tensor:
        """The elements in another shape, in which one size may be -1; a view."""
        sizes = ints(shape)
        if (sizes < -1).any():
            raise UsageError(f"a size of reshape is from -1 on, not {sizes.min()}")
        return op_call("Reshape", [self, sizes], {"allowzero": 1})

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """The tensor with the axes from `start_dim` to `end_dim` made one; a view."""
        start, end = axis_of(start_dim, self.ndim), axis_of(end_dim, self.ndim)
        if start > end:
            raise UsageError(f"flatten from axis {start} to {end}: the first is after the last")
        return operators.flatten(self, start=start, end=end)

    def permute(self, *dims: Sizes) -> Tensor:
        """The tensor with its axes in the order `dims`; a view."""
        order = axes_of(ints(dims).tolist(), self.ndim) or ()
        if len(order) != self.ndim:
            raise UsageError(f"permute takes each of {self.ndim} axes once, not {len(order)} axes")
        return op_call("Transpose", [self], {"perm": list(order)})

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """The tensor with the axes `dim0` and `dim1` exchanged; a view."""
        dim0, dim1 = axis_of(dim0, self.ndim), axis_of(dim1, self.ndim)
        order = list(range(self.ndim or 1))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(order) if self.ndim else self

    @property
    def T(self) -> Tensor:
        """The tensor with its axes in reverse order; a view."""
        return self.permute(list(range(self.ndim))[::-1])

    @property
    def mT(self) -> Tensor:
        """The tensor with its last two axes exchanged; a view."""
        return self.transpose(-2, -1)

    def squeeze(self, dim: Dims = None) -> Tensor:
        """The tensor without the axes of size 1, or without those of them that are in `dim`."""
        axes = axes_of(dim, self.ndim)
        ones = [i for i, d in enumerate(self.shape) if d == 1 and (axes is None or i in axes)]
        return op_call("Squeeze", [self, ones])

    def unsqueeze(self, dim: Sizes) -> Tensor:
        """The tensor with new axes of size 1 at `dim`."""
        count = 1 if isinstance(dim, int | np.integer) else len(dim)
        return op_call("Unsqueeze", [self, list(axes_of(dim, self.ndim + count) or ())])

    def expand(self, *shape: Sizes) -> Tensor:
        """The tensor repeated along axes of size 1 to `shape`, where -1 keeps a size; a view."""
        sizes = ints(shape)
        old = (*[1] * (len(sizes) - self.ndim), *self._data.shape)
        if len(sizes) < self.ndim or (sizes[: len(sizes) - self.ndim] < 0).any():
            raise UsageError(f"expand gives no sizes to all axes of {[*old]}: {sizes.tolist()}")
        if any(d not in (-1, size) and size != 1 for d, size in zip(sizes, old, strict=True)):
            raise UsageError(f"expand repeats only axes of size 1: {[*old]} to {sizes.tolist()}")
        sizes = np.where(sizes == -1, 1, sizes)  # ONNX broadcasts both ways
        return op_call("Expand", [self, sizes])

    def repeat(self, *times: Sizes) -> Tensor:
        """The tensor repeated `times` along each axis."""
        counts = ints(times)
        if len(counts) < self.ndim or (counts < 0).any():
            raise UsageError(f"repeat takes a count from 0 on for each axis, not {counts.tolist()}")
        x = self[(None,) * (len(counts) - self.ndim)] if len(counts) > self.ndim else self
        return op_call("Tile", [x, counts])

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Parts of these `sizes` along axis `dim`; of one size, but for a shorter last part."""
        dim = axis_of(dim, self.ndim)
        if isinstance(sizes, int):
            if sizes <= 0:
                raise UsageError(f"split takes parts of a size from 1 on, not {sizes}")
            length = self.shape[dim]
            sizes = [builtins.min(sizes, length - i) for i in range(0, length or 1, sizes)]
        return _several(op_call("Split", [self, list(sizes)], {"axis": dim}, outputs=len(sizes)))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """`chunks` parts along axis `dim`, of one size but for a smaller last one.

        There are fewer where so many of that size have all elements already.
        """
        dim = axis_of(dim, self.ndim)
        if chunks < 1:
            raise UsageError(f"chunk makes one part or more, not {chunks}")
        each = -(-self._data.shape[dim] // chunks)
        if each * (chunks - 1) >= self._data.shape[dim]:
            return self.split(builtins.max(each, 1), dim) if each else (self,) * chunks
        attributes = {"axis": dim, "num_outputs": chunks}
        return _several(op_call("Split", [self], attributes, outputs=chunks))

    def tril(self, diagonal: int = 0) -> Tensor:
        """The lower triangle of each matrix, up to `diagonal`; 0 above it."""
        return op_call("Trilu", [self, np.array(diagonal)], {"upper": 0})

    def triu(self, diagonal: int = 0) -> Tensor:
        """The upper triangle of each matrix, from `diagonal` on; 0 below it."""
        return op_call("Trilu", [self, np.array(diagonal)], {"upper": 1})

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """The elements at `index` along axis `dim`: ONNX's GatherElements."""
        within(index)
        return op_call("GatherElements", [self, index], {"axis": dim})

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The slices at `index` along axis `dim`: ONNX's Gather."""
        within(index)
        return op_call("Gather", [self, index], {"axis": dim})

    def clone(self) -> Tensor:
        """A tensor of the same elements, through which the gradient flows."""
        return op_call("Identity", [self])

    def contiguous(self) -> Tensor:
        """Itself: operators take any view."""
        return self

    def __getitem__(self, key: object) -> Tensor:
        from onnx_fuse.nn.indexing import indexed

        return indexed(self, key)

    def __setitem__(self, key: object, value: object) -> None:
        raise UsageError(
            "the elements of a Tensor do not change: make a new one with where() or masked_fill()"
        )


_OPERANDS = (Tensor, np.ndarray, np.generic, int, float)

for _name, _function in vars(Tensor).items():  # tracebacks and pickle read a function's own name
    if getattr(_function, "__name__", "") == "method":
        _function.__name__, _function.__qualname__ = _name, f"Tensor.{_name}"


def _wrap(array: Array, edge: Any, index: int) -> Tensor:
    new = Tensor.__new__(Tensor)
    new._data, new._edge, new._index = array, edge, index
    new.grad, new.requires_grad = None, edge is not None
    return new


dispatch.use(_wrap)


def tensor(
    data: object, dtype: DType | None = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """A Tensor of `data`, with the `dtype`, `device` and `requires_grad` of `Tensor`."""
    return Tensor(data, dtype, device, requires_grad)


def where(condition: Tensor, a: object, b: object) -> Tensor:
    """`a` where the boolean `condition` is true, else `b`; all broadcast."""
    if isinstance(a, Tensor):
        a, b = promoted(a, b)
    else:
        b, a = promoted(b, a) if isinstance(b, Tensor) else (Tensor(b), Tensor(a))
    return operators.select(condition, a, b)


# ---- types -------------------------------------------------------------------------------------


def promoted(a: Tensor, b: object) -> tuple[Any, Any]:
    """Two operands in one dtype: a float's where the other is an integer, else the wider one."""
    kind = a._data.dtype
    if isinstance(b, int | float) and not isinstance(b, np.generic):
        if is_float(kind):
            return a, np.array(b, kind)
        if isinstance(b, float):
            return a.to("float32"), np.array(b, np.float32)
        if kind.kind == "b" and not isinstance(b, bool):
            return a.to("int64"), np.array(b, np.int64)
        return a, np.array(b, kind)
    if not isinstance(b, Tensor):
        b = Tensor(b)
    other = b._data.dtype
    if other == kind:
        return a, b
    if is_float(kind) != is_float(other):
        common = kind if is_float(kind) else other
    else:
        common = np.promote_types(kind, other)
    return a.to(common), b.to(common)


def _several(results: object) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
