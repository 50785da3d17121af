"""Checkpoints: runs killed at any moment go on to the same bits; damage is noticed."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import safetensors.numpy
from support import with_weights

from onnx_fuse.errors import CheckFailed, DataError, UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.training import checkpoint, fit, optim, settings
from onnx_fuse.training.history import History
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
EPOCHS, BATCH, EVERY = 3, 8, 2
# All that a run carries: weights, slots, running statistics, Dropout's draws, half a sum of
# gradients, the place in the data.
MODEL = """net (float[batch, 6] x, float[6, 8] w1, float[8] g, float[8] b, float[8] mean,
     float[8] var, float[8, 4] w2) => (float[batch, 4] y)
    <float ratio = {0.2}, bool on = {1}>
    { h = MatMul (x, w1)  n = BatchNormalization (h, g, b, mean, var)  r = Relu (n)
    d = Dropout (r, ratio, on)  y = MatMul (d, w2) }"""
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
    rng = np.random.default_rng(0)
    return with_weights(
        text_model(MODEL), lambda v: np.abs(rng.normal(size=v.shape.numpy())).astype(np.float32)
    )


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


def run(trainer: Trainer, folder: Path | str) -> History:
    data = {"batch_size": BATCH, "validation": arrays()}
    return fit.fit(trainer, arrays(), epochs=EPOCHS, folder=folder, every=EVERY, **data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, History]:
    """An uninterrupted run."""
    started = trainer()
    return started, run(started, tmp_path_factory.mktemp("whole"))


def assert_same(resumed: tuple[Trainer, History], whole: tuple[Trainer, History]) -> None:
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
    point: str, whole: tuple[Trainer, History], tmp_path: Path
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


def test_only_the_runs_own_steps_are_counted_and_deleted(tmp_path: Path) -> None:
    """Copies, links and files beside them stay; so do newer steps, from which it did not go on."""
    started = trainer()
    others = ["step-best", "step-9", "step-00000009.copy", "step-000000008", "notes"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "step-00000006").symlink_to(tmp_path / "notes")
    (tmp_path / "step-99999999").mkdir()
    feeds = {k: a[:BATCH] for k, a in arrays().items()}
    for _ in range(4):
        started.step(feeds)
        started.checkpoint(tmp_path)
    steps = {f"step-{number:08}" for number in (3, 4, 6, 7, 99999999)}
    assert {p.name for p in tmp_path.iterdir()} == {*others, *steps}
    with pytest.warns(UserWarning, match="step-99999999 is damaged and skipped: No such file"):
        assert Trainer.resume(tmp_path, model()).calls == 4


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def tensors(**changes: Any) -> bytes:
    """The states of a run as safetensors, some of them replaced."""
    return safetensors.numpy.save({**trainer().state(), **changes})


@cache
def w1() -> Array:
    return trainer().state()["w1"]


HISTORY = dataclasses.asdict(History(examples=37, batch_size=8))
# what is forged or damaged -> (manifest's fields or text, tensors' bytes, what is said)
FORGED: dict[str, tuple[Any, bytes | Callable[[], bytes] | None, str]] = {
    "no JSON": ("{", None, "is damaged"),
    "not UTF-8": (b"\xff", None, "is damaged"),
    "a list": ("[]", None, "is no object"),
    "nested deeply": ("[" * 100_000, None, "is damaged"),
    "a long number": ('{"step": ' + "9" * 5000 + "}", None, "is damaged"),
    "format": ({"format": 2}, None, "its format is 2, this version reads 1"),
    "step as text": ({"step": "0"}, None, "has no 'step' that is of type int"),
    "step as truth": ({"step": False}, None, "has no 'step' that is of type int"),
    "another step": ({"step": 7}, None, "is of step 7"),
    "settings": ({"settings": []}, None, "has no 'settings' that is of type dict"),
    "extra": ({"extra": None}, None, "has no 'extra' that is of type dict"),
    "digest": ({"sha256": 1}, None, "has no 'sha256' that is of type str"),
    "model": ({"model": ["m"]}, None, "has no 'model' that is of type str"),
    "another model": ({"model": "m"}, None, "is of another model"),
    "empty": ({}, b"", "header too small"),
    "truncated": ({}, lambda: tensors()[:-4], "is damaged"),
    "a long header": ({}, (2**60).to_bytes(8, "little"), "header too large"),
    "no header": ({}, header(b"[]"), "is damaged"),
    "an unknown dtype": (
        {},
        header(b'{"w1":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}', b"abcd"),
        "is damaged",
    ),
    "a huge shape": (
        {},
        header(b'{"w1":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}'),
        "is damaged",
    ),
    "a dtype": (
        {},
        lambda: tensors(w1=w1().astype(float)),
        r"'w1' is float64\[6, 8\] in the checkpoint",
    ),
    "a shape": (
        {},
        lambda: tensors(w1=w1()[:1]),
        r"'w1' is float32\[1, 8\] in the checkpoint, float32\[6, 8",
    ),
    "a tensor more": ({}, lambda: tensors(w9=w1()), "is of another model"),
    "history": ({"extra": {"fit": [1]}}, None, "its history lacks one of examples"),
    "losses": ({"extra": {"fit": HISTORY | {"losses": ["1"]}}}, None, "its history lacks a number"),
    "epochs": ({"extra": {"fit": HISTORY | {"epochs": [{}]}}}, None, "its history lacks the epoch"),
    "too few losses": (
        {"extra": {"fit": HISTORY | {"epochs": [{"epoch": 1.0, "step": 5.0, "loss": 1.0}]}}},
        None,
        "its history lacks losses of its epochs",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_and_damaged_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    """The only checkpoint of a folder: an error of this project in one line, nothing restored."""
    changes, data, text = FORGED[name]
    last = trainer().checkpoint(tmp_path)
    path = last / "manifest.json"
    if isinstance(changes, dict):
        fields = json.loads(path.read_text())
        if callable(data):
            data = data()
        if data is not None:
            (last / "state.safetensors").write_bytes(data)
            fields["sha256"] = hashlib.sha256(data).hexdigest()
        changes = json.dumps(fields | changes)
    path.write_bytes(changes if isinstance(changes, bytes) else changes.encode())
    fresh = trainer()

    def resume() -> None:
        fresh.restore(tmp_path)
        run(fresh, tmp_path)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(DataError) as fault:
            resume()
    said = "\n".join([*(str(w.message) for w in told), str(fault.value)])
    assert re.search(text, said), said
    assert "\n" not in str(fault.value)
    if "history" not in said:
        assert fresh.calls == 0
        assert fresh.state()["w1"].tobytes() == w1().tobytes()


@pytest.mark.parametrize(
    "changes", [{"optimizer": {}}, {"optimizer": []}, {"clip_norm": "1"}, {"nothing": 1}]
)
def test_forged_settings_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = trainer().checkpoint(tmp_path) / "manifest.json"
    fields = json.loads(path.read_text())
    fields["settings"] |= changes
    path.write_text(json.dumps(fields))
    with pytest.raises(DataError, match="the settings of its run are damaged"):
        Trainer.resume(tmp_path, model())
    with (
        pytest.raises(UsageError, match="was started with")
        if "nothing" not in changes
        else (contextlib.nullcontext())
    ):
        trainer().restore(tmp_path)


def test_a_folder_that_another_thread_trains_in(tmp_path: Path) -> None:
    found: list[str] = []

    def other() -> None:
        try:
            trainer().checkpoint(tmp_path / "run")
        except UsageError as error:
            found.append(str(error))

    with checkpoint.locked(tmp_path / "run"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    [message] = found
    assert message.startswith(f"{tmp_path / 'run'}: another training writes its checkpoints there")
    assert not (tmp_path / "run").exists()  # nothing was written into it


def test_an_interrupted_replacement_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may be saved twice, at its number and at the end of an epoch."""
    started = trainer()
    last = started.checkpoint(tmp_path)
    before = (last / "manifest.json").read_bytes()
    replace, calls = os.replace, []

    def second(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", second)
    with pytest.raises(KeyboardInterrupt):
        started.checkpoint(tmp_path, note=1)
    assert len(calls) == 3
    assert (last / "manifest.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [last.name]


def test_states_that_are_not_finite_are_no_checkpoint(tmp_path: Path) -> None:
    """A finite loss may have an infinite gradient: the checkpoint before it stays the newest."""
    text = "net (float[batch] x) => (float[batch] y) <float[1] w = {0}> { y = Mul (x, w) }"
    started = Trainer(text_model(text), loss="mse", optimizer=optim.SGD(lr=1.0))
    started.checkpoint(tmp_path)
    feeds = {"x": np.array([3e38, 3e38], np.float32), "labels": np.full(2, 10, np.float32)}
    assert started.step(feeds) == 100
    with pytest.raises(CheckFailed, match="step 1: 'w' is not finite any more"):
        started.checkpoint(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000"]


def test_resume_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no valid checkpoint"):
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


def test_a_learning_rate_that_is_a_function_is_given_again(tmp_path: Path) -> None:
    def halved(update: int) -> float:
        return 0.5**update

    rates = optim.sequential([optim.constant(0.1), optim.custom(0.1, halved)], [2])
    straight, stopped = trainer(), trainer()
    for t in (straight, stopped):
        t.schedule(rates)
        for _ in range(7):  # three updates, and half of one
            t.step(arrays())
    stopped.checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"the function .*halved, which no checkpoint holds"):
        Trainer.resume(tmp_path, model())
    resumed = Trainer.resume(tmp_path, model(), schedule=rates)
    assert resumed.lr == pytest.approx(0.05)
    for t in (straight, resumed):
        t.step(arrays())
    for name, array in straight.weights().items():
        np.testing.assert_array_equal(resumed.weights()[name], array)
    again = trainer()
    again.schedule(optim.constant(0.1))
    with pytest.raises(UsageError, match="takes another schedule"):
        again.restore(tmp_path)


def test_manifest_is_readable(tmp_path: Path) -> None:
    started = trainer()
    run(started, tmp_path)
    newest = max(tmp_path.iterdir())
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["step"] == started.calls == len(manifest["extra"]["fit"]["losses"]) == 15
    assert manifest["settings"]["optimizer"]["name"] == "adamw"


def test_a_bound_that_clips_nothing_is_none(tmp_path: Path) -> None:
    """A page of the run measures the norm by it, and the run may go on without a page."""
    for own, stored in ((None, np.inf), (np.inf, None), (1.0, 1.0)):
        settings.check(tmp_path, {"clip_norm": own}, {"clip_norm": stored})
    with pytest.raises(UsageError, match=r"started with clip_norm 1\.0, not inf"):
        settings.check(tmp_path, {"clip_norm": np.inf}, {"clip_norm": 1.0})
