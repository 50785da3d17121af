"""Sequences and optionals at lowering: a sequence is the tuple of its tensors, and costs nothing.

They are followed where no input or output of the model is one, and where only the operators here
meet them. Elsewhere onnxruntime runs what has to do with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.importer.shapes import MAKES_SEQUENCES
from onnx_fuse.ir.build import Builder, captured, required
from onnx_fuse.lower.context import Slot
from onnx_fuse.lower.control import Control

READ = {
    *("SequenceAt", "SequenceLength", "ConcatFromSequence"),
    *("OptionalHasElement", "OptionalGetElement"),
}
OPERATORS = (MAKES_SEQUENCES | READ) - {"SequenceMap"}
WITH_PLACE = {"SequenceInsert", "SequenceErase", "SequenceAt", "SplitToSequence"}
"""Operators with an operand that says where: it must be known."""
PASSED = {"Identity", "If", "Loop"}
"""Operators that hand sequences on."""


def followed(graph: ir.Graph) -> bool:
    """Whether the model has sequences or optionals, and all of them can be followed."""
    ends = (*graph.inputs, *graph.outputs)
    if any(isinstance(v.type, ir.SequenceType | ir.OptionalType) for v in ends):
        return False
    sequences: set[ir.Value] = set()
    nodes = list(ir.traversal.RecursiveGraphIterator(graph))
    for node in nodes:
        reads = any(v in sequences for v in node.inputs)
        if node.op_type in OPERATORS:
            if node.op_type in MAKES_SEQUENCES:
                sequences.update(node.outputs)
        elif reads and node.op_type not in PASSED:
            return False
        elif reads:
            sequences.update(node.outputs)
    return bool(sequences) or any(node.op_type in READ for node in nodes)


def sequences(low: Control, values: Sequence[ir.Value | None]) -> list[ir.Value]:
    """Those among the values that are followed as tuples of slots."""
    known = [v for v in values if v is not None and v in low.slots]
    return [v for v in known if low.slots[v].items is not None]


def leave(low: Control, node: ir.Node) -> None:
    """Leave a node to a later stage, with what makes the sequences that it reads."""
    waiting = [node]
    while waiting:  # a chain of them may be longer than a recursion
        read = sequences(low, (*waiting[-1].inputs, *captured(waiting[-1])))
        makers = [value.producer() for value in read]  # a body's input has none: its loop is left
        if first := [maker for maker in makers if maker is not None and maker not in low.later]:
            waiting += first
        elif (each := waiting.pop()) not in low.later:
            low.later.append(each)


def sequence(low: Control, node: ir.Node) -> bool:
    """Give the outputs of an operator on sequences their slots; False for any other operator."""
    slots = [low.slots[v] if v is not None else None for v in node.inputs]
    first = slots[0] if slots else None
    if node.op_type == "Identity" and first is not None and first.items is not None:
        low.slots[node.outputs[0]] = first
        return True
    if node.op_type not in OPERATORS or node.domain:
        return False
    items = list(first.items) if first is not None and first.items is not None else []
    where = 2 if node.op_type == "SequenceInsert" else 1
    placed = low.has(node, where) and node.op_type in WITH_PLACE
    at = low.host(node, where) if placed else None
    if placed and at is None:
        low.require_operand(node, where)
        return False
    result: Slot
    match node.op_type:
        case "SequenceConstruct":
            result = Slot(items=tuple(s for s in slots if s is not None))
        case "SequenceEmpty":
            result = Slot(items=())
        case "SequenceInsert":
            items.insert(len(items) if at is None else _place(at, len(items)), required(slots[1]))
            result = Slot(items=tuple(items))
        case "SequenceErase":
            items.pop(-1 if at is None else _place(at, len(items)))
            result = Slot(items=tuple(items))
        case "SequenceAt":
            result = items[_place(required(at), len(items))]
        case "SequenceLength":
            result = Slot(host=np.array(len(items), np.int64))
        case "Optional" | "OptionalGetElement":
            if first is None:
                return False
            result = first
        case "OptionalHasElement":
            result = Slot(host=np.array(first is not None))
        case "SplitToSequence":
            result = Slot(items=_parts(low, node, at))
        case _:
            result = _joined(low, node, items)
    low.slots[node.outputs[0]] = result
    return True


def _place(at: np.ndarray, length: int) -> int:
    """The index counted from the front; a negative one counts from the end."""
    index = int(at.reshape(-1)[0])
    return index + length if index < 0 else index


def _parts(low: Control, node: ir.Node, sizes: np.ndarray | None) -> tuple[Slot, ...]:
    """The items of a SplitToSequence, as views of its input."""
    x = low.view(node, 0)
    axis = low.attr(node, "axis", 0) % len(x.shape)
    length = x.shape[axis]
    each = 1 if sizes is None else int(sizes) if sizes.ndim == 0 else 0
    squeezed = each > 0 and not low.attr(node, "keepdims", 1)  # sizes in a vector keep the axis
    if sizes is not None and sizes.ndim:
        lengths = [int(n) for n in sizes]
    else:
        lengths = [min(each, length - i) for i in range(0, length, each)]
    if squeezed and max(lengths, default=1) > 1:
        raise ModelError(f"{low.label(node)}: keepdims = 0 needs parts of 1, its split is {each}")
    parts, start = [], 0
    for n in lengths:
        parts.append(Slot(tensor=x.at(axis, start) if squeezed else x.part(axis, start, n)))
        start += n
    return tuple(parts)


def _joined(low: Control, node: ir.Node, items: list[Slot]) -> Slot:
    """ConcatFromSequence, as a Concat of the items, each with an axis of one if it is a new one."""
    op = Builder()
    values = []
    for slot in items:
        value = ir.Value()
        low.slots[value] = slot
        values.append(value)
    axis, new = low.attr(node, "axis"), low.attr(node, "new_axis", 0)
    if new:
        values = [op.Unsqueeze(v, [axis]) for v in values]
    joined = op.Concat(*values, axis=axis)
    low.walk([*op.nodes], [*values, joined])
    return low.slots[joined]
