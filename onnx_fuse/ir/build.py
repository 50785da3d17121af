"""Build nodes and small models, and ask a graph what it holds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.constants import CANONICAL_OPSET, DEFAULT, FUSE
from onnx_fuse.ir.names import Names

T = TypeVar("T")


class Builder:
    """`op.Mul(a, b)` makes a Mul node and returns its output; the nodes collect in `op.nodes`.

    An input may be a Value, None (absent), or a number, list or array, which becomes a Constant of
    the first Value input's dtype (floats) or int64 (integers). `outputs=n` returns a tuple of n.
    `domain=` and `name=` are the node's; all other keywords are attributes.
    """

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def build(*inputs: object, **keywords: Any) -> Any:
            return self.node(op_type, inputs, **keywords)

        return build

    def node(
        self,
        op_type: str,
        inputs: Sequence[Any],
        *,
        outputs: int | Sequence[str] = 1,
        domain: str = "",
        name: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """The node in full: `attributes` and further keywords together are its attributes."""
        like = next((v.dtype for v in inputs if isinstance(v, ir.Value) and v.dtype), None)
        values = [
            v if v is None or isinstance(v, ir.Value) else self.constant(v, like) for v in inputs
        ]
        while values and values[-1] is None:
            values.pop()
        count = outputs if isinstance(outputs, int) else len(outputs)
        present = {k: v for k, v in {**(attributes or {}), **more}.items() if v is not None}
        for key, value in present.items():
            if isinstance(value, list) and not value:  # onnx-ir warns of it on the terminal
                present[key] = ir.AttrInt64s(key, value)
        node = ir.node(op_type, values, present, domain=domain, num_outputs=count, name=name)
        if not isinstance(outputs, int):
            for value, label in zip(node.outputs, outputs, strict=True):
                value.name = label
        self.nodes.append(node)
        return node.outputs[0] if count == 1 else tuple(node.outputs)

    def constant(self, value: object, dtype: ir.DataType | None = None) -> ir.Value:
        """A Constant node; Python floats take `dtype`, integers and lists of integers int64.

        A list without entries counts as one of integers: axes, sizes.
        """
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            # objects are sizes, of which a constant holds the integers
            tensor = ir.Tensor(array.astype(np.int64) if array.dtype == object else array)
        else:
            array = np.asarray(value)
            floating = array.dtype.kind == "f" and bool(array.size)
            kind = (dtype or ir.DataType.FLOAT) if floating else ir.DataType.INT64
            tensor = ir.Tensor(array.astype(kind.numpy()), kind)
        output: ir.Value = self.node("Constant", (), value=tensor)
        output.dtype, output.const_value = tensor.dtype, tensor
        output.shape = ir.Shape(tensor.numpy().shape)
        return output


def text_model(text: str) -> ir.Model:
    """A model from ONNX text: `agraph (float[N] x) => (float[N] y) { y = Relu(x) }`."""
    if not text.lstrip().startswith("<"):
        text = f'<ir_version: 10, opset_import: ["" : {CANONICAL_OPSET}, "{FUSE}" : 1]>\n{text}'
    return ir.from_onnx_text(text)


def const_array(value: ir.Value | None) -> np.ndarray | None:
    """The constant a value holds (initializer or Constant node), else None."""
    node = value.producer() if value is not None and value.const_value is None else None
    held = node.attributes.get("value") if node is not None and node.op_type == "Constant" else None
    if held is not None and not held.is_ref():
        return held.as_tensor().numpy()  # `get_const_tensor` would give the tensor a name
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def rank(value: ir.Value | None) -> int | None:
    """The number of axes where it is known, or None."""
    return None if value is None or value.shape is None else len(value.shape)


def extent(value: ir.Value | None, axis: int) -> int | str | None:
    """The size of an axis, or its name where only that is known, or None."""
    shape = value.shape if value is not None and value.shape is not None else ()
    size = shape[axis] if -len(shape) <= axis < len(shape) else None
    return size.value if isinstance(size, ir.SymbolicDim) else size


def dim(value: ir.Value | None, axis: int) -> int | None:
    """The size of an axis where it is statically known, or None."""
    size = extent(value, axis)
    return size if isinstance(size, int) else None


def extents(shape: Iterable[int | ir.SymbolicDim] | None) -> list[int | str | None]:
    """Each size, or its name where only that is known; of no shape, none."""
    return [d if isinstance(d, int) else d.value for d in shape or ()]


def given(node: ir.Node, index: int) -> ir.Value | None:
    """Input `index`, None where it is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def required(part: T | None) -> T:
    """What the graph has for certain, though its type admits None."""
    assert part is not None
    return part


