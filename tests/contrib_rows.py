"""What a test of a contrib operator is made of; and the rows of the less usual operators."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

Array = np.ndarray[Any, Any]


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape).astype(dtype)


def whole(*shape: int, high: int, low: int = 0, dtype: Any = np.int32, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)


@dataclass(frozen=True)
class Row:
    """`weights` are the operands that are initializers; an output named "" is not asked for.

    `limit` bounds the difference over 1 + |value|: sums in another order, in float32. `steps`
    bounds that of integers.
    """

    op: str
    operands: tuple[Array | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    weights: tuple[int, ...] = ()
    domain: str = "com.microsoft"
    name: str = ""
    limit: float = 3e-6
    steps: int = 0
    fixed: bool = False  # the operands' last axes have a size, as hidden sizes do

    def __str__(self) -> str:
        return f"{self.op}-{self.name}" if self.name else self.op

    def model(self) -> ir.Model:
        inputs, constants, values = [], [], []
        for i, array in enumerate(self.operands):
            if array is None:
                values.append(None)
                continue
            last = array.ndim - 1 if self.fixed and array.ndim > 2 else -1
            dims = [d if k == last else f"d{i}_{k}" for k, d in enumerate(array.shape)]
            held = ir.tensor(array, name=f"w{i}") if i in self.weights else None
            value = ir.Value(
                name=f"w{i}" if held else f"x{i}",
                shape=ir.Shape(array.shape if held else dims),
                type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                const_value=held,
            )
            (constants if held else inputs).append(value)
            values.append(value)
        node = ir.node(
            self.op, values, self.attributes, domain=self.domain, num_outputs=len(self.outputs)
        )
        for value, name in zip(node.outputs, self.outputs, strict=True):
            value.name = name
        graph = ir.Graph(
            inputs,
            [v for v in node.outputs if v.name],
            nodes=[node],
            initializers=constants,
            opset_imports={"": 21, "com.microsoft": 1},
            name="g",
        )
        return ir.Model(graph, ir_version=10)

    def feeds(self) -> dict[str, Array]:
        given = enumerate(self.operands)
        return {f"x{i}": a for i, a in given if a is not None and i not in self.weights}


# ---- mixtures of experts -------------------------------------------------------------------------


def _mixtures() -> list[Row]:
    def row(name: str, kind: str, *, bias: bool = True, wide: int = 1, flat: bool = False,
            length: int = 3, **attributes: Any) -> Row:  # fmt: skip
        experts, hidden, inner = 4, 8, 6
        x = random(7, hidden) if flat else random(2, length, hidden)
        tokens = 7 if flat else 2 * length

        def weights(out: int, size: int, seed: int) -> list[Array | None]:
            added = random(experts, out, seed=seed) if bias else None
            return [random(experts, out, size, seed=seed) * np.float32(0.4), added]

        operands = [x, random(tokens, experts, seed=3), *weights(wide * inner, hidden, 1),
                    *weights(hidden, inner, 2)]  # fmt: skip
        return Row("MoE", tuple(operands), {"activation_type": kind, **attributes},
                   weights=tuple(range(2, len(operands))), name=name, limit=2e-5)  # fmt: skip

    return [
        row("relu", "relu", k=2),
        row("no token", "relu", k=2, length=0),
        row("gelu of flat tokens", "gelu", k=2, flat=True),
        row("silu, normalized", "silu", k=2, normalize_routing_weights=1),
        row("one expert", "silu", k=1, bias=False),
        row("all experts", "identity", k=4),
        row("gated in turn", "swiglu", k=2, wide=2, swiglu_fusion=1, swiglu_limit=0.7,
            activation_alpha=1.702, activation_beta=1.0),
    ]  # fmt: skip


# ---- the others ----------------------------------------------------------------------------------


def _inverses() -> list[Row]:
    rows = []
    for size in (1, 2, 3, 7, 16):
        x = random(2, 3, size, size, seed=size) + np.eye(size, dtype=np.float32)[::-1] * 3
        rows.append(Row("Inverse", (x,), fixed=True, name=f"{size} rows", limit=1e-4))
    swapped = np.float64([[[0, 2], [4, 0]], [[1e-300, 1], [1, 1]]])
    return [
        *rows,
        Row("Inverse", (swapped,), fixed=True, name="pivots", limit=1e-12),
        Row("Inverse", (random(2, 4, 4).astype(np.float16),), fixed=True, name="half", limit=2e-2),
    ]


def _states() -> list[Row]:
    x, w, b = random(2, 4, 9), random(4, 1, 3, seed=1), random(4)
    more: dict[str, Any] = {"outputs": ("y", "s"), "weights": (1, 2)}
    return [
        Row("CausalConvWithState", (x, w, b, random(2, 4, 2, seed=3)), {"activation": "silu"},
            name="silu", **more),
        Row("CausalConvWithState", (x, w, b), name="no past", **more),
        Row("CausalConvWithState", (x[..., :1], w, None, random(2, 4, 4, seed=3)), {"dilation": 2},
            name="one step, dilated", **more),
    ]  # fmt: skip


def _floats_of_four_bits() -> list[Row]:
    rows = []
    for kind in (0, 1):
        packed = whole(16 * 64 // 2, high=256, dtype=np.uint8)
        scales = np.abs(random(16 * 64 // 32))
        attributes = {"N": 16, "K": 64, "block_size": 32, "quant_type": kind}
        rows.append(Row("MatMulBnb4", (random(2, 3, 64), packed, scales), attributes,
                        weights=(1, 2), name=("fp4", "nf4")[kind], limit=2e-5))  # fmt: skip
    return rows


def _single_tokens() -> list[Row]:
    q, keys, values = random(2, 1, 32), random(2, 4, 5, 8, seed=4), random(2, 4, 5, 8, seed=5)
    mask = np.int32([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    name, attributes = "DecoderMaskedMultiHeadAttention", {"num_heads": 4}
    return [
        Row(name, (q, keys, values), attributes, name="cross", limit=1e-5, fixed=True),
        Row(name, (q, keys, values, mask), attributes, name="mask", limit=1e-5, fixed=True),
        Row(name, (q, q, q, None, None, keys, values, np.int32([3])),
            attributes | {"past_present_share_buffer": 1}, ("y", "present_key", "present_value"),
            name="buffer", limit=1e-5, fixed=True),
    ]  # fmt: skip


def further_rows() -> list[Row]:
    return [*_mixtures(), *_inverses(), *_states(), *_floats_of_four_bits(), *_single_tokens()]


def _convolved(x: Array, w: Array) -> Array:
    """Of [N, H, W, C] and [M, k, k, C], one of padding."""
    wide = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, w.shape[1:3], (1, 2))
    return np.asarray(np.einsum("nhwcij,mijc->nhwm", windows, w))


def _buckets(places: int, buckets: int, far: int, both: bool) -> Array:
    """T5's bucket of each (query, key), number by number."""
    found = np.zeros((places, places), int)
    for i in range(places):
        for j in range(places):
            distance, count, base = i - j, buckets, 0
            if both:
                count //= 2
                base, distance = (count if j > i else 0), abs(distance)
            distance = max(distance, 0)
            exact = count // 2
            if distance >= exact:
                far_off = math.log(distance / exact) / math.log(far / exact) * (count - exact)
                distance = min(exact + int(far_off + 1e-6), count - 1)
            found[i, j] = base + distance
    return found


