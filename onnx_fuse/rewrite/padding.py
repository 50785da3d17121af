"""Batches of sequences without their padding: a graph over the tokens that exist.

Where the mask of every attention hides the keys of padded tokens, and each token's row is computed
from its own alone, nobody reads what stands at the padding. The rows [B, S, ..] of a graph then
become [1, T, ..], one sequence behind the other, and attention takes the packed kind, which knows
by offsets where each begins. Operators of rows stay as they are, with their kernels and gradients.
Inputs are added, which `Packing.feeds` makes of the mask of one batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import Builder, captured, const_array, dim, extents, rank, required, sources
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.evaluate import evaluate
from onnx_fuse.ir.names import FusedName, Names
from onnx_fuse.ir.traits import BROADCASTS, POINTWISE, SIZES
from onnx_fuse.ops.fused.sdpa.kinds import KINDS, Kind
from onnx_fuse.ops.rules import attribute, constant_ints, is_float, label, producer
from onnx_fuse.program.packing import OFFSETS, PROPERTY, TOKENS, Packing
from onnx_fuse.rewrite.canonicalize import refresh
from onnx_fuse.rewrite.key_masks import KeyMask, key_mask, reached_inputs

_SAMPLES = ((3, 5), (2, 7))
"""(B, S) at which sizes are looked at: what is B x S at both is so at every size."""
_ALONG = frozenset(("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization"))


class NotPacked(ModelError):
    """A graph whose padding may be read, or that nothing proves otherwise."""


@dataclass(frozen=True)
class _RowAxes:
    """The axes of a value along which sequences (None: joined to the rows) and rows are."""

    batch: int | None
    row: int

    def behind(self, size: int) -> tuple[int | None, int]:
        """The two axes counted from the last, -1, of so many."""
        return None if self.batch is None else self.batch - size, self.row - size


def pack(model: ir.Model, *, zero: bool = False, tokens: bool = False) -> ir.Model:
    """A copy of an optimized model that works on tokens only; `Packing.of` says what it is fed.

    Outputs that have a row for each token are refused, since the model defines those at the padding
    too; with `zero` they are zero there, and with `tokens` they stay [1, T, ..]. Raises NotPacked
    with the reason.
    """
    model = model.clone()
    packer = _Packer(model, zero, tokens)
    packing = packer.run()
    refresh(model)
    model.metadata_props[PROPERTY] = json.dumps(asdict(packing))
    return model


class _Packer:
    def __init__(self, model: ir.Model, zero: bool, tokens: bool) -> None:
        self.model, self.graph = model, model.graph
        self.zero, self.as_tokens = zero, tokens
        self.rows: dict[ir.Value, _RowAxes] = {}
        self.shapes: dict[ir.Value, list[int | ir.SymbolicDim]] = {}
        """Of values that are packed now, the shapes that they had."""
        self.picked: list[int] = []
        self.places: ir.Value | None = None
        self.chosen: ir.Value | None = None
        self.packed: dict[tuple[ir.Value, tuple[int | None, int]], ir.Value] = {}
        self.biases: dict[ir.Value, ir.Value] = {}
        """Biases of scores, and what packed attention reads of them."""
        self.names = Names.of(self.graph)
        self.op = Builder()

    def run(self) -> Packing:
        attentions = [node for node in self.graph if _kind(node) is not None]
        if not attentions:
            raise NotPacked("it has no attention that a kernel of ours computes")
        inputs = {v: None for node in attentions for v in reached_inputs(node.inputs[3:])}
        if len(inputs) != 1:
            named = ", ".join(sorted(f"'{v.name}'" for v in inputs))
            raise NotPacked(f"its attention is masked by {named or 'no input'}, not by one input")
        (self.mask,) = inputs
        if rank(self.mask) != 2:
            raise NotPacked(f"its mask '{self.mask.name}' is not [batch, sequence]")
        self.fed = [v for v in self.graph.inputs if v is not self.mask and self._like_mask(v)]
        self.proofs: dict[tuple[ir.Value | None, ...], KeyMask] = {}
        self.tokens = self._input("padding.rows", ir.DataType.INT64, [1, TOKENS])
        offsets = self._input("padding.offsets", ir.DataType.INT64, [OFFSETS])
        # a tensor of the GPU's own: blocks of each attention read it, and a small input may stay
        # in the host's memory
        self.offsets = self.op.Cast(offsets, to=int(ir.DataType.INT32))
        self.offsets.type, self.offsets.shape = ir.TensorType(ir.DataType.INT32), offsets.shape
        self._place(next(iter(self.graph)))
        nodes = list(self.graph)
        for value in self.fed:
            if is_float(value) and (rank(value) or 0) > 2:
                self._fed_rows(value)
        for node in nodes:
            self._visit(node)
        ends = [value for value in self.graph.outputs if value in self.rows]
        for value in ends:
            if self.rows[value] != _RowAxes(0, 1):
                raise NotPacked(f"its output '{value.name}' has rows that are no second axis")
            if not self.as_tokens:
                self._spread(value)
        if not any(kind is not None and kind.packed for kind in map(_kind, self.graph)):
            raise NotPacked("no attention is over rows of its inputs")
        return Packing(
            mask=str(self.mask.name),
            rows=str(self.tokens.name),
            places=str(self.places.name) if self.places else "",
            offsets=str(offsets.name),
            inputs=tuple(str(v.name) for v in self.fed),
            outputs=tuple(str(v.name) for v in ends if self.as_tokens),
            picked=tuple(self.picked),
            chosen=str(self.chosen.name) if self.chosen else "",
            longest=min(proof.longest for proof in self.proofs.values()),
        )

    # ---- ends ----

    def _fed_rows(self, value: ir.Value) -> None:
        """Let what reads rows of an input read those of tokens."""
        if value.is_graph_output():
            raise NotPacked(f"its input '{value.name}' is an output")
        readers = list(value.uses())
        rows = self._taken(value, value, 2)
        rows.type, rows.shape = value.type, value.shape
        self._place(next(iter(self.graph)))
        for node, i in readers:
            node.replace_input_with(i, rows)
        self._result(rows, _RowAxes(0, 1))

    def _like_mask(self, value: ir.Value) -> bool:
        """Whether the first two axes are the mask's."""
        ours = required(self.mask.shape)
        if value.shape is None or len(value.shape) < 2:
            return False
        sizes = extents(value.shape)[:2]
        return None not in sizes and sizes == extents(ours)

    def _input(self, stem: str, dtype: ir.DataType, sizes: Sequence[object]) -> ir.Value:
        kind, shape = ir.TensorType(dtype), ir.Shape(sizes)  # type: ignore[arg-type]
        value = ir.Value(name=self.names.fresh(stem), type=kind, shape=shape)
        self.graph.inputs.append(value)
        return value

    def _place(self, at: ir.Node, *, after: bool = False) -> None:
        for node in self.op.nodes:
            for value in node.outputs:
                value.name = value.name or self.names.fresh("padding")
        (self.graph.insert_after if after else self.graph.insert_before)(at, self.op.nodes)
        self.op = Builder()

    def _spread(self, value: ir.Value) -> None:
        """Give an output the rows of the padding again."""
        if not self.zero:
            raise NotPacked(
                f"its output '{value.name}' has a row for each token, at the padding too: "
                "pack='zero' gives zeros there"
            )
        op, dtype, name = self.op, required(value.dtype), value.name
        if self.places is None:
            sizes = [*required(self.mask.shape)]
            self.places = self._input("padding.places", ir.DataType.INT64, sizes)
        wide = op.Gather(op.Squeeze(value, [0]), self.places, axis=0)
        there = op.Cast(self.mask, to=int(ir.DataType.BOOL))
        if behind := list(range(2, required(rank(value)))):
            there = op.Unsqueeze(there, behind)
        nothing = op.constant(np.zeros((), dtype.numpy()))
        result: ir.Value = op.Where(there, wide, nothing)
        result.type, result.shape = value.type, ir.Shape(self.shapes[value])
        self._place(required(value.producer()), after=True)
        value.name = self.names.fresh(f"{name}.packed")
        result.name = name
        self.graph.outputs[self.graph.outputs.index(value)] = result

    # ---- one node ----

    def _visit(self, node: ir.Node) -> None:
        if any(v in self.rows for v in captured(node)):
            raise NotPacked(f"the body of '{label(node)}' ({node.op_type}) reads rows")
        if _kind(node) is not None and any(v in self.rows for v in node.inputs):
            return self._attention(node)
        given = [v for v in node.inputs if v in self.rows]
        if not given:
            if self._begins(node):
                index = self._rows_of(required(node.inputs[1]), (-2, -1), node)
                node.replace_input_with(1, index)
                self._result(node.outputs[0], _RowAxes(0, 1))
            return None
        if node.op_type in SIZES and not node.domain:
            return self._measured(node, given[0])
        if node.op_type == "Gather" and not node.domain and self._pick(node):
            return None
        if node.op_type == "Reshape" and not node.domain:
            return self._reshaped(node, given[0])
        places = self._results(node)
        if places is None:
            raise NotPacked(f"'{label(node)}' ({node.op_type}) may read rows of padding")
        for value, place in zip(node.outputs, places, strict=True):
            self._result(value, place)

    def _begins(self, node: ir.Node) -> bool:
        """Whether a Gather looks up a row of a table for each token."""
        if (node.op_type, node.domain) != ("Gather", "") or attribute(node, "axis", 0):
            return False
        table, index = node.inputs[0], required(node.inputs[1])
        if not is_float(table) or const_array(table) is None or rank(index) != 2:
            return False
        if set(self.fed).isdisjoint(reached_inputs([index])):
            return False
        found = [self._evaluated([index], sample) for sample in _SAMPLES]
        return [array and array[0].shape for array in found] == [*_SAMPLES]

    def _result(self, value: ir.Value, place: _RowAxes) -> None:
        self.rows[value] = place
        if value.shape is None:
            raise NotPacked(f"the rank of '{value.name}' is not known")
        self.shapes[value] = [*value.shape]
        sizes: list[int | str | ir.SymbolicDim] = [*value.shape]
        if place.batch is not None:
            sizes[place.batch] = 1
        sizes[place.row] = TOKENS
        value.shape = ir.Shape(sizes)

    def _results(self, node: ir.Node) -> list[_RowAxes] | None:
        """Where the rows of a node's outputs are, None where it may read other rows."""
        first = node.inputs[0]
        fused = FusedName.of(node.op_type)
        if node.domain == FUSE:
            rowwise = fused.family in ("", "Gemm") and (fused.norm or fused.family or fused.skip)
            return self._rowwise(node) if rowwise and not fused.grad else self._elements(node, FUSE)
        if node.domain == "com.microsoft" and node.op_type == "MatMulNBits":
            return self._rowwise(node)
        if node.domain:
            return None
        kind = node.op_type
        if kind in POINTWISE | BROADCASTS or kind == "Dropout":
            return self._elements(node, "")
        place, size = None if first is None else self.rows.get(first), rank(first) or 0
        if kind == "Concat":
            return self._joined(node)
        if place is None or any(v in self.rows for v in node.inputs[1:]):
            return None
        if kind == "RotaryEmbedding":
            return self._rotated(node, place, size)
        if kind == "MatMul":
            return [place] if rank(node.inputs[1]) == 2 and place.row < size - 1 else None
        if kind == "Gemm":
            return self._rowwise(node) if not attribute(node, "transA", 0) else None
        if kind in _ALONG:
            along = attribute(node, "axis", -1) % size
            return [place] * len(node.outputs) if along > place.row else None
        if kind == "Transpose":
            perm = list(attribute(node, "perm", range(size)[::-1]))
            batch = None if place.batch is None else perm.index(place.batch)
            return [_RowAxes(batch, perm.index(place.row))]
        if kind.startswith("Reduce"):
            given = constant_ints(node.inputs[1]) if len(node.inputs) > 1 else None
            axes = given or attribute(node, "axes")
            last = max(place.row, place.batch or 0)
            return [place] if axes and all(axis % size > last for axis in axes) else None
        if kind in ("Split", "Slice", "Unsqueeze", "Squeeze"):
            return self._cut(node, place, size)
        return None

    def _rotated(self, node: ir.Node, place: _RowAxes, size: int) -> list[_RowAxes] | None:
        """Of a rotation of [B, S, H D] or [B, H, S, D], by each token's angles or their number."""
        if place != _RowAxes(0, size - 2):
            return None
        numbers = node.inputs[3] if len(node.inputs) > 3 else None
        each = [3] if numbers is not None else [1, 2]
        for i in each:
            value = required(node.inputs[i])
            ends = (-2, -1) if numbers is not None else (-3, -2)
            if rank(value) != -ends[0]:
                return None
            node.replace_input_with(i, self._rows_of(value, ends, node))
        return [place]

    def _cut(self, node: ir.Node, place: _RowAxes, size: int) -> list[_RowAxes] | None:
        """Of an operator that works on axes behind those of the rows."""
        kind = node.op_type
        if kind in ("Split", "Concat"):
            axes: Sequence[int] | None = [attribute(node, "axis", 0)]
        else:
            at = 3 if kind == "Slice" else 1
            axes = constant_ints(node.inputs[at]) if len(node.inputs) > at else None
        total = size + len(axes or ()) * (kind == "Unsqueeze")
        if not axes or any(axis % total <= max(place.row, place.batch or 0) for axis in axes):
            return None
        return [place] * len(node.outputs)

    def _joined(self, node: ir.Node) -> list[_RowAxes] | None:
        """Of a Concat behind the axes of rows: operands without rows get those of the tokens."""
        places = {(self.rows[v], rank(v) or 0) for v in node.inputs if v in self.rows}
        if len(places) != 1:
            return None
        ((place, size),) = places
        results = self._cut(node, place, size)
        for i, value in enumerate(node.inputs) if results else ():
            if value is not None and value not in self.rows:
                node.replace_input_with(i, self._rows_of(value, place.behind(size), node))
        return results

    def _elements(self, node: ir.Node, domain: str) -> list[_RowAxes] | None:
        """Of an operator of elements: operands without rows get those of the tokens."""
        if domain and not (len(node.inputs) == 1 and node.op_type in POINTWISE):
            return None
        ends = {self.rows[v].behind(rank(v) or 0) for v in node.inputs if v in self.rows}
        if len(ends) != 1:
            return None
        ((batch, row),) = ends
        for i, value in enumerate(node.inputs):
            size = rank(value)
            if value is None or value in self.rows or (node.op_type == "Dropout" and i):
                continue
            if size is None:
                return None
            if self._varies(value, batch, row):
                if batch is None:
                    return None
                node.replace_input_with(i, self._rows_of(value, (batch, row), node))
        size = max(rank(v) or 0 for v in node.inputs)
        return [_RowAxes(None if batch is None else batch + size, row + size)] * len(node.outputs)

    def _varies(self, value: ir.Value, batch: int | None, row: int) -> bool:
        """Whether a value without rows has more than one along the axes of rows."""
        size = rank(value) or 0
        return any(a is not None and a >= -size and dim(value, a) != 1 for a in (batch, row))

    def _rowwise(self, node: ir.Node) -> list[_RowAxes] | None:
        """Of a product or a norm of rows, whose weights have none."""
        given = [v for v in node.inputs if v in self.rows]
        sizes, places = {rank(v) for v in given}, {self.rows[v] for v in given}
        if len(sizes) != 1 or len(places) != 1 or node.inputs[0] not in self.rows:
            return None
        (size,), (place,) = sizes, places
        if size is None or place.row >= size - 1:
            return None
        for i, value in enumerate(node.inputs):
            if value is None or value in self.rows or const_array(value) is not None:
                continue
            batch, row = place.behind(size)
            axes = rank(value)
            if axes is None or (axes > 2 and batch is None):
                return None
            if self._varies(value, batch, row) and axes >= size:
                node.replace_input_with(i, self._rows_of(value, (batch, row), node))
        return [place] * len(node.outputs)

    # ---- values without rows ----

    def _rows_of(self, value: ir.Value, ends: tuple[int | None, int], at: ir.Node) -> ir.Value:
        """A value [B or 1, S or 1, ..] with a row for each token, [1, T, ..].

        `ends` are the axes, counted from the last; of a table's rows those of their numbers.
        """
        batch, row = ends
        key = value, ends
        if key in self.packed:
            return self.packed[key]
        node, size = producer(value, "Gather"), rank(value) or 0
        table = None if node is None or attribute(node, "axis", 0) else node.inputs[0]
        array = const_array(table)
        behind = 0 if array is None else array.ndim - 1
        if node is not None and batch is not None and behind and row + behind < 0:
            inner = self._rows_of(required(node.inputs[1]), (batch + behind, row + behind), at)
            result = self.op.Gather(table, inner)
        elif batch is None or row != batch + 1 or size > -batch:
            raise NotPacked(f"'{value.name}' has its rows on other axes than those of tokens")
        else:
            self._check_sizes(value, batch, row)
            shape = self.op.Shape(self.mask)
            if row < -1:
                shape = self.op.Concat(shape, self.op.constant([1] * (-row - 1)), axis=0)
            result = self._taken(self.op.Expand(value, shape), value, size + row + 1)
        result.type = value.type
        self._place(at)
        self.packed[key] = result
        return result

    def _taken(self, wide: ir.Value, like: ir.Value, first: int) -> ir.Value:
        """The tokens' rows of a value [B, S, ..], of the sizes of `like` from axis `first` on."""
        sizes = [dim(like, axis) for axis in range(first, required(rank(like)))]
        if None in sizes:
            raise NotPacked(f"the sizes of '{like.name}' are not known")
        flat = self.op.Reshape(wide, [-1, *sizes])
        flat.type = like.type
        rows: ir.Value = self.op.Gather(flat, self.tokens, axis=0)
        return rows

    def _check_sizes(self, value: ir.Value, batch: int, row: int) -> None:
        """Raise NotPacked unless a value has one row for all, or the batch's sizes."""
        for sample in _SAMPLES:
            array = self._evaluated([value], sample)
            sizes = None if array is None else array[0].shape
            for axis, size in ((batch, sample[0]), (row, sample[1])):
                if sizes is None or (axis >= -len(sizes) and sizes[axis] not in (1, size)):
                    raise NotPacked(f"'{value.name}' may have other sizes than the mask")

    def _evaluated(
        self, values: Sequence[ir.Value], sample: tuple[int, int], mask: Array | None = None
    ) -> list[Array] | None:
        """What values are at (B, S), of a batch of zeros; None where that is not known."""
        arrays: dict[ir.Value, Array] = {}

        reached = sources(values, lambda node: (v for v in node.inputs if v not in self.rows))
        for value in self.rows:
            shape = self._sizes_at(value, sample)
            if shape is not None:
                arrays[value] = np.broadcast_to(np.zeros((), required(value.dtype).numpy()), shape)
        for value in reached:
            if (array := const_array(value)) is not None:
                arrays[value] = array
            elif value.producer() is None and value is not self.mask:
                shape = self._fed_sizes(value, sample)
                if shape is None:
                    return None
                arrays[value] = np.zeros(shape, required(value.dtype).numpy())
        kind = required(self.mask.dtype).numpy()
        arrays[self.mask] = (np.ones(sample) if mask is None else mask).astype(kind)
        made = {v.producer() for v in reached} - {None}
        nodes = [n for n in self.graph if n in made and n.outputs[0] not in arrays]
        results = evaluate(nodes, arrays, self.graph.opset_imports) | arrays
        return None if any(v not in results for v in values) else [results[v] for v in values]

    def _fed_sizes(self, value: ir.Value, sample: tuple[int, int]) -> tuple[int, ...] | None:
        by_name = dict(zip(extents(required(self.mask.shape)), sample, strict=True))
        if value.shape is None:
            return None
        sizes = [by_name.get(d, d) for d in extents(value.shape)]
        return tuple(sizes) if all(isinstance(d, int) for d in sizes) else None  # type: ignore[arg-type]

    def _sizes_at(self, value: ir.Value, sample: tuple[int, int]) -> tuple[int, ...] | None:
        """The shape that packed rows had at (B, S)."""
        place, sizes = self.rows[value], extents(self.shapes[value])
        if place.batch is None:
            sizes[place.row] = prod(sample)
        else:
            sizes[place.batch], sizes[place.row] = sample
        return tuple(sizes) if all(isinstance(d, int) for d in sizes) else None  # type: ignore[arg-type]

    # ---- nodes of their own ----

    def _measured(self, node: ir.Node, x: ir.Value) -> None:
        """Let a node that reads the shape of rows read that of the padded ones."""
        place, old = self.rows[x], self.shapes[x]
        op, sizes = self.op, list[ir.Value]()
        shape = op.Shape(self.mask)
        for axis, size in enumerate(extents(old)):
            if axis == place.row and place.batch is None:
                sizes.append(op.ReduceProd(shape, keepdims=1))
            elif axis in (place.batch, place.row):
                at = int(axis == place.row)
                sizes.append(op.Slice(shape, [at], [at + 1], [0]))
            elif isinstance(size, int):
                sizes.append(op.constant([size]))
            else:
                raise NotPacked(f"the sizes of '{x.name}' are not known")
        if node.op_type == "Size":
            raise NotPacked(f"'{label(node)}' counts the elements of rows")
        whole = sizes[0] if len(sizes) == 1 else op.Concat(*sizes, axis=0)
        start, end = attribute(node, "start", 0), attribute(node, "end")
        if start or end is not None:
            last = np.iinfo(np.int64).max if end is None else end
            whole = op.Slice(whole, [start], [last], [0])
        y = node.outputs[0]
        whole.type, whole.shape = y.type, y.shape
        self._place(node)
        y.replace_all_uses_with(whole, replace_graph_outputs=True)

    def _pick(self, node: ir.Node) -> bool:
        """A Gather of rows at places that are known; whether it is one."""
        x, index = node.inputs
        if x not in self.rows or index in self.rows or self.rows[x].batch is None:
            return False
        if attribute(node, "axis", 0) % required(rank(x)) != self.rows[x].row:
            return False
        at = const_array(index)
        if at is None or self.rows[x] != _RowAxes(0, 1):
            return False
        if self.chosen is None:
            sizes = [required(self.mask.shape)[0], "picks"]
            self.chosen = self._input("padding.chosen", ir.DataType.INT64, sizes)
        self.picked += sorted({*at.ravel().tolist()} - {*self.picked})
        columns = np.array([self.picked.index(i) for i in at.flat], np.int64).reshape(at.shape)
        rows = self.op.Gather(self.chosen, self.op.constant(columns), axis=1)
        flat = self.op.Squeeze(x, [0])
        flat.type, y = x.type, node.outputs[0]
        result = self.op.Gather(flat, rows, axis=0)
        result.type, result.shape = y.type, y.shape
        self._place(node)
        y.replace_all_uses_with(result, replace_graph_outputs=True)
        if result.is_graph_output():
            y.name, result.name = self.names.fresh("padding"), y.name
        return True

    def _reshaped(self, node: ir.Node, x: ir.Value) -> None:
        """A Reshape that leaves rows apart, or joins or parts sequences and rows."""
        y, places, rests = node.outputs[0], set[_RowAxes](), set[tuple[int, ...]]()
        for sample in _SAMPLES:
            before, target = (
                self._sizes_at(x, sample),
                self._evaluated([required(node.inputs[1])], sample),
            )
            if before is None or target is None:
                break
            copies = not attribute(node, "allowzero", 0)
            sizes = [before[i] if n == 0 and copies else int(n) for i, n in enumerate(target[0])]
            if -1 in sizes:
                sizes[sizes.index(-1)] = prod(before) // max(1, -prod(sizes))
            place = self.rows[x]
            leading = place in (_RowAxes(0, 1), _RowAxes(None, 0))
            if tuple(sizes) == before:
                places.add(place)
                rests.add(
                    tuple(n for i, n in enumerate(sizes) if i not in (place.batch, place.row))
                )
            elif leading and tuple(sizes[:2]) == sample:
                places.add(_RowAxes(0, 1))
                rests.add(tuple(sizes[2:]))
            elif leading and sizes[0] == prod(sample):
                places.add(_RowAxes(None, 0))
                rests.add(tuple(sizes[1:]))
        if len(places) != 1 or len(rests) != 1 or 0 in next(iter(rests)):
            raise NotPacked(f"'{label(node)}' (Reshape) mixes rows, or its target is not known")
        (place,), (rest,) = places, rests
        whole = list(rest)
        if place.batch is not None:
            whole.insert(place.batch, 1)
        whole.insert(place.row, -1)
        shape = self.op.constant(whole)
        self._place(node)
        node.attributes.pop("allowzero", None)
        node.replace_input_with(1, shape)
        self._result(y, place)

    def _attention(self, node: ir.Node) -> None:
        kind, (q, k, v) = required(_kind(node)), node.inputs[:3]
        if any(x is None or self.rows.get(x) != _RowAxes(0, 2) for x in (q, k, v)):
            raise NotPacked(f"'{label(node)}' ({node.op_type}) has queries and keys of other rows")
        masks = tuple(node.inputs[3:])
        if masks not in self.proofs:
            self.proofs[masks] = key_mask(kind, masks, self.mask, self._evaluated)
        proof = self.proofs[masks]
        if proof.reason:
            raise NotPacked(f"'{label(node)}' ({node.op_type}): {proof.reason}")
        bias = proof.bias
        packed = replace(
            kind,
            steps=() if bias is None else ("Mask",),
            causal=kind.causal or proof.causal,
            guard=kind.guard or "Guard",
            packed=True,
        )
        if packed.name not in KINDS:
            raise NotPacked(f"'{label(node)}' ({node.op_type}): no kernel of ours has its mask")
        names = ("scale", "softcap", "q_rows", "kv_rows")
        attributes = {name: node.attributes[name] for name in names if name in node.attributes}
        inputs = [q, k, v, self.offsets, self.mask]
        if bias is not None:
            inputs.append(self._of_positions(bias))
        y = self.op.node(packed.name, inputs, domain=FUSE, attributes=attributes, name=node.name)
        old = node.outputs[0]
        y.type, y.shape, y.name = old.type, old.shape, self.names.fresh("padding")
        self._place(node)
        old.replace_all_uses_with(y, replace_graph_outputs=True)
        self._result(y, _RowAxes(0, 2))

    def _of_positions(self, bias: ir.Value) -> ir.Value:
        """A bias of scores as [1, heads, S, S]."""
        if bias not in self.biases:
            op, one = self.op, self.op.constant([1])
            length = op.Slice(op.Shape(self.mask), [1], [2], [0])
            whole = op.Expand(bias, op.Concat(one, one, length, length, axis=0))
            whole.type = bias.type
            self.biases[bias] = whole
        return self.biases[bias]


def _kind(node: ir.Node) -> Kind | None:
    return KINDS.get(node.op_type) if node.domain == FUSE else None
