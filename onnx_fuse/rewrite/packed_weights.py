"""Packed parameters: initializers that a pass made by transposing or concatenating the model's own.

A packed initializer carries, in its metadata, the originals it was made of:
    packed = concat(axis, [transpose(part, perm) for part in parts])
so that gradients and trained weights answer under the names and in the shapes the user knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder
from onnx_fuse.ops.rules import PACKED, typed


@dataclass(frozen=True)
class Part:
    """One original parameter inside a packed one: its name, shape, and the transpose applied."""

    name: str
    shape: tuple[int, ...]
    perm: tuple[int, ...] | None

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[p] for p in self.perm) if self.perm else self.shape


def parts(value: ir.Value) -> tuple[int | None, list[Part]]:
    """(axis, parts) of a packed initializer; of any other, itself as the only part."""
    record = json.loads(value.metadata_props.get(PACKED, "null"))
    if record is None:
        # the data knows its shape even where inference has put a symbol for it
        tensor = value.const_value
        shape = tuple(tensor.shape.numpy()) if tensor is not None else ()
        if tensor is None and value.shape is not None:
            shape = value.shape.numpy()
        return None, [Part(value.name or "", shape, None)]
    group = [
        Part(p["name"], tuple(p["shape"]), tuple(p["perm"]) if p["perm"] else None)
        for p in record["parts"]
    ]
    return record["axis"], group


def unpack(value: ir.Value, array: np.ndarray) -> dict[str, np.ndarray]:
    """The original parameters inside `array`, a (trained) content of the packed `value`."""
    axis, group = parts(value)
    pieces = [array]
    if axis is not None:
        ends = np.cumsum([p.packed_shape[axis] for p in group])[:-1]
        pieces = np.split(array, ends, axis)
    return {
        p.name: piece if p.perm is None else piece.transpose(np.argsort(p.perm))
        for p, piece in zip(group, pieces, strict=True)
    }


def pack(value: ir.Value, originals: Mapping[str, np.ndarray]) -> np.ndarray:
    """The content of the packed `value` from its original parameters by name."""
    axis, group = parts(value)
    pieces = [
        originals[p.name] if p.perm is None else originals[p.name].transpose(p.perm) for p in group
    ]
    return np.asarray(pieces[0], order="C") if axis is None else np.concatenate(pieces, axis)


def unpack_values(op: Builder, value: ir.Value, packed: ir.Value) -> dict[str, ir.Value]:
    """`unpack` as nodes, of a value shaped like the packed one (its gradient)."""
    axis, group = parts(value)
    if axis is None:
        pieces = (packed,)
    else:
        sizes = op.constant([p.packed_shape[axis] for p in group])
        pieces = op.Split(packed, sizes, axis=axis, outputs=len(group))
    result = {}
    for part, piece in zip(group, pieces, strict=True):
        if part.perm is not None:
            piece = op.Transpose(piece, perm=[int(i) for i in np.argsort(part.perm)])
        result[part.name] = typed(piece, value, part.shape)
    return result


def pack_values(op: Builder, value: ir.Value, originals: Mapping[str, ir.Value]) -> ir.Value:
    """`pack` as nodes, of values of the original parameters by name."""
    axis, group = parts(value)
    pieces = [originals[part.name] for part in group]
    for i, part in enumerate(group):
        if part.perm is not None:
            turned = op.Transpose(pieces[i], perm=list(part.perm))
            pieces[i] = typed(turned, value, part.packed_shape)
    return pieces[0] if axis is None else typed(op.Concat(*pieces, axis=axis), value, value.shape)
