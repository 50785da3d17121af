"""The results of nodes whose inputs are known, as onnxruntime would compute them.

Shape arithmetic is exact in any implementation and is done by NumPy; all else is asked of
onnxruntime itself, whose answer is the one a run would give. onnx's reference evaluator is not
asked: its Pow, LpNormalization, Resize and casts to 4 bits differ from onnxruntime's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.traits import DRAWS

# Element types that Python cannot take from onnxruntime, and one that holds their values exactly.
_FETCHED_AS = {
    ir.DataType.BFLOAT16: ir.DataType.FLOAT,
    ir.DataType.FLOAT8E4M3FN: ir.DataType.FLOAT,
    ir.DataType.FLOAT8E4M3FNUZ: ir.DataType.FLOAT,
    ir.DataType.FLOAT8E5M2: ir.DataType.FLOAT,
    ir.DataType.FLOAT8E5M2FNUZ: ir.DataType.FLOAT,
    ir.DataType.INT4: ir.DataType.INT8,
    ir.DataType.UINT4: ir.DataType.UINT8,
}


def evaluate(
    nodes: Sequence[ir.Node], arrays: Mapping[ir.Value, Array], opsets: Mapping[str, int]
) -> dict[ir.Value, Array]:
    """The outputs of `nodes`, which are in order and read nothing but each other and `arrays`.

    An output that could not be computed is left out. An exact node costs microseconds; for the
    others one onnxruntime session is made, or one for each where that fails.
    """
    results: dict[ir.Value, Array] = {}
    asked: list[ir.Node] = []
    coming: set[ir.Value] = set()  # the outputs of `asked`
    for node in nodes:
        inputs = [None if v is None else results.get(v, arrays.get(v)) for v in node.inputs]
        pairs = list(zip(inputs, node.inputs, strict=True))
        complete = all(a is not None or v is None for a, v in pairs)
        answers = exact(node, inputs) if complete else None
        if answers is not None:
            results.update(zip(node.outputs, answers, strict=False))
        elif all(a is not None or v is None or v in coming for a, v in pairs):
            unknown = _integer_division(node) and _may_trap(inputs)
            if not (traps(node, inputs) if complete else unknown):
                asked.append(node)
                coming.update(node.outputs)
    if asked:
        results.update(_run_what_runs(asked, {**arrays, **results}, opsets))
    return results


def _run_what_runs(
    nodes: Sequence[ir.Node], arrays: Mapping[ir.Value, Array], opsets: Mapping[str, int]
) -> dict[ir.Value, Array]:
    answers = _run(nodes, arrays, opsets)
    if answers is not None or len(nodes) == 1:
        return answers or {}
    results: dict[ir.Value, Array] = {}
    for node in nodes:
        if all(v is None or v in arrays or v in results for v in node.inputs):
            results.update(_run_what_runs([node], {**arrays, **results}, opsets))
    return results


def _run(
    nodes: Sequence[ir.Node], arrays: Mapping[ir.Value, Array], opsets: Mapping[str, int]
) -> dict[ir.Value, Array] | None:
    """The arrays that onnxruntime makes; None where it refuses the nodes."""
    names: dict[ir.Value, str] = {}
    protos = []
    for node in nodes:
        proto = ir.serde.serialize_node(node)
        if not any(a.HasField("g") or a.graphs for a in proto.attribute):  # branches use the names
            for value in (*node.inputs, *node.outputs):
                if value is not None and (value.name or value in arrays):
                    names.setdefault(value, f"v{len(names)}")
            proto.input[:] = ["" if v is None else names[v] for v in node.inputs]
            proto.output[:] = [names.get(v, "") for v in node.outputs]
        protos.append(proto)
    inside = {v for node in nodes for v in node.outputs}
    branches = any(a.HasField("g") or a.graphs for proto in protos for a in proto.attribute)
    read = arrays if branches else {v for node in nodes for v in node.inputs}
    outputs = []
    wanted: list[tuple[ir.Value, ir.DataType | None]] = []
    for value in (v for node in nodes for v in node.outputs if v.name):
        name, dtype = names.get(value, value.name or ""), value.dtype
        if dtype in _FETCHED_AS:
            fetched = _FETCHED_AS[dtype]
            cast = onnx.helper.make_node("Cast", [name], [f"{name} fetched"], to=fetched.value)
            protos.append(cast)
            name = f"{name} fetched"
        elif dtype == ir.DataType.STRING:
            continue
        wanted.append((value, dtype if dtype in _FETCHED_AS else None))
        outputs.append(onnx.ValueInfoProto(name=name))
    constants = []
    for value, array in arrays.items():
        if value in read and value not in inside:
            if array.dtype.kind in "OSTU":  # strings
                tensor = onnx.numpy_helper.from_array(array.astype(object))
            else:
                tensor = ir.serde.serialize_tensor(ir.tensor(array))
            tensor.name = names.get(value, value.name or "")
            constants.append(tensor)
    graph = onnx.helper.make_graph(protos, "constants", [], outputs, constants)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in opsets.items() if d != FUSE]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    data = model.SerializeToString()
    again = len(data) <= _SMALL and not branches and not any(n.op_type in DRAWS for n in nodes)
    answers = (_answers if again else _answers.__wrapped__)(data)
    if answers is None:
        return None
    copied = np.array if again else np.asarray  # what is kept for the next time stays as it is
    return {
        value: copied(answer) if dtype is None else answer.astype(dtype.numpy())
        for (value, dtype), answer in zip(wanted, answers, strict=True)
        if not isinstance(answer, list | dict | None)  # a sequence, a map or an optional
    }


_SMALL = 1 << 12  # bytes of a model whose answers are remembered: each layer asks for the same


@lru_cache(1024)
def _answers(model: bytes) -> list[Any] | None:
    """The outputs of a serialized model without inputs, which nobody changes; None if it fails."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    run = onnxruntime.RunOptions()
    run.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
        return list(session.run(None, {}, run))
    except Exception:  # noqa: BLE001 - its errors share no class
        return None


