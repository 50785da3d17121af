"""Gemm, LayerNormGemm and RMSNormGemm, each with every activation; and their merging.

    y = act(z),  z = N(x) · w + c,   x [..., K], w [K, N], c broadcastable to [..., N]
with N the identity, LayerNormalization(x, scale, bias) or RMSNormalization(x, scale) over the last
axis. MatMul + Add is the body, so leading axes stay as they are, dynamic ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, given, rank
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.activations import ACTIVATIONS, Activation
from onnx_fuse.ops.fused import padded
from onnx_fuse.ops.fused.activations import Tail, tail_of
from onnx_fuse.ops.fused.gradients import gemm_grad, gemm_grad_def
from onnx_fuse.ops.fused.norm import (
    EPSILON,
    LAYER_NORM_TEXT,
    RMS_TEXT,
    STASH,
    Norm,
    canonical_norm,
    norm_attributes,
)
from onnx_fuse.ops.opdef import OpDef, fused_op, register
from onnx_fuse.ops.rules import (
    CONSTANT,
    PACKED,
    Rewriter,
    Rule,
    attribute,
    combined_with,
    consumer_views,
    consumers,
    freeze,
    is_additive_identity,
    is_constant,
    is_float,
    is_initializer,
    label,
    producer,
    replay_views,
    sole_reader,
    through_row_views,
    typed,
)
from onnx_fuse.reasons import Reason


@dataclass(frozen=True)
class Prologue:
    """What stands before the product: its inputs, attributes, and body text that computes `n`."""

    inputs: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    text: str = ""
    saves: tuple[str, ...] = ()


PROLOGUES = {
    "": Prologue(),
    "LayerNorm": Prologue(
        ("scale", "bias"), (EPSILON,), LAYER_NORM_TEXT.format(n="n", x="x"), ("mean", "rstd")
    ),
    "RMSNorm": Prologue(("scale",), (EPSILON, STASH), RMS_TEXT + "  n = nx * scale\n", ("rstd",)),
}


def _define(prefix: str, activation: Activation | None) -> OpDef:
    prologue = PROLOGUES[prefix]
    name = str(FusedName.make("Gemm", activation.name if activation else "", norm=prefix))
    inputs = ", ".join(("x", *prologue.inputs, "w", "c"))
    tail = f"  y = {activation.forward}\n" if activation else ""
    attributes = [*prologue.attributes, activation.attributes if activation else ""]
    text = f"  m = MatMul ({'n' if prefix else 'x'}, w)\n  {'z' if activation else 'y'} = m + c\n"
    saves = prologue.saves + (("z",) if activation else ())
    lines = prologue.text + text + tail
    return fused_op(name, attributes, inputs, "y", lines, saves=saves, grad=gemm_grad)


_VARIANTS = [(p, a) for p in PROLOGUES for a in (None, *ACTIVATIONS.values())]
register(*(_define(p, a) for p, a in _VARIANTS), *(gemm_grad_def(p, a) for p, a in _VARIANTS))


# ---- recognition -----------------------------------------------------------------------------


_LARGE = 1 << 20
"""Elements of a weight from which a gradient by parts, fifteen passes, costs more than the norm."""


@dataclass(frozen=True)
class _Site:
    """A product with a rank-2 weight, and all that can be fused around it."""

    x: ir.Value
    w: ir.Value
    transposed: bool
    c: ir.Value | None
    nodes: tuple[ir.Node, ...]
    norm: Norm | None = None
    views: tuple[ir.Node, ...] = ()
    tail: Tail | None = None
    moved: bool = False  # the product comes before `views`, whose added rows are `fill`
    fill: padded.Fill = None

    @property
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]


def _product(rw: Rewriter, node: ir.Node) -> _Site | None:
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or node.domain or not is_float(node.outputs[0]):
        return None
    if node.op_type == "MatMul":
        usable = rank(w) == 2 and (rank(x) or 0) >= 2
        return _Site(x, w, False, None, (node,)) if usable else None
    if attribute(node, "transA", 0) != 0:
        return rw.refuse("Gemm", [node], Reason("transposed")) or None
    scaled = [k for k in ("alpha", "beta") if attribute(node, k, 1.0) != 1.0]
    c = given(node, 2)
    if "alpha" in scaled or ("beta" in scaled and c is not None):
        return rw.refuse("Gemm", [node], Reason("scaled", what=" and ".join(scaled))) or None
    return _Site(x, w, attribute(node, "transB", 0) != 0, c, (node,))


def _with_bias(rw: Rewriter, site: _Site) -> _Site:
    """Take in an Add whose other operand is a bias: scalar, per column (N) or per row (M)."""
    reader, size = combined_with(site.output, "Add"), rank(site.output)
    if site.c is not None or reader is None:
        return site
    (add, c), width = reader, dim(site.output, -1)
    if size is None or width is None or (rank(c) or 0) > size:
        return site
    shape = [dim(c, i) for i in range(rank(c) or 0)]
    column = all(d == 1 for d in shape[:-1]) and (not shape or shape[-1] in (1, width))
    # A bias with a number for each row must have the product's rows: else it could add rows.
    row = bool(shape) and shape[-1] == 1 and is_constant(c)
    row &= all(d == 1 or d == dim(site.output, i - len(shape)) for i, d in enumerate(shape))
    if rank(c) is None or not (column or row):
        return site  # a residual or another full tensor: not a bias
    return replace(site, c=c, nodes=(*site.nodes, add))


def _with_activation(rw: Rewriter, site: _Site) -> _Site:
    tail, after = tail_of(site.output), consumer_views(site.output)
    z = after[-1].outputs[0] if after else site.output
    if tail is None:
        unfused = [n for n in consumers(z) if n.op_type in _OTHER_ACTIVATIONS and not n.domain]
        if unfused:
            names = ", ".join(ACTIVATIONS)
            reason = Reason("activation", op=unfused[0].op_type, names=names)
            rw.refuse("Gemm+activation", [site.nodes[0], unfused[0]], reason)
        return site
    if sole_reader(z) is None:
        reason = Reason("other-readers", what="its input")
        rw.refuse("Gemm+activation", [site.nodes[0], tail.node], reason)
        return site
    return replace(site, tail=tail, nodes=(*site.nodes, tail.node))


def _with_norm(rw: Rewriter, site: _Site) -> _Site:
    below, views = through_row_views(site.x, pad=True)
    node = below.producer() if below is not None else None
    norm = canonical_norm(node)
    if node is None or below is not node.outputs[0]:
        return site
    if norm is None:
        if node.op_type == "LayerNormalization":
            axis = attribute(node, "axis", -1)
            rw.refuse("LayerNormGemm", [node, site.nodes[0]], Reason("norm-axis", axis=axis))
        return site
    if norm.x.dtype != site.w.dtype or any(a.dtype != site.w.dtype for a in norm.affine):
        rw.refuse("LayerNormGemm", [node, site.nodes[0]], Reason("norm-weight"))
        return site
    sizes = [dim(site.w, i) or 0 for i in range(2)]
    readers, reason = consumers(below), None
    if rw.training and prod(sizes) >= _LARGE and any(size % 8 for size in sizes):
        reason = Reason("gradient-rows", sizes=str(sizes))
    elif not rw.training and len(readers) > 1 and any(map(_of_computed_matrix, readers)):
        # whose columns' sums, and transpose, would be made in every run
        reason = Reason("computed-matrix")
    if reason:
        rw.refuse("LayerNormGemm", [node, site.nodes[0]], reason)
        return site
    site = replace(site, views=tuple(views))
    if any(v.op_type == "Pad" for v in views) and not _norm_keeps_zero_rows(rw, norm):
        return _before_pad(rw, site, norm)
    return replace(site, norm=norm)


def _of_computed_matrix(node: ir.Node) -> bool:
    matrix = given(node, 1) if node.op_type == "MatMul" else None
    return rank(matrix) == 2 and not (is_constant(matrix) or is_initializer(matrix))


def _before_pad(rw: Rewriter, site: _Site, norm: Norm) -> _Site:
    """The product before a Pad that the norm cannot cross, where that pays; an activation stays."""
    fill, reason = padded.fill_of(site.w, site.c)
    if site.c is not None and (rank(site.c) or 0) > (rank(norm.x) or 0):
        reason = Reason("padded-bias")
    reason = reason or padded.refusal(norm.node, site.x, site.views)
    if rw.training:
        reason = Reason("padded-trained")
    if reason:
        rw.refuse("LayerNormGemm", [norm.node, site.nodes[0]], Reason("zero-rows", why=reason))
        return replace(site, views=())
    nodes = site.nodes[:-1] if site.tail else site.nodes
    return replace(site, tail=None, nodes=nodes, norm=norm, moved=True, fill=fill)


def _norm_keeps_zero_rows(rw: Rewriter, norm: Norm) -> bool:
    scale, *bias = (const_array(v) for v in norm.affine)
    epsilon = norm.attributes["epsilon"]
    # also where the smallest numbers count as zero
    sound = epsilon >= np.finfo(np.float32).tiny
    if scale is None or not np.isfinite(scale.astype(np.float64)).all() or not sound:
        return False
    zero = all(b is not None and not b.any() for b in bias)
    trained = [v for v in norm.affine[1:] if CONSTANT not in v.metadata_props]
    return zero and not (rw.training and trained)


def _fuse(rw: Rewriter, node: ir.Node) -> bool:
    site = _product(rw, node)
    if site is None:
        _explain_dynamic_weight(rw, node)
        return False
    site = _with_norm(rw, _with_activation(rw, _with_bias(rw, site)))
    tail = site.tail
    if site.norm is None and tail is None and (site.c is None or node.op_type == "Gemm"):
        return False
    op = Builder()
    x, prefix = site.x, ""
    inputs: list[ir.Value] = []
    attributes: dict[str, float | int] = {**tail.attributes} if tail else {}
    if site.norm is not None:
        norm = site.norm
        views = () if site.moved else site.views
        x, prefix = replay_views(op, views, norm.node.outputs[0], norm.x), norm.kind
        inputs, attributes = list(norm.affine), {**norm.attributes, **attributes}
    w = site.w
    if site.transposed:
        stored = is_initializer(w)
        w = rw.pack(op, [w], [1, 0], None, f"{w.name}.T") if stored else op.Transpose(w)
    c = site.c if site.c is not None else rw.zeros(site.output)
    if site.moved and (bias := const_array(site.c)) is not None:
        c = op.constant(bias)  # as the added rows are: no parameter any more, which trains
    name = str(FusedName.make("Gemm", tail.activation.name if tail else "", norm=prefix))
    y = op.node(name, [x, *inputs, w, c], domain=FUSE, attributes=attributes)
    if site.moved:
        shape = ir.Shape([*(x.shape or ())[:-1], dim(w, 1)])
        y = padded.replay_padded_views(op, site.x, site.views, typed(y, x, shape), site.fill)
    if tail is not None:
        y = tail.replayed(op, y)
    return rw.replace(site.nodes[-1], op, [site.output], [y])


def _explain_dynamic_weight(rw: Rewriter, node: ir.Node) -> None:
    below, _ = through_row_views(node.inputs[0])
    norm = below.producer() if below is not None else None
    if node.op_type == "MatMul" and norm is not None and canonical_norm(norm):
        size, reason = rank(node.inputs[1]), Reason("unknown", what="the rank of the norm")
        if size != 2:
            reason = Reason("right-rank", rank=size)
        rw.refuse("LayerNormGemm", [norm, node], reason)


# ---- merging ---------------------------------------------------------------------------------


class Parts(NamedTuple):
    """A product: its norm and activation by name, the norm's inputs with x first.

    `turned`: w is [columns, K], as ONNX's Gemm may have it.
    """

    prefix: str
    activation: str
    head: tuple[ir.Value, ...]
    w: ir.Value
    c: ir.Value | None
    turned: bool = False


def product_parts(node: ir.Node) -> Parts | None:
    """The parts of a fused Gemm, a MatMul or a Gemm x · w + c; None for any other node."""
    if node.op_type in ("MatMul", "Gemm") and not node.domain:
        x, w = node.inputs[:2]
        usual = {"transA": 0, "alpha": 1.0, "beta": 1.0}
        plain = all(attribute(node, key, value) == value for key, value in usual.items())
        if x is None or w is None or not plain:
            return None
        return Parts("", "", (x,), w, given(node, 2), attribute(node, "transB", 0) != 0)
    name = FusedName.of(node.op_type)
    if node.domain != FUSE or name.family != "Gemm" or name.place or name.grad or name.exposed:
        return None
    if name.activation and name.activation not in ACTIVATIONS:
        return None
    *head, w, c = [v for v in node.inputs if v is not None]
    return Parts(name.norm, name.activation, tuple(head), w, c)


def _fuse_siblings(rw: Rewriter, node: ir.Node) -> bool:
    """One wider product for all that read the same input through the same norm, then Split."""
    if node.op_type == "MatMulNBits":
        return _fuse_packed_siblings(rw, node)
    parts = product_parts(node)
    if parts is None:
        return False
    norms, kind = norm_attributes(node), _kind(rw, parts.w)

    def mergeable(peer: ir.Node) -> bool:
        theirs = product_parts(peer)
        if theirs is None or theirs.prefix != parts.prefix or peer.graph is not node.graph:
            return False
        if peer.op_type == "Gemm" and not peer.domain:
            return False
        same = all(a is b for a, b in zip(theirs.head, parts.head, strict=True))
        same = same and norm_attributes(peer) == norms
        w, c = theirs.w, theirs.c
        column = c is None or is_additive_identity(c) or (is_initializer(c) and rank(c) == 1)
        full = c is None or rank(c) != 1 or dim(c, 0) == dim(w, 1)
        held = kind is not None and kind == _kind(rw, w)
        return same and held and rank(w) == 2 and column and full

    family = [n for n in consumers(parts.head[0]) if mergeable(n)]
    if not rw.training:  # whose backward gains more by one product than an epilogue saves
        family = [n for n in family if not _has_residual(n.outputs[0])]
    family = _worth_merging(family)
    if len(family) < 2 or node is not family[0] or len({n.inputs[-2] for n in family}) == 1:
        return False
    members = [theirs for peer in family if (theirs := product_parts(peer))]
    weights, biases = [member.w for member in members], [member.c for member in members]
    widths = [dim(w, 1) or 0 for w in weights]
    if any(packed_many(v) for v in (*weights, *biases) if v is not None):
        return False
    if len(set(weights)) < len(weights) or 0 in widths:
        return False
    biased = [c is not None and not is_additive_identity(c) for c in biases]
    if rw.training and any(biased) and not all(biased):
        # The zeros that stand for an absent bias would be trained, and could not be saved.
        return rw.refuse("MergedGemm", family, Reason("few-biases"))
    op = Builder()
    stem = "+".join(str(w.name) for w in weights)
    w = _joined_codes(op, rw, weights, stem) if kind else rw.pack(op, weights, None, 1, stem)
    signatures = {
        (n.op_type, tuple(sorted((k, v.value) for k, v in n.attributes.items()))) for n in family
    }
    act = parts.activation if len(signatures) == 1 else ""
    title = "+".join(label(n) for n in family)
    if all(c is None for c in biases):
        y = op.MatMul(parts.head[0], w, name=title)
        name = "MatMul"
    else:
        c = merged_bias(op, rw, biases, widths, weights[0], stem)
        name = str(FusedName.make("Gemm", act, norm=parts.prefix))
        attributes = {k: v.value for k, v in node.attributes.items() if act or k in norms}
        y = op.node(name, [*parts.head, w, c], domain=FUSE, name=title, attributes=attributes)
    _replace_family(rw, family, op, typed(y, node.outputs[0]), widths, name)
    return True


def dequantized_columns(w: ir.Value) -> list[np.ndarray] | None:
    """8-bit codes, scales and zero points by column that a weight is dequantized from, or None."""
    node = producer(w, "DequantizeLinear")
    if node is None or attribute(node, "block_size", 0) or attribute(node, "output_dtype", 0):
        return None
    codes, scale, zero = [const_array(given(node, i)) for i in range(3)]
    kinds = ("int8", "uint8", "float8_e4m3fn")
    if codes is None or scale is None or codes.dtype.name not in kinds:
        return None
    if given(node, 2) is None:
        zero = np.zeros(scale.shape, codes.dtype)
    columns = codes.shape[-1:]
    by_column = scale.shape == columns and attribute(node, "axis", 1) in (1, -1)
    if codes.ndim != 2 or zero is None or not (by_column or scale.size == 1):
        return None
    return [codes, *(np.broadcast_to(a.reshape(-1), columns) for a in (scale, zero))]


def _kind(rw: Rewriter, w: ir.Value) -> tuple[np.dtype, ...] | None:
    """The types of a weight's codes, none where it is held as it is; None where it is computed."""
    if is_initializer(w):
        return ()
    part = None if rw.training else dequantized_columns(w)
    return None if part is None else tuple(a.dtype for a in part)


