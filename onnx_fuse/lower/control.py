"""If, Loop and Scan are unrolled where their conditions and trip counts are known at lowering."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import required
from onnx_fuse.lower.context import Slot
from onnx_fuse.lower.host_values import HostValues
from onnx_fuse.program.call import NeedsValues

MAX_UNROLL = 1024
"""The most passes of a Loop or Scan that are written out."""


class Control(HostValues):
    """Control flow, in terms of the walk over nodes that `lower.Lowerer` makes."""

    later: list[ir.Node]
    """The nodes of later stages."""
    stuck: set[ir.Node]
    """The nodes among `later` that only onnxruntime can run."""
    fallbacks: dict[str, str]

    @abstractmethod
    def _node(self, node: ir.Node) -> None:
        """Lower one node of a body."""

    @abstractmethod
    def _inner(self, graph: ir.Graph, outputs: Sequence[ir.Value]) -> None:
        """Lower a body; `outputs` are its results."""

    @abstractmethod
    def _deciding(self, node: ir.Node, operand: int | None = None) -> list[str]:
        """Inputs of the model that an unknown operand is computed from."""

    @abstractmethod
    def walk(self, nodes: Sequence[ir.Node], results: Sequence[ir.Value]) -> None:
        """Lower nodes that stand in no graph; `results` count as used, though no node has them."""

    def require_operand(self, node: ir.Node, i: int) -> None:
        """Raise NeedsValues where inputs of the model decide about operand `i`."""
        if names := self._deciding(node, i):
            raise NeedsValues(names)

    def _control(self, node: ir.Node) -> bool:
        """Unroll an If, Loop or Scan whose control flow is known; False for any other one."""
        mark, later, fallbacks = self._mark(), len(self.later), dict(self.fallbacks)
        unroll = {"If": self._branch, "Loop": self._loop, "Scan": self._scan}[node.op_type]
        if unroll(node) and len(self.later) == later:
            return True
        self._rewind(mark)
        del self.later[later:]
        self.fallbacks = fallbacks
        deciding = {"If": 1, "Loop": 2, "Scan": 0}[node.op_type]  # the number of leading operands
        names = [n for i in range(deciding) if self.has(node, i) for n in self._deciding(node, i)]
        if names:
            raise NeedsValues(list(dict.fromkeys(names)))
        return False

    def _branch(self, node: ir.Node) -> bool:
        condition = self.host(node, 0)
        if condition is None:
            return False
        branch = "then_branch" if condition.reshape(-1)[0] else "else_branch"
        self._inner(node.attributes[branch].as_graph(), node.outputs)
        return True

    def _loop(self, node: ir.Node) -> bool:
        """Write a Loop out for as long as its condition is known."""
        body = node.attributes["body"].as_graph()
        trips, condition = (self.host(node, i) for i in range(2))
        if (self.has(node, 0) and trips is None) or (self.has(node, 1) and condition is None):
            return False
        limit = MAX_UNROLL if trips is None else int(trips.reshape(-1)[0])
        carried = [self.slots[v] for v in node.inputs[2:] if v is not None]
        stacked: list[list[Slot]] = [[] for _ in body.outputs[1 + len(carried) :]]
        if limit > MAX_UNROLL:
            return False
        for i in range(limit):
            if condition is not None and not condition.reshape(-1)[0]:
                break
            start = [Slot(host=np.array(i, np.int64)), Slot(host=np.array(True)), *carried]
            self.slots.update(zip(body.inputs, start, strict=True))
            results = self._once(body)
            condition = results[0].host
            if condition is None:
                return False
            carried = results[1 : 1 + len(carried)]
            for pile, slot in zip(stacked, results[1 + len(carried) :], strict=True):
                pile.append(slot)
        else:
            if trips is None and limit:
                return False
        self.slots.update(zip(node.outputs, carried, strict=False))
        return self._stack(node, len(carried), stacked, [0] * len(stacked), [0] * len(stacked))

    def _scan(self, node: ir.Node) -> bool:
        """Write a Scan out, whose length is a static size."""
        body, count = node.attributes["body"].as_graph(), self.attr(node, "num_scan_inputs")
        states = len(node.inputs) - count
        ways = self.attr(node, "scan_input_directions") or [0] * count
        scanned = [self.view(node, states + i) for i in range(count)]
        axes = self.attr(node, "scan_input_axes") or [0] * count
        axes = [a % len(t.shape) for a, t in zip(axes, scanned, strict=True)]
        length = scanned[0].shape[axes[0]]
        if length > MAX_UNROLL:
            return False
        carried = [self.slots[v] for v in node.inputs[:states] if v is not None]
        piles: list[list[Slot]] = [[] for _ in body.outputs[states:]]
        for i in range(length):
            rows = []
            for tensor, axis, way in zip(scanned, axes, ways, strict=True):
                rows.append(Slot(tensor=tensor.at(axis, length - 1 - i if way else i)))
            self.slots.update(zip(body.inputs, [*carried, *rows], strict=True))
            results = self._once(body)
            carried = results[:states]
            for pile, slot in zip(piles, results[states:], strict=True):
                pile.append(slot)
        self.slots.update(zip(node.outputs, carried, strict=False))
        out_axes = self.attr(node, "scan_output_axes") or [0] * len(piles)
        out_ways = self.attr(node, "scan_output_directions") or [0] * len(piles)
        return self._stack(node, states, piles, out_axes, out_ways)

    def _once(self, body: ir.Graph) -> list[Slot]:
        """Lower one pass through a body whose inputs are set; return the slots of its outputs."""
        for value in body.initializers.values():
            self.slots[value] = Slot(host=required(value.const_value).numpy())
        for inner in body:
            self._node(inner)
        return [self.slots[v] for v in body.outputs]

    def _stack(
        self,
        node: ir.Node,
        first: int,
        piles: Sequence[Sequence[Slot]],
        axes: Sequence[int],
        ways: Sequence[int],
    ) -> bool:
        """Make the outputs from `first` on: the results of all passes along a new axis."""
        for i, (pile, axis, way) in enumerate(zip(piles, axes, ways, strict=True), first):
            if i >= len(node.outputs):
                break
            if not pile or any(slot.later for slot in pile):
                return False
            hosts = [slot.host for slot in (reversed(pile) if way else pile)]
            arrays = [a for a in hosts if a is not None]
            if len(arrays) == len(hosts):
                if any(a.shape != arrays[0].shape for a in arrays):
                    return False
                self._known(node.outputs[i], np.stack(arrays, axis))
                continue
            rows = [self._tensor(slot) for slot in (reversed(pile) if way else pile)]
            if any(row.shape != rows[0].shape for row in rows):
                return False
            shape = list(rows[0].shape)
            axis %= len(shape) + 1
            shape.insert(axis, len(rows))
            y = self.output(node, i, shape, rows[0].dtype)
            for k, row in enumerate(rows):
                if row.size:
                    self._copy(self.label(node), row, y.at(axis, k))
        return True
