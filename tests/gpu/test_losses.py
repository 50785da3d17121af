"""Losses by name and their gradients on the GPU."""

import numpy as np
import pytest
from support import answers, stock
from test_losses import HOSTILE, NAMED, PAIR, gradient_graph

from onnx_fuse import InferenceSession, Trainer, hvp, optim
from onnx_fuse.ir.build import text_model


@pytest.mark.parametrize("case", [*NAMED, *HOSTILE])
def test_a_loss_by_name_and_its_gradient(case: str) -> None:
    """As on onnxruntime; on the GPU all of it, since nothing falls back."""
    row = NAMED.get(case) or (*HOSTILE[case][:4], None, "")
    graph, feeds = gradient_graph(row, np.float32)
    expected = answers(stock(graph, optimized=True), feeds)
    session = InferenceSession(graph, device="cuda")
    found = dict(zip(expected, session.run(list(expected), feeds), strict=True))
    for name, want in expected.items():
        tolerance = 1e-6 + 1e-5 * np.nan_to_num(np.abs(want), posinf=0).max(initial=0)
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=tolerance, err_msg=name)


def test_sequences_of_several_lengths_train() -> None:
    rng, text = np.random.default_rng(0), PAIR.replace("[B,", "[B,T,")
    cpu, gpu = (
        Trainer(text_model(text), loss="ctc", optimizer=optim.SGD(lr=0.1), device=device)
        for device in ("cpu", "cuda")
    )
    for steps in (5, 8, 5, 13):
        feeds = {name: rng.normal(size=(4, steps, 3)).astype("f") for name in ("a", "b")}
        feeds["labels"] = rng.integers(1, 4, (4, 2))
        assert float(gpu.step(feeds)) == pytest.approx(float(cpu.step(feeds)), rel=1e-4)


def test_a_hessian_times_a_vector() -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(5, 3)).astype("f") for name in ("a", "b")}
    vectors = {"w": rng.normal(size=(3, 4)).astype("f")}
    cpu, gpu = (
        hvp(text_model(PAIR), feeds, vectors, loss="contrastive", device=device)["w"]
        for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(gpu, cpu, rtol=1e-3, atol=1e-3 * np.abs(cpu).max())