class Concatenated(ir.LazyTensor):
    """Arrays as one along an axis: they stay apart until all numbers are asked for at once."""

    _lock = threading.Lock()

    def __init__(self, arrays: Sequence[np.ndarray], axis: int) -> None:
        self.apart, self.axis = arrays, axis
        """The arrays; none once they are one."""
        shape = [*arrays[0].shape]
        shape[axis] = sum(array.shape[axis] for array in arrays)

        def whole() -> ir.TensorProtocol:
            with self._lock:
                if self._tensor is None:
                    self._tensor = ir.tensor(np.concatenate(self.apart, axis))
                    self.apart = ()
                return self._tensor

        kind = ir.DataType.from_numpy(arrays[0].dtype)
        super().__init__(whole, kind, ir.Shape(shape), cache=True)


def add_initializer(
    graph: ir.Graph, name: str, content: np.ndarray | np.generic | ir.TensorProtocol
) -> ir.Value:
    """A new initializer of `graph` with these numbers; no other value may have its name."""
    numbers = isinstance(content, np.ndarray | np.generic)
    tensor: Any = ir.tensor(np.asarray(content), name=name) if numbers else content
    tensor.name = name
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, const_value=tensor, shape=shape, type=kind)
    graph.register_initializer(value)
    return value


def add_input(graph: ir.Graph, name: str, kind: Any, shape: Iterable[Any] | None) -> ir.Value:
    """A new input of `graph`, of an element type or a type; no other value may have its name."""
    kind = ir.TensorType(kind) if isinstance(kind, ir.DataType) else kind
    sizes = None if shape is None else ir.Shape(shape)
    value = ir.Value(name=name, type=kind, shape=sizes)
    graph.inputs.append(value)
    return value


def rename_shadowing_values(graph: ir.Graph) -> None:
    """Rename values in bodies of If, Loop and Scan that are called as a value outside.

    Each graph numbers its new values by itself, and ONNX does not let a body hide an outer name.
    """
    if next(iter(graph.subgraphs()), None) is None:
        return
    names = Names.of(graph)

    def visit(each: ir.Graph, outside: set[str | None]) -> None:
        results = [v for node in each for v in node.outputs]
        values = (*each.inputs, *each.initializers.values(), *results)
        for value in values:
            if value.name and value.name in outside:
                value.name = names.fresh(value.name)
        outside = outside.union(v.name for v in values)
        for attribute in (a for node in each for a in node.attributes.values()):
            for body in subgraphs(attribute):
                visit(body, outside)

    visit(graph, set())


