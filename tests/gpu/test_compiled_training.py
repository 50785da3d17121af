"""Training steps that were compiled ahead, beside those that are compiled where they run."""

from pathlib import Path
from typing import Any

import gpt
import numpy as np
import pytest

from onnx_fuse import Trainer, deploy, optim
from onnx_fuse.cuda import nvrtc
from onnx_fuse.program.problem import Hardware

pytestmark = pytest.mark.gpu
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
"""Of a loss after a few updates: what is compiled ahead calls no cuBLASLt."""


@pytest.mark.parametrize("precision", TOLERANCE)
def test_compiled_steps_train_alike(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(**more: Any) -> Trainer:
        return Trainer(
            gpt.build(gpt.Config()),
            loss="cross_entropy",
            optimizer=optim.AdamW(),
            precision=precision,
            device="cuda",
            clip_norm=1.0,
            accumulate=2,
            **more,
        )

    shapes = [{"input_ids": (4, -1), "labels": (4, -1)}]
    made = trainer(hardware=Hardware.detect())
    deploy.compile_training(made, tmp_path, shapes=shapes, ranges={"sequence": (33, 64)})
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, (4, n)) for n in (64, 40, 33, 50, 64, 63)]
    feeds = [{"input_ids": ids, "labels": ids} for ids in texts]
    plain = trainer()
    want = [float(plain.step(each)) for each in feeds] + [plain.evaluate(feeds[0]).loss]

    def refuse(*given: Any) -> None:
        raise AssertionError("NVRTC was asked")

    monkeypatch.setattr(nvrtc, "_nvrtc", refuse)
    run = trainer(compiled=tmp_path)
    got = [float(run.step(each)) for each in feeds] + [run.evaluate(feeds[0]).loss]
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[precision])
