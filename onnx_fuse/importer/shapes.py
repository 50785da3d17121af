"""Types and shapes: infer them, refuse what is too large to address, fix the inputs'."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.importer import contrib
from onnx_fuse.importer.inference import inferred
from onnx_fuse.importer.save import functions_attached, serialized
from onnx_fuse.importer.types import READ_BY_INFERENCE, complete_types
from onnx_fuse.ir.actual_sizes import POOLS, bodies_of, dims_of, infer_actual
from onnx_fuse.ir.build import all_nodes, extents, required, subgraphs
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.bodies import carries_body

_LONGEST_SHAPE = 1 << 20
MAKES_SEQUENCES = {
    *("SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceMap"),
    *("SplitToSequence", "Optional", "OptionalGetElement"),
}


def infer_shapes(model: ir.Model, *, again: bool = False) -> None:
    """Fill in dtypes and shapes, fused ops through their bodies; what was known stays.

    `again`: after a rewrite, where a size that inference has named before has no better name.
    """
    if not _is_known(model, again):
        # onnx follows the entries of every vector, shape or not, at 60 bytes each (1.23).
        _infer(model, data_prop=all(_vector_length(v) <= _LONGEST_SHAPE for v in _values(model)))


def _is_known(model: ir.Model, again: bool) -> bool:
    """Whether every axis has a number or an input's symbol, and what fused nodes need is there."""
    fused = any(carries_body(node) for node in all_nodes(model.graph))
    values = set(_values(model)).difference(model.graph.inputs)
    known = all(v.dtype and v.shape is not None for v in values)
    symbols = {dim for v in model.graph.inputs for dim in extents(v.shape) if dim is not None}
    open_sizes = {dim for v in values for dim in extents(v.shape) if not isinstance(dim, int)}
    known &= None not in open_sizes if again else open_sizes <= symbols
    return known and fused == (FUSE in model.graph.opset_imports)


def _vector_length(value: ir.Value) -> int:
    dims = extents(value.shape)
    return dims[0] if len(dims) == 1 and isinstance(dims[0], int) else 0


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    yield from _results(model)


def check_sizes(model: ir.Model) -> None:
    """Shapes that constants ask for: nothing may be too large to address."""
    _infer(model, data_prop=False)
    for value in _values(model):
        dims = [d for d in value.shape or () if isinstance(d, int)]
        if math.prod(d or 1 for d in dims) >= 2**48:  # NumPy has no such array, empty or not
            node = value.producer()
            where = f"node '{node.name}' ({node.op_type})" if node else f"input '{value.name}'"
            raise ModelError(f"{where} has shape {value.shape}: its size overflows")
    nodes = list(all_nodes(model.graph))
    unranked = any(n.op_type == "Squeeze" and len(n.inputs) == 1 and not n.domain for n in nodes)
    for node in nodes:
        _check_axis(node)
        _check_windows(node)
        ends = node.attributes["body"].as_graph().outputs if node.op_type == "Scan" else ()
        if unranked and any(value.shape is None for value in ends):
            where = f"node '{node.name or node.outputs[0].name}' (Scan)"
            raise ModelError(
                f"{where}: the rank of a result is unknown, for a Squeeze without axes"
            )


_WINDOWS = (*POOLS, "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv")


def _check_windows(node: ir.Node) -> None:
    """Refuse a window whose attributes do not fit its image or each other, as onnxruntime does."""
    x = node.inputs[0] if node.op_type in _WINDOWS and not node.domain else None
    axes = None if x is None or x.shape is None else len(x.shape) - 2
    for name in ("kernel_shape", "strides", "dilations", "pads") if x is not None else ():
        entries, sides = list(node.attributes.get_ints(name, ())), 1 + (name == "pads")
        axes = len(entries) // sides if axes is None and entries else axes
        needed = entries or (name == "kernel_shape" and node.op_type in POOLS)
        fits = len(entries) == sides * (axes or 0) and (sides > 1 or min(entries, default=0) > 0)
        fits = fits and max(map(abs, entries), default=0) < 2**31
        if (needed and not fits) or (axes is not None and axes < 1):
            raise ModelError(
                f"node '{node.name or node.outputs[0].name}' ({node.op_type}): {name} is "
                f"{entries}, which fits no windows over {axes} axes"
            )


