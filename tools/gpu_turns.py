"""Processes that get ready beside each other, and are timed alone: one after another on each GPU.

Each tool's process makes a `Turn` first, compiles and warms up what it is to time, and then takes
its turn, which lasts until the process ends. It comes once all others on that GPU are ready, or
after `PATIENCE` seconds: compiling takes minutes of processor time, timing a few seconds.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

FOLDER = "GPU_TURNS"
"""The environment variable that names the folder of a GPU's locks; without it nobody waits."""
PATIENCE = 100.0


class Turn:
    """The place of this process among those on its GPU."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        folder = os.environ.get(FOLDER, "")
        self._locks = [(Path(folder) / name).open("w") for name in ("ready", "timed") if folder]
        self.shared = bool(folder)
        """Whether other processes may be on the GPU until the turn comes."""
        if self._locks:
            fcntl.flock(self._locks[0], fcntl.LOCK_SH)  # everybody has it who is not ready

    def take(self) -> None:
        """Wait until the others are ready, then for the end of those that are being timed."""
        if not self._locks:
            return
        ready, timed = self._locks
        fcntl.flock(ready, fcntl.LOCK_UN)
        while time.monotonic() - self._begun < PATIENCE:
            try:
                fcntl.flock(ready, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        fcntl.flock(ready, fcntl.LOCK_UN)
        fcntl.flock(timed, fcntl.LOCK_EX)


def devices() -> list[str]:
    """The GPUs to take, as CUDA_VISIBLE_DEVICES names them."""
    from cuda.bindings import driver

    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if given:
        return given.split(",")
    driver.cuInit(0)
    return [str(i) for i in range(driver.cuDeviceGetCount()[1])]


def environment(device: str, cache: Path) -> dict[str, str]:
    """What a process of a GPU is to have in its environment, with few threads of its own.

    The locks are the machine's: the processes of several tools take turns, too.
    """
    locks = Path(tempfile.gettempdir()) / f"onnx-fuse-turns-{os.getuid()}-{device}"
    locks.mkdir(exist_ok=True)
    return {
        "CUDA_VISIBLE_DEVICES": device,
        FOLDER: str(locks),
        "ONNX_FUSE_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),
        **dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "4"),
    }