def _joined_codes(op: Builder, rw: Rewriter, weights: Sequence[ir.Value], stem: str) -> ir.Value:
    """The columns of all weights, whose codes have the same types, dequantized at once."""
    held = [part for w in weights if (part := dequantized_columns(w)) is not None]
    names = (stem, f"{stem}.scale", f"{stem}.zero")
    joined = [
        rw.initializer(name, np.concatenate(arrays, axis=-1))
        for name, arrays in zip(names, zip(*held, strict=True), strict=True)
    ]
    return typed(op.DequantizeLinear(*joined, axis=1), weights[0], joined[0].shape)


def _fuse_packed_siblings(rw: Rewriter, node: ir.Node) -> bool:
    """One wider MatMulNBits for those that read the same input, then Split.

    The rows of the weights, their scales and zero points stand behind each other as they are.
    """
    x = node.inputs[0]

    def form(peer: ir.Node) -> tuple[object, ...]:
        """What two of one family have alike: all but N and the weights."""
        options = sorted((k, v.value) for k, v in peer.attributes.items() if k != "N")
        ranks = [(i, rank(v)) for i, v in enumerate(peer.inputs[1:], 1) if v is not None]
        return peer.domain, peer.op_type, options, ranks

    if x is None or given(node, 4) is not None:  # g_idx orders the columns
        return False
    family = [
        peer
        for peer in consumers(x)
        if peer.graph is node.graph
        and peer.inputs[0] is x
        and form(peer) == form(node)
        and all(v is None or is_initializer(v) for v in peer.inputs[1:])
    ]
    if len(family) < 2 or node is not family[0] or len({n.inputs[1] for n in family}) < len(family):
        return False
    widths = [int(attribute(peer, "N", 0)) for peer in family]
    op, title = Builder(), "+".join(label(n) for n in family)
    merged: list[ir.Value | None] = [x]
    for i, value in enumerate(node.inputs[1:], 1):
        held = [a for peer in family if (a := const_array(peer.inputs[i])) is not None]
        if value is not None and len(held) < len(family):
            return False  # weights that were left out
        merged.append(rw.initializer(f"{title}.{i}", np.concatenate(held)) if held else None)
    attributes = {**node.attributes, "N": sum(widths)}
    y = op.node(node.op_type, merged, domain=node.domain, name=title, attributes=attributes)
    _replace_family(rw, family, op, typed(y, node.outputs[0]), widths, node.op_type)
    return True