def _check_axis(node: ir.Node) -> None:
    """Refuse an axis so far out that a list of the axes before it would fill the memory."""
    attribute = node.attributes.get("axis")
    if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.INT:
        return
    shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
    quantizes = node.op_type in ("QuantizeLinear", "DequantizeLinear")  # one scale needs no axis
    if shape is None or quantizes or -len(shape) - 1 <= attribute.value <= len(shape) + 1:
        return
    raise ModelError(
        f"node '{node.name or node.outputs[0].name}' ({node.op_type}): axis {attribute.value} is "
        f"out of range for its input of {len(shape)} axes"
    )


def _infer(model: ir.Model, *, data_prop: bool) -> None:
    untouched = set(_sequences(model))
    again, silent = True, len(list(all_nodes(model.graph)))
    while again:  # once more for each operator that inference is silent about
        bodies = contrib.bodies_attached(model)
        with functions_attached(model), bodies as (unread, without), without_weights(model):
            proto = serialized(model)
            _known_in_bodies(proto.graph, {})
            untouched |= unread
        declared = _without_sizes_of_results(proto.graph)
        try:
            result = infer_actual(proto, partial(inferred, data_prop=data_prop))
        except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
            return  # a file that contradicts itself: what is known stays, and onnxruntime says why
        _declare_what_is_open(result.graph, declared)
        _assign_inferred(model.graph, result.graph, untouched)
        again = complete_types(all_nodes(model.graph), model.graph.opset_imports.get("", 1))
        # a body that needs a size can be written once the node before it has told its own
        again, silent = again or 0 < without < silent, without


@contextlib.contextmanager
def declarations_as_hints(model: ir.Model) -> Iterator[None]:
    """Within the block results have no shapes; after it those inferred, or else those declared.

    Where one is contradicted, as by a batch that was set free at the inputs alone, none is taken.
    A number counts where another size of the value is an input's name. Where no size of an input is
    open it counts as well, but for 1, which decides what broadcasts. A name that is no input's
    never counts: inference may have given it to another size.
    """
    sizes = [d for i in model.graph.inputs for d in i.shape or () if not isinstance(d, int)]
    symbols, least = {d for d in sizes if d.value}, math.inf if sizes else 2
    # the body of a Loop or Scan says by the names of its ends whether a state keeps its shape
    loops = {node.graph for node in all_nodes(model.graph) if node.graph and node.graph.inputs}
    ends = {v for graph in (model.graph, *loops) for v in graph.outputs}
    inner = (v for node in all_nodes(model.graph) for v in node.outputs if v not in ends)
    declared = {v: v.shape for v in inner if v.shape is not None and v.dtype is not None}
    for value in declared:
        value.shape = None
    yield
    stale = any(_contradicted(shape, v.shape, symbols) for v, shape in declared.items())
    for value, shape in declared.items() if not stale else ():
        dims = [None] * len(shape) if value.shape is None else value.shape
        value.shape = ir.Shape([
            d if isinstance(d, int) or d in symbols or not _is_hint(hint, shape, symbols, least)
            else hint for d, hint in zip(dims, shape, strict=True)
        ])  # fmt: skip


def _is_hint(dim: object, shape: ir.Shape, symbols: Collection[Any], least: float) -> bool:
    beside_a_name = any(d in symbols for d in shape)
    return dim in symbols or (isinstance(dim, int) and (beside_a_name or dim >= least))


def _contradicted(declared: ir.Shape, inferred: ir.Shape | None, symbols: Collection[Any]) -> bool:
    if inferred is None:
        return False
    return len(declared) != len(inferred) or any(
        isinstance(old, int) and (old != new if isinstance(new, int) else new in symbols)
        for old, new in zip(declared, inferred, strict=True)
    )


Sizes = Mapping[str, Sequence[int]]
"""The numbers declared for the axes of results by name; 0 where none is."""


def _without_sizes_of_results(graph: onnx.GraphProto) -> Sizes:
    """Take the numbers off the shapes that the file declares for its outputs, and return them.

    A batch that was set free at the inputs alone is still a number there, which inference believes.
    Some exporters write 0 for a size that they do not know.
    """
    computed = {name for node in graph.node for name in node.output}
    declared: dict[str, Sequence[int]] = {}
    for info in graph.output:
        dims = info.type.tensor_type.shape.dim
        if info.name in computed and any(d.HasField("dim_value") for d in dims):
            declared[info.name] = [d.dim_value for d in dims]
            for d in dims:
                d.ClearField("dim_value")
    return declared


