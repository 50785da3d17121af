"""Kernels with their addresses: loaded, packed once, enqueued any number of times."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Protocol

from onnx_fuse.cuda import cublaslt
from onnx_fuse.cuda.arguments import Addresses, Arguments, Operands
from onnx_fuse.cuda.nvrtc import LOADED, LOCK, compile
from onnx_fuse.cuda.source import KEPT, Defines
from onnx_fuse.errors import DeviceError
from onnx_fuse.program.launch import Launch
from onnx_fuse.program.problem import Hardware


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


class LoadedKernel:
    """A kernel that is loaded on a device; its library goes with the last one that uses it."""

    def __init__(self, launch: Launch, arch: str, device: int) -> None:
        driver = self._driver = _driver()
        cubin = compile(launch.source, launch.defines, arch)
        self._library = _check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), launch)
        result = driver.cuLibraryGetKernel(self._library, launch.entry.encode())
        self._raw, self._device, self._smem = _check(result, launch), device, 48 << 10
        self.function = driver.CUfunction(int(self._raw))

    def allow(self, launch: Launch) -> None:
        """Let it take the launch's shared memory: two may ask for different sizes."""
        if launch.smem > self._smem:
            kinds = self._driver.CUfunction_attribute
            limit = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            done = self._driver.cuKernelSetAttribute(limit, launch.smem, self._raw, self._device)
            _check(done, launch)
            self._smem = launch.smem

    def __del__(self) -> None:
        if hasattr(self, "_library") and not sys.is_finalizing():
            _UNUSED.append((self._driver, self._library))


_KERNELS: OrderedDict[tuple[str, str, Defines, str, int], LoadedKernel] = OrderedDict()
_UNUSED: deque[tuple[Any, Any]] = deque()  # libraries that nobody uses, to be unloaded


def _kernel(launch: Launch, arch: str) -> LoadedKernel:
    """The kernel of a launch, loaded on the current device.

    The last `KEPT` that were asked for stay loaded, as do those that somebody has.
    """
    device = int(_check(_driver().cuCtxGetDevice(), launch))
    key = (launch.source, launch.entry, launch.defines, arch, device)
    with LOCK:
        kernel = _KERNELS.get(key)
    if kernel is None:
        fresh = LoadedKernel(launch, arch, device)
        with LOCK:
            kernel = _KERNELS.setdefault(key, fresh)
            LOADED.add((launch.source, launch.defines, arch))
    with LOCK:
        kernel.allow(launch)
        _KERNELS.move_to_end(key)
        while len(_KERNELS) > KEPT:
            old, _ = _KERNELS.popitem(last=False)
            LOADED.discard((old[0], *old[2:4]))
    _unload()
    return kernel


def _unload() -> None:
    while _UNUSED:
        driver, library = _UNUSED.popleft()
        if driver.cuCtxSynchronize()[0]:  # not while a stream captures
            _UNUSED.append((driver, library))
            return
        driver.cuLibraryUnload(library)


def bound() -> set[tuple[str, str]]:
    """(source, entry) of every kernel this process has bound."""
    with LOCK:
        return {(source, entry) for source, entry, *_ in _KERNELS}


def _check(result: Sequence[Any], launch: Launch) -> Any:
    if int(result[0]):
        reason = _driver().cuGetErrorName(result[0])[1]
        name = reason.decode() if isinstance(reason, bytes) else reason
        raise DeviceError(f"{launch.entry} grid={launch.grid} block={launch.block}: {name}")
    return result[1] if len(result) > 1 else None


class _Flags:
    """Device memory that is zero, cut into pieces; freed when the last piece goes."""

    SIZE = 2 << 20  # what the driver takes at least

    def __init__(self, nbytes: int, launch: Launch) -> None:
        driver = self._driver = _driver()
        self.nbytes, self.used = nbytes, 0
        # another library may capture a graph of this launch, which the memory is to outlive
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = _check(driver.cuThreadExchangeStreamCaptureMode(relaxed), launch)
        try:
            self._context = _check(driver.cuCtxGetCurrent(), launch)
            self.address = int(_check(driver.cuMemAlloc(nbytes), launch))
            _check(driver.cuMemsetD8(self.address, 0, nbytes), launch)
            # the memset is ordered with no other stream
            _check(driver.cuStreamSynchronize(0), launch)
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)

    def __del__(self) -> None:
        if not hasattr(self, "address") or sys.is_finalizing():
            return
        if not self._driver.cuCtxPushCurrent(self._context)[0]:
            self._driver.cuMemFree(self.address)
            self._driver.cuCtxPopCurrent()


_FLAGS: dict[int, _Flags] = {}  # device -> what the next pieces come from


