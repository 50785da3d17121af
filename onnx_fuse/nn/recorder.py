"""What a capture makes of the operators it is told of: one ONNX graph.

Every operation emits its nodes once more, on the graph's values. A `backward` becomes a node of
its own (`Backward`), which `assemble` replaces: the graph before it is fused, and differentiated as
a whole.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse import autodiff, rewrite
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import add_input, detach, reads
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE
from onnx_fuse.ir.copying import Copier
from onnx_fuse.nn.operation import Operation
from onnx_fuse.nn.runner import Array
from onnx_fuse.nn.tensor import Tensor
from onnx_fuse.ops.shape_ops import Writer
from onnx_fuse.rewrite.canonicalize import clean

_DOMAIN = "onnx_fuse.nn"


class CaptureWarning(UserWarning):
    """What a captured function did in Python that a replay will not do again."""


class Recorder:
    """The graph of a capture as it grows. `sizes` says whether Python has read an open size."""

    def __init__(self, grad: bool = True) -> None:
        imports = {"": CANONICAL_OPSET}
        self.model = ir.Model(
            ir.Graph([], [], nodes=[], opset_imports=imports, name="nn"), ir_version=10
        )
        self.op = autodiff.Emitter(self.model)
        self.sizes = False
        self.grad = grad
        """Whether operators are remembered for gradients, but where a block stops that."""
        self.inputs: list[tuple[Tensor, ir.Value]] = []
        """Tensors that the graph reads and was not given as arguments, such as parameters."""
        self.renewals: dict[ir.Value, Callable[[], Array]] = {}
        """Inputs that get a new value at each replay."""
        self.states: dict[int, tuple[Tensor, ir.Value]] = {}
        """Tensors that were assigned to, with their new values, by identity."""
        self.leaves: dict[int, Tensor] = {}
        """Tensors that got a gradient, by identity."""
        self.cleared: set[int] = set()
        """Identities of the parameters whose gradients were forgotten before they got one."""
        self.modules: list[tuple[Any, bool]] = []
        """The modules that were called, with their modes."""
        self.checks: list[tuple[Tensor, Callable[[Array], None]]] = []
        """Tensors with what their elements must be, which a replay asks again of its arguments."""
        self.equal_sizes = False
        """Whether sizes of arguments that are equal have to be equal in a replay."""
        self.differentiates = False
        self._values: dict[int, tuple[weakref.ref[Tensor], ir.Value]] = {}
        self._before: set[ir.Value] = set()  # of leaves, before they were assigned to
        self._alive: list[Any] = []  # kept alive, so that no id() is used twice

    # ---- what `nn` tells it ----

    def record(self, operation: Operation, inputs: Sequence[Any], tensors: object) -> None:
        """Add the nodes of an operation that has just run."""
        imports = self.model.graph.opset_imports
        if operation.opset > imports[""] or any(d not in imports for d in operation.domains):
            imports.update({**operation.domains, "": max(operation.opset, imports[""])})
            self.op.opset = imports[""]
            self.op._imports = [onnx.helper.make_opsetid(d, v) for d, v in imports.items()]
        values = [
            None if x is None
            else self.op.constant(x) if isinstance(x, np.ndarray)
            else self.value(x)
            for x in inputs
        ]  # fmt: skip
        self.op.stem = operation.name
        emitted = operation.build(self.op, *values)
        results = tensors if isinstance(tensors, tuple) else (tensors,)
        for tensor, value in zip(results, emitted if isinstance(emitted, tuple) else (emitted,),
                                 strict=True):  # fmt: skip
            if value.shape is None or value.dtype is None:  # where inference says nothing
                value.dtype = ir.DataType.from_numpy(tensor._data.dtype)
                value.shape = value.shape or ir.Shape([None] * tensor.ndim)
            stops = not tensor.requires_grad and any(
                x is not None and type(x) is not np.ndarray and x.requires_grad for x in inputs
            )
            self._bind(tensor, self._stopped(value) if stops else value)

    def backward(
        self, loss: Tensor, gradient: Tensor | None, new: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Add a Backward node: the gradients `new` of leaves by a result."""
        self.differentiates = True
        self.equal_sizes = self.equal_sizes or gradient is not None
        for leaf, _ in new:
            if leaf.grad is not None and not self.knows(leaf.grad):
                raise UsageError(
                    "a captured function cannot add to gradients that were there before: call "
                    "zero_grad() in it, or before it"
                )
            self.leaves[id(leaf)] = leaf
        values = [self.value(leaf) for leaf, _ in new]
        self._check_flow(self.value(loss), values)
        dy = None if gradient is None else self.value(gradient)
        node = ir.Node(
            _DOMAIN, "Backward", [self.value(loss), dy, *values], num_outputs=len(values),
            name=self.op.fresh("backward"),
        )  # fmt: skip
        for value, result, (_, grad) in zip(values, node.outputs, new, strict=True):
            result.name = self.op.fresh(f"{value.name}.grad")
            result.type, result.shape = value.type, value.shape
            self._bind(grad, result)
        self.op.nodes.append(node)

    def _check_flow(self, loss: ir.Value, leaves: Sequence[ir.Value]) -> None:
        """Raise UsageError unless the graph's gradients flow where those of the tape do."""
        reached, todo = {loss}, [loss]
        while todo:
            value = todo.pop()
            node = None if value in leaves else value.producer()
            if node is None or (node.op_type == "StopGradient" and node.domain == FUSE):
                continue
            new = [v for v in reads(node) if v is not None and v not in reached]
            reached.update(new)
            todo += new
        if not reached.issuperset(leaves) or not reached.isdisjoint(self._before):
            raise UsageError(
                "the gradient of a captured function flows to what was computed before it, or to "
                "the former elements of a Tensor that was assigned to: capture the whole "
                "computation, and assign after backward()"
            )

    def assigned(self, tensor: Tensor, source: Tensor) -> None:
        """Note that a tensor has the elements of another from now on."""
        value = self.value(source)
        if tensor.requires_grad and self.knows(tensor):
            self._before.add(self.value(tensor))
        self.states[id(tensor)] = tensor, value
        self._bind(tensor, value)
        self._alive.append(tensor)

    def same(self, tensor: Tensor, other: Tensor) -> None:
        """Note that `other` has the elements of `tensor`, as a constant for gradients."""
        value = self.value(tensor)
        self._bind(other, self._stopped(value) if tensor.requires_grad else value)

    def _stopped(self, value: ir.Value) -> ir.Value:
        """The value, which no gradient flows through."""
        if not self.grad or value.dtype is None or not value.dtype.is_floating_point():
            return value
        stopped: ir.Value = self.op.node(
            "StopGradient", [value], domain=FUSE, outputs=[self.op.fresh(f"{value.name}.constant")]
        )
        stopped.type, stopped.shape = value.type, value.shape
        return stopped

    def renewed(self, tensor: Tensor, refresh: Callable[[], Array]) -> None:
        """Note that a tensor has another value at each replay, which `refresh` makes."""
        self.renewals[self.value(tensor)] = refresh

    def checked(self, tensor: Tensor, check: Callable[[Array], None]) -> None:
        """Note that `check` raises for elements of a tensor that the function refuses."""
        self.checks.append((tensor, check))

    def cleared_gradient(self, leaf: object) -> None:
        """Note that the gradient of a leaf was forgotten."""
        if id(leaf) not in self.leaves:
            self.cleared.add(id(leaf))
            self._alive.append(leaf)

    def entered(self, module: Any) -> None:
        """Note that a module was called, in its present mode."""
        self.modules.append((module, module.training))

    def sizes_read(self, tensor: Tensor) -> None:
        """Note that Python asked for the shape of a tensor."""
        if self.knows(tensor):
            shape = self.value(tensor).shape
            self.sizes |= shape is None or any(not isinstance(d, int) for d in shape)

    def values_read(self, tensor: Tensor) -> None:
        """Warn that Python asked for the elements of a tensor."""
        if self.knows(tensor):
            warnings.warn(
                "a captured function reads the elements of a Tensor in Python: what it does with "
                "them now, every replay does, whatever they are then",
                CaptureWarning,
                stacklevel=4,
            )

    # ---- values ----

    def argument(self, tensor: Tensor, name: str) -> ir.Value:
        """A graph input for an argument, whose sizes are open."""
        name = self.op.fresh(name)
        sizes = [f"{name}_{i}" for i in range(tensor.ndim)]
        return self._input(tensor, name, sizes)

    def _input(self, tensor: Tensor, name: str, shape: Sequence[Any]) -> ir.Value:
        kind = ir.DataType.from_numpy(tensor._data.dtype)
        value = add_input(self.model.graph, name, kind, shape)
        self._bind(tensor, value)
        self._alive.append(tensor)
        return value

    def _bind(self, tensor: Tensor, value: ir.Value) -> None:
        self._values[id(tensor)] = weakref.ref(tensor), value

    def knows(self, tensor: Tensor) -> bool:
        """Whether the graph has a value for the tensor."""
        entry = self._values.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def value(self, tensor: Tensor) -> ir.Value:
        """The graph's value of a tensor; an input if it came from outside."""
        if self.knows(tensor):
            return self._values[id(tensor)][1]
        value = self._input(tensor, self.op.fresh(f"t{len(self.inputs)}"), tensor._data.shape)
        self.inputs.append((tensor, value))
        return value

    def living(self) -> list[tuple[Tensor, ir.Value]]:
        """The tensors that nodes of the graph have made and that somebody still holds."""
        pairs = [(ref(), value) for ref, value in self._values.values()]
        return [(t, v) for t, v in pairs if t is not None and v.producer() is not None]

    def finished(self, outputs: Sequence[ir.Value], gpu: bool) -> ir.Model:
        """The graph with these outputs, its Backward nodes written out."""
        graph = self.model.graph
        graph.extend(self.op.nodes)
        self.op.nodes = []
        graph.outputs.extend(outputs)
        if self.differentiates:
            assemble(self.model, gpu)
            for node in [n for n in graph if n.op_type == "StopGradient" and n.domain == FUSE]:
                old, new = node.outputs[0], node.inputs[0]
                assert new is not None
                ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
                graph.remove(node, safe=True)
        op = autodiff.Emitter(self.model)
        for i, value in enumerate(graph.outputs):
            if value.producer() is None or value in graph.outputs[:i]:
                new = op.node("Identity", [value], outputs=[op.fresh(f"{value.name}.out")])
                new.type, new.shape = value.type, value.shape
                graph.outputs[i] = new
        graph.extend(op.nodes)
        if not self.differentiates:
            infer_shapes(self.model)
        clean(self.model)
        return self.model


