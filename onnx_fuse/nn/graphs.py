"""`capture`: the operators that a function calls become one graph, which later calls replay."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from operator import attrgetter, is_
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import save
from onnx_fuse.nn.dispatch import MODE, apply, no_grad
from onnx_fuse.nn.export import with_initializers
from onnx_fuse.nn.nested import flat, form_of, formed, names_of
from onnx_fuse.nn.operation import Operation
from onnx_fuse.nn.recorder import CaptureWarning, Recorder, copied
from onnx_fuse.nn.runner import PooledProgram, home, kind, turn_of
from onnx_fuse.nn.tensor import Tensor, _wrap

__all__ = ["Block", "Capture", "CaptureWarning", "capture"]
__dir__ = __all__.copy


class Captured:
    """A graph that a capture has made, and the tensors that it reads and writes.

    `shapes` are those of the arguments it was captured with; it holds for others of their ranks,
    unless Python has read an open size.
    """

    def __init__(
        self, recorder: Recorder, arguments: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        self.sizes, self.shapes = recorder.sizes, [t._data.shape for t in arguments]
        self._empty = [0 in shape for shape in self.shapes]
        sizes = [(n, size) for n, shape in enumerate(self.shapes) for size in shape]
        self._equal = [
            (i, j) for i, (n, size) in enumerate(sizes if recorder.equal_sizes else ())
            for j, (m, other) in enumerate(sizes[:i]) if m != n and size == other
        ]  # fmt: skip
        self._modules, self._count = recorder.modules, len(results)
        self._differentiates = recorder.differentiates
        leaves = list(recorder.leaves.values())
        held = [leaf for leaf in leaves if leaf.grad is not None]
        fresh = [leaf for leaf in leaves if id(leaf) not in recorder.cleared]
        states = [tensor for tensor, _ in recorder.states.values()]
        ends = [*results, *states, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        values = [recorder.value(tensor) for tensor in ends]
        # A target is a tensor, or the number of an argument: each replay has others of these.
        place: dict[int, Any] = {id(t): i for i, t in enumerate(arguments)}
        self._checks = [(place[id(t)], check) for t, check in recorder.checks if id(t) in place]
        self._states, self._held, self._leaves, self._fresh = (
            [place.get(id(t), t) for t in tensors] for tensors in (states, held, leaves, fresh)
        )
        self._outside = [(tensor, _kind(tensor)) for tensor, _ in recorder.inputs]
        self._renewals = [
            (tensor, recorder.renewals[value])
            for tensor, value in recorder.inputs
            if value in recorder.renewals
        ]
        gpu = any(t.device != "cpu" for t in (*arguments, *(t for t, _ in recorder.inputs)))
        self.model = recorder.finished(values, gpu)
        """The ONNX graph; its first inputs are the arguments, the others tensors of outside."""
        inputs = self.model.graph.inputs
        others = [value for _, value in recorder.inputs]
        first = [value for value in inputs if value not in others]
        inputs.clear()
        inputs.extend([*first, *others])
        fixed = {id(t): i for i, (t, _) in enumerate(recorder.inputs, len(arguments))}
        stands = {id(t): _still_fits(t, v) for t, v in recorder.inputs}
        state = {
            i: fixed[id(t)]
            for i, t in enumerate(states, len(results))
            if gpu and stands.get(id(t)) and t.device != "cpu"
        }
        self._in_place = [states[i - len(results)] for i in state]
        """Tensors that a replay writes to where they are."""
        ends_stay = len(state) == len(states) and not held
        targets = (*self._states, *self._leaves)
        self._stays = ends_stay and all(type(t) is not int for t in targets)
        """Whether a replay changes no tensor but those of `_in_place`."""
        self._quiet = recorder.differentiates or not recorder.grad
        self._again: FastReplay | None = None
        if gpu:
            from onnx_fuse.runtime.specialize import KEEPERS

            KEEPERS.add(self)
        self._steady = False
        imports = self.model.graph.opset_imports
        self._operation = Operation(
            "a captured graph",
            copied(self.model),
            opset=imports[""],
            domains={domain: version for domain, version in imports.items() if domain},
            whole=len(arguments),
            fuses=not recorder.differentiates,
            state=state,
        )

    def forget(self) -> None:
        """Launch nothing again that was found before."""
        self._again, self._steady = None, False

    def fits(self, arguments: Sequence[Tensor]) -> bool:
        """Whether a replay with these arguments does what the function would."""
        sizes = [size for t in arguments for size in t._data.shape] if self._equal else []
        return (
            (not self.sizes or [t._data.shape for t in arguments] == self.shapes)
            and [0 in t._data.shape for t in arguments] == self._empty
            and all(sizes[i] == sizes[j] for i, j in self._equal)
            and all(module.training is mode for module, mode in self._modules)
            and (self._is_steady() or all(_kind(t) == kind for t, kind in self._outside))
        )

    def _is_steady(self) -> bool:
        """Whether the captured graph reads the same outer tensors as in the last replay."""
        self._steady = self._again is not None and self._again.holds()
        return self._steady

    def replay(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run the graph; assigns the tensors that the function assigns, and returns its results.

        `fits` has just been asked.
        """

        for number, check in self._checks:
            check(arguments[number]._data)

        def tensor(target: Any) -> Tensor:
            return arguments[target] if type(target) is int else target

        for leaf in self._fresh if self._stays else map(tensor, self._fresh):
            if leaf.grad is not None:
                raise UsageError(
                    "a captured function cannot add to gradients that are there already: call "
                    "zero_grad() in it, or before it"
                )
        for random, refresh in self._renewals:
            random._data = Tensor(refresh(), device=random.device)._data
        again = self._again if self._steady else None
        if again is not None and again.takes(arguments):
            ends = again.run(arguments)
            for leaf in self._leaves:
                leaf.grad = None
            return [_wrap(array, None, 0) for array in ends[: self._count]]
        for state in self._in_place:
            state._data = sole(state)
        operands = [*arguments, *(t for t, _ in self._outside)]
        if self._differentiates:
            with no_grad():
                tensors = apply(self._operation, operands)
        else:
            tensors = apply(self._operation, operands)
        ends = list(tensors) if isinstance(tensors, tuple) else [tensors]
        results, rest = ends[: self._count], ends[self._count :]
        with no_grad():
            for target, new in zip(self._states, rest, strict=False):
                tensor(target)._data = new._data
        for leaf in map(tensor, self._leaves):
            leaf.grad = None
        for target, grad in zip(self._held, rest[len(self._states) :], strict=True):
            tensor(target).grad = grad
        if self._stays and self._quiet:
            self._again = self._ready(arguments)
        return results

    def _ready(self, arguments: Sequence[Tensor]) -> FastReplay | None:
        """What later replays need no more than, if they can be launched at once."""
        tensors = [t for t, _ in self._outside]
        arrays = [t._data for t in (*arguments, *tensors)]
        gpu = next((a.device_id for a in arrays if type(a) is not np.ndarray), None)
        turn = turn_of(self._operation.plan("again", arrays, 0, gpu).forward, arrays)
        if turn is None or any(t._data.ready not in (None, turn.stream) for t in self._in_place):
            return None
        return FastReplay(turn, arguments, tensors, self._in_place)

    def file(self, names: dict[int, str]) -> Any:
        """The graph as a model of its own: what is outside is an initializer with its value.

        `names` are those of tensors, by identity.
        """
        tensors = [t for t, _ in self._outside]
        fixed = self.shapes if self.sizes else None
        return with_initializers(self.model, tensors, names, fixed)

    def names(self) -> dict[int, str]:
        """The names of the parameters and buffers of the modules that were called."""
        names: dict[int, str] = {}
        for module, _ in self._modules:
            for name, tensor in module._named():
                names.setdefault(id(tensor), name)
        return names


