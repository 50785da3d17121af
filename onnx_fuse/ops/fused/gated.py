"""Gated units (GLU, ReGLU, GEGLU, SwiGLU): one product, whose one half lets through the other.

    y = act(z[..., :N]) * z[..., N:]   GateFirstGemm<Act>      z = norm(x) · w + c
    y = z[..., :N] * act(z[..., N:])   GateLastGemm<Act>

with x [..., K], w [K, 2N], c broadcastable to [..., 2N], and the norm the identity,
LayerNormalization or RMSNormalization over the last axis. Exporters write them as two products of
one x (Llama, T5), whose weights are put side by side, or as one whose result is split (diffusers).

Training keeps the parts: their gradients have kernels, and an operator of a fused file that is to
be trained becomes its parts again.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, rank
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.activations import ACTIVATIONS, Activation
from onnx_fuse.ops.fused.activations import Tail, activation_of
from onnx_fuse.ops.fused.gemm import PROLOGUES, Parts, merged_bias, packed_many, product_parts
from onnx_fuse.ops.fused.norm import canonical_norm, norm_attributes
from onnx_fuse.ops.opdef import OpDef, fused_op, register
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    consumers,
    cut_of,
    is_additive_identity,
    is_initializer,
    sole_consumer,
    typed,
)
from onnx_fuse.reasons import Reason

NAME = "GatedGemm"
PLACES = {"GateFirst": ("z, u", "g, u"), "GateLast": ("u, z", "u, g")}
"""By the gate's half: the halves of the product in order, and the factors of y; g = act(z)."""


def _define(prefix: str, place: str, activation: Activation) -> OpDef:
    prologue = PROLOGUES[prefix]
    name = str(FusedName.make("Gemm", activation.name, norm=prefix, place=place))
    inputs = ", ".join(("x", *prologue.inputs, "w", "c"))
    halves, factors = PLACES[place]
    text = (
        f"{prologue.text}  m = MatMul ({'n' if prefix else 'x'}, w)\n  both = m + c\n"
        f"  {halves} = Split <axis: int = -1, num_outputs: int = 2> (both)\n"
        f"  g = {activation.forward}\n  y = Mul ({factors})"
    )
    return fused_op(name, [*prologue.attributes, activation.attributes], inputs, "y", text)


OPS = {
    str(name): name
    for prefix in PROLOGUES
    for place in PLACES
    for name in (FusedName.make("Gemm", a, norm=prefix, place=place) for a in ACTIVATIONS)
}
"""Every gated product, with what its name says."""
register(*(_define(op.norm, op.place, ACTIVATIONS[op.activation]) for op in OPS.values()))


@dataclass(frozen=True)
class _Unit:
    """A gated unit before it is one operator.

    `products` are the one that makes both halves, or the gate's and the other's.
    """

    products: tuple[Parts, ...]
    norm: dict[str, object]
    place: str
    gate: Tail
    nodes: tuple[ir.Node, ...]


def _gate_activation(value: ir.Value | None) -> Tail | None:
    node = value.producer() if value is not None else None
    z = node.inputs[0] if node is not None and node.inputs else None
    if node is None or z is None:
        return None
    if activation := activation_of(node):
        return Tail(z, (), node, *activation)
    parts = product_parts(node)
    if parts is None or not parts.activation:
        return None
    row = ACTIVATIONS[parts.activation]
    attributes = {k: a.value for k, a in node.attributes.items() if f"{k}:" in row.attributes}
    return Tail(z, (), node, row, attributes)


def _recognize(rw: Rewriter, node: ir.Node) -> bool:
    """Act on a Mul; or, in training, on an operator of this family."""
    if node.domain == FUSE:
        return rw.training and node.op_type in OPS and _apart(rw, node)
    if rw.training or node.op_type != "Mul" or node.domain or len(node.inputs) != 2:
        return False
    for factor, let in (node.inputs, reversed(node.inputs)):
        gate = _gate_activation(factor)
        if gate is None or let is None or factor is let:
            continue
        unit_of = _of_halves if product_parts(gate.node) is None else _of_two_products
        if (unit := unit_of(rw, node, gate, let)) is not None:
            return _fuse(rw, node, unit)
    return False


# ---- one product whose result is split -------------------------------------------------------


def _of_halves(rw: Rewriter, node: ir.Node, gate: Tail, let: ir.Value) -> _Unit | None:
    first, second = cut_of(gate.z), cut_of(let)
    if first is None or second is None:
        return None
    joined = first.source
    product = joined.producer()
    plain = _plain(product)
    if joined is not second.source or product is None or plain is None:
        return None
    nodes = (product, *dict.fromkeys((first.node, second.node)), gate.node, node)
    width, size = dim(joined, -1), rank(joined)
    columns = size is not None and {first.axis, second.axis} == {size - 1}
    half = None if width is None or width % 2 or not columns else width // 2
    pieces = {dim(piece, -1) for piece in (gate.z, let)}
    if half is None or {first.start, second.start} != {0, half} or pieces != {half}:
        return rw.refuse(NAME, nodes, Reason("gate-halves")) or None
    readers = {
        joined: {first.node, second.node},
        gate.z: {gate.node},
        let: {node},
        gate.node.outputs[0]: {node},
    }
    if any(set(consumers(v)) != nodes or v.is_graph_output() for v, nodes in readers.items()):
        return rw.refuse(NAME, nodes, Reason("other-readers", what="what is split")) or None
    place = "GateFirst" if first.start == 0 else "GateLast"
    return _Unit((plain,), norm_attributes(product), place, gate, nodes)


