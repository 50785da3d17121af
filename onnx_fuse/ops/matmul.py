"""MatMul, Gemm, Einsum."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import onnx_ir as ir

from onnx_fuse.ir.build import dim, given, rank
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import (
    Values,
    Writer,
    arguments,
    dims,
    fail,
    known_rank,
    may_be_float,
    same_dim,
    text,
)


def _matmul(op: Writer, node: ir.Node, dys: Values) -> Values:
    """dA = dY Bᵀ, dB = Aᵀ dY; a weight [K,N] meets rows of any rank through one 2-D Gemm."""
    (a, b), dy = arguments(node, 2), dys[0]
    ra, rb = known_rank(a), known_rank(b)
    if ra == 1 or rb == 1:
        return _vector_matmul(op, a, b, dy, ra, rb)
    if rb == 2:
        k = dim(b, 0) if dim(b, 0) is not None else dim(a, -1)
        n = dim(b, 1) if dim(b, 1) is not None else dim(dy, -1)
        if ra == 2 or (k is not None and n is not None):
            a2 = a if ra == 2 else op.reshape(a, [-1, k])
            dy2 = dy if ra == 2 else op.reshape(dy, [-1, n])
            return [op.reshape_like(op.Gemm(dy2, b, transB=1), a), op.Gemm(a2, dy2, transA=1)]
    return [op.MatMul(dy, op.swap_last(b)), op.MatMul(op.swap_last(a), dy)]


def _vector_matmul(op: Writer, a: ir.Value, b: ir.Value, dy: ir.Value, ra: int, rb: int) -> Values:
    """A vector is a matrix of one row (a) or one column (b); that axis is missing in dy."""
    last = op.constant([-1])
    if ra == 1 and rb == 1:
        return [op.Mul(dy, b), op.Mul(dy, a)]
    if rb == 1:
        column = op.Unsqueeze(dy, last)  # [..., M, 1]
        return [op.Mul(column, b), op.Mul(column, a)]
    row = op.Unsqueeze(dy, [-2])  # [..., 1, N]
    da = op.ReduceSum(op.Mul(row, b), last, keepdims=0)
    return [da, op.Mul(op.Unsqueeze(a, last), row)]


def _gemm(op: Writer, node: ir.Node, dys: Values) -> Values:
    (a, b), dy = node.inputs[:2], dys[0]
    # onnxruntime takes every number but 0 for 1
    ta, tb = (int(node.attributes.get_int(name, 0) != 0) for name in ("transA", "transB"))
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    scale = {} if alpha == 1.0 else {"alpha": alpha}
    # Y = A' B':  dA' = dY B'ᵀ,  dB' = A'ᵀ dY;  a transposed operand gets the transposed product
    da = (
        op.Gemm(b, dy, transA=tb, transB=1, **scale)
        if ta
        else op.Gemm(dy, b, transB=1 - tb, **scale)
    )
    db = (
        op.Gemm(dy, a, transA=1, transB=ta, **scale)
        if tb
        else op.Gemm(a, dy, transA=1 - ta, **scale)
    )
    dc = dy if beta == 1.0 or given(node, 2) is None else op.Mul(dy, beta)
    return [da, db, dc]


def einsum_terms(node: ir.Node, ranks: Sequence[int | None]) -> tuple[list[str], str]:
    """The letters of an Einsum's operands, whose ranks are `ranks`, and those of its result.

    An ellipsis becomes letters that are free, if the ranks tell how many; else it stays.
    """
    equation = text(node, "equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:  # what is there once, in the order of the alphabet
        right = "".join(sorted(c for c in set(left) - {",", "."} if left.count(c) == 1))
        right = f"{'...' if '.' in left else ''}{right}"
    pairs = zip(terms, ranks, strict=False)
    counts = {None if r is None else r - len(t) + 3 for t, r in pairs if "..." in t}
    free = [c for c in ascii_letters if c not in equation]
    count = counts.pop() if len(counts) == 1 else None
    if count is None or not 0 <= count <= len(free):
        return terms, right
    letters = "".join(free[:count])
    return [t.replace("...", letters) for t in terms], right.replace("...", letters)


def _turned(op: Writer, x: ir.Value, letters: str, order: Sequence[str]) -> tuple[Any, str]:
    """A term of an Einsum with its letters in this order."""
    perm = sorted(range(len(letters)), key=lambda at: order.index(letters[at]))
    moved = op.Transpose(x, perm=perm) if perm != sorted(perm) else x
    return moved, "".join(letters[at] for at in perm)


def _multiplied(op: Writer, x: Any, own: str, y: Any, letters: str, kept: set[str]) -> Any:
    """The product of two terms of an Einsum, in the order of a batched product, and its letters.

    onnxruntime's Einsum (1.32) divides by 0 where it has to move axes of an empty term.
    """
    x, own = _turned(op, x, own, sorted(own, key=lambda c: (c not in kept, c not in letters)))
    order = sorted(letters, key=lambda c: (c not in own, c not in kept, own.find(c)))
    y, letters = _turned(op, y, letters, order)
    result = "".join(c for c in dict.fromkeys(own + letters) if c in kept)
    return op.Einsum(x, y, equation=f"{own},{letters}->{result}"), result


def _einsum(op: Writer, node: ir.Node, dys: Values) -> Values:
    """dX_i: the same sum with dY in the place of X_i; letters X_i alone has are broadcast back."""
    terms, right = einsum_terms(node, [rank(x) for x in node.inputs])
    if any("." in term for term in terms):
        raise fail(node, "its equation has an ellipsis, of axes whose number is not known")
    dy = dys[0]
    sizes: dict[str, Any] = {}
    equal = all(
        same_dim(sizes.setdefault(letter, size), size)
        for x, term in zip(node.inputs, terms, strict=True)
        for letter, size in zip(term, x.shape if x is not None and x.shape else (), strict=False)
    )
    answers: list[ir.Value | None] = []
    for i, (x, term) in enumerate(zip(node.inputs, terms, strict=True)):
        if not may_be_float(x) or x is None:
            answers.append(None)
            continue
        if len(set(term)) != len(term):
            raise fail(node, f"term '{term}' of its equation takes a diagonal")
        others = [(v, t) for j, (v, t) in enumerate(zip(node.inputs, terms, strict=True)) if j != i]
        outside = set(right).union(*(t for _, t in others))
        shared = "".join(c for c in term if c in outside)
        if others and all(all(dims(v) or [0]) for v in (dy, *(v for v, _ in others))):
            equation = f"{','.join([right, *(t for _, t in others)])}->{shared}"
            g, result = op.Einsum(dy, *(v for v, _ in others), equation=equation), shared
        else:
            g, result = dy, right
            for at, (y, letters) in enumerate(others, 1):
                kept = set(shared).union(*(t for _, t in others[at:]))
                g, result = _multiplied(op, g, result, y, letters, kept)
        g, _ = _turned(op, g, result, shared)
        if shared != term:
            g = op.Unsqueeze(g, [k for k, c in enumerate(term) if c not in outside])
        # a letter of several sizes is 1 in some operand, and broadcast: the walker sums it back
        answers.append(g if shared == term and equal else op.Expand(g, op.Shape(x)))
    return answers


register(OpDef("MatMul", grad=_matmul), OpDef("Gemm", grad=_gemm), OpDef("Einsum", grad=_einsum))
