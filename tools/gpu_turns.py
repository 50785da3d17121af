"""Processes that get ready beside each other, and are timed alone: one after another on each GPU.

A tool starts a process within a `Place`. The process makes a `Turn`, compiles and warms up what it
is to time, and takes its turn, which lasts until the process ends. It comes once all others that
were started on that GPU are ready, or after `PATIENCE` seconds: to compile takes minutes of
processor time, to time a few seconds.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType

READY, TIMED = "GPU_TURNS_READY", "GPU_TURNS_TIMED"
"""Environment variables: an open file that is locked by all who are not ready, and the path of one
that is locked by who is timed."""
PATIENCE = 100.0


class Place:
    """What a process that is started within it is given: a GPU, its cache, and its turn.

    The locks are the machine's, so that the processes of several tools take turns, too.
    """

    def __init__(self, device: str, cache: Path) -> None:
        folder = Path(tempfile.gettempdir()) / f"onnx-fuse-turns-{os.getuid()}-{device}"
        folder.mkdir(exist_ok=True)
        self._ready = (folder / "ready").open("w")
        self.pass_fds = (self._ready.fileno(),)
        self.env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": device,
            READY: str(self._ready.fileno()),
            TIMED: str(folder / "timed"),
            "ONNX_FUSE_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),
            **dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "4"),
        }

    def __enter__(self) -> Place:
        fcntl.flock(self._ready, fcntl.LOCK_SH)  # the process inherits it
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.flock(self._ready, fcntl.LOCK_UN)  # what the process has started may live on
        self._ready.close()


class Turn:
    """This process's turn; one that was started outside of a Place does not wait."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.shared = READY in os.environ
        """Whether other processes may be on the GPU until the turn comes."""

    def take(self, patience: float = PATIENCE) -> None:
        """Wait until the others are ready, then for the end of those that are being timed."""
        if not self.shared:
            return
        ready = int(os.environ[READY])
        fcntl.flock(ready, fcntl.LOCK_UN)
        while time.monotonic() - self._begun < patience:
            try:
                fcntl.flock(ready, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        fcntl.flock(ready, fcntl.LOCK_UN)
        fcntl.flock(os.open(os.environ[TIMED], os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)


def devices() -> list[str]:
    """The GPUs to take, as CUDA_VISIBLE_DEVICES names them."""
    from cuda.bindings import driver

    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if given:
        return given.split(",")
    driver.cuInit(0)
    return [str(i) for i in range(driver.cuDeviceGetCount()[1])]
