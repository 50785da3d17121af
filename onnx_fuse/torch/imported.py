"""An ONNX file as an nn.Module: its graph forward, and the generated backward."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from onnx_fuse import autodiff, rewrite, session
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import save, to_proto
from onnx_fuse.ir.build import bind_defaults
from onnx_fuse.ir.constants import Model
from onnx_fuse.program.problem import PRECISIONS
from onnx_fuse.rewrite.constants import lift_parameters, set_parameter
from onnx_fuse.rewrite.precision import lower_precision
from onnx_fuse.torch.graph import OnnxGraph, enter
from onnx_fuse.torch.library import call_graph
from onnx_fuse.training import tied_weights
from onnx_fuse.training.groups import TrainableSelection
from onnx_fuse.training.weights import model_names


class OnnxModule(nn.Module):
    """A graph whose weights are parameters under their ONNX names.

    `from_onnx` makes one, and says what `model`, `trainable`, `precision` and `untie` are.

    Names with dots are those of submodules, so that the state dict has the names of the file. It
    computes what the file says in training mode too: a file that was exported for inference has no
    Dropout, and its BatchNormalizations keep their statistics, which are buffers.
    """

    def __init__(
        self,
        model: Model,
        trainable: bool | Sequence[str] = True,
        precision: str = "fp32",
        untie: bool = False,
    ) -> None:
        super().__init__()
        if precision not in ("fp32", "bf16", "fp16"):
            raise UsageError(f"there is no precision '{precision}': choose fp32, bf16 or fp16")
        source = read(model)
        if untie:
            source = source.clone()
            tied_weights.untie(source.graph)
        graph = session.load(source.clone())
        bind_defaults(graph)
        lift_parameters(graph)
        names = set(graph.graph.initializers)
        rewrite.optimize(graph, level=2, training=True)
        dtype, _ = PRECISIONS[precision]
        if dtype != "float32":
            lower_precision(graph, ir.DataType[dtype.upper()], masters=True)
        weights = [v for v in autodiff.trainable(graph) if names.issuperset(model_names(v))]
        weights = [v for v in weights if autodiff.is_weight(v)]
        weights = _differentiable(graph, weights)
        statistics = {
            name
            for node in graph.graph
            if node.op_type == "BatchNormalization"
            for v in node.inputs[3:5]
            if v is not None and v in weights
            for name in model_names(v)
        }
        self.input_names = [str(v.name) for v in graph.graph.inputs]
        self.output_names = [str(v.name) for v in graph.graph.outputs]
        arrays = {
            name: _own_content(source, graph, name) for v in weights for name in model_names(v)
        }
        self._graph, self._names = opened(graph, weights)
        self._places: list[tuple[dict[str, Any], str]] = []
        """The dict of a submodule that has each weight, and its name there: quicker than getattr"""
        globs = None if isinstance(trainable, bool) else trainable
        for name in self._names:
            trains = trainable is not False and TrainableSelection(globs, (), ())(name)
            holder, last = self._holder(name)
            tensor = torch.from_numpy(arrays[name])
            if name in statistics:
                holder.register_buffer(last, tensor)
                self._places.append((holder._buffers, last))
            else:
                holder.register_parameter(last, nn.Parameter(tensor, requires_grad=trains))
                self._places.append((holder._parameters, last))
        self._given = _Given(source)

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        """The submodule that has a parameter, and its name there."""
        holder: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            part = _attribute(holder, part, nn.Module)
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        return holder, _attribute(holder, last)

    def forward(self, *args: Tensor, **named: Tensor) -> Any:
        """The outputs for the inputs: `args` in their order, the others `named`.

        Returns a tensor, or a tuple where the graph has several outputs. Raises ValueError for
        tensors that do not fit the graph's inputs, TypeError for a name that it does not have.
        """
        missing = self.input_names[len(args) :]
        if len(args) > len(self.input_names) or set(missing) != set(named):
            raise TypeError(f"the inputs are {', '.join(self.input_names)}")
        weights = [table[name] for table, name in self._places]
        tensors = [*args, *(named[name] for name in missing), *weights]
        results = call_graph(self._graph, tensors)
        return results[0] if len(results) == 1 else tuple(results)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file as it was given, with the present weights in place of its own."""
        model = self._given.model.clone()
        for name, (table, last) in zip(self._names, self._places, strict=True):
            array = table[last].detach().cpu().numpy()
            set_parameter(model, name, np.array(array, order="C"))
        tensors = (v.const_value for v in self._given.model.graph.initializers.values())
        save(model, path, external=any(t is not None and "external" in t.meta for t in tensors))


