"""LayerNormalization and RMSNormalization from every form exporters write; residual add + norm.

In the canonical graph a norm over the last axis is either ai.onnx LayerNormalization with scale and
bias and axis -1, or `onnx_fuse.RMSNormalization` (ai.onnx has one from opset 23 only):
    RMSNormalization(x, scale) = x / sqrt(mean(x²) + epsilon) * scale
    SkipLayerNorm(x, residual, scale, bias) = LayerNormalization(s, scale, bias), s = x + residual
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, rank
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.fused.gradients import NORM_GRADS, rms_norm_grad, skip_norm_grad
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    constant_ints,
    consumers,
    freeze,
    is_constant,
    is_float,
    number,
    other_operand,
    producer,
    scalar,
    sole_consumer,
)
from onnx_fuse.ops.shape_ops import spans

EPSILON = "epsilon: float = 1e-05"
STASH = "stash_type: int = 1"

# Pow, Div and Mul in this order are what onnxruntime's own SimplifiedLayerNormalization fusion
# finds.
RMS_TEXT = """  xs = Cast <to: int = @stash_type> (x)
  two = CastLike (Constant <value_float: float = 2.0> (), xs)
  sq = Pow (xs, two)
  axes = [-1]
  ms = ReduceMean <keepdims: int = 1> (sq, axes)
  v = ms + CastLike (Constant <value_float: float = @epsilon> (), xs)
  std = Sqrt (v)
  rstd = Reciprocal (std)
  ns = xs / std
  nx = CastLike (ns, x)
"""
LAYER_NORM_TEXT = (
    "  {n}, mean, rstd = LayerNormalization <axis: int = -1, epsilon: float = @epsilon> "
    "({x}, scale, bias)\n"
)

register(
    OpDef(
        "RMSNormalization",
        FUSE,
        body=f"RMSNormalization <{EPSILON}, {STASH}> (x, scale) => (y) {{\n"
        f"{RMS_TEXT}  y = nx * scale\n}}",
        saves=("rstd",),
        grad=rms_norm_grad,
    ),
    OpDef(
        "SkipLayerNorm",
        FUSE,
        body=f"SkipLayerNorm <{EPSILON}> (x, residual, scale, bias) => (y, s) {{\n"
        f"  s = x + residual\n{LAYER_NORM_TEXT.format(n='y', x='s')}}}",
        saves=("mean", "rstd"),
        grad=skip_norm_grad,
    ),
    OpDef(
        "SkipRMSNorm",
        FUSE,
        body=f"SkipRMSNorm <{EPSILON}, {STASH}> (x, residual, scale) => (y, s) {{\n"
        "  s = x + residual\n"
        f"{RMS_TEXT.replace('(x)', '(s)').replace('(ns, x)', '(ns, s)')}  y = nx * scale\n}}",
        saves=("rstd",),
        grad=skip_norm_grad,
    ),
    *NORM_GRADS,
)


@dataclass(frozen=True)
class Norm:
    """A canonical norm node over the last axis, taken apart."""

    node: ir.Node
    kind: str  # "LayerNorm" or "RMSNorm": the prefix of the fused ops
    x: ir.Value
    affine: tuple[ir.Value, ...]  # (scale, bias) or (scale,)
    attributes: dict[str, float | int]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two norms that compute the same."""
        return (self.kind, self.x, self.affine, tuple(sorted(self.attributes.items())))


def canonical_norm(node: ir.Node | None) -> Norm | None:
    """The parts of a node that `RULES` has brought to canonical form, else None."""
    if node is None:
        return None
    epsilon = attribute(node, "epsilon", 1e-5)
    x, *affine = node.inputs
    bound = [v for v in (x, *affine) if v is not None]
    if not all(spans(v, bound[0]) for v in bound[1:]):
        return None
    match node.domain, node.op_type:
        case "", "LayerNormalization":
            canonical = attribute(node, "axis", -1) == -1 and len(bound) == 3
            if not canonical or attribute(node, "stash_type", 1) != 1:
                return None
            return Norm(node, "LayerNorm", bound[0], tuple(bound[1:]), {"epsilon": epsilon})
        case "onnx_fuse", "RMSNormalization":
            attributes = {"epsilon": epsilon, "stash_type": attribute(node, "stash_type", 1)}
            return Norm(node, "RMSNorm", bound[0], tuple(bound[1:]), attributes)
    return None


# ---- canonicalization ------------------------------------------------------------------------


