"""Graphs, programs and launches as text that is the same where they are (tools/replay.py)."""

import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.nvrtc import compile as compile_cubin
from onnx_fuse.cuda.source import Defines, source_text
from onnx_fuse.ir.build import all_nodes
from onnx_fuse.program.call import Call, Program

SHOWN = 4
"""Elements of an array that its text shows; its digest covers all."""


def array_text(array: np.ndarray) -> str:
    """Type, shape, digest of the bits and first elements."""
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]
    first = " ".join(str(x) for x in array.reshape(-1)[:SHOWN])
    more = " ..." if array.size > SHOWN else ""
    return f"{array.dtype}{list(array.shape)} {digest} {{{first}{more}}}"


def model_names(model: ir.Model) -> set[str]:
    """The names of values, nodes and sizes in a model as it came: all others are generated."""
    nodes = list(all_nodes(model.graph))
    names = {node.name or "" for node in nodes} | set(model.graph.initializers)
    values = [*model.graph.inputs, *model.graph.outputs, *(v for n in nodes for v in n.outputs)]
    dims = {str(dim) for value in values if value.shape for dim in value.shape}
    return names | dims | {value.name or "" for value in values}


class _Names:
    """Names of values; those that the package generated are numbered as they occur."""

    def __init__(self, known: Collection[str]) -> None:
        self.known, self.numbers = known, dict[str, int]()

    def of(self, name: str | None) -> str:
        if not name or name in self.known:
            return name or ""
        return f"%{self.numbers.setdefault(name, len(self.numbers))}"

    def size(self, dim: int | ir.SymbolicDim) -> str:
        """A dimension; within an expression, each generated symbol by its number."""
        if isinstance(dim, int) or str(dim) in self.known:
            return str(dim)
        return re.sub(r"[A-Za-z_]\w*(?!\w*\()", lambda match: self.of(match[0]), str(dim))


def graph_text(model: ir.Model, known: Collection[str]) -> str:
    """A model, a line for each value and node; `known` names keep their names."""
    ends = {v.name or "" for v in (*model.graph.inputs, *model.graph.outputs)}
    names = _Names({*known, *ends})
    lines = [
        f"opset {domain or 'ai.onnx'} {n}" for domain, n in sorted(model.opset_imports.items())
    ]
    lines += _lines(model.graph, names, "")
    for key, function in sorted(model.functions.items()):
        attributes = ", ".join(map(_attribute_name, function.attributes.values()))
        lines.append(f"function {':'.join(filter(None, key))} <{attributes}>")
        lines += _lines(function, _Names(()), "  ")
    return "\n".join(lines)


def _attribute_name(attribute: ir.Attr) -> str:
    return f"{attribute.name}: {attribute.type.name}"


def _lines(graph: ir.Graph | ir.Function, names: _Names, indent: str) -> Iterator[str]:
    for value in graph.inputs:
        yield f"{indent}input {_typed(value, names)}"
    if isinstance(graph, ir.Graph):
        for value in graph.initializers.values():
            array = value.const_value
            text = "" if array is None else array_text(array.numpy())
            yield f"{indent}weight {names.of(value.name)} = {text}"
    for node in graph:
        yield from _node(node, names, indent)
    for value in graph.outputs:
        yield f"{indent}output {_typed(value, names)}"


def _typed(value: ir.Value, names: _Names) -> str:
    dtype = "?" if value.dtype is None else value.dtype.name
    shape = "?" if value.shape is None else f"[{','.join(map(names.size, value.shape))}]"
    return f"{names.of(value.name)}: {dtype}{shape}"


