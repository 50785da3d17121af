"""Rows that PyTorch's MultiheadAttention turns around its products stay in their order.

With the batch as its first axis the module multiplies x [N, L, C] as [L, N, C], merges batch and
heads into one axis, and turns the result back:

    MatMul(Transpose(x), w) + c = Transpose(MatMul(x, w) + c)
    Reshape(Transpose(Reshape(x))) = Transpose(Reshape(x))      where the last undoes the first
    Transpose(Gemm of rows [L, N]) = Gemm of rows [N, L]

Each of them moves the same numbers, and what is left are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, given, rank
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    combined_with,
    consumers,
    producer,
    sole_consumer,
    typed,
)

NAME = "RowOrder"
_VIEWS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")
_LONGEST = 8
"""Views of a chain at most."""


def _static_nonzero_sizes(value: ir.Value | None) -> list[int] | None:
    if value is None or value.shape is None:
        return None
    sizes = [d for d in value.shape if isinstance(d, int) and d > 0]
    return sizes if len(sizes) == len(value.shape) else None


def _perm(turn: ir.Node) -> list[int]:
    return [*attribute(turn, "perm", range(rank(turn.inputs[0]) or 0)[::-1])]


def _sink(rw: Rewriter, node: ir.Node) -> bool:
    """Transpose, MatMul, Reshape: move the Transpose after the product."""
    x, w = node.inputs
    turn = producer(x, "Transpose")
    if turn is None or x is None or rank(w) != 2:
        return False
    perm, source = _perm(turn), turn.inputs[0]
    if source is None or len(perm) < 3 or perm[-1] != len(perm) - 1 or source.shape is None:
        return False
    reader = combined_with(node.outputs[0], "Add")
    add = reader[0] if reader is not None and rank(reader[1]) == 1 else None
    last = node if add is None else add
    readers = consumers(last.outputs[0])
    width = w.shape[1] if w is not None and w.shape is not None else None
    if not readers or any(reader.op_type != "Reshape" for reader in readers):
        return False
    op = Builder()
    shape = [*source.shape[:-1], width]
    y = typed(op.MatMul(source, w), source, shape)
    if add is not None:
        inputs = [y if v is node.outputs[0] else v for v in add.inputs]
        y = typed(op.Add(*inputs), source, shape)
    y = typed(op.Transpose(y, perm=perm), source, [shape[axis] for axis in perm])
    return rw.replace(last, op, [last.outputs[0]], [y])


def _turn_ahead(rw: Rewriter, node: ir.Node) -> bool:
    """A Transpose of a product's rows [L, N], which another one has brought into that order."""
    split = producer(node.inputs[0], "Reshape")
    if _perm(node) != [1, 0, 2] or split is None or sole_consumer(split.outputs[0]) is not node:
        return False
    gemm = producer(split.inputs[0], "Gemm")
    if gemm is None or attribute(gemm, "transA", 0) or sole_consumer(gemm.outputs[0]) is not split:
        return False
    bias = given(gemm, 2)
    if bias is not None and rank(bias) != 1:
        return False
    merged = producer(gemm.inputs[0], "Reshape")
    turn = producer(merged.inputs[0], "Transpose") if merged is not None else None
    if merged is None or turn is None or sole_consumer(merged.outputs[0]) is not gemm:
        return False
    rows, outer = _static_nonzero_sizes(turn.outputs[0]), _static_nonzero_sizes(split.outputs[0])
    flat = _static_nonzero_sizes(merged.outputs[0])
    if rows is None or outer is None or flat is None or rows[:2] != outer[:2]:
        return False
    if flat != [prod(rows[:2]), prod(rows[2:])] or sole_consumer(turn.outputs[0]) is not merged:
        return False
    op = Builder()
    first, second, *rest = _perm(turn)
    y = typed(op.Transpose(turn.inputs[0], perm=[second, first, *rest]), turn.outputs[0])
    y.shape = ir.Shape([rows[1], rows[0], *rows[2:]])
    y = typed(op.Reshape(y, op.constant(flat)), y, flat)
    product = op.node("Gemm", [y, *gemm.inputs[1:]], attributes=gemm.attributes)
    assert isinstance(product, ir.Value)
    y = typed(product, y, [flat[0], outer[2]])
    shape = [outer[1], outer[0], outer[2]]
    return rw.replace(node, op, [node.outputs[0]], [op.Reshape(y, op.constant(shape))])


