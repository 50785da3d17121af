"""Start the ranks of a run on this machine, and end all of them when one ends badly."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from onnx_fuse.distributed.watch import ENDED, LAUNCHED

GRACE = 8.0
"""Seconds that the other ranks have to end by themselves once one has failed."""
_TAIL = 12  # lines that a rank may say at its end


class _Rank:
    """A rank's process. What it writes to stderr is kept, but for rank 0, whose is shown."""

    def __init__(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.rank = rank
        first = rank == 0
        self.process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=None if first else subprocess.DEVNULL,
            stderr=None if first else subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes through the launcher alone
        )
        self.said: deque[str] = deque(maxlen=_TAIL)
        if self.process.stderr is not None:
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            if text:
                self.said.append(text)

    def cause(self) -> str:
        code = self.process.returncode
        if code < 0:
            name = signal.Signals(-code).name
            memory = ": perhaps the machine has no memory left" if name == "SIGKILL" else ""
            return f"rank {self.rank} was ended by {name}{memory}"
        last = self.said[-1].removeprefix("onnx-fuse: ") if self.said else ""
        return f"rank {self.rank} ended with exit code {code}" + (f": {last}" if last else "")

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of a rank on this machine."""
    ours = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    variables = {**os.environ, **{k: str(v) for k, v in ours.items()}}
    variables |= {"MASTER_ADDR": "127.0.0.1", LAUNCHED: "1"}
    variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // size)))
    return variables


def run(command: Sequence[str], size: int) -> int:
    """Run the command as `size` ranks on this machine, and return the exit code of the run.

    Rank 0 has the launcher's output. Where another one fails first, its cause is one line on
    stderr. A signal to the launcher ends all ranks, and raises KeyboardInterrupt if it does so.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[_Rank] = []
    try:
        ranks.extend(_Rank(i, command, environment(i, size, port)) for i in range(size))
        return _wait(ranks)
    except KeyboardInterrupt:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # by the ranks as well then
        for each in ranks:
            each.signal(signal.SIGTERM if ignored else signal.SIGINT)
        _await(ranks, GRACE)
        raise
    finally:
        for each in ranks:
            if each.process.poll() is None:
                each.signal(signal.SIGKILL)
                each.process.wait()


def _wait(ranks: Sequence[_Rank]) -> int:
    """Wait for all ranks, or for the first that fails and then for what the others make of it."""
    while True:
        codes = [each.process.poll() for each in ranks]
        failed = [each for each, code in zip(ranks, codes, strict=True) if code not in (None, 0)]
        if failed:
            break
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)
    _await(ranks, GRACE)
    failed = [each for each in ranks if each.process.poll() not in (None, 0, ENDED)]
    if not failed:  # one hangs, which the others have said
        return 1
    first = next((each for each in failed if each.rank == 0), failed[0])
    code = first.process.returncode
    if first.rank or code < 0:  # else it has said itself what it ended of
        print(f"onnx-fuse: {first.cause()}; all ranks end", file=sys.stderr, flush=True)
    return code if 0 < code < ENDED else 1


def _await(ranks: Sequence[_Rank], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(each.process.poll() is None for each in ranks):
        time.sleep(0.05)