def _replace_family(
    rw: Rewriter,
    family: Sequence[ir.Node],
    op: Builder,
    y: ir.Value,
    widths: Sequence[int],
    name: str,
) -> None:
    """Put the pieces of y, with the activations that it lacks, in the place of the products."""
    act = FusedName.of(name).activation
    results = []
    pieces = op.Split(y, op.constant(widths), axis=-1, outputs=len(family))
    for peer, piece in zip(family, pieces, strict=True):
        peer_act = (product_parts(peer) or ("", ""))[1]
        typed(piece, peer.outputs[0], peer.outputs[0].shape)
        if peer_act and not act:
            piece = ACTIVATIONS[peer_act].alone(op, piece, peer)
        results.append(piece)
    rw.fusions["MergedGemm"] += 1
    rw.notes.append(f"merged into one {name}: {', '.join(label(n) for n in family)}")
    first = min(family, key=list(family[0].graph or ()).index)
    rw.replace(first, op, [n.outputs[0] for n in family], results)
    for peer in family:
        if not peer.outputs[0].uses() and peer.graph is not None:
            peer.graph.remove(peer, safe=True)


def _worth_merging(family: list[ir.Node]) -> list[ir.Node]:
    """The members whose activation does not leave an epilogue for a pass of its own.

    An activated member may join if its output is only multiplied with another member's (the gate of
    a gated unit): that product is a pass over both anyway.
    """
    outputs = {n.outputs[0] for n in family}

    def gates(node: ir.Node) -> bool:
        reader = combined_with(node.outputs[0], "Mul")
        return reader is not None and reader[1] in outputs

    act = {n: (product_parts(n) or ("", ""))[1] for n in family}
    if len({(act[n], *((k, v.value) for k, v in n.attributes.items())) for n in family}) == 1:
        return family
    return [n for n in family if not act[n] or gates(n)]


