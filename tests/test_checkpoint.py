"""Checkpoints: runs killed at any moment go on to the same bits; damage is noticed."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest

from onnx_fuse.errors import CheckFailed, DataError, UsageError
from onnx_fuse.onnx.build import text_model
from onnx_fuse.training import checkpoint, fit, optim
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
EPOCHS, BATCH, EVERY = 3, 8, 2
# All that a run carries: weights, slots, running statistics, Dropout's draws, half a sum of
# gradients, the place in the data.
MODEL = """net (float[batch, 6] x, float[6, 8] w1, float[8] g, float[8] b, float[8] mean,
     float[8] var, float[8, 4] w2) => (float[batch, 4] y)
    <float ratio = {0.2}, bool on = {1}> {
    h = MatMul (x, w1)
    n = BatchNormalization (h, g, b, mean, var)
    r = Relu (n)
    d = Dropout (r, ratio, on)
    y = MatMul (d, w2)
}"""
CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_checkpoint as t
from onnx_fuse.training import checkpoint
from onnx_fuse.training.backends import Portable

point, folder = sys.argv[2], sys.argv[3]
write, replace, commit = checkpoint._write, os.replace, Portable.commit

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def at(step, call):
    # Lets the first checkpoint and some steps pass.
    return t.RUN.calls > step and point == call

def write_half(path, data):
    if at(4, path.name):
        path.write_bytes(data[: len(data) // 2])
        die()
    write(path, data)

def replace_and(source, target):
    if at(4, "before rename"):
        die()
    replace(source, target)
    if at(4, "after rename"):
        die()

def commit_half(self, spec):
    if at(6, "step"):
        for state in spec.states[: len(spec.states) // 2]:
            self._now[state.name] = 1 - self._now[state.name]
        die()
    commit(self, spec)

checkpoint._write, os.replace, Portable.commit = write_half, replace_and, commit_half
t.RUN = t.trainer()
t.run(t.RUN, folder)
"""
RUN: Any = None  # of the child


def model() -> Any:
    result = text_model(MODEL)
    rng = np.random.default_rng(0)
    for value in list(result.graph.inputs[1:]):
        array = np.abs(rng.normal(size=value.shape.numpy())).astype(np.float32)
        value.const_value = onnx_ir.tensor(array, name=value.name)
        result.graph.inputs.remove(value)
        result.graph.register_initializer(value)
    return result


def trainer() -> Trainer:
    return Trainer(
        model(),
        loss="cross_entropy",
        optimizer=optim.AdamW(lr=optim.cosine(0.02, 20, warmup=2)),
        loss_options={"label_smoothing": 0.1, "weight": np.array([1.0, 2.0, 0.5, 1.0])},
        clip_norm=1.0,
        accumulate=2,
        seed=3,
    )


def arrays() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(37, 6)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, 4, 37)}


def run(trainer: Trainer, folder: Path | str) -> fit.History:
    return fit.fit(
        trainer,
        arrays(),
        epochs=EPOCHS,
        batch_size=BATCH,
        validation=arrays(),
        folder=folder,
        every=EVERY,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, fit.History]:
    """An uninterrupted run."""
    started = trainer()
    return started, run(started, tmp_path_factory.mktemp("whole"))


def assert_same(resumed: tuple[Trainer, fit.History], whole: tuple[Trainer, fit.History]) -> None:
    """Equal to the last bit: states, losses, epochs."""
    assert resumed[1] == whole[1]
    expected = whole[0].state()
    found = resumed[0].state()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


POINTS = ["state.safetensors", "manifest.json", "before rename", "after rename", "step"]


@pytest.mark.parametrize("point", POINTS)
def test_killed_run_goes_on_to_the_same_bits(
    point: str, whole: tuple[Trainer, fit.History], tmp_path: Path
) -> None:
    """SIGKILL half way through a file, beside either rename, and half way through a step."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), point, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    resumed = Trainer.resume(tmp_path, model())
    assert 2 <= resumed.calls < 8
    assert_same((resumed, run(resumed, tmp_path)), whole)
    assert not list(tmp_path.glob(".*"))  # drafts of the dead are swept
    assert len(list(tmp_path.iterdir())) == checkpoint.KEEP


def test_checkpoint_between_two_updates_keeps_the_sum(tmp_path: Path) -> None:
    """After one of two accumulated steps the accumulators are not zero."""
    feeds = {k: a[:BATCH] for k, a in arrays().items()}
    first = trainer()
    for _ in range(3):
        first.step(feeds)
    first.checkpoint(tmp_path)
    assert any(a.any() for k, a in first.state().items() if k.endswith(".accumulated"))
    second = Trainer.resume(tmp_path, model())
    assert [first.step(feeds) for _ in range(3)] == [second.step(feeds) for _ in range(3)]
    for name, array in first.state().items():
        assert second.state()[name].tobytes() == array.tobytes(), name


def test_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    started = trainer()
    feeds = {k: a[:BATCH] for k, a in arrays().items()}
    for _ in range(2):
        started.step(feeds)
        last = started.checkpoint(tmp_path)
    path = last / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        assert Trainer.resume(tmp_path, model()).calls == 1
    (last / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        assert Trainer.resume(tmp_path, model()).calls == 1


def test_states_that_are_not_finite_are_no_checkpoint(tmp_path: Path) -> None:
    """A finite loss may have an infinite gradient: the checkpoint before it stays the newest."""
    text = "net (float[batch] x) => (float[batch] y) <float[1] w = {0}> { y = Mul (x, w) }"
    started = Trainer(text_model(text), loss="mse", optimizer=optim.SGD(lr=1.0))
    started.checkpoint(tmp_path)
    feeds = {"x": np.array([3e38, 3e38], np.float32), "labels": np.full(2, 10, np.float32)}
    assert started.step(feeds) == 100
    with pytest.raises(CheckFailed, match="step 1: 'w' is not finite"):
        started.checkpoint(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000"]


def test_resume_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no whole checkpoint"):
        Trainer.resume(tmp_path, model())
    trainer().checkpoint(tmp_path)
    other = model()
    other.graph.initializers["ratio"].const_value = onnx_ir.tensor(np.float32(0.3), name="ratio")
    with pytest.raises(DataError, match="is of another model"):
        Trainer.resume(tmp_path, other)
    changed = trainer()
    changed.schedule(optim.Schedule(0.5))
    with pytest.raises(UsageError, match="was started with optimizer"):
        changed.restore(tmp_path)
    run(trainer(), tmp_path)
    resumed = Trainer.resume(tmp_path, model())
    with pytest.raises(UsageError, match="37 examples in batches of 8, not 37 in batches of 4"):
        fit.fit(resumed, arrays(), epochs=EPOCHS, batch_size=4)


def test_manifest_is_readable(tmp_path: Path) -> None:
    started = trainer()
    run(started, tmp_path)
    newest = max(tmp_path.iterdir())
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["step"] == started.calls == len(manifest["extra"]["fit"]["losses"]) == 15
    assert manifest["settings"]["optimizer"]["name"] == "adamw"
