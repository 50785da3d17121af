"""NVRTC: source -> cubin, by a cache on disk; what the compiler says of registers and spills."""

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
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from onnx_fuse import config, progress
from onnx_fuse.cuda.source import GIVEN, Defines, source_text
from onnx_fuse.errors import INSTALL_CUDA, DeviceError
from onnx_fuse.files import private_folder, read_private
from onnx_fuse.program.hardware import hold_capability
from onnx_fuse.program.launch import Launch

NVRTC = 13
"""The release of NVRTC that the kernels are tested with, from 13.0.88 on."""
LOCK = threading.Lock()
LOADED: set[tuple[str, Defines, str]] = set()
"""Modules of which this process has loaded some kernel: `compile_all` leaves them."""


@dataclass(frozen=True)
class Usage:
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
        return ".".join(map(str, nvrtc_version()))


@cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor). Raises DeviceError without NVRTC, for one of a release that the kernels are
    not tested with, or where the driver is too old for it.
    """
    try:
        from cuda.bindings import driver, nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except ImportError as error:
        raise DeviceError(
            f"the CUDA bindings, which compile the kernels, are missing ({_line(error)}): "
            f"{INSTALL_CUDA}"
        ) from error
    except RuntimeError as error:  # the bindings find no library
        raise DeviceError(
            f"NVRTC, which compiles the kernels, was not found ({_line(error)}): "
            "pip install nvidia-cuda-nvrtc"
        ) from error
    if major != NVRTC:
        raise DeviceError(
            f"NVRTC {major}.{minor} is not supported: the kernels are tested with release {NVRTC}: "
            f"pip install 'nvidia-cuda-nvrtc>={NVRTC},<{NVRTC + 1}'"
        )
    try:
        newest = int(driver.cuDriverGetVersion()[1]) // 1000
    except RuntimeError:  # no driver here: this compiles for another machine
        newest = major
    if major > newest:
        raise DeviceError(
            f"the NVIDIA driver runs CUDA {newest} at most, but NVRTC makes code for CUDA {major}: "
            f"update the driver to one for CUDA {major}"
        )
    return major, minor


def check_compiler() -> str:
    """NVRTC's version. Raises DeviceError, which says what mends it, where nothing can compile."""
    with LOCK:  # cuda.core's first import does not survive being raced by a second thread
        try:
            importlib.import_module("cuda.core")
        except ImportError as error:
            raise DeviceError(
                f"cuda-core, which compiles the kernels, is missing ({error}): {INSTALL_CUDA}"
            ) from error
        return ".".join(map(str, nvrtc_version()))


def begin_loading() -> None:
    """Load NVRTC and its bindings in another thread, which takes 0.2 s; compiling raises errors."""

    def load() -> None:
        with suppress(DeviceError):
            check_compiler()

    threading.Thread(target=load).start()


def _defined(text: str, defines: Defines) -> str:
    """`text` under its #defines: by -D they would reach NVRTC's own header, where T is a name."""
    return "".join(f"#define {key} {value}\n" for key, value in defines) + text


def _nvrtc(text: str, defines: Defines, arch: str) -> tuple[bytes, str]:
    hold_capability(arch, int("".join(filter(str.isdigit, arch))))
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
    if stored := GIVEN.get((source, defines, arch)):
        return bytes(stored)
    text, path = source_text(source), cache_path(source, defines, arch)
    cubin = stored_cubin(path)
    if cubin is None:
        cubin, _ = _nvrtc(text, defines, arch)
        store_cubin(path, cubin)
    if config.DUMP.value:
        _dump(config.DUMP.value, source, text, defines, arch, cubin)
    return cubin


def cache_path(source: str, defines: Defines, arch: str) -> Path:
    """The place of its cubin in the disk cache."""
    digest = _hashed(source).copy()
    digest.update(repr((defines, arch, _compiler())).encode())
    key: str = digest.hexdigest()
    folder: Path = config.CACHE_DIR.value / "cubin"
    return folder / key[:2] / key


@lru_cache(maxsize=4096)
def _hashed(source: str) -> Any:
    """A hash of the source's text, which takes longer than all else of a key."""
    return hashlib.sha256(f"{source_text(source)}\0".encode())


def stored_cubin(path: Path) -> bytes | None:
    """A cache entry is digest + cubin: a torn or altered one counts as absent."""
    try:
        entry = read_private(path)
    except OSError:
        return None
    return entry[32:] if hashlib.sha256(entry[32:]).digest() == entry[:32] else None


def store_cubin(path: Path, cubin: bytes) -> None:
    """Write a file beside and rename it: another process sees the whole entry or none."""
    try:
        if not private_folder(path.parent):
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"compiled kernels are not cached: {error}", stacklevel=2)


def resources(source: str, defines: Defines = (), arch: str = "sm_90a") -> dict[str, Usage]:
    """Registers, spills and local memory of each entry of a source; needs no GPU."""
    _, log = _nvrtc(source_text(source), defines, arch)
    warnings = tuple(
        line for line in log.splitlines() if re.search(r"C75\d\d|setmaxnreg|wgmma.*serializ", line)
    )
    by_entry = {}
    for block in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", block)
        used = re.search(r"Used (\d+) registers", block)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", block)
        if not (name and used and stack):
            raise DeviceError(f"ptxas log not understood: {block}")
        frame, stores, loads = map(int, stack.groups())
        by_entry[name[1]] = Usage(name[1], int(used[1]), frame, stores + loads, warnings)
    return by_entry


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
    tool = disassembler()
    if tool:
        sass = subprocess.run([*tool, str(binary)], capture_output=True, text=True, check=False)
        path.with_name(path.name + ".sass").write_text(sass.stdout or sass.stderr)


@cache
def disassembler() -> tuple[str, ...]:
    """The command that prints SASS; where there is none, one line on stderr says so once."""
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


def compile_all(launches: Iterable[Launch], arch: str, workers: int = 0) -> None:
    """Compile every distinct module of `launches` in threads; later binds find them cached.

    Those that the disk cache has are left alone: whoever binds them reads them.

    `workers` is the number of threads; 0: one a processor, 8 to 32.
    """
    missing = {(x.source, x.defines) for x in launches if not x.of_library}
    missing = {key for key in missing if (*key, arch) not in GIVEN}
    if not config.DUMP.value:
        with LOCK:
            missing = {key for key in missing if (*key, arch) not in LOADED}
        missing = {key for key in missing if not cache_path(*key, arch).is_file()}
    if not missing:
        return
    workers = workers or min(32, max(8, os.cpu_count() or 8))
    # the longest sources first, so that none of them ends alone
    order = sorted(missing, key=lambda key: (-len(source_text(key[0])), key))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        jobs = [pool.submit(compile, source, defines, arch) for source, defines in order]
        for done, job in enumerate(jobs):
            progress.report("compiling kernels", done, len(jobs))
            job.result()