def _has_residual(y: ir.Value) -> bool:
    """Whether y is only added to another product of its shape, whose epilogue adds it."""
    other = (combined_with(y, "Add") or (None, None))[1]
    return other is not None and other.shape == y.shape and producer(other, "MatMul") is not None


def packed_many(value: ir.Value) -> bool:
    return '"axis": null' not in value.metadata_props.get(PACKED, '"axis": null')


def merged_bias(
    op: Builder,
    rw: Rewriter,
    biases: Sequence[ir.Value | None],
    widths: Sequence[int],
    like: ir.Value,
    stem: str,
) -> ir.Value:
    """All biases in one vector; a missing one counts as zeros."""
    if all(c is None or is_additive_identity(c) for c in biases):
        return rw.zeros(like)
    parts = [
        c if c is not None and rank(c) == 1 else rw.zeros(like, n)
        for c, n in zip(biases, widths, strict=True)
    ]
    return rw.pack(op, parts, None, 0, f"{stem}.bias")


# ---- the norm's other readers ----------------------------------------------------------------


def _keep(rw: Rewriter, node: ir.Node) -> bool:
    """A norm that a fused Gemm has taken over but others still read becomes its second output.

    Writing n once costs M·K elements; keeping the norm as a node would read x and write n. A norm
    read by fused Gemms alone is recomputed in each (no byte more) and is gone before this rule.
    """
    norm = canonical_norm(node)
    if norm is None or (not consumers(node.outputs[0]) and not node.outputs[0].is_graph_output()):
        return False
    for peer in consumers(norm.x):
        name = FusedName.of(peer.op_type)
        plain = name.family == "Gemm" and not (name.place or name.grad or name.exposed)
        if peer.domain != FUSE or not plain or name.norm != norm.kind:
            continue
        *head, w, c = peer.inputs
        mine = {k: v.value for k, v in peer.attributes.items() if k in norm.attributes}
        if tuple(head) != (norm.x, *norm.affine) or mine != norm.attributes:
            continue
        if not (is_constant(w) and is_constant(c)) or peer.graph is not node.graph:
            continue  # moving it before its weight's producer could close a cycle
        op = Builder()
        name_of_both, attributes = f"{peer.op_type}_n", peer.attributes
        y, n = op.node(name_of_both, peer.inputs, outputs=2, domain=FUSE, attributes=attributes)
        readers = len(consumers(node.outputs[0])) + node.outputs[0].is_graph_output()
        rw.notes.append(
            f"{label(node)}: is now also an output of {label(peer)}, for {readers} other "
            "reader(s); computing it again would read its input a second time"
        )
        return rw.replace(node, op, [node.outputs[0], peer.outputs[0]], [n, y])
    return False


