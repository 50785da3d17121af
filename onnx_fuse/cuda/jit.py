"""NVRTC: source under cuda_src/ (or text) -> cubin -> kernel -> launch; disk cache, resources."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from onnx_fuse import config
from onnx_fuse.cuda.arguments import Arguments
from onnx_fuse.errors import INSTALL_CUDA, DeviceError
from onnx_fuse.program.problem import ITEMSIZE, Hardware, Launch

Defines = tuple[tuple[str, str], ...]
_INCLUDE = re.compile(r'^[ \t]*#include[ \t]+"([^"]+)".*$', re.MULTILINE)
_LOCK = threading.Lock()


# ---- source -------------------------------------------------------------------------------------


def source_root() -> Path:
    """cuda_src/: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "cuda_src"
    return inside if inside.is_dir() else package.parent / "cuda_src"


@cache
def source_text(source: str) -> str:
    """The text of a path under cuda_src/ (or of a text), each own #include expanded once."""
    seen: set[str] = set()

    def expand(text: str) -> str:
        def include(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in seen:
                return ""
            seen.add(name)
            return expand((source_root() / name).read_text())

        return _INCLUDE.sub(include, text)

    return expand(source if "\n" in source else (source_root() / source).read_text())


def without_bounds(text: str) -> str:
    """The text without its __launch_bounds__(...), which only a __global__ function may have."""
    head, *rest = text.split("__launch_bounds__")
    for part in rest:
        depth, end = 0, 0
        while depth or "(" not in part[:end]:
            depth += {"(": 1, ")": -1}.get(part[end], 0)
            end += 1
        head += part[end:]
    return head


_GIVEN: dict[tuple[str, Defines, str], bytes | memoryview] = {}  # compiled elsewhere
_GIVEN_WAITS: dict[str, tuple[bool, bool]] = {}


def give(
    source: str, defines: Defines, arch: str, cubin: bytes | memoryview, waiting: tuple[bool, bool]
) -> None:
    """Take `cubin` for what `source` compiles to; `waiting` is (waits, waits_first) of it.

    `source` is then a name alone, which must tell the text apart from any other.
    """
    _GIVEN[source, defines, arch], _GIVEN_WAITS[source] = cubin, waiting


@cache
def waits(source: str) -> bool:
    """Whether its kernels wait for the launch before by themselves, so may start while it runs."""
    if source in _GIVEN_WAITS:
        return _GIVEN_WAITS[source][0]
    kernels = source_text(source).split("__global__")[1:]
    return all(re.search(r"\b(after_previous_launch|grid_dependency_wait)\(\)", k) for k in kernels)


@cache
def waits_first(source: str) -> bool:
    """Whether its kernels do nothing before they wait, and so may follow any launches early."""
    if source in _GIVEN_WAITS:
        return _GIVEN_WAITS[source][1]
    kernels = source_text(source).split("__global__")[1:]
    heads = [";".join(k.partition("{")[2].split(";")[:2]) for k in kernels]
    return all(re.search(r"\b(after_previous_launch|grid_dependency_wait)\(\)", h) for h in heads)


@cache
def source_hash(source: str) -> str:
    """12 hex digits over the expanded text: part of the key of a tuning record."""
    return hashlib.sha256(source_text(source).encode()).hexdigest()[:12]


# ---- compile ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one entry; `local_bytes` is the stack frame."""

    entry: str
    registers: int
    local_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """No spill, no local memory, no serialised wgmma."""
        return not (self.local_bytes or self.spill_bytes or self.warnings)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@cache
def _compiler() -> str:
    """NVRTC's version, from its package where that is installed: loading it takes 10 to 120 ms."""
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return ".".join(map(str, _nvrtc_version()))


@cache
def _nvrtc_version() -> tuple[int, int]:
    """(major, minor). Raises DeviceError without NVRTC, or where the driver is too old for it."""
    try:
        from cuda.bindings import driver, nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # no bindings; or they find no library
        raise DeviceError(
            f"NVRTC, which compiles the kernels, was not found ({_line(error)}): "
            "pip install nvidia-cuda-nvrtc"
        ) from error
    try:
        newest = int(driver.cuDriverGetVersion()[1]) // 1000
    except RuntimeError:  # no driver here: this compiles for another machine
        newest = major
    if major > newest:
        raise DeviceError(
            f"the NVIDIA driver runs CUDA {newest} at most, but NVRTC makes code for CUDA {major}: "
            f"update the driver, or pip install 'nvidia-cuda-nvrtc<{newest + 1}'"
        )
    return major, minor


def check_compiler() -> str:
    """NVRTC's version. Raises DeviceError, which says what mends it, where nothing can compile."""
    with _LOCK:  # cuda.core's first import does not survive being raced by a second thread
        try:
            importlib.import_module("cuda.core")
        except ImportError as error:
            raise DeviceError(
                f"cuda-core, which compiles the kernels, is missing ({error}): {INSTALL_CUDA}"
            ) from error
        return ".".join(map(str, _nvrtc_version()))


def _defined(text: str, defines: Defines) -> str:
    """`text` under its #defines: by -D they would reach NVRTC's own header, where T is a name."""
    return "".join(f"#define {key} {value}\n" for key, value in defines) + text


def _nvrtc(text: str, defines: Defines, arch: str) -> tuple[bytes, str]:
    check_compiler()
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        ptxas_options=["-v"],
        # NVRTC 13.0 takes a generic lambda inside a kernel for a host function otherwise
        device_as_default_execution_space=True,
        # our own sources need no header; a generated one may ask for the toolkit's
        use_bundled_headers="#include <" in text,
    )
    log = io.StringIO()
    try:
        code = Program(_defined(text, defines), "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        listing = " ".join(f"-D{key}={value}" for key, value in defines)
        raise DeviceError(f"NVRTC {arch} {listing}: {str(error)[:4000]}") from error
    assert isinstance(code, bytes)
    return code, log.getvalue().replace("\0", "")


def compile(source: str, defines: Defines = (), arch: str = "sm_90a") -> bytes:
    """Cubin of a source for `arch`: given, or from the disk cache where it is there and whole."""
    if given := _GIVEN.get((source, defines, arch)):
        return bytes(given)
    text = source_text(source)
    key = hashlib.sha256(repr((text, defines, arch, _compiler())).encode()).hexdigest()
    path = config.CACHE_DIR.value / "cubin" / key[:2] / key
    cubin = _stored(path)
    if cubin is None:
        cubin, _ = _nvrtc(text, defines, arch)
        _store(path, cubin)
    if config.DUMP.value:
        _dump(config.DUMP.value, source, text, defines, arch, cubin)
    return cubin


def _stored(path: Path) -> bytes | None:
    """A cache entry is digest + cubin: a torn or altered one counts as absent."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    return entry[32:] if hashlib.sha256(entry[32:]).digest() == entry[:32] else None


def _store(path: Path, cubin: bytes) -> None:
    """Written beside and renamed: another process sees the whole entry or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"compiled kernels are not kept: {error}", stacklevel=2)


