"""The driver calls the runtime makes: memory, copies, streams, graphs; faults as DeviceError."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnx_fuse.errors import INSTALL_CUDA, DeviceError
from onnx_fuse.kernels import jit


def bindings() -> Any:
    """cuda.bindings.driver, or a DeviceError that says what to install."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"device 'cuda' needs the CUDA packages ({error}): {INSTALL_CUDA}"
        ) from error
    return driver


def check(result: Sequence[Any], what: str) -> Any:
    """The value of a driver call's result; a DeviceError that names `what` where it failed."""
    if int(result[0]):
        driver = bindings()
        name, text = driver.cuGetErrorName(result[0])[1], driver.cuGetErrorString(result[0])[1]
        detail = f"{_text(name)} ({_text(text)})"
        if "OUT_OF_MEMORY" in detail:
            raise DeviceMemoryError(f"{what}: {detail}")
        if any(fault in detail for fault in _FATAL):
            detail += (
                "; this process can use the GPU no more (with ONNX_FUSE_GRAPH=0 and "
                "ONNX_FUSE_DEBUG=1 a new one names the kernel that failed)"
            )
        raise DeviceError(f"{what}: {detail}")
    return result[1] if len(result) > 1 else None


# faults of a kernel or of the GPU itself, which take the context along
_FATAL = (
    *("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "ASSERT"),
    *("ILLEGAL_INSTRUCTION", "HARDWARE_STACK", "LAUNCH_FAILED", "LAUNCH_TIMEOUT"),
    *("ECC_UNCORRECTABLE", "DEVICE_UNAVAILABLE", "CONTEXT_IS_DESTROYED"),
)


class DeviceMemoryError(DeviceError):
    """The GPU has too little free memory."""


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


_thread = threading.local()


def begin(device_id: int = 0) -> None:
    """Make the GPU's primary context in another thread, 0.2 s in which this one may do other work.

    Faults are for `start` to raise.
    """

    def retain() -> None:
        with contextlib.suppress(DeviceError):
            _context(device_id)

    threading.Thread(target=retain).start()  # no daemon: an exit must not cut off the driver


def probe(device_id: int = 0) -> None:
    """Raises DeviceError, which says what mends it, where there is no such GPU to be used."""
    driver = bindings()
    try:
        result = driver.cuInit(0)
    except RuntimeError as error:  # the bindings find no libcuda
        detail = " ".join(str(error).split())[:200]
        raise DeviceError(
            f"no NVIDIA driver was found ({detail}): install it, or give the container the GPU "
            "(--gpus all); device 'cpu' needs none"
        ) from error
    check(result, "the NVIDIA driver does not start")
    count = check(driver.cuDeviceGetCount(), "counting GPUs")
    if device_id >= count:
        raise DeviceError(f"GPU {device_id} does not exist: this machine has {count}")


def faults() -> list[str]:
    """Everything that keeps "cuda" from running here, each with what mends it."""

    def fault(work: Callable[[], object]) -> str:
        try:
            work()
        except DeviceError as error:
            return str(error)
        return ""

    found = dict.fromkeys(fault(work) for work in (bindings, jit.check_compiler, start))
    return [text for text in found if text]


def _context(device_id: int) -> Any:
    """The GPU's primary context: the first call makes it, and another meanwhile waits for it."""
    probe(device_id)
    return check(bindings().cuDevicePrimaryCtxRetain(device_id), f"a context on GPU {device_id}")


def start(device_id: int = 0) -> None:
    """Make the GPU's primary context current on this thread; what is missing is a DeviceError."""
    if getattr(_thread, "device", None) != device_id:
        check(bindings().cuCtxSetCurrent(_context(device_id)), f"the context of GPU {device_id}")
        _thread.device = device_id


def free_memory() -> int:
    """Bytes of the current GPU's memory that nobody holds."""
    return int(check(bindings().cuMemGetInfo(), "free memory"))


class Memory:
    """One device allocation; freed when the object goes."""

    def __init__(self, nbytes: int, what: str) -> None:
        self.nbytes = max(nbytes, 1)
        self._free: Callable[..., Any] = bindings().cuMemFree
        self.address = int(check(bindings().cuMemAlloc(self.nbytes), f"{what}: {nbytes:,} bytes"))

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._free(self.address)
            self.address = 0


class Pinned:
    """Page-locked host memory as a uint8 array."""

    def __init__(self, nbytes: int) -> None:
        self._free: Callable[..., Any] = bindings().cuMemFreeHost
        self.address = int(
            check(bindings().cuMemAllocHost(max(nbytes, 1)), f"{nbytes:,} bytes of pinned memory")
        )
        raw = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self.address)
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.ctypeslib.as_array(raw)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._free(self.address)
            self.address = 0


