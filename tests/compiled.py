"""What NVRTC made of each source, kept on disk for all tests of a run."""

import fcntl
import hashlib
import pickle
from pathlib import Path

from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.source import Defines

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
