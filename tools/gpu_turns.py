"""Processes that get ready beside each other, and are timed alone: one after another on each GPU.

A tool starts a process within a `Place`. The process makes a `Turn`, compiles and warms up what it
is to time, and takes its turn, which lasts until the process ends. It comes once all others that
were started on that GPU are ready, or after `PATIENCE` seconds: to compile takes minutes of
processor time, to time a few seconds.
"""

import fcntl
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""The figures of a process by name; "error" says why some are missing."""

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
        self.env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": device,
            READY: str(self._ready.fileno()),
            TIMED: str(folder / "timed"),
            "ONNX_FUSE_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),
            **dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "4"),
        }

    def __enter__(self) -> dict[str, Any]:
        """What Popen is to be given."""
        fcntl.flock(self._ready, fcntl.LOCK_SH)  # the process inherits it
        return {"env": self.env, "pass_fds": (self._ready.fileno(),)}

    def __exit__(self, *_: object) -> None:
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


def say(**figures: Any) -> None:
    """Hand figures to the process that waits for them, as a line of JSON."""
    print(json.dumps(figures), flush=True)


def told(
    command: Sequence[str],
    where: Mapping[str, Any],
    limit: float,
    show: Callable[[str, Any], object] = lambda name, value: None,
) -> Found:
    """What a process says, each figure shown as it comes.

    `where` is what Popen is to be given; a process that takes longer than `limit` seconds is ended.
    """
    found: Found = {}

    def keep(figures: Found) -> None:
        found.update(figures)
        for name, value in figures.items():
            show(name, value)

    with (
        tempfile.TemporaryFile("w+") as faults,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=faults, text=True, **where
        ) as process,
    ):
        timer = threading.Timer(limit, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # libraries print, too
                keep(json.loads(line))
        if process.wait():
            faults.seek(0)
            why = (faults.read().strip().splitlines() or ["no output"])[-1]
            keep({"error": why if timer.is_alive() else f"ended after {limit:g} s"})
        timer.cancel()
    return found


def together(
    names: Sequence[str],
    arms: Sequence[str],
    measure: Callable[[str, str, Mapping[str, Any]], Found],
    gpus: Sequence[str],
    jobs: int = 1000,
) -> Iterator[tuple[str, str, Found]]:
    """(name, arm, figures) of processes that get ready together, each as it ends.

    `measure` starts one, with what Popen is to be given: one of `gpus`, and a cache of its own.
    """

    def placed(name: str, arm: str, device: str, cache: Path) -> Found:
        with Place(device, cache) as where:
            return measure(name, arm, where)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        runs = {
            pool.submit(placed, name, arm, gpus[i % len(gpus)], Path(folder) / f"{name}.{arm}"): (
                name,
                arm,
            )
            for i, name in enumerate(names)
            for arm in arms
        }
        for run in as_completed(runs):
            yield *runs[run], run.result()
