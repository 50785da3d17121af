"""Ops written out in others where no kernel of their own serves and ONNX gives them no body.

`DECOMPOSED[domain, op]` is `fn(op, node, shapes, known) -> outputs`, or None where it cannot: `op`
is a Builder, `shapes` are the shapes of the inputs, () of absent ones, and `known(i)` is the value
of input `i`, None where it is absent (and an end to it where the value is not known).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.lower import selection
from onnx_fuse.lower.context import Context
from onnx_fuse.lower.recurrent import recurrent
from onnx_fuse.lower.selection import Known, Results, Shapes, attr
from onnx_fuse.ops.activations import ACTIVATIONS as TABLE
from onnx_fuse.ops.fused.gated import OPS as GATED
from onnx_fuse.ops.fused.gated import written_out
from onnx_fuse.ops.matmul import einsum_terms
from onnx_fuse.ops.norm import mean_variance_axes
from onnx_fuse.ops.recurrent import GATES
from onnx_fuse.program.data_movement import is_smooth

MAX_TABLE = 1 << 24
"""Elements of a Fourier transform's table: longer ones are onnxruntime's."""

Decomposition = Callable[[Builder, ir.Node, Shapes, Known], "Results | None"]


def four_bits(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """Gemm<Act> of dequantized 4-bit weights as MatMul, which takes them packed, and the rest."""
    name = FusedName.of(node.op_type)
    x, w, c = node.inputs
    source = w.producer() if w is not None else None
    if source is None or source.op_type != "DequantizeLinear" or name.exposed not in ((), ("z",)):
        return None
    z = y = op.Add(op.MatMul(x, w), c)
    if name.activation:
        y = TABLE[name.activation].alone(op, z, node)
    return [y, z][: 1 + len(name.exposed)]


def norm_gemm(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results:
    """<Norm>Gemm<Act> as the norm, then Gemm<Act>."""
    name = FusedName.of(node.op_type)
    exposed = name.exposed
    epsilon = attr(node, "epsilon", 1e-5)
    x, *params, w, c = node.inputs
    values: dict[str, Any] = {}
    if name.rms:
        names: tuple[str, ...] = ("n", "rstd") if "rstd" in exposed else ("n",)
        op_type = str(FusedName.of("RMSNormalization").exposing(*names[1:]))
        outs = op.node(op_type, [x, *params], domain=FUSE, outputs=len(names), epsilon=epsilon)
    else:
        names = ("n", "mean", "rstd") if {"mean", "rstd"} & set(exposed) else ("n",)
        outs = op.LayerNormalization(x, *params, epsilon=epsilon, outputs=len(names))
    values |= zip(names, outs if len(names) > 1 else (outs,), strict=True)
    attrs = {k: a.value for k, a in node.attributes.items() if k != "epsilon"}
    suffix = ("z",) if "z" in exposed else ()
    op_type = str(FusedName.make("Gemm", name.activation, exposed=suffix))
    outs = op.node(op_type, [values["n"], w, c], domain=FUSE, outputs=1 + len(suffix), **attrs)
    values |= zip(("y", "z"), outs if suffix else (outs,), strict=False)
    return [values["y"], *(values[name] for name in exposed)]


def group_norm(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results:
    """GroupNorm<Act> as the norm and the activation, which the norm's kernel then applies."""
    x, scale, bias = node.inputs
    groups, epsilon = attr(node, "num_groups", 1), attr(node, "epsilon", 1e-5)
    scale, bias = (op.Reshape(value, [-1]) for value in (scale, bias))
    y = op.GroupNormalization(x, scale, bias, num_groups=groups, epsilon=epsilon)
    row = TABLE.get(FusedName.of(node.op_type).activation)
    return [y if row is None else row.alone(op, y, node)]


def is_flat_grid(ctx: Context, node: ir.Node) -> bool:
    """Whether it is an AffineGrid with a size of one: its body squeezes a batch, and gives NaN."""
    types = ctx.infer(node) if node.op_type == "AffineGrid" else None
    return types is not None and types[0] is not None and 1 in types[0][1][:-1]