class FastReplay:
    """A replay whose tensors stand where they stood at the last one, and are of the same kinds.

    It launches at once what the last one has found.

    Args:
        turn: The launches.
        arguments, tensors: The arguments of the last replay, and the tensors from outside.
        in_place: Those of `tensors` that a replay writes to.
    """

    def __init__(
        self,
        turn: PooledProgram,
        arguments: Sequence[Tensor],
        tensors: Sequence[Tensor],
        in_place: Sequence[Tensor],
    ) -> None:
        self._turn, self._written = turn, in_place
        self._kinds = [kind(t._data) for t in arguments]
        self._gradients = [t.requires_grad for t in in_place]
        written, first = {id(t) for t in in_place}, len(arguments)
        self._others = [t for t in tensors if id(t) not in written]
        self._other_kinds = [_kind(t) for t in self._others]
        self._inputs = [None] * first
        self._inputs += [t._data if id(t) in written else None for t in tensors]
        self._addresses = [0 if a is None else a.address for a in self._inputs]
        self._moving = [i for i, a in enumerate(self._inputs) if a is None]
        """The indices of the inputs whose tensors may change from run to run."""
        self._arrays = [t._data for t in in_place]

    def holds(self) -> bool:
        """Whether the outer tensors that the graph reads are still those of the capture."""
        return (
            all(map(is_, map(_DATA, self._written), self._arrays))
            and [t.requires_grad for t in self._written] == self._gradients
            and [_kind(t) for t in self._others] == self._other_kinds
        )

    def takes(self, arguments: Sequence[Tensor]) -> bool:
        """Whether these arguments are of the same kinds, and nobody else has what is written."""
        return (
            [kind(t._data) for t in arguments] == self._kinds
            and max(map(sys.getrefcount, self._arrays), default=0) <= HOLDERS
            and not any(map(_LENT, self._arrays))
        )

    def run(self, arguments: Sequence[Tensor]) -> list[Any]:
        """The results, and what is written in place."""
        arrays = self._turn.ready([t._data for t in (*arguments, *self._others)])
        addresses = self._addresses
        for i, array in zip(self._moving, arrays, strict=True):
            addresses[i] = array.address
        return self._turn.launch(self._inputs, addresses)