class _Axes:
    """A tensor's axes as products of factors of the axes that it had first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = {i: n for i, n in enumerate(sizes) if n > 1}
        self.origin = [*self.sizes]
        self.axes = [[i] if n > 1 else [] for i, n in enumerate(sizes)]

    def turn(self, perm: Sequence[int]) -> None:
        self.axes = [self.axes[axis] for axis in perm]

    def reshape(self, shape: Sequence[int]) -> bool:
        """Group the factors to the sizes of `shape`; False where they do not divide them."""
        left = [factor for axis in self.axes for factor in axis]
        self.axes = []
        for size in shape:
            axis: list[int] = []
            while size > 1:
                factor = left.pop(0)
                if self.sizes[factor] > size and not self._split(factor, size, left):
                    return False
                if size % self.sizes[factor]:
                    return False
                size //= self.sizes[factor]
                axis.append(factor)
            self.axes.append(axis)
        return True

    def _split(self, factor: int, size: int, left: list[int]) -> bool:
        """Split a factor into two: `size`, and the quotient after it."""
        if self.sizes[factor] % size:
            return False
        rest = max(self.sizes) + 1
        self.sizes[rest] = self.sizes[factor] // size
        self.sizes[factor] = size
        self.origin.insert(self.origin.index(factor) + 1, rest)
        left.insert(0, rest)
        return True


def _regroup(rw: Rewriter, node: ir.Node) -> bool:
    """A chain of views whose last Reshape splits what its first one has merged."""
    chain = [node]
    while len(chain) < _LONGEST:
        above = producer(chain[-1].inputs[0], *_VIEWS)
        if above is None or sole_consumer(above.outputs[0]) is not chain[-1]:
            break
        chain.append(above)
    while chain and chain[-1].op_type != "Reshape":
        chain.pop()
    if len({id(n) for n in chain}) < 3 or not any(n.op_type == "Transpose" for n in chain):
        return False
    x = chain[-1].inputs[0]
    input_sizes = _static_nonzero_sizes(x)
    if x is None or input_sizes is None:
        return False
    axes = _Axes(input_sizes)
    for view in reversed(chain):
        shape = _static_nonzero_sizes(view.outputs[0])
        if shape is None:
            return False
        if view.op_type == "Transpose":
            axes.turn(_perm(view))
        elif not axes.reshape(shape):
            return False
    if any(len(axis) > 1 for axis in axes.axes):
        return False  # the result is no view of x
    ones = sum(not axis for axis in axes.axes)
    sizes = [axes.sizes[factor] for factor in axes.origin]
    refined = [*sizes[:1], *[1] * ones, *sizes[1:]]
    places = {factor: i + (ones if i else 0) for i, factor in enumerate(axes.origin)}
    spare = iter(range(min(1, len(sizes)), min(1, len(sizes)) + ones))
    perm = [places[axis[0]] if axis else next(spare) for axis in axes.axes]
    op = Builder()
    y = x
    if refined != input_sizes:
        y = typed(op.Reshape(y, op.constant(refined)), x, refined)
    if perm != sorted(perm):
        y = typed(op.Transpose(y, perm=perm), x, [refined[axis] for axis in perm])
    if y is x:
        y = op.Identity(x)
    return rw.replace(node, op, [node.outputs[0]], [y])


RULES = (
    Rule(NAME, 2, ("MatMul",), _sink, conditions="types ranks"),
    Rule(
        NAME,
        2,
        ("Transpose",),
        _turn_ahead,
        conditions="readers constants weights types ranks sizes body",
    ),
    Rule(
        NAME,
        2,
        ("Reshape",),
        _regroup,
        conditions="readers constants weights types ranks sizes body",
    ),
)
