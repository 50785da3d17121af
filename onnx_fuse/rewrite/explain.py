"""Why an operator stayed: each norm, attention, activation, residual sum and layout change left.

A rule that came close has recorded its reason (`Rewriter.refuse`), which is given first. Whatever
else of these classes the optimized graph holds gets one by its class and its neighbours, so that
nothing stays without a word; equal reasons are one entry with all its nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_fuse.ir.build import rank
from onnx_fuse.ir.constants import FUSE, base_name
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ir.traits import REARRANGES
from onnx_fuse.ops.activations import ACTIVATIONS, OPERATORS
from onnx_fuse.ops.fused.activations import activation_of
from onnx_fuse.ops.fused.gated import NAME as GATED
from onnx_fuse.ops.fused.layerscale import NAME as LAYER_SCALE
from onnx_fuse.ops.fused.layerscale import NAME_16 as LAYER_SCALE_16
from onnx_fuse.ops.fused.layerscale import WIDE, scale_of
from onnx_fuse.ops.rules import (
    Refusal,
    attribute,
    constant_ints,
    consumers,
    is_constant,
    is_float,
    label,
    other_operand,
    producer,
    scalar,
)
from onnx_fuse.reasons import Reason


@dataclass(frozen=True)
class Leftover:
    """Nodes that stay as they are for one reason, which begins with their operator's name."""

    nodes: tuple[str, ...]
    reason: str
    code: str


