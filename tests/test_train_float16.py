"""Training in float16: the scale of the loss, overflow, the types of what a step holds."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cases import RealCase, real_cases
from test_train import LINEAR, batch

from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]


def half(loss_scale: float = 65536.0, **options: Any) -> Trainer:
    settings = {"loss": "mse", "optimizer": optim.AdamW(lr=0.01), **options}
    return Trainer(text_model(LINEAR), precision="fp16", loss_scale=loss_scale, **settings)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 3.0])
def test_float16_follows_float32(clip: float | None, accumulate: int) -> None:
    options = {"clip_norm": clip, "accumulate": accumulate}
    full = Trainer(text_model(LINEAR), loss="mse", optimizer=optim.AdamW(lr=0.01), **options)
    losses = [[t.step(batch(i)) for i in range(20)] for t in (half(**options), full)]
    np.testing.assert_allclose(*losses, rtol=5e-3)  # float16 has 11 bits


@pytest.mark.parametrize("name", ["mlp_ln__ts17", "bert__ts13", "resnet_train__ts17"])
def test_float16_steps_are_typed(name: str) -> None:
    """What CUDA lowers is ONNX whose types agree; onnxruntime's CPU lacks some of its operators."""
    case = next(c for c in real_cases() if c.name == name)
    graph, _ = training_model(case.path, loss="mse", optimizer=optim.AdamW(), precision="fp16")
    proto = to_proto(graph)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)


@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_a_step_of_fused_operators_knows_its_ranks(case: RealCase) -> None:
    """As CUDA trains in float32: what is fused in the forward is differentiated by its parts."""
    graph, _ = training_model(case.path, loss="mse", optimizer=optim.SGD(), level=2, fused=True)
    products = [n for n in graph.graph if n.op_type == "MatMul" and not n.domain]
    assert all(v.shape is not None for n in products for v in n.inputs if v is not None)


def far(seed: int) -> dict[str, Array]:
    """A batch of large gradients."""
    feeds = batch(seed)
    return {**feeds, "labels": feeds["labels"] * 10000}


def test_float16_overflow_halves_the_scale_and_leaves_the_rest() -> None:
    """A scale is a power of two: what follows has the bits of a run that started there.

    onnxruntime's CPU computes float16 products in float32: only there does anything overflow.
    """
    trainer = half(2.0**127)
    start, scale = trainer.state(), np.float32(2.0**127)
    for i in range(60):
        trainer.step(far(i))
        state = trainer.state()
        if state["loss_scale"] == scale:
            break
        scale = state["loss_scale"]
        assert scale == 2.0 ** (126 - i)
        assert all(np.array_equal(state[k], start[k]) for k in start if k != "loss_scale")
    assert 4 < i < 40
    fresh = half(float(scale))
    for step in range(i, i + 6):
        if step > i:
            trainer.step(far(step))
        fresh.step(far(step))
    for key, array in fresh.state().items():
        assert array.tobytes() == trainer.state()[key].tobytes(), key


def test_float16_scale_doubles_after_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_fuse.training.step.GROWTH", 3)
    trainer = half(256.0)
    found = []
    for i in range(7):
        trainer.step(batch(i))
        state = trainer.state()
        found.append((float(state["loss_scale"]), int(state["loss_scale.good_steps"])))
    assert found == [(256, 1), (256, 2), (512, 0), (512, 1), (512, 2), (1024, 0), (1024, 1)]


def test_float16_scale_stays_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of zero overflow at no scale."""
    monkeypatch.setattr("onnx_fuse.training.step.GROWTH", 1)
    trainer = half(2.0**125)
    exact = {"x": np.zeros((8, 3), np.float32), "labels": np.full((8, 2), [0.5, -0.5], np.float32)}
    for scale in (2.0**126, 2.0**127, 2.0**127, 2.0**127):
        trainer.step(exact)
        assert trainer.state()["loss_scale"] == scale


def test_float16_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Between two batches of an update that overflows."""
    whole = half(2.0**127, accumulate=2)
    for i in range(5):
        whole.step(far(i))
    whole.checkpoint(tmp_path)
    resumed = Trainer.resume(tmp_path, text_model(LINEAR))
    for i in range(5, 16):
        assert whole.step(far(i)) == resumed.step(far(i))
    assert whole.state()["loss_scale"] < 2.0**123
    for key, array in whole.state().items():
        assert array.tobytes() == resumed.state()[key].tobytes(), key
