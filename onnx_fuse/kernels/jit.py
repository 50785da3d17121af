"""NVRTC: source under cuda_src/ (or text) -> cubin -> kernel -> launch; disk cache, resources."""

from __future__ import annotations

import ctypes
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
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from onnx_fuse import config
from onnx_fuse.errors import INSTALL_CUDA, DeviceError
from onnx_fuse.problem import ITEMSIZE, Arg, Hardware, Launch, Num, Ptr, Table, TensorMap

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


@cache
def waits(source: str) -> bool:
    """Whether its kernels wait for the launch before by themselves, so may start while it runs."""
    kernels = source_text(source).split("__global__")[1:]
    return all(re.search(r"\b(after_previous_launch|grid_dependency_wait)\(\)", k) for k in kernels)


@cache
def waits_first(source: str) -> bool:
    """Whether its kernels do nothing before they wait, and so may follow any launches early."""
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
    """Cubin of a source for `arch`, from the disk cache when it is there and whole."""
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
    wanted = sorted({(x.source, x.defines) for x in launches if x.product is None})
    started, told = time.monotonic(), False
    with ThreadPoolExecutor(max_workers=workers) as pool:
        jobs = [pool.submit(compile, source, defines, arch) for source, defines in wanted]
        for done, job in enumerate(jobs, 1):
            job.result()
            if progress and time.monotonic() - started > 1:
                told = True
                print(f"\rcompiling kernels {done}/{len(jobs)}", end="", file=sys.stderr)
    if told:
        print(f" in {time.monotonic() - started:.1f} s", file=sys.stderr)


# ---- load, bind, launch -------------------------------------------------------------------------

_KERNELS: dict[tuple[str, str, Defines, str, int], Any] = {}  # CUkernel; libraries stay loaded
_SMEM: dict[tuple[str, str, Defines, str, int], int] = {}  # dynamic shared memory allowed so far


def _kernel(launch: Launch, arch: str) -> Any:
    """The CUfunction of a launch, loaded on the current device."""
    from cuda.bindings import driver

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


_CTYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def _tensor_map(arg: TensorMap, address: int, launch: Launch) -> Any:
    from cuda.bindings import driver

    kind = driver.CUtensorMapDataType
    dtype = {
        "bfloat16": kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "float32": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[arg.dtype]
    swizzle = driver.CUtensorMapSwizzle
    encoded = driver.cuTensorMapEncodeTiled(
        dtype,
        len(arg.shape),
        address,
        [driver.cuuint64_t(x) for x in arg.shape],
        [driver.cuuint64_t(x) for x in arg.strides],
        [driver.cuuint32_t(x) for x in arg.box],
        [driver.cuuint32_t(1)] * len(arg.shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle.CU_TENSOR_MAP_SWIZZLE_128B
        if arg.swizzle == 128
        else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    words = _check(encoded, launch).opaque
    return (ctypes.c_uint64 * 16)(*(int(word) for word in words))


class _Zeroed:
    """Device memory of a launch's own, zero at first; freed (after what runs) with its owner."""

    def __init__(self, launch: Launch) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self.address = int(_check(driver.cuMemAlloc(launch.sync), launch))
        _check(driver.cuMemsetD8(self.address, 0, launch.sync), launch)
        # the memset is ordered with no other stream
        _check(driver.cuStreamSynchronize(0), launch)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._driver.cuMemFree(self.address)


class Step(Protocol):
    """A Launch with its addresses."""

    def enqueue(self, stream: int) -> None:
        """Enqueue into the CUstream whose handle is `stream` (one under capture records it)."""


class Bound:
    """A Launch with its addresses: compiled, packed once, enqueued any number of times.

    In a stream it may start while the launch before it ends, where its kernel waits by itself; not
    `early` where a graph's edges say what it follows.
    """

    def __init__(
        self, launch: Launch, pointers: Mapping[str, int], hw: Hardware, early: bool = True
    ) -> None:
        from cuda.bindings import driver

        self.launch = launch
        self._kernel = _kernel(launch, hw.arch)
        self._sync = _Zeroed(launch) if launch.sync else None
        if self._sync:
            pointers = {**pointers, "sync": self._sync.address}
        self._values = [self._pack(arg, pointers) for arg in launch.args]
        self._params = (ctypes.c_void_p * max(1, len(self._values)))(
            *(ctypes.addressof(value) for value in self._values)
        )
        settings = driver.CUlaunchConfig()
        settings.gridDimX, settings.gridDimY, settings.gridDimZ = launch.grid
        settings.blockDimX, settings.blockDimY, settings.blockDimZ = launch.block
        settings.sharedMemBytes = launch.smem
        attributes = []
        if launch.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = launch.cluster
            attribute.value.clusterDim.y = 1
            attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        if launch.cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if early and hw.cc >= 90 and waits(launch.source):
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if attributes:
            settings.attrs, settings.numAttrs = attributes, len(attributes)
        self._settings = settings
        self._enqueue = driver.cuLaunchKernelEx

    def _pack(self, arg: Arg, pointers: Mapping[str, int]) -> Any:
        if isinstance(arg, Num):
            return _CTYPES[arg.ctype](arg.value)

        def place(ptr: Ptr) -> int:
            found = pointers.get(ptr.name, 0)
            return found + ptr.offset if found else 0

        if isinstance(arg, Table):
            words = (w if isinstance(w, int) else place(w) for w in arg.words)
            return (ctypes.c_uint64 * len(arg.words))(*words)
        address = place(arg if isinstance(arg, Ptr) else arg.ptr)
        if isinstance(arg, Ptr):
            return ctypes.c_uint64(address)
        # a kernel compiled without an operand still takes its descriptor: all zeros, never read
        return _tensor_map(arg, address, self.launch) if address else (ctypes.c_uint64 * 16)()

    def enqueue(self, stream: int) -> None:
        """Enqueue into the CUstream whose handle is `stream` (one under capture records a node)."""
        self._settings.hStream = stream
        _check(
            self._enqueue(self._settings, self._kernel, ctypes.addressof(self._params), 0),
            self.launch,
        )


def bind(launch: Launch, pointers: Mapping[str, int], hw: Hardware, early: bool = True) -> Step:
    """`launch` with its addresses: a kernel of ours, or a library's call."""
    if launch.product is None:
        return Bound(launch, pointers, hw, early)
    from onnx_fuse.kernels import cublaslt

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
