"""Graphs drawn at random over the operator set, for tools/fuzz.py.

A row of OPERATORS says how a node of an operator is drawn: from values that are there already, or
from new inputs and constants. `graph(rng)` gives a model and several feeds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from fuzz_graphs import (
    ANY,
    BOOL,
    FLOATS,
    INTEGERS,
    NUMBERS,
    SMALL_INTEGERS,
    SYMBOLS,
    Case,
    Draw,
    Graph,
    Refused,
    Shape,
    finished,
    run_alone,
    table,
)
from fuzz_moves import MOVES, counted, shaped
from fuzz_random import RANDOM
from fuzz_windows import WINDOWS, per_channel
from onnx import TensorProto, helper


def unary(dtypes: Sequence[str], **attributes: Callable[[Graph], Any]) -> Draw:
    def draw(g: Graph, operator: str) -> None:
        given = {k: f(g) for k, f in attributes.items() if g.chance(0.6)}
        g.node(operator, [g.value(dtypes)], **given)

    return draw


def binary(dtypes: Sequence[str], **attributes: Callable[[Graph], Any]) -> Draw:
    def draw(g: Graph, operator: str) -> None:
        a = g.value(dtypes)
        pair = [a, g.beside(a)]
        if g.chance(0.5):
            pair.reverse()
        given = {k: f(g) for k, f in attributes.items()}
        g.node(operator, pair, **given)

    return draw


def several(dtypes: Sequence[str]) -> Draw:
    def draw(g: Graph, operator: str) -> None:
        a = g.value(dtypes)
        g.node(operator, [a, *(g.beside(a) for _ in range(g.number(0, 2)))])

    return draw


def mod(g: Graph, operator: str) -> None:
    a = g.value(NUMBERS)
    shape = g.of(a).shape if g.chance(0.6) else ()
    by = g.array(g.dtype(a), shape, positive=True) + np.array(1, g.dtype(a))
    g.node(operator, [a, g.constant(by)], fmod=1 if g.dtype(a).startswith("f") else g.number(0, 1))


def divide(g: Graph, operator: str) -> None:
    a = g.value(NUMBERS)
    by = g.array(g.dtype(a), g.of(a).shape if g.chance(0.6) else (), positive=True)
    g.node(operator, [a, g.constant(by + np.array(1, g.dtype(a)))])


def power(g: Graph, operator: str) -> None:
    exponent = g.one_of((2.0, 3.0, 0.5, 1.0, 0.0, -1.0))
    a = g.value(FLOATS)
    g.node(operator, [a, g.constant(exponent, g.one_of((g.dtype(a), "float32")))])


def shift(g: Graph, operator: str) -> None:
    a = g.fresh("uint8", g.shape(g.number(0, 3)))
    by = g.constant(g.rng.integers(0, 4, g.of(a).shape), "uint8")
    g.node(operator, [a, by], direction=g.one_of(("LEFT", "RIGHT")))


def where(g: Graph, operator: str) -> None:
    a = g.value(ANY)
    b = g.beside(a)
    g.node(operator, [g.beside(a, "bool"), a, b])


def clip(g: Graph, operator: str) -> None:
    x = g.value((*FLOATS, "int64", "int32"))
    low = g.constant(-1, g.dtype(x)) if g.chance(0.7) else ""
    high = g.constant(2, g.dtype(x)) if g.chance(0.7) else ""
    g.node(operator, [x, low, high] if high else [x, low] if low else [x])


def prelu(g: Graph, operator: str) -> None:
    sizes = g.shape(g.number(0, 4))
    dtype = g.one_of(FLOATS)
    slope = sizes[g.number(0, len(sizes)) :]
    g.node(
        operator, [g.fresh(dtype, sizes), g.fresh(dtype, tuple(g.one_of((1, s)) for s in slope))]
    )


def reciprocal(g: Graph, operator: str) -> None:
    g.node(operator, [g.value(FLOATS, accept=lambda a: bool((np.abs(a) > 0.1).all()))])


def cast(g: Graph, operator: str) -> None:
    target = g.one_of((*ANY, "int8", "uint8"))
    x = g.value(ANY)
    if operator == "CastLike":
        return g.node(operator, [x, g.fresh(target, ())])
    g.node(operator, [x], to=helper.np_dtype_to_tensor_dtype(np.dtype(target)))


def softmax(g: Graph, operator: str) -> None:
    x = g.value(FLOATS, (1, 4))
    g.node(operator, [x], **({"axis": g.axis(x)} if g.chance(0.8) else {}))


def reduction(g: Graph, operator: str) -> None:
    # onnxruntime multiplies integers in float64, and gives the type's ends where that is too large
    of_floats = operator in ("ReduceLogSum", "ReduceProd")
    x = g.value(FLOATS if of_floats else (*FLOATS, "int64", "int32"))
    if operator == "ReduceLogSum":
        x = g.fresh(g.dtype(x), g.shape(g.number(0, 4)))
        g.values[x] = np.abs(g.values[x]) + np.array(0.5, g.dtype(x))
        if x in g.constants:
            g.constants[x] = g.values[x]
        else:
            g.node("Abs", [x])
            x = g.nodes[-1].output[0]
    given: dict[str, Any] = {"keepdims": g.number(0, 1)} if g.chance(0.7) else {}
    if g.chance(0.2):
        given["noop_with_empty_axes"] = g.number(0, 1)
    axes = g.axes(x)
    inputs = [x] if g.chance(0.2) else [x, g.constant(axes, "int64")]
    g.node(operator, inputs, **given)


def argument(g: Graph, operator: str) -> None:
    x = g.value((*FLOATS, "int32"), (1, 4))
    g.node(operator, [x], axis=g.axis(x), keepdims=g.number(0, 1), select_last_index=g.number(0, 1))


def top_k(g: Graph, operator: str) -> None:
    x = g.value(FLOATS, (1, 3))
    axis = g.axis(x)
    size = g.of(x).shape[axis]
    k = g.constant([g.number(0, size)], "int64")
    g.node(operator, [x, k], 2, axis=axis, largest=g.number(0, 1), sorted=1)


def cumulative(g: Graph, operator: str) -> None:
    x = g.value((*FLOATS, "int64", "int32"), (1, 4))
    axis = g.constant(g.axis(x), g.one_of(("int64", "int32")))
    g.node(operator, [x, axis], exclusive=g.number(0, 1), reverse=g.number(0, 1))


def matmul(g: Graph, operator: str) -> None:
    a = g.value(FLOATS, (1, 4))
    k = g.of(a).shape[-1]
    batch = [g.one_of((1, s)) for s in g.of(a).shape[:-2]] if g.chance(0.5) else []
    n = g.one_of((*SYMBOLS, 1, 3, 8))
    shape: Shape = (*batch, k, n) if g.chance(0.9) else (k,)
    domain = "com.microsoft" if operator == "FusedMatMul" else ""
    if domain and len(shape) > 1:
        shape = (*batch, n, k)
        g.node(operator, [a, g.fresh(g.dtype(a), shape)], domain=domain, transB=1, alpha=0.5)
    elif not domain:
        g.node(operator, [a, g.fresh(g.dtype(a), shape)])


def gemm(g: Graph, operator: str) -> None:
    a = g.value(FLOATS, (2, 2))
    flags = {"transA": g.number(0, 1), "transB": g.number(0, 1)}
    m, k = g.of(a).shape[::-1] if flags["transA"] else g.of(a).shape
    n = g.number(1, 8)
    b = g.fresh(g.dtype(a), (n, k) if flags["transB"] else (k, n))
    c = [g.fresh(g.dtype(a), g.one_of(((n,), (1, n), (m, 1), (m, n), ())))]
    if g.chance(0.3):
        flags |= {"alpha": 0.5, "beta": g.one_of((2.0, 0.0))}
    g.node(operator, [a, b, *(c if g.chance(0.8) else [])], **flags)


def einsum(g: Graph, operator: str) -> None:
    a = g.value(("float32", "float64"), (3, 3))
    b, i, j = g.of(a).shape
    text, shape = g.one_of((
        ("bij,jk->bik", (j, 3)), ("bij,bjk->bik", (b, j, 2)), ("bij,bij->b", (b, i, j)),
        ("bij,bik->bjk", (b, i, 2)), ("bij,k->bkij", (2,)), ("bij,ji->b", (j, i)),
    ))  # fmt: skip
    g.node(operator, [a, g.fresh(g.dtype(a), shape)], equation=text)


def layer_norm(g: Graph, operator: str) -> None:
    x = g.value(FLOATS, (1, 4), lambda a: a.size > 0)
    axis = g.axis(x)
    shape = g.of(x).shape[axis:]
    scale = g.fresh(g.dtype(x), shape if g.chance(0.8) else tuple(1 for _ in shape))
    bias = [g.fresh(g.dtype(x), shape)] if operator == "LayerNormalization" else []
    g.node(operator, [x, scale, *(bias if g.chance(0.7) else [])], axis=axis, epsilon=1e-5)


def channel_norm(g: Graph, operator: str) -> None:
    x = g.value(FLOATS, (3, 4), lambda a: a.size > 0)
    c = g.of(x).shape[1]
    pair = [g.fresh(g.dtype(x), (c,)) for _ in range(2)]
    if operator == "BatchNormalization":
        mean, var = g.fresh(g.dtype(x), (c,)), g.constant(g.array(g.dtype(x), (c,), positive=True))
        return g.node(operator, [x, *pair, mean, var])
    given = {"num_groups": g.one_of([n for n in (1, 2, c) if not c % n])}
    g.node(operator, [x, *pair], **(given if operator == "GroupNormalization" else {}))


def recurrent(g: Graph, operator: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    x = g.value(("float32",), (3, 3), lambda a: a.size > 0)
    steps, batch, width = g.of(x).shape
    hidden, way = g.number(1, 4), g.one_of(("forward", "reverse", "bidirectional"))
    ways = 2 if way == "bidirectional" else 1
    w = g.fresh("float32", (ways, gates * hidden, width))
    r = g.fresh("float32", (ways, gates * hidden, hidden))
    b = g.fresh("float32", (ways, 2 * gates * hidden)) if g.chance(0.6) else ""
    lengths = g.constant(g.rng.integers(1, steps + 1, batch), "int32") if g.chance(0.3) else ""
    given: dict[str, Any] = {"linear_before_reset": 1} if operator == "GRU" else {}
    given = given if g.chance(0.5) else {}
    inputs = [x, w, r, b, lengths]
    while not inputs[-1]:
        inputs.pop()
    g.node(operator, inputs, g.number(1, 2), hidden_size=hidden, direction=way, **given)


def attention(g: Graph, operator: str) -> None:
    batch, heads, group = g.one_of((*SYMBOLS, 1, 2)), g.number(1, 2), g.number(1, 2)
    queries, keys, width = g.one_of((*SYMBOLS, 1, 4)), g.one_of((*SYMBOLS, 1, 5)), g.one_of((4, 8))
    dtype = g.one_of(FLOATS)
    q = g.fresh(dtype, (batch, heads * group, queries, width))
    k, v = (g.fresh(dtype, (batch, heads, keys, width)) for _ in range(2))
    sizes = [g.of(q).shape[2], g.of(k).shape[2]]
    mask = [g.fresh(g.one_of((dtype, "bool")), tuple(sizes))] if g.chance(0.5) else []
    given = {"is_causal": 1} if g.chance(0.3) else {}
    if g.chance(0.2):
        given["softcap"] = 2.0  # type: ignore[assignment]
    g.node(operator, [q, k, v, *mask], **given)


def rotary(g: Graph, operator: str) -> None:
    batch, steps = g.number(1, 2), g.number(1, 4)
    x = g.fresh("float32", (batch, 2, steps, 8))
    cos, sin = (g.fresh("float32", (batch, steps, 4)) for _ in range(2))
    g.node(operator, [x, cos, sin], interleaved=g.number(0, 1))


def quantize(g: Graph, operator: str) -> None:
    kind = g.one_of(SMALL_INTEGERS)
    if operator == "DynamicQuantizeLinear":
        return g.node(operator, [g.value(("float32",), (1, 4))], 3)
    x = g.value(("float32",), (1, 4))
    axis = g.axis(x)
    per_axis = g.chance(0.4)
    shape = (g.of(x).shape[axis],) if per_axis else ()
    scale = g.constant(g.array("float32", shape, positive=True) * np.float32(0.05))
    zero = g.constant(g.rng.integers(0, 9, shape), kind)
    domain = "com.microsoft" if per_axis and g.chance(0.3) else ""
    g.node("QuantizeLinear", [x, scale, zero], domain=domain, axis=axis)
    quantized = g.nodes[-1].output[0]
    g.node("DequantizeLinear", [quantized, scale, zero], domain=domain, axis=axis)


def quantized_matmul(g: Graph, operator: str) -> None:
    kind, b_kind, k, n = g.one_of(SMALL_INTEGERS), g.one_of(SMALL_INTEGERS), g.number(1, 6), 3
    a = g.fresh(kind, (*g.shape(g.number(1, 2)), k))
    zero, y_zero = (g.constant(g.number(0, 9), kind) for _ in range(2))
    b_scale, b_zero = per_channel(g, n, b_kind)
    b = g.constant(g.array(b_kind, (k, n)))
    scale, y_scale = g.constant(0.0625, "float32"), g.constant(0.125, "float32")
    g.node(operator, [a, scale, zero, b, b_scale, b_zero, y_scale, y_zero])


def few_bits(g: Graph, operator: str) -> None:
    """MatMulNBits: rows of blocks of `size` numbers of 4 or 8 bits, each with a scale."""
    bits, size, n, k = g.one_of((4, 4, 8)), g.one_of((16, 32)), g.number(1, 5), g.number(1, 40)
    count = -(-k // size)
    a = g.fresh(g.one_of(("float32", "float32", "float16")), (*g.shape(g.number(1, 2)), k))
    b = g.constant(g.rng.integers(0, 256, (n, count, size * bits // 8)), "uint8")
    scales = g.constant(g.array(g.dtype(a), (n, count), positive=True))
    zeros = g.rng.integers(0, 256, (n, -(-count * bits // 8)))
    inputs = [a, b, scales, *([g.constant(zeros, "uint8")] if g.chance(0.5) else [])]
    g.node(operator, inputs, domain="com.microsoft", K=k, N=n, bits=bits, block_size=size)


def determinant(g: Graph, operator: str) -> None:
    size = g.number(1, 5)
    g.node(operator, [g.fresh("float32", (*g.shape(g.number(0, 2)), size, size))])


def diagonal(g: Graph, operator: str) -> None:
    given = {"dtype": g.one_of((1, 6, 7, 11))} if g.chance(0.5) else {}
    g.node(operator, [g.value((*FLOATS, "int64"), (2, 2))], k=g.number(-2, 2), **given)


SAME_SIZE = (
    ("float32", "int32", "uint32"),
    ("float64", "int64", "uint64"),
    ("float16", "int16", "uint16"),
    ("int8", "uint8"),
)
"""Types whose bits can be read as each other's."""


