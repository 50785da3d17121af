"""The loss of a model, its parameters, and the file of its gradients."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.autodiff.emit import Emitter, roots
from onnx_fuse.autodiff.load import load
from onnx_fuse.autodiff.walk import backward, open_sizes_not_shown, without_gradient
from onnx_fuse.errors import ModelError, NoGradientWarning, UsageError, listed, unknown
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import (
    Builder,
    add_initializer,
    add_input,
    insert_behind,
    rank,
    reads,
    rename_shadowing_values,
    required,
)
from onnx_fuse.ir.constants import DEFAULT, MAP_TYPE, Model
from onnx_fuse.ir.traits import SIZE_INPUTS, only_sizes
from onnx_fuse.ops.loss import LOSSES, label_value
from onnx_fuse.ops.rules import CONSTANT
from onnx_fuse.ops.shape_ops import may_be_float
from onnx_fuse.rewrite.canonicalize import canonicalize
from onnx_fuse.rewrite.constants import lift_parameters, starts_recurrence
from onnx_fuse.rewrite.packed_weights import pack_values, parts, unpack_values

GRADIENT_OF = "onnx_fuse.gradient_of"
"""Key of the metadata of an input or output that is a gradient: the name of what it is one of."""


def gradient_names(values: Sequence[ir.Value]) -> dict[str, str]:
    """The names of the gradients among a graph's inputs or outputs, by what they are gradients of.

    A name is not always "<name>.grad": that may be taken, or need quoting in a shell. Where nothing
    is noted, as in files of older versions, the names that end so are those of gradients.
    """
    noted = {v.metadata_props.get(GRADIENT_OF): v.name or "" for v in values}
    if any(of is not None for of in noted):
        return {of: name for of, name in noted.items() if of is not None}
    names = [v.name or "" for v in values]
    return {name.removesuffix(".grad"): name for name in names if name.endswith(".grad")}


_COMPUTED_NAME = re.compile(r"(val|(c_)?lifted_tensor)_\d+|onnx::\w+|.*Constant(_\d+)?_output_\d+")


def attach_loss(
    model: ir.Model,
    loss: str,
    options: Mapping[str, Any] | None = None,
    *,
    output: str | None = None,
    fused: bool = False,
) -> tuple[ir.Value, ir.Value | None]:
    """Append the loss named `loss` of an output (the first); returns it and its new label input.

    `loss` is a name of `ops.loss.LOSSES`, or a scalar output of the model that is the loss already.
    Options that are arrays (weight, pos_weight) become initializers. Those that name inputs of
    lengths become inputs where the model has none of the name. `fused` allows operators of ours.
    Raises UsageError.
    """
    graph, settings = model.graph, dict(options or {})
    named = {v.name: v for v in graph.outputs}
    if loss not in LOSSES:
        if loss not in named:
            raise UsageError(
                f"{unknown('loss', loss, LOSSES)}, or a scalar output of the model: "
                f"{', '.join(str(n) for n in named)}"
            )
        return named[loss], None
    if output is not None and output not in named:
        raise UsageError(f"the model has no output '{output}': it has {', '.join(map(str, named))}")
    logits = named[output] if output is not None else graph.outputs[0]
    row, op = LOSSES[loss], Emitter(model, fused=fused)
    op.stem = "loss"
    row.check(loss, settings)
    rest = [v for v in graph.outputs if v is not logits]
    for key in row.outputs:
        chosen = settings.get(key)
        if (not rest) if chosen is None else (chosen not in named):
            raise UsageError(
                f"{loss} reads {1 + len(row.outputs)} outputs of the model, which has "
                f"{', '.join(map(str, named))}: name them by {', '.join(row.outputs)}"
            )
        settings[key] = rest.pop(0) if chosen is None else named[chosen]
    label = label_value(logits, loss, op.fresh("labels"), settings)
    if label is not None:
        graph.inputs.append(label)
    for key in row.lengths:
        if settings.get(key) is not None:
            settings[key] = _lengths(graph, op, settings[key], required(label))
    for key in ("weight", "pos_weight"):
        if settings.get(key) is not None:
            dtype = (logits.dtype or ir.DataType.FLOAT).numpy()
            array = np.asarray(settings[key]).astype(dtype)
            settings[key] = add_initializer(graph, op.fresh(f"loss.{key}"), array)
    value = LOSSES[loss].build(op, logits, label, settings)
    value = op.node("Identity", [value], outputs=[op.fresh("loss")])
    value.type, value.shape = ir.TensorType(logits.dtype or ir.DataType.FLOAT), ir.Shape(())
    graph.extend(op.nodes)
    graph.outputs.append(value)
    return value, label


def _lengths(graph: ir.Graph, op: Emitter, name: str, label: ir.Value) -> ir.Value:
    """The input of this name as int64 [N]; a new one where there is none."""
    value = next((v for v in graph.inputs if v.name == name), None)
    if value is None:
        value = add_input(graph, name, ir.DataType.INT64, label.shape and label.shape[:1])
    return value if value.dtype == ir.DataType.INT64 else op.Cast(value, to=7)


def trainable(model: ir.Model) -> list[ir.Value]:
    """The float initializers that are the model's own: what `wrt` means where nothing is said.

    What reaches the outputs only as sizes, such as the scales of a Resize, is none.
    """
    sizes = only_sizes(model.graph)
    return [
        v
        for v in model.graph.initializers.values()
        if v.dtype and _differentiable(v) and CONSTANT not in v.metadata_props and v not in sizes
    ]


def only_measured(graph: ir.Graph) -> dict[str, str]:
    """{name: why it has no gradient} of weights that reach the outputs only as sizes.

    The operands of operators that are sizes themselves, such as the scales of a Resize, are none.
    """

    def is_size(node: ir.Node, index: int) -> bool:
        return not node.domain and index in SIZE_INPUTS.get(node.op_type, ())

    return {
        v.name or "": "it only decides sizes"
        for v in only_sizes(graph)
        if v.is_initializer() and _differentiable(v) and CONSTANT not in v.metadata_props
        if is_weight(v) and not all(is_size(*use) for use in v.uses())
    }


def gradient(
    model: Model, wrt: Sequence[str] | None = None, loss: str | None = None, order: int = 1,
    **options: object,
) -> ir.Model:  # fmt: skip
    """Append the backward of a model to it; arguments and errors are those of `api.gradient`."""
    if order not in (1, 2):
        raise UsageError(f"order is {order!r:.20}: it must be 1 or 2")
    result, names, stopped = append_gradients(model, wrt, loss, options)
    notes = without_gradient(stopped)
    if not names:
        why = notes[0] if notes else "it has no weight; name an input, as in wrt=['x'] or --wrt x"
        raise ModelError(f"the model has nothing to differentiate by: {why}")
    for note in notes:
        warnings.warn(note, NoGradientWarning, stacklevel=3)
    if order == 2:
        result, _, stopped = append_gradients(result, names, second=True)
        for note in without_gradient(stopped):  # such a derivative is 0, as of a straight line
            warnings.warn(note, NoGradientWarning, stacklevel=3)
    return result


def append_gradients(
    model: Model,
    wrt: Sequence[str] | None = None,
    loss: str | None = None,
    options: Mapping[str, Any] | None = None,
    second: bool = False,
) -> tuple[ir.Model, list[str], dict[str, str]]:
    """The model with its backward, the names that have a gradient there, and {name: why not}.

    Arguments are those of `api.gradient`, and so are errors, except that there may be no gradient.
    For the `second` one, outputs are the gradients that the model has already.
    """
    model = load(model)
    firsts = gradient_names(model.graph.outputs) if second else {}
    for value in (*model.graph.inputs, *model.graph.outputs) if second else ():
        value.metadata_props.pop(GRADIENT_OF, None)
    wrt = None if wrt is None else listed("wrt", wrt)
    if loss is not None and not isinstance(loss, str):
        raise UsageError(f"loss is {loss!r:.80}: it takes the name of a loss or of an output")
    graph = model.graph
    inputs = list(graph.inputs)
    lift_parameters(model, wrt or ())
    # a batch that was set free at the inputs is still a number in the shapes of outputs
    declared = {y: y.shape for y in graph.outputs if y.producer() is not None}
    for y in declared:
        y.shape = None
    open_sizes_not_shown(graph)
    infer_shapes(model)
    for y, shape in declared.items():
        if y.shape is None and shape is not None:
            y.shape = ir.Shape([None] * len(shape))
    if any(rank(v) is None for node in graph for v in node.outputs if may_be_float(v)):
        canonicalize(model, training=True)  # the sizes a Reshape reads may be computed of constants
        infer_shapes(model)
    holders: dict[str, list[ir.Value]] = {}  # a parameter may be packed, and more than once
    for v in trainable(model):
        for part in parts(v)[1]:
            holders.setdefault(part.name, []).append(v)
    holders.update({str(v.name): [v] for v in graph.inputs if _differentiable(v)})
    stopped = only_measured(graph) if wrt is None else {}
    targets = list(holders) if wrt is None else list(dict.fromkeys(wrt))
    if wrt is None:
        targets = [name for name in targets if all(map(is_weight, holders[name]))]
    for name in targets:
        if name not in holders:
            raise UsageError(_unknown(graph, name))
    dys: dict[ir.Value, ir.Value | None] = {}
    if loss is not None:
        value, _ = attach_loss(model, loss, options)
        dys[value] = None
    else:
        op = Emitter(model)
        by_name = {v.name: v for v in graph.outputs}
        ends = {by_name[name]: f"{_typeable(of)}.vector" for of, name in firsts.items()}
        for y in ends or graph.outputs:
            maker = y.producer()
            if MAP_TYPE in y.meta and maker is not None:
                raise ModelError(
                    f"output '{y.name}' is not a tensor: {maker.op_type} '{maker.name}', its "
                    "node, has no gradient"
                )
            if _differentiable(y) and y not in dys:
                name = ends.get(y, f"{_typeable(y.name)}.grad")
                dy = dys[y] = add_input(graph, op.fresh(name), y.type, y.shape)
                dy.metadata_props[GRADIENT_OF] = y.name or ""
    if not any(map(may_be_float, dys)):
        return model, [], dict.fromkeys(targets, "no output is of a floating-point type")
    values = list(dict.fromkeys(v for name in targets for v in holders[name]))
    groups = _groups(graph, inputs)
    dxs = backward(model, dys, values, stopped=stopped if wrt is None or second else None)
    op = Emitter(model)
    grads: dict[str, tuple[ir.Value, ir.Value]] = {}
    for x in values:
        if x.name in dxs:
            packed = x.is_initializer()
            unpacked = unpack_values(op, x, dxs[x.name]) if packed else {x.name: dxs[x.name]}
            for name, g in unpacked.items():
                grads[name] = (op.Add(grads[name][0], g) if name in grads else g, x)
    if second:
        for name in (n for n in targets if n not in grads):  # no gradient depends on it
            x = holders[name][0]
            sizes = [p.shape for p in parts(x)[1] if p.name == name and not x.is_graph_input()]
            zeros = op.Expand(op.constant(0.0, x.dtype), list(sizes[0])) if sizes else None
            grads[name] = op.zeros_like(x) if zeros is None else zeros, x
    for name in targets:
        if name in grads:
            g, x = grads[name]
            kind = "hvp" if second else "grad"
            out = op.node("Identity", [g], outputs=[op.fresh(f"{_typeable(name)}.{kind}")])
            out.metadata_props[GRADIENT_OF] = name
            out.type, out.shape = x.type, g.shape if x.is_initializer() else x.shape
            graph.outputs.append(out)
    graph.extend(op.nodes)
    if grads:
        _ask_equal_sizes(model, groups)
    for y, shape in declared.items():
        y.shape = shape
    rename_shadowing_values(graph)
    return model, list(grads), stopped


_SPLIT = ("INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL")
"""Types of inputs that are no float and that onnxruntime splits."""


def _groups(graph: ir.Graph, inputs: Sequence[ir.Value]) -> dict[ir.Value, frozenset[ir.Value]]:
    """For each input those that it meets, and that these meet: one node reads results of both."""
    made_of = {x: frozenset([x]) for x in inputs}
    groups = set(made_of.values())
    for node in graph:
        origins = frozenset[ir.Value]().union(*(made_of.get(v, ()) for v in reads(node) if v))
        made_of.update(dict.fromkeys(node.outputs, origins))
        if origins and not any(origins <= group for group in groups):
            joined = {group for group in groups if group & origins}
            groups = groups - joined | {frozenset().union(*joined)}
    return {x: next(group for group in groups if x in group) for x in inputs}


def _ask_equal_sizes(model: ir.Model, groups: Mapping[ir.Value, frozenset[ir.Value]]) -> None:
    """Let a run fail where sizes of one name differ, at a node whose name says so.

    Gradients believe the names of inputs that meet, and onnxruntime does not ask. Of the inputs
    with a name, the one of fewest axes passes through Splits into one part, which has the size of
    another input.
    """
    places: dict[tuple[str, frozenset[ir.Value]], list[tuple[ir.Value, int]]] = {}
    for x in groups:
        counts = x.uses() and (_differentiable(x) or str(x.dtype) in _SPLIT)
        for axis, d in enumerate(x.shape or () if counts else ()):
            if not isinstance(d, int) and d.value:
                places.setdefault((d.value, groups[x]), []).append((x, axis))
    op, asks, passed = Emitter(model), Builder(), dict[ir.Value, ir.Value]()
    asked = {node.name for node in model.graph}  # of a gradient, whose forward asks
    for (symbol, _), named in places.items():
        x, axis = min(named, key=lambda place: len(place[0].shape or ()))
        for other, i in named:
            name = (
                f"axis {axis} of '{x.name}' and axis {i} of '{other.name}' must be equal: "
                f"both are named '{symbol}'"
            )
            if (other, i) != (x, axis) and name not in asked:
                size, part = asks.Shape(other, start=i, end=i + 1), passed.get(x, x)
                passed[x] = asks.Split(part, size, axis=axis)
                asks.nodes[-1].name = name
    for x, part in passed.items():
        readers = [use for use in x.uses() if use.node not in asks.nodes]
        # onnxruntime dies of an InstanceNormalization of an empty tensor that is no input
        safe = [use for use in readers if use.node.op_type != "InstanceNormalization"]
        for node, index in safe or readers:
            node.replace_input_with(index, part)
    op.stem = "sizes"
    for node in asks.nodes:
        op.adopt(node)
    if passed:
        model.graph.insert_before(model.graph[0], asks.nodes)


def open_parameters(model: ir.Model, values: Sequence[ir.Value]) -> list[str]:
    """Turn these initializers into inputs, in place; returns the names of the new inputs.

    An initializer that a pass packed comes to be made by nodes, of inputs that have the original
    parameters' names and shapes.
    """
    graph, op = model.graph, Emitter(model)
    op.stem = "parameters"
    inputs: dict[str, ir.Value] = {}
    for value in values:
        for part in parts(value)[1]:
            if part.name not in inputs:
                shape = ir.Shape(part.shape)
                inputs[part.name] = ir.Value(name=part.name, type=value.type, shape=shape)
    for value in values:
        new = pack_values(op, value, inputs)
        ir.convenience.replace_all_uses_with(value, new, replace_graph_outputs=True)
        del graph.initializers[str(value.name)]
    insert_behind(graph, None, op.nodes)
    graph.inputs.extend(inputs.values())
    return list(inputs)


def is_weight(value: ir.Value) -> bool:
    """Whether a float initializer is a weight: no scalar, mask or first state of a recurrence.

    Exporters keep those among the weights, and constants of one element such as torch's val_73.
    """
    tensor = value.meta.get(DEFAULT, value.const_value if value.is_initializer() else None)
    array = None if tensor is None else tensor.numpy()
    if array is None or array.ndim == 0 or starts_recurrence(value):
        return False
    if array.shape == (1,) and _COMPUTED_NAME.fullmatch(value.name or ""):
        return any(n.op_type not in ("Add", "Div", "Mul", "Pow", "Sub") for n, _ in value.uses())
    limit = 65504 if array.dtype == np.float16 else 1e9
    return bool(array.max(initial=0) < limit and array.min(initial=0) > -limit)


def named_scalars(model: ir.Model) -> dict[str, str]:
    """{name: why it does not train} of float scalars that may be parameters: CLIP's logit_scale.

    Exporters number the constants of formulas, or call them so.
    """
    scalars = [v for v in trainable(model) if v.uses() and v.shape is not None and not v.shape]
    return {
        name: "it is a scalar, which trains only if `trainable` names it"
        for name in (str(v.name) for v in scalars)
        if not (_COMPUTED_NAME.fullmatch(name) or "const" in name.lower())
    }


def scales(graph: ir.Graph) -> set[str]:
    """The names of the initializers that only QuantizeLinear and DequantizeLinear read, as scales.

    They have gradients, and yet are no weights unless named: a usual rate is many times a scale.
    """
    quantizes = ("QuantizeLinear", "DequantizeLinear")
    return {
        v.name or ""
        for v in graph.initializers.values()
        if v.uses() and all(n.op_type in quantizes and i == 1 for n, i in v.uses())
    }


def _differentiable(value: ir.Value) -> bool:
    """Whether a gradient can be asked for or given here; an unknown dtype may be one that can.

    Floats of 8 and 4 bits are codes, as integers of so few bits are: no operator adds them.
    """
    return may_be_float(value) and (value.dtype is None or value.dtype.bitwidth >= 16)


def _typeable(name: str | None) -> str:
    """The name with "_" in place of what needs quoting in a shell."""
    return re.sub(r"[^A-Za-z0-9_.,:/@%+=\[\]-]", "_", name or "")


def _unknown(graph: ir.Graph, name: str) -> str:
    if name in (measured := only_measured(graph)):
        return f"'{name}' has no gradient: {measured[name]}"
    for value in roots(graph):
        if value.name == name:
            return f"'{name}' is of type {value.dtype}: it has no gradient"
    if name in graph.initializers:
        return (
            f"'{name}' is a constant of this model, which has no gradient: a Constant node, or "
            "folded in part. Take gradients before `optimize`, or optimize for training"
        )
    inputs = [v for v in graph.inputs if _differentiable(v)]
    weights = [v for v in graph.initializers.values() if _differentiable(v) and is_weight(v)]
    names = [str(v.name) for v in (*inputs, *weights)]
    listed = f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
    return f"the model has no initializer or input '{name}': it has {listed}"
