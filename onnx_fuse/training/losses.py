"""What a step minimizes: losses by name, by an output, by an ONNX model or function; their sum."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse import autodiff
from onnx_fuse.arrays import Array
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import DataError, ModelError, UsageError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import add_initializer, add_input, extents, required
from onnx_fuse.ir.copying import Copier
from onnx_fuse.ops.loss import LOSSES, class_axis, ignored_label
from onnx_fuse.ops.rules import cast_to, is_float, typed

Given: TypeAlias = Any
"""A loss: its name; the name of a scalar output; or a path, bytes, ModelProto, FunctionProto,
onnx_ir.Model or onnxscript function that computes it."""


@dataclass(frozen=True)
class Target:
    """An output of the model and the labels that a loss compares it with."""

    logits: str
    """The output that the loss is computed from."""
    labels: str
    """The input of labels."""
    classes: int = 0
    """The number of classes where labels are class numbers, otherwise 0."""
    class_axis: int = 0
    """The axis of `logits` that counts classes."""
    ignored: int = -100
    """The label that does not count."""
    symbols: int = 0
    """The number of classes where a row of labels is a sequence of them, otherwise 0."""

    @property
    def checked(self) -> int:
        """The number of classes where labels are numbers of them, otherwise 0."""
        return self.classes or self.symbols

    def check(self, labels: Array, first: int = 0) -> None:
        """Raise DataError for one of `labels` that is neither a class nor the ignored label.

        `first` is the number of the first row, for the message.
        """
        classes = self.checked
        # as numbers without a sign, those below 0 are the largest
        unsigned = labels.view(np.uint64) if labels.dtype == np.int64 and labels.size else None
        if unsigned is not None and int(unsigned.max()) < classes:
            return
        wrong = ((labels < 0) | (labels >= classes)) & (labels != self.ignored)
        if wrong.any():
            place = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), labels.shape)]
            label = labels[tuple(place)]
            place[0] += first
            raise DataError(
                f"'{self.labels}' holds {label} at {place}: the model has the classes 0 to "
                f"{classes - 1}"
            )


@dataclass(frozen=True)
class Term:
    """One of several losses, whose weighted sum is minimized."""

    loss: Given
    """The loss: a name such as cross_entropy or mse, a scalar output, or an ONNX model or
    function. The inputs of a model that have the name of an output are that output; where
    there is none, the first one is `output`. Those that have the name of an input are that input.
    All others are fed, and its first output is the loss, a scalar."""
    output: str | None = None
    """The output that the loss is computed from; the default is the first."""
    weight: float = 1.0
    """The factor of the loss in the sum."""
    labels: str = ""
    """The name of the input of labels. Terms may share one. The default is "labels"; where terms
    do not share it, the second one's is "labels_1"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a loss by name, such as ignore_index and label_smoothing."""

    @property
    def named(self) -> bool:
        """Whether the loss has a name, of its own or of an output."""
        return isinstance(self.loss, str) and not self.loss.endswith(".onnx")

    def to_json(self) -> dict[str, Any]:
        """The term as JSON values; a model is known by a digest of its content."""
        loss = self.loss
        if not self.named:
            digest = hashlib.sha256(to_proto(load(_proto(loss, {}, ""))).SerializeToString())
            loss = f"sha256 {digest.hexdigest()}"
        options = {
            k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in self.options.items()
        }
        return {
            **{"loss": loss, "output": self.output, "weight": self.weight},
            **{"labels": self.labels, "options": options},
        }


def terms(
    loss: Given | Sequence[Term], options: Mapping[str, Any] | None, output: str | None
) -> list[Term]:
    """The terms of a loss, which may be one alone with its `options` and `output`."""
    if not isinstance(loss, list | tuple):
        return [Term(loss, output, options=dict(options or {}))]
    if not loss or not all(isinstance(term, Term) for term in loss):
        raise UsageError("several losses are a list of Term, each with its output and weight")
    if options or output:
        raise UsageError("each Term has its own output and options")
    return list(loss)


def attach(
    model: ir.Model,
    summands: Sequence[Term],
    shares: Sequence[ir.Value | None] = (),
    fused: bool = False,
) -> tuple[ir.Value, list[ir.Value], list[Target]]:
    """Append the weighted sum of losses to a model, in place.

    `shares` are scalars that multiply the losses, where a batch is one of several ranks' parts.
    `fused` allows operators of ours.
    Returns the sum, the new inputs that are fed, and what the losses by name compare. Raises
    UsageError and ModelError for a loss that does not fit the model.
    """
    before = set(model.graph.inputs)
    outputs = list(model.graph.outputs)
    values, targets = [], []
    for term in summands:
        by_name = {v.name: v for v in outputs}
        if term.output is not None and term.output not in by_name:
            names = ", ".join(str(v.name) for v in outputs)
            raise UsageError(f"the model has no output '{term.output}': it has {names}")
        logits = by_name[term.output] if term.output is not None else outputs[0]
        if term.named:
            value, label = autodiff.attach_loss(
                model, term.loss, dict(term.options), output=term.output, fused=fused
            )
            if label is not None:
                label = _shared(model, label, term.labels)
                targets.append(_target(term, logits, label))
        else:
            value = _attach_model(model, term, outputs, logits, before)
        values.append(value)
    op = autodiff.Emitter(model)
    op.stem = "loss"
    for i, share in enumerate(shares):
        if share is not None:
            product = op.Mul(values[i], cast_to(op, share, values[i]))
            values[i] = typed(product, values[i], ir.Shape([]))
    total = values[0]
    if len(values) > 1 or summands[0].weight != 1:
        parts = [
            typed(op.Mul(cast_to(op, value, total), term.weight), total, ir.Shape([]))
            for value, term in zip(values, summands, strict=True)
        ]
        total = op.node("Sum", parts, outputs=[op.fresh("loss")])
        typed(total, values[0], ir.Shape([]))
    model.graph.extend(op.nodes)
    return total, [v for v in model.graph.inputs if v not in before], targets


