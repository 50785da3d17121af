"""The one way in which every operator runs: at once, on a tape for the backward, and recorded.

`apply` runs an operation on tensors. Where one of them requires a gradient, the result remembers
the operation (`Edge`), and `backward` walks these edges from the last to the first. While a
recorder is at work (`nn.graphs`), it is told of each operation, too.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.errors import UsageError, did_you_mean
from onnx_fuse.ir.constants import CANONICAL_OPSET
from onnx_fuse.ir.traits import DRAWS
from onnx_fuse.nn.operation import Build, Operation, Plan, Recent
from onnx_fuse.nn.runner import Array
from onnx_fuse.ops.shape_ops import Writer

Input: TypeAlias = Any
"""A `nn.tensor.Tensor`, an array, or None."""
P = ParamSpec("P")
R = TypeVar("R")


class _Mode(threading.local):
    """What holds for the operators that a thread calls."""

    grad = True
    recorder: Any = None


MODE = _Mode()
_numbers = itertools.count()
_make: Callable[..., Any]
"""Makes a Tensor of (array, edge, index). `nn.tensor`, a layer below, sets it."""


def use(make: Callable[..., Any]) -> None:
    """Set the function that makes a Tensor of (array, edge, index)."""
    global _make
    _make = make


class Edge:
    """One run of an operation whose results require gradients.

    `targets` are what the gradients of `plan.wrt` go to: a leaf Tensor, or an earlier edge with the
    number of its result; `stopped` are those of `plan.stops`, which get none. `ends` are the
    (shape, dtype) of the results where there are several.
    """

    __slots__ = ("ends", "number", "plan", "saved", "stopped", "targets")

    def __init__(
        self, plan: Plan, inputs: Sequence[Any], arrays: Sequence[Array], results: Sequence[Array]
    ) -> None:
        self.plan, self.number = plan, next(_numbers)
        self.saved = [arrays[s] if s >= 0 else results[~s] for s in plan.sources]
        self.targets = _targets(inputs, plan.wrt)
        self.stopped = _targets(inputs, plan.stops) if plan.stops else ()
        count = plan.count
        self.ends = [(r.shape, r.dtype) for r in results[:count]] if count > 1 else None


def _targets(inputs: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [x if x._edge is None else (x._edge, x._index) for x in [inputs[i] for i in places]]


def apply(operation: Operation, inputs: Sequence[Input]) -> Any:
    """Run an operation on tensors, arrays (which are constants) and None (what is left out).

    Returns a Tensor, or a tuple of them. Raises UsageError for what onnxruntime refuses.
    """
    arrays: list[Array] = []
    key: list[Any] = []
    needs, gpu, bit = 0, None, 1
    for x in inputs:
        if x is None:
            key.append(None)
        else:
            a = x
            if type(x) is not np.ndarray:
                a = x._data
                if x.requires_grad:
                    needs |= bit
                if type(a) is not np.ndarray:
                    gpu = a.device_id
                    key.append(gpu)
            arrays.append(a)
            key += (a.dtype.num, a.shape)
        bit <<= 1
    if not MODE.grad:
        needs = 0
    key.append(needs)
    plan_key = tuple(key)
    plan = operation.plans.get(plan_key)
    if plan is None:
        plan = operation.plan(plan_key, [_array(x) for x in inputs], needs, gpu)
    results = plan.forward(arrays)
    edge = Edge(plan, inputs, arrays, results) if needs else None
    tensors: object
    if plan.count == 1:
        tensors = _make(results[0], edge if edge and plan.floats[0] else None, 0)
    else:
        tensors = tuple(
            [
                _make(results[i], edge if edge and plan.floats[i] else None, i)
                for i in range(plan.count)
            ]
        )
    if MODE.recorder is not None:
        MODE.recorder.record(operation, inputs, tensors)
    return tensors


def _array(x: Input) -> Array | None:
    return x if x is None or type(x) is np.ndarray else x._data


# ---- operators by name -------------------------------------------------------------------------

KINDS = 512
"""Operations with values of their attributes that are kept, with their sessions."""
_KINDS: Recent[Operation] = Recent(KINDS)


def op_call(
    name: str,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
    outputs: int = 1,
) -> Any:
    """Run one ONNX operator at once, and record it for the backward.

    The operator runs on the device of its inputs: on this package's kernels on a GPU, on
    onnxruntime otherwise. Its gradient is the rule that `onnx_fuse.gradient` applies.

    Args:
        name: The operator's name, such as "Softmax".
        inputs: Its inputs in order: Tensors, NumPy arrays or None for one that is left out. A list
            of integers is an int64 constant, and a number one of the first Tensor's dtype.
        attributes: Its attributes by name.
        domain: Its domain: "" for ai.onnx, "onnx_fuse", "com.microsoft" or one that
            `onnx_fuse.register_op` has brought.
        outputs: The number of results asked for.

    Returns:
        A Tensor, or a tuple of them where several outputs are asked for.

    Raises:
        UsageError: There is no such operator, or it does not take these inputs.
    """
    key = (name, domain, outputs, frozen(attributes) if attributes else None)
    operation = _KINDS.get(key)
    if operation is None:
        operation = _KINDS.put(key, _operator(name, dict(attributes or {}), domain, outputs))
    return apply(operation, constants(inputs))


def constants(inputs: Sequence[Any]) -> list[Any]:
    """The inputs of an operator with lists and numbers as arrays."""
    plain = [x for x in inputs if x is not None and not isinstance(x, np.ndarray | int | float)]
    first = next((x for x in plain if hasattr(x, "_data")), None)
    return [
        x if x is None or hasattr(x, "_data") or type(x) is np.ndarray else _constant(x, first)
        for x in inputs
    ]


def _constant(x: object, like: Input) -> np.ndarray[Any, Any]:
    if isinstance(x, np.generic):
        return np.asarray(x)
    if isinstance(x, list | tuple):
        return np.array(x, np.int64 if all(isinstance(i, int) for i in x) else None)
    return np.array(x, None if like is None else like._data.dtype)


def _operator(name: str, attributes: dict[str, Any], domain: str, outputs: int) -> Operation:
    opset = CANONICAL_OPSET
    if not domain:
        if not onnx.defs.has(name):
            names = {s.name for s in onnx.defs.get_all_schemas() if not s.domain}
            raise UsageError(f"ai.onnx has no operator '{name}'{did_you_mean(name, names)}")
        opset = max(opset, onnx.defs.get_schema(name).since_version)
        if onnx.defs.has(name, max_inclusive_version=CANONICAL_OPSET):
            opset = CANONICAL_OPSET

    def build(op: Writer, *values: ir.Value | None) -> Any:
        # named outputs: one draw of a random operator is not another's
        names = [op.fresh(f"{name}_{i}") for i in range(outputs)] if name in DRAWS else outputs
        return op.node(name, values, outputs=names, domain=domain, attributes=attributes)

    domains = {domain: 1} if domain else None
    return Operation(name, build, opset=opset, domains=domains)


def frozen(value: object) -> Any:
    """A key for a static argument: equal for values that mean the same, in type and sign too."""
    if type(value) is float:
        return value.hex()
    if type(value) is int or type(value) is str or value is None:
        return value
    if isinstance(value, Mapping):
        return tuple([(k, frozen(v)) for k, v in sorted(value.items())])
    if isinstance(value, list | tuple):
        return tuple([frozen(v) for v in value])
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return type(value), value


def operation(build: Build) -> Callable[..., Any]:
    """A function of Tensors, from `build(op, *values, **static)` that emits ONNX nodes.

    Its nodes run as one, and are differentiated as one. Positional arguments are Tensors, arrays,
    numbers or None; keyword arguments are static: each combination makes a graph of its own.
    """
    name = build.__name__.strip("_")
    plain = Operation(name, build, domains={"onnx_fuse": 1})

    @wraps(build)
    def call(*inputs: Input, **static: object) -> Any:
        if not static:
            return apply(plain, inputs)
        key = (build, frozen(static))
        variant = _KINDS.get(key)
        if variant is None:

            def emit(op: Writer, *values: ir.Value | None) -> Any:
                return build(op, *values, **static)

            variant = _KINDS.put(key, Operation(name, emit, domains={"onnx_fuse": 1}))
        return apply(variant, inputs)

    return call


# ---- gradients ---------------------------------------------------------------------------------


class no_grad:
    """Within the block, or the function that it decorates, no operator is remembered."""

    def __enter__(self) -> None:
        self._before = MODE.grad
        MODE.grad = False

    def __exit__(self, *_: object) -> None:
        MODE.grad = self._before

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, run without a tape."""

        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> R:
            with no_grad():
                return function(*args, **named)

        return call


