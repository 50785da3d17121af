"""What a step adds where several adapters train together: each as it would alone, on its rows.

The loss is a mean over the batch, in which an adapter's rows are a part. So its gradient is scaled
by what the whole batch counts, over what its own rows count. One that no row names keeps its
matrices and the optimizer's states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import Builder, required
from onnx_fuse.ops.rules import typed
from onnx_fuse.training.adapters import AdapterSet
from onnx_fuse.training.losses import Term
from onnx_fuse.training.ranks import Measure
from onnx_fuse.training.weights import model_names


class OwnRows:
    """What the rows of each adapter count in a step, as nodes that `op` emits."""

    def __init__(
        self,
        op: Builder,
        graph: ir.Graph,
        adapters: AdapterSet,
        terms: Sequence[Term],
        measures: Sequence[Measure],
    ) -> None:
        """Raises UsageError for losses of which an adapter's rows are no part by themselves."""
        if len(set(measures)) > 1 or any(term.loss == "contrastive" for term in terms):
            raise UsageError(
                "several adapters need a loss in which each row counts by itself: not contrastive, "
                "and not the sum of losses that are means of different labels"
            )
        self._adapters, self._picked = adapters, dict[tuple[ir.Value, int], ir.Value]()
        inputs = {str(v.name): v for v in graph.inputs}
        numbers = inputs[adapters.rows]
        every = op.constant(np.arange(len(adapters.names)))
        mine = op.Cast(op.Equal(op.Unsqueeze(numbers, [1]), every), to=ir.DataType.FLOAT.value)
        of_row = _of_rows(op, measures[0], inputs, numbers)
        counts = op.ReduceSum(op.Mul(mine, of_row), [0], keepdims=0)
        self.counts = self._vector(counts, ir.DataType.FLOAT)
        """float32 [adapters]: the labels that count among each one's rows; since the last update,
        where gradients are accumulated."""
        total = op.ReduceSum(of_row, keepdims=0)
        share = op.constant(np.float32(1)) if measures[0].sums else op.Div(total, counts)
        nothing = op.constant(np.float32(0))
        factors = op.Where(op.Greater(counts, nothing), share, nothing)
        self._factors = self._vector(factors, ir.DataType.FLOAT)
        self._now: ir.Value | None = None
        self._numbers: ir.Value | None = None
        self.updates: ir.Value | None = None
        """The state that counts the updates of each adapter, int64 [adapters]."""

    def _vector(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        value.dtype, value.shape = dtype, ir.Shape([len(self._adapters.names)])
        return value

    def owner(self, w: ir.Value) -> int:
        """The place of the adapter that has a parameter."""
        return self._adapters.owner(model_names(w)[0])

    def name(self, w: ir.Value) -> str:
        """The name of the adapter that has a parameter."""
        return self._adapters.names[self.owner(w)]

    def _of(self, op: Builder, values: ir.Value, w: ir.Value) -> ir.Value:
        """The entry of a parameter's adapter, a scalar."""
        key = values, self.owner(w)
        if key not in self._picked:
            one = op.Gather(values, op.constant(np.array(key[1])), axis=0)
            self._picked[key] = typed(one, values, ir.Shape([]))
        return self._picked[key]

    def scaled(self, op: Builder, w: ir.Value, gradient: ir.Value) -> ir.Value:
        """The gradient of a parameter as of the loss of its adapter's rows alone."""
        factor = op.CastLike(self._of(op, self._factors, w), gradient)
        return typed(op.Mul(gradient, factor), gradient, gradient.shape)

    def trains(self, op: Builder, w: ir.Value) -> ir.Value:
        """Whether a row since the last update names the parameter's adapter."""
        return self._of(op, self._trains(op), w)

    def _trains(self, op: Builder) -> ir.Value:
        if self._now is None:
            self._now = op.Greater(self.counts, op.constant(np.float32(0)))
            self._vector(self._now, ir.DataType.BOOL)
        return self._now

    def number(self, op: Builder, w: ir.Value) -> ir.Value:
        """The number of the update of the parameter's adapter, which is 1 at its first one."""
        if self._numbers is None:
            updates = required(self.updates)
            numbers = op.Add(updates, op.constant(np.array(1)))
            self._numbers = self._vector(numbers, ir.DataType.INT64)
        return self._of(op, self._numbers, w)

    def next_updates(self, op: Builder, finite: ir.Value | None) -> ir.Value:
        """The updates of each adapter after this one, which does not count unless `finite`."""
        trains = self._trains(op)
        counted = trains if finite is None else op.And(trains, finite)
        return op.Add(required(self.updates), op.Cast(counted, to=ir.DataType.INT64.value))


def _of_rows(
    op: Builder, measure: Measure, inputs: dict[str, ir.Value], rows: ir.Value
) -> ir.Value:
    """What each row of the batch counts, float32 [batch, 1]."""
    if measure.sums or measure.ignored is None:
        ones = op.GreaterOrEqual(op.Unsqueeze(rows, [1]), op.constant(np.array(-1)))
        return op.Cast(ones, to=ir.DataType.FLOAT.value)
    labels = inputs[measure.labels]
    there = op.Not(op.Equal(labels, op.constant(np.array(measure.ignored))))
    counts = op.Cast(there, to=ir.DataType.FLOAT.value)
    if measure.weight:
        weights = op.constant(np.array(measure.weight, np.float32))
        place = op.Where(there, labels, op.constant(np.array(0)))
        counts = op.Mul(counts, op.Gather(weights, place, axis=0))
    flat = op.Reshape(counts, op.Concat(op.Shape(rows), [-1], axis=0))
    return op.ReduceSum(flat, [1], keepdims=1)
