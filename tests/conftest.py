"""Fixtures that every test file may use."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import compiled
import onnx
import onnx_ir
import pytest
from fake_gpu import FakeGpu
from support import Cli

from onnx_fuse.cuda import nvrtc
from onnx_fuse.importer.save import save as save_model
from onnx_fuse.ir.build import text_model
from onnx_fuse.program import passes

passes.CHECKED = True
"""Every program that a test lowers is held to `program.spec` after each pass."""


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist, which inherit it, take a processor each: NumPy's threads, as
    many as processors in each of them, would spend most of their time waiting for one.
    """
    if getattr(config.option, "numprocesses", 0):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """The collector leaves the modules and the tests alone, which stay: to walk them again and
    again took a fifth of the time of the tests in Python.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _left_alone() -> Iterator[None]:
    """So is what stays of a file's tests: a collection took half a second behind those that parse
    all sources, and each test of a fake GPU collects once or twice.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The compiler's answers are kept for all tests, and for all workers of a run: each variant of
    a kernel is compiled once, whatever cache folder a test gives to the package.
    """
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # that of the run
    compiled.keep(folder / "compiled")


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests put into the package's cache goes with their other files; `tests/gpu` keeps it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNX_FUSE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist gives its workers a width of 80 columns; output has the one of a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def signals_end() -> Iterator[None]:
    """Signals end the processes that the test starts, even where a shell started the tests so
    that they ignore Ctrl-C, as in the background: an ignored signal stays so in a child."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    for number, handler in handlers.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    return Cli(capsys, tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """`saved(text or model, name)` writes a model into the test's folder; a proto as it is."""

    def save(model: str | onnx_ir.Model | onnx.ModelProto, name: str = "model.onnx") -> Path:
        path = tmp_path / name
        if isinstance(model, onnx.ModelProto):
            path.write_bytes(model.SerializeToString())
        else:
            save_model(text_model(model) if isinstance(model, str) else model, path)
        return path

    return save


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code that stands for a source: what is tested is what surrounds it."""
    monkeypatch.setattr(nvrtc, "compile", lambda source, defines, arch: f"{arch}{source}".encode())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU of host memory, which is there until everything on it is gone."""
    yield FakeGpu().use(monkeypatch)
    gc.collect()