def opened(
    model: ir.Model, weights: Sequence[ir.Value], fixed: Sequence[str] = ()
) -> tuple[OnnxGraph, list[str]]:
    """The OnnxGraph of a model with its weights as further inputs, and the names of these.

    `fixed` are outputs that have no gradient. The model becomes the graph's.
    """
    names = autodiff.open_parameters(model, weights)
    _cast_parts(model)
    _cast_rows(model)
    data = to_proto(model, shapes=False).SerializeToString(deterministic=True)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return enter(OnnxGraph(f"onnx:{digest}", model, fused=True, fixed=fixed)), names


class _Given:
    """The model as it was given, which copies of a module share."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> _Given:
        return self


def _differentiable(model: ir.Model, weights: Sequence[ir.Value]) -> list[ir.Value]:
    """The weights that an output depends on with a gradient: exporters keep masks among them."""
    joint = model.clone()
    grads = autodiff.backward(
        joint,
        {y: None for y in joint.graph.outputs if y.dtype is None or y.dtype.is_floating_point()},
        [joint.graph.initializers[str(v.name)] for v in weights],
        stopped={},
    )
    return [v for v in weights if str(v.name) in grads]


def _cast_parts(model: ir.Model) -> None:
    """Let parameters that are packed be cast before, so that only narrow numbers are copied."""
    graph = model.graph
    for node in [n for n in graph if n.op_type == "Concat" and not n.domain]:
        joined, casts = node.outputs[0], [n for n, _ in node.outputs[0].uses()]
        if (
            len(casts) != 1
            or casts[0].op_type != "Cast"
            or any(v is None or not v.is_graph_input() for v in node.inputs)
        ):
            continue
        (cast,), op = casts, autodiff.Emitter(model)
        op.stem = node.name or "parameters"
        narrow = [op.Cast(v, to=cast.attributes.get_int("to")) for v in node.inputs]
        for i, part in enumerate(narrow):
            node.replace_input_with(i, part)
        graph.insert_before(node, op.nodes)
        joined.type = cast.outputs[0].type
        ir.convenience.replace_all_uses_with(cast.outputs[0], joined, replace_graph_outputs=True)
        graph.remove(cast, safe=True)


def _cast_rows(model: ir.Model) -> None:
    """Let rows of a table be cast behind their lookup, so that its gradient is summed in its type.

    It would be made in the narrow type and cast as a whole otherwise.
    """
    graph = model.graph
    for cast in [n for n in graph if n.op_type == "Cast" and not n.domain]:
        table, (narrow,) = cast.inputs[0], cast.outputs
        reads = [(n, i) for n, i in narrow.uses() if n.op_type == "Gather" and not n.domain]
        if (
            table is None
            or not table.is_graph_input()
            or narrow.is_graph_output()
            or len(reads) != len(narrow.uses())
            or any(i or n.graph is not graph for n, i in reads)
        ):
            continue
        for node, _ in reads:
            op = autodiff.Emitter(model)
            op.stem = node.name or "rows"
            (rows,) = node.outputs
            wide = op.Gather(table, node.inputs[1], axis=node.attributes.get_int("axis", 0))
            wide.type, wide.shape = table.type, rows.shape
            cast_rows = op.Cast(wide, to=cast.attributes.get_int("to"))
            cast_rows.type, cast_rows.shape, cast_rows.name = rows.type, rows.shape, rows.name
            graph.insert_before(node, op.nodes)
            ir.convenience.replace_all_uses_with(rows, cast_rows, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        graph.remove(cast, safe=True)


def _attribute(holder: nn.Module, name: str, kind: type | None = None) -> str:
    """`name`, or one like it where the module has another attribute of that name."""
    name = name or "_"
    while hasattr(holder, name) and not (kind and isinstance(getattr(holder, name), kind)):
        name += "_"
    return name


def _own_content(source: ir.Model, graph: ir.Model, name: str) -> np.ndarray[Any, Any]:
    value = source.graph.initializers.get(name)
    if value is None or value.const_value is None:
        nodes = (n for n in source.graph for v in n.outputs if v.name == name)
        tensor = next(nodes).outputs[0].const_value
        assert tensor is not None
        return np.array(tensor.numpy())
    return np.array(value.const_value.numpy())


def from_onnx(
    model: Model,
    trainable: bool | Sequence[str] = True,
    *,
    precision: str = "fp32",
    untie: bool = False,
) -> OnnxModule:
    """Make an nn.Module of an ONNX model, to be trained with any of torch's optimizers.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model.
        trainable: Whether the weights ask for gradients, or globs over the names of those that do.
        precision: "fp32"; or "bf16" or "fp16" to compute in 16 bits, with weights in float32.
        untie: Give each place that reads a tensor of one repeated number a parameter of its own:
            exporters keep the ones and zeros of all new LayerNorms once.

    Returns:
        The module. Its inputs and outputs are the model's, in their order.

    Raises:
        ModelError: The model is malformed or unsupported.
        UsageError: There is no such precision.
    """
    return OnnxModule(model, trainable, precision, untie)
