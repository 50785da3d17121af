"""Output sizes as onnxruntime works them out, where ONNX's inference (1.23) has others.

A Resize multiplies in float32. A pool drops the last window of `ceil_mode` that begins beyond the
image, in every opset, and what SAME adds around an image does not count dilations. A ConvTranspose
with SAME makes `stride` pixels of each at most, whatever its output_padding. A PRelu broadcasts its
input to the slope, too, and an Attention of opset 25 one query to the rows of the mask. A letter of
an Einsum has the largest size that an operand has for it, not the first operand's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnx_fuse.arrays import Array

Dims = Sequence["int | str | None"]
"""Sizes of a tensor: a symbol's name, or None, where one is not known."""
Infer = Callable[[onnx.ModelProto], onnx.ModelProto]
Types = Mapping[str, onnx.TypeProto]
Tensors = Mapping[str, onnx.TensorProto]

POOLS = ("MaxPool", "AveragePool", "LpPool")
_CONCERNED = {
    *(("", name) for name in (*POOLS, "Attention", "ConvTranspose", "Einsum", "NonZero", "PRelu")),
    *(("", name) for name in ("Resize", "Upsample")),
    ("com.microsoft", "QLinearAveragePool"),
    ("com.microsoft", "NhwcMaxPool"),
}
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_SETTLED = "onnx_fuse.settled"
"""Domain of the nodes that inference shall not look at: the sizes of their outputs stay."""


def infer_actual(model: onnx.ModelProto, infer: Infer) -> onnx.ModelProto:
    """The model with the types and shapes that `infer` gives it, less the sizes that are not so.

    `infer` is ONNX's shape inference, whose errors this raises. A size that onnxruntime makes
    another one is left open, and what follows from it inferred again: onnxruntime's own inference
    is ONNX's, and refuses a file in which a constant or a declared shape says what is right.
    `model` is changed then, and that node's domain in the result.
    """
    result = infer(model)
    declared = {v.name for v in model.graph.output if v.type.tensor_type.HasField("shape")}
    while declared or any(_is_concerned(node) for node in nodes_of(result.graph)):
        walk = _Walk({o.domain: o.version for o in model.opset_import}, declared)
        walk.graph(result.graph, {}, {})
        if not walk.opened:
            break
        _settle(model.graph, walk.opened, walk.changed)
        domains = {node.domain for node in nodes_of(model.graph)}
        domains -= {opset.domain for opset in model.opset_import}
        model.opset_import.extend(
            onnx.helper.make_opsetid(d, 1) for d in domains if d.startswith(_SETTLED)
        )
        result = infer(model)
    return result


def correct_types(
    node: onnx.NodeProto,
    types: Types,
    data: Tensors,
    results: Types,
    *,
    write: bool = True,
) -> list[int]:
    """Write the right sizes into the types that inference has for a node's outputs.

    Returns the axes that it had wrong.

    `types` and `data` are the types and the constants among the node's inputs, by name. Without
    `write` the wrong sizes are left open.
    """
    if not _is_concerned(node) or node.output[0] not in results:
        return []
    if node.op_type == "Attention" and len(node.output) > 3 and node.output[3] in results:
        _write_dims(results[node.output[3]], [3], [None] * 3 + [_keys(node, types)])
    first = types.get(node.input[0])
    rank = len(dims_of(first) or ()) if node.op_type == "ConvTranspose" else 0
    shape = results[node.output[0]].tensor_type.shape
    while 0 < len(shape.dim) < rank:  # an output_shape below the image's stays away from it
        shape.dim.add()
    inferred = dims_of(results[node.output[0]])
    values = [onnx.numpy_helper.to_array(data[n]) if n in data else None for n in node.input]
    read = [dims_of(types.get(name)) for name in node.input]
    dims = actual_dims(node, read, inferred, values)
    if dims is None or inferred is None:
        return []
    pairs = list(enumerate(zip(inferred, dims, strict=True)))
    wrong = [i for i, (a, b) in pairs if a not in (None, b)]
    axes = [i for i, (a, b) in pairs if a != b] if write else wrong
    for name in {*node.output} & {*results}:
        _write_dims(results[name], axes, dims if write else None)
    return wrong


