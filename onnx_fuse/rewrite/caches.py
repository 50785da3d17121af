"""Caches that grow: the Concats of keys and of values before attention become one operator.

It takes in the rotation of queries and new keys by the same tables. A decoder's layer then has one
launch for what were up to eight. It is for graphs that this runtime's kernels run.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, rank
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.fused.caches import PLAIN, ROTATED
from onnx_fuse.ops.fused.sdpa import KINDS
from onnx_fuse.ops.rules import (
    Rewriter,
    attribute,
    depends_on,
    is_constant,
    nodes_in_order,
    producer,
)
from onnx_fuse.rewrite.canonicalize import fold_sizes, refresh
from onnx_fuse.rewrite.rotation import rotation_of

GROWING_CACHE = PLAIN
"""Name of the rewrite in reports and for --fuse and --skip."""


def grow_caches(rw: Rewriter) -> int:
    """Put one operator in the place of the two Concats before attention; how many there were.

    The nodes are not in order afterwards: a present may be read before the other is there.
    """
    nodes = [node for node in nodes_in_order(rw.graph, tuple(KINDS)) if _joins(node)]
    if any(_is_sum_of_products(node.inputs[0]) for node in nodes):
        refresh(rw.model)
        # what repeated the heads is gone, and said of no size that it is not 0
        fold_sizes(rw.model, training=False)
    return sum(_grow(rw, node) for node in nodes)


def _is_sum_of_products(value: ir.Value | None) -> bool:
    """Whether it is the sum of two products that is not seen to be a rotation."""
    total = producer(value, "Add")
    if total is None or rotation_of(total) is not None:
        return False
    return all(producer(v, "Mul") is not None for v in total.inputs)


def _joins(attention: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The Concats of the keys and of the values."""
    _, k, v = attention.inputs[:3]
    keys, values = _growing(k, attention), _growing(v, attention)
    return None if keys is None or values is None or keys is values else (keys, values)


def _grow(rw: Rewriter, attention: ir.Node) -> bool:
    q, joins = attention.inputs[0], _joins(attention)
    if joins is None or q is None:
        return False
    (past_key, new_key), (past_value, new_value) = (join.inputs for join in joins)
    old, op = [join.outputs[0] for join in joins], Builder()
    operands = [new_key, new_value, past_key, past_value]
    turned, turned_key = (
        rotation_of(x.producer()) if x is not None else None for x in (q, new_key)
    )
    name = PLAIN
    if turned is not None and turned_key is not None:
        tables = [turned.cos, turned.sin]
        if [turned_key.cos, turned_key.sin] == tables and dim(turned.x, -1) == dim(new_key, -1):
            name, old = ROTATED, [q, *old]
            operands = [turned.x, turned_key.x, new_value, past_key, past_value, *tables]
    if any(depends_on(operand, value) for operand in operands for value in old):
        return False
    new = op.node(name, operands, domain=FUSE, outputs=len(old))
    return rw.replace(attention, op, old, new)


def _growing(value: ir.Value | None, attention: ir.Node) -> ir.Node | None:
    """The Concat of a past and new tokens [B, H, tokens, D], which a Cast may lead to."""
    cast = producer(value, "Cast")
    join = producer(value if cast is None else cast.inputs[0], "Concat")
    if join is None or join.graph is not attention.graph or len(join.inputs) != 2:
        return None
    past, new = join.inputs
    if attribute(join, "axis", 0) not in (2, -2) or is_constant(past) or is_constant(new):
        return None
    return join if rank(past) == rank(new) == 4 and past is not new else None
