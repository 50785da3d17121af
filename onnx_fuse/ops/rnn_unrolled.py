"""One step of RNN, GRU and LSTM in standard ONNX, for nodes that no step operator of ours serves.

Those with peepholes, clipped or coupled gates or other activations are written out over their
steps on a GPU (`lower/recurrent.py`), and as Scans where they are differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim
from onnx_fuse.ops.formula import emitted
from onnx_fuse.ops.shape_ops import arguments

DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
TAKES: dict[str, tuple[float | None, ...]] = {
    **dict.fromkeys(("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **{"Elu": (1.0,), "LeakyRelu": (0.01,), "ThresholdedRelu": (None,)},
    **{"HardSigmoid": (0.2, 0.5), "Affine": (None, None), "ScaledTanh": (None, None)},
}
"""alpha and beta where they are not given; None: onnxruntime's three operators differ."""
Activation = tuple[str, tuple[float, ...]]


class Cell:
    """One direction of a node: `step` is its formula, from the ONNX specification."""

    def __init__(
        self, op: Builder, node: ir.Node, direction: int, acts: Sequence[Activation]
    ) -> None:
        self.op, self.kind, self.acts = op, node.op_type, acts
        self.clip = node.attributes.get_float("clip", 0.0)
        self.coupled = bool(node.attributes.get_int("input_forget", 0))
        self.linear = bool(node.attributes.get_int("linear_before_reset", 0))
        self.at = op.constant(np.int64(direction))
        x, w, r, b, _, self.h0, self.c0, p = arguments(node, 8)
        self.dtype = x.dtype or ir.DataType.FLOAT
        self.w, self.r = (op.Transpose(self.mine(v), perm=[1, 0]) for v in (w, r))
        self.r.dtype = self.dtype  # which numbers in formulas take
        self.b = [] if b is None else op.Split(self.mine(b), num_outputs=2, axis=0, outputs=2)
        self.p = [] if p is None else op.Split(self.mine(p), num_outputs=3, axis=0, outputs=3)
        self.h: ir.Value
        self.c: ir.Value | None = None

    def mine(self, value: ir.Value) -> ir.Value:
        """The part of a stacked tensor that belongs to this direction."""
        return self.op.Gather(value, self.at, axis=0)

    def act(self, which: int, x: str, clipped: bool = True) -> str:
        """The formula of activation `which` of the formula x, whose values are clipped first."""
        x = f"Clip({x}, {-self.clip}, {self.clip})" if self.clip and clipped else x
        name, numbers = self.acts[which]
        formulas = {"Affine": "(({x}) * {0} + {1})", "ScaledTanh": "(Tanh(({x}) * {1}) * {0})"}
        given = ", ".join(f"{k} = {v}" for k, v in zip(("alpha", "beta"), numbers, strict=False))
        call = f"{name} <{given}> ({{x}})" if given else f"{name}({{x}})"
        return formulas.get(name, call).format(*numbers, x=x)

    def products(self, x: ir.Value) -> ir.Value:
        """x Wᵀ + b of all steps: [T, B, gates H]."""
        y: ir.Value = self.op.MatMul(x, self.w)
        return self.op.Add(y, self.b[0]) if self.b else y

    def step(self, row: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """The next h and c from a row of `products`."""
        values: dict[str, Any] = {"row": row, "h": self.h, "c": self.c, "r": self.r}
        values |= zip(("peep_i", "peep_o", "peep_f"), self.p, strict=False)
        values |= {"b": self.b[1]} if self.b else {}
        total = "row + MatMul(h, r) + b" if self.b else "row + MatMul(h, r)"
        if self.kind == "LSTM":
            i, o, f = "iof"
            if self.p:
                i, o, f = "i + peep_i * c", "o + peep_o * new", "f + peep_f * c"
            h, c = emitted(
                f"""i, o, f, g = Split <num_outputs = 4, axis = -1> ({total})
                entered = {self.act(0, i)}
                left = {"1 - entered" if self.coupled else self.act(0, f)}
                new = left * c + entered * {self.act(1, "g")}
                {self.act(0, o)} * {self.act(2, "new", clipped=False)}, new""",
                self.op,
                **values,
            )
            return h, c
        formula = self._gru() if self.kind == "GRU" else self.act(0, total)
        return emitted(formula, self.op, **values), None

    def _gru(self) -> str:
        """z and s gate; the candidate reads s ⊙ h, or s ⊙ (h Rᵀ + b) if linear_before_reset."""
        thirds = "{0}z, {0}s, {0}h = Split <num_outputs = 3, axis = -1> ({1})".format
        parts = [("x", "row"), ("h", "MatMul(h, r)"), ("r", "r"), *[("b", "b")] * bool(self.b)]
        bz, bs, bh = (" + bz", " + bs", " + bh") if self.b else ("", "", "")
        recurrent = f"s * (hh{bh})" if self.linear else f"MatMul(s * h, rh){bh}"
        lines = [thirds(*part) for part in parts]
        lines += [f"z = {self.act(0, f'xz + hz{bz}')}", f"s = {self.act(0, f'xs + hs{bs}')}"]
        return "\n".join([*lines, f"n = {self.act(1, f'xh + {recurrent}')}", "n + z * (h - n)"])


def activations(node: ir.Node, directions: int) -> list[Activation] | None:
    """The node's activations with their numbers; None where onnxruntime may read them otherwise."""
    default = DEFAULT[node.op_type] * directions
    names = list(node.attributes.get_strings("activations", default))
    if len(names) != len(default) or any(name not in TAKES for name in names):
        return None
    numbers: list[list[float]] = [[] for _ in names]
    for k, attribute in enumerate(("activation_alpha", "activation_beta")):
        takers = [i for i, name in enumerate(names) if len(TAKES[name]) > k]
        values = list(node.attributes.get_floats(attribute, ()))
        if values and (len(values) != len(takers) or (node.op_type == "RNN" and len(names) > 1)):
            return None
        usual = [TAKES[names[i]][k] for i in takers]
        for i, number in zip(takers, values or usual, strict=True):
            if number is None:
                return None
            numbers[i].append(number)
    return [(name, tuple(n)) for name, n in zip(names, numbers, strict=True)]


class Written:
    """A node in other operators, whose `results` are made by the nodes of `op`.

    A direction is a Scan. With `sizes`, the numbers of steps, sequences and hidden units, its steps
    are written out.
    """

    def __init__(
        self, op: Builder, node: ir.Node, acts: Sequence[Activation] = (),
        sizes: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        self.op, self.node, self.acts, self.sizes = op, node, acts, sizes
        way = node.attributes.get_string("direction", "forward")
        layout, lstm = node.attributes.get_int("layout", 0) == 1, node.op_type == "LSTM"
        x, self.w, self.r, self.b, self.lengths, *states = arguments(node, 6 + lstm)
        self.dtype: ir.DataType = x.dtype or ir.DataType.FLOAT
        self.zero = op.constant(np.zeros((), self.dtype.numpy()))
        self.steps: ir.Value | None = None
        if sizes is None and not dim(x, int(layout)):
            self.steps = op.Shape(x, start=int(layout), end=int(layout) + 1)
        self.rows, *self.states = (
            op.Transpose(v, perm=[1, 0, 2]) if layout and v is not None else v for v in (x, *states)
        )
        if self.steps is not None:
            self._at_least_one()
        self.counts = None if self.lengths is None else op.Unsqueeze(self.lengths, [1])
        directions = [
            self._direction(i, bool(i) or way == "reverse")
            for i in range(2 if way == "bidirectional" else 1)
        ]
        self.results = []
        for i, parts in enumerate(zip(*directions, strict=True)):
            value = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=1 if i == 0 else 0)
            if layout:
                value = op.Transpose(value, perm=[2, 0, 1, 3] if i == 0 else [1, 0, 2])
            self.results.append(value)

    def _at_least_one(self) -> None:
        """Where x may have no step, one past every length, as a Scan has at least one."""
        op, size = self.op, self.steps
        if self.lengths is None:
            batch = op.Shape(self.rows, start=1, end=2)
            self.lengths = op.Expand(op.Cast(size, to=ir.DataType.INT32), batch)
        more = op.Sub(op.Max(size, [1]), size)
        pads = op.Concat([0, 0, 0], more, [0, 0], axis=0)
        self.rows = op.Pad(self.rows, pads)

    def _direction(self, i: int, reverse: bool) -> list[ir.Value]:
        """Y [T, 1, B, H], Y_h and Y_c [1, B, H]."""
        op = self.op
        *last, y = self.walked(i, reverse)
        if self.steps is not None:
            y = op.Slice(y, [0], self.steps, [0])
        if self.counts is not None:  # onnxruntime's last state of an empty sequence is 0, not h0
            some = op.Greater(self.counts, op.constant(np.int32(0)))
            last = [op.Where(some, v, self.zero) for v in last]
        return [op.Unsqueeze(y, [1]), *(op.Unsqueeze(v, [0]) for v in last)]

    def walked(self, i: int, reverse: bool) -> Sequence[ir.Value]:
        """The last states [B, H] of direction `i`, and its rows [T, B, H]."""
        op, each = self.op, len(DEFAULT[self.node.op_type])
        cell = Cell(op, self.node, i, self.acts[i * each : (i + 1) * each])
        products = cell.products(self.rows)
        start = [self._start(cell, v, products) for v in self.states]
        if self.sizes is None:
            return self._scanned(cell, products, start, reverse)
        rows: dict[int, ir.Value] = {}
        for t in range(self.sizes[0])[:: -1 if reverse else 1]:
            row = op.Gather(products, op.constant(np.int64(t)), axis=0)
            *start, rows[t] = self._step(op, cell, row, op.constant(np.int32(t)), start)
        y = op.Concat(*(op.Unsqueeze(row, [0]) for _, row in sorted(rows.items())), axis=0)
        return [*start, y]

    def _step(
        self, op: Builder, cell: Cell, row: ir.Value, t: ir.Value, states: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """The states after step `t`, and its row of the result."""
        cell.op, cell.h, cell.c = op, states[0], states[1] if len(states) > 1 else None
        new = [v for v in cell.step(row) if v is not None]
        if self.counts is None:
            return [*new, new[0]]
        alive = op.Less(t, self.counts)
        y = op.Where(alive, new[0], op.constant(np.zeros((), self.dtype.numpy())))
        return [*(op.Where(alive, v, old) for v, old in zip(new, states, strict=True)), y]

    def _scanned(
        self, cell: Cell, products: ir.Value, start: Sequence[ir.Value], reverse: bool
    ) -> Sequence[ir.Value]:
        op, inner, scanned = self.op, Builder(), [products]
        if self.counts is not None:
            length = op.Squeeze(op.Shape(products, start=0, end=1), [0])
            every = op.Range(op.constant(0), length, op.constant(1))
            scanned.append(op.Cast(every, to=ir.DataType.INT32))
        inputs = [ir.Value(name="") for _ in (*start, *scanned)]
        states = inputs[: len(start)]
        ends = self._step(inner, cell, inputs[len(start)], inputs[-1], states)
        ends = [v if ends.index(v) == k else inner.Identity(v) for k, v in enumerate(ends)]
        body = ir.Graph(inputs, ends, nodes=inner.nodes, name="step")
        how: dict[str, Any] = {"body": body, "num_scan_inputs": len(scanned)}
        if reverse:
            how |= {"scan_input_directions": [1] * len(scanned), "scan_output_directions": [1]}
        results: Sequence[ir.Value] = op.node(
            "Scan", [*start, *scanned], outputs=len(ends), attributes=how
        )
        return results

    def _start(self, cell: Cell, initial: ir.Value | None, products: ir.Value) -> ir.Value:
        """The state [B, H] before the first step."""
        op = self.op
        if initial is not None:
            return cell.mine(initial)
        if self.sizes is not None:
            zeros: ir.Value = op.constant(np.zeros(self.sizes[1:], self.dtype.numpy()))
            return zeros
        batch = op.Shape(products, start=1, end=2)
        hidden = op.Shape(cell.r, start=0, end=1)
        wide: ir.Value = op.Expand(self.zero, op.Concat(batch, hidden, axis=0))
        return wide
