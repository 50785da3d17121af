"""Sizes that shape inference leaves open: what Reshape and Expand do, from what they read.

[B, 4, C] to [4 · Shape(x)[0], -1] is [4 B, C], whatever B is. A size is a product of symbols with
an integer before it. Sums, products and ranges of such tensors have sizes of the same kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.onnx.build import Builder, const_array, dim, rank
from onnx_fuse.onnx.evaluate import exact
from onnx_fuse.ops.rewrite import attribute

Size: TypeAlias = tuple[int, tuple[str, ...]]
Sizes: TypeAlias = list[Size | None]


_LONGEST = 64
"""Entries of a shape, and symbols of a size, that are followed; what is longer is not known."""


def infer_reshapes(model: ir.Model) -> bool:
    """Give what Reshape nodes answer, and all that has the same symbols, the sizes it must have.

    The symbols of the model's own inputs and outputs keep their names. A Reshape or Expand to the
    sizes that its input has goes, and what the sizes fix becomes a constant. True where a node's
    readers have changed.
    """
    graph, changed = model.graph, False
    meaning: dict[str, Size] = {}
    known: dict[ir.Value, Sizes] = {}  # entries of integer vectors and scalars made of shapes
    for node in list(graph):
        if node.domain or not node.inputs:
            continue
        entries = _entries(node, known, meaning)
        if entries is not None and len(entries) <= _LONGEST:
            y = node.outputs[0]
            known[y] = entries
            changed = _constant(node, entries) or changed
        if node.op_type == "Where" and entries is not None and None not in entries:
            third = node.inputs[2]  # no size is negative, so that the Where chooses nothing
            y = node.outputs[0]
            assert third is not None
            same_rank = rank(third) is not None and rank(third) == rank(y)
            if known.get(third) == entries and same_rank and not y.is_graph_output():
                y.replace_all_uses_with(third)
                changed = True
        if node.op_type == "Pad":
            _pad(node, meaning)
        else:
            _computed(node, known, meaning)
        if node.op_type in ("Reshape", "Expand"):
            x, y = node.inputs[0], node.outputs[0]
            wanted = _read(node.inputs[1], known)
            same = _sizes(x, meaning)
            if node.op_type == "Reshape":
                changed = _copied(node, wanted, same) or changed
                wanted = _reshape(node, wanted, meaning)
            whole = same is not None and None not in same and not y.is_graph_output()
            if x is not None and whole and same == wanted:
                y.replace_all_uses_with(x)
                changed = True
    ends = {*graph.inputs, *graph.outputs}
    kept = {str(d) for value in ends for d in value.shape or ()}
    plain = {name: size for name, (k, s) in meaning.items() if (size := _dim(k, s)) is not None}
    first: dict[Size, str] = {}  # of the symbols for 4 B, say, one is as good as all
    for name, composed in meaning.items():
        if name not in kept and _dim(*composed) is None:
            plain[name] = first.setdefault(composed, name)
    plain = {name: size for name, size in plain.items() if name not in kept}
    for node in graph if plain else ():
        for value in node.outputs:
            if value.shape is not None and value not in ends:
                dims = [d.value if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
                value.shape = ir.Shape([plain.get(d, d) if isinstance(d, str) else d for d in dims])
    return changed


def _constant(node: ir.Node, entries: Sizes) -> bool:
    """Readers of a node whose entries are all numbers read a constant."""
    y = node.outputs[0]
    numbers = [k for k, symbols in (s or (0, ("?",)) for s in entries) if not symbols]
    if len(numbers) < len(entries) or y.dtype != ir.DataType.INT64 or y.shape is None:
        return False
    if not y.uses() or y.is_graph_output() or len(y.shape) > 1:
        return False
    op = Builder()
    made = op.constant(np.array(numbers, np.int64).reshape([] if len(y.shape) == 0 else [-1]))
    assert node.graph is not None
    node.graph.insert_before(node, op.nodes)
    y.replace_all_uses_with(made)
    return True


def _reshape(node: ir.Node, wanted: Sizes | None, meaning: dict[str, Size]) -> Sizes | None:
    """Enter what the symbols in the output's shape mean; the sizes it has."""
    y, given = node.outputs[0], _sizes(node.inputs[0], meaning)
    if wanted is None or (attribute(node, "allowzero", 0) != 0 and (0, ()) in wanted):
        return None
    found = list(wanted)
    for i, size in enumerate(found):
        if size == (0, ()):
            found[i] = given[i] if given is not None and i < len(given) else None
    if found.count((-1, ())) == 1:
        hole = found.index((-1, ()))
        found[hole] = _quotient(given, found[:hole] + found[hole + 1 :])
    if y.is_graph_output():
        return None
    return found if _enter(y, found, meaning) else None