def bits_read(g: Graph, operator: str) -> None:
    kinds = g.one_of(SAME_SIZE)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(g.one_of(kinds)))
    g.node(operator, [g.value(kinds)], to=to)


def grams(g: Graph, operator: str) -> None:
    """TfIdfVectorizer over single words 2, 3, 5, 4 and the pairs (5, 6), (7, 8), (6, 7)."""
    words = g.rng.integers(2, 9, g.of(g.fresh("int64", g.shape(g.number(1, 2)))).shape)
    longest = g.number(1, 2)
    weights = {"weights": [0.5 * i for i in range(1, 8)]} if g.chance(0.5) else {}
    g.node(
        operator,
        [g.constant(words, g.one_of(("int32", "int64")))],
        mode=g.one_of(("TF", "IDF", "TFIDF")),
        min_gram_length=g.number(1, longest),
        max_gram_length=longest,
        max_skip_count=g.number(0, 2),
        pool_int64s=[2, 3, 5, 4, 5, 6, 7, 8, 6, 7],
        ngram_counts=[0, 4],
        ngram_indexes=[0, 1, 2, 3, 4, 6, 5],
        **weights,
    )


def reversed_sequences(g: Graph, operator: str) -> None:
    x = g.value(FLOATS, (2, 4), lambda a: a.size > 0)
    time = g.number(0, 1)
    steps, batch = g.of(x).shape[time], g.of(x).shape[1 - time]
    lengths = g.constant(g.rng.integers(1, steps + 1, batch), "int64")
    g.node(operator, [x, lengths], time_axis=time, batch_axis=1 - time)


