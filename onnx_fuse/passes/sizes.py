"""Sizes that shape inference leaves open: what Reshape and Expand do, from what they read.

[B, 4, C] to [4 · Shape(x)[0], -1] is [4 B, C], whatever B is. A size is a product of symbols with
an integer before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_fuse.onnx.build import const_array
from onnx_fuse.ops.rewrite import attribute

Size: TypeAlias = tuple[int, tuple[str, ...]]


def measure_reshapes(model: ir.Model) -> None:
    """Give what Reshape nodes answer, and all that has the same symbols, the sizes it must have.

    The symbols of the model's own inputs and outputs keep their names. An Expand to the sizes that
    its input has goes.
    """
    meaning: dict[str, Size] = {}
    for node in model.graph:
        if node.op_type == "Reshape" and not node.domain:
            _reshape(node, meaning)
        elif node.op_type == "Expand" and not node.domain:
            x, y = node.inputs[0], node.outputs[0]
            same = _sizes(x, meaning)
            known = same is not None and None not in same and not y.is_graph_output()
            if x is not None and known and same == _entries(node.inputs[1], meaning):
                y.replace_all_uses_with(x)
    ends = {*model.graph.inputs, *model.graph.outputs}
    kept = {str(d) for value in ends for d in value.shape or ()}
    plain = {name: size for name, (k, s) in meaning.items() if (size := _dim(k, s)) is not None}
    plain = {name: size for name, size in plain.items() if name not in kept}
    for node in model.graph if plain else ():
        for value in node.outputs:
            if value.shape is not None and value not in ends:
                dims = [d.value if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
                value.shape = ir.Shape([plain.get(d, d) if isinstance(d, str) else d for d in dims])


def _reshape(node: ir.Node, meaning: dict[str, Size]) -> None:
    """Enter what the symbols in the output's shape mean."""
    y, given = node.outputs[0], _sizes(node.inputs[0], meaning)
    if y.is_graph_output():
        return
    found = _entries(node.inputs[1], meaning)
    if found is None or attribute(node, "allowzero", 0) != 0:
        return
    for i, size in enumerate(found):
        if size == (0, ()):
            found[i] = given[i] if given is not None and i < len(given) else None
    if found.count((-1, ())) == 1:
        hole = found.index((-1, ()))
        found[hole] = _quotient(given, found[:hole] + found[hole + 1 :])
    if y.shape is None:
        y.shape = ir.Shape([None] * len(found))
    if len(y.shape) != len(found):  # the file declares another rank
        return
    dims: list[int | str | None] = []
    for old, size in zip(y.shape, found, strict=True):
        symbol = old.value if isinstance(old, ir.SymbolicDim) else old
        if size is not None and isinstance(symbol, str) and size != (1, (symbol,)):
            meaning.setdefault(symbol, size)
        dims.append(symbol if symbol is not None or size is None else _dim(*size))
    y.shape = ir.Shape(dims)


def _dim(factor: int, symbols: tuple[str, ...]) -> int | str | None:
    """The size as a shape can say it."""
    return factor if not symbols else symbols[0] if (factor, len(symbols)) == (1, 1) else None


def _product(sizes: Iterable[Size | None]) -> Size | None:
    factor = 1
    symbols: list[str] = []
    for size in sizes:
        if size is None or size[0] < 0:
            return None
        factor *= size[0]
        symbols.extend(size[1])
    return factor, tuple(sorted(symbols))


def _quotient(given: Sequence[Size | None] | None, others: Sequence[Size | None]) -> Size | None:
    total, rest = _product(given if given is not None else [None]), _product(others)
    if total is None or rest is None or rest[0] == 0 or total[0] % rest[0]:
        return None
    left = Counter(total[1])
    left.subtract(rest[1])
    if min(left.values(), default=0) < 0:
        return None
    return total[0] // rest[0], tuple(sorted(left.elements()))


def _sizes(value: ir.Value | None, meaning: dict[str, Size]) -> list[Size | None] | None:
    """The sizes of a value."""
    if value is None or value.shape is None:
        return None
    dims = [d.value if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
    return [
        None if d is None else (d, ()) if isinstance(d, int) else meaning.get(d, (1, (d,)))
        for d in dims
    ]


def _entries(value: ir.Value | None, meaning: dict[str, Size]) -> list[Size | None] | None:
    """The entries of an integer scalar or vector that is computed from shapes."""
    array = const_array(value)
    if array is not None:
        known = array.dtype.kind == "i" and array.ndim < 2
        return [(int(i), ()) for i in array.flat] if known else None
    node = value.producer() if value is not None else None
    if node is None or node.domain:
        return None
    match node.op_type:
        case "Unsqueeze" | "Squeeze" | "Reshape" | "Cast" | "Identity":
            return _entries(node.inputs[0], meaning)
        case "Concat":
            parts = [_entries(v, meaning) for v in node.inputs]
            return None if None in parts else [s for part in parts for s in part or ()]
        case "Mul":
            pair = [_entries(v, meaning) for v in node.inputs]
            single = all(part is not None and len(part) == 1 for part in pair)
            return [_product(part[0] for part in pair if part)] if single else None
        case "Gather":
            extents, index = _entries(node.inputs[0], meaning), const_array(node.inputs[1])
            if extents is None or index is None or math.prod(index.shape) != 1:
                return None
            i = int(index.flat[0])
            return [extents[i]] if -len(extents) <= i < len(extents) else None
        case "Shape":
            sizes = _sizes(node.inputs[0], meaning)
            start, end = attribute(node, "start", 0), attribute(node, "end")
            assert isinstance(start, int)
            return None if sizes is None else sizes[start : end if isinstance(end, int) else None]
    return None
