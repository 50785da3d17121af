"""What tools/bench_operators.py times: nodes, and what torch does with the same tensors.

The sizes follow from a number of elements. Where torch has no such operator, the bytes alone are
the peer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from math_cases import Case, i64
from torch.nn import functional as F

from onnx_fuse.ir.constants import FUSE

Torch = Callable[..., Any]
UNTIMED = {
    "no launch: views": ("Flatten", "Reshape", "Squeeze", "Unsqueeze"),
    "known without a run": ("ConstantOfShape", "EyeLike", "MelWeightMatrix", "Range"),
    "tools/bench_torch.py and onnx-fuse lab": ("Gemm", "MatMul"),
    "text": ("TfIdfVectorizer",),
}
"""Operators that need no row, and why."""
SAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsInf IsNaN Log Neg "
    "Reciprocal Relu Round Sigmoid Sign Sin Sinh Sqrt Tan Tanh Softplus Gelu Elu Selu Celu Mish "
    "HardSwish HardSigmoid Softsign"
)
"""Operators whose names in lower case are torch's."""
UNARY = {name: name.lower() for name in SAME.split()} | {
    "Identity": "clone", "LeakyRelu": "leaky_relu", "ThresholdedRelu": "relu",
    "Shrink": "hardshrink", "Swish": "silu",
}  # fmt: skip
BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Pow": "pow", "Max": "maximum",
    "Min": "minimum", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt",
    "LessOrEqual": "le", "Mod": "fmod",
}  # fmt: skip
REDUCTIONS = {
    "ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "amax", "ReduceMin": "amin",
    "ReduceProd": "prod", "ReduceLogSumExp": "logsumexp", "ReduceL2": "norm",
}  # fmt: skip
WRITTEN: dict[str, Torch] = {
    "ReduceL1": lambda x, *_: x.abs().sum(1),
    "ReduceLogSum": lambda x, *_: x.sum(1).log(),
    "ReduceSumSquare": lambda x, *_: x.square().sum(1),
}
CONVOLUTIONS = (
    (3, 224, 64, 7, 2), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1), (256, 56, 128, 1, 1),
    (256, 56, 512, 1, 2), (128, 28, 128, 3, 1), (256, 14, 1024, 1, 1), (512, 14, 512, 3, 2),
    (512, 7, 512, 3, 1),
)  # fmt: skip
"""Channels, size of the images, filters, kernel and stride of ResNet-50."""
SHORT = 64
"""Elements of a short row."""


@dataclass(frozen=True)
class Row:
    """One operator at one shape, and what torch does with the same tensors."""

    case: Case
    torch: Torch | None
    shape: str

    @property
    def name(self) -> str:
        """The operator, and what its case notes."""
        return " ".join(filter(None, (self.case.op, self.case.note)))


