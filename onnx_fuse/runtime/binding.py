"""What `InferenceSession.io_binding()` gives on the GPU: inputs and outputs by place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.program.call import Tensor, dtype_of
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.runtime import device
from onnx_fuse.runtime.prepared import Prepared
from onnx_fuse.runtime.staging import Pending
from onnx_fuse.runtime.tensor import DeviceTensor, adopt

_KEPT = 32
"""Shapes of packed batches of which a binding keeps what it found out, the last ones used."""


class Binding:
    """onnxruntime's IOBinding for the CUDA device: inputs by array or address, outputs by place.

    What is bound stays bound: a run copies bound arrays to the GPU, and reads and writes bound GPU
    memory where it is.
    """

    def __init__(self, outputs: Sequence[str], device_id: int) -> None:
        self.known, self.device_id = list(outputs), device_id
        self.feeds: dict[str, Any] = {}
        self.addressed: set[str] = set()
        """The inputs that are bound by an address, which nobody changes behind it."""
        self.targets: dict[str, str] = {}
        self.places: dict[str, DeviceTensor] = {}
        self.lent: dict[str, Any] = {}
        """The objects among the places."""
        self.prepared: Prepared | None = None
        """What the last run found out, as long as only addresses are others."""
        self.kept: dict[tuple[Any, ...], Prepared] = {}
        """What runs of packed batches found out, by the shapes of all that these were fed."""
        self.results: dict[str, Any] = {}
        self.late: Pending | None = None
        """Results on their way to the host."""
        self.expected = 0
        """Tokens that caches which grow are to have in the end, if it is known."""
        self.chained = False
        """Whether each run follows the last: from when its caches stand in rooms (`follows`), pasts
        need not be fed, and presents are no results."""
        self.follows: Any = None
        self.ran_in: device.Stream | None = None
        """The stream of the last run, while nobody has waited for it."""

    def bind_cpu_input(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Feed an array; each run reads what it holds when the run begins."""
        self.feed(name, array)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        """Feed anything that has `__dlpack__`, `__cuda_array_interface__` or `numpy()`.

        Each run that is given no `stream` comes after what the value's library has enqueued.
        """
        plain = not hasattr(value, "__dlpack__") and hasattr(value, "numpy")
        self.feed(name, value.numpy() if plain else value)

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: object,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Feed GPU memory by its address, with element type and shape; it is read in place."""
        memory = self._memory(device_type, device_id, element_type, shape, buffer_ptr)
        self.feed(name, memory, addressed=True)

    def feed(self, name: str, value: object, *, addressed: bool = False) -> None:
        """Feed an array or a GPU tensor; `addressed`: one that is bound by its address."""
        self.feeds[name] = value
        # what an object comes after is asked for, if it was one when the last run prepared this
        asked = addressed or name not in self.addressed
        if self.prepared is not None and not (asked and self.prepared.takes(name, value)):
            self.prepared = None
        (self.addressed.add if addressed else self.addressed.discard)(name)

    def recall(
        self, beside: Callable[[Mapping[str, Any]], Mapping[str, Any] | str]
    ) -> Mapping[str, Any] | None:
        """What is bound and what a packed graph is fed `beside` it, where a run of such shapes has
        been, with whose findings the next one begins. None where the next finds all out itself.
        """
        self.prepared = None  # was for another mask
        if not self.kept or not all(hasattr(value, "shape") for value in self.feeds.values()):
            return None
        if isinstance(more := beside(self.feeds), str):
            return None
        feeds = {**self.feeds, **more}
        last = self.kept.pop(self._shapes(feeds), None)
        if (
            last is None
            or not all(last.takes(name, value) for name, value in feeds.items())
            or not all(last.moves(n, at) for n, at in self.places.items() if n not in self.lent)
        ):
            return None
        self.prepared = last
        return feeds

    def keep(self, feeds: Mapping[str, Any] | None) -> None:
        """Let packed runs of such shapes begin with what this one, of `feeds`, found out."""
        if feeds is None or self.prepared is None:
            return
        self.prepared.rest()
        self.kept[self._shapes(feeds)] = self.prepared
        if len(self.kept) > _KEPT:
            del self.kept[next(iter(self.kept))]
        self.prepared = None

    def _shapes(self, feeds: Mapping[str, Any]) -> tuple[Any, ...]:
        shapes = frozenset((name, tuple(value.shape)) for name, value in feeds.items())
        return shapes, frozenset(self.addressed), tuple(self.targets.items()), tuple(self.places)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: object = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Say where an output goes: "cpu" for an array, "cuda" for a new DeviceTensor.

        With `buffer_ptr`, the address of GPU memory, the output is written there; `element_type`
        and `shape` must then be the output's.
        """
        if device_type not in ("cpu", "cuda"):
            raise UsageError(f"an output is bound to 'cpu' or 'cuda', not to '{device_type}'")
        place = None
        if buffer_ptr is not None:
            memory = (device_type, device_id, element_type, shape or (), buffer_ptr)
            place = self._memory(*memory)
        self.rebind(name, device_type, place)

    def bind_ortvalue_output(self, name: str, value: object) -> None:
        """Write an output into a contiguous GPU tensor, a DeviceTensor or one of any library.

        Each run that is given no `stream` comes after what the tensor's library has enqueued.
        """
        tensor = adopt(value, device.LEGACY)
        if not isinstance(tensor, DeviceTensor):
            raise UsageError(
                f"output {name}: only a GPU tensor can be bound; bind_output(name) gives an array"
            )
        self.rebind(name, "cuda", tensor, value)

    def rebind(
        self, name: str, device_type: str, place: DeviceTensor | None, lent: object = None
    ) -> None:
        """Let an output go to a device, or to a place there; `lent` is the object that has it."""
        if name not in self.known:
            raise UsageError(f"the model has no output '{name}'")
        if place is None and name not in self.places and self.targets.get(name) == device_type:
            return  # as it is bound already
        prepared = self.prepared if lent is None and name not in self.lent else None
        if lent is not None or name in self.lent:
            self.kept.clear()  # the object that is bound is looked at in each of them
        if prepared is None or place is None or not prepared.moves(name, place):
            self.prepared = None
        self.targets[name] = device_type
        self.places.pop(name, None)
        self.lent.pop(name, None)
        if place is not None:
            self.places[name] = place
        if lent is not None:
            self.lent[name] = lent

    def clear_binding_inputs(self) -> None:
        """Unbind all inputs."""
        self.feeds, self.prepared = {}, None
        self.kept.clear()

    def clear_binding_outputs(self) -> None:
        """Unbind all outputs."""
        self.targets, self.places, self.lent, self.prepared = {}, {}, {}, None
        self.kept.clear()

    def synchronize_inputs(self) -> None:
        """Wait for everything on the GPU, whoever enqueued it, so that inputs hold their values."""
        device.start(self.device_id)
        device.wait_for_all()

    def synchronize_outputs(self) -> None:
        """Wait for the last run. Raises DeviceError where a kernel failed."""
        if self.ran_in is not None:
            device.start(self.device_id)
            self.ran_in.wait("running what is bound")
            self.ran_in = None
            for result in self.results.values():
                if isinstance(result, DeviceTensor):
                    result.ready = None

    @staticmethod
    def _memory(
        device_type: str, device_id: int, element_type: Any, shape: Sequence[int], address: int
    ) -> DeviceTensor:
        if device_type != "cuda":
            raise UsageError(
                f"memory of device type '{device_type}' cannot be bound by its address, only that "
                "of 'cuda'"
            )
        dtype = np.dtype(element_type).name
        if dtype not in ITEMSIZE:
            raise UsageError(f"no GPU tensor has the element type {dtype}")
        return DeviceTensor(address, shape, dtype, device_id, None)

    def get_outputs(self) -> list[Any]:
        """The bound outputs in the order of binding: arrays, or DeviceTensors on "cuda".

        It waits for arrays, and not for DeviceTensors.
        """
        if self.late is not None:
            self.results |= zip(self.late.names, self.late.result(), strict=True)
            self.late = None
        return list(self.results.values())

    def copy_outputs_to_cpu(self) -> list[np.ndarray[Any, Any]]:
        """Wait for the bound outputs, and return them as arrays."""
        return [np.asarray(result) for result in self.get_outputs()]


def check_place(name: str, target: DeviceTensor, value: Any) -> None:
    """Refuse a place of another shape or type than the output's, unless that comes later."""
    if value is None:
        return
    dtype = dtype_of(value.dtype) if isinstance(value, Tensor) else value.dtype
    if (target.shape, target.dtype) != (tuple(value.shape), dtype):
        raise UsageError(f"output {name} is {dtype}{list(value.shape)}, not {target}")
