"""One step of RNN, GRU and LSTM in standard ONNX, for nodes that no step operator of ours serves.

Those with peepholes, clipped or coupled gates or other activations are written out over their
steps on a GPU (`kernels/recurrent.py`), and as Scans where they are differentiated.
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
    """A node as Scans, one a direction: the nodes of `op`, and `results` for its outputs."""

    def __init__(self, node: ir.Node, acts: Sequence[Activation]) -> None:
        self.op, self.node = Builder(), node
        attributes = node.attributes
        way = attributes.get_string("direction", "forward")
        self.layout = attributes.get_int("layout", 0) == 1
        count, each = 2 if way == "bidirectional" else 1, len(DEFAULT[node.op_type])
        op = self.op
        x, _, _, _, self.lengths = arguments(node, 5)
        self.steps: ir.Value | None = None
        if not dim(x, int(self.layout)):
            self.steps = op.Shape(x, start=int(self.layout), end=int(self.layout) + 1)
        self.rows: ir.Value = op.Transpose(x, perm=[1, 0, 2]) if self.layout else x
        if self.steps is not None:
            self._at_least_one()
        if self.lengths is not None:
            self.lengths = op.Unsqueeze(self.lengths, [1])
        by_direction = [
            self._direction(i, acts[i * each : (i + 1) * each], bool(i) or way == "reverse")
            for i in range(count)
        ]
        self.results = []
        for i, parts in enumerate(zip(*by_direction, strict=True)):
            value = op.Concat(*parts, axis=1 if i == 0 else 0)
            if self.layout:
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

    def _direction(self, i: int, acts: Sequence[Activation], reverse: bool) -> list[ir.Value]:
        """Y [T, 1, B, H], Y_h and Y_c [1, B, H]."""
        op, first = self.op, self.op.constant([0])
        cell = Cell(op, self.node, i, acts)
        products = cell.products(self.rows)
        lstm = self.node.op_type == "LSTM"
        start = [self._start(cell, cell.h0, products)]
        start += [self._start(cell, cell.c0, products)] if lstm else []
        scanned = [products]
        if self.lengths is not None:
            length = op.Squeeze(op.Shape(products, start=0, end=1), [0])
            every = op.Range(op.constant(0), length, op.constant(1))
            scanned.append(op.Cast(every, to=ir.DataType.INT32))
        inner = Builder()
        inputs = [ir.Value(name="") for _ in (*start, *scanned)]
        cell.op, cell.h, cell.c = inner, inputs[0], inputs[1] if lstm else None
        new = [v for v in cell.step(inputs[len(start)]) if v is not None]
        row = new[0]
        if self.lengths is not None:
            alive = inner.Less(inputs[-1], self.lengths)
            zero = inner.constant(np.zeros((), cell.dtype.numpy()))
            row = inner.Where(alive, row, zero)
            new = [inner.Where(alive, v, old) for v, old in zip(new, inputs, strict=False)]
        ends = [*new, row]
        ends = [v if ends.index(v) == k else inner.Identity(v) for k, v in enumerate(ends)]
        body = ir.Graph(inputs, ends, nodes=inner.nodes, name=f"step {i}")
        way = {"scan_input_directions": [1] * len(scanned), "scan_output_directions": [1]}
        results = op.node(
            "Scan",
            [*start, *scanned],
            outputs=len(start) + 1,
            attributes={"body": body, "num_scan_inputs": len(scanned), **(way if reverse else {})},
        )
        *last, y = results
        if self.steps is not None:
            y = op.Slice(y, [0], self.steps, [0])
        if self.lengths is not None:  # onnxruntime's last state of an empty sequence is 0, not h0
            some = op.Greater(self.lengths, op.constant(np.int32(0)))
            zero = op.constant(np.zeros((), cell.dtype.numpy()))
            last = [op.Where(some, v, zero) for v in last]
        return [op.Unsqueeze(y, [1]), *(op.Unsqueeze(v, first) for v in last)]

    def _start(self, cell: Cell, initial: ir.Value | None, products: ir.Value) -> ir.Value:
        """The state [B, H] before the first step."""
        op = self.op
        if initial is not None:
            initial = op.Transpose(initial, perm=[1, 0, 2]) if self.layout else initial
            return cell.mine(initial)
        batch = op.Shape(products, start=1, end=2)
        hidden = op.Shape(cell.r, start=0, end=1)
        zero = op.constant(np.zeros((), cell.dtype.numpy()))
        return op.Expand(zero, op.Concat(batch, hidden, axis=0))
