"""What a float model becomes, by calibration data, so that rounding its layers costs less."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.ir.build import Builder, add_initializer, const_array, given, required
from onnx_fuse.ir.names import Names
from onnx_fuse.quantization.layers import channels
from onnx_fuse.runtime import ort
from onnx_fuse.training.stored_codes import stored_codes
from onnx_fuse.validation.inputs import Feeds

_LARGEST_GRAM = 8192
"""Channels above which no gram is kept: it has the square of that many float64 numbers."""
_DAMPING = 0.01
"""What is added to a gram's diagonal, of its mean, as in GPTQ (arXiv:2210.17323, section 3.3)."""
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


@dataclass(frozen=True)
class Inputs:
    """What the data brings to a layer, by channel of its input."""

    largest: Array
    """The largest absolute value of each channel."""
    mean: Array
    gram: Array | None
    """The mean of x x' over rows, for a matrix multiplication."""


def observed(
    model: ir.Model, names: Collection[str], feeds: Sequence[Feeds], *, grams: bool
) -> dict[str, Inputs]:
    """The inputs of the named layers by name, with grams where they are asked for.

    Inputs that the data leaves without a row, or brings numbers to that are not finite, are absent.
    """
    if not names:
        return {}
    model = model.clone()
    nodes = [node for node in model.graph if node.name in names]
    sources = list(dict.fromkeys(required(node.inputs[0]) for node in nodes))
    op, naming = Builder(), Names.of(model.graph)
    for value in sources:
        op.Identity(value).name = naming.fresh(f"{value.name}_observed")
    model.graph.extend(op.nodes)
    model.graph.outputs[:] = [node.outputs[0] for node in op.nodes]
    convolved = {node.inputs[0] for node in nodes if node.op_type in ("Conv", "ConvTranspose")}
    found: list[Inputs | None] = [None] * len(sources)
    rows = [0] * len(sources)
    session = ort.session(model, as_written=True)
    for batch in feeds:
        for i, x in enumerate(ort.run(session, batch)):
            axis = 1 if sources[i] in convolved else x.ndim - 1
            x = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]).astype(np.float64)
            if not len(x):
                continue
            wanted = grams and sources[i] not in convolved and x.shape[1] <= _LARGEST_GRAM
            with np.errstate(invalid="ignore"):
                new = Inputs(np.abs(x).max(0), x.mean(0), x.T @ x / len(x) if wanted else None)
            rows[i] += len(x)
            found[i] = _joined(found[i], new, len(x) / rows[i])
    pairs = zip(sources, found, strict=True)
    by_value = {v: x for v, x in pairs if x is not None and np.isfinite(x.largest).all()}
    return {n.name or "": by_value[v] for n in nodes if (v := required(n.inputs[0])) in by_value}


def _joined(old: Inputs | None, new: Inputs, share: float) -> Inputs:
    """Both together; `share` is that of the new one's rows."""
    if old is None:
        return new
    gram = None
    if old.gram is not None and new.gram is not None:
        gram = old.gram + share * (new.gram - old.gram)
    mean = old.mean + share * (new.mean - old.mean)
    return Inputs(np.maximum(old.largest, new.largest), mean, gram)


def smoothed(model: ir.Model, inputs: Mapping[str, Inputs]) -> tuple[ir.Model, int]:
    """The same function, where large channels of a norm's result are smaller and weights larger.

    Each channel is divided in the norm's scale, and multiplied in the weights of the layers that
    read it, by sqrt(its largest value / its largest weight), so that both become as large
    (SmoothQuant, arXiv:2211.10438, equation 4 with alpha 0.5). Also returns the number of norms.
    """
    model, count = model.clone(), 0
    naming = Names.of(model.graph)
    for node in model.graph:
        readers = [reader for reader, _ in node.outputs[0].uses()]
        vectors = _vectors(node)
        weights = [const_array(given(reader, 1)) for reader in readers]
        plain = all(
            r.name in inputs and r.inputs[0] is node.outputs[0] and r.op_type in ("MatMul", "Gemm")
            for r in readers
        )
        if not (vectors and readers and plain) or node.outputs[0].is_graph_output():
            continue
        matrices = [w for w in weights if w is not None and w.ndim == 2]
        if len(matrices) < len(readers):
            continue
        axes = [channels(r, w) for r, w in zip(readers, matrices, strict=True)]
        largest = inputs[str(readers[0].name)].largest
        pairs = zip(matrices, axes, strict=True)
        wide = np.max([np.abs(w.astype(np.float64)).max(axis) for w, axis in pairs], axis=0)
        used = (largest > 0) & (wide > 0)
        factor = np.sqrt(np.divide(largest, wide, out=np.ones_like(wide), where=used))
        for reader, weight, axis in zip(readers, matrices, axes, strict=True):
            _replace(model.graph, reader, 1, weight * np.expand_dims(factor, axis), naming)
        for maker, i in vectors:
            _replace(model.graph, maker, i, required(const_array(maker.inputs[i])) / factor, naming)
        count += 1
    return model, count


