"""RNN, GRU and LSTM written out over their steps: one product for all inputs, one a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

MAX_STEPS = 1024
"""Steps that are written out at most."""
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
PLAIN = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")  # activations without a parameter


class Cell:
    """One direction of a node: `step` is its formula, from the ONNX specification."""

    def __init__(self, op: Any, node: ir.Node, direction: int, names: Sequence[str]) -> None:
        self.op, self.kind, self.names = op, node.op_type, names
        self.clip = node.attributes.get_float("clip", 0.0)
        self.linear = bool(node.attributes.get_int("linear_before_reset", 0))
        self.at = op.constant(np.int64(direction))
        x, w, r, *rest = node.inputs
        assert x is not None
        assert w is not None
        assert r is not None
        self.dtype = x.dtype or ir.DataType.FLOAT
        rest += [None] * (5 - len(rest))
        b, _, self.h0, self.c0, p = rest
        self.w, self.r = (op.Transpose(self.mine(v), perm=[1, 0]) for v in (w, r))
        self.b = [] if b is None else op.Split(self.mine(b), num_outputs=2, axis=0, outputs=2)
        self.p = [] if p is None else op.Split(self.mine(p), num_outputs=3, axis=0, outputs=3)
        self.h: ir.Value
        self.c: ir.Value | None = None

    def mine(self, value: ir.Value) -> ir.Value:
        """This direction's part."""
        found: ir.Value = self.op.Gather(value, self.at, axis=0)
        return found

    def act(self, which: int, value: ir.Value) -> ir.Value:
        """Activation `which` of the clipped value."""
        if self.clip:
            ends = (self.op.constant(v, self.dtype) for v in (-self.clip, self.clip))
            value = self.op.Clip(value, *ends)
        found: ir.Value = self.op.node(self.names[which], [value])
        return found

    def products(self, x: ir.Value) -> ir.Value:
        """x Wᵀ + b of all steps: [T, B, gates H]."""
        y: ir.Value = self.op.MatMul(x, self.w)
        return self.op.Add(y, self.b[0]) if self.b else y

    def step(self, row: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """The next h and c from a row of `products`."""
        op = self.op
        own = op.MatMul(self.h, self.r)
        if self.kind == "GRU":
            return self._gru(row, own), None
        total = op.Add(row, own)
        if self.b:
            total = op.Add(total, self.b[1])
        if self.kind == "RNN":
            return self.act(0, total), None
        i, o, f, c = op.Split(total, num_outputs=4, axis=-1, outputs=4)
        if self.p:
            i, f = op.Add(i, op.Mul(self.p[0], self.c)), op.Add(f, op.Mul(self.p[2], self.c))
        kept = op.Mul(self.act(0, f), self.c)
        new = op.Add(kept, op.Mul(self.act(0, i), self.act(1, c)))
        if self.p:
            o = op.Add(o, op.Mul(self.p[1], new))
        return op.Mul(self.act(0, o), op.node(self.names[2], [new])), new

    def _gru(self, row: ir.Value, own: ir.Value) -> ir.Value:
        """z and r gate; the candidate reads r ⊙ h, or r ⊙ (h Rᵀ + b) if linear_before_reset."""
        op = self.op
        thirds = [op.Split(v, num_outputs=3, axis=-1, outputs=3) for v in (row, own)]
        (xz, xr, xh), (hz, hr, hh) = thirds
        bz, br, bh = (
            op.Split(self.b[1], num_outputs=3, axis=-1, outputs=3) if self.b else [None] * 3
        )

        def plus(a: ir.Value, b: ir.Value | None) -> ir.Value:
            return a if b is None else op.Add(a, b)

        z, r = self.act(0, plus(op.Add(xz, hz), bz)), self.act(0, plus(op.Add(xr, hr), br))
        if self.linear:
            candidate = op.Add(xh, op.Mul(r, plus(hh, bh)))
        else:
            recurrent = op.Split(self.r, num_outputs=3, axis=-1, outputs=3)[2]
            candidate = plus(op.Add(xh, op.MatMul(op.Mul(r, self.h), recurrent)), bh)
        new = self.act(1, candidate)
        found: ir.Value = op.Add(new, op.Mul(z, op.Sub(self.h, new)))
        return found


def recurrent(
    op: Any, node: ir.Node, shapes: Sequence[tuple[int, ...] | None], known: Any
) -> Sequence[ir.Value | None] | None:
    """Y [T, D, B, H], Y_h and Y_c [D, B, H]; past a sequence's length the state stays, Y is 0."""
    kind, x, attributes = node.op_type, node.inputs[0], node.attributes
    assert x is not None
    shape, sizes = shapes[0], shapes[2]
    assert shape is not None
    assert sizes is not None
    layout, way = (
        attributes.get_int("layout", 0) == 1,
        attributes.get_string("direction", "forward"),
    )
    steps, batch = (shape[1], shape[0]) if layout else shape[:2]
    directions, _, hidden = sizes
    names = list(attributes.get_strings("activations", DEFAULT[kind] * directions))
    each = len(DEFAULT[kind])
    listed = any(a in attributes for a in ("activation_alpha", "activation_beta"))
    if not 0 < steps <= MAX_STEPS or listed or attributes.get_int("input_forget", 0) == 1:
        return None
    if len(names) != each * directions or any(n not in PLAIN for n in names):
        return None
    lengths = node.inputs[4] if len(node.inputs) > 4 else None
    if lengths is not None:
        lengths = op.Unsqueeze(lengths, op.constant([1]))
    rows = op.Transpose(x, perm=[1, 0, 2]) if layout else x
    zeros = op.constant(np.zeros((batch, hidden), (x.dtype or ir.DataType.FLOAT).numpy()))
    ys, hs, cs = [], [], []
    for d in range(directions):
        cell = Cell(op, node, d, names[d * each : (d + 1) * each])
        pair = []
        for given in (cell.h0, cell.c0):
            if given is not None and layout:
                given = op.Transpose(given, perm=[1, 0, 2])
            pair.append(zeros if given is None else cell.mine(given))
        cell.h, cell.c = pair
        products = cell.products(rows)
        made: dict[int, Any] = {}
        for t in range(steps)[:: -1 if way == "reverse" or d else 1]:
            h, c = cell.step(op.Gather(products, op.constant(np.int64(t)), axis=0))
            made[t] = h
            if lengths is not None:
                alive = op.Less(op.constant(np.int32(t)), lengths)
                made[t] = op.Where(alive, h, zeros)
                h = op.Where(alive, h, cell.h)
                c = None if c is None else op.Where(alive, c, cell.c)
            cell.h, cell.c = h, c
        first = op.constant([0])
        stack = op.Concat(*(op.Unsqueeze(made[t], first) for t in range(steps)), axis=0)
        ys.append(op.Unsqueeze(stack, op.constant([1])))
        hs.append(op.Unsqueeze(cell.h, first))
        cs.append(None if cell.c is None else op.Unsqueeze(cell.c, first))
    results = [op.Concat(*ys, axis=1), op.Concat(*hs, axis=0)]
    if kind == "LSTM":
        results.append(op.Concat(*cs, axis=0))
    if layout:
        results = [op.Transpose(results[0], perm=[2, 0, 1, 3])] + [
            op.Transpose(v, perm=[1, 0, 2]) for v in results[1:]
        ]
    return results