def _node(node: ir.Node, names: _Names, indent: str) -> Iterator[str]:
    inputs = ", ".join("" if value is None else names.of(value.name) for value in node.inputs)
    plain, graphs = [], []
    for attribute in sorted(node.attributes.values(), key=lambda a: a.name):
        if attribute.is_ref():
            plain.append(f"{attribute.name}=@{attribute.ref_attr_name}")
        elif attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            value = attribute.value
            several = attribute.type == ir.AttributeType.GRAPHS
            graphs += [(attribute.name, graph) for graph in (value if several else [value])]
        else:
            plain.append(f"{attribute.name}={_value(attribute.value)}")
    operator = ":".join(filter(None, (node.domain, node.op_type, node.overload)))
    outputs = ", ".join(_typed(value, names) for value in node.outputs)
    yield f"{indent}{outputs} = {operator}<{', '.join(plain)}>({inputs})"
    for name, graph in graphs:
        yield f"{indent}  {name}:"
        yield from _lines(graph, names, f"{indent}    ")


def _value(value: Any) -> str:
    if isinstance(value, ir.TensorProtocol):
        return array_text(value.numpy())
    return repr(list(value) if isinstance(value, tuple | list) else value)


def program_text(program: Program, known: Collection[str]) -> str:
    """A program: ends, buffers, calls with their problems, constants, what is left to others."""
    names = _Names(known)
    lines = [f"input {name} = {tensor}" for name, tensor in program.inputs]
    for buffer in program.buffers:
        array = program.constants.get(buffer.id)
        text = "" if array is None else f" {array_text(np.asarray(array))}"
        lines.append(f"b{buffer.id} {buffer.kind} {buffer.nbytes} {names.of(buffer.name)}{text}")
    for kind, calls in (("once", program.setup), ("call", program.calls)):
        for call in calls:
            text, _, nodes = str(call).partition("  # ")
            why = f" [{call.why}]" if call.why else ""
            nodes = " ".join(node if node in known else "_" for node in call.nodes)
            lines += [f"{kind} {text}{why}  # {nodes}", f"    {_plain(call.problem)}"]
            lines += [f"    {_plain(call.expression)}"] if call.expression else []
            lines.append(f"    workspace {call.workspace} inplace {call.inplace}")
    for name, y in program.outputs:
        text = array_text(y) if isinstance(y, np.ndarray) else str(y)
        lines.append(f"output {name} = {text}")
    lines += [f"fallback {text}" for text in program.fallbacks]
    lines += [f"in parts {text}" for text in program.in_parts]
    for stage in program.stages:
        ends = ", ".join(f"{names.of(name)}={tensor}" for name, tensor in stage.inputs)
        outputs = ", ".join(map(names.of, stage.outputs))
        lines.append(f"stage host={stage.host} loop={stage.loop is not None} {outputs} <- {ends}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """The text of a value: fields that have their defaults and addresses are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = []
        for entry in fields(value):
            of_default = (
                entry.default_factory() if callable(entry.default_factory) else entry.default
            )
            inner = getattr(value, entry.name)
            if entry.repr and repr(inner) != repr(of_default):
                shown.append(f"{entry.name}={_plain(inner)}")
        return f"{type(value).__name__}({', '.join(shown)})"
    if type(value) in (tuple, list):
        return f"({', '.join(map(_plain, value))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def launch_lines(call: Call, arch: str = "") -> Iterator[str]:
    """Each launch of a call: source, digest, macros, grid, block; for `arch` its code, too."""
    for launch in call.launches:
        if launch.of_library:
            yield f"{call.kernel}: library {_plain(launch.product or launch.collective)}"
            continue
        macros = " ".join(f"{name}={value}" for name, value in launch.defines)
        source = "generated" if "\n" in launch.source else launch.source
        code = f" cubin {_cubin(launch.source, launch.defines, arch)}" if arch else ""
        yield (
            f"{call.kernel}: {source} {launch.entry} {_digest(launch.source)}{code}"
            f" grid {launch.grid} block {launch.block} smem {launch.smem} cluster {launch.cluster}"
            f" sync {launch.sync}{' cooperative' * launch.cooperative} macros {macros}"
        )
        yield f"    {_plain(launch.args)}"


@cache
def _digest(source: str) -> str:
    """Of the source with its includes."""
    return hashlib.sha256(source_text(source).encode()).hexdigest()[:12]


@cache
def _cubin(source: str, defines: Defines, arch: str) -> str:
    return hashlib.sha256(compile_cubin(source, defines, arch)).hexdigest()[:12]
