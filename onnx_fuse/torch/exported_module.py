"""Modules whose whole forward is one graph: `fuse(module, whole=True)`.

For each kind of call (mode, types and ranks) the forward is exported and imported as an ONNX file
is: for the shapes of the first call, and once more, with sizes that are open, when some of them
change. Parameters and buffers stay the module's own, and are read where they are at each call.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from functools import cache
from operator import is_
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from onnx_fuse import autodiff, rewrite, session
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.ir.build import add_input, all_nodes, bind_defaults
from onnx_fuse.ir.traits import DRAWS
from onnx_fuse.rewrite.precision import lower_precision
from onnx_fuse.rewrite.slices import slices_as_splits
from onnx_fuse.torch import exports
from onnx_fuse.torch.imported import opened
from onnx_fuse.torch.library import call_graph, mask_of
from onnx_fuse.training.dropout import draw_masks
from onnx_fuse.training.weights import model_names

PROGRAMS = 64
"""Programs that a module keeps; then it begins anew."""
CALLS = 1024
"""Kinds of calls with their shapes whose programs are known without a search."""
_RNG = "dropout.rng"
_NARROW = {torch.bfloat16: ir.DataType.BFLOAT16, torch.float16: ir.DataType.FLOAT16}


class ExportedModule(nn.Module):
    """A module, of the class behind this one, whose forward is a graph of ours.

    Under torch.compile, torch.export and torch.func its own forward runs.
    """

    _programs: Programs

    def forward(self, *args: object, **named: object) -> Any:
        """What the module's own forward returns."""
        if (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or torch._C._len_torch_dispatch_stack()
        ):
            return super().forward(*args, **named)
        return self._programs(self, args, named)

    def __reduce_ex__(self, protocol: object) -> Any:
        """As its own class, which a copy or a file is made of, and whole again."""
        state = {key: x for key, x in vars(self).items() if key != "_programs"}
        return _again, (type(self).__mro__[2],), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._programs = Programs(self)


def _again(kind: object) -> Any:
    cls = _fused_class(kind)
    return cls.__new__(cls)


@cache
def _fused_class(kind: Any) -> Any:
    return type(kind.__name__, (ExportedModule, kind), {"__module__": kind.__module__})


def make_whole(module: nn.Module) -> None:
    """Let a module's forward be one graph from now on. Raises UsageError for what is none."""
    if isinstance(module, ExportedModule):
        return
    for name, each in module.named_modules():
        if isinstance(each, ExportedModule):
            raise UsageError(f"'{name}' is one graph already")
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if name and any(getattr(each, hook, None) for hook in hooks):
            raise UsageError(f"'{name}' has hooks, which a graph does not call")
    kind: Any = type(module)
    module.__class__ = _fused_class(kind)
    module._programs = Programs(module)


