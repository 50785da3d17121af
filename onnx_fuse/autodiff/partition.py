"""A graph and its backward as two models: what the first keeps, the second reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.autodiff.emit import Emitter
from onnx_fuse.autodiff.subgraphs import ancestors, draws
from onnx_fuse.autodiff.walk import backward
from onnx_fuse.importer.save import inline
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import Builder, all_nodes, const_array, extents, reads
from onnx_fuse.ir.traits import SIZES, VIEWS
from onnx_fuse.ops.shape_ops import fail, may_be_float
from onnx_fuse.rewrite.canonicalize import clean

_ATTENTION = ("Attention", "Sdpa", "GroupedSdpa")
"""How the names of operators begin whose results are attention's."""
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


@dataclass(frozen=True)
class Partition:
    """The two halves of a graph that is differentiated.

    The first inputs of `backward` are the gradients of the float outputs, in their order; the
    others have the names of outputs of `forward` and of inputs of the graph. Its outputs are the
    gradients of the inputs that were asked for, in that order, but for those in `stopped`.
    """

    forward: ir.Model
    """The graph, with inner values that the backward reads as further outputs."""
    backward: ir.Model
    """The gradients."""
    stopped: Mapping[str, str] = field(default_factory=dict)
    """The inputs that no gradient flows to, with the reason (`backward`)."""


def partition(
    model: ir.Model,
    wrt: Sequence[str],
    *,
    fused: bool = False,
    recompute: bool = False,
    fixed: Collection[str] = (),
    strict: bool = True,
) -> Partition:
    """Differentiate a graph by some of its inputs, and cut it in two.

    Args:
        model: A graph in canonical form (`session.load`). It is not changed.
        wrt: Names of float inputs.
        fused: As in `backward`.
        recompute: Keep nothing: the backward then holds what it needs of the forward, and depends
            on inputs alone, so that it can be differentiated in its turn.
        fixed: Names of outputs that have no gradient, whatever their type.
        strict: Whether each input must have a gradient. Without it, `stopped` has the others.

    Raises:
        ModelError: A node on the way has no gradient; or the backward would draw random numbers
            anew.
    """
    joint = inline(model) if recompute else model.clone()
    graph = joint.graph
    if any(v.type is None for n in graph for v in n.outputs):
        infer_shapes(joint)
    names = [v.name or "" for v in graph.inputs]
    named = {v.name: v for v in graph.inputs}
    op = Emitter(joint)
    dys: dict[ir.Value, ir.Value | None] = {}
    for y in graph.outputs:
        if may_be_float(y) and y not in dys and y.name not in fixed:
            dys[y] = ir.Value(name=op.fresh(f"{y.name}.grad"), type=y.type, shape=y.shape)
    stopped: dict[str, str] = {}
    inputs = [named[name] for name in wrt]
    by_name = backward(joint, dys, inputs, fused=fused, stopped=None if strict else stopped)
    outputs = list(graph.outputs)  # of nodes that may have become their bodies
    gradients: list[ir.Value] = []
    op = Emitter(joint)
    for name in (name for name in wrt if name in by_name):
        g, label = by_name[name], op.fresh(f"{name}.grad")
        if g.producer() is None or g in gradients or g in outputs:
            g = op.node("Identity", [g], outputs=[label])
        g.name, g.type, g.shape = label, named[name].type, named[name].shape
        gradients.append(g)
    graph.extend(op.nodes)
    infer_shapes(joint)  # of what nodes return besides since
    if not recompute:
        _measure_inputs(joint)
    ends = [dy for dy in dys.values() if dy is not None]
    turned = set() if recompute else _turned(graph, outputs)
    saved_values = [] if recompute else _saved(graph, outputs, gradients, set(ends), turned)
    graph.inputs.extend(ends)
    first, saved = ([str(v.name) for v in values] for values in (ends, saved_values))
    named_outputs = [str(v.name) for v in outputs]
    more = [name for name in saved if name not in named_outputs]
    forward = cut(joint, names, [*named_outputs, *more])
    behind = cut(joint, [*first, *names, *saved], [str(g.name) for g in gradients])
    for node in all_nodes(behind.graph):
        if draws(node):
            raise fail(node, "it draws random numbers, and the backward would draw others")
    feeds = behind.graph.inputs
    unread = {v for v in feeds if not v.uses() and not v.is_graph_output()}
    read = [v for v in feeds if v.name in first or v not in unread]
    feeds.clear()
    feeds.extend(read)
    return Partition(forward, behind, stopped)


def _measure_inputs(model: ir.Model) -> None:
    """Let a Shape of an inner value read inputs, where their sizes are known to be its sizes.

    The backward then depends on the shapes of its inputs, and on no numbers among them.
    """
    graph, op = model.graph, Emitter(model)
    axes: dict[str, tuple[ir.Value, int]] = {}
    for value in graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                axes.setdefault(size.value, (value, axis))
    for node in [n for n in graph if n.op_type == "Shape" and not n.domain]:
        measured = node.inputs[0]
        if measured is None or measured.producer() is None or measured.shape is None:
            continue
        end = node.attributes.get_int("end", len(measured.shape))
        names = extents(measured.shape)[slice(node.attributes.get_int("start", 0), end)]
        if not names or any(n is None or (isinstance(n, str) and n not in axes) for n in names):
            continue
        op.stem = node.name or "shape"
        sizes_read = [_size_vector(op, n, axes) for n in names]
        (old,) = node.outputs
        new = sizes_read[0] if len(sizes_read) == 1 else op.Concat(*sizes_read, axis=0)
        new.shape = ir.Shape([len(names)])
        graph.insert_before(node, op.nodes)
        op.nodes = []
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _size_vector(
    op: Emitter, size: int | str | None, axes: Mapping[str, tuple[ir.Value, int]]
) -> Any:
    if isinstance(size, str):
        value, axis = axes[size]
        return op.Shape(value, start=axis, end=axis + 1)
    return op.constant(np.array([size], np.int64))


