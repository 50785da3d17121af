"""ONNX's own inference of types and shapes, as far as it can be believed.

What it follows of the entries of shapes is a list without a rank (onnx 1.23): it reads a Slice
whose start is not known as one from 0, rows of a matrix as entries, and casts as if they kept every
number. Where that may be wrong, an Identity, which it does not look through, keeps the entries from
those who read them; `entries` knows these graphs better. Its C++ ends the process where a Slice
meets a negative size, as a window longer than its image makes, or some operators an operand without
a type: such graphs are inferred in a child.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from onnx_fuse.errors import ModelError
from onnx_fuse.guard import Crash, in_child
from onnx_fuse.ir.actual_sizes import bodies_of, nodes_of

_INTEGERS = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
_BARRIER = "onnx_fuse entries of "


def inferred(proto: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto:
    """The model with the types and shapes of its values.

    Raises what onnx.shape_inference raises, and ModelError where it would end the process.
    """
    for node in nodes_of(proto.graph):  # onnx forgets that STFT is onesided by default
        if node.op_type == "STFT" and not any(a.name == "onesided" for a in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))
    barred = data_prop and _keep_entries(proto.graph, {}, {})
    try:
        result = _infer(proto, data_prop=data_prop)
    finally:
        if barred:
            _without_barriers(proto.graph)
    if barred:
        _without_barriers(result.graph)
    return result


def _infer(proto: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto:
    def infer() -> bytes:
        result = onnx.shape_inference.infer_shapes(proto, data_prop=data_prop)
        return bytes(result.SerializeToString())

    untyped = _that_read_no_type(proto.graph)
    if not untyped and not _may_crash_inference(proto.graph, data_prop=data_prop):
        return onnx.shape_inference.infer_shapes(proto, data_prop=data_prop)
    try:
        return onnx.ModelProto.FromString(in_child(infer, silent=True))
    except (Crash, ModelError) as error:  # it reads sizes outside its memory, a huge one at times
        for node in untyped:  # once more without them: only custom operators' results lack a type
            node.domain = _UNREAD
        if untyped:
            proto.opset_import.add(domain=_UNREAD, version=1)
            return _infer(proto, data_prop=data_prop)
        raise ModelError(  # onnxruntime dies of it, too, when it loads the graph
            f"ONNX's shape inference crashed on this graph ({error}): a Slice or GatherND reads a "
            "size below 0, as a window longer than its input makes, or a size that is asked for"
        ) from error


_UNREAD = "onnx_fuse.unread"
_READ_TYPES = frozenset(
    ("EyeLike", "RegexFullMatch", "DictVectorizer", "LabelEncoder", "TreeEnsemble")
)
"""Operators whose inference reads the type of their operand without asking whether it has one."""


def _that_read_no_type(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Such nodes whose operand may have no type, as the result of a custom operator has none."""
    nodes = [n for n in nodes_of(graph) if n.op_type in _READ_TYPES and n.domain != _UNREAD]
    if not nodes:
        return []
    graphs = [graph, *(body for node in nodes_of(graph) for body in bodies_of(node))]
    typed = {t.name for g in graphs for t in g.initializer}
    infos = (info for g in graphs for info in (*g.input, *g.value_info, *g.output))
    typed |= {info.name for info in infos if info.type.WhichOneof("value")}
    return [node for node in nodes if not node.input or node.input[0] not in typed]


_SHRINKS = frozenset(
    (
        *("Conv", "ConvInteger", "QLinearConv", "ConvTranspose", "DeformConv", "AveragePool"),
        *("MaxPool", "LpPool", "MaxUnpool", "MaxRoiPool", "RoiAlign", "Col2Im", "Pad"),
        *("CenterCropPad", "AffineGrid", "DFT", "STFT", "Resize", "Upsample"),
    )
)
"""Operators that may make a size below 0 of good ones."""
_ASKED = {"ConstantOfShape": 0, "Expand": 1, "OneHot": 1, "Split": 1, "Tile": 1, "TopK": 1}
"""Operators that may be asked for a size below 0, and the place of the input that does it."""