def unique(g: Graph, operator: str) -> None:
    # numbers that are drawn: those of a node may be NaN, which onnxruntime takes for any other
    drawn = g.chance(0.5)
    x = g.fresh("float32", g.shape(g.number(1, 3))) if drawn else g.value(("int64",), (1, 3))
    given = {"axis": g.axis(x)} if g.chance(0.5) else {}
    g.node(operator, [x], g.number(1, 4), sorted=1, **given)


def mean_variance(g: Graph, operator: str) -> None:
    """Over images of two places or more: the variance of one number is noise in onnxruntime."""
    x = g.fresh(g.one_of(("float32", "float16")), (*g.shape(2), g.number(2, 4), g.number(1, 4)))
    axes = [axis for axis in range(4) if axis == 2 or g.chance(0.5)]
    g.node(operator, [x], **({"axes": axes} if g.chance(0.6) else {}))


def signal_window(g: Graph, operator: str) -> None:
    given = {"output_datatype": g.one_of((1, 11))} if g.chance(0.5) else {}
    g.node(operator, [g.constant(g.number(1, 9), "int64")], periodic=g.number(0, 1), **given)


def transform(g: Graph, operator: str) -> None:
    batch, length, dtype = g.shape(1)[0], g.number(4, 9), g.one_of(("float32", "float64"))
    onesided = g.number(0, 1)
    if operator == "STFT":
        x, size = g.fresh(dtype, (batch, length + 4, 1)), g.number(2, 4)
        inputs = [x, g.constant(g.number(1, 3), "int64")]
        inputs += [g.fresh(dtype, (size,)) if g.chance(0.6) else "", g.constant(size, "int64")]
        return g.node(operator, inputs, onesided=onesided)
    real = onesided or g.chance(0.5)
    x = g.fresh(dtype, (batch, length, g.number(1, 2), 1 if real else 2))
    inputs = [x, g.constant(g.number(3, 10), "int64") if g.chance(0.4) else ""]
    inputs += [g.constant(g.number(1, 2), "int64")] if g.chance(0.6) else []
    inverse = {} if onesided else {"inverse": g.number(0, 1)}
    g.node(operator, inputs if inputs[-1] else inputs[:1], onesided=onesided, **inverse)


