"""What gradient rules and contrib bodies ask of a graph, and the builder that they write with.

They keep shape arithmetic out of the graph wherever the shape is static. The emitter that runs
gradient rules makes one node of equal ones, so a rule may ask for `Shape(x)` as often as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import Builder, const_array, dim, given
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.evaluate import exact
from onnx_fuse.ops.formula import emitted

Tensor: TypeAlias = Any
"""The ir.Value that a call of the (untyped) builder returns."""
Values: TypeAlias = Sequence[Any]


# ---- attributes ------------------------------------------------------------------------------


def may_be_float(value: ir.Value | None) -> bool:
    """Whether a gradient can exist for the value; an unknown dtype may be one."""
    return value is not None and (value.dtype is None or value.dtype.is_floating_point())


def text(node: ir.Node, name: str, default: str) -> str:
    """A string attribute, or the default where it is absent or empty."""
    return node.attributes.get_string(name, default) or default


def ints_attribute(
    node: ir.Node, name: str, default: Sequence[int] | None = None
) -> list[int] | None:
    """An attribute that is a list of integers, or the default where it is absent."""
    ints = node.attributes.get_ints(name, None)
    return list(ints) if ints is not None else (None if default is None else list(default))


def arguments(node: ir.Node, count: int) -> list[Any]:
    """The first `count` inputs, None for those that are absent."""
    return [given(node, i) for i in range(count)]


def static(value: ir.Value | None, depth: int = 8) -> np.ndarray | None:
    """The value's content where the graph fixes it: a constant, or integers made of constants."""
    array = const_array(value)
    node = value.producer() if value is not None else None
    if array is not None or node is None or node.domain or not depth or may_be_float(value):
        return array
    if node.op_type == "Shape" and node.inputs[0] is not None:
        sizes = dims(node.inputs[0])
        end = node.attributes.get_int("end", None)
        return None if sizes is None else np.array(sizes[node.attributes.get_int("start", 0) : end])
    if node.op_type not in _STATIC or len(node.outputs) > 1:
        return None
    arrays = [None if v is None else static(v, depth - 1) for v in node.inputs]
    if any(a is None for a, v in zip(arrays, node.inputs, strict=True) if v is not None):
        return None
    answers = exact(node, arrays)
    return None if answers is None else answers[0]