def _fold_affine(rw: Rewriter, node: ir.Node) -> bool:
    """LN(x; gamma, beta)·W + c = LN(x; 1, 0)·(gamma ⊙ W) + (beta·W + c): rounds W once more."""
    parts = product_parts(node)
    if parts is None or not parts.prefix or parts.c is None:
        return False
    head, w, c = parts.head, parts.w, parts.c
    arrays = [const_array(v) for v in (*head[1:], w, c)]
    if any(a is None for a in arrays) or not all(map(is_initializer, (*head[1:], w))):
        return False
    scale, *bias, weight, shift = [np.asarray(a, np.float64) for a in arrays]
    if np.all(scale == 1) and not any(np.any(b) for b in bias):
        return False
    if shift.ndim > 1:
        return rw.refuse("FoldAffine", [node], Reason("bias-shape"))
    dtype = (w.dtype or ir.DataType.FLOAT).numpy()
    width = weight.shape[0]
    scale, *bias = (np.broadcast_to(a, (width,)) for a in (scale, *bias))  # one number for all
    ones = rw.initializer(f"onex{np.dtype(dtype).name}x{width}", np.ones(width, dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        product = (scale[:, None] * weight).astype(dtype)
        moved = (bias[0] @ weight + shift).astype(dtype) if bias else None
    if not np.isfinite(product).all() or (moved is not None and not np.isfinite(moved).all()):
        return rw.refuse("FoldAffine", [node], Reason("not-finite"))
    folded = rw.initializer(f"{w.name}.folded", product)
    inputs: list[ir.Value | None] = [head[0], ones, *([rw.zeros(w, width)] if bias else []), folded]
    inputs.append(c if moved is None else rw.initializer(f"{w.name}.shift", moved))
    lost = list(node.inputs)
    for i, value in enumerate(inputs):
        node.replace_input_with(i, value)
    freeze([value for value in lost if value not in node.inputs])
    rw.fusions["FoldAffine"] += 1
    return True


_OTHER_ACTIVATIONS = ("Celu", "Clip", "PRelu", "Softsign", "ThresholdedRelu")
_NORMS = ("LayerNormalization", "RMSNormalization")
_FAMILY = (
    "MatMul",
    *(str(FusedName.make("Gemm", a, norm=p)) for p in PROLOGUES for a in ("", *ACTIVATIONS)),
)
FUSE_GEMM = Rule("Gemm", 1, ("MatMul", "Gemm"), _fuse, conditions="readers types ranks body")
MERGE = Rule("MergedGemm", 2, (*_FAMILY, "MatMulNBits"), _fuse_siblings, conditions="ranks")
KEEP = Rule("LayerNormGemm", 1, _NORMS, _keep, conditions="weights types ranks body")
FOLD_AFFINE = Rule(
    "FoldAffine",
    3,
    _FAMILY,
    _fold_affine,
    training=False,
    conditions="readers weights types ranks sizes body",
)
