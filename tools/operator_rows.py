"""What tools/bench_operators.py times beside the elementwise operators and rows of one tensor.

Each row is a Case, what torch does with the same tensors, and a label; None where torch has no such
operator: then the bytes alone are the peer. These sizes follow from a number of elements `n`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from math_cases import Case, i64

Torch = Callable[..., Any]
Made = tuple[Case, Torch | None, str]

UNTIMED = {
    "no launch: views": ("Flatten", "Reshape", "Squeeze", "Unsqueeze"),
    "known without a run": ("ConstantOfShape", "EyeLike", "MelWeightMatrix", "Range"),
    "tools/bench_torch.py and tools/kernel_lab.py": ("Gemm", "MatMul"),
    "text": ("TfIdfVectorizer",),
}
"""Operators that need no row, and why."""


def every(n: int) -> Iterator[Made]:
    """All of them."""
    yield from _logic(n)
    yield from _moves(n)
    yield from _reductions(n)
    yield from _random(n)
    yield from _quantized(n)
    yield from _windows(n)
    yield from _sequences(n)
    yield from _losses(n)


def _logic(n: int) -> Iterator[Made]:
    import torch

    rng, label = np.random.default_rng(1), f"1 x {n}"
    flags = rng.random((2, 1, n)) < 0.5
    for op in ("And", "Or", "Xor"):
        call = getattr(torch, f"logical_{op.lower()}")
        yield Case(op, tuple(flags)), call, label
    yield Case("Not", (flags[0],)), torch.logical_not, label
    whole = rng.integers(0, 1000, (2, 1, n))
    for op in ("And", "Or", "Xor"):
        yield Case(f"Bitwise{op}", tuple(whole)), getattr(torch, f"bitwise_{op.lower()}"), label
    yield Case("BitwiseNot", (whole[0],)), torch.bitwise_not, label
    shifted = whole[0].astype(np.uint32), np.ones((1, n), np.uint32)
    yield Case("BitShift", shifted, {"direction": "LEFT"}), None, label
    yield Case("BitCast", ((1, n),), {"to": 6}, opset=26), lambda x: x.view(torch.int32) + 0, label
    yield Case("Cast", ((1, n),), {"to": 10}), lambda x: x.half(), label
    like = rng.random((1, 2)).astype(np.float16)
    yield Case("CastLike", ((1, n), like)), lambda x, _: x.half(), label
    for op in ("Sum", "Mean"):
        added = (lambda x, y: x + y) if op == "Sum" else (lambda x, y: (x + y) / 2)
        yield Case(op, ((1, n), (1, n))), added, label
    yield (Case("PRelu", ((n // 64, 64), (64,))),
           torch.nn.functional.prelu, f"{n // 64} x 64")  # fmt: skip


def _moves(n: int) -> Iterator[Made]:
    import torch

    rng = np.random.default_rng(2)
    shape, label = (n // 64, 64), f"{n // 64} x 64"
    yield Case("Expand", ((1, 64), i64(*shape))), lambda x, *_: x.expand(shape).clone(), label
    yield Case("Slice", (shape, i64(1), i64(60), i64(1))), lambda x, *_: x[:, 1:60].clone(), label
    halves = Case("Split", (shape,), {"axis": 1, "num_outputs": 2}, 2)
    yield halves, lambda x: [part.clone() for part in x.split(32, 1)], label
    yield Case("Tile", (shape, i64(1, 2))), lambda x, *_: x.repeat(1, 2), label
    side = int(n**0.5)
    yield Case("Trilu", ((side, side),), {"upper": 0}), torch.tril, f"{side} x {side}"
    classes = rng.integers(0, 64, (n // 64,))[:, None]
    hot = Case("OneHot", (classes, np.array(64), np.float32([0, 1])), {"axis": -1})
    yield hot, lambda i, *_: torch.nn.functional.one_hot(i, 64), label
    lengths = np.full(64, n // 64, np.int64)
    turned = Case("ReverseSequence", (shape, lengths), {"batch_axis": 1, "time_axis": 0})
    yield turned, lambda x, *_: x.flip(0), label
    pairs = np.stack([rng.integers(0, size, n // 4) for size in shape], -1)
    yield Case("GatherND", (shape, pairs)), lambda x, i: x[i[:, 0], i[:, 1]], label
    chosen = rng.random((1, n)) < 0.5
    kept = Case("Compress", ((1, n), np.ones(64, np.bool_)), {"axis": 1})
    yield kept, lambda x, c: x[:, :64][:, c], f"1 x {n}"
    masked = Case("Where", (chosen, (1, n), (1, n)), note="half")
    yield masked, torch.where, f"1 x {n}"
    yield (Case("SpaceToDepth", ((1, 4, side // 4 * 2, side // 4 * 2),), {"blocksize": 2}),
           lambda x: torch.nn.functional.pixel_unshuffle(x, 2), f"4 x {side // 4 * 2}")  # fmt: skip
    matrices = (n // 64, 8, 8)
    yield Case("Det", (matrices,)), torch.linalg.det, f"{n // 64} x 8 x 8"
    yield (Case("Einsum", (shape, shape), {"equation": "ij,ij->i"}),
           lambda x, y: torch.einsum("ij,ij->i", x, y), label)  # fmt: skip


def _reductions(n: int) -> Iterator[Made]:
    import torch

    forms: dict[str, Torch] = {
        "ReduceL1": lambda x, *_: x.abs().sum(1),
        "ReduceLogSum": lambda x, *_: x.sum(1).log(),
        "ReduceSumSquare": lambda x, *_: x.square().sum(1),
    }
    for shape in ((1, n), (8, n // 8), (n // 64, 64)):
        label = f"{shape[0]} x {shape[1]}"
        for op, call in forms.items():
            yield Case(op, (shape, i64(1))), call, label
        yield Case("ArgMin", (shape,), {"axis": 1}), lambda x: torch.argmin(x, 1), label
        hard = lambda x: torch.zeros_like(x).scatter_(1, x.argmax(1, True), 1.0)  # noqa: E731
        yield Case("Hardmax", (shape,), {"axis": 1}), hard, label
        axis = np.array(1, np.int64)
        product = Case("CumProd", (shape, axis), opset=26)
        yield product, lambda x, *_: torch.cumprod(x, 1), label


def _random(n: int) -> Iterator[Made]:
    import torch

    label = f"1 x {n}"
    yield Case("RandomNormalLike", ((1, n),), {"seed": 1.0}), torch.randn_like, label
    yield Case("RandomUniformLike", ((1, n),), {"seed": 1.0}), torch.rand_like, label
    yield (Case("RandomNormal", (), {"seed": 1.0, "shape": [1, n]}),
           lambda: torch.randn(1, n, device="cuda"), label)  # fmt: skip
    yield (Case("RandomUniform", (), {"seed": 1.0, "shape": [1, n]}),
           lambda: torch.rand(1, n, device="cuda"), label)  # fmt: skip
    chances = np.full((1, n), 0.25, np.float32)
    yield Case("Bernoulli", (chances,), {"seed": 1.0}), torch.bernoulli, label
    drop = Case("Dropout", ((1, n), np.array(0.5, np.float32), np.array(True)), {"seed": 1}, 2)
    yield drop, lambda x, *_: torch.nn.functional.dropout(x, 0.5), label


def _quantized(n: int) -> Iterator[Made]:
    import torch

    rng, label = np.random.default_rng(3), f"{n // 64} x 64"
    shape, scale, zero = (n // 64, 64), np.array(0.1, np.float32), np.array(7, np.uint8)
    codes = rng.integers(0, 255, shape).astype(np.uint8)
    rounded = lambda x, *_: (x * 10).round().add(7).clamp(0, 255).to(torch.uint8)  # noqa: E731
    yield Case("QuantizeLinear", (shape, scale, zero)), rounded, label
    yield (Case("DequantizeLinear", (codes, scale, zero)),
           lambda q, *_: (q.float() - 7) * 0.1, label)  # fmt: skip

    def ranged(x: Any) -> Any:
        step = (x.amax() - x.amin()) / 255
        return (x / step).round().clamp(0, 255).to(torch.uint8)

    yield Case("DynamicQuantizeLinear", (shape,), {}, 3), ranged, label
    side = int((n / 3) ** 0.5) // 32 * 32
    a, b = (rng.integers(-9, 9, (side, side)).astype(np.int8) for _ in range(2))
    square = f"{side} x {side}"
    yield Case("MatMulInteger", (a, b)), torch._int_mm, square
    one, none = np.array(0.1, np.float32), np.array(0, np.int8)
    whole = Case("QLinearMatMul", (a, one, none, b, one, none, one, none))
    yield whole, lambda x, s, z, y, *_: torch._int_mm(x, y), square
    image = rng.integers(0, 9, (1, 16, int((n / 16) ** 0.5), int((n / 16) ** 0.5)))
    x, w = image.astype(np.uint8), rng.integers(0, 9, (16, 16, 3, 3)).astype(np.uint8)
    size = f"16 x {x.shape[2]} x {x.shape[3]}"
    yield Case("ConvInteger", (x, w)), None, size
    low = np.array(0, np.uint8)
    yield Case("QLinearConv", (x, one, low, w, one, low, one, low)), None, size


def _windows(n: int) -> Iterator[Made]:
    import torch

    functional = torch.nn.functional
    side = int((n / 64) ** 0.5) // 2 * 2
    x, label = (1, 64, side, side), f"64 x {side} x {side}"
    two = {"kernel_shape": [2, 2], "strides": [2, 2]}
    yield Case("Conv", (x, (64, 64, 3, 3))), functional.conv2d, label
    yield Case("ConvTranspose", (x, (64, 64, 3, 3))), functional.conv_transpose2d, label
    yield Case("GlobalMaxPool", (x,)), lambda x: x.amax((2, 3), keepdim=True), label
    yield Case("GlobalLpPool", (x,)), lambda x: x.norm(dim=(2, 3), keepdim=True), label
    yield Case("LpPool", (x,), two), lambda x: functional.lp_pool2d(x, 2, 2), label
    scales = np.float32([1, 1, 2, 2])
    for mode, name in (("nearest", "nearest"), ("cubic", "bicubic")):
        resized = Case("Resize", (x, None, scales), {"mode": mode}, note=mode)
        grown = lambda x, *_, name=name: functional.interpolate(x, scale_factor=2, mode=name)  # noqa: E731
        yield resized, grown, label
    half = side // 2
    boxes = np.float32([[0, 0, half, half]] * 32)
    aligned = {"output_height": 7, "output_width": 7}
    yield Case("RoiAlign", (x, boxes, np.zeros(32, np.int64)), aligned), None, label
    offsets = (1, 18, side - 2, side - 2)
    yield Case("DeformConv", (x, (64, 64, 3, 3), offsets)), None, label
    blocks = (1, 64 * 4, half * half)
    folded = Case("Col2Im", (blocks, i64(side, side), i64(2, 2)), {"strides": [2, 2]})
    yield folded, lambda x, *_: functional.fold(x, (side, side), 2, stride=2), label
    count = max(8, int(n**0.5))
    corners = np.random.default_rng(4).random((1, count, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + 0.1], -1)
    suppressed = (boxes, (1, 1, count), np.array([100]), np.float32([0.5]))
    yield Case("NonMaxSuppression", suppressed), None, f"{count} boxes"


def _sequences(n: int) -> Iterator[Made]:
    import torch

    steps = max(4, int((n / 4096) ** 0.5))
    batch, hidden = 16, 128
    label = f"{steps} x {batch} x {hidden}"
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        given = ((steps, batch, hidden), (1, gates * hidden, hidden), (1, gates * hidden, hidden))
        module = getattr(torch.nn, op)(hidden, hidden).cuda()

        def run(x: Any, *_: Any, module: Any = module) -> Any:
            with torch.no_grad():
                return module(x)

        yield Case(op, given, {"hidden_size": hidden}, 1), run, label
    heads = (1, 8, steps, 64)
    attended = torch.nn.functional.scaled_dot_product_attention
    yield Case("Attention", (heads,) * 3, opset=23), attended, f"8 x {steps} x 64"
    cache = (8, 1, steps + 8, 64)
    yield (Case("TensorScatter", (cache, (8, 1, 1, 64), np.zeros(8, np.int64)),
                {"mode": "linear"}, opset=24), None, f"8 x {steps + 8} x 64")  # fmt: skip
    length = 1024
    signal = (n // length, length, 1)
    yield (Case("DFT", (signal, np.array(length), np.array(1)), opset=20),
           lambda x, *_: torch.fft.fft(x[..., 0]), f"{n // length} x {length}")  # fmt: skip
    frames = Case("STFT", ((1, n, 1), np.array(256), (512,), np.array(512)))
    yield (frames, lambda x, s, w, *_: torch.stft(x[..., 0], 512, 256, window=w, center=False,
                                                  return_complex=True), f"{n}")  # fmt: skip


def _losses(n: int) -> Iterator[Made]:
    import torch

    functional = torch.nn.functional
    for classes in (64, 5000):
        rows = n // classes
        labels = np.random.default_rng(5).integers(0, classes, rows)
        scores, label = (rows, classes), f"{rows} x {classes}"
        yield Case("SoftmaxCrossEntropyLoss", (scores, labels)), functional.cross_entropy, label
        yield (Case("NegativeLogLikelihoodLoss", (scores, labels)),
               functional.nll_loss, label)  # fmt: skip
