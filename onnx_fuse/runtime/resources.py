"""What the shapes of a model share on one GPU: a stream, weights, memory, staging."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.launch import bind
from onnx_fuse.errors import DeviceError
from onnx_fuse.program.call import Call, Program
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime import device
from onnx_fuse.runtime.arg_updates import operands
from onnx_fuse.runtime.deployed import Deployed
from onnx_fuse.runtime.memory import Arena, Constant, Constants
from onnx_fuse.runtime.plan import aligned
from onnx_fuse.runtime.staging import Downloads, Uploads
from onnx_fuse.runtime.streams import StreamOrder
from onnx_fuse.runtime.weights import Weights

if TYPE_CHECKING:
    import onnx_ir as ir


class Resources:
    """The stream, weights and memory that an Executable and its instances use.

    It refers to neither of them, so that an Executable that nobody has gives its memory back at
    once. Nothing is made before its first use, which needs the device's context.
    """

    def __init__(
        self,
        model: ir.Model | Deployed,
        state: Mapping[str, str],
        device_id: int,
        home: Resources | None,
        retire: Callable[[], None],
    ) -> None:
        """`home` lends its stream and its weights; `retire` lets go of the arena's block."""
        self.model, self.state, self.device_id = model, state, device_id
        if isinstance(model, Deployed):  # its kernels are chosen, and nothing here can compile
            self.hw = Hardware.detect(device_id)
        else:
            from onnx_fuse.runtime import calibration

            self.hw = calibration.of(device_id).hw
        self.uploads, self.downloads = Uploads(), Downloads()
        self._home, self._retire = home, retire
        self._stream: device.Stream | None = None
        self._lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(1, "onnx_fuse kernels")

    @property
    def stream(self) -> device.Stream:
        """The stream of all work. Raises DeviceError in a fork of the process that started it."""
        device.check_process()
        if self._stream is None:
            with self._lock:  # one, whatever threads come first
                if self._stream is None:
                    device.start(self.device_id)
                    stream = device.Stream() if self._home is None else self._home.stream
                    self.order = StreamOrder(stream)
                    """The order of runs in callers' streams, once there is a stream."""
                    self._stream = stream
        return self._stream

    @cached_property
    def copies(self) -> device.Stream:
        """The stream of uploads beside the runs in `stream`."""
        return device.Stream()

    @cached_property
    def weights(self) -> Weights:
        """Weights and states, which stay on the device, by name."""
        home = None if self._home is None else self._home.weights
        return Weights(self.stream, self.device_id, home)

    @cached_property
    def pool(self) -> device.Pool:
        """Where outputs that stay on the GPU, constants and the arena come from."""
        return device.Pool(self.stream, self.device_id)

    @cached_property
    def arena(self) -> Arena:
        """The memory in which the temporaries of all shapes stand."""
        return Arena(self.pool, self._retire)

    @cached_property
    def constants(self) -> Constants:
        """The constants of all programs, on the device."""
        return Constants(self.pool, self.stream)

    def begin(self, program: Program, made: Callable[[np.ndarray], bool]) -> None:
        """Compile the kernels, and upload weights while threads make others (see `Weights.of`)."""
        self.compile(program)
        device.start(self.device_id)
        self.weights.of(program, self.weight, made)

    def compile(self, program: Program) -> Future[None]:
        """Compile the kernels behind those of the programs that came before, while others work."""
        launches = [x for call in (*program.setup, *program.calls) for x in call.launches]
        return self._compiler.submit(nvrtc.compile_all, launches, self.hw.arch)

    def prepared(
        self, program: Program, room: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[int, Constant], device.Memory | None]:
        """Compile the kernels, upload weights and constants, reserve memory for what setup makes.

        The address of each buffer that stays, and what holds it; `room` may have a buffer's bytes.
        """
        compiling = self.compile(program)  # uploading weights needs no kernels
        device.start(self.device_id)
        address = self.weights.of(program, self.weight)
        compiling.result()
        buffers = {b.id: b.nbytes for b in program.buffers if b.kind == "constant"}
        constants = self.constants.place(
            {b: program.constants[b] for b in buffers if b in program.constants}
        )
        address |= dict.fromkeys(buffers, 0)  # those of no bytes have no place
        address |= {b: constant.address for b, constant in constants.items()}
        once = {b: aligned(room.get(b, nbytes)) for b, nbytes in buffers.items()
                if b not in program.constants}  # fmt: skip
        made = self.pool.allocate(sum(once.values()), "constants", again=False) if once else None
        at = 0 if made is None else made.address
        for buffer, nbytes in once.items():
            address[buffer] = at
            at += nbytes
        return address, constants, made

    def set_up(self, calls: Iterable[Call], address: Mapping[int, int]) -> None:
        """Enqueue the calls that depend only on sizes, which run once."""
        for call in calls:
            pointers = operands(address, -1, call)
            for launch in call.launches:
                bind(launch, pointers, self.hw).enqueue(self.stream.handle)

    def forget(self) -> None:
        """Let go of the arena and of host memory whose copies may not have come to their end."""
        self.uploads, self.downloads = Uploads(), Downloads()
        if "arena" in vars(self):
            self.arena.release()

    @property
    def has_residents(self) -> bool:
        """Whether weights or states may be on the device; asks nothing of it."""
        return self._home is not None or "weights" in vars(self)

    def weight(self, name: str) -> np.ndarray:
        """A weight of the model as the file has it."""
        if isinstance(self.model, Deployed):
            return self.model.weight(name)
        value = self.model.graph.initializers[name].const_value
        assert value is not None
        return value.numpy()


class AfterFault:
    """A block that calls `forget` where the driver refuses something in it."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, DeviceError):
            self._forget()


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """A function that calls a bound method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call
