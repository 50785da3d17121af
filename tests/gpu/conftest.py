"""Tests here need an NVIDIA GPU, and are skipped where there is none."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_fuse.errors import DeviceError
from onnx_fuse.program.problem import Hardware


def _spread_over_gpus() -> None:
    """Each worker of pytest-xdist gets another GPU first: it runs its tests there."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        order = [(int(worker) + place) % gpus for place in range(gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))


_spread_over_gpus()


def _missing() -> str:
    """Why no GPU can be used, empty where one can."""
    from onnx_fuse.runtime import device

    try:
        device.start()
    except DeviceError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    here = [item for item in items if item.path.parent == folder]
    reason = _missing() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is there stays: later collections pass over it


@pytest.fixture(autouse=True, scope="session")
def _cache_folder() -> None:
    """Kernels stay compiled from one run of these tests to the next."""


@pytest.fixture(autouse=True)
def _memory_goes_back() -> Iterator[None]:
    """Other processes test on the same GPU, and cannot collect this one's sessions."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test measures and counts is of this process alone."""
    monkeypatch.setenv("ONNX_FUSE_AHEAD", "0")


@pytest.fixture(scope="session")
def hw() -> Hardware:
    return Hardware.detect(0)