def integer_product(g: Graph, operator: str) -> None:
    k = g.number(1, 5)
    a = g.fresh("uint8", (*g.shape(g.number(1, 2)), k))
    g.node(operator, [a, g.fresh(g.one_of(SMALL_INTEGERS), (k, g.number(1, 4)))])


def loss(g: Graph, operator: str) -> None:
    sizes: Shape = tuple(g.number(1, 5) for _ in range(g.number(2, 3)))
    x = g.fresh(g.one_of(("float32", "float64")), sizes)  # onnxruntime does not check the labels
    shape = g.of(x).shape
    labels = g.constant(g.rng.integers(0, shape[1], (shape[0], *shape[2:])), "int64")
    if operator == "NegativeLogLikelihoodLoss":
        g.node("LogSoftmax", [x], axis=1)
        x = g.nodes[-1].output[0]
    weight = [g.fresh(g.dtype(x), (shape[1],))] if g.chance(0.3) else []
    given = {"ignore_index": 0} if g.chance(0.3) else {}
    way = g.one_of(("mean", "sum", "none"))
    if way == "mean" and given:
        way = "sum"
    g.node(operator, [x, labels, *weight], reduction=way, **given)


def branches(g: Graph, operator: str) -> None:
    x = g.value(("float32",), (0, 3))
    condition = g.fresh("bool", ())
    bodies = []
    for inner in (g.one_of(("Relu", "Neg", "Identity")), g.one_of(("Tanh", "Abs", "Identity"))):
        out = g.name("b")
        node = helper.make_node(inner, [x], [out])
        info = [onnx.ValueInfoProto(name=out)]
        info[0].type.tensor_type.elem_type = TensorProto.FLOAT
        bodies.append(helper.make_graph([node], inner, [], info))
    names = [g.name()]
    node = helper.make_node("If", [condition], names, then_branch=bodies[0], else_branch=bodies[1])
    choice = bodies[0 if bool(g.of(condition)) else 1].node[0]
    alone = helper.make_node(choice.op_type, [x], names)
    g.values[names[0]] = run_alone(alone, {x: g.of(x)}, g.opset)[0]
    g.nodes.append(node)