class unrecorded:
    """Within the block a capture is not told what runs."""

    def __enter__(self) -> None:
        self._recorder, MODE.recorder = MODE.recorder, None

    def __exit__(self, *_: object) -> None:
        MODE.recorder = self._recorder


def gradients(root: Edge, index: int, dy: Array) -> list[tuple[Any, Array]]:
    """(leaf Tensor, gradient) of each leaf that the result `index` of `root` depends on."""
    pending: dict[Edge, list[Array | None]] = {root: [None] * root.plan.count}
    pending[root][index] = dy
    leaves: dict[int, tuple[Any, Array]] = {}
    stops: list[tuple[Any, str]] = []
    for edge in _in_order(root):
        dys = pending.pop(edge, None)
        if dys is None:
            continue
        plan = edge.plan
        if plan.refusal:
            raise UsageError(plan.refusal)
        stops += [(target, plan.reason) for target in edge.stopped]
        if not plan.wrt:
            continue
        if any(dy is not None and i not in plan.seeds for i, dy in enumerate(dys)):
            raise UsageError(plan.blocked)
        seeds = [_zeros(edge, i) if dys[i] is None else dys[i] for i in plan.seeds]
        for target, dx in zip(edge.targets, plan.backward([*seeds, *edge.saved]), strict=True):
            if type(target) is tuple:
                earlier, i = target
                sums = pending.setdefault(earlier, [None] * earlier.plan.count)
                before = sums[i]
                sums[i] = dx if before is None else _sum(before, dx)
            else:
                previous = leaves.get(id(target))
                total = dx if previous is None else _sum(previous[1], dx)
                leaves[id(target)] = target, total
    for target, reason in stops:
        edges = _in_order(target[0]) if type(target) is tuple else []
        ends = [t for edge in edges for t in (*edge.targets, *edge.stopped)] or [target]
        if any(type(t) is not tuple and id(t) not in leaves for t in ends):
            raise UsageError(reason)
    return list(leaves.values())


def _in_order(root: Edge) -> list[Edge]:
    """The edges that lead to `root`, the last run first."""
    edges, todo = {root}, [root]
    while todo:
        edge = todo.pop()
        for target in (*edge.targets, *edge.stopped):
            if type(target) is tuple and target[0] not in edges:
                edges.add(target[0])
                todo.append(target[0])
    return sorted(edges, key=lambda edge: -edge.number)


def _zeros(edge: Edge, index: int) -> Array:
    assert edge.ends is not None
    shape, dtype = edge.ends[index]
    return np.zeros(shape, dtype)


@operation
def _add(op: Writer, a: ir.Value, b: ir.Value) -> Any:
    return op.Add(a, b)


def _sum(a: Array, b: Array) -> Array:
    with unrecorded(), no_grad():
        return _add(_make(a, None, 0), _make(b, None, 0))._data
