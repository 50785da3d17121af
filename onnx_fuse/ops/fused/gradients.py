"""The gradients of the fused ops, each an op with one body, and the rules that call them.

With xh = (x - mean) rstd, Wq = scale ⊙ W, z = xh·Wq + beta·W + c (before the activation) and
dz = dy ⊙ act'(z), a norm before a product leaves no trace in its backward but two row sums:
    c2 = Σ_n dz (z - beta·W - c) / K      c1 = Σ_n dz cs / K,  cs[n] = Σ_k Wq[k, n]
    dx = rstd (dz·Wqᵀ - c1 - xh c2)       G = xhᵀ·dz
    dW = scale ⊙ G + beta ⊗ dc            dscale = Σ_n W ⊙ G      dbeta = W·dc      dc = Σ_m dz
c1 and c2 come from dz alone, before the product; RMSNorm has neither c1 nor beta. What is kept from
the forward is mean and rstd (one number a row each) and z.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_fuse.ir.build import dim
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.activations import Activation
from onnx_fuse.ops.conv import conv_grad
from onnx_fuse.ops.fused.activations import act_grad
from onnx_fuse.ops.opdef import OpDef, fused_op, lookup
from onnx_fuse.ops.shape_ops import Tensor, Values, Writer, arguments, fail

STASH = "stash_type: int = 1"


def wide(node: ir.Node) -> dict[str, int]:
    """The type that row sums are taken in: float32, or float64 for float64."""
    x = node.inputs[0]
    double = x is not None and x.dtype == ir.DataType.DOUBLE
    return {"stash_type": int(ir.DataType.DOUBLE if double else ir.DataType.FLOAT)}


def saved(node: ir.Node, name: str) -> Tensor:
    """The inner value `name` that the node returns."""
    _, exposed = lookup(node)
    first = len(node.outputs) - len(exposed)
    return node.outputs[first + exposed.index(name)]


def cotangents(node: ir.Node, dys: Values, outputs: int, handled: str = "") -> Tensor:
    """The gradient of the inner value `handled`, if it is returned; others must have none."""
    _, exposed = lookup(node)
    cotangent = None
    for name, dy in zip(exposed, dys[outputs:], strict=False):
        if dy is not None and name != handled:
            raise fail(node, f"the gradient would have to flow through its inner value '{name}'")
        cotangent = dy if name == handled else cotangent
    return cotangent


# ---- Gemm ------------------------------------------------------------------------------------

_ROWS = """
    first = [0]
    second = [1]
    last = [-1]
    k1 = Shape <start: int = 0, end: int = 1> (w)
    n1 = Shape <start: int = 1, end: int = 2> (w)
    x_shape = Shape (x)
    rows = ReduceProd (Slice (x_shape, first, last))
    rows_k = Concat <axis: int = 0> (rows, k1)
    rows_n = Concat <axis: int = 0> (rows, n1)
    dz2 = Reshape <allowzero: int = 1> (dz, rows_n)
    dc = ReduceSum <keepdims: int = 0> (dz2, first)
"""
_PLAIN = """
    x2 = Reshape <allowzero: int = 1> (x, rows_k)
    dx = Reshape <allowzero: int = 1> (Gemm <transB: int = 1> (dz2, w), x_shape)
    dw = Gemm <transA: int = 1> (x2, dz2)
"""
_C1 = """
    cs = ReduceSum <keepdims: int = 0> (wq, first)
    c1 = MatMul (dzs, Unsqueeze (Cast <to: int = @stash_type> (cs), second)) / ks
    d0 = gs - c1