def _keys(node: onnx.NodeProto, types: Types) -> int | str | None:
    """The number of an Attention's keys, None if not known: the scores have 0 by inference then."""
    names = [node.input[1], *filter(None, node.input[4:5])]
    first, *past = [(dims_of(types.get(name)) or [None, None])[-2] for name in names]
    if not past:
        return first
    return first + past[0] if isinstance(first, int) and isinstance(past[0], int) else None


def same_pads(
    size: int, kernel: int, stride: int, auto_pad: str, *, conv: bool = False
) -> tuple[int, int]:
    """What SAME_UPPER or SAME_LOWER adds before and behind one axis of a pool, or of a Conv.

    Negative amounts, which cut, stand where the stride is larger than the kernel: onnxruntime
    halves them towards zero, and cuts one less in front of a Conv.
    """
    total = (-(-size // stride) - 1) * stride + kernel - size
    twice = total + (auto_pad != "SAME_UPPER") + (conv and total < 0)
    before = twice // 2 if twice >= 0 else -(-twice // 2)
    return before, total - before


def pooled(
    size: int, kernel: int, stride: int, pads: tuple[int, int], dilation: int, auto_pad: str,
    *, ceil: bool,
) -> tuple[int, tuple[int, int]]:  # fmt: skip
    """The number of a pool's windows along one axis, and the pads before and behind the image."""
    if auto_pad.startswith("SAME"):
        pads = same_pads(size, kernel, stride, auto_pad)
    elif auto_pad == "VALID":
        pads = 0, 0
    last = size + sum(pads) - dilation * (kernel - 1) - 1
    if not ceil:
        return (last // stride if last >= 0 else -(-last // stride)) + 1, pads
    count = -(-last // stride) + 1
    return count - ((count - 1) * stride >= size + pads[0]), pads


def actual_dims(
    node: onnx.NodeProto,
    read: Sequence[Dims | None],
    inferred: Dims | None,
    values: Sequence[Array | None],
) -> list[int | str | None] | None:
    """The sizes of the outputs of a node; None where inference has them right.

    `read` are the sizes of the node's inputs, `inferred` is what ONNX's inference says of the first
    output, and `values` are the inputs as far as they are constant.
    """
    x = read[0]
    if x is None or not _is_concerned(node):
        return None
    if node.op_type == "NonZero":  # of a scalar
        return None if x else [1, None]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Einsum":
        y = _einsum(attributes.get("equation", b"").decode(), read)
        return None if y == inferred else y
    if inferred is not None and len(inferred) != len(x):
        return None
    if node.op_type in ("PRelu", "Attention"):
        mask = next(iter(read[3:]), None) or [1]
        rows = [d if isinstance(d, int) else 1 for d in mask[-2:-1]]
        pair = (x, read[1]) if node.op_type == "PRelu" else (inferred or x, [*rows, 1])
        y = _broadcast(*pair)
        return None if y == inferred else y
    x, *read = ([d if isinstance(d, int) else None for d in dims or ()] for dims in read)
    if node.op_type in ("Resize", "Upsample"):
        y = _resized(node, x, attributes, values)
    else:
        y = _windows(node, (x, *read), attributes, inferred)
    if y is None:
        return None
    if inferred is None:
        return y
    merged = [a if b is None else b for a, b in zip(inferred, y, strict=True)]
    return None if merged == [*inferred] else merged


def _broadcast(x: Dims, slope: Dims | None) -> list[int | str | None] | None:
    """The sizes of x and a slope together; None where the slope has more axes.

    A symbol of x may be 1: the slope's size counts, or, where it is another symbol, none is known.
    """
    if slope is None or len(slope) > len(x):
        return None
    aligned = [*[1] * (len(x) - len(slope)), *slope]
    pairs = zip(x, aligned, strict=True)
    return [
        d if s in (1, d) or (isinstance(d, int) and d != 1)
        else s if d == 1 or isinstance(s, int)
        else None
        for d, s in pairs
    ]  # fmt: skip


def _resized(
    node: onnx.NodeProto,
    x: Sequence[int | None],
    attributes: Mapping[str, Any],
    values: Sequence[Array | None],
) -> list[int | str | None] | None:
    place = 2 if node.op_type == "Resize" and len(node.input) > 2 else 1  # opset 10 has no roi
    scales, sizes = (values[i] if i < len(values) else None for i in (place, 3))
    if node.op_type == "Upsample" and "scales" in attributes:  # opset 7
        scales = np.array(attributes["scales"], np.float32)
    axes = [*attributes.get("axes", range(len(x)))]
    if not all(-len(x) <= a < len(x) for a in axes):
        return None
    policy = attributes.get("keep_aspect_ratio_policy", b"stretch")
    factors = np.ones(len(x), np.float32)
    if scales is not None and scales.size == len(axes) and (scales > 0).all():
        factors[axes] = scales.reshape(-1)
        more = 0.0
    elif sizes is not None and sizes.size == len(axes) and policy != b"stretch":
        lengths = [x[a] for a in axes]
        if not all(lengths):
            return None
        ratios = sizes.reshape(-1).astype(np.float32) / np.array(lengths, np.float32)
        factors[axes] = ratios.min() if policy == b"not_larger" else ratios.max()
        more = 0.5  # to the nearest integer, the larger one of two
    else:
        return None
    products = [None if d is None else np.float32(d) * f for d, f in zip(x, factors, strict=True)]
    return [None if p is None or not np.isfinite(p) else int(float(p) + more) for p in products]


def _einsum(equation: str, read: Sequence[Dims | None]) -> list[int | str | None] | None:
    """The sizes of a result; None where the axes of an operand are not known."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    sizes: dict[str | int, int | str | None] = {}
    dotted = 0
    for term, dims in zip(left.split(","), read, strict=False):
        before, dots, after = term.partition("...")
        if dims is None and dots:
            return None
        more = len(dims or ()) - len(before) - len(after) if dots else 0
        dotted = max(dotted, more)
        labels = [*before, *range(-more, 0), *after]
        for label, size in zip(labels, dims or [None] * len(labels), strict=False):
            sizes[label] = (_broadcast([sizes.get(label, 1)], [size]) or [None])[0]
    if not arrow:
        right = "..." + "".join(sorted(c for c in {*left} - {*",."} if left.count(c) == 1))
    before, dots, after = right.partition("...")
    results = [*before, *(range(-dotted, 0) if dots else ()), *after]
    return [sizes[label] for label in results] if {*results} <= {*sizes} else None


def _windows(
    node: onnx.NodeProto,
    read: Sequence[Sequence[int | None]],
    attributes: Mapping[str, Any],
    inferred: Dims | None,
) -> list[int | str | None] | None:
    x = read[0]
    rank = len(x) - 2
    auto = attributes.get("auto_pad", b"NOTSET").decode()
    strides = attributes.get("strides") or [1] * rank
    dilations = attributes.get("dilations") or [1] * rank
    if rank < 1 or len(strides) != rank or min(strides) < 1:
        return None
    if node.op_type == "ConvTranspose":
        if "output_shape" in attributes and inferred is not None:
            return [*inferred[:2], *attributes["output_shape"][-rank:]]
        if not auto.startswith("SAME") or inferred is None:
            return None
        kernel = attributes.get("kernel_shape") or list(read[1][2:])
        more = attributes.get("output_padding") or [0] * rank
        if not len(kernel) == len(dilations) == len(more) == rank:
            return None
        axes = zip(x[2:], kernel, strides, dilations, more, strict=True)
        sizes = [
            None if n is None or k is None else min((n - 1) * s + (k - 1) * d + 1 + m, n * s)
            for n, k, s, d, m in axes
        ]
        return [*inferred[:2], *sizes]
    kernel = attributes.get("kernel_shape") or []
    pads = attributes.get("pads") or [0] * (2 * rank)
    if not len(kernel) == len(dilations) == len(pads) // 2 == rank:
        return None
    if min(*kernel, *dilations) < 1:
        return None
    last = node.op_type == "NhwcMaxPool" or bool(attributes.get("channels_last", 0))
    ceil = bool(attributes.get("ceil_mode", 0))
    y: list[int | str | None] = list(x)
    for i, axis in enumerate(range(1, rank + 1) if last else range(2, rank + 2)):
        size, around = x[axis], (pads[i], pads[rank + i])
        if size is not None:
            step = (kernel[i], strides[i], around, dilations[i], auto)
            y[axis] = pooled(size, *step, ceil=ceil)[0]
    return y


# ---- models ------------------------------------------------------------------------------------


def _is_concerned(node: onnx.NodeProto) -> bool:
    domain = "" if node.domain == "ai.onnx" else node.domain
    return (domain, node.op_type) in _CONCERNED and bool(node.input) and bool(node.output)


def bodies_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [g for a in node.attribute if a.type in _GRAPHS for g in (a.g, *a.graphs)]


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for body in bodies_of(node):
            yield from nodes_of(body)


def dims_of(info: onnx.TypeProto | None) -> list[int | str | None] | None:
    if info is None or not info.tensor_type.HasField("shape"):
        return None
    dims = info.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]


def _write_dims(info: onnx.TypeProto, axes: Sequence[int], dims: Dims | None) -> None:
    """Write the sizes of some axes into a type, or leave them open without `dims`."""
    shape = info.tensor_type.shape
    for axis in axes if info.tensor_type.HasField("shape") else ():
        shape.dim[axis].Clear()
        size = None if dims is None else dims[axis]
        if isinstance(size, int):
            shape.dim[axis].dim_value = size
        elif size is not None:
            shape.dim[axis].dim_param = size


class _Walk:
    """A walk over the nodes of a model to sizes that inference has wrong.

    `opened` are the types, by name, of the outputs of nodes that nothing wrong precedes, with their
    wrong sizes left open. `changed` are the names of what depends on them. Outputs of the graph
    that are `declared` may have another number of axes, which inference leaves as it is.
    """

    def __init__(self, opsets: Mapping[str, int], declared: Container[str]) -> None:
        self.opsets, self.declared = opsets, declared
        self.opened: dict[str, onnx.TypeProto] = {}
        self.changed: set[str] = set()

    def graph(self, graph: onnx.GraphProto, outside: Types, constants: Tensors) -> None:
        tensor_type = onnx.helper.make_tensor_type_proto
        types = {**outside, **{t.name: tensor_type(t.data_type, t.dims) for t in graph.initializer}}
        types |= {v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output)}
        held = {**constants, **{t.name: t for t in graph.initializer}}
        for node in graph.node:
            if node.op_type == "Constant":
                held.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
            for body in bodies_of(node):
                self.graph(body, types, held)
            if self.changed.intersection(_read(node)):
                self.changed.update(node.output)
            elif _is_concerned(node) or any(name in self.declared for name in node.output):
                self._node(node, types, held)

    def _node(self, node: onnx.NodeProto, types: Types, data: Tensors) -> None:
        inferred = {name: onnx.TypeProto() for name in node.output if name in types}
        for name, proto in inferred.items():  # which a declared shape may have made right
            proto.CopyFrom(types[name])
        read = {name: types[name] for name in node.input if name in types}
        typed = set(node.input) <= {"", *read}
        version = self.opsets.get(node.domain, 1)
        if typed and onnx.defs.has(node.op_type, version, node.domain):
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
            tensors = {name: data[name] for name in node.input if name in data}
            opsets = [onnx.helper.make_opsetid(*each) for each in self.opsets.items()]
            with contextlib.suppress(
                onnx.shape_inference.InferenceError, onnx.checker.ValidationError
            ):
                inferred = onnx.shape_inference.infer_node_outputs(
                    schema, node, read, tensors, opset_imports=opsets, ir_version=10
                )
        wrong = correct_types(node, types, data, inferred)
        for name in node.output:
            dims, actual = dims_of(types.get(name)), dims_of(inferred.get(name))
            if dims is None:
                continue
            other_rank = actual is not None and len(dims) != len(actual)
            if other_rank or any(i < len(dims) and dims[i] is not None for i in wrong):
                self.opened[name] = onnx.TypeProto()
                self.opened[name].CopyFrom(inferred[name] if other_rank else types[name])
                _write_dims(self.opened[name], wrong, None)
                self.changed.update(node.output)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for body in bodies_of(node):
        for inner in body.node:
            yield from _read(inner)
        yield from (v.name for v in body.output)


def _settle(graph: onnx.GraphProto, types: Types, changed: Collection[str]) -> None:
    """Write types into a graph for inference to start from; forget the shapes that follow them."""
    infos = {v.name: v for v in (*graph.value_info, *graph.output)}
    for node in graph.node:
        for body in bodies_of(node):
            _settle(body, types, changed)
        for name in node.output:
            if name in types:
                info = infos.get(name) or graph.value_info.add(name=name)
                info.type.CopyFrom(types[name])
                if not node.domain.startswith(_SETTLED):
                    node.domain = _SETTLED + node.domain
            elif name in changed and name in infos:
                infos[name].type.tensor_type.ClearField("shape")
