"""What NVRTC makes of sources: kept on disk for all tests of a run, and whether it is clean."""

import fcntl
import hashlib
import pickle
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.source import Defines
from onnx_fuse.program.launch import Launch

compile_anew = nvrtc._nvrtc
"""The compiler itself."""


def keep(folder: Path) -> None:
    """Ask the compiler once for each (text, defines, architecture), and read the answer from then
    on; who comes while another worker compiles the same waits for it. Errors are not kept.
    """
    folder.mkdir(exist_ok=True)

    def once(text: str, defines: Defines, arch: str) -> tuple[bytes, str]:
        key = hashlib.sha256(repr((text, defines, arch)).encode()).hexdigest()
        with (folder / key).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (kept := file.read()):
                kept = pickle.dumps(compile_anew(text, defines, arch))
                file.write(kept)
        answer: tuple[bytes, str] = pickle.loads(kept)
        return answer

    nvrtc._nvrtc = once


def unclean(
    variants: Iterable[Launch | tuple[str, Defines]], *archs: str, parked: int = 0
) -> list[str]:
    """What is wrong with kernels, given by launches or as (source, macros): stacks and spills of
    more than the bytes that may be `parked`, and serialised wgmma; for an H200 if not for `archs`.
    """
    once = dict.fromkeys((x.source, x.defines) if isinstance(x, Launch) else x for x in variants)
    assert once
    return [
        f"{source[:60]} {arch} {dict(defines)}: {found}"
        for (source, defines), arch in product(once, archs or ("sm_90a",))
        for found in nvrtc.resources(source, defines, arch).values()
        if found.warnings or max(found.spill_bytes, found.local_bytes) > parked
    ]