def layer_norm(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """A norm whose scale or bias differs between rows as one without, and the rest after it."""
    x, scale, bias = (*node.inputs, None)[:3]
    axis = attr(node, "axis", -1) % len(shapes[0])
    row = shapes[0][axis:]
    if not any(len(s) > len(row) and s[: -len(row)] != (1,) * axis for s in shapes[1:]):
        return None
    ones = op.CastLike(op.Expand(op.constant(np.ones((), np.float32)), list(row)), scale)
    attrs = {k: a.value for k, a in node.attributes.items()}
    outs = op.node("LayerNormalization", [x, ones], outputs=len(node.outputs), attributes=attrs)
    normed, *stats = outs if isinstance(outs, tuple) else (outs,)
    y = op.Mul(normed, scale)
    return [y if bias is None else op.Add(y, bias), *stats]


def gated(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results:
    """A gated product as the product, its halves and a pass over them."""
    return [written_out(op, node, shapes[-2][1])]


def lp_normalization(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results:
    x, axis, p = node.inputs[0], attr(node, "axis", -1), attr(node, "p", 2)
    norm = op.node(f"ReduceL{p}", [x, [axis]], keepdims=1)
    zero = op.constant(0.0, x.dtype if x is not None else None)
    return [op.Where(op.Equal(norm, zero), zero, op.Div(x, norm))]


def mean_variance(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results:
    """(x - mean) / deviation, as onnxruntime's kernel: in float32, without the 1e-9 of ONNX's body.

    That body takes the variance as a difference of squares, which says little of close numbers.
    """
    x, axes = op.Cast(node.inputs[0], to=1), mean_variance_axes(node, len(shapes[0]))
    centred = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    variance = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
    return [op.CastLike(op.Div(centred, op.Sqrt(variance)), node.inputs[0])]


def hardmax(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """1 at the first largest element along the axis, unless that is NaN."""
    x, axis = node.inputs[0], attr(node, "axis", -1) % len(shapes[0])
    first = op.ArgMax(x, axis=axis, keepdims=1)
    chosen = op.And(op.Equal(first, _places(op, x, axis, len(shapes[0]))), op.Equal(x, x))
    return [op.CastLike(chosen, x)]


def _places(op: Builder, x: ir.Value | None, axis: int, rank: int) -> ir.Value:
    """int64 [1, .., d, .., 1]: the places 0 to d - 1 along an axis of `x`, which may be open."""
    size = op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0])
    places = op.Range(op.constant(0), size, op.constant(1))
    others = [k for k in range(rank) if k != axis]
    shaped: ir.Value = op.Unsqueeze(places, op.constant(others)) if others else places
    return shaped


def reverse_sequence(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """y[t, b] = x[length[b] - 1 - t, b] for t < length[b], else x[t, b]."""
    x, lengths = node.inputs
    time, batch = attr(node, "time_axis", 0), attr(node, "batch_axis", 1)
    rank = len(shapes[0])
    t = _places(op, x, time, rank)
    n = op.Reshape(lengths, [-1 if k == batch else 1 for k in range(rank)])
    place = op.Where(op.Less(t, n), op.Sub(op.Sub(n, 1), t), t)
    return [op.GatherElements(x, op.Expand(place, op.Shape(x)), axis=time)]


def einsum(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """Pairwise from the left: transpose, sum what no one else has, MatMul over batch and sums.

    A pair without a sum, or whose letters are the same, is no MatMul but an elementwise product.
    """
    terms, right = einsum_terms(node, [len(s) for s in shapes])
    if any(len(set(t)) < len(t) for t in terms):
        return None  # a diagonal, or an ellipsis
    size: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for c, d in zip(term, shape, strict=True):
            size[c] = d if d != 1 else size.get(c, 1)

    def summed(value: ir.Value | None, term: str, keep: set[str]) -> tuple[Any, str]:
        axes = [k for k, c in enumerate(term) if c not in keep]
        if axes:
            value = op.ReduceSum(value, axes, keepdims=0)
        return value, "".join(c for c in term if c in keep)

    value, term = node.inputs[0], terms[0]
    for i, (other, second) in enumerate(zip(node.inputs[1:], terms[1:], strict=True), 1):
        later = set(right).union(*terms[i + 1 :])
        value, term = summed(value, term, later | set(second))
        other, second = summed(other, second, later | set(term))
        batch = [c for c in term if c in second and c in later]
        inner = [c for c in term if c in second and c not in later]
        rows = [c for c in term if c not in second]
        columns = [c for c in second if c not in term]

        if not inner or not (rows or columns):  # no sum of several products shares an operand
            order = list(term) if inner else batch + rows + columns
            value, other = _spread(op, value, term, order), _spread(op, other, second, order)
            if inner:
                axes = [order.index(c) for c in inner]
                value = op.node("Dots", [value, other], domain=FUSE, axes=axes)
            else:
                value = op.Mul(value, other)
            term = "".join(batch + rows + columns)
            continue

        def matrix(v: object, t: str, order: list[list[str]]) -> Any:
            v = op.Expand(v, [size[c] for c in t])  # where only the other operand's axis is longer
            v = op.Transpose(v, perm=[t.index(c) for part in order for c in part])
            lengths = [int(np.prod([size[c] for c in part])) for part in order]
            return op.Reshape(v, lengths, allowzero=1)

        a = matrix(value, term, [batch, rows, inner])
        b = matrix(other, second, [batch, inner, columns])
        value, term = op.MatMul(a, b), "".join(batch + rows + columns)
        value = op.Reshape(value, [size[c] for c in term])
    value, term = summed(value, term, set(right))
    return [op.Transpose(value, perm=[term.index(c) for c in right])]


def _spread(op: Builder, value: ir.Value, term: str, order: list[str]) -> Any:
    """`value` with its axes in this order of letters, and an axis of 1 for each that it lacks."""
    value = op.Transpose(value, perm=[term.index(c) for c in order if c in term])
    missing = [k for k, c in enumerate(order) if c not in term]
    return op.Unsqueeze(value, op.constant(missing)) if missing else value


def _fourier(n: int, size: int, parts: int, inverse: bool, onesided: bool) -> np.ndarray:
    """[size * parts, m * parts of the result]: the transform of length n of rows of `size`.

    y[k] = Σ x[j] e^(∓2πi jk/n) (1/n if inverse); onesided: half of the symmetric spectrum, given
    back (or taken, if inverse, for a real result).
    """
    half = n // 2 + 1
    j = np.arange(min(size, half if inverse and onesided else n))
    k = np.arange(half if onesided and not inverse else n)
    angle = 2 * np.pi / n * (np.outer(j, k) % n) * (1 if inverse else -1)
    wave = np.exp(1j * angle) / (n if inverse else 1)
    if inverse and onesided:  # the other half is the conjugate
        wave *= np.where((j == 0) | (2 * j == n), 1, 2)[:, None]
    rows = [wave, 1j * wave][:parts]
    columns = [wave.real for wave in rows], [wave.imag for wave in rows]
    table = np.zeros((size, parts, len(k), 1 if inverse and onesided else 2))
    for c in range(table.shape[3]):
        for r in range(parts):
            table[: len(j), r, :, c] = columns[c][r]
    return table.reshape(size * parts, -1)


def _stages(
    op: Builder, reads: list[Any], axis: int, n: int, inverse: bool, onesided: bool,
    frames: int = 0, step: int = 0,
) -> Any:  # fmt: skip
    return op.node(
        "Fourier", reads, domain=FUSE, axis=axis, points=n, inverse=int(inverse),
        onesided=int(onesided), frames=frames, step=step,
    )  # fmt: skip


def _transform(
    op: Builder, x: ir.Value, shape: Sequence[int], axis: int, n: int, inverse: bool, onesided: bool
) -> Any:
    """The Fourier transform along `axis` of [..., 1 or 2], in stages or as a product in float64."""
    if is_smooth(n):
        return _stages(op, [x], axis, n, inverse, onesided)
    size, parts = int(shape[axis]), int(shape[-1])
    table = _fourier(n, size, parts, inverse, onesided)
    if table.size > MAX_TABLE:
        return None
    perm = [*(a for a in range(len(shape) - 1) if a != axis), axis, len(shape) - 1]
    rest = [shape[a] for a in perm[:-2]]
    rows = op.Reshape(op.Transpose(x, perm=perm), [int(np.prod(rest)), size * parts])
    y = op.MatMul(op.Cast(rows, to=ir.DataType.DOUBLE), op.constant(table))
    last = 1 if inverse and onesided else 2
    y = op.Reshape(op.Cast(y, to=x.dtype), [*rest, table.shape[1] // last, last])
    return op.Transpose(y, perm=[int(a) for a in np.argsort(perm)])


def dft(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    x, shape, length, at = required(node.inputs[0]), shapes[0], const(1), const(2)
    axis = (attr(node, "axis", -2) if at is None else int(at.reshape(-1)[0])) % len(shape)
    inverse, onesided = bool(attr(node, "inverse", 0)), bool(attr(node, "onesided", 0))
    size = int(shape[axis])  # the table of one length
    default = 2 * (size - 1) if inverse and onesided else size
    n = default if length is None else int(length.reshape(-1)[0])
    if axis == len(shape) - 1 or shape[-1] not in (1, 2) or n < 1:
        return None
    y = _transform(op, x, shape, axis, n, inverse, onesided)
    return None if y is None else [y]


def stft(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """Frames of the signal, times the window, transformed.

    The signal is [batch, length, 1 or 2] or, as PyTorch exports it, [batch, length].
    """
    signal, shape, step, length = required(node.inputs[0]), shapes[0], required(const(1)), const(3)
    window = node.inputs[2] if len(node.inputs) > 2 else None
    x = signal
    if len(shape) == 2:
        x, shape = op.Unsqueeze(signal, [2]), (*shape, 1)
    wide = () if window is None else shapes[2]
    n = int(length.reshape(-1)[0]) if length is not None else (*wide, 0)[0]
    every = int(step.reshape(-1)[0])
    starts = np.arange(0, int(shape[1]) - n + 1, every)
    if n < 1 or every < 1 or not len(starts) or len(shape) != 3:
        return None
    onesided = bool(attr(node, "onesided", 1))
    if is_smooth(n):
        reads = [x] if window is None else [x, window]
        return [_stages(op, reads, 1, n, False, onesided, len(starts), every)]
    frames = op.Gather(x, op.constant(starts[:, None] + np.arange(n)), axis=1)
    if window is not None:
        frames = op.Mul(frames, op.Reshape(window, [n, 1]))
    frames.dtype = signal.dtype
    sizes = (shape[0], len(starts), n, shape[2])
    y = _transform(op, frames, sizes, 2, n, False, onesided)
    return None if y is None else [y]


def max_unpool(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """Zeros with x at its flat indices; where the output is to be larger, zeros at the end."""
    x, shape, output_shape = required(node.inputs[0]), shapes[0], const(2)
    kernel = attr(node, "kernel_shape", [])
    strides, pads = (
        attr(node, "strides", [1] * len(kernel)),
        attr(node, "pads", [0, 0] * len(kernel)),
    )
    sizes = [
        (d - 1) * s - before - after + k
        for d, s, k, before, after in zip(
            shape[2:], strides, kernel, pads[: len(kernel)], pads[len(kernel) :], strict=True
        )
    ]
    inside = [*shape[:2], *sizes]
    blank = op.constant(np.zeros(int(np.prod(inside)), (x.dtype or ir.DataType.FLOAT).numpy()))
    flat = op.ScatterElements(blank, op.Reshape(node.inputs[1], [-1]), op.Reshape(x, [-1]), axis=0)
    y = op.Reshape(flat, inside)
    if output_shape is not None:
        more = [int(d) - have for d, have in zip(output_shape, inside, strict=True)]
        y = op.Pad(y, [0] * len(inside) + more)
    return [y]


def tensor_scatter(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """The cache with `update` written from each row's index on, round its end if circular."""
    past, update, *more = node.inputs
    (cache, new), axis = shapes[:2], attr(node, "axis", -2)
    axis %= len(cache)
    place = _places(op, update, axis, len(new))
    if more and more[0] is not None:
        place = op.Add(place, op.Reshape(more[0], [-1 if k == 0 else 1 for k in range(len(new))]))
    if attr(node, "mode", "linear") == "circular":
        place = op.Mod(place, cache[axis])
    return [op.ScatterElements(past, op.Expand(place, op.Shape(update)), update, axis=axis)]


def mel_weight_matrix(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Results | None:
    """Ask for all five numbers; once they are known, the matrix is computed at lowering."""
    for i in range(5):
        const(i)
    return None


DECOMPOSED: dict[tuple[str, str], Decomposition] = {
    ("", "DFT"): dft,
    ("", "Einsum"): einsum,
    **{("", name): recurrent for name in GATES},
    ("", "Hardmax"): hardmax,
    ("", "LayerNormalization"): layer_norm,
    ("", "LpNormalization"): lp_normalization,
    ("", "MaxUnpool"): max_unpool,
    ("", "MeanVarianceNormalization"): mean_variance,
    ("", "MelWeightMatrix"): mel_weight_matrix,
    ("", "ReverseSequence"): reverse_sequence,
    **selection.DECOMPOSED,
    ("", "STFT"): stft,
    ("", "TensorScatter"): tensor_scatter,
    **{
        (FUSE, str(FusedName.make(family, act, norm=norm))): decomposition
        for act in ("", *TABLE)
        for family, norm, decomposition in (
            ("Gemm", "LayerNorm", norm_gemm),
            ("Gemm", "RMSNorm", norm_gemm),
            ("Gemm", "", four_bits),
            ("GroupNorm", "", group_norm),
        )
    },
    **{(FUSE, name): gated for name in GATED},
}