def _native(rw: Rewriter, node: ir.Node) -> bool:
    """Node forms: bias bound, axis -1, no outputs nobody reads."""
    x, scale = node.inputs[0], node.inputs[1]
    size = rank(x)
    axis = attribute(node, "axis", -1)
    last = axis == -1 or (size is not None and axis == size - 1)
    if not last or node.domain or rank(scale) != 1 or x is None or scale is None:
        return False
    if node.op_type == "RMSNormalization":
        op = Builder()
        centred, size, stash = _EXACT.centred(x), dim(scale, 0), attribute(node, "stash_type", 1)
        if x.dtype != scale.dtype or not spans(scale, x):
            return rw.refuse("RMSNormalization", [node], "its scale is of another type or width")
        if centred is not None and size and stash == 1 and x.dtype == ir.DataType.FLOAT:
            # What exporters make of a LayerNorm by hand; in 16 bits the deviation is rounded first.
            n = node.outputs[0]
            n, bias = _affine(n, "Add", size) or (n, rw.zeros(scale, size))
            epsilon = attribute(node, "epsilon", 1e-5)
            y = op.LayerNormalization(centred, scale, bias, axis=-1, epsilon=epsilon)
            return rw.replace(n.producer() or node, op, [n], [y])
        if x.dtype == ir.DataType.DOUBLE:
            stash = ir.DataType.DOUBLE.value  # onnxruntime computes doubles in nothing less
        epsilon = attribute(node, "epsilon", 1e-5)
        y = op.RMSNormalization(x, scale, domain=FUSE, epsilon=epsilon, stash_type=stash)
        return rw.replace(node, op, [node.outputs[0]], [y])
    changed = _widened(rw, node, x)
    scale = node.inputs[1] or scale
    while len(node.outputs) > 1 and not consumers(node.outputs[-1]):
        if node.outputs[-1].is_graph_output():
            break
        node.resize_outputs(len(node.outputs) - 1)
        changed = True
    width = dim(scale, 0)
    if (len(node.inputs) < 3 or node.inputs[2] is None) and width is not None:
        # onnxruntime dies of a function whose LayerNormalization has no bias (1.22 to 1.31).
        node.resize_inputs(3)
        node.replace_input_with(2, rw.zeros(scale, width))
        changed = True
    if axis != -1:
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
        changed = True
    return changed


def _widened(rw: Rewriter, node: ir.Node, x: ir.Value) -> bool:
    """Expand a scale and a bias of one number to the width of x, where that is known."""
    width, op, changed = dim(x, -1), Builder(), False
    if width is None or width == 1 or node.graph is None:
        return False
    for i, value in enumerate(node.inputs[1:], 1):
        if value is None or rank(value) != 1 or dim(value, 0) != 1:
            continue
        array = None if rw.training else const_array(value)
        if array is None:
            wide = op.Expand(value, op.constant([width]))
        else:
            wide = rw.initializer(f"{value.name}x{width}", np.repeat(array, width))
        node.replace_input_with(i, wide)
        if array is not None:
            freeze([value])
        changed = True
    node.graph.insert_before(node, op.nodes)
    return changed