"""
# onnxruntime 1.31 computes MatMul(Transpose(w), v) wrongly for a v of rank 1: hence columns.
_NORMED = """
    scale_col = Unsqueeze (scale, second)
    wq = w * scale_col
    {centre}
    rs = Cast <to: int = @stash_type> (rstd)
    xhs = xm * rs
    xh = CastLike (xhs, x)
    {shift}
    zs = Cast <to: int = @stash_type> (z)
    cvs = Cast <to: int = @stash_type> (cv)
    dzs = Cast <to: int = @stash_type> (dz)
    ks = Cast <to: int = @stash_type> (k1)
    c2 = ReduceSum <keepdims: int = 1> (dzs * (zs - cvs), last) / ks
    g = Reshape <allowzero: int = 1> (Gemm <transB: int = 1> (dz2, wq), x_shape)
    gs = Cast <to: int = @stash_type> (g)
    {c1}
    d2 = (d0 - xhs * c2) * rs
    dx = CastLike (d2, x)
    gw = Gemm <transA: int = 1> (Reshape <allowzero: int = 1> (xh, rows_k), dz2)
    dscale = ReduceSum <keepdims: int = 0> (w * gw, second)
    {dw}
"""
_CENTRED = "xm = Cast <to: int = @stash_type> (x) - Cast <to: int = @stash_type> (mean)"
_LAYER_NORM = _NORMED.format(
    centre=_CENTRED,
    shift="cv = MatMul (Unsqueeze (bias, first), w) + c",
    c1=_C1,
    dw="dw = scale_col * gw + Unsqueeze (bias, second) * dc\n"
    " dbias = Squeeze (MatMul (w, Unsqueeze (dc, second)), second)",
)
_RMS_NORM = _NORMED.format(
    centre="xm = Cast <to: int = @stash_type> (x)",
    shift="cv = Identity (c)",
    c1="d0 = Identity (gs)",
    dw="dw = scale_col * gw",
)
# prefix: (body, inputs, outputs), without what an activation adds
_GEMMS = {
    "": (_PLAIN, ["dy", "x", "w"], ["dx", "dw", "dc"]),
    "LayerNorm": (
        _LAYER_NORM,
        ["dy", "x", "scale", "bias", "w", "c", "mean", "rstd", "z"],
        ["dx", "dscale", "dbias", "dw", "dc"],
    ),
    "RMSNorm": (
        _RMS_NORM,
        ["dy", "x", "scale", "w", "c", "rstd", "z"],
        ["dx", "dscale", "dw", "dc"],
    ),
}


def dz_text(activation: Activation | None) -> str:
    """dz from dy, and from z where there is an activation."""
    return activation.gradient_text() if activation else "dz = Identity (dy)"


def gemm_grad_def(prefix: str, activation: Activation | None) -> OpDef:
    text, inputs, outputs = _GEMMS[prefix]
    name = FusedName.make(
        "Gemm", activation.name if activation else "", norm=prefix, grad=True
    ).base
    reads = inputs if prefix or activation is None else [*inputs, "z"]
    attributes = [STASH if prefix else "", activation.attributes if activation else ""]
    lines = dz_text(activation) + _ROWS + text
    return fused_op(name, attributes, ", ".join(reads), ", ".join(outputs), lines)


def gemm_grad(op: Writer, node: ir.Node, dys: Values) -> Values:
    """The rule of every Gemm; a bias that is not one per column takes dz itself, summed by rows.

    A norm n that others read as well stands in memory, and its whole gradient is known only behind
    the product's: the two are then differentiated one after the other, the norm once.
    """
    name = FusedName.of(node.op_type)
    kind, act = name.norm, name.activation
    source, *affine, w, c = arguments(node, len(node.inputs))
    y, dn = node.outputs[0], cotangents(node, dys, 1, "n")
    stats = [saved(node, s) for s in ("mean", "rstd")[kind == "RMSNorm" :]] if kind else []
    grads: list[Any] = []
    if dys[0] is not None:
        prefix, norm, x = (kind, stats, source) if dn is None else ("", [], saved(node, "n"))
        outer = affine if prefix else []
        grad = FusedName.make("Gemm", act, norm=prefix, grad=True)
        inputs = [dys[0], x, *outer, w, *([c] if prefix else []), *norm]
        if act or prefix:
            inputs.append(saved(node, "z") if act else y)
        of_norm = ("epsilon", "stash_type")
        attributes = {k: a.value for k, a in node.attributes.items() if k not in of_norm}
        attributes.update(wide(node) if prefix else {})
        like = [x, *outer, w, ir.Value(shape=ir.Shape([w.shape[1] if w.shape else None]))]
        like[-1].dtype = y.dtype
        shape = [dim(c, i) for i in range(len(c.shape))] if c.shape is not None else [None]
        per_column = all(size == 1 for size in shape[:-1]) and (
            len(shape) < 2 or shape[-1] == dim(w, 1)
        )
        if per_column or not op.wants(c):
            *grads, dc = op.emit(str(grad), inputs, like, **attributes)
            for _ in shape[1:]:
                dc = op.Unsqueeze(dc, [0])
            grads.append(op.unbroadcast(dc, c) if per_column else None)
        else:
            *grads, _, dz = op.emit(str(grad.exposing("dz")), inputs, [*like, y], **attributes)
            grads.append(dz)
    if dn is not None:
        through, *rest = grads or [None, None, None]
        dn = dn if through is None else op.Add(through, dn)
        grads = [*norm_grad(op, node, kind, dn, None, source, affine, stats), *rest]
    return grads or [None] * len(node.inputs)


# ---- norms -----------------------------------------------------------------------------------

_NORM = """
    last = [-1]
    first = [0]
    k1 = Shape (scale)
    rows_k = Concat <axis: int = 0> (last, k1)
    dys = Cast <to: int = @stash_type> (dy)
    scales = Cast <to: int = @stash_type> (scale)
    rs = Cast <to: int = @stash_type> (rstd)
    {centre}
    xh = xm * rs
    g = dys * scales
    m2 = ReduceMean <keepdims: int = 1> (g * xh, last)
    {mean}
    d2 = (d0 - xh * m2) * rs
    {skip}
    dx = CastLike (d3, x)
    dscale = CastLike (ReduceSum <keepdims: int = 0> (Reshape (dys * xh, rows_k), first), scale)
    {dbias}
