"""States of a training run on the GPU, and the step graphs that replace them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir import Builder
from onnx_fuse.runtime.executable import Executable

Array = np.ndarray[Any, Any]


def guarded(model: ir.Model, successors: Mapping[str, str], scalars: Sequence[str]) -> ir.Model:
    """`model` in which a state keeps its value where one of `scalars` is not finite.

    A step is written in place, so a bad one must not be: next = Where(|loss| < inf, next, now).
    """
    model = model.clone()
    graph, op = model.graph, Builder()
    named = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    fine: ir.Value | None = None
    for name in scalars:
        value = named[name]
        bound = op.constant(np.inf, value.dtype)
        finite = op.Less(op.Abs(value), bound)
        fine = finite if fine is None else op.And(fine, finite)
    if fine is None:
        return model
    for i, value in enumerate(graph.outputs):
        if value.name in successors:
            chosen = op.Where(fine, value, named[successors[str(value.name)]])
            chosen.type, chosen.shape = value.type, value.shape
            chosen.name, value.name = value.name, f"{value.name}.unguarded"
            graph.outputs[i] = chosen
    graph.extend(op.nodes)
    return model


class CudaStates:
    """The states of a run on one GPU, shared by the graphs of its modes.

    A step is one graph launch over states that never leave the device; `read` copies one out.
    """

    def __init__(self, states: Mapping[str, Array], *, math: str = "ieee") -> None:
        self._math = math
        empty = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
        self._home = Executable(empty, math=math)
        self._home.place(states)
        self._models: dict[str, ir.Model] = {}
        self._executables: dict[str, Executable] = {}

    def add(self, key: str, model: ir.Model) -> None:
        """The graph of a mode."""
        self._models[key] = model

    def read(self, name: str) -> Array:
        """A copy of a state."""
        return self._home.read(name)

    def write(self, name: str, array: Array) -> None:
        """Replace a state."""
        self._home.write(name, array)

    def run(
        self,
        key: str,
        successors: Mapping[str, str],
        scalars: Sequence[str],
        outputs: Sequence[str],
        feeds: Mapping[str, Any],
    ) -> dict[str, Array]:
        """One step: `scalars` and `outputs` by name; `successors` maps outputs to states.

        Where a scalar is not finite, the states stay as they were.
        """
        if key not in self._executables:
            model = guarded(self._models.pop(key), successors, scalars if successors else ())
            self._executables[key] = Executable(
                model, math=self._math, state=successors, resident=self._home.resident
            )
        names = [*scalars, *outputs]
        return dict(zip(names, self._executables[key].run(names, feeds), strict=True))