def scanned(g: Graph, operator: str) -> None:
    x = g.value(("float32",), (1, 3), lambda a: a.shape[0] > 0)
    state = g.fresh("float32", g.of(x).shape[1:])
    s, e, t, y = (g.name("b") for _ in range(4))
    nodes = [
        helper.make_node("Add", [s, e], [t]),
        helper.make_node(g.one_of(("Tanh", "Sigmoid")), [t], [y]),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in (s, e, y, t)]
    body = helper.make_graph(nodes, "step", info[:2], info[2:])
    g.node("Scan", [state, x], 2, body=body, num_scan_inputs=1)


def gelu(g: Graph, operator: str) -> None:
    g.node(operator, [g.value(FLOATS)], approximate=g.one_of(("none", "tanh")))


def microsoft(g: Graph, operator: str) -> None:
    x = g.value(("float32",), (2, 3), lambda a: a.size > 0)
    if operator in ("FastGelu", "BiasGelu", "SkipLayerNormalization"):
        width = g.of(x).shape[-1]
        bias = g.fresh("float32", (width,))
        if operator == "SkipLayerNormalization":
            # onnxruntime does not check the sizes: those of a constant must be the other's, too
            sizes = (g.number(1, 3), g.number(1, 4), g.number(1, 8))
            x, skip = (g.fresh("float32", sizes) for _ in range(2))
            width = sizes[-1]
            bias = g.fresh("float32", (width,))
            pair = [bias, g.fresh("float32", (width,))]
            return g.node(operator, [x, skip, *pair], domain="com.microsoft")
        return g.node(operator, [x, bias], domain="com.microsoft")
    g.node(operator, [x], domain="com.microsoft")


