"""Models in float64: on onnxruntime where it has the kernels, else by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir
from onnx_ir import DataType

from onnx_fuse import progress
from onnx_fuse.arrays import Array
from onnx_fuse.autodiff.emit import Emitter, expand
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import inline
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import all_nodes, remove_unused_nodes
from onnx_fuse.ir.constants import one_line
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ops.quantize import dequantized
from onnx_fuse.ops.recurrent import GATES
from onnx_fuse.ops.shape_ops import Writer
from onnx_fuse.program.call import NeedsValues, Program
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.rewrite.precision import widened
from onnx_fuse.runtime import ort
from onnx_fuse.validation.inputs import Feeds
from onnx_fuse.validation.values import by_name


class Reference:
    """A model that NumPy runs in the types that it has, as each operator's answer says.

    The answers are those by which programs are checked (`program.interpret`), of the program for a
    GPU that need not be here.
    """

    def __init__(self, model: ir.Model) -> None:
        # most checks run in onnxruntime only
        from onnx_fuse.lower.walk import lower
        from onnx_fuse.program.interpret.run import initializers, interpret

        infer_shapes(model)
        self._lower, self._interpret = lower, interpret
        self._model, self._weights = model, initializers(model)
        self._programs: WeakKeyDictionary[ir.Model, dict[Any, Program]] = WeakKeyDictionary()

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs of these names, or all of them. Raises ModelError and LookupError."""
        progress.report("running a graph in NumPy")
        program = self._lowered(self._model, feeds)
        outputs = self._interpret(program, feeds, self._weights, self._lowered)
        return [outputs[name] for name in names or (str(v.name) for v in self._model.graph.outputs)]

    def _lowered(self, model: ir.Model, feeds: Mapping[str, Array]) -> Program:
        """The program for arrays of these shapes, and of these values where they decide shapes."""
        shapes = {name: (array.shape, array.dtype.name) for name, array in feeds.items()}
        programs, key = self._programs.setdefault(model, {}), str(shapes)
        values: dict[str, Array] = {}
        while key not in programs:
            try:
                program = self._lower(model, shapes, CHIPS["H200"], values=values)
            except NeedsValues as needs:
                values |= {name: np.asarray(feeds[name]) for name in needs.names}
                continue
            if values:
                return program
            programs[key] = program
        return programs[key]


def evaluator_in_double(
    model: ir.Model, names: Sequence[str]
) -> Callable[[Feeds], dict[str, Array]]:
    """The model in float64: onnxruntime where it has the kernels, else NumPy."""
    model = to_double(model)
    model.graph.outputs[:] = list(by_name(model, names).values())
    remove_unused_nodes(model)
    inputs = [v.name or "" for v in model.graph.inputs]
    try:
        session = ort.session(model, as_written=True)
        return lambda feeds: dict(
            zip(names, ort.run(session, {k: feeds[k] for k in inputs}, names), strict=True)
        )
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        missing = ort.plain(error)
    reference = Reference(model)

    def evaluate(feeds: Feeds) -> dict[str, Array]:
        try:
            with np.errstate(all="ignore"):  # a guard selects what is no number afterwards
                outputs = reference.run(names, {k: feeds[k] for k in inputs})
        except (ModelError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"nothing here runs the graph in float64, which checks its gradients: onnxruntime "
                f"says '{missing}', without it '{one_line(error)}'"
            ) from error
        return dict(zip(names, outputs, strict=True))

    return evaluate


def in_double(feeds: Mapping[str, Array]) -> Feeds:
    """Floats of any width as float64, the rest as it is."""
    return {
        name: a.astype(np.float64) if DataType.from_numpy(a.dtype).is_floating_point() else a
        for name, a in feeds.items()
    }


_NARROW = (DataType.FLOAT, DataType.FLOAT16, DataType.BFLOAT16)
_WRITTEN_OUT = {*GATES, "CausalConvWithState", "DynamicQuantizeLinear", "LinearAttention",
                "RotaryEmbedding"}  # fmt: skip
"""Operators without float64, by the standard or on onnxruntime (1.32), that have a body."""


def to_double(model: ir.Model) -> ir.Model:
    """A copy that computes in float64, in which operators that lack it are written out."""
    model = inline(model)
    infer_shapes(model)
    op = Emitter(model)
    for node in [n for n in all_nodes(model.graph) if not n.domain]:
        statistics = node.op_type == "LayerNormalization" and len(node.outputs) > 1
        if node.op_type in _WRITTEN_OUT or statistics:  # which are of float32
            expand(op, node)
        elif node.op_type == "DequantizeLinear":
            writer = Writer()
            y = dequantized(writer, node)
            for new_node in writer.nodes:
                op.adopt(new_node)
            replace_node(node, writer.nodes, [y], named=False)
    return widened(model, _NARROW, DataType.DOUBLE)
