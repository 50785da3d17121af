"""Sizes that shape inference leaves open: what Reshape and Expand do, from what they read.

[B, 4, C] to [4 · Shape(x)[0], -1] is [4 B, C], whatever B is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, extents, rank, required
from onnx_fuse.ir.entries import Array, Entries, Sizes, divided, multiplied
from onnx_fuse.ir.sizes import SymbolicSize, product, size
from onnx_fuse.ir.traits import BROADCASTS
from onnx_fuse.ops.rules import attribute

_ZERO, _ONE, _HOLE = size(0), size(1), size(-1)


def infer_reshapes(model: ir.Model) -> bool:
    """Propagate symbolic sizes through the results of Reshape nodes.

    Symbols of the model's inputs and outputs keep their names. Removes a Reshape or Expand to its
    input's sizes, and replaces values that the sizes determine by constants. Returns True where
    the readers of a node have changed.
    """
    graph, changed = model.graph, False
    facts = Entries()
    facts.meaning |= _joined_results(graph, facts)
    for node in list(graph):
        body = any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())
        if not facts.believed.isdisjoint(node.inputs) or (facts.believed and body):
            facts.believed.update(node.outputs)
        if node.domain or not node.inputs:
            continue
        entries = facts.follow(node)
        holds = facts.believed.isdisjoint(node.outputs)
        if entries is not None and holds:
            changed = _constant(node, entries) or changed
            if node.op_type == "Where":
                changed = _chooses_nothing(node, entries, facts) or changed
        (_pad if node.op_type == "Pad" else _computed)(node, facts)
        if node.op_type in ("Reshape", "Expand"):
            x, y = node.inputs[0], node.outputs[0]
            wanted = facts.vector(node.inputs[1])
            same = facts.sizes(x)
            if node.op_type == "Reshape":
                changed = (holds and _copied(node, wanted, same)) or changed
                wanted = _reshape(node, wanted, facts)
            static = same is not None and None not in same and _read_inside(y)
            if x is not None and static and same == wanted and y not in facts.believed:
                y.replace_all_uses_with(x)
                changed = True
    _name_plainly(graph, facts)
    return changed


def _name_plainly(graph: ir.Graph, facts: Entries) -> None:
    """Put numbers and the inputs' symbols in the place of inference's own names for them."""
    ends = {*graph.inputs, *graph.outputs}
    declared = {str(d) for value in ends for d in value.shape or ()}
    plain = {name: d for name, s in facts.meaning.items() if (d := _as_dim(s)) is not None}
    first: dict[SymbolicSize, str] = {}  # of the symbols for 4 B, say, one is as good as all
    for name, composed in facts.meaning.items():
        if _as_dim(composed) is None:
            plain[name] = first.setdefault(composed, name)
    plain = {name: d for name, d in plain.items() if name not in declared}
    for node in graph if plain else ():
        for value in node.outputs:
            if value.shape is not None and value not in ends:
                dims = extents(value.shape)
                if not plain.keys().isdisjoint(dims):
                    value.shape = ir.Shape([plain.get(d, d) if isinstance(d, str) else d
                                            for d in dims])  # fmt: skip


def _joined_results(graph: ir.Graph, facts: Entries) -> dict[str, SymbolicSize]:
    """What the symbols mean that stand at the joined axes of results alone: a cache that grows."""
    meaning: dict[str, set[SymbolicSize | None]] = {
        str(d): {None} for value in graph.inputs for d in value.shape or ()
    }
    for value in graph.outputs:
        node = value.producer()
        joined = node is not None and node.op_type == "Concat" and not node.domain
        sizes = _concat(node, facts) if node is not None and joined else None
        for i, d in enumerate(value.shape or ()):
            whole = sizes[i] if sizes is not None and i < len(sizes) else None
            meaning.setdefault(str(d), set()).add(whole)
    meanings = {name: sizes.pop() for name, sizes in meaning.items() if len(sizes) == 1}
    return {name: s for name, s in meanings.items() if s is not None and s != size(name)}


def _concat(node: ir.Node, facts: Entries) -> Sizes | None:
    """The sizes of a Concat: those along its axis added, the others those of its first input."""
    parts = [facts.sizes(v) for v in node.inputs]
    complete = [p for p in parts if p is not None]
    axis = attribute(node, "axis", 0)
    if len(complete) < len(parts) or len({len(p) for p in complete}) != 1:
        return None
    sizes, total = list(complete[0]), size(0)
    if not -len(sizes) <= axis < len(sizes):
        return None
    for part in complete:
        if (extent := part[axis]) is None:
            return None
        total += extent
    sizes[axis] = total
    return sizes


def _constant(node: ir.Node, entries: Array) -> bool:
    """Readers of a node whose entries are all numbers read a constant."""
    y = node.outputs[0]
    numbers = [e.number if isinstance(e, SymbolicSize) else None for e in entries.flat]
    if y.dtype != ir.DataType.INT64 or not all(isinstance(n, int) for n in numbers):
        return False
    if not _read_inside(y) or rank(y) not in (None, entries.ndim):
        return False
    op = Builder()
    constant = op.constant(np.array(numbers, np.int64).reshape(entries.shape))
    required(node.graph).insert_before(node, op.nodes)
    y.replace_all_uses_with(constant)
    return True


def _chooses_nothing(node: ir.Node, entries: Array, facts: Entries) -> bool:
    """Where(sizes == -1, x, sizes), by which exporters write torch's expand, is the sizes."""
    third, y = node.inputs[2], node.outputs[0]
    fallback = facts.of(third)
    if fallback is None or fallback.shape != entries.shape or any(e is None for e in entries.flat):
        return False
    if list(fallback.flat) != list(entries.flat) or not _read_inside(y) or third is None:
        return False
    y.replace_all_uses_with(third)
    return True