class _Zeroed:
    """A launch's own memory, zero at first; its block is freed with it, after what still runs."""

    ALIGNED = 128  # launches that run side by side share no line of the cache

    def __init__(self, launch: Launch) -> None:
        device = int(_check(_driver().cuCtxGetDevice(), launch))
        nbytes = -(-launch.sync // self.ALIGNED) * self.ALIGNED
        with LOCK:
            block = _FLAGS.get(device)
            if block is None or block.used + nbytes > block.nbytes:
                block = _FLAGS[device] = _Flags(max(nbytes, _Flags.SIZE), launch)
            self._block, self.address = block, block.address + block.used
            block.used += nbytes


class PlacedLaunch(Protocol):
    """A Launch with its addresses."""

    early: bool
    """Whether, where its kernel waits by itself, it may start while the launch before it ends: not
    where a graph's edges say what it follows."""

    def place(self, pointers: Addresses) -> None:
        """Take other addresses for what is enqueued from now on."""

    def enqueue(self, stream: int) -> None:
        """Enqueue into the CUstream whose handle is `stream` (one under capture records it)."""


class BoundLaunch:
    """A Launch with its addresses: compiled, packed once, enqueued any number of times."""

    def __init__(
        self, launch: Launch, address: Addresses, hw: Hardware, operands: Operands | None = None
    ) -> None:
        self.launch, self.early = launch, hw.cc >= 90 and launch.waits != ""
        self.grid, self.smem = launch.grid, launch.smem
        self._loaded = _kernel(launch, hw.arch)
        self._kernel = self._loaded.function
        self._sync = _Zeroed(launch) if launch.sync else None
        self._settings: tuple[int, bool, Any] = (-1, False, None)
        self._enqueue = _driver().cuLaunchKernelEx
        self._arguments = Arguments(launch, operands or {})
        self.arguments = self._arguments.address
        """The address of the array that points to the arguments; it never changes."""
        self.place(address)

    @property
    def numbers(self) -> tuple[tuple[int, int, int], int, tuple[Any, ...], int]:
        """What `rewrite` takes but for addresses."""
        return self.grid, self.smem, self._arguments.words, self.launch.sync

    def twin(self, address: Addresses) -> BoundLaunch:
        """The same launch with other addresses, in the same order of launches.

        They share the memory in which the launch counts, which is ready for the next one.
        """
        twin = copy(self)
        twin._arguments = self._arguments.twin()
        twin.arguments = twin._arguments.address
        twin.place(address)
        return twin

    def place(self, address: Addresses) -> None:
        """Take other addresses for what is enqueued from now on."""
        self._arguments.place(address, self._sync.address if self._sync else 0)

    def rewrite(
        self,
        grid: tuple[int, int, int],
        smem: int,
        words: tuple[Any, ...],
        sync: int,
        address: Addresses,
    ) -> None:
        """Take another grid, bytes of shared memory, arguments (see `words_of`) and addresses.

        Where the bytes of its own memory are others, that is new: what a run leaves lies by them.
        """
        if smem != self.smem:
            self.launch = replace(self.launch, smem=smem)
            with LOCK:
                self._loaded.allow(self.launch)
        if (grid, smem) != (self.grid, self.smem):
            self.grid, self.smem, self._settings = grid, smem, (-1, False, None)
        if sync != self.launch.sync:
            self.launch = replace(self.launch, sync=sync)
            self._sync = _Zeroed(self.launch)
        self._arguments.words = words
        self.place(address)

    def enqueue(self, stream: int) -> None:
        """Enqueue into the CUstream whose handle is `stream` (one under capture records a node)."""
        last, early, settings = self._settings
        if last != stream or early != self.early:
            x = self.launch
            settings = _settings(
                self.grid, x.block, self.smem, x.cluster, x.cooperative, self.early, stream
            )
            self._settings = stream, self.early, settings
        done = self._enqueue(settings, self._kernel, self.arguments, 0)
        if done[0]:
            _check(done, self.launch)


@lru_cache(maxsize=4096)
def _settings(
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem: int,
    cluster: int,
    cooperative: bool,
    early: bool,
    stream: int,
) -> Any:
    """The launch's configuration as a struct of the driver's, which is shared and never changed."""
    driver = _driver()
    kinds, config = driver.CUlaunchAttributeID, driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = smem, stream
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = cluster
        attribute.value.clusterDim.y = 1
        attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    if early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def bind(
    launch: Launch, address: Addresses, hw: Hardware, operands: Operands | None = None
) -> PlacedLaunch:
    """Bind `launch` to its addresses: a kernel of this package, or a library's call."""
    if not launch.of_library:
        return BoundLaunch(launch, address, hw, operands)
    pointers = {name: address[key] + at for name, (key, at) in (operands or {}).items()} or address
    if launch.collective is not None:
        from onnx_fuse.cuda import collective  # which a run on one GPU does without

        return collective.BoundCollective(launch, pointers, hw)
    return cublaslt.BoundMatmul(launch, pointers, hw)