"""


_BATCH_NORM = """
    planes = [0, 0, -1]
    axes = [0, 2]
    xs = Cast <to: int = @stash_type> (Reshape (x, planes))
    dys = Cast <to: int = @stash_type> (Reshape (dy, planes))
    mean = ReduceMean <keepdims: int = 1> (xs, axes)
    xm = xs - mean
    variance = ReduceMean <keepdims: int = 1> (xm * xm, axes)
    std = Sqrt (variance + @epsilon)
    xh = xm / std
    p = dys * xh
    m1 = ReduceMean <keepdims: int = 1> (dys, axes)
    m2 = ReduceMean <keepdims: int = 1> (p, axes)
    d0 = dys - m1
    d1 = d0 - xh * m2
    scales = Cast <to: int = @stash_type> (Reshape (scale, [-1, 1]))
    d2 = d1 * (scales / std)
    dx = CastLike (Reshape <allowzero: int = 1> (d2, Shape (x)), x)
    dscale = CastLike (ReduceSum <keepdims: int = 0> (p, axes), scale)
    dbias = CastLike (ReduceSum <keepdims: int = 0> (dys, axes), scale)
"""


def _norm_def(name: str, centred: bool, skip: bool) -> OpDef:
    text = _NORM.format(
        centre=_CENTRED if centred else "xm = Cast <to: int = @stash_type> (x)",
        mean="d0 = g - ReduceMean <keepdims: int = 1> (g, last)"
        if centred
        else "d0 = Identity (g)",
        skip="d3 = d2 + Cast <to: int = @stash_type> (ds)" if skip else "d3 = Identity (d2)",
        dbias="sums = ReduceSum <keepdims: int = 0> (Reshape (dys, rows_k), first)\n"
        " dbias = CastLike (sums, scale)"
        if centred
        else "",
    )
    inputs = ["dy", *(["ds"] if skip else []), "x", "scale", *(["mean"] if centred else []), "rstd"]
    outputs = ["dx", "dscale", *(["dbias"] if centred else [])]
    return fused_op(name, [STASH], ", ".join(inputs), ", ".join(outputs), text)


# y = LN(x), t = y · w + c and x needs no gradient: those of w, of LN's parameters and of c, from
# dt [M,n] and xh = (x - mean) rstd [M,k] alone; w is [n,k], or ("Turned") [k,n].
_LEAF = """
    first = [0]
    last = [1]
    row = [1, -1]
    flat = [-1]
    dc = ReduceSum <keepdims: int = 0> (dt, first)
    g = Gemm <transA: int = 1> ({operands})
    {features}
    dgamma = ReduceSum <keepdims: int = 0> (w * g, {axis})
    sums = Gemm <transB: int = {turned}> (Reshape (dc, row), w)
    dbeta = Reshape (sums, flat)
    scaled = g * gammas
    bias = dcn * betas
    dw = scaled + bias
