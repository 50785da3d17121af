"""Rules of operators over windows, rows and products: their constraints and their results."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_ir import Node

from onnx_fuse.ir.build import given
from onnx_fuse.ir.sizes import SymbolicSize, rounded_down, size, unknown
from onnx_fuse.ir.windows import around
from onnx_fuse.validation.symbolic.walk import NOTHING, Fact, Rule, Walk, needed, sizes_in


def _norm(w: Walk, node: Node) -> list[Fact]:
    """LayerNormalization and its like: the scale has the sizes of the last axes."""
    shape = w.shape(node.inputs[0])
    scale = w.shape(node.inputs[1]) if len(node.inputs) > 1 else None
    if shape is not None and scale is not None:
        w.broadcast([shape, scale])
    return [Fact(None if shape is None else tuple(shape))]


def _per_channel(w: Walk, node: Node) -> list[Fact]:
    """InstanceNormalization, BatchNormalization: a parameter for each channel."""
    shape, scale = w.shape(node.inputs[0]), w.shape(node.inputs[1])
    if shape is not None and scale is not None and len(shape) > 1:
        w.same(shape[1], scale[0])
    return [Fact(None if shape is None else tuple(shape))]


def _matmul(w: Walk, node: Node) -> list[Fact]:
    at = (0, 3) if node.op_type == "QLinearMatMul" else (0, 1)
    a, b = (needed(w.shape(node.inputs[i])) for i in at)
    inner = b[-2] if len(b) > 1 else b[0]
    w.same(a[-1], inner)
    batch = w.broadcast([a[:-2], b[:-2]]) or ()
    rows = (a[-2],) if len(a) > 1 else ()
    columns = (b[-1],) if len(b) > 1 else ()
    return [Fact((*batch, *rows, *columns))]


def _gemm(w: Walk, node: Node) -> list[Fact]:
    a, b = needed(w.shape(node.inputs[0])), needed(w.shape(node.inputs[1]))
    if node.attributes.get_int("transA", 0):
        a = a[::-1]
    if node.attributes.get_int("transB", 0):
        b = b[::-1]
    w.same(a[1], b[0])
    for result, bias in zip((b[1], a[0]), reversed(w.shape(given(node, 2)) or ()), strict=False):
        if bias.number not in (None, 1):
            w.same(result, bias)
    return [Fact((a[0], b[1]))]


def _pad(w: Walk, node: Node) -> list[Fact]:
    shape, pads = needed(w.shape(node.inputs[0])), needed(sizes_in(w, node.inputs[1]))
    some = given(node, 3)
    axes = list(range(len(shape))) if some is None else needed(w.ints(some))
    if len(pads) != 2 * len(axes):
        return [NOTHING]
    mode = node.attributes.get_string("mode", "constant")
    for i, axis in enumerate(axes):
        before, after = pads[i], pads[i + len(axes)]
        if mode == "reflect":  # the edge itself is not repeated
            for p in (before, after):
                w.system.require("least", shape[axis], p + 1)
        shape[axis] = shape[axis] + before + after
    return [Fact(tuple(shape))]


def _conv(w: Walk, node: Node) -> list[Fact]:
    weight = {"QLinearConv": 3}.get(node.op_type, 1)
    x, k = needed(w.shape(node.inputs[0])), needed(w.shape(node.inputs[weight]))
    w.same(x[1], k[1] * node.attributes.get_int("group", 1))
    places = _windows(w, node, x[2:], k[2:])
    for i in (2, 4) if node.op_type == "DeformConv" else ():  # offsets and a mask of each place
        if (moved := w.shape(given(node, i))) is not None:
            w.same(x[0], moved[0])
            for a, b in zip(places, moved[2:], strict=True):
                w.same(a, b)
    return [Fact((x[0], k[0], *places))]


def _quantize(w: Walk, node: Node) -> list[Fact]:
    """QuantizeLinear and DequantizeLinear: a scale for all, for each entry of an axis, or block."""
    shape, scale = w.shape(node.inputs[0]), w.shape(node.inputs[1])
    blocks = node.attributes.get_int("block_size", 0)
    if shape and scale is not None and len(scale) == 1 and scale[0].number != 1 and not blocks:
        w.same(shape[node.attributes.get_int("axis", 1)], scale[0])
    return [Fact(None if shape is None else tuple(shape))]


def _reverse_sequence(w: Walk, node: Node) -> list[Fact]:
    x, lengths = needed(w.shape(node.inputs[0])), needed(w.shape(node.inputs[1]))
    w.same(x[node.attributes.get_int("batch_axis", 1)], lengths[0])
    return [Fact(tuple(x))]


def _pool(w: Walk, node: Node) -> list[Fact]:
    x = needed(w.shape(node.inputs[0]))
    kernel = [size(k) for k in node.attributes.get_ints("kernel_shape", ())]
    shape = (*x[:2], *_windows(w, node, x[2:], kernel))
    return [Fact(shape)] * len(node.outputs)


def _windows(
    w: Walk, node: Node, x: Sequence[SymbolicSize], kernel: Sequence[SymbolicSize]
) -> list[SymbolicSize]:
    """The number of positions of a window along each axis, each of which must be positive."""
    n = len(x)
    strides = node.attributes.get_ints("strides", [1] * n)
    dilations = node.attributes.get_ints("dilations", [1] * n)
    pads, auto = around(node, n), node.attributes.get_string("auto_pad", "NOTSET")
    up = node.attributes.get_int("ceil_mode", 0)
    dims = []
    for i in range(n):
        if auto.startswith("SAME"):
            dims.append(-(-x[i] // strides[i]))
            continue
        room = x[i] + pads[i] - (kernel[i] - 1) * dilations[i] - 1
        w.system.require("least", room, size(0))
        dims.append((-(-room // strides[i]) if up else room // strides[i]) + 1)
    return dims


def _conv_transpose(w: Walk, node: Node) -> list[Fact]:
    x, k = needed(w.shape(node.inputs[0])), needed(w.shape(node.inputs[1]))
    w.same(x[1], k[0])
    n = len(x) - 2
    if (
        "output_shape" in node.attributes
        or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
    ):
        return [NOTHING]
    strides = node.attributes.get_ints("strides", [1] * n)
    dilations = node.attributes.get_ints("dilations", [1] * n)
    pads, more = around(node, n), node.attributes.get_ints("output_padding", [0] * n)
    dims = [
        (x[2 + i] - 1) * strides[i] + more[i] + (k[2 + i] - 1) * dilations[i] + 1 - pads[i]
        for i in range(n)
    ]
    return [Fact((x[0], k[1] * node.attributes.get_int("group", 1), *dims))]


def _global_pool(w: Walk, node: Node) -> list[Fact]:
    x = needed(w.shape(node.inputs[0]))
    return [Fact((*x[:2], *[size(1)] * (len(x) - 2)))]


def _resize(w: Walk, node: Node) -> list[Fact]:
    x = needed(w.shape(node.inputs[0]))
    if "axes" in node.attributes:
        return [NOTHING]
    sizes = sizes_in(w, given(node, 3)) if given(node, 3) is not None else None
    if sizes is not None:
        return [Fact(tuple(sizes)) if len(sizes) == len(x) else NOTHING]
    scales = needed(w.numbers(given(node, 2)))
    return [Fact(tuple(rounded_down(d * needed(s)) for d, s in zip(x, scales, strict=True)))]


def _reduce(w: Walk, node: Node) -> list[Fact]:
    shape = needed(w.shape(node.inputs[0]))
    keep = node.attributes.get_int("keepdims", 1)
    if node.op_type.startswith("Arg"):
        axes = [node.attributes.get_int("axis", 0)]
    else:
        axes = [] if given(node, 1) is None else needed(w.ints(node.inputs[1]))
    if not axes and not node.attributes.get_int("noop_with_empty_axes", 0):
        axes = list(range(len(shape)))
    gone = {a % len(shape) for a in axes}
    dims = [size(1) if i in gone else d for i, d in enumerate(shape) if keep or i not in gone]
    return [Fact(tuple(dims))]


def _top_k(w: Walk, node: Node) -> list[Fact]:
    shape, k = needed(w.shape(node.inputs[0])), w.numbers(node.inputs[1])
    axis = node.attributes.get_int("axis", -1) % len(shape)
    count = k[0] if k else None
    if count is not None:
        w.system.require("least", shape[axis], count)
    shape[axis] = unknown() if count is None else count
    return [Fact(tuple(shape))] * 2


def _einsum(w: Walk, node: Node) -> list[Fact]:
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    inputs, _, output = equation.partition("->")
    if "." in equation or not output:
        return [NOTHING]
    letters: dict[str, SymbolicSize] = {}
    for term, value in zip(inputs.split(","), node.inputs, strict=True):
        for letter, dim in zip(term, needed(w.shape(value)), strict=True):
            earlier = letters.setdefault(letter, dim)
            w.system.require("broadcast", earlier, dim)
            letters[letter] = dim if earlier.number == 1 else w.system.resolve(earlier)
    return [Fact(tuple(letters[c] for c in output))]


def _attention(w: Walk, node: Node) -> list[Fact]:
    """Attention of ai.onnx 23 on: the mask is as long as the past and the keys together."""
    q, k, v = (needed(w.shape(x)) for x in node.inputs[:3])
    mask, past = (w.shape(given(node, i)) for i in (3, 4))
    w.same(q[0], k[0])
    w.same(k[0], v[0])
    w.same(k[-2], v[-2])
    total = k[-2]
    present = []
    if past is not None:
        w.same(past[0], k[0])
        total = total + past[2]
        past_v = w.shape(node.inputs[5])
        if past_v is not None:
            w.same(past_v[0], k[0])
            w.same(past_v[2], past[2])
            present = [Fact((*past[:2], total, past[3])), Fact((*past_v[:2], total, past_v[3]))]
    if mask is not None:
        w.broadcast([mask[-2:], [q[-2], total]])
        if len(mask) > 2:
            w.broadcast([mask[:-2][:1], [q[0]]] if len(mask) == 4 else [[size(1)]])
    heads = node.attributes.get_int("kv_num_heads", 0)
    if len(q) == 4:
        return [Fact((*q[:3], v[3])), *present]
    wide = v[2] / heads * node.attributes.get_int("q_num_heads", 0) if heads else v[2]
    return [Fact((q[0], q[1], wide)), *present]


def _recurrent(w: Walk, node: Node) -> list[Fact]:
    x, r = needed(w.shape(node.inputs[0])), needed(w.shape(node.inputs[2]))
    if node.attributes.get_int("layout", 0) != 0:  # the batch is the first axis
        return []
    weights = w.shape(node.inputs[1])
    if weights is not None:
        w.same(x[2], weights[2])
    for i in (4, 5, 6):
        if (start := w.shape(given(node, i))) is not None:
            w.same(start[0 if i == 4 else 1], x[1])
    state = Fact((r[0], x[1], r[2]))
    return [Fact((x[0], r[0], x[1], r[2])), state, state]


def _blocks(w: Walk, node: Node) -> list[Fact]:
    x, b = needed(w.shape(node.inputs[0])), node.attributes.get_int("blocksize", 1)
    if node.op_type == "DepthToSpace":
        w.system.require("divides", x[1], size(b * b))
        return [Fact((x[0], x[1] // (b * b), x[2] * b, x[3] * b))]
    for d in x[2:]:
        w.system.require("divides", d, size(b))
    return [Fact((x[0], x[1] * (b * b), x[2] // b, x[3] // b))]


_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
RULES: dict[str, Rule] = {
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _norm),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), _per_channel),
    **dict.fromkeys(("MatMul", "MatMulInteger", "QLinearMatMul"), _matmul),
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv", "DeformConv"), _conv),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _global_pool),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _blocks),
    **dict.fromkeys(("ArgMax", "ArgMin", *(f"Reduce{kind}" for kind in _REDUCTIONS)), _reduce),
    "Gemm": _gemm,
    "ReverseSequence": _reverse_sequence,
    "Pad": _pad,
    "ConvTranspose": _conv_transpose,
    "Resize": _resize,
    "TopK": _top_k,
    "Einsum": _einsum,
    "Attention": _attention,
}
