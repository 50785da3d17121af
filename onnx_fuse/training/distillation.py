"""Distillation: a loss that holds the graph of a teacher, and compares its outputs with ours."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from numbers import Real

import onnx_ir as ir

from onnx_fuse import rewrite
from onnx_fuse.autodiff import Emitter
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import add_input
from onnx_fuse.ir.constants import Model
from onnx_fuse.ops.loss import class_axis
from onnx_fuse.ops.rules import is_float
from onnx_fuse.session import load
from onnx_fuse.training.losses import Term

_DIVERGENCE = """p = Softmax <axis: int = {axis}> (b / t)
c = LogSoftmax <axis: int = {axis}> (b / t) - LogSoftmax <axis: int = {axis}> (a / t)
ReduceMean <keepdims = 0> (ReduceSum <keepdims = 0> (Where(p > 0, p * c, 0), [{axis}])) * (t * t)"""
_SQUARES = "d = a - b; ReduceMean <keepdims = 0> (d * d)"


def distilled(
    model: ir.Model,
    teacher: Model,
    weights: Mapping[str, float] | None,
    temperature: float | None,
    level: int,
) -> Term:
    """The weighted sum of what a teacher's outputs differ by from the model's of the same names.

    Inputs of the teacher that have the name of one of the model's are those. `weights` is by
    output; None is the first output that both have. With a `temperature` T, outputs are scores, and
    the loss is T² · KL(softmax(teacher / T) || softmax(model / T)), the mean over all rows; without
    one it is the mean of the squared differences. `level` is that of the teacher's fusions. Raises
    UsageError where outputs or numbers do not fit.
    """
    if temperature is not None and not 0 < temperature < inf:
        raise UsageError(f"the temperature is {temperature!r}: it must be above 0, or None")
    part = load(teacher)
    rewrite.optimize(part, level=level)
    graph, op = part.graph, Emitter(part)
    ours = {str(v.name): v for v in model.graph.outputs if is_float(v)}
    both = {str(v.name): v for v in graph.outputs if is_float(v) and v.name in ours}
    if not both:
        raise UsageError("the teacher has no output of floats with the name of one of the model's")
    chosen = {next(iter(both)): 1.0} if weights is None else dict(weights)
    if not chosen:
        raise UsageError("distill names no output: leave it out for the first that both have")
    for name in chosen.keys() - both.keys():
        raise UsageError(
            f"the model and the teacher have no output of floats '{name}' in common: they have "
            f"{', '.join(both)}"
        )
    for name, weight in chosen.items():
        if not (isinstance(weight, Real) and isfinite(weight)):
            raise UsageError(f"distill gives '{name}' the weight {weight!r}: it must be a number")
    _adopt_types(op, graph, {str(v.name): v for v in model.graph.inputs})
    terms = []
    for name, weight in chosen.items():
        b, like = both[name], ours[name]
        if like.shape is None:
            raise UsageError(f"the rank of the output '{name}' is not known")
        if b.shape is not None and not _may_be_equal(b.shape, like.shape):
            raise UsageError(
                f"the output '{name}' has the shape {b.shape} in the teacher and {like.shape} in "
                "the model: they must be equal"
            )
        b.name = op.fresh(f"teacher/{name}")
        a = add_input(graph, name, like.type, like.shape)
        b = op.CastLike(b, a)
        axis = class_axis(len(like.shape), {})
        text = _SQUARES if temperature is None else _DIVERGENCE.format(axis=axis)
        terms.append(op.Mul(op.formula(text, a=a, b=b, t=temperature or 1.0), float(weight)))
    total = op.node("Sum", terms, outputs=[op.fresh("distillation")])
    total.type, total.shape = next(iter(ours[name].type for name in chosen)), ir.Shape([])
    graph.extend(op.nodes)
    graph.outputs.clear()
    graph.outputs.append(total)
    return Term(part)


def _may_be_equal(a: ir.Shape, b: ir.Shape) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(
        x == y or not (isinstance(x, int) and isinstance(y, int)) for x, y in pairs
    )


def _adopt_types(op: Emitter, graph: ir.Graph, inputs: Mapping[str, ir.Value]) -> None:
    """Let the teacher read floats in the types of the model's inputs."""
    for value in graph.inputs:
        fed = inputs.get(str(value.name))
        if fed is None or fed.dtype == value.dtype or not (is_float(fed) and is_float(value)):
            continue
        wide = op.Cast(value, to=int(value.dtype or ir.DataType.FLOAT))
        ir.convenience.replace_all_uses_with(value, wide)
        wide.producer().replace_input_with(0, value)
        value.type = fed.type
        graph.insert_before(graph[0], op.nodes)
        op.nodes = []