def _read_inside(value: ir.Value) -> bool:
    # what nobody reads any more would count as a change in every round
    return bool(value.uses()) and not value.is_graph_output()


def _reshape(node: ir.Node, wanted: Sizes | None, facts: Entries) -> Sizes | None:
    """Enter what the symbols in the output's shape mean; the sizes it has."""
    y, came = node.outputs[0], facts.sizes(node.inputs[0])
    literal = attribute(node, "allowzero", 0) != 0  # a 0 is a size of 0, and copies none
    if wanted is None or (literal and _ZERO in wanted):
        return None
    sizes: Sizes = []
    total = multiplied(came if came is not None else [None])
    for i, entry in enumerate(wanted):
        if entry == _ZERO:
            sizes.append(came[i] if came is not None and i < len(came) else None)
        elif entry == _HOLE:
            sizes.append(entry)
        else:
            if entry is not None and not literal and _may_copy(entry, i, came):
                if total is not None and _is_zero_with(total, entry):
                    facts.believed.add(y)  # where it copies, the result is empty
                else:
                    entry = None
            sizes.append(entry if entry is not None and entry.nonnegative else None)
    if sizes.count(_HOLE) == 1:
        hole = sizes.index(_HOLE)
        others = sizes[:hole] + sizes[hole + 1 :]
        rest = multiplied(others)
        quotient = None if total is None or rest is None else _quotient(total, rest)
        alike = all(s is not None and (s.positive or s in (came or ())) for s in others)
        if literal and not (alike and quotient is not None and quotient.positive):
            facts.believed.add(y)  # beside a 0 it is what the other sizes leave without zeros
        sizes[hole] = quotient
    if y.is_graph_output() or _HOLE in sizes:
        return None
    return sizes if _enter(y, sizes, facts) else None


def _quotient(total: SymbolicSize, rest: SymbolicSize) -> SymbolicSize | None:
    quotient = divided(total, rest)
    exactly = quotient is not None and quotient * rest == total  # what is left over ends the run
    return quotient if exactly and quotient is not None and quotient.nonnegative else None


def _may_copy(entry: SymbolicSize, axis: int, came: Sizes | None) -> bool:
    """Whether the entry may be 0 where the input's size is not, so that Reshape copies that."""
    if entry.positive or (came is not None and axis >= len(came)):  # a 0 there ends the run
        return False
    here = None if came is None else came[axis]
    return here is None or not _is_zero_with(here, entry)


def _is_zero_with(value: SymbolicSize, entry: SymbolicSize) -> bool:
    """Whether a product is 0 wherever the product `entry` is."""
    exactly = value / entry if entry else None
    if not value or (exactly is not None and exactly.settled and exactly.whole):
        return True
    if len(value.terms) != 1 or len(entry.terms) != 1:
        return False
    [factors], [others] = value.terms, entry.terms
    return set(others) <= set(factors)


