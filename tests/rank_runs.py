"""Runs of tests/rank_worker.py in which a rank is killed, and what is resumed of them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import rank_worker
from rank_worker import PLACES, RANKS

from onnx_fuse.distributed.watch import ENDED

WORKER = Path(__file__).parent / "rank_worker.py"


def started(folder: Path, device: str, place: str = "") -> list[subprocess.Popen[str]]:
    """The ranks of a run of 12 steps in a folder, as another launcher starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {"DEVICE": device, "PLACE": place, "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), "run", str(folder)],
            env=os.environ | environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


def losses_of_one(folder: Path, device: str) -> np.ndarray:
    """The losses of the same run by one process, this one, which continues what is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEVICE", device)
        rank_worker.run(folder)
    return np.asarray(np.load(folder / "losses.npy"))


def check_killed(folder: Path, device: str, places: Iterable[str], tolerance: float) -> None:
    """Check runs in which a rank is killed at a place of PLACES, all at once.

    The other one ends by itself, with a sentence, and what is resumed from the last whole
    checkpoint, by one process and by all ranks, has the losses of a run that nobody kills.
    """
    runs = {place: started(folder / place, device, place) for place in places}
    wanted = losses_of_one(folder / "never", device)
    resumed = {}
    for place, run in runs.items():
        dead = PLACES[place][0]
        said = [rank.communicate(timeout=90)[1] for rank in run]
        codes = [rank.returncode for rank in run]
        assert codes.pop(dead) == -signal.SIGKILL, (place, said)
        assert codes == [ENDED], (place, said)
        assert f"rank {dead} ended without a message" in said[1 - dead], (place, said)
        shutil.copytree(folder / place, folder / f"{place}, by one")
        resumed[place] = started(folder / place, device)
    for place, run in resumed.items():
        found = losses_of_one(folder / f"{place}, by one", device)
        np.testing.assert_allclose(found, wanted, rtol=tolerance, err_msg=f"{place}, by one")
        said = [rank.communicate(timeout=90)[1] for rank in run]
        assert [rank.returncode for rank in run] == [0] * RANKS, (place, said)
        found = np.load(folder / place / "losses.npy")
        np.testing.assert_allclose(found, wanted, rtol=tolerance, err_msg=place)