def assemble(model: ir.Model, gpu: bool) -> None:
    """Fuse what stands before each Backward node, and replace the node by the gradient's nodes."""
    graph = model.graph
    while (marker := next((n for n in graph if n.domain == _DOMAIN), None)) is not None:
        nodes = list(graph)
        place = nodes.index(marker)
        after, ahead = nodes[place + 1 :], {v for n in nodes[:place] for v in n.outputs}
        loss, dy, *leaves = marker.inputs
        assert loss is not None
        final = list(graph.outputs)
        read = (v for n in after for v in reads(n))
        needed = dict.fromkeys(v for v in (loss, dy, *read, *final) if v in ahead and v is not None)
        standins = {v: ir.Value(name=v.name, type=v.type, shape=v.shape) for v in needed}
        graph.outputs.clear()
        for node in (marker, *after):
            graph.remove(node)
            for i, value in enumerate(node.inputs):
                if value in standins:
                    node.replace_input_with(i, standins[value])
        graph.outputs.extend(needed)
        infer_shapes(model)
        rewrite.optimize(model, training=True, level=2, own_kernels=gpu)
        now = dict(zip(needed, graph.outputs, strict=True))
        seed = None if dy is None else now.get(dy, dy)
        wanted = [v for v in leaves if v is not None]
        grads = autodiff.backward(model, {now[loss]: seed}, wanted, fused=gpu)
        now = dict(zip(needed, graph.outputs, strict=True))
        pairs = [(standins[old], new) for old, new in now.items()]
        pairs += [(g, grads[str(x.name)]) for g, x in zip(marker.outputs, wanted, strict=True)]
        results = dict(pairs)
        graph.outputs.clear()
        detach([marker])
        for old, new in pairs:
            ir.convenience.replace_all_uses_with(old, new)
        graph.extend(after)
        graph.outputs.extend(results.get(standins.get(v, v), v) for v in final)


def copied(model: ir.Model) -> Callable[..., Any]:
    """A function that emits the nodes of a graph on other inputs: the build of an operation."""
    formals, outputs = list(model.graph.inputs), list(model.graph.outputs)

    def build(op: Writer, *inputs: ir.Value) -> Any:
        values: dict[Any, Any] = dict(zip(formals, inputs, strict=True))
        for name, value in model.graph.initializers.items():
            values[value] = op.node("Constant", [], value=value.const_value, outputs=[
                op.fresh(name)])  # fmt: skip
            values[value].const_value = value.const_value
            values[value].type, values[value].shape = value.type, value.shape
        copier = Copier(values=values, fresh=op.fresh, names_nodes=True, typed=True, closed=True)
        for node in model.graph:
            [copy] = copier.copy(node)
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                if node.op_type == "Constant":
                    new.const_value = old.const_value
                else:  # the inputs may have other types and shapes
                    new.type, new.shape = old.type if node.domain else None, None
            op.adopt(copy)
            op.nodes.append(copy)
        results = tuple(values[v] for v in outputs)
        return results[0] if len(results) == 1 else results

    return build
