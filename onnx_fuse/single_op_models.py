"""Operators by themselves: for each, a graph of given sizes whose program calls its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

HEAD = 64
"""The width of a head of attention."""


def _sizes(text: str, m: int, k: int, n: int) -> tuple[int, ...]:
    """The sizes that a text such as "1 9K M" names at [M,K,N].

    H and W are those of an image of M pixels, as square as M lets it be. A heads of D numbers have
    K together, and B blocks of 32 do.
    """
    high = next(d for d in range(isqrt(m), 0, -1) if m % d == 0)
    sizes = {"": 1, "M": m, "K": k, "N": n, "H": high, "W": m // high, "B": -(-k // 32)}
    sizes |= {"A": -(-k // HEAD), "D": min(k, HEAD)}
    digits = "0123456789"
    return tuple(int(s.rstrip("".join(sizes)) or 1) * sizes[s.lstrip(digits)] for s in text.split())


@dataclass(frozen=True)
class OperatorGraph:
    """The graph of an operator: the text of its nodes on x, and the sizes of x and y at [M,K,N].

    `text` names weights and indices of `_WEIGHTS` and `_constants`; {k} and {n} in it are sizes.
    """

    text: str
    x: str = "M K"
    y: str = "M K"
    gradient: bool = False
    """Whether the operator is in the gradient of the graph, of all its inputs."""


_LINEAR = OperatorGraph(
    "h = LayerNormalization <axis = -1> (x, gamma, beta)\n y = Gemm (h, w, c)", y="M N"
)
_NORM = OperatorGraph("y = LayerNormalization <axis = -1> (x, gamma, beta)")
_IMAGE = "1 K H W"
_CONV = OperatorGraph("y = Conv <pads = [1, 1, 1, 1]> (x, filters)", _IMAGE, "1 N H W")
_CHANNELS = OperatorGraph(
    "y, m, v = BatchNormalization <training_mode = 1> (x, gamma, beta, gamma, beta)", _IMAGE, _IMAGE
)
_ATTENTION = OperatorGraph("y = Attention (x, x, x)", "1 A M D", "1 A M D")
_WINDOW = "<kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)"

OPS = {
    "Gemm": OperatorGraph("y = Gemm (x, w, c)", y="M N"),
    "LayerNormGemm": _LINEAR,
    "LayerNormGemmGrad": replace(_LINEAR, gradient=True),
    "MatMulNBits": OperatorGraph(
        "y = com.microsoft.MatMulNBits <bits = 4, block_size = 32, K = {k}, N = {n}> (x, q, s)",
        y="M N",
    ),
    "Norm": _NORM,
    "NormGrad": replace(_NORM, gradient=True),
    "NormGradSums": replace(_NORM, gradient=True),
    "ChannelNorm": _CHANNELS,
    "ChannelGrad": replace(_CHANNELS, gradient=True),
    "Softmax": OperatorGraph("y = Softmax <axis = -1> (x)"),
    "Reduce": OperatorGraph("y = ReduceSum <keepdims = 0> (x, last)", y="M"),
    "Conv": _CONV,
    "ConvWeightGrad": replace(_CONV, gradient=True),
    "Pool": OperatorGraph(f"y = AveragePool {_WINDOW}", _IMAGE, _IMAGE),
    "MaxPoolGrad": OperatorGraph(f"y = MaxPool {_WINDOW}", _IMAGE, _IMAGE, True),
    "Resample": OperatorGraph('y = Resize <mode = "linear"> (x, , scales)', _IMAGE, "1 K 2H 2W"),
    "GridSample": OperatorGraph("y = GridSample (x, grid)", _IMAGE, _IMAGE),
    "Col2Im": OperatorGraph("y = Col2Im <pads = [1, 1, 1, 1]> (x, size, three)", "1 9K M", _IMAGE),
    "Sdpa": _ATTENTION,
    "SdpaGrad": replace(_ATTENTION, gradient=True),
    "CrossEntropy": OperatorGraph("y = SoftmaxCrossEntropyLoss (x, labels)", y=""),
    "CumulativeSum": OperatorGraph("y = CumSum (x, last)"),
    "TopK": OperatorGraph("y, i = TopK (x, eight)", y="M 8"),
    "GatherElements": OperatorGraph("y = GatherElements <axis = 1> (x, places)"),
    "ScatterElements": OperatorGraph("y = ScatterElements <axis = 1> (x, places, x)"),
    "GatherND": OperatorGraph("y = GatherND (x, rows)"),
    "Recurrence": OperatorGraph(
        "y = GRU <hidden_size = {n}> (x, gates, states)", "M 1 K", "M 1 1 N"
    ),
    "Random": OperatorGraph("y = RandomNormalLike <seed = 1.0> (x)"),
    "Pointwise": OperatorGraph("y = Gelu (x)"),
}
"""Operators that are tuned, timed and tried by name."""


_WEIGHTS = {
    "w": "K N", "c": "N", "gamma": "K", "beta": "K", "s": "N B", "q": "N B 16", "grid": "1 H W 2",
    "filters": "N K 3 3", "gates": "1 3N K", "states": "1 3N N",
}  # fmt: skip
"""Initializers of these sizes, all zeros, of x's type unless they have 4 bits."""


def _constants(m: int, k: int, n: int) -> dict[str, np.ndarray]:
    constants = {
        "last": [1], "labels": np.arange(m) % k, "eight": [8], "three": [3, 3],
        "size": _sizes("H W", m, k, n), "rows": np.arange(m)[::-1, None],
        "places": np.broadcast_to(np.arange(k)[::-1], (m, k)),
    }  # fmt: skip
    scales = np.array([1, 1, 2, 2], np.float32)
    return {name: np.array(v, np.int64) for name, v in constants.items()} | {"scales": scales}


def program_of(op: str, shape: tuple[int, int, int], precision: str, hw: Hardware) -> Program:
    """The program of one of OPS at [M,K,N]."""
    m, k, n = shape
    of_x, of_y = (_sizes(text, *shape) for text in (OPS[op].x, OPS[op].y))
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
    for name, sizes in _WEIGHTS.items():
        if name in read:
            dims = _sizes(sizes, *shape)
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
