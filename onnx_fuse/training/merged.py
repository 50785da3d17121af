"""Adapters that are added to their weights once a step, in front of everything that reads these.

W + scale · A·B is one small product, and a sum in float32 that is rounded to 16 bits where the step
computes in them. All that reads W reads the sum, so that a step has the calls of the network
without adapters. With dW = xᵀ·dy the gradients of A and B, here without the scale, are

    dA = dW·Bᵀ = xᵀ·(dy·Bᵀ)      dB = Aᵀ·dW = (x·A)ᵀ·dy

by two large products and two small ones through dW, or by four small ones that read x and dy twice
each: whichever costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import onnx_ir as ir

from onnx_fuse.adapters.files import Adapter
from onnx_fuse.arrays import Array
from onnx_fuse.ir.build import Builder, add_initializer, dim, insert_behind, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.fused.norm import norm_attributes, norm_node
from onnx_fuse.ops.rules import cast_to, typed
from onnx_fuse.rewrite import packed_weights

ByRows: TypeAlias = Callable[[int | None, int, int, int], bool]


def _fewer_operations(rows: int | None, k: int, n: int, rank: int) -> bool:
    """Whether four products of rows and rank have fewer operations than one of rows, and two."""
    m = rows or 1024
    return 2 * m * rank * (k + n) < m * k * n + 2 * k * n * rank


@dataclass(frozen=True)
class Merging:
    """Low-rank adapters that are added to weights, and how their gradients are made."""

    adapters: Mapping[str, Adapter]
    """By the names of the weights in the model as it was given."""
    first: Mapping[str, Array]
    """The first values of each A [K, rank] and B [rank, N]."""
    by_rows: ByRows = _fewer_operations
    """For (rows or None, K, N, rank): whether the products of rows cost less than those of dW."""

    @staticmethod
    def of(
        attached: ir.Model, adapters: Sequence[Adapter], by_rows: ByRows = _fewer_operations
    ) -> Merging:
        """Those of the model from `adapters.attach`."""
        names = [name for each in adapters for name in (each.a, each.b)]
        tensors = {name: attached.graph.initializers[name].const_value for name in names}
        first = {name: t.numpy() for name, t in tensors.items() if t is not None}
        return Merging({each.weight: each for each in adapters}, first, by_rows)


@dataclass(frozen=True)
class _Product:
    """scale · A·B, or with `turned` its transpose, as a part of a packed weight."""

    a: ir.Value
    b: ir.Value
    low: tuple[ir.Value, ir.Value]
    """A and B in the type of the sum's gradient."""
    scale: float
    turned: bool

    def added_to(self, op: Builder, w: ir.Value) -> ir.Value:
        """Its sum with a weight of its shape, worked out in the type of A."""
        kind, shape = w.dtype, w.shape
        w, (a, b) = cast_to(op, w, self.a), self.low
        pair, how = ((b, a), {"transA": 1, "transB": 1}) if self.turned else ((a, b), {})
        if a is self.a:
            total = typed(op.Gemm(*pair, w, alpha=self.scale, **how), w, shape)
        else:
            change = typed(op.Gemm(*pair, alpha=self.scale, **how), a, shape)
            total = typed(op.Add(w, cast_to(op, change, w)), w, shape)
        if kind is None or kind == total.dtype:
            return total
        narrow: ir.Value = op.Cast(total, to=kind.value)
        narrow.dtype, narrow.shape = kind, shape
        return narrow

    def gradients(self, op: Builder, dw: ir.Value) -> list[ir.Value]:
        """Those of A and B from that of the sum."""
        (a, b), turned = self.low, {"transA": 1} if self.turned else {}
        da = op.Gemm(dw, b, alpha=self.scale, transB=1, **turned)
        turned = {"transB": 1} if self.turned else {}
        db = op.Gemm(a, dw, alpha=self.scale, transA=1, **turned)
        return self._typed(op, dw, da, db)

    def gradients_of_rows(self, op: Builder, x: ir.Value, dy: ir.Value) -> list[ir.Value]:
        """The same from the rows x and dy of the product with the sum."""
        if self.turned:
            x, dy = dy, x
        a, b = self.low
        t = typed(op.Gemm(dy, b, transB=1), dy, [None, dim(b, 0)])
        da = op.Gemm(x, t, alpha=self.scale, transA=1)
        u = typed(op.MatMul(x, a), x, [None, dim(a, 1)])
        db = op.Gemm(u, dy, alpha=self.scale, transA=1)
        return self._typed(op, dy, da, db)

    def _typed(self, op: Builder, like: ir.Value, *grads: ir.Value) -> list[ir.Value]:
        factors = (self.a, self.b)
        return [
            cast_to(op, typed(g, like, v.shape), v) for v, g in zip(factors, grads, strict=True)
        ]


