"""Caches before attention: what adds rows to the keys and to the values becomes one operator.

New rows stand behind those of before (Concat), or at places of a buffer of a fixed size (torch's
index_copy and index_put as ScatterElements or ScatterND, TensorScatter). The operator takes in the
rotation of queries and new keys by the same tables. A decoder's layer then has one launch for what
were up to eight. It is for graphs that this runtime's kernels run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, extents, rank, required, sources
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.fused.caches import CACHES, NORM_ROTATED, PLAIN, ROTATED
from onnx_fuse.ops.fused.norm import canonical_norm
from onnx_fuse.ops.fused.sdpa import KINDS
from onnx_fuse.ops.fused.sdpa.rule import transposed
from onnx_fuse.ops.rules import (
    Rewriter,
    attribute,
    constant_ints,
    is_constant,
    nodes_in_order,
    producer,
    scalar,
)
from onnx_fuse.rewrite.canonicalize import fold_sizes, refresh
from onnx_fuse.rewrite.rotation import head_rotation_of

GROWING_CACHE = CACHES[PLAIN, False]
"""Name of the rewrite in reports and for --fuse and --skip."""


def grow_caches(rw: Rewriter) -> int:
    """Put one operator in the place of the two updates before attention; how many there were.

    The nodes are not in order afterwards: a present may be read before the other is there.
    """
    nodes = [node for node in nodes_in_order(rw.graph, tuple(KINDS)) if _updates(node)]
    if any(_is_sum_of_products(node.inputs[0]) for node in nodes):
        refresh(rw.model)
        # what repeated the heads is gone, and said of no size that it is not 0
        fold_sizes(rw.model, training=False)
    places: dict[object, ir.Value] = {}
    return sum(_grow(rw, node, places) for node in nodes)


def _is_sum_of_products(value: ir.Value | None) -> bool:
    """Whether it is, or begins with, a sum of two products that is not seen to be a rotation."""
    join = producer(value, "Concat")
    total = producer(value if join is None else join.inputs[0], "Add")
    if value is None or total is None or head_rotation_of(value) is not None:
        return False
    return all(producer(v, "Mul") is not None for v in total.inputs)


@dataclass(frozen=True)
class _Places:
    """Where new rows stand: `source` with `axes` unsqueezed, [B or 1, 1, S, 1].

    Of `starts`, `source` [B] or None (0) has the place of the first row of each sequence, and
    those behind `circular` buffers' ends are at their beginning.
    """

    source: ir.Value | None
    axes: tuple[int, ...] = ()
    starts: bool = False
    circular: bool = False

    def build(self, op: Builder, past: ir.Value, new: ir.Value) -> ir.Value:
        value: ir.Value | None = self.source
        if value is not None and value.dtype != ir.DataType.INT64:
            value = op.Cast(value, to=ir.DataType.INT64)
        if value is not None and self.axes:
            value = op.Unsqueeze(value, list(self.axes))
        if not self.starts:
            return required(value)
        rows = op.Squeeze(op.Shape(new, start=2, end=3), [0])
        rows = op.Unsqueeze(op.Range(op.constant(0), rows, op.constant(1)), [0, 1, 3])
        places: ir.Value = rows if value is None else op.Add(value, rows)
        return op.Mod(places, op.Shape(past, start=2, end=3)) if self.circular else places


@dataclass(frozen=True)
class _Update:
    """`present` [B, H, T, D]: `past` with `new` behind it or at `places`; new, transposed by
    `perm`, is [B, H, S, D].
    """

    present: ir.Value
    past: ir.Value
    new: ir.Value
    places: _Places | None = None
    perm: tuple[int, ...] = ()

    def rows(self, op: Builder) -> ir.Value:
        return transposed(op, self.new, self.perm) if self.perm else self.new

    @property
    def key(self) -> tuple[object, ...]:
        """What the places are computed from; None in the place of a size that has no name."""
        if self.places is None or not self.places.starts:
            return (self.places,)
        sizes = [x.shape[2] for x in (self.past, self.new) if x.shape is not None]
        return self.places, *extents(sizes)


def _updates(attention: ir.Node) -> tuple[_Update, _Update] | None:
    _, k, v = attention.inputs[:3]
    keys, values = _update(k, attention), _update(v, attention)
    if keys is None or values is None or keys.present is values.present:
        return None
    return None if keys.key != values.key or None in keys.key[1:] else (keys, values)


def _grow(rw: Rewriter, attention: ir.Node, places: dict[object, ir.Value]) -> bool:
    q, both = attention.inputs[0], _updates(attention)
    if both is None or q is None:
        return False
    keys, values = both
    old, op = [update.present for update in both], Builder()
    new_key, new_value = (update.rows(op) for update in both)
    operands = [new_key, new_value, keys.past, values.past]
    turned, turned_key = (head_rotation_of(x) for x in (q, new_key))
    how, attributes = PLAIN, dict[str, Any]()
    if turned is not None and turned_key is not None:
        tables = [turned.cos, turned.sin]
        if [turned_key.cos, turned_key.sin] == tables and dim(turned.x, -1) == dim(new_key, -1):
            how, old, rows = ROTATED, [q, *old], [turned.x, turned_key.x]
            norms = [norm for x in rows if (norm := _head_norm(x)) is not None]
            if len(norms) == 2 and norms[0].epsilon == norms[1].epsilon:
                how, attributes = NORM_ROTATED, {"epsilon": norms[0].epsilon}
                rows = [
                    transposed(op, norm.x, norm.perm) if norm.perm else norm.x for norm in norms
                ]
                tables += [norm.scale for norm in norms]
            operands = [*rows, new_value, keys.past, values.past, *tables]
    where = places.get(keys.key)
    if keys.places is not None:
        where = keys.places.build(op, keys.past, new_key) if where is None else where
        operands.append(where)
    if not sources(operands).keys().isdisjoint(old):
        return False
    if where is not None:
        places[keys.key] = where
    name = CACHES[how, keys.places is not None]
    new = op.node(name, operands, domain=FUSE, outputs=len(old), **attributes)
    return rw.replace(attention, op, old, new)


@dataclass(frozen=True)
class _HeadNorm:
    """An RMSNormalization of each head's numbers of `x`, transposed by `perm` (if any)."""

    x: ir.Value
    scale: ir.Value
    epsilon: float
    perm: tuple[int, ...] = ()