def resources(source: str, defines: Defines = (), arch: str = "sm_90a") -> dict[str, Resources]:
    """Registers, spills and local memory of each entry of a source; needs no GPU."""
    _, log = _nvrtc(source_text(source), defines, arch)
    warnings = tuple(
        line for line in log.splitlines() if re.search(r"C75\d\d|setmaxnreg|wgmma.*serializ", line)
    )
    found = {}
    for block in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", block)
        used = re.search(r"Used (\d+) registers", block)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", block)
        if not (name and used and stack):
            raise DeviceError(f"ptxas log not understood: {block}")
        frame, stores, loads = map(int, stack.groups())
        found[name[1]] = Resources(name[1], int(used[1]), frame, stores + loads, warnings)
    return found


def _dump(folder: Path, source: str, text: str, defines: Defines, arch: str, cubin: bytes) -> None:
    """Source, cubin and (where a disassembler is installed) SASS, under `folder`/kernels."""
    kernels = folder / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr((text, defines, arch)).encode()).hexdigest()[:12]
    stem = "generated" if "\n" in source else source.removesuffix(".cu").replace("/", ".")
    path = kernels / f"{stem}.{arch}.{digest}"
    path.with_name(path.name + ".cu").write_text(_defined(text, defines))
    binary = path.with_name(path.name + ".cubin")
    binary.write_bytes(cubin)
    tool = _disassembler()
    if tool:
        sass = subprocess.run([*tool, str(binary)], capture_output=True, text=True, check=False)
        path.with_name(path.name + ".sass").write_text(sass.stdout or sass.stderr)