def _vectors(node: ir.Node) -> list[tuple[ir.Node, int]]:
    """The constants, each an input of a node, that all scale a norm's result by channel."""
    found = []
    if node.op_type == "Add":
        for i, other in ((0, 1), (1, 0)):
            shift, maker = const_array(node.inputs[i]), node.inputs[other]
            before = None if maker is None else maker.producer()
            if shift is None or shift.ndim != 1 or before is None:
                continue
            if len(before.outputs[0].uses()) == 1 and (more := _vectors(before)):
                return [(node, i), *more]
        return []
    if node.op_type == "Mul":
        found = [(node, i) for i in (0, 1) if const_array(node.inputs[i]) is not None]
        found = [] if len(found) > 1 else found
    elif node.op_type in _NORMS:
        found = [(node, i) for i in range(1, len(node.inputs)) if node.inputs[i] is not None]
    arrays = [const_array(maker.inputs[i]) for maker, i in found]
    return found if all(a is not None and a.ndim == 1 and a.size > 1 for a in arrays) else []


def shifts(model: ir.Model, placed: ir.Model, inputs: Mapping[str, Inputs]) -> dict[str, Array]:
    """By layer, the mean of what the rounding of its weight adds to each channel of its result.

    It is the rounded weight's difference times the mean input; padding counts as such an input.
    """
    weights = {node.name: const_array(given(node, 1)) for node in model.graph}
    found = {}
    for node in placed.graph:
        weight, seen = weights.get(node.name), inputs.get(node.name or "")
        maker = required(node.inputs[1]).producer() if seen is not None else None
        if weight is None or seen is None or maker is None or node.op_type == "ConvTranspose":
            continue
        if node.op_type != "Conv" and weight.ndim != 2:
            continue
        codes, stored = const_array(maker.inputs[0]), stored_codes(maker)
        if codes is None or stored is None:
            continue
        apart = stored.floats(codes).astype(np.float64) - weight
        if node.op_type == "Conv":
            apart = apart.sum(tuple(range(2, apart.ndim)))  # [O, I / groups]
            groups = node.attributes.get_int("group", 1)
            split = apart.reshape(groups, -1, apart.shape[1])
            vector = np.einsum("goi,gi->go", split, seen.mean.reshape(groups, -1)).reshape(-1)
        else:
            turned = apart if channels(node, weight) == 0 else apart.T
            vector = turned @ seen.mean
        found[node.name or ""] = vector
    return found


def shifted(model: ir.Model, vectors: Mapping[str, Array]) -> ir.Model:
    """The model where the biases of these layers are less by a vector; one without gets one.

    A MatMul's bias is a vector that an Add after it has; without one it stays.
    """
    model = model.clone()
    naming = Names.of(model.graph)
    for node in [n for n in model.graph if n.name in vectors]:
        vector, at = vectors[node.name or ""], (node, 2)
        if node.op_type == "MatMul":
            uses = list(node.outputs[0].uses())
            if len(uses) != 1 or uses[0].node.op_type != "Add":
                continue
            at = uses[0].node, 1 - uses[0].idx
        owner, i = at
        value = given(owner, i)
        bias = const_array(value)
        factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        if (value is not None and (bias is None or bias.ndim != 1)) or factors != [1, 1]:
            continue
        weight = required(const_array(node.inputs[1]))
        bias = np.zeros(vector.shape, weight.dtype) if bias is None else bias
        if bias.shape == vector.shape:
            _replace(model.graph, owner, i, bias - vector, naming, like=bias)
    return model


def _replace(
    graph: ir.Graph, node: ir.Node, i: int, array: Array, naming: Names, like: Array | None = None
) -> None:
    """Let a node read another constant, in the type of the one that it reads."""
    old = given(node, i)
    like = required(const_array(old)) if like is None else like
    label = f"{node.name}_input_{i}" if old is None else str(old.name)
    new = add_initializer(graph, naming.fresh(label), array.astype(like.dtype))
    if old is None:
        node.resize_inputs(max(len(node.inputs), i + 1))
    node.replace_input_with(i, new)
    if old is not None and old.is_initializer() and not (old.uses() or old.is_graph_output()):
        del graph.initializers[str(old.name)]


def compensated(
    weight: Array, gram: Array, scale_of: Callable[[Array], Array], block: int
) -> tuple[Array, Array]:
    """A weight [K, N] as codes times scales, and these [K / block, N], by GPTQ.

    Rows are rounded in turn, and what each loses is taken up by those after it, as the gram of the
    inputs [K, K] says that they can (arXiv:2210.17323, equations 2 and 3 in Cholesky form).
    `scale_of` gives the scales [N] of a block [rows, N].
    """
    left, result = weight.astype(np.float64), np.empty(weight.shape)
    diagonal = np.einsum("ii->i", damped := gram.copy())
    diagonal[diagonal == 0] = 1
    diagonal += _DAMPING * diagonal.mean()
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    scales = []
    for first in range(0, len(weight), block):
        rows = range(first, min(first + block, len(weight)))
        scale = scale_of(left[first : rows.stop])
        lost = np.empty((len(rows), weight.shape[1]))
        for k, row in enumerate(rows):
            result[row] = np.clip(np.rint(left[row] / scale), -8, 7) * scale
            lost[k] = (left[row] - result[row]) / upper[row, row]
            left[row + 1 : rows.stop] -= np.outer(upper[row, row + 1 : rows.stop], lost[k])
        left[rows.stop :] -= upper[first : rows.stop, rows.stop :].T @ lost
        scales.append(scale)
    return result, np.stack(scales)
