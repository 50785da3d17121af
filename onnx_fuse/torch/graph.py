"""A graph as a function of torch tensors: its ends, its halves for autograd, and where it runs."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import onnx_ir as ir
import torch

from onnx_fuse.autodiff import partition
from onnx_fuse.errors import UsageError
from onnx_fuse.torch.guard_cache import Kinds
from onnx_fuse.torch.host import DTYPES, HostRunner


class End:
    """An input or output of a graph: name, torch's dtype, and a size or a symbol for each axis."""

    def __init__(self, value: ir.Value) -> None:
        self.name = value.name or ""
        if value.dtype not in DTYPES:
            raise UsageError(f"'{self.name}' is of type {value.dtype}, which torch does not have")
        self.dtype = DTYPES[value.dtype]
        self.differentiable = self.dtype.is_floating_point
        """Of an output: whether it has a gradient."""
        self.sizes: tuple[int | str | None, ...] | None = None
        if value.shape is not None:
            self.sizes = tuple(d if isinstance(d, int) else d.value for d in value.shape)

    def shape(self, symbols: dict[str, Any]) -> tuple[Any, ...] | None:
        """The sizes with these numbers for symbols; None where they do not tell it."""
        if self.sizes is None:
            return None
        shape = tuple(symbols.get(d) if isinstance(d, str) else d for d in self.sizes)
        return None if None in shape else shape


class OnnxGraph:
    """An ONNX graph in canonical form whose inputs are all that it computes with.

    `key` names it within this process. The graphs derived of it are kept as long as it is.
    `fused` allows operators of ours in its backward that its forward does not have. The outputs
    `fixed` have no gradient, whatever their type. With `rows` each row of the first input makes one
    of every output that has several axes.
    """

    def __init__(
        self,
        key: str,
        model: ir.Model,
        *,
        fused: bool = False,
        fixed: Sequence[str] = (),
        rows: bool = False,
    ) -> None:
        self.key, self.model, self.fused, self._fixed = key, model, fused, fixed
        self.rows = rows
        self.inputs = [End(v) for v in model.graph.inputs]
        self.outputs = [End(v) for v in model.graph.outputs]
        for end in self.outputs:
            end.differentiable &= end.name not in fixed
        self.gpu: dict[int, Any] = {}
        """What runs it on each GPU, by its number."""
        self.ready = Kinds()
        """What runs it, and keeps what its gradient reads (`library.call_graph`)."""
        self._made: dict[str, OnnxGraph] = {}
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxGraph:
        return self

    @cached_property
    def host(self) -> HostRunner:
        """What runs it on the CPU."""
        return HostRunner(self.model)

    def symbols(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The size of each symbol. Raises ValueError for tensors that do not fit the inputs."""
        values: dict[str, Any] = {}
        where = tensors[0].device
        for end, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.device != where:
                raise ValueError(f"{end.name} is on {tensor.device}, but others are on {where}")
            if tensor.dtype != end.dtype:
                raise ValueError(f"{end.name} is {tensor.dtype}, but {end.dtype} is needed")
            if end.sizes is None:
                continue
            if tensor.dim() != len(end.sizes):
                raise ValueError(
                    f"{end.name} has {tensor.dim()} axes, but {len(end.sizes)} are needed"
                )
            for axis, (size, wanted) in enumerate(zip(tensor.shape, end.sizes, strict=True)):
                bound = values.setdefault(wanted, size) if isinstance(wanted, str) else wanted
                if type(bound) is int and type(size) is int and bound != size:  # while traced, not
                    raise ValueError(f"{end.name} has size {size} at axis {axis}, not {bound}")
        return values

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute the outputs on the device of the tensors, which must be one."""
        if tensors[0].get_device() >= 0:
            results: list[torch.Tensor] = self._runner_on(tensors[0].device).run(self, tensors)
            return results
        tensors = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        symbols = self.symbols(tensors)
        shapes = [end.shape(symbols) for end in self.outputs]
        return self.host.run(self.inputs, self.outputs, tensors, shapes)

    def turn(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What launches it for GPU tensors like these (`gpu.GpuRunner.turn`)."""
        return self._runner_on(tensors[0].device).turn(self, tensors)

    def _runner_on(self, where: torch.device) -> Any:
        runner = self.gpu.get(where.index)
        if runner is not None:
            return runner
        if where.type != "cuda":
            raise UsageError(f"a tensor is on '{where}': there is 'cpu', and 'cuda'")
        from onnx_fuse.torch.gpu import GpuRunner

        with self._lock:
            return self.gpu.setdefault(where.index, GpuRunner(self.model, where.index))

    # ---- derivatives ----

    def derived(self, part: str) -> OnnxGraph:
        """The graph "forward:101", "backward:101" or "gradient:101", for the inputs in the mask.

        A forward has what its backward reads as further outputs. The first inputs of a backward and
        of a gradient are the gradients of the float outputs; the others have the names of outputs
        of the forward, and of inputs of this graph. A gradient reads inputs alone.
        """
        derived = self._made.get(part)
        if derived is not None:
            return derived
        with self._lock:
            if part not in self._made:
                kind, _, mask = part.partition(":")
                wrt = [e.name for e, bit in zip(self.inputs, mask, strict=True) if bit == "1"]
                recompute = kind == "gradient"
                halves = partition(
                    self.model, wrt, fused=self.fused and not recompute, recompute=recompute,
                    fixed=self._fixed,
                )  # fmt: skip
                models = {"gradient": halves.backward}
                if not recompute:
                    models = {"forward": halves.forward, "backward": halves.backward}
                for name, model in models.items():
                    key = f"{name}:{mask}"
                    self._made[key] = OnnxGraph(
                        f"{self.key}/{key}", model, fused=self.fused,
                        rows=self.rows and name == "forward",
                    )  # fmt: skip
            return self._made[part]

    @cached_property
    def floats(self) -> str:
        """The mask of all inputs that may have a gradient."""
        return "".join("1" if e.dtype.is_floating_point else "0" for e in self.inputs)

    @cached_property
    def has_float32(self) -> bool:
        """Whether torch's precision of float32 products matters to it."""
        return any(e.dtype == torch.float32 for e in self.inputs)

    @cached_property
    def saving(self) -> str:
        """The part of the forward for the gradients of all of these."""
        return f"forward:{self.floats}"


_ROOTS: weakref.WeakValueDictionary[str, OnnxGraph] = weakref.WeakValueDictionary()
BUILDERS: dict[str, Callable[..., OnnxGraph]] = {}
"""What makes the graph of a function of ours, by the name in its key."""


def enter(graph: OnnxGraph) -> OnnxGraph:
    """Let `find` know a graph as long as somebody holds it; returns one of the same key, if any."""
    return _ROOTS.setdefault(graph.key, graph)


def built(name: str, *parts: object) -> str:
    """The key of the graph that the builder `name` makes of these arguments."""
    return f"{name}({','.join(map(str, parts))})"


_BUILT = re.compile(r"(\w+)\((.*)\)")


def find(key: str) -> OnnxGraph:
    """The graph of a key. Raises UsageError where the module it belongs to is gone."""
    root, *parts = key.split("/")
    graph = _ROOTS.get(root)
    if graph is None:
        match = _BUILT.fullmatch(root)
        if match is None or match[1] not in BUILDERS:
            raise UsageError(f"graph '{root}' is not in this process: make its module first")
        graph = BUILDERS[match[1]](*match[2].split(","))
    for part in parts:
        graph = graph.derived(part)
    return graph
