"""Training steps whose small feeds and losses are not copied, beside the same by copies."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import pytest

from onnx_fuse import Trainer, optim
from onnx_fuse.errors import CheckFailed
from onnx_fuse.runtime import device, run_slots
from onnx_fuse.runtime.run_slots import Turns
from onnx_fuse.runtime.tensor import DeviceTensor

WIDTHS = (784, 64, 10)
Feeds = dict[str, Any]


def batch(i: int, rows: int = 256) -> Feeds:
    rng = np.random.default_rng(i)
    x = rng.standard_normal((rows, WIDTHS[0])).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, WIDTHS[-1], rows)}


def on_gpu(array: np.ndarray) -> DeviceTensor:
    memory = device.Memory(array.nbytes, "feeds")
    stream = device.Stream()
    stream.upload(memory.address, array.ctypes.data, array.nbytes)
    stream.wait("feeds")
    return DeviceTensor(memory.address, array.shape, array.dtype.name, 0, memory)


def overwritten(trainer: Trainer) -> list[Any]:
    """The arrays of a step are other numbers as soon as it has returned."""
    held, found = batch(0), []
    for i in range(36):
        for name, array in batch(i).items():
            held[name][...] = array
        found.append(trainer.step(held))
    return found


def of_sizes(trainer: Trainer) -> list[Any]:
    return [trainer.step(batch(i, 256 if i % 5 else 96)) for i in range(30)]


def rates(trainer: Trainer) -> list[Any]:
    found = []
    for i in range(28):
        trainer.lr = 0.01 / (1 + i)
        found.append(trainer.step(batch(i)))
    return found


def evaluated(trainer: Trainer) -> list[Any]:
    found: list[Any] = []
    for i in range(28):
        found.append(trainer.step(batch(i)))
        if i % 6 == 5:
            found.append(trainer.evaluate(batch(i)).loss)
    return found


def resident(trainer: Trainer) -> list[Any]:
    """GPU tensors that come again, alternate, and stand where no kernel may read in place."""
    feeds = [batch(i) for i in range(3)]
    tensors = [on_gpu(each["x"]) for each in feeds]
    odd = on_gpu(np.concatenate([np.zeros(1, np.float32), feeds[2]["x"].reshape(-1)]))
    tensors[2] = DeviceTensor(odd.address + 4, (256, WIDTHS[0]), "float32", 0, odd)
    order = [*[0] * 12, *[0, 1] * 6, *[1] * 8, *[2] * 6, *[0] * 3]
    return [trainer.step({**feeds[i], "x": tensors[i]}) for i in order]


def in_threads(trainer: Trainer) -> list[Any]:
    """One thread after another steps, and another reads what it started."""
    found: list[Any] = []
    for i in range(24):
        thread = threading.Thread(target=lambda i=i: found.append(trainer.step(batch(i))))
        thread.start()
        thread.join()
    return found


def faulty(trainer: Trainer) -> list[Any]:
    found: list[Any] = [trainer.step(batch(i)) for i in range(20)]
    bad = batch(20)
    bad["x"][3, 4] = np.inf
    late = [trainer.step(bad), trainer.step(batch(21))]
    for loss in late:
        with pytest.raises(CheckFailed, match="step 21: "):
            float(loss)
    return [*found, *(trainer.step(batch(i)) for i in range(22, 34))]


@pytest.mark.parametrize("few", [True, False])  # launches, for a graph of each turn
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (overwritten, {}),
        (overwritten, {"accumulate": 3, "clip_norm": 0.5}),
        (overwritten, {"precision": "bf16", "ema": 0.9}),
        (overwritten, {"precision": "fp16"}),
        (of_sizes, {}),
        (rates, {}),
        (evaluated, {}),
        (resident, {}),
        (in_threads, {}),
        (faulty, {}),
    ],
)
def test_steps_have_the_bits_of_steps_by_copies(
    steps: Callable[[Trainer], list[Any]],
    options: Feeds,
    few: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not few:
        monkeypatch.setattr(run_slots, "LAUNCHES", 0)
    results = []
    taken: list[int] = []
    take = Turns.take

    def counted(made: Turns, feeds: Feeds, stream: device.Stream) -> Any:
        found = take(made, feeds, stream)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Turns, "take", counted)
    for copies in (False, True):
        if copies:
            monkeypatch.setattr(Turns, "of", lambda *given: None)
        trainer = Trainer(
            mlp.build(mlp.Config(WIDTHS)),
            loss="cross_entropy",
            optimizer=optim.AdamW(),
            device="cuda",
            **options,
        )
        losses = [float(loss) for loss in steps(trainer)]
        results.append((losses, trainer.weights()))
        assert any(taken) is not copies, "only one of the two takes turns"
        taken.clear()
    (first, weights), (second, others) = results
    assert first == second
    for name, array in weights.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)


@pytest.mark.parametrize("name", optim.TABLE)
def test_a_run_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """To the same bits; and each optimizer begins as on onnxruntime."""

    def made(device: str = "cuda") -> Trainer:
        model = mlp.build(mlp.Config(WIDTHS))
        return Trainer(model, loss="cross_entropy", optimizer=name, device=device)

    cpu, gpu = made("cpu"), made()
    for i in range(3):
        assert float(gpu.step(batch(i))) == pytest.approx(float(cpu.step(batch(i))), rel=1e-3)
    whole, first = made(), made()
    wanted = [float(whole.step(batch(i))) for i in range(40)]
    for i in range(20):
        first.step(batch(i))
    first.checkpoint(tmp_path)
    second = made()
    second.restore(tmp_path)
    assert [float(second.step(batch(i))) for i in range(20, 40)] == wanted[20:]