def _declare_what_is_open(graph: onnx.GraphProto, declared: Sizes) -> None:
    """Give results the numbers declared for axes that are no number, and no input's symbol."""
    symbols = {d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim}
    for info in graph.output if declared else ():
        dims, numbers = info.type.tensor_type.shape.dim, declared.get(info.name, ())
        if not info.type.tensor_type.HasField("shape") or len(dims) != len(numbers):
            continue
        for d, number in zip(dims, numbers, strict=True):
            if number and not d.dim_value and (not d.dim_param or d.dim_param not in symbols):
                d.dim_value = number


def _known_in_bodies(graph: onnx.GraphProto, outside: Mapping[str, onnx.TensorProto]) -> None:
    """Give bodies copies of the small constants that they read from outside.

    Inference (onnx 1.23) does not look for the axes or sizes of their nodes there.
    """
    bodies = [body for node in graph.node for body in bodies_of(node)]
    if not bodies:
        return
    tensors = {**outside, **{t.name: t for t in graph.initializer}}
    for node in graph.node:
        held = [a.t for a in node.attribute if a.name == "value"]
        tensors.update(dict.fromkeys(node.output, held[0]) if held else {})
    small = {k: t for k, t in tensors.items() if t.ByteSize() <= READ_BY_INFERENCE}
    for body in bodies:
        _known_in_bodies(body, small)
        local = {t.name for t in body.initializer} | {v.name for v in body.input}
        local.update(name for node in body.node for name in node.output)
        for name in {name for node in body.node for name in node.input} & {*small} - local:
            body.initializer.add().CopyFrom(small[name])
            body.initializer[-1].name = name


@contextlib.contextmanager
def without_weights(model: ir.Model) -> Iterator[None]:
    """Within the block large initializers are inputs: inference needs their types alone."""
    graph = model.graph
    large = [
        v
        for v in graph.initializers.values()
        if v.const_value is not None and v.const_value.nbytes > READ_BY_INFERENCE
    ]
    inputs, order = list(graph.inputs), list(graph.initializers.values())
    tensors = [required(v.const_value) for v in large]
    for value, tensor in zip(large, tensors, strict=True):
        value.dtype = value.dtype or tensor.dtype
        if value.shape is None:
            value.shape = ir.Shape(list(tensor.numpy().shape))
        value.const_value = None
        del graph.initializers[value.name or ""]
    graph.inputs.extend(v for v in large if not v.is_graph_input())
    try:
        yield
    finally:
        graph.inputs.clear()  # deleting a slice would leave the weights marked as inputs (1.1)
        graph.inputs.extend(inputs)
        for value, tensor in zip(large, tensors, strict=True):
            value.const_value = tensor
        for value in order if large else ():  # each where it was
            graph.initializers.pop(value.name or "", None)
            graph.initializers[value.name or ""] = value


def _assign_inferred(
    graph: ir.Graph, proto: onnx.GraphProto, untouched: Collection[ir.Value], *, inner: bool = False
) -> None:
    values = {v.name: v for node in graph for v in node.outputs}
    if inner:
        values.update({v.name: v for v in graph.inputs})
    for info in itertools.chain(proto.value_info, proto.output, proto.input):
        value = values.get(info.name)
        if value is None or value in untouched or info.type.WhichOneof("value") != "tensor_type":
            continue
        tensor = info.type.tensor_type
        if tensor.elem_type and (value.type is None or value.dtype != tensor.elem_type):
            value.dtype = ir.DataType(tensor.elem_type)
        if tensor.HasField("shape"):
            dims = dims_of(info.type) or []
            node = value.producer()
            if node is not None and node.op_type == "Attention" and not node.domain:
                dims = [d or None for d in dims]  # 0 for the heads of an unknown size (1.23)
            if value.shape is None or [*value.shape] != dims:
                value.shape = ir.Shape(dims)
    for node, described in zip(graph, proto.node, strict=True):
        if any(a.g.node or a.graphs for a in described.attribute):
            texts = {a.name: [a.g] if a.HasField("g") else a.graphs for a in described.attribute}
            for name, attribute in node.attributes.items():
                for body, text in zip(subgraphs(attribute), texts[name], strict=False):
                    _assign_inferred(body, text, untouched, inner=True)


def _sequences(model: ir.Model) -> list[ir.Value]:
    """Values that may be sequences or optionals, which onnx-ir (1.1) would infer as tensors."""
    sequences: dict[ir.Value, None] = {}
    for node in all_nodes(model.graph):
        graphs = [g for a in node.attributes.values() for g in subgraphs(a)]
        reads = [*node.inputs, *(v for g in graphs for v in g.outputs)]
        if node.op_type in MAKES_SEQUENCES or (
            (graphs or node.op_type == "Identity") and any(v in sequences for v in reads)
        ):
            sequences.update(dict.fromkeys(node.outputs))
    return list(sequences)


