"""Rows that a chain of moves takes to places known beforehand are gathered at once.

A window of an image that is rolled, and padded to whole windows, is a Pad, four Slices, two
Concats and a Transpose, and back again: each a pass over all of it. Where the last axis moves as a
whole and every place is known (the first axis, a batch, is free), all of them are one Gather of
rows, with zeros for the rows that a Pad adds, or the row that a Where puts in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, add_initializer, const_array, dim
from onnx_fuse.ir.evaluate import exact
from onnx_fuse.ir.names import Names
from onnx_fuse.ir.traits import VIEWS
from onnx_fuse.ops.rules import attribute, consumers, freeze_shared

GATHER_ROWS = "GatherRows"
"""Name of the rewrite in reports and for --fuse and --skip."""
_MOVES = VIEWS | {"Slice", "Concat", "Pad"}
_PASSES = ("Slice", "Concat", "Pad", "Transpose", "Where")
_FEWEST = 3
"""Moves that are passes over the tensor, from which one Gather is less."""
_LONGEST = 64
"""Nodes of a chain."""
_LARGEST = 1 << 22
"""Elements of an image and its batch that are followed through the moves."""
Chain = list[ir.Node]


def gather_rows(graph: ir.Graph) -> int:
    """Put a Gather in the place of each chain that allows it; how many there were."""
    places = {node: i for i, node in enumerate(graph)}
    ends = [n for n in graph if _moves(n) and not n.outputs[0].is_graph_output()]
    taken: set[ir.Node] = set()
    held: dict[bytes, ir.Value] = {}
    # the last of a chain first: what it takes in is gone then
    return sum(_replace(graph, n, places, taken, held) for n in reversed(ends) if n not in taken)


def _moves(node: ir.Node) -> bool:
    if _fill(node) is not None:
        return True
    return node.op_type in _MOVES and not node.domain and len(node.outputs) == 1


def _fill(node: ir.Node) -> np.ndarray | None:
    """The row that a Where puts in the place of some, at places known beforehand."""
    if node.op_type != "Where" or node.domain or const_array(node.inputs[0]) is None:
        return None
    row = const_array(node.inputs[2])
    return row if row is not None and row.ndim == 1 else None


def _data(node: ir.Node) -> Sequence[ir.Value | None]:
    if node.op_type == "Where":
        return node.inputs[1:2]
    return node.inputs if node.op_type == "Concat" else node.inputs[:1]


def _replace(
    graph: ir.Graph,
    last: ir.Node,
    places: dict[ir.Node, int],
    taken: set[ir.Node],
    held: dict[bytes, ir.Value],
) -> bool:
    y = last.outputs[0]
    if not y.uses():
        return False
    for source, chain in reversed(list(_chains(last, places))):
        if sum(n.op_type in _PASSES for n in chain) < _FEWEST:
            return False
        if all(n.op_type not in ("Concat", "Pad") for n in chain):
            continue  # one Transpose does it
        traced = _followed(source, chain, y)
        if traced is not None:
            rows, place, rest = traced
            fills = [row for node in chain if (row := _fill(node)) is not None]
            if any(row.tobytes() != fills[0].tobytes() for row in fills):
                return False
            if place.tobytes() not in held:  # blocks of a stage share theirs
                valid = np.maximum(place, 0)
                held[place.tobytes()] = add_initializer(graph, Names.of(graph).fresh("rows"), valid)
            index = held[place.tobytes()]
            _emit(graph, last, source, rows, place, rest, index, fills[0] if fills else None)
            taken.update(chain)
            return True
    return False


def _chains(last: ir.Node, places: dict[ir.Node, int]) -> Iterator[tuple[ir.Value, Chain]]:
    """(what a chain reads, its nodes in order) for all chains that end here, the shortest first."""
    chain: Chain = [last]
    inside = {last}
    open_values = [v for v in dict.fromkeys(_data(last)) if v is not None]
    while open_values and len(chain) < _LONGEST:
        if len(open_values) == 1:
            yield open_values[0], sorted(chain, key=lambda n: places[n])
        makers = [v.producer() for v in open_values]
        next_node = max((n for n in makers if n in places), key=lambda n: places[n], default=None)
        if next_node is None or not _moves(next_node):
            return
        result = next_node.outputs[0]
        if result.is_graph_output() or not set(consumers(result)) <= inside:
            return
        chain.append(next_node)
        inside.add(next_node)
        open_values.remove(result)
        open_values += [v for v in dict.fromkeys(_data(next_node)) if v not in open_values and v]


def _followed(
    source: ir.Value, chain: Chain, y: ir.Value
) -> tuple[int, np.ndarray, tuple[int, ...]] | None:
    """(rows a batch of `source` has, where each of the result's comes from, its shape but the
    first axis); -1 is a row of zeros. None where rows do not move as a whole, or by the batch.
    """
    if source.shape is None or source.is_initializer() or len(source.shape) < 2:
        return None
    first, *rest = (d if isinstance(d, int) else None for d in source.shape)
    sizes = [d for d in rest if d]
    if len(sizes) < len(rest) or first == 0:
        return None
    width, rows = sizes[-1], prod(sizes[:-1])
    units = [first] if first else _units(source, chain, rows * width)
    for unit in units:
        one = _rows(source, chain, y, [unit, *sizes])
        if one is None:
            continue
        place, shape = one
        if first is not None:
            return *_by_batch(place, unit * rows, unit, shape[0]), shape[1:]
        two = _rows(source, chain, y, [2 * unit, *sizes])
        again = np.concatenate([place, np.where(place < 0, -1, place + unit * rows)])
        if two is None or two[1] != (2 * shape[0], *shape[1:]) or (two[0] != again).any():
            return None
        return unit * rows, place, shape[1:]
    return None


def _units(source: ir.Value, chain: Chain, each: int) -> list[int]:
    """Sizes of a free first axis to try: 1, and what a Reshape of it makes a batch of."""
    sizes = [1]
    for node in chain:
        target = const_array(node.inputs[1]) if node.op_type == "Reshape" else None
        if target is not None and node.inputs[0] is source and target.size and target[0] <= 0:
            rows = abs(int(np.prod(target[1:])))
            if rows and rows % each == 0:
                sizes.append(rows // each)
    return sizes


def _rows(
    source: ir.Value, chain: Chain, y: ir.Value, shape: list[int]
) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """Where the rows of `y` come from for a source of this shape, and the shape of `y`.

    A row is as long as the source's last axis; one of `y` may be several end to end.
    """
    if prod(shape) > _LARGEST:
        return None
    width = shape[-1]
    held = {source: np.arange(prod(shape), dtype=np.int64).reshape(shape)}
    for node in chain:
        arrays = [
            None if v is None else held[v] if v in held else const_array(v) for v in node.inputs
        ]
        if any(v is not None and a is None for v, a in zip(node.inputs, arrays, strict=True)):
            return None
        if node.op_type in ("Pad", "Where"):
            array = _padded(node, arrays) if node.op_type == "Pad" else _filled(arrays, width)
        else:
            results = exact(node, arrays)
            array = results[0] if results else None
        if array is None or array.size > _LARGEST:
            return None
        held[node.outputs[0]] = array
    origins = held[y]
    if any(n.op_type == "Where" for n in chain):  # one kind of added rows, or none is known
        if (origins == -1).any():
            return None
        origins = np.maximum(origins, -1)
    if origins.ndim < 2 or origins.shape[-1] % width or not origins.size:
        return None
    flat = origins.reshape(-1, width)
    starts = flat[:, :1]
    in_order = (flat == starts + np.arange(width)).all(1) & (starts[:, 0] % width == 0)
    if not (in_order & (starts[:, 0] >= 0) | (flat < 0).all(1)).all():
        return None
    return np.where(starts[:, 0] < 0, -1, starts[:, 0] // width), origins.shape


def _padded(node: ir.Node, arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """A Pad with zeros, which are -1 here."""
    x, pads, *more = arrays
    value, axes = [*more, None, None][:2]
    if attribute(node, "mode", "constant") != "constant" or x is None or pads is None:
        return None
    if value is not None and (value.any() or np.signbit(value).any()):
        return None
    around = [(0, 0)] * x.ndim
    padded = list(range(x.ndim)) if axes is None else [int(axis) for axis in axes.reshape(-1)]
    if pads.shape != (2 * len(padded),) or not all(-x.ndim <= axis < x.ndim for axis in padded):
        return None  # no Pad: the check of the model says so
    for axis, before, after in zip(padded, *pads.reshape(2, -1).tolist(), strict=True):
        around[axis] = before, after
    if min(min(pair) for pair in around) < 0:
        return None
    return np.pad(x, around, constant_values=-1)


def _filled(arrays: Sequence[np.ndarray | None], width: int) -> np.ndarray | None:
    """A Where that puts a row where there was none: -2, since a Pad's -1 would be zeros."""
    there, x, row = arrays
    if there is None or x is None or row is None or row.size not in (1, width):
        return None
    if x.shape[-1] != width or np.broadcast_shapes(there.shape, x.shape) != x.shape:
        return None
    return np.where(there, x, -2)


