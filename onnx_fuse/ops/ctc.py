"""Connectionist temporal classification: the loss of labels whose places in time are not known.

With blanks between the labels z and at both ends, L = 2 S + 1 of them,

    α[t, l] = log p[t, z[l]] + logsumexp(α[t-1, l], α[t-1, l-1], α[t-1, l-2])

is the logarithm of the probability of all ways to be at l at time t; the last term is there where
z[l] is no blank and not z[l-2]. A Scan walks over time. What no way reaches is NONE and not -inf,
so that no difference of two of them is NaN; its share in a gradient is exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import dim
from onnx_fuse.ops.shape_ops import Tensor, Writer

NONE = -1e30


def ctc(op: Writer, logits: ir.Value, labels: ir.Value, options: Mapping[str, Any]) -> Tensor:
    """-log p(labels) of scores [N, T, C] (time_major: [T, N, C]) and labels [N, S].

    Labels end at their length, or where ignore_index begins; the default of input_lengths is T. The
    mean is that of each loss over its number of labels. A sequence that no way through its time
    gives has the loss inf, or 0 with zero_infinity, and no gradient.
    """
    x = op.Transpose(logits, perm=[1, 0, 2]) if options.get("time_major") else logits
    x.dtype = logits.dtype
    x = op.wide(x)
    ignored = -100 if options.get("ignore_index") is None else options["ignore_index"]
    numbers = {
        "zero": 0,
        "one": 1,
        "two": 2,
        "blank": options.get("blank") or 0,
        "ignored": ignored,
    }
    values = {name: op.constant(np.array(n, np.int64)) for name, n in numbers.items()}
    impossible = 0.0 if options.get("zero_infinity") else np.inf
    floats = {"none": NONE, "sure": 0.0, "limit": NONE / 2, "impossible": impossible}
    values |= {name: op.constant(n, x.dtype) for name, n in floats.items()}
    counts, steps = options.get("target_lengths"), options.get("input_lengths")
    if counts is None:
        counts = op.ReduceSum(
            op.Cast(op.Not(op.Equal(labels, values["ignored"])), to=7), [1], keepdims=0
        )
    if steps is None:
        steps = op.Expand(op.Shape(x, start=1, end=2), op.Shape(labels, start=0, end=1))
    values |= {"x": x, "labels": labels, "counts": counts}
    first, scores, edge, skip, count = op.formula(_LATTICE, **values)
    scores.dtype = x.dtype
    alpha = _walk(op, first, scores, edge, skip, steps)
    each = op.formula(_LOSS, **values, alpha=alpha, count=count)
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return op.to_like(each, logits)
    if reduction == "mean":
        each = op.Div(each, op.to_like(op.Max(counts, values["one"]), x))
        return op.to_like(op.ReduceMean(each, keepdims=0), logits)
    return op.to_like(op.ReduceSum(each, keepdims=0), logits)


def _walk(
    op: Writer, first: Tensor, scores: Tensor, edge: Tensor, skip: Tensor, steps: Tensor
) -> Tensor:
    """α [N, L] after each row's number of `steps` [N], from α before the `first` one.

    `scores` [T, N, L] are log p[t, z[l]], `edge` [N, 2] is what stands before the first place.
    """
    size = op.Shape(scores, start=0, end=1)
    if not dim(scores, 0):  # a Scan has at least one step: one past every length
        more = op.Sub(op.Max(size, [1]), size)
        scores = op.Pad(scores, op.Concat([0, 0, 0], more, [0, 0], axis=0))
        size = op.Shape(scores, start=0, end=1)
    zero, one = (op.constant(np.array(i, np.int64)) for i in range(2))
    times, inner = op.Range(zero, op.Squeeze(size, [0]), one), Writer()
    kind = ir.TensorType(scores.dtype) if scores.dtype else None
    alpha, row = (ir.Value(name=f"ctc_{name}", type=kind) for name in ("alpha", "row"))
    t = ir.Value(name="ctc_t", type=ir.TensorType(ir.DataType.INT64))
    new = inner.formula(
        """wide = Concat <axis = 1> (edge, a); before = Slice(wide, [1], [-1], [1])
        skipped = Slice(wide, [0], [-2], [1]) + skip; top = Max(a, before, skipped)
        sum = Exp(a - top) + Exp(before - top) + Exp(skipped - top)
        Where(Unsqueeze(t < steps, [1]), top + Log(sum) + row, a)""",
        **{"a": alpha, "row": row, "t": t, "edge": edge, "skip": skip, "steps": steps},
    )
    new.name, new.type = "ctc_next", alpha.type
    body = ir.Graph([alpha, row, t], [new], nodes=inner.nodes, name="ctc step")
    attributes = {"body": body, "num_scan_inputs": 2}
    return op.node("Scan", [first, scores, times], attributes=attributes)


_LATTICE = """rows = Shape <start = 0, end = 1> (labels)
inner = Shape <start = 1, end = 2> (labels)
count = Unsqueeze(counts, [1])
own = Where(Range(zero, Squeeze(inner), one) < count, labels, blank)
blanks = Expand(blank, Shape(labels))
pairs = Concat <axis = 2> (Unsqueeze(blanks, [2]), Unsqueeze(own, [2]))
end = Expand(blank, Concat <axis = 0> (rows, [1]))
z = Concat <axis = 1> (Reshape(pairs, Concat <axis = 0> (rows, inner * two)), end)
earlier = Slice(Concat <axis = 1> (end, end, z), [0], [-2], [1])
skip = Where(And(Not(z == blank), Not(z == earlier)), sure, none)
long = Shape <start = 1, end = 2> (z)
first = Where(Range(zero, Squeeze(long), one) == zero, sure, none)
raw = LogSoftmax <axis = -1> (x)
p = Where(raw < none, none, raw)
sizes = Concat <axis = 0> (Shape <start = 0, end = 2> (p), long)
scores = GatherElements <axis = 2> (p, Expand(Unsqueeze(z, [1]), sizes))
begin = Expand(first, Shape(z))
edge = Expand(none, Concat <axis = 0> (rows, [2]))
scores = Transpose <perm = [1, 0, 2]> (scores)
begin, scores, edge, skip, count"""
_LOSS = """ends = Concat <axis = 1> (count * two, Max(count * two - one, zero))
absent = Concat <axis = 1> (count < zero, count == zero)
last = Where(absent, none, GatherElements <axis = 1> (alpha, ends))
top = ReduceMax <keepdims = 1> (last, [1])
total = Squeeze(top + Log(ReduceSum <keepdims = 1> (Exp(last - top), [1])), [1])
Where(total < limit, impossible, -total)"""
