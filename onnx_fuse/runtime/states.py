"""States of a training run on the GPU, and the step graphs that replace them in place.

A state that a step casts to 16 bits has a copy in 16 bits, a state of its own: what replaces the
state writes the copy in the same pass, and the next step reads it instead of casting anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.container import digest_of
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import is_large_weight, serialized_without_weights
from onnx_fuse.ir.build import Builder, add_input, required
from onnx_fuse.runtime.budget import Budget, Recompute
from onnx_fuse.runtime.deployed import Deployed
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.timeline import Communication

Copies: TypeAlias = "Mapping[str, tuple[ir.Value, ir.DataType]]"
"""Name of a copy -> the state that it is a copy of, and its 16-bit type."""


class StepGraphs:
    """The graphs of a run's modes as a GPU runs them, by mode; the first one is a whole step."""

    def __init__(self, states: Collection[str], *, copies: bool = True) -> None:
        """`states` are their names. Without `copies`, each step casts them anew."""
        self.copies: Copies | None = None if copies else {}
        self._states, self._models = states, dict[str, ir.Model]()

    def add(self, key: str, model: ir.Model) -> None:
        """The graph of a mode."""
        if self.copies is None:
            self.copies = _copies_of(model, self._states)
        self._models[key] = model

    def of(
        self, key: str, successors: Mapping[str, str], guards: Sequence[str]
    ) -> tuple[ir.Model, dict[str, str]]:
        """A graph, and its outputs that replace states: `successors`, and some of its own."""
        model, replaced = guarded(self._models[key], successors, guards)
        return model, _use_copies(model, replaced, self.copies or {})

    def of_copies(self) -> tuple[ir.Model, dict[str, str]]:
        """The graph that makes all copies of what their states are, and which output is which."""
        model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
        states, written = dict[ir.Value, ir.Value](), dict[str, str]()
        for name, (state, dtype) in (self.copies or {}).items():
            if state not in states:
                kept = add_input(model.graph, str(state.name), ir.DataType.FLOAT, state.shape)
                states[state] = kept
            _write(states[state], add_input(model.graph, name, dtype, state.shape), written)
        return model, written


def guarded(
    model: ir.Model, successors: Mapping[str, str], scalars: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    """A copy whose states keep their values from the first step on that has a bad scalar.

    The outputs that replace states are `successors`, and one of its own; a model without any stays
    as it is.

    A step is written in place, so a bad one must not be, nor those that are under way behind it:
    sound' = sound and |scalar| < inf;  next = Where(sound', next, now). `sound` is itself a state.
    """
    model = model.clone()
    if not successors:
        return model, {}
    graph, op = model.graph, Builder()
    named = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    fine = add_input(graph, SOUND, ir.DataType.BOOL, [])
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


def _casts(value: ir.Value) -> list[tuple[ir.Node, ir.DataType]]:
    """The Casts to 16 bits of a graph's input, but those that the graph answers, and their types.

    What stands in the body of a loop is none of them.
    """
    nodes = dict.fromkeys(node for node, _ in value.uses() if node.op_type == "Cast")
    casts = [(node, ir.DataType(node.attributes.get_int("to", 0))) for node in nodes]
    here = (pair for pair in casts if pair[0].graph is value.graph and not pair[0].domain)
    return [pair for pair in here if pair[1] in NARROW and not pair[0].outputs[0].is_graph_output()]


def _copies_of(model: ir.Model, states: Collection[str]) -> Copies:
    """The copies of those of `states` that `model` casts to 16 bits."""
    read = [v for v in model.graph.inputs if v.name in states and v.dtype == ir.DataType.FLOAT]
    types = [(v, dtype) for v in read for _, dtype in _casts(v)]
    return {f"onnx_fuse.{dtype.name.lower()} {v.name}": (v, dtype) for v, dtype in types}


def _use_copies(model: ir.Model, successors: dict[str, str], copies: Copies) -> dict[str, str]:
    """Let `model` read the copies of states, and write those of the states that it replaces.

    Returns `successors` with the outputs that replace copies.
    """
    graph = model.graph
    states = {v.name: v for v in graph.inputs}
    replaced = {successors[v.name]: v for v in graph.outputs if v.name in successors}
    for name, (like, dtype) in copies.items():
        state, after = states.get(like.name), replaced.get(str(like.name))
        casts = [node for node, to in _casts(state) if to == dtype] if state is not None else []
        if not casts and after is None:
            continue
        copy = add_input(graph, name, dtype, like.shape)
        for cast in casts:
            ir.convenience.replace_all_uses_with(cast.outputs[0], copy)
            graph.remove(cast, safe=True)
        if after is not None:
            _write(after, copy, successors)
    return successors


def _write(value: ir.Value, copy: ir.Value, successors: dict[str, str]) -> None:
    """Add the output that replaces `copy`, a Cast of `value`, to the graph of both."""
    graph, op = required(copy.graph), Builder()
    after = op.Cast(value, to=required(copy.dtype).value)
    after.name, after.type, after.shape = f"{copy.name}.next", copy.type, copy.shape
    graph.extend(op.nodes)
    graph.outputs.append(after)
    successors[after.name] = str(copy.name)


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


NARROW = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
COPIES = "copies"
"""The key of the graph that makes the copies of states."""
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
        # a budget may rather have the memory of the copies
        self._graphs = StepGraphs(states.keys(), copies=memory is None)
        self.add = self._graphs.add
        self._executables: dict[str, Executable] = {}
        self._copied = False
        """Whether all copies are of what their states are now."""

    def read(self, name: str) -> Array:
        """A copy of a state."""
        return self._home.weights.read(name)

    def write(self, name: str, array: Array) -> None:
        """Replace the value of a state."""
        self._home.weights.write(name, array)
        self._copied = False

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
        if not self._copied:
            self._make_copies()
        if key not in self._executables:
            self._open(key, *self._graphs.of(key, successors, guards))
        names = [*scalars, *outputs]
        pending = self._executables[key].send(names, feeds)
        return lambda: dict(zip(names, pending.result(), strict=True))

    def _open(self, key: str, model: ir.Model, successors: Mapping[str, str]) -> None:
        self._executables[key] = Executable(
            model if self._compiled is None else _read(self._compiled / f"{key}.fused", model),
            math=self._math,
            state=successors,
            device_id=self._device_id,
            home=self._home.shared,
            memory=self._memory,
        )

    def _make_copies(self) -> None:
        """Cast all states that have copies in 16 bits, whose first values these are."""
        self._copied, copies = True, self._graphs.copies or {}
        if copies and COPIES not in self._executables:
            empty = {
                name: np.broadcast_to(np.zeros((), dtype.numpy()), required(state.shape).numpy())
                for name, (state, dtype) in copies.items()
            }
            self._home.weights.place(empty)
            self._open(COPIES, *self._graphs.of_copies())
        if copies:
            self._executables[COPIES].send([], {})

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