class Sums:
    """The weights of a graph that contain low-rank products."""

    def __init__(self, by_rows: ByRows = _fewer_operations) -> None:
        self._by_rows = by_rows
        self._products: dict[ir.Value, list[tuple[_Product | None, int]]] = {}
        self._axes: dict[ir.Value, int | None] = {}

    def add(
        self, total: ir.Value, axis: int | None, products: list[tuple[_Product | None, int]]
    ) -> None:
        """Keep of a sum the products in its parts along `axis`, and the parts' sizes."""
        self._products[total], self._axes[total] = products, axis

    @property
    def factors(self) -> set[ir.Value]:
        """All A and B."""
        products = [p for each in self._products.values() for p, _ in each if p is not None]
        return {v for p in products for v in (p.a, p.b)}

    def of(self, weights: Collection[ir.Value]) -> list[ir.Value]:
        """The sums that the gradients of some of `weights` are made of."""
        return [
            total
            for total, products in self._products.items()
            if any(p is not None and (p.a in weights or p.b in weights) for p, _ in products)
        ]

    def gradients(
        self, graph: ir.Graph, of_sums: Mapping[ir.Value, ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """The gradients of A and B from those of the sums, with their nodes behind the latter's."""
        grads: dict[ir.Value, ir.Value] = {}
        for total, dw in of_sums.items():
            op, after = Builder(), required(dw.producer())
            for product, both in self._each(op, total, dw):
                for v, g in zip((product.a, product.b), both, strict=True):
                    grads[v] = typed(op.Add(grads[v], g), v, v.shape) if v in grads else g
            graph.insert_after(after, op.nodes)
        return grads

    def _each(
        self, op: Builder, total: ir.Value, dw: ir.Value
    ) -> Iterator[tuple[_Product, Sequence[ir.Value]]]:
        """Each product in a sum, with the gradients of its A and B."""
        products, axis = self._products[total], self._axes[total]
        if axis is None:
            product, operands = required(products[0][0]), _operands(dw)
            rank = required(product.a.shape).numpy()[1]
            sizes = (*required(total.shape).numpy(), rank)
            if operands is not None and self._by_rows(operands.rows, *sizes):
                yield product, product.gradients_of_rows(op, *operands.matrices(op, *sizes[:2]))
            else:
                yield product, product.gradients(op, dw)
            return
        ends = op.constant([size for _, size in products])
        pieces = op.Split(dw, ends, axis=axis, outputs=len(products))
        for (part, _), piece in zip(products, pieces, strict=True):
            if part is not None:
                yield part, part.gradients(op, typed(piece, dw))


@dataclass(frozen=True)
class _Operands:
    """What a dW is the product of: rows x, or those of a norm of them, and rows dy."""

    x: ir.Value
    dy: ir.Value
    norm: tuple[ir.Value, ...] = ()
    """The norm's scale, and the bias of a LayerNormalization."""
    attributes: Mapping[str, int | float] = field(default_factory=dict)
    """The norm's."""

    @property
    def rows(self) -> int | None:
        """How many rows there are, where it is known."""
        sizes = None if self.x.shape is None else list(self.x.shape)[:-1]
        static = [size for size in sizes or () if isinstance(size, int)]
        return prod(static) if sizes is not None and len(static) == len(sizes) else None

    def matrices(self, op: Builder, k: int, n: int) -> tuple[ir.Value, ir.Value]:
        """x [rows, k], normalized where it is, and dy [rows, n]."""
        x = self.x
        if self.norm:
            kind = "LayerNorm" if len(self.norm) == 2 else "RMSNorm"
            x = norm_node(op, kind, x, self.norm, self.attributes)
        return _matrix(op, x, k), _matrix(op, self.dy, n)


def _matrix(op: Builder, v: ir.Value, columns: int) -> ir.Value:
    if v.shape is not None and len(v.shape) == 2:
        return v
    return typed(op.Reshape(v, [-1, columns]), v, [None, columns])


def _operands(dw: ir.Value) -> _Operands | None:
    """The operands of the product that is `dw`; None where one of them is in no memory."""
    node = dw.producer()
    if node is None or None in node.inputs:
        return None
    operands = [v for v in node.inputs if v is not None]
    if node.op_type == "Gemm" and not node.domain:
        how = {name: attribute.value for name, attribute in node.attributes.items()}
        usual = {"alpha": 1.0, "beta": 1.0, "transA": 1, "transB": 0}
        plain = len(operands) == 2 and usual | how == usual and how.get("transA") == 1
        return _Operands(operands[0], operands[1]) if plain else None
    name = FusedName.of(node.op_type)
    if node.domain != FUSE or name.family != "Gemm" or not name.grad:
        return None
    if name.activation or name.place or name.exposed:
        return None
    dy, x, *rest = operands
    if not name.norm:
        return _Operands(x, dy)
    # the statistics are the forward's, which has the norm's attributes
    rstd = rest[3] if name.rms else rest[5]
    forward = rstd.producer()
    if forward is None or FusedName.of(forward.op_type).norm != name.norm:
        return None
    affine = tuple(rest[:1] if name.rms else rest[:2])
    return _Operands(x, dy, affine, norm_attributes(forward))


def add_to_weights(model: ir.Model, merging: Merging) -> Sums:
    """Put W + scale · A·B in the place of each weight W, in place.

    Args:
        model: A graph whose weights may be packed (`rewrite.params`).
        merging: The low-rank products.

    Returns:
        The sums. A and B have become initializers of the graph.
    """
    graph, op, merged, adapters = model.graph, Builder(), Sums(merging.by_rows), merging.adapters
    casts = Builder()  # in front of all sums, so that one call makes them
    for weight in list(graph.initializers.values()):
        axis, parts = packed_weights.parts(weight)
        uses = list(weight.uses())
        ends = {node for node, _ in uses}
        # the gradient is that of what the step computes with: of the sum in 16 bits, where it is
        cast = next(iter(ends)) if len(ends) == 1 else None
        low = weight if cast is None or cast.op_type != "Cast" or cast.domain else cast.outputs[0]
        if not uses or not any(part.name in adapters for part in parts):
            continue
        pieces: Sequence[ir.Value] = [weight]
        if axis is not None:
            sizes = op.constant([part.packed_shape[axis] for part in parts])
            pieces = op.Split(weight, sizes, axis=axis, outputs=len(parts))
        products: list[tuple[_Product | None, int]] = []
        sums = []
        for part, piece in zip(parts, pieces, strict=True):
            piece = typed(piece, weight, part.packed_shape)
            product = None
            if part.name in adapters:
                each = adapters[part.name]
                a, b = (_initializer(graph, n, merging.first[n]) for n in (each.a, each.b))
                turned = each.transposed != (part.perm == (1, 0))
                narrow = (cast_to(casts, a, low), cast_to(casts, b, low))
                product = _Product(a, b, narrow, each.scale, turned)
                piece = product.added_to(op, piece)
            products.append((product, 0 if axis is None else part.packed_shape[axis]))
            sums.append(piece)
        total = sums[0]
        if axis is not None:
            total = typed(op.Concat(*sums, axis=axis), weight, weight.shape)
        total.name = f"{weight.name}.sum"
        for node, index in uses:
            node.replace_input_with(index, total)
        merged.add(total if low is weight else low, axis, products)
    insert_behind(graph, None, [*casts.nodes, *op.nodes])
    return merged


def _initializer(graph: ir.Graph, name: str, content: Array) -> ir.Value:
    if name not in graph.initializers:  # else of a weight that stands in two packed ones
        add_initializer(graph, name, content)
    return graph.initializers[name]