def _integer_division(node: ir.Node) -> bool:
    return node.op_type in ("Div", "Mod") and not node.domain


def _may_trap(arrays: Sequence[Array | None]) -> bool:
    """Whether an integer division by this divisor could end the process, as one by 0 does."""
    divisor = arrays[1] if len(arrays) > 1 else None
    return divisor is None or bool((divisor == 0).any() or (divisor == -1).any())


def traps(node: ir.Node, arrays: Sequence[Array | None]) -> bool:
    """Whether an integer division would end the process: by 0, or of the smallest integer by -1."""
    if not _integer_division(node) or len(arrays) < 2:
        return False
    a, b = arrays[0], arrays[1]
    if a is None or b is None or {a.dtype.kind, b.dtype.kind} - {"i", "u"}:
        return False  # inference reports that the types differ
    smallest = b.dtype.kind == "i" and (b == -1).any() and (a == np.iinfo(a.dtype).min).any()
    return bool((b == 0).any() or smallest)


# ---- what is exact in any implementation ---------------------------------------------------------


def exact(node: ir.Node, arrays: Sequence[Array | None]) -> list[Array] | None:
    """The outputs of a node that moves elements or computes with integers; None for any other."""
    function = _EXACT.get(node.op_type) if not node.domain else None
    if function is None or not arrays or arrays[0] is None:
        return None
    if any(a is not None and a.dtype.kind not in "biufV" for a in arrays):
        return None
    if any(a is None for a in arrays[: _REQUIRED.get(node.op_type)]):
        return None
    try:
        with np.errstate(all="ignore"):
            result = function(node, arrays)
    except (ValueError, IndexError, ArithmeticError):
        return None  # no valid node: onnxruntime says what is wrong with it
    return None if result is None else [np.asarray(result, order="C")]


def viewer(node: ir.Node) -> Callable[[Sequence[Array | None]], Array]:
    """What `exact` does for a node that only moves elements, as a function of its inputs.

    The result may share the memory of an input. The function raises ValueError or IndexError for
    inputs that do not fit.
    """
    function = _EXACT[node.op_type]
    return lambda arrays: np.asarray(function(node, arrays))


_Exact = Callable[[ir.Node, Sequence[Any]], "Array | None"]


def _at(arrays: Sequence[Any], index: int) -> Any:
    return arrays[index] if index < len(arrays) else None


def _ints(array: Array) -> tuple[int, ...]:
    return tuple(int(n) for n in np.reshape(array, -1))


def _reshape(node: ir.Node, arrays: Sequence[Any]) -> Array:
    x, shape = arrays[0], _ints(arrays[1])
    if node.attributes.get_int("allowzero", 0) == 0:
        shape = tuple(x.shape[i] if d == 0 else d for i, d in enumerate(shape))
    return x.reshape(shape)


def _flatten(node: ir.Node, arrays: Sequence[Any]) -> Array:
    (x,) = arrays
    axis = node.attributes.get_int("axis", 1)
    rows = math.prod(x.shape[:axis])
    return x.reshape(rows, -1 if rows and x.size else math.prod(x.shape[axis:]))


def _concat(node: ir.Node, arrays: Sequence[Any]) -> Array | None:
    if any(a.dtype != arrays[0].dtype for a in arrays):
        return None
    return np.concatenate(arrays, node.attributes["axis"].as_int())


TO_THE_END = (2**31 - 1, 2**63 - 1)
"""Ends of a Slice that mean the whole rest in either direction, to onnxruntime: not so to ONNX."""