def _may_crash_inference(graph: onnx.GraphProto, *, data_prop: bool) -> bool:
    nodes = list(nodes_of(graph))
    kinds = {node.op_type for node in nodes}
    if kinds.isdisjoint(("Slice", "GatherND")):
        return False
    if not kinds.isdisjoint(_SHRINKS):
        return True
    asked = [n for n in nodes if n.op_type in _ASKED]
    if not data_prop or not asked:
        return bool(asked)
    makers = {name: node for node in nodes for name in node.output}
    todo = [n.input[_ASKED[n.op_type]] for n in asked if len(n.input) > _ASKED[n.op_type]]
    seen = set[str]()
    while todo:
        name = todo.pop()
        maker = makers.get(name)
        if maker is None or name in seen:
            continue
        seen.add(name)
        if maker.op_type in ("Sub", "Neg"):  # all else makes no size below 0 of good ones
            return True
        if maker.op_type in _FOLLOWED:
            todo += maker.input if maker.op_type in _ALIKE else maker.input[:1]
    return False


_ALIKE = ("Add", "Sub", "Mul", "Concat")
_FOLLOWED = frozenset((*_ALIKE, "Gather", "Slice", "Cast", "CastLike", "Squeeze", "Unsqueeze"))
_TOO_MANY = 2  # axes: of what has them, a list of entries says too little


def _keep_entries(
    graph: onnx.GraphProto, outside: Mapping[str, int], constants: Mapping[str, int]
) -> bool:
    """Bar entries from the readers of nodes that misread them; whether there are any.

    `outside` has the ranks of the values around a body whose entries inference follows, and
    `constants` the numbers of entries of those that are constants.
    """
    ranks, lengths = dict(outside), dict(constants)
    for tensor in graph.initializer:
        lengths[tensor.name] = math.prod(tensor.dims)
        if tensor.data_type in _INTEGERS:
            ranks[tensor.name] = len(tensor.dims)
    barred: list[int] = []
    inner = False
    for place, node in enumerate(graph.node):
        kind = node.op_type
        if kind == "Constant":
            held = [a.t for a in node.attribute if a.name == "value"]
            lengths[node.output[0]] = math.prod(held[0].dims) if held else 1
            ranks[node.output[0]] = len(held[0].dims) if held else 1
        elif kind in ("Shape", "Size"):
            ranks[node.output[0]] = 1 if kind == "Shape" else 0
        elif kind in _FOLLOWED and not node.domain:
            rank = _rank_followed(node, ranks, lengths)
            if rank is not None and rank < _TOO_MANY:
                ranks[node.output[0]] = rank
            elif kind == "Slice" or node.input[0] in ranks:
                barred.append(place)
        elif node.attribute:
            for body in bodies_of(node):
                inner = _keep_entries(body, ranks, lengths) or inner
    for place in reversed(barred):
        node = graph.node[place]
        name = f"{_BARRIER}{node.output[0]}"
        graph.node.insert(
            place + 1, onnx.NodeProto(op_type="Identity", input=[name], output=node.output[:1])
        )
        node.output[0] = name
    return inner or bool(barred)


def _rank_followed(
    node: onnx.NodeProto, ranks: Mapping[str, int], lengths: Mapping[str, int]
) -> int | None:
    """The rank of a node's result whose entries inference follows rightly, if it does."""
    kind = node.op_type
    if kind == "Slice":  # a vector's length, if nothing else, is followed wherever it comes from
        fixed = all(name in lengths for name in node.input[1:] if name)
        return ranks.get(node.input[0], 1) if fixed else None
    if node.input[0] not in ranks:
        return None
    rank = ranks[node.input[0]]
    if kind in _ALIKE:
        return max(ranks.get(name, 1) for name in node.input)
    if rank >= _TOO_MANY:
        return None
    if kind == "Gather":
        return ranks.get(node.input[1])
    if kind in ("Cast", "CastLike"):
        to = next((a.i for a in node.attribute if a.name == "to"), 0)
        return rank if to in _INTEGERS else None
    if kind == "Squeeze":
        return 0  # of one entry
    axes = next((len(a.ints) for a in node.attribute if a.name == "axes"), None)
    if axes is None:
        axes = lengths.get(node.input[1]) if len(node.input) > 1 else None
    return None if axes is None else rank + axes


def _without_barriers(graph: onnx.GraphProto) -> None:
    for place in reversed(range(len(graph.node))):
        node = graph.node[place]
        if node.op_type == "Identity" and node.input[0].startswith(_BARRIER):
            graph.node[place - 1].output[0] = node.output[0]
            del graph.node[place]
        else:
            for body in bodies_of(node):
                _without_barriers(body)