@dataclass(frozen=True)
class _Reader:
    """Reads a norm that is written out; a `loose` one reads near misses too.

    Those have a Cast within, which rounds to fewer bits, or computes in more, than the fused norm
    does, or a constant that raises the rank.
    """

    loose: bool = False

    def number(self, node: ir.Node, index: int) -> float | None:
        return scalar(node.inputs[index]) if self.loose else number(node, index)

    def without_casts(self, value: ir.Value | None) -> ir.Value | None:
        """`value`, if loose before any casts between float types."""
        ways = ("Cast", "Identity") if self.loose else ("Identity",)
        while (node := producer(value, *ways)) is not None and is_float(node.inputs[0]):
            value = node.inputs[0]
        return value

    def same(self, a: ir.Value | None, b: ir.Value | None) -> bool:
        """Whether these are one value, or one value cast to one type."""
        a, b = self.without_casts(a), self.without_casts(b)
        if a is b:
            return a is not None
        casts = [producer(v, "Cast") for v in (a, b)]
        first, second = casts
        if first is None or second is None or first.inputs[0] is not second.inputs[0]:
            return False
        return first.outputs[0].dtype == second.outputs[0].dtype

    def mean(self, value: ir.Value | None) -> ir.Value | None:
        """What `value` is the last-axis mean of."""
        value = self.without_casts(value)
        divided = producer(value, "Div")
        if divided is None:
            return self._reduced(value, "ReduceMean")
        x = self._reduced(divided.inputs[0], "ReduceSum")
        return x if dim(x, -1) is not None and self.number(divided, 1) == dim(x, -1) else None

    def _reduced(self, value: ir.Value | None, op_type: str) -> ir.Value | None:
        """What `value` is a reduction of, over the last axis, which is kept or put back."""
        node, kept = producer(value, op_type), 1
        view = producer(value, "Reshape", "Unsqueeze")
        if view is not None and value is not None and value.shape and view.inputs[0] is not None:
            rows = view.inputs[0].shape
            node, kept = producer(view.inputs[0], op_type), 0
            if rows is None or (*rows, 1) != tuple(value.shape) or None in map(_named, rows):
                return None
        if node is None or attribute(node, "keepdims", 1) != kept or len(node.inputs) < 2:
            return None
        axes, size = constant_ints(node.inputs[1]), rank(node.inputs[0])
        last = axes in ([-1], [size - 1] if size is not None else None)
        return node.inputs[0] if last else None

    def square(self, value: ir.Value | None) -> ir.Value | None:
        """What `value` is the square of."""
        node = producer(self.without_casts(value), "Mul", "Pow")
        if node is None:
            return None
        a, b = node.inputs[0], node.inputs[1]
        squared = self.same(a, b) if node.op_type == "Mul" else self.number(node, 1) == 2.0
        return a if squared else None

    def centred(self, value: ir.Value | None) -> ir.Value | None:
        """The x of x - mean(x)."""
        sub = producer(self.without_casts(value), "Sub")
        if sub is None or not self.same(self.mean(sub.inputs[1]), sub.inputs[0]):
            return None
        return sub.inputs[0]

    def found(self, node: ir.Node) -> _Found | None:
        """The norm whose sqrt(mean(d²) + epsilon) this Sqrt or Pow is."""
        if node.op_type == "Pow" and self.number(node, 1) not in (0.5, -0.5):
            return None
        variance, epsilon = node.inputs[0], 0.0  # exporters leave out an Add of next to nothing
        if (add := producer(variance, "Add")) is not None:
            numbers = [self.number(add, i) for i in (0, 1)]
            at = 1 if numbers[1] is not None else 0
            if (found := numbers[at]) is None:
                return None
            variance, epsilon = add.inputs[1 - at], found
        deviation = self.square(self.mean(variance))
        if deviation is None:
            return None
        centred = self.centred(deviation)
        inverse = node.op_type == "Pow" and self.number(node, 1) == -0.5

        def is_deviation(value: ir.Value | None) -> bool:
            """The deviation may be computed twice: for the variance, and to be divided."""
            if centred is None or self.same(value, deviation):
                return self.same(value, deviation)
            return self.same(self.centred(value), centred)

        n = self._normalized(node.outputs[0], is_deviation, inverse)
        x = centred if centred is not None else deviation
        return None if n is None else _Found(n, x, epsilon, centred is not None)

    def _normalized(
        self, root: ir.Value, is_deviation: Callable[[ir.Value | None], bool], inverse: bool
    ) -> ir.Value | None:
        """d / std in either spelling, from std (or 1/std) upward."""
        values = [(root, inverse)]
        while values:
            value, inverted = values.pop()
            for user in consumers(value):
                a, b = (user.inputs[0], user.inputs[1]) if len(user.inputs) == 2 else (None, None)
                match "" if user.domain else user.op_type:
                    case "Cast" | "Identity" if self.loose or user.op_type == "Identity":
                        values.append((user.outputs[0], inverted))
                    case "Reciprocal" if not inverted:
                        values.append((user.outputs[0], True))
                    case "Div" if not inverted and b is value:
                        if is_deviation(a):
                            return user.outputs[0]
                        if self.number(user, 0) == 1.0:
                            values.append((user.outputs[0], True))
                    case "Mul" if inverted and is_deviation(other_operand(user, value)):
                        return user.outputs[0]
        return None


@dataclass(frozen=True)
class _Found:
    """A norm that is written out: n = x / sqrt(mean(x²) + epsilon), or of x - mean(x) `centred`."""

    n: ir.Value
    x: ir.Value
    epsilon: float
    centred: bool

    @property
    def name(self) -> str:
        return "LayerNormalization" if self.centred else "RMSNormalization"


_EXACT, _LOOSE = _Reader(), _Reader(loose=True)
_NEAR = "it contains a Cast or a constant of more axes, but the fused norm has one type and rank"


def _named(size: int | ir.SymbolicDim) -> int | str | None:
    """A size that can be compared, or None."""
    return size.value if isinstance(size, ir.SymbolicDim) else size


def _decomposed(rw: Rewriter, node: ir.Node) -> bool:
    """Recognize sqrt(mean(d²) + epsilon): d = x - mean(x) makes a LayerNorm, d = x an RMSNorm."""
    if node.domain:
        return False
    found = _EXACT.found(node)
    if found is not None:
        return _build(rw, node, found)
    found = _LOOSE.found(node)
    if found is not None:
        rw.refuse(found.name, [node], _NEAR)
    return False