def _copied(node: ir.Node, wanted: Sizes | None, given: Sizes | None) -> bool:
    """A target of numbers and of sizes that the input has in the same places is a constant."""
    target, graph = node.inputs[1], node.graph
    if wanted is None or given is None or graph is None or const_array(target) is not None:
        return False
    literal = attribute(node, "allowzero", 0) != 0  # a 0 is a size of 0, and copies none
    if literal and (0, ()) in wanted:
        return False
    numbers = []
    for i, size in enumerate(wanted):
        if size is not None and not size[1]:
            numbers.append(size[0])
        elif size is not None and i < len(given) and given[i] == size:
            numbers.append(0)
        else:
            return False
    op = Builder()
    node.replace_input_with(1, op.constant(np.array(numbers, np.int64)))
    node.attributes.pop("allowzero", None)
    graph.insert_before(node, op.nodes)
    return True


_BROADCAST = frozenset(
    (
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Where", "Max", "Min", "Sum", "Mean"),
        *("And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
    )
)


def _computed(node: ir.Node, known: Mapping[ir.Value, Sizes], meaning: dict[str, Size]) -> None:
    """Enter what the symbols in the shape of a sum, a product or a Range mean."""
    given = [_sizes(v, meaning) for v in node.inputs]
    found: Sizes | None = None
    match node.op_type:
        case kind if kind in _BROADCAST:
            found = _broadcast(given)
        case "Expand":
            wanted = _read(node.inputs[1], known)
            if wanted is not None and all(s is None or s[0] >= 0 for s in wanted):
                found = _broadcast([given[0], wanted])
        case "MatMul":
            a, b = given
            if a is not None and b is not None and len(a) > 1 and len(b) > 1:
                batch = _broadcast([a[:-2], b[:-2]])
                found = None if batch is None else [*batch, a[-2], b[-1]]
        case "Range":
            start, limit, step = (_read(v, known) for v in node.inputs)
            if start == [(0, ())] and step == [(1, ())] and limit is not None:
                found = [s if s is not None and s[0] >= 0 else None for s in limit]
    if found is not None and None not in node.outputs and not node.outputs[0].is_graph_output():
        _enter(node.outputs[0], found, meaning)


def _broadcast(shapes: Sequence[Sizes | None]) -> Sizes | None:
    """The sizes that all are broadcast to, None where that depends on what is not known."""
    known = [s for s in shapes if s is not None]
    if len(known) < len(shapes):
        return None
    found: Sizes = []
    for axis in range(-max((len(s) for s in known), default=0), 0):
        here = [s[axis] for s in known if len(s) >= -axis]
        long = list(dict.fromkeys(s for s in here if s != (1, ())))
        fixed = [s for s in long if s is not None and not s[1]]
        # A number of 2 and more is broadcast with 1 or with itself alone.
        found.append(fixed[0] if fixed else long[0] if len(long) == 1 else None)
        if not long:
            found[-1] = (1, ())
    return found


def _pad(node: ir.Node, meaning: dict[str, Size]) -> None:
    """Enter what the symbols in the output's shape mean: sizes that nothing is added to stay."""
    y, given = node.outputs[0], _sizes(node.inputs[0], meaning)
    pads = const_array(node.inputs[1]) if len(node.inputs) in (2, 3) else None
    if given is None or pads is None or pads.shape != (2 * len(given),) or y.is_graph_output():
        return
    by = [bool(pads[i] or pads[i + len(given)]) for i in range(len(given))]
    _enter(y, [None if padded else size for size, padded in zip(given, by, strict=True)], meaning)


def _enter(y: ir.Value, found: Sizes, meaning: dict[str, Size]) -> bool:
    """Give `y` the sizes found, and its symbols their meaning; False where its rank is another."""
    if y.shape is None:
        y.shape = ir.Shape([None] * len(found))
    if len(y.shape) != len(found):  # the file declares another rank
        return False
    dims: list[int | str | None] = []
    for old, size in zip(y.shape, found, strict=True):
        symbol = old.value if isinstance(old, ir.SymbolicDim) else old
        if size is not None and isinstance(symbol, str) and size != (1, (symbol,)):
            meaning.setdefault(symbol, size)
        dims.append(symbol if symbol is not None or size is None else _dim(*size))
    y.shape = ir.Shape(dims)
    return True


def _dim(factor: int, symbols: tuple[str, ...]) -> int | str | None:
    """The size as an entry of a shape."""
    return factor if not symbols else symbols[0] if (factor, len(symbols)) == (1, 1) else None


_LARGEST = 2**62


def _product(sizes: Iterable[Size | None]) -> Size | None:
    factor = 1
    symbols: list[str] = []
    for size in sizes:
        if size is None or size[0] < 0:
            return None
        factor *= size[0]
        symbols.extend(size[1])
        if len(symbols) > _LONGEST or factor > _LARGEST:
            return None
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


def _sizes(value: ir.Value | None, meaning: Mapping[str, Size]) -> Sizes | None:
    """The sizes of a value."""
    if value is None or value.shape is None:
        return None
    dims = [d.value if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
    return [
        None if d is None else (d, ()) if isinstance(d, int) else meaning.get(d, (1, (d,)))
        for d in dims
    ]


def _read(value: ir.Value | None, known: Mapping[ir.Value, Sizes]) -> Sizes | None:
    """The entries of an integer scalar or vector."""
    if value is None or value in known:
        return None if value is None else known[value]
    array = const_array(value)
    if array is None or array.dtype.kind != "i" or array.ndim > 1 or array.size > _LONGEST:
        return None
    return [(int(i), ()) for i in array.flat]


def _unread(value: ir.Value | None) -> Sizes | None:
    """A list of None for each entry of a vector; None where its length is not known."""
    whole = value is not None and value.dtype == ir.DataType.INT64
    length = dim(value, 0) if whole and rank(value) == 1 else None
    return None if length is None or length > _LONGEST else [None] * length


def _entries(
    node: ir.Node, known: Mapping[ir.Value, Sizes], meaning: Mapping[str, Size]
) -> Sizes | None:
    """The entries of what a node makes of shapes, from those of what it reads."""
    first = node.inputs[0]
    match node.op_type:
        case "Unsqueeze" | "Squeeze" | "Reshape" | "Identity":
            return known.get(first) if first is not None else None
        case "Cast" if attribute(node, "to") == ir.DataType.INT64.value:
            return known.get(first) if first is not None else None
        case "Concat":
            parts = [_read(v, known) or _unread(v) for v in node.inputs]
            sizes = [s for part in parts for s in part or ()]
            return None if None in parts or len(sizes) > _LONGEST else sizes
        case "Mul":
            pair = [_read(v, known) for v in node.inputs]
            single = all(part is not None and len(part) == 1 for part in pair)
            product = _product(part[0] for part in pair if part) if single else None
            return None if product is None else [product]
        case "Div":
            whole, by = (_read(v, known) for v in node.inputs)
            if whole is None or by is None or len(whole) != 1 or len(by) != 1:
                return None
            part = _quotient(whole, by) if by[0] is not None and not by[0][1] else None
            return None if part is None else [part]
        case "Where":
            return _where_entries(node, known)
        case "Gather" | "Slice" if first is not None and first in known:
            return _indexed_entries(node, known[first])
        case "Shape":
            found = _sizes(first, meaning)
            start, end = attribute(node, "start", 0), attribute(node, "end")
            return None if found is None else found[start:end]
    return None


def _where_entries(node: ir.Node, known: Mapping[ir.Value, Sizes]) -> Sizes | None:
    """The entries of Where(sizes == -1, x, sizes), by which exporters write torch's expand."""
    condition, other, sizes = node.inputs
    equal = condition.producer() if condition is not None else None
    given, instead = _read(sizes, known), _read(other, known)
    if equal is None or equal.op_type != "Equal" or equal.domain or sizes not in equal.inputs:
        return None
    if given is None or instead is None or len(given) != len(instead):
        return None
    with_ = const_array(equal.inputs[1 if equal.inputs[0] is sizes else 0])
    if with_ is None or with_.shape not in ((), (1,), (len(given),)) or not (with_ == -1).all():
        return None
    return [x if size == (-1, ()) else size for size, x in zip(given, instead, strict=True)]


def _indexed_entries(node: ir.Node, entries: Sizes) -> Sizes | None:
    """The entries that a Gather or a Slice takes."""
    numbers = [const_array(v) for v in node.inputs[1:]]
    if any(array is None for array in numbers):
        return None
    places: Any = np.arange(len(entries))
    found = exact(node, [places, *numbers])
    if found is None or found[0].ndim > 1:
        return None
    return [entries[int(i)] for i in found[0].flat]
