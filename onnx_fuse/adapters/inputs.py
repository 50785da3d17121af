"""A graph whose adapters are inputs: which ones a run has is a matter of its feeds.

One input has the matrices of all adapters of a run, one below the other, [ranks, columns]: for each
weight W [K, N] that has an adapter, columns Aᵀ [ranks, K] and B [ranks, N]. A product x·W becomes
x·W + mask(x·A)·B, where the mask has zeros in the columns of every adapter that is not the row's.
These are two matrix multiplications, however many adapters there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.adapters.columns import AdaptedWeight, AdapterColumns, Ends, WeightColumns
from onnx_fuse.adapters.products import (
    LowRank,
    Products,
    adaptable,
    add_beside,
    matched,
    products_of,
    write_out,
)
from onnx_fuse.ir.build import Builder, add_input, insert_behind, rank, required, required_inputs
from onnx_fuse.ir.names import Names
from onnx_fuse.ir.traits import BROADCASTS, POINTWISE, RESHAPES, SIZES
from onnx_fuse.ops.rules import cast_to, typed
from onnx_fuse.rewrite.constants import lift_parameters

RANKS = "adapter_ranks"
"""The name of the dimension of all ranks of a run."""


class AdaptedModel:
    """A model, of which a graph with inputs for adapters is made for the weights that have any."""

    ranks = 0
    """The most ranks that a batch may have together, 0: as many as come."""

    def __init__(
        self,
        read: Callable[[], ir.Model],
        opened: Callable[[ir.Model], Any],
        dtype: np.dtype[Any] | None,
    ) -> None:
        """`read` gives the model as its file has it, `opened` a session of a graph.

        `dtype` is what the session computes in, where that is not the type of the weights.
        """
        self._read, self._opened, self.dtype = read, opened, dtype

    @cached_property
    def weights(self) -> dict[str, AdaptedWeight]:
        """The weights that can have an adapter."""
        return weights_of(self._read())

    def session(self, names: Collection[str]) -> tuple[Any, Ends, AdapterColumns]:
        """The session whose weights of these `names` have adapters, its inputs, their layout."""
        model = self._read()
        weights = [each for name, each in self.weights.items() if name in names]
        layout = AdapterColumns.of(weights, self.dtype)
        ends = add_inputs(model, layout)
        return self._opened(model), ends, layout


def weights_of(model: ir.Model) -> dict[str, AdaptedWeight]:
    """The weights that can have an adapter; what is fused with one is written out, in place."""
    found = {}
    lift_parameters(model)
    for name, adapter in adaptable(model).items():
        weight = model.graph.initializers[name]
        shape = tuple(map(int, required(weight.shape).numpy()))
        found[name] = AdaptedWeight(adapter, shape, required(weight.dtype).numpy())
    return found


def chosen(model: ir.Model, globs: Collection[str]) -> list[AdaptedWeight]:
    """Those of `weights_of` that globs name, by their names or their modules'.

    Raises UsageError for one that names none.
    """
    weights = weights_of(model)
    found = matched({each: (each, w.adapter.module) for each, w in weights.items()}, globs)
    return [each for name, each in weights.items() if name in found]


def add_inputs(model: ir.Model, layout: AdapterColumns) -> Ends:
    """Let a graph read its adapters, in place."""
    graph, op = model.graph, Builder()
    lift_parameters(model)
    weights = [graph.initializers[name] for name in layout.places]
    write_out(model, weights)
    names = Names.of(graph)
    products = {weight: products_of(weight) for weight in weights}
    rows_of = BatchRows.of(model, products)
    refusal, kind = rows_of.refusal, ir.DataType.from_numpy(layout.dtype)
    matrices = add_input(graph, names.fresh("adapters"), kind, [RANKS, layout.columns])
    mask, chosen = names.fresh("adapter_mask"), [rows_of.size, RANKS]
    choice = None if refusal else add_input(graph, mask, ir.DataType.BOOL, chosen)
    rows = typed(op.Transpose(matrices, perm=[1, 0]), matrices, [layout.columns, None])
    sizes = [count for place in layout.places.values() for count in (place.k, place.n)]
    pieces = iter(op.Split(rows, sizes, axis=0, outputs=len(sizes)))

    def beside(weight: ir.Value, place: WeightColumns) -> LowRank:
        a, b = (
            typed(next(pieces), rows, [place.k, None]),
            typed(next(pieces), rows, [place.n, None]),
        )
        b = typed(op.Transpose(b, perm=[1, 0]), b, [None, place.n])
        a, b = cast_to(op, a, weight), cast_to(op, b, weight)

        def low_rank(op: Builder, x: ir.Value, factor: float) -> ir.Value:
            scaled = a if factor == 1 else typed(op.Mul(a, factor), a, a.shape)
            shape = None if x.shape is None else [*list(x.shape)[:-1], None]
            low = typed(op.MatMul(x, scaled), a, shape)
            low = low if choice is None else masked(op, low, choice, rows_of.in_one[x])
            product: ir.Value = op.MatMul(low, b)
            return product

        return low_rank

    for weight, place in zip(weights, layout.places.values(), strict=True):
        add_beside(graph, weight, products[weight], beside(weight, place))
    insert_behind(graph, None, op.nodes)
    return Ends(str(matrices.name), mask, rows_of.input, refusal)


@dataclass(frozen=True)
class BatchRows:
    """Where the rows of a batch stand in what the weights of a graph multiply."""

    input: str
    """The input whose first axis is the batch, "" where none has an axis."""
    size: int | ir.SymbolicDim | None
    """The size of that axis."""
    in_one: Mapping[ir.Value, bool]
    """Whether the first axis of a value is (False) the batch, or (True) it and the sequence."""
    refusal: str
    """Why rows cannot have different adapters, "" where they can."""

    @classmethod
    def of(cls, model: ir.Model, products: Mapping[ir.Value, Products]) -> BatchRows:
        """Those of the products that read some weights."""
        batch = next((v for v in required_inputs(model) if rank(v)), None)
        size = None if batch is None else required(batch.shape)[0]
        refusal, in_one = "", dict[ir.Value, bool]()
        if isinstance(size, ir.SymbolicDim) and size.value is not None:
            in_one = _in_one_axis(model.graph, size)
            apart = (w.name for w, readers in products.items() for n, _ in readers
                     if required(n.inputs[0]) not in in_one)  # fmt: skip
            if name := next(apart, None):
                refusal = f"the rows that '{name}' multiplies are not in the order of the batch"
        else:
            refusal = (
                "the first input has no batch dimension with a name, so that its size is dynamic"
            )
        return cls("" if batch is None else str(batch.name), size, in_one, refusal)


def masked(op: Builder, low: ir.Value, mask: ir.Value, in_one: bool) -> ir.Value:
    """`low` [batch, ..., ranks] under the mask, or with batch and sequence `in_one` axis."""
    shape, zero = list(required(low.shape)), op.constant(0.0, low.dtype)
    if not in_one:
        if len(shape) > 2:
            mask = op.Unsqueeze(mask, list(range(1, len(shape) - 1)))
        return typed(op.Where(mask, low, zero), low, shape)
    ends = op.Shape(mask)
    split = op.Concat(op.Slice(ends, [0], [1]), [-1], op.Slice(ends, [1], [2]), axis=0)
    spread = typed(op.Reshape(low, split), low, [None, None, None])
    chosen = typed(op.Where(op.Unsqueeze(mask, [1]), spread, zero), low, spread.shape)
    return typed(op.Reshape(chosen, op.Shape(low)), low, shape)


_OF_ROWS = frozenset(
    (
        *("Gemm", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Attention"),
        *("GroupQueryAttention", "MultiHeadAttention"),
    )
)
"""Operators that keep the sequences of their first input apart, and in their order."""


def _in_one_axis(graph: ir.Graph, size: ir.SymbolicDim) -> dict[ir.Value, bool]:
    """The values whose first axis is the batch, or (True) the batch and the sequence in one.

    Inference gives sizes new names behind some operators, whose rows are followed here. What is
    computed from rows in another order is left out.
    """
    found: dict[ir.Value, bool] = {}
    moved = set[ir.Value]()

    def moves(node: ir.Node) -> bool:
        if not node.inputs or node.op_type in SIZES:
            return False
        if not moved.isdisjoint(v for v in node.inputs if v is not None):
            return True
        x, y = node.inputs[0], node.outputs[0]
        if x is None or found.get(x) is not False or not rank(y) or required(y.shape)[0] != size:
            return False
        if node.op_type == "Transpose":
            return node.attributes.get_ints("perm", [-1])[0] != 0
        axis = {"Gather": "axis", "ReverseSequence": "time_axis"}.get(node.op_type)
        return axis is not None and node.attributes.get_int(axis, 0) == 0

    def of(node: ir.Node, y: ir.Value) -> bool | None:
        if y.shape is not None and len(y.shape) and y.shape[0] == size:
            return False
        kind, x = node.op_type, node.inputs[0] if node.inputs else None
        if kind in _OF_ROWS or (kind == "MatMul" and rank(node.inputs[1]) == 2):
            return found.get(x) if x is not None else None
        if kind in POINTWISE | BROADCASTS:
            known = [found[v] for v in node.inputs if v in found and rank(v) == rank(y)]
            return known[0] if known else None
        if kind not in RESHAPES or x is None or found.get(x) is not False or rank(y) != 2:
            return None
        whole = x.shape is not None and y.shape is not None and x.shape[-1] == y.shape[-1]
        return True if whole and rank(x) != 2 else None

    for value in graph.inputs:
        if value.shape is not None and len(value.shape) and value.shape[0] == size:
            found[value] = False
    for node in graph:
        if moves(node):
            moved.update(node.outputs)
            continue
        for y in node.outputs:
            if (in_one := of(node, y)) is not None:
                found[y] = in_one
    return found