def _copied(node: ir.Node, wanted: Sizes | None, came: Sizes | None) -> bool:
    """A target of numbers and of sizes that the input has in the same places is a constant."""
    target, graph = node.inputs[1], node.graph
    if wanted is None or came is None or graph is None or const_array(target) is not None:
        return False
    literal = attribute(node, "allowzero", 0) != 0
    if literal and _ZERO in wanted:
        return False
    numbers = []
    for i, entry in enumerate(wanted):
        if entry is not None and isinstance(entry.number, int):
            numbers.append(entry.number)
        elif entry is not None and i < len(came) and came[i] == entry:
            numbers.append(0)
        else:
            return False
    if literal and -1 in numbers:  # beside a 0 that is copied no -1 is found
        held = multiplied(s for i, s in enumerate(came) if i >= len(numbers) or numbers[i])
        hole = None if held is None else _quotient(held, product(size(n) for n in numbers if n > 0))
        if hole is None or not isinstance(hole.number, int):
            return False
        numbers[numbers.index(-1)] = hole.number
    op = Builder()
    node.replace_input_with(1, op.constant(np.array(numbers, np.int64)))
    node.attributes.pop("allowzero", None)
    graph.insert_before(node, op.nodes)
    return True


def _computed(node: ir.Node, facts: Entries) -> None:
    """Enter what the symbols in the shape of a sum, a product or a Range mean."""
    sizes: Sizes | None = None
    match node.op_type:
        case kind if kind in BROADCASTS:
            sizes = _broadcast([facts.sizes(v) for v in node.inputs])
        case "Expand":
            wanted = facts.vector(node.inputs[1])
            if wanted is not None and all(s is None or s.nonnegative for s in wanted):
                sizes = _broadcast([facts.sizes(node.inputs[0]), wanted])
        case "Concat":
            sizes = _concat(node, facts)
        case "ConstantOfShape":
            sizes = facts.vector(node.inputs[0])
            if sizes is not None:
                sizes = [s if s is not None and s.nonnegative else None for s in sizes]
        case "MatMul":
            a, b = (facts.sizes(v) for v in node.inputs)
            if a is not None and b is not None and len(a) > 1 and len(b) > 1:
                batch = _broadcast([a[:-2], b[:-2]])
                sizes = None if batch is None else [*batch, a[-2], b[-1]]
        case "Range":
            start, limit, step = (facts.vector(v) for v in node.inputs)
            if start == [_ZERO] and step == [_ONE] and limit is not None:
                sizes = [s if s is not None and s.nonnegative else None for s in limit]
    if sizes is not None and None not in node.outputs and not node.outputs[0].is_graph_output():
        _enter(node.outputs[0], sizes, facts)


def _broadcast(shapes: Sequence[Sizes | None]) -> Sizes | None:
    """The sizes that all are broadcast to, None where that depends on what is not known."""
    complete = [s for s in shapes if s is not None]
    if len(complete) < len(shapes):
        return None
    sizes: Sizes = []
    for axis in range(-max((len(s) for s in complete), default=0), 0):
        here = [s[axis] for s in complete if len(s) >= -axis]
        long = list(dict.fromkeys(s for s in here if s != _ONE))
        fixed = [s for s in long if s is not None and s.number is not None]
        # A number of 2 and more is broadcast with 1 or with itself alone.
        sizes.append(fixed[0] if fixed else long[0] if len(long) == 1 else None)
        if not long:
            sizes[-1] = _ONE
    return sizes


def _pad(node: ir.Node, facts: Entries) -> None:
    """Enter what the symbols in the output's shape mean: sizes that nothing is added to stay."""
    y, came = node.outputs[0], facts.sizes(node.inputs[0])
    pads = const_array(node.inputs[1]) if len(node.inputs) in (2, 3) else None
    if came is None or pads is None or pads.shape != (2 * len(came),) or y.is_graph_output():
        return
    by = [bool(pads[i] or pads[i + len(came)]) for i in range(len(came))]
    _enter(y, [None if padded else s for s, padded in zip(came, by, strict=True)], facts)


def _enter(y: ir.Value, sizes: Sizes, facts: Entries) -> bool:
    """Give `y` the sizes found, and its symbols their meaning; False where its rank is another."""
    if y.shape is None:
        y.shape = ir.Shape([None] * len(sizes))
    if len(y.shape) != len(sizes):  # the file declares another rank
        return False
    symbols = extents(y.shape)
    dims: list[int | str | None] = []
    for symbol, new in zip(symbols, sizes, strict=True):
        if new is not None and isinstance(symbol, str) and new != size(symbol):
            facts.meaning.setdefault(symbol, new)
        dims.append(symbol if symbol is not None or new is None else _as_dim(new))
    if dims != symbols:
        y.shape = ir.Shape(dims)
    return True


def _as_dim(value: SymbolicSize) -> int | str | None:
    if isinstance(value.number, int):
        return value.number
    [(factors, times), *more] = value.terms.items()
    single = not more and times == 1 and len(factors) == 1 and isinstance(factors[0], str)
    return str(factors[0]) if single else None
