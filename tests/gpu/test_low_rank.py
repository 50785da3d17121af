"""Low-rank adapters on the GPU, beside their products and within the weights, against the CPU."""

from pathlib import Path
from typing import Any

import gpt
import numpy as np
import pytest
from decoders import growing, slotted
from support import run as run_on_cpu
from support import write_adapter

from onnx_fuse import InferenceSession, Lora, Trainer, generate, optim
from onnx_fuse.deploy import compile
from onnx_fuse.importer.save import save
from onnx_fuse.program.problem import Hardware
from onnx_fuse.training.adapters import merge

pytestmark = pytest.mark.gpu
STEPS = 20
TOLERANCE = {"fp32": 2e-4, "bf16": 2e-2}
"""Of a loss, relative: the CPU's is in float32, and rounding adds up over the steps."""


def feeds(i: int) -> dict[str, Any]:
    """Texts that count on, so that there is something to learn."""
    start = np.random.default_rng(i % 4).integers(0, 256, (8, 1))
    ids = (start + np.arange(65)) % 256
    return {"input_ids": ids[:, :-1].copy(), "labels": ids[:, 1:].copy()}


def trainer(device: str, merged: bool | None, precision: str = "fp32", **more: Any) -> Trainer:
    given = {"optimizer": optim.AdamW(lr=1e-2), "clip_norm": 1.0, "loss": "cross_entropy"} | more
    return Trainer(
        gpt.build(gpt.Config()),
        lora=Lora(8, 16.0, merged=merged),
        precision=precision,
        device=device,
        **given,
    )


@pytest.fixture(scope="module")
def curve() -> list[float]:
    """The losses of the CPU, whose products stand beside each other."""
    run = trainer("cpu", False)
    return [float(run.step(feeds(i))) for i in range(STEPS)]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("merged", [False, True], ids=["beside", "within"])
def test_trains_as_the_cpu_does(merged: bool, precision: str, curve: list[float]) -> None:
    run = trainer("cuda", merged, precision)
    losses = [float(run.step(feeds(i))) for i in range(STEPS)]
    assert losses[-1] < 0.95 * losses[0]
    np.testing.assert_allclose(losses, curve, rtol=TOLERANCE[precision])


@pytest.mark.parametrize("merged", [False, True], ids=["beside", "within"])
def test_what_is_saved_is_what_trains(merged: bool, tmp_path: Path) -> None:
    """Equal bits of two runs and of a resumed one; files that hold what the run computes with."""
    first, other = (trainer("cuda", merged, "bf16", ema=0.5) for _ in range(2))
    for i in range(3):
        assert float(first.step(feeds(i))) == float(other.step(feeds(i)))
    first.checkpoint(tmp_path / "run")
    resumed = Trainer.resume(tmp_path / "run", gpt.build(gpt.Config()), device="cuda")
    for i in range(3, 6):
        first.step(feeds(i))
        resumed.step(feeds(i))
    for name, array in first.state().items():
        assert resumed.state()[name].tobytes() == array.tobytes(), name
    for ema in (False, True):
        loss = float(first.evaluate(feeds(9), ema=ema).loss)
        first.save(tmp_path / "merged.onnx", ema=ema)
        whole = Trainer(
            tmp_path / "merged.onnx", loss="cross_entropy", precision="bf16", device="cuda"
        )
        # the merged file's weights are rounded from float64 sums, a step's from float32 ones
        np.testing.assert_allclose(float(whole.evaluate(feeds(9)).loss), loss, rtol=5e-3)
    first.save_adapters(tmp_path / "adapters.safetensors")
    again = trainer("cuda", merged, "bf16")
    again.load_adapters(tmp_path / "adapters.safetensors")
    loss = float(first.evaluate(feeds(9)).loss)
    assert float(again.evaluate(feeds(9)).loss) == loss


