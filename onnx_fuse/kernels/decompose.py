"""Ops written out in others where no kernel of their own serves and ONNX gives them no body.

`DECOMPOSED[domain, op]` is `fn(op, node, shapes) -> outputs`, or None where it cannot: `op` is a
Builder, `shapes` the static shapes of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir import FUSE
from onnx_fuse.kernels.linear import ACTIVATIONS

Shapes = Sequence["tuple[int, ...] | None"]
Decomposition = Callable[[Any, ir.Node, Shapes], "Sequence[ir.Value | None] | None"]


def _attr(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def norm_gemm(op: Any, node: ir.Node, shapes: Shapes) -> Sequence[ir.Value | None]:
    """<Norm>Gemm<Act> as the norm, then Gemm<Act>."""
    name, *exposed = node.op_type.split("_")
    rms, act = name.startswith("RMS"), name.split("NormGemm")[1]
    epsilon = _attr(node, "epsilon", 1e-5)
    x, *params, w, c = node.inputs
    found: dict[str, Any] = {}
    if rms:
        names: tuple[str, ...] = ("n", "rstd") if "rstd" in exposed else ("n",)
        op_type = "_".join(("RMSNormalization", *names[1:]))
        made = op.node(op_type, [x, *params], domain=FUSE, outputs=len(names), epsilon=epsilon)
    else:
        names = ("n", "mean", "rstd") if {"mean", "rstd"} & set(exposed) else ("n",)
        made = op.LayerNormalization(x, *params, epsilon=epsilon, outputs=len(names))
    found |= zip(names, made if len(names) > 1 else (made,), strict=True)
    kept = {k: a.value for k, a in node.attributes.items() if k != "epsilon"}
    suffix = "_z" if "z" in exposed else ""
    made = op.node(
        f"Gemm{act}{suffix}", [found["n"], w, c], domain=FUSE, outputs=1 + bool(suffix), **kept
    )
    found |= zip(("y", "z"), made if suffix else (made,), strict=False)
    return [found["y"], *(found[name] for name in exposed)]


def lp_normalization(op: Any, node: ir.Node, shapes: Shapes) -> Sequence[ir.Value | None]:
    x, axis, p = node.inputs[0], _attr(node, "axis", -1), _attr(node, "p", 2)
    norm = op.node(f"ReduceL{p}", [x, [axis]], keepdims=1)
    zero = op.constant(0.0, x.dtype if x is not None else None)
    return [op.Where(op.Equal(norm, zero), zero, op.Div(x, norm))]


def hardmax(op: Any, node: ir.Node, shapes: Shapes) -> Sequence[ir.Value | None] | None:
    """1 at the first largest element along the axis."""
    x, shape = node.inputs[0], shapes[0]
    assert shape is not None
    axis = _attr(node, "axis", -1) % len(shape)
    place = [shape[axis] if k == axis else 1 for k in range(len(shape))]
    first = op.ArgMax(x, axis=axis, keepdims=1)
    classes = op.constant(np.arange(shape[axis]).reshape(place))
    return [op.CastLike(op.Equal(first, classes), x)]


def reverse_sequence(op: Any, node: ir.Node, shapes: Shapes) -> Sequence[ir.Value | None] | None:
    """y[t, b] = x[length[b] - 1 - t, b] for t < length[b], else x[t, b]."""
    (x, lengths), shape = node.inputs, shapes[0]
    assert shape is not None
    time, batch = _attr(node, "time_axis", 0), _attr(node, "batch_axis", 1)
    rank = len(shape)
    t = op.constant(np.arange(shape[time]).reshape([-1 if k == time else 1 for k in range(rank)]))
    n = op.Reshape(lengths, [-1 if k == batch else 1 for k in range(rank)])
    place = op.Where(op.Less(t, n), op.Sub(op.Sub(n, 1), t), t)
    return [op.GatherElements(x, op.Expand(place, list(shape)), axis=time)]


def einsum(op: Any, node: ir.Node, shapes: Shapes) -> Sequence[ir.Value | None] | None:
    """Pairwise from the left: transpose, sum what no one else has, MatMul over batch and sums."""
    equation = str(_attr(node, "equation", "")).replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "." in equation or any(len(set(t)) < len(t) for t in terms):
        return None
    if "->" not in equation:
        letters = sorted(set(left) - {","})
        right = "".join(c for c in letters if left.count(c) == 1)
    size: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        assert shape is not None
        size |= {c: max(d, size.get(c, 1)) for c, d in zip(term, shape, strict=True)}

    def summed(value: Any, term: str, keep: set[str]) -> tuple[Any, str]:
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

        def matrix(v: Any, t: str, order: list[list[str]]) -> Any:
            v = op.Transpose(v, perm=[t.index(c) for part in order for c in part])
            return op.Reshape(v, [int(np.prod([size[c] for c in part])) for part in order])

        a = matrix(value, term, [batch, rows, inner])
        b = matrix(other, second, [batch, inner, columns])
        value, term = op.MatMul(a, b), "".join(batch + rows + columns)
        value = op.Reshape(value, [size[c] for c in term])
    value, term = summed(value, term, set(right))
    return [op.Transpose(value, perm=[term.index(c) for c in right])]


DECOMPOSED: dict[tuple[str, str], Decomposition] = {
    ("", "Einsum"): einsum,
    ("", "Hardmax"): hardmax,
    ("", "LpNormalization"): lp_normalization,
    ("", "ReverseSequence"): reverse_sequence,
    **{
        (FUSE, f"{norm}Gemm{act}"): norm_gemm
        for norm in ("LayerNorm", "RMSNorm")
        for act in ACTIVATIONS
    },
}