def _by_batch(place: np.ndarray, rows: int, unit: int, first: int) -> tuple[int, np.ndarray]:
    """The places within one image, where all of a fixed batch move alike."""
    for batch in range(unit, 1, -1):
        if rows % batch or place.size % batch or first % batch:
            continue
        each, here = rows // batch, place.reshape(batch, -1)
        moved = np.where(here < 0, -1, here - each * np.arange(batch)[:, None])
        if (moved == moved[0]).all() and moved.min() >= -1 and moved.max() < each:
            return each, moved[0]
    return rows, place


def _emit(
    graph: ir.Graph,
    last: ir.Node,
    source: ir.Value,
    rows: int,
    place: np.ndarray,
    rest: tuple[int, ...],
    index: ir.Value,
    fill: np.ndarray | None,
) -> None:
    op, y = Builder(), last.outputs[0]
    flat = op.Reshape(source, [-1, rows, dim(source, -1)])
    result = op.Gather(flat, index, axis=1)
    if (place < 0).any():
        if fill is None:
            fill = np.zeros((), (source.dtype or ir.DataType.FLOAT).numpy())
        result = op.Where(op.constant((place >= 0)[:, None]), result, op.constant(fill))
    result = op.Reshape(result, [-1, *rest])
    result.dtype, result.shape = y.dtype, y.shape
    graph.insert_before(last, op.nodes)
    y.replace_all_uses_with(result)
    freeze_shared([y], op.nodes)