class Event:
    """A point in a stream's order that the host can wait for."""

    def __init__(self) -> None:
        driver = bindings()
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._raw = check(driver.cuEventCreate(int(flags)), "an event")
        self._destroy: Callable[..., Any] = driver.cuEventDestroy

    def record(self, stream: Stream) -> None:
        """Move to the end of what the stream holds now."""
        check(bindings().cuEventRecord(self._raw, stream.raw), "an event")

    def passed(self) -> bool:
        """Whether the stream has come this far (or it was never recorded)."""
        return int(bindings().cuEventQuery(self._raw)[0]) == 0

    def wait(self, what: str) -> None:
        """Until the stream has come this far; a kernel's fault surfaces here."""
        check(bindings().cuEventSynchronize(self._raw), what)

    def __del__(self) -> None:
        if hasattr(self, "_destroy"):
            self._destroy(self._raw)


class Stream:
    """A CUDA stream, and the copies and graphs that go through it."""

    def __init__(self) -> None:
        driver = bindings()
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.raw = check(driver.cuStreamCreate(int(flags)), "a CUDA stream")
        self.handle = int(self.raw)

    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Host to device, in stream order."""
        check(bindings().cuMemcpyHtoDAsync(address, source, nbytes, self.raw), "copy to the GPU")

    def download(self, target: int, address: int, nbytes: int) -> None:
        """Device to host, in stream order."""
        check(bindings().cuMemcpyDtoHAsync(target, address, nbytes, self.raw), "copy from the GPU")

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Device to device, in stream order."""
        check(bindings().cuMemcpyDtoDAsync(target, source, nbytes, self.raw), "copy on the GPU")

    def clear(self, address: int, nbytes: int) -> None:
        """Zeros, in stream order."""
        if nbytes:
            check(bindings().cuMemsetD8Async(address, 0, nbytes, self.raw), "clearing memory")

    def wait(self, what: str) -> None:
        """Until everything enqueued is done; a kernel's fault surfaces here."""
        check(bindings().cuStreamSynchronize(self.raw), what)

    def timed(self, enqueue: Callable[[], None], repeats: int = 20) -> float:
        """Seconds that one `enqueue` takes on the GPU, by events around `repeats` of them."""
        driver = bindings()
        begin, end = (check(driver.cuEventCreate(0), "an event") for _ in range(2))
        enqueue()
        check(driver.cuEventRecord(begin, self.raw), "an event")
        for _ in range(repeats):
            enqueue()
        check(driver.cuEventRecord(end, self.raw), "an event")
        check(driver.cuEventSynchronize(end), "timing")
        milliseconds = float(check(driver.cuEventElapsedTime(begin, end), "timing"))
        for event in (begin, end):
            check(driver.cuEventDestroy(event), "an event")
        return milliseconds / 1e3 / repeats

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """What `enqueue` puts into the stream, as an executable CUDA graph."""
        driver = bindings()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(self.raw, mode), "graph capture")
        collects = gc.isenabled()
        gc.disable()  # memory that is freed while this thread captures would spoil the graph
        try:
            enqueue()
        except BaseException:
            driver.cuStreamEndCapture(self.raw)
            raise
        finally:
            if collects:
                gc.enable()
        graph = check(driver.cuStreamEndCapture(self.raw), "graph capture")
        executable = check(driver.cuGraphInstantiate(graph, 0), "graph instantiation")
        check(driver.cuGraphDestroy(graph), "graph capture")
        return Graph(executable)

    def capture_steps(
        self,
        steps: Sequence[Callable[[], None]],
        after: Sequence[Sequence[int]],
        early: Sequence[bool],
    ) -> Graph:
        """A graph of kernels, one a step: step i follows the steps `after[i]`, all earlier ones.

        A kernel of an `early` step itself waits for those, and may be launched before their end.
        """
        driver = bindings()
        nodes: list[Any] = []
        whole, programmatic = driver.CUgraphEdgeData(), driver.CUgraphEdgeData()
        kinds = driver.CUgraphDependencyType
        programmatic.type = int(kinds.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        programmatic.from_port = int(driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
        flags = driver.CUstreamUpdateCaptureDependencies_flags
        replaced = int(flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)

        def enqueue() -> None:
            for step, before, soon in zip(steps, after, early, strict=True):
                heads = [nodes[k] for k in before]
                edges = [programmatic if soon else whole] * len(heads)
                set_to = driver.cuStreamUpdateCaptureDependencies(
                    self.raw, heads, edges, len(heads), replaced
                )
                check(set_to, "graph capture")
                step()
                found = driver.cuStreamGetCaptureInfo(self.raw)
                check(found, "graph capture")
                nodes.append(found[4][0])

        return self.capture(enqueue)

    def launch(self, graph: Graph, what: str) -> None:
        """Launch an executable graph."""
        check(bindings().cuGraphLaunch(graph.raw, self.raw), what)


class Graph:
    """An executable CUDA graph; destroyed when the object goes."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._destroy: Callable[..., Any] = bindings().cuGraphExecDestroy

    def __del__(self) -> None:
        self._destroy(self.raw)
