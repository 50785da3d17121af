"""Operators by themselves: for each, a graph of given sizes whose program calls its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt, prod

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse import autodiff, rewrite
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import bind_defaults
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import PRECISIONS, Hardware
from onnx_fuse.rewrite.constants import lift_parameters
from onnx_fuse.session import load

Shape = Callable[[int, int, int], tuple[int, ...]]
HEAD = 64
"""The width of a head of attention."""


def pixels(m: int) -> tuple[int, int]:
    """The sizes of an image of m pixels, as square as m lets it be."""
    high = next(d for d in range(isqrt(m), 0, -1) if m % d == 0)
    return high, m // high


def _rows(m: int, k: int, n: int) -> tuple[int, ...]:
    return m, k


def _product(m: int, k: int, n: int) -> tuple[int, ...]:
    return m, n


def _image(m: int, k: int, n: int) -> tuple[int, ...]:
    return 1, k, *pixels(m)


def _filtered(m: int, k: int, n: int) -> tuple[int, ...]:
    return 1, n, *pixels(m)


def _heads(m: int, k: int, n: int) -> tuple[int, ...]:
    return 1, -(-k // HEAD), m, min(k, HEAD)


def _scalar(m: int, k: int, n: int) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True)
class OperatorGraph:
    """The graph of an operator: the text of its nodes on x, and the shapes of x and y at [M,K,N].

    `text` names weights and indices of `_weights`; {k} and {n} in it are the sizes.
    """

    text: str
    x: Shape = _rows
    y: Shape = _rows
    gradient: bool = False
    """Whether the operator is in the gradient of the graph, of all its inputs."""


_LINEAR = OperatorGraph(
    "h = LayerNormalization <axis = -1> (x, gamma, beta)\n y = Gemm (h, w, c)", y=_product
)
_NORM = OperatorGraph("y = LayerNormalization <axis = -1> (x, gamma, beta)")
_CONV = OperatorGraph("y = Conv <pads = [1, 1, 1, 1]> (x, filters)", _image, _filtered)
_CHANNELS = OperatorGraph(
    "y, m, v = BatchNormalization <training_mode = 1> (x, gamma, beta, gamma, beta)", _image, _image
)
_ATTENTION = OperatorGraph("y = Attention (x, x, x)", _heads, _heads)
_WINDOW = "<kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)"


def _of(graph: OperatorGraph) -> OperatorGraph:
    """The gradient of a graph."""
    return OperatorGraph(graph.text, graph.x, graph.y, True)


OPS = {
    "Gemm": OperatorGraph("y = Gemm (x, w, c)", y=_product),
    "LayerNormGemm": _LINEAR,
    "LayerNormGemmGrad": _of(_LINEAR),
    "MatMulNBits": OperatorGraph(
        "y = com.microsoft.MatMulNBits <bits = 4, block_size = 32, K = {k}, N = {n}> (x, q, s)",
        y=_product,
    ),
    "Norm": _NORM,
    "NormGrad": _of(_NORM),
    "NormGradSums": _of(_NORM),
    "ChannelNorm": _CHANNELS,
    "ChannelGrad": _of(_CHANNELS),
    "Softmax": OperatorGraph("y = Softmax <axis = -1> (x)"),
    "Reduce": OperatorGraph("y = ReduceSum <keepdims = 0> (x, last)", y=lambda m, k, n: (m,)),
    "Conv": _CONV,
    "ConvWeightGrad": _of(_CONV),
    "Pool": OperatorGraph(f"y = AveragePool {_WINDOW}", _image, _image),
    "MaxPoolGrad": OperatorGraph(f"y = MaxPool {_WINDOW}", _image, _image, True),
    "Resample": OperatorGraph(
        'y = Resize <mode = "linear"> (x, , scales)',
        _image,
        lambda m, k, n: (1, k, *(2 * d for d in pixels(m))),
    ),
    "GridSample": OperatorGraph("y = GridSample (x, grid)", _image, _image),
    "Col2Im": OperatorGraph(
        "y = Col2Im <pads = [1, 1, 1, 1]> (x, size, three)", lambda m, k, n: (1, 9 * k, m), _image
    ),
    "Sdpa": _ATTENTION,
    "SdpaGrad": _of(_ATTENTION),
    "CrossEntropy": OperatorGraph("y = SoftmaxCrossEntropyLoss (x, labels)", y=_scalar),
    "CumulativeSum": OperatorGraph("y = CumSum (x, last)"),
    "TopK": OperatorGraph("y, i = TopK (x, eight)", y=lambda m, k, n: (m, 8)),
    "GatherElements": OperatorGraph("y = GatherElements <axis = 1> (x, places)"),
    "ScatterElements": OperatorGraph("y = ScatterElements <axis = 1> (x, places, x)"),
    "GatherND": OperatorGraph("y = GatherND (x, rows)"),
    "Recurrence": OperatorGraph(
        "y = GRU <hidden_size = {n}> (x, gates, states)",
        lambda m, k, n: (m, 1, k),
        lambda m, k, n: (m, 1, 1, n),
    ),
    "Random": OperatorGraph("y = RandomNormalLike <seed = 1.0> (x)"),
    "Pointwise": OperatorGraph("y = Gelu (x)"),
}
"""Operators that are tuned, timed and tried by name."""


def io_shapes(op: str, m: int, k: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of x and y of one of OPS at [M,K,N].

    x is [M,K] and y [M,N], or as x where there is no weight. An image has M pixels, as square as M
    lets it be, with K channels, and a convolution N filters of 3 x 3. Attention has heads of 64
    numbers, K in all, of M queries. The text of some reads no N.
    """
    return OPS[op].x(m, k, n), OPS[op].y(m, k, n)