class Rows(list[Row]):
    """All rows of n elements."""

    def __init__(self, n: int) -> None:
        self.n, self.label = n, ""
        self.entries(1, n)
        for count in (1, 8, n // SHORT):
            self.rows(count, n // count)
            self.indexed(count, n // count)
        self.moves(n // 64)
        self.quantized(n // 64)
        self.images(int((n / 64) ** 0.5) // 2 * 2)
        self.sequences(max(4, int((n / 4096) ** 0.5)))
        for classes in (64, 5000):
            self.losses(n // classes, classes)

    def add(
        self,
        op: str,
        *inputs: Any,
        torch: Torch | None = None,
        outputs: int = 1,
        opset: int = 22,
        note: str = "",
        domain: str = "",
        at: str = "",
        **attributes: Any,
    ) -> None:
        """A row of the section's shape, or `at` another."""
        case = Case(op, inputs, attributes, outputs, note=note, domain=domain, opset=opset)
        self.append(Row(case, torch, at or self.label))

    def entries(self, *shape: int) -> None:
        """Operators of entries, in one long row."""
        rng, self.label = np.random.default_rng(1), f"1 x {shape[1]}"
        for op, name in UNARY.items():
            call = getattr(torch, name, None) or getattr(F, name)
            more = {"lambd": 0.5} if op == "Shrink" else {}
            self.add(op, shape, torch=call, opset={"Swish": 24}.get(op, 22), **more)
        for op, name in BINARY.items():
            more = {"fmod": 1} if op == "Mod" else {}
            self.add(op, shape, shape, torch=getattr(torch, name), **more)
        self.add("Where", np.zeros(shape, np.bool_), shape, shape, torch=torch.where)
        ends = np.float32(-1), np.float32(1)
        self.add("Clip", shape, *ends, torch=lambda x, a, b: torch.clamp(x, -1.0, 1.0))
        flags, whole = rng.random((2, *shape)) < 0.5, rng.integers(0, 1000, (2, *shape))
        for op in ("And", "Or", "Xor"):
            self.add(op, *flags, torch=getattr(torch, f"logical_{op.lower()}"))
            self.add(f"Bitwise{op}", *whole, torch=getattr(torch, f"bitwise_{op.lower()}"))
        self.add("Not", flags[0], torch=torch.logical_not)
        self.add("BitwiseNot", whole[0], torch=torch.bitwise_not)
        self.add(
            "BitShift", whole[0].astype(np.uint32), np.ones(shape, np.uint32), direction="LEFT"
        )
        self.add("BitCast", shape, torch=lambda x: x.view(torch.int32) + 0, opset=26, to=6)
        self.add("Cast", shape, torch=lambda x: x.half(), to=10)
        self.add("CastLike", shape, np.ones((1, 2), np.float16), torch=lambda x, _: x.half())
        self.add("Sum", shape, shape, torch=lambda x, y: x + y)
        self.add("Mean", shape, shape, torch=lambda x, y: (x + y) / 2)
        for kind, call in (("Normal", "randn"), ("Uniform", "rand")):
            like, drawn = getattr(torch, f"{call}_like"), getattr(torch, call)
            self.add(f"Random{kind}Like", shape, torch=like, seed=1.0)
            made = lambda drawn=drawn: drawn(*shape, device="cuda")
            self.add(f"Random{kind}", torch=made, seed=1.0, shape=[*shape])
        self.add("Bernoulli", np.full(shape, 0.25, np.float32), torch=torch.bernoulli, seed=1.0)
        some = np.array(0.5, np.float32), np.array(True)
        self.add("Dropout", shape, *some, torch=lambda x, *_: F.dropout(x, 0.5), outputs=2, seed=1)
        half = rng.random(shape) < 0.5
        self.add("Where", half, shape, shape, torch=torch.where, note="half")
        first = np.ones(64, np.bool_)
        self.add("Compress", shape, first, torch=lambda x, c: x[:, :64][:, c], axis=1)

    def rows(self, count: int, length: int) -> None:
        """Operators of whole rows."""
        shape, turned, self.label = (count, length), (length, count), f"{count} x {length}"
        for op, name in REDUCTIONS.items():
            call = getattr(torch, name)
            self.add(op, shape, i64(1), torch=lambda x, *_, call=call: call(x, dim=1))
        for op, call in WRITTEN.items():
            self.add(op, shape, i64(1), torch=call)
        self.add("ReduceSum", turned, i64(0), torch=lambda x, *_: x.sum(0), note="columns")
        self.add("ArgMax", shape, torch=lambda x: torch.argmax(x, 1), axis=1)
        self.add("ArgMin", shape, torch=lambda x: torch.argmin(x, 1), axis=1)
        hard = lambda x: torch.zeros_like(x).scatter_(1, x.argmax(1, True), 1.0)
        self.add("Hardmax", shape, torch=hard, axis=1)
        self.add("Softmax", shape, torch=lambda x: torch.softmax(x, 1), axis=1)
        self.add("LogSoftmax", shape, torch=lambda x: torch.log_softmax(x, 1), axis=1)
        width = (length,)
        norm = lambda x, s, b: F.layer_norm(x, (x.shape[1],), s, b)
        self.add("LayerNormalization", shape, width, width, torch=norm, axis=1)
        rms = lambda x, s: F.rms_norm(x, (x.shape[1],), s)
        self.add("RMSNormalization", shape, width, torch=rms, opset=23, axis=1)
        if length >= 1000:
            stat = np.ones((count, 1), np.float32)

            def backward(x: Any, dy: Any, s: Any, mean: Any, rstd: Any) -> Any:
                back = torch.ops.aten.native_layer_norm_backward
                return back(dy, x, s.shape, mean, rstd, s, s, [True] * 3)

            given = shape, shape, width, stat, stat
            self.add("LayerNormGrad", *given, torch=backward, outputs=3, domain=FUSE)
        square = int(length**0.5)
        planes = (count, 4, square, max(1, length // square // 4))
        norm = lambda x, s, b: F.instance_norm(x, weight=s, bias=b)
        self.add("InstanceNormalization", planes, (4,), (4,), torch=norm)
        self.add("LpNormalization", shape, torch=lambda x: F.normalize(x, dim=1), axis=1)
        axis, down = np.array(1, np.int64), np.array(0, np.int64)
        self.add("CumSum", shape, axis, torch=lambda x, *_: torch.cumsum(x, 1))
        self.add("CumSum", turned, down, torch=lambda x, *_: torch.cumsum(x, 0), note="columns")
        self.add("CumProd", shape, axis, torch=lambda x, *_: torch.cumprod(x, 1), opset=26)
        for k in {min(50, length), length}:
            best = lambda x, *_, k=k: torch.topk(x, k, 1)
            self.add("TopK", shape, i64(k), torch=best, outputs=2, note=f"of {k}", axis=1)
        moved = lambda x: x.t().clone(memory_format=torch.contiguous_format)
        self.add("Transpose", shape, torch=moved, perm=[1, 0])
        self.add("Concat", shape, shape, torch=lambda x, y: torch.cat((x, y), 1), axis=1)

    def indexed(self, count: int, length: int) -> None:
        """Operators that read indices."""
        shape, rng = (count, length), np.random.default_rng(0)
        index = rng.integers(0, length, shape)
        self.add("GatherElements", shape, index, torch=lambda x, i: x.gather(1, i), axis=1)
        chosen = lambda x, i: torch.index_select(x, 1, i[0])
        self.add("Gather", shape, index[0, None], torch=chosen, axis=1)
        for way, name in (("none", ""), ("add", "sum"), ("max", "amax"), ("mul", "prod")):

            def scatter(x: Any, i: Any, u: Any, name: str = name) -> Any:
                return x.scatter_reduce(1, i, u, name) if name else x.scatter(1, i, u)

            given = shape, index, shape
            self.add("ScatterElements", *given, torch=scatter, note=way, axis=1, reduction=way)
        if count > 1:
            return
        places = rng.integers(0, length, (length // 4, 1))
        for way in ("none", "add"):
            given = (length,), places, (len(places),)
            put = lambda x, i, u, way=way: x.index_put((i[:, 0],), u, accumulate=way == "add")
            self.add("ScatterND", *given, torch=put, note=way, reduction=way)
        self.add("NonZero", rng.random(shape) < 0.5, torch=torch.nonzero)
        found = lambda x: torch.unique(x, return_inverse=True, return_counts=True)
        self.add("Unique", index, torch=found, outputs=4)

    def moves(self, count: int) -> None:
        """Operators that move the elements of many short rows, or a matrix."""
        rng, shape, self.label = np.random.default_rng(2), (count, 64), f"{count} x 64"
        self.add("PRelu", shape, (64,), torch=F.prelu)
        self.add("Expand", (1, 64), i64(*shape), torch=lambda x, *_: x.expand(shape).clone())
        ends = i64(1), i64(60), i64(1)
        self.add("Slice", shape, *ends, torch=lambda x, *_: x[:, 1:60].clone())
        halves = lambda x: [part.clone() for part in x.split(32, 1)]
        self.add("Split", shape, torch=halves, outputs=2, axis=1, num_outputs=2)
        self.add("Tile", shape, i64(1, 2), torch=lambda x, *_: x.repeat(1, 2))
        classes = rng.integers(0, 64, (count, 1)), np.array(64), np.float32([0, 1])
        self.add("OneHot", *classes, torch=lambda i, *_: F.one_hot(i, 64), axis=-1)
        lengths = np.full(64, count, np.int64)
        flip = lambda x, *_: x.flip(0)
        self.add("ReverseSequence", shape, lengths, torch=flip, batch_axis=1, time_axis=0)
        pairs = np.stack([rng.integers(0, size, self.n // 4) for size in shape], -1)
        self.add("GatherND", shape, pairs, torch=lambda x, i: x[i[:, 0], i[:, 1]])
        dots = lambda x, y: torch.einsum("ij,ij->i", x, y)
        self.add("Einsum", shape, shape, torch=dots, equation="ij,ij->i")
        self.add("Det", (count, 8, 8), torch=torch.linalg.det, at=f"{count} x 8 x 8")
        side = int(self.n**0.5)
        self.add("Trilu", (side, side), torch=torch.tril, at=f"{side} x {side}", upper=0)
        apart, even = lambda x: F.pixel_unshuffle(x, 2), side // 4 * 2
        self.add("SpaceToDepth", (1, 4, even, even), torch=apart, at=f"4 x {even}", blocksize=2)

    def quantized(self, count: int) -> None:
        """Operators of small integers."""
        rng, shape, self.label = np.random.default_rng(3), (count, 64), f"{count} x 64"
        scale, zero = np.array(0.1, np.float32), np.array(7, np.uint8)
        codes = rng.integers(0, 255, shape).astype(np.uint8)
        rounded = lambda x, *_: (x * 10).round().add(7).clamp(0, 255).to(torch.uint8)
        self.add("QuantizeLinear", shape, scale, zero, torch=rounded)
        wide = lambda q, *_: (q.float() - 7) * 0.1
        self.add("DequantizeLinear", codes, scale, zero, torch=wide)

        def ranged(x: Any) -> Any:
            step = (x.amax() - x.amin()) / 255
            return (x / step).round().clamp(0, 255).to(torch.uint8)

        self.add("DynamicQuantizeLinear", shape, torch=ranged, outputs=3)
        side = int((self.n / 3) ** 0.5) // 32 * 32
        a, b = (rng.integers(-9, 9, (side, side)).astype(np.int8) for _ in range(2))
        square = f"{side} x {side}"
        self.add("MatMulInteger", a, b, torch=torch._int_mm, at=square)
        one, none, low = scale, np.array(0, np.int8), np.array(0, np.uint8)
        product = lambda x, s, z, y, *_: torch._int_mm(x, y)
        self.add("QLinearMatMul", a, one, none, b, one, none, one, none, torch=product, at=square)
        side = int((self.n / 16) ** 0.5)
        x = rng.integers(0, 9, (1, 16, side, side)).astype(np.uint8)
        w = rng.integers(0, 9, (16, 16, 3, 3)).astype(np.uint8)
        self.add("ConvInteger", x, w, at=f"16 x {side} x {side}")
        self.add("QLinearConv", x, one, low, w, one, low, one, low, at=f"16 x {side} x {side}")

    def images(self, side: int) -> None:
        """Operators of windows, regions and images of 64 channels."""
        shape, self.label, half = (1, 64, side, side), f"64 x {side} x {side}", side // 2
        filters, channel = (64, 64, 3, 3), (64,)
        two: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
        places = np.arange(side * side * 64).reshape(64, half, 2, half, 2)[None, :, :, 0, :, 1]
        unpool = lambda x, i: F.max_unpool2d(x, i % (side * side), 2, 2)
        self.add("MaxUnpool", (1, 64, half, half), places, torch=unpool, **two)
        self.add("MaxPool", shape, torch=lambda x: F.max_pool2d(x, 2, 2), **two)
        self.add("AveragePool", shape, torch=lambda x: F.avg_pool2d(x, 2, 2), **two)
        self.add("LpPool", shape, torch=lambda x: F.lp_pool2d(x, 2, 2), **two)
        self.add("GlobalAveragePool", shape, torch=lambda x: x.mean((2, 3), keepdim=True))
        self.add("GlobalMaxPool", shape, torch=lambda x: x.amax((2, 3), keepdim=True))
        self.add("GlobalLpPool", shape, torch=lambda x: x.norm(dim=(2, 3), keepdim=True))
        self.add("LRN", shape, torch=lambda x: F.local_response_norm(x, 5), size=5)
        for mode, name in (("linear", "bilinear"), ("nearest", "nearest"), ("cubic", "bicubic")):
            grown = lambda x, *_, name=name: F.interpolate(x, scale_factor=2, mode=name)
            scales, note = np.float32([1, 1, 2, 2]), "" if mode == "linear" else mode
            self.add("Resize", shape, None, scales, torch=grown, note=note, mode=mode)
        sampled = lambda x, g: F.grid_sample(x, g, align_corners=False)
        self.add("GridSample", shape, (1, side, side, 2), torch=sampled)
        given = shape, channel, channel, channel, np.ones(64, np.float32)
        norm = lambda x, s, b, m, v: F.batch_norm(x, m, v, s, b)
        self.add("BatchNormalization", *given, torch=norm)
        norm = lambda x, s, b: F.group_norm(x, 8, s, b)
        self.add("GroupNormalization", shape, channel, channel, torch=norm, num_groups=8)
        self.add("DepthToSpace", shape, torch=lambda x: F.pixel_shuffle(x, 2), blocksize=2)
        pads = i64(0, 0, 1, 1, 0, 0, 1, 1)
        self.add("Pad", shape, pads, torch=lambda x, *_: F.pad(x, (1, 1, 1, 1)))
        self.add("Conv", shape, filters, torch=F.conv2d)
        for c, size, m, k, s in CONVOLUTIONS:
            pad, at = k // 2, f"{c} x {size}^2 to {m}, {k} x {k} / {s}"
            conv = lambda x, w, s=s, pad=pad: F.conv2d(x, w, None, s, pad)
            how: dict[str, Any] = {"strides": [s, s], "pads": [pad] * 4}
            batch = max(1, self.n // (c * size**2))
            self.add("Conv", (batch, c, size, size), (m, c, k, k), torch=conv, at=at, **how)
        self.add("ConvTranspose", shape, filters, torch=F.conv_transpose2d)
        boxes, batches = np.float32([[0, 0, half, half]] * 32), np.zeros(32, np.int64)
        self.add("RoiAlign", shape, boxes, batches, output_height=7, output_width=7)
        self.add("DeformConv", shape, filters, (1, 18, side - 2, side - 2))
        blocks, fold = (1, 64 * 4, half * half), lambda x, *_: F.fold(x, (side, side), 2, stride=2)
        self.add("Col2Im", blocks, i64(side, side), i64(2, 2), torch=fold, strides=[2, 2])
        count = max(8, int(self.n**0.5))
        corners = np.random.default_rng(4).random((1, count, 2)).astype(np.float32)
        boxes, at = np.concatenate([corners, corners + 0.1], -1), f"{count} boxes"
        limits = np.array([100]), np.float32([0.5])
        self.add("NonMaxSuppression", boxes, (1, 1, count), *limits, at=at)

    def sequences(self, steps: int) -> None:
        """Recurrent operators, attention, and signals."""
        batch, hidden = 16, 128
        self.label = f"{steps} x {batch} x {hidden}"
        for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
            weights = (1, gates * hidden, hidden)
            module = getattr(torch.nn, op)(hidden, hidden).cuda().requires_grad_(False)
            work = lambda x, *_, module=module: module(x)
            self.add(op, (steps, batch, hidden), weights, weights, torch=work, hidden_size=hidden)
        heads, attended = (1, 8, steps, 64), F.scaled_dot_product_attention
        self.add("Attention", *[heads] * 3, torch=attended, opset=23, at=f"8 x {steps} x 64")
        cache, token, first = (8, 1, steps + 8, 64), (8, 1, 1, 64), np.zeros(8, np.int64)
        at = f"8 x {steps + 8} x 64"
        self.add("TensorScatter", cache, token, first, opset=24, at=at, mode="linear")
        count, length = self.n // 1024, 1024
        signal, fft = (count, length, 1), lambda x, *_: torch.fft.fft(x[..., 0])
        whole = np.array(length), np.array(1)
        self.add("DFT", signal, *whole, torch=fft, opset=20, at=f"{count} x {length}")

        def frames(x: Any, step: Any, window: Any, *_: Any) -> Any:
            how: dict[str, Any] = {"center": False, "return_complex": True}
            return torch.stft(x[..., 0], 512, 256, window=window, **how)

        given = (1, self.n, 1), np.array(256), (512,), np.array(512)
        self.add("STFT", *given, torch=frames, at=f"{self.n}")

    def losses(self, count: int, classes: int) -> None:
        shape, self.label = (count, classes), f"{count} x {classes}"
        labels = np.random.default_rng(5).integers(0, classes, count)
        self.add("SoftmaxCrossEntropyLoss", shape, labels, torch=F.cross_entropy)
        self.add("NegativeLogLikelihoodLoss", shape, labels, torch=F.nll_loss)
