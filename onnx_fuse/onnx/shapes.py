"""Types and shapes: infer them, refuse what is too large to address, fix the inputs'."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.onnx import contrib
from onnx_fuse.onnx.build import subgraphs
from onnx_fuse.onnx.common import quiet
from onnx_fuse.onnx.save import functions_attached
from onnx_fuse.onnx.types import complete_types

_LONGEST_SHAPE = 1 << 20
MAKES_SEQUENCES = {
    *("SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceMap"),
    *("SplitToSequence", "Optional", "OptionalGetElement"),
}


def infer_shapes(model: ir.Model) -> None:
    """Fill in dtypes and shapes, fused ops through their bodies; what was known stays."""
    # onnx follows the entries of every vector, shape or not, at 60 bytes each (1.23).
    _infer(model, data_prop=all(_length(v) <= _LONGEST_SHAPE for v in _values(model)))


def _length(value: ir.Value) -> int:
    """Entries of a vector; 0 for all else."""
    shape = value.shape
    dim = shape[0] if shape is not None and len(shape) == 1 else 0
    return dim if isinstance(dim, int) else 0


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        yield from node.outputs


def check_sizes(model: ir.Model) -> None:
    """Shapes that constants ask for: nothing may be too large to address."""
    _infer(model, data_prop=False)
    for value in _values(model):
        dims = [d for d in value.shape or () if isinstance(d, int)]
        if math.prod(dims) >= 2**48:
            node = value.producer()
            where = f"node '{node.name}' ({node.op_type})" if node else f"input '{value.name}'"
            raise ModelError(f"{where} has shape {value.shape}: its size overflows")


def _infer(model: ir.Model, *, data_prop: bool) -> None:
    with functions_attached(model), contrib.bodies_attached(model), quiet("onnx_ir"):
        kept = [(v, v.type, v.shape) for v in _sequences(model)]
        again = True
        while again:  # at most once for each operator that inference is silent about
            common_passes.ShapeInferencePass(
                strict_mode=False, check_type=False, data_prop=data_prop
            )(model)
            for value, type_, shape in kept:
                value.type, value.shape = type_, shape
            again = complete_types(model.graph, model.graph.opset_imports.get("", 1))


def _sequences(model: ir.Model) -> list[ir.Value]:
    """Values that may be sequences or optionals, which onnx-ir (1.1) would infer as tensors."""
    found: dict[ir.Value, None] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        graphs = [g for a in node.attributes.values() for g in subgraphs(a)]
        reads = [*node.inputs, *(v for g in graphs for v in g.outputs)]
        if node.op_type in MAKES_SEQUENCES or (
            (graphs or node.op_type == "Identity") and any(v in found for v in reads)
        ):
            found.update(dict.fromkeys(node.outputs))
    return list(found)


def fix_shapes(
    model: ir.Model, shapes: Mapping[str, Sequence[int]], dims: Mapping[str, int] | None = None
) -> None:
    """Give inputs the shapes named and symbols the sizes of `dims`, in place; -1 is left free.

    A symbolic axis that gets a size gets it wherever its name stands. Raises UsageError.
    """
    inputs = {v.name: v for v in model.graph.inputs}
    open_dims = [d for v in inputs.values() for d in v.shape or () if not isinstance(d, int)]
    symbols = {d.value for d in open_dims if d.value}
    sizes: dict[str, int] = {}
    for named, size in (dims or {}).items():
        if named not in symbols:
            raise UsageError(f"no input has the dimension '{named}' (there are {sorted(symbols)})")
        sizes[named] = size
    for name, given in shapes.items():
        if name not in inputs:
            raise UsageError(f"the model has no input '{name}' (it has {list(inputs)})")
        own = list(inputs[name].shape or [None] * len(given))
        if len(own) != len(given):
            raise UsageError(f"input '{name}' has {len(own)} dimensions, not {len(given)}")
        for axis, (dim, size) in enumerate(zip(own, given, strict=True)):
            if size < 0:
                continue
            symbol = dim.value if isinstance(dim, ir.SymbolicDim) else None
            fixed = dim if isinstance(dim, int) else size
            if symbol:
                fixed = sizes.setdefault(symbol, size)
            if fixed != size:
                raise UsageError(f"input '{name}': axis {axis} is {fixed}, not {size}")
            own[axis] = size
        inputs[name].shape = ir.Shape(own)
    for graph in (model.graph, *model.graph.subgraphs()) if sizes else ():
        values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
        for value in values:
            if value.shape is not None:
                symbolic = [d.value if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
                value.shape = ir.Shape([sizes.get(str(d), d) for d in symbolic])
