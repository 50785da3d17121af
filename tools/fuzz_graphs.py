"""Graphs drawn at random over the operator set: valid ones, since onnxruntime runs each node first.

`graph(rng)` gives a model and several feeds. A row of OPERATORS says how a node of an operator is
drawn: from values that are there already, or from new inputs and constants. Dimensions of inputs
are symbols or fixed; the first feed has the sizes that the nodes were drawn for, the others have
sizes of 0 and 1 and others, which onnxruntime may refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper

Feeds = dict[str, np.ndarray]
Shape = tuple[int | str, ...]
"""Sizes of a new input; a symbol is a dynamic dimension."""

FLOATS = ("float32", "float32", "float32", "float32", "float16", "float64")
INTEGERS = ("int64", "int64", "int32")
SMALL_INTEGERS = ("int8", "uint8")
BOOL = ("bool",)
NUMBERS = FLOATS + INTEGERS
ANY = NUMBERS + BOOL
SYMBOLS = ("A", "B", "C")
LARGEST = 4096
"""Elements of a value; a node that makes more is not taken."""


class Refused(Exception):
    """A node that cannot be drawn from what there is, or that onnxruntime does not run."""


@dataclass
class Graph:
    """A graph under construction, with the array of each value at the first feed's sizes."""

    rng: np.random.Generator
    opset: int
    sizes: dict[str, int]
    values: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, Shape] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    count: int = 0
    open_ranks: bool = False
    """Whether the rank of a value depends on the sizes of the inputs."""

    # ---- drawing ----

    def one_of(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def number(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def name(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def array(self, dtype: str, shape: Sequence[int], positive: bool = False) -> np.ndarray:
        return drawn(self.rng, dtype, shape, positive)

    # ---- values ----

    def constant(self, array: Any, dtype: str | None = None) -> str:
        name = self.name("c")
        self.values[name] = self.constants[name] = np.asarray(array, dtype)
        return name

    def fresh(self, dtype: str, shape: Shape) -> str:
        """A new input, or a constant at times, of this shape."""
        concrete = [self.sizes[s] if isinstance(s, str) else s for s in shape]
        if self.chance(0.3):
            return self.constant(self.array(dtype, concrete))
        name = self.name("x")
        self.inputs[name] = shape
        self.values[name] = self.array(dtype, concrete)
        return name

    def shape(self, rank: int) -> Shape:
        return tuple(
            self.one_of(SYMBOLS) if self.chance(0.6) else self.one_of((1, 2, 3, 4, 5))
            for _ in range(rank)
        )

    def value(
        self,
        dtypes: Sequence[str] = FLOATS,
        rank: tuple[int, int] = (0, 4),
        accept: Callable[[np.ndarray], bool] = lambda _: True,
    ) -> str:
        """A value of these types and ranks: one that is there, or a new input."""
        fits = [
            name
            for name, array in self.values.items()
            if array.dtype.name in dtypes
            and rank[0] <= array.ndim <= rank[1]
            and accept(array)
            and (name not in self.constants or self.chance(0.2))
        ]
        if fits and self.chance(0.8):
            recent = fits[-4:] if self.chance(0.6) else fits
            return str(self.one_of(recent))
        name = self.fresh(self.one_of(dtypes), self.shape(self.number(*rank)))
        if not accept(self.values[name]):
            raise Refused
        return name

    def of(self, name: str) -> np.ndarray:
        return self.values[name]

    def dtype(self, name: str) -> str:
        return self.values[name].dtype.name

    def beside(self, name: str, dtype: str | None = None) -> str:
        """A value that broadcasts with another: of its type, one that is there or a new one."""
        shape = self.of(name).shape
        dtype = dtype or self.dtype(name)

        def broadcasts(array: np.ndarray) -> bool:
            try:
                return int(np.prod(np.broadcast_shapes(array.shape, shape))) <= LARGEST
            except ValueError:
                return False

        if self.chance(0.5):
            return self.value((dtype,), (0, 4), broadcasts)
        symbols = {size: symbol for symbol, size in self.sizes.items()}
        dims: list[int | str] = []
        for size in shape[self.number(0, len(shape)) :] if shape else ():
            symbol = symbols.get(size, size)
            dims.append(self.one_of((1, size, symbol)))
        return self.fresh(dtype, tuple(dims))

    def axis(self, name: str, low: int = 0) -> int:
        rank = self.of(name).ndim
        if rank <= low:
            raise Refused
        axis = self.number(low, rank - 1)
        return axis - rank if self.chance(0.4) else axis

    def axes(self, name: str) -> list[int]:
        rank = self.of(name).ndim
        some = self.rng.permutation(rank)[: self.number(0, rank)]
        return [int(a) - rank if self.chance(0.3) else int(a) for a in some]

    # ---- nodes ----

    def node(
        self, operator: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attrs: Any
    ) -> None:
        """Add a node, once onnxruntime has run it."""
        names = [self.name() for _ in range(outputs)]
        attrs = {k: v for k, v in attrs.items() if v != []}  # an empty list has no type
        node = helper.make_node(operator, list(inputs), names, domain=domain, **attrs)
        arrays = run_alone(node, {n: self.values[n] for n in inputs if n}, self.opset)
        for array in arrays:
            if not isinstance(array, np.ndarray) or array.size > LARGEST or array.ndim > 6:
                raise Refused
            if array.dtype.kind == "f" and array.size and not np.isfinite(array).all():
                raise Refused  # what follows would say nothing
            if array.dtype.kind == "f" and array.size and np.abs(array).max() > 1e4:
                raise Refused
        self.nodes.append(node)
        self.values.update(zip(names, arrays, strict=True))


def drawn(
    rng: np.random.Generator, dtype: str, shape: Sequence[int], positive: bool = False
) -> np.ndarray:
    """Random entries of a type: floats around 0, small integers."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith(("float", "double")):
        array = rng.standard_normal(shape)
        return np.asarray(np.abs(array) + 0.1 if positive else array).astype(dtype)
    low = 0 if positive or dtype.startswith("u") else -3
    return np.asarray(rng.integers(low, 5, shape)).astype(dtype)


def options() -> onnxruntime.SessionOptions:
    plain = onnxruntime.SessionOptions()
    plain.log_severity_level = 4
    plain.intra_op_num_threads = plain.inter_op_num_threads = 1
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return plain


def model_of(graph: GraphProto, opset: int) -> ModelProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run_alone(node: onnx.NodeProto, feeds: Feeds, opset: int) -> list[np.ndarray]:
    """The outputs of one node on onnxruntime. Raises Refused where it does not run."""
    element = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    graph = helper.make_graph(
        [node],
        "alone",
        [helper.make_tensor_value_info(n, element[n], a.shape) for n, a in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name in node.output],
    )
    try:
        session = onnxruntime.InferenceSession(
            model_of(graph, opset).SerializeToString(), options()
        )
        return list(session.run(None, feeds))
    except Exception as error:  # onnxruntime's faults share no base
        raise Refused(str(error)) from error


# ---- operators -----------------------------------------------------------------------------------

Draw = Callable[[Graph, str], None]


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
    x = g.value(FLOATS)
    shape = g.of(x).shape
    slope = shape[g.number(0, len(shape)) :] if shape else ()
    g.node(operator, [x, g.fresh(g.dtype(x), tuple(g.one_of((1, s)) for s in slope))])


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
    x = g.value((*FLOATS, "int64", "int32") if operator != "ReduceLogSum" else FLOATS)
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
    g.node(
        operator,
        [x],
        axis=g.axis(x),
        keepdims=g.number(0, 1),
        select_last_index=g.number(0, 1),
    )


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
        if not axes and not isinstance(g.inputs.get(x), tuple) and g.chance(0.2):
            g.open_ranks = True  # which axes are 1 differs between feeds
            return g.node(operator, [x])
        rank = g.of(x).ndim
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


def window(g: Graph, spatial: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if g.chance(0.5):
        given["strides"] = [g.number(1, 3) for _ in range(spatial)]
    if g.chance(0.3):
        given["dilations"] = [g.number(1, 2) for _ in range(spatial)]
    if g.chance(0.5):
        given["pads"] = [g.number(0, 1) for _ in range(2 * spatial)]
    elif g.chance(0.3):
        given["auto_pad"] = g.one_of(("SAME_UPPER", "SAME_LOWER", "VALID"))
    return given


def image(g: Graph, dtypes: Sequence[str] = ("float32", "float16")) -> str:
    return g.value(dtypes, (3, 4), lambda a: a.size > 0 and min(a.shape[2:]) > 1)


def conv(g: Graph, operator: str) -> None:
    x = image(g)
    c, spatial = g.of(x).shape[1], g.of(x).ndim - 2
    group = g.one_of([n for n in (1, 1, c) if not c % n])
    m = group * g.number(1, 3)
    kernel = [g.number(1, 3) for _ in range(spatial)]
    if operator == "Conv":
        w = g.fresh(g.dtype(x), (m, c // group, *kernel))
    else:
        w = g.fresh(g.dtype(x), (c, m // group, *kernel))
    bias = [g.fresh(g.dtype(x), (m,))] if g.chance(0.6) else []
    g.node(operator, [x, w, *bias], group=group, **window(g, spatial))


def pool(g: Graph, operator: str) -> None:
    x = image(g)
    spatial = g.of(x).ndim - 2
    given = window(g, spatial) | {"kernel_shape": [g.number(1, 3) for _ in range(spatial)]}
    if g.chance(0.3):
        given["ceil_mode"] = 1
    if operator == "AveragePool" and g.chance(0.4):
        given["count_include_pad"] = 1
    if operator == "LpPool" and g.chance(0.5):
        given["p"] = g.number(1, 3)
    g.node(operator, [x], 1 + (operator == "MaxPool" and g.chance(0.2)), **given)


def global_pool(g: Graph, operator: str) -> None:
    g.node(operator, [image(g)])


def resize(g: Graph, operator: str) -> None:
    x = g.value(("float32",), (3, 4), lambda a: a.size > 0)
    rank = g.of(x).ndim
    modes = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    given: dict[str, Any] = {
        "mode": g.one_of(("nearest", "linear", "cubic") if rank == 4 else ("nearest", "linear")),
        "coordinate_transformation_mode": g.one_of((*modes, "half_pixel_symmetric")),
    }
    if given["mode"] == "nearest":
        ways = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
        given["nearest_mode"] = g.one_of(ways)
    factors = [1.0, 1.0, *(g.one_of((0.5, 0.7, 1.0, 1.3, 2.0, 2.5)) for _ in range(rank - 2))]
    if g.chance(0.6):
        return g.node(operator, [x, "", g.constant(factors, "float32")], **given)
    sizes = [max(1, int(s * f)) for s, f in zip(g.of(x).shape, factors, strict=True)]
    g.node(operator, [x, "", "", g.constant(sizes, "int64")], **given)


def blocks(g: Graph, operator: str) -> None:
    n, h, w = g.one_of((1, 2)), g.number(1, 2), g.number(1, 3)
    if operator == "DepthToSpace":
        x = g.fresh("float32", (n, 8, h, w))
        return g.node(operator, [x], blocksize=2, mode=g.one_of(("DCR", "CRD")))
    g.node(operator, [g.fresh("float32", (n, 2, 2 * h, 2 * w))], blocksize=2)


def grid_sample(g: Graph, operator: str) -> None:
    x = g.value(("float32",), (4, 4), lambda a: a.size > 0)
    grid = g.constant(g.rng.uniform(-1.2, 1.2, (g.of(x).shape[0], 2, 3, 2)), "float32")
    g.node(
        operator,
        [x, grid],
        mode=g.one_of(("linear", "nearest", "cubic")),
        padding_mode=g.one_of(("zeros", "border", "reflection")),
        align_corners=g.number(0, 1),
    )


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
    g.node("QuantizeLinear", [x, scale, zero], axis=axis)
    g.node("DequantizeLinear", [g.nodes[-1].output[0], scale, zero], axis=axis)


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
            sizes = g.shape(3)  # onnxruntime does not check all sizes
            width = g.number(1, 8)
            x, skip = (g.fresh("float32", (*sizes[:2], width)) for _ in range(2))
            bias = g.fresh("float32", (width,))
            pair = [bias, g.fresh("float32", (width,))]
            return g.node(operator, [x, skip, *pair], domain="com.microsoft")
        return g.node(operator, [x, bias], domain="com.microsoft")
    g.node(operator, [x], domain="com.microsoft")


def table(draw: Draw, names: str) -> dict[str, Draw]:
    return dict.fromkeys(names.split(), draw)


def small(g: Graph) -> float:
    return float(g.one_of((0.1, 0.5, 1.0)))


OPERATORS: dict[str, Draw] = {
    **table(
        unary(FLOATS),
        "Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Log Reciprocal Round "
        "Sigmoid Sin Sinh Softplus Softsign Sqrt Tan Tanh IsNaN HardSwish Mish",
    ),
    **table(unary((*FLOATS, "int64", "int32")), "Abs Neg Sign Relu"),
    **table(unary(ANY), "Identity NonZero Size"),
    **table(unary(BOOL), "Not"),
    **table(unary(INTEGERS), "BitwiseNot"),
    **table(unary(FLOATS, alpha=small), "Elu Celu LeakyRelu ThresholdedRelu"),
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
    **table(cast, "Cast CastLike"),
    **table(softmax, "Softmax LogSoftmax Hardmax LpNormalization"),
    **table(
        reduction,
        "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare "
        "ReduceLogSumExp ReduceLogSum",
    ),
    **table(argument, "ArgMax ArgMin"),
    "TopK": top_k,
    "CumSum": cumulative,
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
    **table(matmul, "MatMul FusedMatMul"),
    "Gemm": gemm,
    "Einsum": einsum,
    **table(layer_norm, "LayerNormalization RMSNormalization"),
    **table(channel_norm, "BatchNormalization InstanceNormalization GroupNormalization"),
    **table(conv, "Conv ConvTranspose"),
    **table(pool, "MaxPool AveragePool LpPool"),
    **table(global_pool, "GlobalAveragePool GlobalMaxPool GlobalLpPool"),
    "Resize": resize,
    **table(blocks, "DepthToSpace SpaceToDepth"),
    "GridSample": grid_sample,
    **table(recurrent, "LSTM GRU RNN"),
    "Attention": attention,
    "RotaryEmbedding": rotary,
    **table(quantize, "QuantizeLinear DynamicQuantizeLinear"),
    "MatMulInteger": integer_product,
    **table(loss, "SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss"),
    "If": branches,
    "Scan": scanned,
    **table(microsoft, "FastGelu BiasGelu QuickGelu SkipLayerNormalization"),
    **table(shaped, "ConstantOfShape"),
}
"""How a node of each operator is drawn."""
SHAPE_WORK: tuple[tuple[Draw, str], ...] = (
    (counted, "Range"),
    (counted, "Range"),
    (shaped, "Reshape"),
    (shaped, "Expand"),
)
"""Groups of nodes that exporters write, and that a graph seldom has by chance."""


@dataclass
class Case:
    """A graph, and feeds: at the sizes it was drawn for, and at others that may not run."""

    model: ModelProto
    feeds: list[Feeds]
    operators: list[str]


def graph(rng: np.random.Generator, operators: Sequence[str] = ()) -> Case:
    """A random graph of 1 to 12 nodes; of these operators alone, if any are named."""
    names = list(operators or rng.permutation(list(OPERATORS))[:16])
    sizes = {symbol: int(rng.choice([1, 2, 3, 4, 5, 7])) for symbol in SYMBOLS}
    g = Graph(rng, int(rng.choice([21, 22, 23])), sizes)
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


def finished(g: Graph) -> Case:
    """The model of what was drawn, and its feeds."""
    if not g.nodes:
        g.node("Identity", [g.value()])
    read = {name for node in g.nodes for name in node.input}
    bodies = [a.g for node in g.nodes for a in node.attribute if a.type == AttributeProto.GRAPH]
    read |= {name for body in bodies for node in body.node for name in node.input}
    produced = [name for node in g.nodes for name in node.output]
    outputs = [n for n in produced if n not in read or g.chance(0.15)] or produced[-1:]
    element = {n: helper.np_dtype_to_tensor_dtype(g.of(n).dtype) for n in g.values}
    inputs = [
        helper.make_tensor_value_info(n, element[n], shape)
        for n, shape in g.inputs.items()
        if n in read
    ]
    results = [
        helper.make_tensor_value_info(
            n, element[n], [None] * g.of(n).ndim if not g.open_ranks and g.chance(0.9) else None
        )
        for n in outputs
    ]
    constants = [numpy_helper.from_array(a, n) for n, a in g.constants.items() if n in read]
    model = model_of(helper.make_graph(g.nodes, "drawn", inputs, results, constants), g.opset)
    feeds = [{n: g.of(n) for n in g.inputs if n in read}]
    ways: list[dict[str, int]] = [
        dict.fromkeys(SYMBOLS, 1),
        {s: g.one_of((1, s_)) for s, s_ in g.sizes.items()},
        {s: g.number(1, 6) for s in SYMBOLS},
        {**g.sizes, g.one_of(SYMBOLS): 0},
    ]

    def sized(shape: Shape, sizes: dict[str, int]) -> list[int]:
        return [sizes[s] if isinstance(s, str) else s for s in shape]

    feeds += [
        {n: g.array(g.dtype(n), sized(s, sizes)) for n, s in g.inputs.items() if n in read}
        for sizes in ways
    ]
    return Case(model, feeds, [node.op_type for node in g.nodes])
