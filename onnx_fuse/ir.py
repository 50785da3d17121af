"""The HLIR is ONNX itself: load and check a model, bring it to one opset, build nodes, save it.

Files are untrusted: sizes and external-data locations are checked before anything is read through
them, and every fault becomes a `ModelError` of one sentence.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from google.protobuf.message import DecodeError

from onnx_fuse.errors import ModelError, UsageError

FUSE = "onnx_fuse"
"""Domain of the fused operators."""
CANONICAL_OPSET = 21
"""Opset that older models are brought up to: the newest that onnxruntime 1.22 implements whole.
Newer models stay at theirs; what this project emits means the same in all of them."""
BODIES: dict[str, Callable[[Sequence[str], int, str], ir.Function]] = {}
"""`BODIES[name](exposed, opset, overload)`: a fused op's body as a function; `ops` fills it."""
MAX_PROTOBUF = 2**31 - 1
_STREAMED = 1 << 16  # bytes from which save() writes an initializer on its own

Model: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model"


# ---- load ------------------------------------------------------------------------------------


def load(source: Model) -> ir.Model:
    """Parse, check and canonicalize the opset of `source`: a path, bytes, ModelProto or ir.Model.

    Local functions are inlined, except this project's own fused ops, whose bodies are taken off and
    put back by `save`. Raises ModelError for anything that is not a valid model.
    """
    model = read(source)
    with _faults(_name(source)):
        return _canonical(model)


def read(source: Model) -> ir.Model:
    """Parse and check `source` and leave it as it is: its functions, its opset, its weights' order.

    External tensors are mapped into memory, so the model no longer depends on where its file was.
    """
    with _faults(_name(source)):
        if isinstance(source, ir.Model):
            model = source.clone()
        else:
            folder = None
            if isinstance(source, onnx.ModelProto):
                proto = _checked(source)
            elif isinstance(source, bytes):
                proto = _checked(_parse(source))
            else:
                folder = Path(source).parent
                proto = _checked(_parse(Path(source).read_bytes()))
            _check_tensors(proto, folder)
            model = ir.serde.deserialize_model(proto)
            model.graph.opset_imports.setdefault("", CANONICAL_OPSET)
            if folder is not None:
                _map_external(model, folder)
        _check_graph(model)
    return model


def _name(source: Model) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else "model"


