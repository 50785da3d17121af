"""States of a training run on the GPU, and the step graphs that replace them in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.container import digest_of
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import is_large_weight, serialized_without_weights
from onnx_fuse.ir.build import Builder
from onnx_fuse.runtime.budget import Budget, Recompute
from onnx_fuse.runtime.deployed import Deployed
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.timeline import Communication


def guarded(
    model: ir.Model, successors: Mapping[str, str], scalars: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    """`model` whose states keep their values from the first step on that has a bad scalar.

    The outputs that replace states are `successors`, and one of its own; a model without any stays
    as it is.

    A step is written in place, so a bad one must not be, nor those that are under way behind it:
    sound' = sound and |scalar| < inf;  next = Where(sound', next, now). `sound` is itself a state.
    """
    if not successors:
        return model, {}
    model = model.clone()
    graph, op = model.graph, Builder()
    named = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    fine = ir.Value(name=SOUND, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    graph.inputs.append(fine)
    for name in scalars:
        value = named[name]
        fine = op.And(fine, op.Less(op.Abs(value), op.constant(np.inf, value.dtype)))
    for i, value in enumerate(graph.outputs):
        if value.name in successors:
            chosen = op.Where(fine, value, named[successors[str(value.name)]])
            chosen.type, chosen.shape = value.type, value.shape
            chosen.name, value.name = value.name, f"{value.name}.unguarded"
            graph.outputs[i] = chosen
    fine.name, fine.dtype, fine.shape = f"{SOUND}.next", ir.DataType.BOOL, ir.Shape([])
    graph.outputs.append(fine)
    graph.extend(op.nodes)
    return model, {**successors, f"{SOUND}.next": SOUND}


def graph_digest(model: ir.Model) -> str:
    """The digest of a graph and of the weights in it that no step changes."""
    held = (v.const_value for v in model.graph.initializers.values())
    large = (tensor.numpy() for tensor in held if tensor is not None and is_large_weight(tensor))
    dense = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in large)
    return digest_of([serialized_without_weights(model), *dense])


def _read(path: Path, model: ir.Model) -> Deployed:
    """The compiled file of a mode's graph. Raises UsageError where it is of another graph."""
    if not path.is_file():
        raise UsageError(f"{path.parent} has no {path.name}: compile the training anew")
    deployed = Deployed(path)
    if deployed.container.manifest.get("graph") != graph_digest(model):
        raise UsageError(
            f"{path}: compiled from another model or with other settings: compile it anew"
        )
    return deployed


SOUND = "onnx_fuse.sound"
"""Whether all steps so far were good: a state of the run."""


class CudaStates:
    """The states of a run on one GPU, shared by the graphs of its modes.

    A step is one graph launch over states that never leave the device; `read` copies one out. All
    work is in one stream's order.
    """

    def __init__(
        self,
        states: Mapping[str, Array],
        *,
        math: str = "ieee",
        memory: Budget | None = None,
        device_id: int = 0,
        compiled: str | os.PathLike[str] | None = None,
    ) -> None:
        """`compiled` is a folder with a compiled file of each mode."""
        self._compiled = None if compiled is None else Path(compiled)
        self._math, self._memory = math, memory
        empty = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
        self._device_id = device_id
        self._home = Executable(empty, math=math, device_id=device_id)
        self._home.weights.place({**states, SOUND: np.array(True)})
        self._models: dict[str, ir.Model] = {}
        self._executables: dict[str, Executable] = {}

    def add(self, key: str, model: ir.Model) -> None:
        """The graph of a mode."""
        self._models[key] = model

    def read(self, name: str) -> Array:
        """A copy of a state."""
        return self._home.weights.read(name)

    def write(self, name: str, array: Array) -> None:
        """Replace the value of a state."""
        self._home.weights.write(name, array)

    def adopt(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The feeds with those that are on a GPU as DeviceTensors, whatever library has them.

        Steps that are enqueued from now on come after what makes them.
        """
        return {name: self._home.adopt(value) for name, value in feeds.items()}

    def start(
        self,
        key: str,
        successors: Mapping[str, str],
        scalars: Sequence[str],
        outputs: Sequence[str],
        feeds: Mapping[str, Any],
        guards: Sequence[str],
    ) -> Callable[[], dict[str, Array]]:
        """Enqueue one step; what it returns waits for `scalars` and `outputs`, by name.

        `successors` maps outputs to states. Where a scalar of `guards` is not finite, the states
        stay as they were, and they stay so until `resume_updates`.
        """
        if key not in self._executables:
            model, successors = guarded(self._models.pop(key), successors, guards)
            self._executables[key] = Executable(
                model if self._compiled is None else _read(self._compiled / f"{key}.fused", model),
                math=self._math,
                state=successors,
                device_id=self._device_id,
                home=self._home.shared,
                memory=self._memory,
            )
        names = [*scalars, *outputs]
        pending = self._executables[key].send(names, feeds)
        return lambda: dict(zip(names, pending.result(), strict=True))

    def recompute(self, key: str) -> Recompute | None:
        """What the graph of a mode runs a second time, once it has run within a budget."""
        runs = self._executables.get(key)
        return None if runs is None or self._memory is None else runs.specializer.recompute

    def communication(self, key: str) -> Communication | None:
        """The collectives of the last step of a mode; None where it ran none as a graph."""
        executable = self._executables.get(key)
        instances = [] if executable is None else executable.instances()
        if not instances:
            return None
        self._home.stream.wait("the last step")
        return instances[-1].communication()

    def resume_updates(self) -> None:
        """Let steps replace states again after a bad one."""
        self._home.weights.write(SOUND, np.array(True))