def _head_norm(rows: ir.Value) -> _HeadNorm | None:
    """The norm behind `rows` [B, H, S, D], whose squares are summed in float32."""
    view = producer(rows, "Transpose")
    perm = () if view is None else tuple(attribute(view, "perm", ()))
    value = rows if view is None else view.inputs[0]
    norm = None if value is None else canonical_norm(value.producer())
    if norm is None or norm.kind != "RMSNorm" or norm.attributes["stash_type"] != 1:
        return None
    (scale,) = norm.affine
    if perm[-1:] not in ((), (3,)) or scale.dtype != rows.dtype or rank(norm.x) != 4:
        return None
    return _HeadNorm(norm.x, scale, norm.attributes["epsilon"], perm)


def _update(value: ir.Value | None, attention: ir.Node) -> _Update | None:
    """How [B, H, tokens, D], which a Cast may lead to, has its new rows."""
    cast = producer(value, "Cast")
    value = value if cast is None else cast.inputs[0]
    node = None if value is None else value.producer()
    if node is None or node.graph is not attention.graph or node.domain:
        return None
    form = _FORMS.get(node.op_type)
    update = None if form is None else form(node)
    if update is None or is_constant(update.past) or is_constant(update.new):
        return None
    same = update.past is update.new
    return update if rank(update.past) == rank(update.new) == 4 and not same else None


def _joined(node: ir.Node) -> _Update | None:
    if attribute(node, "axis", 0) not in (2, -2) or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    return None if past is None or new is None else _Update(node.outputs[0], past, new)


def _scattered(node: ir.Node) -> _Update | None:
    """ScatterElements along the tokens, its indices the same for all heads and columns."""
    past, indices, new = node.inputs
    if attribute(node, "axis", 0) not in (2, -2) or attribute(node, "reduction", "none") != "none":
        return None
    places = _places(indices)
    if past is None or new is None or places is None:
        return None
    return _Update(node.outputs[0], past, new, places)