def with_shapes(
    model: ir.Model, shapes: Mapping[str, Sequence[int]] | None, dims: Mapping[str, int] | None
) -> ir.Model:
    """A copy of `model` with its shapes fixed, or itself where none are given."""
    if not shapes and not dims:
        return model
    sized = model.clone()
    fix_shapes(sized, shapes or {}, dims)
    return sized


@contextlib.contextmanager
def symbols_apart(model: ir.Model) -> Iterator[None]:
    """Within the block each open axis of an input has a symbol of its own.

    Runtimes do not ask whether sizes of one name are equal. Afterwards the symbols are the file's.
    """
    names: dict[_Dim, _Dim] = {}  # of the new symbols, in the file
    for value in model.graph.inputs:
        dims = extents(value.shape)
        for axis, dim in enumerate(dims):
            if isinstance(dim, str):
                fresh = f"{dim} of {value.name}.{axis}" if dim in names else dim
                names[fresh] = dim
                dims[axis] = fresh
        if value.shape is not None:
            value.shape = ir.Shape(dims)
    names = {fresh: name for fresh, name in names.items() if fresh != name}
    shared = dict.fromkeys(names.values())
    declared = [extents(v.shape) for v in model.graph.outputs]
    _replace_symbols(_results(model), shared)
    try:
        yield
    finally:
        _replace_symbols((*model.graph.inputs, *_results(model)), names)
        for value, dims in zip(model.graph.outputs, declared, strict=True):
            pairs = list(zip(extents(value.shape), dims, strict=False))
            if len(pairs) == len(dims) and any(d in shared for d in dims):
                new = [old if old in shared and not isinstance(d, int) else d for d, old in pairs]
                value.shape = ir.Shape(new)


_Dim: TypeAlias = int | str | None


def _results(model: ir.Model) -> Iterator[ir.Value]:
    return (value for node in all_nodes(model.graph) for value in node.outputs)


def _replace_symbols(values: Iterable[ir.Value], names: Mapping[Any, _Dim]) -> None:
    for value in values if names else ():
        dims = extents(value.shape)
        if not names.keys().isdisjoint(dims):
            value.shape = ir.Shape([names.get(d, d) for d in dims])


def fix_shapes(
    model: ir.Model, shapes: Mapping[str, Sequence[int]], dims: Mapping[str, int] | None = None
) -> None:
    """Give inputs the shapes named and symbols the sizes of `dims`, in place; -1 is left free.

    A symbolic axis that gets a size gets it wherever its name stands. Raises UsageError.
    """
    inputs = {v.name: v for v in model.graph.inputs}
    symbols = {d for v in inputs.values() for d in extents(v.shape) if isinstance(d, str)}
    sizes: dict[str, int] = {}
    for named, size in (dims or {}).items():
        if named not in symbols:
            raise UsageError(
                f"no input has a size named '{named}': the inputs name "
                f"{', '.join(sorted(symbols)) or 'none'}"
            )
        if not isinstance(size, Integral):
            raise UsageError(f"the size '{named}' is {size!r}: it takes a whole number")
        sizes[named] = size
    for name, shape in shapes.items():
        if not isinstance(shape, Sequence) or not all(isinstance(n, Integral) for n in shape):
            raise UsageError(f"the shape of '{name}' is {shape!r}: it takes whole numbers")
        if name not in inputs:
            raise UsageError(f"the model has no input '{name}' (it has {list(inputs)})")
        dimensions = extents(inputs[name].shape) or [None] * len(shape)
        if len(dimensions) != len(shape):
            raise UsageError(f"input '{name}' has {len(dimensions)} dimensions, not {len(shape)}")
        for axis, (dim, size) in enumerate(zip(dimensions, shape, strict=True)):
            if size < 0:
                continue
            known = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
            if known not in (None, size):
                why = f", as elsewhere for '{dim}'" if isinstance(dim, str) else ""
                raise UsageError(f"input '{name}': axis {axis} must be {known}{why}, not {size}")
            dimensions[axis] = size
        inputs[name].shape = ir.Shape(dimensions)
    inner = (value for graph in model.graph.subgraphs() for value in graph.inputs)
    _replace_symbols((*model.graph.inputs, *inner, *_results(model)), sizes)
