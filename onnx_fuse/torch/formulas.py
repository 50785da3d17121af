"""Modules of other libraries by what they compute: their forward, traced, is a known formula.

A forward of one tensor is written as ONNX nodes, which the patterns of the fusions then match.

| | |
|---|---|
| RMSNorm | y = weight · x / √(mean(x²) + eps) over the last axis |
| linear layer | y = x · weight + bias with a weight [K, N], as GPT-2's Conv1D has it |
| activation | what the rules of `ops.fused.activations` make one operator of |

Casts to float32 and back to x's type may stand anywhere between in a norm.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import fx, nn

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import Builder
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE
from onnx_fuse.ops.fused import activations, norm
from onnx_fuse.ops.patterns import Spellings
from onnx_fuse.ops.rules import Rewriter, constant_ints, nodes_in_order, scalar

_SAME = object()
"""The type of x, as a forward asks for it."""
_RMS_NORM = "weight * OverRoot (x, Average (Square (x)) + epsilon)"
_LINEAR = (
    "Reshape (bias + MatMul (Reshape (x, Concat <axis: int = 0> (rest, Shape <start: int = -1> "
    "(x))), weight), Concat <axis: int = 0> (Slice (Shape (x), zero, last), width))"
)


def rms_norm(module: nn.Module) -> float | None:
    """The epsilon of an RMSNorm that scales by its one parameter `weight`; None for another module.

    nn.RMSNorm is not looked at: its forward is torch's own.
    """
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    values = None
    if [*shapes] == ["weight"] and len(shapes["weight"]) == 1:
        values = _values(norm.LOOSE, _RMS_NORM, module)
    return scalar(values["epsilon"]) if values else None


def is_linear(module: nn.Module) -> bool:
    """Whether a module is x · weight + bias with its parameters weight [K, N] and bias [N].

    Its rows may lie along any number of axes: x is viewed as a matrix, and the result as x was.
    """
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    weight = shapes.get("weight", ())
    if len(shapes) != 2 or len(weight) != 2 or shapes.get("bias") != weight[1:]:
        return False
    values = _values(Spellings({}), _LINEAR, module)
    names = ("rest", "zero", "last", "width")
    sizes = [constant_ints(values[name]) for name in names] if values else []
    return sizes == [[-1], [0], [-1], [weight[1]]]


def activation(module: nn.Module) -> str | None:
    """The name, among ours, of an activation without parameters; None for another module."""
    graph = None if [*module.parameters()] else _graph(module)
    if graph is None:
        return None
    rw = Rewriter(ir.Model(graph, ir_version=10))
    for rule in activations.RULES:
        for node in nodes_in_order(graph, rule.anchors):
            rule.apply(rw, node)
    last = graph.outputs[0].producer()
    row, numbers = (activations.activation_of(last) if last is not None else None) or (None, {})
    if last is None or row is None or last.inputs[0] is not graph.inputs[0]:
        return None
    same = all(np.float32(alpha) == np.float32(row.alpha) for alpha in numbers.values())
    return row.key if same else None


def _values(spellings: Spellings, text: str, module: nn.Module) -> dict[str, ir.Value] | None:
    """What the names of a formula are in a forward, where x and parameters are those so called."""
    graph = _graph(module)
    values = spellings.find(text, graph.outputs[0]) if graph is not None else None
    ends = {"x", *(name for name, _ in module.named_parameters())}
    return values if values and all(values[name].name == name for name in ends) else None


# ---- a forward as ONNX nodes -----------------------------------------------------------------


def _graph(module: nn.Module) -> ir.Graph | None:
    """A forward of one tensor x of float32, without children and buffers."""
    if [*module.children(), *module.buffers()]:
        return None
    op, x = Builder(), _typed(ir.Value(name="x"))
    try:
        traced = fx.Tracer().trace(module)
        y = _Writer(module, op, traced).run(x)
    except Exception:  # noqa: BLE001 - what a forward does may be anything; it is no formula then
        return None
    if not isinstance(y, ir.Value):
        return None
    return ir.Graph([x], [y], nodes=op.nodes, opset_imports={"": CANONICAL_OPSET, FUSE: 1})


class _Writer(fx.Interpreter):
    """Runs a traced forward on values of ONNX. Raises KeyError for what is not in `_WRITERS`."""

    def __init__(self, module: nn.Module, op: Builder, graph: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self._op, self._parameters = op, dict[Any, Any]()

    def get_attr(self, target: str, args: object, kwargs: object) -> Any:
        return self._parameters.setdefault(target, _typed(ir.Value(name=target)))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _typed(_WRITERS[target](self._op, *args, **kwargs))

    call_method = call_function


def _typed(value: object) -> Any:
    """`value`, of float32 where it is a value without a type."""
    if isinstance(value, ir.Value):
        value.dtype = value.dtype or ir.DataType.FLOAT
    return value


def _elementwise(op_type: str) -> Callable[..., Any]:
    """The operator of one name, of tensors and numbers; whether it works in place is no matter."""

    def write(op: Builder, *operands: Any, inplace: bool = False) -> Any:
        if isinstance(operands[-1], tuple):  # of sizes
            return op.Concat(operands[0], [*operands[-1]], axis=0)
        plain = [v for v in operands if not isinstance(v, bool)]
        values = [v if isinstance(v, ir.Value) else np.float64(v) for v in plain]
        return op.node(op_type, values)

    return write


def _clip(op: Builder, x: ir.Value, min_val: float, max_val: float, inplace: bool = False) -> Any:
    return op.Clip(x, float(min_val), float(max_val))


def _leaky_relu(op: Builder, x: ir.Value, negative_slope: float, inplace: bool = False) -> Any:
    return op.LeakyRelu(x, alpha=negative_slope)


def _mean(op: Builder, x: ir.Value, dim: int | Sequence[int], keepdim: bool = False) -> Any:
    return op.ReduceMean(x, np.ravel(dim), keepdims=int(keepdim))


def _cast(op: Builder, x: ir.Value, kind: object = torch.float32) -> Any:
    if kind not in (_SAME, torch.float32) and getattr(kind, "name", "") != "x":
        raise UsageError(f"a cast to {kind}")
    return op.Cast(x, to=int(ir.DataType.FLOAT))


def _attribute(op: Builder, x: ir.Value, key: str) -> Any:
    return _SAME if key == "dtype" and x.name == "x" else {"shape": _shape}[key](op, x)


def _shape(op: Builder, x: ir.Value, *axis: int) -> Any:
    sizes = {(): {}, (-1,): {"start": -1}}
    shape = op.Shape(x, **sizes[axis])
    shape.dtype = ir.DataType.INT64
    return shape


def _slice(op: Builder, x: ir.Value, key: slice) -> Any:
    if key.step is not None:
        raise UsageError("steps of a slice")
    return op.Slice(x, [key.start or 0], [key.stop])


def _view(op: Builder, x: ir.Value, *sizes: object) -> Any:
    parts = [size if isinstance(size, ir.Value) else op.constant([size]) for size in sizes]
    return op.Reshape(x, parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0))


_KINDS: dict[Callable[..., Any], tuple[Any, ...]] = {
    _elementwise("Add"): (operator.add, torch.add, "add"),
    _elementwise("Div"): (operator.truediv, torch.div, "div"),
    _elementwise("Erf"): (torch.erf, "erf"),
    _elementwise("HardSwish"): (F.hardswish,),
    _elementwise("Mish"): (F.mish,),
    _elementwise("Mul"): (operator.mul, torch.mul, "mul"),
    _elementwise("Pow"): (operator.pow, torch.pow, "pow"),
    _elementwise("Relu"): (F.relu, torch.relu, "relu"),
    _elementwise("Selu"): (F.selu,),
    _elementwise("Sigmoid"): (torch.sigmoid, F.sigmoid, "sigmoid"),
    _elementwise("Tanh"): (torch.tanh, F.tanh, "tanh"),
    _clip: (F.hardtanh,),
    lambda op, x, alpha=1.0, inplace=False: op.Elu(x, alpha=alpha): (F.elu,),
    _leaky_relu: (F.leaky_relu,),
    lambda op, x, approximate="none": op.Gelu(x, approximate=approximate): (F.gelu,),
    lambda op, x, inplace=False: op.Silu(x, domain=FUSE): (F.silu,),
    lambda op, x: op.Reciprocal(_typed(op.Sqrt(x))): (torch.rsqrt, "rsqrt"),
    lambda op, x: op.Mul(x, x): (torch.square, "square"),
    lambda op, c, a, b: op.Add(c, _typed(op.MatMul(a, b))): (torch.addmm,),
    _attribute: (getattr,),
    _slice: (operator.getitem,),
    _mean: (torch.mean, "mean"),
    _cast: ("to", "type", "type_as", "float"),
    _shape: ("size",),
    _view: ("view", "reshape", torch.reshape),
}
_WRITERS = {target: write for write, targets in _KINDS.items() for target in targets}