_DATA, _LENT = attrgetter("_data"), attrgetter("_owner.lent")
HOLDERS = 4
"""References to the memory of a tensor that nobody else has: the tensor's, two of an Again, and the
one that counts them."""


def _still_fits(tensor: Tensor, value: ir.Value) -> bool:
    data = tensor._data
    return data.shape == tuple(value.shape or ()) and (
        ir.DataType.from_numpy(data.dtype) == value.dtype
    )


def _kind(tensor: Tensor) -> Any:
    return tensor._data.shape, tensor._data.dtype, tensor.device, tensor.requires_grad


MANY = 32
"""A warning says that a function is captured repeatedly once it has this many graphs."""


class Capture:
    """A function whose operators are captured at its first call, and replayed at later ones.

    Arguments of other ranks, dtypes or Python values are captured anew; of other shapes only if the
    function reads sizes in Python. Called within another capture, it is part of that one.

    Args:
        function: A function of Tensors, nested lists, tuples and dicts of them, and Python values.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._captured: dict[Any, list[tuple[Captured, Any]]] = {}
        self._last: Captured | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if MODE.recorder is not None:
            return self._function(*args, **kwargs)
        tensors: list[Tensor] = []
        form = flat((args, kwargs), tensors)
        kinds = tuple([(t._data.dtype.num, t.ndim, t.device, t.requires_grad) for t in tensors])
        same = [id(t) for t in tensors]  # two arguments that are one tensor are one in the graph
        key = (form, kinds, tuple(map(same.index, same)), MODE.grad)
        for captured, shape in self._captured.get(key, ()):
            if captured.fits(tensors):
                self._last = captured
                return formed(shape, iter(captured.replay(tensors)))
        return self._first(key, tensors, args, kwargs)

    def __get__(self, instance: object, owner: object = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def _first(
        self, key: object, tensors: list[Tensor], args: Iterable[object], kwargs: dict[str, object]
    ) -> Any:
        recorder = Recorder(MODE.grad)
        names = names_of(self._function, args, kwargs)
        for tensor in tensors:
            recorder.argument(tensor, names.get(id(tensor), "x"))
        MODE.recorder = recorder
        try:
            result = self._function(*args, **kwargs)
        finally:
            MODE.recorder = None
        results: list[Tensor] = []
        shape = form_of(result, results)
        captured = self._last = Captured(recorder, tensors, results)
        self._captured.setdefault(key, []).append((captured, shape))
        if len(self.graphs) == MANY:
            name = getattr(self._function, "__qualname__", "a function")
            warnings.warn(
                f"{name} has been captured {MANY} times, for other sizes or "
                "Python values: make its numbers Tensors, and read no sizes in it",
                CaptureWarning,
                stacklevel=3,
            )
        return result

    @property
    def graphs(self) -> list[Any]:
        """The captured graphs, as onnx_ir.Model."""
        return [captured.model for variants in self._captured.values() for captured, _ in variants]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph of the last call as an ONNX file, with parameters as initializers.

        Raises UsageError before the first call.
        """
        if self._last is None:
            raise UsageError("nothing is captured yet: call the function first")
        _write(self._last, path)