@contextlib.contextmanager
def _faults(name: str) -> Iterator[None]:
    """Whatever the parsers raise on an untrusted file becomes one sentence that names the file."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except OSError as error:
        raise ModelError(f"{name}: {error.strerror or error}") from error
    except MemoryError as error:
        raise ModelError(f"{name}: out of memory") from error
    except Exception as error:
        raise ModelError(f"{name}: {one_line(_root(error))}") from error


def _parse(data: bytes) -> onnx.ModelProto:
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise ModelError(f"not an ONNX file ({one_line(error)})") from error
    return proto


def _checked(proto: onnx.ModelProto) -> onnx.ModelProto:
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError("not an ONNX file (it holds no graph)")
    imported = {o.domain for o in proto.opset_import}
    if not imported & {"", "ai.onnx"} and any(n.domain == "" for n in proto.graph.node):
        raise ModelError("the model imports no ai.onnx opset")
    newest = onnx.defs.onnx_opset_version()
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx") and not 1 <= opset.version <= newest:
            raise ModelError(f"ai.onnx opset {opset.version} is not known (1 to {newest} are)")
    return proto


def _check_tensors(proto: onnx.ModelProto, folder: Path | None) -> None:
    """Sizes and locations of all stored tensors, before any is allocated or opened."""
    nodes = itertools.chain.from_iterable(f.node for f in proto.functions)
    for tensor in itertools.chain(_tensors(proto.graph), _node_tensors(nodes)):
        where = f"tensor '{tensor.name}'"
        if any(d < 0 for d in tensor.dims):
            raise ModelError(f"{where} has a negative dimension")
        try:
            dtype = ir.DataType(tensor.data_type)
            bits = dtype.bitwidth if dtype != ir.DataType.STRING else 0
        except (ValueError, TypeError) as error:
            raise ModelError(f"{where} has the unknown element type {tensor.data_type}") from error
        count = math.prod(tensor.dims)
        nbytes = (count * bits + 7) // 8
        if nbytes >= 2**48:
            raise ModelError(f"{where} has shape {list(tensor.dims)}: its size overflows")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external(tensor, nbytes, folder, where)
        elif bits and tensor.HasField("raw_data") and len(tensor.raw_data) != nbytes:
            raise ModelError(
                f"{where} holds {len(tensor.raw_data)} bytes, but its shape needs {nbytes}"
            )
        elif not tensor.HasField("raw_data") and _typed_count(tensor) != _entries(
            tensor, count, bits
        ):
            raise ModelError(
                f"{where} holds {_typed_count(tensor)} values, not those of {list(tensor.dims)}"
            )


def _typed_count(tensor: onnx.TensorProto) -> int:
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
    return sum(len(getattr(tensor, field)) for field in fields)


def _entries(tensor: onnx.TensorProto, count: int, bits: int) -> int:
    """Entries of a typed field for `count` elements: 4-bit pairs share one, complex takes two."""
    if tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        return 2 * count
    return -(-count * bits // 8) if 0 < bits < 8 else count


def _check_external(tensor: onnx.TensorProto, nbytes: int, folder: Path | None, where: str) -> None:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelError(f"{where} is in the external file '{location}': pass the model as a path")
    root = folder.resolve()
    target = (root / location).resolve()
    # resolve() follows symlinks, so a link that leaves the folder is caught as well as ../ is.
    if not location or os.path.isabs(location) or not target.is_relative_to(root):
        raise ModelError(f"{where}: external data '{location}' lies outside the model's folder")
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", nbytes))
        size = target.stat().st_size
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: external data '{location}': {error}") from error
    if offset < 0 or length != nbytes or offset + length > size:
        raise ModelError(
            f"{where}: external data '{location}' has no {nbytes} bytes at offset {offset}"
        )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    if graph.sparse_initializer:
        raise ModelError("sparse initializers are not supported: store them dense")
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sub in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from _tensors(sub)


def _map_external(model: ir.Model, folder: Path) -> None:
    """Replace external tensors by arrays over the mapped file."""
    ir.external_data.set_base_dir(model.graph, folder)
    graphs = [model.graph, *(f.graph for f in model.functions.values())]
    for graph in itertools.chain.from_iterable((g, *g.subgraphs()) for g in graphs):
        for value in getattr(graph, "initializers", {}).values():
            value.const_value = _mapped(value.const_value)
        for node in graph:
            for name, attribute in node.attributes.items():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    node.attributes[name] = ir.AttrTensor(name, _mapped(attribute.as_tensor()))


def _mapped(tensor: Any) -> Any:
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    mapped = ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name, doc_string=tensor.doc_string)
    mapped.meta["external"] = tensor.location  # what saves the same model again may want to know
    return mapped


def _check_graph(model: ir.Model) -> None:
    """Cycles, undefined values and unknown operators; then the spec's own checker."""
    known = set(model.functions)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_identifier() in known or (
            node.domain == FUSE and node.op_type.split("_")[0] in BODIES
        ):
            continue
        opset = model.graph.opset_imports.get(node.domain)
        what = f"node '{node.name or node.outputs[0].name if node.outputs else node.name}'"
        if node.domain == "":
            if not onnx.defs.has(node.op_type, max_inclusive_version=opset or 1):
                raise ModelError(f"{what}: ai.onnx opset {opset} has no operator '{node.op_type}'")
        elif node.domain not in _SERVED_DOMAINS:
            raise ModelError(
                f"{what}: operator '{node.op_type}' is of the unknown domain '{node.domain}'"
            )
        elif opset is None:
            raise ModelError(f"{what}: the model does not import its domain '{node.domain}'")
    _check_defined(model.graph, set())
    try:
        common_passes.TopologicalSortPass()(model)
    except (ValueError, ir.passes.PassError) as error:
        raise ModelError("the graph has a cycle") from error
    with functions_attached(model):
        common_passes.CheckerPass()(model)


# Domains whose operators the installed onnxruntime has kernels for.
_SERVED_DOMAINS = ("ai.onnx.ml", "ai.onnx.preview.training", "com.microsoft")


