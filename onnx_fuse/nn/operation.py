"""Operations: graphs that are made and differentiated for inputs of each type and rank, and kept.

An operation is a function that emits ONNX nodes. For inputs of given types and ranks it becomes a
small graph, with a runner for each device. Where a gradient will be asked for, the graph gets its
backward from `autodiff` and is cut in two: the forward also returns what the backward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse import autodiff, rewrite
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import add_input
from onnx_fuse.ir.constants import CANONICAL_OPSET
from onnx_fuse.nn.runner import Array, Run, runner

Build: TypeAlias = Callable[..., Any]
"""`build(op, *values)` emits nodes with `op` and returns one value or several."""
Shape: TypeAlias = "tuple[int | str, ...]"
KEPT = 4096
"""Entries for exact shapes that an operation keeps."""
CLASSES = 256
"""Classes of shapes of which an operation keeps the sessions."""


Kept = TypeVar("Kept")


class Recent(Generic[Kept]):
    """What is found by a key, up to a number of entries: the one least recently used goes first."""

    def __init__(self, most: int) -> None:
        self._most, self._values = most, dict[Any, Kept]()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: object) -> Kept | None:
        """What was put under this key, if it is still here."""
        value = self._values.get(key)
        if value is not None and 2 * len(self._values) > self._most:
            self.put(key, value)  # the order matters once there are many
        return value

    def put(self, key: object, value: Kept) -> Kept:
        """Keep `value`, which is returned."""
        self._values.pop(key, None)
        self._values[key] = value
        while len(self._values) > self._most:
            self._values.pop(next(iter(self._values)), None)
        return value

    def drop(self, key: object) -> None:
        """Forget what was put under this key."""
        self._values.pop(key, None)


class Operation:
    """A function that emits ONNX nodes, and what was made of it for inputs of each kind.

    `domains` are the operator sets besides ai.onnx that its nodes are of. `whole` is for a graph of
    many nodes: the number of its first inputs, whose sizes are open, where those of the others,
    its parameters, are fixed; it `fuses` before it is differentiated. `state` has the results that
    replace an input, by number, with the input's: on a GPU they are written where it stands, unless
    a gradient is asked for.
    """

    __slots__ = (
        *("_classes", "build", "domains", "fuses", "name", "opset", "plans", "state", "whole"),
    )

    def __init__(
        self,
        name: str,
        build: Build,
        *,
        opset: int = CANONICAL_OPSET,
        domains: Mapping[str, int] | None = None,
        whole: int | None = None,
        fuses: bool = True,
        state: Mapping[int, int] | None = None,
    ) -> None:
        self.name, self.build, self.opset = name, build, opset
        self.domains, self.whole = dict(domains or {}), whole
        self.fuses, self.state = fuses and whole is not None, state
        self.plans: dict[Any, Plan] = {}
        """By what `key` gives: the inputs whose gradients are asked for, dtypes and shapes."""
        self._classes: Recent[Plan] = Recent(CLASSES)

    def plan(
        self, key: object, arrays: Sequence[Array | None], needs: int, gpu: int | None
    ) -> Plan:
        """The plan for arrays of these types and shapes; `needs` has a bit for each gradient."""
        shapes = self._general([None if a is None else tuple(a.shape) for a in arrays], needs)
        kinds = [None if a is None else a.dtype for a in arrays]
        host = tuple([a is not None and type(a) is np.ndarray for a in arrays])
        general = (needs, gpu, host, tuple(shapes), tuple(kinds))
        plan = self._classes.get(general)
        if plan is None:
            ends = [None if s is None else (k, s) for k, s in zip(kinds, shapes, strict=True)]
            plan = self._classes.put(general, Plan(self, ends, needs, gpu))
            if plan.refusal:  # sizes may be what a gradient lacks
                exact = [None if a is None else (a.dtype, tuple(a.shape)) for a in arrays]
                special = Plan(self, exact, needs, gpu)
                if not special.refusal:
                    self._classes.drop(general)
                    plan = special
        if len(self.plans) >= KEPT:
            self.plans.clear()
        self.plans[key] = plan
        return plan

    def _general(self, shapes: Sequence[tuple[int, ...] | None], needs: int) -> list[Shape | None]:
        """The shapes as far as they matter: in a gradient, which sizes are 1 and which are equal.

        So a size that is broadcast is known there, and its sum is over known axes.
        """
        if needs and self.whole is None:
            names: dict[int, int | str] = {1: 1}
            return [
                None if s is None else tuple([names.setdefault(d, f"n{len(names)}") for d in s])
                for s in shapes
            ]
        fixed = len(shapes) if self.whole is None else self.whole
        return [
            s if s is None or i >= fixed else tuple([f"x{i}_{j}" for j in range(len(s))])
            for i, s in enumerate(shapes)
        ]

    def model(self, ends: Sequence[tuple[Any, Shape] | None]) -> ir.Model:
        """The graph for inputs of these (dtype, shape); those that are None are absent."""
        imports = {"": self.opset, **self.domains}
        graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="nn")
        model = ir.Model(graph, ir_version=10)
        values: list[ir.Value | None] = []
        for i, end in enumerate(ends):
            if end is None:
                values.append(None)
                continue
            values.append(add_input(graph, f"x{i}", ir.DataType.from_numpy(end[0]), end[1]))
        op = autodiff.Emitter(model)
        try:
            results = self.build(op, *values)
        except ModelError as error:
            if not isinstance(error.__cause__, onnx.checker.ValidationError):
                raise
            kinds = ", ".join(dict.fromkeys(str(end[0]) for end in ends if end is not None))
            raise UsageError(
                f"ONNX has no {self.name} of {kinds}: convert the Tensor, as by x.long()"
            ) from error
        outputs = list(results) if isinstance(results, tuple) else [results]
        op.stem = "y"
        for i, value in enumerate(outputs):
            if value.producer() is None or value in outputs[:i]:  # an input, or a result twice
                outputs[i] = op.node("Identity", [value], outputs=[op.fresh("y")])
        graph.extend(op.nodes)
        graph.outputs.extend(outputs)
        if any(v.dtype is None or v.shape is None for v in outputs):
            infer_shapes(model)
        return model


class Plan:
    """An operation for inputs of one kind: how it runs, and how its gradient does.

    `forward(arrays)` gives `count` results, and then what only the backward reads.
    """

    __slots__ = (
        *("_backward", "_gpu", "_name", "_reverse", "blocked", "count", "floats", "forward"),
        *("reason", "refusal", "seeds", "sources", "stops", "wrt"),
    )

    def __init__(
        self,
        operation: Operation,
        ends: Sequence[tuple[Any, Shape] | None],
        needs: int,
        gpu: int | None,
    ) -> None:
        self._name, self._gpu = operation.name, gpu
        self._backward: Run | None = None
        self._reverse: ir.Model | None = None
        model = operation.model(ends)
        self.count = len(model.graph.outputs)
        self.floats = [v.dtype is None or v.dtype.is_floating_point() for v in model.graph.outputs]
        """Which results are of a floating-point type: these may have gradients."""
        self.seeds = [i for i, is_float in enumerate(self.floats) if is_float]
        """The results whose gradients the backward reads."""
        self.blocked = ""
        """The reason why the backward reads the gradients of no other results, or ""."""
        self.wrt = [i for i in range(len(ends)) if needs >> i & 1]
        """The inputs that the backward gives gradients of, in its order."""
        self.sources: list[int] = []
        """What the backward reads: an input by its number among those present, or ~k for result k
        of the forward; the gradients of the results in `seeds` stand before."""
        self.refusal = ""
        """Why there is no backward, or "" if there is one."""
        self.stops: list[int] = []
        """Inputs that no gradient flows to, because of `reason`."""
        self.reason = ""
        if operation.fuses:
            rewrite.optimize(model, training=bool(needs), level=2, own_kernels=gpu is not None)
        if needs and self.seeds:
            model = self._forward_half(model)
        state = {} if needs else operation.state
        self.forward = runner(model, gpu, operation.name, state)

    def backward(self, arrays: Sequence[Array]) -> list[Array]:
        """The gradients of the inputs in `wrt`, from those of `seeds` and what `sources` names."""
        if self._backward is None:
            assert self._reverse is not None
            self._backward = runner(self._reverse, self._gpu, f"the gradient of {self._name}")
            self._reverse = None
        return self._backward(arrays)

    def _forward_half(self, model: ir.Model) -> ir.Model:
        """The forward of a graph that gets a backward, or the graph with a `refusal`.

        Gradients may flow through the first result alone: others are a norm's mean, or inner values
        of a fused operator.
        """
        graph, every, why = model.graph, self.seeds, ""
        for seeds in (every, every[:1]) if len(every) > 1 else (every,):
            try:
                halves = autodiff.partition(
                    model, [f"x{i}" for i in self.wrt], fused=self._gpu is not None, strict=False,
                    fixed=[str(y.name) for i, y in enumerate(graph.outputs) if i not in seeds],
                )  # fmt: skip
            except ModelError as error:
                why = why or str(error)
                continue
            self.seeds, self.blocked, self._reverse = seeds, why, halves.backward
            stopped = {int(name[1:]): reason for name, reason in halves.stopped.items()}
            self.wrt = [i for i in self.wrt if i not in stopped]
            self.stops = [i for i, reason in stopped.items() if reason]
            self.reason = next(filter(None, stopped.values()), "")
            inputs = [v.name for v in graph.inputs]
            results = [v.name for v in halves.forward.graph.outputs]
            self.sources = [
                inputs.index(v.name) if v.name in inputs else ~results.index(v.name)
                for v in halves.backward.graph.inputs[len(seeds) :]
            ]
            return halves.forward
        self.refusal = why
        return model
