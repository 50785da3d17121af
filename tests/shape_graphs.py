"""Random graphs of operators over shapes, with feeds of several sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

Array = np.ndarray[Any, Any]
SIZES = (0, 1, 2, 3, 5)
_TYPES = {
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.bool_): TensorProto.BOOL,
    np.dtype(np.float32): TensorProto.FLOAT,
}


@dataclass
class ShapeGraph:
    """A graph as it grows: each value with its array for the sizes that it is built with."""

    rng: np.random.Generator
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, tuple[int, list[int | str]]] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def pick(self, accept: Callable[[Array], bool]) -> str | None:
        """The name of a value, a late one rather than an early one."""
        names = [name for name, array in self.arrays.items() if accept(array)]
        if not names:
            return None
        place = max(self.rng.integers(len(names)), self.rng.integers(len(names)))
        return names[int(place)]

    def constant(self, array: Any, dtype: Any = np.int64) -> str:
        made = np.asarray(array, dtype)
        name = f"c{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(made, name))
        return name

    def node(self, kind: str, inputs: Sequence[str], result: Array, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        self.arrays[name] = np.asarray(result)
        return name

    def model(self) -> onnx.ModelProto:
        """The graph, whose outputs are computed of each value that no node reads."""
        read = {name for node in self.nodes for name in node.input}
        ends, outputs = [], []
        for name in [n for n in self.arrays if n not in read and n not in self.inputs][-6:]:
            array = self.arrays[name]
            kind = "Not" if array.dtype == np.bool_ else "Neg"
            ends.append(helper.make_node(kind, [name], [f"{name}.end"]))
            shape = [f"{name}.{i}" for i in range(array.ndim)]
            type_ = _TYPES[array.dtype]
            outputs.append(helper.make_tensor_value_info(f"{name}.end", type_, shape))
        inputs = [helper.make_tensor_value_info(n, t, d) for n, (t, d) in self.inputs.items()]
        graph = helper.make_graph([*self.nodes, *ends], "g", inputs, outputs, self.constants)
        opset = helper.make_opsetid("", int(self.rng.choice([15, 18, 21, 23])))
        return helper.make_model(graph, opset_imports=[opset], ir_version=10)

    def feeds(self, sizes: dict[str, int]) -> dict[str, Array]:
        """Arrays of these sizes; integers are those that the graph was built with."""
        found = {}
        for name, (type_, dims) in self.inputs.items():
            shape = [d if isinstance(d, int) else sizes[d] for d in dims]
            whole = type_ == TensorProto.INT64
            count = int(np.prod(shape))
            floats = np.arange(1, count + 1, dtype=np.float32).reshape(shape)
            found[name] = self.arrays[name] if whole else floats
        return found


def _whole(array: Array) -> bool:
    return array.dtype == np.int64


def _of(accept: Callable[[Array], bool] = lambda a: True) -> Callable[..., Any]:
    """A step that takes a value which is accepted, by name and array, where there is one."""

    def decorated(step: Callable[[ShapeGraph, str, Array], None]) -> Callable[[ShapeGraph], None]:
        def drawn(g: ShapeGraph) -> None:
            name = g.pick(accept)
            if name is not None:
                step(g, name, g.arrays[name])

        return drawn

    return decorated


@_of()
def _shape(g: ShapeGraph, name: str, array: Array) -> None:
    rank = array.ndim
    attributes: dict[str, int] = {}
    if g.rng.random() < 0.4:
        attributes["start"] = int(g.rng.integers(-rank - 1, rank + 2))
    if g.rng.random() < 0.4:
        attributes["end"] = int(g.rng.integers(-rank - 1, rank + 2))
    part = array.shape[attributes.get("start", 0) : attributes.get("end")]
    g.node("Shape", [name], np.array(part, np.int64), **attributes)


@_of()
def _size(g: ShapeGraph, name: str, array: Array) -> None:
    g.node("Size", [name], np.array(array.size))


@_of(lambda a: a.ndim > 0 and a.size > 0 and a.dtype != np.float32)
def _gather(g: ShapeGraph, name: str, array: Array) -> None:
    axis = int(g.rng.integers(-array.ndim, array.ndim))
    limit = array.shape[axis]
    shape = [(), (1,), (2,), (1, 2), (2, 2), (0,)][
        int(g.rng.choice(6, p=[0.35, 0.3, 0.15, 0.08, 0.07, 0.05]))
    ]
    index = g.rng.integers(-limit, limit, shape)
    g.node("Gather", [name, g.constant(index)], np.take(array, index, axis), axis=axis)


@_of(lambda a: a.ndim > 0)
def _slice(g: ShapeGraph, name: str, array: Array) -> None:
    axis = int(g.rng.integers(array.ndim))
    step = int(g.rng.choice([1, 1, 1, 2, -1, -2]))
    start, end = (int(g.rng.choice([0, 1, 2, -1, -2, -3, 9])) for _ in range(2))
    if step > 0 and g.rng.random() < 0.3:
        end = int(g.rng.choice([2**63 - 1, 2**31 - 1]))
    operands = [name, g.constant([start]), g.constant([end])]
    if g.rng.random() < 0.25 and (open_start := g.pick(lambda a: _whole(a) and a.shape == (1,))):
        operands[1], start = open_start, int(g.arrays[open_start][0])
    if axis or step != 1 or g.rng.random() < 0.5:
        operands.append(g.constant([axis if g.rng.random() < 0.5 else axis - array.ndim]))
    if step != 1 or g.rng.random() < 0.3:
        if len(operands) == 3:
            operands.append(g.constant([axis]))
        operands.append(g.constant([step]))
    size = array.shape[axis]
    first, last = (v + size if v < 0 else v for v in (start, end))
    if step > 0:
        cut = slice(min(max(first, 0), size), min(max(last, 0), size), step)
    else:
        last = min(max(last, -1), size - 1)
        cut = slice(min(max(first, 0), size - 1), None if last < 0 else last, step)
    whole: list[Any] = [slice(None)] * array.ndim
    whole[axis] = cut
    g.node("Slice", operands, array[tuple(whole)])


@_of(lambda a: _whole(a) and a.ndim > 0)
def _concat(g: ShapeGraph, name: str, array: Array) -> None:
    axis = int(g.rng.integers(-array.ndim, array.ndim))
    parts = [name]
    beside = np.arange(array.ndim) != axis % array.ndim

    def fits(a: Array) -> bool:
        same_rank = _whole(a) and a.ndim == array.ndim
        return same_rank and bool((np.array(a.shape) == array.shape)[beside].all())

    others = [g.pick(fits) for _ in range(int(g.rng.integers(0, 3)))]
    parts += [other for other in others if other is not None]
    values = [g.arrays[p] for p in parts]
    if array.ndim == 1 and g.rng.random() < 0.4:
        number = g.rng.choice([-1, 0, 1, 2, 3], 1)
        parts.append(g.constant(number))
        values.append(number)
    g.node("Concat", parts, np.concatenate(values, axis), axis=axis)


@_of(lambda a: 1 in a.shape)
def _squeeze(g: ShapeGraph, name: str, array: Array) -> None:
    ones = [i for i, n in enumerate(array.shape) if n == 1]
    if g.rng.random() < 0.3:
        g.node("Squeeze", [name], array.squeeze())
        return
    axis = int(g.rng.choice(ones))
    axes = [axis if g.rng.random() < 0.5 else axis - array.ndim]
    g.node("Squeeze", [name, g.constant(axes)], array.squeeze(axis))


@_of(lambda a: a.ndim < 3)
def _unsqueeze(g: ShapeGraph, name: str, array: Array) -> None:
    axis = int(g.rng.integers(-array.ndim - 1, array.ndim + 1))
    g.node("Unsqueeze", [name, g.constant([axis])], np.expand_dims(array, axis))


def _factors(g: ShapeGraph, count: int) -> list[int]:
    found = [1]
    for p in (2, 3, 5, 7):
        while count % p == 0 and count:
            count //= p
            found.append(p)
    found.append(max(count, 1))
    g.rng.shuffle(found)
    cut = sorted(g.rng.integers(0, len(found) + 1, int(g.rng.integers(0, 3))))
    return [int(np.prod(part)) for part in np.split(np.array(found), cut)]


@_of(lambda a: a.dtype != np.bool_)
def _reshape(g: ShapeGraph, name: str, array: Array) -> None:
    """By constants, or by what the graph has computed."""
    if g.rng.random() < 0.6 and (target := g.pick(lambda a: _fits(array, a))):
        g.node("Reshape", [name, target], array.reshape(_meant(array, g.arrays[target])))
        return
    shape = _factors(g, array.size) if array.size else [0]
    wanted = list(shape)
    if g.rng.random() < 0.5 and array.size:
        wanted[int(g.rng.integers(len(wanted)))] = -1
    for i, n in enumerate(wanted):
        if i < array.ndim and array.shape[i] == n and g.rng.random() < 0.5:
            wanted[i] = 0
    if array.size:
        g.node("Reshape", [name, g.constant(wanted)], array.reshape(shape))


def _meant(array: Array, target: Array) -> list[int]:
    return [array.shape[i] if n == 0 else int(n) for i, n in enumerate(target)]


def _fits(array: Array, target: Array) -> bool:
    if not _whole(target) or target.ndim != 1 or target.size > 5 or not target.size:
        return False
    try:
        array.reshape(_meant(array, target))
    except (ValueError, IndexError):
        return False
    return True


@_of(lambda a: a.ndim < 3)
def _expand(g: ShapeGraph, name: str, array: Array) -> None:
    target = g.pick(lambda a: _whole(a) and a.shape in ((1,), (2,)))
    if target is None or (g.arrays[target] < 0).any() or g.arrays[target].prod() > 60:
        return
    try:
        shape = np.broadcast_shapes(array.shape, tuple(g.arrays[target].tolist()))
    except ValueError:
        return
    g.node("Expand", [name, target], np.broadcast_to(array, shape))


def _constant_of_shape(g: ShapeGraph) -> None:
    target = g.pick(
        lambda a: _whole(a) and a.ndim == 1 and a.size < 4 and (a >= 0).all() and a.prod() < 60
    )
    if target is not None:
        number = int(g.rng.integers(0, 3))
        value = helper.make_tensor("value", TensorProto.INT64, [1], [number])
        g.node("ConstantOfShape", [target], np.full(g.arrays[target], number), value=value)


def _range(g: ShapeGraph) -> None:
    limit = g.pick(lambda a: _whole(a) and a.ndim == 0 and a < 60)
    if limit is not None:
        start, step = int(g.rng.integers(0, 2)), int(g.rng.choice([1, 1, 2]))
        operands = [g.constant(start), limit, g.constant(step)]
        g.node("Range", operands, np.arange(start, int(g.arrays[limit]), step, np.int64))


@_of()
def _cast(g: ShapeGraph, name: str, array: Array) -> None:
    kind = np.dtype([np.int64, np.int64, np.int32, np.bool_, np.float32][int(g.rng.integers(5))])
    g.node("Cast", [name], array.astype(kind), to=_TYPES[kind])


@_of(_whole)
def _arithmetic(g: ShapeGraph, name: str, a: Array) -> None:
    kind = str(g.rng.choice(["Add", "Sub", "Mul", "Div", "Mod", "Min", "Max"]))
    if kind in ("Div", "Mod") or g.rng.random() < 0.4:
        number = g.rng.integers(1, 4, [(), (1,)][int(g.rng.integers(2))])
        operands, b = [name, g.constant(number)], number
    else:
        other = g.pick(lambda b: _whole(b) and _together(a, b))
        if other is None:
            return
        operands, b = [name, other], g.arrays[other]
    functions = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Mod": np.mod,
                 "Min": np.minimum, "Max": np.maximum}  # fmt: skip
    result = (np.sign(a) * (abs(a) // b)) if kind == "Div" else functions[kind](a, b)
    if np.abs(result).max(initial=0) < 10**6:
        g.node(kind, operands, result)


def _together(a: Array, b: Array) -> bool:
    try:
        return int(np.prod(np.broadcast_shapes(a.shape, b.shape))) < 60
    except ValueError:
        return False


@_of(_whole)
def _compare(g: ShapeGraph, name: str, array: Array) -> None:
    number = int(g.rng.choice([-1, 0, 1, 2, 3]))
    kind = str(g.rng.choice(["Equal", "Less", "Greater"]))
    functions = {"Equal": np.equal, "Less": np.less, "Greater": np.greater}
    g.node(kind, [name, g.constant(number)], functions[kind](array, number))


def _where(g: ShapeGraph) -> None:
    condition = g.pick(lambda a: a.dtype == np.bool_)
    a = g.pick(lambda x: condition is not None and _whole(x) and _together(g.arrays[condition], x))
    if condition is None or a is None:
        return
    number = int(g.rng.choice([-1, 0, 1, 2]))
    g.node(
        "Where",
        [condition, g.constant(number), a],
        np.where(g.arrays[condition], number, g.arrays[a]),
    )


@_of(lambda a: _whole(a) and a.ndim > 0 and a.size > 0)
def _reduce(g: ShapeGraph, name: str, array: Array) -> None:
    kind = str(g.rng.choice(["Prod", "Prod", "Sum", "Max", "Min"]))
    keep = bool(g.rng.integers(2))
    function = {"Prod": np.prod, "Sum": np.sum, "Max": np.max, "Min": np.min}[kind]
    result = function(array, keepdims=keep)
    if np.abs(result).max(initial=0) < 10**6:  # over all axes, which every opset writes alike
        g.node(f"Reduce{kind}", [name], result, keepdims=int(keep))


@_of(lambda a: a.ndim > 1)
def _transpose(g: ShapeGraph, name: str, array: Array) -> None:
    order = g.rng.permutation(array.ndim)
    g.node("Transpose", [name], array.transpose(order), perm=order.tolist())


_STEPS: tuple[tuple[Callable[[ShapeGraph], None], int], ...] = (
    *((_shape, 5), (_size, 1), (_gather, 5), (_slice, 4), (_concat, 5), (_squeeze, 3)),
    *((_unsqueeze, 4), (_reshape, 5), (_expand, 2), (_constant_of_shape, 2), (_range, 2)),
    *((_cast, 2), (_arithmetic, 4), (_compare, 2), (_where, 2), (_reduce, 2), (_transpose, 1)),
)


def shape_graph(seed: int) -> ShapeGraph:
    """A graph of 4 to 16 nodes over inputs of up to four axes."""
    rng = np.random.default_rng(seed)
    g = ShapeGraph(rng)
    symbols = ["a", "b", "c", "d"]
    g.sizes = {s: int(rng.choice([1, 2, 3, 4, 6])) for s in symbols}
    for name in ("x", "z"):
        dims: list[int | str] = [
            str(rng.choice(symbols)) if rng.random() < 0.6 else int(rng.choice([1, 2, 3, 4]))
            for _ in range(int(rng.integers(1, 5)))
        ]
        g.inputs[name] = TensorProto.FLOAT, dims
        g.arrays[name] = np.zeros(
            [d if isinstance(d, int) else g.sizes[d] for d in dims], np.float32
        )
    if rng.random() < 0.4:
        g.inputs["n"] = TensorProto.INT64, [1]
        g.arrays["n"] = rng.choice([0, 1, 2, -1, -2], 1)
    steps, weights = zip(*_STEPS, strict=True)
    chances = np.array(weights) / sum(weights)
    _shape(g)
    for _ in range(int(rng.integers(6, 30))):
        steps[int(rng.choice(len(steps), p=chances))](g)
        if len(g.nodes) >= 16:
            break
    return g