def _check_defined(graph: ir.Graph, outer: set[ir.Value]) -> None:
    defined = outer | set(graph.inputs) | set(graph.initializers.values())
    for value in graph.initializers.values():
        if value.const_value is None:
            raise ModelError(f"initializer '{value.name}' has no data")
    for node in graph:
        defined.update(node.outputs)
    for node in graph:
        for read in node.inputs:
            if read is not None and read not in defined:
                raise ModelError(
                    f"node '{node.name}' ({node.op_type}) reads '{read.name}', which no node, "
                    "input or initializer defines"
                )
        for attribute in node.attributes.values():
            for sub in subgraphs(attribute):
                _check_defined(sub, defined)
    for output in graph.outputs:
        if output not in defined:
            raise ModelError(f"nothing defines the output '{output.name}'")


def subgraphs(attribute: ir.Attr) -> Sequence[ir.Graph]:
    """The graphs an attribute holds (If, Loop, Scan)."""
    if attribute.is_ref():
        return ()
    if attribute.type == ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return tuple(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else ()


def _canonical(model: ir.Model) -> ir.Model:
    """Inline local functions and bring the ai.onnx opset up to CANONICAL_OPSET."""
    own = {key for key, f in model.functions.items() if _is_own(f)}
    common_passes.InlinePass(criteria=lambda f: f.identifier() not in own)(model)
    for key in list(model.functions):
        del model.functions[key]
    # Old exporters list every weight as an input as well; a weight must be known to be constant.
    common_passes.RemoveInitializersFromInputsPass()(model)
    version = model.graph.opset_imports.get("", 1)
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    if version < 9 and (scan := next((n for n in nodes if n.op_type == "Scan"), None)):
        raise ModelError(f"node '{scan.name}': opset {version}'s Scan has no later counterpart")
    if version < CANONICAL_OPSET:
        model = _upgrade(model)
    _check_sizes(model)
    model.ir_version = max(model.ir_version, 10)
    return model


def _is_own(function: ir.Function) -> bool:
    """Whether a function found in a file is, to the letter, the body of one of our ops.

    A file may carry another body under one of our names (an older release, or a forgery): that one
    must be inlined and run as it stands.
    """
    if function.domain != FUSE or function.name.split("_")[0] not in BODIES:
        return False
    opset = function.opset_imports.get("", CANONICAL_OPSET)
    ours = fused_function(function.name, opset, function.overload)
    theirs, expected = (ir.serde.serialize_function(f) for f in (function, ours))
    for proto in (theirs, expected):
        del proto.value_info[:], proto.metadata_props[:]
        proto.ClearField("doc_string")
    return bool(theirs == expected)


def _upgrade(model: ir.Model) -> ir.Model:
    """Bring the opset up with the spec's own converter; what that drops is put back."""
    graph, version = model.graph, model.graph.opset_imports[""]
    if _unchanged(model, version):
        graph.opset_imports[""] = CANONICAL_OPSET
        return model
    from onnxscript.version_converter import ConvertVersionPass

    kept = (graph.name, graph.doc_string, dict(graph.metadata_props), dict(graph.opset_imports))
    shapes = [(v.name, v.type, v.shape, v.doc_string, dict(v.metadata_props)) for v in _ends(graph)]
    notes = {n.outputs[0].name: (n.doc_string, dict(n.metadata_props)) for n in graph if n.outputs}
    if version < 14:
        _mark_training(graph)
    with quiet("onnxscript"), training_mode_kept(model):
        model = ConvertVersionPass(target_version=CANONICAL_OPSET, fallback=True)(model).model
    graph = model.graph
    if graph.opset_imports.get("") != CANONICAL_OPSET:
        raise ModelError(f"opset {version} cannot be brought up to {CANONICAL_OPSET}")
    graph.name, graph.doc_string = kept[:2]
    graph.metadata_props.update(kept[2])
    for domain, number in kept[3].items():
        graph.opset_imports.setdefault(domain, number)
    for value, (name, type_, shape, doc, props) in zip(_ends(graph), shapes, strict=True):
        value.name, value.type, value.shape, value.doc_string = name, type_, shape, doc
        value.metadata_props.update(props)
    for node in graph:
        doc, props = notes.get(node.outputs[0].name, (None, {})) if node.outputs else (None, {})
        node.doc_string = doc
        node.metadata_props.update(props)
    return model


def _mark_training(graph: ir.Graph) -> None:
    """Before opset 14 a BatchNormalization trained where it had outputs beside the first.

    The converter refuses the fourth and fifth, which later opsets lack.
    """
    for node in graph:
        if node.op_type == "BatchNormalization" and len(node.outputs) > 1:
            if any(v.uses() or v.is_graph_output() for v in node.outputs[3:]):
                raise ModelError(f"node '{node.name}': the batch's statistics as outputs 4 and 5")
            node.resize_outputs(min(3, len(node.outputs)))
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)