def _slice(node: ir.Node, arrays: Sequence[Any]) -> Array:
    x, starts, ends = arrays[:3]
    axes, steps = _at(arrays, 3), _at(arrays, 4)
    if any(a is not None and (a.ndim != 1 or a.dtype.kind not in "iu") for a in arrays[1:]):
        raise ValueError("Slice reads vectors of integers")
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    cut: list[Any] = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts.tolist(), ends.tolist(), steps, strict=True):
        size = x.shape[axis]
        # Python lets a negative end count from the back; here it has been clamped before.
        first, last = (v + size if v < 0 else v for v in (start, end))
        if step > 0:
            cut[axis] = slice(min(max(first, 0), size), min(max(last, 0), size), step)
        else:
            last = -1 if end in TO_THE_END else min(max(last, -1), size - 1)
            first = min(max(first, 0), size - 1)
            cut[axis] = slice(first, None if last < 0 else last, step)
    return x[tuple(cut)]


def _shape(node: ir.Node, arrays: Sequence[Any]) -> Array:
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end")
    return np.array(arrays[0].shape[start:end], np.int64)


def _constant_of_shape(node: ir.Node, arrays: Sequence[Any]) -> Array:
    value = node.attributes.get_tensor("value")
    number = np.zeros(1, np.float32) if value is None else value.numpy()
    return np.full(_ints(arrays[0]), number.reshape(-1)[0], number.dtype)


def _cast(node: ir.Node, arrays: Sequence[Any]) -> Array | None:
    (x,), to = arrays, ir.DataType(node.attributes["to"].as_int())
    if to == ir.DataType.STRING or x.dtype.kind not in "biu":
        return None
    kind = to.numpy()
    wide_or_bool = kind == np.bool_ or (kind.kind in "iu" and kind.itemsize == 8)
    exactly = wide_or_bool or kind in (np.int32, np.float32, np.float64)
    return x.astype(kind) if exactly else None


def _where(node: ir.Node, arrays: Sequence[Any]) -> Array | None:
    condition, a, b = arrays
    return np.where(condition, a, b) if a.dtype == b.dtype else None


def _range(node: ir.Node, arrays: Sequence[Any]) -> Array | None:
    start, limit, delta = arrays
    kinds = {a.dtype for a in arrays}
    if not kinds <= {np.dtype(np.int64), np.dtype(np.int32)} or not delta.any():
        return None
    numbers = range(start.item(), limit.item(), delta.item())
    return np.array(numbers, start.dtype) if len(numbers) <= 1 << 20 else None


def _integers(function: Callable[..., Any]) -> _Exact:
    """A function of integers of one type, 4 or 8 bytes wide."""

    def compute(node: ir.Node, arrays: Sequence[Any]) -> Array | None:
        kinds = {a.dtype for a in arrays}
        exact_type = len(kinds) == 1 and arrays[0].dtype in (np.int64, np.int32)
        return function(*arrays) if exact_type and not traps(node, arrays) else None

    return compute


_EXACT: dict[str, _Exact] = {
    "Identity": lambda node, arrays: arrays[0],
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": lambda node, arrays: np.transpose(arrays[0], node.attributes.get_ints("perm")),
    "Squeeze": lambda node, arrays: np.squeeze(
        arrays[0], (None if _at(arrays, 1) is None else _ints(arrays[1])) or None
    ),
    "Unsqueeze": lambda node, arrays: np.expand_dims(arrays[0], _ints(arrays[1])),
    "Concat": _concat,
    # take raises IndexError where an index is out of bounds
    "Gather": lambda node, arrays: np.take(
        arrays[0], arrays[1].astype(np.int64), node.attributes.get_int("axis", 0)
    ),
    "Slice": _slice,
    "Shape": _shape,
    "Size": lambda node, arrays: np.array(arrays[0].size, np.int64),
    "Expand": lambda node, arrays: np.broadcast_to(
        arrays[0], np.broadcast_shapes(arrays[0].shape, _ints(arrays[1]))
    ),
    "ConstantOfShape": _constant_of_shape,
    "Cast": _cast,
    "Where": _where,
    "Range": _range,
    "Add": _integers(np.add),
    "Sub": _integers(np.subtract),
    "Mul": _integers(np.multiply),
    "Div": _integers(lambda a, b: (a - np.fmod(a, b)) // b),  # towards zero, as C++ divides
    "Neg": _integers(np.negative),
    "Abs": _integers(np.abs),
    "Equal": _integers(np.equal),
    "Less": _integers(np.less),
    "LessOrEqual": _integers(np.less_equal),
    "Greater": _integers(np.greater),
    "GreaterOrEqual": _integers(np.greater_equal),
    "And": lambda node, arrays: np.logical_and(*arrays),
    "Or": lambda node, arrays: np.logical_or(*arrays),
    "Xor": lambda node, arrays: np.logical_xor(*arrays),
    "Not": lambda node, arrays: np.logical_not(arrays[0]),
}
"""What each operator computes; None where it is left to onnxruntime."""
_REQUIRED = {"Slice": 3, "Squeeze": 1}
"""How many inputs an operator cannot do without, where these are not all of them."""
