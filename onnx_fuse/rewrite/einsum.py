"""Einsum that is a matrix product between transposes and reshapes is written as one.

    abc, cde -> abde    MatMul(a b c, c (d e)), taken apart: a projection to heads, as Keras has it
    abcd, cde -> abe    MatMul(a b (c d), (c d) e): the projection back
    aecd, abcd -> acbe  MatMul(second a c b d, first a c d e): scores of attention
Letters in both operands and in the result are a batch, others in both are summed over, and the rest
are rows of the left operand and columns of the right one. Letters of one role are one axis of the
product where it has but one, if their sizes are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, all_nodes, dim, extent, rank, required
from onnx_fuse.ops.matmul import einsum_terms
from onnx_fuse.ops.rules import Rewriter, attribute, combined_with, is_constant, is_float, typed

_Letters = list[str]


@dataclass(frozen=True)
class _Plan:
    """A product: its left operand is [lead, inner], its right one [batch, inner, columns]."""

    left: str
    """The letters of the left operand, as Einsum has it; `right` of the right one."""
    right: str
    lead: _Letters
    batch: _Letters
    inner: _Letters
    columns: _Letters
    out: _Letters

    @property
    def natural(self) -> _Letters:
        """The letters of the product, columns apart."""
        return self.lead + self.columns

    @property
    def transposes(self) -> int:
        """The number of Transposes that it needs, those of weights included."""
        return (
            (list(self.left) != self.lead + self.inner)
            + (list(self.right) != self.batch + self.inner + self.columns)
            + (self.out != self.natural)
        )


def write_products(model: ir.Model) -> bool:
    """Write each Einsum of `model` that is a product or a Transpose as one; whether any was."""
    changed = False
    for node in list(all_nodes(model.graph)):
        # MatMul has no small integers.
        if node.op_type != "Einsum" or node.domain or not is_float(node.inputs[0]):
            continue
        if str(attribute(node, "equation", "")).count(",") != len(node.inputs) - 1:
            continue
        terms, out = einsum_terms(node, [rank(x) for x in node.inputs])
        if any(len(set(t)) < len(t) for t in (*terms, out)):
            continue  # a diagonal, or an ellipsis
        if len(terms) == 1 and sorted(terms[0]) == sorted(out):
            op = Builder()
            y = op.Transpose(node.inputs[0], perm=[terms[0].index(c) for c in out])
            changed = Rewriter(model).replace(node, op, node.outputs, [y])
        elif len(terms) == 2:
            changed = _product(Rewriter(model), node, terms, list(out)) or changed
    return changed


def _product(rw: Rewriter, node: ir.Node, terms: list[str], out: _Letters) -> bool:
    """Replace `node`, and an Add of a constant that follows it, by a product."""
    values = dict(zip(terms, node.inputs, strict=True))
    if len(values) < 2:  # both operands have the same letters: no product
        return False
    sizes: dict[str, int | None] = {}
    for term, value in values.items():
        for axis, letter in enumerate(term):
            size = dim(value, axis)
            sizes[letter] = size if size not in (None, 1) else sizes.get(letter, size)
    first, second = terms
    candidates = [_plan(first, second, out), _plan(second, first, out)]
    plans = [p for p in candidates if p is not None and _fits(p, values, sizes)]
    if not plans:
        return False
    plan = min(plans, key=lambda p: p.transposes)
    op = Builder()
    a, b = required(values[plan.left]), required(values[plan.right])
    a = _transposed_to(op, a, plan.left, plan.lead + plan.inner)
    b = _transposed_to(op, b, plan.right, plan.batch + plan.inner + plan.columns)
    apart = [sizes[c] or 0 for c in plan.columns]
    inner, several = 0, len(apart) > 1  # a 0 copies an axis
    if len(plan.inner) > 1:
        inner = prod(sizes[c] or 0 for c in plan.inner)
        a = typed(op.Reshape(a, [0] * len(plan.lead) + [inner]), a)
    if inner or several:
        b = typed(op.Reshape(b, [0] * len(plan.batch) + [inner, prod(apart)]), b)
    y: ir.Value = typed(op.MatMul(a, b), a)
    last = node
    if several:
        biased = _bias(node, apart) if plan.out == plan.natural else None
        if biased is not None:
            last, c = biased
            y = typed(op.Add(y, op.Reshape(c, [prod(apart)])), a)
        y = typed(op.Reshape(y, [0] * len(plan.lead) + apart), a)
    y = _transposed_to(op, y, "".join(plan.natural), plan.out)
    return rw.replace(last, op, last.outputs, [y])


def _bias(node: ir.Node, shape: list[int]) -> tuple[ir.Node, ir.Value] | None:
    """The Add that alone reads `node`, and its constant, where that has exactly this shape."""
    reader = combined_with(node.outputs[0], "Add")
    c = reader[1] if reader is not None else None
    constant = c is not None and is_constant(c) and c.shape is not None and [*c.shape] == shape
    return reader if constant else None


def _plan(left: str, right: str, out: _Letters) -> _Plan | None:
    """The product with these operands; None where Einsum does something else besides."""
    batch = [c for c in out if c in left and c in right]
    rows, columns = [c for c in out if c not in right], [c for c in out if c not in left]
    inner = [c for c in left if c in right and c not in out]
    if not rows or not columns or not inner:
        return None
    if sorted(left) != sorted(batch + rows + inner):
        return None  # it sums over letters of one operand
    if sorted(right) != sorted(batch + inner + columns):
        return None
    # All rows but the last stand before the batch, along which the right operand is repeated.
    return _Plan(left, right, rows[:-1] + batch + rows[-1:], batch, inner, columns, out)


def _fits(
    plan: _Plan, values: Mapping[str, ir.Value | None], sizes: Mapping[str, int | None]
) -> bool:
    """Whether all that become one axis are of known size, and nothing is repeated in a sum."""
    several = [part for part in (plan.inner, plan.columns) if len(part) > 1]
    if several and not all(sizes[c] for part in (*several, plan.columns) for c in part):
        return False
    for c in plan.inner:
        # Einsum repeats an operand's 1 along the other's axis, MatMul does not.
        pair = [extent(values[t], t.index(c)) for t in (plan.left, plan.right)]
        if None in pair or pair[0] != pair[1]:
            return False
    return True


def _transposed_to(op: Builder, x: ir.Value, letters: str, order: _Letters) -> ir.Value:
    if list(letters) == order:
        return x
    perm = [letters.index(c) for c in order]
    shape = None if x.shape is None else [x.shape[i] for i in perm]
    return typed(op.Transpose(x, perm=perm), x, shape)