def _unchanged(model: ir.Model, version: int) -> bool:
    """Whether every operator of `model` is defined in `version` as it is in CANONICAL_OPSET."""

    def since(name: str, opset: int) -> int:
        return int(onnx.defs.get_schema(name, opset, "").since_version)

    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    names = {node.op_type for node in nodes if node.domain == ""}
    return all(since(name, version) == since(name, CANONICAL_OPSET) for name in names)


@contextlib.contextmanager
def training_mode_kept(model: ir.Model) -> Iterator[None]:
    """Within the block a pass may drop unused outputs; BatchNormalizations that train still train.

    onnx-ir 1.0's RemoveUnusedNodesPass takes training_mode away from those whose running statistics
    nobody reads, and with it their result.
    """
    held = {
        node.outputs[0].name: ([o.name for o in node.outputs], node.attributes["training_mode"])
        for node in model.graph
        if node.op_type == "BatchNormalization" and "training_mode" in node.attributes
    }
    yield
    for node in model.graph if held else ():
        if node.op_type == "BatchNormalization" and node.outputs[0].name in held:
            names, mode = held[node.outputs[0].name]
            node.attributes["training_mode"] = mode
            for value, name in zip(node.outputs, names, strict=False):
                value.name = name


def _ends(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.outputs]


# ---- build -----------------------------------------------------------------------------------