def _weights(m: int, k: int, n: int) -> dict[str, tuple[int, ...]]:
    """Initializers of these shapes, all zeros, of x's type unless they have 4 bits."""
    return {
        "w": (k, n), "c": (n,), "gamma": (k,), "beta": (k,), "s": (n, -(-k // 32)),
        "q": (n, -(-k // 32), 16), "filters": (n, k, 3, 3), "gates": (1, 3 * n, k),
        "states": (1, 3 * n, n), "grid": (1, *pixels(m), 2),
    }  # fmt: skip


def _constants(m: int, k: int, n: int) -> dict[str, np.ndarray]:
    """Indices and sizes that graphs read."""
    constants = {
        "last": [1], "labels": np.arange(m) % k, "eight": [8], "size": pixels(m), "three": [3, 3],
        "rows": np.arange(m)[::-1, None], "places": np.broadcast_to(np.arange(k)[::-1], (m, k)),
    }  # fmt: skip
    scales = np.array([1, 1, 2, 2], np.float32)
    return {name: np.array(v, np.int64) for name, v in constants.items()} | {"scales": scales}


def program_of(op: str, shape: tuple[int, int, int], precision: str, hw: Hardware) -> Program:
    """The program of one of OPS at [M,K,N], as `io_shapes` says."""
    m, k, n = shape
    of_x, of_y = io_shapes(op, m, k, n)
    dtype, math = PRECISIONS[precision]
    element = "float" if dtype == "float32" else dtype
    text = (
        f'<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
        f"g ({element}{list(of_x)} x) => ({element}{list(of_y) or ''} y) "
        f"{{ {OPS[op].text.format(k=k, n=n)} }}"
    )
    proto = onnx.parser.parse_model(text)
    kind = proto.graph.input[0].type.tensor_type.elem_type
    read = {name for node in proto.graph.node for name in node.input}
    for name, dims in _weights(m, k, n).items():
        if name in read:
            of = onnx.TensorProto.UINT8 if name == "q" else kind
            size = onnx.helper.tensor_dtype_to_np_dtype(of).itemsize * prod(dims)
            tensor = onnx.helper.make_tensor(name, of, dims, bytes(size), raw=True)
            proto.graph.initializer.append(tensor)
    for name, array in _constants(m, k, n).items():
        if name in read:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    graph = load(proto)
    if OPS[op].gradient:
        graph = _gradient(graph)
    else:
        rewrite.optimize(graph)
    shapes = {
        str(v.name): (tuple(map(int, v.shape or ())), ir.DataType(v.dtype or 0).numpy().name)  # type: ignore[arg-type]
        for v in graph.graph.inputs
    }
    return lower(graph, shapes, hw, math=math)


def _gradient(model: ir.Model) -> ir.Model:
    """The gradient of all inputs and weights, of what a forward has kept."""
    bind_defaults(model)
    lift_parameters(model)
    rewrite.optimize(model, training=True)
    weights = [v for v in autodiff.trainable(model) if autodiff.is_weight(v)]
    autodiff.open_parameters(model, weights)
    names = [str(v.name) for v in model.graph.inputs]
    backward: ir.Model = autodiff.partition(model, names, fused=True).backward
    infer_shapes(backward)
    return backward