_STATIC = frozenset(
    (
        *("Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather"),
        *("Identity", "Mul", "Neg", "Reshape", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    )
)


def static_ints(value: ir.Value | None) -> list[int] | None:
    """The content of a constant as a flat list of integers, or None where it is not fixed."""
    array = static(value)
    return None if array is None else [int(i) for i in array.reshape(-1)]


def fail(node: ir.Node, why: str) -> ModelError:
    """The ModelError that says why a node has no gradient."""
    return ModelError(
        f"no gradient for node '{node.name or node.outputs[0].name}' ({node.op_type}): {why}"
    )


# ---- shapes ----------------------------------------------------------------------------------


def known_rank(value: ir.Value) -> int:
    """The number of axes. Raises ModelError where it is unknown."""
    if value.shape is None:
        producer = value.producer()
        if producer is None:
            raise ModelError(
                f"the gradient needs the rank of '{value.name}', which is unknown: give the input "
                "a shape in the file, which may have dynamic dimensions"
            )
        foreign = producer.domain not in ("", FUSE)
        why = f"what {producer.domain}.{producer.op_type} computes is not known here; " * foreign
        raise fail(producer, f"{why}the rank of '{value.name}' is unknown")
    return len(value.shape)


def dims(value: ir.Value) -> list[int] | None:
    """The static shape, None where any axis is dynamic."""
    sizes = [dim(value, i) for i in range(len(value.shape))] if value.shape is not None else [None]
    return None if None in sizes else [s for s in sizes if s is not None]


def same_dim(a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> bool:
    """Equal for certain: one size, or one symbol."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.value is not None and a.value == b.value


def same_size(x: ir.Value, i: int, y: ir.Value, j: int) -> bool:
    """Whether axis `i` of x and axis `j` of y have the same size for certain."""
    return x.shape is not None and y.shape is not None and same_dim(x.shape[i], y.shape[j])


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values have the same shape for certain."""
    if a.shape is None or b.shape is None:
        return a is b
    return len(a.shape) == len(b.shape) and all(map(same_dim, a.shape, b.shape))


def restores(reshape: ir.Node, x: ir.Value | None) -> bool:
    """Whether a Reshape answers in the shape of `x` for certain."""
    shape = reshape.inputs[1].producer() if reshape.inputs[1] is not None else None
    asked = shape is not None and (shape.domain, shape.op_type) == ("", "Shape")
    if asked and shape is not None and not shape.attributes and shape.inputs[0] is x:
        return True
    return x is not None and same_shape(x, reshape.outputs[0])


def spans(vector: ir.Value, x: ir.Value, axis: int = -1) -> bool:
    """Whether a vector has the size of an axis of x for certain: no open size that may be 1."""
    size = vector.shape[0] if vector.shape is not None and len(vector.shape) == 1 else None
    if size is None or x.shape is None or not x.shape:
        return False
    return (isinstance(size, int) and size != 1) or same_dim(size, x.shape[axis])


def norm_axis(axis: int, value: ir.Value) -> int:
    """An axis counted from the front, from one that may be negative."""
    return axis if axis >= 0 else axis + known_rank(value)


# ---- the builder -----------------------------------------------------------------------------


class Writer(Builder):
    """A Builder with names for what takes several nodes: `op.Reshape` is one, `op.reshape` some.

    A size is a number, or an int64 vector of one that is computed where the model runs. `fused`:
    kernels of ours run the graph.
    """

    fused = False
    opset: int
    fresh: Callable[[str], str]

    def formula(self, text: str, node: ir.Node | None = None, /, **values: object) -> Any:
        """The result of formulas (`ops.formula`) of these values."""
        return emitted(text, self, node, **values)

    def to_like(self, value: Tensor, like: ir.Value) -> Tensor:
        """`value` cast to the dtype of `like`; at run time where either is unknown."""
        if value is like or (value.dtype == like.dtype and like.dtype is not None):
            return value
        return self.Cast(value, to=int(like.dtype)) if like.dtype else self.CastLike(value, like)

    def wide(self, value: Tensor) -> Tensor:
        """`value` in float32 where it is of 16 bits."""
        if value.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            return value
        wide = self.Cast(value, to=ir.DataType.FLOAT.value)
        wide.dtype, wide.shape = ir.DataType.FLOAT, value.shape
        return wide

    def emit(self, name: str, inputs: list[Any], like: list[Any], **attributes: object) -> Any:
        """A node of ours whose outputs have the types and shapes of `like`."""
        values = self.node(name, inputs, outputs=len(like), domain=FUSE, attributes=attributes)
        values = (values,) if len(like) == 1 else values
        for value, template in zip(values, like, strict=True):
            value.dtype, value.shape = template.dtype, template.shape
        return values

    def output(self, node: ir.Node, index: int, dtype: ir.DataType | None, label: str) -> Tensor:
        """Output `index` of a forward node; one that it lacks is added, named `<y>.<label>`."""
        if index >= len(node.outputs):
            node.resize_outputs(index + 1)
        value = node.outputs[index]
        if not value.name:
            value.name = self.fresh(f"{node.outputs[0].name}.{label}")
        if value.dtype is None and dtype is not None:
            value.dtype = dtype
        return value

    def shape_of(self, value: ir.Value, axes: Sequence[int] | None = None) -> Tensor:
        """The shape (of some axes) as an int64 vector: a constant where it is known."""
        if axes is None:
            sizes = dims(value)
            return self.constant(sizes) if sizes else self.Shape(value)
        static_sizes = [dim(value, a) for a in axes]
        if None not in static_sizes:
            return self.constant(static_sizes)
        if [a + 1 for a in axes[:-1]] == list(axes[1:]) and (
            axes[-1] + 1 or value.shape is not None
        ):
            end = axes[-1] + 1 if axes[-1] != -1 else None
            return self.Shape(value, start=axes[0], end=end)
        return self.Gather(self.Shape(value), list(axes))

    def sizes_of(self, value: ir.Value) -> list[Any]:
        """The size of each axis."""
        return [
            d if (d := dim(value, a)) is not None else self.Shape(value, start=a, end=a + 1)
            for a in range(known_rank(value))
        ]

    def reshape(self, value: ir.Value, sizes: Sequence[Any]) -> Tensor:
        """Reshape to numbers and int64 vectors (of any length), in order; -1 as in Reshape.

        Beside a -1 a number of 0 copies a size; without one, every size is meant as it is. A value
        without elements has no -1 that onnxruntime finds where another size is 0.
        """
        copies = any(isinstance(s, int) and s < 0 for s in sizes)
        open_sizes = not all(isinstance(s, int) for s in sizes)
        zeros = any(isinstance(s, int) and s == 0 for s in sizes)
        exact = not copies and (open_sizes or zeros)
        return self.Reshape(value, self.vector(sizes), allowzero=1 if exact else None)

    def elements(self, value: ir.Value, start: int = 0) -> Any:
        """The number of elements along the axes from `start` on, as a size."""
        sizes = [dim(value, a) for a in range(start, known_rank(value))]
        if None in sizes:
            return self.ReduceProd(self.Shape(value, start=start), keepdims=1)
        return math.prod(s for s in sizes if s is not None)

    def ratio(self, x: ir.Value, y: ir.Value) -> Tensor:
        """How many elements of x there are for each of y (of which there may be none): an int64."""
        return self.Div(self.Size(x), self.Max(self.Size(y), self.constant(np.int64(1))))

    def vector(self, sizes: Sequence[Any]) -> Tensor:
        """Numbers and int64 vectors, concatenated; a constant where all are numbers."""
        parts: list[Any] = []
        for size in sizes:
            if isinstance(size, int) and parts and isinstance(parts[-1], list):
                parts[-1].append(size)
            else:
                parts.append([size] if isinstance(size, int) else size)
        values = [self.constant(p) if isinstance(p, list) else p for p in parts]
        if not values:
            return self.constant(np.zeros(0, np.int64))
        return values[0] if len(values) == 1 else self.Concat(*values, axis=0)

    def reshape_like(self, value: ir.Value, like: ir.Value) -> Tensor:
        """`value` in the shape of `like`, which has as many elements."""
        if same_shape(value, like):
            return value
        sizes = (
            [dim(like, i) for i in range(len(like.shape))] if like.shape is not None else [None] * 2
        )
        if sizes.count(None) <= 1 and 0 not in sizes:
            shape = self.constant(np.array([-1 if s is None else s for s in sizes], np.int64))
            result = self.Reshape(value, shape)
        else:
            result = self.Reshape(value, self.Shape(like), allowzero=1)
        result.shape = like.shape or result.shape
        return result

    def filled(self, shape: Tensor, dtype: ir.DataType | None, number: float = 0.0) -> Tensor:
        """A tensor of one number."""
        tensor = ir.tensor(np.full(1, number).astype((dtype or ir.DataType.FLOAT).numpy()))
        return self.ConstantOfShape(shape, value=tensor)

    def zeros_like(self, value: ir.Value) -> Tensor:
        """Zeros of the shape and dtype of a value."""
        if value.shape is not None and len(value.shape) == 0:
            return self.constant(np.zeros((), (value.dtype or ir.DataType.FLOAT).numpy()))
        return self.filled(self.shape_of(value), value.dtype)

    def present(self, dy: ir.Value | None, y: ir.Value) -> Tensor:
        """The gradient of an output, zeros where none reaches it."""
        return self.zeros_like(y) if dy is None else dy

    def size_of(self, x: Tensor, axis: int) -> Tensor:
        """The size of an axis as an int64 scalar."""
        size = dim(x, axis)
        if size is not None:
            return self.constant(np.int64(size))
        return self.Squeeze(self.Shape(x, start=axis, end=axis + 1), [0])

    def counted(self, count: Tensor) -> Tensor:
        """0, 1, … up to a number, an int64 scalar."""
        return self.Range(self.constant(np.int64(0)), count, self.constant(np.int64(1)))

    def pad(
        self, x: Tensor, axes: Sequence[int], before: Sequence[Any], after: Sequence[Any]
    ) -> Tensor:
        """Zeros around some axes; amounts are sizes, negative ones cut.

        Never by Pad's own `axes` input: where onnxruntime (1.31) moves a Transpose past such a Pad,
        it permutes the amounts as if there were one for every axis.
        """
        pads: list[Any] = [0] * (2 * known_rank(x))
        for axis, low, high in zip(axes, before, after, strict=True):
            pads[axis % known_rank(x)], pads[axis % known_rank(x) + known_rank(x)] = low, high
        if all(isinstance(size, int) and size == 0 for size in pads):
            return x
        return self.Pad(x, self.vector(pads))

    def pieces(self, vector: Tensor, count: int) -> list[Tensor]:
        """A vector's entries as vectors of one; numbers where it is constant."""
        ints = static_ints(vector)
        if ints is not None:
            return list(ints)
        return [self.Slice(vector, [i], [i + 1], [0]) for i in range(count)]

    def swap_last(self, value: ir.Value) -> Tensor:
        """The transpose of the last two axes."""
        n = known_rank(value)
        return self.Transpose(value, perm=[*range(n - 2), n - 1, n - 2])

    def to_type(self, value: Tensor, dtype: ir.DataType | None) -> Tensor:
        """`value` cast to a dtype; None leaves it as it is."""
        return value if dtype is None or value.dtype == dtype else self.Cast(value, to=int(dtype))

    def scatter_add(
        self, base: Tensor, indices: Tensor, updates: Tensor, axis: int | None = None
    ) -> Tensor:
        """`base` with updates added at places that may repeat, along an axis or by ScatterND.

        In 16 bits the sums are made in float32 for onnxruntime's CPU, which has no others (1.32); a
        graph with `fused` operators runs on our own kernels, which have.
        """
        dtype = base.dtype
        if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) and not self.fused:
            base, updates = (self.Cast(v, to=int(ir.DataType.FLOAT)) for v in (base, updates))
        kind = "ScatterND" if axis is None else "ScatterElements"
        added = self.node(kind, [base, indices, updates], reduction="add", axis=axis)
        return self.to_type(added, dtype)

    def sum_over(self, value: Tensor, axes: Sequence[int], keepdims: int = 0) -> Tensor:
        """The sum over these axes: the value itself over none, where ReduceSum sums over all."""
        return self.ReduceSum(value, list(axes), keepdims=keepdims) if axes else value

    def mean_over(self, value: Tensor, axes: Sequence[int]) -> Tensor:
        """The mean over these axes, which keep the size 1: the value itself over none."""
        return self.ReduceMean(value, list(axes), keepdims=1) if axes else value

    def split_evenly(self, dy: ir.Value, masks: Sequence[ir.Value]) -> list[Tensor]:
        """dy split evenly among the places where the masks (of dy's dtype) are 1."""
        total = masks[0]
        for mask in masks[1:]:
            total = self.Add(total, mask)
        each = self.Div(dy, total)
        return [self.Mul(each, mask) for mask in masks]

    def unbroadcast(self, g: Tensor, x: ir.Value) -> Tensor:
        """Sum `g` over the axes along which `x` was broadcast, so that it has the shape of `x`.

        Axes are static where ranks and sizes (or their symbols) tell; otherwise they are found at
        run time, as the places where x, its shape filled up with ones on the left, has size 1.
        """
        if same_shape(g, x):
            return g
        if g.shape is not None and x.shape is not None and len(g.shape) >= len(x.shape):
            lead = len(g.shape) - len(x.shape)
            pairs = list(enumerate(zip(g.shape[lead:], x.shape, strict=True), start=lead))
            ones = [i for i, (gd, xd) in pairs if xd == 1 and gd != 1]
            # A known size other than 1 was not broadcast, nor was one equal to g's.
            if all(isinstance(xd, int) or gd == 1 or same_dim(gd, xd) for _, (gd, xd) in pairs):
                if lead:
                    axes = [*range(lead), *ones]
                    g = self.ReduceSum(g, self.constant(axes), keepdims=int(bool(ones)))
                    return self.Squeeze(g, list(range(lead))) if ones else g
                return self.ReduceSum(g, self.constant(ones), keepdims=1) if ones else g
        shape = self.Shape(x)
        full = shape
        if g.shape is None or x.shape is None or len(g.shape) != len(x.shape):
            missing = self.Sub(self.Shape(self.Shape(g)), self.Shape(shape))
            full = self.Concat(self.filled(missing, ir.DataType.INT64, 1), shape, axis=0)
        axes = self.Squeeze(self.NonZero(self.Equal(full, 1)), [0])
        g = self.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1)
        return self.Reshape(g, shape, allowzero=1)  # inference does not see the rank of the sum