def subgraphs(attribute: ir.Attr) -> Sequence[ir.Graph]:
    """The graphs an attribute holds (If, Loop, Scan)."""
    if attribute.is_ref():
        return ()
    if attribute.type == ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return tuple(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else ()


def all_nodes(graph: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """The nodes of a graph and of its subgraphs, each before those inside it."""
    for node in graph:
        yield node
        for attribute in node.attributes.values() if node.attributes else ():
            if attribute.type in _HOLD_GRAPHS:
                for inner in subgraphs(attribute):
                    yield from all_nodes(inner)


_HOLD_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def required_inputs(model: ir.Model) -> list[ir.Value]:
    """The inputs that a caller must give: those without a default."""
    return [v for v in model.graph.inputs if DEFAULT not in v.meta and not v.is_initializer()]


def defaults(model: ir.Model) -> dict[str, np.ndarray]:
    """The values of inputs that a caller may leave out, by name."""
    tensors = {v.name or "": v.meta.get(DEFAULT) for v in model.graph.inputs}
    return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}


def bind_defaults(model: ir.Model, feeds: Mapping[str, np.ndarray] | None = None) -> None:
    """Make inputs that have a default initializers, of what is fed for them where anything is."""
    graph = model.graph
    for value in [v for v in graph.inputs if DEFAULT in v.meta]:
        default, fed = value.meta.pop(DEFAULT), (feeds or {}).get(value.name or "")
        value.const_value = default if fed is None else ir.tensor(fed, name=value.name)
        graph.inputs.remove(value)
        graph.register_initializer(value)


def feeds_of(model: ir.Model, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays that the model's inputs name."""
    names = [v.name for v in model.graph.inputs if v.name is not None]
    return {name: arrays[name] for name in names if name in arrays}


def captured(node: ir.Node) -> list[ir.Value]:
    """The values of outer graphs that a node's subgraphs read or return."""
    graphs = [g for attribute in node.attributes.values() for g in subgraphs(attribute)]
    return outer_values(graphs) if graphs else []


def outer_values(graphs: list[ir.Graph]) -> list[ir.Value]:
    """The values that these graphs, and those within them, read or return and do not make."""
    inside: set[ir.Value] = set()
    read: dict[ir.Value, None] = {}
    graphs = list(graphs)
    while graphs:
        graph = graphs.pop()
        inside.update(graph.inputs, graph.initializers.values())
        read.update(dict.fromkeys(graph.outputs))
        for inner in graph:
            inside.update(inner.outputs)
            read.update((v, None) for v in inner.inputs if v is not None)
            graphs += [g for attr in inner.attributes.values() for g in subgraphs(attr)]
    return [v for v in read if v not in inside]


def reads(node: ir.Node) -> list[ir.Value | None]:
    """All that a node reads of its graph, also from within its subgraphs."""
    return [*node.inputs, *captured(node)]


def sources(
    values: Iterable[ir.Value | None],
    through: Callable[[ir.Node], Iterable[ir.Value | None]] = reads,
) -> dict[ir.Value, None]:
    """All values that some are computed from, these among them, as a set in the order of a search.

    `through` says which of the values that a node reads count.
    """
    reached = dict.fromkeys(v for v in values if v is not None)
    todo = list(reached)
    while todo:
        node = todo.pop().producer()
        for value in through(node) if node is not None else ():
            if value is not None and value not in reached:
                reached[value] = None
                todo.append(value)
    return reached


def needed_nodes(nodes: Sequence[ir.Node], results: Iterable[ir.Value | None]) -> list[ir.Node]:
    """The nodes in order that results depend on; the others are cut off from what they read."""
    wanted, needed = set(results), []
    for node in reversed(nodes):
        if any(v in wanted for v in node.outputs):
            wanted.update(reads(node))
            needed.append(node)
        else:
            detach([node])
    return needed[::-1]


def insert_behind(graph: ir.Graph, node: ir.Node | None, nodes: Sequence[ir.Node]) -> None:
    """Insert nodes right behind one of the graph's, or before all of these where that is None."""
    if node is not None:
        graph.insert_after(node, nodes)
    elif len(graph):
        graph.insert_before(graph[0], nodes)
    else:
        graph.extend(nodes)


def detach(nodes: Iterable[ir.Node]) -> None:
    """Take nodes that are in no graph, with their subgraphs, out of the uses of all they read."""
    for node in all_nodes(nodes):
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)


def remove_unused_nodes(model: ir.Model) -> None:
    """Take out the nodes and initializers that no output needs."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass  # takes 30 ms

    holders = [n for n in all_nodes(model.graph) if any(map(subgraphs, n.attributes.values()))]
    while True:
        with _outputs_kept(model):
            RemoveUnusedNodesPass()(model)
        removed = [n for n in holders if n.graph is None]
        if not removed:
            break
        detach(removed)  # what their bodies read may be unused now
        holders = [n for n in holders if n.graph is not None]


@contextlib.contextmanager
def _outputs_kept(model: ir.Model) -> Iterator[None]:
    """Within the block a pass may drop unused outputs, but for those that decide what a node does.

    RemoveUnusedNodesPass takes training_mode away from BatchNormalizations whose running
    statistics nobody reads, and with it their result. onnxruntime runs an Attention that has a past
    only where the node has outputs for the present (1.32). The pass also takes trailing inputs away
    that are absent, of which a Loop without states has to name both.
    """
    held: dict[ir.Node, tuple[list[str | None], ir.Attr | None]] = {}
    for node in all_nodes(model.graph):
        if node.op_type == "BatchNormalization" and "training_mode" in node.attributes:
            held[node] = [o.name for o in node.outputs], node.attributes["training_mode"]
        elif node.op_type == "Attention" and not node.domain and any(node.inputs[4:6]):
            held[node] = [o.name for o in node.outputs[:3]], None
    yield
    for node in all_nodes(model.graph):
        if node.op_type == "Loop" and not node.domain and len(node.inputs) < 2:
            node.resize_inputs(2)
    for node, (names, mode) in held.items():
        if node.graph is None:
            continue
        if mode is not None:
            node.attributes["training_mode"] = mode
        elif len(node.outputs) < len(names):
            node.resize_outputs(len(names))
        for value, name in zip(node.outputs, names, strict=False):
            value.name = name