def small(g: Graph) -> float:
    return float(g.one_of((0.1, 0.5, 1.0)))


OPERATORS: dict[str, Draw] = {
    **table(
        unary(FLOATS),
        "Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Log Round "
        "Sigmoid Sin Sinh Softplus Softsign Sqrt Tan Tanh IsNaN HardSwish Mish",
    ),
    **table(unary((*FLOATS, "int64", "int32")), "Abs Neg Sign Relu"),
    **table(unary(ANY), "Identity NonZero Size"),
    **table(unary(BOOL), "Not"),
    **table(unary(INTEGERS), "BitwiseNot"),
    **table(unary(FLOATS, alpha=small), "Elu Celu LeakyRelu ThresholdedRelu Swish"),
    **table(unary(FLOATS, alpha=small, beta=small), "HardSigmoid"),
    **table(unary(FLOATS, alpha=small, gamma=small), "Selu"),
    **table(unary(FLOATS, lambd=small, bias=small), "Shrink"),
    "IsInf": unary(("float32", "float64")),
    **table(gelu, "Gelu"),
    **table(binary(NUMBERS), "Add Sub Mul Greater Less GreaterOrEqual LessOrEqual"),
    "Equal": binary(ANY),
    **table(binary(BOOL), "And Or Xor"),
    **table(binary(("int64", "int32", "uint8")), "BitwiseAnd BitwiseOr BitwiseXor"),
    **table(several(FLOATS), "Sum Mean"),
    **table(several(NUMBERS), "Max Min"),
    "Mod": mod,
    "Div": divide,
    "Pow": power,
    "BitShift": shift,
    "Where": where,
    "Clip": clip,
    "PRelu": prelu,
    "Reciprocal": reciprocal,
    **table(cast, "Cast CastLike"),
    **table(softmax, "Softmax LogSoftmax Hardmax LpNormalization"),
    **table(
        reduction,
        "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare "
        "ReduceLogSumExp ReduceLogSum",
    ),
    **table(argument, "ArgMax ArgMin"),
    "TopK": top_k,
    **table(cumulative, "CumSum CumProd"),
    "Unique": unique,
    **table(matmul, "MatMul FusedMatMul"),
    "Gemm": gemm,
    "Einsum": einsum,
    **table(layer_norm, "LayerNormalization RMSNormalization"),
    **table(channel_norm, "BatchNormalization InstanceNormalization GroupNormalization"),
    **table(recurrent, "LSTM GRU RNN"),
    "Attention": attention,
    "RotaryEmbedding": rotary,
    **table(quantize, "QuantizeLinear DequantizeLinear DynamicQuantizeLinear"),
    "MatMulInteger": integer_product,
    "QLinearMatMul": quantized_matmul,
    "MatMulNBits": few_bits,
    "MeanVarianceNormalization": mean_variance,
    "Det": determinant,
    "EyeLike": diagonal,
    "BitCast": bits_read,
    "TfIdfVectorizer": grams,
    "ReverseSequence": reversed_sequences,
    **table(signal_window, "BlackmanWindow HammingWindow HannWindow"),
    **table(transform, "DFT STFT"),
    **table(loss, "SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss"),
    **MOVES,
    **WINDOWS,
    **RANDOM,
    "If": branches,
    "Scan": scanned,
    **table(microsoft, "FastGelu BiasGelu QuickGelu SkipLayerNormalization"),
}
"""How a node of each operator is drawn."""
UNDRAWN = {
    **dict.fromkeys(
        ("GroupQueryAttention", "MultiHeadAttention", "DecoderMaskedMultiHeadAttention"),
        "its lengths follow from its caches: tests/test_caches.py draws them",
    ),
    "Scatter": "an operator of opset 10 and below: from opset 11 on, ScatterElements",
    "SequenceMap": "a value of these graphs is a tensor, not a sequence",
}
"""Operators that are lowered and never drawn, and why."""
OPSETS = (21, 21, 22, 23, 24, 26)
"""Swish came with 24, BitCast and CumProd with 26; onnxruntime (1.32) has Random* up to 21."""
SHAPE_WORK: tuple[tuple[Draw, str], ...] = (
    (counted, "Range"),
    (counted, "Range"),
    (shaped, "Reshape"),
    (shaped, "Expand"),
)
"""Groups of nodes that exporters write, and that a graph seldom has by chance."""


def graph(rng: np.random.Generator, operators: Sequence[str] = ()) -> Case:
    """A random graph of 1 to 12 nodes; of these operators alone, if any are named."""
    names = list(operators or rng.permutation(list(OPERATORS))[:16])
    sizes = {symbol: int(rng.choice([1, 2, 3, 4, 5, 7])) for symbol in SYMBOLS}
    g = Graph(rng, int(rng.choice(OPSETS)), sizes)
    wanted = g.number(1, 12)
    for _ in range(8 * wanted):
        if len(g.nodes) >= wanted:
            break
        draw, operator = g.one_of(SHAPE_WORK) if g.chance(0.06) else (None, g.one_of(names))
        before = (dict(g.values), dict(g.inputs), dict(g.constants), list(g.nodes))
        try:
            (draw or OPERATORS[operator])(g, operator)
        except Refused:
            g.values, g.inputs, g.constants, g.nodes = before
    return finished(g)