_ROW_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_OTHER_NORMS = (
    *("GroupNormalization", "InstanceNormalization", "LpNormalization", "LRN", "GroupNorm"),
    *("MeanVarianceNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    *("EmbedLayerNormalization", "SkipGroupNorm"),
)
_ATTENTION = (
    *("Attention", "MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention"),
    *("PackedAttention", "PackedMultiHeadAttention", "FlexAttention", "LinearAttention"),
)
_ACTIVATIONS = (
    *OPERATORS,
    *("Swish", "FastGelu", "BiasGelu", "Celu", "PRelu", "Softsign", "ThresholdedRelu", "Clip"),
    "Erf",
)
_LAYOUT = (*REARRANGES, "Pad", "DepthToSpace", "SpaceToDepth")
_VIEWS = (*_LAYOUT, "Slice", "Gather", "Concat", "Split", "Expand", "Identity", "Cast", "Dropout")
_SCALED = ("MatMul", "Gemm", "LayerNormGemm", "RMSNormGemm", "Conv")
_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
_KINDS = {
    "Gemm": "a Gemm", "MatMul": "a MatMul", "Conv": "a convolution", "Norm": "a norm",
    "Sdpa": "attention", "Attention": "attention", "Softmax": "a softmax", "Pool": "pooling",
    "Reduce": "a reduction",
}  # fmt: skip
_MAX_CLIMB = 64
_MAX_SEEN = 256


def explain(
    graph: ir.Graph, refusals: Sequence[Refusal], off: Collection[str], *, training: bool
) -> list[Leftover]:
    """The reasons why nodes were not fused, those of the most nodes first.

    `refusals` are the rules' own; `off` names the fusions that level or user turned off.
    """
    nodes = list(ir.traversal.RecursiveGraphIterator(graph))
    left = {(label(node), node.op_type): node for node in nodes}
    by_reason: dict[tuple[str, Reason], dict[str, None]] = {}
    explained: set[ir.Node] = set()
    for refusal in refusals:
        ops = refusal.ops or (refusal.fusion,) * len(refusal.nodes)
        stays = [left[key] for key in zip(refusal.nodes, ops, strict=True) if key in left]
        if stays or not refusal.ops:  # an operator refused as a whole names no node
            explained.update(n for n in stays if _reason_of(n) is not None)
            reason = " and ".join(dict.fromkeys(ops)), refusal.reason
            by_reason.setdefault(reason, {}).update(dict.fromkeys(refusal.nodes))
    for node in nodes:
        why = _reason_of(node)
        if why is not None and node not in explained:
            reason = name(node), why(node, off, training)
            by_reason.setdefault(reason, {})[label(node)] = None
    groups = [
        Leftover(tuple(names), f"{ops}: {why}", why.code) for (ops, why), names in by_reason.items()
    ]
    return sorted(groups, key=lambda group: -len(group.nodes))


def name(node: ir.Node) -> str:
    """The operator as a user knows it, without the inner values that a fused one exposes."""
    base = base_name(node)
    return base if node.domain in ("", FUSE) else f"{node.domain}.{base}"


# ---- neighbours ------------------------------------------------------------------------------


def _readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read the numbers of `value`, directly or through views, nearest first."""
    readers: dict[ir.Node, None] = {}
    seen, todo = {value}, deque([value])
    while todo and len(seen) + len(readers) < _MAX_SEEN:
        for node in consumers(todo.popleft()):
            if node.op_type in _VIEWS and not node.domain:
                fresh = [v for v in node.outputs if v not in seen]
                seen.update(fresh)
                todo.extend(fresh)
            elif node.op_type != "Shape":
                readers[node] = None
    return list(readers)


def _source(value: ir.Value | None) -> ir.Node | None:
    node = value.producer() if value is not None else None
    for _ in range(_MAX_CLIMB):
        if node is None or node.op_type not in _VIEWS or node.domain or not node.inputs:
            break
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node


def _names(nodes: Sequence[ir.Node]) -> str:
    """`a Conv and a Mul`, at most three of them."""
    distinct = list(dict.fromkeys(name(node) for node in nodes))
    shown = [f"{'an' if op[0] in 'AEIOU' else 'a'} {op}" for op in distinct[:3]]
    if len(distinct) > 3:
        shown.append("others")
    return " and ".join(", ".join(shown).rsplit(", ", 1))


def _origin(source: ir.Node | None) -> str:
    return "an input of the model or a weight" if source is None else _names([source])


def _kinds(nodes: Sequence[ir.Node]) -> str:
    """`a product and a sum`: the same in fewer words, so that more sites have one reason."""
    return " and ".join(sorted(set(map(_kind, nodes))))


def _kind(node: ir.Node) -> str:
    op = name(node)
    for word, kind in _KINDS.items():
        if word in op:
            return kind
    return "a sum" if op in ("Add", "Sum") else "other arithmetic"


def _fused_parts(node: ir.Node) -> FusedName:
    return FusedName.of(node.op_type if node.domain == FUSE else "")


def _is_product(node: ir.Node | None) -> bool:
    return node is not None and (
        (node.op_type in _PRODUCTS and not node.domain)
        or _fused_parts(node).family in ("Gemm", "Conv", "ConvAdd")
    )


def _is_product_without_norm(node: ir.Node) -> bool:
    plain = node.op_type in ("MatMul", "Gemm") and not node.domain
    return plain or (_fused_parts(node).family == "Gemm" and not _fused_parts(node).norm)


# ---- a reason by class -----------------------------------------------------------------------


def _norm(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    if "Gemm" in off:
        return Reason("off", fusions="Gemm")
    axis = attribute(node, "axis", -1)
    if axis not in (-1, (rank(node.inputs[0]) or 0) - 1):
        return Reason("norm-axis", axis=axis)
    if node.domain not in ("", FUSE):
        return Reason("norm-kernel", op=name(node))
    readers = _readers(node.outputs[0])
    products = [n for n in readers if _is_product_without_norm(n)]
    if not products:
        with_norm = [n for n in readers if _is_product(n) and _fused_parts(n).norm]
        more = " (one of them is a matrix multiplication with another norm)" if with_norm else ""
        read_by = f"{_kinds(readers)}{more}" if readers else "outputs of the model alone"
        return Reason("norm-readers", readers=read_by)
    if not any(is_constant(n.inputs[1]) or n.domain for n in products):
        return Reason("computed", what="what its matrix multiplication multiplies by")
    views = dict.fromkeys(n.op_type for n in consumers(node.outputs[0]) if n.op_type in _VIEWS)
    if "Cast" in views:
        return Reason("norm-cast")
    reshapes = [n for n in consumers(node.outputs[0]) if n.op_type == "Reshape"]
    if any(constant_ints(n.inputs[1]) is None for n in reshapes):
        return Reason("unknown", what="the shape of a Reshape between it and the MatMul")
    if views:
        return Reason("norm-mixed", views=", ".join(views))
    return Reason("unfused", others=_names(products))


def _other_norm(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    if node.op_type == "InstanceNormalization" and "GroupNorm" in off:
        return Reason("off", fusions="GroupNorm")
    return Reason("norm-kernel", op=name(node))


def _batch_norm(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    if attribute(node, "training_mode", 0):
        return Reason("batch-training")
    if training:
        return Reason("trained", what="the convolution before it")
    if "FoldBatchNorm" in off:
        return Reason("off", fusions="FoldBatchNorm")
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    if source is None or not _is_product(source) or source.domain:
        wanted = "a Conv or Gemm that it could be folded into"
        return Reason("follows", source=_origin(source), wanted=wanted)
    if len(consumers(source.outputs[0])) > 1 or source.outputs[0].is_graph_output():
        return Reason("other-readers", what=f"the {name(source)} before it")
    if not all(map(is_constant, (*source.inputs[1:], *node.inputs[1:]))):
        what = f"its parameters, or the weight of the {name(source)} before it"
        return Reason("computed", what=what)
    return Reason("batch-fit", op=name(source))


def _attention(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    if "Sdpa" in off:
        return Reason("off", fusions="Sdpa")
    return Reason("no-operator")


def _softmax(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    readers = [n for n in _readers(node.outputs[0]) if n.op_type in ("MatMul", "Einsum")]
    if not readers:
        return Reason("no-attention")
    if "Sdpa" in off:
        return Reason("off", fusions="Sdpa")
    return Reason("unrecognized", source=_origin(_source(node.inputs[0])))


def _written_norm(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    return Reason("norm-axes")


def _activation(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    if "Gemm" in off and "Conv" in off:
        return Reason("off", fusions="Gemm, Conv")
    x = node.inputs[0]
    source = _source(x)
    if source is not None and node.op_type not in OPERATORS and activation_of(node) is None:
        return Reason("activation", op="it", names=", ".join(ACTIVATIONS))
    if source is None or not _is_product(source):
        wanted = "a matrix multiplication or convolution"
        return Reason("follows", source=_origin(source), wanted=wanted)
    if _is_gated_half(node, source):
        if not training and GATED in off:
            return Reason("gate-off", fusion=GATED)
        why = "its gradient reads both" if training else "other nodes read it, too"
        return Reason("gate", why=why)
    direct = x.producer() if x is not None else None
    if x is not None and (len(consumers(x)) > 1 or x.is_graph_output()):
        return Reason("other-readers", what=f"its input, from {_names([source])}")
    if direct is not source and direct is not None:
        return Reason("between", op=direct.op_type, above=_names([source]), below="it")
    if source.domain == FUSE and FusedName.of(source.op_type).activation:
        return Reason("has-activation", op=name(source))
    return Reason("unfused", others=f"the {name(source)} before it")


def _is_gated_half(node: ir.Node, source: ir.Node) -> bool:
    readers = [n for n in consumers(node.outputs[0]) if n.op_type == "Mul" and not n.domain]
    return any(_source(other_operand(n, node.outputs[0])) is source for n in readers)


def _residual(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    sources = [_source(v) for v in node.inputs]
    readers = _readers(node.outputs[0])
    if any(_fused_parts(n).norm for n in readers):
        return Reason("residual-norm")
    after = f"its readers are {_kinds(readers)}" if readers else "it is an output"
    plain = any(s is not None and name(s) in ("MatMul", "Gemm") for s in sources)
    where = "; a GPU computes it in the epilogue of the MatMul before it" if plain else ""
    return Reason("residual", after=after, where=where)


def _scale(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    if training:
        return Reason("trained", what="the weight")
    if (LAYER_SCALE if node.outputs[0].dtype in WIDE else LAYER_SCALE_16) in off:
        asked = "another --level" if node.outputs[0].dtype in WIDE else "--level 3"
        return Reason("layer-scale", option=asked)
    return Reason("other-readers", what="the matrix multiplication before it")


def _layout(node: ir.Node, off: Collection[str], training: bool) -> Reason:
    source, readers = _source(node.inputs[0]), _readers(node.outputs[0])
    heads = [n for n in (source, *readers) if n is not None and "Sdpa" in n.op_type]
    if heads:
        return Reason("heads")
    before = _kind(source) if source is not None else "an input or weight"
    after = _kinds(readers) if readers else "an output of the model"
    return Reason("layout", op=node.op_type, before=before, after=after)


_Why = Callable[[ir.Node, Collection[str], bool], Reason]


def _reason_of(node: ir.Node) -> _Why | None:
    """The function that explains a node of the classes above; None for any other node."""
    op, out = node.op_type, node.outputs[0] if node.outputs else None
    if out is None or (node.domain == FUSE and op not in ("RMSNormalization", *_ACTIVATIONS)):
        return None
    if op in _ROW_NORMS:
        return _norm
    if op in _OTHER_NORMS:
        return _other_norm
    if op == "BatchNormalization":
        return _batch_norm
    if op in _ATTENTION:
        return _attention
    if not is_float(out) or not node.inputs or (op != "Mul" and is_constant(node.inputs[0])):
        return None
    if op in ("Softmax", "LogSoftmax"):
        return _softmax
    if op in ("Sqrt", "Pow") and _is_root_of_mean(node):
        return _written_norm
    if op in _ACTIVATIONS:
        return _activation
    if op == "Add" and _is_residual_add(node):
        return _residual
    if op == "Mul" and (scaled := scale_of(node)) is not None:
        source = _source(scaled[0])
        return _scale if source is not None and name(source) in _SCALED else None
    return _layout if op in _LAYOUT else None


def _is_root_of_mean(node: ir.Node) -> bool:
    if node.op_type == "Pow" and scalar(node.inputs[1]) not in (0.5, -0.5):
        return False
    add = producer(node.inputs[0], "Add")
    return add is not None and any(producer(v, "ReduceMean") is not None for v in add.inputs)


def _is_residual_add(node: ir.Node) -> bool:
    a, b = node.inputs[0], node.inputs[1]
    if a is None or b is None or is_constant(a) or is_constant(b):
        return False
    if a.shape is None or b.shape is None:
        return True
    return len(a.shape) == len(b.shape) > 0 and all(
        x == y or not (isinstance(x, int) and isinstance(y, int))
        for x, y in zip(a.shape, b.shape, strict=True)
    )