class Programs:
    """The programs of a module, by the kind of call."""

    def __init__(self, module: nn.Module) -> None:
        self._lock = threading.RLock()
        self._begin(module)

    def _begin(self, module: nn.Module) -> None:
        self._known: dict[Any, ExportedForward] = {}
        self._kinds: dict[Any, CallKind] = {}
        every = [*module.modules()]
        self._tables = [each._modules for each in every]
        self._children = [child for table in self._tables for child in table.values()]
        self._modules = every

    def __call__(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the program for these arguments, which is made for the first call of its kind."""
        children = [child for table in self._tables for child in table.values()]
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            self._begin(module)
        leaves: Sequence[Any] = (*args, *named.values())
        spec: object = len(args), (*named,)
        if any(not isinstance(x, (Tensor, *exports.PLAIN)) for x in leaves):
            leaves, nested = tree.tree_flatten((args, named))
            spec = str(nested)
            for x in leaves:
                if not isinstance(x, (Tensor, *exports.PLAIN, torch.dtype, torch.device)):
                    raise UsageError(f"an argument is of class {type(x).__name__}")
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not tensors:
            raise UsageError("none of the arguments is a tensor, so there is nothing to export")
        kind = (
            spec,
            tuple([each.training for each in self._modules]),
            _autocast(tensors[0].device.type),
            *[(x.dim(), x.dtype, x.device) if isinstance(x, Tensor) else repr(x) for x in leaves],
        )
        key = kind, *[x.shape for x in tensors]
        program = self._known.get(key)
        if program is None or program.is_stale():
            program = self._made(module, args, named, key)
        try:
            return program(tensors)
        except (ValueError, AttributeError, KeyError):  # a tensor does not fit, or is gone
            if program.fits():
                raise
            self._forget(program)
        return self._made(module, args, named, key)(tensors)

    def _forget(self, program: ExportedForward) -> None:
        with self._lock:
            self._known = {key: each for key, each in self._known.items() if each is not program}
            for kind in self._kinds.values():
                kind.programs = [each for each in kind.programs if each is not program]

    def _made(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], key: tuple[Any, ...]
    ) -> ExportedForward:
        with self._lock:
            return self._export(module, args, named, key)

    def _export(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], key: tuple[Any, ...]
    ) -> ExportedForward:
        kind, shapes = self._kinds.setdefault(key[0], CallKind()), [tuple(s) for s in key[1:]]
        for old in [each for each in kind.programs if each.is_stale()]:
            self._forget(old)
        program = next((each for each in kind.programs if each.sizes.serve(shapes)), None)
        if program is not None:
            if len(self._known) >= CALLS:
                self._known.clear()
            self._known[key] = program
            return program
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph is being captured, and this kind of call has not run before: run "
                "once before the capture"
            )
        if sum(len(each.programs) for each in self._kinds.values()) >= PROGRAMS:
            self._known.clear()
            self._kinds = {key[0]: kind}
            kind.programs = []
        leaves, spec = tree.tree_flatten((args, named))
        cls = type(module)
        device = next(x.device.type for x in leaves if isinstance(x, Tensor))
        narrow = _autocast(device)
        module.__class__ = cls.__mro__[2]
        try:
            for axes in kind.ways(shapes):
                try:
                    with torch.autocast(device, enabled=False), torch.enable_grad():
                        exported = exports.export(module, leaves, spec, axes)
                    program = ExportedForward(module, exported, narrow)
                    if any(axes):
                        program.check([x for x in leaves if isinstance(x, Tensor)])
                    break
                except (UsageError, ModelError) as error:
                    name = cls.__name__
                    if any(axes):
                        kind.closed = True
                        warnings.warn(f"{name} is exported for each shape: {error}", stacklevel=2)
                    elif isinstance(error, UsageError):
                        raise UsageError(f"{name} cannot be fused whole: {error}") from error
                    else:
                        raise
        finally:
            module.__class__ = cls
        assert program is not None, "the last way has no open axes"
        kind.programs.append(program)
        self._known[key] = program
        return program


class CallKind:
    """Calls that differ in the sizes of their tensors alone, and the programs for them."""

    def __init__(self) -> None:
        self.programs: list[ExportedForward] = []
        self.closed = False
        """Whether torch cannot export with open sizes."""
        self._first: exports.Shapes | None = None
        self._changing: list[set[int]] = []

    def ways(self, shapes: exports.Shapes) -> list[Sequence[set[int]]]:
        """The axes of each tensor to leave open for these shapes: those that have changed so far.

        The way that is tried last leaves none open.
        """
        if self._first is None:
            self._first, self._changing = shapes, [set() for _ in shapes]
        for axes, before, now in zip(self._changing, self._first, shapes, strict=True):
            axes.update(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
        # torch makes a constant of a size of 0 or 1
        open_axes = [
            {i for i in axes if now[i] > 1}
            for axes, now in zip(self._changing, shapes, strict=True)
        ]
        return [open_axes, ()] if any(open_axes) and not self.closed else [()]


def _autocast(device: str) -> torch.dtype | None:
    """The type of an autocast region; None outside of one."""
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class ExportedForward:
    """The graph of a module's forward for one kind of call."""

    def __init__(
        self, module: nn.Module, exported: exports.Exported, narrow: torch.dtype | None
    ) -> None:
        """`narrow` is the type to compute in, where it is not the module's own."""
        tables = _tables(module)
        self._results, self.sizes = exported.results, exported.sizes
        """`sizes`: the shapes of arguments that it serves"""
        # outside of a graph's eyes: what it reads must not have changed until its backward
        changed = set(exported.updated)
        self._counted = [tables[name] for name in exported.counted]
        self._updated = [(tables[name], *f) for name, f in exported.updated.items()]
        graph, names, self._draws = _prepared(module, exported, narrow)
        self._graph = graph
        self._places = [tables[name] for name in names if name not in changed]
        self._stats = [tables[name] for name in names if name in changed]
        order = [n for n in names if n not in changed] + [n for n in names if n in changed]
        position = {name: i for i, name in enumerate(order)}
        self._order = [position[name] for name in names] if order != [*names] else None
        self._outputs = len(graph.outputs) - len(self._updated)
        baked = [
            tables[name]
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if name in tables and not buffer.is_floating_point() and name not in exported.counted
        ]
        self._kinds = self._present()
        self._baked = [(*place, _read(place), _read(place)._version) for place in baked]

    def _present(self) -> list[Any]:
        """The shapes and types of the module's tensors that the graph reads, None where gone."""
        tensors = [table.get(name) for table, name in (*self._places, *self._stats)]
        return [None if x is None else (x.shape, x.dtype) for x in tensors]

    def fits(self) -> bool:
        """Whether the module's tensors have the shapes and types that the graph was made for."""
        return self._present() == self._kinds

    def is_stale(self) -> bool:
        """Whether a buffer that is a constant of the graph has changed."""
        for table, name, tensor, version in self._baked:
            now = table.get(name)
            if now is not tensor or now._version != version:
                return True
        return False

    def _given(self, tensors: Sequence[Tensor], draws: Sequence[Tensor]) -> list[Tensor]:
        weights = [table[name] for table, name in self._places]
        # a buffer that this call changes must not count as changed for its own backward
        weights += [table[name].data for table, name in self._stats]
        if self._order is not None:
            weights = [weights[i] for i in self._order]
        return [*tensors, *draws, *weights]

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise UsageError or ModelError where it has no gradient, or waits for the host."""
        where = tensors[0].device
        draws = [torch.empty((), dtype=torch.int64, device=where)] if self._draws else []
        inputs = self._given(tensors, draws)
        mask = mask_of(inputs) if torch.is_grad_enabled() else ""
        graph = self._graph.derived(f"forward:{mask}") if "1" in mask else self._graph
        if where.type != "cuda":
            return
        with torch.cuda.device(where):
            turn = graph.turn([t.detach().contiguous() for t in inputs])
        if turn is None:
            raise UsageError("its kernels need sizes that the GPU computes")

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """What forward returns for the tensors of its arguments."""
        draws = []
        if self._draws:
            draws = [torch.empty((), dtype=torch.int64, device=tensors[0].device).random_()]
        results = call_graph(self._graph, self._given(tensors, draws))
        if self._updated or self._counted:
            self._update_statistics(results[self._outputs :])
        return self._results(results[: self._outputs])

    def _update_statistics(self, statistics: Sequence[Tensor]) -> None:
        with torch.no_grad():
            if self._counted:
                torch._foreach_add_([table[name] for (table, name) in self._counted], 1)
            if not self._updated:
                return
            buffers = [table[name] for (table, name), *_ in self._updated]
            old = [first for _, first, _ in self._updated]
            new = [second for *_, second in self._updated]
            torch._foreach_mul_(buffers, old)
            torch._foreach_add_(buffers, torch._foreach_mul(statistics, new))


def _tables(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each parameter and buffer stands: the dict of its module, and its name there."""
    places = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for table in (each._parameters, each._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    places[f"{prefix}.{name}" if prefix else name] = (table, name)
    return places


def _read(place: tuple[dict[str, Any], str]) -> Tensor:
    table, name = place
    tensor: Tensor = table[name]
    return tensor


def _prepared(
    module: nn.Module, exported: exports.Exported, narrow: torch.dtype | None
) -> tuple[Any, list[str], bool]:
    """The graph whose further inputs are the module's tensors, their names, whether it draws.

    The number that masks are drawn from is its first input behind the arguments.
    """
    floats = {
        exports.PREFIX + name
        for name, x in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        if x.is_floating_point()
    }
    buffers = {exports.PREFIX + name for name, _ in module.named_buffers(remove_duplicate=False)}
    early = floats & buffers
    while True:
        model = session.load(exported.model.clone())
        bind_defaults(model)
        graph = model.graph
        rng: list[ir.Value] = []

        def number(graph: ir.Graph = graph, rng: list[ir.Value] = rng) -> ir.Value:
            if not rng:
                rng.append(add_input(graph, _RNG, ir.DataType.INT64, []))
            return rng[0]

        draw_masks(graph, autodiff.Emitter(model), number)
        for node in all_nodes(graph):
            if node.op_type in DRAWS and not node.domain:
                raise UsageError(f"its forward draws random numbers ({node.op_type})")
        slices_as_splits(model)
        first = []
        for value in [v for v in graph.initializers.values() if v.name in floats]:
            if value.name in early or not autodiff.is_weight(value):
                del graph.initializers[str(value.name)]
                value.const_value = None
                graph.inputs.append(value)
                first.append(str(value.name))
        used = {str(v.name) for v in graph.initializers.values() if v.uses()} & floats
        rewrite.optimize(model, level=2, training=True)
        if narrow in _NARROW:
            lower_precision(model, _NARROW[narrow], masters=True)
        weights = [v for v in graph.initializers.values() if floats.issuperset(model_names(v))]
        lost = used.difference(n for v in weights for n in model_names(v))
        if not lost:
            break
        early = early | lost  # a pass took them for constants
    fixed = [str(v.name) for v in graph.outputs[len(graph.outputs) - len(exported.updated) :]]
    opened_graph, names = opened(model, weights, fixed if exported.updated else ())
    names = [name.removeprefix(exports.PREFIX) for name in (*first, *names)]
    return opened_graph, names, bool(rng)