def _shared(model: ir.Model, label: ir.Value, name: str) -> ir.Value:
    """The input of labels under its name, which may be that of an input that is there already."""
    if not name or label.name == name:
        return label
    graph = model.graph
    for value in graph.inputs:
        if value is not label and value.name == name:
            if value.dtype != label.dtype:
                raise UsageError(f"'{name}' is {value.dtype}, but a loss reads {label.dtype} there")
            ir.convenience.replace_all_uses_with(label, value)
            graph.inputs.remove(label)
            return value
    label.name = name
    return label


def _target(term: Term, logits: ir.Value, label: ir.Value) -> Target:
    classes = axis = 0
    kind, names = LOSSES[term.loss].labels, (str(logits.name), str(label.name))
    if kind in ("classes", "sequence") and logits.shape is not None:
        axis = class_axis(len(logits.shape), term.options if kind == "classes" else {})
        count = logits.shape[axis]
        classes = count if isinstance(count, int) else 0
    if kind == "sequence":
        return Target(*names, ignored=ignored_label(term.options), symbols=classes)
    return Target(*names, classes, axis, ignored_label(term.options))


# ---- losses as ONNX ----------------------------------------------------------------------------


def _proto(loss: Given, outputs: Mapping[str, ir.Value], first: str) -> Any:
    """The loss as `load` takes it. Inputs of functions that have no type take that of an output."""
    if isinstance(loss, onnx.FunctionProto):
        proto = onnx.helper.make_model(
            onnx.helper.make_graph(
                [onnx.helper.make_node(loss.name, loss.input, loss.output, domain=loss.domain)],
                loss.name,
                [onnx.ValueInfoProto(name=name) for name in loss.input],
                [onnx.ValueInfoProto(name=name) for name in loss.output[:1]],
            ),
            functions=[loss],
            opset_imports=[*loss.opset_import, onnx.helper.make_opsetid(loss.domain, 1)],
        )
    elif hasattr(loss, "to_model_proto"):
        proto = loss.to_model_proto()
    elif isinstance(loss, str | os.PathLike | bytes | onnx.ModelProto | ir.Model):
        return loss
    else:
        raise UsageError(
            f"a loss of type {type(loss).__name__}: give a name, a model or a function"
        )
    for value in proto.graph.input:
        like = outputs.get(value.name) or outputs.get(first)
        if not value.type.tensor_type.elem_type:
            value.CopyFrom(_typed(value.name, like))
    for value in proto.graph.output:
        value.type.tensor_type.elem_type = (
            value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
        )
    return proto


def _typed(name: str, like: ir.Value | None) -> onnx.ValueInfoProto:
    """A new input of the type and shape of an output of the model."""
    dtype = ir.DataType.FLOAT if like is None or like.dtype is None else like.dtype
    shape = None
    if like is not None and like.shape is not None:
        shape = extents(like.shape)
    return onnx.helper.make_tensor_value_info(name, dtype.value, shape)


def _attach_model(
    model: ir.Model,
    term: Term,
    outputs: Sequence[ir.Value],
    first: ir.Value,
    inputs: Collection[ir.Value],
) -> ir.Value:
    """Append the graph of a loss to the model, whose own `inputs` it may read, and return its first
    output.
    """
    by_name = {str(v.name): v for v in outputs}
    part = load(_proto(term.loss, by_name, str(first.name)))
    graph, op = model.graph, autodiff.Emitter(model)
    bound = {v: by_name[str(v.name)] for v in part.graph.inputs if str(v.name) in by_name}
    if not bound:
        if not part.graph.inputs:
            raise ModelError("the loss reads no input")
        bound[part.graph.inputs[0]] = first
    args = {str(v.name): v for v in inputs}
    bound |= {v: args[str(v.name)] for v in part.graph.inputs if v.name in args and v not in bound}
    for value, output in bound.items():
        if value.dtype != output.dtype:
            raise ModelError(
                f"the loss reads '{value.name}' as {value.dtype}, but the model's '{output.name}' "
                f"is {output.dtype}"
            )
    if not part.graph.outputs:
        raise ModelError("the model of the loss has no output: it needs one, which is the loss")
    loss = part.graph.outputs[0]
    fed = [v for v in part.graph.inputs if v not in bound]
    for domain, version in part.graph.opset_imports.items():
        graph.opset_imports[domain] = max(version, graph.opset_imports.get(domain, 0))
    copier = Copier(
        values=dict(bound),
        fresh=lambda name: op.fresh(f"loss/{name}"),
        names_nodes=True,
        typed=True,
    )
    for value in fed:
        name = op.fresh(term.labels if term.labels and len(fed) == 1 else str(value.name))
        copier.values[value] = add_input(graph, name, value.type, value.shape)
    for old in part.graph.initializers.values():
        name = op.fresh(f"loss/{old.name}")
        copier.values[old] = add_initializer(graph, name, required(old.const_value).numpy())
    graph.extend([copy for node in part.graph for copy in copier.copy(node)])
    loss = copier.values[loss] or loss
    graph.outputs.append(loss)
    infer_shapes(model)
    if not is_float(loss) or loss.shape is None or len(loss.shape):
        raise ModelError(
            f"the first output of the loss is {loss.dtype} of shape {loss.shape}: it must be a "
            "float scalar"
        )
    return loss