def _turned(graph: ir.Graph, outputs: Sequence[ir.Value]) -> set[ir.Value]:
    """Transposed results of attention, which the backward reads in place of the results.

    A kernel writes a result in the order in which the forward reads it next, and what passes to the
    backward is dense.
    """
    op, first = Builder(), ancestors(outputs)
    turned_values: set[ir.Value] = set()
    for node in [n for n in graph if n in first and n.op_type == "Transpose" and not n.domain]:
        value, turned = node.inputs[0], node.outputs[0]
        maker = None if value is None else value.producer()
        if value is None or maker is None or not maker.op_type.startswith(_ATTENTION):
            continue
        later = [(n, i) for n, i in value.uses() if n not in first]
        if later and not value.is_graph_output():
            perm = node.attributes.get_ints("perm")
            back = op.Transpose(turned, perm=[perm.index(i) for i in range(len(perm))])
            back.type, back.shape = value.type, value.shape
            for n, i in later:
                n.replace_input_with(i, back)
            graph.insert_after(node, op.nodes)
            op.nodes = []
            turned_values.add(turned)
    return turned_values


def _saved(
    graph: ir.Graph,
    outputs: Sequence[ir.Value],
    gradients: Sequence[ir.Value],
    dys: set[ir.Value],
    turned: set[ir.Value],
) -> list[ir.Value]:
    """The values that pass from the forward to the backward, inputs aside."""
    first = ancestors(outputs)

    def is_view(value: ir.Value | None) -> bool:
        return value not in turned and _is_view(value)

    depends: set[ir.Value] = set(dys)
    for node in graph:
        if any(v in depends for v in reads(node)):
            depends.update(node.outputs)
    needed, counted = ancestors(gradients), _counted(graph)
    saved: dict[ir.Value, None] = {}
    sizes: dict[ir.Value, ir.Value | None] = {}
    seen: set[ir.Value] = set()
    todo = [v for v in gradients if v not in depends]
    for node in graph:
        if node in needed and any(v in depends for v in node.outputs):
            todo += [v for v in reads(node) if v is not None and v not in depends]
    while todo:
        value = todo.pop()
        maker = value.producer()
        if value in seen or maker is None:
            continue
        seen.add(value)
        if maker.op_type in SIZES and not maker.domain and not is_view(maker.inputs[0]):
            sizes[value] = maker.inputs[0]
        elif maker in first and not is_view(value) and value not in counted:
            if maker.op_type != "Constant":
                saved[value] = None
        else:
            todo += [v for v in reads(maker) if v is not None]
    for value, measured in sizes.items():
        if measured is not None and measured.producer() is not None and measured not in saved:
            saved[value] = None
    for node in [n for n in graph if n.op_type == "Split" and not n.domain]:
        joined = node.inputs[0]
        if joined is not None and all(v in saved for v in node.outputs):  # views of what it splits
            for v in node.outputs:
                del saved[v]
            while is_view(joined) and (source := _constant_view_source(joined)) is not None:
                joined = source
            if joined.producer() is not None:
                saved[joined] = None
    order = {v: i for i, v in enumerate(v for node in graph for v in node.outputs)}
    return sorted(saved, key=order.__getitem__)


def _counted(graph: ir.Graph) -> set[ir.Value]:
    """Integers that are made of sizes and constants alone.

    The host knows them, and makes them again: a kept value would have to come back from the GPU.
    """
    ints: set[ir.Value] = set()
    for node in graph:
        inputs = [v for v in reads(node) if v is not None]
        counts = node.op_type in SIZES or (
            any(v in ints for v in inputs)
            and all(v in ints or v.is_initializer() or const_array(v) is not None for v in inputs)
        )
        if counts and not node.domain:
            ints.update(v for v in node.outputs if v.dtype in _INTEGERS)
    return ints


def _is_view(value: ir.Value | None) -> bool:
    maker = None if value is None else value.producer()
    if maker is None:
        return False
    if maker.op_type in ("Cast", "CastLike") and not maker.domain:  # of a mask, which is hashed
        source = maker.inputs[0]
        maker = (None if source is None else source.producer()) or maker
        return maker.op_type == "DropoutScale"
    # the mask of a Dropout is a hash of a number
    return (maker.op_type in VIEWS and not maker.domain) or maker.op_type == "DropoutScale"


def _constant_view_source(view: ir.Value) -> ir.Value | None:
    maker = view.producer()
    if maker is None or maker.op_type == "DropoutScale":
        return None
    others = [v for v in maker.inputs[1:] if v is not None]
    constant = all(v.is_initializer() or const_array(v) is not None for v in others)
    return maker.inputs[0] if constant else None


def cut(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """A copy of the part of a graph that computes the values `outputs` from the values `inputs`."""
    model = model.clone()
    graph = model.graph
    values = {v.name: v for v in graph.inputs}
    values |= {v.name: v for v in graph.initializers.values()}
    values |= {v.name: v for node in graph for v in node.outputs}
    results, fed = [values[name] for name in outputs], []
    graph.outputs.clear()
    for name in inputs:
        value = values[name]
        if value.producer() is not None:
            value.name = f"{name}.made"
            computed, value = value, ir.Value(name=name, type=value.type, shape=value.shape)
            ir.convenience.replace_all_uses_with(computed, value)
        fed.append(value)
    graph.inputs.clear()
    graph.inputs.extend(fed)
    graph.outputs.extend(results)
    clean(model)
    return model