class BoundMethod:
    """A captured method with its instance."""

    def __init__(self, capture: Capture, instance: object) -> None:
        self._capture, self._instance = capture, instance

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._capture(self._instance, *args, **kwargs)


class Block:
    """The graph of what runs within `with capture() as graph`."""

    def __init__(self) -> None:
        self._captured: Captured | None = None
        self._results: list[Tensor] = []

    def __enter__(self) -> Block:
        if MODE.recorder is not None:
            raise UsageError("a block cannot be captured within another capture")
        self._recorder = MODE.recorder = Recorder(MODE.grad)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        recorder, MODE.recorder = self._recorder, None
        del self._recorder
        if kind is not None:
            return
        taken = {id(t) for t, _ in recorder.states.values()}
        grads = {id(leaf.grad) for leaf in recorder.leaves.values()}
        living = [t for t, _ in recorder.living() if id(t) not in taken | grads]
        self._results = living
        self._captured = Captured(recorder, [], living)

    def replay(self) -> None:
        """Run the graph on what its tensors hold now; its results get new elements."""
        captured = self._done()
        captured.fits([])  # what is not so any more, the replay finds out
        arrays = captured.replay([])
        for tensor, new in zip(self._results, arrays, strict=True):
            tensor._data, tensor._edge, tensor._index = new._data, new._edge, new._index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph as an ONNX file, with what it reads from outside as initializers."""
        _write(self._done(), path)

    @property
    def model(self) -> Any:
        """The graph, as an onnx_ir.Model."""
        return self._done().model

    def _done(self) -> Captured:
        if self._captured is None:
            raise UsageError("the block that is captured has not ended")
        return self._captured


def capture(function: Callable[..., Any] | None = None) -> Any:
    """Make one graph of the operators that a function, or a block, calls.

    `@capture` makes a function that runs eagerly once and is replayed afterwards: forward, backward
    and the optimizer's update alike. `with capture() as graph:` does it for a block, which
    `graph.replay()` runs again. The graph is fused, runs as one, and `save(path)` writes it.

    Args:
        function: The function; None for a block.

    Returns:
        A `Capture`, or the context manager of a block.
    """
    return Block() if function is None else Capture(function)


def _write(captured: Captured, path: str | os.PathLike[str]) -> None:
    save(captured.file(captured.names()), path)


def sole(x: Tensor) -> Any:
    """The memory of a Tensor in GPU memory, or a copy of it where others may read it too."""
    from onnx_fuse.runtime.tensor import DeviceTensor

    array = x._data
    if array.is_private() and sys.getrefcount(array) <= 3:  # the Tensor's, this one's, the call's
        return array
    owner = home(array.device_id)
    copy = DeviceTensor(0, array.shape, array.dtype.name, array.device_id, None)
    copy.own(owner.shared.pool.allocate(copy.nbytes, "a tensor"))
    array.before(owner.stream.handle)
    owner.stream.catch_up()
    if copy.nbytes:
        owner.stream.move(copy.address, array.address, copy.nbytes)
    copy.ready = owner.stream
    return copy