"""


def _leaf_def(turned: bool) -> OpDef:
    name = f"LayerNormLeafGrad{'Turned' if turned else ''}"
    text = _LEAF.format(
        operands="xh, dt" if turned else "dt, xh",
        features="gammas = Unsqueeze (gamma, last)\n betas = Unsqueeze (beta, last)\n"
        " dcn = Identity (dc)"
        if turned
        else "gammas = Identity (gamma)\n betas = Identity (beta)\n dcn = Unsqueeze (dc, last)",
        axis="last" if turned else "first",
        turned=int(turned),
    )
    return fused_op(name, [], "dt, xh, w, gamma, beta", "dw, dgamma, dbeta, dc", text)


NORM_GRADS = (
    _leaf_def(False),
    _leaf_def(True),
    _norm_def("LayerNormGrad", True, False),
    _norm_def("RMSNormalizationGrad", False, False),
    _norm_def("SkipLayerNormGrad", True, True),
    _norm_def("SkipRMSNormGrad", False, True),
    fused_op(
        "BatchNormGrad", ["epsilon: float = 1e-05", STASH], "dy, x, scale", "dx, dscale, dbias",
        _BATCH_NORM,
    ),
)  # fmt: skip


def norm_grad(
    op: Writer, node: ir.Node, kind: str, dy: Tensor, ds: Tensor, x: Tensor, affine: list[Any],
    stats: list[Any],
) -> list[Any]:  # fmt: skip
    """[dx, dscale, dbias (LayerNorm alone)]; `ds` is what reaches x besides."""
    plain = {"LayerNorm": "LayerNormGrad", "RMSNorm": "RMSNormalizationGrad"}[kind]
    name = plain if ds is None else f"Skip{kind}Grad"
    inputs = [dy, *([ds] if ds is not None else []), x, affine[0], *stats]
    return list(op.emit(name, inputs, [x, *affine], **wide(node)))


def rms_norm_grad(op: Writer, node: ir.Node, dys: Values) -> Values:
    cotangents(node, dys, 1)
    x, scale = arguments(node, 2)
    return norm_grad(op, node, "RMSNorm", dys[0], None, x, [scale], [saved(node, "rstd")])


def skip_norm_grad(op: Writer, node: ir.Node, dys: Values) -> Values:
    """(y, s) of s = x + residual: x and residual share one gradient."""
    cotangents(node, dys, 2)
    kind = FusedName.of(node.op_type).norm
    stats = [saved(node, s) for s in ("mean", "rstd")[kind == "RMSNorm" :]]
    (dy, ds), s, affine = dys[:2], node.outputs[1], list(node.inputs[2:])
    if dy is None:
        return [ds, ds]
    dx, *more = norm_grad(op, node, kind, dy, ds, s, affine, stats)
    return [dx, dx, *more]


# ---- convolutions ----------------------------------------------------------------------------


def conv_act_grad(op: Writer, node: ir.Node, dys: Values) -> Values:
    activation = FusedName.of(node.op_type).activation
    cotangents(node, dys, 1)
    z = saved(node, "z")
    z.shape = node.outputs[0].shape
    return conv_grad(op, node, [act_grad(op, node, activation, dys[0], z)])
