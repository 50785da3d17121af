"""A graph under construction whose nodes are valid, since onnxruntime runs each one first.

Dimensions of inputs are symbols or fixed; the first feed has the sizes that the nodes were drawn
for, the others have sizes of 0 and 1 and others, which onnxruntime may refuse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, helper, numpy_helper
from support import run

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
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.startswith(("float", "double")):
        array = rng.standard_normal(shape)
        return np.asarray(np.abs(array) + 0.1 if positive else array).astype(dtype)
    low = 0 if positive or dtype.startswith("u") else -3
    return np.asarray(rng.integers(low, 5, shape)).astype(dtype)


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
        return run(model_of(graph, opset), feeds)
    except Exception as error:  # onnxruntime's faults share no base
        raise Refused(str(error)) from error


@dataclass
class Case:
    """A graph, and feeds: at the sizes it was drawn for, and at others that may not run."""

    model: ModelProto
    feeds: list[Feeds]
    operators: list[str]


def finished(g: Graph) -> Case:
    """The model of what was drawn, and its feeds."""
    if not g.nodes:
        g.node("Identity", [g.value()])
    read = {name for node in g.nodes for name in node.input}
    bodies = [a.g for node in g.nodes for a in node.attribute if a.type == AttributeProto.GRAPH]
    read |= {name for body in bodies for node in body.node for name in node.input}
    produced = [name for node in g.nodes for name in node.output]
    produced = [name for name in produced if name in g.values]  # not what is random
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


Draw = Callable[[Graph, str], None]
"""How a node of an operator is drawn and added."""


def table(draw: Draw, names: str) -> dict[str, Draw]:
    return dict.fromkeys(names.split(), draw)
