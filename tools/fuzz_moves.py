"""How nodes that move elements or work out shapes are drawn for tools/fuzz.py."""

import numpy as np
from fuzz_graphs import ANY, FLOATS, Draw, Graph, Refused, table
from onnx import TensorProto, helper


def transpose(g: Graph, operator: str) -> None:
    x = g.value(ANY, (0, 5))
    perm = [int(i) for i in g.rng.permutation(g.of(x).ndim)]
    g.node(operator, [x], **({"perm": perm} if g.chance(0.9) else {}))


def reshape(g: Graph, operator: str) -> None:
    x = g.value(ANY, (0, 5))
    shape = list(g.of(x).shape)
    way = g.number(0, 4)
    if way == 0:
        shape = [-1]
    elif way == 1 and len(shape) > 1:
        i = g.number(0, len(shape) - 2)
        shape[i : i + 2] = [-1]
    elif way == 2:
        shape.insert(g.number(0, len(shape)), 1)
    elif way == 3:
        shape = [0 if g.chance(0.4) and s else s for s in shape]
        if shape and g.chance(0.5):
            shape[g.number(0, len(shape) - 1)] = -1
    elif way == 4 and shape:
        i = g.number(0, len(shape) - 1)
        if shape[i] > 1 and shape[i] % 2 == 0:
            shape[i : i + 1] = [2, -1] if -1 not in shape else [2, shape[i] // 2]
    g.node(operator, [x, g.constant(shape, "int64")])


def flatten(g: Graph, operator: str) -> None:
    x = g.value(ANY, (0, 4))
    rank = g.of(x).ndim
    g.node(operator, [x], axis=g.number(-rank, rank))


def squeeze(g: Graph, operator: str) -> None:
    x = g.value(ANY, (0, 4))
    if operator == "Unsqueeze":
        rank = g.of(x).ndim + g.number(1, 2)
        axes = [int(a) for a in g.rng.permutation(rank)[: rank - g.of(x).ndim]]
    else:
        axes = [i for i, s in enumerate(g.of(x).shape) if s == 1 and g.chance(0.7)]
        rank = g.of(x).ndim
        if not axes:  # all axes of size 1 then, and which these are differs between feeds
            g.open_ranks = True
            return g.node(operator, [x, *([g.constant([], "int64")] if g.chance(0.5) else [])])
    axes = [a - rank if g.chance(0.3) else a for a in axes]
    g.node(operator, [x, g.constant(axes, "int64")])


def expand(g: Graph, operator: str) -> None:
    x = g.value(ANY, (0, 4))
    shape = [g.one_of((1, s, 3)) if s == 1 else g.one_of((1, s)) for s in g.of(x).shape]
    if g.chance(0.3):
        shape = [2, *shape]
    g.node(operator, [x, g.constant(shape, "int64")])


def tile(g: Graph, operator: str) -> None:
    x = g.value(ANY, (0, 3))
    g.node(operator, [x, g.constant([g.number(0, 3) for _ in g.of(x).shape], "int64")])


def concat(g: Graph, operator: str) -> None:
    x = g.value(ANY, (1, 4))
    axis = g.axis(x)
    shape, dtype = g.of(x).shape, g.dtype(x)

    def fits(array: np.ndarray) -> bool:
        if array.ndim != len(shape):
            return False
        sizes = [*array.shape], [*shape]
        for s in sizes:
            s[axis] = 0
        return sizes[0] == sizes[1]

    others = [n for n, a in g.values.items() if a.dtype.name == dtype and fits(a)]
    parts = [x, *(g.one_of(others) for _ in range(g.number(0, 2)))]
    g.node(operator, parts, axis=axis)


def split(g: Graph, operator: str) -> None:
    x = g.value(ANY, (1, 4))
    axis = g.axis(x)
    size = g.of(x).shape[axis]
    if g.chance(0.5):
        first = g.number(0, size)
        return g.node(operator, [x, g.constant([first, size - first], "int64")], 2, axis=axis)
    parts = g.number(1, 3)
    g.node(operator, [x], parts, axis=axis, num_outputs=parts)


def slice_(g: Graph, operator: str) -> None:
    x = g.value(ANY, (1, 4))
    axes = [g.axis(x)]
    starts, ends, steps = [], [], []
    for axis in axes:
        size = g.of(x).shape[axis]
        step = g.one_of((1, 1, 1, 2, -1, -2))
        starts.append(g.number(-size - 1, size + 1))
        largest = np.iinfo(np.int64).max
        end = g.one_of((size, largest)) if step > 0 else g.one_of((-size - 1, -largest))
        ends.append(g.one_of((end, g.number(-size - 1, size + 1))))
        steps.append(step)
    lists = (starts, ends, axes, steps)
    g.node(operator, [x, *(g.constant(a, "int64") for a in lists)])


def pad(g: Graph, operator: str) -> None:
    x = g.value((*FLOATS, "int64"), (1, 4))
    mode = g.one_of(("constant", "constant", "reflect", "edge", "wrap"))
    low = -1 if mode == "constant" else 0
    pads = [g.number(low, 2) for _ in range(2 * g.of(x).ndim)]
    inputs = [x, g.constant(pads, "int64")]
    if mode == "constant" and g.chance(0.5):
        inputs.append(g.constant(2, g.dtype(x)))
    g.node(operator, inputs, mode=mode)


def gather(g: Graph, operator: str) -> None:
    x = g.value(ANY, (1, 4))
    axis = g.axis(x)
    size = g.of(x).shape[axis]
    if not size:
        raise Refused
    shape = [g.number(1, 3) for _ in range(g.number(0, 2))]
    if operator == "GatherElements":
        shape = [g.number(1, s) if s else 0 for s in g.of(x).shape]
    indices = g.rng.integers(-size, size, shape)
    g.node(operator, [x, g.constant(indices, g.one_of(("int64", "int32")))], axis=axis)


def gather_nd(g: Graph, operator: str) -> None:
    x = g.value(ANY, (1, 4), lambda a: a.size > 0)
    shape = g.of(x).shape
    depth = g.number(1, len(shape))
    rows = [g.number(1, 3) for _ in range(g.number(0, 2))]
    indices = np.stack([g.rng.integers(-s, s, rows) for s in shape[:depth]], -1)
    if operator == "GatherND":
        return g.node(operator, [x, g.constant(indices, "int64")])
    updates = g.fresh(g.dtype(x), (*rows, *shape[depth:]))
    unique = ("none",) if len({tuple(i) for i in indices.reshape(-1, depth).tolist()}) == (
        indices.reshape(-1, depth).shape[0]
    ) else ("add", "max", "min")  # fmt: skip
    g.node(operator, [x, g.constant(indices, "int64"), updates], reduction=g.one_of(unique))


def scatter_elements(g: Graph, operator: str) -> None:
    x = g.value((*FLOATS, "int64"), (1, 3), lambda a: a.size > 0)
    axis = g.axis(x)
    shape = [g.number(1, s) for s in g.of(x).shape]
    size = g.of(x).shape[axis]
    order = np.argsort(g.rng.random((*shape[:-1], shape[-1])), axis)
    repeats = g.chance(0.4)
    indices = g.rng.integers(-size, size, shape) if repeats else order
    updates = g.fresh(g.dtype(x), tuple(shape))
    way = g.one_of(("add", "mul", "max", "min")) if repeats else "none"
    g.node(operator, [x, g.constant(indices, "int64"), updates], axis=axis, reduction=way)


def one_hot(g: Graph, operator: str) -> None:
    indices = g.value(("int64", "int32"), (0, 3))
    depth = g.constant(g.number(1, 5), "int64")
    dtype = g.one_of(("float32", "int64"))
    g.node(operator, [indices, depth, g.constant([0, 1], dtype)], axis=g.number(-1, 0))


def compress(g: Graph, operator: str) -> None:
    x = g.value(ANY, (1, 3))
    axis = g.axis(x)
    g.node(operator, [x, g.constant(g.rng.random(g.of(x).shape[axis]) < 0.5)], axis=axis)


def trilu(g: Graph, operator: str) -> None:
    x = g.value(ANY, (2, 4))
    k = [g.constant(g.number(-2, 2), "int64")] if g.chance(0.6) else []
    g.node(operator, [x, *k], upper=g.number(0, 1))


def range_(g: Graph, operator: str) -> None:
    dtype = g.one_of(("int64", "float32"))
    start, limit, step = g.number(-2, 2), g.number(1, 6), g.one_of((1, 1, 2))
    g.node(operator, [g.constant(v, dtype) for v in (start, limit, step)])


def counted(g: Graph, operator: str) -> None:
    """Range over a size of another value, as exporters write positions."""
    x = g.value(ANY, (1, 4))
    axis = g.constant(g.axis(x) % g.of(x).ndim, "int64")
    g.node("Shape", [x])
    g.node("Gather", [g.nodes[-1].output[0], axis], axis=0)
    size = g.nodes[-1].output[0]
    g.node("Range", [g.constant(0, "int64"), size, g.constant(1, "int64")])
    if g.chance(0.6):
        g.node("Unsqueeze", [g.nodes[-1].output[0], g.constant([g.number(0, 1)], "int64")])
    if g.chance(0.6):
        positions = g.nodes[-1].output[0]
        g.node("Add", [positions, g.beside(positions)])
    if g.chance(0.5):
        g.node("Cast", [g.nodes[-1].output[0]], to=TensorProto.FLOAT)


def shaped(g: Graph, operator: str) -> None:
    """A Reshape or an Expand to sizes that are worked out from another value."""
    x = g.value(ANY, (1, 4))
    g.node("Shape", [x])
    sizes = g.nodes[-1].output[0]
    if operator == "Reshape":
        g.node("Reshape", [x, g.constant([-1], "int64")])
        return g.node("Reshape", [g.nodes[-1].output[0], sizes])
    if operator == "ConstantOfShape":
        dtype = g.one_of(("float32", "int64", "bool"))
        value = helper.make_tensor("", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [1], [1])
        return g.node(operator, [sizes], value=value)
    other = g.fresh(g.dtype(x), tuple(g.one_of((1, s)) for s in g.of(x).shape))
    g.node("Expand", [other, sizes])


def shape_of(g: Graph, operator: str) -> None:
    x = g.value(ANY, (0, 4))
    given = {"start": g.number(-2, 2), "end": g.number(-1, 4)} if g.chance(0.5) else {}
    g.node(operator, [x], **(given if operator == "Shape" else {}))


MOVES: dict[str, Draw] = {
    "Transpose": transpose,
    "Reshape": reshape,
    "Flatten": flatten,
    **table(squeeze, "Squeeze Unsqueeze"),
    "Expand": expand,
    "Tile": tile,
    "Concat": concat,
    "Split": split,
    "Slice": slice_,
    "Pad": pad,
    **table(gather, "Gather GatherElements"),
    **table(gather_nd, "GatherND ScatterND"),
    "ScatterElements": scatter_elements,
    "OneHot": one_hot,
    "Compress": compress,
    "Trilu": trilu,
    "Range": range_,
    "Shape": shape_of,
    **table(shaped, "ConstantOfShape"),
}
"""How nodes of operators that move elements or work out shapes are drawn."""