@cache
def _disassembler() -> tuple[str, ...]:
    """The command that prints SASS; said once on stderr where there is none."""
    from cuda.pathfinder import find_nvidia_binary_utility

    for tool in (("nvdisasm",), ("cuobjdump", "--dump-sass")):
        if path := shutil.which(tool[0]) or find_nvidia_binary_utility(tool[0]):
            return (path, *tool[1:])
    print(
        f"{config.DUMP.name}: no SASS: neither nvdisasm nor cuobjdump, which come with the CUDA "
        "toolkit, was found",
        file=sys.stderr,
    )
    return ()


def compile_all(
    launches: Iterable[Launch], arch: str, workers: int = 8, progress: bool = True
) -> None:
    """Compile every distinct module of `launches` in threads; later binds find them cached."""
    wanted = {(x.source, x.defines) for x in launches if x.product is None}
    if not config.DUMP.value:
        with _LOCK:
            wanted = {key for key in wanted if (*key, arch) not in _LOADED}
    if not wanted:
        return
    started, told = time.monotonic(), False
    with ThreadPoolExecutor(max_workers=workers) as pool:
        jobs = [pool.submit(compile, source, defines, arch) for source, defines in sorted(wanted)]
        for done, job in enumerate(jobs, 1):
            job.result()
            if progress and time.monotonic() - started > 1:
                told = True
                print(f"\rcompiling kernels {done}/{len(jobs)}", end="", file=sys.stderr)
    if told:
        print(f" in {time.monotonic() - started:.1f} s", file=sys.stderr)


# ---- load, bind, launch -------------------------------------------------------------------------

_KERNELS: dict[tuple[str, str, Defines, str, int], Any] = {}  # CUkernel; libraries stay loaded
_LOADED: set[tuple[str, Defines, str]] = set()  # of which some kernel is there
_SMEM: dict[tuple[str, str, Defines, str, int], int] = {}  # dynamic shared memory allowed so far


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _kernel(launch: Launch, arch: str) -> Any:
    """The CUfunction of a launch, loaded on the current device."""
    driver = _driver()
    device = int(_check(driver.cuCtxGetDevice(), launch))
    key = (launch.source, launch.entry, launch.defines, arch, device)
    with _LOCK:
        found = _KERNELS.get(key)
    if found is None:
        cubin = compile(launch.source, launch.defines, arch)
        library = _check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), launch)
        kernel = _check(driver.cuLibraryGetKernel(library, launch.entry.encode()), launch)
        with _LOCK:
            found = _KERNELS.setdefault(key, kernel)
            _LOADED.add((launch.source, launch.defines, arch))
    with _LOCK:
        # two launches of one kernel may ask for different sizes: the limit is the largest
        if launch.smem > max(48 << 10, _SMEM.get(key, 0)):
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuKernelSetAttribute(limit, launch.smem, found, device), launch)
            _SMEM[key] = launch.smem
    return driver.CUfunction(int(found))


def bound() -> set[tuple[str, str]]:
    """(source, entry) of every kernel this process has bound."""
    with _LOCK:
        return {(source, entry) for source, entry, *_ in _KERNELS}


def _check(result: Sequence[Any], launch: Launch) -> Any:
    if int(result[0]):
        from cuda.bindings import driver

        reason = driver.cuGetErrorName(result[0])[1]
        name = reason.decode() if isinstance(reason, bytes) else reason
        raise DeviceError(f"{launch.entry} grid={launch.grid} block={launch.block}: {name}")
    return result[1] if len(result) > 1 else None


class _Flags:
    """Device memory that is zero, cut into pieces; freed when the last piece goes."""

    SIZE = 256 << 10

    def __init__(self, nbytes: int, launch: Launch) -> None:
        self._driver, self.nbytes, self.used = _driver(), nbytes, 0
        self.address = int(_check(self._driver.cuMemAlloc(nbytes), launch))
        _check(self._driver.cuMemsetD8(self.address, 0, nbytes), launch)
        # the memset is ordered with no other stream
        _check(self._driver.cuStreamSynchronize(0), launch)

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():
            self._driver.cuMemFree(self.address)


_FLAGS: dict[int, _Flags] = {}  # device -> what the next pieces come from