def _plain(node: ir.Node | None) -> Parts | None:
    """The parts of a product of a matrix without an activation."""
    parts = product_parts(node) if node is not None else None
    return parts if parts and not parts.activation and rank(parts.w) == 2 else None


# ---- two products of one x -------------------------------------------------------------------


def _of_two_products(rw: Rewriter, node: ir.Node, gate: Tail, let: ir.Value) -> _Unit | None:
    up = let.producer()
    first, second = product_parts(gate.node), _plain(up)
    if up is None or first is None or second is None or first.turned:
        return None
    same = len(first.head) == len(second.head) and all(
        a is b for a, b in zip(first.head, second.head, strict=True)
    )
    same = same and norm_attributes(gate.node) == norm_attributes(up)
    if not same or first.prefix != second.prefix:
        return None
    nodes = (gate.node, up, node)
    if gate.node.graph is not node.graph or up.graph is not node.graph:
        return None
    if not (is_initializer(first.w) and is_initializer(second.w)):
        return rw.refuse(NAME, nodes, Reason("computed", what="its weights")) or None
    if rank(first.w) != 2 or rank(second.w) != 2:
        return None
    widths = {dim(first.w, 1), dim(second.w, 0 if second.turned else 1)}
    if len(widths) > 1 or None in widths:
        return rw.refuse(NAME, nodes, Reason("gate-widths")) or None
    if sole_consumer(gate.node.outputs[0]) is not node or sole_consumer(let) is not node:
        reason = Reason("other-readers", what="one of its two matrix multiplications")
        return rw.refuse(NAME, nodes, reason) or None
    for w, c in ((first.w, first.c), (second.w, second.c)):
        row_of = c is None or is_additive_identity(c) or (is_initializer(c) and rank(c) == 1)
        if not row_of or (c is not None and rank(c) == 1 and dim(c, 0) not in widths):
            return rw.refuse(NAME, nodes, Reason("bias-shape")) or None
        if packed_many(w) or (c is not None and packed_many(c)):
            return rw.refuse(NAME, nodes, Reason("gate-merged")) or None
    if first.w is second.w:
        return rw.refuse(NAME, nodes, Reason("gate-weight")) or None
    return _Unit((first, second), norm_attributes(gate.node), "GateFirst", gate, nodes)


# ---- rewriting -------------------------------------------------------------------------------


def _fuse(rw: Rewriter, node: ir.Node, unit: _Unit) -> bool:
    parts = unit.products
    prefix, head = parts[0].prefix, parts[0].head
    if prefix and any(
        (norm := canonical_norm(peer)) is not None and (norm.x, *norm.affine) == head
        for peer in consumers(head[0])
    ):
        # unfused, the product returns the normalized rows for the other readers
        return rw.refuse(NAME, unit.nodes, Reason("other-readers", what="its norm"))
    op = Builder()
    weights = [_upright(rw, op, part.w) if part.turned else part.w for part in parts]
    if len(parts) == 1:
        (w,), c = weights, parts[0].c
        c = c if c is not None else rw.zeros(node.outputs[0])
    else:
        stem = "+".join(str(w.name) for w in weights)
        w = rw.pack(op, weights, None, 1, stem)
        widths = [dim(v, 1) or 0 for v in weights]
        c = merged_bias(op, rw, [part.c for part in parts], widths, weights[0], stem)
    name = FusedName.make("Gemm", unit.gate.activation.name, norm=prefix, place=unit.place)
    attributes = {**unit.norm, **unit.gate.attributes}
    y = op.node(str(name), [*head, w, c], domain=FUSE, attributes=attributes)
    return rw.replace(node, op, [node.outputs[0]], [typed(y, node.outputs[0])])


def _upright(rw: Rewriter, op: Builder, w: ir.Value) -> ir.Value:
    """A weight [columns, K] as [K, columns]."""
    if is_initializer(w):
        return rw.pack(op, [w], [1, 0], None, f"{w.name}.T")
    return op.Transpose(w)


def written_out(op: Builder, node: ir.Node, columns: int) -> ir.Value:
    """A gated product as what it was made of, but for its norm, by nodes of `op`.

    `columns`: of its weight.
    """
    name = OPS[node.op_type]
    y = node.outputs[0]
    *head, w, c = node.inputs
    shape = None if y.shape is None else [*y.shape[:-1], columns]
    if not name.norm and is_additive_identity(c):
        both = op.MatMul(*head, w)
    else:
        plain = str(FusedName.make("Gemm", norm=name.norm))
        both = op.node(plain, [*head, w, c], domain=FUSE, attributes=norm_attributes(node))
    widths = op.constant([columns // 2] * 2)
    halves = list(op.Split(typed(both, y, shape), widths, axis=-1, outputs=2))
    at = 0 if name.place == "GateFirst" else 1
    for half in halves:
        typed(half, y, y.shape)
    halves[at] = ACTIVATIONS[name.activation].alone(op, halves[at], node)
    typed(halves[at], y, y.shape)
    return typed(op.Mul(*halves), y)


def _apart(rw: Rewriter, node: ir.Node) -> bool:
    """The form that training uses: the product, and the gate as nodes of its own."""
    columns = dim(node.inputs[-2], 1)
    if columns is None:
        return False
    op = Builder()
    return rw.replace(node, op, [node.outputs[0]], [written_out(op, node, columns)])


RULE = Rule(NAME, 2, ("Mul", *OPS), _recognize, conditions="readers weights types ranks body")