def _affine(value: ir.Value, op_type: str, width: int | None) -> tuple[ir.Value, ir.Value] | None:
    """(result, operand) when the only use of `value` is a Mul or Add by a vector of the row."""
    node = sole_consumer(value)
    if node is None or node.domain or node.op_type != op_type:
        return None
    operand = other_operand(node, value)
    if operand is None or rank(operand) != 1 or not is_constant(operand):
        return None
    return (node.outputs[0], operand) if width is not None and dim(operand, 0) == width else None


def _computes(found: _Found) -> str:
    """Why the fused norm would not compute what is written out; "" if it would.

    LayerNormalization has no other stash_type than float32 in onnxruntime, epsilon is a float32.
    """
    dtype = found.x.dtype
    if dtype != ir.DataType.FLOAT and (found.centred or dtype != ir.DataType.DOUBLE):
        name = dtype.name.lower() if dtype is not None else "an unknown type"
        return f"it is computed in {name}, and {found.name} computes in float32"
    if float(np.float32(found.epsilon)) != found.epsilon:
        return (
            f"its epsilon {found.epsilon} is a double that no float32, as the attribute is, holds"
        )
    return ""


def _build(rw: Rewriter, node: ir.Node, found: _Found) -> bool:
    x, width, centred = found.x, dim(found.x, -1), found.centred
    if not width:
        return rw.refuse(found.name, [node], "the number of its columns is not known")
    if reason := _computes(found):
        return rw.refuse(found.name, [node], reason)
    last, back, before = found.n, sole_consumer(found.n), producer(x, "Cast")
    source = before.inputs[0] if before is not None else None
    if back is not None and back.op_type == "Cast" and source is not None:
        narrow = source.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        if narrow and back.outputs[0].dtype == source.dtype and x.dtype == ir.DataType.FLOAT:
            # From 16 bits and back before the affine part: what stash_type = float32 means.
            last, x = back.outputs[0], source
    dtype = last.dtype
    if dtype is None or x.dtype != dtype:
        return False
    scale = _affine(last, "Mul", width)
    last = scale[0] if scale else last
    shift = _affine(last, "Add", width) if centred else None
    last = shift[0] if shift else last
    if scale:
        weight = scale[1]
    else:
        stem = f"onex{np.dtype(dtype.numpy()).name}x{width}"
        weight = rw.initializer(stem, np.ones(width, dtype.numpy()))
    op = Builder()
    if centred:
        bias = shift[1] if shift else rw.zeros(last, width)
        y = op.LayerNormalization(x, weight, bias, axis=-1, epsilon=found.epsilon)
    else:
        stash = ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        y = op.RMSNormalization(
            x, weight, domain=FUSE, epsilon=found.epsilon, stash_type=int(stash)
        )
    maker = last.producer()
    assert maker is not None
    return rw.replace(maker, op, [last], [y])


# ---- fusion ----------------------------------------------------------------------------------


def _skip(rw: Rewriter, node: ir.Node) -> bool:
    """Residual add + norm, where no Gemm has taken the norm over."""
    norm = canonical_norm(node)
    add = producer(norm.x, "Add") if norm else None
    if norm is None or add is None or len(node.outputs) > 1:
        return False
    a, b = add.inputs[0], add.inputs[1]
    if a is None or b is None or rank(a) != rank(b) or is_constant(a) or is_constant(b):
        return False
    if rank(a) is None:
        return rw.refuse("SkipLayerNorm", [add, node], "the rank of the residual is not known")
    if any(v.producer() is not None for v in norm.affine):
        return rw.refuse("SkipLayerNorm", [add, node], "its scale is computed in the graph")
    for i in range(rank(a) or 0):
        if dim(a, i) != dim(b, i) and dim(a, i) is not None and dim(b, i) is not None:
            return rw.refuse("SkipLayerNorm", [add, node], "the residual is broadcast")
    op = Builder()
    name = f"Skip{norm.kind}"
    y, s = op.node(name, [a, b, *norm.affine], outputs=2, domain=FUSE, attributes=norm.attributes)
    return rw.replace(add, op, [add.outputs[0], node.outputs[0]], [s, y])


CANONICAL = (
    Rule("Norm", 0, ("LayerNormalization", "RMSNormalization"), _native, conditions="ranks sizes"),
    Rule(
        "Norm",
        0,
        ("Sqrt", "Pow"),
        _decomposed,
        conditions="constants weights types ranks sizes body",
    ),
)
SKIP = Rule(
    "SkipLayerNorm",
    1,
    ("LayerNormalization", "RMSNormalization"),
    _skip,
    conditions="types ranks body",
)
