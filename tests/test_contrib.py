"""Contrib operators: each body against onnxruntime's own kernel; files that hold them.

A row is one node: operator, operands, attributes, outputs. All sizes are symbols but those of the
weights, as in a file.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state
import pytest
from contrib_rows import Array, Row, formulas, further_rows, random, whole
from support import run, says

from onnx_fuse import rewrite
from onnx_fuse.importer import contrib
from onnx_fuse.importer.save import inline
from onnx_fuse.importer.shapes import infer_shapes

# float16: onnxruntime's kernels keep float32 inside where a body rounds between its nodes
HALF = 4e-3


def _norm_rows() -> list[Row]:
    rows = []
    for kind, limit in ((np.float32, 3e-6), (np.float16, HALF)):

        def r(*shape: int, kind: Any = kind) -> Array:
            return random(*shape, seed=len(shape), dtype=kind)

        x, v = r(2, 3, 8), r(8)
        more: dict[str, Any] = {"limit": limit, "attributes": {"epsilon": 1e-3}}
        summed = ("y", "", "", "s")
        skips = {"": r(2, 3, 8)[::-1], "one batch": r(1, 3, 8), "rows": r(3, 8)}
        full, rms = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
        for name, skip in skips.items():
            name = f"{name} {np.dtype(kind).name}"
            rows += [
                Row(full, (x, skip, v, v, v), outputs=summed, name=name, **more),
                Row(full, (x, skip, v), name=f"{name} bare", **more),
                Row(full, (x, skip, v, None, v), name=f"{name} bias", **more),
                Row(rms, (x, skip, v), name=name, **more),
                Row(rms, (x, skip, v, v), outputs=summed,
                    name=f"{name} bias", **more),
            ]  # fmt: skip
        simple = "SimplifiedLayerNormalization"
        rows += [
            Row(simple, (x, v), domain="", name=np.dtype(kind).name, **more),
            Row(simple, (x, r(3, 8)), {"axis": 1}, domain="", name=f"axis {kind}", limit=limit),
        ]
    rows.append(Row(simple, (random(2, 8), random(8)), {}, ("y", "rstd"), domain=""))
    for x, scale in ((random(2, 8), r(8)), (r(2, 8), random(8))):  # y has the scale's type
        rows.append(Row(simple, (x, scale), domain="", limit=HALF, name=f"scale {scale.dtype}"))
    huge = np.array([[3e38, -3e38, 1e-30, 0], [np.nan, 1, 2, 3], [np.inf, 1, 2, 3]], np.float32)
    unit = np.ones(4, np.float32)
    return [
        *rows,
        Row("SkipLayerNormalization", (huge, np.zeros_like(huge), unit, unit), name="hostile"),
        Row("SkipSimplifiedLayerNormalization", (huge, np.zeros_like(huge), unit), name="hostile"),
        Row("SkipLayerNormalization", (random(0, 3, 8), random(0, 3, 8), v.astype(np.float32)),
            name="empty"),
    ]  # fmt: skip


def _activation_rows() -> list[Row]:
    x = np.concatenate([random(4, 6), [[-0.0, np.inf, -np.inf, np.nan, 80, -80]]]).astype(
        np.float32
    )
    ids, w, p, s, v = whole(2, 4, high=5), random(9, 8), random(6, 8), random(2, 8), random(8)
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
    weights = (2, 3, 4, 5, 6)
    embed = "EmbedLayerNormalization"
    return [
        Row("Gelu", (x,)),
        Row("BiasGelu", (x, random(6))),
        Row("FastGelu", (x,)),
        Row("FastGelu", (x, random(6)), name="bias"),
        Row("QuickGelu", (x[:4],)),
        Row("QuickGelu", (x[:4],), {"alpha": 1.0}, name="silu"),
        Row(embed, (ids, ids % 2, w, p, s, v, v, mask), {}, ("y", "m", "e"), weights),
        Row(embed, (ids, None, w, p, None, v, v), {}, ("y", "m"), weights, name="no mask"),
        Row(embed, (ids, None, w, p, None, v, v, mask, ids), {}, ("y", "m"), weights, name="at"),
        Row(embed, (ids[:0], ids[:0], w, p, s, v, v, mask[:0]), {}, ("y", "m", "e"), weights,
            name="no batch"),
        Row(embed, (np.zeros((0, 9), np.int32), None, w, p, None, v, v), {}, ("y", "m"), weights,
            name="no batch of more steps than positions"),
        Row(embed, (ids[:0], None, w, p, None, v, v), {}, ("y", "m"), weights, name="no ids"),
        Row(embed, (ids[:, :0], None, w, p, None, v, v), {}, ("y", "m"), weights, name="length 0"),
        Row(embed, (ids[:0], None, w, p, None, v, v, mask[:0], ids[:0]), {}, ("y", "m"), weights,
            name="no batch at"),
    ]  # fmt: skip


def _product_rows() -> list[Row]:
    rows = []
    a, b = random(2, 3, 4, 5), random(2, 3, 5, 6)
    for ta in (0, 1):
        for tb in (0, 1):
            left, right = (m.swapaxes(-1, -2) if t else m for m, t in ((a, ta), (b, tb)))
            flags = {"transA": ta, "transB": tb}
            rows.append(
                Row("FusedMatMul", (left, right), {**flags, "alpha": 0.3}, name=f"{ta}{tb}")
            )
            left, right = (np.ascontiguousarray(np.moveaxis(m, 2, 0)) for m in (left, right))
            flags |= {"transBatchA": 1, "transBatchB": 1}
            rows.append(Row("FusedMatMul", (left, right), flags, name=f"batch {ta}{tb}"))
    gemm = {"transB": 1, "alpha": 0.5, "beta": 0.7}
    for name, alpha, beta in (
        *(("Relu", None, None), ("LeakyRelu", 0.2, None), ("Tanh", None, None)),
        *(("Sigmoid", None, None), ("HardSigmoid", 0.3, 0.4), ("Elu", 0.7, None)),
        *(("Softplus", None, None), ("Softsign", None, None), ("ThresholdedRelu", 0.3, None)),
    ):
        given = {"activation": name, "activation_alpha": alpha, "activation_beta": beta}
        taken = {k: v for k, v in given.items() if v is not None}
        operands = (random(3, 5), random(6, 5), random(6))
        rows.append(Row("FusedGemm", operands, {**gemm, **taken}, name=name))
    x, w, z = random(2, 4, 6, 7), random(3, 4, 3, 3), random(2, 3, 6, 7)
    for name, parameters in (
        *(("Relu", []), ("LeakyRelu", [0.2]), ("Tanh", []), ("Sigmoid", [])),
        *(("HardSigmoid", [0.3, 0.4]), ("Clip", [-0.2, 0.5])),
    ):
        taken = {"activation": name, **({"activation_params": parameters} if parameters else {})}
        rows += [
            Row("FusedConv", (x, w, random(3), z), {**taken, "pads": [1, 1, 1, 1]}, ("y",), (1, 2),
                name=f"{name} added"),
            Row("FusedConv", (x, w), {**taken, "auto_pad": "SAME_UPPER"}, ("y",), (1,), name=name),
        ]  # fmt: skip
    return [
        *rows,
        Row("FusedMatMul", (random(5), random(2, 5, 6)), name="a vector left"),
        Row("FusedMatMul", (random(2, 3, 5), random(5)), {"alpha": 2.0}, name="a vector right"),
        Row("TransposeMatMul", (random(5, 3), random(5, 6)), {"transA": 1}),
    ]


MASKS = {
    "ends": np.array([3, 5], np.int32),
    "an empty row": np.array([3, 0], np.int32),
    "ends and starts": np.array([5, 4, 1, 0], np.int32),
    "of keys": np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], np.int32),
    "of pairs": whole(2, 5, 5, high=2),
}


def _attention_rows() -> list[Row]:
    op, rows = "Attention", []
    x, w, b, past = random(2, 5, 12), random(12, 48), random(48), random(2, 2, 4, 3, 4)
    more: dict[str, Any] = {"weights": (1, 2), "limit": 1e-5}
    heads = {"num_heads": 4}
    ahead = {**heads, "unidirectional": 1}
    for name, mask in MASKS.items():
        rows += [
            Row(op, (x, w, b, mask), heads, name=f"mask {name}", **more),
            Row(op, (x, w, b, mask), ahead, name=f"causal, mask {name}", **more),
        ]
    split = {**heads, "qkv_hidden_sizes": [16, 16, 8]}
    kept = np.ones((2, 8), np.int32)
    rows += [
        Row(op, (x, w, b), heads, name="plain", **more),
        Row(op, (x, w), {**heads, "scale": 0.3}, ("y", "present"), name="no bias", **more),
        Row(op, (x, random(12, 40), random(40)), split, name="sizes", **more),
        Row(op, (x, w, b, MASKS["of keys"]), {**heads, "mask_filter_value": -3.0}, name="filter",
            **more),
        Row(op, (x, w, b, None, past), ahead, ("y", "present"), name="past", **more),
        Row(op, (x, w, b, kept, past), heads, ("y", "present"), name="past, mask", **more),
        Row(op, (x, w, b, None, None, random(2, 1, 5, 5)), heads, name="scores' bias", **more),
        Row(op, (x, w, b, None, None, random(1, 4, 5, 5)), ahead, name="causal, bias", **more),
    ]  # fmt: skip
    op, more = "MultiHeadAttention", {"fixed": True, "limit": 1e-5}
    q, k, v = random(2, 5, 16), random(2, 6, 16, seed=1), random(2, 6, 16, seed=2)
    k4, v4 = random(2, 4, 6, 4, seed=1), random(2, 4, 6, 4, seed=2)
    p3, p4 = random(2, 4, 3, 4, seed=1), random(2, 4, 3, 4, seed=2)
    outputs = ("y", "k", "v")
    wider = {name: np.concatenate([m, m[..., :1]], -1) for name, m in MASKS.items() if m.ndim > 1}
    for name, mask in {"ends": MASKS["ends"], **wider}.items():
        rows += [
            Row(op, (q, k, v, None, mask), heads, name=f"mask {name}", **more),
            Row(op, (q, k, v, None, mask), ahead, name=f"causal, mask {name}", **more),
        ]
    return [
        *rows,
        Row(op, (q, k, v), heads, name="plain", **more),
        Row(op, (q, k, v), heads, name="no sizes"),
        Row(op, (random(0, 7, 2), random(0, 5, 2), random(0, 5, 7)), heads, name="no batch"),
        Row(op, (q, k, random(2, 6, 8)), {**heads, "scale": 0.3}, name="narrow values", **more),
        Row(op, (q, k, random(2, 6, 8), random(40)), heads, weights=(3,), name="bias", **more),
        Row(op, (q, k4, v4), heads, name="heads given", **more),
        Row(op, (q, k4, v4, random(48)), heads, weights=(3,), name="heads given, bias", **more),
        Row(op, (q, k, v, None, None, random(1, 4, 5, 6)), heads, name="scores' bias", **more),
        Row(op, (q[:, :1], k[:, :1], v[:, :1], None, None, None, p3, p4), ahead, outputs,
            name="past, one token", **more),
        Row(op, (q, q, q, random(48), kept, None, p3, p4), ahead, outputs, (3,),
            name="past, mask", **more),
        *(Row(op, (random(2, s, 16), random(2, t, 16), random(2, t, 16)), ahead,
              name=f"causal {s} over {t}", **more) for s, t in ((5, 5), (3, 7), (7, 3), (1, 4))),
    ]  # fmt: skip


def _rotary_rows() -> list[Row]:
    op, rows = "RotaryEmbedding", []
    tables = random(10, 4), random(10, 4, seed=1)
    whole_ids, one = whole(2, 5, high=10, dtype=np.int64), np.array([2], np.int64)
    for pairs in (0, 1):
        for name, positions in (("positions", whole_ids), ("an offset", one)):
            parts = {"num_heads": 2, "rotary_embedding_dim": 8, "interleaved": pairs}
            for x, attributes in (
                (random(2, 5, 16), {"interleaved": pairs}),
                (random(2, 3, 5, 8), {"interleaved": pairs}),
                *([] if positions is whole_ids else [(random(2, 0, 16), {})]),
                (random(2, 5, 24), parts),
                (random(2, 2, 5, 12), parts),
            ):
                label = f"{name}, {'pairs' if pairs else 'halves'}, {list(x.shape)}"
                rows.append(Row(op, (x, positions, *tables), attributes, weights=(2, 3),
                                name=label, fixed="num_heads" in attributes))  # fmt: skip
    return rows


def _grouped_rows() -> list[Row]:
    heads: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
    turned = {**heads, "do_rotary": 1}
    tables = (random(40, 8), random(40, 8, seed=1))

    def row(name: str, rows: int, past: int | None, lengths: list[int], total: int,
            attributes: Mapping[str, Any] = heads, extra: tuple[Array | None, ...] = (),
            packed: bool = False, kind: Any = np.float32) -> Row:  # fmt: skip
        batch = len(lengths)
        sizes = [(batch, rows, 64), (batch, rows, 32), (batch, rows, 32)]
        qkv: list[Array | None] = [random(*s, seed=i) for i, s in enumerate(sizes)]
        if packed:
            qkv = [np.concatenate([a for a in qkv if a is not None], -1), None, None]
        cache: list[Array | None] = [None, None]
        if past is not None:
            cache = [random(batch, 2, past, 16, seed=i) for i in range(2)]
        angles = tables if attributes.get("do_rotary") else (None, None) if extra else ()
        ends = (np.array(lengths, np.int32) - 1, np.array([total], np.int32))
        operands = (*qkv, *cache, *ends, *angles, *extra)
        cast = [a.astype(kind) if a is not None and a.dtype == np.float32 else a for a in operands]
        return Row("GroupQueryAttention", tuple(cast), attributes, ("y", "k", "v"),
                   (7, 8) if attributes.get("do_rotary") else (), name=name, fixed=True,
                   limit=1e-5 if kind == np.float32 else HALF)  # fmt: skip

    places = np.arange(3, 13).reshape(2, 5)
    return [
        row("prompt", 5, None, [5, 5], 5),
        row("prompt, half", 5, None, [5, 5], 5, kind=np.float16),
        row("prompt into an empty cache", 5, 0, [5, 5], 5),
        row("prompt into a buffer", 5, 12, [5, 5], 5),
        row("padded prompt", 5, None, [5, 3], 5),
        row("token", 1, 7, [8, 8], 8),
        row("tokens of two lengths", 1, 7, [8, 5], 8),
        row("token into a buffer", 1, 12, [8, 5], 8),
        row("chunk", 3, 7, [10], 10),
        row("chunk into a buffer", 3, 12, [10], 10),
        row("packed, turned", 5, None, [5, 5], 5, turned, packed=True),
        row("packed, turned token", 1, 7, [8, 5], 8, turned, packed=True),
        row("turned in pairs", 1, 7, [8, 5], 8, {**turned, "rotary_interleaved": 1}),
        row("positions of a prompt", 5, None, [5, 5], 5, turned, (places,)),
        row("positions of tokens", 1, 7, [8, 5], 8, turned, (np.array([[9], [3]]),)),
        row("positions of a chunk", 3, 7, [10], 10, turned, (np.array([[9, 3, 4]]),)),
        *(row(f"window of {w}", 5, None, [5, 5], 5, {**heads, "local_window_size": w})
          for w in (1, 2, 3)),
        row("window, padded prompt", 5, None, [5, 2], 5, {**heads, "local_window_size": 2}),
        row("window, token", 1, 7, [8, 5], 8, {**heads, "local_window_size": 3}),
        row("softcap", 5, None, [5, 5], 5, {**heads, "softcap": 1.5, "scale": 0.7}),
        row("smooth", 5, None, [5, 5], 5, {**heads, "smooth_softmax": 1}),
        row("sinks", 5, None, [5, 5], 5, extra=(None, None, random(4))),
        row("bias", 1, 7, [8, 5], 8, extra=(None, random(2, 1, 1, 8))),
        row("bias, softcap", 5, None, [5, 5], 5, {**heads, "softcap": 1.5},
            (None, random(1, 4, 5, 5))),
        row("all keys", 5, None, [5, 5], 5, {**heads, "causal": 0}),
    ]  # fmt: skip


def number(value: float, kind: Any = np.float32) -> Array:
    return np.array(value, kind)


# (alpha, the result's scale) of a QGemm of which a sum is a tie that another order rounds otherwise
TIES = ((1.0, 0.048), (0.7, 0.03528))


def _quantized_rows() -> list[Row]:
    rows = []
    scales = number(0.02), number(0.05), number(0.03)
    for kind, low, high, zeros in ((np.uint8, 0, 256, (120, 7, 100)),
                                   (np.int8, -128, 128, (3, -9, 0))):  # fmt: skip

        def q(
            *shape: int, seed: int = 0, kind: Any = kind, low: int = low, high: int = high
        ) -> Array:
            return whole(*shape, low=low, high=high, dtype=kind, seed=seed)

        za, zb, zy = (number(z, kind) for z in zeros)
        a, b = (q(2, 3, 4), scales[0], za), (q(3, 4, seed=1), scales[1], zb)
        x, y = (q(2, 6, 5, 4), scales[0], za), (scales[2], zy)
        label = np.dtype(kind).name
        # onnxruntime's kernels of integers round ties and sums in float32 in another order
        near: dict[str, Any] = {"name": label, "steps": 1}
        pool, means = "QLinearAveragePool", "QLinearGlobalAveragePool"
        rows += [
            Row("QuantizeLinear", (random(3, 4) * 3, *scales[:1], za), name=label),
            Row("QuantizeLinear", (random(3, 4) * 3, np.abs(random(4)) + 0.01, q(4)), {"axis": 1},
                name=f"{label} by column"),
            Row("DequantizeLinear", a, name=label),
            Row("DequantizeLinear", (q(3, 4), random(3), q(3)), {"axis": 0},
                name=f"{label} by row"),
            Row("QLinearAdd", (*a, *b, *y), **near),
            Row("QLinearMul", (*a, *b, *y), **near),
            Row("QLinearSigmoid", (*a, number(1 / 256), number(low, kind)), **near),
            Row("QLinearLeakyRelu", (*a, *y), {"alpha": 0.1}, **near),
            *(Row("QLinearSoftmax", (*a, number(scale), number(low, kind)), {"opset": 13},
                  name=f"{label} in steps of {scale:.4f}", weights=(1, 2, 3, 4))
              for scale in (1 / 256, 0.0026, 0.0039)),
            Row("QLinearConcat", (*y, q(2, 3), *scales[:1], za, q(2, 5), *scales[1:2], zb),
                {"axis": 1}, **near),
            Row("QLinearWhere", (q(2, 3, 4) > 9, *a, q(2, 3, 4, seed=2), *b[1:], *y), **near),
            Row(pool, (*x, *y), {"kernel_shape": [3, 2], "strides": [2, 1]}, **near),
            Row(pool, (*x, *y),
                {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "channels_last": 1,
                 "count_include_pad": 1}, name=f"{label} last", steps=1),
            Row(means, (*x, *y), **near),
            Row(means, (*x, *y), {"channels_last": 1}, name=f"{label} last",
                steps=1),
            Row("NhwcMaxPool", (x[0],), {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]}, name=label),
            Row("QLinearConv", (*x, q(3, 6, 3, 3), *scales[1:2], number(0, kind), *y,
                                whole(3, high=900)), {"pads": [1, 1, 1, 1]}, ("y",), (3,), **near),
            Row("QLinearConv", (*x, q(3, 4, 3, 3), *scales[1:2], number(0, kind), *y),
                {"channels_last": 1}, ("y",), (3,), name=f"{label} last", steps=1),
            Row("DynamicQuantizeMatMul", (random(2, 3, 4), q(4, 5), random(5) ** 2), weights=(1, 2),
                name=label),
            Row("DynamicQuantizeMatMul", (random(2, 3, 4), q(4, 5), scales[1], zb, random(5)),
                weights=(1, 2, 3, 4), name=f"{label} bias"),
            Row("MatMulIntegerToFloat", (q(2, 3, 4), q(4, 5), *scales[:2], za, zb, random(5)),
                name=label),
            Row("MatMulIntegerToFloat", (q(2, 3, 4), q(4, 5), *scales[:1], random(5) ** 2),
                name=f"{label} by column"),
            Row("QGemm", (q(3, 4), *scales[:1], za, q(5, 4), *scales[1:2], zb, whole(5, high=99)),
                {"transB": 1, "alpha": 0.5}, name=label),
            Row("QGemm", (q(3, 4), *scales[:1], za, q(4, 5), *scales[1:2], zb, None, *y),
                name=f"{label} rounded"),
            *(Row("QGemm", (q(32, 64), number(0.03), za, q(64, 32, seed=1), number(0.002), zb,
                            whole(32, high=900), number(by), zy),
                  {"alpha": alpha}, name=f"{label} in steps of {by}", weights=tuple(range(1, 9)))
              for alpha, by in TIES),
        ]  # fmt: skip
    bytes_ = whole(2, 5, 8, high=256, dtype=np.uint8), whole(8, 24, high=256, dtype=np.uint8)
    tables = [whole(*shape, high=256, dtype=np.uint8)
              for shape in ((50, 6), (9, 6), (2, 6), (6,), (6,))]  # fmt: skip
    numbers = [number(scale) for scale in (0.02, 0.03, 0.01, 0.008, 0.005)]
    points = [number(point, np.uint8) for point in (120, 0, 255, 3, 128)]
    words, held = whole(2, 4, high=50, dtype=np.int32), tuple(range(2, 7))
    seen = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
    both = ("y", "m")
    rows += [
        Row("QEmbedLayerNormalization", (words, words % 2, *tables, seen, *numbers, *points), {},
            both, held, limit=1e-5),
        Row("QEmbedLayerNormalization", (words, None, *tables[:2], None, *tables[3:], None,
            *numbers[:2], None, *numbers[3:], *points[:2], None, *points[3:]), {}, both, held,
            name="without segments", limit=1e-5),
    ]  # fmt: skip
    zero = number(128, np.uint8)
    attention = (*bytes_, random(24), *scales[:2])
    heads = {"num_heads": 2}
    return [
        *rows,
        Row("QAttention", (*attention, None, zero, zero), heads, weights=(1, 2), name="plain",
            limit=1e-5),
        Row("QAttention", (*attention, np.array([5, 3], np.int32), zero, zero),
            {**heads, "unidirectional": 1}, weights=(1, 2), name="mask", limit=1e-5),
    ]  # fmt: skip


def _few_bits_rows() -> list[Row]:
    rows = []
    n, k = 6, 80
    for bits in (4, 8):
        for size in (16, 32):
            blocks = -(-k // size)
            packed = whole(n, blocks, size * bits // 8, high=256, dtype=np.uint8)
            width = -(-blocks * bits // 8)
            zeros = whole(n, width, high=256, dtype=np.uint8, seed=3)
            scales = np.abs(random(n, blocks)) * 0.1
            sizes = {"bits": bits, "block_size": size, "N": n, "K": k}
            x, name = random(2, 3, k), f"{bits} bits, blocks of {size}"
            more: dict[str, Any] = {"weights": (1, 2, 3, 4, 5), "limit": 1e-5}
            op = "MatMulNBits"
            rows += [
                Row(op, (x, packed, scales), sizes, name=name, **more),
                Row(op, (x, packed, scales, zeros), sizes, name=f"{name}, zeros", **more),
                Row(op, (x, packed, scales, None, None, random(n)), sizes,
                    name=f"{name}, bias", **more),
            ]  # fmt: skip
            table = whole(9, 64 * bits // 8, high=256, dtype=np.uint8)
            ids, of_rows = whole(2, 3, high=9, dtype=np.int64), np.abs(random(9, 64 // size))
            packed_zeros = whole(9, -(-64 // size * bits // 8), high=256, dtype=np.uint8)
            rows += [
                Row("GatherBlockQuantized", (table, ids, of_rows, z),
                    {"bits": bits, "block_size": size, "quantize_axis": 1}, weights=(0, 2, 3),
                    name=f"{name}{'' if z is None else ', zeros'}")
                for z in (None, packed_zeros)
            ]  # fmt: skip
            if bits == 4:  # onnxruntime's kernel has these for 4 bits alone
                places = whole(k, high=blocks)
                rows += [
                    Row(op, (x, packed, scales, random(n, blocks) + 8), sizes,
                        name=f"{name}, zeros of floats", **more),
                    Row(op, (x, packed, scales, None, places), sizes,
                        name=f"{name}, g_idx", **more),
                ]  # fmt: skip
    return rows


def _form_rows() -> list[Row]:
    x = random(2, 3, 4)
    ids = np.array([3.0, 1, 3, 2, 1, 3], np.float32)
    return [
        Row("GatherND", (x, np.array([[0, 2], [1, 1]], np.int32)), weights=(1,)),
        Row("Pad", (x, np.array([0, 1, 2, 0, 0, 1]), number(2.5)), {"mode": "constant"}),
        Row("Pad", (x, np.array([[0, 1, 2, 0, 0, 1]]), random(1)), name="shape [1, 6]"),
        Row("Unique", (ids,), {}, ("y", "idx", "counts")),
        Row("Trilu", (x, np.array(1)), {"upper": 0}),
        Row("Range", (number(1), number(7), number(2))),
        Row("Range", (number(1, np.int32).reshape(1), number(7, np.int32)), name="without delta"),
        Row("ExpandDims", (x, number(1, np.int32)), weights=(1,)),
        *(
            Row("GridSample", (random(2, 3, 5, 6), random(2, 4, 3, 2)), {"mode": mode}, name=mode)
            for mode in ("bilinear", "nearest")
        ),
        Row("CDist", (random(3, 4), random(5, 4)), limit=1e-5),
        Row(
            "CDist", (random(3, 4), random(5, 4)), {"metric": "euclidean"}, limit=1e-5, name="root"
        ),
    ]


ROWS = [
    *(*_quantized_rows(), *_few_bits_rows(), *_form_rows()),
    *(*_norm_rows(), *_activation_rows(), *_product_rows()),
    *(*_attention_rows(), *_rotary_rows(), *_grouped_rows(), *further_rows()),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_body_computes_what_onnxruntimes_kernel_does(row: Row) -> None:
    model = row.model()
    expected = run(model, row.feeds())
    flat = inline(model)
    assert not [n for n in flat.graph if n.domain or contrib.lookup(n)]
    got = run(flat, row.feeds())
    infer_shapes(model)
    outputs = model.graph.outputs
    assert next(iter(model.graph)).overload == ""
    for value, a, b in zip(outputs, expected, got, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert value.dtype == ir.DataType.from_numpy(a.dtype)
        assert len(value.shape) == a.ndim
        wide, narrow = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(wide), np.isnan(narrow))
        same = np.isnan(wide) | (wide == narrow)
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0, np.abs(wide - narrow) / (1 + np.abs(wide)))
        if a.dtype.kind in "iu":
            assert np.abs(wide - narrow).max(initial=0) <= row.steps
        else:
            assert error.max(initial=0) <= row.limit


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_node_with_an_attribute_less_or_of_no_sense_has_a_body_or_a_reason(row: Row) -> None:
    """onnxruntime's quantizer writes QAttention without heads for the standard's Attention."""
    for name, value in row.attributes.items():
        rest = {k: v for k, v in row.attributes.items() if k != name}
        changed = [{**rest, name: bad} for bad in (0, -1)] if isinstance(value, int) else []
        for attributes in (rest, *changed):
            model = replace(row, attributes=attributes).model()
            [node] = [n for n in model.graph if contrib.lookup(n)]
            with suppress(contrib.Unwritable):
                contrib.write(node)


@pytest.mark.parametrize("heads", [{}, {"num_heads": 0}])
def test_attention_without_heads_says_so(heads: dict[str, int]) -> None:
    row = next(row for row in ROWS if row.op == "QAttention")
    given = {k: v for k, v in row.attributes.items() if k != "num_heads"} | heads
    model = replace(row, attributes=given).model()
    [node] = [n for n in model.graph if contrib.lookup(n)]
    with pytest.raises(contrib.Unwritable, match="'num_heads' is missing, or is no positive"):
        contrib.write(node)


def test_the_docs_name_every_operator_that_has_a_body() -> None:
    text = (Path(__file__).parent.parent / "docs" / "contrib.md").read_text()
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")][1:]
    named = [name.strip() for row in rows for name in row.split(",")]
    assert sorted(named) == sorted(name for _, name in contrib.CONTRIB)


def test_every_operator_that_onnxruntimes_cpu_has_is_checked() -> None:
    kernels = {
        k.op_name
        for k in onnxruntime.capi.onnxruntime_pybind11_state.get_all_opkernel_def()
        if k.provider == "CPUExecutionProvider"
    }
    missing = {name for _, name in contrib.CONTRIB} - {row.op for row in ROWS}
    assert not missing & kernels


# ---- operators, and forms of them, that onnxruntime's CPU has no kernel for ------------------


def _gelu(x: Array) -> Array:
    erf = np.vectorize(math.erf, otypes=[float])
    return np.asarray(x * 0.5 * (1 + erf(x / math.sqrt(2))))


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _group_norm(x: Array, g: Array, b: Array, groups: int, silu: bool) -> Array:
    n, h, w, c = x.shape
    parts = x.reshape(n, h * w, groups, c // groups)
    mean = parts.mean((1, 3), keepdims=True)
    variance = parts.var((1, 3), keepdims=True)
    y = ((parts - mean) / np.sqrt(variance + 1e-5)).reshape(x.shape) * g + b
    return np.asarray(y / (1 + np.exp(-y)) if silu else y)


def _attended(q: Array, k: Array, v: Array) -> Array:
    """Of [B, S, N, h] each."""
    q, k, v = (m.transpose(0, 2, 1, 3) for m in (q, k, v))
    y = _softmax(q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])) @ v
    return np.asarray(y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1))


_COUNTS = np.array([3, 0, 5, 1], np.int32)
_THERE = np.arange(5) < _COUNTS[:, None]
_OFFSET = np.concatenate([np.flatnonzero(_THERE), np.flatnonzero(~_THERE)]).reshape(4, 5)
_STARTS = np.cumsum([0, *_COUNTS])
_TOKENS, _PADDED = random(9, 32), random(4, 5, 32)
_PROJECTION = random(32, 96, seed=1), random(96, seed=2)


def _packed(added: Array) -> Array:
    """Attention of the sequences of `_TOKENS`, one by one."""
    whole = _TOKENS @ _PROJECTION[0] + _PROJECTION[1]
    results = []
    for i, count in enumerate(_COUNTS):
        if not count:
            continue
        start, end = _STARTS[i], _STARTS[i + 1]
        q, k, v = (m.reshape(-1, 4, 8).swapaxes(0, 1) for m in np.split(whole[start:end], 3, 1))
        z = q @ k.swapaxes(1, 2) / math.sqrt(8) + added[i % len(added), :, :count, :count]
        results.append((_softmax(z) @ v).swapaxes(0, 1).reshape(-1, 32))
    return np.concatenate(results)


_IMAGE, _C = random(2, 3, 4, 8), (random(8), random(8, seed=1))
_QKV, _KV, _Q = random(2, 5, 4, 3, 8), random(2, 6, 4, 2, 8), random(2, 5, 32)
_NORM = {"groups": 4, "activation": 1}
BY_HAND = [
    *formulas(),
    (Row("BiasAdd", (_IMAGE, _C[0], _IMAGE)), _IMAGE * 2 + _C[0]),
    (
        Row("BiasSplitGelu", (_IMAGE, _C[0]), fixed=True),
        (_IMAGE + _C[0])[..., :4] * _gelu((_IMAGE + _C[0])[..., 4:]),
    ),
    (
        Row("BiasSoftmax", (_Q, _Q[:1]), {"axis": 2, "is_inner_broadcast": 0}),
        _softmax(_Q + _Q[:1]),
    ),
    (Row("GroupNorm", (_IMAGE, *_C), _NORM), _group_norm(_IMAGE, *_C, 4, True)),
    (
        Row("SkipGroupNorm", (_IMAGE, *_C, _IMAGE[:, 0, 0], _C[0]), {**_NORM, "activation": 0}),
        _group_norm(_IMAGE + _IMAGE[:, :1, :1] + _C[0], *_C, 4, False),
    ),
    (
        Row("FusedMatMulActivation", (_Q, _Q[0].T), {"activation": "Relu", "alpha": 0.5}),
        np.maximum(_Q @ _Q[0].T / 2, 0),
    ),
    (
        Row(
            "QLinearReduceMean",
            (whole(2, 3, 4, high=256, dtype=np.uint8), number(0.5), number(3, np.uint8),
             number(0.25), number(7, np.uint8)),
            {"axes": [1], "keepdims": 0},
        ),
        np.clip(np.round((whole(2, 3, 4, high=256) - 3.0).mean(1) * 0.5 / 0.25) + 7, 0, 255),
    ),
    (
        Row("MultiHeadAttention", (_QKV,), {"num_heads": 4}, name="packed queries, keys, values"),
        _attended(*(_QKV[:, :, :, i] for i in range(3))),
    ),
    (
        Row("MultiHeadAttention", (_Q, _KV), {"num_heads": 4}, name="packed keys, values"),
        _attended(_Q.reshape(2, 5, 4, 8), _KV[:, :, :, 0], _KV[:, :, :, 1]),
    ),
    *(
        (
            Row("RemovePadding", (_PADDED, _COUNTS), {}, (*"abc", "y")[3 - i :], name=str(i)),
            want,
        )
        for i, want in enumerate((_PADDED[_THERE], _OFFSET, _STARTS, [5]))
    ),
    (
        Row("RestorePadding", (_TOKENS, _OFFSET.astype(np.int32))),
        np.where(_THERE[..., None], _TOKENS[_THERE.cumsum() - 1].reshape(4, 5, 32), 0),
    ),
    *(
        (
            Row("PackedAttention", (_TOKENS, *_PROJECTION, _OFFSET.astype(np.int32),
                                    _STARTS.astype(np.int32), added), {"num_heads": 4},
                weights=(1, 2), name="" if added is None else f"bias {added.shape}"),
            _packed(np.zeros((1, 1, 5, 5)) if added is None else added),
        )
        for added in (None, random(4, 1, 5, 5), random(1, 4, 5, 5))
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expected"), BY_HAND, ids=lambda p: str(p) if isinstance(p, Row) else ""
)
def test_a_body_that_no_cpu_has_computes_its_formula(row: Row, expected: Array) -> None:
    model = row.model()
    infer_shapes(model)
    got = run(inline(model), row.feeds())[-1]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    if "GroupNorm" not in row.op:  # onnx infers no shape of a GroupNormalization (1.23)
        shape = model.graph.outputs[-1].shape
        assert len(shape) == np.ndim(expected)


# What depends on how sizes or operands are packed, and is refused: the reason that is said.
REFUSED = [
    ("beam search", Row("MultiHeadAttention",
                        (_Q, _Q, _Q, None, None, None, random(2, 4, 3, 8), random(2, 4, 3, 8),
                         whole(1, high=2), whole(2, 1, 3, high=1)), {"num_heads": 4})),
    ("it has a mask", Row("MultiHeadAttention",
                          (_Q, _Q, _Q, None, whole(2, 3, high=2), None, random(2, 4, 3, 8),
                           random(2, 4, 3, 8), whole(1, high=2)), {"num_heads": 4})),
    ("window's size", Row("GroupQueryAttention",
                          (_Q, _Q, _Q, None, None, whole(2, high=1), whole(1, high=1)),
                          {"num_heads": 4, "kv_num_heads": 4, "sliding_window_cache": 1})),
    ("packed sequences", Row("Attention", (_Q, random(32, 96), random(96), whole(8, high=5)),
                             {"num_heads": 4}, weights=(0, 1, 2, 3))),
    ("mean", Row("SkipSimplifiedLayerNormalization", (_Q, _Q, random(32)), {}, ("y", "mean"))),
    ("g_idx", Row("MatMulNBits", (_Q, whole(4, 2, 8, high=256, dtype=np.uint8), random(4, 2),
                                  whole(4, 1, high=256, dtype=np.uint8), whole(32, high=2)),
                  {"K": 32, "N": 4, "block_size": 16})),
    ("activation 'Odd'", Row("FusedGemm", (_Q[0], _Q[0].T), {"activation": "Odd"})),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "row"), REFUSED, ids=[reason for reason, _ in REFUSED])
def test_a_node_without_a_body_stays(reason: str, row: Row) -> None:
    model = row.model()
    model.graph.outputs[:] = model.graph.outputs[:2]
    infer_shapes(model)  # says nothing, and goes on
    kept = inline(model)
    assert [n.op_type for n in kept.graph] == [row.op]
    report = rewrite.optimize(model, own_kernels=True)
    assert [n.op_type for n in model.graph] == [row.op]
    if contrib.CONTRIB[row.domain, row.op].recognized:
        assert says(report, f"whole: {reason}")