class _Zeroed:
    """Memory of a launch's own, zero at first; its block is freed (after what runs) with it."""

    ALIGNED = 128  # launches that run side by side share no line of the cache

    def __init__(self, launch: Launch) -> None:
        device = int(_check(_driver().cuCtxGetDevice(), launch))
        nbytes = -(-launch.sync // self.ALIGNED) * self.ALIGNED
        with _LOCK:
            block = _FLAGS.get(device)
            if block is None or block.used + nbytes > block.nbytes:
                block = _FLAGS[device] = _Flags(max(nbytes, _Flags.SIZE), launch)
            self._block, self.address = block, block.address + block.used
            block.used += nbytes


class Step(Protocol):
    """A Launch with its addresses."""

    early: bool
    """Whether, where its kernel waits by itself, it may start while the launch before it ends: not
    where a graph's edges say what it follows."""

    def place(self, pointers: Mapping[str, int]) -> None:
        """Take other addresses for what is enqueued from now on."""

    def enqueue(self, stream: int) -> None:
        """Enqueue into the CUstream whose handle is `stream` (one under capture records it)."""


class Bound:
    """A Launch with its addresses: compiled, packed once, enqueued any number of times."""

    def __init__(self, launch: Launch, pointers: Mapping[str, int], hw: Hardware) -> None:
        self.launch, self.early = launch, hw.cc >= 90 and waits(launch.source)
        self._kernel = _kernel(launch, hw.arch)
        self._sync = _Zeroed(launch) if launch.sync else None
        self._settings: tuple[int, bool, Any] = (-1, False, None)
        self._enqueue = _driver().cuLaunchKernelEx
        self._arguments = Arguments(launch, self._pointers(pointers))
        self.arguments = self._arguments.address
        """Where the array that points to the arguments stands, for the whole life of this."""

    def _pointers(self, pointers: Mapping[str, int]) -> Mapping[str, int]:
        return {**pointers, "sync": self._sync.address} if self._sync else pointers

    def place(self, pointers: Mapping[str, int]) -> None:
        """Take other addresses for what is enqueued from now on."""
        self._arguments.place(self._pointers(pointers))

    def become(self, launch: Launch, pointers: Mapping[str, int]) -> bool:
        """Be another launch of the same kernel; False where it is of another."""
        old = self.launch
        if (old.source, old.entry, old.defines, old.smem, old.sync) != (
            launch.source, launch.entry, launch.defines, launch.smem, launch.sync
        ):  # fmt: skip
            return False
        self.launch, self._settings = launch, (-1, False, None)
        self._arguments.replace(launch.args, self._pointers(pointers))
        return True

    def enqueue(self, stream: int) -> None:
        """Enqueue into the CUstream whose handle is `stream` (one under capture records a node)."""
        known, early, settings = self._settings
        if known != stream or early != self.early:
            x = self.launch
            settings = _settings(
                x.grid, x.block, x.smem, x.cluster, x.cooperative, self.early, stream
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
    """How to launch, as the driver takes it; nobody changes it."""
    driver = _driver()
    kinds, found = driver.CUlaunchAttributeID, driver.CUlaunchConfig()
    found.gridDimX, found.gridDimY, found.gridDimZ = grid
    found.blockDimX, found.blockDimY, found.blockDimZ = block
    found.sharedMemBytes, found.hStream = smem, stream
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
        found.attrs, found.numAttrs = attributes, len(attributes)
    return found


def bind(launch: Launch, pointers: Mapping[str, int], hw: Hardware) -> Step:
    """`launch` with its addresses: a kernel of ours, or a library's call."""
    if launch.product is None:
        return Bound(launch, pointers, hw)
    from onnx_fuse.cuda import cublaslt

    return cublaslt.Bound(launch, pointers, hw)


def enqueue(
    launches: Iterable[Launch], pointers: Mapping[str, int], stream: int, hw: Hardware
) -> None:
    """Bind and enqueue `launches` in order; `pointers` maps argument names to device addresses."""
    for launch in launches:
        bind(launch, pointers, hw).enqueue(stream)


def contiguous(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Byte strides of the outer dims of a dense tensor, innermost dim first: for a TensorMap."""
    strides, step = [], ITEMSIZE[dtype]
    for size in shape[:-1]:
        step *= size
        strides.append(step)
    return tuple(strides)