@pytest.mark.parametrize("precision", TOLERANCE)
def test_several_adapters_train_as_on_the_cpu(precision: str) -> None:
    """Each on its rows, of which some steps have none; the bits of two runs are equal."""
    names = [["a", "b", "a", None, "c", "b", "a", "c"], ["b"] * 8, [None, "a"] * 4]
    loras = {"a": Lora(4, 8.0), "b": Lora(8, 16.0), "c": Lora(17, 34.0)}
    runs = [
        Trainer(
            gpt.build(gpt.Config()), loss="cross_entropy", optimizer=optim.AdamW(lr=1e-2),
            clip_norm=1.0, lora=loras, device=device, precision=kind,
        )
        for device, kind in (("cpu", "fp32"), ("cuda", precision), ("cuda", precision))
    ]  # fmt: skip
    losses = [
        [float(run.step({**feeds(i), "adapter": names[i % 3]})) for i in range(STEPS)]
        for run in runs
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=TOLERANCE[precision])
    assert losses[1] == losses[2]
    for name, array in runs[1].state().items():
        assert runs[2].state()[name].tobytes() == array.tobytes(), name
    updates = [run.state()["adapters.updates"].tolist() for run in runs]
    assert updates == [[13, 14, 7]] * 3


SERVED = {"fp32": 2e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Of the largest logit: float32 sums in another order, and activations in 16 bits."""


@pytest.mark.parametrize("precision", SERVED)
def test_each_row_runs_with_its_adapter(precision: str, tmp_path: Path) -> None:
    """As onnxruntime runs the merged files; a batch without adapters has the bits of the file."""
    path = tmp_path / "model.onnx"
    save(gpt.build(gpt.Config()), path)
    session = InferenceSession(path, device="cuda", precision=precision)
    ids = {"input_ids": np.random.default_rng(0).integers(0, 256, (4, 33))}
    expected = {None: run_on_cpu(path, ids)[0]}
    plain = session.run(None, ids)[0]
    for seed, (name, rank) in enumerate({"a": 12, "b": 16, "c": 40}.items()):
        file = write_adapter(tmp_path / f"{name}.safetensors", path, rank, seed)
        session.add_adapter(name, file)
        merge(path, file, tmp_path / "merged.onnx")
        expected[name] = run_on_cpu(tmp_path / "merged.onnx", ids)[0]
    mixed = ["b", None, "a", "c"], ["c", "c", None, "b"], ["a", "b", None, "c"]
    for names in ("a", "b", "a", *mixed):
        rows = [names] * 4 if isinstance(names, str) else names
        for _ in range(4 if names == "a" else 1):  # the first runs are no CUDA graph
            found = session.run(None, ids, adapter=names)[0]
        for row, name in enumerate(rows):
            most = SERVED[precision] * np.abs(expected[name][row]).max()
            np.testing.assert_allclose(found[row], expected[name][row], atol=most, rtol=0)
    np.testing.assert_array_equal(session.run(None, ids, adapter=[None] * 4)[0], plain)
    fused, here = tmp_path / "model.fused", {"here": Hardware.detect()}
    sizes = [{"input_ids": (4, 33)}]
    compile(path, fused, targets=here, shapes=sizes, precision=precision, adapter_rank=68)
    compiled = InferenceSession(fused, device="cuda")
    for name in "abc":
        compiled.add_adapter(name, tmp_path / f"{name}.safetensors")
    np.testing.assert_array_equal(compiled.run(None, ids)[0], plain)
    names = ["a", "b", None, "c"]  # of as many ranks as the file has room for
    found = [each.run(None, ids, adapter=names)[0] for each in (compiled, session)]
    np.testing.assert_array_equal(*found)
    found = compiled.run(None, ids, adapter="a")[0]
    most = SERVED[precision] * np.abs(expected["a"]).max()
    np.testing.assert_allclose(found, expected["a"], atol=most, rtol=0)
    session.add_adapter("a", tmp_path / "b.safetensors")
    found = session.run(None, ids, adapter="a")[0]
    np.testing.assert_array_equal(found, session.run(None, ids, adapter="b")[0])


@pytest.mark.parametrize("form", [growing, slotted])
def test_text_with_adapters_is_that_of_the_cpu(form: Any, tmp_path: Path) -> None:
    texts = []
    file = write_adapter(tmp_path / "a.safetensors", form(), 4, 0)
    for device in ("cpu", "cuda"):
        session = InferenceSession(form(), device=device)
        session.add_adapter("a", file)
        prompts = [[1, 2, 3], [4, 5, 6]]
        names = ["a", None]
        texts.append(generate(session, prompts, max_new_tokens=6, adapter=names))
    assert texts[0] == texts[1]
    assert texts[0] != generate(form(), prompts, max_new_tokens=6)