def _permuted(node: ir.Node) -> _Update | None:
    """ScatterND between two Transposes, of which the first brings the tokens to the front."""
    back, scatter = attribute(node, "perm", ()), producer(node.inputs[0], "ScatterND")
    if scatter is None or attribute(scatter, "reduction", "none") != "none":
        return None
    turn, (_, indices, new) = producer(scatter.inputs[0], "Transpose"), scatter.inputs
    front: list[int] = [] if turn is None else [*attribute(turn, "perm", ())]
    if turn is None or len(front) != 4 or front[0] != 2 or rank(indices) != 2:
        return None
    places, past = _places(indices), turn.inputs[0]
    if [front[i] for i in back] != [0, 1, 2, 3] or places is None or past is None or new is None:
        return None
    perm = tuple(back)
    if (before := producer(new, "Transpose")) is not None and before.inputs[0] is not None:
        order = attribute(before, "perm", ())
        new, perm = before.inputs[0], tuple(order[i] for i in back)
    return _Update(node.outputs[0], past, new, places, () if perm == (0, 1, 2, 3) else perm)


def _at_coordinates(node: ir.Node) -> _Update | None:
    """ScatterND by (sequence, head, token) of all sequences and heads: TorchScript's index_put."""
    past, indices, new = node.inputs
    parts = () if (join := producer(indices, "Concat")) is None else join.inputs
    if attribute(node, "reduction", "none") != "none" or len(parts) != 3:
        return None
    if past is None or past.shape is None or new is None or indices is None:
        return None
    if indices.shape is None or rank(past) != 4 or rank(indices) != 4 or dim(indices, -1) != 3:
        return None
    sizes, each = extents((*indices.shape[:3], past.shape[3])), []
    for part in parts:
        unit = producer(part, "Unsqueeze")
        if unit is None or constant_ints(unit.inputs[1]) not in ([-1], [3]):
            return None
        expand = producer(unit.inputs[0], "Expand")
        each.append(unit.inputs[0] if expand is None else expand.inputs[0])
    if None in sizes or extents(past.shape[:2]) != sizes[:2] or rank(each[2]) != 1:
        return None
    if not all(_counts(each[axis], axis, sizes[axis]) for axis in (0, 1)):
        return None
    if (view := producer(new, "Reshape")) is not None and (source := view.inputs[0]) is not None:
        turned = head_rotation_of(source)  # has the shape of what it turns
        shape = (source if turned is None else turned.x).shape
        new = source if extents(shape) == sizes else new
    return _Update(node.outputs[0], past, new, _Places(each[2], (0, 1, 3)))


def _counts(value: ir.Value | None, axis: int, size: int | str | None) -> bool:
    """Whether it is 0, 1, ... along an axis of three, of which it has the last ones."""
    shape = extents(None if value is None else value.shape)
    before = len(shape) - 3 + axis
    if before < 0 or shape.pop(before) != size or any(n != 1 for n in shape):
        return False
    if (array := const_array(value)) is not None:
        return array.ravel().tolist() == list(range(array.size))
    view = producer(value, "Reshape", "Unsqueeze")
    counting = producer(value if view is None else view.inputs[0], "Range")
    return counting is not None and [scalar(x) for x in counting.inputs[::2]] == [0, 1]


def _tensor_scattered(node: ir.Node) -> _Update | None:
    past, new, *starts = node.inputs
    if past is None or new is None or attribute(node, "axis", -2) not in (2, -2):
        return None
    circular = attribute(node, "mode", "linear") == "circular"
    places = _Places(starts[0] if starts else None, (1, 2, 3), starts=True, circular=circular)
    return _Update(node.outputs[0], past, new, places)


def _places(indices: ir.Value | None) -> _Places | None:
    """Of indices that are the same for all heads and columns: [., 1, S, 1] or less, expanded."""
    expand = producer(indices, "Expand")
    value = indices if expand is None else expand.inputs[0]
    if value is None or value.shape is None or dim(value, -1) != 1 or len(value.shape) > 4:
        return None
    lead = list(value.shape)[:-2]
    if lead and lead[-1] != 1:
        return None
    view = producer(value, "Unsqueeze", "Reshape")
    source = None if view is None else view.inputs[0]
    if rank(source) == 1 and all(size == 1 for size in lead):  # its numbers in their order
        return _Places(source, (0, 1, 3))
    if rank(source) == 2 and view is not None and view.op_type == "Unsqueeze":
        axes = constant_ints(view.inputs[1]) or []
        if sorted(axis % 4 for axis in axes) == [1, 3]:
            return _Places(source, (1, 3))
    return _Places(value, tuple(range(4 - len(value.shape))))


_FORMS = {
    "Concat": _joined,
    "ScatterElements": _scattered,
    "ScatterND": _at_coordinates,
    "Transpose": _permuted,
    "TensorScatter": _tensor_scattered,
}