def _gated_experts() -> list[tuple[Row, Array]]:
    """Mixtures whose gate and up stand in halves, or in weights of their own."""
    x, routed, limit = random(5, 4), random(5, 3, seed=1), np.float32(0.5)
    gate, up, down = (random(3, 6, 4, seed=i) for i in (2, 3, 4))
    down = down.transpose(0, 2, 1).copy()
    best = np.argsort(-routed, axis=1)[:, :2]
    chosen = np.take_along_axis(routed, best, 1)
    weights = np.exp(chosen) / np.exp(chosen).sum(1, keepdims=True)
    y = np.zeros_like(x)
    for t in range(5):
        for e, weight in zip(best[t], weights[t], strict=True):
            g, u = np.minimum(gate[e] @ x[t], limit), np.clip(up[e] @ x[t], -limit, limit)
            y[t] += weight * (down[e] @ (g / (1 + np.exp(-g)) * u))
    attributes = {"activation_type": "swiglu", "k": 2, "normalize_routing_weights": 1,
                  "swiglu_limit": float(limit)}  # fmt: skip
    halves = np.concatenate([gate, up], 1)
    return [
        (Row("MoE", (x, routed, halves, None, down), {**attributes, "swiglu_fusion": 2},
             weights=(2, 4), name="gated halves"), y),
        (Row("MoE", (x, routed, gate, None, down, None, up), attributes, weights=(2, 4, 6),
             name="gated apart"), y),
    ]  # fmt: skip


def formulas() -> list[tuple[Row, Array]]:
    """Operators that onnxruntime's CPU has no kernel for, and what they compute."""
    image, filters = random(2, 5, 6, 3), random(4, 3, 3, 3)
    x, w, b = random(2, 3, 8), random(8, 4), random(4)
    z = x @ w + b
    table, length = random(8, 2), np.array([20], np.int64)
    queries, shift, places = random(2, 5, 8), random(8, seed=1), random(1, 2, 5, 5, seed=2)
    gate_w, gate_b, scale = random(4, 6), random(6, seed=3), random(1, 2, 1, 1, seed=4)
    rows = (queries + shift).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3) @ gate_w + gate_b
    gates = 1 / (1 + np.exp(-rows.reshape(2, 2, 5, 2, 3).sum(-1)))
    gate = gates[..., :1] * (gates[..., 1:] * scale - 1) + 2
    return [
        *_gated_experts(),
        (
            Row("NhwcConv", (image, filters), {"pads": [1, 1, 1, 1]}, weights=(1,), fixed=True),
            _convolved(image, filters),
        ),
        (
            Row("GemmFastGelu", (x, w, b), weights=(1, 2)),
            z * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        ),
        *(
            (
                Row("RelativePositionBias", (table, length, length), name=f"both ways {both}",
                    attributes={"max_distance": 16, "is_bidirectional": both}, weights=(0,)),
                table[_buckets(20, 8, 16, bool(both))].transpose(2, 0, 1)[None],
            )
            for both in (0, 1)
        ),
        (
            Row("GatedRelativePositionBias", (queries, shift, places, gate_w, gate_b, scale),
                {"num_heads": 2}, weights=(1, 3, 4, 5)),
            gate * places,
        ),
    ]  # fmt: skip
