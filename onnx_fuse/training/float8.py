"""Precision "fp8": the linear products of a training graph in float8, all else in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import dim, rank
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ops.fused import float8, gated
from onnx_fuse.ops.fused.gemm import KEEP, Parts, product_parts
from onnx_fuse.ops.fused.norm import norm_attributes, norm_node
from onnx_fuse.ops.rules import typed
from onnx_fuse.ops.shape_ops import Writer
from onnx_fuse.program.problem import Hardware


def check(precision: str, hw: Hardware | None, gpu: int, *, ranks: bool) -> None:
    """Raise UsageError where a run cannot train in float8, on `hw` or on the GPU `gpu`."""
    if precision != "fp8":
        return
    if ranks:
        raise UsageError("precision 'fp8' trains on one GPU: use precision 'bf16' for several")
    hw = hw or Hardware.detect(gpu)
    if hw.arch != "sm_90a":
        raise UsageError(
            f"precision 'fp8' needs a Hopper GPU (sm_90a), this is {hw.name} ({hw.arch}): use "
            "precision 'bf16'"
        )


def skipped(precision: str) -> tuple[str, ...]:
    """Fusions that would hide a product from `in_float8`, by name."""
    return (KEEP.name, gated.RULE.name) if precision == "fp8" else ()


def following(
    histories: Mapping[ir.Value, ir.Value | None], gradients: Mapping[str, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """What follows on each history that `in_float8` returned; of some it is the gradient."""
    successors = {h: gradients.get(str(h.name)) if v is None else v for h, v in histories.items()}
    return {h: v for h, v in successors.items() if v is not None}


def in_float8(
    model: ir.Model,
    weights: Sequence[ir.Value],
    add_state: Callable[[str, str, np.ndarray], ir.Value],
) -> dict[ir.Value, ir.Value | None]:
    """Turn the products of weights that are differentiated into `Float8Linear`s, in place.

    A norm before one becomes an operator of its own. `add_state` makes the state of a history, of a
    name, a kind and its first value. Returns what follows on each history, None where its gradient
    is that.
    Raises UsageError where no product has sizes that are multiples of 16.
    """
    active, fed = set(weights), set(model.graph.inputs)
    successors: dict[ir.Value, ir.Value | None] = {}
    for node in list(model.graph):
        for reached in (active, fed):
            if not reached.isdisjoint(node.inputs):
                reached.update(node.outputs)
        parts = product_parts(node) if active.issuperset(node.outputs) else None
        if parts is None or parts.w in fed or not _has_right_sizes(parts):
            continue
        op, stem = Writer(), str(node.name or node.outputs[0].name)
        (x, *affine), w, c, y = parts.head, parts.w, parts.c, node.outputs[0]
        if parts.prefix:
            x = norm_node(op, parts.prefix, x, affine, norm_attributes(node))
        maker = w.producer()
        master = maker.inputs[0] if maker is not None and maker.op_type == "Cast" else None
        if master is not None and master.dtype == ir.DataType.FLOAT:
            w = master  # rounded once
        if parts.turned:
            w = typed(op.Transpose(w, perm=[1, 0]), w, [dim(w, 1), dim(w, 0)])
        flat = x if rank(x) == 2 else typed(op.Reshape(x, [-1, dim(w, 0)]), x)
        flat.shape = flat.shape or ir.Shape([None, dim(w, 0)])
        start = np.zeros(float8.HISTORY, np.float32)
        past = tuple(add_state(f"{stem}.{of}_history", "history", start) for of in ("x", "w", "dz"))
        fused = node.attributes.items() if node.domain else ()
        attributes = {k: v.value for k, v in fused if k not in norm_attributes(node)}
        operands = flat, w, op.constant(0.0, x.dtype) if c is None else c
        product, *after = float8.linear(op, parts.activation, operands, past, **attributes)
        successors |= dict(zip(past, [*after, None], strict=True))
        if flat is not x:
            sizes = [op.Shape(x, start=0, end=-1), op.constant([dim(w, 1)])]
            product = typed(op.Reshape(product, op.Concat(*sizes, axis=0)), y, y.shape)
        typed(product, y, y.shape)
        if y.is_graph_output():
            product = typed(op.Identity(product), y, y.shape)
        for reached in (active, fed):
            reached.update(v for n in op.nodes for v in n.outputs)
        replace_node(node, op.nodes, [product])
    if not successors:
        raise UsageError(
            "precision 'fp8': no weight of a matrix multiplication has sizes that are multiples of "
            f"{float8.MULTIPLE}: use precision 'bf16'"
        )
    return successors


def _has_right_sizes(parts: Parts) -> bool:
    x, sizes, c = parts.head[0], [dim(parts.w, i) for i in range(2)], parts.c
    row = c is None or rank(c) == 0 or (rank(c), dim(c, 0)) == (1, sizes[not parts.turned])
    return row and (
        x.dtype == ir.DataType.BFLOAT16
        and (rank(x) or 0) >= 2
        and rank(parts.w) == 2
        and all(size is not None and size % float8.MULTIPLE == 0 and size > 0 for size in sizes)
    )