class Builder:
    """`op.Mul(a, b)` makes a Mul node and returns its output; the nodes collect in `op.nodes`.

    An input may be a Value, None (absent), or a number, list or array, which becomes a Constant of
    the first Value input's dtype (floats) or int64 (integers). `outputs=n` returns a tuple of n.
    `domain=` and `name=` are the node's; all other keywords are attributes.
    """

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def build(*inputs: Any, **keywords: Any) -> Any:
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
        node = ir.node(
            op_type,
            values,
            {k: v for k, v in {**(attributes or {}), **more}.items() if v is not None},
            domain=domain,
            num_outputs=count,
            name=name,
        )
        if not isinstance(outputs, int):
            for value, label in zip(node.outputs, outputs, strict=True):
                value.name = label
        self.nodes.append(node)
        return node.outputs[0] if count == 1 else tuple(node.outputs)

    def constant(self, value: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """A Constant node; Python floats take `dtype`, integers and lists of integers int64."""
        if isinstance(value, np.ndarray | np.generic):
            tensor = ir.tensor(np.asarray(value))
        else:
            array = np.asarray(value)
            floating = array.dtype.kind == "f"
            kind = (dtype or ir.DataType.FLOAT) if floating else ir.DataType.INT64
            tensor = ir.tensor(array.astype(kind.numpy()))
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
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def unique_name(graph: ir.Graph, stem: str) -> str:
    """`stem`, or `stem_1`, `stem_2`, …: a value name the graph does not use yet."""
    taken = {v.name for v in graph.inputs} | set(graph.initializers)
    taken.update(v.name for n in graph for v in n.outputs)
    return next(
        name for i in range(len(taken) + 1) if (name := f"{stem}_{i}" if i else stem) not in taken
    )


def infer_shapes(model: ir.Model) -> None:
    """Fill in dtypes and shapes, fused ops through their bodies; what was known stays."""
    # onnx follows the entries of every vector, shape or not, at 60 bytes each (1.23).
    _infer(model, data_prop=all(_length(v) <= _LONGEST_SHAPE for v in _values(model)))


_LONGEST_SHAPE = 1 << 20


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


def _check_sizes(model: ir.Model) -> None:
    """Shapes that constants ask for: nothing may be too large to address."""
    _infer(model, data_prop=False)
    for value in _values(model):
        dims = [d for d in value.shape or () if isinstance(d, int)]
        if math.prod(dims) >= 2**48:
            node = value.producer()
            where = f"node '{node.name}' ({node.op_type})" if node else f"input '{value.name}'"
            raise ModelError(f"{where} has shape {value.shape}: its size overflows")


def _infer(model: ir.Model, *, data_prop: bool) -> None:
    with functions_attached(model), quiet("onnx_ir"):
        kept = [(v, v.type, v.shape) for v in _sequences(model)]
        common_passes.ShapeInferencePass(strict_mode=False, check_type=False, data_prop=data_prop)(
            model
        )
        for value, type_, shape in kept:
            value.type, value.shape = type_, shape


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


MAKES_SEQUENCES = {
    *("SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceMap"),
    *("SplitToSequence", "Optional", "OptionalGetElement"),
}


def fix_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> None:
    """Give inputs the shapes named, in place; -1 leaves an axis free.

    A symbolic axis that gets a size gets it wherever its name stands. Raises UsageError.
    """
    inputs = {v.name: v for v in model.graph.inputs}
    sizes: dict[str, int] = {}
    for name, given in shapes.items():
        if name not in inputs:
            raise UsageError(f"the model has no input '{name}' (it has {list(inputs)})")
        dims = list(inputs[name].shape or [None] * len(given))
        if len(dims) != len(given):
            raise UsageError(f"input '{name}' has {len(dims)} dimensions, not {len(given)}")
        for axis, (dim, size) in enumerate(zip(dims, given, strict=True)):
            if size < 0:
                continue
            symbol = dim.value if isinstance(dim, ir.SymbolicDim) else None
            fixed = dim if isinstance(dim, int) else size
            if symbol:
                fixed = sizes.setdefault(symbol, size)
            if fixed != size:
                raise UsageError(f"input '{name}': axis {axis} is {fixed}, not {size}")
            dims[axis] = size
        inputs[name].shape = ir.Shape(dims)
    for graph in (model.graph, *model.graph.subgraphs()):
        values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
        for value in values:
            if value.shape is not None:
                symbolic = [d.value if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
                value.shape = ir.Shape([sizes.get(str(d), d) for d in symbolic])


# ---- save ------------------------------------------------------------------------------------


@contextlib.contextmanager
def functions_attached(model: ir.Model) -> Iterator[None]:
    """Within the block the model carries the body of every fused op it calls."""
    opset = model.graph.opset_imports[""]
    added: dict[ir.OperatorIdentifier, ir.Function] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        key = node.op_identifier()
        if node.domain == FUSE and key not in model.functions and key not in added:
            added[key] = fused_function(node.op_type, opset, node.overload)
    model.functions.update(added)
    imported = FUSE in model.graph.opset_imports
    if added:
        model.graph.opset_imports[FUSE] = 1
    elif not model.functions:
        model.graph.opset_imports.pop(FUSE, None)
    try:
        yield
    finally:
        for key in added:
            model.functions.pop(key, None)  # the inliner takes away what it used up
        if added and not imported:
            model.graph.opset_imports[FUSE] = 1


def fused_function(op_type: str, opset: int, overload: str = "") -> ir.Function:
    """The body of `LayerNormGemm`; that of `LayerNormGemm_mean_rstd` returns inner values too."""
    name, *exposed = op_type.split("_")
    if name not in BODIES:
        raise ModelError(f"domain {FUSE} has no operator '{op_type}'")
    return BODIES[name](exposed, opset, overload)


def to_proto(model: ir.Model, *, shapes: bool = True) -> onnx.ModelProto:
    """The model as a ModelProto that stock onnxruntime runs: fused ops carry their bodies.

    `shapes=False` as in `save`.
    """
    with functions_attached(model), _noted_shapes(model, shapes):
        return ir.serde.serialize_model(model)


@contextlib.contextmanager
def _noted_shapes(model: ir.Model, kept: bool) -> Iterator[None]:
    """Within the block, unless `kept`, values that carry no note have no type or shape either."""
    held: list[tuple[ir.Value, ir.TypeProtocol | None, ir.Shape | None]] = []
    for graph in () if kept else (model.graph, *model.graph.subgraphs()):
        ends = {*graph.inputs, *graph.outputs}
        made = (v for n in graph if n.domain in ("", FUSE) for v in n.outputs)
        for value in itertools.chain(graph.initializers.values(), made):
            if value not in ends and not value.metadata_props and not value.doc_string:
                held.append((value, value.type, value.shape))
                value.type = value.shape = None
    try:
        yield
    finally:
        for value, type_, shape in held:
            value.type, value.shape = type_, shape


def inline(model: ir.Model) -> ir.Model:
    """The same model in plain ai.onnx: every fused op replaced by its body."""
    model = model.clone()
    with functions_attached(model):
        flat = common_passes.InlinePass()(model).model.clone()
    for key in list(flat.functions):
        del flat.functions[key]
    flat.graph.opset_imports.pop(FUSE, None)
    return flat


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    tensors = (v.const_value for v in model.graph.initializers.values())
    return sum(t.nbytes for t in tensors if t is not None)


def save(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    external: bool = False,
    shapes: bool = True,
) -> None:
    """Write `path` whole or not at all (a file beside it, renamed).

    `shapes=False` leaves inner shapes out, which `onnx.shape_inference` gives back: with them
    onnxruntime's CPU makes SkipLayerNormalization of residual and norm, 14 ms where Add and
    LayerNormalization take 5 (BERT-base, batch 4 x 64; 1.31.1, 2026-11).

    `external` puts weights into `<path>.data`; models over 2 GB always do. Otherwise each large
    initializer is serialized by itself, so that no second copy of the weights is ever in memory:
    a protobuf message may come in pieces, which the parser merges.
    """
    path = Path(path)
    external = external or weight_bytes(model) > MAX_PROTOBUF - (64 << 20)
    big = {} if external else _large_initializers(model.graph)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            if external:
                _save_external(model, path, Path(folder), shapes)
                return
            draft = Path(folder) / path.name
            noted = _noted_shapes(model, shapes)
            with draft.open("wb") as file, functions_attached(model), noted:
                for name in big:
                    del model.graph.initializers[name]
                try:
                    file.write(ir.serde.serialize_model(model).SerializeToString())
                finally:
                    for value in big.values():
                        model.graph.initializers[value.name or ""] = value
                for value in big.values():
                    assert value.const_value is not None
                    piece = onnx.ModelProto()
                    piece.graph.initializer.append(ir.serde.serialize_tensor(value.const_value))
                    piece.graph.initializer[0].name = value.name
                    file.write(piece.SerializeToString())
            os.replace(draft, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from error


def _large_initializers(graph: ir.Graph) -> dict[str, ir.Value]:
    return {
        name: value
        for name, value in graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes >= _STREAMED
    }


def _save_external(model: ir.Model, path: Path, folder: Path, shapes: bool) -> None:
    data = f"{path.name}.data"
    with functions_attached(model), _noted_shapes(model, shapes):
        # save() points the tensors at the file it writes; the caller's model keeps its own.
        kept = {name: value.const_value for name, value in model.graph.initializers.items()}
        try:
            ir.save(model, folder / path.name, external_data=data)
        finally:
            for name, tensor in kept.items():
                model.graph.initializers[name].const_value = tensor
    if (folder / data).exists():
        os.replace(folder / data, path.parent / data)
    os.replace(folder / path.name, path)


# ---- helpers ---------------------------------------------------------------------------------


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def one_line(error: BaseException) -> str:
    """The first line that an error's text has."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def quiet(logger_name: str) -> Iterator[None]:
    """Within the block this logger says nothing: what it logs we report, or need not report."""
    import logging

    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def feeds_of(model: ir.Model, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays that the model's inputs name."""
    names = [v.name for v in model.graph.inputs if v.name is not None]
    return {name: arrays[name] for name in names if name in arrays}
